"""A zip archive, read with `zipfile`, and whether every tool unpacks it alike: names, links, duplicates, stray bytes.

`zipfile` takes one of the meanings that an archive may have and passes over the others: bytes that belong to no entry,
most of what stands in front of an entry's data, what follows the end of packed data. An archive that two tools would
unpack differently is refused, because the file that is graded would depend on the grader's computer. Therefore
`zipfile` reads the headers alone; what lies between them is compared here, and the data are unpacked here.
"""

from __future__ import annotations

import contextlib
import io
import re
import stat
import struct
import unicodedata
import warnings
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from grading.findings import Finding
from grading.programs import few, printable

MB = 1_000_000
MAX_ENTRIES = 10_000
# Bytes of a name. A longer part fits on no Linux or macOS disk, a longer path on no macOS disk (1,024), so no honest
# archive holds one; and the time to bring a name into one Unicode form grows with the square of its length.
MAX_PART, MAX_NAME = 255, 1_000


class FormatError(AssertionError):
    """The submission is wrong. An AssertionError, as in the course's own checker, so that scripts can catch that."""


_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
LOCAL_SIZE = 30  # bytes of a local header in front of its name
WIDE, _WIDE_COUNT = 0xFFFFFFFF, 0xFFFF  # in place of a number: "see the zip64 record"
HAS_DESCRIPTOR, IS_UTF8, IS_ENCRYPTED = 0x8, 0x800, 0x2061  # flags; masked headers and patches count as encrypted
MAX_VERSION = 45  # zip64's; more is for other ciphers and compression methods
NO_ZIP = "not a zip archive, or a truncated one"
ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar")  # ends of names, in lower case
OTHER_ARCHIVES = {  # by the bytes at these places
    (0, b"Rar!\x1a\x07"): "RAR", (0, b"7z\xbc\xaf\x27\x1c"): "7z", (0, b"\x1f\x8b"): "gzip (.tar.gz)",
    (0, b"\xfd7zXZ\0"): "xz (.tar.xz)", (0, b"BZh"): "bzip2 (.tar.bz2)", (257, b"ustar"): "tar",
}  # fmt: skip


class ZipEntry(NamedTuple):
    """A file or folder. local: the header in front of its data; None if it is damaged. end: where the next begins."""

    name: str
    central: zipfile.ZipInfo
    local: zipfile.ZipInfo | None
    end: int

    @property
    def is_folder(self) -> bool:
        return self.name.endswith("/")

    @property
    def start(self) -> int:
        """Where its data begin."""
        return self.central.header_offset + LOCAL_SIZE + len(_raw_name(self.local)) + len(self.local.extra)


class Archive(NamedTuple):
    payload: bytes
    entries: list[ZipEntry]  # in the order of their data
    has_backslashes: bool  # between folders and names, as Windows PowerShell writes them; `entries` have slashes


def read_archive(payload: bytes) -> Archive:
    """The entries in the directory of a zip. Raises `FormatError` unless it has exactly one directory."""
    # zipfile reads as many entries as there are. Each has this mark, also those of an archive inside of this one.
    if (count := payload.count(b"PK\1\2")) > MAX_ENTRIES:
        raise FormatError(f"the archive has {count} entries; more than {MAX_ENTRIES} are refused")
    file = _open(payload)
    _check_end(payload, file)
    headers = sorted(file.filelist, key=lambda header: header.header_offset)
    starts = [*(header.header_offset for header in headers), file.start_dir]
    local = [_read_local(payload, start, end) for start, end in pairwise(starts)]
    names = [header.filename for header in headers]
    has_backslashes = any("\\" in name for name in names) and not any("/" in name for name in names)
    if has_backslashes:
        for header in filter(None, headers + local):
            header.filename = header.filename.replace("\\", "/")
    names = [header.filename for header in headers]
    return Archive(payload, [*map(ZipEntry, names, headers, local, starts[1:])], has_backslashes)


