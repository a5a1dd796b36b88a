"""Checking a submission that lies in memory or in a zip. Nothing is unpacked to disk and no student code is run."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from grading.archive import MB, Archive, Entry, FormatError, read_archive, read_entry
from grading.editions import TEXTS
from grading.entries import archive_problems, damaged_entries
from grading.names import check_names, enter_top_folder
from grading.needs import check_needs
from grading.outputs import OUTPUT, check_text
from grading.package import Files, Package
from grading.pdf import content_warnings, reports_among
from grading.programs import GradingError, printable
from grading.rules import EDITIONS, Report, Rules


def check_bytes(payload: bytes, student_id: str, rules: Rules) -> Report:
    """Check a zip that lies in memory, whatever its size. Raises `GradingError` for the caller's broken data files."""
    report, edition = Report(student_id), EDITIONS[rules.edition]
    try:
        archive = read_archive(payload)
    except FormatError as error:
        report.problems.append(str(error))
        return report
    refused = archive_problems(archive, rules.max_unpacked_bytes)
    report.problems += refused
    entries = enter_top_folder(archive.entries, report, edition)
    report.files = sorted(entries)
    check_names(entries, edition, report)
    if not refused:
        _check_contents(archive, entries, rules, report)
        sizes = {name: entry.central.size for name, entry in entries.items()}
        files = Files(sizes, lambda name: read_entry(archive, entries[name], keep=True))
        check_needs(files, edition, Package(), report)
    return report


def _check_contents(archive: Archive, files: dict[str, Entry], rules: Rules, report: Report) -> None:
    """Read every entry once, in memory, those too that are not judged; check output files and the report."""
    damaged, judged = defaultdict(list), {entry.name for entry in files.values()}
    others = [(entry.name, entry) for entry in archive.entries if entry.name not in judged]
    reports = reports_among(files, report.student_id)
    for name, entry in [*sorted(files.items()), *others]:
        is_text = entry.name in judged and (bool(OUTPUT.fullmatch(name)) or name in TEXTS)
        is_report = entry.name in judged and name in reports and entry.central.size <= rules.max_bytes
        if is_text and entry.central.size > rules.max_bytes:
            report.problems.append(f"{name}: {entry.central.size / MB:.1f} MB is too large for an output file")
            continue
        try:
            raw = read_entry(archive, entry, keep=is_text or is_report)
        except FormatError as error:
            damaged[str(error)].append(name)
            continue
        if is_text and raw:
            check_text(name, raw, rules, report)
        if is_report:
            report.warnings += content_warnings(name, raw)
    report.problems += [damaged_entries(names, why) for why, names in damaged.items()]


def check_zip(path: str | os.PathLike, student_id: str, **rules) -> Report:
    """Check a zip; keywords are the fields of `Rules`. Nothing is written.

    A file that is no sound zip is a problem in the report. Raises `GradingError` when `path` is no file, on a bad ID or
    rule, and for broken data files of the caller's; `OSError` when the file cannot be read.
    """
    checked = Rules(**rules)
    student_id = checked.clean_id(student_id)
    if not Path(path).is_file():
        raise GradingError(f"{printable(path)} does not exist, or is neither a folder nor a plain file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > checked.max_bytes:
            return Report(student_id, [checked.too_large(size)])
        return check_bytes(file.read(int(checked.max_bytes) + 1), student_id, checked)


def assert_zip(path: str | os.PathLike, student_id: str, **rules) -> Report:
    """`check_zip`, but raises `FormatError` when there is a problem."""
    report = check_zip(path, student_id, **rules)
    report.raise_if_wrong()
    return report
