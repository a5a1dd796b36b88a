"""Methods beyond the base: a readable file for each or for a few alike, all on one training and one evaluation loop.

`table.py` lists the methods without importing PyTorch, so a wrong name or argument is refused before a model is loaded.
`create` and `create_head` import the file of a method when it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from itertools import combinations
from types import ModuleType
from typing import TYPE_CHECKING, Any

from advanced.entries import Argument, MethodEntry
from advanced.table import METHODS, WHY
from engine.plan import ChosenMethod
from engine.programs import NeedsCausal, did_you_mean
from utils import UserError, join_names, short_repr

if TYPE_CHECKING:
    from engine.methods import Method
    from llama import Llama
    from tokenizer import Tokenizer

__all__ = [
    "METHODS", "Argument", "ChosenMethod", "MethodEntry", "choose", "create", "create_head", "named_files", "part",
    "reason_between",
]  # fmt: skip


def no_method(name: str) -> UserError:
    """The error for a name that no method has."""
    near = did_you_mean(name, METHODS)
    return UserError(f"there is no method {name!r}{near or '; there are ' + ', '.join(METHODS)}")


def choose(
    names: str,
    assignments: Sequence[str] = (),
    option: str = "finetune",
    family: str = "llama",
    attention: str | None = None,
) -> tuple[ChosenMethod, ...]:
    """The methods `a,b`, in the order of the table, which is the order in which they work.

    assignments: `key=value` or `method.key=value`; other arguments have their defaults. family: the kind of the model.
    attention: of the model; None: not known. Raises `UserError` for an unknown name or argument, a value that is not
    allowed, a key that several methods have, and methods that cannot be combined or are not for such a model
    (`NeedsCausal` if only a causal model would do).
    """
    chosen = [name.strip() for name in names.split(",")]
    _check_names(chosen, option, family)
    settings = {name: METHODS[name].defaults for name in chosen}
    given = set()
    for assignment in assignments:
        name, key, text = _parse_assignment(assignment, chosen)
        if (name, key) in given:
            raise UserError(f"{assignment}: {name}.{key} is given twice")
        given.add((name, key))
        settings[name][key] = _checked(METHODS[name].arguments[key], assignment, text)
    for name in chosen:
        if reason := METHODS[name].refuses(settings[name], settings):
            raise UserError(f"{name}: {reason}")
        if attention is not None:
            check_attention(name, attention)
    return tuple(ChosenMethod(name, tuple(settings[name].items())) for name in METHODS if name in chosen)


def _check_names(chosen: list[str], option: str, family: str) -> None:
    """Raises `UserError` for an unknown method, one not for `option` or `family`, or two that do not combine."""
    for name in chosen:
        if name not in METHODS:
            raise no_method(name)
        if option not in METHODS[name].options:
            raise UserError(f"{name} is for {' and '.join(METHODS[name].options)}, not for {option}")
        if family not in METHODS[name].families:
            fitting = [other for other, entry in METHODS.items() if family in entry.families]
            raise UserError(f"{name} is not for models of the kind {family}; for these there are {', '.join(fitting)}")
    alone = [name for name in chosen if METHODS[name].combines]
    if alone and len(chosen) > 1:
        raise UserError(f"{alone[0]} cannot be combined with other methods: it takes saved models and trains nothing")
    if len(set(chosen)) < len(chosen):
        raise UserError(f"a method is named twice: {', '.join(chosen)}")
    for name, other in combinations(chosen, 2):
        if reason := reason_between(name, other):
            raise UserError(f"{name} and {other} cannot be combined: {reason}")


def reason_between(name: str, other: str) -> str:
    """Why two methods cannot be combined, from the entry of either; "" if they can."""
    one, two = METHODS[name], METHODS[other]
    if one.is_head and two.is_head:
        return "each says what is predicted"
    if reason := one.conflicts.get(other) or two.conflicts.get(name):
        return reason
    is_apart = None not in (one.attention, two.attention) and one.attention != two.attention
    return "one is for causal models, the other for bidirectional ones" if is_apart else ""


def check_attention(name: str, attention: str) -> None:
    """Raises `UserError` for a method that is not for a model of this attention."""
    needed = METHODS[name].attention
    if needed not in (None, attention):
        raise (NeedsCausal if needed == "causal" else UserError)(f"{name} {WHY[needed]}")


def _parse_assignment(assignment: str, chosen: list[str]) -> tuple[str, str, str]:
    """Method, key and text of `key=value` or `method.key=value`."""
    path, separator, text = assignment.partition("=")
    prefix, dot, key = path.rpartition(".")
    if not separator or not key:
        raise UserError(f"{assignment}: an argument of a method is key=value, or method.key=value")
    if dot and prefix not in chosen:
        raise UserError(f"{assignment}: {prefix!r} is none of the methods {join_names(chosen)}")
    fitting = [name for name in ([prefix] if dot else chosen) if key in METHODS[name].arguments]
    if not fitting:
        known = [f"{name}.{each}" for name in chosen for each in METHODS[name].arguments]
        raise UserError(f"{assignment}: no argument of that name; there are {join_names(known)}")
    if len(fitting) > 1:
        raise UserError(f"{assignment}: {' and '.join(fitting)} have an argument {key}; write {fitting[0]}.{key}=...")
    return fitting[0], key, text


def _checked(argument: Argument, assignment: str, text: str) -> Any:
    try:
        value = argument.parse(text)
    except ValueError:
        raise UserError(f"{assignment}: must be {_kind(argument.default)}") from None
    if not argument.fits(value):
        raise UserError(f"{assignment}: must be {argument.wanted}")
    return value


def _kind(default: Any) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[type(default)]


def named_files(chosen: Sequence[ChosenMethod]) -> list[str]:
    """The values of all arguments that name files; several files of one argument are joined by commas."""
    values = ((METHODS[name].arguments[key], value) for name, settings in chosen for key, value in settings)
    return [value for argument, value in values if argument.names_files and value]


def part(name: str) -> ModuleType:
    """A module of this folder, for code that must also work without the folder."""
    return importlib.import_module(f"advanced.{name}")


def create(name: str, settings: Mapping[str, Any]) -> Method:
    """A method. Raises `UserError` for a name or settings that are not in the table, as a saved run may have."""
    return _class_of(name, settings, is_head=False)(**settings)


def create_head(
    name: str, settings: Mapping[str, Any], llama: Llama, tokenizer: Tokenizer, label_names: list[str]
) -> Any:
    """A classifier that replaces the base's: token ids b s -> log-probabilities b c.

    Raises `UserError` as `create` does, and `NeedsCausal` if the head needs a causal model and this is none.
    """
    made = _class_of(name, settings, is_head=True)
    check_attention(name, llama.config.attention)
    return made(llama, tokenizer, label_names, **settings)


def _class_of(name: str, settings: Mapping[str, Any], is_head: bool) -> Any:
    entry = METHODS.get(name)
    if entry is None or entry.is_head != is_head or entry.combines:
        raise UserError(
            f"there is no {'head' if is_head else 'method'} {short_repr(name)} here; there are {join_names(METHODS)}"
        )
    for key, value in settings.items():
        argument = entry.arguments.get(key)
        if argument is None or type(value) is not type(argument.default) or not argument.fits(value):
            raise UserError(f"the method {name} has no setting {short_repr(key)}={short_repr(value)}")
    module, _, class_name = entry.class_path.rpartition(".")
    return getattr(importlib.import_module(module), class_name)
