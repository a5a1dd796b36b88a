"""A BERT in a table of experiments, beside a Llama: the same runs, figures and errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import random_llama, save_checkpoint
from error_helpers import refused
from small import our_directory

from advanced.experiments import __main__ as program
from advanced.experiments import cost, judging, rows, trial
from advanced.experiments.grid import Table
from advanced.experiments.models import model_of
from advanced.experiments.results import read_results
from bert.load import load_bert
from convert import hugging_face
from engine.families import load_llama
from engine.plan import ComputeSettings, checksum

TWO_KINDS = {
    "title": "Two kinds",
    "data": {"films": {"batch_size": 4, "epochs": 2}},
    "seeds": [1],
    "settings": {"attention": "causal", "lr": 0.003},
    "rows": [{"name": "plain"}, {"name": "ema", "method": "ema"}, {"name": "decoder", "checkpoint": "tiny.pt"}],
}


@pytest.fixture
def table(tmp_path: Path, films: dict[str, Path], tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Beside it, the directory `encoder` and the checkpoint `tiny.pt`."""
    monkeypatch.setattr(rows, "path_of", lambda data, name: str(films[name]))
    for module in (rows, judging):
        monkeypatch.setattr(module, "path_of", lambda data, name: str(films[name]))
    our_directory(tmp_path / "encoder")
    save_checkpoint(tmp_path / "tiny.pt", random_llama(1))
    (tmp_path / "tiny.model").write_bytes(tiny_checkpoint.with_suffix(".model").read_bytes())
    return write(tmp_path, TWO_KINDS)


def write(folder: Path, table: dict) -> Path:
    (path := folder / "two.json").write_text(json.dumps(table), encoding="utf-8")
    return path


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs the command with these flags, or the `main` of another one."""

    def run(*flags: object, main: Callable[[], None] = program.main) -> None:
        monkeypatch.setattr(sys, "argv", ["experiments", *map(str, flags)])
        main()

    return run


def test_an_encoder_and_a_decoder_stand_in_one_table(table: Path, tmp_path: Path):
    model = model_of(str(tmp_path / "encoder"), None, {})
    rows = Table.read(table).rows
    found = {}
    for row in rows:
        (each,) = Table.read(table).final(row, "films", None, model, {})
        found[row.name] = trial.run_trial(each, model, tmp_path, ComputeSettings(torch.device("cpu")))
        assert [*tmp_path.glob("*.resume")]  # until its line is written
        trial.clear(each, model, tmp_path)
    assert [found[name]["model"] for name in ("plain", "ema", "decoder")] == ["encoder", "encoder", "tiny"]
    assert found["plain"]["checksums"][0] == checksum(tmp_path / "encoder") == found["plain"]["weights"]
    encoder = load_bert(tmp_path / "encoder")
    whole = sum(parameter.numel() for parameter in encoder.parameters())
    classes = found["plain"]["trainable"] - whole
    assert classes == 2 * (encoder.config.dim + 1) and len(found["ema"]["dev"]["predictions"]) > 0
    assert found["plain"]["train_losses"] == found["ema"]["train_losses"]  # an average moves no weights
    assert len({each["key"] for each in found.values()}) == 3
    assert not [*tmp_path.glob("*.resume")]


def test_a_llama_in_a_directory_is_the_llama_of_its_file(table: Path, tmp_path: Path):
    """With the tokenizer in it; of the runs' figures, all but what they are known by."""
    llama, tokenizer = load_llama(tmp_path / "tiny.pt", tmp_path / "tiny.model", "causal")
    hugging_face.write(tmp_path / "folder", llama.state_dict(), llama.config, tokenizer)
    found = []
    for name in ("tiny.pt", "folder"):
        model = model_of(str(tmp_path / name), None, {})
        assert model.family == "llama"
        (each,) = Table.read(table).final(Table.read(table).rows[0], "films", None, model, {})
        found.append(trial.run_trial(each, model, tmp_path, ComputeSettings(torch.device("cpu"))))
    of_file, of_folder = found
    assert of_folder["checksums"][0] == checksum(tmp_path / "folder") != of_file["checksums"][0]
    assert of_folder["train_losses"] == pytest.approx(of_file["train_losses"], abs=1e-4)
    assert of_folder["dev"]["predictions"] == of_file["dev"]["predictions"]


