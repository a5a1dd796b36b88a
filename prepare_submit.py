"""Create or check the zip that is handed in.

    python prepare_submit.py DIR ID      create ID.zip from DIR and check it; a wrong one is not written
    python prepare_submit.py ZIP ID      check a zip; nothing is unpacked to disk, no student code is run

A zip must mean the same to every tool that may unpack it, and the modules that it imports must be in it.

Exit status: 0 the submission is fine; 1 it was checked and is wrong (one line for each problem); 2 it could not be
checked (bad usage, a missing file). Needs the standard library, `course.py` and `utils.py` alone: it answers at once.

For scripts: `check_zip` and `create_zip` return a `Report`; `assert_zip`, and the course's own `check_file` and
`main`, raise `FormatError`, an `AssertionError`, on a wrong format.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import contextlib
import fnmatch
import io
import itertools
import math
import os
import re
import stat
import struct
import sys
import threading
import unicodedata
import warnings
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from course import (
    ADVANCED,
    DEFAULT_EDITION,
    LABEL_NAMES,
    OUTPUT_KINDS,
    TEXTS,
    Edition,
    Example,
    create_data,
    has_gold_labels,
    majority_accuracy,
    parse_line,
    prompt_suffix,
    read_label_names,
)
from course import EDITIONS as ALL_EDITIONS
from utils import (
    ROOT,
    ArgumentParser,
    UserError,
    atomic_write,
    check_writable,
    decimal_number,
    find_asset,
    printable,
    run_main,
    some,
)

MB = 1_000_000
MAX_ENTRIES = 10_000
# Bytes of a name. A part of more fits on no Linux or macOS disk, a whole path of more on no macOS disk (1,024), so
# nobody has packed it; and to bring a name into one Unicode form takes time that grows as its square.
MAX_PART, MAX_NAME = 255, 1_000
# Bytes of Python that are parsed, in a file and in all: a syntax tree takes a thousand times its text.
MAX_MODULE, MAX_CODE = 100_000, MB
MAX_LINES = 100_000  # of an output file; the largest data set has some 2,000
MAX_ID = 100  # letters
MAX_FAULTS = 20  # modules that are named because they are not Python
MAX_DEPTH = 10  # of a module in packages
NO_SUBMISSION = (
    "the films data set that comes with this package is for trying things out; the assignment asks for SST and CFIMDB"
)
_KIND_WORDS = {kind[:6] for kind in OUTPUT_KINDS}  # see _words
OUTPUT = re.compile(rf"({'|'.join(LABEL_NAMES)})-(dev|test)-({'|'.join(OUTPUT_KINDS)})-output\.txt")
EDITIONS = {name: edition for name, edition in ALL_EDITIONS.items() if edition.required}  # whose files are known


def _any_of(patterns: str) -> re.Pattern:
    """Matches a name that fits one of the shell patterns."""
    return re.compile("|".join(map(fnmatch.translate, patterns.split())), re.IGNORECASE)


# Never packed. A zip that holds the first is wrong (large, private or not the student's work); the second is clutter.
FOREIGN = _any_of(".git .venv venv env pyvenv.cfg conda-meta node_modules *.pt *.pth")
CLUTTER = _any_of("__pycache__ .*_cache .hypothesis .ipynb_checkpoints .DS_Store *.pyc *.zip *.resume* *.lock .*.tmp")


def _few(names: Iterable[str], most: int = 5) -> str:
    return some(sorted(names), most)


class FormatError(AssertionError):
    """The submission is wrong. An AssertionError, as in the course's own checker, so that scripts can catch that."""


class Score(NamedTuple):
    """One output file against its data; None where the data has no gold labels."""

    lines: int
    accuracy: float | None
    majority: float | None


@dataclass
class Report:
    """What a check found. `files` are relative to the top folder."""

    student_id: str
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    scores: dict[str, Score] = field(default_factory=dict)

    @property
    def accuracies(self) -> dict[str, float]:
        """Accuracy of each output file whose data has gold labels."""
        return {name: score.accuracy for name, score in self.scores.items() if score.accuracy is not None}

    def raise_if_wrong(self) -> None:
        """Raise `FormatError` with every problem in its message, if there are any."""
        if self.problems:
            raise FormatError("; ".join(self.problems))

    def __str__(self) -> str:
        lines = [f"{self.student_id}: {len(self.files)} files"]
        if self.scores:
            lines.append(f"{'output file':<36}{'lines':>6}{'accuracy':>10}{'majority':>10}")
        for name, (count, accuracy, majority) in self.scores.items():
            numbers = "  no gold labels" if accuracy is None else f"{accuracy:>10.3f}{majority:>10.3f}"
            lines.append(f"{name:<36}{count:>6}{numbers}")
        for kind, messages in (("note", self.notes), ("warning", self.warnings), ("problem", self.problems)):
            lines += [f"{kind}: {message}" for message in messages]
        count = len(self.problems)
        lines.append(f"{count} problem{'s' * (count != 1)} found" if count else "the submission is fine")
        return "\n".join(lines)


