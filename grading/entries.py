"""Whether every tool unpacks an archive alike: names, links, duplicates, stray bytes.

An archive that two tools would unpack differently is refused: the file that is graded would depend on the grader's
computer.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import stat
import struct
import unicodedata
import zipfile
from collections import defaultdict

from grading.archive import HAS_DESCRIPTOR, IS_ENCRYPTED, MAX_VERSION, MB, WIDE, Archive, Entry
from grading.findings import Message
from grading.programs import few, printable

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


def _readings(entry: Entry) -> set[str]:
    """Every name that some tool gives an entry: Finder writes UTF-8 without the flag for it, others trust the flag."""
    texts = {path.decode("utf-8", "surrogateescape") for path in _unicode_paths(entry)}
    with contextlib.suppress(UnicodeDecodeError):
        texts.add(entry.central.name.decode("utf-8"))
    return texts | {entry.name, entry.central.name.decode("cp437")}


def _unicode_paths(entry: Entry) -> tuple[bytes, ...]:
    return entry.central.paths + (entry.local.paths if entry.local else ())


def _skeleton(name: bytes) -> bytes:
    """A name's ASCII letters, which all code pages share. For others some tools write "?", Info-ZIP "#U" and digits."""
    return re.sub(rb"(?:[\x80-\xff?]|#U[0-9a-fA-F]{4}|#L[0-9a-fA-F]{6})+", b"?", name)


def _entry_fault(entry: Entry) -> str | None:
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


def _damage(entry: Entry) -> str | None:
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


def _collisions(entries: list[Entry]) -> list[str]:
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


def _descriptors(entry: Entry) -> tuple[bytes, ...]:
    """The bytes that may follow an entry's data: none, or if a flag is set checksum and sizes, in one of four forms."""
    if not entry.local.flags & HAS_DESCRIPTOR:
        return (b"",)
    checksum, sizes = entry.central.checksum, (entry.central.packed, entry.central.size)
    plain = struct.pack("<3L", checksum, *(size & WIDE for size in sizes)), struct.pack("<L2Q", checksum, *sizes)
    return *plain, *(b"PK\7\x08" + descriptor for descriptor in plain)
