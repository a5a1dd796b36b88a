"""Saved runs: enough by themselves, opened by one function, and predicted with, line by line, however many come."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import ROOT, drive_in, hear_interrupts, random_llama
from error_helpers import check_one_error, stderr_lines

from classifier import LlamaEmbeddingClassifier, LlamaZeroShotClassifier
from engine import families, runs, streams, tables
from engine import runs as saved_runs
from engine.data import create_data
from engine.flags import get_args
from engine.plan import InputFile, Plan
from engine.runs import load_classifier, predict, record_of, save_classifier
from engine.storage import load_tensors, save_tensors
from tokenizer import Tokenizer
from utils import UserError, prompt_suffix

SOME = ["A warm little film", "the plot wanders off", "I laughed twice, by accident", "nothing happens", "cardboard"]


@pytest.fixture(scope="module", params=["bidirectional", "causal"])
def saved(request, tmp_path_factory: pytest.TempPathFactory, classify_flags: Callable) -> Path:
    """A folder with what a fine-tuning leaves behind: its model, its predictions."""
    folder = tmp_path_factory.mktemp(request.param)
    flags = ["--epochs", 6, "--lr", 0.005, "--batch_size", 4, "--attention", request.param, "--model_out", "best.pt"]
    drive_in(folder, *classify_flags("finetune"), *flags)
    labels = {line[0] for line in (folder / "films-dev-finetuning-output.txt").read_text().splitlines()}
    assert labels == {"0", "1"}, "all labels are alike, so what follows would prove nothing"
    assert sorted(os.listdir(folder)) == [
        "best.pt", "films-dev-finetuning-output.txt", "films-test-finetuning-output.txt"
    ]  # fmt: skip
    return folder


def predicted(folder: Path, *flags: object, text: str = "") -> str:
    """What `--option predict` prints, run in this process. text: on its standard input."""
    before = os.dup(0)
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
        try:
            return drive_in(folder, "--option", "predict", "--model", "best.pt", *flags)
        finally:
            os.dup2(before, 0)
            os.close(before)


# ------------------------------------------------------------------------------------------------------ saved runs


@pytest.mark.parametrize("saved", ["causal"], indirect=True)
def test_a_saved_run_needs_no_other_file(saved: Path, tmp_path: Path, films: dict[str, Path]):
    """On another machine: nothing but the code and the file."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "engine", tmp_path / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(saved / "best.pt", tmp_path / "elsewhere.pt")
    shutil.copy(films["dev"], tmp_path / "dev.txt")
    command = "run_llama.py --option predict --model elsewhere.pt --input dev.txt --output labels.txt --kernels plain"
    done = subprocess.run([sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "wrote 10 predictions to labels.txt\n", done.stderr
    assert (tmp_path / "labels.txt").read_bytes() == (saved / "films-dev-finetuning-output.txt").read_bytes()


def test_predictions_of_the_dev_file_are_the_runs_own(saved: Path, films: dict[str, Path], tmp_path: Path):
    own = (saved / "films-dev-finetuning-output.txt").read_text()
    bare, old_mac, marked = (tmp_path / name for name in ("bare.txt", "old.txt", "marked.txt"))
    bare.write_text("".join(f"{example.sentence}\n" for example in create_data(films["dev"])))
    old_mac.write_bytes(films["dev"].read_bytes().replace(b"\n", b"\r"))
    marked.write_bytes(b"\xef\xbb\xbf" + bare.read_bytes())
    for path in (films["dev"], bare, old_mac, marked):
        assert predicted(saved, "--input", path) == own, path
    assert predicted(saved, "--input", "-", text=bare.read_text()) == own
    shutil.copy(saved / "best.pt", tmp_path)
    (tmp_path / "-").write_text("another film\n")
    assert predicted(tmp_path, "--input", "-", text=bare.read_text()) == own  # standard input, whatever is called so
    assert predicted(saved, "--input", bare, "--kernels", "plain") == own


def test_probabilities_are_those_of_the_runs_own_batches(saved: Path, films: dict[str, Path]):
    """Which depend on the batch where the model is bidirectional."""
    model, about = load_classifier(saved / "best.pt")
    examples = create_data(films["dev"])
    dataset = families.encode_for(model, about.tokenizer, examples)
    with torch.inference_mode():
        expected = torch.cat([model(batch["token_ids"]).exp() for batch in dataset.loader(4)])
    sentences = [example.sentence for example in examples]
    own = torch.tensor([each.probabilities for each in predict(model, about, sentences)])
    other = torch.tensor([each.probabilities for each in predict(model, about, sentences, batch_size=3)])
    torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-4)
    assert torch.allclose(other, expected, atol=1e-4) == about.config.is_causal


def test_what_is_known_of_a_run_is_in_its_file(saved: Path, films: dict[str, Path], tiny_checkpoint: Path):
    model, about = load_classifier(saved / "best.pt")
    content = load_tensors(saved / "best.pt")
    assert about.label_names == ("bad", "good") and about.batch_size == 4 and about.prompt_suffix is None
    assert about.precision == "fp32" and about.config.attention == saved.name[: len(about.config.attention)]
    assert about.tokenizer.encode("a film", bos=True, eos=False) == Tokenizer(
        tokenizer_model=tiny_checkpoint.with_suffix(".model")
    ).encode("a film", bos=True, eos=False)
    plan = Plan(
        checkpoint=InputFile.of(tiny_checkpoint),
        tokenizer=InputFile.of(tiny_checkpoint.with_suffix(".model")),
        train=InputFile.of(films["train"]),
        dev=InputFile.of(films["dev"]),
        label_names=("bad", "good"),
        attention=about.config.attention,
        epochs=6,
        lr=0.005,
        batch_size=4,
    )
    assert about.identity == content["identity"] == plan.identity()
    assert about.dev_score == content["dev_score"] and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_plan_is_its_content():
    file = InputFile("0" * 64, "here/train.txt")
    plan = Plan(file, file, file, file, ("bad", "good"))
    moved = Plan(file, file, InputFile("0" * 64, "there/train.txt"), file, ("bad", "good"))
    assert plan == moved and hash(plan) == hash(moved) and plan.digest == moved.digest
    other = Plan(file, file, InputFile("1" * 64, "here/train.txt"), file, ("bad", "good"))
    assert plan != other and plan.digest != other.digest and re.fullmatch("[0-9a-f]{64}", plan.digest)
    with pytest.raises(AttributeError):
        plan.lr = 1.0


def test_a_plan_has_the_defaults_of_the_flags():
    flags = vars(get_args([]))
    names = ("attention", "seed", "epochs", "lr", "batch_size", "hidden_dropout_prob", "max_sentence_len", "precision")
    assert {name: getattr(Plan, name) for name in names} == {name: flags[name] for name in names}
    assert Plan.train_eval is not flags["no_train_eval"]


def test_a_label_word_classifier_is_saved_and_opened_as_well(tmp_path: Path, tokenizer: Tokenizer):
    names = ["bad", "warm little", "film"]
    for attention in ("bidirectional", "causal"):
        llama = random_llama(attention=attention)
        model = LlamaZeroShotClassifier(SimpleNamespace(num_labels=3), tokenizer, names, llama=llama)
        record = record_of(model, tokenizer, names, 2)
        save_classifier(tmp_path / "x.pt", model, record)
        opened, about = load_classifier(tmp_path / "x.pt")
        tokens = torch.tensor([[1, 5, 9], [1, 80, 3]])
        assert type(opened) is LlamaZeroShotClassifier and torch.equal(opened(tokens), model(tokens))
        (prediction,) = predict(opened, about, ["a film"])
        ids = tokenizer.encode(f"a film {prompt_suffix(names)}", bos=True, eos=False)
        assert prediction.label == model(torch.tensor([ids])).argmax().item()


def test_settings_of_the_text_are_kept(tmp_path: Path, classify_flags: Callable, films: dict[str, Path]):
    """--max_sentence_len, --precision and the batch size are those of the run, whatever the flags of predict are."""
    flags = ["--epochs", 1, "--max_sentence_len", 3, "--precision", "bf16", "--batch_size", 3, "--model_out", "best.pt"]
    drive_in(tmp_path, *classify_flags("finetune"), *flags)
    _, about = load_classifier(tmp_path / "best.pt")
    assert (about.tokenizer.max_len, about.precision, about.batch_size) == (3, "bf16", 3)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        compute_fast = runs.compute_fast
        patch.setattr(runs, "compute_fast", lambda *args: seen.append(args[1].precision) or compute_fast(*args))
        own = (tmp_path / "films-dev-finetuning-output.txt").read_text()
        assert predicted(tmp_path, "--input", films["dev"]) == own
    assert seen == ["bf16"]


# ------------------------------------------------------------------------------------------------------- streaming


class Slowly:
    """Sentences, with a pause (None) after each."""

    def __init__(self, texts: list[str]):
        self.texts, self.asked = texts, 0

    def __iter__(self) -> Iterator[str | None]:
        for text in self.texts:
            self.asked += 1
            yield text
            yield None


def untrained(tokenizer: Tokenizer, attention: str) -> tuple[LlamaEmbeddingClassifier, saved_runs.SavedRun]:
    settings = SimpleNamespace(num_labels=2, hidden_dropout_prob=0.3, option="finetune", pad_id=3)
    model = LlamaEmbeddingClassifier(settings, llama=random_llama(attention=attention)).eval()
    about = saved_runs.SavedRun(("bad", "good"), tokenizer, None, 2, "fp32", model.llama.config, {}, None, None)
    return model, about


def test_batches_are_full_and_in_order_where_they_matter(tokenizer: Tokenizer):
    """A bidirectional model meets the same batches however slowly the sentences come; a causal one does not wait."""
    for attention, expected in (("bidirectional", [2, 2, 1]), ("causal", [1] * 5)):
        model, about = untrained(tokenizer, attention)
        at_once, sizes, slowly = list(predict(model, about, SOME)), [], Slowly(SOME)
        model.register_forward_pre_hook(lambda _, inputs, sizes=sizes: sizes.append(len(inputs[0])))
        behind = [slowly.asked - index for index, _ in enumerate(predict(model, about, slowly), 1)]
        assert sizes == expected and max(behind) == (1 if attention == "bidirectional" else 0)
        slow = list(predict(model, about, Slowly(SOME)))
        assert [each.sentence for each in slow] == SOME == [each.sentence for each in at_once]
        for one, other in zip(slow, at_once, strict=True):
            assert one.label == other.label and one.probabilities == pytest.approx(other.probabilities, abs=1e-5)


def test_memory_does_not_grow_with_the_lines(tokenizer: Tokenizer):
    """No more sentences are asked for than fit some batches before the first prediction comes out."""
    (model, about), asked = untrained(tokenizer, "causal"), []

    def endless() -> Iterator[str]:
        while True:
            asked.append(1)
            yield "a film"

    with pytest.raises(TypeError, match="one text, 'a film'; give a list"):
        next(predict(model, about, "a film"))
    predictions = predict(model, about, endless())
    for count in range(1, 500):
        next(predictions)
        assert len(asked) <= count + 2 * saved_runs.BUCKETED


def predicting(folder: Path, **how: object) -> subprocess.Popen:
    """`--option predict` on what is written to its standard input."""
    command = [sys.executable, str(ROOT / "run_llama.py"), "--option", "predict", "--model", "best.pt", "--input", "-"]
    return subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **how)


