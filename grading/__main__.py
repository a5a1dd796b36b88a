"""`python -m grading SUBMISSIONS --config grading.toml --out DIR`: a folder of zips to grades.

Exit status: 0 every submission was judged; 1 some need a person: refused, unmatched, claimed twice; 2 a wrong flag,
config, roster or override; 130 interrupted (what is finished stays, and the same command goes on).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from grading.batch import OLD_STATE, STATE, judge_all, rows_of, write_sheets
from grading.box import InBox, add_box_flags, box_of
from grading.judge import REFUSED, read_overrides, summary
from grading.programs import GradingError, GradingParser, printable, run_main, whole_number
from grading.settings import need, read_settings, write_first
from grading.uploads import find_submissions


def get_args() -> argparse.Namespace:
    parser = GradingParser(
        prog="python -m grading",
        description="Grade a folder of submissions: zips, Canvas's downloads, folders.",
        epilog="Exit status: 0 all judged; 1 some need a person (refused, unmatched, claimed twice); 2 wrong usage.",
        formatter_class=argparse.HelpFormatter,
    )
    parser.add_argument("submissions", metavar="SUBMISSIONS", nargs="?", help="the folder of zips and folders")
    parser.add_argument("--config", metavar="FILE.toml", help="the config; --init writes one to begin with")
    parser.add_argument("--out", metavar="DIR", help="the folder that is written to; the same again goes on")
    parser.add_argument("--init", metavar="FILE.toml", help="write a config with all defaults and comments, and end")
    jobs = {"type": whole_number, "default": os.cpu_count() or 1}
    parser.add_argument("--jobs", metavar="N", **jobs, help="processes (default: %(default)s)")
    parser.add_argument("--run-code", action="store_true", help="run students' code in a box; without it, none is run")
    add_box_flags(parser)
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: give a number from 1 on")
    if not args.init:
        for name, value in (("SUBMISSIONS", args.submissions), ("--config", args.config), ("--out", args.out)):
            if value is None:
                parser.error(f"{name} is needed")
    return args


def with_progress(judged: Iterator[tuple], count: int) -> Iterator[tuple]:
    """The same, counted on a terminal."""
    is_terminal = sys.stderr.isatty()
    try:
        for number, pair in enumerate(judged, 1):
            yield pair
            print(f"\r{number}/{count}" if is_terminal else "", end="", file=sys.stderr, flush=True)
    finally:
        print("\n" if is_terminal else "", end="", file=sys.stderr)


def main() -> int:
    args = get_args()
    if args.init:
        write_first(Path(args.init))
        print(f"wrote {args.init}")
        return 0
    folder, out = Path(args.submissions), Path(args.out)
    settings = read_settings(Path(args.config))
    if not folder.exists():
        raise GradingError(f"SUBMISSIONS {printable(folder)} does not exist")
    if folder.resolve() in (out.resolve(), *out.resolve().parents):
        raise GradingError(f"--out {printable(out)} must not lie among the submissions")
    for own in filter(None, (args.config, settings.roster, settings.overrides)):
        if out.resolve() in Path(own).resolve().parents:
            raise GradingError(f"{printable(own)} lies in --out, where files are replaced; move it")
    if (out / "grades.csv").exists() and not ((out / STATE).is_dir() or (out / OLD_STATE).exists()):
        raise GradingError(f"--out {printable(out)} holds a grades.csv that is not this program's; give another folder")
    need("jinja2")
    run_code = InBox(box_of(args)) if args.run_code else None
    submissions, others = find_submissions(folder, settings)
    if all(one.path is None for one in submissions):
        raise GradingError(f"SUBMISSIONS {printable(folder)} holds neither a zip nor a folder")
    overrides = read_overrides(settings, submissions)
    out.mkdir(parents=True, exist_ok=True)
    judged = with_progress(judge_all(submissions, settings, out, args.jobs, run_code), len(submissions))
    rows = rows_of(judged, settings, overrides)
    write_sheets(rows, others, settings, out)
    print(summary(row.grade for row in rows))
    for row in rows:
        if row.grade.status == REFUSED:
            print(f"{row.student_id}: {'; '.join(row.grade.reasons)}".removeprefix(": "))
    if others:
        print(f"passed over: {len(others)} files that are neither archives nor folders")
    print(f"wrote grades.csv, canvas.csv, overview.html and reports/ in {printable(out)}")
    return 1 if any(row.grade.status == REFUSED for row in rows) else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