def _open(payload: bytes) -> zipfile.ZipFile:
    """The archive as `zipfile` reads its directory. Raises `FormatError` if that is damaged."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file = zipfile.ZipFile(io.BytesIO(payload))
    except Exception as error:  # damaged bytes make zipfile raise errors of a dozen unrelated classes
        kind = next((kind for (at, mark), kind in OTHER_ARCHIVES.items() if payload.startswith(mark, at)), "")
        said = f"not a zip archive: it is of the kind {kind}" if kind else f"{NO_ZIP} ({printable(error)})"
        raise FormatError(said) from None
    for header in file.filelist:
        header.filename = header.orig_filename  # not cut at a NUL, and not replaced by a Unicode path
    return file


def _check_end(payload: bytes, file: zipfile.ZipFile) -> None:
    """Raise `FormatError` unless the directory is followed by its end alone, and this says what `zipfile` has found."""
    if re.search(rb"PK[\1-\7][\2-\x08]", file.comment):
        raise FormatError("the comment of the archive holds an archive: other tools may unpack that one")
    end, count = len(payload) - _END.size - len(file.comment), len(file.filelist)
    mark, *numbers, length = _END.unpack_from(payload, end)
    locator = end - _LOCATOR64.size
    is_wide = locator >= _END64.size and payload.startswith(b"PK\6\7", locator)
    stop = locator - _END64.size if is_wide else end
    found = [0, 0, count, count, stop - file.start_dir, file.start_dir]  # two disks, two counts, size, start
    limits = [_WIDE_COUNT] * 4 + [WIDE] * 2 if is_wide else found
    is_right = mark == b"PK\5\6" and length == len(file.comment)
    is_right &= all(number in (there, most) for number, there, most in zip(numbers, found, limits, strict=True))
    if is_wide:
        is_right &= payload.startswith(b"PK\6\6", stop) and [*_END64.unpack_from(payload, stop)[4:]] == found
        is_right &= _LOCATOR64.unpack_from(payload, locator)[2] == stop
    if is_right and file.filelist:
        # zipfile does not see that the last entry goes on behind the directory. 18: from these lengths to the name.
        last = file.filelist[-1]
        lengths = len(_raw_name(last)), len(last.extra), len(last.comment)
        is_right = struct.unpack_from("<3H", payload, stop - sum(lengths) - 18) == lengths
    if not is_right:
        raise FormatError(f"{NO_ZIP}, or one with foreign bytes: its directory is not what its end says")


def _read_local(payload: bytes, start: int, end: int) -> zipfile.ZipInfo | None:
    """The local header between two places, read by `zipfile` as a directory of this one entry; None if damaged."""
    fixed = payload[start : start + LOCAL_SIZE]
    if len(fixed) < LOCAL_SIZE or not fixed.startswith(b"PK\3\4"):
        return None
    stop = start + LOCAL_SIZE + sum(struct.unpack("<2H", fixed[-4:]))
    if stop > end:
        return None
    # Its comment is of zeros: else the end of a hostile header could be taken for the locator of a zip64 record.
    comment = bytes(_LOCATOR64.size)
    header = b"PK\1\2\0\0" + fixed[4:] + struct.pack("<3H2L", len(comment), 0, 0, 0, 0)
    header += payload[start + LOCAL_SIZE : stop] + comment
    with contextlib.suppress(FormatError):
        return _open(header + _END.pack(b"PK\5\6", 0, 0, 1, 1, len(header), 0, 0)).filelist[0]
    return None


def _raw_name(header: zipfile.ZipInfo) -> bytes:
    return header.filename.encode("utf-8" if header.flag_bits & IS_UTF8 else "cp437")


def _extra_fields(header: zipfile.ZipInfo, number: int) -> list[bytes]:
    """The contents of a header's extra fields with this number. `zipfile` has checked that they are whole."""
    found, at = [], 0
    while at + 4 <= len(header.extra):
        kind, length = struct.unpack_from("<2H", header.extra, at)
        at += 4 + length
        found += [header.extra[at - length : at]] if kind == number else []
    return found


def _unicode_paths(entry: ZipEntry) -> list[bytes]:
    """The names in Unicode path fields, which some tools prefer to the name."""
    headers = filter(None, (entry.central, entry.local))
    return [content[5:] for header in headers for content in _extra_fields(header, 0x7075)]


# -------------------------------------------------------------------------------------- the content of an entry


def _pieces(archive: Archive, entry: ZipEntry) -> Iterator[bytes]:
    """An entry's content in pieces. Raises `FormatError` unless it ends exactly where its packed data end."""
    packed = memoryview(archive.payload)[entry.start : entry.start + entry.central.compress_size]
    if entry.central.compress_type == zipfile.ZIP_STORED:
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
        if size > entry.central.file_size:
            break
    if size != entry.central.file_size:
        raise FormatError(f"its size is not the declared {entry.central.file_size} bytes")
    if checksum != entry.central.CRC:
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
    raw = _raw_name(entry.central)
    texts = {path.decode("utf-8", "surrogateescape") for path in _unicode_paths(entry)}
    with contextlib.suppress(UnicodeDecodeError):
        texts.add(raw.decode("utf-8"))
    return texts | {entry.name, raw.decode("cp437")}


def _skeleton(name: bytes) -> bytes:
    """A name's ASCII letters, which all code pages share. For others some tools write "?", Info-ZIP "#U" and digits."""
    return re.sub(rb"(?:[\x80-\xff?]|#U[0-9a-fA-F]{4}|#L[0-9a-fA-F]{6})+", b"?", name)