@pytest.mark.parametrize("saved", ["bidirectional"], indirect=True)
def test_lines_are_answered_while_the_input_is_still_being_written(saved: Path):
    """As a pipe of one's own: what was written is answered before more is. A bidirectional model needs full batches."""
    with predicting(saved, text=True) as process:
        for batch in range(3):
            for number in range(4):  # the run's batch size
                process.stdin.write(f"a film {batch} {number}\n")
            process.stdin.flush()
            for number in range(4):
                assert re.fullmatch(rf"[01] \|\|\| a film {batch} {number}\n", process.stdout.readline())
        process.stdin.write("the last one, without a line end")
        process.stdin.close()
        assert process.stdout.readline().endswith("the last one, without a line end\n")
        assert process.wait(timeout=60) == 0


@pytest.mark.slow
def test_a_steady_stream_is_answered(saved: Path):
    """Lines that come without a pause as long as one that is waited for."""
    with predicting(saved, bufsize=0) as process:

        def write() -> None:
            with contextlib.suppress(OSError, ValueError):  # the pipe has no other end any more, or was closed
                while True:
                    process.stdin.write(b"a film\n")
                    time.sleep(0.05)

        threading.Thread(target=write, daemon=True).start()
        assert process.stdout.readline().endswith(b"a film\n")
        process.stdout.close()  # the reader has gone: it ends, although more comes
        assert process.wait(timeout=60) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("first", "status"), [("\n", 2), ("a film\n", 130)], ids=["a bad line", "an interrupt"])
