"""Ratios between this package and others, measured in one run.

python -m benchmarks                      # everything; README.md here says what each line means
python -m benchmarks --rows decode-fp32 train-fp32 --llama2c ~/llama2.c/run --json report.json
python -m benchmarks --quick              # every code path on a tiny model, in seconds; its figures mean nothing
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.table import ROWS
from engine.programs import ArgumentParser, check_writable, run_main
from utils import UserError


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def get_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. Raises `UserError` for what does not fit."""
    parser = ArgumentParser(prog="python -m benchmarks", description="ratios of speed and memory, measured in one run")
    names = tuple(ROWS)
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="NAME", help="some lines only")
    parser.add_argument("--repeats", type=positive, default=5, help="rounds that are kept; epochs take at most 3")
    parser.add_argument("--threads", type=positive, help="threads of PyTorch and llama2.c; default: PyTorch's choice")
    parser.add_argument("--llama2c", metavar="PATH", help="llama2.c's compiled `run`, or the folder that holds it")
    parser.add_argument("--json", metavar="FILE", help="write the report here")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables here")
    parser.add_argument("--quick", action="store_true", help="a tiny model and tiny work: does everything run?")
    args = parser.parse_args(argv)
    check_args(args)
    return args


def check_args(args: argparse.Namespace) -> None:
    """Everything that can be known before work starts."""
    for flag in ("json", "markdown"):
        if getattr(args, flag) is not None:
            check_writable(getattr(args, flag), f"--{flag}")
    if args.json and args.markdown and Path(args.json).resolve() == Path(args.markdown).resolve():
        raise UserError(f"--markdown {args.markdown} is also --json; give it a name of its own")


def main() -> int:
    """Exit status 1 where something is wrong, named on standard error; speed alone is no failure."""
    args = get_args()
    from benchmarks.run import run  # which needs PyTorch

    wrong = run(args)
    for what in wrong:
        print(f"error: {what}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(run_main(main))
