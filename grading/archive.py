"""A zip archive, read by its format, and whether every tool unpacks it alike: names, links, duplicates, stray bytes.

`zipfile` is not used: of the meanings that an archive may have, it takes one and ignores the others. An archive that
two tools would unpack differently is refused: the file that is graded would depend on the grader's computer.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import stat
import struct
import unicodedata
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from grading.findings import Message
from grading.programs import few, printable

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


class ZipEntry(NamedTuple):
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
    entries: list[ZipEntry]  # in the order of the directory
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
        entries.append(ZipEntry(name, central, local, attributes))
        at = central.end + comment_length
    if at != stop:
        raise FormatError(f"{NO_ZIP}: its directory does not hold the entries that its end counts")
    has_backslashes = any("\\" in one.name for one in entries) and not any("/" in one.name for one in entries)
    return Archive(payload, [*map(_with_slashes, entries)] if has_backslashes else entries, start, has_backslashes)


def _with_slashes(entry: ZipEntry) -> ZipEntry:
    central, local = (
        header and header._replace(name=header.name.replace(b"\\", b"/")) for header in (entry.central, entry.local)
    )
    return ZipEntry(entry.name.replace("\\", "/"), central, local, entry.attributes)


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


def _pieces(archive: Archive, entry: ZipEntry) -> Iterator[bytes]:
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


def read_entry(archive: Archive, entry: ZipEntry, keep: bool) -> bytes:
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


# --------------------------------------------------------------------------------------- what an archive is to any tool

FINDER_ICON = "Icon\r"  # macOS and Google Drive put it into folders


def fixed_entry(name: str, mode: int = stat.S_IFREG | 0o644) -> zipfile.ZipInfo:
    """An entry to write: its time and system are fixed, so that the same input gives the same bytes everywhere."""
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    info.create_system = 3  # Unix, also when packed on Windows
    info.external_attr = mode << 16
    return info


def name_fault(name: str) -> str | None:
    """Why a name must not be unpacked, or None."""
    if re.search("[\0-\x1f\x7f-\x9f\ud800-\udfff]", name.removesuffix(f"/{FINDER_ICON}")):
        return "control or undecodable characters in the name"
    if name.startswith("/") or re.match("[A-Za-z]:", name):
        return "an absolute name"
    if "\\" in name:
        return "a backslash in the name"
    # Windows drops dots and spaces at the end, so ".. " is ".." there.
    if not all(part.rstrip(". ") for part in name.removesuffix("/").split("/")):
        return "a name with an empty, '.' or '..' part"
    return None


def _readings(entry: ZipEntry) -> set[str]:
    """Every name that some tool gives an entry: Finder writes UTF-8 without the flag for it, others trust the flag."""
    texts = {path.decode("utf-8", "surrogateescape") for path in _unicode_paths(entry)}
    with contextlib.suppress(UnicodeDecodeError):
        texts.add(entry.central.name.decode("utf-8"))
    return texts | {entry.name, entry.central.name.decode("cp437")}


def _unicode_paths(entry: ZipEntry) -> tuple[bytes, ...]:
    return entry.central.paths + (entry.local.paths if entry.local else ())


def _skeleton(name: bytes) -> bytes:
    """A name's ASCII letters, which all code pages share. For others some tools write "?", Info-ZIP "#U" and digits."""
    return re.sub(rb"(?:[\x80-\xff?]|#U[0-9a-fA-F]{4}|#L[0-9a-fA-F]{6})+", b"?", name)


