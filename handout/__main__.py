"""Write the folder that students get: `python -m handout OUT --edition cmu2025`.

OUT must not exist, or be empty. The functions that a student implements are empty in it, the rest runs alone. Exit
status 0, or 2 and one line.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.programs import ArgumentParser, run_main
from grading.editions import DEFAULT_EDITION, EDITIONS
from handout.writing import VERSION, leaks, write_handout
from utils import UserError


def main() -> None:
    parser = ArgumentParser(prog="python -m handout", description="Write the folder that students get.")
    parser.add_argument("out", metavar="OUT", help="a folder that does not exist, or is empty")
    parser.add_argument("--edition", choices=EDITIONS, default=DEFAULT_EDITION, help="whose (default: %(default)s)")
    args = parser.parse_args()
    out = Path(args.out)
    holes = write_handout(out, args.edition)
    if found := leaks(out, args.edition, holes):
        raise UserError(f"{out} holds a line of an answer: {found[0]}")
    files = sum(path.is_file() for path in out.rglob("*"))
    print(f"wrote hand-out {VERSION} of {args.edition} to {out}: {files} files, {len(holes)} functions to write")


if __name__ == "__main__":
    sys.exit(run_main(main))
