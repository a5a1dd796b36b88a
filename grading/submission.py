"""Checking a submission in memory or in a zip, and making the zip that is handed in. No student code is run.

First the names of the files: the top folder, required and listed files, files that do not belong there. Then contents.
"""

from __future__ import annotations

import fnmatch
import io
import os
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from grading.addition import check_folder
from grading.archive import (
    ARCHIVES,
    FINDER_ICON,
    MAX_ENTRIES,
    MB,
    Archive,
    FormatError,
    ZipEntry,
    archive_problems,
    damaged_entries,
    fixed_entry,
    name_fault,
    read_archive,
    read_entry,
)
from grading.editions import ADVANCED, EDITIONS, OUTPUT_KINDS, TEXTS, Edition
from grading.findings import Finding
from grading.needs import DRIVER, MAPPINGS, Files, Package, check_needs, files_of, find_needs, is_carried, outermost
from grading.outputs import (
    NO_SUBMISSION,
    OUTPUT,
    check_report,
    check_text,
    name_warnings,
    reports_among,
    right_name,
)
from grading.programs import GradingError, atomic_write, check_writable, few, printable
from grading.rules import Report, Rules

MAX_OUTPUT = 10 * MB
_KIND_WORDS = {kind[:6] for kind in OUTPUT_KINDS}  # see _words


def any_of(patterns: str) -> re.Pattern:
    """A pattern for the names that fit one of these shell patterns, in any case."""
    return re.compile("|".join(map(fnmatch.translate, patterns.split())), re.IGNORECASE)


# Never packed. A zip that holds the first is wrong (large, private or not the student's work); the second is clutter.
FOREIGN = any_of(".git .venv venv env pyvenv.cfg conda-meta node_modules *.pt *.pth")
CLUTTER = any_of("__pycache__ .*_cache .hypothesis .ipynb_checkpoints .DS_Store *.pyc *.zip *.resume* *.l*ck .*.tmp")


def is_foreign(name: str, edition: Edition) -> bool:
    """Whether a submission must not hold a file; the models in an edition's own folders belong there."""
    is_model = name.split("/")[0] in edition.folders and name.endswith(".pth")
    return not is_model and any(map(FOREIGN.match, name.split("/")))


def _ignored(name: str) -> bool:
    """Whether a system added it: top names with a leading underscore (as the course does), Finder's files."""
    base = name.rsplit("/", 1)[-1]
    return name.startswith("_") or base in (".DS_Store", FINDER_ICON) or base.startswith("._")


def enter_top_folder(entries: list[ZipEntry], report: Report, edition: Edition) -> dict[str, ZipEntry]:
    """The files by their name below the top folder. A finding unless there is one top folder, named by the ID."""
    entries = [entry for entry in entries if not _ignored(entry.name)]
    loose = {entry.name for entry in entries if "/" not in entry.name}
    tops = {entry.name.split("/", 1)[0] for entry in entries} - loose
    if loose:
        said = f"outside the top folder {report.student_id}/: {few(loose)}"
        report.findings.append(Finding(said, "E010-folder", min(loose)))
    if len(tops) > 1:
        said = f"there must be one top folder, named by the ID; found {len(tops)}: {few(tops)}"
        report.findings.append(Finding(said, "E010-folder", "", 0, 1, len(tops)))
    elif tops and tops != {report.student_id}:
        is_spelling = {name.casefold() for name in tops} == {report.student_id.casefold()}
        said = f"{edition.id_name} mismatch: the top folder is {few(tops)}, the ID is {report.student_id}"
        if is_spelling:
            said = f"{said} (upper and lower case differ)"
            report.findings.append(Finding(said, "E011-id-case", "", 0, report.student_id, min(tops)))
        else:
            report.findings.append(Finding(said, "E010-folder", "", 0, report.student_id, min(tops)))
    elif not entries:
        report.findings.append(Finding("the archive is empty", "E001-zip"))
    top = _top_with_files([entry.name for entry in entries], tops, report.student_id, edition)
    inside = [entry for entry in entries if entry.name.startswith(top) and not entry.is_folder]
    return _enter_deeper_folder({entry.name.removeprefix(top): entry for entry in inside}, report, edition)


