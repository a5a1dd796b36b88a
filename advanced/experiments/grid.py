"""The runs that a table consists of, and the choice of their values on data held out of train. No PyTorch.

A table is a JSON file:

    {"title": ..., "data": {"sst": {"epochs": 5, "batch_size": 80}, ...}, "shots": [null, 16], "seeds": [1, 2, 3],
     "settings": {"hold_out": 0.1, ...}, "baseline": "plain", "registered": "the commit that fixed it",
     "rows": [{"name": "plain", "tune": {"lr": [1e-3, 3e-3]}}, {"name": "mixout", "method": "mixout", ...}]}

Every row is run with every seed, on every data set and size. If a row has `tune`, each combination of its values is
run first, without dev and test; the final runs have the combination with the best score on data held out of train, of
equal ones that with the smallest rate. If the best rate is the smallest or the largest, one more is tried beyond it, up
to `MORE_RATES`. Of all training sentences (`null`) the choice is made with the seeds of `tune_seeds` for all final
seeds; of a few of a class it is made for each seed, with the sentences that this seed draws.

A single combination is run in this way only for `--tune`, to compare it with other rows. A key of `tune` is a setting
of `engine.plan.Plan` or an argument of the row's methods. `second_test`: so many training sentences are taken out and
judged in the place of a test file without labels. `judged_on`: dev and test are those of another data set with as many
classes, so that a page shows what training on one is worth on the other; if its test has no labels, its train takes
that place. `members`: the row is a vote and soups of so many models of one
division of the data, see `trial.py`. `registered`: the commit in which the rows stood before their
figures were known. `judges`: of which splits gains are taken; both, if it is not given. `--render` shows a row's
`source`. A table whose `seeds` are an empty list only tunes: it never uses dev or test.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from advanced import METHODS, choose
from advanced.experiments.models import Model
from advanced.experiments.rows import DATA_SETTINGS, PLAN_SETTINGS, Row, Trial
from advanced.experiments.schema import BAG_OF_WORDS, JUDGES, SOLVED, check_table
from config import ROUNDING
from engine.data import read_json
from engine.metrics import entry_of
from utils import UserError, join_names, warn

Done = Mapping[str, Mapping[str, Any]]  # results by key
TUNE_SEEDS = (0, 11)
MORE_RATES = 3  # beyond those that a row names


class Tried(NamedTuple):
    """A combination of the values that a row tunes. score: the mean of its runs; None: they are not all done."""

    combination: dict[str, Any]
    runs: list[Trial]
    score: float | None


@dataclass(frozen=True)
class Table:
    """A file of the folder `tables/`."""

    name: str
    title: str
    data: dict[str, dict[str, Any]]
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    shots: tuple[int | None, ...] = (None,)
    settings: dict[str, Any] = field(default_factory=dict)
    tune_seeds: tuple[int, ...] = TUNE_SEEDS
    baseline: str = "plain"
    registered: str = ""
    judges: tuple[str, ...] = JUDGES

    @classmethod
    def read(cls, path: str | Path) -> Table:
        """Raises `UserError` for a file that is no table, or that has a method which `choose` refuses."""
        content = read_json(path)
        try:
            check_table(content)
            rows = tuple(Row(**{key: _frozen(value) for key, value in row.items()}) for row in content.pop("rows"))
            table = cls(Path(path).stem, rows=rows, **{key: _frozen(value) for key, value in content.items()})
            table._check("baseline" in content)
        except UserError as error:
            raise UserError(f"{path} is not a table of experiments: {error}") from None
        return table

    def _check(self, has_baseline: bool) -> None:
        """Raises `UserError` for entries that do not fit together. has_baseline: the file names a baseline."""
        names = [row.name for row in self.rows]
        if len(set(names)) < len(names):
            raise UserError("two rows have one name")
        if has_baseline and self.baseline not in names:
            raise UserError(f"there is no row {self.baseline}, which is the baseline")
        for row, data, _ in self.cells():
            for combination in row.combinations():
                try:
                    trial = self.trial(row, data, None, 0, "tune", combination)
                except UserError as error:
                    raise UserError(f"row {row.name}: {error}") from None
                settings = dict(trial.settings)
                if row.option == "finetune" and (precision := settings["precision"]) in ROUNDING:
                    raise UserError(f"row {row.name}: precision {precision} rounds the weights, which are trained")
                chooses = [name for name in row.methods if METHODS[name].holds_out] + ["its tune"] * bool(row.tune)
                chooses += ["its C"] * (row.option in SOLVED)
                chooses += ["its epoch"] * bool(self.settings_of(row, data)["judged_on"])
                if row.option != "prompt" and chooses and not settings["hold_out"]:
                    who = join_names(chooses[:1])
                    raise UserError(f"row {row.name}: with hold_out 0 {who} would choose on dev")

    def without_unknown(self, model: Model) -> Table:
        """Leave out rows whose checkpoint is neither here nor in results, with a notice.

        Raises `UserError` if no row is left.
        """
        return self._without(model, [row for row in self.rows if not model.beside(row.checkpoint).is_known])

    def without_absent(self, model: Model) -> Table:
        """Leave out rows whose checkpoint is not here, with a notice. Raises `UserError` if no row is left."""
        absent = [row for row in self.rows if not Path(model.beside(row.checkpoint).checkpoint).exists()]
        return self._without(model, absent)

    def _without(self, model: Model, rows: Sequence[Row]) -> Table:
        if rows and len(rows) == len(self.rows):
            raise UserError(f"{model.beside(rows[0].checkpoint).checkpoint} does not exist")
        for checkpoint in dict.fromkeys(model.beside(row.checkpoint).checkpoint for row in rows):
            names = join_names([row.name for row in rows if model.beside(row.checkpoint).checkpoint == checkpoint])
            warn(f"left out: {names}, starting from {checkpoint}, which is not here")
        return replace(self, rows=tuple(row for row in self.rows if row not in rows))

    def check_families(self, model: Model) -> None:
        """Raises `UserError` for a row whose method or option is not for a model of this family."""
        for row in self.rows:
            family = model.beside(row.checkpoint).family
            try:
                if family != "llama" and row.option == "prompt":
                    raise UserError(f"zero-shot methods ask a language model, which a {family} is not")
                if row.method:
                    choose(row.method, row.arguments, row.option, family)
            except UserError as error:
                raise UserError(f"row {row.name}: {error}") from None

    def only(self, rows: Sequence[str] | None, data: Sequence[str] | None = None) -> Table:
        """The table with these rows, the baseline, the bag of words and these data sets alone. None: all of them."""
        always = {self.baseline, *(row.name for row in self.rows if row.option == BAG_OF_WORDS)}
        wanted = {row.name for row in self.rows} if rows is None else {*rows, *always}
        settings = {name: own for name, own in self.data.items() if data is None or name in data}
        return replace(self, rows=tuple(row for row in self.rows if row.name in wanted), data=settings)

    def cells(self) -> Iterator[tuple[Row, str, int | None]]:
        """Every row with every data set and size; a zero-shot row, which is not trained, has no sizes."""
        for data, row in itertools.product(self.data, self.rows):
            sizes = (None,) if row.option == "prompt" else self.shots if row.shots is None else row.shots
            if row.data is None or data in row.data:
                yield from ((row, data, shots) for shots in sizes)

    def sizes(self) -> list[tuple[str, int | None]]:
        """Every data set with each of its sizes."""
        return [*dict.fromkeys((data, shots) for _, data, shots in self.cells())]

    def settings_of(self, row: Row, data: str) -> dict[str, Any]:
        """A value for each setting: that of the row, else of the data set, else of the table."""
        return PLAN_SETTINGS | DATA_SETTINGS | self.settings | self.data[data] | row.settings

    def seeds_of(self, row: Row) -> tuple[int, ...]:
        return self.seeds if row.seeds is None else row.seeds

    def trial(self, row: Row, data: str, shots: int | None, seed: int, phase: str, chosen: Mapping[str, Any]) -> Trial:
        """chosen: values for the keys of the row's `tune`."""
        plan = {key: value for key, value in chosen.items() if key in PLAN_SETTINGS}
        settings = self.settings_of(row, data) | plan
        if phase == "tune":  # which looks at no sentences of the other data set
            settings["judged_on"] = ""
        arguments = (*row.arguments, *(f"{key}={value}" for key, value in chosen.items() if key not in plan))
        if row.method:
            choose(row.method, arguments, row.option, attention=settings["attention"])
        return Trial(
            self.name, row.name, row.option, row.method, arguments, data, shots, seed, phase,
            tuple(sorted(settings.items())), row.checkpoint, members=row.members if phase == "final" else 1,
        )  # fmt: skip

    def choosing_seeds(self, row: Row, shots: int | None) -> list[tuple[int, ...]]:
        """The groups of seeds that choose a row's values, each by itself."""
        if not row.tune:
            return []
        is_each = shots is not None and self.seeds_of(row)
        return [(seed,) for seed in self.seeds_of(row)] if is_each else [self.tune_seeds]

    def tuning(
        self, row: Row, data: str, shots: int | None, seeds: Sequence[int], model: Model, done: Done
    ) -> list[Tried]:
        """What a group of seeds tries on data held out of train: combinations of `tune`, with their runs.

        A rate beyond the tried ones is added where their results show that the best is at an edge.
        """

        def tried_of(combination: dict[str, Any]) -> Tried:
            runs = [self.trial(row, data, shots, seed, "tune", combination) for seed in seeds]
            results = [done.get(run.key(model)) for run in runs]
            score = None if None in results else fmean(entry_of(each, "selection") for each in results)
            return Tried(combination, runs, score)

        rates = sorted(row.tune.get("lr", ()))
        most = len(rates) + MORE_RATES if len(rates) > 1 else 0
        while True:
            tried = [tried_of(combination) for combination in row.combinations(rates)]
            best = best_of(tried) if len(rates) < most else None
            beyond = None if best is None else _beyond(rates, best["lr"])
            if beyond is None:
                return tried
            rates = sorted([*rates, beyond])

    def final(self, row: Row, data: str, shots: int | None, model: Model, done: Done) -> list[Trial]:
        """The row's final runs whose values are chosen: for all seeds alike, or for each by the runs of this seed."""
        seeds, chosen = self.seeds_of(row), row.combinations()
        if len(chosen) > 1:
            groups = self.choosing_seeds(row, shots)
            chosen = [best_of(self.tuning(row, data, shots, group, model, done)) for group in groups]
        each = zip(seeds, chosen if len(chosen) > 1 else chosen * len(seeds), strict=True)
        return [self.trial(row, data, shots, seed, "final", values) for seed, values in each if values is not None]

    def ready(self, model: Model, done: Done, only_tune: bool = False) -> list[Trial]:
        """The runs that can be started now, in their order: seed by seed, so that a stopped grid has all rows.

        only_tune: leave out the final runs.
        """
        waiting: list[Trial] = []
        only_tune = only_tune or not self.seeds
        for row, data, shots in self.cells():
            if len(row.combinations()) > 1 or only_tune:
                for seeds in self.choosing_seeds(row, shots):
                    waiting += [run for one in self.tuning(row, data, shots, seeds, model, done) for run in one.runs]
            if not only_tune:
                waiting += self.final(row, data, shots, model, done)
        left = [trial for trial in waiting if trial.key(model) not in done]
        order = {seed: place for place, seed in enumerate(self.seeds)}
        last = len(order)

        def place(trial: Trial) -> tuple[int, bool]:
            is_shared = trial.phase == "tune" and trial.shots is None  # of all seeds
            return -1 if is_shared else order.get(trial.seed, last), trial.phase == "final"

        return sorted(left, key=place)


def best_of(tried: Sequence[Tried]) -> dict[str, Any] | None:
    """The combination with the highest score; of equal ones that of the smallest rate, else the first.

    None while the scores are not all known.
    """
    if any(one.score is None for one in tried):
        return None
    return max(tried, key=lambda one: (one.score, -one.combination.get("lr", 0.0))).combination


def _beyond(rates: Sequence[float], best: float) -> float | None:
    """The rate to try after these, in their order, if the best one is the first or the last of them."""
    if best == rates[-1]:
        return float(f"{best * rates[-1] / rates[-2]:.2g}")
    return float(f"{best * rates[0] / rates[1]:.2g}") if best == rates[0] else None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
