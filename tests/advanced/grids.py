"""What the tests of experiments share: a table, fake results of its runs, and the program with flags."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from advanced.experiments import __main__ as program
from advanced.experiments import judging, processes, report, rows, runner, trial
from advanced.experiments.grid import Table
from advanced.experiments.models import Model
from advanced.experiments.rows import Trial
from engine.data import create_data, pack
from engine.plan import ComputeSettings

Finished = tuple[Table, dict[str, dict]]  # a table and results by key
PLAIN_CPU = ComputeSettings(torch.device("cpu"), kernels="plain")
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
    monkeypatch.setattr(rows, "path_of", lambda data, split: str(films[split]))
    for module in (judging, report):
        monkeypatch.setattr(module, "path_of", lambda data, split: str(films[split]))
    monkeypatch.setattr(runner, "commit_of_code", lambda: "0123456789ab")
    return Model(str(tiny_checkpoint), str(tiny_checkpoint.with_suffix(".model")))


@pytest.fixture
def main(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs the program on trial.json and the tiny model, or on what flags name instead."""

    def run(*flags: object, tables: Sequence[object] = (), checkpoint: object = model.checkpoint) -> None:
        command = ["experiments", *(tables or [tmp_path / "trial.json"]), "--pretrained-model-path", checkpoint, *flags]
        monkeypatch.setattr("sys.argv", [*map(str, command)])
        program.main()

    return run


class Threads(ThreadPoolExecutor):
    """A replacement for processes."""

    def __init__(self, workers: int, **how):
        super().__init__(workers)


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], None]:
    """Lets a function compute the runs, in threads."""

    def use(compute: Callable) -> None:
        monkeypatch.setattr(processes, "ProcessPoolExecutor", Threads)
        monkeypatch.setattr(runner, "compute_trial", compute)

    return use


def table_of(folder: Path, **changes) -> Table:
    path = folder / "trial.json"
    path.write_text(json.dumps({**CONTENT, **changes}), encoding="utf-8")
    return Table.read(path)


def first_of(table: Table, model: Model, row: int = 0, shots: int | None = None) -> Trial:
    """The first final run of a row, which has nothing to choose."""
    return table.final(table.rows[row], "films", shots, model, {})[0]


def tuning_runs(
    table: Table, model: Model, row: int = 0, shots: int | None = 4, seeds: Sequence[int] = (0,)
) -> list[Trial]:
    """The runs by which a group of seeds chooses the values of a row, before any is done."""
    each = table.tuning(table.rows[row], "films", shots, seeds, model, {})
    return [run for one in each for run in one.runs]


def scored(trials: list[Trial], model: Model, score: Callable[[Trial], float]) -> dict[str, dict]:
    return {each.key(model): {"key": each.key(model), "selection": score(each)} for each in trials}


def line_of(one: Trial, model: Model, **figures: Any) -> dict[str, Any]:
    """A line of results."""
    about = {"key": one.key(model), "checksums": model.checksums, "settings": dict(one.settings)}
    how = {
        "processor": "a processor",
        "torch": "2",
        "kernels": "plain",
        "commit": None,
        "date": "2026-01-02",
        "machine": "a machine",
    }
    how |= {"weights": model.checksums[0], "wall_seconds": 36.0}
    return {**about, **how, **trial.named(one, model), **figures}


def scores_of(labels: Sequence[int], wrong: int) -> dict[str, Any]:
    """Of answers of which the first few are wrong."""
    answers = [1 - label if index < wrong else label for index, label in enumerate(labels)]
    about = {"predictions": pack(answers), "labels": pack(labels)}
    return {"accuracy": 1 - wrong / len(labels), "macro_f1": 0.5, **about}


@pytest.fixture
def finished(tmp_path: Path, model: Model, films: dict[str, Path]) -> Finished:
    """A table whose runs are all done: plain is right in 6 of 10 cases, ema in all, and wise-ft has its sweep."""
    labels = [each.label for each in create_data(films["dev"])]
    rows = [{"name": name, "method": method} for name, method in (("plain", ""), ("ema", "ema"), ("mixed", "wise-ft"))]
    table = table_of(tmp_path, rows=rows, shots=[None], seeds=[1, 2, 3])
    sweep = {"wise-ft": {"alphas": [0.0, 1.0], "scores": [0.5, 0.6], "alpha": 1.0}}
    done = {}
    for row, wrong in zip(table.rows, (4, 0, 4), strict=True):
        scores, found = scores_of(labels, wrong), sweep if row.name == "mixed" else {}
        for one in table.final(row, "films", None, model, {}):
            figures = {"trainable": 100, "seconds": 7.0, "figures": found, "dev": scores, "test": scores}
            done[one.key(model)] = line_of(one, model, **figures)
    return table, done
