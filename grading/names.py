"""The names of a submission's files: the top folder, required and listed files, what does not belong there."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable

from grading.archive import Entry
from grading.editions import ADVANCED, OUTPUT_KINDS, Edition
from grading.outputs import NO_SUBMISSION
from grading.pdf import name_warnings, right_name
from grading.programs import few, printable
from grading.rules import Report

_KIND_WORDS = {kind[:6] for kind in OUTPUT_KINDS}  # see _words


def any_of(patterns: str) -> re.Pattern:
    """Matches a name that fits one of the shell patterns."""
    return re.compile("|".join(map(fnmatch.translate, patterns.split())), re.IGNORECASE)


# Never packed. A zip that holds the first is wrong (large, private or not the student's work); the second is clutter.
FOREIGN = any_of(".git .venv venv env pyvenv.cfg conda-meta node_modules *.pt *.pth")
CLUTTER = any_of("__pycache__ .*_cache .hypothesis .ipynb_checkpoints .DS_Store *.pyc *.zip *.resume* *.lock .*.tmp")


def _ignored(name: str) -> bool:
    """What operating systems add: top names with a leading underscore (as the course does), Finder's files."""
    base = name.rsplit("/", 1)[-1]
    return name.startswith("_") or base == ".DS_Store" or base.startswith("._")


def enter_top_folder(entries: list[Entry], report: Report, edition: Edition) -> dict[str, Entry]:
    """The files by their name below the top folder; problems where that is not one folder named by the ID."""
    entries = [entry for entry in entries if not _ignored(entry.name)]
    loose = {entry.name for entry in entries if "/" not in entry.name}
    tops = {entry.name.split("/", 1)[0] for entry in entries} - loose
    if loose:
        report.problems.append(f"outside the top folder {report.student_id}/: {few(loose)}")
    if len(tops) > 1:
        report.problems.append(f"there must be one top folder, named by the ID; found {len(tops)}: {few(tops)}")
    elif tops and tops != {report.student_id}:
        is_spelling = {name.casefold() for name in tops} == {report.student_id.casefold()}
        (report.warnings if is_spelling else report.problems).append(
            f"{edition.id_name} mismatch: the top folder is {few(tops)}, the ID is {report.student_id}"
            + (" (upper and lower case differ)" if is_spelling else "")
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


def check_names(files: dict[str, Entry], edition: Edition, report: Report) -> None:
    """Required and optional files, empty ones, and what does not belong in a submission."""
    if missing := [name for name in edition.required if name not in files]:
        report.problems.append(f"required files are missing: {_with_hints(missing, files)}")
    present = [name for name in ADVANCED if name in files]
    if 0 < len(present) < len(ADVANCED):
        absent = set(ADVANCED) - set(present)
        report.problems.append(f"advanced outputs must be all four or none; missing: {_with_hints(absent, files)}")
    if empty := [name for name in (*edition.required, *present) if name in files and files[name].central.size == 0]:
        report.problems.append(f"empty files: {few(empty)}")
    if foreign := [name for name in files if any(map(FOREIGN.match, name.split("/")))]:
        report.problems.append(f"checkpoints, environments and .git do not belong in a submission: {few(foreign)}")
    if clutter := [name for name in files if any(map(CLUTTER.match, name.split("/")))]:
        report.warnings.append(f"caches and archives do not belong in a submission: {few(clutter)}")
    if unlisted := [name for name in edition.listed if name not in files]:
        report.warnings.append(f"in the course's list of files but absent: {few(unlisted, len(unlisted))}")
    if misnamed := name_warnings(files, report.student_id):
        report.warnings += misnamed
    elif present and right_name(report.student_id) not in files:
        report.warnings.append(f"advanced outputs without {right_name(report.student_id)}: describe the method there")
    if absent := [name for name in edition.optional if name not in files]:
        report.notes.append(f"optional and absent: {few(absent)}")


def _with_hints(missing: Iterable[str], files: Iterable[str]) -> str:
    """Missing names, each with a file whose name is nearly that; and what outputs on the bundled data are."""
    near = {_words(name): name for name in sorted(files, reverse=True)}
    hinted = []
    for name in sorted(missing):
        words = _words(name)
        # sst-dev-output.txt: the name does not say of which kind it is
        found = [near[wanted] for wanted in (words, words - _KIND_WORDS, words - {"output"}) if wanted in near]
        hinted.append(f"{name} (there is {printable(found[0])})" if found else name)
    trials = [name for name in files if re.search(r"(?i)\bfilms-.*output", name)]
    return ", ".join(hinted) + (f"; {few(trials, 1)}: {NO_SUBMISSION}" if trials else "")


def _words(name: str) -> frozenset[str]:
    """What a file name says, without what browsers and editors add to it; the first letters of its words."""
    base = re.sub(r"\([0-9]+\)", "", name.rsplit("/", 1)[-1].lower())
    return frozenset(word[:6] for word in re.findall("[a-z]+|[0-9]+", base)) - {"txt", "copy"}
