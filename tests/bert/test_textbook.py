"""The BERT of textbooks: the formulas written out, its directory, what is trained on it, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from conftest import SENTENCES
from error_helpers import refused
from small import PIECES, batch, call, shake, write_vocabulary  # noqa: F401

from bert import heads, pretrain
from bert.config import BertConfig
from bert.examples import PretrainingData
from bert.load import load_model, load_tokenizer
from bert.model import Bert
from bert.save import save_pretrained
from bert.spans import SpanData
from bert.squad import Question
from bert.wordpiece import WordPiece
from fast import accelerate

SMALL = dict(vocab_size=300, hidden=32, n_layers=2, attn_heads=4)


def textbook(make: Callable = heads.BertForPreTraining, **changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    model = make(Bert(BertConfig.textbook(**{**SMALL, "max_seq_len": 64, **changes})))
    shake(model)
    return model.eval()


def test_its_shape_is_that_of_the_paper_unless_it_is_said():
    config = BertConfig.textbook(30522)
    assert (config.dim, config.n_layers, config.n_heads, config.hidden_dim) == (768, 12, 12, 3072)
    assert config.n_segments == 3 and not config.embedding_norm and not config.has_pooler
    assert BertConfig.textbook(9, 8, 1, 2, dropout=0.0).dropout == 0.0
    names = dict(textbook().named_parameters())
    assert not [name for name in names if "embeddings.norm" in name or "pooler" in name or "transform" in name]
    assert names["encoder.embeddings.segments.weight"].shape == (3, 32)
    for wrong in ({"first_segment": 3}, {"first_segment": -1}, {"embedding_norm": 1}, {"plain_heads": None}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            BertConfig.textbook(300, **wrong)


# ------------------------------------------------------------------------------------------------- the formulas


def affine(weights: dict, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def normed(weights: dict, name: str, x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return (
        centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt() * weights[f"{name}.weight"]
        + weights[f"{name}.bias"]
    )


def layer(weights: dict, x: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
    """One text. x: s D, is_real: s -> s D"""
    query, key, value = (affine(weights, f"attention.compute_{name}", x) for name in ("query", "key", "value"))
    heads = []
    for head in range(4):
        part = slice(8 * head, 8 * head + 8)
        scores = query[:, part] @ key[:, part].T / math.sqrt(8)  # s t
        scores[:, ~is_real] = -1e9
        scores = scores.exp() / scores.exp().sum(-1, keepdim=True)
        heads.append(scores @ value[:, part])
    x = normed(weights, "attention_norm", x + affine(weights, "attention.compute_output", torch.cat(heads, -1)))
    inner = affine(weights, "feed_forward.w1", x)
    inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
    return normed(weights, "ffn_norm", x + affine(weights, "feed_forward.w2", inner))


def written_out(model: torch.nn.Module, ids: list[int], segments: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the next sentence, 2, and of the tokens, s v; in float64."""
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    rows = []
    for place, (token, segment) in enumerate(zip(ids, segments, strict=True)):
        angles = [place / 10000 ** (2 * (i // 2) / 32) for i in range(32)]
        wave = [math.cos(angle) if i % 2 else math.sin(angle) for i, angle in enumerate(angles)]
        row = weights["encoder.embeddings.tokens.weight"][token] + torch.tensor(wave, dtype=torch.float64)
        rows.append(row + weights["encoder.embeddings.segments.weight"][segment])
    x, is_real = torch.stack(rows), torch.tensor(ids) > 0
    for number in range(2):
        prefix = f"encoder.layers.{number}."
        own = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        x = layer(own, x, is_real)
    following, words = affine(weights, "next_sentence", x[0]), affine(weights, "masked_lm", x)
    return following - following.exp().sum().log(), words - words.exp().sum(-1, keepdim=True).log()


@pytest.mark.parametrize("is_fast", [False, True])
def test_the_model_is_the_formulas(is_fast: bool):
    model = textbook()
    twin = textbook()
    if is_fast:
        accelerate(twin)
    ids, segments, _ = batch(3, 11)
    segments = (segments + 1) * (ids > 0)
    with torch.no_grad():
        following, words = twin(ids, segments)
        for row in range(3):
            expected = written_out(model, ids[row].tolist(), segments[row].tolist())
            torch.testing.assert_close(following[row].double(), expected[0], atol=1e-4, rtol=1e-4)
            real = ids[row] > 0
            torch.testing.assert_close(words[row][real].double(), expected[1][real], atol=1e-4, rtol=1e-4)
        ones = model(ids, torch.ones_like(ids))
        assert all(torch.equal(a, b) for a, b in zip(model(ids), ones, strict=True))  # one text is segment 1


def test_the_sum_is_dropped_and_not_normalised_in_training():
    part = textbook(dropout=0.5).encoder.embeddings
    ids = torch.full((1, 64), 7)
    kept = part(ids)
    torch.manual_seed(1)
    dropped = part.train()(ids)
    is_kept = dropped != 0
    assert 0.3 < is_kept.float().mean() < 0.7
    torch.testing.assert_close(dropped[is_kept], 2 * kept[is_kept])


def test_segments_are_counted_from_one_in_every_kind_of_data():
    tokenizer = WordPiece(PIECES)
    tokenizer.first_segment = 1
    assert tokenizer.encode_pair("a film", "the play").segment_ids == [1, 1, 1, 1, 2, 2, 2]
    documents = [[[10 * d + s] * 3 for s in range(6)] for d in (1, 2, 3)]
    for data in (
        PretrainingData(documents, tokenizer, 16),
        SpanData([Question("0", "the", "a film is bad", ()), Question("1", "a", "a", ())], tokenizer, 12, 4),
    ):
        items = [data[(0, place)] for place in range(2)] if isinstance(data, PretrainingData) else [data[0], data[1]]
        made = data.collate_fn(items)
        assert made["segment_ids"].unique().tolist() in ([0, 1, 2], [1, 2])
        assert torch.equal(made["segment_ids"] > 0, made["is_real"])


# ------------------------------------------------------------------------------------------------ its directory

WITH_CLASSES = (heads.BertForSequenceClassification, heads.BertForTokenClassification)
KINDS = (
    heads.BertForPreTraining,
    heads.BertForMaskedLM,
    heads.BertForNextSentencePrediction,
    heads.BertForQuestionAnswering,
    *WITH_CLASSES,
)


@pytest.mark.parametrize("make", KINDS)
def test_what_was_saved_is_loaded(tmp_path: Path, make: Callable):
    model = textbook((lambda encoder: make(encoder, 2)) if make in WITH_CLASSES else make, vocab_size=len(PIECES))
    save_pretrained(tmp_path, model, WordPiece(PIECES))
    again, new = load_model(tmp_path)
    assert type(again) is make and not new and again.encoder.config == model.encoder.config
    ids = batch(2, 9)[0] % len(PIECES)
    outputs = [each if isinstance(each, tuple) else (each,) for each in (model(ids), again(ids))]
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert not again.encoder.embeddings.positions.weight.requires_grad
    assert load_tokenizer(tmp_path).first_segment == 1
    with pytest.raises(ValueError, match="textbook-bert"):  # transformers does not take it for one of its own
        transformers.AutoConfig.from_pretrained(tmp_path)


# ---------------------------------------------------------------------------------------------------- programs


def test_training_reads_texts_as_segments_one_and_two(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    read, compute = [], Bert.forward

    def forward(self: Bert, ids: torch.Tensor, segments: torch.Tensor, is_real: torch.Tensor) -> tuple:
        read.append(segments[is_real])
        return compute(self, ids, segments, is_real)

    monkeypatch.setattr(Bert, "forward", forward)
    pretrain.main([*flags, "--out", str(tmp_path / "book")])
    assert torch.cat(read).unique().tolist() == [1, 2]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    documents = ["\n".join(SENTENCES[(index * 5 + each) % len(SENTENCES)] for each in range(4)) for index in range(12)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    vocabulary = write_vocabulary(tmp_path / "pieces.txt")
    shape = "--dim 32 --n_layers 2 --n_heads 4 --hidden_dim 64 --max_seq_len 48".split()
    run = "--batch_size 4 --length 24 --every 3 --epochs 1 --held_out 0.2".split()
    return ["--text", str(tmp_path / "text.txt"), "--tokenizer", str(vocabulary), *shape, *run, "--textbook"]


def test_it_is_trained_and_every_option_takes_it(flags: list[str], tmp_path: Path, call: Callable[..., str]):
    pretrain.main([*flags, "--out", str(tmp_path / "book")])
    assert json.loads((tmp_path / "book" / "pretraining.json").read_text())["settings"]["textbook"]
    model, new = load_model(tmp_path / "book")
    made = BertConfig.textbook(len(PIECES), 32, 2, 4, hidden_dim=64, max_seq_len=48)
    assert isinstance(model, heads.BertForPreTraining) and not new and model.encoder.config == made
    named = "--pretrained-model-path", tmp_path / "book"
    assert "[MASK] 1 of 1" in call("--option", "fill-mask", *named, "--text", "a [MASK] film")
    two = "--text", "the film", "--text_b", "is bad"
    assert "Next" in call("--option", "nsp", *named, *two)
    assert "  2  bad" in call("--option", "encode", *named, *two)
    further = [*flags[:2], "--init", str(tmp_path / "book"), "--length", "24", "--epochs", "1", "--held_out", "0.2"]
    pretrain.main([*further, "--out", str(tmp_path / "more")])
    assert load_model(tmp_path / "more")[0].encoder.config == made
    refused("--textbook: the shape is that of --init", pretrain.main, [*further, "--out", "x", "--textbook"])
