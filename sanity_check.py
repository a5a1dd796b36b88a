"""Checks llama.py and classifier.py against numbers that others computed: `python sanity_check.py`.

Exit status 0 if they are right, 1 if not, 2 if they cannot be checked. With stories42M.pt and the course's
sanity_check.data it checks the logits and hidden states of the two sequences that the assignment publishes. Without
them it checks the bundled checkpoint against tensors that Hugging Face transformers computed from it. Where something
is wrong, and with `--parts`, it goes part by part: the numbers of a wrong part are compared with those of the usual
mistakes, and the one that fits is named. `--published` runs generation and the four zero-shot files on the real
stories42M.pt and compares them with what independently finished public repositories of the assignment have in common.
`--code DIR` says whose files are judged; they run in a process of their own (docs/grading.md).
"""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # this grading/, not one on PYTHONPATH
    try:
        from grading import run_script
    except ImportError:
        print("error: the folder grading/ must lie beside sanity_check.py, whole; copy it there", file=sys.stderr)
        sys.exit(2)
    sys.exit(run_script("sanity_check"))  # which imports this file once more

from argparse import Namespace
from contextvars import copy_context
from typing import Any

from grading.editions import ATTENTION_KINDS, BUNDLED_NORM, DEFAULT_EDITION, EDITIONS, NORMS
from grading.programs import DefaultText, GradingError, GradingParser, add_json, run_told
from grading.student_process import Student, add_flags, student_of

COURSE_CHECKPOINT, COURSE_REFERENCE = "stories42M.pt", "sanity_check.data"


def get_args() -> Namespace:
    parser = GradingParser(description="Check llama.py and classifier.py against numbers that others computed.")
    add, checkpoint, reference = parser.add_argument, DefaultText(COURSE_CHECKPOINT), DefaultText(COURSE_REFERENCE)
    add("--pretrained-model-path", default=checkpoint, help="the checkpoint to check")
    add("--data", default=reference, help="the course's reference tensors")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="cpu", help="where to compute")
    add("--edition", choices=EDITIONS, default=DEFAULT_EDITION, help="whose reference tensors")
    add("--attention", choices=ATTENTION_KINDS, help="check this kind alone (default: all that llama.py has)")
    add("--parts", action="store_true", help="ask every part by itself, even if the whole is right")
    add("--published", action="store_true", help="compare text and zero-shot labels with public ones")
    add("--data_dir", default="data", help="where --published finds sst-*.txt and cfimdb-*.txt")
    add("--tokenizer", help="SentencePiece model for --published (default: as run_llama.py chooses)")
    add_flags(parser)
    add_json(parser)
    return parser.parse_args()


def check(student: Student, args: Namespace, told: dict[str, Any]) -> bool:
    """Make the checks that the flags ask for and print their lines. Returns whether all is right.

    told: gets the verdicts on the parts, as "parts", if they were judged.

    The expected numbers are read before the student's code first runs: it may write to the files that hold them.
    """
    from grading import parts, reference, small_model  # here, as they import PyTorch

    norm = EDITIONS[args.edition].norm
    small_model.NORM.set(norm)
    expected, given = parts.stored_numbers(norm), reference.find_given(args, student.folder)
    if norm != BUNDLED_NORM and reference.has_other_norm(student, args.edition):
        return False
    passed = reference.check_sanity(student, args, given)
    return parts.check_parts(student, expected, args, passed, told) and passed


def check_to_the_end(student: Student, args: Namespace, told: dict[str, Any]) -> bool:
    """As `check`, and whether the student's process then ends as it should."""
    with student:  # its process imports PyTorch while this one does
        passed = copy_context().run(check, student, args, told)  # which sets the norm of the small model
        if passed and (trouble := student.end()):
            print(trouble)
            return False
    return passed


def main() -> int:
    args = get_args()
    return run_told("sanity_check.py", args, lambda told: run(args, told))


def run(args: Namespace, told: dict[str, Any]) -> int:
    """Run the check that the flags choose; the status is 0 or 1."""
    norm = EDITIONS[args.edition].norm
    if norm != BUNDLED_NORM and args.published:
        known, has = NORMS[BUNDLED_NORM], NORMS[norm]
        raise GradingError(f"--published knows {known} alone, and {args.edition} has {has}")
    student = student_of(args)
    if args.published:  # runs the student's driver, and asks the student's modules nothing
        from grading import published

        passed = published.check_published(student.folder, args)
    else:
        passed = check_to_the_end(student, args, told)
    print("Your Llama implementation is correct!" if passed else "Sanity check FAILED: see the lines above.")
    return 0 if passed else 1
