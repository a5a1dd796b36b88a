"""What the assignment fixes: data lines, label mappings, the prompt, what counts as a gold label.

Every program that reads or writes the course's files does it through here, so that they agree on every line. Needs
the standard library and `utils.py` alone.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from utils import UserError, read_text, whole_number

SEPARATOR = " ||| "
NO_GOLD_LABEL = -1

LABEL_NAMES = {"sst": ("awful", "bad", "average", "good", "excellent"), "cfimdb": ("bad", "good")}  # as published


# ------------------------------------------------------------------------------------------------- data lines


class Example(NamedTuple):
    """One line of a data file, or of an output file, where the label is a prediction."""

    sentence: str
    label: int


def parse_line(line: str) -> Example:
    """What a line `LABEL ||| sentence` says; white space around the two is dropped. Raises `ValueError`: what is wrong.

    The first separator counts: a sentence may hold another.
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


def format_line(label: int, sentence: str) -> str:
    """The inverse of `parse_line`, without a line end."""
    return f"{label}{SEPARATOR}{sentence}"


def create_data(path: str | os.PathLike, num_labels: int | None = None, *, is_test: bool = False) -> list[Example]:
    """The examples of a data file, one `LABEL ||| sentence` a line, UTF-8.

    num_labels: labels must lie in 0 ... num_labels - 1; None accepts every label from 0 up. A test file without gold
    labels may have -1 on every line. Raises `UserError`, naming file and line, for anything else.
    """
    lines = read_text(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise UserError(f"{path} holds no data; expected lines of the form 'LABEL{SEPARATOR}sentence'")
    is_unlabelled = is_test and all(line.partition(SEPARATOR)[0].strip() == str(NO_GOLD_LABEL) for line in lines)
    lowest = NO_GOLD_LABEL if is_unlabelled else 0
    examples = []
    for number, line in enumerate(lines, 1):
        try:
            example = parse_line(line)
        except ValueError as error:
            raise UserError(f"{path} line {number}: {error}") from None
        if example.label < lowest or (num_labels is not None and example.label >= num_labels):
            allowed = "0 or more" if num_labels is None else f"from 0 to {num_labels - 1}, as the label mapping says"
            raise UserError(f"{path} line {number}: the label {example.label} is not {allowed}")
        examples.append(example)
    return examples


# ------------------------------------------------------------------------------------- sentences, as they come

STANDARD_INPUT = "-"
PATIENCE = 0.2  # seconds without a new line, after which what has come is worked on


def read_sentences(path: str) -> Iterator[str | None]:
    """The sentences of a file, one a line, or of standard input (-), however many; None where no more are at hand yet.

    A data file is read as well: where its first line is `LABEL ||| sentence`, all are, and the labels are dropped.
    Raises `UserError`, naming the line, for one that is empty or not UTF-8, and for an input without sentences.
    """
    name, number, is_data = "standard input" if path == STANDARD_INPUT else path, 0, False
    for line in _lines_of(path):
        if line is None:
            yield None
            continue
        number += 1
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{name} line {number}: not UTF-8 text") from None
        if number == 1:
            is_data = _is_data_line(text)
        try:
            sentence = parse_line(text).sentence if is_data else text.strip()
        except ValueError as error:
            raise UserError(f"{name} line {number}: {error}, as the first line has it") from None
        if not sentence:
            raise UserError(f"{name} line {number}: the sentence is empty")
        yield sentence
    if number == 0:
        raise UserError(f"{name} holds no sentences")


def _is_data_line(text: str) -> bool:
    try:
        parse_line(text)
    except ValueError:
        return False
    return True


def _lines_of(path: str) -> Iterator[bytes | None]:
    """The lines of an input, without waiting longer than `PATIENCE` without a word (None)."""
    if path != STANDARD_INPUT and os.path.isfile(path):
        with open(path, "rb") as file:
            yield from file
        return
    pieces: queue.Queue[bytes | OSError] = queue.Queue(maxsize=64)
    source = sys.stdin.buffer if path == STANDARD_INPUT else open(path, "rb")
    threading.Thread(target=_read_pieces, args=(source, pieces), daemon=True).start()
    rest, is_waiting = b"", False
    while True:
        try:
            piece = pieces.get(timeout=None if is_waiting else PATIENCE)
        except queue.Empty:
            is_waiting = True
            yield None
            continue
        is_waiting = False
        if isinstance(piece, OSError):
            raise piece
        *lines, rest = (rest + piece).split(b"\n") if piece else (*([rest] if rest else []), b"")
        yield from lines
        if not piece:
            return


def _read_pieces(source: BinaryIO, pieces: queue.Queue[bytes | OSError]) -> None:
    """Hand over what arrives, and nothing at the end."""
    try:
        while piece := source.read1(1 << 16):
            pieces.put(piece)
        pieces.put(b"")
    except OSError as error:
        pieces.put(error)


# ---------------------------------------------------------------------------------------------- labels, prompt


def read_label_names(path: str | os.PathLike) -> list[str]:
    """The label mapping. Raises `UserError` unless it is a JSON list of at least two distinct, non-empty strings."""
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


def prompt_suffix(label_names: Sequence[str]) -> str:
    """`Is this movie a, b, or c? This movie is `; the space at the end is part of the reference."""
    if len(label_names) == 2:
        choices = " or ".join(label_names)
    else:
        choices = f"{', '.join(label_names[:-1])}, or {label_names[-1]}"
    return f"Is this movie {choices}? This movie is "


def has_gold_labels(labels: Sequence[int]) -> bool:
    """Whether the labels of a data set can be gold: placeholders are all the same."""
    return len(set(labels)) > 1


def majority_accuracy(labels: Sequence[int]) -> float:
    """The accuracy of always answering the most frequent gold label."""
    return Counter(labels).most_common(1)[0][1] / len(labels)