def _top_with_files(names: list[str], tops: set[str], student_id: str, edition: Edition) -> str:
    """The top folder below which names are judged, with a slash; "" if they are judged as they lie.

    It is the ID's if that holds a required file, else the one with most of them, or every file would be called missing.
    """
    split = {(name.partition("/")[0] if "/" in name else "", name.rpartition("/")[2]) for name in names}
    held = Counter(top for top, base in split if base in edition.required)
    places = [*sorted(tops, key=lambda top: (top != student_id, top)), ""]
    top = student_id if held[student_id] else max(places, key=lambda top: held[top])
    return top and f"{top}/"


def _enter_deeper_folder(files: dict[str, ZipEntry], report: Report, edition: Edition) -> dict[str, ZipEntry]:
    """The files below the folder that holds the required ones. A finding if that is not the top folder."""
    found = Counter(folder for folder, _, base in (name.rpartition("/") for name in files) if base in edition.required)
    if not found or "" in found:
        return files
    folder = f"{max(found, key=lambda name: (found[name], name))}/"
    inside = {name.removeprefix(folder): entry for name, entry in files.items() if name.startswith(folder)}
    example = next(name for name in edition.required if name in inside)
    found = f"files must lie directly in the top folder: there is {printable(folder + example)}"
    said = f"{found}; move all that is in {printable(folder)} up into {report.student_id}/"
    report.findings.append(Finding(said, "E010-folder", folder + example, 0, example))
    return inside


def check_names(files: dict[str, ZipEntry], edition: Edition, report: Report) -> None:
    """Report required and optional files that are absent, empty ones, and files that do not belong there."""
    missing = [name for name in edition.required if name not in files]
    inner = [name for name in files if name.lower().endswith(ARCHIVES)]
    if inner and len(missing) == len(edition.required):
        said = f"no required file is here, but an archive in the archive: {few(inner)}; hand in that one alone"
        report.findings.append(Finding(said, "E001-zip", inner[0]))
    elif missing:
        said = f"required files are missing: {with_hints(missing, files)}"
        report.findings.append(Finding(said, "E012-missing"))
    present = [name for name in ADVANCED if name in files]
    _check_pairs(files, present, report)
    given = [name for name in (*edition.required, *present) if name in files]
    if empty := [name for name in given if files[name].central.file_size == 0]:
        report.findings.append(Finding(f"empty files: {few(empty)}", "E019-empty", min(empty)))
    report.findings += check_folder(files, edition)
    if foreign := [name for name in files if is_foreign(name, edition)]:
        said = f"checkpoints, environments and .git do not belong in a submission: {few(foreign)}"
        report.findings.append(Finding(said, "E022-foreign", min(foreign)))
    if clutter := [name for name in files if any(map(CLUTTER.match, name.split("/")))]:
        said = f"caches and archives do not belong in a submission: {few(clutter)}"
        report.findings.append(Finding(said, "E023-clutter", min(clutter)))
    if unlisted := [name for name in edition.listed if name not in files]:
        said = f"in the course's list of files but absent: {few(unlisted, len(unlisted))}"
        report.findings.append(Finding(said, "E024-unlisted"))
    if misnamed := name_warnings(files, report.student_id):
        report.findings += misnamed
    elif present and right_name(report.student_id) not in files:
        said = f"advanced outputs without {right_name(report.student_id)}: describe the method there"
        report.findings.append(Finding(said, "E063-no-report", right_name(report.student_id)))
    own = (*edition.required, *edition.listed, *edition.optional)
    asked = {name for other in EDITIONS.values() for name in other.required}.difference(own)
    if strange := [name for name in files if name in asked]:
        said = f"only other editions of the course ask for: {few(strange)}"
        report.findings.append(Finding(said, "E027-edition", min(strange)))
    if absent := [name for name in edition.optional if name not in files]:
        report.findings.append(Finding(f"optional and absent: {few(absent)}", "E025-optional"))


