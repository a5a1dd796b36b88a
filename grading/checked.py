"""What is checked of a student's code: one part of it (`CheckedPart`), and the verdict on it (`PartVerdict`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from grading import small_model as small
from grading.asking import ChildAnswer, ChildQuestion
from grading.compare import Tensors
from grading.editions import BUNDLED_NORM
from grading.small_model import SMALL_SHAPE

IMPORT = "import of llama.py"
DROPOUT = 0.5  # acts in training only


class CheckedPart(NamedTuple):
    """One thing that a student writes: the question about it, and what each usual mistake would answer.

    where: the class or function in the student's files. needs: the names of the parts that this one calls; it cannot
    be right while they are wrong. read: makes of the answer the numbers that are judged. judged: how many of the
    stored tensors; None: all. drawn: the explanation if the numbers differ from call to call.
    """

    name: str
    where: str
    question: ChildQuestion
    mistakes: dict[str, Callable[[], torch.Tensor | Tensors]]
    needs: tuple[str, ...] = ()
    read: Callable[[ChildAnswer], ChildAnswer] = lambda answer: answer
    judged: int | None = None
    drawn: str = "it gives other numbers each time; is there dropout in evaluation?"


class PartVerdict(NamedTuple):
    """The verdict on a part: "ok", "WRONG", "not written yet" or "not judged"; and a sentence that explains it."""

    part: CheckedPart
    verdict: str
    sentence: str = ""


def small_config(kind: str) -> dict[str, Any]:
    config = {**SMALL_SHAPE, "attention": kind, "dropout": DROPOUT}
    return config if small.NORM.get() == BUNDLED_NORM else {**config, "norm": small.NORM.get()}


def with_mistakes(by_hand: Callable, table: dict[str, dict], *arguments) -> dict[str, Callable]:
    return {sentence: partial(by_hand, *arguments, **wrong) for sentence, wrong in table.items()}
