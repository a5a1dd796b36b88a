"""Sentences to be classified, as they come: from a file, or from standard input while it is still being written."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Iterator
from typing import BinaryIO

from course import parse_line
from utils import UserError

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
