"""Create or check the zip that is handed in.

    python prepare_submit.py DIR ID      create ID.zip from DIR and check it; a wrong one is not written
    python prepare_submit.py ZIP ID      check a zip; nothing is unpacked to disk, no student code is run

Exit status: 0 the submission is fine; 1 it was checked and is wrong (one line for each problem); 2 it could not be
checked (bad usage, a missing file). Needs the standard library and `utils.py` alone, so it answers at once.

For scripts: `check_zip` and `create_zip` return a `Report`; `assert_zip`, and the course's own `check_file` and
`main`, raise `FormatError`, an `AssertionError`, on a wrong format.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import json
import math
import os
import re
import stat
import sys
import unicodedata
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from utils import ArgumentParser, UserError, atomic_write, check_writable, find_asset, read_text, run_main

MB = 1_000_000
MAX_ENTRIES = 10_000
LABEL_NAMES = {"sst": ("awful", "bad", "average", "good", "excellent"), "cfimdb": ("bad", "good")}
OUTPUT = re.compile(r"(sst|cfimdb)-(dev|test)-(prompting|finetuning|lora|advanced)-output\.txt")


def _any_of(patterns: str) -> re.Pattern:
    """Matches a name that fits one of the shell patterns."""
    return re.compile("|".join(map(fnmatch.translate, patterns.split())), re.IGNORECASE)


# Never packed. A zip that holds the first is wrong (large, private or not the student's work); the second is clutter.
FOREIGN = _any_of(".git .venv venv env pyvenv.cfg conda-meta node_modules *.pt *.pth")
CLUTTER = _any_of("__pycache__ .*_cache .hypothesis .ipynb_checkpoints .DS_Store *.pyc *.zip *.resume* .*.tmp")


def _outputs(*kinds: str) -> tuple[str, ...]:
    """The output files of some kinds, one for each data set and split."""
    pairs = [(data, split) for data in LABEL_NAMES for split in ("dev", "test")]
    return tuple(f"{data}-{split}-{kind}-output.txt" for kind in kinds for data, split in pairs)


@dataclass(frozen=True)
class Edition:
    """What one edition of the course asks for."""

    id_name: str
    required: tuple[str, ...]
    listed: tuple[str, ...]  # in the README's tree, but not demanded by its checker: a warning when absent
    optional: tuple[str, ...] = ()


_CODE = ("run_llama.py", "llama.py", "optimizer.py", "classifier.py", "rope.py")
_TEXTS = ("generated-sentence-temp-0.txt", "generated-sentence-temp-1.txt")
_REQUIRED = (*_CODE, *_TEXTS, *_outputs("prompting", "finetuning"))
_LISTED = ("base_llama.py", "config.py", "sanity_check.py", "tokenizer.py", "utils.py", "README.md", "structure.md",
           "sanity_check.data", "setup.sh")  # fmt: skip
ADVANCED = _outputs("advanced")
# Sources. cmu2024: neubig/minllama-assignment. ucsc: the fork of it that UC Santa Cruz hands out in NLP 244, as seen in
# the public copy iamsorenl/minllama-assignment: the same checker and tree, only the ID is a CruzID. cmu2025:
# cmu-l3/anlp-fall2025-hw1, where LoRA outputs and feedback.txt are new. Its checker counts feedback.txt among the
# advanced outputs and so accepts one of the four alone; here the rule is "all four or none" in every edition.
_LISTED_2025 = (*_LISTED, "lora.py", "checklist.md")
EDITIONS = {
    "ucsc": Edition("CruzID", _REQUIRED, _LISTED),
    "cmu2024": Edition("AndrewID", _REQUIRED, _LISTED),
    "cmu2025": Edition("AndrewID", _REQUIRED + _outputs("lora"), _LISTED_2025, ("feedback.txt",)),
}


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
    """What to check by; sizes in MB (1,000,000 bytes). Without `data_dir`, data is looked for in the usual places."""

    edition: str = "ucsc"
    data_dir: str | os.PathLike | None = None
    size_limit: float = 10.0
    max_unpacked: float | None = None  # None: 20 times the size limit
    id_pattern: str = r"[A-Za-z0-9][A-Za-z0-9._-]*"

    def __post_init__(self) -> None:
        if self.edition not in EDITIONS:
            raise UserError(f"no edition {self.edition!r}; there are {', '.join(EDITIONS)}")
        if self.data_dir is not None and not Path(self.data_dir).is_dir():
            raise UserError(f"the data folder {self.data_dir} does not exist")

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
            fits = re.fullmatch(self.id_pattern, student_id)
        except re.error as error:
            raise UserError(f"the ID pattern {self.id_pattern!r} is not a regular expression: {error}") from None
        # A top name with a leading underscore would be ignored by the check, as the course does for __MACOSX.
        if not fits or "/" in student_id or student_id.startswith("_") or _name_fault(student_id):
            raise UserError(f"{student_id!r} is not a valid ID (pattern {self.id_pattern})")
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
        if path is None:
            return LABEL_NAMES[dataset]
        text = read_text(path)
        try:
            names = json.loads(text)
        except ValueError:
            names = None
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise UserError(f"{path} is not a JSON list of label names")
        return names


# ------------------------------------------------------------------------------------- the archive and its names


def _few(names: Iterable[str], most: int = 5) -> str:
    """The first names, safe to print: unprintable characters escaped, long ones cut, the rest counted."""
    names = sorted(names)
    shown = [(name if name.isprintable() else ascii(name))[:100] for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def _name_fault(name: str) -> str | None:
    """Why a name must not be unpacked, or None."""
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        return "control or undecodable characters in the name"
    if name.startswith("/") or re.match("[A-Za-z]:", name):
        return "an absolute name"
    if "\\" in name:
        return "a backslash in the name"
    if not {"", ".", ".."}.isdisjoint(name.removesuffix("/").split("/")):
        return "a name with an empty, '.' or '..' part"
    return None


def _entry_fault(info: zipfile.ZipInfo) -> str | None:
    """Why an entry must not be read, or None. `orig_filename` is the name before zipfile cuts it at a NUL."""
    if fault := _name_fault(info.orig_filename):
        return fault
    if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "a link or special file"
    if info.flag_bits & 0x1:
        return "encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "a compression method other than stored or deflate"
    return None


def _archive_problems(entries: list[zipfile.ZipInfo], rules: Rules) -> list[str]:
    """What forbids reading an archive. Judged by its directory alone: nothing has been unpacked yet."""
    if len(entries) > MAX_ENTRIES:
        return [f"the archive has {len(entries)} entries; more than {MAX_ENTRIES} are refused"]
    faults = defaultdict(list)
    for info in entries:
        if fault := _entry_fault(info):
            faults[fault].append(info.orig_filename)
    problems = [f"refused entries ({fault}): {_few(names)}" for fault, names in faults.items()]
    # Two names that one disk would take for the same file: which one is graded depends on the grader's computer.
    paths = [unicodedata.normalize("NFC", info.filename).casefold().removesuffix("/") for info in entries]
    if twice := [path for path, count in Counter(paths).items() if count > 1]:
        problems.append(f"several entries for one name (upper and lower case are the same): {_few(twice)}")
    plain = {path for path, info in zip(paths, entries, strict=True) if not info.filename.endswith("/")}
    if both := plain & {parent for path in paths for parent in _parents(path)}:
        problems.append(f"both a file and a folder: {_few(both)}")
    unpacked = sum(info.file_size for info in entries)
    if unpacked > rules.max_unpacked_bytes:
        problems.append(f"{unpacked / MB:.1f} MB when unpacked; the limit is {rules.max_unpacked_bytes / MB:g} MB")
    return problems


def _parents(path: str) -> Iterator[str]:
    """The folders that a name lies in. Names are at most 64 KB, so depth is capped: nobody nests 50 folders."""
    parts = path.split("/", 50)
    return ("/".join(parts[:depth]) for depth in range(1, len(parts)))


def _ignored(name: str) -> bool:
    """What operating systems add: top names with a leading underscore (as the course does), Finder's files."""
    base = name.rsplit("/", 1)[-1]
    return name.startswith("_") or base == ".DS_Store" or base.startswith("._")


