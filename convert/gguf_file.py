"""Reading a GGUF file (github.com/ggml-org/ggml, docs/gguf.md): what it declares, and its tensors in float32.

Whatever a file says of itself is compared with its size before it is used, so that a damaged or hostile one costs no
more memory than its own size allows. How numbers are packed in blocks is left to the package `gguf`.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import sys
import warnings
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from convert.directory import require_file
from convert.gguf import import_gguf
from utils import UserError, short_repr

MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = ("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", None, None, "<Q", "<q", "<d")  # by the number of a type
COUNT, LONG_COUNT = "<I", "<Q"
TEXT, ARRAY = 8, 9  # the two types that are no numbers
MOST_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32  # bytes


class StoredTensor(NamedTuple):
    """shape: with the length of a row last, as in PyTorch. kind: a number of `gguf.GGMLQuantizationType`."""

    shape: tuple[int, ...]
    kind: int
    offset: int  # bytes from the beginning of the file


class GGUFFile:
    """A GGUF file whose declarations hold. Raises `UserError` if it is none, or damaged, or of another version.

    values: what it declares, by name; of several numbers an `array`. tensors: where each one lies, by name.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        require_file(self.path)
        with self.path.open("rb") as file:
            is_empty = os.fstat(file.fileno()).st_size == 0
            self.content = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.at = 0
        with self._naming_the_file():
            self._read()

    def tensor(self, name: str) -> np.ndarray:
        """The numbers of a tensor, float32. Raises `UserError` for a kind that the package `gguf` cannot unpack."""
        shape, kind, offset = self.tensors[name]
        gguf = import_gguf()
        kind = gguf.GGMLQuantizationType(kind)
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows = (*shape[:-1], shape[-1] // per_block * block_bytes)
        packed = np.frombuffer(self.content, np.uint8, math.prod(rows), offset).reshape(rows)
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):  # of damaged scales; the sums are checked later
                warnings.simplefilter("ignore")
                return np.require(gguf.dequantize(packed, kind), np.float32, "W")  # a copy of float32 in the file
        except NotImplementedError:
            raise UserError(f"{self.path}: {name} is of the kind {kind.name}, which gguf cannot unpack") from None

    def _read(self) -> None:
        if self._bytes(4) != MAGIC:
            raise UserError(f"{self.path} is not a GGUF file")
        version = self._number(COUNT)
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise UserError(f"{self.path} has version {short_repr(version)} of GGUF; known are {known}, little-endian")
        n_tensors, n_values = self._number(LONG_COUNT), self._number(LONG_COUNT)
        self.values = dict(self._declared() for _ in self._up_to(n_values))
        self._require_one_part()
        alignment = self.values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
            raise ValueError
        places = [self._placed() for _ in self._up_to(n_tensors)]
        begin = -(-self.at // alignment) * alignment
        self.tensors = {name: place._replace(offset=begin + place.offset) for name, place in places}
        if len(self.tensors) < n_tensors:
            raise ValueError
        self._require_layout(begin, alignment)

    def _require_one_part(self) -> None:
        number, count = (self.values.get(f"split.{name}", 0) for name in ("no", "count"))
        if type(number) is int and type(count) is int and count > 1:
            how = "join them first (llama.cpp's program: llama-gguf-split --merge PART-1 OUT)"
            raise UserError(f"{self.path} is part {number + 1} of {count} of a model: {how}")

    def _require_layout(self, begin: int, alignment: int) -> None:
        """The tensors follow one another as they are declared, and end with the file, but for zeros: a wrong
        type or shape shows.
        """
        sizes, at, before = import_gguf().GGML_QUANT_SIZES, begin, "the declarations"
        for name, (shape, kind, offset) in self.tensors.items():
            per_block, block_bytes = sizes[kind]
            if shape[-1] % per_block:
                raise ValueError
            if offset != at:
                where = f"begins {abs(offset - at)} bytes {'behind' if offset > at else 'before'} the end of {before}"
                raise UserError(f"{self.path} is damaged: {short_repr(name)} {where}")
            size, before = math.prod(shape) // per_block * block_bytes, short_repr(name)
            if at + size > len(self.content):
                raise ValueError
            at += size + -size % alignment
        left = self.content[at:]
        if len(left) >= alignment and left.strip(b"\0"):  # zeros fill a file up; numbers are of a tensor
            raise UserError(f"{self.path} is damaged: it goes on for {len(left)} bytes behind the end of {before}")

    def _declared(self) -> tuple[str, Any]:
        name, kind = self._text(), self._number(COUNT)
        return name, self._array() if kind == ARRAY else self._value(kind)

    def _placed(self) -> tuple[str, StoredTensor]:
        name, dimensions = self._text(), self._number(COUNT)
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise ValueError
        shape = tuple(self._number(LONG_COUNT) for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise ValueError
        return name, StoredTensor(shape, self._number(COUNT), self._number(LONG_COUNT))

    def _array(self) -> list[str] | array:
        kind, length = self._number(COUNT), self._number(LONG_COUNT)
        if kind == TEXT:
            return [self._text() for _ in self._up_to(length)]
        layout = _number_type(kind)
        numbers = array(layout[-1].replace("?", "B"), self._bytes(length * struct.calcsize(layout)))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def _value(self, kind: int) -> Any:
        return self._text() if kind == TEXT else self._number(_number_type(kind))

    def _text(self) -> str:
        return self._bytes(self._number(LONG_COUNT)).decode()

    def _number(self, layout: str) -> Any:
        value = struct.unpack(layout, self._bytes(struct.calcsize(layout)))[0]
        # a file says 1e-5 with 32 bits: the shortest decimal number that rounds to the same bits is what was meant
        return float(str(np.float32(value))) if layout == "<f" else value

    def _bytes(self, count: int) -> bytes:
        found = self.content[self.at : self.at + count]
        if len(found) < count:
            raise EOFError
        self.at += count
        return found

    def _up_to(self, count: int) -> Iterator[int]:
        """The numbers below `count`. Raises for more things than there are bytes left."""
        if count > len(self.content) - self.at:
            raise EOFError
        yield from range(count)

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except UnicodeDecodeError:
            raise UserError(f"{self.path} is damaged: a name or a token in it is not UTF-8 text") from None
        except (ValueError, KeyError, EOFError, OverflowError, TypeError):
            raise UserError(f"{self.path} is damaged: what it declares does not fit its size") from None


def _number_type(kind: int) -> str:
    if not 0 <= kind < len(NUMBERS) or NUMBERS[kind] is None:
        raise ValueError
    return NUMBERS[kind]