def _check_pairs(files: dict[str, ZipEntry], present: list[str], report: Report) -> None:
    """Warn of a data set that has one of its two advanced outputs, of dev and of test. present: of those outputs."""
    datasets = {name: name.partition("-")[0] for name in ADVANCED}
    begun = {datasets[name] for name in present}
    if absent := [name for name in ADVANCED if name not in files and datasets[name] in begun]:
        said = f"of the advanced outputs of one data set only one is here; missing: {with_hints(absent, files)}"
        report.findings.append(Finding(said, "E021-advanced", "", 0, len(present) + len(absent), len(present)))


def warn_of_upper_case(path: Path, report: Report, rules: Rules) -> None:
    """Warn of an ID in upper case: as it was given, or in the name of the zip at `path`.

    Not with an ID pattern of the caller's, which says itself what an ID is.
    """
    if rules.id_pattern != Rules.id_pattern:
        return
    right, id_name = report.student_id.lower(), EDITIONS[rules.edition].id_name
    places = {"": report.student_id}
    if path.suffix.lower() == ".zip" and path.stem.lower() == right:
        places["the zip is named "] = path.name
    found = [f"{where}{printable(name)}" for where, name in places.items() if name != name.lower()]
    if found:
        said = f"{id_name} in upper case: {', '.join(found)}; write {right}, in lower case"
        report.findings.append(Finding(said, "E011-id-case", "", 0, right, report.student_id))


def with_hints(missing: Iterable[str], files: Iterable[str]) -> str:
    """Missing names, each with a file whose name is nearly that; and that outputs on the bundled data do not count."""
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
    """The first letters of the words of a file name, without the words that browsers and editors add."""
    base = re.sub(r"\([0-9]+\)", "", name.rsplit("/", 1)[-1].lower())
    return frozenset(word[:6] for word in re.findall("[a-z]+|[0-9]+", base)) - {"txt", "copy"}


# ---------------------------------------------------------------------------------------------------------- contents


def check_bytes(payload: bytes, student_id: str, rules: Rules) -> Report:
    """Check a zip in memory, of any size. Raises `GradingError` for the caller's broken data files."""
    return look_into(payload, student_id, rules)[0]


def look_into(payload: bytes, student_id: str, rules: Rules) -> tuple[Report, Files | None]:
    """`check_bytes`, with the files of the submission, to be read; None if they must not be read."""
    report, edition = Report(student_id), EDITIONS[rules.edition]
    try:
        archive = read_archive(payload)
    except FormatError as error:
        report.findings.append(Finding(str(error), "E001-zip"))
        return report, None
    if archive.has_backslashes:
        said = "backslashes between folders and names, which Linux takes for letters: the zip of Windows PowerShell?"
        report.findings.append(Finding(said, "E006-backslash"))
    refused = archive_problems(archive, rules.max_unpacked_bytes)
    report.findings += refused
    entries = enter_top_folder(archive.entries, report, edition)
    report.files = sorted(entries)
    check_names(entries, edition, report)
    if refused or _check_contents(archive, entries, rules, report):
        return report, None
    sizes = {name: entry.central.file_size for name, entry in entries.items()}
    files = Files(sizes, lambda name: read_entry(archive, entries[name], keep=True))
    check_needs(files, edition, Package(), report)
    return report, files


