"""Reading sentences one by one: from a file, or from standard input while another program is still writing to it."""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from engine.columns import SKIP, USUAL, Columns, check_format, has_columns, read_texts
from engine.data import is_empty_line, parse_line
from utils import UserError, warn

STANDARD_INPUT = "-"
PATIENCE = 0.2  # seconds to wait for more input before the sentences so far are processed
PIECE = 1 << 16  # bytes
MOST_BYTES = 1 << 26  # of a line: a device may never end one
LINE_END = re.compile(rb"\r\n|\r|\n")


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
    for line in _lines_of(path):
        if line is None:
            yield None
            continue
        number += 1
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{name} line {number}: not UTF-8 text") from None
        if is_empty_line(text) if is_data else not text.strip():
            if not columns.skip_empty:
                raise UserError(f"{name} line {number}: the sentence is empty; {SKIP}")
            skipped += 1
            continue
        if is_data is None:
            is_data = _is_data_line(text)
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


def _lines_of(path: str) -> Iterator[bytes | None]:
    """The lines of an input, which end with \\n, \\r\\n or \\r; None as in `_pieces_of`."""
    rest: list[bytes] = []  # pieces of a line whose end has not arrived
    for piece in _pieces_of(path):
        if piece is None:
            yield None
            continue
        if rest and rest[-1].endswith(b"\r"):  # it may be the first half of \r\n
            rest[-1], piece = rest[-1][:-1], b"\r" + piece
        *lines, last = LINE_END.split(piece[:-1]) if piece.endswith(b"\r") else LINE_END.split(piece)
        for line in lines:
            yield b"".join([*rest, line])
            rest = []
        rest.append(last + b"\r" if piece.endswith(b"\r") else last)
        if sum(map(len, rest)) > MOST_BYTES:
            raise UserError(f"{path} has a line of more than {MOST_BYTES >> 20} MiB; give a sentence a line")
    last = b"".join(rest)
    if last:
        yield last.removesuffix(b"\r")


def _pieces_of(path: str) -> Iterator[bytes | None]:
    """The bytes of an input, piece by piece; for a pipe or a terminal also None, about every `PATIENCE` seconds."""
    # unbuffered, and not `sys.stdin`: a thread that waits in `sys.stdin` would keep the program from ending
    source = open(0 if path == STANDARD_INPUT else path, "rb", buffering=0, closefd=path != STANDARD_INPUT)
    if path != STANDARD_INPUT and os.path.isfile(path):
        with source:
            yield from iter(lambda: source.read(PIECE), b"")
        return
    pieces: queue.Queue[bytes | OSError] = queue.Queue(maxsize=64)
    threading.Thread(target=_read_pieces, args=(source, pieces), daemon=True).start()
    is_waiting, last = False, time.monotonic()
    while True:
        try:
            piece = pieces.get(timeout=None if is_waiting else PATIENCE)
        except queue.Empty:
            is_waiting, last = True, time.monotonic()
            yield None
            continue
        is_waiting = False
        if isinstance(piece, OSError):
            raise piece
        if not piece:
            return
        yield piece
        if time.monotonic() - last >= PATIENCE:  # process in time, also if lines arrive steadily
            last = time.monotonic()
            yield None


def _read_pieces(source: BinaryIO, pieces: queue.Queue[bytes | OSError]) -> None:
    """Put the arriving pieces into the queue, and an empty one at the end; or the error that ends reading."""
    try:
        while piece := source.read(PIECE):
            pieces.put(piece)
        pieces.put(b"")
    except OSError as error:
        pieces.put(error)
