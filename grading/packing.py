"""Making the zip that is handed in from a folder.

It holds the files of the folder, without links, environments, checkpoints, caches and archives; and from the package
beside the grading scripts (`grading.package`) the files that these need to run and the folder lacks. Of the package's
own folder, only the student's files and the package's running code are packed.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from grading.archive import MAX_ENTRIES, MB
from grading.editions import EDITIONS, Edition
from grading.entries import FINDER_ICON, fixed_entry, name_fault
from grading.findings import Message
from grading.needs import DRIVER, find_needs, outermost
from grading.package import MAPPINGS, Package, files_of, is_carried
from grading.programs import GradingError, atomic_write, check_writable, few, printable
from grading.rules import Report, Rules
from grading.submission import CLUTTER, any_of, check_bytes, is_foreign, warn_of_upper_case

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
        return Report(student_id, [Message(said, "E003-unpacked")])
    payload = _pack(files, student_id)
    report = check_bytes(payload, student_id, checked)
    report.notes += notes
    warn_of_upper_case(out, report, checked)
    if len(payload) > checked.max_bytes:
        said = f"{checked.too_large(len(payload))}; the largest files: {_largest(sizes)}"
        report.problems.append(Message(said, "E002-size"))
    if force or not report.problems:
        with atomic_write(out) as file:
            file.write(payload)
        report.is_written = True
        report.notes.append(f"wrote {printable(out)} ({len(payload) / MB:.2f} MB)")
    else:
        earlier = "; the one that lies there is an earlier one" if out.exists() else ""
        report.notes.append(f"{printable(out)} was not written{earlier}")
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
    absent = {*find_needs(files_of(files), edition, package).absent, *_absent_mappings(files)}
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