def test_it_ends_in_one_line_while_standard_input_is_open(saved: Path, first: str, status: int):
    with predicting(saved, text=True, stderr=subprocess.PIPE, preexec_fn=hear_interrupts) as process:
        process.stdin.write(first * 4)
        process.stdin.flush()
        if status == 130:
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == status
        check_one_error(status, process.stderr.read(), expected=status)


def test_a_long_line_in_many_pieces_takes_time_in_proportion_to_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("utils.PIECE", 7)

    def seconds(length: int) -> float:
        path = tmp_path / "long.txt"
        path.write_bytes("é".encode() * length + b"\r\nnext\rlast")
        start = time.process_time()
        assert [*tables.read_sentences(str(path))] == ["é" * length, "next", "last"]
        return time.process_time() - start

    # 16 times as long; were all pieces looked at for each, 200 times the seconds
    assert seconds(160_000) < 50 * min(seconds(10_000) for _ in range(5))


def test_a_line_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "MOST_BYTES", 1 << 20)
    with pytest.raises(UserError, match="^/dev/zero has a line of more than 1 MiB"):
        list(tables.read_sentences("/dev/zero"))


def test_an_error_of_the_system_ends_the_reading():
    pieces: queue.Queue[bytes | OSError] = queue.Queue()
    broken = SimpleNamespace(read=mock.Mock(side_effect=[b"first\n", OSError(errno.EIO, "Input/output error")]))
    streams._read_pieces(broken, pieces)
    assert pieces.get_nowait() == b"first\n" and pieces.get_nowait().errno == errno.EIO and pieces.empty()