@dataclass(frozen=True)
class Rules:
    """What to check by; sizes in MB (1,000,000 bytes). Without `data_dir`, data is looked for in the usual places.

    Left as None, `size_limit` is the edition's, and `max_unpacked` 20 times that.
    """

    edition: str = DEFAULT_EDITION
    data_dir: str | os.PathLike | None = None
    size_limit: float | None = None
    max_unpacked: float | None = None
    id_pattern: str = r"[A-Za-z0-9][A-Za-z0-9._-]*"

    def __post_init__(self) -> None:
        if self.edition not in EDITIONS:
            raise UserError(f"no edition {printable(repr(self.edition))}; there are {', '.join(EDITIONS)}")
        if self.data_dir is not None and not Path(self.data_dir).is_dir():
            raise UserError(f"the data folder {printable(self.data_dir)} does not exist")
        if self.size_limit is None:
            object.__setattr__(self, "size_limit", EDITIONS[self.edition].size_limit)

    @property
    def max_bytes(self) -> float:
        return self.size_limit * MB

    @property
    def max_unpacked_bytes(self) -> float:
        return self.max_unpacked * MB if self.max_unpacked else 20 * self.max_bytes

    def too_large(self, size: int) -> str:
        return f"the zip is {size / MB:.2f} MB; the limit is {self.size_limit:g} MB"

    def clean_id(self, student_id: str) -> str:
        """The ID without spaces around it. Raises `UserError` for one that the pattern, or a folder name, rules out."""
        student_id = student_id.strip()
        try:
            fits = re.fullmatch(self.id_pattern, student_id, re.ASCII) and len(student_id) <= MAX_ID
        except (re.error, OverflowError, RecursionError) as error:
            raise UserError(f"the ID pattern {printable(self.id_pattern)} is no regular expression: {error}") from None
        # A top name with a leading underscore would be ignored by the check, as the course does for __MACOSX.
        if not fits or "/" in student_id or student_id.startswith("_") or _name_fault(student_id):
            wanted = f"at most {MAX_ID} letters, pattern {printable(self.id_pattern)}"
            raise UserError(f"{printable(repr(student_id))} is not a valid ID ({wanted})")
        return student_id

    def find(self, name: str) -> Path | None:
        """Where a data file lies: always the caller's own, never one inside the submission. None if nowhere."""
        if self.data_dir is not None:
            path = Path(self.data_dir, name)
        else:
            path = find_asset(Path("data", name)) or Path(os.environ.get("MINLLAMA_ASSETS", ""), "data", name)
        return path if path.is_file() else None

    def label_names(self, dataset: str) -> Sequence[str]:
        """The names in the data set's mapping file, or the published ones. Raises `UserError` on a broken mapping."""
        path = self.find(f"{dataset}-label-mapping.json")
        return EDITIONS[self.edition].label_names[dataset] if path is None else read_label_names(path)


# ------------------------------------------------------------------------------------------- an archive, read once

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_WIDE, _WIDE_COUNT = 0xFFFFFFFF, 0xFFFF  # in place of a number: "see the zip64 record"
_HAS_DESCRIPTOR, _IS_UTF8, _IS_ENCRYPTED = 0x8, 0x800, 0x2061  # flags; masked headers and patches count as encrypted
MAX_VERSION = 45  # zip64's; more is for other ciphers and compression methods
NO_ZIP = "not a zip archive, or a truncated one"


class Header(NamedTuple):
    """What an archive says of an entry; it does so twice, in its directory and in front of the entry's data."""

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
    central: Header
    local: Header | None  # None where there is none
    attributes: int

    @property
    def is_folder(self) -> bool:
        return self.name.endswith("/")


class Archive(NamedTuple):
    payload: bytes
    entries: list[Entry]  # in the order of the directory
    directory: int  # where it begins


def _read_archive(payload: bytes) -> Archive:
    """What the directory of a zip holds. Raises `FormatError` unless there is exactly one directory to be found.

    Not by `zipfile`, which takes one of the meanings that an archive may have and passes over the others.
    """
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
        name = central.name.decode("utf-8" if central.flags & _IS_UTF8 else "cp437", "surrogateescape")
        local = _read_header(payload, central.offset, start, is_local=True)
        entries.append(Entry(name, central, local, attributes))
        at = central.end + comment_length
    if at != stop:
        raise FormatError(f"{NO_ZIP}: its directory does not hold the entries that its end counts")
    return Archive(payload, entries, start)


def _read_end(payload: bytes, end: int) -> tuple[int, list[int]]:
    """Where the directory must end, and its end record: two disks, two counts, size, start. As zip64 where that is."""
    numbers = list(_END.unpack_from(payload, end)[1:-1])
    locator = end - _LOCATOR64.size
    if locator < 0 or not payload.startswith(b"PK\6\7", locator):
        return end, numbers
    start = _LOCATOR64.unpack_from(payload, locator)[2]
    if start + _END64.size != locator or not payload.startswith(b"PK\6\6", start):
        raise FormatError(f"{NO_ZIP}: its zip64 end is not where its locator says")
    wide = list(_END64.unpack_from(payload, start)[4:])
    limits = [_WIDE_COUNT] * 4 + [_WIDE] * 2
    if any(number not in (there, limit) for number, there, limit in zip(numbers, wide, limits, strict=True)):
        raise FormatError("the archive has two ends, zip64 and plain, that disagree")
    return start, wide


