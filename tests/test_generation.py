"""`--option generate` beyond the two fixed texts: one more temperature, and a file of prompts."""

from __future__ import annotations

import csv
import io
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import drive_in
from error_helpers import TEXT_FLAGS

from engine import inference, streams
from engine.inference import batches_of_one_length, up_to_stop
from engine.weights import load_llama_model
from tokenizer import Tokenizer
from utils import UserError, prompt_suffix

PROMPTS = ["A film", "I liked it, and so did you", "So", "A book", "The end"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (path := tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS), encoding="utf-8")
    return path


def one_by_one(checkpoint: Path, prompt: str, attention: str, tokens: int) -> str:
    """The text at temperature 0, without driver, batch or kernels."""
    tokenizer = Tokenizer(None, str(checkpoint.with_suffix(".model")))
    idx = torch.tensor([tokenizer.encode(prompt, bos=True, eos=False)])
    llama = load_llama_model(checkpoint, attention=attention)
    return tokenizer.decode(llama.generate(idx, tokens, temperature=0.0)[0].tolist())


def test_a_text_that_ends_before_others_of_its_batch_ends_once_and_a_prompt_does_not_end_it():
    assert [up_to_stop(ids, 2, (7, 8)) for ids in ([7, 5, 9, 8, 8], [7, 5, 9, 6, 4], [7, 5, 7, 7])] == [
        [7, 5, 9, 8],
        [7, 5, 9, 6, 4],
        [7, 5, 7],
    ]


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_each_prompt_of_a_file_is_continued_as_if_alone(
    drive: Callable, tiny_checkpoint: Path, prompts: Path, tmp_path: Path, attention: str
):
    flags = ["--pretrained-model-path", tiny_checkpoint, "--attention", attention, "--max_new_tokens", 6]
    out = drive(*flags, "--prompt_file", prompts, "--output", tmp_path / "o.jsonl", "--batch_size", 2)
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines == [
        {"prompt": prompt, "temperature": 0.0, "text": one_by_one(tiny_checkpoint, prompt, attention, 6)}
        for prompt in PROMPTS
    ]
    assert f"wrote 5 texts to {tmp_path / 'o.jsonl'}\n" in out and not [*tmp_path.glob("generated-*")]


def test_standard_output_holds_the_lines_alone(
    drive: Callable, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, prompts: Path
):
    flags = ["--pretrained-model-path", tiny_checkpoint, "--prompt_file", prompts, "--max_new_tokens", 3]
    out = drive(*flags, "--temperature", 0.5, "--seed", 3)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["prompt"] for line in lines] == PROMPTS and {line["temperature"] for line in lines} == {0.5}
    assert out == drive(*flags, "--temperature", 0.5, "--seed", 3) != drive(*flags, "--temperature", 0.5, "--seed", 4)


