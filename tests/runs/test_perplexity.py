"""How well a model predicts a text: windows, figures and the command, against one token after the other."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import SENTENCES, drive_in, random_llama

from engine import runs, training
from engine.plan import ComputeSettings
from engine.tasks import TextWindows, perplexity_of
from llama import Llama
from tokenizer import Tokenizer
from utils import UserError

TEXT = "A café at night.\n" + " ".join(SENTENCES)


def slow_nats(llama: Llama, ids: list[int], length: int) -> float:
    """The sum over all tokens, each predicted by a pass of its own from bos and those before it in its window."""
    nats = 0.0
    for position, token in enumerate(ids):
        seen = [1, *ids[position // length * length : position]]
        with torch.inference_mode():
            logits, _ = llama(torch.tensor([seen]))
        nats -= logits[0, -1].log_softmax(-1)[token].item()
    return nats


def test_a_perplexity_that_no_float_can_hold_is_infinite():
    assert perplexity_of(0.0) == 1.0 and perplexity_of(math.log(300.0)) == pytest.approx(300.0)
    assert perplexity_of(709.0) < math.inf == perplexity_of(710.0) == perplexity_of(math.inf)
    assert math.isnan(perplexity_of(math.nan))


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 35])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_windows_hold_every_token_once_behind_bos(tokens: int, batch_size: int):
    ids = list(range(10, 10 + tokens))
    windows = TextWindows(ids, 1, 8)
    assert len(windows) == math.ceil(tokens / 8)
    batches, predicted = list(windows.loader(batch_size)), []
    for batch in batches:
        assert batch["token_ids"].shape == batch["targets"].shape and len(batch["targets"]) <= batch_size
        for seen, targets in zip(batch["token_ids"].tolist(), batch["targets"].tolist(), strict=True):
            assert seen == [1, *targets[:-1]]
            predicted += targets
    assert predicted == ids
    assert len(batches) == math.ceil(tokens // 8 / batch_size) + (tokens % 8 > 0)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_figures_are_those_of_one_token_after_the_other(tokenizer: Tokenizer, batch_size: int):
    llama = random_llama(attention="causal", max_seq_len=16)
    ids = tokenizer.encode(TEXT, bos=False, eos=False)
    nats, result = slow_nats(llama, ids, 16), training.perplexity(llama, tokenizer, TEXT, batch_size)
    assert result.tokens == len(ids) and len(ids) % 16 > 0
    assert result.nats_per_token == pytest.approx(nats / len(ids), abs=1e-5)
    assert result.perplexity == pytest.approx(math.exp(nats / len(ids)), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / len(TEXT.encode()), rel=1e-5)


def test_a_tokenizer_that_cuts_sentences_does_not_cut_the_text(tokenizer: Tokenizer, tiny_tokenizer: Path):
    llama = random_llama(attention="causal")
    assert training.perplexity(llama, Tokenizer(4, tiny_tokenizer), TEXT) == training.perplexity(llama, tokenizer, TEXT)


def test_a_bidirectional_model_and_an_empty_text_are_refused(tokenizer: Tokenizer):
    with pytest.raises(UserError, match="attention causal"):
        training.perplexity(random_llama(attention="bidirectional"), tokenizer, TEXT)
    with pytest.raises(UserError, match="no text"):
        training.perplexity(random_llama(attention="causal"), tokenizer, "")


# ----------------------------------------------------------------------------------------------- the command


@pytest.fixture
def flags(tiny_checkpoint: Path, tmp_path: Path) -> list[str]:
    """Of the command on `text.txt`."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    named = ["--pretrained-model-path", tiny_checkpoint, "--attention", "causal", "--input", "text.txt"]
    return ["--option", "perplexity", *map(str, named)]