def _read_header(payload: bytes, at: int, stop: int, is_local: bool) -> Header | None:
    """The header of an entry, which must lie before `stop`; None where there is none.

    Raises `FormatError` for a name that no disk holds, before anything is made of it.
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
    return Header(name, version & 0xFF, flags, method, checksum, packed, size, offset, paths, end)


def _extra_fields(extra: bytes) -> list[tuple[int, bytes]] | None:
    """The numbered fields behind a name; None where they are damaged. Up to three bytes of padding may follow."""
    found, at = [], 0
    while at + 4 <= len(extra):
        number, length = struct.unpack_from("<2H", extra, at)
        at += 4 + length
        found.append((number, extra[at - length : at]))
    return found if at <= len(extra) else None


def _widen(numbers: list[int], wide: bytes) -> list[int] | None:
    """The numbers of a header, those that are too wide for it from its zip64 field; None where they disagree."""
    words = [word for (word,) in struct.iter_unpack("<Q", wide[: len(wide) // 8 * 8])]
    if _WIDE not in numbers:
        return numbers if words == numbers[: len(words)] else None
    if len(words) != numbers.count(_WIDE) or wide[8 * len(words) :] not in (b"", bytes(4)):
        return None
    return [words.pop(0) if number == _WIDE else number for number in numbers]


# -------------------------------------------------------------------------------- what an archive may be to any tool


def _name_fault(name: str) -> str | None:
    """Why a name must not be unpacked, or None."""
    if re.search("[\0-\x1f\x7f-\x9f\ud800-\udfff]", name):
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
    """Every name that some tool gives an entry: Finder writes UTF-8 and does not say so, others trust the flag."""
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
    if fault := _name_fault(entry.name):
        return fault
    if any(_skeleton(path) != _skeleton(entry.central.name) for path in _unicode_paths(entry)):
        return "another name in the field Unicode path, 0x7075, which some tools prefer"
    if fault := next(filter(None, map(_name_fault, sorted(_readings(entry)))), None):
        return fault
    kind = stat.S_IFMT(entry.attributes >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "a link or special file"
    # 0x10 and 0x8 are DOS's attributes of a folder and of a volume label, which unzip skips.
    if entry.central.size if entry.is_folder else kind == stat.S_IFDIR or entry.attributes & 0x18:
        return "a file to some tools, a folder or label to others"
    headers = [header for header in (entry.central, entry.local) if header]
    if any(header.flags & _IS_ENCRYPTED for header in headers):
        return "encrypted"
    if any(header.version > MAX_VERSION for header in headers):
        return "a version of the format that unzip skips"
    if entry.central.method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "a compression method other than stored or deflate"
    return None


def _damage(entry: Entry) -> str | None:
    """In what an entry's two headers differ, or None. Sizes that are not known yet when they are written are 0."""
    if entry.local is None:
        return "its local header is damaged, or not where the directory says"
    for what in ("name", "method", "checksum", "packed", "size"):
        here, there = getattr(entry.local, what), getattr(entry.central, what)
        is_later = entry.local.flags & _HAS_DESCRIPTOR and what in ("checksum", "packed", "size") and here == 0
        if here != there and not is_later:
            return f"its local header has another {what.replace('packed', 'packed size')}"
    return None


def _archive_problems(archive: Archive, rules: Rules) -> list[str]:
    """What forbids reading an archive. Judged by its headers alone: nothing has been unpacked yet."""
    refused, damaged = defaultdict(list), defaultdict(list)
    for entry in archive.entries:
        if fault := _entry_fault(entry):
            refused[fault].append(entry.name)
        elif fault := _damage(entry):
            damaged[fault].append(entry.name)
    problems = [f"refused entries ({fault}): {_few(names)}" for fault, names in refused.items()]
    problems += [_damaged(names, fault) for fault, names in damaged.items()]
    if not problems:
        problems += _collisions(archive.entries)
    if not problems:
        problems += _stray_bytes(archive)
    unpacked = sum(entry.central.size for entry in archive.entries)
    if unpacked > rules.max_unpacked_bytes:
        problems.append(f"{unpacked / MB:.1f} MB when unpacked; the limit is {rules.max_unpacked_bytes / MB:g} MB")
    return problems


def _damaged(names: list[str], why: str) -> str:
    return f"{_few(names)} {'is' if len(names) == 1 else 'are'} damaged: {why}"


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
    """Names that one disk would take for the same: which file is graded would depend on the grader's computer."""
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
    problems = [f"several entries for one name (upper and lower case are the same): {_few(twice)}"] if twice else []
    return problems + ([f"both a file and a folder: {_few(both)}"] if both else [])


def _stray_bytes(archive: Archive) -> list[str]:
    """Bytes that belong to no entry, or to two: read from its start, the archive would hold other files."""
    entries, at = sorted(archive.entries, key=lambda entry: entry.central.offset), 0
    ends = [*(entry.central.offset for entry in entries), archive.directory][1:]
    for entry, end in zip(entries, ends, strict=True):
        data_end = entry.local.end + entry.central.packed
        if entry.central.offset != at or data_end > end or archive.payload[data_end:end] not in _descriptors(entry):
            name = printable(entry.name)
            return [f"bytes around {name} belong to no entry or to two: other tools may find other files"]
        # Read from the start, what is stored before its size is known ends where a descriptor seems to follow.
        is_open = entry.local.flags & _HAS_DESCRIPTOR and entry.central.method == zipfile.ZIP_STORED
        if is_open and b"PK\7\x08" in archive.payload[entry.local.end : data_end]:
            return [f"{printable(entry.name)} holds what looks like its own end: other tools may find other files"]
        at = end
    return [] if at == archive.directory else ["bytes before the directory: other tools may find other files there"]


