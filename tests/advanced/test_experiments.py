"""The grid: which runs there are, that none is done twice, what is chosen on what, and the statistics of its tables."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FIGURES, ROOT, asset, save_checkpoint
from sklearn.metrics import f1_score

from advanced.experiments import __main__ as program
from advanced.experiments import grid, report, runner, summary, trial
from advanced.experiments.grid import Row, Table, Trial
from advanced.experiments.models import Model
from advanced.experiments.render import difference_in_words, render
from advanced.experiments.results import (
    Difference,
    append_result,
    compare,
    interval,
    macro_f1_bootstrap,
    paired_bootstrap,
    read_results,
    results_beside,
)
from advanced.experiments.schema import SETTINGS
from config import PRESETS, LlamaConfig
from engine.data import create_data, pack, unpack
from engine.plan import ComputeSettings
from llama import Llama
from utils import UserError, sha256_of

PLACE = ComputeSettings(torch.device("cpu"), kernels="plain")
CONTENT = {
    "title": "A trial",
    "data": {"films": {"epochs": 1, "batch_size": 4}},
    "shots": [None, 4],
    "seeds": [1, 2],
    "settings": {"hold_out": 0.25, "attention": "causal", "lr": 0.01},
    "rows": [
        {"name": "plain", "tune": {"lr": [0.01, 0.02]}},
        {"name": "lora", "method": "lora", "arguments": ["rank=2"], "tune": {"alpha": [4, 8]}, "shots": [4]},
        {"name": "asked", "option": "prompt", "seeds": [1]},
    ],
}


@pytest.fixture
def model(tiny_checkpoint: Path, films: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Model:
    """The tiny model, and its data under the names of a data set."""
    monkeypatch.setattr(grid, "path_of", lambda data, split: str(films[split]))
    monkeypatch.setattr(trial, "path_of", lambda data, split: str(films[split]))
    monkeypatch.setattr("advanced.experiments.render.path_of", lambda data, split: str(films[split]))
    return Model(str(tiny_checkpoint), str(tiny_checkpoint.with_suffix(".model")))


PRESETS_42M = Table.read(program.HERE / "tables" / "stories42M.json")


def table_of(folder: Path, **changes) -> Table:
    path = folder / "trial.json"
    path.write_text(json.dumps({**CONTENT, **changes}), encoding="utf-8")
    return Table.read(path)


def scored(trials: list[Trial], model: Model, score: Callable[[Trial], float]) -> dict[str, dict]:
    return {each.key(model): {"key": each.key(model), "selection": score(each)} for each in trials}


# --------------------------------------------------------------------------------------------------------- runs


def test_what_is_tuned_comes_first_and_the_best_on_held_out_data_is_taken(tmp_path: Path, model: Model):
    table = table_of(tmp_path)
    row = table.rows[0]
    tuning = table.tuning(row, "films", 4)
    assert [dict(each.settings)["lr"] for each in tuning] == [0.01, 0.02]
    assert {each.phase for each in tuning} == {"tune"}
    assert table.final(row, "films", 4, model, {}) is None
    done = scored(tuning, model, lambda each: dict(each.settings)["lr"])
    final = table.final(row, "films", 4, model, done)
    assert [each.seed for each in final] == [1, 2] and all(dict(each.settings)["lr"] == 0.02 for each in final)
    equal = scored(tuning, model, lambda each: 0.5)
    assert dict(table.final(row, "films", 4, model, equal)[0].settings)["lr"] == 0.01
    lora = table.rows[1]
    done = scored(table.tuning(lora, "films", 4), model, lambda each: 1.0 if "alpha=8" in each.arguments else 0.0)
    assert table.final(lora, "films", 4, model, done)[0].arguments == ("rank=2", "alpha=8")


def test_the_mean_over_tuning_seeds_decides(tmp_path: Path, model: Model):
    table = table_of(tmp_path, tune_seeds=[7, 8])
    row = table.rows[0]
    scores = {(0.01, 7): 0.9, (0.01, 8): 0.1, (0.02, 7): 0.6, (0.02, 8): 0.6}
    done = scored(table.tuning(row, "films", 4), model, lambda each: scores[dict(each.settings)["lr"], each.seed])
    assert dict(table.final(row, "films", 4, model, done)[0].settings)["lr"] == 0.02


def test_a_table_without_seeds_is_all_choice(tmp_path: Path, model: Model):
    rows = [{"name": "plain", "tune": {"lr": [0.01]}}, {"name": "ema", "method": "ema", "tune": {"lr": [0.01, 0.02]}}]
    table = table_of(tmp_path, rows=rows, shots=[None], seeds=[])
    wanted = table.ready(model, {})
    assert [(each.row, each.phase) for each in wanted] == [("plain", "tune"), ("ema", "tune"), ("ema", "tune")]
    done = scored(wanted, model, lambda each: 0.25)
    assert table.ready(model, done) == []
    text = render(table, model, done)
    assert "| ema | films, all | lr 0.01: .250, lr 0.02: .250 |" in text and "Majority" not in text
    with pytest.raises(UserError, match="none of these rows has a final run"):
        report.text_of(table, model, done, ["python"])


def test_a_single_value_is_measured_on_held_out_data_too_where_that_is_asked_for(tmp_path: Path, model: Model):
    """So that rows can be compared without a look at dev. The final runs do not wait for it."""
    one, none = {"name": "one", "tune": {"lr": [0.01]}}, {"name": "none"}
    table = table_of(tmp_path, rows=[one, none], shots=[None], baseline="none")
    wanted = table.ready(model, {}, only_tune=True)
    assert [(each.row, each.phase) for each in wanted] == [("one", "tune")]
    assert {(each.row, each.phase) for each in table.ready(model, {})} == {("one", "final"), ("none", "final")}
    assert not table.ready(model, scored(wanted, model, lambda each: 0.5), only_tune=True)


def test_ready_runs_are_those_that_are_not_done_seed_by_seed(tmp_path: Path, model: Model):
    table = table_of(tmp_path)
    ready = table.ready(model, {})
    kinds = [(each.row, each.phase) for each in ready]
    assert kinds.count(("plain", "tune")) == 4 and kinds.count(("lora", "tune")) == 2  # two sizes, and one
    assert kinds.count(("asked", "final")) == 1 and ("plain", "final") not in kinds
    done = scored(ready, model, lambda each: 0.5)
    after = table.ready(model, done)
    assert [each.seed for each in after] == [1, 1, 1, 2, 2, 2] and {each.phase for each in after} == {"final"}
    assert not table.ready(model, done | scored(after, model, lambda each: 0.5))


def test_a_run_is_told_from_others_by_what_decides_it_and_by_nothing_else(
    tmp_path: Path, model: Model, films: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    table = table_of(tmp_path)
    (one, *_) = table.tuning(table.rows[0], "films", 4)
    same = {**vars(one)}
    assert Trial(**{**same, "table": "other", "row": "renamed"}).key(model) == one.key(model)
    changes = {"seed": 9, "shots": 5, "phase": "final", "settings": (*one.settings[:-1], ("precision", "bf16"))}
    changes |= {"method": "ema"}
    keys = {Trial(**{**same, name: value}).key(model) for name, value in changes.items()}
    assert len(keys | {one.key(model)}) == 1 + len(changes)
    assert one.key(Model(model.tokenizer, model.tokenizer)) != one.key(model)
    key, names = one.key(model), json.loads(films["label_names"].read_text())
    for written, is_same in ((json.dumps(names, indent=4), True), (json.dumps(names[::-1]), False)):
        (path := tmp_path / "names.json").write_text(written)
        monkeypatch.setattr(grid, "path_of", lambda _, split: str({**films, "label_names": path}[split]))  # noqa: B023
        assert (one.key(model) == key) == is_same


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": [{"name": "a"}, {"name": "a"}]}, "two rows have one name"),
        ({"rows": [{"name": "a", "method": "nothing"}]}, "no method 'nothing'"),
        ({"rows": [{"name": "a", "method": "lora", "tune": {"r": [1]}}]}, "no argument of that name"),
        ({"rows": [{"name": "a", "wrong": 1}]}, "row 'a': there is no 'wrong' here"),
        ({"rows": [{"method": "ema"}]}, "row 1: it has no name"),
        ({"rows": [1]}, "rows must be a list of rows"),
        ({"rows": []}, "rows must be a list of rows"),
        ({"rows": [{"name": "a", "tune": {"lr": 1}}]}, "row 'a': tune: lr must be a list of values"),
        ({"rows": [{"name": "a", "tune": {"lr": ["abc"]}}]}, "row 'a': tune: lr must be a number above 0, not 'abc'"),
        ({"rows": [{"name": "a", "tune": {"rank": [1]}}]}, "no setting rank, and no method that it could be of"),
        ({"rows": [{"name": "a", "arguments": ["rank=2"]}]}, "it has arguments, and no method"),
        ({"rows": [{"name": "a", "option": "prompt", "shots": [4]}]}, "shots are of training sentences"),
        ({"rows": [{"name": "a", "settings": {"precision": "int8"}}]}, "precision int8 rounds the weights"),
        ({"rows": [{"name": "a", "tune": {"precision": ["fp32", "int8"]}}]}, "precision int8 rounds the weights"),
        ({"data": {"films": {"precision": "int8"}}}, "row plain: precision int8 rounds the weights"),
        ({"rows": [{"name": "a", "data": ["other"]}]}, "row 'a': the table has no data set other"),
        ({"rows": [{"name": "a", "option": "generate"}]}, "option must be finetune or prompt"),
        ({"rows": [{"name": "a", "arguments": "rank=2"}]}, "arguments must be a list of texts"),
        ({"settings": {"lrr": 1}}, "settings: there is no 'lrr' here; there are lr, epochs"),
        ({"settings": {"epochs": "1"}}, "settings: epochs must be a whole number of at least 1, not '1'"),
        ({"settings": {"epochs": True}}, "settings: epochs must be a whole number"),
        ({"settings": {"lr": -1}}, "lr must be a number above 0"),
        ({"settings": {"lr": math.nan}}, "lr must be a number above 0"),
        ({"settings": {"lr": 10**400}}, "lr must be a number above 0"),
        ({"settings": {"hold_out": 2}}, "hold_out must be a number from 0 to below 1"),
        ({"settings": {"hold_out": 1}}, "hold_out must be a number from 0 to below 1"),
        ({"settings": {"hidden_dropout_prob": 1.0}}, "hidden_dropout_prob must be a number from 0 to below 1"),
        ({"settings": {"precision": "fp8"}}, "precision must be one of fp32"),
        ({"data": []}, "data must be an object"),
        ({"data": {}}, "it names no data set"),
        ({"data": {"films": {"batch_size": 2**31}}}, "data, films: batch_size must be a whole number of at least 1"),
        ({"data": {"films": {"batch_size": 0}}}, "data, films: batch_size must be a whole number of at least 1"),
        ({"data": {"films": 1}}, "data: films must be an object"),
        ({"seeds": 1}, "seeds must be a list of seeds"),
        ({"seeds": ["a"]}, "seeds must be a list of seeds"),
        ({"seeds": []}, "row 'asked': in a table without seeds a row has tune, and no seeds"),
        ({"seeds": [], "rows": [{"name": "plain"}]}, "row 'plain': in a table without seeds"),
        ({"seeds": [1, 1]}, "seeds must be a list of seeds from 0 to 2.32 - 1, none of them twice"),
        ({"shots": 4}, "shots must be a list"),
        ({"shots": [-1]}, "shots must be a list"),
        ({"baseline": "nothing"}, "no row nothing, which is the baseline"),
        ({"settings": {"hold_out": 0.0}}, "with hold_out 0 its tune would choose on dev"),
        (
            {"rows": [{"name": "a", "method": "lora, early-stopping", "settings": {"hold_out": 0}}]},
            "row a: with hold_out 0 early-stopping would choose on dev",
        ),
        ({"rows": [{"name": "a", "method": "padding-mask"}]}, "row a: padding-mask does nothing in a causal model"),
        (
            {
                "rows": [
                    {"name": "a", "method": "smart", "tune": {"attention": ["causal", "bidirectional"]}},
                    {"name": "b", "option": "prompt", "method": "pmi", "settings": {"attention": "bidirectional"}},
                ]
            },
            "row b: pmi reads likelihoods",
        ),
    ],
)
def test_a_wrong_table_is_refused_before_anything_is_run(tmp_path: Path, changes: dict, words: str):
    with pytest.raises(UserError, match=words):
        table_of(tmp_path, **changes)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not JSON"), ("[]", "no JSON object"), ("{}", "it has no title"), ("[" * 10**5, "is not JSON")],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str, words: str):
    (path := tmp_path / "table.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=words) as error:
        Table.read(path)
    assert "\n" not in str(error.value)


def test_every_setting_of_a_run_is_checked():
    assert SETTINGS.keys() == grid.PLAN_SETTINGS.keys()
    assert all(SETTINGS[name].fits(value) for name, value in grid.PLAN_SETTINGS.items())


def test_a_line_that_a_kill_has_cut_is_done_again(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "results.jsonl"
    about = {"model": "m", "checksums": ["1", "2"]}
    append_result(path, {"key": "a", **about})
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"key": "b", "x"')
    assert read_results([path, tmp_path / "absent"]).keys() == {"a"} and "left out" in capsys.readouterr().err
    append_result(path, {"key": "c", **about})
    with pytest.raises(UserError, match="line 2 is not a result"):  # somebody should look at it
        read_results([path])


@pytest.mark.parametrize("line", ['{"key": "a"}', '{"model": "m", "checksums": []}', '["key"]', "\xff"])
def test_a_line_of_another_kind_is_refused(tmp_path: Path, line: str):
    path = tmp_path / "results.jsonl"
    path.write_bytes(f"{line}\n".encode("latin-1"))
    append_result(path, {"key": "c", "model": "m", "checksums": ["1", "2"]})
    with pytest.raises(UserError, match="line 1 is not a result|not UTF-8"):
        read_results([path])


# ------------------------------------------------------------------------------------------------------ one run


@pytest.mark.parametrize("method", ["", "lora"])
def test_a_run_has_the_figures_that_the_driver_prints(
    tmp_path: Path, model: Model, drive: Callable, classify_flags: Callable, method: str
):
    rows = [{"name": "row", "method": method, "arguments": ["rank=2"] if method else []}]
    table = table_of(tmp_path, rows=rows, data={"films": {"epochs": 3, "batch_size": 4}})
    (one, *_) = table.final(table.rows[0], "films", None, model, {})
    result = trial.run_trial(one, model, tmp_path, PLACE)
    kind = "advanced" if method else "finetuning"
    flags = ["--dev_out", f"films-dev-{kind}-output.txt", "--test_out", f"films-test-{kind}-output.txt"]
    flags += ["--method", method, "--method-args", "rank=2"] if method else []
    flags += ["--hold_out", 0.25, "--seed", 1, "--lr", 0.01, "--epochs", 3, "--batch_size", 4, "--attention", "causal"]
    out = drive(*classify_flags("finetune"), *flags, "--no_train_eval", "--kernels", "plain")
    scores = [line.rpartition(":: ")[2] for line in out.splitlines() if line.startswith("epoch ") and "::" in line]
    assert [f"{score:.3f}" for score in result["epoch_scores"]] == scores and "held-out acc" in out
    assert f"dev acc :: {result['dev']['accuracy']:.3f}" in FIGURES.findall(out)
    (macro,) = re.findall(r"dev macro-F1 :: (.*)", out)
    assert f"{result['dev']['macro_f1']:.3f}" == macro
    written = (tmp_path / f"films-dev-{kind}-output.txt").read_text(encoding="utf-8").splitlines()
    assert tuple(result["checksums"]) == model.checksums and result["weights"] == sha256_of(model.checkpoint)
    assert unpack(result["dev"]["predictions"]) == [int(line[0]) for line in written]
    assert len([*tmp_path.glob(f"{result['key']}*")]) == 2
    trial.clear(one, model, tmp_path)
    assert not [*tmp_path.glob(f"{result['key']}*")]  # weights do not stay when the figures are kept
    json.dumps(result)


def test_a_run_that_was_stopped_goes_on_from_its_last_epoch(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
):
    table = table_of(tmp_path, rows=[{"name": "plain"}], data={"films": {"epochs": 3, "batch_size": 4}})
    (one, *_) = table.final(table.rows[0], "films", None, model, {})
    undisturbed = trial.run_trial(one, model, tmp_path, PLACE)
    trial.clear(one, model, tmp_path)
    from engine import runs

    fine_tune, begun = runs.fine_tune, []

    def stopping(*inputs, history, **named):
        begun.append(len(history))
        for result in fine_tune(*inputs, history=history, **named):
            yield result
            if len(begun) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(runs, "fine_tune", stopping)
    with pytest.raises(KeyboardInterrupt):
        trial.run_trial(one, model, tmp_path, PLACE)
    resumed = trial.run_trial(one, model, tmp_path, PLACE)
    assert begun == [0, 1]
    changing = ("seconds", "wall_seconds", "peak_mb")
    assert {k: v for k, v in resumed.items() if k not in changing} == {
        k: v for k, v in undisturbed.items() if k not in changing
    }


def test_what_another_version_left_is_not_gone_on_from(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """The identity of a run has entries that an older version did not write, or had others: the run starts anew."""
    table = table_of(tmp_path, rows=[{"name": "plain"}], data={"films": {"epochs": 2, "batch_size": 4}})
    (one, *_) = table.final(table.rows[0], "films", None, model, {})
    undisturbed = trial.run_trial(one, model, tmp_path, PLACE)
    (point,) = tmp_path.glob("*.resume")
    content = torch.load(point)
    content["identity"]["a setting of old"] = 1
    torch.save(content, point)
    capsys.readouterr()
    anew = trial.run_trial(one, model, tmp_path, PLACE)
    assert "belongs to a run with another a setting of old; this one starts anew" in capsys.readouterr().err
    assert anew["train_losses"] == undisturbed["train_losses"] and len(anew["train_losses"]) == 2


def test_tuning_does_not_look_at_dev_and_test(tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch):
    table = table_of(tmp_path)
    asked = table.trial(table.rows[2], "films", None, 1, "tune", {})
    for one in (table.tuning(table.rows[0], "films", 4)[0], asked):
        result = trial.run_trial(one, model, tmp_path, PLACE)
        assert "selection" in result and not {"dev", "test"} & result.keys()


def test_a_test_file_without_gold_labels_is_not_classified(
    tmp_path: Path, model: Model, films: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    placeholders = tmp_path / "placeholders.txt"
    lines = (f"0 ||| {example.sentence}\n" for example in create_data(films["test"]))
    placeholders.write_text("".join(lines), encoding="utf-8")
    monkeypatch.setattr(trial, "path_of", lambda data, split: str({**films, "test": placeholders}[split]))
    table = table_of(tmp_path)
    (asked,) = table.final(table.rows[2], "films", None, model, {})
    result = trial.run_trial(asked, model, tmp_path, PLACE)
    assert "dev" in result and "test" not in result


@pytest.mark.slow
def test_the_program_runs_what_is_left_and_nothing_twice(
    tmp_path: Path, tiny_checkpoint: Path, films: dict[str, Path], run: Callable
):
    (tmp_path / "data").mkdir()
    for split in ("train", "dev", "test"):
        (tmp_path / f"data/films-{split}.txt").write_bytes(films[split].read_bytes())
    (tmp_path / "data/films-label-mapping.json").write_bytes(films["label_names"].read_bytes())
    table_of(tmp_path, rows=CONTENT["rows"][:1], shots=[4])
    command = ["-m", "advanced.experiments", "trial.json", "--pretrained-model-path", tiny_checkpoint]
    command += ["--results", "r.jsonl", "--work", "work"]
    for expected in (4, 0):
        done = run_module(command, tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("done:") == expected
    keys = [json.loads(line)["key"] for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert len(keys) == len(set(keys)) == 4 and not list((tmp_path / "work").iterdir())


class Threads(ThreadPoolExecutor):
    """Stands for processes."""

    def __init__(self, workers: int, **how):
        super().__init__(workers)


def test_a_run_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    rows = [{"name": "bad", "seeds": [1, 2]}, {"name": "good", "method": "ema"}]
    table, path = table_of(tmp_path, rows=rows, shots=[4]), tmp_path / "r.jsonl"
    calls = []

    def compute(one: Trial, *where) -> dict:
        calls.append(one.row)
        if one.row == "bad":
            raise UserError("the loss is nan")
        return {"key": one.key(model), "model": model.name, "checksums": model.checksums, "selection": 0.5}

    monkeypatch.setattr(runner, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(runner, "compute_trial", compute)
    running = runner.Runner(lambda: table.ready(model, read_results([path])), model, path, tmp_path, "cpu", 2)
    with pytest.raises(UserError, match="2 runs failed, for example: final bad on films .4 a class., seed [12]: .*nan"):
        running.run()
    assert sorted(calls) == ["bad", "bad", "good", "good"] and len(read_results([path])) == 2
    out, err = capsys.readouterr()
    assert out.count("done:") == 2 and out.count("start:") == 4 and err.count("failed: final bad") == 2
    assert "2 runs done, 2 failed, 0 that can be started now are left" in out
    assert not list(tmp_path.glob("*.lock"))


def test_a_run_that_another_table_has_done_is_taken_over(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Its tuning settles which final runs there are; those that the other table has are not run either."""
    row = {"method": "lora", "arguments": ["rank=2"], "tune": {"lr": [0.01, 0.02]}}
    other = table_of(tmp_path, rows=[{**row, "name": "low rank", "arguments": ["rank=2", "alpha=4"]}], shots=[4])
    results = tmp_path / "results"
    results.mkdir()
    lines = scored(other.tuning(other.rows[0], "films", 4), model, lambda each: dict(each.settings)["lr"])
    lines |= scored(other.final(other.rows[0], "films", 4, model, lines)[:1], model, lambda each: 0.5)
    for line in lines.values():
        append_result(results / f"other-{model.name}.jsonl", {**line, "model": model.name, "checksums": [], "row": "x"})
    text = 'no result\n{"key": "x"}\n"key model checksums"\n'
    (results / f"notes-{model.name}.jsonl").write_text(text, encoding="utf-8")

    ran = []

    def compute(one: Trial, *where) -> dict:
        ran.append((one.phase, one.seed, dict(one.settings)["lr"]))
        return {"key": one.key(model), "model": model.name, "checksums": model.checksums, "row": one.row}

    monkeypatch.setattr(runner, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(runner, "compute_trial", compute)
    table_of(tmp_path, rows=[{**row, "name": "plain", "arguments": ["alpha=4", "rank=2"]}], shots=[4])
    command = ["experiments", str(tmp_path / "trial.json"), "--pretrained-model-path", model.checkpoint]
    path = results / f"trial-{model.name}.jsonl"
    monkeypatch.setattr("sys.argv", [*command, "--results", str(path), "--list"])
    program.main()
    assert "1 runs can be started now" in capsys.readouterr().out and not path.exists()
    again = results / "again.jsonl"
    again_left = partial(Table.read(tmp_path / "trial.json").ready, model)
    runner.take_over(lambda: again_left(read_results([again])), model, again, tmp_path)
    assert len(read_results([again])) == capsys.readouterr().out.count("taken over from another table: ") == 3
    for expected in (3, 0):
        monkeypatch.setattr("sys.argv", [*command, "--results", str(path), "--work", str(tmp_path / "work")])
        program.main()
        assert capsys.readouterr().out.count("taken over from another table: ") == expected
    assert ran == [("final", 2, 0.02)]
    done = read_results([path])
    assert len(path.read_text().splitlines()) == len(done) == 4 and {*lines} < {*done}
    assert all(line["row"] == "plain" for line in done.values())
    assert all(done[key]["arguments"][:2] == ["alpha=4", "rank=2"] for key in lines)
    assert {done[key]["data"] for key in lines} == {"films"} and not list((tmp_path / "work").iterdir())


def test_results_beside_are_those_of_other_tables_of_the_checkpoint(tmp_path: Path):
    own = tmp_path / "own-a[1].jsonl"
    for number, name in enumerate(("own-a[1]", "other-a[1]", "other-a1", "other-b")):
        append_result(tmp_path / f"{name}.jsonl", {"key": number, "model": "a[1]", "checksums": []})
    assert [*results_beside(own, "a[1]")] == [1]


def test_a_run_that_another_table_ends_meanwhile_is_taken_over_by_one_process(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
):
    """Also where it is not this process: a run that somebody holds is left to him."""
    table, path = table_of(tmp_path, rows=[{"name": "plain"}], shots=[4]), tmp_path / f"trial-{model.name}.jsonl"
    first, second = table.ready(model, {})
    held, ran = runner.NameLock(tmp_path / f"{second.key(model)}.lock"), []

    def line(one: Trial) -> dict:
        return {"key": one.key(model), "model": model.name, "checksums": model.checksums, "row": "of the other"}

    def compute(one: Trial, *where) -> dict:
        ran.append(one.seed)
        held.release()
        append_result(tmp_path / f"other-{model.name}.jsonl", line(second))
        return line(one)

    append_result(tmp_path / f"other-{model.name}.jsonl", line(second))
    assert held.acquire() is None

    def left() -> list[Trial]:
        return table.ready(model, read_results([path]))

    runner.take_over(left, model, path, tmp_path)
    assert not path.exists()
    monkeypatch.setattr(runner, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(runner, "compute_trial", compute)
    runner.Runner(left, model, path, tmp_path, "cpu", 1).run()
    done = read_results([path])
    assert ran == [1] and len(path.read_text().splitlines()) == 2
    assert [done[one.key(model)]["row"] for one in (first, second)] == ["of the other", "plain"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "0"], "--workers 0: must be at least 1"),
        (["--workers", "-1"], "at least 1"),
        (["--minutes", "0"], "--minutes 0.0: must be above 0"),
        (["--minutes", "nan"], "must be above 0 and finite"),
        (["--results", "."], "must end in .jsonl"),
        (["--results", "trial.json"], "must end in .jsonl"),
        (["--results", "folder.jsonl"], "is a folder"),
        (["--report", "dev.txt"], "must end in .md"),
        (["--report", "absent/r.md"], "does not exist"),
        (["--render", "--list"], "--list and --render cannot be combined"),
        (["--report", "r.md", "--html", "p.html"], "--report and --html cannot be combined"),
        (["--tune", "--render"], "--tune says which runs are done, and --render does none"),
        (["--only", "nope"], "has no row nope; it has plain, lora, asked"),
    ],
)
def test_a_flag_that_makes_no_sense_is_one_line(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, flags: list[str], words: str
):
    table_of(tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["experiments", "trial.json", "--pretrained-model-path", model.checkpoint, *flags])
    with pytest.raises(UserError, match=words):
        program.main()


