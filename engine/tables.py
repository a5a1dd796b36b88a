"""Data in columns, and inputs that are read row by row. No PyTorch.

In: TSV, CSV and JSONL files, or standard input. Out: `Example`s with their label names, sentences one by one, and
the rows of an output. Files of any other kind are read by `data.create_data`.

    text<TAB>label              text,label                          {"text": "a fine film", "label": "good"}
    a fine film<TAB>good        "fine, and more so",1

The first line of a TSV or CSV file names the columns; each line of a JSONL file names its own. A CSV file may have
quotes (RFC 4180), a TSV file has none: every tab separates two columns.

A label is the same text in every format (`label_text`). It is one of the label names or, if no name is a number,
the number of a class, from 0. Capitals count; two labels of a file that differ in them alone are refused.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from engine.data import (
    NO_GOLD_LABEL,
    SEPARATOR,
    Example,
    create_data,
    is_empty_line,
    lines_of,
    parse_json,
    parse_line,
)
from engine.streams import STANDARD_INPUT, lines_arriving
from utils import NUL_IS_NO_TEXT, UserError, decimal_number, join_names, require_unpacked, short_repr, warn

FORMATS = (".tsv", ".csv", ".jsonl")
# other endings of them (jsonlines.org, github.com/ndjson/ndjson-spec, Scrapy's .jl)
ALIASES = {".tab": ".tsv", **dict.fromkeys((".ndjson", ".jsonlines", ".ldjson", ".jl"), ".jsonl")}
GZIP_ENDING = ".gz"  # may follow any of them
OTHER_FORMATS = {
    ".json": "one JSON text for the whole file is not read; write an object a line, in a file that ends in .jsonl",
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "spreadsheets are not read; save it as .csv"),
    **dict.fromkeys((".parquet", ".arrow", ".feather"), "this format is not read; save it as .csv or .jsonl"),
    **dict.fromkeys((".tar", ".tgz", ".zip"), "archives are not read; unpack it"),
}
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")  # as JSON writes it; 01 is a text
LARGEST_FIELD = 2**31 - 1  # characters
NUMBERED = "{} ({})"  # one of several columns with the same name
SKIP = "--skip_empty leaves such lines out, and counts them"


class Columns(NamedTuple):
    """The names of the columns to read. skip_empty: leave out lines without a text, or without a label."""

    text: str = "text"
    label: str = "label"
    skip_empty: bool = False


USUAL = Columns()


class Record(NamedTuple):
    """A line of a file. number: of the line. text, label: "" and None if there is none. row: all columns."""

    number: int
    text: str
    label: Any
    row: Mapping[str, Any]


def has_columns(path: str | os.PathLike) -> bool:
    """Whether a file has columns (TSV, CSV or JSONL), judged by the ending of its name."""
    return ending_of(path) in FORMATS


def check_format(path: str | os.PathLike) -> None:
    """Raise `UserError` for a file that is not read as lines of text: of a known format that is not read at all, by the
    ending of its name, or with columns, by all its lines, under an ending that does not say so.
    """
    if why := OTHER_FORMATS.get(ending_of(path)):
        raise UserError(f"{path}: {why}; files with columns end in {', '.join(FORMATS)}")
    is_file = path != STANDARD_INPUT and os.path.isfile(path)
    if is_file and not has_columns(path) and (found := _columns_in(os.fspath(path))):
        how = f"named {found[0]} they are read as columns, see --text-column; as texts, from standard input (-)"
        raise UserError(f"{path}: every line {found[1]}; {how}")


def _columns_in(path: str) -> tuple[str, str] | None:
    """The format that all lines of a file have (its ending, and what every line is); None for lines of text."""
    try:
        kinds = (_format_of_line(line) for line in lines_arriving(path) if line and line.strip())
        if (first := next(kinds, None)) is None:
            return None
        second = next(kinds, None if first[0] == ".tsv" else first)  # one line with tabs is no table
        return first if second == first and all(kind == first for kind in kinds) else None
    except ValueError:  # not UTF-8, or a line is too long: the function that reads the file says so
        return None


def _format_of_line(line: bytes) -> tuple[str, str] | None:
    text = line.decode("utf-8-sig")
    if _is_object(text):
        return ".jsonl", "is a JSON object"
    tabs = text.count("\t")
    return (".tsv", f"has {tabs} tab{'s' * (tabs > 1)}") if tabs and SEPARATOR not in text else None


def _is_object(text: str) -> bool:
    try:
        return text.lstrip().startswith("{") and isinstance(parse_json(text), dict)
    except ValueError:
        return False


def read_examples(
    path: str | os.PathLike, label_names: Sequence[str], columns: Columns = USUAL, *, is_test: bool = False
) -> list[Example]:
    """The examples of a data file of any format; line breaks in a text become spaces.

    A test file may have no labels; its examples get the label -1. Raises `UserError`, naming file and line.
    """
    if not has_columns(path):
        return _read_lines(path, columns, len(label_names), is_test)
    records, classes = read_records(path, columns), _classes_of(label_names)
    is_unlabelled = is_test and all(each.label in (None, str(NO_GOLD_LABEL)) for each in records)
    is_unlabelled &= not any(NUMBERED.format(columns.label, 1) in each.row for each in records)
    if not is_unlabelled:
        _require_labels(path, records, columns)
    kept = _filled(path, records, needs_label=not is_unlabelled)
    try:
        return [Example(each.text, NO_GOLD_LABEL if is_unlabelled else classes[each.label]) for each in kept]
    except KeyError:
        wrong = next(each for each in kept if each.label not in classes)
        numbers = f", nor a number from 0 to {len(label_names) - 1}" if classes.keys() - {*label_names} else ""
        allowed = f"{'neither' if numbers else 'not'} one of {join_names(label_names)}{numbers}"
        raise UserError(f"{path} line {wrong.number}: the label {short_repr(wrong.label)} is {allowed}") from None


def _read_lines(path: str | os.PathLike, columns: Columns, num_labels: int, is_test: bool) -> list[Example]:
    """The examples of lines `LABEL ||| sentence`."""
    check_format(path)
    try:
        return create_data(path, num_labels, is_test=is_test, skip_empty=columns.skip_empty)
    except UserError as error:
        hint = "" if columns.skip_empty or not any(map(is_empty_line, lines_of(path))) else f"; {SKIP}"
        raise UserError(f"{error}{hint}") from None


def read_texts(path: str | os.PathLike, columns: Columns = USUAL) -> list[str]:
    """The texts of a file with columns; the other columns are ignored. Raises `UserError`, naming file and line."""
    return [record.text for record in filled_records(path, columns)]


def filled_records(path: str | os.PathLike, columns: Columns = USUAL) -> list[Record]:
    """The lines of a file with columns that have a text. Raises `UserError`, naming file and line."""
    return _filled(path, read_records(path, columns), needs_label=False)


def _filled(path: str | os.PathLike, records: Sequence[Record], needs_label: bool) -> list[Record]:
    """The lines that have a text, and a label where it is needed; a warning counts the others."""
    kept = [each for each in records if each.text and not (needs_label and each.label is None)]
    if skipped := len(records) - len(kept):
        warn(
            f"{path}: {skipped} of {len(records)} lines are left out, which have no text{' or no label' * needs_label}"
        )
    if not kept:
        raise UserError(f"{path} holds no data")
    return kept


def read_records(path: str | os.PathLike, columns: Columns = USUAL) -> list[Record]:
    """Read the lines of a file with columns; with `skip_empty` also those without a text.

    Raises `UserError`, naming file and line, also for an empty text.
    """
    records = []
    for number, row in {".tsv": _delimited, ".csv": _delimited, ".jsonl": _json_lines}[ending_of(path)](path):
        if row and columns.text not in row:
            raise UserError(_lacking(path, number, "text", columns.text, row))
        text, label = row.get(columns.text), row.get(columns.label)
        if isinstance(text, (dict, list)):
            raise UserError(f"{path} line {number}: the column {columns.text} is no text but {short_repr(text)}")
        text = "" if _is_missing(text) else " ".join(_cell_of(text).strip().splitlines())
        if not text and not columns.skip_empty:
            what = f"the column {columns.text} is empty" if row else "the line is blank"
            raise UserError(f"{path} line {number}: {what}; {SKIP}")
        records.append(Record(number, text, None if _is_missing(label) else label_text(label), row))
    if not any(record.text for record in records):
        raise UserError(f"{path} holds no data")
    return records


def _is_missing(value: Any) -> bool:
    """Whether a cell is empty: white space, null, or the NaN that pandas writes."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


