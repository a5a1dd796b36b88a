"""`Plan`, the frozen values that decide what a run computes, `ComputeSettings`, and the identity of a checkpoint.

In: checked flags. Out: values that a run is made of and known by. No PyTorch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.programs import import_folder, import_part
from engine.tables import Columns, has_columns
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
        to read, if the file has columns (see `tables.py`); they are part of the checksum."""
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
        values.pop("method_files", None)
        plain = {name: value.sha256 if isinstance(value, InputFile) else value for name, value in values.items()}
        files = {file.path: file.sha256 for file in self.method_files}
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


# ------------------------------------------------------------------------------------------------ the files of a run


def contract_model_path(args: Namespace) -> Path:
    kind = f"{args.family}-" if hasattr(args, "family") else ""
    return Path(f"{kind}{args.option}-{args.epochs}-{args.lr}.pt")


def model_candidates(args: Namespace, digest: str = "") -> list[Path]:
    """Possible paths of the fine-tuned model: the assignment's name, and two names that include the training data.

    digest: of the plan; it is part of the name if the run uses methods, because there are many combinations of them.
    """
    if args.model_out is not None:
        return [Path(args.model_out)]
    path = contract_model_path(args)
    if args.methods:
        parts = path.stem, *(method.name for method in args.methods), digest[:8]
        return [path.with_stem("-".join(filter(None, parts)))]
    suffixes = Path(args.train).stem, sha256_of(args.train)[:12]
    return [path, *(path.with_stem(f"{path.stem}-{suffix}") for suffix in suffixes)]


def files_of_model(path: Path) -> dict[str, Path]:
    """The files that belong to a fine-tuned model during training, each with a description."""
    return {
        f"the fine-tuned model, {path}": path,
        f"the resume point, {path.with_suffix('.resume')}": path.with_suffix(".resume"),
        f"the lock of the run, {path.with_suffix('.lock')}": path.with_suffix(".lock"),
    }


# ----------------------------------------------------------------------------------------- the identity of a checkpoint
# Checkpoints that the same command makes from the same texts count as one.
#
# Two processors round differently; after a few thousand steps their weights differ as much as those of two seeds. But
# published figures shall also hold for a model that is pretrained again on another machine. So its identity is a
# checksum of its settings and inputs, which `advanced.pretrain` writes to NEW.json, and `bert.pretrain` to a file in
# its directory. The identity of every other checkpoint is a checksum of its bytes.

PLACES = ("text", "init", "device")  # settings that are paths or devices; `origin` has the checksums of the files
RECORD = "pretraining.json"  # the name of the record in a directory


def origin(texts: Sequence[str], tokenizer: str | Path, init: str | None) -> dict[str, Any]:
    """The inputs of a pre-training run, as checksums. init: the checkpoint to start from; None: random weights."""
    first = None if init is None else identity_of(init)
    return {"text": [sha256_of(path) for path in texts], "tokenizer": sha256_of(tokenizer), "init": first}


def identity_of(checkpoint: str | Path) -> str:
    """The checksum of a checkpoint's settings and inputs, if it has a record of these weights; else of its bytes."""
    weights, path = checksum(checkpoint), Path(checkpoint)
    try:
        record = json.loads((path / RECORD if path.is_dir() else path.with_suffix(".json")).read_text(encoding="utf-8"))
        if record["weights"] != weights:
            return weights
        settings = {name: value for name, value in record["settings"].items() if name not in PLACES}
        content = {"settings": settings, "made_of": record["made_of"]}
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return weights
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def checksum(path: str | Path) -> str:
    """The checksum of a file, or of the files of the model in a directory.

    A file is read again only if its modification time has changed.
    """
    if not os.path.isdir(path):
        return _checksum(str(path), os.stat(path).st_mtime_ns)
    files = {os.path.basename(name): Path(path, name) for name in files_of(path)}
    sums = {name: _checksum(str(file), file.stat().st_mtime_ns) for name, file in files.items()}
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def files_of(folder: str | Path) -> list[str]:
    """The names of the files of model and tokenizer in a directory; of an adapter's base, paths. Raises `UserError`."""
    return import_part("convert.directory", "a Hugging Face directory").files_of_model(Path(folder))


@lru_cache(maxsize=256)
def _checksum(path: str, changed: int) -> str:
    return sha256_of(path)
