"""Rows with columns: the sentences of an input with all else that stands beside them, and files of rows. No PyTorch."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from engine.columns import USUAL, Columns, ending_of, filled_records, has_columns
from engine.stream import read_sentences
from utils import UserError, short_repr

Row = Mapping[str, Any]


def read_rows(path: str, columns: Columns = USUAL) -> tuple[Iterator[str | None], list[Row] | None]:
    """The sentences of an input (see `read_sentences`), and their rows; None for an input without columns.

    A file with columns is read and checked at once. Raises `UserError`.
    """
    if not has_columns(path):
        return read_sentences(path, columns), None
    records = filled_records(path, columns)
    return (record.text for record in records), [record.row for record in records]


def names_of_rows(rows: Iterable[Row], own: Sequence[str], path: str) -> list[str]:
    """The names of all columns, in order. own: those that are added; raises `UserError` if `path` has one of them."""
    names = [*dict.fromkeys(name for row in rows for name in row)]
    if taken := [name for name in own if name in names]:
        raise UserError(f"{path} has a column {short_repr(taken[0])}, which the output adds; rename it")
    return names


class TableWriter:
    """Writes rows to a file as CSV, TSV or JSON lines, as the ending of its name says; the first two with a header.

    A TSV file has no quotes, so tabs and line breaks in a cell become spaces.
    """

    def __init__(self, file: IO[str], path: str, names: Sequence[str]):
        self.file, self.ending, self.names = file, ending_of(path), names
        if self.ending != ".jsonl":
            self._write_cells(names)

    def write(self, row: Row) -> None:
        if self.ending == ".jsonl":
            self.file.write(f"{json.dumps(row, ensure_ascii=False)}\n")
        else:
            self._write_cells([row.get(name) for name in self.names])

    def _write_cells(self, values: Sequence[Any]) -> None:
        cells = [_cell_of(value) for value in values]
        if self.ending == ".csv":
            csv.writer(self.file, lineterminator="\n").writerow(cells)
        else:
            self.file.write("\t".join(re.sub(r"[\t\n]", " ", cell) for cell in cells) + "\n")


def _cell_of(value: Any) -> str:
    """A value as text: null is empty, and lists and objects of a JSON line are JSON."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.replace("\r\n", "\n").replace("\r", "\n")
