"""Messages between a grading script and the process that runs a student's code: bounded, and without code in them.

A message is a fixed head (a mark and two lengths), a JSON object, and the raw bytes of its tensors. Nothing is
unpickled. Both sides import this module, the student's side before PyTorch: PyTorch is imported where it is needed.
"""

from __future__ import annotations

import json
import math
import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HEAD = struct.Struct("<4sIQ")
MARK = b"MLG1"
MAX_TEXT = 1 << 20  # bytes of the JSON object
MAX_NUMBERS = 1 << 23  # of all tensors of a message
ITEM_BYTES = {"float32": 4, "float64": 8, "int64": 8}
MAX_BYTES = 8 * MAX_NUMBERS
GIVEN = "given/"  # begins the names of a question's own tensors in its answer
CLOSED = 81  # exit status of a student's process that cannot write its answer


class Malformed(ValueError):
    """Bytes that are not a message of this format."""


def pack(header: dict, tensors: dict[str, torch.Tensor] | None = None) -> bytes:
    """A message. tensors: contiguous or not, on the CPU, float32, float64 or int64. Raises `Malformed` if too long."""
    table, payload = [], []
    for name, tensor in (tensors or {}).items():
        table.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        payload.append(tensor.contiguous().numpy().tobytes())
    text, data = json.dumps({**header, "tensors": table}).encode(), b"".join(payload)
    if len(text) > MAX_TEXT or len(data) > MAX_BYTES:
        raise Malformed(f"{len(text) + len(data):,} bytes are too many for a message")
    return HEAD.pack(MARK, len(text), len(data)) + text + data


def parse(message: bytes) -> tuple[dict, bytes]:
    """A message of `pack` taken apart, where it goes through no pipe."""
    _, length, _ = HEAD.unpack_from(message)
    text, data = message[HEAD.size :][:length], message[HEAD.size + length :]
    return json.loads(text), data


def read(handle: int) -> tuple[dict, bytes] | None:
    """The next message of a pipe: its JSON object, and the bytes of its tensors. None at the end of the pipe.

    Raises `Malformed` for anything that is not a message, and `OSError` as `os.read` does.
    """
    head = _read_exactly(handle, HEAD.size)
    if head is None:
        return None
    mark, text_size, data_size = HEAD.unpack(head)
    if mark != MARK or text_size > MAX_TEXT or data_size > MAX_BYTES:
        raise Malformed("not the head of a message")
    text, data = _read_exactly(handle, text_size), _read_exactly(handle, data_size)
    if text is None or data is None:
        return None
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed("not JSON") from None
    if not isinstance(header, dict):
        raise Malformed("not a JSON object")
    return header, data


def _read_exactly(handle: int, size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        chunk = os.read(handle, min(size - len(found), 1 << 16))
        if not chunk:
            return None
        found += chunk
    return bytes(found)


def write(handle: int, message: bytes) -> None:
    """Write a whole message to a pipe. Raises `OSError` as `os.write` does."""
    left = memoryview(message)
    while left:
        left = left[os.write(handle, left) :]


def unpack(header: dict, data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a message by name. Raises `Malformed` if table and bytes do not fit together."""
    import torch

    tensors, start, table = {}, 0, header.get("tensors")
    if not isinstance(table, list):
        raise Malformed("no table of tensors")
    for row in table:
        name, dtype, shape = _checked(row)
        end = start + ITEM_BYTES[dtype] * math.prod(shape)
        if end > len(data):
            raise Malformed("a tensor is longer than the message")
        # a copy: PyTorch wants memory that it may write to, and none of length 0
        numbers = torch.frombuffer(bytearray(data[start:end]), dtype=getattr(torch, dtype)) if end > start else None
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype)) if numbers is None else numbers.reshape(shape)
        start = end
    if start != len(data):
        raise Malformed("bytes that belong to no tensor")
    return tensors


def _checked(row: object) -> tuple[str, str, list[int]]:
    """A row of the table of tensors: name, dtype and shape. Raises `Malformed` for a row of another form."""
    if not (isinstance(row, list) and len(row) == 3):
        raise Malformed("a tensor without name, dtype and shape")
    name, dtype, shape = row
    sizes_are_right = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not (isinstance(name, str) and isinstance(dtype, str) and dtype in ITEM_BYTES and sizes_are_right):
        raise Malformed("a tensor with a strange name, dtype or shape")
    if len(shape) > 16 or math.prod(max(1, size) for size in shape) > MAX_NUMBERS:
        raise Malformed("a tensor that is too large")
    return name, dtype, shape
