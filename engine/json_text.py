"""JSON that people or other programs have written: parsing it, and finding entries of a wrong kind. No PyTorch."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from utils import UserError, read_text, short_repr

# a pair of surrogates, which is one character; a lone one, in the group; any other escape
ESCAPES = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.", re.DOTALL)
LARGEST = 1e300  # of a number: beyond it, means and differences would overflow


def parse_json(text: str, is_line: bool = False) -> Any:
    r"""The value of a JSON text. Raises `ValueError`: what is wrong, and where. is_line: of a file of one a line.

    Unlike `json.loads` it refuses a lone surrogate (`\ud83d`), which is half a character and cannot be written as
    UTF-8, and an object with two entries of one name, of which `json.loads` would drop the first.
    """
    try:
        if "\\ud" in text or "\\uD" in text:
            if lone := next((found for found in ESCAPES.finditer(text) if found[1]), None):
                raise json.JSONDecodeError(f"{lone[1]} is half a character (a lone surrogate)", text, lone.start())
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        line = "" if is_line else f"line {error.lineno}, "
        raise ValueError(f"{error.msg} ({line}column {error.colno})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"two entries of one object are called {short_repr(twice)}")
    return found


def read_json(path: str | os.PathLike) -> Any:
    """The value of a JSON file. Raises `UserError`."""
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None


def lines_of(path: str | os.PathLike) -> list[str]:
    """The lines of a text file. Only line ends divide it: a text in JSON may hold U+0085, U+2028 and U+2029."""
    lines = read_text(path).split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def misfit(value: Any, kind: Any, place: str = "the line") -> str:
    """The place of the first value that is not of its kind; "" if all are.

    kind: a class (float: any finite number), None, a tuple of possible kinds, [kind] for a list of such values, or a
    dict with the kind of each entry: a name with ? at its end may be absent, "*" stands for all entries not named.
    """
    if isinstance(kind, tuple):
        found = [misfit(value, each, place) for each in kind]
        return "" if "" in found else found[-1]
    if isinstance(kind, list):
        if not isinstance(value, list):
            return place
        return next((where for each in value if (where := misfit(each, kind[0], f"an item of {place}"))), "")
    if isinstance(kind, Mapping):
        return _misfit_in(value, kind, place)
    if kind is float:
        is_fit = type(value) in (int, float) and abs(value) <= LARGEST
    else:
        is_fit = value is None if kind is None else type(value) is kind
    return "" if is_fit and not (kind is int and abs(value) > LARGEST) else place


def _misfit_in(value: Any, kinds: Mapping[str, Any], place: str) -> str:
    if not isinstance(value, dict):
        return place
    wanted = {name.removesuffix("?"): kind for name, kind in kinds.items() if name != "*"}
    for name in (*wanted, *(value.keys() - wanted.keys() if "*" in kinds else ())):
        is_optional = f"{name}?" in kinds
        if name in value:
            if where := misfit(value[name], wanted.get(name, kinds.get("*")), f"{short_repr(name)} of {place}"):
                return where
        elif not is_optional:
            return f"{short_repr(name)} of {place}"
    return ""