PARENT = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from advanced.experiments.trial import end_with_parent
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(60)
"""


def test_runs_end_when_the_program_is_killed(tmp_path: Path):
    (tmp_path / "parent.py").write_text(PARENT, encoding="utf-8")
    settings = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, tmp_path / "parent.py"], env=settings, stdout=subprocess.PIPE) as parent:
        assert int(parent.stdout.readline()) != parent.pid
        parent.kill()
        parent.communicate(timeout=20)  # ends when nobody holds its output any more, a child neither


def run_module(command: list, folder: Path):
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, env=settings, capture_output=True, text=True, timeout=300
    )


# --------------------------------------------------------------------------------------------------- statistics


def test_with_one_seed_the_bootstrap_has_the_standard_error_of_a_mean():
    drawing = np.random.default_rng(1)
    better, base = drawing.random((1, 900)) < 0.6, drawing.random((1, 900)) < 0.5
    difference = paired_bootstrap(better, base)
    values = better[0].astype(float) - base[0]
    error = values.std(ddof=1) / math.sqrt(900)
    assert difference.mean == pytest.approx(values.mean())
    assert difference.error == pytest.approx(error, rel=0.08)
    assert difference.low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert difference.is_beyond_noise


def test_seeds_that_differ_widen_the_interval_and_equal_methods_do_not_differ():
    drawing = np.random.default_rng(2)
    base = drawing.random((5, 400)) < 0.5
    steady = base | (drawing.random((5, 400)) < 0.1)
    moody = base.copy()
    moody[:2] |= drawing.random((2, 400)) < 0.25  # the same gain on average, in two seeds of five
    narrow, wide = paired_bootstrap(steady, base), paired_bootstrap(moody, base)
    assert wide.mean == pytest.approx(narrow.mean, abs=0.02) and wide.error > 1.5 * narrow.error
    same = paired_bootstrap(base, base)
    assert tuple(same[:4]) == (0, 0, 0, 0) and not same.is_beyond_noise


def test_macro_f1_knows_a_class_that_only_the_baseline_says():
    labels, twos = np.array([0, 1, 0, 1]), np.full((1, 4), 2)
    assert macro_f1_bootstrap(labels[None], twos, labels, draws=2).mean == pytest.approx(2 / 3)  # of three classes


def test_macro_f1_is_computed_anew_of_each_draw():
    """A slow version: sentences and seeds drawn as lists, scikit-learn's figure of each."""
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 3, 60)
    base = np.where(rng.random((3, 60)) < 0.5, labels, rng.integers(0, 3, (3, 60)))
    better = np.where(rng.random((3, 60)) < 0.8, labels, 2)
    score = partial(f1_score, average="macro", labels=[0, 1, 2], zero_division=0)
    for against in (base, None):
        found = macro_f1_bootstrap(better, against, labels, draws=50, seed=9)
        drawing, drawn = np.random.default_rng(9), []
        for _ in range(50):
            sentences, seeds = drawing.integers(0, 60, 60), drawing.integers(0, 3, 3)
            gains = [
                score(labels[sentences], better[seed][sentences])
                - (0 if against is None else score(labels[sentences], against[seed][sentences]))
                for seed in seeds
            ]
            drawn.append(np.mean(gains))
        means = [np.mean([score(labels, row) for row in rows]) for rows in (better, base)]
        assert found.mean == pytest.approx(means[0] - (0 if against is None else means[1]))
        assert found.error == pytest.approx(np.std(drawn, ddof=1))
        assert (found.low, found.high) == pytest.approx(tuple(np.quantile(drawn, (0.025, 0.975))))
    ours, theirs = (
        {seed: {"trainable": 1, "dev": {"predictions": pack(row.tolist())}} for seed, row in enumerate(rows)}
        for rows in (better, base)
    )
    assert compare(ours, theirs, "dev", labels, "macro_f1") == macro_f1_bootstrap(better, base, labels)
    assert interval(ours, "dev", labels, "macro_f1") == macro_f1_bootstrap(better, None, labels)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_class_that_nobody_predicts_counts_in_macro_f1(is_alone: bool):
    labels, better, base = np.array([0, 1, 2, 0]), np.array([[0, 1, 1, 0]]), np.array([[0, 0, 1, 0]])
    ours, theirs = (f1_score(labels, row[0], labels=[0, 1, 2], average="macro") for row in (better, base))
    found = macro_f1_bootstrap(better, None if is_alone else base, labels)
    assert found.mean == pytest.approx(ours if is_alone else ours - theirs)


