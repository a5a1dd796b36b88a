"""The text of --list-methods: a table of all methods, and below it the arguments of each.

The parameters that a method trains are counted in a model of the checkpoint's shape on device "meta", which has names
and shapes and no numbers.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence

import torch

from advanced import create, no_method, reason_between
from advanced.added import trainable_parameters
from advanced.entries import MethodEntry
from advanced.table import METHODS
from config import LlamaConfig
from engine.families import LLAMA_FAMILY, model_settings
from engine.methods import prepare
from engine.weights import blueprint
from llama import Llama
from tokenizer import Tokenizer
from utils import join_names

LIST_COLUMNS = ("method", "--option", "trains", "paper")
WIDTH = 100  # of a line
NOT_KNOWN = {"padding-mask", "distill"}  # whether they gain anything: the list below the first table of README.md
PRETRAINING = (
    "Continued pre-training, before all of these (arXiv:2004.10964):",
    "  python -m advanced.pretrain --init CKPT --text FILE... --out NEW.pt",
)


def chosen_of(names: str | None) -> dict[str, MethodEntry]:
    """The entries of the methods `a,b`; None: all. Raises `UserError` for an unknown name."""
    if names is None:
        return METHODS
    chosen = [name.strip() for name in names.split(",")]
    if unknown := [name for name in chosen if name not in METHODS]:
        raise no_method(unknown[0])
    return {name: entry for name, entry in METHODS.items() if name in chosen}


def lines_of(trained: Mapping[str, int] | None = None, names: str | None = None) -> Iterator[str]:
    """The lines of the table, of the arguments, and of the methods that do not combine.

    trained: the number of parameters that each method trains; None: not known. names: the methods `a,b`; None: all.
    """
    entries = chosen_of(names)
    rows = [LIST_COLUMNS, *(_row(name, entry, trained) for name, entry in entries.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, entry in zip(rows, (None, *entries.values()), strict=True):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        if entry is not None:
            gain = "; whether it gains anything is not known" if row[0] in NOT_KNOWN else ""
            yield from _wrapped(f"{entry.summary}; costs: {entry.cost}{gain}", "    ")
    yield ""
    yield "Arguments, as key=value or method.key=value, with their defaults:"
    arguments = {name: _arguments(entry) for name, entry in entries.items()}
    width = max((len(assignment) for given in arguments.values() for assignment in given), default=0)
    for name, given in arguments.items():
        yield name if given else f"{name}: no arguments"
        for assignment, help in given.items():
            yield from _wrapped(help, f"  {assignment:{width}}  ")
        if entries[name].attention is not None:
            yield f"  for {entries[name].attention} models alone"
        for reason, others in _conflicts(name).items():
            yield from _wrapped(f"{join_names(others)}: {reason}", "  not with ")
    yield ""
    yield from PRETRAINING


def _wrapped(text: str, before: str) -> list[str]:
    """The text in lines of at most `WIDTH` characters, all as far to the right as the first, which begins so."""
    indents = dict(initial_indent=before, subsequent_indent=" " * len(before))
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False, **indents)


def _conflicts(name: str) -> dict[str, list[str]]:
    """For each reason, the methods that this one cannot be combined with."""
    found: dict[str, list[str]] = {}
    for other in METHODS:
        if other != name and (reason := reason_between(name, other)):
            found.setdefault(reason, []).append(other)
    return found


def _row(name: str, entry: MethodEntry, trained: Mapping[str, int] | None) -> tuple[str, ...]:
    count = "-" if trained is None else f"{trained[name]:,}"
    return name, ", ".join(entry.options), count, entry.paper


def _arguments(entry: MethodEntry) -> dict[str, str]:
    """The help of each argument, by the text key=default."""
    defaults = {key: str(argument.default) for key, argument in entry.arguments.items()}
    defaults |= {key: text.lower() for key, text in defaults.items() if text in ("True", "False")}
    return {f"{key}={defaults[key]}": argument.help for key, argument in entry.arguments.items()}


def count_trained(
    config: LlamaConfig, tokenizer: Tokenizer, label_names: Sequence[str], names: str | None = None
) -> dict[str, int]:
    """The number of parameters that each method trains in a model of this shape, alone and with its defaults."""
    return {name: trained_by(name, config, tokenizer, label_names) for name in chosen_of(names)}


def trained_by(name: str, config: LlamaConfig, tokenizer: Tokenizer, label_names: Sequence[str]) -> int:
    """The number of parameters that one method trains; 0 for a zero-shot method and one that combines saved models."""
    entry = METHODS[name]
    if "finetune" not in entry.options or entry.combines:
        return 0
    chosen = name, entry.defaults
    attention = entry.attention or "bidirectional"
    with torch.device("meta"):
        llama = blueprint(dataclasses.replace(config, attention=attention), Llama)
        settings = model_settings(chosen if entry.is_head else None, len(label_names))
        model = LLAMA_FAMILY.make_classifier(settings, llama, tokenizer, label_names)
        prepare(model, [] if entry.is_head else [create(*chosen)])
    return trainable_parameters(model)
