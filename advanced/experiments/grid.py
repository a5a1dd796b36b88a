"""The runs that a table consists of. No PyTorch.

A table is a JSON file:

    {"title": ..., "data": {"sst": {"epochs": 5, "batch_size": 80}, ...}, "shots": [null, 16], "seeds": [1, 2, 3],
     "settings": {"hold_out": 0.1, ...}, "baseline": "plain",
     "rows": [{"name": "plain", "tune": {"lr": [1e-3, 2e-3]}}, {"name": "mixout", "method": "mixout", ...}]}

Every row is run with every seed, on every data set and size. If a row has `tune`, each combination of its values is
run first, with the seeds of `tune_seeds` and without dev and test; the final runs have the combination with the best
score on data held out of train. A single combination is run in this way only for `--tune`, to compare it with other
rows. A key of `tune` is a setting of `engine.plan.Plan` or an argument of the row's methods. `--render` shows a row's
`source`. A table whose `seeds` are an empty list only tunes: it never uses dev or test.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from advanced import METHODS, choose
from advanced.experiments.models import Model
from advanced.experiments.schema import check_table
from engine.data import read_label_names
from engine.figures import entry_of
from engine.json_text import read_json
from engine.lineage import checksum
from utils import UserError, find_asset, join_names, warn

PLAN_SETTINGS = {
    "lr": 1e-3, "epochs": 5, "batch_size": 8, "hidden_dropout_prob": 0.3, "hold_out": 0.1, "precision": "fp32",
    "attention": None, "max_sentence_len": None,
}  # fmt: skip
TUNE_SEEDS = (0,)


@dataclass(frozen=True)
class Trial:
    """One run. phase: "tune", without dev and test, or "final". settings: a value for each of `PLAN_SETTINGS`."""

    table: str
    row: str
    option: str
    method: str
    arguments: tuple[str, ...]
    data: str
    shots: int | None
    seed: int
    phase: str
    settings: tuple[tuple[str, Any], ...]
    checkpoint: str = ""  # that it starts from; "": that of the whole table

    def model(self, model: Model) -> Model:
        """The model that it starts from. model: that of the whole table."""
        return model.beside(self.checkpoint)

    def key(self, model: Model) -> str:
        """A hash of everything that decides the run: equal in all tables and folders, different for other runs."""
        model = self.model(model)
        files = {split: path_of(self.data, split) for split in ("train", "dev", "test")}
        inputs = {name: checksum(path) for name, path in files.items()}
        inputs |= dict(zip(("checkpoint", "tokenizer"), model.checksums, strict=True))
        names = "option", "shots", "seed", "phase", "settings"
        own = {"method": self.method, **{name: getattr(self, name) for name in names}}
        methods = choose(self.method, self.arguments, self.option) if self.method else ()
        label_names = read_label_names(path_of(self.data, "label_names"))
        content = {**own, **inputs, "arguments": methods, "label_names": label_names}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def size_in_words(shots: int | None) -> str:
    """The amount of training data: sentences of each class, or all."""
    return "all" if shots is None else f"{shots} a class"


def path_of(data: str, split: str) -> str:
    """The path of a data set's file. Raises `UserError` if the file is not here."""
    name = f"data/{data}-label-mapping.json" if split == "label_names" else f"data/{data}-{split}.txt"
    path = find_asset(name)
    if path is None:
        raise UserError(f"{name} does not exist; setup.sh fetches the course's data")
    return str(path)


