"""A row of a table, one run of it, and the plan of that run. No PyTorch."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from advanced import choose, named_files
from advanced.experiments.models import Model
from engine.data import read_label_names
from engine.plan import InputFile, Plan, checksum, files_of
from utils import UserError, find_asset

PLAN_SETTINGS = {
    "lr": 1e-3, "epochs": 5, "batch_size": 8, "hidden_dropout_prob": 0.3, "hold_out": 0.1, "precision": "fp32",
    "attention": None, "max_sentence_len": None, "dropout": None, "weight_decay": 0.0, "clip": None,
}  # fmt: skip
DATA_SETTINGS = {"second_test": 0, "judged_on": ""}
SPLITS = ("train", "dev", "test", "label_names")  # the files of a data set
DRAWS = 1000  # between the seeds of models of one division of the data


@dataclass(frozen=True)
class Trial:
    """One run. phase: "tune", without dev and test, or "final". settings: a value for each of `PLAN_SETTINGS` and
    `DATA_SETTINGS`. draw: of several models of one division of the data, by `seed`, which. members: see the head."""

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
    draw: int = 0
    members: int = 1

    @property
    def training_seed(self) -> int:
        return self.seed + DRAWS * self.draw

    def each_member(self) -> list[Trial]:
        """The runs of the models that this one combines, all of one division of the data."""
        return [replace(self, members=1, draw=number) for number in range(self.members)]

    def model(self, model: Model) -> Model:
        """The model that it starts from. model: that of the whole table."""
        return model.beside(self.checkpoint)

    def key(self, model: Model) -> str:
        """A hash of everything that decides the run: equal in all tables and folders, different for other runs.

        model: that of the whole table, which keeps the key.
        """
        if self not in model.keys:
            model.keys[self] = self._key(self.model(model))
        return model.keys[self]

    def _key(self, model: Model) -> str:
        files = {split: path_of(self.data, split) for split in ("train", "dev", "test")}
        inputs = {name: checksum(path) for name, path in files.items()}
        inputs |= dict(zip(("checkpoint", "tokenizer"), model.checksums, strict=True))
        names = "option", "shots", "seed", "phase", "settings"
        own = {"method": self.method, **{name: getattr(self, name) for name in names}}
        own |= {"draw": self.draw} if self.draw else {}
        own |= {"members": self.members} if self.members > 1 else {}
        if judged := dict(self.settings)["judged_on"]:
            inputs["judged_on"] = [checksum(path_of(judged, split)) for split in files]
        else:  # a key from before there was this setting stays
            own["settings"] = tuple(each for each in self.settings if each[0] != "judged_on")
        methods = choose(self.method, self.arguments, self.option) if self.method else ()
        if files := named_files(methods):  # known by what is in them; absent ones have no results
            each = [path for paths in files for path in paths.split(",")]
            inputs["files"] = [checksum(path) if Path(path).exists() else path for path in each]
        arguments = [(name, [each for each in values if each[1] not in files]) for name, values in methods]
        label_names = read_label_names(path_of(self.data, "label_names"))
        content = {**own, **inputs, "arguments": arguments, "label_names": label_names}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def size_in_words(shots: int | None) -> str:
    """The amount of training data: sentences of each class, or all."""
    return "all" if shots is None else f"{shots} a class"


def name_of_data(data: str, split: str) -> str:
    """The name of a data set's file, from the folder that it is looked for in."""
    return f"data/{data}-label-mapping.json" if split == "label_names" else f"data/{data}-{split}.txt"


def path_of(data: str, split: str) -> str:
    """The path of a data set's file. Raises `UserError` if the file is not here."""
    name = name_of_data(data, split)
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
    members: int = 1
    source: str = ""  # of its settings: a paper, or a repository

    @property
    def methods(self) -> list[str]:
        return [name.strip() for name in self.method.split(",") if name]

    def combinations(self, rates: Sequence[float] = ()) -> list[dict[str, Any]]:
        """All choices of one value for every key of `tune`. rates: in the place of those for `lr`."""
        tune = self.tune | ({"lr": rates} if rates else {})
        return [dict(zip(tune, values, strict=True)) for values in itertools.product(*tune.values())]


def label_names_of(trial: Trial) -> list[str]:
    """The names of the classes of its data set."""
    return read_label_names(path_of(trial.data, "label_names"))


def plan_of(trial: Trial, model: Model) -> Plan:
    """model: that the run starts from."""
    files = {split: InputFile.of(path_of(trial.data, split)) for split in ("train", "dev")}
    settings = {name: value for name, value in trial.settings if name in PLAN_SETTINGS}
    if model.family != "llama":  # which has one kind of attention
        settings["attention"] = None
    own_files = files_of(model.checkpoint) if Path(model.checkpoint).is_dir() else ()
    methods = choose(trial.method, trial.arguments, family=model.family) if trial.method else ()
    return Plan(
        family=model.family,
        checkpoint=InputFile.of(model.checkpoint, own_files),
        tokenizer=InputFile.of(model.tokenizer),
        label_names=tuple(label_names_of(trial)),
        methods=methods,
        method_files=tuple(map(InputFile.of_several, named_files(methods))),
        seed=trial.training_seed,
        shots=trial.shots,
        train_eval=False,
        **files,
        **settings,
    )
