"""Judging rope.apply_rotary_emb: the rotation by hand, the usual mistakes, and the lines that `rope_test.py` prints.

Comparing a student's numbers with expected ones, for this script and `optimizer_test.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from grading.student_process import ChildAnswer, ChildQuestion, Student

Tensors = tuple[torch.Tensor, ...]
LARGEST_ERROR = 1e-6
Say = Callable[[str], None]  # takes a line: `print`, or a list's `append`


def alike(actual: Tensors, expected: Tensors, tolerance: float = 1e-5) -> bool:
    """Whether shapes are the same and all numbers equal up to `tolerance`, relative above 1. NaN is equal to NaN."""
    return len(actual) == len(expected) and all(
        a.shape == e.shape and torch.allclose(a.double(), e.double(), atol=tolerance, rtol=tolerance, equal_nan=True)
        for a, e in zip(actual, expected, strict=True)
    )


def report_error(what: str, actual: torch.Tensor, expected: torch.Tensor, say: Say = print) -> bool:
    """Print the largest error of a tensor, and whether it is within `LARGEST_ERROR`. The shapes are the same."""
    error = (actual - expected.double()).abs().max().item()
    passed = error <= LARGEST_ERROR  # False for NaN as well
    say(f"{what}: largest error {error:.1e}, tolerance {LARGEST_ERROR:.0e}: {'ok' if passed else 'WRONG'}")
    return passed


def report_verdict(test: str, student: Student, mistake: str | None, say: Say = print) -> bool:
    """Print the last line of a test. mistake: None if all numbers are right; then the process must end well, too."""
    trouble = student.end() if mistake is None else mistake
    say(f"{test} test FAILED: {trouble}" if trouble else f"{test} test passed!")
    return not trouble


# --------------------------------------------------------------------------------------------------------- the rotation

# ---------------------------------------------------------------------------------------- the rotation by hand


def neighbours(pair: int, head_dim: int) -> tuple[int, int]:
    """Where the two numbers of a pair stand in a head."""
    return 2 * pair, 2 * pair + 1


def halves(pair: int, head_dim: int) -> tuple[int, int]:
    return pair, pair + head_dim // 2


def frequency(pair: int, head_dim: int, theta: float) -> float:
    """The angle by which a pair turns from one position to the next."""
    return theta ** (-2 * pair / head_dim)


def rotate_by_hand(
    x: torch.Tensor,
    theta: float,
    *,
    frequency: Callable = frequency,
    turn: Callable = lambda cos, sin: (cos, -sin, sin, cos),
    start: int = 0,
    read: Callable = neighbours,
    write: Callable = neighbours,
    along: int = 1,
) -> torch.Tensor:
    """RoFormer's equation 34, one number at a time in double precision. x: b s h d

    The keywords are what can go wrong. turn: the matrix, row by row, that turns a pair. along: the dimension of the
    positions.
    """
    x = x.double().transpose(1, along)
    rotated = x.clone()
    for position in range(x.shape[1]):
        for pair in range(x.shape[-1] // 2):
            angle = (start + position) * frequency(pair, x.shape[-1], theta)
            a, b, c, d = turn(math.cos(angle), math.sin(angle))
            first, second = (x[:, position, :, column] for column in read(pair, x.shape[-1]))  # b h
            y1, y2 = write(pair, x.shape[-1])
            rotated[:, position, :, y1] = a * first + b * second
            rotated[:, position, :, y2] = c * first + d * second
    return rotated.transpose(1, along)


def rotate_both(
    query: torch.Tensor,
    key: torch.Tensor,
    theta: float,
    *,
    give: Callable = lambda q, k, turned: turned,
    alone: str = "",
    **wrong,
) -> Tensors:
    """give: chooses the result from query, key, and the pair of rotated ones. wrong: keywords of `rotate_by_hand`.

    alone: "query" or "key", the only one that is rotated in the wrong way; "": both are.
    """
    pair = (("query", query), ("key", key))
    return give(query, key, tuple(rotate_by_hand(x, theta, **wrong if alone in ("", name) else {}) for name, x in pair))


ROTATION_MISTAKES: dict[str, dict] = {
    "halves of a head are paired (x1 with x_{d/2+1}), but these weights rotate neighbours (x1 with x2)":
        dict(read=halves, write=halves),
    "neighbours are paired, but the result is put together as two halves": dict(write=halves),
    "halves of a head are paired and then interleaved; neighbours (x1, x2) are pairs": dict(read=halves),
    "the wrong sign: pairs turn backwards. It is x1 cos - x2 sin, x1 sin + x2 cos":
        dict(turn=lambda cos, sin: (cos, sin, -sin, cos)),
    "the result is the complex conjugate: the second number of each pair has the wrong sign":
        dict(turn=lambda cos, sin: (cos, -sin, -sin, -cos)),
    "what is turned is the pair's complex conjugate: x2 enters with the wrong sign":
        dict(turn=lambda cos, sin: (cos, sin, sin, -cos)),
    "one wrong sign: the first number of a pair is x1 cos - x2 sin": dict(turn=lambda cos, sin: (cos, sin, sin, cos)),
    "one wrong sign: the second number of a pair is x1 sin + x2 cos":
        dict(turn=lambda cos, sin: (cos, -sin, -sin, cos)),
    "one wrong sign: x1 cos is subtracted; the first number of a pair is x1 cos - x2 sin":
        dict(turn=lambda cos, sin: (-cos, -sin, sin, cos)),
    "one wrong sign: x2 cos is subtracted; the second number of a pair is x1 sin + x2 cos":
        dict(turn=lambda cos, sin: (cos, -sin, sin, -cos)),
    "sine and cosine are exchanged": dict(turn=lambda cos, sin: (sin, -cos, cos, sin)),
    "positions are counted from 1; the first is 0": dict(start=1),
    "pair i turns by theta^(-i/d), but the exponent is -2i/d": dict(frequency=lambda i, d, theta: theta ** (-i / d)),
    "pair i turns by theta^(-4i/d), but the exponent is -2i/d":
        dict(frequency=lambda i, d, theta: theta ** (-4 * i / d)),
    "pair i turns by theta^(2i/d): the exponent lacks its minus":
        dict(frequency=lambda i, d, theta: theta ** (2 * i / d)),
    "the exponent counts pairs from 1, so that none turns by one radian a position":
        dict(frequency=lambda i, d, theta: theta ** (-2 * (i + 1) / d)),
    "the exponent is -2(i-1)/d with i from 0; that formula counts from 1":
        dict(frequency=lambda i, d, theta: theta ** (-2 * (i - 1) / d)),
    "all pairs turn by the same angle; pair i turns by theta^(-2i/d)": dict(frequency=lambda i, d, theta: 1.0),
    "the argument theta is ignored, 10000 always taken": dict(frequency=lambda i, d, theta: frequency(i, d, 1e4)),
    **{
        f"theta is {wrong:g} whatever is asked for; its default is 10000":
            dict(frequency=lambda i, d, theta, wrong=wrong: frequency(i, d, wrong))
        for wrong in (1e3, 1e5, 5e5, 1e6)
    },
    "nothing is rotated": dict(give=lambda q, k, turned: (q, k)),
    "the key is not rotated": dict(give=lambda q, k, turned: (turned[0], k)),
    "the query is not rotated": dict(give=lambda q, k, turned: (q, turned[1])),
    "the key is returned before the query": dict(give=lambda q, k, turned: turned[::-1]),
    "positions run along the heads; they are the dimension before (b s h d)": dict(along=2),
}  # fmt: skip
ROTATION_MISTAKES |= {
    f"{said} (of the {alone} alone; the other is right)": {**wrong, "alone": alone}
    for said, wrong in ROTATION_MISTAKES.items()
    for alone in ("query", "key")
    if "turn" in wrong
}


# ------------------------------------------------------------------------------------------------- the check

DEFAULT_THETA = 10000.0
# What the assignment's rotary_embedding_actual.data publishes for a query of twos and a key of threes, shape 1 2 2 4
# (github.com/neubig/minllama-assignment, commit 2951cdd): position 0 is not turned, position 1 is this for every head.
PUBLISHED_QUERY = (-0.6023372411727905, 2.7635464668273926, 1.9799003601074219, 2.019899606704712)
PUBLISHED_KEY = (-0.903505802154541, 4.145319938659668, 2.969850540161133, 3.0298495292663574)


class RotationCase(NamedTuple):
    """A query and a key, the right result, and the beginning of the lines about them."""

    what: str
    query: torch.Tensor
    key: torch.Tensor
    max_seq_len: int
    theta: float
    expected: Tensors

    @property
    def question(self) -> ChildQuestion:
        theta = {} if self.theta == DEFAULT_THETA else {"theta": self.theta}
        return ask_rotation(self.query, self.key, self.max_seq_len, **theta)


def ask_rotation(query: torch.Tensor, key: torch.Tensor, max_seq_len: int, **theta: float) -> ChildQuestion:
    """query: b s h d, key: b s g d. Without theta the student's default is asked for."""
    settings = {"head_dim": query.shape[-1], "max_seq_len": max_seq_len, **theta}
    return ChildQuestion("rotate", "rope", settings, {"query": query, "key": key})


