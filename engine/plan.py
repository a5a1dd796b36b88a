"""What a run is to compute: frozen values, without PyTorch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.columns import Columns, has_columns
from utils import sha256_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class InputFile:
    """A file, or the files of a folder, that a run reads: it is what its content is, wherever it lies."""

    sha256: str
    path: str = field(compare=False)

    @classmethod
    def of(cls, path: str | os.PathLike, names: Iterable[str] = (), columns: Columns | None = None) -> InputFile:
        """names: of the files that a run reads of a folder, where `path` is one. columns: those that it reads, of a
        file that has some (see `columns.py`)."""
        if not os.path.isdir(path):
            content = sha256_of(path)
            if columns is not None and has_columns(path):
                content = hashlib.sha256(json.dumps([content, *columns]).encode()).hexdigest()
            return cls(content, str(path))
        sums = {name: sha256_of(os.path.join(path, name)) for name in sorted(names)}
        return cls(hashlib.sha256(json.dumps(sums).encode()).hexdigest(), str(path))


class ChosenMethod(NamedTuple):
    """A method with a value for each of its arguments, in the order of the table."""

    name: str
    settings: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Plan:
    """All that decides what a fine-tuning computes, but for the machine.

    attention: None for what the checkpoint declares; `assemble` fills it in.
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
    max_sentence_len: int | None = None
    precision: str = "fp32"
    train_eval: bool = True  # going through the training data once more moves the random generator
    family: str = "llama"  # the kind of the checkpoint, see `families`
    option: str = "finetune"  # or "pretrain", which freezes the pretrained model
    methods: tuple[ChosenMethod, ...] = ()
    shots: int | None = None  # train on so many sentences of each class; None for all
    hold_out: float = 0.0  # the share of the training data that epochs are chosen on, in the place of dev

    def identity(self) -> dict[str, Any]:
        """Plain values by which two plans are equal: those of files are checksums. A Llama's does not say its family:
        there were saved runs before there was another one."""
        names = [each.name for each in dataclasses.fields(self) if (each.name, self.family) != ("family", "llama")]
        values = {name: getattr(self, name) for name in names}
        plain = {name: value.sha256 if isinstance(value, InputFile) else value for name, value in values.items()}
        methods = {name: dict(settings) for name, settings in self.methods}
        return {**plain, "label_names": list(self.label_names), "methods": methods}

    @property
    def digest(self) -> str:
        """The identity in 64 hexadecimal digits, the same on every machine."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()


class ComputeSettings(NamedTuple):
    """Where and how a run is computed: this changes rounding, and on another kind of device the masks of dropout.

    kernels: "auto" for the fastest that agree with the code, "plain" for the code as it is written. shard: split the
    model over several processes. precision: the number format of the products, see `config.PRECISIONS`.
    """

    device: torch.device
    kernels: str = "auto"
    shard: bool = False
    precision: str = "fp32"
