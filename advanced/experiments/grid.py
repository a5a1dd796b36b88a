"""Which runs a table consists of. No PyTorch.

A table is a JSON file:

    {"title": ..., "data": {"sst": {"epochs": 5, "batch_size": 80}, ...}, "shots": [null, 16], "seeds": [1, 2, 3],
     "settings": {"hold_out": 0.1, ...}, "baseline": "plain",
     "rows": [{"name": "plain", "tune": {"lr": [1e-3, 2e-3]}}, {"name": "mixout", "method": "mixout", ...}]}

Every row is run with every seed, on every data set and size. Where a row has `tune`, each combination of those values
is run first with the seeds of `tune_seeds`, without a look at dev or test; the one that does best on the data held
out of train is taken. A single combination is only run so where `--tune` asks for it, to be compared with other rows.
A key of `tune` is a setting of `engine.plan.Plan`, or an argument of the row's methods. A row's `source` is a line that
`--render` shows. A table whose `seeds` are an empty list is all choice: nothing in it ever looks at dev or test.
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
from advanced.experiments.schema import check_table
from engine.data import read_label_names
from engine.lineage import checksum, identity_of
from engine.programs import import_part, tokenizer_name
from utils import UserError, find_asset, join_names, read_text, warn

PLAN_SETTINGS = {
    "lr": 1e-3, "epochs": 5, "batch_size": 8, "hidden_dropout_prob": 0.3, "hold_out": 0.1, "precision": "fp32",
    "attention": None, "max_sentence_len": None,
}  # fmt: skip
TUNE_SEEDS = (0,)
VOCABULARY = "vocab.txt"


@dataclass(frozen=True)
class Model:
    """A checkpoint and its tokenizer; or a Hugging Face directory, of a BERT or of a Llama, and the tokenizer in it.

    recorded: `checksums` by the name of a checkpoint, from results.
    """

    checkpoint: str
    tokenizer: str
    recorded: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def beside(self, name: str) -> Model:
        """Another checkpoint of the same folder, with the tokenizer of its own name or else the same one.

        `{model}` in its name stands for the name of this one. An empty name is this one's.
        """
        if not name:
            return self
        path = Path(self.checkpoint).parent / name.replace("{model}", self.name)
        own = Path(_tokenizer_of(path)) if path.is_dir() else path.with_suffix(".model")
        return Model(str(path), str(own) if own.is_file() else self.tokenizer, self.recorded)

    @property
    def name(self) -> str:
        return name_of(self.checkpoint)

    @property
    def family(self) -> str:
        """The kind of the model (see `engine.families`)."""
        return _kind_of(self.checkpoint) if Path(self.checkpoint).is_dir() else "llama"

    @property
    def is_known(self) -> bool:
        return Path(self.checkpoint).exists() or self.name in self.recorded

    @property
    def checksums(self) -> tuple[str, ...]:
        """What the checkpoint and the tokenizer are known by; where the files are not here, as it was recorded. So
        results can be rendered without the weights that they come from."""
        if Path(self.checkpoint).exists():
            if not self.tokenizer:
                raise UserError(f"{self.checkpoint} has no tokenizer beside it; name one with --tokenizer")
            return identity_of(self.checkpoint), checksum(self.tokenizer)
        if self.name in self.recorded:
            return tuple(self.recorded[self.name])
        raise UserError(f"{self.checkpoint} does not exist")


def model_of(checkpoint: str, tokenizer: str | None, results: Mapping[str, Mapping[str, Any]]) -> Model:
    """The checkpoint and the tokenizer that flags name. results: where they are named, too, if they are not here.

    Raises `UserError` if they are neither.
    """
    recorded = {result["model"]: result["checksums"] for result in results.values()}
    if Path(checkpoint).is_dir():
        return _directory(checkpoint, tokenizer, recorded)
    path = find_asset(checkpoint)
    if path is None and name_of(checkpoint) not in recorded:
        raise UserError(f"--pretrained-model-path {checkpoint} does not exist")
    if path is None and tokenizer is None:
        return Model(checkpoint, "", recorded)
    name = tokenizer_name(path or checkpoint, tokenizer)
    found = find_asset(name)
    if found is None:
        raise UserError(f"--tokenizer {name} does not exist")
    return Model(str(path or checkpoint), str(found), recorded)


def name_of(checkpoint: str | Path) -> str:
    """What results call it."""
    return Path(checkpoint).name.removesuffix(".pt")


def _directory(checkpoint: str, tokenizer: str | None, recorded: Mapping[str, Sequence[str]]) -> Model:
    if tokenizer is not None and _kind_of(checkpoint) == "bert":
        raise UserError(f"--tokenizer: the vocabulary is that of --pretrained-model-path {checkpoint}")
    found = Path(tokenizer or _tokenizer_of(checkpoint))
    if not found.is_file():
        holds_none = f"--pretrained-model-path {checkpoint} holds no {found.name}"
        raise UserError(holds_none if tokenizer is None else f"--tokenizer {tokenizer} does not exist")
    return Model(checkpoint, str(found), recorded)


def _kind_of(folder: str | Path) -> str:
    return import_part("convert.directory", "a Hugging Face directory").family_of(Path(folder))


def _tokenizer_of(folder: str | Path) -> str:
    return str(Path(folder, VOCABULARY)) if _kind_of(folder) == "bert" else tokenizer_name(folder)


@dataclass(frozen=True)
class Trial:
    """One run. phase: "tune", which never looks at dev and test, or "final". settings: of `PLAN_SETTINGS`."""

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
    checkpoint: str = ""  # which it starts from, if that is not the one of the whole table

    @property
    def size(self) -> str:
        return size_in_words(self.shots)

    def model(self, model: Model) -> Model:
        """What it starts from. model: that of the whole table."""
        return model.beside(self.checkpoint)

    def key(self, model: Model) -> str:
        """What tells this run from every other one, wherever the files lie. Equal in all tables."""
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
    """How much of the training data is used."""
    return "all" if shots is None else f"{shots} a class"


def path_of(data: str, split: str) -> str:
    """A data set's file. Raises `UserError` if it is not here."""
    name = f"data/{data}-label-mapping.json" if split == "label_names" else f"data/{data}-{split}.txt"
    path = find_asset(name)
    if path is None:
        raise UserError(f"{name} does not exist; setup.sh fetches the course's data")
    return str(path)