def _descriptors(entry: Entry) -> tuple[bytes, ...]:
    """What may follow an entry's data: nothing, or if a flag says so checksum and sizes, in one of four forms."""
    if not entry.local.flags & _HAS_DESCRIPTOR:
        return (b"",)
    checksum, sizes = entry.central.checksum, (entry.central.packed, entry.central.size)
    plain = struct.pack("<3L", checksum, *(size & _WIDE for size in sizes)), struct.pack("<L2Q", checksum, *sizes)
    return *plain, *(b"PK\7\x08" + descriptor for descriptor in plain)


def _ignored(name: str) -> bool:
    """What operating systems add: top names with a leading underscore (as the course does), Finder's files."""
    base = name.rsplit("/", 1)[-1]
    return name.startswith("_") or base == ".DS_Store" or base.startswith("._")


def _enter_top_folder(entries: list[Entry], report: Report, edition: Edition) -> dict[str, Entry]:
    """The files by their name below the top folder; problems where that is not one folder named by the ID."""
    entries = [entry for entry in entries if not _ignored(entry.name)]
    loose = {entry.name for entry in entries if "/" not in entry.name}
    tops = {entry.name.split("/", 1)[0] for entry in entries} - loose
    if loose:
        report.problems.append(f"outside the top folder {report.student_id}/: {_few(loose)}")
    if len(tops) > 1:
        report.problems.append(f"there must be one top folder, named by the ID; found {len(tops)}: {_few(tops)}")
    elif tops and tops != {report.student_id}:
        report.problems.append(
            f"{edition.id_name} mismatch: the top folder is {_few(tops)}, the ID is {report.student_id}"
        )
    elif not entries:
        report.problems.append("the archive is empty")
    # Names are judged below the ID's folder; without any folder as they lie, or every file would be called missing.
    top = f"{report.student_id if report.student_id in tops else min(tops)}/" if tops else ""
    files = {
        entry.name.removeprefix(top): entry for entry in entries if entry.name.startswith(top) and not entry.is_folder
    }
    return _enter_deeper_folder(files, report, edition)


def _enter_deeper_folder(files: dict[str, Entry], report: Report, edition: Edition) -> dict[str, Entry]:
    """The files below the folder that holds the required ones, and a problem where that is not the top folder."""
    found = Counter(folder for folder, _, base in (name.rpartition("/") for name in files) if base in edition.required)
    if not found or "" in found:
        return files
    folder = f"{max(found, key=lambda name: (found[name], name))}/"
    inside = {name.removeprefix(folder): entry for name, entry in files.items() if name.startswith(folder)}
    example = next(name for name in edition.required if name in inside)
    report.problems.append(
        f"files must lie directly in the top folder: there is {printable(folder + example)}; "
        f"move all that is in {printable(folder)} up into {report.student_id}/"
    )
    return inside


def _check_names(files: dict[str, Entry], edition: Edition, report: Report) -> None:
    """Required and optional files, empty ones, and what does not belong in a submission."""
    if missing := [name for name in edition.required if name not in files]:
        report.problems.append(f"required files are missing: {_with_hints(missing, files)}")
    present = [name for name in ADVANCED if name in files]
    if 0 < len(present) < len(ADVANCED):
        absent = set(ADVANCED) - set(present)
        report.problems.append(f"advanced outputs must be all four or none; missing: {_with_hints(absent, files)}")
    if empty := [name for name in (*edition.required, *present) if name in files and files[name].central.size == 0]:
        report.problems.append(f"empty files: {_few(empty)}")
    if foreign := [name for name in files if any(map(FOREIGN.match, name.split("/")))]:
        report.problems.append(f"checkpoints, environments and .git do not belong in a submission: {_few(foreign)}")
    if clutter := [name for name in files if any(map(CLUTTER.match, name.split("/")))]:
        report.warnings.append(f"caches and archives do not belong in a submission: {_few(clutter)}")
    if unlisted := [name for name in edition.listed if name not in files]:
        report.warnings.append(f"in the course's list of files but absent: {_few(unlisted, len(unlisted))}")
    pdf = f"{report.student_id}-report.pdf"
    if present and pdf not in files:
        report.warnings.append(f"advanced outputs without {pdf}: describe the method there")
    if absent := [name for name in edition.optional if name not in files]:
        report.notes.append(f"optional and absent: {_few(absent)}")


def _with_hints(missing: Iterable[str], files: Iterable[str]) -> str:
    """Missing names, each with a file whose name is nearly that; and what outputs on the bundled data are."""
    near = {_words(name): name for name in sorted(files, reverse=True)}
    hinted = []
    for name in sorted(missing):
        words = _words(name)
        # sst-dev-output.txt: nobody can tell of which kind it is
        found = [near[wanted] for wanted in (words, words - _KIND_WORDS, words - {"output"}) if wanted in near]
        hinted.append(f"{name} (there is {printable(found[0])})" if found else name)
    trials = [name for name in files if re.search(r"(?i)\bfilms-.*output", name)]
    return ", ".join(hinted) + (f"; {_few(trials, 1)}: {NO_SUBMISSION}" if trials else "")