def _enter_top_folder(entries: list[zipfile.ZipInfo], report: Report, id_name: str) -> dict[str, zipfile.ZipInfo]:
    """The files by their name below the top folder; problems where that is not one folder named by the ID."""
    entries = [info for info in entries if not _ignored(info.filename)]
    loose = {info.filename for info in entries if "/" not in info.filename}
    tops = {info.filename.split("/", 1)[0] for info in entries} - loose
    if loose:
        report.problems.append(f"outside the top folder {report.student_id}/: {_few(loose)}")
    if len(tops) > 1:
        report.problems.append(f"there must be one top folder, named by the ID; found {len(tops)}: {_few(tops)}")
    elif tops and tops != {report.student_id}:
        report.problems.append(f"{id_name} mismatch: the top folder is {_few(tops)}, the ID is {report.student_id}")
    elif not entries:
        report.problems.append("the archive is empty")
    # Names are judged below the ID's folder; without any folder as they lie, or every file would be called missing.
    top = f"{report.student_id if report.student_id in tops else min(tops)}/" if tops else ""
    # Not info.is_dir(), which fails on an empty name.
    inside = [info for info in entries if info.filename.startswith(top) and not info.filename.endswith("/")]
    return {info.filename.removeprefix(top): info for info in inside}


def _check_names(files: dict[str, zipfile.ZipInfo], edition: Edition, report: Report) -> None:
    """Required and optional files, empty ones, and what does not belong in a submission."""
    if missing := [name for name in edition.required if name not in files]:
        deeper = [name for name in files if name.endswith(f"/{missing[0]}")]
        hint = f" (there is {_few(deeper, 1)}: files must lie directly in the top folder)" if deeper else ""
        report.problems.append(f"required files are missing: {_few(missing, len(missing))}{hint}")
    present = [name for name in ADVANCED if name in files]
    if 0 < len(present) < len(ADVANCED):
        absent = set(ADVANCED) - set(present)
        report.problems.append(f"advanced outputs must be all four or none; missing: {_few(absent)}")
    if empty := [name for name in (*edition.required, *present) if name in files and files[name].file_size == 0]:
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