# --------------------------------------------------------------------------------------------------------------- labels


def label_text(value: Any) -> str:
    """A label as text, the same in every format: `1`, `1.0` (of pandas), `1e0` and `"1"` are "1"; `true`, `True` (of
    pandas) and `TRUE` (of spreadsheets) are "true".
    """
    text = value.strip() if isinstance(value, str) else json.dumps(value)
    if text.lower() in ("true", "false"):
        return text.lower()
    if not NUMBER.fullmatch(text) or (text.lstrip("-").isdecimal() and text != "-0"):
        return text
    number = float(text)
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else json.dumps(number)


def derive_label_names(path: str | os.PathLike, columns: Columns = USUAL) -> list[str]:
    """The class names of a file: the labels that are there, in the order of the numbers or else of the alphabet.

    Raises `UserError` if the column does not look like labels, or if two of them differ in capitals or spaces alone.
    """
    records = [record for record in read_records(path, columns) if record.text]
    _require_labels(path, records, columns)
    labels = [record.label for record in records if record.label is not None]
    names = {*labels}
    by_look: dict[str, str] = {}
    for name in sorted(names):
        other = by_look.setdefault(_look_of(name), name)
        if other != name:
            lines = [next(each.number for each in records if each.label == label) for label in (other, name)]
            both = f"the labels {short_repr(other)} (line {lines[0]}) and {short_repr(name)} (line {lines[1]})"
            raise UserError(f"{path}: {both} differ in capitals or spaces alone; write one, or use --label-names")
    are_numbers = all(map(is_number, names))
    is_range = are_numbers and max(map(float, labels), default=0) - min(map(float, labels), default=0) < len(labels)
    are_few = 2 * len(names) <= max(4, len(labels)) or is_range
    if len(names) < 2 or not are_few or not all(each.isprintable() for each in names):
        examples = join_names(sorted(map(short_repr, names)), 3)
        found = f"{len(names)} different ones in {len(labels)} lines, such as {examples}"
        raise UserError(f"{path}: the column {columns.label} does not look like labels: {found}")
    return sorted(names, key=float if are_numbers else str)


