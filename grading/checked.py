"""What is checked of a student's code: one part of it (`CheckedPart`), and the verdict on it (`PartVerdict`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch

from grading import small_model as small
from grading.asking import ChildAnswer, ChildQuestion
from grading.compare import Tensors
from grading.editions import BUNDLED_NORM
from grading.small_model import SMALL_SHAPE

IMPORT = "import of llama.py"
DROPOUT = 0.5  # acts in training only
TWO_MISTAKES = "two mistakes together: {}; and: {}"

Mistakes = dict[str, Callable[[], "torch.Tensor | Tensors"]]  # the sentence about each, and the numbers that it gives


class Alone(NamedTuple):
    """A part asked with stand-ins in the place of those that it needs: what the other parts do has no effect.

    right: the right numbers. mistakes: as those of the part.
    """

    question: ChildQuestion
    right: Callable[[], torch.Tensor | Tensors]
    mistakes: Mistakes


class CheckedPart(NamedTuple):
    """One thing that a student writes: the question about it, and what each usual mistake would answer.

    where: the class or function in the student's files. needs: the names of the parts that this one calls; it cannot
    be right while they are wrong. read: makes of the answer the numbers that are judged. judged: how many of the
    stored tensors; None: all. also: other numbers that are right, too. alone: how the part is asked where one that it
    needs is wrong. drawn: the explanation if the numbers differ from call to call.
    """

    name: str
    where: str
    question: ChildQuestion
    mistakes: Mistakes
    needs: tuple[str, ...] = ()
    read: Callable[[ChildAnswer], ChildAnswer] = lambda answer: answer
    judged: int | None = None
    also: tuple[Callable[[], torch.Tensor | Tensors], ...] = ()
    alone: Alone | None = None
    drawn: str = "it gives other numbers each time; is there dropout in evaluation?"


class PartVerdict(NamedTuple):
    """The verdict on a part: "ok", "WRONG", "not written yet" or "not judged"; and a sentence that explains it."""

    part: CheckedPart
    verdict: str
    sentence: str = ""


def small_config(kind: str) -> dict[str, Any]:
    config = {**SMALL_SHAPE, "attention": kind, "dropout": DROPOUT}
    return config if small.NORM.get() == BUNDLED_NORM else {**config, "norm": small.NORM.get()}


def with_mistakes(by_hand: Callable, table: dict[str, dict], *arguments, **settings) -> Mistakes:
    """settings: keywords that all of them have beside their own."""
    return {sentence: partial(by_hand, *arguments, **settings, **wrong) for sentence, wrong in table.items()}


def as_tensors(numbers: torch.Tensor | Tensors) -> Tensors:
    return numbers if isinstance(numbers, tuple) else (numbers,)


def singles_then_pairs(mistakes: Mistakes) -> Iterator[tuple[str, Callable]]:
    """Every mistake; then every two that can be made together, as they change different things."""
    yield from mistakes.items()
    for (one, first), (other, second) in combinations(mistakes.items(), 2):
        together = joined(first, second)
        if together:
            yield TWO_MISTAKES.format(one, other), together


def joined(first: Callable, second: Callable) -> partial | None:
    """Two mistakes of `with_mistakes` made at once; None where both change the same thing, or are of other functions.

    Keywords with the same value in both are no change.
    """
    if not (isinstance(first, partial) and isinstance(second, partial)) or first.func is not second.func:
        return None
    common = {*first.keywords} & {*second.keywords}
    if any(first.keywords[name] is not second.keywords[name] for name in common):
        return None
    return partial(first.func, *first.args, **first.keywords, **{
        name: value for name, value in second.keywords.items() if name not in common
    })  # fmt: skip