@dataclass(frozen=True)
class Row:
    """One line of a table. tune: values to choose from."""

    name: str
    option: str = "finetune"
    method: str = ""
    arguments: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    tune: dict[str, list[Any]] = field(default_factory=dict)
    shots: tuple[int | None, ...] | None = None  # None: the table's
    data: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None
    checkpoint: str = ""  # beside that of the whole table; empty: that one
    source: str = ""  # of its settings: a paper, or who used them

    @property
    def methods(self) -> list[str]:
        return [name.strip() for name in self.method.split(",") if name]

    def combinations(self) -> list[dict[str, Any]]:
        """Each choice of a value for every key of `tune`."""
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
        """Raises `UserError` for a file that is no table, or one with a method that is refused."""
        text = read_text(path)
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not JSON: {error}") from None
        try:
            check_table(content)
            rows = tuple(Row(**{key: _frozen(value) for key, value in row.items()}) for row in content.pop("rows"))
            table = cls(Path(path).stem, rows=rows, **{key: _frozen(value) for key, value in content.items()})
            table._check("baseline" in content)
        except UserError as error:
            raise UserError(f"{path} is not a table of experiments: {error}") from None
        return table

    def _check(self, has_baseline: bool) -> None:
        """What cannot be seen of an entry alone. has_baseline: it names one."""
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
        """The rows whose checkpoint is known, with a line about the others. Raises `UserError` where none is left."""
        return self._without(model, [row for row in self.rows if not model.beside(row.checkpoint).is_known])

    def without_absent(self, model: Model) -> Table:
        """The rows that can be run, as their checkpoint is here; with a line about the others.

        Raises `UserError` where none is left.
        """
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
        """Raises `UserError` for a row whose method, option or attention is not for the kind of its model."""
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
        """Of these rows, and of the baseline, which they are compared with, on these data; all of them for None."""
        wanted = {row.name for row in self.rows} if rows is None else {*rows, self.baseline}
        settings = {name: own for name, own in self.data.items() if data is None or name in data}
        return replace(self, rows=tuple(row for row in self.rows if row.name in wanted), data=settings)

    def cells(self) -> Iterator[tuple[Row, str, int | None]]:
        """Every row on every data set and size; what is not trained, on the data alone."""
        for data, row in itertools.product(self.data, self.rows):
            sizes = (None,) if row.option == "prompt" else self.shots if row.shots is None else row.shots
            if row.data is None or data in row.data:
                yield from ((row, data, shots) for shots in sizes)

    def settings_of(self, row: Row, data: str) -> dict[str, Any]:
        """A value for each of `PLAN_SETTINGS`: what the row says, else the data set, else the table."""
        return PLAN_SETTINGS | self.settings | self.data[data] | row.settings

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
        """The runs that compare the row's values, and the row with others, on data held out of train.

        An empty list where it has no `tune`. Where that has one value, the final runs do not wait for them.
        """
        if not row.tune:
            return []
        each = itertools.product(row.combinations(), self.tune_seeds)
        return [self.trial(row, data, shots, seed, "tune", choice) for choice, seed in each]

    def final(
        self, row: Row, data: str, shots: int | None, model: Model, done: Mapping[str, Mapping[str, Any]]
    ) -> list[Trial] | None:
        """The row's runs, or None while the tuning is not done. done: results by key.

        Of equally good combinations the first is taken.
        """
        choices = row.combinations()
        if len(choices) > 1:
            tuning = self.tuning(row, data, shots)
            results = [done.get(trial.key(model)) for trial in tuning]
            if any(result is None for result in results):
                return None
            scores = [result["selection"] for result in results]
            each = len(self.tune_seeds)
            means = [fmean(scores[first : first + each]) for first in range(0, len(scores), each)]
            choices = [choices[means.index(max(means))]]
        seeds = self.seeds if row.seeds is None else row.seeds
        return [self.trial(row, data, shots, seed, "final", choices[0]) for seed in seeds]

    def ready(self, model: Model, done: Mapping[str, Mapping[str, Any]], only_tune: bool = False) -> list[Trial]:
        """The runs that can be started now, in the order in which to start them: seed by seed, so that a grid which is
        stopped has something of every row. only_tune: those alone that do not look at dev and test."""
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
