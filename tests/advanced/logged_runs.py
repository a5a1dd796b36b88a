"""Runs for the workers that tests start: each leaves a line about itself, and waits until it may end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from grids import line_of

from advanced.experiments.models import Model
from advanced.experiments.rows import Trial

LOG, GO_ON = "LOGGED_RUNS", "go-on"  # the variable that names the folder of the lines; the file in it that ends runs


class Begun(NamedTuple):
    """A line: the seed of the run, its process, and its folder, which lies in that of its worker."""

    seed: int
    process: int
    work: str


def compute(trial: Trial, model: Model, work: Path, *how: Any) -> dict[str, Any]:
    folder = Path(os.environ[LOG])
    with open(folder / "log", "a", encoding="utf-8") as file:
        file.write(f"{trial.seed} {os.getpid()} {work}\n")
    while not (folder / GO_ON).exists():
        time.sleep(0.05)
    return line_of(trial, model)


def begun(folder: Path, fewest: int = 0) -> list[Begun]:
    """The lines, when there are so many."""
    for _ in range(1200):
        lines = (folder / "log").read_text(encoding="utf-8").splitlines() if (folder / "log").exists() else []
        if len(lines) >= fewest:
            return [Begun(int(seed), int(process), work) for seed, process, work in map(str.split, lines)]
        time.sleep(0.1)
    raise AssertionError(f"{len(lines)} runs have begun")
