"""A panel: the rows of a table on one data set and size, beside its baseline and beside what needs no method at all.

Accuracies are of dev and test together where dev has chosen nothing and both have gold labels (`results.judges_of`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from advanced.experiments.grid import Done, Table
from advanced.experiments.models import Model
from advanced.experiments.results import Runs, compare, figure_of, fits, has_few_seeds, judges_of, table_of
from advanced.experiments.rows import Row, Trial, size_in_words
from advanced.experiments.schema import BAG_OF_WORDS, JUDGES
from advanced.experiments.statistics import LEVEL, Difference, holm
from engine.data import majority_accuracy, unpack
from engine.metrics import entry_of
from utils import UserError


class Cell(NamedTuple):
    """A row on one data set and size. runs: by seed. missing: how many are not done. chosen: the tuned values."""

    name: str
    row: Row
    runs: Runs
    missing: int
    chosen: str

    @property
    def unfitted(self) -> int:
        """The number of runs whose training did not fit its sentences, of which there is no verdict."""
        return sum(not fits(run) for run in self.runs.values())


class Verdict(NamedTuple):
    """How a row compares with the baseline. p: corrected for all rows of the panel (Holm)."""

    gain: Difference
    p: float

    @property
    def is_beyond_noise(self) -> bool:
        return self.p < LEVEL and not self.gain.has_few_seeds


def verdicts_of(gains: Mapping[str, Difference]) -> dict[str, Verdict]:
    """Each gain with its p-value, corrected for all of them. By the names of rows."""
    ps = holm([gain.p for gain in gains.values()])
    return {name: Verdict(gain, p) for (name, gain), p in zip(gains.items(), ps, strict=True)}


class Panel(NamedTuple):
    """title: of its data set and size. baseline: the runs of the table's baseline by seed. cells: rows with runs.

    judges: the splits that may judge the rows.
    """

    title: str
    data: str
    cells: list[Cell]
    baseline: Runs
    baseline_name: str
    judges: Sequence[str] = JUDGES

    @property
    def splits(self) -> list[str]:
        """Those that judge the rows: of `judges`, if they are there."""
        found = judges_of(run for cell in self.cells for run in cell.runs.values())
        return [split for split in found if split in self.judges] or found

    @property
    def labels(self) -> list[int]:
        """Of the sentences that judge the rows."""
        run = next(run for cell in self.cells for run in cell.runs.values())
        return [label for split in self.splits for label in unpack(entry_of(run, split)["labels"])]

    @property
    def majority(self) -> float:
        return majority_accuracy(self.labels)

    @property
    def processor(self) -> str | None:
        """The one that most rows, and then most runs, were done on: times are compared only there."""
        kinds = [[run.get("processor") for run in cell.runs.values()] for cell in self.cells]
        rows = Counter(each for kind in kinds for each in {*kind})
        runs = Counter(each for kind in kinds for each in kind)
        return max(runs, key=lambda each: (rows[each], runs[each]))  # of equals the first, as sets have no order

    def comparable(self, base: Runs) -> list[Cell]:
        """The rows that can be compared with these runs: none if training of these did not fit its sentences."""
        if not all(map(fits, base.values())):
            return []
        return [cell for cell in self.cells if cell.runs and cell.runs is not base and not cell.unfitted]

    def verdicts(self, against: Runs | None = None) -> dict[str, Verdict]:
        """By the names of rows, those that can be compared with these runs, else with the baseline.

        None can, if training of the other side did not fit its sentences.
        """
        base = self.baseline if against is None else against
        gains = {cell.name: compare(cell.runs, base, self.splits) for cell in self.comparable(base)}
        return verdicts_of({name: gain for name, gain in gains.items() if gain is not None})

    def above_majority(self) -> dict[str, bool]:
        """By the names of rows, whether their accuracy is above that of the majority class, corrected for all rows.

        Rows of too few seeds are left out.
        """
        cells = [cell for cell in self.cells if not cell.unfitted and not has_few_seeds(cell.runs.values())]
        figures = {cell.name: figure_of([*cell.runs.values()], self.splits) for cell in cells}
        over = {name: figure._replace(mean=figure.mean - self.majority) for name, figure in figures.items()}
        return {name: each.is_beyond_noise and each.gain.mean > 0 for name, each in verdicts_of(over).items()}

    def bag_of_words(self) -> Runs:
        return next((cell.runs for cell in self.cells if cell.row.option == BAG_OF_WORDS), {})


def cells_of(table: Table, model: Model, done: Done, data: str, shots: int | None) -> list[Cell]:
    cells = []
    for row, of_data, of_shots in table.cells():
        if (of_data, of_shots) != (data, shots):
            continue
        trials = table.final(row, data, shots, model, done)
        runs = {trial.seed: _result_of(trial, done[key]) for trial in trials if (key := trial.key(model)) in done}
        values = {values_of(row, trial) for trial in trials} or {""}
        chosen = values.pop() if len(values) == 1 else "chosen for each seed"
        missing = len(table.seeds_of(row)) - len(runs)
        if row.members == 1 or not runs:
            cells.append(Cell(row.name, row, runs, missing, chosen))
        else:
            cells += _combined(row, runs, missing, chosen)
    return cells


def _result_of(trial: Trial, run: Mapping[str, Any]) -> Mapping[str, Any]:
    """The result of a run. Raises `UserError` if its line is damaged, or says that it is of another run."""
    entry_of(run, "dev")
    for name in ("data", "shots", "method", "seed", "phase"):
        if entry_of(run, name) != getattr(trial, name):
            raise UserError(f"the result {run['key']} has another {name!r} than the run with its key; remove it")
    return run


def _combined(row: Row, runs: Mapping[int, Any], missing: int, chosen: str) -> list[Cell]:
    """A cell for each way in which the models of a row with `members` are combined."""
    names = dict.fromkeys(name for run in runs.values() for name in entry_of(run, "combined"))
    apart = {name: {seed: {**run, **run["combined"][name]} for seed, run in runs.items()} for name in names}
    return [Cell(f"{name} of {row.members}: {row.name}", row, apart[name], missing, chosen) for name in names]


def title_of(table: Table, data: str, size: str) -> str:
    """Of the panel of a data set and a size, the name."""
    judged = (table.settings | table.data[data]).get("judged_on")
    return ", ".join(filter(None, (data.upper(), size, f"judged on {judged.upper()}" if judged else "")))


def panels_of(table: Table, model: Model, done: Done) -> list[Panel]:
    """The panels in which some row has runs."""
    panels = []
    for data, shots in table.sizes() if table.seeds else ():
        cells = [cell for cell in cells_of(table, model, done, data, shots) if cell.runs]
        if cells:
            baseline = next((cell.runs for cell in cells if cell.name == table.baseline), {})
            size = "" if all(cell.row.option == "prompt" for cell in cells) else size_in_words(shots)
            panels.append(Panel(title_of(table, data, size), data, cells, baseline, table.baseline, table.judges))
    return panels


def values_of(row: Row, trial: Trial) -> str:
    """The values of a run for the keys that the row tunes, in words."""
    settings = dict(trial.settings)
    chosen = [f"{key} {_shown(settings[key])}" for key in row.tune if key in settings]
    return ", ".join(chosen + [argument for argument in trial.arguments if argument not in row.arguments])


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def uniform_guess(labels: Sequence[int]) -> float:
    """The expected accuracy of a class drawn with equal probabilities."""
    return 1 / len(set(labels))


def each_seed(runs: Runs, splits: Sequence[str], figure: str = "accuracy") -> list[float]:
    """The figure of each seed on these splits together."""
    return [float(row.mean()) for row in table_of([*runs.values()], splits, figure)]


def majority_f1(labels: Sequence[int]) -> float:
    """The macro-F1 of always answering the most frequent class."""
    share = float(np.max(np.bincount(labels)) / len(labels))
    return 2 * share / (1 + share) / len(set(labels))
