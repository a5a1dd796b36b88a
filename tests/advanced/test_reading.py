"""How a text becomes a vector: without padding, from several tokens, behind trained vectors; all of that together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import SENTENCES, asset, random_llama
from steps import check_kernels
from test_methods import TOKENS, Settings, classifier, exported, train
from torch import nn

from advanced import create
from advanced.padding_mask import PaddingMask
from advanced.pooling import Pooling
from advanced.prompt_tuning import PromptTuning
from advanced.reading import reading_of
from classifier import LlamaEmbeddingClassifier, read_last
from engine import families, runs
from engine.data import Example
from engine.methods import Method, prepare
from engine.weights import load_llama_model
from fast import accelerate
from fast.attention import FusedAttention
from llama import Llama
from tokenizer import Tokenizer
from utils import UserError

ATTENTIONS = ["bidirectional", "causal"]
LENGTHS = [5, 3, 4]  # of the rows of TOKENS


def prepared(*methods: Method, attention: str = "bidirectional") -> LlamaEmbeddingClassifier:
    model = classifier(attention=attention)
    prepare(model, methods)
    return model


def read(model: nn.Module, token_ids: torch.Tensor = TOKENS) -> torch.Tensor:
    """b D"""
    with torch.no_grad():
        return model.read(model.llama, token_ids, 3)


@torch.no_grad()
def states(llama: Llama, ids: list[int]) -> torch.Tensor:
    """Of one text without padding, by the base. Returns s D"""
    return llama(torch.tensor([ids]))[1][0]


def rows() -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(TOKENS, LENGTHS, strict=True)]


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_reading_in_which_nothing_was_changed_is_that_of_the_base(attention: str):
    model = classifier(attention=attention)
    expected = read_last(model.llama, TOKENS, 3)
    reading = reading_of(model)
    assert reading_of(model) is reading is model.read and not list(reading.parameters())
    assert torch.equal(read(model), expected)


# -------------------------------------------------------------------------------------------------------- padding


def test_a_row_without_padding_is_what_the_base_makes_of_it_alone():
    model, base = prepared(PaddingMask()), classifier()
    for row, vector in zip(rows(), read(model), strict=True):
        torch.testing.assert_close(vector, states(base.llama, row)[-1], atol=1e-5, rtol=0)
        torch.testing.assert_close(read(model, torch.tensor([row]))[0], vector, atol=1e-5, rtol=0)
        wide = torch.tensor([row + [3] * 40])
        torch.testing.assert_close(read(model, wide)[0], vector, atol=1e-5, rtol=0)


def test_the_courses_own_state_depends_on_the_batch():
    base = classifier()
    with torch.no_grad():
        alone = base.read(base.llama, TOKENS[1:2, :3], 3)
        assert not torch.allclose(base.read(base.llama, TOKENS, 3)[1:2], alone, atol=1e-2)


def test_only_trailing_padding_is_hidden():
    """`<0x00>` may stand in a text."""
    model, ids = prepared(PaddingMask()), torch.tensor([[1, 3, 3, 6], [1, 5, 6, 3]])
    assert not torch.allclose(read(model, ids)[0], read(model, torch.tensor([[1, 6]]))[0], atol=1e-3)
    torch.testing.assert_close(read(model, ids)[0], states(model.llama, [1, 3, 3, 6])[-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kernels_hide_padding_too(precision: str):
    plain, fast = prepared(PaddingMask()), prepared(PaddingMask())
    accelerate(fast, precision, generates=False)
    assert type(fast.llama.layers[0].attention) is FusedAttention
    close = dict(atol=1e-5, rtol=0) if precision == "fp32" else dict(atol=0.1, rtol=0.1)
    torch.testing.assert_close(read(fast), read(plain), **close)
    torch.testing.assert_close(read(fast, TOKENS[1:2, :3]), read(fast)[1:2], **close)
    assert not torch.allclose(read(fast), read(classifier()), atol=0.2)
    weight = "llama.layers.0.attention.compute_key.weight"
    check_kernels(plain, fast, precision, weight, exact=1e-5, rounded=0.1, cosine=0.98)


def test_a_causal_model_needs_no_mask():
    with pytest.raises(UserError, match="padding-mask does nothing in a causal model"):
        prepared(PaddingMask(), attention="causal")


def test_zero_shot_classification_without_padding(tokenizer: Tokenizer):
    """A row's scores are the same alone and in a batch; those of the course are not."""
    scores = {}
    for methods in ((), [("padding-mask", {})]):
        model = runs.assemble_zero_shot(random_llama(), tokenizer, ["bad", "good"], methods).eval()
        examples = [Example(sentence, 0) for sentence in SENTENCES[:4]]
        dataset = families.encode_for(model, tokenizer, examples)
        batch = dataset.collate_fn([dataset[index] for index in range(4)])["token_ids"]
        shortest = min(range(4), key=lambda index: len(dataset.token_ids[index]))
        with torch.no_grad():
            scores[bool(methods)] = model(torch.tensor([dataset.token_ids[shortest]])), model(batch)[[shortest]]
        assert not any(parameter.requires_grad for parameter in model.parameters())
    torch.testing.assert_close(*scores[True], atol=1e-5, rtol=0)
    assert not torch.allclose(*scores[False], atol=1e-3)