def _read_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo, keep: bool) -> bytes:
    """An entry's bytes (none unless `keep`), its checksum and declared size verified.

    Raises `Exception`s of many kinds on a damaged entry, as zipfile does.
    """
    size, chunks = 0, []
    with archive.open(info) as stream:
        while size <= info.file_size and (chunk := stream.read(1 << 16)):
            size += len(chunk)
            chunks += [chunk] if keep else []
    if size != info.file_size:
        raise zipfile.BadZipFile(f"its size is not the declared {info.file_size} bytes")
    return b"".join(chunks)


def _check_contents(archive: zipfile.ZipFile, files: dict[str, zipfile.ZipInfo], rules: Rules, report: Report) -> None:
    """Read every file once, in memory; check those that hold outputs."""
    for name, info in sorted(files.items()):
        is_text = bool(OUTPUT.fullmatch(name)) or name in _TEXTS
        if is_text and info.file_size > rules.max_bytes:
            report.problems.append(f"{name}: {info.file_size / MB:.1f} MB is too large for an output file")
            continue
        try:
            raw = _read_entry(archive, info, keep=is_text)
        except Exception as error:  # hostile bytes make zipfile raise errors of a dozen unrelated classes
            report.problems.append(f"{_few([name])} is damaged: {_few([str(error)])}")
            continue
        if is_text and raw:
            _check_text(name, raw, rules, report)


# ------------------------------------------------------------------------------------------------ output files


class Example(NamedTuple):
    label: int
    sentence: str


def _parse(line: str) -> Example | None:
    """`LABEL ||| sentence`, or None. Space around the sentence is dropped, as the course does."""
    label, bar, sentence = line.partition(" ||| ")
    if not bar or not sentence.strip() or not re.fullmatch("-?[0-9]{1,9}", label.strip()):
        return None
    return Example(int(label), sentence.strip())


def _load_data(path: Path) -> list[Example]:
    """The examples of a data file. Raises `UserError` naming the first line that is not one."""
    rows = [_parse(line) for line in read_text(path).rstrip("\n").split("\n")]
    if None in rows:
        raise UserError(f"{path} line {rows.index(None) + 1}: not 'LABEL ||| sentence'")
    return rows


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
    elif match := OUTPUT.fullmatch(name):
        _check_output(name, *match.groups(), text.removesuffix("\n").split("\n"), rules, report)


def _check_output(
    name: str, dataset: str, split: str, kind: str, lines: list[str], rules: Rules, report: Report
) -> None:
    """Line format and labels, then lines, sentences and accuracy against the data if it is there."""
    rows = [_parse(line) for line in lines]
    label_names = rules.label_names(dataset)
    labels = range(len(label_names))
    _flag(report.problems, name, "not 'LABEL ||| sentence'", [row is None for row in rows])
    outside = [row is not None and row.label not in labels for row in rows]
    _flag(report.problems, name, f"label outside 0..{len(labels) - 1}", outside)
    if len(rows) > 1 and len({row and row.label for row in rows}) == 1:
        report.warnings.append(f"{name}: every line has the same label")
    path = rules.find(f"{dataset}-{split}.txt")
    if path is None:
        note = f"no {dataset}-{split}.txt here: its outputs are not compared with the data (give --data DIR)"
        report.notes += [note] if note not in report.notes else []
        return
    data = _load_data(path)
    if len(rows) != len(data):
        report.problems.append(f"{name}: {len(rows)} lines, but {path.name} has {len(data)}")
    _compare(name, kind, rows, data, label_names, report)
    if len(rows) == len(data) and None not in rows:
        report.scores[name] = _score(rows, data)


