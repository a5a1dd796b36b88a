"""From a folder of downloads to one submission a student: whose an upload is, and which of several counts.

Nothing is guessed: an upload that names no student, or that two students could have made, is told and not graded.
"""

from __future__ import annotations

import csv
import io
import os
import re
import stat
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from grading.archive import ARCHIVES, MAX_ENTRIES, MB, FormatError, fixed_entry
from grading.findings import Finding
from grading.programs import GradingError, few, printable, read_text
from grading.rules import Rules
from grading.settings import Settings

MAX_READ = 100 * MB  # of a zip or of a folder's files: larger ones are refused unread
TOO_MUCH = f"more than {MAX_READ / MB:g} MB are not read: leave out checkpoints and data sets"
# Canvas: the student's name, whether it was late, the student's number, the upload's, and the file's own name.
CANVAS = re.compile(r"(?s)[^_]+(?P<late>_LATE)?_(?P<user>\d+)_(?P<upload>\d+)_(?P<file>.+)")
AGAIN = re.compile(r"(?s)(?P<file>.+)-(?P<number>\d{1,4})")  # Canvas numbers later uploads of one name
COPY = re.compile(r"(?s)(?P<file>.+?) ?\(\d{1,4}\)")  # as browsers do


class RosterEntry(NamedTuple):
    """A row of the roster; without one, only the ID is known."""

    student_id: str
    name: str = ""
    canvas_id: str = ""
    section: str = ""


@dataclass
class Upload:
    """A zip or folder, and what its name says. names: the ID, in the ways in which it can be read from the name."""

    path: Path
    names: list[str]
    user: str = ""
    order: tuple[int, int] = (0, 0)
    is_late: bool = False


@dataclass
class Submission:
    """What is to be graded, or why it cannot be. path: None without an upload."""

    student: RosterEntry
    path: Path | None = None
    messages: list[Finding] = field(default_factory=list)


def read_upload(path: Path) -> Upload:
    stem = path.name if path.is_dir() else re.sub(r"(?i)(\.tar)?\.\w{1,4}$", "", path.name)
    match = CANVAS.fullmatch(stem)
    own = match["file"] if match else stem
    again = AGAIN.fullmatch(own) if match else None
    names = [own, *([again["file"]] if again else []), *(copy["file"] for copy in [COPY.fullmatch(own)] if copy)]
    if match is None:
        return Upload(path, names)
    order = int(match["upload"]), int(again["number"]) if again else 0
    return Upload(path, names, match["user"], order, bool(match["late"]))


def read_roster(path: Path, rules: Rules) -> list[RosterEntry]:
    """The students of a CSV file. Raises `GradingError` for one without IDs, or with one ID twice."""
    students, lines = [], {}
    for line, row in read_table(path, "id"):
        try:
            student_id = rules.clean_id(row["id"])
        except GradingError as error:
            raise GradingError(f"{path} line {line}: {error}") from None
        if before := lines.get(student_id.casefold()):
            raise GradingError(f"{path} line {line}: {student_id} stands in line {before} already")
        lines[student_id.casefold()] = line
        students.append(RosterEntry(student_id, *(row.get(name, "") for name in ("name", "canvas_id", "section"))))
    return students