def test_a_row_that_is_compared_with_none_has_an_interval_of_its_own():
    """Of what is not trained, the closed form of a share; of one or two seeds of what is trained, none."""
    labels = np.random.default_rng(3).integers(0, 2, 900)
    predictions = np.where(np.arange(900) < 540, labels, 1 - labels)  # .6 are right
    run = {"dev": {"predictions": pack(predictions.tolist())}}
    found, error = interval({1: run}, "dev", labels), math.sqrt(0.6 * 0.4 / 900)
    assert (found.low, found.high) == pytest.approx((0.6 - 1.96 * error, 0.6 + 1.96 * error), abs=0.15 * error)
    assert interval({1: run}, "test", labels) is None
    trained = {seed: {**run, "trainable": 7} for seed in (1, 2, 3)}
    assert interval(trained, "dev", labels).low == pytest.approx(found.low, abs=0.1 * error)
    assert interval({1: trained[1], 2: trained[2]}, "dev", labels) is None


def test_one_or_two_seeds_of_what_is_trained_are_never_beyond_noise():
    """Of what is not trained there is no other seed."""
    labels = [0, 1] * 100
    right, wrong = ({"dev": {"predictions": pack(answers)}} for answers in (labels, labels[::-1]))
    trained = [{**each, "trainable": 5} for each in (right, wrong)]
    assert compare({1: right}, {1: wrong}, "dev", labels).is_beyond_noise
    assert not compare({1: trained[0]}, {1: trained[1]}, "dev", labels).is_beyond_noise
    for seeds, is_beyond in ((2, False), (3, True)):
        several = [dict.fromkeys(range(seeds), each) for each in trained]
        assert compare(*several, "dev", labels).is_beyond_noise == is_beyond
    assert not compare(several[0], {2: trained[1]}, "dev", labels).is_beyond_noise
    for one, other in ((trained[0], wrong), (right, trained[1])):  # one side is trained, the other only asked
        assert not compare({1: one}, {1: other}, "dev", labels).is_beyond_noise