def published_case() -> RotationCase:
    query, key = 2 * torch.ones(1, 2, 2, 4), 3 * torch.ones(1, 2, 2, 4)
    at_one = torch.tensor((PUBLISHED_QUERY, PUBLISHED_KEY))[:, None].expand(2, 2, 4)
    expected = (torch.stack((x[0, 0], turned))[None] for x, turned in zip((query, key), at_one, strict=True))  # 1 2 2 4
    return RotationCase("published values, {name}", query, key, 20, DEFAULT_THETA, tuple(expected))


def closed_form_cases(seed: int = 0) -> list[RotationCase]:
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for batch, length, heads, kv_heads, head_dim, theta in ((2, 7, 4, 2, 8, 10000.0), (1, 33, 3, 3, 6, 500.0)):
        query = torch.randn(batch, length, heads, head_dim, generator=generator)
        key = torch.randn(batch, length, kv_heads, head_dim, generator=generator)
        what = f"closed form, {{name}} {{shape}}, theta {theta:g}"
        cases.append(RotationCase(what, query, key, 64, theta, rotate_both(query, key, theta)))
    return cases


def report_case(case: RotationCase, answer: ChildAnswer, say: Say = print) -> bool:
    """Print the largest error of query and key, and whether it is within the tolerance."""
    if len(answer.tensors) != 2:  # none, if there is trouble
        what = case.what.format(name="query and key", shape=list(case.query.shape))
        say(f"{what}: {answer.line or f'it returns {len(answer.tensors)} tensors, not two'}: WRONG")
        return False
    verdicts = []
    for name, actual, expected in zip(("query", "key"), answer.tensors, case.expected, strict=True):
        what = case.what.format(name=name, shape=list(expected.shape))
        if actual.shape == expected.shape:
            verdicts.append(report_error(what, actual, expected, say))
        else:
            say(f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}: WRONG")
            verdicts.append(False)
    return all(verdicts)


def rotation_mistake(cases: list[RotationCase], answers: list[ChildAnswer]) -> str:
    """The mistake that gives the student's numbers in every case, or where to look."""
    for answer in answers:
        if answer.trouble:
            return f"apply_rotary_emb: {answer.line}"
    for sentence, wrong in ROTATION_MISTAKES.items():
        numbers = (rotate_both(case.query, case.key, case.theta, **wrong) for case in cases)
        if all(alike(answer.tensors, each, 2e-3) for answer, each in zip(answers, numbers, strict=True)):
            return sentence
    return "are neighbouring numbers paired, and does pair i turn by theta^(-2i/d)?"


def check_rotation(student: Student, seed: int = 0, say: Say = print) -> bool:
    """Ask every case, say its lines and the verdict. Returns whether all is right. seed: of the drawn inputs."""
    cases = [published_case(), *closed_form_cases(seed)]
    answers = student.ask_all(case.question for case in cases)
    are_right = [report_case(case, answer, say) for case, answer in zip(cases, answers, strict=True)]
    mistake = None if all(are_right) else rotation_mistake(cases, answers)
    return report_verdict("Rotary embedding", student, mistake, say)
