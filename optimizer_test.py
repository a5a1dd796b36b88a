"""Checks optimizer.AdamW: `python optimizer_test.py`. Exit status: 0 right, 1 wrong, 2 could not check.

Where it is wrong, its numbers are compared with those that the usual mistakes give, and the mistake that fits is named.
`--code DIR` says whose optimizer.py is judged; it runs in a process of its own (docs/grading.md).
"""

import os
import sys

if __name__ == "__main__":  # no student's file, here or on PYTHONPATH, is to be taken for Python's own or for grading/
    home, added = os.path.dirname(os.path.realpath(__file__)), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    late = {home, *map(os.path.realpath, added)}
    sys.path[:] = sorted([home, *sys.path], key=lambda path: os.path.realpath(path) in late)

try:
    from grading.asking import add_flags, student_of
    from grading.programs import GradingParser, run_main
except ModuleNotFoundError as error:
    if __name__ != "__main__" or (error.name or "").partition(".")[0] != "grading":
        raise
    print("error: the folder grading/ must lie beside optimizer_test.py, whole; copy it there", file=sys.stderr)
    sys.exit(2)


def main() -> int:
    parser = GradingParser(description="Check AdamW in optimizer.py against published weights, PyTorch and formulas.")
    add_flags(parser)
    with student_of(parser.parse_args()) as student:  # its process imports PyTorch while this one does
        from grading.adamw import check_adamw

        return 0 if check_adamw(student) else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
