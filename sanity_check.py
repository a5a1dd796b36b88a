"""Checks llama.py and classifier.py against numbers that others computed: `python sanity_check.py`.

Exit status 0 if they are right, 1 if not, 2 if they cannot be checked. With stories42M.pt and the course's
sanity_check.data it checks the logits and hidden states of the two sequences that the assignment publishes. Without
them it checks the bundled checkpoint against tensors that Hugging Face transformers computed from it. Where something
is wrong, and with `--parts`, it goes part by part: the numbers of a wrong part are compared with those of the usual
mistakes, and the one that fits is named. `--published` runs generation and the four zero-shot files on the real
stories42M.pt and compares them with what independently finished public repositories of the assignment have in common.
`--code DIR` says whose files are judged; they run in a process of their own (docs/grading.md).
"""

import sys

if __name__ == "__main__":  # beside this script may lie a student's random.py, which must not be taken for Python's
    sys.path.append(sys.path.pop(0))

from argparse import Namespace  # noqa: E402

from grading.asking import Student, add_flags, student_of  # noqa: E402
from grading.editions import ATTENTION_KINDS, DEFAULT_EDITION, EDITIONS  # noqa: E402
from grading.programs import ArgumentParser, Default, run_main  # noqa: E402

COURSE_CHECKPOINT, COURSE_REFERENCE = "stories42M.pt", "sanity_check.data"


def get_args() -> Namespace:
    parser = ArgumentParser(description="Check llama.py and classifier.py against numbers that others computed.")
    parser.add_argument("--pretrained-model-path", default=Default(COURSE_CHECKPOINT), help="the checkpoint to check")
    parser.add_argument("--data", default=Default(COURSE_REFERENCE), help="the course's reference tensors")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="cpu", help="where to compute")
    parser.add_argument("--edition", choices=EDITIONS, default=DEFAULT_EDITION, help="whose reference tensors")
    parser.add_argument(
        "--attention", choices=ATTENTION_KINDS, help="check this kind alone (default: all that llama.py has)"
    )
    parser.add_argument("--parts", action="store_true", help="ask every part by itself, even if the whole is right")
    parser.add_argument("--published", action="store_true", help="compare text and zero-shot labels with public ones")
    parser.add_argument("--data_dir", default="data", help="where --published finds sst-*.txt and cfimdb-*.txt")
    parser.add_argument("--tokenizer", help="SentencePiece model for --published (default: as run_llama.py chooses)")
    add_flags(parser)
    return parser.parse_args()


def check(student: Student, args: Namespace) -> bool:
    """Make the checks that the flags ask for and print their lines. Returns whether all is right."""
    from grading import parts, published, reference  # here, as they import PyTorch

    if EDITIONS[args.edition].norm != reference.BUNDLED_NORM:
        return reference.check_another_norm(student, args)
    if args.published:
        return published.check_published(student.folder, args, published.PUBLISHED_TEXTS, published.PUBLISHED_LABELS)
    passed = reference.check_sanity(student, args)
    return parts.check_parts(student, args.attention, args.parts, passed) and passed


def main() -> int:
    args = get_args()
    with student_of(args) as student:  # its process imports PyTorch while this one does
        passed, trouble = check(student, args), ""
        if passed and (trouble := student.end()):
            print(trouble)
        passed = passed and not trouble
    print("Your Llama implementation is correct!" if passed else "Sanity check FAILED: see the lines above.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