def _check_contents(archive: Archive, files: dict[str, ZipEntry], rules: Rules, report: Report) -> bool:
    """Read every entry once, also those that are not judged; check output files and the report.

    Returns whether an entry is damaged.
    """
    damaged, judged = defaultdict(list), {entry.name for entry in files.values()}
    others = [(entry.name, entry) for entry in archive.entries if entry.name not in judged]
    reports = reports_among(files, report.student_id)
    for name, entry in [*sorted(files.items()), *others]:
        is_text = entry.name in judged and (bool(OUTPUT.fullmatch(name)) or name in TEXTS)
        is_report = entry.name in judged and name in reports and entry.central.file_size <= rules.max_bytes
        if is_text and entry.central.file_size > min(rules.max_bytes, MAX_OUTPUT):
            said = f"{name}: {entry.central.file_size / MB:.1f} MB is too large for an output file"
            report.findings.append(Finding(said, "E020-text", name, got=entry.central.file_size))
            continue
        try:
            raw = read_entry(archive, entry, keep=is_text or is_report)
        except FormatError as error:
            damaged[str(error)].append(name)
            continue
        if is_text and raw:
            check_text(name, raw, rules, report)
        if is_report:
            check_report(name, raw, report)
    report.findings += [damaged_entries(names, why) for why, names in damaged.items()]
    return bool(damaged)


