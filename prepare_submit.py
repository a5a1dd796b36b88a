"""Create or check the zip that is handed in.

    python prepare_submit.py DIR ID      create ID.zip from DIR and check it; a wrong one is not written
    python prepare_submit.py ZIP ID      check a zip; nothing is unpacked to disk, no student code is run

The zip holds the assignment's own list of files and the files that these need to run (`engine/`, `grading/` and so on),
from beside this script. Every tool must unpack it alike, and it must hold the modules that its modules import.

Exit status: 0 nothing refused or deducted, perhaps flags and notes; 1 it was checked and is wrong (one line for each
finding); 2 it could not be checked (bad usage, a missing file). Needs the standard library and `grading/` alone: it
answers at once.

For scripts: `check_zip` and `create_zip` return a `Report` with `findings`, of which those in `wrong` cost a part of
the grade; `assert_zip`, and the course's own `check_file` and `main`, raise `FormatError`, an `AssertionError`, on a
wrong format.
"""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # this grading/, not one on PYTHONPATH
    try:
        from grading import run_script
    except ImportError:
        print("error: the folder grading/ must lie beside prepare_submit.py, whole; copy it there", file=sys.stderr)
        sys.exit(2)
    sys.exit(run_script("prepare_submit", "command_line"))  # which imports this file once more

import argparse
import contextlib
import math
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from grading.archive import FormatError
from grading.editions import ADVANCED, EDITIONS
from grading.findings import SEVERITIES
from grading.programs import GradingError, GradingParser, add_json, decimal_number, printable, run_told
from grading.rules import Report, Rules
from grading.submission import assert_zip, check_zip, create_zip

__all__ = ["ADVANCED", "EDITIONS", "FormatError", "Report", "Rules", "assert_zip", "check_file", "check_zip",
           "create_zip", "main"]  # fmt: skip


def main(path: str, aid: str) -> None:
    """The course's function: create and check, or check; print the report; raise `FormatError` on a wrong format."""
    report = create_zip(path, aid) if Path(path).is_dir() else check_zip(path, aid)
    print(report)
    report.raise_if_wrong()


def check_file(file: str, check_aid: str) -> None:
    """The course's function: as `main`, for a zip."""
    main(file, check_aid)


def megabytes(text: str) -> float:
    value = math.nan
    with contextlib.suppress(ValueError):
        value = decimal_number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{printable(text)} is not a positive number of megabytes")
    return value


def get_args() -> argparse.Namespace:
    parser = GradingParser(
        description="Create the zip that is handed in from a folder, or check one. Nothing is unpacked or executed.",
        epilog="Exit status: 0 not wrong; 1 checked and wrong, one line for each finding; 2 it could not be checked.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28),
    )
    add, default = parser.add_argument, Rules()
    add("path", metavar="DIR|ZIP", help="a folder to pack and check, or a zip to check")
    add("id", metavar="ID", help="the student's or group's ID: the name of the zip's one top folder")
    add("--edition", choices=EDITIONS, default=default.edition, help="whose file list (default: %(default)s)")
    add("--data", dest="data_dir", metavar="DIR", help="the data sets (default: data/ here, data/ beside this script, "
        "data/ in the folder MINLLAMA_ASSETS)")  # fmt: skip
    add("--size_limit", metavar="MB", type=megabytes,
        help=f"largest zip, in millions of bytes (default: the edition's, {default.size_limit:g})")  # fmt: skip
    add("--max_unpacked", metavar="MB", type=megabytes,
        help="largest sum of the unpacked files (default: 20 times the size limit, at most 500)")  # fmt: skip
    add("--id_pattern", metavar="REGEX", default=default.id_pattern, help="what an ID is (default: %(default)s)")
    add("--out", metavar="FILE.zip", help="the zip to write from DIR (default: ID.zip in the current folder)")
    add("--force", action="store_true", help="write the zip of DIR although it is wrong (the status is still 1)")
    add_json(parser)
    return parser.parse_args()


def refuse_submissions(folder: str, required: Iterable[str]) -> None:
    """Raise `GradingError` if a folder holds several zips and no file of the assignment: what a grader has."""
    zips = list(Path(folder).glob("*.zip"))
    if len(zips) > 1 and not any(Path(folder, name).exists() for name in required):
        said = f"{printable(folder)} holds {len(zips)} zips and none of the assignment's files"
        raise GradingError(f"{said}; to grade them all: python -m grading {printable(folder)} --config FILE --out DIR")


def refuse_outputs_alone(folder: str, required: Iterable[str]) -> None:
    """Raise `GradingError` if a folder holds outputs of the assignment and no code, at any depth."""
    outputs = [name for name in (*required, *ADVANCED) if name.endswith(".txt") and Path(folder, name).exists()]
    if outputs and not any(Path(folder).rglob("*.py")):
        said = f"{printable(folder)} holds outputs, for example {outputs[0]}, and no code"
        raise GradingError(f"{said}; name the folder that holds the code and the outputs, or . if you are in it")


def command_line() -> int:
    """Run the command; the status is 0 or 1. Raises `GradingError` and `OSError` for `run_main`."""
    args = get_args()
    return run_told("prepare_submit.py", args, lambda told: run(args, told))


def run(args: argparse.Namespace, told: dict[str, Any]) -> int:
    """Create or check the zip and print the report; told: gets it as plain values."""
    rules = {name.name: getattr(args, name.name) for name in fields(Rules)}
    if Path(args.path).is_dir():
        refuse_submissions(args.path, EDITIONS[args.edition].required)
        refuse_outputs_alone(args.path, EDITIONS[args.edition].required)
        report = create_zip(args.path, args.id, args.out, args.force, **rules)
    elif args.out or args.force:
        raise GradingError("--out and --force are for packing a folder; to check a zip leave them out")
    else:
        report = check_zip(args.path, args.id, **rules)
    print(report)
    scores = {name: score._asdict() for name, score in report.scores.items()}
    told |= {"id": report.student_id, "files": report.files, "scores": scores}
    told["findings"] = [one.told() for severity in SEVERITIES for one in report.of(severity)]
    return 1 if report.wrong else 0