def test_prompts_are_gathered_piece_by_piece_and_each_is_continued_once(
    drive: Callable, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):  # fmt: skip
    """Of a file that is longer than what is gathered; all that are too long are counted, and none that just fits."""
    tokenizer = Tokenizer(None, str(tiny_checkpoint.with_suffix(".model")))
    fits = next(text for text in ("a" * n for n in range(1, 99)) if len(tokenizer.encode(text, True, False)) == 64)
    prompts = ["So", fits, f"{fits}a", "A film", "So", f"{fits}aa", "The end"]
    (path := tmp_path / "p.txt").write_text("".join(f"{prompt}\n" for prompt in prompts), encoding="utf-8")
    flags = ["--pretrained-model-path", tiny_checkpoint, "--prompt_file", path, "--max_new_tokens", 2]
    monkeypatch.setattr(inference, "GATHERED", 1)
    out = drive(*flags, "--batch_size", 2, "--output", tmp_path / "o.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["prompt"] for line in lines] == prompts and f"wrote 7 texts to {tmp_path / 'o.jsonl'}\n" in out
    assert all(line["text"].startswith(line["prompt"]) for line in lines) and lines[0] == lines[4]
    assert "warning: 2 prompts are longer than max_seq_len=64 tokens" in capsys.readouterr().err


def test_a_table_of_texts_keeps_the_other_columns(drive: Callable, tiny_checkpoint: Path, tmp_path: Path):
    (path := tmp_path / "p.csv").write_text("id,text\n7,So\n8,The end\n", encoding="utf-8")
    flags = ["--pretrained-model-path", tiny_checkpoint, "--prompt_file", path, "--max_new_tokens", 2, "--output"]
    drive(*flags, tmp_path / "o.csv")
    rows = [*csv.DictReader(open(tmp_path / "o.csv", encoding="utf-8", newline=""))]
    assert [(row["id"], row["prompt"]) for row in rows] == [("7", "So"), ("8", "The end")]
    assert [*rows[0]] == ["prompt", "temperature", "text", "id"] and rows[0]["text"].startswith("So")
    drive(*flags, tmp_path / "o.txt")  # lines of JSON under any other name, as before
    lines = [json.loads(line) for line in (tmp_path / "o.txt").read_text(encoding="utf-8").splitlines()]
    assert [line | {"id": row["id"], "temperature": "0.0"} for line, row in zip(lines, rows, strict=True)] == rows


def test_letters_are_written_as_they_are(drive: Callable, tiny_checkpoint: Path, tmp_path: Path):
    (path := tmp_path / "p.txt").write_text("Ein schönes Stück\n", encoding="utf-8")
    out = drive("--pretrained-model-path", tiny_checkpoint, "--prompt_file", path, "--max_new_tokens", 1)
    assert '{"prompt": "Ein schönes Stück", "temperature": 0.0, "text": "Ein schönes Stück' in out


class Terminal(io.StringIO):
    """Keeps what was to be read each time that something was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.shown = threading.Event()

    def flush(self) -> None:
        self.seen.append(self.getvalue())
        if self.getvalue():
            self.shown.set()


def test_who_writes_one_prompt_gets_its_text_before_the_next(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(streams, "PATIENCE", 0.05)
    os.mkfifo(pipe := tmp_path / "pipe")
    terminal = Terminal()
    answered: list[bool] = []

    def write() -> None:
        with open(pipe, "wb", buffering=0) as file:
            file.write(b"So\n")
            answered.append(terminal.shown.wait(30))
            file.write(b"A film\n")

    (writer := threading.Thread(target=write, daemon=True)).start()
    flags = ["--pretrained-model-path", tiny_checkpoint, "--prompt_file", pipe, "--max_new_tokens", 2]
    lines = drive_in(tmp_path, *flags, stdout=terminal).splitlines()
    writer.join(30)
    assert answered == [True] and lines[0] in "".join(terminal.seen).splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["So", "A film"]


def test_no_text_is_made_that_nobody_reads(tiny_checkpoint: Path, prompts: Path, tmp_path: Path):
    """As after `| head -n 1`."""
    screen = io.StringIO()
    screen.has_reader = False
    flags = ["--pretrained-model-path", tiny_checkpoint, "--prompt_file", prompts, "--max_new_tokens", 2]
    assert len(drive_in(tmp_path, *flags, stdout=screen).splitlines()) == 1


def test_prompts_come_from_a_column_too(drive: Callable, tiny_checkpoint: Path, tmp_path: Path):
    (path := tmp_path / "p.csv").write_text('id,start\n1,"A film, that"\n', encoding="utf-8")
    flags = ["--pretrained-model-path", tiny_checkpoint, "--prompt_file", path, "--max_new_tokens", 2]
    assert json.loads(drive(*flags, "--text-column", "start"))["prompt"] == "A film, that"


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_beam_search_decodes_each_prompt(drive: Callable, tiny_checkpoint: Path, prompts: Path, attention: str):
    flags = ["--pretrained-model-path", tiny_checkpoint, "--attention", attention, "--max_new_tokens", 5]
    greedy = drive(*flags, "--prompt_file", prompts)
    assert (
        drive(*flags, "--prompt_file", prompts, "--beam", 1)
        == greedy
        != drive(*flags, "--prompt_file", prompts, "--beam", 4)
    )
    sampled = ["--prompt_file", prompts, "--temperature", 0.7]  # where nothing is searched for
    assert drive(*flags, *sampled, "--beam", 4) == drive(*flags, *sampled)


def test_prompts_beyond_the_model_are_counted(
    drive: Callable, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    (path := tmp_path / "p.txt").write_text("So\n" + "A film " * 600 + "\n", encoding="utf-8")
    drive("--pretrained-model-path", tiny_checkpoint, "--prompt_file", path, "--max_new_tokens", 1)
    assert "warning: one prompt is longer than max_seq_len=" in capsys.readouterr().err


def test_another_temperature_is_a_third_text(drive: Callable, tiny_checkpoint: Path, tmp_path: Path):
    """The two fixed texts are those of a run without it."""
    flags = ["--pretrained-model-path", tiny_checkpoint, "--prompt", "A film", "--max_new_tokens", 20, *TEXT_FLAGS]
    drive(*flags)
    fixed = {path.name: path.read_bytes() for path in tmp_path.glob("generated-*")}
    out = drive(*flags, "--temperature", 0.7)
    third = tmp_path / "generated-sentence-temp-0.7.txt"
    assert "Temperature is 0.7\n" in out and third.read_text(encoding="utf-8").startswith("A film")
    assert fixed == {path.name: path.read_bytes() for path in tmp_path.glob("generated-*") if path != third}


def test_only_a_prompt_longer_than_the_model_is_said_to_be_cut(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
):
    ids = tokenizer.encode("a film", bos=True, eos=False)
    inference.warn_of_changes("a film", ids, tokenizer, len(ids))
    assert capsys.readouterr().err == ""
    inference.warn_of_changes("a film", ids, tokenizer, len(ids) - 1)
    assert f"--prompt is {len(ids)} tokens long" in capsys.readouterr().err


def test_batches_hold_one_length():
    prompts = [[1] * length for length in (3, 2, 3, 3, 5, 2)]
    assert [*batches_of_one_length(prompts, 2)] == [[1, 5], [0, 2], [3], [4]]


@pytest.mark.parametrize(("flags", "words"), [
    (["--temperature", 1], "--temperature 1.0: the texts at temperature 0 and 1 are made in any case"),
    (["--temperature", -1], "--temperature -1.0: must be at least 0 and finite"),
    (["--output", "x"], "--output is for --prompt_file"),
    (["--prompt_file", "p", "--prompt", "x"], "--prompt is not for --prompt_file"),
    (["--prompt_file", "p", "--generated_sentence_low_temp_out", "x"], "--generated_sentence_low_temp_out is not for"),
    (["--prompt_file", "p", "--num_samples", 2], "--num_samples is not for --prompt_file"),
    (["--prompt_file", "nowhere.txt"], "--prompt_file nowhere.txt does not exist"),
    (["--option", "perplexity", "--prompt_file", "p"], "--prompt_file is for --option generate"),
    (["--question", "x"], "--question is for --option prompt"),
    (["--option", "prompt", "--question", " "], "--question must be a text in one line"),
    (["--option", "prompt", "--question", "a\nb"], "--question must be a text in one line"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(drive: Callable, flags: list, words: str):
    with pytest.raises(UserError) as raised:
        drive(*flags)
    assert words in str(raised.value)


def test_an_empty_line_is_named_and_nothing_is_written(drive: Callable, tiny_checkpoint: Path, tmp_path: Path):
    (path := tmp_path / "p.txt").write_text("So\n\nThe end\n", encoding="utf-8")
    with pytest.raises(UserError, match="p.txt line 2: the sentence is empty"):
        drive("--pretrained-model-path", tiny_checkpoint, "--prompt_file", path, "--output", tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_the_file_of_prompts_is_not_written_over(drive: Callable, tiny_checkpoint: Path, prompts: Path):
    before = prompts.read_bytes()
    with pytest.raises(UserError, match=r"^--output: .* is also --prompt_file; one of them needs another name$"):
        drive("--pretrained-model-path", tiny_checkpoint, "--prompt_file", prompts, "--output", prompts)
    assert prompts.read_bytes() == before


# ----------------------------------------------------------------------------------------------------- questions


@pytest.mark.parametrize(("question", "asked"), [
    ("Is it {labels}? It is ", "Is it sport, money, or tech? It is "),
    ("{labels}: {labels}", "sport, money, or tech: sport, money, or tech"),
    ("{0} {other} {: {{labels}}", "{0} {other} {: {sport, money, or tech}"),
    ("What is it?", "What is it?"),
])  # fmt: skip
def test_only_the_place_of_the_labels_is_filled_in(question: str, asked: str):
    assert prompt_suffix(["sport", "money", "tech"], question) == asked


def test_another_question_is_asked(tmp_path: Path, drive: Callable, classify_flags: Callable):
    """The course's own words, given as a question, change nothing; others are in the output and in the answers."""
    usual = drive(*classify_flags("prompt"))
    outputs = {path.name: path.read_bytes() for path in tmp_path.glob("*-output.txt")}
    drive(*classify_flags("prompt"), "--question", "Is this movie {labels}? This movie is ")
    assert outputs == {path.name: path.read_bytes() for path in tmp_path.glob("*-output.txt")}
    drive(*classify_flags("prompt"), "--question", "bad or good ? {labels}:")
    lines = (tmp_path / "films-dev-prompting-output.txt").read_text(encoding="utf-8").splitlines()
    assert all(line.endswith(" bad or good ? bad or good:") for line in lines) and "dev acc ::" in usual


def test_a_method_asks_the_question_or_says_why_not(tmp_path: Path, drive: Callable, classify_flags: Callable):
    flags = [*classify_flags("prompt"), "--attention", "causal", "--question", "Well, {labels}? "]
    names = {split: f"films-{split}-advanced-output.txt" for split in ("dev", "test")}
    for split, name in names.items():
        flags[flags.index(f"--{split}_out") + 1] = name
    drive(*flags, "--method", "direct", "--method-args", "words=poor+fine")
    lines = (tmp_path / names["dev"]).read_text(encoding="utf-8").splitlines()
    assert all(line.endswith(" Well, poor or fine?") for line in lines)
    with pytest.raises(UserError, match="the method channel asks nothing after a sentence"):
        drive(*flags, "--method", "channel")
    with pytest.raises(UserError, match="the method direct asks its template; give that or a question, not both"):
        drive(*flags, "--method", "direct", "--method-args", "template=So?")
