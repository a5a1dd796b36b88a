"""Data lines, label mappings, gold labels. Imports only the standard library and `utils.py`.

Every command reads and writes the course's files with this module; `grading/lines.py` is the graders' own copy.
"""

from __future__ import annotations

import base64
import json
import os
import random
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from engine.json_text import lines_of
from utils import UserError, read_text, warn, whole_number

SEPARATOR = " ||| "
NO_GOLD_LABEL = -1


# ----------------------------------------------------------------------------------------------------------- data lines


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
    return tuple([examples[place] for place in sorted(part)] for part in _divided(examples, seed, shots, hold_out))


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
    """The predicted classes in a text that `pack` returned."""
    return list(zlib.decompress(base64.b64decode(text)))