def test_a_pipe_that_pauses_within_a_line_is_read_as_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "PATIENCE", 0.05)
    os.mkfifo(tmp_path / "pipe")

    def write() -> None:
        with open(tmp_path / "pipe", "wb", buffering=0) as file:
            for piece in (b"first\nsec", "ond é".encode()[:-1], "é".encode()[1:] + b"\r\n", b"third"):
                file.write(piece)
                time.sleep(0.2)

    threading.Thread(target=write, daemon=True).start()
    read = list(tables.read_sentences(str(tmp_path / "pipe")))
    assert [each for each in read if each] == ["first", "second é", "third"] and None in read


# --------------------------------------------------------------------------------------------------- what is written


def test_probabilities_come_with_tabs_between_them(saved: Path, tmp_path: Path):
    text = "a film\nwith a\ttab\n"
    lines = predicted(saved, "--input", "-", "--probabilities", text=text).splitlines()
    for line, sentence in zip(lines, ("a film", "with a tab"), strict=True):
        label, *probabilities, shown = line.split("\t")
        numbers = [float(each) for each in probabilities]
        assert shown == sentence and sum(numbers) == pytest.approx(1, abs=1e-5) and len(numbers) == 2
        assert int(label) == numbers.index(max(numbers))
    assert "with a\ttab" in predicted(saved, "--input", "-", text=text)


BAD = {
    "an empty line": ("good\n\nbad\n", "line 2: the sentence is empty"),
    "not UTF-8": (b"good\nbad\nb\xe9d\n", "line 3: not UTF-8 text"),
    "a NUL": ("good\nb\0d\n", "line 2: not UTF-8 text, it has a NUL"),
    "nothing": ("", "holds no sentences"),
    "a data file with a line that is none": ("1 ||| good\nbad\n", "line 2: no ' ||| ' between label and sentence"),
    "a label that is none": ("1 ||| good\nx ||| bad\n", "line 2: the label 'x' is not a whole number"),
}