@pytest.mark.parametrize("more", [[], ["--kernels", "plain", "--batch_size", "3"], ["--precision", "bf16"]])
def test_the_command_prints_the_figures(flags: list[str], more: list[str], drive: Callable, tiny_tokenizer: Path):
    out = drive(*flags, *more)
    tokenizer = Tokenizer(tokenizer_model=tiny_tokenizer)
    expected = training.perplexity(random_llama(attention="causal"), tokenizer, TEXT)
    nats, bits, perplexity = map(
        float, re.search(r"nats a token :: (.*), bits a byte :: (.*)\nperplexity :: (.*)\n$", out).groups()
    )
    assert f"\n{expected.tokens} tokens in text.txt\n" in out
    tolerance = 2e-2 if "bf16" in more else 2e-4
    assert nats == pytest.approx(expected.nats_per_token, abs=tolerance)
    assert bits == pytest.approx(expected.bits_per_byte, abs=tolerance)
    assert perplexity == pytest.approx(math.exp(nats), rel=1e-3)
    assert drive(*flags, *more) == out  # nothing is random


def test_the_model_gets_the_kernels_of_the_flags(flags: list[str], drive: Callable, monkeypatch: pytest.MonkeyPatch):
    seen, compute_fast = [], runs.compute_fast

    def noting(model: Llama, compute: ComputeSettings, **purpose: bool) -> None:
        seen.append((compute.precision, compute.kernels, purpose))
        compute_fast(model, compute, **purpose)

    monkeypatch.setattr(runs, "compute_fast", noting)
    drive(*flags, "--precision", "bf16")
    assert seen == [("bf16", "auto", {"trains": False})]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--attention": "bidirectional"}, ["bidirectional", "--attention causal"]),
        ({"--attention": None}, ["bidirectional", "--attention causal"]),  # which the checkpoint does not declare
        ({"--input": None}, ["--option perplexity", "--input FILE"]),
        ({"--input": "absent.txt"}, ["--input absent.txt", "does not exist"]),
        ({"--input": "."}, ["--input .", "folder"]),
        ({"--input": "/dev/null"}, ["/dev/null is a device"]),  # /dev/zero does not end
        ({"--input": "empty.txt"}, ["empty.txt", "no text"]),
        ({"--input": "blank.txt"}, ["blank.txt", "no text"]),
        ({"--input": "latin.txt"}, ["latin.txt line 2", "UTF-8"]),
        ({"--max_sentence_len": "4"}, ["--max_sentence_len", "perplexity"]),
        ({"--output": "out.txt"}, ["--output", "perplexity"]),
    ],
)
def test_wrong_input_is_one_line(changes: dict, words: list[str], flags: list[str], tmp_path: Path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.txt").write_text(" \n\t\r\n")
    (tmp_path / "latin.txt").write_bytes("fine\ncaf\u00e9\n".encode("latin-1"))
    chosen = {**dict(zip(flags[::2], flags[1::2], strict=True)), **changes}
    with pytest.raises(UserError) as caught:
        drive_in(tmp_path, *(item for pair in chosen.items() if pair[1] is not None for item in pair))
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv", "t.tsv"])
def test_of_columns_the_texts_are_measured(tmp_path: Path, tiny_checkpoint: Path, name: str):
    (tmp_path / "t.txt").write_text("\n".join(SENTENCES))
    rows = [{"review": sentence, "stars": "1"} for sentence in SENTENCES]
    separator = "\t" if name == "t.tsv" else ","
    quoted = [separator.join(cell if name == "t.tsv" else f'"{cell}"' for cell in row.values()) for row in rows]
    lines = [json.dumps(row) for row in rows] if name == "t.jsonl" else [separator.join(rows[0]), *quoted]
    (tmp_path / name).write_text("\n".join(lines))
    given = ["--option", "perplexity", "--attention", "causal", "--pretrained-model-path", tiny_checkpoint, "--input"]
    of_lines = drive_in(tmp_path, *given, "t.txt").splitlines()[-2:]
    assert drive_in(tmp_path, *given, name, "--text-column", "review").splitlines()[-2:] == of_lines
    (tmp_path / "t.json").write_text("[]")
    with pytest.raises(UserError, match="t.json: one JSON text for the whole file is not read"):
        drive_in(tmp_path, *given, "t.json")
