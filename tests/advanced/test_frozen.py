"""What is trained while the pretrained weights stay: a head alone, adapters, prefixes, biases, and LoRA beside PEFT;
and how much of it there is."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import asset, random_llama
from steps import check_kernels, share_factors
from test_contract import Laboratory, laboratory, outputs_of  # noqa: F401 (a fixture)
from test_methods import TOKENS, Settings, classifier, exported, train
from torch import nn

from advanced import choose, create
from advanced.adapter import Adapter, Bottleneck
from advanced.added import trainable_parameters
from advanced.bitfit import BitFit
from advanced.lora import LoRA
from advanced.padding_mask import PaddingMask
from advanced.prefix import Prefix, keys_and_values
from advanced.table import MATRICES
from base_llama import causal_mask
from classifier import LlamaEmbeddingClassifier
from config import LlamaConfig
from engine import runs
from engine.context import AttentionContext, ContextAttention, KVCache, embed, hidden_states, sharing
from engine.decoding import Decoder
from engine.methods import Method, prepare
from engine.weights import load_llama_model
from fast import accelerate, decoder
from fast.attention import FusedContextAttention
from fast.last_position import hidden_state_at
from llama import Attention, Llama
from rope import apply_rotary_emb
from tokenizer import Tokenizer

ATTENTIONS = ["bidirectional", "causal"]
FROZEN_TOGETHER = ("lora", "adapter", "prefix", "bitfit", "ema")
HEAD = {"classifier_head.weight", "classifier_head.bias"}


def prepared(method: Method, attention: str = "bidirectional", std: float = 0.3) -> LlamaEmbeddingClassifier:
    """With something in what would begin as zero."""
    model = classifier(attention=attention)
    torch.manual_seed(5)
    prepare(model, [method])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "llama" in name:
            nn.init.normal_(parameter, std=std)
    return model


def trained_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# --------------------------------------------------------------------------------------------------- linear probe


def test_a_linear_probe_is_the_classifier_that_is_made_with_frozen_weights(laboratory: Laboratory):
    settings = dict(hidden_dropout_prob=0.3, epochs=3)
    probe, frozen = laboratory.done("linear-probe", **settings), laboratory.done("", option="pretrain", **settings)
    figures = [[(each.train_loss, each.dev_score) for each in done.history] for done in (probe, frozen)]
    assert figures[0] == figures[1] and len({loss for loss, _ in figures[0]}) == 3
    assert trained_names(probe.run.model) == HEAD
    states = probe.saved.state_dict(), frozen.saved.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


# ------------------------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("form", ["sequential", "parallel"])
def test_an_adapter_computes_the_formula(form: str, attention: str):
    """Layer by layer from the paper's table, row by row, position by position."""
    model = prepared(Adapter(width=3, form=form, scale=2.5, places="attention+feed_forward"), attention)
    base = classifier(attention=attention)

    def adapted(adapter: nn.Module, plain: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        outputs = plain.clone()
        for place in [(row, position) for row in range(3) for position in range(5)]:
            x = plain[place] if form == "sequential" else read[place]
            middle = adapter.down.weight @ x + adapter.down.bias
            middle[middle < 0] = 0
            outputs[place] += 2.5 * (adapter.up.weight @ middle + adapter.up.bias)
        return outputs

    with torch.no_grad():
        h = embed(base.llama, TOKENS)
        for plain, mine in zip(base.llama.layers, model.llama.layers, strict=True):
            read = plain.attention_norm(h)
            h = h + adapted(mine.attention.adapter, plain.attention(read), read)
            read = plain.ffn_norm(h)
            h = h + adapted(mine.feed_forward.adapter, plain.feed_forward(read), read)
        expected = base.llama.norm(h)
        torch.testing.assert_close(model.llama(TOKENS)[1], expected, atol=1e-4, rtol=1e-4)
        at = torch.tensor([4, 1, 2])
        one = hidden_state_at(model.llama, TOKENS, at)  # the last layer's attention gives one position of each row
        torch.testing.assert_close(one, expected[torch.arange(3), at], atol=1e-4, rtol=1e-4)
        assert not torch.allclose(expected, base.llama(TOKENS)[1], atol=0.1)


def test_dropout_is_where_the_formulas_have_it():
    """Within an adapter's bottleneck, behind its ReLU; of what LoRA reads, before A."""
    torch.manual_seed(1)
    bottleneck, x = Bottleneck(32, 3, 2.0, 0.5), torch.randn(4, 5, 32)
    lora, model = LoRA(dropout=0.5, targets="w1"), classifier()
    lora.prepare(model)
    layer = model.llama.layers[0].feed_forward.w1.train()
    for weight in (bottleneck.up.weight, layer.lora_B):
        nn.init.normal_(weight)
    torch.manual_seed(0)
    adapted, updated = bottleneck(x), layer(x)
    torch.manual_seed(0)
    torch.testing.assert_close(adapted, 2.0 * bottleneck.up(F.dropout(F.relu(bottleneck.down(x)), 0.5)))
    read = F.dropout(x, 0.5)
    expected = x @ layer.weight.T + lora.scale * read @ layer.lora_A.T @ layer.lora_B.T
    torch.testing.assert_close(updated, expected, atol=1e-4, rtol=1e-4)


def test_an_adapter_finds_its_input_however_the_attention_is_called():
    model = prepared(Adapter(width=3, places="attention"))
    layer, x, at = model.llama.layers[1].attention, torch.randn(3, 5, 32), torch.tensor([4, 1, 2])
    told = sharing(layer, ContextAttention)
    torch.testing.assert_close(told(x), layer(x))
    told.context = AttentionContext().queried_at(at)
    torch.testing.assert_close(told(x)[:, 0], layer(x)[torch.arange(3), at])


def test_an_adapter_begins_as_nothing_and_trains_both_projections():
    model, adapter = classifier(), Adapter(width=4, places="attention+feed_forward", dropout=0.5)
    train(model, [adapter], steps=0)
    for bottleneck in [layer.feed_forward.adapter for layer in model.llama.layers]:
        assert not any(part.abs().sum() for part in (bottleneck.up.weight, bottleneck.up.bias, bottleneck.down.bias))
        assert bottleneck.down.weight.std() > 0.05
    own = {f"{part}.adapter.{each}.{kind}" for part in ("attention", "feed_forward") for each in ("down", "up")
           for kind in ("weight", "bias")}  # fmt: skip
    assert trained_names(model) == {f"llama.layers.{i}.{name}" for i in range(2) for name in own} | HEAD
    begun = copy.deepcopy(model.state_dict())
    train(trained := classifier(), [adapter])
    state, tensors = adapter.export(trained.state_dict())
    assert len(tensors) == 16 and all(torch.equal(state[name], begun[name]) for name in state if "llama" in name)
    assert all(tensor.abs().sum() > 0 for tensor in tensors.values())
    layer, x = trained.llama.layers[0].feed_forward, torch.randn(64, 32)
    assert torch.equal(layer(x), layer(x))
    assert not torch.equal(layer.train()(x), layer(x))  # dropout, in training alone


# ------------------------------------------------------------------------------------------------------- prefixes


def gated(attention: Attention, x: torch.Tensor, sees: torch.Tensor, row: int, query: int, head: int) -> torch.Tensor:
    """(1 - l) Attn(q, K, V) + l Attn(q, P_k, P_v) for one query of one head. x: b s D, sees: s -> d"""
    with torch.no_grad():
        group = head // attention.n_rep
        linears = (attention.compute_query, attention.compute_key)
        heads = (linear(x).unflatten(-1, (-1, attention.head_dim)) for linear in linears)  # b s h d, b t g d
        queries, keys = apply_rotary_emb(*heads, attention.head_dim, attention.max_seq_len, *attention.rope)
        q, keys = queries[row, query, head], keys[row, :, group]  # d, t d
        values = attention.compute_value(x).unflatten(-1, (attention.n_kv_heads, attention.head_dim))[row, :, group]
        scores = [math.exp(q @ key / math.sqrt(attention.head_dim)) for key in keys[sees]]
        of_prefix = [math.exp(q @ key / math.sqrt(attention.head_dim)) for key in attention.prefix_key[group]]
        plain = sum(s * value for s, value in zip(scores, values[sees], strict=True)) / sum(scores)
        prefix = sum(s * v for s, v in zip(of_prefix, attention.prefix_value[group], strict=True)) / sum(of_prefix)
        gate = sum(of_prefix) / (sum(of_prefix) + sum(scores))
        return (1 - gate) * plain + gate * prefix


@pytest.mark.parametrize("kind", [*ATTENTIONS, "padded"])
def test_a_prefix_is_a_gate_between_the_text_and_itself(kind: str):
    """He et al.'s form, for every row, query and head; two heads share each key/value head."""
    causal = kind == "causal"
    model = prepared(Prefix(3), "causal" if causal else "bidirectional", std=1.0)
    attention, x = model.llama.layers[0].attention, torch.randn(2, 4, 32)
    is_real = torch.tensor([[True] * 4, [True, True, False, False]]) if kind == "padded" else torch.ones(2, 4).bool()
    context = AttentionContext.of_text(4, causal, x.device)
    if kind == "padded":
        context = AttentionContext(mask=is_real[:, None, None, :])
    expected = torch.empty(2, 4, 4, 8)  # b s h d
    for row in range(2):
        for query in range(4):
            sees = is_real[row] & (torch.arange(4) <= query) if causal else is_real[row]
            for head in range(4):
                expected[row, query, head] = gated(attention, x, sees, row, query, head)
    with torch.no_grad():
        expected = attention.compute_output(expected.flatten(-2))
        told = sharing(attention, type(attention))
        told.context = context
        torch.testing.assert_close(told(x), expected, atol=1e-5, rtol=1e-4)
        if kind != "padded":
            torch.testing.assert_close(attention(x), expected, atol=1e-5, rtol=1e-4)
        at = torch.tensor([3, 1])
        told.context = context.queried_at(at)
        one = told(x)[:, 0]
        torch.testing.assert_close(one, expected[torch.arange(2), at], atol=1e-5, rtol=1e-4)


def test_a_prefix_of_words_is_these_words_before_a_causal_text():
    """It begins so: what the model computed from them, in every layer. The text then stands behind them."""
    plain, model = random_llama(attention="causal"), random_llama(attention="causal")
    torch.manual_seed(7)
    words = torch.randint(model.config.vocab_size, (1, 4))
    torch.manual_seed(7)
    Prefix(4).prepare(model)
    for layer, (key, value) in zip(model.layers, keys_and_values(plain, words), strict=True):
        assert torch.equal(layer.attention.prefix_key, key) and torch.equal(layer.attention.prefix_value, value)
    with torch.no_grad():
        together = plain(torch.cat((words.expand(3, -1), TOKENS), dim=1))[1][:, 4:]
        behind = hidden_states(model, TOKENS, AttentionContext(start=4, mask=causal_mask(5)))
    torch.testing.assert_close(behind, together, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_words_of_a_prefix_see_one_another_as_those_of_a_text_do(attention: str):
    """In a bidirectional model the first word's keys, in the second layer, are of the last word, too."""
    model, words = random_llama(attention=attention), torch.tensor([[5, 9, 14]])
    heard: list[torch.Tensor] = []
    model.layers[1].attention.compute_key.register_forward_hook(lambda module, inputs, out: heard.append(out))
    with torch.no_grad():
        model(words)
    key = keys_and_values(model, words)[1][0]  # g p d
    torch.testing.assert_close(heard[1], heard[0])
    other = keys_and_values(model, torch.tensor([[5, 9, 77]]))[1][0]
    assert torch.allclose(key[:, 0], other[:, 0], atol=1e-6) == (attention == "causal")


@pytest.mark.parametrize("kernels", ["plain", "fast"])
def test_a_prefix_stands_before_what_a_cache_holds(kernels: str):
    llama = prepared(Prefix(3), "causal", std=1.0).llama
    base = random_llama(attention="causal")
    texts, generator = torch.tensor([[1, 9, 40], [1, 77, 5]]), Decoder(llama)
    if kernels == "fast":
        accelerate(llama)
        generator = decoder(llama, tokens=8)
    expected = llama.generate(texts, 8, temperature=0.0)
    assert torch.equal(generator.generate(texts, 8, temperature=0.0), expected)
    assert not torch.equal(base.generate(texts, 8, temperature=0.0), expected)
    text, cache = torch.tensor([[1, 5, 8, 77, 5]]), KVCache(llama, 1, 5)
    with torch.no_grad():
        parts = [cache.read(text[:, part])[1] for part in (slice(0, 3), slice(3, 5))]
        torch.testing.assert_close(torch.cat(parts, dim=1), llama(text)[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_kernels_compute_a_prefix(attention: str, precision: str, monkeypatch: pytest.MonkeyPatch):
    plain, fast = (prepared(Prefix(3), attention, std=1.0) for _ in range(2))
    accelerate(fast, precision, generates=False)
    assert type(fast.llama.layers[0].attention) is FusedContextAttention
    with torch.no_grad():
        asked = []
        fused = nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(
            nn.functional, "scaled_dot_product_attention", lambda *q, **named: asked.append(q) or fused(*q, **named)
        )
        fast(TOKENS)
        assert len(asked) == 2  # a kernel in every layer, with the prefix among its keys
        assert all(key.shape[2] == 8 for _, key, _ in asked)
    weight = "llama.layers.0.attention.prefix_key"
    check_kernels(plain, fast, precision, weight, exact=2e-5, rounded=0.15, cosine=0.95)


def test_a_prefix_and_the_head_alone_are_trained():
    model, method = classifier(), Prefix(3)
    before = copy.deepcopy(model.state_dict())
    train(model, [method])
    own = {f"llama.layers.{i}.attention.prefix_{each}" for i in range(2) for each in ("key", "value")}
    assert trained_names(model) == own | HEAD
    state, tensors = method.export(model.state_dict())
    assert tensors.keys() == own and all(torch.equal(state[name], before[name]) for name in before if "llama" in name)
    assert all(tensor.is_contiguous() for tensor in tensors.values())  # else they could not be split over processes
    assert tensors.popitem()[1].shape == (2, 3, 8)  # key/value heads, not query heads
    torch.manual_seed(1)
    one = prepared(method)
    assert all(tensor.grad is not None for tensor in gradients_of(one))


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    model(TOKENS)[:, 0].sum().backward()
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def test_a_prefix_is_seen_where_padding_is_not():
    model = classifier()
    prepare(model, [PaddingMask(), Prefix(3)])
    with torch.no_grad():
        alone = model(TOKENS[1:2, :3])
        torch.testing.assert_close(model(TOKENS)[1:2], alone, atol=1e-5, rtol=0)
        model.llama.layers[0].attention.prefix_value.mul_(3)
        assert not torch.allclose(model(TOKENS)[1:2], alone, atol=1e-3)


# --------------------------------------------------------------------------------------------------------- biases


class BiasedNorm(nn.Module):
    """What a norm is in the models of the paper."""

    def __init__(self, norm: nn.Module, bias: torch.Tensor):
        super().__init__()
        self.norm, self.bias = norm, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + self.bias


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_bitfit_is_a_model_whose_layers_have_biases(attention: str):
    model, biased = prepared(BitFit(), attention), classifier(attention=attention)
    for mine, other in zip(model.llama.layers, biased.llama.layers, strict=True):
        for part in (other.attention, other.feed_forward):
            for name, linear in part.named_children():
                if isinstance(linear, nn.Linear):
                    linear.bias = mine.get_submodule(f"{part_name(other, part)}.{name}").bitfit_bias
        other.attention_norm = BiasedNorm(other.attention_norm, mine.attention_norm.bitfit_bias)
        other.ffn_norm = BiasedNorm(other.ffn_norm, mine.ffn_norm.bitfit_bias)
    torch.testing.assert_close(model(TOKENS), biased(TOKENS), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(model(TOKENS), classifier(attention=attention)(TOKENS), atol=1e-2)
    trained = {name.rpartition(".")[2] for name in trained_names(model) - HEAD}
    assert trained == {"bitfit_bias"} and len(trained_names(model) - HEAD) == 2 * 9
    assert all(parameter.grad is not None for parameter in gradients_of(model))


def part_name(layer: nn.Module, part: nn.Module) -> str:
    return next(name for name, child in layer.named_children() if child is part)


def test_bitfit_trains_biases_that_a_plain_model_has_no_place_for():
    model, method = classifier(), BitFit()
    before = copy.deepcopy(model.state_dict())
    train(model, [method])
    state, own = method.export(model.state_dict())
    assert state.keys() == before.keys() and len(own) == 18
    assert all(torch.equal(state[name], before[name]) for name in before if "llama" in name)
    assert all(tensor.abs().sum() > 0 for tensor in own.values())


@pytest.mark.parametrize(
    ("name", "arguments", "weight", "std", "rounded", "cosine"),
    [
        ("adapter", [], "feed_forward.adapter.down.weight", 0.3, 0.2, 0.95),
        ("bitfit", [], "attention.compute_query.bitfit_bias", 0.3, 0.2, 0.95),
        ("ia3", [], "feed_forward.w2.ia3_scale", 0.3, 0.2, 0.95),
        ("lora", ["rank=4", "variant=dora", "targets=compute_query+w2"], "feed_forward.w2.lora_B", 0.15, 0.2, 0.95),
        ("lora", ["rank=4", f"targets={'+'.join(MATRICES)}"], "attention.compute_query.lora_B", 0.15, 0.15, 0.98),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kernels_compute_what_hangs_on_layers(
    name: str, arguments: list[str], weight: str, std: float, rounded: float, cosine: float, precision: str
):
    ((_, settings),) = choose(name, arguments)
    plain, fast = (prepared(create(name, dict(settings)), std=std) for _ in range(2))
    accelerate(fast, precision, generates=False)
    weight = f"llama.layers.0.{weight}"
    check_kernels(plain, fast, precision, weight, exact=2e-5, rounded=rounded, cosine=cosine)
    with torch.no_grad():
        assert not torch.allclose(fast.eval()(TOKENS), classifier()(TOKENS), atol=1e-2)


# ----------------------------------------------------------------------------------------------------------- LoRA


def test_lora_computes_and_learns_as_the_peft_library_does():
    """The same factors in both: outputs, gradients, and the merged matrices."""
    peft = pytest.importorskip("peft")
    model, lora = classifier(), LoRA(rank=3, alpha=6.0, targets="compute_query+w2")
    prepare(model, [lora])
    other = classifier()
    config = peft.LoraConfig(r=3, lora_alpha=6.0, lora_dropout=0.0, target_modules=["compute_query", "w2"])
    peft.inject_adapter_in_model(config, other.llama)
    share_factors(model, other)
    outputs = model(TOKENS), other(TOKENS)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    for each in outputs:
        each[:, 0].sum().backward()
    factors = {name for name in trained_names(model) if "lora" in name}
    assert len(factors) == 2 * 2 * 2
    for name in factors:
        theirs = other.get_parameter(f"{name}.default.weight")
        torch.testing.assert_close(model.get_parameter(name).grad, theirs.grad, atol=1e-5, rtol=1e-4)
    assert {name for name in trained_names(other) if "lora" in name} == {f"{name}.default.weight" for name in factors}
    merged = exported(model, [lora])
    for name, module in other.llama.named_modules():
        if hasattr(module, "merge"):
            module.merge()
            torch.testing.assert_close(merged[f"llama.{name}.weight"], module.base_layer.weight, atol=1e-5, rtol=1e-5)


# --------------------------------------------------------------------------------------------------- how much of it

SHAPES = {
    "stories260K": dict(dim=64, n_layers=5, n_heads=8, n_kv_heads=4, vocab_size=512, multiple_of=4, max_seq_len=512),
    "stories42M": dict(),
}
TRAINED = {  # with the arguments' defaults; for L layers, D model dim, G = g d, f feed-forward dim; the head is 2 D + 2
    "linear-probe": {"stories260K": 130, "stories42M": 1_026},
    "lora": {"stories260K": 9_090, "stories42M": 132_098},  # L (8 (D + D) + 8 (D + G))
    "adapter": {"stories260K": 21_090, "stories42M": 267_522},  # L (2 D 32 + 32 + D)
    "prefix": {"stories260K": 5_250, "stories42M": 132_098},  # L 2 16 G
    "bitfit": {"stories260K": 3_770, "stories42M": 51_714},  # L (D + G + G + D + f + f + D + D + D)
    "prompt-tuning": {"stories260K": 1_154, "stories42M": 9_218},  # 16 D
    "ia3": {"stories260K": 1_310, "stories42M": 20_226},  # L (G + G + f)
}
ALL = {"stories260K": 260_032 + 130, "stories42M": 41_689_600 + 1_026}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TRAINED)
def test_so_much_is_trained(name: str, shape: str):
    """Only sizes are made: one compares methods that train about as much."""
    config = LlamaConfig.from_preset("stories42M", **SHAPES[shape])
    with torch.device("meta"):
        model = LlamaEmbeddingClassifier(Settings, llama=Llama(config))
        everything = trainable_parameters(model)
        prepare(model, [create(name, {})])
    assert trainable_parameters(model) == TRAINED[name][shape]
    assert everything == ALL[shape]


def test_equal_budgets_are_a_matter_of_arguments():
    """On stories42M LoRA of rank 8 and a prefix of 16 train as much; an adapter of width 16 about as much."""
    D, layers, head = 512, 8, 2 * 512 + 2
    budget = TRAINED["lora"]["stories42M"]
    assert budget == TRAINED["prefix"]["stories42M"] == layers * 16 * 2 * D + head
    with torch.device("meta"):
        model = LlamaEmbeddingClassifier(Settings, llama=Llama(LlamaConfig.from_preset("stories42M")))
        prepare(model, [Adapter(width=16)])
    assert trainable_parameters(model) == layers * (2 * D * 16 + 16 + D) + head
    assert abs(trainable_parameters(model) / budget - 1) < 0.05


def test_a_tied_matrix_counts_once():
    model = random_llama()
    assert trainable_parameters(model) == sum(parameter.numel() for parameter in {*model.parameters()})
    assert trainable_parameters(model.requires_grad_(False)) == 0


@pytest.mark.parametrize("name", ["adapter", "prefix", "bitfit", "prompt-tuning"])
def test_the_real_checkpoint_learns_three_sentences(name: str, assets: Path):
    llama = load_llama_model(asset(assets, "stories260K.pt"))
    tokenizer = Tokenizer(tokenizer_model=asset(assets, "tok512.model"))
    model = LlamaEmbeddingClassifier(Settings, llama=llama)
    texts = [tokenizer.encode(text, bos=True, eos=False) for text in ("good dog", "bad cat", "a very bad day")]
    tokens = torch.tensor([ids + [3] * (max(map(len, texts)) - len(ids)) for ids in texts])
    torch.manual_seed(0)
    prepare(model, [create(name, {})])
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(tokens), torch.tensor([1, 0, 0]))
        loss.backward()
        optimizer.step()
    assert loss < 0.1 and model(tokens).argmax(-1).tolist() == [1, 0, 0]


# ------------------------------------------------------------------------------------------------------ all at once


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("names", [",".join(FROZEN_TOGETHER), "padding-mask,pooling,prompt-tuning,adapter,ema"])
def test_what_several_have_made_together_is_what_is_saved(laboratory: Laboratory, names: str, precision: str):
    run = laboratory.assemble(laboratory.plan(names, epochs=1, precision=precision))
    if precision == "bf16":  # which the laboratory, that has no kernels, only notes
        accelerate(run.model, precision, generates=False)
    checkpointer, seen = laboratory.watched(run)
    laboratory.train(run, checkpointer)
    model, about = runs.load_classifier(checkpointer.model_path)
    if precision == "bf16":
        accelerate(model, about.precision, generates=False)
    close = dict(atol=1e-6, rtol=0) if precision == "fp32" else dict(atol=0.05, rtol=0.02)  # a merged matrix is rounded
    torch.testing.assert_close(outputs_of(model, run), seen[-1], **close)
