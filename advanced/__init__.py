"""Ways to train beyond the base: one readable file for each, all around the one training loop.

This table says what there is, without importing PyTorch: a wrong name or argument is refused before anything is loaded.
`create` imports the file of a method that is used.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from utils import UserError, decimal_number, shown, some, whole_number

if TYPE_CHECKING:
    from training import Method


@dataclass(frozen=True)
class Argument:
    """One argument of a method. fits: which values it can have, said in words by `wanted`."""

    default: Any
    help: str
    fits: Callable[[Any], bool] = lambda value: True
    wanted: str = "of that kind"

    def parse(self, text: str) -> Any:
        """A value of the default's type. Raises `ValueError`."""
        if isinstance(self.default, bool):
            return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else _refuse()
        return {int: whole_number, float: decimal_number, str: str}[type(self.default)](text)


def _refuse() -> None:
    raise ValueError("not true or false")


@dataclass(frozen=True)
class MethodEntry:
    """Where a method is, what it takes, and what it cannot be combined with."""

    module: str
    class_name: str
    summary: str
    arguments: dict[str, Argument]
    conflicts: tuple[str, ...] = ()


class ChosenMethod(NamedTuple):
    """A method with a value for each of its arguments, in the order of the table."""

    name: str
    settings: tuple[tuple[str, Any], ...]


METHODS = {
    "lora": MethodEntry(
        "advanced.lora",
        "LoRA",
        "trains low-rank updates of frozen matrices",
        {
            "rank": Argument(8, "r, the rank of an update", lambda rank: 1 <= rank <= 2**16, "from 1 to 2^16"),
            "alpha": Argument(
                16.0, "updates are scaled by alpha / r", lambda alpha: 0 < alpha < math.inf, "above 0 and finite"
            ),
            "dropout": Argument(0.0, "of what the update reads", lambda p: 0 <= p < 1, "from 0 to below 1"),
            "targets": Argument(
                "compute_query+compute_value",
                "matrices that are updated, joined by +: compute_query, compute_key, compute_value, compute_output, "
                "w1, w2, w3",
                lambda names: bool(names) and set(names.split("+")) <= LORA_TARGETS,
                "names of matrices, joined by +",
            ),
        },
    ),
    "ema": MethodEntry(
        "advanced.ema",
        "EMA",
        "evaluates and saves an exponential moving average of the weights",
        {"decay": Argument(0.99, "of the average, per step", lambda decay: 0 <= decay < 1, "from 0 to below 1")},
    ),
}
LORA_TARGETS = {"compute_query", "compute_key", "compute_value", "compute_output", "w1", "w2", "w3"}


def choose(names: str, assignments: Sequence[str] = ()) -> tuple[ChosenMethod, ...]:
    """The methods `a,b`, with `key=value` or `method.key=value` for the arguments that are not the default.

    They come in the order of the table, which is that of their work: what adds parameters before what averages them.
    Raises `UserError` for an unknown name or argument, a value that does not fit, a key that fits several methods, and
    methods that cannot be combined.
    """
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in METHODS:
            raise UserError(f"there is no method {name!r}; there are {some(METHODS)}")
    if len(set(chosen)) < len(chosen):
        raise UserError(f"a method is named twice in {names}")
    for name in chosen:
        if clash := set(METHODS[name].conflicts) & set(chosen):
            raise UserError(f"{name} and {some(sorted(clash))} cannot be combined")
    settings = {name: {key: each.default for key, each in METHODS[name].arguments.items()} for name in chosen}
    given = set()
    for assignment in assignments:
        name, key, text = _parse_assignment(assignment, chosen)
        if (name, key) in given:
            raise UserError(f"{assignment}: {name}.{key} is given twice")
        given.add((name, key))
        settings[name][key] = _checked(METHODS[name].arguments[key], assignment, text)
    return tuple(ChosenMethod(name, tuple(settings[name].items())) for name in METHODS if name in chosen)


def _parse_assignment(assignment: str, chosen: list[str]) -> tuple[str, str, str]:
    """Method, key and text of `key=value` or `method.key=value`."""
    path, separator, text = assignment.partition("=")
    prefix, dot, key = path.rpartition(".")
    if not separator or not key:
        raise UserError(f"{assignment}: an argument of a method is key=value, or method.key=value")
    if dot and prefix not in chosen:
        raise UserError(f"{assignment}: {prefix!r} is none of the methods {some(chosen)}")
    fitting = [name for name in ([prefix] if dot else chosen) if key in METHODS[name].arguments]
    if not fitting:
        known = [f"{name}.{each}" for name in chosen for each in METHODS[name].arguments]
        raise UserError(f"{assignment}: no argument of that name; there are {some(known)}")
    if len(fitting) > 1:
        raise UserError(f"{assignment}: {' and '.join(fitting)} have an argument {key}; write {fitting[0]}.{key}=...")
    return fitting[0], key, text


def _checked(argument: Argument, assignment: str, text: str) -> Any:
    try:
        value = argument.parse(text)
    except ValueError:
        raise UserError(f"{assignment}: must be a {_kind(argument.default)}") from None
    if not argument.fits(value):
        raise UserError(f"{assignment}: must be {argument.wanted}")
    return value


def _kind(default: Any) -> str:
    return {bool: "true or false", int: "whole number", float: "number", str: "text"}[type(default)]


def create(name: str, settings: Mapping[str, Any]) -> Method:
    """The method itself. Raises `UserError` where a saved run names one that is not here, or has other settings."""
    entry = METHODS.get(name)
    if entry is None:
        raise UserError(f"there is no method {name!r} here; there are {some(METHODS)}")
    for key, value in settings.items():
        argument = entry.arguments.get(key)
        if argument is None or type(value) is not type(argument.default) or not argument.fits(value):
            raise UserError(f"the method {name} has no setting {shown(key)}={shown(value)}")
    return getattr(importlib.import_module(entry.module), entry.class_name)(**settings)
