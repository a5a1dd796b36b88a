"""A zip archive, read by its format. `entries` checks that every tool would read it alike.

`zipfile` is not used: of the meanings that an archive may have, it takes one and ignores the others.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from grading.programs import printable

MB = 1_000_000
MAX_ENTRIES = 10_000
# Bytes of a name. A longer part fits on no Linux or macOS disk, a longer path on no macOS disk (1,024), so no honest
# archive holds one; and the time to bring a name into one Unicode form grows with the square of its length.
MAX_PART, MAX_NAME = 255, 1_000


class FormatError(AssertionError):
    """The submission is wrong. An AssertionError, as in the course's own checker, so that scripts can catch that."""


_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
WIDE, _WIDE_COUNT = 0xFFFFFFFF, 0xFFFF  # in place of a number: "see the zip64 record"
HAS_DESCRIPTOR, IS_UTF8, IS_ENCRYPTED = 0x8, 0x800, 0x2061  # flags; masked headers and patches count as encrypted
MAX_VERSION = 45  # zip64's; more is for other ciphers and compression methods
NO_ZIP = "not a zip archive, or a truncated one"


class ZipHeader(NamedTuple):
    """A header of an entry. An archive has two for each: in its directory and in front of the entry's data."""

    name: bytes
    version: int  # of the format, times ten, that unpacking needs
    flags: int
    method: int
    checksum: int
    packed: int  # size in the archive
    size: int  # and when unpacked
    offset: int  # of the local header, by the directory; 0 in the local header itself
    paths: tuple[bytes, ...]  # of Unicode path fields, which some tools prefer to the name
    end: int  # where the header ends


class Entry(NamedTuple):
    """A file or folder of an archive."""

    name: str
    central: ZipHeader
    local: ZipHeader | None  # None where there is none
    attributes: int

    @property
    def is_folder(self) -> bool:
        return self.name.endswith("/")


class Archive(NamedTuple):
    payload: bytes
    entries: list[Entry]  # in the order of the directory
    directory: int  # where it begins
    has_backslashes: bool  # between folders and names, as Windows PowerShell writes them; `entries` have slashes


def read_archive(payload: bytes) -> Archive:
    """The entries in the directory of a zip. Raises `FormatError` unless it has exactly one directory."""
    end = payload.rfind(b"PK\5\6", max(0, len(payload) - _END.size - 0xFFFF))
    if end < 0 or len(payload) < end + _END.size:
        raise FormatError(NO_ZIP)
    comment = payload[end + _END.size :]
    if len(comment) != _END.unpack_from(payload, end)[-1]:
        raise FormatError(f"{NO_ZIP}, or one with foreign bytes behind its end")
    if re.search(rb"PK[\1-\7][\2-\x08]", comment):
        raise FormatError("the comment of the archive holds an archive: other tools may unpack that one")
    stop, (disk, first_disk, here, count, size, start) = _read_end(payload, end)
    if disk or first_disk or here != count:
        raise FormatError("one part of an archive that is split in several")
    if count > MAX_ENTRIES:
        raise FormatError(f"the archive has {count} entries; more than {MAX_ENTRIES} are refused")
    if start + size != stop:
        raise FormatError(f"{NO_ZIP}, or one with foreign bytes: its directory is not where its end says")
    entries, at = [], start
    for _ in range(count):
        central = _read_header(payload, at, stop, is_local=False)
        if central is None:
            raise FormatError(f"{NO_ZIP}: its directory is damaged")
        comment_length, *_, attributes, _ = _CENTRAL.unpack_from(payload, at)[-5:]
        name = central.name.decode("utf-8" if central.flags & IS_UTF8 else "cp437", "surrogateescape")
        local = _read_header(payload, central.offset, start, is_local=True)
        entries.append(Entry(name, central, local, attributes))
        at = central.end + comment_length
    if at != stop:
        raise FormatError(f"{NO_ZIP}: its directory does not hold the entries that its end counts")
    has_backslashes = any("\\" in one.name for one in entries) and not any("/" in one.name for one in entries)
    return Archive(payload, [*map(_with_slashes, entries)] if has_backslashes else entries, start, has_backslashes)


def _with_slashes(entry: Entry) -> Entry:
    central, local = (
        header and header._replace(name=header.name.replace(b"\\", b"/")) for header in (entry.central, entry.local)
    )
    return Entry(entry.name.replace("\\", "/"), central, local, entry.attributes)


