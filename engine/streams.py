"""The lines of a file, of a pipe or of standard input, one by one while they arrive. Only the standard library and
`utils.py`.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Iterator
from typing import BinaryIO

from utils import PIECE, UserError, bytes_of

STANDARD_INPUT = "-"
PATIENCE = 0.2  # seconds to wait for more input before the sentences so far are processed
MOST_BYTES = 1 << 26  # of a line: a device may never end one
LINE_END = re.compile(rb"\r\n|\r|\n")


def lines_arriving(path: str) -> Iterator[bytes | None]:
    """The lines of an input, which end with \\n, \\r\\n or \\r; None as in `_pieces_of`."""
    rest: list[bytes] = []  # pieces of a line whose end has not arrived
    length = 0  # of them, in bytes; not summed anew for each, which costs most for a line in many pieces
    for piece in _pieces_of(path):
        if piece is None:
            yield None
            continue
        if rest and rest[-1].endswith(b"\r"):  # it may be the first half of \r\n
            rest[-1], piece = rest[-1][:-1], b"\r" + piece
        *lines, last = LINE_END.split(piece[:-1]) if piece.endswith(b"\r") else LINE_END.split(piece)
        for line in lines:
            yield b"".join([*rest, line])
            rest, length = [], 0
        rest.append(last + b"\r" if piece.endswith(b"\r") else last)
        length += len(rest[-1])
        if length > MOST_BYTES:
            raise UserError(f"{path} has a line of more than {MOST_BYTES >> 20} MiB; give a sentence a line")
    last = b"".join(rest)
    if last:
        yield last.removesuffix(b"\r")


def _pieces_of(path: str) -> Iterator[bytes | None]:
    """The bytes of an input, piece by piece; for a pipe or a terminal also None, about every `PATIENCE` seconds."""
    if path != STANDARD_INPUT and os.path.isfile(path):
        yield from bytes_of(path)
        return
    # unbuffered, and not `sys.stdin`: a thread that waits in `sys.stdin` would keep the program from ending
    source = open(0 if path == STANDARD_INPUT else path, "rb", buffering=0, closefd=path != STANDARD_INPUT)
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
