"""What an entry of the table of methods holds: `MethodEntry`, and the kinds of typed arguments. No PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from utils import decimal_number, whole_number

EVERY = ("llama", "bert")  # families: for methods that need no part which only one of the models has


@dataclass(frozen=True)
class Argument:
    """One argument of a method. fits: whether a value is allowed; wanted: the allowed values in words.

    names_files: whether its value is the name of a file, or several with commas; they are inputs of the run.
    """

    default: Any
    help: str
    fits: Callable[[Any], bool] = lambda value: True
    wanted: str = "of that kind"
    names_files: bool = False

    def parse(self, text: str) -> Any:
        """The text as a value of the default's type. Raises `ValueError`."""
        if isinstance(self.default, bool):
            if text.lower() not in ("true", "false"):
                raise ValueError("not true or false")
            return text.lower() == "true"
        return {int: whole_number, float: decimal_number, str: str}[type(self.default)](text)


@dataclass(frozen=True)
class MethodEntry:
    """Where a method's class is, its arguments, and what it cannot be combined with.

    class_path: module and class. summary: what the method changes, as the rest of a sentence that begins with its name.
    conflicts: for each other method, the reason. paper: where it is published. cost: of a training step, compared with
    a plain one, in words. options: the values of --option that accept it. is_head: it replaces the base's classifier
    (`create_head`) and is no `Method`. attention: the only kind of attention that it is for, or None. families: the
    kinds of models that it is for (see `engine.families`). holds_out: it chooses something by a score, so a part of the
    training data is held out. needs_shots: it needs sentences without labels, see `Method.uses_unlabelled`. combines:
    "weights" or "predictions", if it combines those of saved models and trains nothing (`engine.finetuning`);
    class_path is then a function. refuses: called with its settings and with those of all chosen methods by name;
    returns why they make no sense together, or "".
    """

    class_path: str
    summary: str
    arguments: dict[str, Argument] = field(default_factory=dict)
    conflicts: Mapping[str, str] = field(default_factory=dict)
    paper: str = ""
    cost: str = "none"
    options: tuple[str, ...] = ("finetune",)
    families: tuple[str, ...] = ("llama",)
    is_head: bool = False
    attention: str | None = None
    holds_out: bool = False
    combines: str = ""
    needs_shots: bool = False
    refuses: Callable[[dict[str, Any], Mapping[str, dict[str, Any]]], str] = lambda settings, every: ""

    @property
    def is_enough(self) -> bool:
        """Whether it trains, and needs nothing but its defaults and labelled sentences."""
        return not self.needs_shots and not any(argument.names_files for argument in self.arguments.values())

    @property
    def defaults(self) -> dict[str, Any]:
        return {key: argument.default for key, argument in self.arguments.items()}


def count(default: int, help: str, least: int = 1, most: int = 2**16) -> Argument:
    """A whole number, from `least` to `most`, both included."""
    return Argument(default, help, lambda number: least <= number <= most, f"from {least} to {most}")


def share(default: float, help: str) -> Argument:
    """From 0 to below 1: a probability of dropping, a decay."""
    return Argument(default, help, lambda value: 0 <= value < 1, "from 0 to below 1")


def part(default: float, help: str) -> Argument:
    """From 0 to 1, both included."""
    return Argument(default, help, lambda value: 0 <= value <= 1, "from 0 to 1")


LEAST, MOST = 1e-9, 1e6  # a smaller number would change nothing; with a larger one float32 overflows
LIMITS = f"from {LEAST:g} to {MOST:g}"


def positive(default: float, help: str) -> Argument:
    return Argument(default, help, lambda value: LEAST <= value <= MOST, f"above 0 and finite, {LIMITS}")


def not_negative(default: float, help: str) -> Argument:
    wanted = f"at least 0 and finite, {LIMITS} if it is not 0"
    return Argument(default, help, lambda value: value == 0 or LEAST <= value <= MOST, wanted)


def one_of(values: Collection[str], default: str, help: str) -> Argument:
    listed = ", ".join(values)
    return Argument(default, f"{help}: {listed}", lambda value: value in values, f"one of {listed}")


def some_of(values: Collection[str], default: str, help: str, what: str) -> Argument:
    """Names joined by +, each at most once. what: the noun for the names."""
    listed = ", ".join(values)

    def fits(text: str) -> bool:
        names = text.split("+")
        return {*names} <= {*values} and len({*names}) == len(names)

    wanted = f"names of {what}, joined by +, each once: {listed}"
    return Argument(default, f"{help}, joined by +: {listed}", fits, wanted)


def models_joined(help: str, least: int = 0) -> Argument:
    """Files of saved models, joined by commas, each once. least: how many there must be; 0: "" stands for none."""

    def fits(text: str) -> bool:
        names = text.split(",") if text or least else []
        return len(names) >= least and all(name.strip() == name != "" for name in names) and len({*names}) == len(names)

    wanted = f"{f'at least {least} ' if least else ''}files that finetune has saved, joined by commas, each once"
    return Argument("", f"{help}, joined by commas", fits, wanted, True)