@dataclass(frozen=True)
class Row:
    """One line of a table. tune: for each key, the values to choose from."""

    name: str
    option: str = "finetune"
    method: str = ""
    arguments: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    tune: dict[str, list[Any]] = field(default_factory=dict)
    shots: tuple[int | None, ...] | None = None  # None: the table's
    data: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None
    checkpoint: str = ""  # in the folder of the whole table's; "": that one
    source: str = ""  # of its settings: a paper, or a repository

    @property
    def methods(self) -> list[str]:
        return [name.strip() for name in self.method.split(",") if name]

    def combinations(self) -> list[dict[str, Any]]:
        """All choices of one value for every key of `tune`."""
        return [dict(zip(self.tune, values, strict=True)) for values in itertools.product(*self.tune.values())]


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
                if row.option == "finetune" and settings["precision"] == "int8":
                    raise UserError(f"row {row.name}: precision int8 rounds the weights, which cannot be trained then")
                chooses = [name for name in row.methods if METHODS[name].holds_out]
                if row.option == "finetune" and (row.tune or chooses) and not settings["hold_out"]:
                    who = join_names(chooses or ["its tune"])
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
        """The table with these rows, the baseline, and these data sets alone. None: all of them."""
        wanted = {row.name for row in self.rows} if rows is None else {*rows, self.baseline}
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
        """A value for each of `PLAN_SETTINGS`: that of the row, else of the data set, else of the table."""
        return PLAN_SETTINGS | self.settings | self.data[data] | row.settings

    def seeds_of(self, row: Row) -> tuple[int, ...]:
        return self.seeds if row.seeds is None else row.seeds

    def trial(self, row: Row, data: str, shots: int | None, seed: int, phase: str, chosen: Mapping[str, Any]) -> Trial:
        """chosen: values for the keys of the row's `tune`."""
        plan = {key: value for key, value in chosen.items() if key in PLAN_SETTINGS}
        settings = self.settings_of(row, data) | plan
        arguments = (*row.arguments, *(f"{key}={value}" for key, value in chosen.items() if key not in plan))
        if row.method:
            choose(row.method, arguments, row.option, attention=settings["attention"])
        return Trial(
            self.name, row.name, row.option, row.method, arguments, data, shots, seed, phase,
            tuple(sorted(settings.items())), row.checkpoint,
        )  # fmt: skip

    def tuning(self, row: Row, data: str, shots: int | None) -> list[Trial]:
        """The runs on data held out of train, which compare the combinations of `tune`; none for a row without `tune`.

        If there is only one combination, the final runs do not wait for these.
        """
        each = itertools.product(row.combinations() if row.tune else (), self.tune_seeds)
        return [self.trial(row, data, shots, seed, "tune", choice) for choice, seed in each]

    def final(
        self, row: Row, data: str, shots: int | None, model: Model, done: Mapping[str, Mapping[str, Any]]
    ) -> list[Trial] | None:
        """The row's final runs, or None while tuning is not done. done: results by key.

        They have the combination with the best mean score, the first one of equals.
        """
        choices = row.combinations()
        if len(choices) > 1:
            tuning = self.tuning(row, data, shots)
            results = [done.get(trial.key(model)) for trial in tuning]
            if any(result is None for result in results):
                return None
            scores = [entry_of(result, "selection") for result in results]
            each = len(self.tune_seeds)
            means = [fmean(scores[first : first + each]) for first in range(0, len(scores), each)]
            choices = [choices[means.index(max(means))]]
        return [self.trial(row, data, shots, seed, "final", choices[0]) for seed in self.seeds_of(row)]

    def ready(self, model: Model, done: Mapping[str, Mapping[str, Any]], only_tune: bool = False) -> list[Trial]:
        """The runs that can be started now, in their order: seed by seed, so that a stopped grid has all rows.

        only_tune: leave out the final runs.
        """
        waiting: list[Trial] = []
        only_tune = only_tune or not self.seeds
        for row, data, shots in self.cells():
            final = None if only_tune else self.final(row, data, shots, model, done)
            waiting += self.tuning(row, data, shots) if final is None else final
        left = [trial for trial in waiting if trial.key(model) not in done]
        order = {seed: place for place, seed in enumerate(self.seeds)}
        return sorted(left, key=lambda trial: -1 if trial.phase == "tune" else order.get(trial.seed, len(order)))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