def test_the_driver_hides_padding_from_a_zero_shot_classifier(
    tmp_path: Path, drive: Callable, classify_flags: Callable, tiny_checkpoint: Path
):
    flags = [*classify_flags("prompt"), "--dev_out", "films-dev-advanced-output.txt"]
    flags += ["--test_out", "films-test-advanced-output.txt", "--method", "padding-mask"]
    assert "dev acc" in drive(*flags)
    with pytest.raises(UserError, match="padding-mask does nothing in a causal model"):
        drive(*flags, "--attention", "causal")


def test_the_real_checkpoint_gives_a_row_the_same_in_any_batch(assets: Path):
    llama = load_llama_model(asset(assets, "stories260K.pt"))
    tokenizer = Tokenizer(tokenizer_model=asset(assets, "tok512.model"))
    texts = [tokenizer.encode(sentence, bos=True, eos=False) for sentence in SENTENCES[:4]]
    longest = max(map(len, texts))
    batch = torch.tensor([ids + [3] * (longest - len(ids)) for ids in texts])
    model = LlamaEmbeddingClassifier(Settings, llama=llama)
    moved = (read(model, batch)[1] - read(model.eval(), torch.tensor([texts[1]]))[0]).abs().max()
    PaddingMask().prepare(model)
    torch.testing.assert_close(read(model, batch)[1], read(model, torch.tensor([texts[1]]))[0], atol=1e-5, rtol=0)
    assert moved > 0.1


# -------------------------------------------------------------------------------------------------------- pooling


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kind", ["mean", "attention", "last"])
def test_pooling_is_the_formula_over_real_tokens(kind: str, attention: str):
    if (kind, attention) == ("last", "causal"):
        pytest.skip("refused, see below")
    model = prepared(Pooling(kind), attention=attention)
    if kind == "attention":
        torch.testing.assert_close(read(model), read(prepared(Pooling("mean"), attention=attention)))  # it begins so
        query = nn.init.normal_(model.read.query).detach()
    for row, length in enumerate(LENGTHS):
        with torch.no_grad():
            seen = model.llama(TOKENS)[1][row, :length]  # t D: padding is seen, and is not read
        weights = {"mean": [1 / length] * length, "last": [0.0] * (length - 1) + [1.0]}.get(kind)
        if kind == "attention":
            powers = [torch.exp((state @ query) / 32**0.5).item() for state in seen]
            weights = [power / sum(powers) for power in powers]
        expected = sum(weight * state for weight, state in zip(weights, seen, strict=True))
        torch.testing.assert_close(read(model)[row], expected, atol=1e-5, rtol=1e-5)


