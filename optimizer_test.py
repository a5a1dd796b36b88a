"""Checks optimizer.AdamW: `python optimizer_test.py`. Exit status: 0 right, 1 wrong, 2 could not check.

Where it is wrong, its numbers are compared with those that the usual mistakes give, and the mistake that fits is named.
`--code DIR` says whose optimizer.py is judged; it runs in a process of its own (docs/grading.md).
"""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # this grading/, not one on PYTHONPATH
    try:
        from grading import run_script
    except ImportError:
        print("error: the folder grading/ must lie beside optimizer_test.py, whole; copy it there", file=sys.stderr)
        sys.exit(2)
    sys.exit(run_script("optimizer_test"))  # which imports this file once more

from grading.editions import DEFAULT_EDITION, EDITIONS
from grading.programs import GradingParser, add_json, run_told
from grading.student_process import add_flags, student_of


def main() -> int:
    parser = GradingParser(description="Check AdamW in optimizer.py against published weights, PyTorch and formulas.")
    parser.add_argument("--edition", choices=EDITIONS, default=DEFAULT_EDITION, help="whose AdamW: two clip gradients")
    add_flags(parser)
    add_json(parser)
    args = parser.parse_args()
    with student_of(args) as student:  # its process imports PyTorch while this one does
        from grading.adamw import check_adamw

        clips = EDITIONS[args.edition].clips
        return run_told("optimizer_test.py", args, lambda _: 0 if check_adamw(student, clips) else 1)