def test_methods_are_compared_on_the_seeds_that_both_have():
    labels = [0, 1, 0, 1]
    ours = {seed: {"dev": {"predictions": pack([0, 1, 0, 1])}} for seed in (1, 2)}
    theirs = {seed: {"dev": {"predictions": pack([0, 1, 1, 1])}} for seed in (2, 3)}
    assert compare(ours, theirs, "dev", labels).mean == pytest.approx(0.25)
    assert compare(ours, {}, "dev", labels) is None


# --------------------------------------------------------------------------------------------------------- tables


def test_the_table_has_means_deviations_differences_and_says_what_is_missing(
    tmp_path: Path, model: Model, films: dict[str, Path]
):
    labels = [each.label for each in create_data(films["dev"])]
    rows = [{"name": "plain"}, {"name": "ema", "method": "ema"}, {"name": "lora", "method": "lora"}]
    table = table_of(tmp_path, rows=rows, shots=[None], seeds=[1, 2])
    done = {}
    for row, wrong in ((table.rows[0], (3, 5)), (table.rows[1], (1, 1))):
        for one, count in zip(table.final(row, "films", None, model, {}), wrong, strict=True):
            answers = [1 - label if index < count else label for index, label in enumerate(labels)]
            scores = {"accuracy": 1 - count / 10, "macro_f1": 0.5, "predictions": pack(answers)}
            result = {"trainable": 1234, "seconds": 7.4, "dev": scores, "test": scores}
            done[one.key(model)] = {"key": one.key(model), **result}
    text = render(table, model, done)
    plain, ema = (line for line in text.splitlines() if line.startswith(("| plain", "| ema")))
    assert plain.startswith("| plain | 1,234 | 2 | .600 ± .141 | .500 ± .000 |  | .600 ± .141 |") and "| 7 |" in plain
    assert "| +0.300 [" in ema and "Majority class: dev .500, test .500." in text
    assert "Missing: 2 runs (lora 2)." in text and "| lora" not in text


def test_results_are_rendered_without_the_weights_that_they_come_from(
    tmp_path: Path, model: Model, finished: tuple[Table, dict[str, dict]], monkeypatch: pytest.MonkeyPatch
):
    table, done = finished
    away = Model(str(tmp_path / "gone.pt"), "", {"gone": model.checksums})
    text = render(table, away, done)
    assert text == render(table, model, done).replace(f"`{model.name}`", "`gone`") and "| ema" in text
    with pytest.raises(UserError, match="gone.pt does not exist"):
        render(table, Model(away.checkpoint, ""), done)
    with open(tmp_path / "r.jsonl", "w", encoding="utf-8") as file:
        lines = ({**result, "model": "gone", "checksums": model.checksums} for result in done.values())
        file.write("".join(f"{json.dumps(line)}\n" for line in lines))
    command = ["experiments", str(tmp_path / "trial.json"), "--pretrained-model-path", "gone.pt", "--render"]
    monkeypatch.setattr("sys.argv", [*command, "--results", str(tmp_path / "r.jsonl")])
    monkeypatch.setattr(program, "can_plot", lambda: False)
    program.main()
    assert (tmp_path / "r.md").read_text(encoding="utf-8") == text
    program.main()  # its own page is written anew
    monkeypatch.setattr("sys.argv", [*command, "--results", str(tmp_path / "r.jsonl"), "--only", "ema"])
    program.main()
    assert "| mixed" not in (tmp_path / "r-part.md").read_text(encoding="utf-8")
    assert (tmp_path / "r.md").read_text(encoding="utf-8") == text
    (tmp_path / "r-part.md").unlink()
    monkeypatch.setattr("sys.argv", [*command, "--results", str(tmp_path / "r.jsonl"), "--baseline", "ema"])
    program.main()
    compared = (tmp_path / "r-part.md").read_text(encoding="utf-8")
    assert re.search(r"^\| plain .*\*\*-0.400 ", compared, flags=re.MULTILINE)  # what ema is above plain
    assert "| mixed" in compared and (tmp_path / "r.md").read_text(encoding="utf-8") == text
    (tmp_path / "r-part.md").unlink()
    monkeypatch.setattr("sys.argv", [*command, "--results", str(tmp_path / "r.jsonl"), "--data", "films"])
    program.main()
    assert (tmp_path / "r-part.md").is_file()
    (tmp_path / "r-part.md").write_text("# My notes\n", encoding="utf-8")
    with pytest.raises(UserError, match="r-part.md is there already and has another title; .* another --results"):
        program.main()