def _flag(messages: list[str], name: str, what: str, bad: list[bool]) -> None:
    """Add one message for all bad lines: the first one's number, and how many there are."""
    if any(bad):
        more = f" (and {sum(bad) - 1} more lines)" if sum(bad) > 1 else ""
        messages.append(f"{name} line {bad.index(True) + 1}: {what}{more}")


def _compare(
    name: str, kind: str, rows: list[Example | None], data: list[Example], label_names: Sequence[str], report: Report
) -> None:
    """Compare sentences. Prompts may differ, so they earn a warning, and for advanced methods nothing at all."""
    same = {"advanced": str.__contains__, "prompting": str.startswith}.get(kind, str.__eq__)
    pairs = list(zip(rows, data, strict=False))
    strange = [row is not None and not same(row.sentence, gold.sentence) for row, gold in pairs]
    _flag(report.problems, name, "not the sentence of the data file's same line", strange)
    if kind == "prompting" and not any(strange):
        comma = "," * (len(label_names) > 2)
        choice = f"{', '.join(label_names[:-1])}{comma} or {label_names[-1]}"
        suffix = f" Is this movie {choice}? This movie is"  # its last space went with the line's end
        other = [row is not None and row.sentence != gold.sentence + suffix for row, gold in pairs]
        _flag(report.warnings, name, "another prompt than the course's after the sentence", other)


def _score(rows: list[Example], data: list[Example]) -> Score:
    """Accuracy and that of the most frequent class. Labels that are all equal are placeholders (CFIMDB's test file)."""
    counts = Counter(gold.label for gold in data)
    if len(counts) == 1:
        return Score(len(rows), None, None)
    right = sum(row.label == gold.label for row, gold in zip(rows, data, strict=True))
    return Score(len(rows), right / len(data), max(counts.values()) / len(data))


# ----------------------------------------------------------------------------------------------- check and create


def _check_bytes(payload: bytes, student_id: str, rules: Rules) -> Report:
    """Check a zip that lies in memory, whatever its size. Raises `UserError` for broken data files of the caller's."""
    report = Report(student_id)
    try:
        archive = zipfile.ZipFile(io.BytesIO(payload))
    except Exception as error:  # see _check_contents
        report.problems.append(f"not a zip archive, or a truncated one: {_few([str(error)])}")
        return report
    edition, entries = EDITIONS[rules.edition], archive.infolist()
    refused = _archive_problems(entries, rules)
    report.problems += refused
    files = _enter_top_folder(entries, report, edition.id_name)
    report.files = sorted(files)
    _check_names(files, edition, report)
    if not refused:
        _check_contents(archive, files, rules, report)
    return report


def check_zip(path: str | os.PathLike, student_id: str, **rules) -> Report:
    """Check a zip; keywords are the fields of `Rules`. Nothing is written.

    A file that is no sound zip is a problem in the report. Raises `UserError` when `path` is no file, on a bad ID or
    rule, and for broken data files of the caller's; `OSError` when the file cannot be read.
    """
    checked = Rules(**rules)
    student_id = checked.clean_id(student_id)
    if not Path(path).is_file():
        raise UserError(f"{path} does not exist, or is neither a folder nor a plain file")
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
        raise UserError(f"--out {out}: the name must end in .zip")
    check_writable(out, "--out")
    if not Path(folder).is_dir():
        raise UserError(f"{folder} is not a folder")
    left_out: list[str] = []
    files = dict(_walk(Path(folder), left_out))
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if len(files) > MAX_ENTRIES or sum(sizes.values()) > checked.max_unpacked_bytes:
        what = f"{folder} holds {len(files)} files of {sum(sizes.values()) / MB:.1f} MB, too much for a submission"
        return Report(student_id, [f"{what}; the largest: {_largest(sizes)}"])
    payload = _pack(files, student_id)
    report = _check_bytes(payload, student_id, checked)
    if left_out:
        report.notes.append(f"left out: {_few(left_out, 10)}")
    if len(payload) > checked.max_bytes:
        report.problems.append(f"{checked.too_large(len(payload))}; the largest files: {_largest(sizes)}")
    if force or not report.problems:
        with atomic_write(out, "wb") as file:
            file.write(payload)
        report.notes.append(f"wrote {out} ({len(payload) / MB:.2f} MB)")
    else:
        report.notes.append(f"{out} was not written")
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
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of megabytes")
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
    add("--size_limit", metavar="MB", type=_megabytes, default=default.size_limit,
        help="largest zip, in millions of bytes (default: %(default)g)")  # fmt: skip
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
