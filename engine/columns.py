"""Data in columns: examples from TSV, CSV and JSONL files. Files of any other kind are read by `data.create_data`.

    text<TAB>label              text,label                          {"text": "a fine film", "label": "good"}
    a fine film<TAB>good        "fine, and more so",1

The first line of a TSV or CSV file names the columns; each line of a JSONL file names its own. A CSV file may have
quotes (RFC 4180), a TSV file has none: every tab separates two columns. A label is a label name or a class number.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.data import NO_GOLD_LABEL, Example, create_data
from utils import UserError, join_names, read_text, short_repr, whole_number

FORMATS = (".tsv", ".csv", ".jsonl")


class Columns(NamedTuple):
    """The names of the columns to read."""

    text: str = "text"
    label: str = "label"


USUAL = Columns()


class Record(NamedTuple):
    """One line of a file. number: of the line. label: None if the line has no label. row: all columns."""

    number: int
    text: str
    label: Any
    row: Mapping[str, Any]


def has_columns(path: str | os.PathLike) -> bool:
    """Whether a file has columns (TSV, CSV or JSONL), judged by the ending of its name."""
    return _ending(path) in FORMATS


def read_examples(
    path: str | os.PathLike, label_names: Sequence[str], columns: Columns = USUAL, *, is_test: bool = False
) -> list[Example]:
    """The examples of a data file of any format; line breaks in a text become spaces.

    A test file may have no labels; its examples get the label -1. Raises `UserError`, naming file and line.
    """
    if not has_columns(path):
        return create_data(path, len(label_names), is_test=is_test)
    examples, records = [], read_records(path, columns)
    is_unlabelled = is_test and all(record.label is None for record in records)
    for record in records:
        if record.label is None and not is_unlabelled:
            raise UserError(_lacking(path, record.number, "label", columns.label, record.row))
        try:
            examples.append(Example(record.text, _label_of(record.label, label_names)))
        except ValueError as error:
            raise UserError(f"{path} line {record.number}: {error}") from None
    return examples


def read_texts(path: str | os.PathLike, columns: Columns = USUAL) -> list[str]:
    """The texts of a file with columns; the other columns are ignored. Raises `UserError`, naming file and line."""
    return [record.text for record in read_records(path, columns)]


def read_records(path: str | os.PathLike, columns: Columns = USUAL) -> list[Record]:
    """Read the lines of a file with columns. Raises `UserError`, naming file and line, also for an empty text."""
    records = []
    for number, row in {".tsv": _delimited, ".csv": _delimited, ".jsonl": _json_lines}[_ending(path)](path):
        if columns.text not in row:
            raise UserError(_lacking(path, number, "text", columns.text, row))
        text, label = row[columns.text], row.get(columns.label)
        if not isinstance(text, str) or not text.strip():
            what = "is empty" if isinstance(text, str) else f"is no text but {short_repr(text)}"
            raise UserError(f"{path} line {number}: the column {columns.text} {what}")
        label = label.strip() if isinstance(label, str) else label
        records.append(Record(number, " ".join(text.strip().splitlines()), label, row))
    if not records:
        raise UserError(f"{path} holds no data")
    return records


def derive_label_names(path: str | os.PathLike, known: Sequence[str], columns: Columns = USUAL) -> list[str] | None:
    """Derive the class names from the labels of a file; None if `known`, the label names, are enough for it.

    Labels that are not all in `known` become the class names, in alphabetical order. If labels are numbers and `known`
    has too few names, the numbers become the names. Raises `UserError` if the column does not look like labels.
    """
    labels = [record.label for record in read_records(path, columns)]
    names = {label for label in labels if isinstance(label, str)}
    if names <= {*known}:
        numbers = {label for label in labels if type(label) is int}
    elif all(map(_is_number, names)):
        numbers = {int(label) for label in names}
    else:
        numbers = None
    if numbers is not None:
        highest = max(numbers, default=-1)
        return [str(number) for number in range(highest + 1)] if len(known) <= highest < len(labels) else None
    if len(names) < 2 or 2 * len(names) > max(4, len(labels)) or not all(each.isprintable() and each for each in names):
        examples = join_names(sorted(map(short_repr, names)), 3)
        found = f"{len(names)} different ones in {len(labels)} lines, such as {examples}"
        raise UserError(f"{path}: the column {columns.label} does not look like labels: {found}")
    return sorted(names)


def _label_of(value: Any, label_names: Sequence[str]) -> int:
    if value is None:
        return NO_GOLD_LABEL
    if isinstance(value, str) and value in label_names:
        return [*label_names].index(value)
    number = int(value) if isinstance(value, str) and _is_number(value) else value
    if type(number) is int and 0 <= number < len(label_names):
        return number
    allowed = f"one of {join_names(label_names)}, nor a number from 0 to {len(label_names) - 1}"
    raise ValueError(f"the label {short_repr(value)} is neither {allowed}")


def _ending(path: str | os.PathLike) -> str:
    return Path(path).suffix.lower()


def _is_number(text: str) -> bool:
    try:
        whole_number(text)
    except ValueError:
        return False
    return True


def _delimited(path: str | os.PathLike) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a TSV or CSV file below its header, each with the number of the line in which it ends."""
    lines = read_text(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    if _ending(path) == ".tsv":
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader((f"{line}\n" for line in lines), strict=True)
    names: list[str] | None = None
    try:
        for row in reader:
            if names is None:
                names = [name.strip() for name in row]
                if twice := [name for place, name in enumerate(names) if name in names[:place]]:
                    raise UserError(f"{path} line 1: two columns are called {short_repr(twice[0])}")
                continue
            if len(row) != len(names):
                raise UserError(f"{path} line {reader.line_num}: {len(row)} columns, where line 1 names {len(names)}")
            yield reader.line_num, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise UserError(f"{path} line {reader.line_num}: {error}") from None


def _json_lines(path: str | os.PathLike) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = read_text(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path} line {number}: no JSON object but {short_repr(row)}")
        yield number, row


def _lacking(path: str | os.PathLike, number: int, kind: str, name: str, row: Mapping[str, Any]) -> str:
    there = f"there are {join_names(row)}" if row else "there are none"
    return f"{path} line {number}: nothing in a column {short_repr(name)}; {there}; --{kind}-column says which it is"