def test_runs_of_a_model_that_was_made_again_are_not_done_again_and_the_table_says_so(
    model: Model, finished: tuple[Table, dict[str, dict]]
):
    table, done = finished
    assert "was made" not in render(table, model, done)
    path, settings = Path(model.checkpoint), {"lr": 0.1, "device": "cpu"}
    keys = []
    for settings["device"] in ("cpu", "cuda"):
        state = torch.load(path, weights_only=True)
        state["model"]["norm.weight"] += 1e-6
        torch.save(state, path)
        record = {"settings": settings, "made_of": {"text": ["1"]}, "weights": sha256_of(path)}
        path.with_suffix(".json").write_text(json.dumps(record), encoding="utf-8")
        keys.append(table.final(table.rows[0], "films", None, model, done)[0].key(model))
    assert keys[0] == keys[1] not in done
    lines = [{**result, "model": "base", "weights": str(number % 3)} for number, result in enumerate(done.values())]
    text = render(table, model, done | {str(number): line for number, line in enumerate(lines)})
    assert "`base` was made 3 times by the same command; weights differ by rounding." in text


def test_a_row_that_starts_from_an_absent_checkpoint_is_left_out(
    tmp_path: Path, model: Model, capsys: pytest.CaptureFixture
):
    rows = [{"name": "plain"}, {"name": "adapted", "checkpoint": "{model}-adapted.pt"}]
    table = table_of(tmp_path, rows=rows)
    assert [row.name for row in table.without_unknown(model).rows] == ["plain"]
    assert "left out: adapted" in capsys.readouterr().err
    known = Model(model.checkpoint, model.tokenizer, {f"{model.name}-adapted": model.checksums})
    assert table.without_unknown(known) == table
    assert [row.name for row in table.without_absent(known).rows] == ["plain"]


