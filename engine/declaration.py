"""The declaration of one flag, from which the parser, `--help` and the checks are made; `flags.py` has all of them."""

from __future__ import annotations

import argparse
import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.programs import ArgumentParser, Default
from utils import UserError, decimal_number, whole_number


class Once(argparse.Action):
    """Refuses a flag that is given twice, because argparse would ignore its first value."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Namespace, values: Any, option: Any = None) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option} is given twice; name several with a comma between them")
        setattr(namespace, self.dest, values)


class Insisted(str):
    """A choice that the user has made twice on the command line."""


class Insisting(argparse.Action):
    """Tells a choice that is made twice, which insists on it, from one that is made once."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Namespace, values: Any, option: Any = None) -> None:
        before = getattr(namespace, self.dest)
        insists = before == values and not isinstance(before, Default)
        setattr(namespace, self.dest, Insisted(values) if insists else values)


def number_and_count(text: str) -> tuple[float, int]:
    """Parse a text such as `0.6,5`. Raises `ArgumentTypeError`."""
    number, _, count = text.partition(",")
    try:
        return decimal_number(number), whole_number(count)
    except ValueError:
        raise argparse.ArgumentTypeError("must be a number and a whole number, as in 0.6,5") from None


# ---------------------------------------------------------------------------------------------------- one declaration


class Range(NamedTuple):
    """The range of a number, and its description for errors. excludes: whether `least` and `most` are outside."""

    words: str
    least: float
    most: float = math.inf
    excludes: tuple[bool, bool] = (False, False)

    def holds(self, value: float) -> bool:
        is_low = value < self.least or (self.excludes[0] and value == self.least)
        is_high = value > self.most or (self.excludes[1] and value == self.most)
        return not (is_low or is_high or value != value)  # NaN is unequal to itself


class PairOfRanges(NamedTuple):
    """The ranges of two numbers with a comma between them, and their description for errors."""

    words: str
    first: Range
    second: Range

    def holds(self, values: tuple[float, float]) -> bool:
        return self.first.holds(values[0]) and self.second.holds(values[1])


AT_LEAST_1 = Range("must be at least 1", 1)
ABOVE_0 = Range("must be above 0 and finite", 0, excludes=(True, True))
FROM_0_TO_1 = Range("must be from 0 to 1", 0, 1)
BELOW_1 = Range("must be from 0 to below 1", 0, 1, excludes=(False, True))
ALPHA_AND_K = PairOfRanges("ALPHA must be from 0 to 1, and K from 1 to 1000", FROM_0_TO_1, Range("", 1, 1000))


@dataclass(frozen=True)
class Flag:
    """The declaration of one flag, for the parser, `--help` and the checks.

    type: int, float, str, bool for a switch, or a function from text to value. choices, metavar, action, default: as in
    argparse; a `Default` can be told apart from the same text typed by a user. options: the options that accept the
    flag, all others refuse it; empty: no option refuses it. reads: the options that read the file named by the flag.
    needed_by: the options that require the flag. group: its heading in --help.
    """

    name: str
    help: str
    type: Callable[[str], Any] = str
    default: Any = None
    within: Range | PairOfRanges | None = None
    options: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    needed_by: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    action: Any = None
    group: str = ""

    @property
    def dest(self) -> str:
        """The name of the flag's value among the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")

    def add_to(self, parser: Any) -> None:
        """Add the flag to a parser. parser: an `ArgumentParser`, or a group of one."""
        if self.type is bool:
            parser.add_argument(self.name, action="store_true", help=self.help)
            return
        wanted = {"choices": self.choices, "metavar": self.metavar, "action": self.action}
        if self.type is not str:  # `type=str` would turn a `Default` into plain text
            wanted["type"] = self.type
        if self.action == "extend":
            wanted["nargs"] = "+"
        given = {name: value for name, value in wanted.items() if value is not None}
        parser.add_argument(self.name, help=self.help, default=self.default, **given)

    def is_given(self, args: Namespace) -> bool:
        """Whether the flag has a value; 0 is a value."""
        value = getattr(args, self.dest, None)
        return value is not None and value is not False and value != []

    def check(self, args: Namespace) -> None:
        """Raise `UserError` for a value outside the flag's range."""
        value = getattr(args, self.dest, None)
        if value is not None and self.within is not None and not self.within.holds(value):
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            raise UserError(f"{self.name} {shown}: {self.within.words}")


def add_flags(parser: ArgumentParser, flags: tuple[Flag, ...]) -> None:
    """Add flags to a parser in this order, each under its heading."""
    groups: dict[str, Any] = {"": parser}
    for flag in flags:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        flag.add_to(groups[flag.group])