def test_the_query_of_attention_is_trained_and_saved():
    model, method = classifier(), Pooling("attention")
    train(model, [method])
    assert model.read.query.abs().sum() > 0
    state, own = method.export(model.state_dict())
    assert own.keys() == {"read.query"} and state.keys() == classifier().state_dict().keys()


def test_the_last_token_is_refused_where_it_is_read_anyway():
    with pytest.raises(UserError, match="what is read anyway"):
        prepared(Pooling("last"), attention="causal")
    with pytest.raises(UserError, match="what is read anyway"):
        prepared(PaddingMask(), Pooling("last"))


# ------------------------------------------------------------------------------------------------- trained vectors


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_prompt_of_words_reads_as_these_words_before_the_text(attention: str):
    model, base = prepared(PromptTuning(3), attention=attention), classifier(attention=attention)
    words = torch.tensor([[7, 120, 44]])
    with torch.no_grad():
        model.read.prompt.copy_(model.llama.tok_embeddings(words)[0])
        expected = base.read(base.llama, torch.cat((words.expand(3, -1), TOKENS), dim=1), 3)
    torch.testing.assert_close(read(model), expected, atol=1e-5, rtol=0)
    assert not torch.allclose(read(model), read(base), atol=1e-3)


def test_a_prompt_begins_as_tokens_of_the_vocabulary_and_is_trained_with_the_head_alone():
    model, method = classifier(), PromptTuning(5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    prepare(model, [method])
    table = model.llama.tok_embeddings.weight.detach()
    assert all((table == vector).all(dim=1).any() for vector in model.read.prompt.detach())
    begun = model.read.prompt.detach().clone()
    assert len(begun.unique(dim=0)) > 1
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"read.prompt", "classifier_head.weight", "classifier_head.bias"}
    other = classifier()
    torch.manual_seed(3)
    train(other, [method])
    own = method.export(other.state_dict())[1]
    assert own.keys() == {"read.prompt"} and not torch.allclose(own["read.prompt"], begun, atol=1e-3)
    assert all(torch.equal(exported(other, [method])[name], before[name]) for name in before if "llama" in name)


def test_a_text_as_long_as_the_model_has_positions_takes_a_prompt():
    model = prepared(PromptTuning(4), attention="causal")
    length = model.llama.config.max_seq_len
    assert read(model, torch.full((1, length), 9)).isfinite().all()


# ---------------------------------------------------------------------------------------------------- all together


def test_the_three_parts_combine():
    """Prompt, padding and pooling together, against every row alone behind the words that the prompt is."""
    model, base, words = prepared(PaddingMask(), Pooling("mean"), PromptTuning(2)), classifier(), [7, 120]
    with torch.no_grad():
        model.read.prompt.copy_(model.llama.tok_embeddings(torch.tensor(words)))
    for row, vector in zip(rows(), read(model), strict=True):
        torch.testing.assert_close(vector, states(base.llama, words + row)[2:].mean(0), atol=1e-5, rtol=0)


class Deaf(LlamaEmbeddingClassifier):
    """A forward of somebody's own, as it was before there was a `read`."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.llama(input_ids)[1]
        return self.classifier_head(self.dropout(hidden[:, -1])).log_softmax(-1)


@pytest.mark.parametrize("name", ["padding-mask", "pooling", "prompt-tuning"])
def test_a_classifier_that_does_not_ask_is_refused_when_it_has_computed(name: str):
    model = classifier()
    model.__class__ = Deaf
    prepare(model, [create(name, {})])
    with pytest.raises(UserError, match=r"forward does not call self\.read"):
        model(TOKENS)


def test_a_classifier_with_its_own_reading_is_refused():
    model = classifier()
    model.read = lambda llama, token_ids, pad_id: llama(token_ids)[1][:, 0]
    with pytest.raises(UserError, match="reads a text in its own way"):
        Pooling().prepare(model)
    del model.read
    with pytest.raises(UserError, match="reads a text in its own way"):
        Pooling().prepare(model)