def check_zip(path: str | os.PathLike, student_id: str, **rules) -> Report:
    """Check a zip; keywords are the fields of `Rules`. Nothing is written.

    A damaged zip is a finding in the report. Raises `GradingError` if `path` is not a file, for a bad ID or rule, and
    for broken data files of the caller's; `OSError` if the file cannot be read.
    """
    checked = Rules(**rules)
    student_id = checked.clean_id(student_id)
    if not Path(path).is_file():
        raise GradingError(f"{printable(path)} does not exist, or is neither a folder nor a plain file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > checked.max_bytes:
            return Report(student_id, [checked.too_large(size)])
        report = check_bytes(file.read(int(checked.max_bytes) + 1), student_id, checked)
    warn_of_upper_case(Path(path), report, checked)
    return report


def assert_zip(path: str | os.PathLike, student_id: str, **rules) -> Report:
    """`check_zip`, but raises `FormatError` if it is wrong."""
    report = check_zip(path, student_id, **rules)
    report.raise_if_wrong()
    return report


# ------------------------------------------------------------------------------------------------------- making the zip
# It holds the files of the folder, without links, environments, checkpoints, caches and archives; and from the package
# beside the grading scripts (`grading.needs`) the files that these need to run and the folder lacks. Of the package's
# own folder, only the student's files and the package's running code are packed.

MAX_TOLD = 100  # names in a note
OWN_PARTS = "this package's tests, pages, builders, results and data sets, and what editors leave behind,"
# Files that editors leave in a folder.
SCRATCH = any_of("*~ .*.sw? *.orig *.rej *.bak *.tmp *.egg-info .idea .vscode")


def create_zip(
    folder: str | os.PathLike, student_id: str, out: str | os.PathLike | None = None, force: bool = False, **rules
) -> Report:
    """Pack a folder and check the result; `out` (default: ID.zip in the current folder) is written if it is right.

    force: write a wrong one, too. An existing file is replaced at once or not at all. Raises as `check_zip` does.
    """
    checked = Rules(**rules)
    student_id = checked.clean_id(student_id)
    out = Path(out or f"{student_id}.zip")
    if out.suffix != ".zip":  # another name inside `folder` would be packed into the next zip
        raise GradingError(f"--out {printable(out)}: the name must end in .zip")
    check_writable(out, "--out")
    if not Path(folder).is_dir():
        raise GradingError(f"{printable(folder)} is not a folder")
    files, notes = _choose(Path(folder), EDITIONS[checked.edition], Package())
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if len(files) > MAX_ENTRIES or sum(sizes.values()) > checked.max_unpacked_bytes:
        what = f"{printable(folder)} holds {len(files)} files of {sum(sizes.values()) / MB:.1f} MB"
        said = f"{what}, too much for a submission; the largest: {_largest(sizes)}"
        return Report(student_id, [Finding(said, "E003-unpacked")])
    payload = _pack(files, student_id)
    report = check_bytes(payload, student_id, checked)
    report.findings += map(Finding, notes)
    warn_of_upper_case(out, report, checked)
    if len(payload) > checked.max_bytes:
        said = f"{checked.too_large(len(payload))}; the largest files: {_largest(sizes)}"
        report.findings.append(Finding(said, "E002-size"))
    if force or not report.wrong:
        with atomic_write(out) as file:
            file.write(payload)
        report.is_written = True
        report.findings.append(Finding(f"wrote {printable(out)} ({len(payload) / MB:.2f} MB)"))
    else:
        earlier = "; the one that lies there is an earlier one" if out.exists() else ""
        report.findings.append(Finding(f"{printable(out)} was not written{earlier}"))
    return report


def _choose(folder: Path, edition: Edition, package: Package) -> tuple[dict[str, Path], list[str]]:
    """The files to pack, by their names in the submission, and notes on files that are left out or added."""
    left_out: list[str] = []
    files, notes = dict(_walk(folder, left_out, edition)), []
    if folder.resolve() == package.root:
        own = [name for name in files if not is_carried(name) or any(map(SCRATCH.match, name.split("/")))]
        for name in own:
            del files[name]
        if own:
            tops = {outermost(name, files_of(files)) for name in own}
            notes.append(f"{OWN_PARTS} are no part of a submission; left out: {few(tops, MAX_TOLD)}")
    if left_out:
        notes.append(f"left out: {few(left_out, 10)}")
    added, names = _additions(files, edition, package)
    if names:
        notes.append(f"added, because these files need it and the folder lacks it: {few(names, MAX_TOLD)}")
    return files | added, notes


def _additions(files: dict[str, Path], edition: Edition, package: Package) -> tuple[dict[str, Path], set[str]]:
    """The package's files that some files need, directly or through others, and lack; and their names for a note."""
    required, others, _ = find_needs(files_of(files), edition, package)
    absent = {*required.absent, *others.absent, *_absent_mappings(files)}
    added = {name: package.additions(name) for name in sorted(absent)}
    paths = {name: path for found in added.values() for name, path in found.items()}
    return paths, {name for name, found in added.items() if found}


def _absent_mappings(files: dict[str, Path]) -> set[str]:
    """The label mappings that a submission lacks, if its driver names one: the course's own has one as a default."""
    driver = files.get(DRIVER)
    is_named = driver is not None and b"-label-mapping.json" in driver.read_bytes()
    return {name for name in MAPPINGS if name not in files} if is_named else set()


def _walk(root: Path, left_out: list[str], edition: Edition) -> Iterator[tuple[str, Path]]:
    """The files to pack, with their names below `root`. Others are named in `left_out`; links are never followed."""
    folders = [root]
    while folders:
        for path in folders.pop().iterdir():
            name = path.relative_to(root).as_posix()
            if path.is_symlink():
                left_out.append(f"{name} (a link)")
            elif is_foreign(name, edition) or CLUTTER.match(path.name) or path.name == FINDER_ICON:
                left_out.append(name)
            elif any((path / inner).exists() for inner in ("pyvenv.cfg", "conda-meta")):
                left_out.append(name)
            elif path.is_dir():
                folders.append(path)
            elif path.is_file() and not name_fault(name):
                yield name, path
            else:
                left_out.append(f"{name} (not a plain file, or its name cannot be stored)")


def _pack(files: dict[str, Path], student_id: str) -> bytes:
    """The zip of some files. Order, times and permissions are fixed, so that the same input gives the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, path in sorted(files.items()):
            info = fixed_entry(f"{student_id}/{name}")
            archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED, compresslevel=9)
    return buffer.getvalue()


def _largest(sizes: dict[str, int]) -> str:
    top = sorted(sizes, key=lambda name: (-sizes[name], name))[:5]
    return ", ".join(f"{few([name])} ({sizes[name] / MB:.2f} MB)" for name in top)