def _entry_fault(entry: ZipEntry) -> str | None:
    """Why an entry must not be read, or None."""
    central, headers = entry.central, [header for header in (entry.central, entry.local) if header]
    paths = [*map(_raw_name, headers), *_unicode_paths(entry)]
    if any(len(path) > MAX_NAME or max(map(len, path.split(b"/"))) > MAX_PART for path in paths):
        return f"a name of more bytes than {MAX_PART} a part and {MAX_NAME} in all"
    if fault := name_fault(entry.name):
        return fault
    if any(_skeleton(path) != _skeleton(paths[0]) for path in _unicode_paths(entry)):
        return "another name in the field Unicode path, 0x7075, which some tools prefer"
    if fault := next(filter(None, map(name_fault, sorted(_readings(entry)))), None):
        return fault
    kind = stat.S_IFMT(central.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "a link or special file"
    # 0x10 and 0x8 are DOS's attributes of a folder and of a volume label, which unzip skips.
    if central.file_size if entry.is_folder else kind == stat.S_IFDIR or central.external_attr & 0x18:
        return "a file to some tools, a folder or label to others"
    if any(header.flag_bits & IS_ENCRYPTED for header in headers):
        return "encrypted"
    if any(header.extract_version > MAX_VERSION for header in headers):
        return "a version of the format that unzip skips"
    if central.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "a compression method other than stored or deflate"
    return None


def _damage(entry: ZipEntry) -> str | None:
    """Why an entry's two headers do not fit together, or None."""
    central, local = entry.central, entry.local
    if local is None:
        return "its local header is damaged, or not where the directory says"
    # A tool that learns these after the data writes 0 in front of them.
    pairs = (local.CRC, central.CRC), (local.compress_size, central.compress_size), (local.file_size, central.file_size)
    is_later = local.flag_bits & HAS_DESCRIPTOR
    is_alike = all(here == there or (is_later and here == 0) for here, there in pairs)
    if not is_alike or local.compress_type != central.compress_type or _raw_name(local) != _raw_name(central):
        return "its local header has another name, method, checksum or size than the directory"
    for header in (central, local):
        for content in _extra_fields(header, 0x0001):
            numbers = iter((header.file_size, header.compress_size, header.header_offset))
            words = struct.unpack(f"<{len(content) // 8}Q", content[: len(content) // 8 * 8])
            if not all(word in numbers for word in words):  # in this order
                return "its zip64 field has another size or place than zipfile has found"
    return None


def archive_problems(archive: Archive, most_bytes: float) -> list[Finding]:
    """The reasons not to read an archive, by its headers alone: nothing has been unpacked yet."""
    refused, damaged = defaultdict(list), defaultdict(list)
    for entry in archive.entries:
        if fault := _entry_fault(entry):
            refused[fault].append(entry.name)
        elif fault := _damage(entry):
            damaged[fault].append(entry.name)
    problems = [Finding(f"refused entries ({fault}): {few(names)}", "E004-entries") for fault, names in refused.items()]
    problems += [damaged_entries(names, fault) for fault, names in damaged.items()]
    if not problems:
        problems += [Finding(said, "E004-entries") for said in _collisions(archive.entries)]
    if not problems:
        problems += [Finding(said, "E004-entries") for said in _stray_bytes(archive)]
    unpacked = sum(entry.central.file_size for entry in archive.entries)
    if unpacked > most_bytes:
        said = f"{unpacked / MB:.1f} MB when unpacked; the limit is {most_bytes / MB:g} MB"
        problems.append(Finding(said, "E003-unpacked", expected=int(most_bytes), got=unpacked))
    return problems


def damaged_entries(names: list[str], why: str) -> Finding:
    return Finding(f"{few(names)} {'is' if len(names) == 1 else 'are'} damaged: {why}", "E005-damaged", min(names))


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
    for (name, index, is_folder), (following, other, _) in pairwise(sorted(names)):
        if name == following and index != other:
            twice.add(name.replace("\0", "/"))
        elif following.startswith(f"{name}\0") and not is_folder:
            both.add(name.replace("\0", "/"))
    problems = [f"several entries for one name (upper and lower case are the same): {few(twice)}"] if twice else []
    return problems + ([f"both a file and a folder: {few(both)}"] if both else [])


def _stray_bytes(archive: Archive) -> list[str]:
    """Problems: bytes that belong to no entry or to two. A tool that reads from the start would find other files."""
    if archive.entries and archive.entries[0].central.header_offset:
        return ["bytes in front of the first entry: other tools may find other files there"]
    for entry in archive.entries:
        data_end = entry.start + entry.central.compress_size
        if data_end > entry.end or archive.payload[data_end : entry.end] not in _descriptors(entry):
            name = printable(entry.name)
            return [f"bytes around {name} belong to no entry or to two: other tools may find other files"]
        # A tool that reads from the start ends stored data of unknown size where a descriptor seems to follow.
        is_open = entry.local.flag_bits & HAS_DESCRIPTOR and entry.central.compress_type == zipfile.ZIP_STORED
        if is_open and b"PK\7\x08" in archive.payload[entry.start : data_end]:
            return [f"{printable(entry.name)} holds what looks like its own end: other tools may find other files"]
    return []


def _descriptors(entry: ZipEntry) -> tuple[bytes, ...]:
    """The bytes that may follow an entry's data: none, or if a flag is set checksum and sizes, in one of four forms."""
    if not entry.local.flag_bits & HAS_DESCRIPTOR:
        return (b"",)
    checksum, sizes = entry.central.CRC, (entry.central.compress_size, entry.central.file_size)
    plain = struct.pack("<3L", checksum, *(size & WIDE for size in sizes)), struct.pack("<L2Q", checksum, *sizes)
    return *plain, *(b"PK\7\x08" + descriptor for descriptor in plain)