@pytest.mark.parametrize(("content", "words"), BAD.values(), ids=BAD)
def test_a_bad_line_is_named_and_nothing_is_half_written(saved: Path, tmp_path: Path, content: str | bytes, words: str):
    path = tmp_path / "bad.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    out = tmp_path / "labels.txt"
    out.write_text("earlier work")
    with pytest.raises(UserError, match=re.escape(f"bad.txt {words}")):
        predicted(saved, "--input", path, "--output", out)
    assert out.read_text() == "earlier work" and sorted(os.listdir(tmp_path)) == ["bad.txt", "labels.txt"]


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl"])
def test_a_table_keeps_the_columns_of_the_input(saved: Path, tmp_path: Path, ending: str):
    """Also of another format; a reader of the standard library finds every cell again."""
    rows = [
        {"id": 7, "review": "a fine, \"warm\" film", "stars": "5"}, {"id": 8, "review": "x\ty\nz", "stars": None},
        {"id": None, "review": "bad", "stars": ["=1", 2]},
    ]  # fmt: skip
    (path := tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    given = ["--input", path, "--text-column", "review", "--names", "--probabilities"]
    labels = [line.split("\t")[0] for line in predicted(saved, *given).splitlines()]
    assert {*labels} <= {"bad", "good"}
    out = tmp_path / f"out{ending}"
    assert predicted(saved, *given, "--output", out) == f"wrote 3 predictions to {out}\n"
    text = out.read_text(encoding="utf-8")
    if ending == ".jsonl":
        found = [json.loads(line) for line in text.splitlines()]
        assert [{name: row[name] for name in rows[0]} for row in found] == rows
    else:
        plain = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if ending == ".tsv" else {}
        found = [*csv.DictReader(io.StringIO(text, newline=""), **plain)]
        cells = [["7", rows[0]["review"], "5"], ["8", "x\ty\nz", ""], ["", "bad", '["=1", 2]']]
        assert [[row[name].replace("\t", " ").replace("\n", " ") for name in rows[0]] for row in found] == [
            [cell.replace("\t", " ").replace("\n", " ") for cell in row] for row in cells
        ]
    assert [*found[0]] == [*rows[0], "prediction", "probability_bad", "probability_good"]
    assert [row["prediction"] for row in found] == labels
    with pytest.raises(UserError, match="has a column 'prediction', which the output adds"):
        predicted(saved, "--input", out, "--text-column", "review")


def test_lines_become_a_table_and_predictions_may_be_names(saved: Path, tmp_path: Path):
    out = tmp_path / "out.csv"
    assert predicted(saved, "--input", "-", "--output", out, text='1 ||| a "film"\n0 ||| a, b\n').startswith("wrote 2")
    rows = [*csv.DictReader(io.StringIO(out.read_text(encoding="utf-8"), newline=""))]
    numbers = [
        line.partition(" ||| ")[0] for line in predicted(saved, "--input", "-", text='a "film"\na, b\n').splitlines()
    ]
    assert rows == [{"text": text, "prediction": n} for text, n in zip(('a "film"', "a, b"), numbers, strict=True)]
    names = [
        line.partition(" ||| ")[0] for line in predicted(saved, "--input", "-", "--names", text="x\ny\n").splitlines()
    ]
    assert {*names} <= {"bad", "good"}


def test_a_dash_is_standard_output_and_the_count_goes_beside_it(
    saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    plain = predicted(saved, "--input", "-", text="a film\n")
    assert predicted(saved, "--input", "-", "--output", "-", text="a film\n") == plain
    assert "wrote 1 predictions to standard output\n" in capfd.readouterr().err and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("to_stdout", [False, True])
def test_what_is_read_is_not_written_over(saved: Path, tmp_path: Path, to_stdout: bool):
    (path := tmp_path / "f.txt").write_text("a film\n")
    command = [sys.executable, ROOT / "run_llama.py", "--option", "predict", "--model", saved / "best.pt"]
    more = ["--input", path] if to_stdout else ["--input", "-", "--output", path]
    with open(path, "ab") as out, open(path, "rb") as given:
        done = subprocess.run(
            [*command, *more], stdin=given, stdout=out if to_stdout else None, stderr=subprocess.PIPE, text=True
        )
    check_one_error(done.returncode, done.stderr, "--input", "standard output" if to_stdout else "standard input")
    assert path.read_text() == "a film\n"


def test_long_sentences_are_counted_in_one_warning(saved: Path, capfd: pytest.CaptureFixture):
    predicted(saved, "--input", "-", text="slow " * 200 + "\na film\n" + "film " * 200 + "\n")
    (warning,) = [line for line in stderr_lines(capfd.readouterr().err) if line.startswith("warning")]
    what = "cut" if saved.name.startswith("causal") else "used whole, as the reference does"
    assert warning == f"warning: 2 sentences are longer than max_seq_len=64 tokens; {what}"


FLAGS = {
    "no model": (["--input", "-"], "--option predict needs --model FILE"),
    "no input": (["--model", "best.pt"], "--option predict needs --input FILE"),
    "absent model": (["--model", "absent.pt", "--input", "-"], "--model absent.pt does not exist"),
    "absent input": (["--model", "best.pt", "--input", "absent"], "--input absent does not exist"),
    "a folder": (["--model", "best.pt", "--input", "."], "--input . is a folder"),
    "output is the model": (["--model", "best.pt", "--input", "-", "--output", "best.pt"], "best.pt is also --model"),
    "a flag of the base": (["--model", "best.pt", "--input", "-", "--attention", "causal"], "--attention is for"),
    "another option's flag": (["--option", "prompt", "--input", "-"], "--input is for --option predict and perplexity"),
    "no saved run": (["--model", "films-dev-finetuning-output.txt", "--input", "-"], "not a PyTorch checkpoint"),
}


@pytest.mark.parametrize(("flags", "words"), FLAGS.values(), ids=FLAGS)
def test_mistakes_are_one_line(saved: Path, flags: list[str], words: str):
    before = sorted(os.listdir(saved))
    with pytest.raises(UserError, match=re.escape(words)) as error:
        drive_in(saved, "--option", "predict", *flags)
    assert "\n" not in str(error.value) and sorted(os.listdir(saved)) == before


CHANGES = {
    "a pretrained checkpoint": lambda saved: {"model": saved["model"], "model_args": {}},
    "a resume point": lambda saved: {**saved, "kind": "resume point"},
    "no tokenizer": lambda saved: {**saved, "tokenizer": None},
    "another tokenizer": lambda saved: {**saved, "tokenizer": torch.zeros(9, dtype=torch.uint8)},
    "more labels": lambda saved: {**saved, "label_names": ["a", "b", "c"]},
    "no batch": lambda saved: {**saved, "batch_size": 0},
    "a length that is a word": lambda saved: {**saved, "max_sentence_len": "abc"},
    "a length below 1": lambda saved: {**saved, "max_sentence_len": -3},
    "a suffix that is a number": lambda saved: {**saved, "prompt_suffix": 5},
    "another precision": lambda saved: {**saved, "precision": "nonsense"},
    "no head of that name": lambda saved: {**saved, "model_config": {**saved["model_config"], "head": "none"}},
    "another shape": lambda saved: changed_args(saved, dim=64),
    "a million layers": lambda saved: changed_args(saved, n_layers=10**6),
    "a huge feed-forward": lambda saved: changed_args(saved, hidden_dim=2**30),
    "a huge vocabulary": lambda saved: changed_args(saved, vocab_size=2**30),
    "a missing weight": lambda saved: {**saved, "model": dict(list(saved["model"].items())[:-1])},
    "numbers that are none": lambda saved: {
        **saved,
        "model": {**saved["model"], "classifier_head.bias": torch.tensor([0.0, float("nan")])},
    },  # fmt: skip
    "a method that is not here": lambda saved: {**saved, "methods": {"x": {"settings": {}, "tensors": {}}}},
}


def changed_args(saved: dict, **changes: int) -> dict:
    config = saved["model_config"]
    return {**saved, "model_config": {**config, "model_args": {**config["model_args"], **changes}}}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_is_no_saved_run_is_refused_in_one_line(saved: Path, tmp_path: Path, change: Callable):
    content = load_tensors(saved / "best.pt", mmap=False)
    save_tensors(tmp_path / "odd.pt", change(content))
    start = time.process_time()
    with pytest.raises(UserError, match=r"odd\.pt") as error:
        load_classifier(tmp_path / "odd.pt")
    assert "\n" not in str(error.value) and time.process_time() - start < 5


def test_it_runs_in_one_process(saved: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="--option predict runs in one process"):
        predicted(saved, "--input", "-")


def test_a_model_name_that_is_chosen_holds_model_and_resume_point(tmp_path: Path, classify_flags: Callable):
    flags = [*classify_flags("finetune"), "--epochs", 2, "--model_out", "mine.pt"]
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        fine_tune = runs.fine_tune

        def stopped(*inputs, **named):
            yield next(fine_tune(*inputs, **named))
            raise KeyboardInterrupt

        patch.setattr(runs, "fine_tune", stopped)
        drive_in(tmp_path, *flags)
    assert sorted(os.listdir(tmp_path)) == ["mine.pt", "mine.resume"]
    assert "resuming from mine.resume" in drive_in(tmp_path, *flags, "--resume")
    done = subprocess.run(
        [sys.executable, ROOT / "run_llama.py", *map(str, flags), "--model_out", "a-dev-finetuning-output.txt/x.pt"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    check_one_error(done.returncode, done.stderr, "--model_out", "does not exist")
