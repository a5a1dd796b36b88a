"""Methods on a BERT: the contract of tests/advanced/test_contract.py, and by hand what is particular there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import test_contract as contract
import torch
import torch.nn.functional as F
from small import directory  # noqa: F401
from steps import step_of
from torch import nn

from advanced import METHODS, create
from advanced.prefix import keys_and_values
from bert.config import BertConfig
from bert.heads import BertForSequenceClassification
from bert.model import Bert
from engine import runs
from engine.methods import Method, prepare
from engine.plan import ComputeSettings, InputFile

FOR_BERTS = [name for name, entry in METHODS.items() if "bert" in entry.families and not entry.combines]
FILES_OF_BERT = ("config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json")
IDS = torch.tensor([[2, 9, 3, 40, 8], [2, 77, 8, 0, 0], [2, 5, 6, 8, 0]])  # 0 is padding; 3, a Llama's, is none
REAL = [5, 3, 4]


class BertLaboratory(contract.Laboratory):
    """Fine-tunes a tiny BERT."""

    family = "bert"

    def pretrained(self) -> tuple[InputFile, InputFile]:
        return InputFile.of(self.checkpoint, FILES_OF_BERT), InputFile.of(self.checkpoint / "vocab.txt")


@pytest.fixture
def laboratory(tmp_path: Path, directory: Path, films: dict[str, Path]) -> BertLaboratory:
    return BertLaboratory(tmp_path, directory, films)


def classifier(seed: int = 0, **changes) -> BertForSequenceClassification:
    """With weights and biases that matter."""
    torch.manual_seed(seed)
    shape = dict(vocab_size=100, dim=32, n_layers=3, n_heads=4, hidden_dim=48, max_seq_len=16)
    config = BertConfig(**{**shape, "dropout": 0.0, "attention_dropout": 0.0, **changes})
    model = BertForSequenceClassification(Bert(config), 2).eval()
    model.dropout.p = 0.0
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def prepared(name: str, model: nn.Module | None = None, **settings) -> tuple[nn.Module, Method]:
    model, method = model or classifier(), create(name, {**METHODS[name].defaults, **settings})
    prepare(model, [method])
    return model, method


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# ------------------------------------------------------------------------------------------------ the contract


@pytest.mark.parametrize("name", FOR_BERTS)
def test_a_method_begins_as_the_base(laboratory: BertLaboratory, name: str):
    contract.test_a_method_begins_as_the_base(laboratory, name, "bidirectional")


@pytest.mark.parametrize("name", FOR_BERTS)
def test_what_is_judged_is_what_is_saved_and_the_file_is_enough(laboratory: BertLaboratory, name: str):
    contract.test_what_is_judged_is_what_is_saved_and_the_file_is_enough(laboratory, name, "bidirectional")


@pytest.mark.slow
@pytest.mark.parametrize("name", FOR_BERTS)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(laboratory: BertLaboratory, name: str):
    contract.test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(laboratory, name, is_within=True)


@pytest.mark.parametrize("name", ["adapter", "bitfit", "ia3", "lora", "pooling", "prefix"])
def test_kernels_compute_what_a_method_has_changed(laboratory: BertLaboratory, name: str):
    outputs = []
    for kernels in ("plain", "auto"):
        torch.manual_seed(1)
        run = runs.assemble(laboratory.plan(name), ComputeSettings(torch.device("cpu"), kernels))
        for parameter in run.model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.3)
        outputs.append(contract.outputs_of(run.model, run))
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)


# -------------------------------------------------------------------------------------------------- one by one


@pytest.mark.parametrize("has_pooler", [True, False])
@pytest.mark.parametrize("kind", ["mean", "attention", "last"])
def test_pooling_reads_the_real_tokens(kind: str, has_pooler: bool):
    """In the place of what the pooler makes of [CLS]; where there is no pooler, the head's own layer comes behind."""
    base = classifier(has_pooler=has_pooler)
    model, _ = prepared("pooling", classifier(has_pooler=has_pooler), kind=kind)
    if kind == "attention":
        assert not model.read.query.any()  # it begins as the mean
        query = nn.init.normal_(model.read.query)
    texts = []
    with torch.no_grad():
        hidden, _ = base.encoder(IDS)
        for row, length in zip(hidden, REAL, strict=True):
            states = [*row[:length]]
            weights = {"mean": [1 / length] * length, "last": [0.0] * (length - 1) + [1.0]}.get(kind)
            if kind == "attention":
                sizes = [math.exp(state @ query / math.sqrt(32)) for state in states]
                weights = [size / sum(sizes) for size in sizes]
            texts.append(sum(weight * state for weight, state in zip(weights, states, strict=True)))
        text = torch.stack(texts)
        if not has_pooler:
            text = F.relu(base.transform(text))
        torch.testing.assert_close(model(IDS), F.log_softmax(base.classifier(text), dim=-1), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(model.encoder(IDS)[1], torch.stack(texts), atol=1e-5, rtol=1e-4)
        mask = (IDS != 0).long()  # said as a mask, with other ids where padding is
        torch.testing.assert_close(model(IDS + 7 * (1 - mask), None, mask), model(IDS), atol=1e-5, rtol=1e-4)


def test_a_prefix_is_seen_by_every_token_as_keys_and_values_are():
    model, _ = prepared("prefix", length=2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    attention, base = model.encoder.layers[1].attention, classifier().encoder.layers[1].attention
    x, mask = torch.randn(3, 5, 32), (IDS != 0)[:, None, None, :]
    expected = torch.empty(3, 5, 4, 8)  # b s h d
    with torch.no_grad():
        q, k, v = (
            compute(x).unflatten(-1, (4, 8)) for compute in (base.compute_query, base.compute_key, base.compute_value)
        )
        for row, head, s in [(row, head, s) for row in range(3) for head in range(4) for s in range(5)]:
            keys = [*attention.prefix_key[head], *k[row, : REAL[row], head]]
            values = [*attention.prefix_value[head], *v[row, : REAL[row], head]]
            sizes = [math.exp(q[row, s, head] @ key / math.sqrt(8)) for key in keys]
            expected[row, s, head] = sum(e * value for e, value in zip(sizes, values, strict=True)) / sum(sizes)
        expected = base.compute_output(expected.flatten(-2))
        torch.testing.assert_close(attention(x, mask), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(attention(x, mask=mask), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(attention(x[:1]), expected[:1], atol=1e-5, rtol=1e-4)  # a text without padding
    own = {f"encoder.layers.{i}.attention.prefix_{kind}" for i in range(3) for kind in ("key", "value")}
    assert trained(model) == own | {"classifier.weight", "classifier.bias"}


def test_a_prefix_begins_as_the_keys_and_values_of_random_tokens():
    encoder, heard = classifier().encoder, []
    for layer in encoder.layers:
        for linear in (layer.attention.compute_key, layer.attention.compute_value):
            linear.register_forward_hook(lambda module, inputs, output: heard.append(output))
    words = torch.tensor([[4, 0, 9]])  # among them the id of padding, which is a token like others here
    with torch.no_grad():
        encoder(words, None, torch.ones_like(words))
    expected = [each[0].unflatten(-1, (4, 8)).transpose(0, 1) for each in heard]
    found = [each for pair in keys_and_values(encoder, words) for each in pair]
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)
    assert not any(layer.attention._forward_pre_hooks for layer in encoder.layers)


def test_an_adapter_is_beside_the_feed_forward_before_the_norm():
    model, _ = prepared("adapter", width=3, scale=2.5)
    adapter = model.encoder.layers[0].feed_forward.adapter
    nn.init.normal_(adapter.up.weight)
    base, x = classifier().encoder.layers[0], torch.randn(2, 5, 32)
    with torch.no_grad():
        h = base.attention_norm(x + base.attention(x))
        added = 2.5 * F.relu(h @ adapter.down.weight.T + adapter.down.bias) @ adapter.up.weight.T
        expected = base.ffn_norm(h + base.feed_forward(h) + added)
        torch.testing.assert_close(model.encoder.layers[0](x), expected, atol=1e-5, rtol=1e-4)


def test_bitfit_trains_the_biases_that_are_there_and_adds_none():
    model, base = prepared("bitfit")[0], classifier()
    assert model.state_dict().keys() == base.state_dict().keys()
    biases = {name for name in base.state_dict() if name.startswith("encoder") and name.endswith("bias")}
    assert len(biases) == 3 * 8 + 2 and trained(model) == biases | {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize("is_distilled", [False, True])
def test_rates_fall_from_the_head_to_the_embeddings(is_distilled: bool):
    model = classifier(**(dict(n_segments=0, has_pooler=False) if is_distilled else {}))
    groups = [{"params": [*model.parameters()], "lr": 1.0}]
    split = create("layer-decay", {"factor": 0.5}).parameter_groups(groups, model)
    rates = {id(parameter): group["lr"] for group in split for parameter in group["params"]}
    above = "transform" if is_distilled else "encoder.pooler"
    for name, parameter in model.named_parameters():
        expected = {f"encoder.layers.{layer}": 0.5 ** (3 - layer) for layer in range(3)}
        expected |= {"encoder.embeddings": 0.5**4, "classifier": 1.0, above: 1.0}
        (rate,) = (rate for start, rate in expected.items() if name.startswith(start))
        assert rates[id(parameter)] == rate, name


def test_the_top_layers_and_the_pooler_are_drawn_anew():
    model, base = classifier(), classifier()
    for each in (model, base):
        for parameter in each.encoder.layers.parameters():
            nn.init.constant_(parameter, 7.0)
    prepared("reinit", model, layers=2, head="zero")
    changed = {name for name, tensor in base.state_dict().items() if not torch.equal(tensor, model.state_dict()[name])}
    above = ("encoder.layers.1.", "encoder.layers.2.", "encoder.pooler.", "classifier.")
    assert changed == {name for name in base.state_dict() if name.startswith(above)}
    layer = model.encoder.layers[2]
    assert 0.015 < layer.attention.compute_key.weight.std() < 0.025 and not layer.feed_forward.w1.bias.any()
    assert (layer.ffn_norm.weight == 1).all() and not layer.ffn_norm.bias.any()
    assert not model.classifier.weight.any() and not model.classifier.bias.any()
    model, base = prepared("reinit", layers=0, head="zero")[0].encoder.state_dict(), classifier().encoder.state_dict()
    assert all(torch.equal(model[name], base[name]) for name in base)


def test_mixout_mixes_matrices_and_leaves_biases():
    model, mixout = prepared("mixout", p=0.5)
    mixout.start(model)
    layer, x = model.encoder.layers[0].feed_forward.w1.train(), torch.randn(4, 32)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.normal_()
        torch.manual_seed(5)
        output = layer(x)
        torch.manual_seed(5)
        kept = F.dropout(torch.ones(32), 0.5) != 0
        mixed = torch.where(kept, layer.weight, before)
        torch.testing.assert_close(output, F.linear(x, 2 * (mixed - 0.5 * before), layer.bias), atol=1e-4, rtol=1e-4)
    assert len(mixout.layers(model)) == 3 * 6


def test_smart_moves_real_tokens_alone():
    model, smart = prepared("smart", classifier())
    smart.start(model)
    step = step_of(model, tokens=IDS)
    moved = smart.worst_perturbation(step).abs().sum(dim=-1) > 0  # b s
    assert torch.equal(moved, IDS != 0)
    assert smart.penalty(step) > 0


def test_wise_ft_mixes_the_encoder_and_leaves_the_head():
    model, wise = prepared("wise-ft", points=3)
    wise.start(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1.0
    scores = iter((0.1, 0.9, 0.2))
    assert wise.finish(model, lambda: next(scores)) and wise.figures()["alpha"] == 0.5
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name] + (1.0 if name.startswith("classifier") else 0.5))


def test_the_parts_have_the_names_that_methods_look_for():
    model = classifier(pad_id=4)
    assert model.encoder.tok_embeddings is model.encoder.embeddings.tokens
    assert model.classifier_head is model.classifier and model.pad_id == 4