def test_another_kind_of_model_is_refused_by_its_name(table: Path, tmp_path: Path):
    (tmp_path / "encoder" / "config.json").write_text('{"model_type": "t5"}', encoding="utf-8")
    words = "describes a model of type .t5.; known here are llama, bert, distilbert"
    refused(words, model_of, str(tmp_path / "encoder"), None, {})


def test_the_command_lists_what_can_be_started(
    table: Path, tmp_path: Path, call: Callable, capsys: pytest.CaptureFixture
):
    results = tmp_path / "two.jsonl"
    flags = [table, "--pretrained-model-path", tmp_path / "encoder", "--results", results, "--work", tmp_path / "work"]
    (tmp_path / "tiny.pt").unlink()
    call(*flags, "--list")
    printed = capsys.readouterr()
    assert "2 runs can be started now" in printed.out and "left out: decoder" in printed.err
    assert read_results([results]) == {}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"method": "prompt-tuning"}, "row other: prompt-tuning is not for models of the kind bert"),
        ({"option": "prompt"}, "row other: zero-shot methods ask a language model, which a bert is not"),
    ],
)
def test_what_is_not_for_a_bert_is_refused_before_anything_runs(
    table: Path, tmp_path: Path, call: Callable, row: dict, words: str
):
    path = write(tmp_path, {**TWO_KINDS, "rows": [{"name": "plain"}, {"name": "other", **row}]})
    refused(words, call, path, "--pretrained-model-path", tmp_path / "encoder", "--list")


def test_a_directory_has_its_own_vocabulary(table: Path, tmp_path: Path, call: Callable):
    flags = [table, "--pretrained-model-path", tmp_path / "encoder", "--list"]
    other = tmp_path / "tiny.model"
    refused("the vocabulary is that of --pretrained-model-path", call, *flags, "--tokenizer", other)
    (tmp_path / "encoder" / "vocab.txt").unlink()
    refused("holds no vocab.txt", call, *flags)


def test_the_cost_of_an_encoder_is_measured_beside_that_of_a_decoder(
    table: Path, tmp_path: Path, call: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Each row has its own parameters, with the classes; the first is the model itself."""
    monkeypatch.setattr(cost, "path_of", judging.path_of)
    monkeypatch.setattr(cost, "apart", lambda function, *arguments: function(*arguments))
    sizes = ["--batch_size", "2", "--steps", "1", "--rounds", "1"]
    models = ["--pretrained-model-path", tmp_path / "tiny.pt", "--others", tmp_path / "encoder"]
    call(*models, "--data", "films", *sizes, "--out", tmp_path / "cost.md", main=cost.main)
    text = (tmp_path / "cost.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    decoder, encoder = (line.split(" | ") for line in text.splitlines() if line.startswith(("| tiny", "| encoder")))
    classes = 2 * (load_bert(tmp_path / "encoder").config.dim + 1)
    whole = sum(parameter.numel() for parameter in load_bert(tmp_path / "encoder").parameters())
    assert encoder[1] == f"{whole + classes:,}" != decoder[1]
    assert all(float(column.split(" ")[0]) > 0 for column in (*decoder[2:4], *encoder[2:4]))


def test_methods_of_decoders_are_not_measured_on_an_encoder(table: Path, tmp_path: Path, call: Callable):
    flags = ["--pretrained-model-path", tmp_path / "encoder", "--methods", "prompt-finetune"]
    refused("prompt-finetune is not for models of the kind bert", call, *flags, main=cost.main)