def test_rows_of_a_checkpoint_that_is_here_are_run_without_the_tables_own(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Where that one is known from results; from those of another table, too."""
    for name in (model.checkpoint, model.tokenizer):
        shutil.copy(name, tmp_path)
    rows = [{"name": "plain"}, {"name": "ema", "method": "ema"}, {"name": "own", "checkpoint": f"{model.name}.pt"}]
    table, path = table_of(tmp_path, rows=rows, shots=[4]), tmp_path / "gone.pt"
    gone = Model(str(path), "", {"gone": model.checksums})
    assert [row.name for row in table.without_absent(gone).rows] == ["own"]
    assert re.search("left out: plain, ema, starting from .*gone.pt, which is not here", capsys.readouterr().err)
    with pytest.raises(UserError, match="gone.pt does not exist"):
        table.only(["ema"]).without_absent(gone)
    line = {"key": "k", "model": "gone", "checksums": model.checksums}
    command = ["experiments", str(tmp_path / "trial.json"), "--pretrained-model-path", str(path), "--list"]
    monkeypatch.setattr("sys.argv", [*command, "--results", str(tmp_path / "trial-gone.jsonl")])
    with pytest.raises(UserError, match="gone.pt does not exist"):
        program.main()
    append_result(tmp_path / "other-gone.jsonl", line)
    program.main()
    assert "2 runs can be started now" in capsys.readouterr().out
    none = replace(table, rows=())
    assert none.without_absent(gone) == none
    (tmp_path / f"{model.name}.model").unlink()
    with pytest.raises(UserError, match=f"{model.name}.pt has no tokenizer beside it; name one with --tokenizer"):
        program.main()
    monkeypatch.setattr("sys.argv", [*sys.argv, "--tokenizer", model.tokenizer])
    program.main()
    assert "2 runs can be started now" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*sys.argv[:-1], str(tmp_path / "absent.model")])
    with pytest.raises(UserError, match="--tokenizer .*absent.model does not exist"):
        program.main()


def test_what_other_tables_have_done_needs_no_checkpoint(tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch):
    table, path = table_of(tmp_path, rows=[{"name": "plain"}], shots=[4]), tmp_path / "trial-gone.jsonl"
    gone = Model(str(tmp_path / "gone.pt"), "", {"gone": model.checksums})
    (first, _) = table.ready(gone, {})
    line = {"key": first.key(gone), "model": "gone", "checksums": model.checksums}
    append_result(tmp_path / "other-gone.jsonl", line)
    command = ["experiments", str(tmp_path / "trial.json"), "--pretrained-model-path", gone.checkpoint]
    monkeypatch.setattr("sys.argv", [*command, "--results", str(path), "--work", str(tmp_path / "work")])
    with pytest.raises(UserError, match="gone.pt does not exist"):
        program.main()
    assert [*read_results([path])] == [first.key(gone)]


def three_tables(folder: Path) -> None:
    """With seeds of their own, so that none takes over what another has done."""
    (folder / "tables").mkdir()
    for number, name in enumerate(("first", "second", "third")):
        table_of(folder, rows=[{"name": "plain"}], shots=[4], seeds=[2 * number, 2 * number + 1])
        (folder / f"tables/{name}.json").write_bytes((folder / "trial.json").read_bytes())


def test_several_tables_are_done_one_after_the_other(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """What goes wrong in one does not stop the next, and is said at the end."""

    def compute(one: Trial, *where) -> dict:
        if one.table != "second":
            raise UserError("the loss is nan")
        return {"key": one.key(model), "model": model.name, "checksums": model.checksums}

    monkeypatch.setattr(runner, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(runner, "compute_trial", compute)
    monkeypatch.setattr(program, "HERE", tmp_path)
    three_tables(tmp_path)
    command = ["experiments", "first", "second", "third", "--pretrained-model-path", model.checkpoint]
    command += ["--work", str(tmp_path / "work")]
    for flags, said in ((["--list"], "2 runs can be started"), (["--minutes", "1e-9"], "0 runs done, 0 failed, 2")):
        monkeypatch.setattr("sys.argv", [*command, *flags])
        program.main()
        out = capsys.readouterr().out
        assert out.count(said) == 3 and re.findall("^table (.*)$", out, re.MULTILINE) == ["first", "second", "third"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(UserError, match="^of 3 tables 2 failed: first, third$"):
        program.main()
    said = capsys.readouterr().err
    assert all(f"warning: {name}: 2 runs failed, for example: final plain" in said for name in ("first", "third"))
    assert len(read_results([tmp_path / f"results/second-{model.name}.jsonl"])) == 2


def test_the_minutes_are_those_of_all_tables(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """The first one uses them up."""
    now = [0.0]

    def compute(one: Trial, *where) -> dict:
        now[0] += 120
        return {"key": one.key(model), "model": model.name, "checksums": model.checksums}

    monkeypatch.setattr(runner, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(runner, "compute_trial", compute)
    monkeypatch.setattr(program, "HERE", tmp_path)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    three_tables(tmp_path)
    command = ["experiments", "first", "second", "--pretrained-model-path", model.checkpoint, "--minutes", "1"]
    monkeypatch.setattr("sys.argv", [*command, "--work", str(tmp_path / "work")])
    program.main()
    first, second = (line for line in capsys.readouterr().out.splitlines() if "runs done" in line)
    assert first.startswith("1 runs done, 0 failed, 1") and second.startswith("0 runs done")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((f"first second {flag}", f"{flag.split()[0]} is for one table, not for first, second") for flag in (
            "--results r.jsonl", "--only plain", "--baseline plain", "--report r.md", "--html p.html"
        )),
        ("first second first", "a table is named twice: first, second, first"),
        ("first nothing", "there is no table nothing; there are first, second, third"),
    ],
)  # fmt: skip
def test_of_several_tables_nothing_is_begun_where_one_cannot_be(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, words: str, said: str
):
    monkeypatch.setattr(program, "HERE", tmp_path)
    three_tables(tmp_path)
    monkeypatch.setattr("sys.argv", ["experiments", *words.split(), "--pretrained-model-path", model.checkpoint])
    with pytest.raises(UserError, match=f"^{said}$"):
        program.main()
    assert not (tmp_path / "results").exists()


def test_what_was_tried_is_shown_and_can_be_all_that_is_run(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    table = table_of(tmp_path, tune_seeds=[5, 6], shots=[4])
    done = scored(table.tuning(table.rows[0], "films", 4), model, lambda each: 40 * dict(each.settings)["lr"])
    mixed = table_of(tmp_path, rows=[{"name": "a", "tune": {"attention": ["causal"], "max_sentence_len": [None, 9]}}])
    scores = scored(mixed.tuning(mixed.rows[0], "films", 4), model, lambda each: 0.5)
    assert "| attention causal, max_sentence_len None: .500, attention causal, max_sentence_len 9: .500 |" in render(
        mixed, model, scores
    )
    table = table_of(tmp_path, tune_seeds=[5, 6], shots=[4])
    assert "| plain | films, 4 a class | lr 0.01: .400 ± .000, lr 0.02: .800 ± .000 |" in render(table, model, done)
    done.popitem()
    assert "| lr 0.01: .400 ± .000, lr 0.02: .800 (1 of 2 seeds) |" in render(table, model, done)
    command = ["experiments", str(tmp_path / "trial.json"), "--pretrained-model-path", model.checkpoint, "--list"]
    command += ["--results", str(tmp_path / "r.jsonl")]
    for flags, counted, word in ((["--tune"], 8, "tune"), (["--only", "asked", "--tune"], 4, "tune"), ([], 9, "")):
        monkeypatch.setattr("sys.argv", [*command, *flags])
        program.main()
        *lines, last = capsys.readouterr().out.splitlines()
        assert last == f"{counted} runs can be started now" and len(lines) == counted
        assert all(line.startswith(word) for line in lines)


def test_a_difference_beyond_noise_is_bold():
    assert difference_in_words(Difference(0.1, 0.01, 0.08, 0.12)) == "**+0.100 [+0.080, +0.120]**"
    assert difference_in_words(Difference(-0.1, 0.1, -0.3, 0.1)) == "-0.100 [-0.300, +0.100]"
    assert difference_in_words(Difference(-0.1, 0.01, -0.12, -0.08)).startswith("**-0.100")


def test_the_tables_that_are_here_can_be_read():
    for path in (program.HERE / "tables").glob("*.json"):
        table = Table.read(path)
        assert table.baseline in {row.name for row in table.rows} and table.title


def test_every_preset_says_where_it_comes_from_and_pages_do(model: Model, tmp_path: Path):
    known = re.compile(r"arXiv:\d{4}\.\d{5}|(cmu-l3|neubig|vaishdho1|Qihongfei-hub)/[\w-]+|GitHub|small steps")
    assert all(known.search(row.source) for row in PRESETS_42M.rows)
    rows = [{"name": "plain", "source": "a paper", "tune": {"lr": [0.1, 0.2]}}, {"name": "lora", "method": "lora"}]
    table = table_of(tmp_path, rows=rows)
    done = scored(table.tuning(table.rows[0], "films", None), model, lambda each: 0.5)
    page = "## Sources\n\n| method | source |\n|---|---|\n| plain | a paper |\n\n## What was tried"
    assert page in render(table, model, done)
    assert "Sources" not in render(table_of(tmp_path, rows=[{"name": "plain"}]), model, {})
    for source in ("a | b", "two\nlines", 3):
        with pytest.raises(UserError, match="row plain: source must be a text of one line, without |, not "):
            table_of(tmp_path, rows=[{"name": "plain", "source": source}])


@pytest.mark.slow
@pytest.mark.parametrize("row", PRESETS_42M.rows, ids=lambda row: row.name)
def test_a_preset_for_stories42m_runs_on_a_random_model_of_that_shape(
    tmp_path: Path, assets: Path, films: dict[str, Path], model: Model, row: Row
):
    """A few steps; what the presets are worth nobody has measured."""
    torch.manual_seed(0)
    path = tmp_path / "stories42M.pt"
    save_checkpoint(path, Llama(LlamaConfig.from_preset("stories42M")), **PRESETS["stories42M"])
    big = Model(str(path), str(asset(assets, "tokenizer.model")))
    short = replace(row, checkpoint="", settings=row.settings | {"epochs": 2, "batch_size": 2})
    one = PRESETS_42M.trial(short, "sst", 2, 1, "final", row.combinations()[0])
    result = trial.run_trial(replace(one, data="films"), big, tmp_path, PLACE)
    assert 0 <= result["dev"]["accuracy"] <= 1 and result.get("trainable", 1) > 0


def test_an_unknown_table_or_row_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table_of(tmp_path)
    for flags, words in (
        (["nothing"], "no table nothing; there are adapted, "),
        ([str(tmp_path / "trial.json"), "--only", "x"], "no row x"),
        ([str(tmp_path / "trial.json"), "--baseline", "y"], "no row y"),
        ([str(tmp_path / "trial.json"), "--data", "films", "x"], "no data x; it has films"),
    ):
        monkeypatch.setattr("sys.argv", ["experiments", *flags])
        with pytest.raises(UserError, match=words):
            program.main()


# ------------------------------------------------------------------------------------- plots, reports, what it costs


@pytest.fixture
def finished(tmp_path: Path, model: Model, films: dict[str, Path]) -> tuple[Table, dict[str, dict]]:
    """A table whose runs are all done: plain is right in 6 of 10 cases, ema in all, and wise-ft has its sweep."""
    labels = [each.label for each in create_data(films["dev"])]
    rows = [{"name": name, "method": method} for name, method in (("plain", ""), ("ema", "ema"), ("mixed", "wise-ft"))]
    table = table_of(tmp_path, rows=rows, shots=[None], seeds=[1, 2, 3])
    done = {}
    for row, wrong in zip(table.rows, (4, 0, 4), strict=True):
        for one in table.final(row, "films", None, model, {}):
            answers = [1 - label if index < wrong else label for index, label in enumerate(labels)]
            scores = {"accuracy": 1 - wrong / 10, "macro_f1": 0.5, "predictions": pack(answers)}
            sweep = {"alphas": [0.0, 1.0], "scores": [0.5, 0.6], "alpha": 1.0}
            found = {"wise-ft": sweep} if row.name == "mixed" else {}
            figures = {"trainable": 100, "seconds": 7.0, "figures": found, "dev": scores, "test": scores}
            about = {name: getattr(one, name) for name in ("row", "option", "method", "data", "shots", "seed")}
            about |= {"arguments": list(one.arguments), "settings": dict(one.settings), "model": model.name}
            done[one.key(model)] = {"key": one.key(model), **about, **figures}
    return table, done


def test_rows_can_be_named_and_the_baseline_stays_beside_them(
    tmp_path: Path, model: Model, finished: tuple[Table, dict[str, dict]]
):
    table, done = finished
    assert table.only(None) == table and [row.name for row in table.only(["mixed"]).rows] == ["plain", "mixed"]
    text = render(table.only(["ema"]), model, done)
    assert "| ema" in text and "| plain" in text and "| mixed" not in text


def test_data_can_be_named(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    rows = [{"name": "plain"}, {"name": "ema", "method": "ema", "data": ["films"]}]
    table = table_of(tmp_path, rows=rows, data={"films": {}, "sst": {"batch_size": 4}}, shots=[None], seeds=[1, 2])
    assert [(row.name, data) for row, data, _ in table.only(None, ["sst"]).cells()] == [("plain", "sst")]
    whole, part = (one.ready(model, {}) for one in (table, table.only(None, ["sst"])))
    assert part == [each for each in whole if each.data == "sst"] and len(part) == 2 and len(whole) == 6
    monkeypatch.setattr(program, "check_args", lambda args: None)
    named = [str(tmp_path / "trial.json"), "--pretrained-model-path", model.checkpoint, "--tokenizer", model.tokenizer]
    monkeypatch.setattr("sys.argv", ["experiments", *named, "--data", "sst", "--list"])
    program.main()
    assert "2 runs can be started now" in capsys.readouterr().out


def test_the_summary_has_a_gain_for_every_method_and_checkpoint(
    tmp_path: Path, model: Model, finished: tuple[Table, dict[str, dict]], monkeypatch: pytest.MonkeyPatch
):
    _, done = finished
    folder = tmp_path / "all"
    (folder / "tables").mkdir(parents=True)
    (tmp_path / "trial.json").rename(folder / "tables" / "full.json")
    monkeypatch.setattr(summary, "HERE", folder)
    for name, without in (("one", ()), ("two", [("ema", 3)]), ("none", [("ema", 1), ("ema", 2)])):
        for line in done.values():
            if (line["row"], line["seed"]) not in without:
                append_result(folder / f"full-{name}.jsonl", {**line, "model": name, "checksums": model.checksums})
        once = {**next(iter(done.values())), "model": "x", "checksums": model.checksums}
        append_result(folder / "full-some.jsonl", once)
    (folder / "full-void.jsonl").touch()
    (folder / "one").write_text("what is here now is not what was recorded", encoding="utf-8")
    text = summary.render_summary([*summary.columns_of(folder, ["full"])])
    head, _, majority, plain, *gains = text[text.index("## FILMS") :].splitlines()[2:]
    assert head == "|  | none, all | one, all | two, all |" and majority.count("| .500 ") == 3
    assert plain == "| plain: accuracy | .600 ± .000 | .600 ± .000 | .600 ± .000 |"
    (ema,) = (line.split(" | ") for line in gains if "ema" in line)
    assert ema[0] == "| ema" and ema[2].startswith("**+0.400 [+0.") and ema[1] == ema[3].rstrip(" |") == ""
    assert any(line.startswith("| mixed | +0.000 [+0.000, +0.000] |") for line in gains) and len(gains) == 2
    few = summary.summarize([*summary.columns_of(folder, ["full"])][:1])
    assert few[0] == "|  | none, all |" and not any("ema" in line for line in few)
    (column,) = (each for each in summary.columns_of(folder, ["full"]) if each.checkpoint == "one")
    ((cell, runs),) = ((each, each.runs) for each in column.panel.cells if each.row.name == "ema")
    shifted = cell._replace(runs={seed + 2: run for seed, run in runs.items()})  # of three seeds one is the baseline's
    panel = column.panel._replace(cells=[shifted])
    assert len(runs) == 3 and column.gain("ema") and column._replace(panel=panel).gain("ema") == ""
    for name in ("tables/{}.json", "{}-one.jsonl", "{}-two.jsonl"):
        shutil.copy(folder / name.format("full"), folder / name.format("few"))
    heads = summary.summarize([*summary.columns_of(folder, ["full", "few"])])[0]
    assert heads == "|  | none, all | one, all | one, all | two, all | two, all |"


def test_a_summary_is_written_over_its_own_page_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["summary", "--results", str(tmp_path), "--out", str(tmp_path / "s.md")])
    with pytest.raises(UserError, match="there are no results of full or few-shot"):
        summary.main()
    monkeypatch.setattr(summary, "columns_of", lambda folder: ["a column"])
    monkeypatch.setattr(summary, "render_summary", lambda columns: "# What\n")
    for _ in range(2):
        summary.main()
    (tmp_path / "s.md").write_text("# My notes\n", encoding="utf-8")
    with pytest.raises(UserError, match="s.md is there already"):
        summary.main()
    assert (tmp_path / "s.md").read_text() == "# My notes\n"
    monkeypatch.setattr("sys.argv", ["summary", "--out", str(tmp_path / "s.txt")])
    with pytest.raises(UserError, match="must end in .md"):
        summary.main()


def test_every_kind_of_plot_is_drawn_of_what_has_it(
    tmp_path: Path, model: Model, finished: tuple[Table, dict[str, dict]]
):
    pytest.importorskip("matplotlib")
    from advanced.experiments.plots import draw

    table, done = finished
    written = draw(table, model, done, tmp_path / "trial")
    kinds = "accuracy", "trainable", "seconds", "wise-ft"
    assert [path.name for path in written] == [f"trial-{kind}.png" for kind in kinds]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    without = {key: result for key, result in done.items() if not result["figures"]}
    assert [path.name for path in draw(table, model, without, tmp_path / "t")][-1] == "t-seconds.png"


def test_a_report_says_what_was_done_and_whether_it_is_beyond_noise(
    tmp_path: Path, model: Model, finished: tuple[Table, dict[str, dict]], monkeypatch: pytest.MonkeyPatch
):
    whole, done = finished
    table = whole.only(["ema"])
    monkeypatch.setattr(report.shutil, "which", lambda name: None)
    assert report.write_report(table, model, done, ["python", "-m", "this"], tmp_path / "r.md") == [tmp_path / "r.md"]
    text = (tmp_path / "r.md").read_text(encoding="utf-8")
    assert "**ema** evaluates and saves an exponential moving average" in text and "wise-ft" not in text
    said = re.search(r"\*ema\* differs from \*plain\* by (.*), which is (.*); on test by (.*), which is (.*)\.\n", text)
    assert said[1].startswith("**+0.400 [") and said[3].startswith("**+0.400 [")
    assert said[2] == said[4] == "beyond noise"
    assert "| plain | 100 | 3 |" in text and "\n```\npython -m this\n```\n" in text
    assert "; here decay=0.99." in text and "## What was tried" not in text and "was made" not in text
    assert "held out of the training data" in text and "chosen on dev" not in text and "are missing" not in text
    nothing = report.text_of(whole.only(["mixed"]), model, done, [])
    assert "*mixed* differs from *plain* by +0.000 [+0.000, +0.000], which is within noise" in nothing


def test_a_report_shows_how_often_each_class_is_predicted_and_what_macro_f1_gains(
    tmp_path: Path, model: Model, finished: tuple[Table, dict[str, dict]], films: dict[str, Path]
):
    table, done = finished
    gold = [each.label for each in create_data(films["dev"])]
    answers = [0] * 8 + [1] * 2
    for run in done.values():
        if run["row"] == "plain":
            run["dev"] = run["dev"] | {"predictions": pack(answers)}
    gain = 1 - f1_score(gold, answers, average="macro")
    lines = report.text_of(table.only(["ema"]), model, done, []).splitlines()
    assert "| *gold labels* | .500 | .500 | .000 | .000 | .000 |  |  |" in lines
    assert "| plain | .800 | .200 | .000 | .000 | .000 |  |  |" in lines
    (found,) = [line for line in lines if line.startswith("| ema | .500 | .500 | .000 | .000 | .000 | ")]
    assert f" **{gain:+.3f} [" in found and " **+0.400 [" in found  # on dev, and on test, where 4 of 10 are wrong


def test_a_report_says_what_was_tried_where_it_is_from_and_of_which_makes(
    model: Model, finished: tuple[Table, dict[str, dict]]
):
    table, done = finished
    plain, ema = table.only(["ema"]).rows
    tuned = replace(table, rows=(replace(plain, tune={"lr": [0.1, 0.2]}), replace(ema, source="a paper")))
    for one in tuned.tuning(tuned.rows[0], "films", None):
        done[one.key(model)] = {"selection": dict(one.settings)["lr"], "settings": dict(one.settings)}
    run = next(iter(done.values()))
    for one in tuned.final(tuned.rows[0], "films", None, model, done):
        done[one.key(model)] = run | {"key": one.key(model), "seed": one.seed, "weights": f"make {one.seed}"}
    text = report.text_of(tuned, model, done, [])
    assert "| plain | films, all | lr 0.1: .100, lr 0.2: .200 |" in text and "*plain*: lr as chosen" in text
    assert "| ema | a paper |" in text and f"`{model.name}` was made 3 times by the same command" in text


@pytest.mark.parametrize("of", ["table", "data", "rows", "one row"])
def test_a_report_says_what_epochs_are_chosen_on(model: Model, finished: tuple[Table, dict[str, dict]], of: str):
    """Wherever in the table that is said."""
    whole, done = finished
    table, nothing = whole.only(["ema"]), {"hold_out": 0.0}
    plain, ema = table.rows
    other = {
        "table": replace(table, settings=nothing),
        "data": replace(table, data={"films": nothing}),
        "rows": replace(table, rows=tuple(replace(row, settings=nothing) for row in table.rows)),
        "one row": replace(table, rows=(plain, replace(ema, settings=nothing))),
    }[of]
    of_other = {}
    for old, new in zip(table.rows, other.rows, strict=True):
        both = (table, old), (other, new)
        pairs = zip(*(each.final(row, "films", None, model, {}) for each, row in both), strict=True)
        of_other |= {after.key(model): done[before.key(model)] for before, after in pairs}
    text = report.text_of(other, model, of_other, [])
    assert ("The epoch is chosen on dev" in text) == (of != "one row")
    assert ("held out of the training data" in text) == (of == "one row") == ("Where `hold_out` is 0" in text)
    said = {"data": "; FILMS: hold_out 0.0", "one row": "; *ema*: hold_out 0.0", "table": " hold_out 0.0"}
    assert f"{said.get(of, '; *plain*: hold_out 0.0')}" in text.replace("\n", " ")


def test_a_report_names_the_seeds_of_a_row_that_has_others(model: Model, finished: tuple[Table, dict[str, dict]]):
    table, done = finished
    plain, ema, *_ = table.rows
    text = report.text_of(replace(table, rows=(plain, replace(ema, seeds=(1, 2)))), model, done, [])
    assert "(seeds 1, 2, 3; *ema*: 1, 2)" in text.replace("\n", " ")


def test_a_report_of_the_most_rows_has_three_pages(model: Model, finished: tuple[Table, dict[str, dict]]):
    table, done = finished
    ema, plain = table.rows[1], table.rows[0]
    runs = [done[each.key(model)] for each in table.final(ema, "films", None, model, {})]
    numbers = range(1, report.MOST_ROWS)
    rows = [replace(ema, name=f"ema {number}", arguments=(f"decay=0.{number}",)) for number in numbers]
    many = replace(table, rows=(plain, *rows))
    for row in rows:
        trials = many.final(row, "films", None, model, {})
        done |= {one.key(model): run for one, run in zip(trials, runs, strict=True)}
    text = report.text_of(many, model, done, [])
    assert text.count("differs from") == report.MOST_ROWS - 1
    assert len([word for word in text.split() if word != "|"]) < 700  # with two data sets 1400


def test_a_report_counts_what_is_missing_of_its_rows_and_of_the_baseline(
    model: Model, finished: tuple[Table, dict[str, dict]]
):
    table, done = finished
    left = {key: run for key, run in done.items() if (run["row"], run["seed"]) not in {("plain", 3), ("mixed", 1)}}
    text = report.text_of(table.only(["ema"]), model, left, [])
    assert "1 runs of these rows are missing (FILMS, all: plain 1). " in text
    tuned = replace(table, rows=(*table.only(["ema"]).rows, Row("new", tune={"lr": [0.1, 0.2]})))
    assert "3 runs of these rows are missing" in report.text_of(tuned, model, done, [])


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"name": "plain"}, "finetuning"),
        ({"name": "ema", "method": "ema", "arguments": ["decay=0.5"]}, "advanced"),
        ({"name": "asked", "option": "prompt"}, "prompting"),
        ({"name": "ask: it", "option": "prompt", "method": "direct", "arguments": ["words=bad+good"]}, "advanced"),
        ({"name": "cut", "option": "prompt", "settings": {"max_sentence_len": 2}}, "prompting"),
    ],
)
def test_a_reports_command_makes_the_predictions_of_the_grid(
    tmp_path: Path, model: Model, drive: Callable, films: dict[str, Path], row: dict, kind: str
):
    """Its paths are those of the course's data, here replaced."""
    table = table_of(tmp_path, rows=[row], shots=[4], seeds=[3], data={"films": {"epochs": 3, "batch_size": 4}})
    (cell,) = table.cells()
    (one,) = table.final(*cell, model, {})
    result = trial.run_trial(one, model, tmp_path, PLACE)
    command = report.command_of(cell[0], result, model)
    assert command[:2] == ["python", "run_llama.py"]
    paths = {f"data/films-{split}.txt": films[split] for split in ("train", "dev", "test")}
    paths |= {"data/films-label-mapping.json": films["label_names"], f"{model.name}.pt": model.checkpoint}
    drive(*(paths.get(word, word) for word in command[2:]), "--kernels", "plain")
    size = "-4" if row.get("option") != "prompt" else ""
    written = [each.label for each in create_data(tmp_path / f"films{size}-dev-{kind}-output.txt")]
    assert written == unpack(result["dev"]["predictions"])


def test_a_reports_command_names_the_checkpoint_and_tokenizer_of_its_row(tmp_path: Path):
    for name in ("base.pt", "other.model", "base-task.pt", "base-task.model", "base-more.pt"):
        (tmp_path / name).touch()
    model = Model(str(tmp_path / "base.pt"), str(tmp_path / "other.model"))
    about = {"data": "sst", "option": "prompt", "method": "", "arguments": [], "shots": None, "seed": 1}
    result = about | {"settings": dict.fromkeys(("attention", "batch_size", "precision", "max_sentence_len"))}
    checkpoints = "", "base-task.pt", "base-more.pt"
    commands = [" ".join(report.command_of(Row("x", checkpoint=own), result, model)) for own in checkpoints]
    assert "--pretrained-model-path base.pt --tokenizer other.model --train" in commands[0]
    assert "--pretrained-model-path base-task.pt --train" in commands[1]
    assert "--pretrained-model-path base-more.pt --tokenizer other.model --train" in commands[2]
    near = Model("checkpoints/base.pt", "checkpoints/other.model")  # as it is typed where the command is
    words = " ".join(report.command_of(Row("x"), result, near))
    assert "--pretrained-model-path checkpoints/base.pt --tokenizer checkpoints/other.model --train" in words


def test_a_reports_command_for_an_encoder_is_that_of_encoders(tmp_path: Path):
    about = {"data": "sst", "option": "finetune", "method": "lora", "arguments": [], "shots": None, "seed": 1}
    model = Model(str(tmp_path / "small-bert"), str(tmp_path / "small-bert" / "vocab.txt"))
    words = report.command_of(Row("x"), {**about, "family": "bert", "settings": grid.PLAN_SETTINGS}, model)
    assert words[:3] == ["python", "-m", "bert.run"] and "--tokenizer" not in words
    pytest.importorskip("bert.run").get_args(words[3:])  # of which none is unknown
    llama = report.command_of(Row("x"), {**about, "family": "llama", "settings": grid.PLAN_SETTINGS}, model)
    assert llama[:2] == ["python", "run_llama.py"] and "--tokenizer" not in llama and "--precision" in llama


def test_the_command_of_everything_is_what_was_typed():
    flags = ["my/full.json", "--pretrained-model-path", "a b.pt", "--tokenizer", "t.model"]
    flags += ["--results", "mine.jsonl", "--only", "x y", "--baseline", "z", "--data", "sst"]
    command = program.command_of(program.get_args([*flags, "--report", "r.md"]))
    assert command == ["python", "-m", "advanced.experiments", *flags]


def test_a_long_command_is_broken_between_words_and_means_the_same():
    words = ["python", "x.py", *(f"--flag{number} 'a b' $c" for number in range(30)), "w" * 200]
    lines = report._shell(words)
    script = "\n".join(["printf '%s\\0' \\", *lines])
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.split("\0")[:-1] == words and len(lines) > 8
    assert all(len(line) <= report.WIDTH + 2 for line in lines if "w" * 200 not in line)


def test_a_report_of_what_is_only_asked_speaks_of_no_epochs(tmp_path: Path, model: Model):
    rows = [{"name": "asked", "option": "prompt"}, {"name": "direct", "option": "prompt", "method": "direct"}]
    table = table_of(tmp_path, rows=rows, shots=[None], seeds=[1], baseline="asked")
    trials = [table.final(*cell, model, {})[0] for cell in table.cells()]
    done = {one.key(model): trial.run_trial(one, model, tmp_path, PLACE) for one in trials}
    text = report.text_of(table, model, done, [])
    assert "Nothing is trained." in text and "epoch" not in text and "## Results: FILMS\n" in text


def test_a_report_without_results_or_with_too_many_rows_is_refused(
    tmp_path: Path, model: Model, finished: tuple[Table, dict[str, dict]], monkeypatch: pytest.MonkeyPatch
):
    table, done = finished
    with pytest.raises(UserError, match="none of these rows has a final run: plain, ema"):
        report.write_report(table.only(["ema"]), model, {}, [], tmp_path / "r.md")
    monkeypatch.setattr(report, "MOST_ROWS", 2)
    with pytest.raises(UserError, match="room for 2 rows, not for 3; name them with --only"):
        report.write_report(table, model, done, [], tmp_path / "r.md")
    assert not (tmp_path / "r.md").exists()
    plain = {key for key, result in done.items() if result["row"] == "plain"}
    alone = report.text_of(table.only(["ema"]), model, {key: done[key] for key in done.keys() - plain}, [])
    assert "*plain*, which the others would be compared with, has no runs here." in alone


@pytest.mark.parametrize(
    ("script", "warning"),
    [
        (None, "pandoc is not here"),
        ("echo no engine >&2; exit 47", "pandoc made no .*r.pdf: no engine"),
        ("exit 0", "pandoc made no .*r.pdf: no reason"),
        ('echo PDF > "$3"', None),
    ],
)
def test_a_pdf_is_made_where_that_is_possible(
    tmp_path: Path, model: Model, finished: tuple[Table, dict[str, dict]], script: str | None, warning: str | None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
):  # fmt: skip
    (tools := tmp_path / "tools").mkdir()
    if script is not None:
        (tools / "pandoc").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tools / "pandoc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    table, done = finished
    written = report.write_report(table, model, done, [], tmp_path / "r.md")
    said = capsys.readouterr().err
    assert re.search(warning, said) if warning else not said
    assert [path.name for path in written] == ["r.md"] + ["r.pdf"] * (warning is None)


def test_what_a_method_costs_is_measured_beside_plain_training(model: Model, monkeypatch: pytest.MonkeyPatch):
    from advanced.experiments import cost

    monkeypatch.setattr(cost, "path_of", trial.path_of)
    work = cost.Workload(model, "films", "causal", batch_size=4, steps=2, rounds=2)
    found = cost.measure_time(work, cost.MeasuredMethod(model, "r-drop"))
    assert 0 < found.least <= found.middle <= found.most
    assert cost.measure_time(work, cost.MeasuredMethod(model, "linear-probe")).trained == 2 * 32 + 2
    with pytest.raises(UserError, match="too few for 9 batches"):
        work._replace(steps=9).sentences()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps", 0], "--steps 0: must be at least 1"),
        (["--rounds", -1], "--rounds -1: must be at least 1"),
        (["--batch_size", 0], "--batch_size 0: must be at least 1"),
        (["--out", "."], "is a folder"),
        (["--out", "there.md"], "there.md is there already"),
    ],
)
def test_what_cannot_be_measured_or_written_is_refused_first(
    tmp_path: Path, flags: list, words: str, monkeypatch: pytest.MonkeyPatch
):
    from advanced.experiments import cost

    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.md").write_text("mine", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["cost", "--pretrained-model-path", "absent.pt", *map(str, flags)])
    with pytest.raises(UserError, match=words):
        cost.main()


@pytest.mark.parametrize("name", ["r.md", "r.pdf"])
def test_a_report_does_not_replace_a_file(tmp_path: Path, name: str):
    (tmp_path / name).write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match=f"--report: .*{name} is there already"):
        program.check_args(program.get_args(["full", "--report", str(tmp_path / "r.md")]))