def _look_of(name: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def is_number(text: str) -> bool:
    try:
        return math.isfinite(decimal_number(text))
    except (ValueError, OverflowError):
        return False


def _classes_of(label_names: Sequence[str]) -> dict[str, int]:
    """The class of each label: of the names, and, if none of them is a number, of the class numbers.

    Raises `UserError` for two names that are one label, such as 1 and 1.0.
    """
    classes = {} if any(map(is_number, label_names)) else {str(number): number for number in range(len(label_names))}
    spelt: dict[str, str] = {}
    for number, name in enumerate(label_names):
        label = label_text(name)
        if label in spelt:
            both = f"{short_repr(spelt[label])} and {short_repr(name)}"
            raise UserError(f"the label names {both} are one label in a file with columns; change one")
        spelt[label], classes[label] = name, number
    return classes


def _require_labels(path: str | os.PathLike, records: Sequence[Record], columns: Columns) -> None:
    """Raise `UserError` if there is no column of labels or one has lists, or, without `skip_empty`, if one is empty."""
    nested = next((each for each in records if isinstance(each.row.get(columns.label), (dict, list))), None)
    if nested is not None:
        what = f"no text and no number but {short_repr(nested.row[columns.label])}"
        raise UserError(f"{path} line {nested.number}: the label is {what}")
    lacking = [each for each in records if each.label is None]
    if lacking and not any(columns.label in each.row for each in records):
        raise UserError(_lacking(path, lacking[0].number, "label", columns.label, lacking[0].row))
    if lacking and not columns.skip_empty:
        raise UserError(f"{path} line {lacking[0].number}: the column {columns.label} is empty; {SKIP}")


# ---------------------------------------------------------------------------------------------------------------- files


def ending_of(path: str | os.PathLike) -> str:
    """The ending of a file's name in lower case, without `.gz`: `.csv`; of a format in `FORMATS` always the same."""
    ending = Path(os.fspath(path).lower().removesuffix(GZIP_ENDING)).suffix
    return ALIASES.get(ending, ending)


def _delimited(path: str | os.PathLike) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a TSV or CSV file below its header, each with the number of the line in which it ends.

    A blank line is a row without columns.
    """
    lines = lines_of(path)
    largest = csv.field_size_limit(LARGEST_FIELD)  # of all readers of this process, so it is put back
    if ending_of(path) == ".tsv":
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader((f"{line}\n" for line in lines), strict=True)
    names: list[str] | None = None
    read = 0  # lines of the rows so far: a quote that is left open takes all lines that follow into its row
    try:
        for row in reader:
            if len(row) < 2 and not "".join(row).strip():
                yield reader.line_num, {}
            elif names is None:
                names = _apart([name.strip() for name in row])
                if twice := [name for name, count in Counter(names).items() if count > 1]:
                    raise UserError(f"{path} line 1: two columns are called {short_repr(twice[0])}")
            elif len(row) != len(names):
                counts = f"{len(row)} columns, where line 1 names {len(names)}"
                raise UserError(f"{path} line {reader.line_num}: {counts}{_other_separator(path, names)}")
            else:
                yield reader.line_num, dict(zip(names, row, strict=True))
            read = reader.line_num
    except csv.Error as error:
        raise UserError(f"{path} line {read + 1}: {error}") from None
    finally:
        csv.field_size_limit(largest)


def _apart(names: Sequence[str]) -> list[str]:
    """The names of columns; each of several that have one name gets a number: `x (1)`, `x (2)`."""
    counts, seen = Counter(names), Counter[str]()
    apart = []
    for name in names:
        seen[name] += 1
        apart.append(NUMBERED.format(name, seen[name]).strip() if counts[name] > 1 else name)
    return apart


def _json_lines(path: str | os.PathLike) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file, each with the number of its line; a blank line is an object without entries."""
    for number, line in enumerate(lines_of(path), 1):
        try:
            row = parse_json(line, is_line=True) if line.strip() else {}
        except ValueError as error:
            raise UserError(_whole_json(path) or f"{path} line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise UserError(_whole_json(path) or f"{path} line {number}: no JSON object but {short_repr(row)}")
        yield number, row


def _whole_json(path: str | os.PathLike) -> str:
    """What to say of a JSONL file that is one JSON array or object over all its lines; "" for others."""
    try:
        value = parse_json("\n".join(lines_of(path)))
    except ValueError:
        return ""
    kind = "array" if isinstance(value, list) else "object" if isinstance(value, dict) else "value"
    return f"{path} is one JSON {kind}; {OTHER_FORMATS['.json']}"


def _lacking(path: str | os.PathLike, number: int, kind: str, name: str, row: Mapping[str, Any]) -> str:
    there = f"there are {join_names(row)}" if row else "there are none"
    said = f"nothing in a column {short_repr(name)}; {there}; --{kind}-column says which it is"
    return f"{path} line {number}: {said}{_other_separator(path, row)}"


def _other_separator(path: str | os.PathLike, names: Iterable[str]) -> str:
    """What to say if the columns of a CSV or TSV file seem to be separated by another character than they should be."""
    own = {".csv": ",", ".tsv": "\t"}.get(ending_of(path))
    other = next((each for each in ";\t,|" if own and each != own and any(each in name for name in names)), None)
    separators = f"columns of .csv are separated by commas and those of .tsv by tabs, these by {other!r}, it seems"
    return f"; {separators}" if other else ""


# ------------------------------------------------------------------------------------------------- sentences one by one


def read_sentences(path: str, columns: Columns = USUAL) -> Iterator[str | None]:
    """Yield the sentences of a file, or of standard input (-), one per line; None if no other one has arrived yet.

    A data file is accepted too: if the first line is `LABEL ||| sentence`, all lines must be, and the labels are
    dropped. Of a file with columns, the texts are read. With `columns.skip_empty`, lines without a sentence are left
    out, and a warning counts them. Raises `UserError`, naming the line, for a line that is empty or not UTF-8, and for
    an input without sentences.
    """
    check_format(path)
    if has_columns(path):
        yield from read_texts(path, columns)
        return
    name, number, skipped, is_data = "standard input" if path == STANDARD_INPUT else path, 0, 0, None
    for line in lines_arriving(path):
        if line is None:
            yield None
            continue
        number += 1
        if number == 1:
            require_unpacked(name, line)
        try:
            text = line.replace(*NUL_IS_NO_TEXT).decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{name} line {number}: not UTF-8 text{', it has a NUL' * (0 in line)}") from None
        if is_empty_line(text) if is_data else not text.strip():
            if not columns.skip_empty:
                raise UserError(f"{name} line {number}: the sentence is empty; {SKIP}")
            skipped += 1
            continue
        if is_data is None:
            is_data = _is_data_line(text)
            if _is_object(text):
                warn(f"{name}: the first line is a JSON object, which is read as text; a file named .jsonl has columns")
        try:
            yield parse_line(text).sentence if is_data else text.strip()
        except ValueError as error:
            raise UserError(f"{name} line {number}: {error}, as the first line has it") from None
    if skipped:
        warn(f"{name}: {skipped} of {number} lines are left out, which have no sentence")
    if number == skipped:
        raise UserError(f"{name} holds no sentences")


def shown_before_waiting(sentences: Iterable[str | None]) -> Iterator[str | None]:
    """The same sentences; after each None (no sentence has arrived yet), flush standard output before waiting."""
    for sentence in sentences:
        yield sentence
        if sentence is None:
            sys.stdout.flush()


def _is_data_line(text: str) -> bool:
    try:
        parse_line(text)
    except ValueError:
        return False
    return True


# -------------------------------------------------------------------------- rows with all that stands beside a sentence

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
        elif self.ending == ".tsv":
            self.file.write("\t".join(re.sub(r"[\t\n]", " ", cell) for cell in cells) + "\n")
        else:
            raise ValueError(f"rows of a file {self.ending} are not written yet")


def _cell_of(value: Any) -> str:
    """A value as text: null is empty, and lists and objects of a JSON line are JSON."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.replace("\r\n", "\n").replace("\r", "\n")