def _entry_fault(entry: ZipEntry) -> str | None:
    """Why an entry must not be read, or None."""
    if fault := name_fault(entry.name):
        return fault
    if any(_skeleton(path) != _skeleton(entry.central.name) for path in _unicode_paths(entry)):
        return "another name in the field Unicode path, 0x7075, which some tools prefer"
    if fault := next(filter(None, map(name_fault, sorted(_readings(entry)))), None):
        return fault
    kind = stat.S_IFMT(entry.attributes >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "a link or special file"
    # 0x10 and 0x8 are DOS's attributes of a folder and of a volume label, which unzip skips.
    if entry.central.size if entry.is_folder else kind == stat.S_IFDIR or entry.attributes & 0x18:
        return "a file to some tools, a folder or label to others"
    headers = [header for header in (entry.central, entry.local) if header]
    if any(header.flags & IS_ENCRYPTED for header in headers):
        return "encrypted"
    if any(header.version > MAX_VERSION for header in headers):
        return "a version of the format that unzip skips"
    if entry.central.method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "a compression method other than stored or deflate"
    return None


def _damage(entry: ZipEntry) -> str | None:
    """The difference between an entry's two headers, or None. A size that is not known yet is written as 0."""
    if entry.local is None:
        return "its local header is damaged, or not where the directory says"
    for what in ("name", "method", "checksum", "packed", "size"):
        here, there = getattr(entry.local, what), getattr(entry.central, what)
        is_later = entry.local.flags & HAS_DESCRIPTOR and what in ("checksum", "packed", "size") and here == 0
        if here != there and not is_later:
            return f"its local header has another {what.replace('packed', 'packed size')}"
    return None


def archive_problems(archive: Archive, most_bytes: float) -> list[Message]:
    """The reasons not to read an archive, by its headers alone: nothing has been unpacked yet."""
    refused, damaged = defaultdict(list), defaultdict(list)
    for entry in archive.entries:
        if fault := _entry_fault(entry):
            refused[fault].append(entry.name)
        elif fault := _damage(entry):
            damaged[fault].append(entry.name)
    problems = [Message(f"refused entries ({fault}): {few(names)}", "E004-entries") for fault, names in refused.items()]
    problems += [damaged_entries(names, fault) for fault, names in damaged.items()]
    if not problems:
        problems += [Message(said, "E004-entries") for said in _collisions(archive.entries)]
    if not problems:
        problems += [Message(said, "E004-entries") for said in _stray_bytes(archive)]
    unpacked = sum(entry.central.size for entry in archive.entries)
    if unpacked > most_bytes:
        said = f"{unpacked / MB:.1f} MB when unpacked; the limit is {most_bytes / MB:g} MB"
        problems.append(Message(said, "E003-unpacked", expected=int(most_bytes), got=unpacked))
    return problems


def damaged_entries(names: list[str], why: str) -> Message:
    return Message(f"{few(names)} {'is' if len(names) == 1 else 'are'} damaged: {why}", "E005-damaged", min(names))


def _fold(name: str) -> str:
    """One spelling for all names that some disk, or unzip, takes for the same.

    Case; Unicode's forms and its invisible letters; dots and spaces at the end (Windows); what follows a colon (a
    file's second stream on Windows) or, with digits alone, a semicolon (VMS's version, which unzip drops).
    """
    if not name.isascii():
        letters = unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())
        name = "".join(letter for letter in letters if unicodedata.category(letter) != "Cf")
    parts = name.lower().removesuffix("/").split("/")
    return "/".join(part if part.isalnum() else re.sub(r":.*|;[0-9]*\Z", "", part).rstrip(". ") for part in parts)


def _collisions(entries: list[ZipEntry]) -> list[str]:
    """Problems: names that some disk takes for one, so that one file would replace another."""
    # With "/" as the lowest letter, what lies in a folder follows it at once: neighbours are all that need comparing.
    names = {
        (_fold(reading).replace("/", "\0"), index, entry.is_folder)
        for index, entry in enumerate(entries)
        for reading in _readings(entry)
    }
    twice, both = set(), set()
    for (name, index, is_folder), (following, other, _) in itertools.pairwise(sorted(names)):
        if name == following and index != other:
            twice.add(name.replace("\0", "/"))
        elif following.startswith(f"{name}\0") and not is_folder:
            both.add(name.replace("\0", "/"))
    problems = [f"several entries for one name (upper and lower case are the same): {few(twice)}"] if twice else []
    return problems + ([f"both a file and a folder: {few(both)}"] if both else [])


def _stray_bytes(archive: Archive) -> list[str]:
    """Problems: bytes that belong to no entry or to two. A tool that reads from the start would find other files."""
    entries, at = sorted(archive.entries, key=lambda entry: entry.central.offset), 0
    ends = [*(entry.central.offset for entry in entries), archive.directory][1:]
    for entry, end in zip(entries, ends, strict=True):
        data_end = entry.local.end + entry.central.packed
        if entry.central.offset != at or data_end > end or archive.payload[data_end:end] not in _descriptors(entry):
            name = printable(entry.name)
            return [f"bytes around {name} belong to no entry or to two: other tools may find other files"]
        # A tool that reads from the start ends stored data of unknown size where a descriptor seems to follow.
        is_open = entry.local.flags & HAS_DESCRIPTOR and entry.central.method == zipfile.ZIP_STORED
        if is_open and b"PK\7\x08" in archive.payload[entry.local.end : data_end]:
            return [f"{printable(entry.name)} holds what looks like its own end: other tools may find other files"]
        at = end
    return [] if at == archive.directory else ["bytes before the directory: other tools may find other files there"]


def _descriptors(entry: ZipEntry) -> tuple[bytes, ...]:
    """The bytes that may follow an entry's data: none, or if a flag is set checksum and sizes, in one of four forms."""
    if not entry.local.flags & HAS_DESCRIPTOR:
        return (b"",)
    checksum, sizes = entry.central.checksum, (entry.central.packed, entry.central.size)
    plain = struct.pack("<3L", checksum, *(size & WIDE for size in sizes)), struct.pack("<L2Q", checksum, *sizes)
    return *plain, *(b"PK\7\x08" + descriptor for descriptor in plain)