def _words(name: str) -> frozenset[str]:
    """What a file name says, without what browsers and editors add to it; the first letters of its words."""
    base = re.sub(r"\([0-9]+\)", "", name.rsplit("/", 1)[-1].lower())
    return frozenset(word[:6] for word in re.findall("[a-z]+|[0-9]+", base)) - {"txt", "copy"}


def _pieces(archive: Archive, entry: Entry) -> Iterator[bytes]:
    """An entry's content in pieces. Raises `FormatError` where it does not end where its packed data do."""
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


def _read_entry(archive: Archive, entry: Entry, keep: bool) -> bytes:
    """An entry's bytes (none unless `keep`). Raises `FormatError` where size, checksum or packed data are not right."""
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


def _check_contents(archive: Archive, files: dict[str, Entry], rules: Rules, report: Report) -> None:
    """Read every entry once, in memory, those too that are not judged; check the files that hold outputs."""
    damaged, judged = defaultdict(list), {entry.name for entry in files.values()}
    others = [(entry.name, entry) for entry in archive.entries if entry.name not in judged]
    for name, entry in [*sorted(files.items()), *others]:
        is_text = entry.name in judged and (bool(OUTPUT.fullmatch(name)) or name in TEXTS)
        if is_text and entry.central.size > rules.max_bytes:
            report.problems.append(f"{name}: {entry.central.size / MB:.1f} MB is too large for an output file")
            continue
        try:
            raw = _read_entry(archive, entry, keep=is_text)
        except FormatError as error:
            damaged[str(error)].append(name)
            continue
        if is_text and raw:
            _check_text(name, raw, rules, report)
    report.problems += [_damaged(names, why) for why, names in damaged.items()]


# ---------------------------------------------------------------------------------------------- what imports what


def _check_imports(archive: Archive, files: dict[str, Entry], edition: Edition, report: Report) -> None:
    """The submission must run as it is: modules of this package that its modules import must be in it.

    What the required modules reach is a problem where it is absent; other scripts, such as graders, earn a warning.
    """
    followed = Imports(archive, files)
    named = [name for name in edition.required if name.endswith(".py") and name in files]
    others = sorted(name for name in files if "/" not in name and name.endswith(".py"))
    told = set(edition.required)
    for start, messages, what in (
        (named, report.problems, "imported but not in the submission, which cannot run without"),
        (others, report.warnings, "imported by other scripts but not in the submission"),
    ):
        faults, absent = followed.follow(start)
        messages += faults[:MAX_FAULTS]
        if wanted := [f"{name} ({place})" for name, place in absent.items() if name not in told]:
            messages.append(f"{what}: {_few(wanted)}")
        told |= absent.keys()
    if followed.unread:
        report.warnings.append(f"too large to look at what they import: {_few(followed.unread)}")


def _modules_of_this_package() -> dict[str, str]:
    """What lies beside this file, and what the course hands out: the file, or folder, of each module."""
    handed_out = [Path(name) for edition in EDITIONS.values() for name in edition.required + edition.listed]
    flat = [path.name for path in (*handed_out, *ROOT.glob("*.py")) if path.suffix == ".py"]
    inner = [path.relative_to(ROOT) for path in ROOT.glob("*/*.py")]
    files = {name.removesuffix(".py"): name for name in flat}
    return files | {path.parts[0]: f"{path.parts[0]}/" for path in inner} | {
        f"{path.parts[0]}.{path.stem}": path.as_posix() for path in inner
    }


class Imports:
    """Follows the imports of a submission through its modules. Nothing is executed."""

    def __init__(self, archive: Archive, files: dict[str, Entry]):
        self.archive, self.files = archive, files
        self.names = sorted(files)
        self.seen: set[str] = set()
        self.unread: list[str] = []
        self.bytes_left = MAX_CODE
        self.ours = _modules_of_this_package()

    def follow(self, start: list[str]) -> tuple[list[str], dict[str, str]]:
        """What does not parse, and the absent modules with the place of their first import, reached from files."""
        faults, absent, waiting = [], {}, list(start)
        for file in waiting:
            if file in self.seen:
                continue
            self.seen.add(file)
            try:
                tree = self._parse(file)
            except FormatError as error:
                faults.append(f"{printable(file)} {error}")
                continue
            imported = list(_imported(tree, file.split("/")[:-1]))
            # Whoever has found once that a package is absent need not ask again.
            optional = {name.split(".")[0] for _, name, is_optional in imported if is_optional}
            for line, name, is_optional in imported:
                found, missing = self._find(name)
                waiting += [path for path in found if path not in self.seen]
                if missing in self.ours and not is_optional and missing not in optional:
                    absent.setdefault(self.ours[missing], f"{file} line {line}")
        return faults, absent

    def _parse(self, file: str) -> ast.AST:
        """The syntax tree of a file. Raises `FormatError` where it is not Python."""
        size = self.files[file].central.size
        if size > min(MAX_MODULE, self.bytes_left):
            self.unread.append(file)
            return ast.Module([], [])
        self.bytes_left -= size
        try:
            source = _read_entry(self.archive, self.files[file], keep=True)
        except FormatError:  # damaged, which has been said
            return ast.Module([], [])
        # Python's parser takes memory that grows with the square of a dotted name.
        if any(run.count(b".") > MAX_NAME for run in re.findall(rb"(?:[\w\x80-\xff.\t\f ]|\\\r?\n)+", source)):
            raise FormatError("line 1: not Python, or too deeply nested")
        try:
            return _parse_python(source)
        except SyntaxError as error:
            raise FormatError(f"line {error.lineno or 1}: not Python ({printable(error.msg)})") from None
        except (ValueError, LookupError, MemoryError, RecursionError):
            raise FormatError("line 1: not Python, or too deeply nested") from None

    def _find(self, name: str) -> tuple[list[str], str | None]:
        """The files that importing `a.b.c` runs, and the first module of `a`, `a.b`, `a.b.c` that is not there."""
        found, parts = [], name.split(".")
        for depth in range(1, min(len(parts), MAX_DEPTH) + 1):
            module = ".".join(parts[:depth])
            path = module.replace(".", "/")
            package = f"{path}/__init__.py"
            if package in self.files or self._is_folder(path):
                found += [package] if package in self.files else []
            elif f"{path}.py" in self.files:
                return [*found, f"{path}.py"], None
            else:
                return found, module
        return found, None

    def _is_folder(self, path: str) -> bool:
        index = bisect.bisect(self.names, f"{path}/")
        return index < len(self.names) and self.names[index].startswith(f"{path}/")