def _read_end(payload: bytes, end: int) -> tuple[int, list[int]]:
    """The end of the directory, and its end record: two disks, two counts, size, start. Of zip64 the wide one."""
    numbers = list(_END.unpack_from(payload, end)[1:-1])
    locator = end - _LOCATOR64.size
    if locator < 0 or not payload.startswith(b"PK\6\7", locator):
        return end, numbers
    start = _LOCATOR64.unpack_from(payload, locator)[2]
    if start + _END64.size != locator or not payload.startswith(b"PK\6\6", start):
        raise FormatError(f"{NO_ZIP}: its zip64 end is not where its locator says")
    wide = list(_END64.unpack_from(payload, start)[4:])
    limits = [_WIDE_COUNT] * 4 + [WIDE] * 2
    if any(number not in (there, limit) for number, there, limit in zip(numbers, wide, limits, strict=True)):
        raise FormatError("the archive has two ends, zip64 and plain, that disagree")
    return start, wide


def _read_header(payload: bytes, at: int, stop: int, is_local: bool) -> ZipHeader | None:
    """The header of an entry, which must end before `stop`; None if there is none.

    Raises `FormatError` for a name that no disk holds, before it uses the name.
    """
    form, mark = (_LOCAL, b"PK\3\4") if is_local else (_CENTRAL, b"PK\1\2")
    if at + form.size > stop or not payload.startswith(mark, at):
        return None
    values = form.unpack_from(payload, at)
    version, flags, method, _, _, checksum, packed, size, *lengths = values[1:11] if is_local else values[2:12]
    start = at + form.size
    end = start + sum(lengths)
    extra = _extra_fields(payload[start + lengths[0] : end])
    if end > stop or extra is None:
        return None
    name = payload[start : start + lengths[0]]
    paths = tuple(content[5:] for number, content in extra if number == 0x7075)
    for path in (name, *paths):
        if len(path) > MAX_NAME or max(map(len, path.split(b"/"))) > MAX_PART:
            shown = printable(path[:MAX_PART].decode("utf-8", "replace"), 40)
            raise FormatError(f"a name of {len(path)} bytes, {shown}: {MAX_PART} a part and {MAX_NAME} in all is most")
    numbers = [size, packed] if is_local else [size, packed, values[-1]]
    for number, content in extra:
        numbers = _widen(numbers, content) if number == 0x0001 and numbers else numbers
    if numbers is None:
        return None
    size, packed, offset = [*numbers, 0][:3]
    return ZipHeader(name, version & 0xFF, flags, method, checksum, packed, size, offset, paths, end)


def _extra_fields(extra: bytes) -> list[tuple[int, bytes]] | None:
    """The numbered fields behind a name; None if they are damaged. Up to three bytes of padding may follow."""
    found, at = [], 0
    while at + 4 <= len(extra):
        number, length = struct.unpack_from("<2H", extra, at)
        at += 4 + length
        found.append((number, extra[at - length : at]))
    return found if at <= len(extra) else None


def _widen(numbers: list[int], wide: bytes) -> list[int] | None:
    """The numbers of a header; numbers too wide for it come from its zip64 field. None if the two disagree."""
    words = [word for (word,) in struct.iter_unpack("<Q", wide[: len(wide) // 8 * 8])]
    if WIDE not in numbers:
        return numbers if words == numbers[: len(words)] else None
    if len(words) != numbers.count(WIDE) or wide[8 * len(words) :] not in (b"", bytes(4)):
        return None
    return [words.pop(0) if number == WIDE else number for number in numbers]


# -------------------------------------------------------------------------------------- the content of an entry


def _pieces(archive: Archive, entry: Entry) -> Iterator[bytes]:
    """An entry's content in pieces. Raises `FormatError` unless it ends exactly where its packed data end."""
    packed = memoryview(archive.payload)[entry.local.end : entry.local.end + entry.central.packed]
    if entry.central.method == zipfile.ZIP_STORED:
        yield bytes(packed)
        return
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    for start in range(0, len(packed), MB):
        waiting, piece = packed[start : start + MB], b" "
        while piece and not inflater.eof:
            try:
                piece = inflater.decompress(waiting, MB)
            except zlib.error as error:
                raise FormatError(str(error)) from None
            yield piece
            waiting = inflater.unconsumed_tail
        if inflater.eof and (inflater.unused_data or start + MB < len(packed)):
            raise FormatError("other data follow its own: other tools may find other files there")
    if not inflater.eof:
        raise FormatError("its data are cut short")


def read_entry(archive: Archive, entry: Entry, keep: bool) -> bytes:
    """An entry's bytes (none unless `keep`). Raises `FormatError` if size, checksum or packed data are wrong."""
    size, checksum, kept = 0, 0, []
    for piece in _pieces(archive, entry):
        size, checksum = size + len(piece), zlib.crc32(piece, checksum)
        kept += [piece] if keep else []
        if size > entry.central.size:
            break
    if size != entry.central.size:
        raise FormatError(f"its size is not the declared {entry.central.size} bytes")
    if checksum != entry.central.checksum:
        raise FormatError("its checksum (CRC) is another")
    return b"".join(kept)