def read_table(path: Path, *needed: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and row of a CSV file with a header. Raises `GradingError` where a needed column is absent."""
    reader = csv.DictReader(io.StringIO(read_text(path)), restval="", strict=True)
    try:
        header = [str(name).strip().lower() for name in reader.fieldnames or []]
        if missing := [name for name in needed if name not in header]:
            raise GradingError(f"{path}: no column {few(missing)} in its first line, with commas between the columns")
        reader.fieldnames = header
        for row in reader:
            if any(value for value in row.values()):
                yield reader.line_num, {name: value.strip() for name, value in row.items() if isinstance(value, str)}
    except csv.Error as error:
        raise GradingError(f"{path} line {reader.line_num}: {error}") from None


# ---------------------------------------------------------------------------------------------------------- matching


def find_submissions(folder: Path, settings: Settings) -> tuple[list[Submission], list[str]]:
    """The submissions in a folder, by ID, and the names of files there that are none."""
    others, uploads = [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
        if path.name.startswith((".", "__MACOSX")) or not (path.is_dir() or path.name.lower().endswith(ARCHIVES)):
            others.append(path.name)
        else:
            uploads.append(read_upload(path))
    rules = settings.rules()
    roster = read_roster(Path(settings.roster), rules) if settings.roster else None
    claims: dict[RosterEntry, list[tuple[Upload, list[Finding]]]] = defaultdict(list)
    unmatched = []
    for upload in uploads:
        student, said = _student_of(upload, roster, settings, rules)
        if student is None:
            unmatched.append(Submission(RosterEntry(""), upload.path, [said]))
        else:
            claims[student].append((upload, [said] if said else []))
    found = [_newest(student, claimed) for student, claimed in _merge_cases(claims).items()]
    for student in roster or []:
        if student not in claims:
            user = student.canvas_id
            theirs = [name for name in others if user and read_upload(Path(name)).user == user]
            said = f"no upload of this student but {few(theirs)}: no archive" if theirs else "no upload of this student"
            found.append(Submission(student, None, [Finding(said, "E074-absent", *theirs[:1])]))
    return sorted(found, key=lambda one: one.student.student_id) + unmatched, others


def _merge_cases(claims: dict) -> dict:
    """Without a roster, one student for all spellings of an ID in upper and lower case."""
    merged, first = defaultdict(list), {}
    for student, claimed in claims.items():
        merged[first.setdefault(student.student_id.casefold(), student)] += claimed
    return merged


def _student_of(
    upload: Upload, roster: list[RosterEntry] | None, settings: Settings, rules: Rules
) -> tuple[RosterEntry | None, Finding | None]:
    """The student whose upload it is, with a remark; or None, and why not."""
    ids = list(filter(None, (_id_in(name, settings, rules) for name in upload.names)))
    shown = printable(upload.path.name)
    if roster is None:
        if ids:
            return RosterEntry(ids[-1]), None  # the name without what Canvas and browsers add
        return None, Finding(f"{shown}: its name holds no ID", "E073-unmatched", shown, 0, settings.id_pattern)
    by_name = next((one for name in ids for one in roster if one.student_id == name), None)
    said = None
    if by_name is None:
        by_name = next((one for name in ids for one in roster if one.student_id.casefold() == name.casefold()), None)
        if by_name:
            said = Finding(f"{shown}: the ID is in another case", "E011-id-case", shown, 0, by_name.student_id, ids[0])
    by_number = [one for one in roster if one.canvas_id and one.canvas_id == upload.user]
    if by_name and by_number and by_number != [by_name]:
        who = f"{by_name.student_id} by its name, {by_number[0].student_id} by its Canvas number"
        return None, Finding(f"{shown}: {who}", "E073-unmatched", shown)
    student = by_name or (by_number[0] if len(by_number) == 1 else None)
    if student is None:
        return None, Finding(f"{shown}: no student of the roster", "E073-unmatched", shown, 0, "", few(ids))
    return student, said


def _id_in(name: str, settings: Settings, rules: Rules) -> str | None:
    """The ID in the name of an upload, by the config's pattern; None if there is none."""
    match = re.fullmatch(settings.id_pattern, name, re.ASCII)
    if match is None:
        return None
    try:
        return rules.clean_id(match["id"] if "id" in match.re.groupindex else name)
    except GradingError:
        return None


def _newest(student: RosterEntry, claimed: list[tuple[Upload, list[Finding]]]) -> Submission:
    """The newest upload of a student, the others listed; none of them where nobody can say which it is."""
    claimed = sorted(claimed, key=lambda pair: (pair[0].order, pair[0].path.name))
    names = [printable(upload.path.name) for upload, _ in claimed]
    orders = {upload.order for upload, _ in claimed}
    if len(claimed) > 1 and (len({upload.user for upload, _ in claimed}) > 1 or len(orders) < len(claimed)):
        said = f"{len(claimed)} uploads claim the ID {student.student_id}: {', '.join(names)}"
        return Submission(student, None, [Finding(said, "E072-twice", names[0], 0, 1, len(claimed))])
    upload, messages = claimed[-1]
    if names[:-1]:
        messages.append(Finding(f"older uploads, which do not count: {', '.join(names[:-1])}", "E071-older", names[0]))
    if upload.is_late:
        messages.append(Finding("Canvas calls it late", "E070-late", names[-1]))
    return Submission(student, upload.path, messages)


# ----------------------------------------------------------------------------------------------------------- reading


def read_payload(path: Path, student_id: str) -> bytes:
    """The bytes of a zip, or a zip of a folder's files as they lie. Raises `FormatError` where they are too many.

    What is neither a file nor a folder, such as a pipe, is read as an empty folder.
    """
    if path.is_file():
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_READ:
                raise FormatError(f"{size / MB:.1f} MB; {TOO_MUCH}")
            return file.read(MAX_READ)
    tops = [each.name.casefold() for each in path.glob("*/")]
    files, total, top = [], 0, "" if student_id.casefold() in tops else f"{student_id}/"
    for each in sorted(path.rglob("*")):
        if each.is_symlink() or each.is_file():
            files.append(each)
            total += 0 if each.is_symlink() else each.stat().st_size
        if len(files) > MAX_ENTRIES or total > MAX_READ:
            raise FormatError(f"more than {MAX_ENTRIES} files, or {TOO_MUCH}")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for each in files:
            name = each.relative_to(path).as_posix().encode("utf-8", "replace").decode()
            mode = (stat.S_IFLNK if each.is_symlink() else stat.S_IFREG) | 0o644
            archive.writestr(fixed_entry(f"{top}{name}", mode), b"" if each.is_symlink() else each.read_bytes())
    return buffer.getvalue()