def _parse_python(source: bytes) -> ast.AST:
    """`ast.parse`, silently, and in a thread with a deep stack: Python 3.10 does not stop before its stack ends."""
    size = threading.stack_size(128 << 20)
    try:
        with warnings.catch_warnings(), ThreadPoolExecutor(1) as thread:
            warnings.simplefilter("ignore")
            return thread.submit(ast.parse, source).result()
    finally:
        threading.stack_size(size)


def _imported(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str, bool]]:
    """Line and dotted name of each import of a module in `package`, and whether the module can do without.

    Of `from a import b` the name is `a.b`, which may be a module or not. What only a type checker reads is left out.
    """
    waiting = [(tree, False)]
    for node, is_optional in waiting:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, is_optional) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(package) + (node.level == 0):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])[:MAX_NAME]
            yield from ((node.lineno, f"{module}.{alias.name}", is_optional) for alias in node.names)
        inner = is_optional or _provides_for_absence(node)
        if not _is_for_type_checkers(node):
            waiting += [(statement, inner) for statement in _block(node, "body")]
        for part in ("handlers", "orelse", "finalbody", "cases"):
            waiting += [(statement, is_optional) for statement in _block(node, part)]


def _block(node: ast.AST, part: str) -> list[ast.AST]:
    """The statements in a part of a statement; a lambda's or a conditional expression's parts are no lists."""
    block = getattr(node, part, [])
    return block if isinstance(block, list) else []


