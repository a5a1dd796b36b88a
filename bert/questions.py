"""Made-up questions in SQuAD's format, to try question answering without the real data.

    python -m bert.questions --out FOLDER [--paragraphs 120] [--version v2.0|1.1]

writes `questions-train.json` and `questions-dev.json`, a tenth as many paragraphs, none of which is in the other.
A paragraph says who plays what, where and when, in any order, and is asked for each; in version 2.0 every other one is
asked for something that it does not say. So no place in a paragraph answers more than a quarter of its questions.
"""

from __future__ import annotations

import json
import random
import sys
from argparse import Namespace
from itertools import permutations, product
from pathlib import Path
from typing import Any

from engine.programs import ArgumentParser, check_new, run_main
from utils import UserError, atomic_write

FACTS = {  # a question, and its possible answers
    "Who plays?": ("Anna", "Ben", "Dora", "Emil", "Greta", "Hugo"),
    "What is played?": ("a cello", "a flute", "a harp", "an organ", "a trumpet"),
    "Where is it?": ("Basel", "Oslo", "Lisbon", "Vienna", "Dublin"),
    "When is it?": ("Monday", "Tuesday", "Friday", "Sunday"),
}
NOT_SAID = "What does it cost?"
VERSIONS = "1.1", "v2.0"


def squad(version: str, first: int, count: int) -> dict[str, Any]:
    """The paragraphs of numbers first..first + count, always the same ones. Raises `ValueError` beyond the last one."""
    everything = [*product(*FACTS.values(), permutations(FACTS))]
    if first + count > len(everything):
        raise ValueError(f"there are {len(everything)} paragraphs")
    random.Random(0).shuffle(everything)
    paragraphs = [_paragraph(number, *everything[number]) for number in range(first, first + count)]
    if version == "v2.0":
        for paragraph in paragraphs[1::2]:
            name = paragraph["qas"][0]["id"].partition("-")[0]
            nothing = {"id": f"{name}-none", "question": NOT_SAID, "answers": [], "is_impossible": True}
            paragraph["qas"].append(nothing)
    return {"version": version, "data": [{"title": "music", "paragraphs": paragraphs}]}


def _paragraph(number: int, *facts: Any) -> dict[str, Any]:
    """facts: an answer for each question, then the order of the questions in which they are said."""
    *answers, order = facts
    answer_of = dict(zip(FACTS, answers, strict=True))
    context = ", ".join(answer_of[question] for question in order) + "."
    questions = [
        {
            "id": f"{number}-{index}",
            "question": question,
            "answers": [{"text": answer, "answer_start": context.index(answer)}],
        }
        for index, (question, answer) in enumerate(answer_of.items())
    ]
    return {"context": context, "qas": questions}


def get_args(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(prog="python -m bert.questions", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", default=".", metavar="FOLDER", help="where the two files are written")
    parser.add_argument("--paragraphs", type=int, default=120, help="to train on")
    parser.add_argument("--version", choices=VERSIONS, default="v2.0", help="2.0 has questions without an answer")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = get_args(argv)
    if args.paragraphs < 10:
        raise UserError(f"--paragraphs {args.paragraphs}: must be at least 10")
    parts = {"train": (0, args.paragraphs), "dev": (args.paragraphs, args.paragraphs // 10)}
    paths = {part: Path(args.out) / f"questions-{part}.json" for part in parts}
    for path in paths.values():
        check_new(path, "--out")
    try:
        contents = {part: squad(args.version, *numbers) for part, numbers in parts.items()}
    except ValueError as error:
        raise UserError(f"--paragraphs {args.paragraphs}: {error}") from None
    for part, path in paths.items():
        with atomic_write(path) as file:
            file.write(json.dumps(contents[part], indent=1) + "\n")
        print(f"{sum(len(each['qas']) for each in contents[part]['data'][0]['paragraphs'])} questions in {path}")


if __name__ == "__main__":
    sys.exit(run_main(main))
