"""`Plan`, the frozen values that decide what a run computes, and `ComputeSettings`. No PyTorch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.columns import Columns, has_columns
from engine.programs import import_folder
from utils import sha256_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class InputFile:
    """An input file of a run, or files in a folder. Two are equal if their content is equal, wherever they lie."""

    sha256: str
    path: str = field(compare=False)

    @classmethod
    def of(cls, path: str | os.PathLike, names: Iterable[str] = (), columns: Columns | None = None) -> InputFile:
        """Compute the checksum. names: the files to read, or their paths, if `path` is a folder. columns: the columns
        to read, if the file has columns (see `columns.py`); they are part of the checksum."""
        if not os.path.isdir(path):
            content = sha256_of(path)
            if columns is not None and has_columns(path):
                content = hashlib.sha256(json.dumps([content, columns.text, columns.label]).encode()).hexdigest()
            return cls(content, str(path))
        sums = {os.path.basename(name): sha256_of(os.path.join(path, name)) for name in sorted(names)}
        return cls(hashlib.sha256(json.dumps(sums).encode()).hexdigest(), str(path))

    @classmethod
    def of_several(cls, paths: str) -> InputFile:
        """The files of a list with commas, in their order."""
        sums = [sha256_of(path) for path in paths.split(",")]
        return cls(hashlib.sha256(json.dumps(sums).encode()).hexdigest(), paths)


class ChosenMethod(NamedTuple):
    """A method's name, and its arguments and their values, in the order of the table of methods."""

    name: str
    settings: tuple[tuple[str, Any], ...]


ADDED = ("family", "dropout", "weight_decay", "clip", "method_files", "norm")  # settings that plans have not always had


@dataclass(frozen=True)
class Plan:
    """All values that decide what a fine-tuning computes, except `ComputeSettings`.

    attention: None: the checkpoint's own setting, which `assemble` fills in. norm: None: the checkpoint's own.
    """

    checkpoint: InputFile
    tokenizer: InputFile
    train: InputFile
    dev: InputFile
    label_names: tuple[str, ...]
    attention: str | None = None
    seed: int = 1337
    epochs: int = 5
    lr: float = 2e-5
    batch_size: int = 8
    hidden_dropout_prob: float = 0.3
    dropout: float | None = None  # in the pretrained model; None: as its config says
    weight_decay: float = 0.0
    clip: float | None = None  # the largest norm of all gradients together; None: any
    max_sentence_len: int | None = None
    precision: str = "fp32"
    train_eval: bool = True  # part of the plan: scoring the training data moves the random generator
    family: str = "llama"  # the model family of the checkpoint, see `families`
    option: str = "finetune"  # or "pretrain", which freezes the pretrained model
    methods: tuple[ChosenMethod, ...] = ()
    method_files: tuple[InputFile, ...] = ()  # of the methods' settings that name files, each with the setting as path
    shots: int | None = None  # the number of training sentences of each class; None: all
    norm: str | None = None
    hold_out: float = 0.0  # the share of the training data on which epochs are chosen; 0: they are chosen on dev

    def identity(self) -> dict[str, Any]:
        """The plan as plain values, to compare two plans; files become checksums. Of `ADDED`, defaults are left out, so
        that the identities of runs from before there were these settings stay valid."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        for each in dataclasses.fields(self):
            if each.name in ADDED and values[each.name] == each.default:
                del values[each.name]
        plain = {name: value.sha256 if isinstance(value, InputFile) else value for name, value in values.items()}
        files = {file.path: file.sha256 for file in plain.pop("method_files", ())}
        methods = {name: {key: files.get(value, value) for key, value in settings} for name, settings in self.methods}
        return {**plain, "label_names": list(self.label_names), "methods": methods}

    @property
    def digest(self) -> str:
        """The identity in 64 hexadecimal digits, the same on every machine."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()


class ComputeSettings(NamedTuple):
    """Where and how a run is computed. This changes rounding; another kind of device also draws other dropout masks.

    kernels: "auto": the fastest kernels that agree with the code; "plain": the code as it is written. shard: split the
    model over several processes. precision: the number format of matrix products, see `config.PRECISIONS`.
    insists: on that precision, although it suits no model of this size.
    """

    device: torch.device
    kernels: str = "auto"
    shard: bool = False
    precision: str = "fp32"
    insists: bool = False

    @property
    def kept_precision(self) -> str | None:
        """The precision in which a large model is kept in memory if nothing is trained; None: in float32."""
        is_plain = self.kernels == "plain" or self.shard or self.device.type != "cpu" or import_folder("fast") is None
        return None if is_plain else self.precision