def _provides_for_absence(node: ast.AST) -> bool:
    """Whether it is `try: ... except ImportError:`, or `with suppress(ImportError):`."""
    if isinstance(node, ast.With):
        caught = [argument for item in node.items for argument in getattr(item.context_expr, "args", [])]
    else:
        caught = [handler.type for handler in getattr(node, "handlers", [])]
    names = {getattr(part, "id", getattr(part, "attr", "")) for kind in caught if kind for part in ast.walk(kind)}
    return None in caught or not names.isdisjoint({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", getattr(node.test, "attr", "")) == "TYPE_CHECKING"


# ------------------------------------------------------------------------------------------------ output files


def _check_text(name: str, raw: bytes, rules: Rules, report: Report) -> None:
    """A generated text must be UTF-8 and not blank; an output file is checked line by line."""
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        report.problems.append(f"{name} line {line}: not UTF-8 text")
        return
    if not text.strip():
        report.problems.append(f"{name} holds nothing but white space")
    elif text.count("\n") > MAX_LINES:
        report.problems.append(f"{name} has {text.count(chr(10))} lines, too many for an output file")
    elif match := OUTPUT.fullmatch(name):
        _check_output(name, *match.groups(), text.removesuffix("\n").split("\n"), rules, report)


def _read_line(line: str) -> Example | None:
    """What a line of an output file says, or None: what is no such line is a student's mistake, which is counted."""
    with contextlib.suppress(ValueError):
        return parse_line(line)
    return None


def _read_data(path: Path) -> list[Example]:
    """A data file of the caller's. Its labels may be withheld in every split; sentences are compared all the same."""
    return create_data(path, is_test=True)


def _check_output(
    name: str, dataset: str, split: str, kind: str, lines: list[str], rules: Rules, report: Report
) -> None:
    """Line format and labels, then lines, sentences and accuracy against the data if it is there."""
    rows = [_read_line(line) for line in lines]
    if _are_of_films(rows, split):
        report.problems.append(f"{name}: its sentences are those of films-{split}.txt: {NO_SUBMISSION}")
        return
    label_names = rules.label_names(dataset)
    labels = range(len(label_names))
    _flag(report.problems, name, "not 'LABEL ||| sentence'", [row is None for row in rows])
    outside = [row is not None and row.label not in labels for row in rows]
    _flag(report.problems, name, f"label outside 0..{len(labels) - 1}", outside)
    if len(rows) > 1 and len({row and row.label for row in rows}) == 1:
        report.warnings.append(f"{name}: every line has the same label")
    prompt = f" {prompt_suffix(label_names)}".rstrip()  # its last space goes with the line's end
    is_prompted = all(row and row.sentence.endswith(prompt) for row in rows)
    if is_prompted and kind in ("finetuning", "lora"):
        report.problems.append(f"{name}: every sentence ends in the course's prompt: a prompting output, misnamed")
        kind = "prompting"
    path = rules.find(f"{dataset}-{split}.txt")
    if path is None:
        note = f"no {dataset}-{split}.txt here: its outputs are not compared with the data (give --data DIR)"
        report.notes += [note] if note not in report.notes else []
        return
    data = _read_data(path)
    if len(rows) != len(data):
        report.problems.append(f"{name}: {len(rows)} lines, but {path.name} has {len(data)}")
    _compare(name, kind, rows, data, prompt, report)
    if len(rows) == len(data) and None not in rows:
        report.scores[name] = _score(rows, data)


def _are_of_films(rows: list[Example | None], split: str) -> bool:
    """Whether they are outputs on the data set that comes with this package, whatever their file is called."""
    path = find_asset(Path("data", f"films-{split}.txt"))
    pairs = list(zip(rows, _read_data(path), strict=False)) if path else []
    return 2 * sum(row is not None and row.sentence.startswith(film.sentence) for row, film in pairs) > len(pairs)


def _flag(messages: list[str], name: str, what: str, bad: list[bool]) -> None:
    """Add one message for all bad lines: the first one's number, and how many there are."""
    if any(bad):
        more = f" (and {sum(bad) - 1} more lines)" if sum(bad) > 1 else ""
        messages.append(f"{name} line {bad.index(True) + 1}: {what}{more}")


def _compare(
    name: str, kind: str, rows: list[Example | None], data: list[Example], prompt: str, report: Report
) -> None:
    """Compare sentences. Prompts may differ, so they earn a warning, and for advanced methods nothing at all."""
    same = {"advanced": str.__contains__, "prompting": str.startswith}.get(kind, str.__eq__)
    pairs = list(zip(rows, data, strict=False))
    strange = [row is not None and not same(row.sentence, gold.sentence) for row, gold in pairs]
    _flag(report.problems, name, "not the sentence of the data file's same line", strange)
    if kind == "prompting" and not any(strange):
        if all(row and row.sentence == gold.sentence for row, gold in pairs):
            report.problems.append(f"{name}: no sentence has a prompt after it: a finetuning output, misnamed")
            return
        other = [row is not None and row.sentence != gold.sentence + prompt for row, gold in pairs]
        _flag(report.warnings, name, "another prompt than the course's after the sentence", other)


def _score(rows: list[Example], data: list[Example]) -> Score:
    """Accuracy, and that of always answering the most frequent class; neither without gold labels."""
    labels = [gold.label for gold in data]
    if not has_gold_labels(labels):
        return Score(len(rows), None, None)
    right = sum(row.label == label for row, label in zip(rows, labels, strict=True))
    return Score(len(rows), right / len(data), majority_accuracy(labels))


# ----------------------------------------------------------------------------------------------- check and create


def _check_bytes(payload: bytes, student_id: str, rules: Rules) -> Report:
    """Check a zip that lies in memory, whatever its size. Raises `UserError` for broken data files of the caller's."""
    report, edition = Report(student_id), EDITIONS[rules.edition]
    try:
        archive = _read_archive(payload)
    except FormatError as error:
        report.problems.append(str(error))
        return report
    refused = _archive_problems(archive, rules)
    report.problems += refused
    files = _enter_top_folder(archive.entries, report, edition)
    report.files = sorted(files)
    _check_names(files, edition, report)
    if not refused:
        _check_contents(archive, files, rules, report)
        _check_imports(archive, files, edition, report)
    return report


def check_zip(path: str | os.PathLike, student_id: str, **rules) -> Report:
    """Check a zip; keywords are the fields of `Rules`. Nothing is written.

    A file that is no sound zip is a problem in the report. Raises `UserError` when `path` is no file, on a bad ID or
    rule, and for broken data files of the caller's; `OSError` when the file cannot be read.
    """
    checked = Rules(**rules)
    student_id = checked.clean_id(student_id)
    if not Path(path).is_file():
        raise UserError(f"{printable(path)} does not exist, or is neither a folder nor a plain file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > checked.max_bytes:
            return Report(student_id, [checked.too_large(size)])
        return _check_bytes(file.read(int(checked.max_bytes) + 1), student_id, checked)


def assert_zip(path: str | os.PathLike, student_id: str, **rules) -> Report:
    """`check_zip`, but raises `FormatError` when there is a problem."""
    report = check_zip(path, student_id, **rules)
    report.raise_if_wrong()
    return report


def _walk(root: Path, left_out: list[str]) -> Iterator[tuple[str, Path]]:
    """The files to pack, with their names below `root`. Links are never followed; they are named in `left_out`."""
    folders = [root]
    while folders:
        for path in folders.pop().iterdir():
            name = path.relative_to(root).as_posix()
            if path.is_symlink():
                left_out.append(f"{name} (a link)")
            elif FOREIGN.match(path.name) or CLUTTER.match(path.name) or _is_environment(path):
                left_out.append(name)
            elif path.is_dir():
                folders.append(path)
            elif path.is_file() and not _name_fault(name):
                yield name, path
            else:
                left_out.append(f"{name} (not a plain file, or its name cannot be stored)")


def _is_environment(path: Path) -> bool:
    return any((path / mark).exists() for mark in ("pyvenv.cfg", "conda-meta"))


def _pack(files: dict[str, Path], student_id: str) -> bytes:
    """The zip of some files. Order, times and permissions are fixed, so that the same input gives the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, path in sorted(files.items()):
            info = zipfile.ZipInfo(f"{student_id}/{name}", date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system = 3  # Unix, also when packed on Windows
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED, compresslevel=9)
    return buffer.getvalue()


def create_zip(
    folder: str | os.PathLike, student_id: str, out: str | os.PathLike | None = None, force: bool = False, **rules
) -> Report:
    """Pack a folder and check the result; `out` (default: ID.zip in the current folder) is written if it is right.

    `force` writes it all the same. An existing file is replaced at once or not at all. Raises what `check_zip` raises.
    """
    checked = Rules(**rules)
    student_id = checked.clean_id(student_id)
    out = Path(out or f"{student_id}.zip")
    if out.suffix != ".zip":  # another name inside `folder` would be packed into the next zip
        raise UserError(f"--out {printable(out)}: the name must end in .zip")
    check_writable(out, "--out")
    if not Path(folder).is_dir():
        raise UserError(f"{printable(folder)} is not a folder")
    left_out: list[str] = []
    files = dict(_walk(Path(folder), left_out))
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if len(files) > MAX_ENTRIES or sum(sizes.values()) > checked.max_unpacked_bytes:
        what = f"{printable(folder)} holds {len(files)} files of {sum(sizes.values()) / MB:.1f} MB"
        return Report(student_id, [f"{what}, too much for a submission; the largest: {_largest(sizes)}"])
    payload = _pack(files, student_id)
    report = _check_bytes(payload, student_id, checked)
    if left_out:
        report.notes.append(f"left out: {_few(left_out, 10)}")
    if len(payload) > checked.max_bytes:
        report.problems.append(f"{checked.too_large(len(payload))}; the largest files: {_largest(sizes)}")
    if force or not report.problems:
        with atomic_write(out, "wb") as file:
            file.write(payload)
        report.notes.append(f"wrote {printable(out)} ({len(payload) / MB:.2f} MB)")
    else:
        report.notes.append(f"{printable(out)} was not written")
    return report


def _largest(sizes: dict[str, int]) -> str:
    top = sorted(sizes, key=lambda name: (-sizes[name], name))[:5]
    return ", ".join(f"{_few([name])} ({sizes[name] / MB:.2f} MB)" for name in top)


def main(path: str, aid: str) -> None:
    """The course's function: create and check, or check; print the report; raise `FormatError` on a wrong format."""
    report = create_zip(path, aid) if Path(path).is_dir() else check_zip(path, aid)
    print(report)
    report.raise_if_wrong()


def check_file(file: str, check_aid: str) -> None:
    """The course's function: as `main`, for a zip."""
    main(file, check_aid)


# --------------------------------------------------------------------------------------------------- command line


def _megabytes(text: str) -> float:
    value = math.nan
    with contextlib.suppress(ValueError):
        value = decimal_number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{printable(text)} is not a positive number of megabytes")
    return value


def get_args() -> argparse.Namespace:
    parser = ArgumentParser(
        description="Create the zip that is handed in from a folder, or check one. Nothing is unpacked or executed.",
        epilog="Exit status: 0 fine; 1 checked and wrong, one line for each problem; 2 it could not be checked.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28),
    )
    add, default = parser.add_argument, Rules()
    add("path", metavar="DIR|ZIP", help="a folder to pack and check, or a zip to check")
    add("id", metavar="ID", help="the student's or group's ID: the name of the zip's one top folder")
    add("--edition", choices=EDITIONS, default=default.edition, help="whose file list (default: %(default)s)")
    add("--data", dest="data_dir", metavar="DIR", help="the data sets (default: data/ here, data/ beside this script, "
        "data/ in the folder MINLLAMA_ASSETS)")  # fmt: skip
    add("--size_limit", metavar="MB", type=_megabytes,
        help=f"largest zip, in millions of bytes (default: the edition's, {default.size_limit:g})")  # fmt: skip
    add("--max_unpacked", metavar="MB", type=_megabytes,
        help="largest sum of the unpacked files (default: 20 times the size limit)")  # fmt: skip
    add("--id_pattern", metavar="REGEX", default=default.id_pattern, help="what an ID is (default: %(default)s)")
    add("--out", metavar="FILE.zip", help="the zip to write from DIR (default: ID.zip in the current folder)")
    add("--force", action="store_true", help="write the zip of DIR although it has problems (the status is still 1)")
    return parser.parse_args()


def command_line() -> int:
    """Run the command; the status is 0 or 1. Raises `UserError` and `OSError` for `run_main`."""
    args = get_args()
    rules = {name.name: getattr(args, name.name) for name in fields(Rules)}
    if Path(args.path).is_dir():
        report = create_zip(args.path, args.id, args.out, args.force, **rules)
    elif args.out or args.force:
        raise UserError("--out and --force are for packing a folder; to check a zip leave them out")
    else:
        report = check_zip(args.path, args.id, **rules)
    print(report)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(run_main(command_line))
