"""Data lines, label mappings, gold labels, and JSON that others have written. Only the standard library and
`utils.py`.

In: files of texts with labels. Out: `Example`s, label names, lines of predictions. Every command reads and writes
the course's files with this module; `grading/programs.py` has the graders' own copy.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from utils import UserError, read_text, short_repr, warn, whole_number

# a pair of surrogates, which is one character; a lone one, in the group; any other escape
ESCAPES = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.", re.DOTALL)
MOST_PREDICTIONS = 1 << 24  # of a text in a line of results
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


# ----------------------------------------------------------------------------------------------------------- data lines

SEPARATOR = " ||| "
NO_GOLD_LABEL = -1


class Example(NamedTuple):
    """One line of a data file, or of an output file, where the label is a prediction."""

    sentence: str
    label: int


def parse_line(line: str) -> Example:
    """Parse a line `LABEL ||| sentence`; white space around both is dropped. Raises `ValueError` with the reason.

    The first separator divides the line; the sentence may contain others.
    """
    label, separator, sentence = line.partition(SEPARATOR)
    sentence = sentence.strip()
    if not separator:
        raise ValueError(f"no '{SEPARATOR}' between label and sentence")
    if not sentence:
        raise ValueError("the sentence is empty")
    try:
        return Example(sentence, whole_number(label.strip()))
    except ValueError:
        raise ValueError(f"the label {label[:40]!r} is not a whole number") from None


def format_line(label: int | str, sentence: str) -> str:
    """The inverse of `parse_line`, without a line end."""
    return f"{label}{SEPARATOR}{sentence}"


def is_empty_line(line: str) -> bool:
    """Whether a data line has no sentence; an editor may have cut the space after the separator."""
    label, separator, sentence = f"{line} ".partition(SEPARATOR)
    return not (sentence if separator else label).strip()


def create_data(
    path: str | os.PathLike, num_labels: int | None = None, *, is_test: bool = False, skip_empty: bool = False
) -> list[Example]:
    """The examples of a UTF-8 data file with one `LABEL ||| sentence` per line.

    num_labels: labels must be in 0 ... num_labels - 1; None: every label from 0 up is accepted. A test file without
    gold labels may have -1 on every line. skip_empty: leave out lines without a sentence, and warn how many there are.
    Raises `UserError`, naming file and line, for any other content.
    """
    lines = lines_of(path)
    numbered = [(number, line) for number, line in enumerate(lines, 1) if not (skip_empty and is_empty_line(line))]
    if len(numbered) < len(lines):
        warn(f"{path}: {len(lines) - len(numbered)} of {len(lines)} lines are left out, which have no sentence")
    if not numbered:
        raise UserError(f"{path} holds no data; expected lines of the form 'LABEL{SEPARATOR}sentence'")
    is_unlabelled = is_test and all(line.partition(SEPARATOR)[0].strip() == str(NO_GOLD_LABEL) for _, line in numbered)
    lowest = NO_GOLD_LABEL if is_unlabelled else 0
    examples = []
    for number, line in numbered:
        try:
            example = parse_line(line)
        except ValueError as error:
            raise UserError(f"{path} line {number}: {error}") from None
        if example.label < lowest or (num_labels is not None and example.label >= num_labels):
            allowed = "0 or more" if num_labels is None else f"from 0 to {num_labels - 1}, as the label mapping says"
            raise UserError(f"{path} line {number}: the label {example.label} is not {allowed}")
        examples.append(example)
    return examples


def divide(
    examples: Sequence[Example], seed: int, shots: int | None = None, hold_out: float = 0.0
) -> tuple[list[Example], list[Example]]:
    """Divide examples into training examples and held-out examples (to choose epochs on), both in their order.

    shots: draw this number of training examples of each class; None: take all. hold_out: 0 holds out none. Above 0, it
    is the share of each class to hold out, at least one example; with `shots`, the number of shots is held out instead.
    Raises `UserError` if a class has too few examples.
    """
    train, held_out = _divided(examples, seed, shots, hold_out)
    return [examples[place] for place in sorted(train)], [examples[place] for place in sorted(held_out)]


def set_aside(examples: Sequence[Example], seed: int, shots: int | None, hold_out: float) -> list[Example]:
    """The examples that `divide` puts into neither part, without their labels."""
    train, held_out = _divided(examples, seed, shots, hold_out)
    rest = (example for place, example in enumerate(examples) if place not in train | held_out)
    return [example._replace(label=NO_GOLD_LABEL) for example in rest]


def _divided(examples: Sequence[Example], seed: int, shots: int | None, hold_out: float) -> tuple[set[int], set[int]]:
    """The places of the examples of both parts, see `divide`."""
    drawing, train, held_out = random.Random(seed), set(), set()
    for label in sorted({example.label for example in examples}):
        places = [place for place, example in enumerate(examples) if example.label == label]
        drawing.shuffle(places)
        held = shots or max(1, round(hold_out * len(places))) if hold_out else 0
        rest = len(places) - held if shots is None else shots
        if rest < 1 or rest + held > len(places):
            wanted = f"{rest} to train on" if shots else "one to train on"
            wanted += f" and {held} to hold out" if held else ""
            raise UserError(f"class {label} has {len(places)} examples, too few for {wanted}")
        train |= {*places[:rest]}
        held_out |= {*places[rest : rest + held]}
    return train, held_out


# --------------------------------------------------------------------------------------------------------------- labels


def read_label_names(path: str | os.PathLike) -> list[str]:
    """Read a label mapping. Raises `UserError` unless it is a JSON list of at least two distinct, non-empty strings."""
    text = read_text(path)
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    is_list = isinstance(names, list) and all(
        isinstance(name, str) and name.strip() and name.isprintable() for name in names
    )
    if not is_list or len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f'{path} must be a JSON list of two or more distinct names, such as ["bad", "good"]')
    return names


def has_gold_labels(labels: Sequence[int]) -> bool:
    """Whether the labels of a data set can be gold labels; placeholders are all equal."""
    return len(set(labels)) > 1


def majority_accuracy(labels: Sequence[int]) -> float:
    """The accuracy of always answering the most frequent gold label."""
    return Counter(labels).most_common(1)[0][1] / len(labels)


# ----------------------------------------------------------------------------------------------------- predictions


def pack(predictions: Sequence[int]) -> str:
    """Predicted classes as compressed text, about a third of the length of one digit per prediction."""
    return base64.b64encode(zlib.compress(bytes(predictions), 9)).decode()


def unpack(text: str) -> list[int]:
    """The predicted classes in a text that `pack` returned. Raises `ValueError` or `zlib.error` for any other text."""
    unpacking = zlib.decompressobj()
    found = unpacking.decompress(base64.b64decode(text), MOST_PREDICTIONS)
    if not unpacking.eof:
        raise ValueError(f"a text that is cut, or holds more than {MOST_PREDICTIONS:,} classes")
    return list(found)
