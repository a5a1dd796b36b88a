"""Judging rope.apply_rotary_emb: the rotation by hand, the usual mistakes, and the lines that `rope_test.py` prints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from grading.asking import ChildAnswer, ChildQuestion, Student
from grading.compare import Tensors, alike

# ---------------------------------------------------------------------------------------- the rotation by hand


def neighbours(pair: int, head_dim: int) -> tuple[int, int]:
    """Where the two numbers of a pair stand in a head."""
    return 2 * pair, 2 * pair + 1


def halves(pair: int, head_dim: int) -> tuple[int, int]:
    return pair, pair + head_dim // 2


def frequency(pair: int, head_dim: int, theta: float) -> float:
    """The angle by which a pair turns from one position to the next."""
    return theta ** (-2 * pair / head_dim)


def turn(cos: float, sin: float) -> tuple[float, float, float, float]:
    """The matrix, row by row, that turns a pair."""
    return cos, -sin, sin, cos


def rotate_by_hand(
    x: torch.Tensor,
    theta: float,
    *,
    frequency: Callable = frequency,
    turn: Callable = turn,
    start: int = 0,
    read: Callable = neighbours,
    write: Callable = neighbours,
) -> torch.Tensor:
    """RoFormer's equation 34, one number at a time in double precision. x: b s h d

    The keywords are what can go wrong.
    """
    _, length, _, head_dim = x.shape
    rotated = x.double().clone()
    for position in range(length):
        for pair in range(head_dim // 2):
            angle = (start + position) * frequency(pair, head_dim, theta)
            a, b, c, d = turn(math.cos(angle), math.sin(angle))
            first, second = (x[:, position, :, column].double() for column in read(pair, head_dim))  # b h
            y1, y2 = write(pair, head_dim)
            rotated[:, position, :, y1] = a * first + b * second
            rotated[:, position, :, y2] = c * first + d * second
    return rotated


def rotate_both(query: torch.Tensor, key: torch.Tensor, theta: float, **wrong) -> Tensors:
    return rotate_by_hand(query, theta, **wrong), rotate_by_hand(key, theta, **wrong)


def along_heads(x: torch.Tensor, theta: float) -> torch.Tensor:
    """The rotation with head numbers for positions. x: b s h d"""
    return rotate_by_hand(x.transpose(1, 2), theta).transpose(1, 2)


def exponent(power: Callable[[int, int], float]) -> Callable[..., Tensors]:
    """`rotate_both` with another power of theta for pair i of a head of size d."""
    return partial(rotate_both, frequency=lambda i, d, theta: theta ** power(i, d))


MISTAKES: dict[str, Callable[[torch.Tensor, torch.Tensor, float], Tensors]] = {
    "halves of a head are paired (x1 with x_{d/2+1}), but these weights rotate neighbours (x1 with x2)": partial(
        rotate_both, read=halves, write=halves
    ),
    "neighbours are paired, but the result is put together as two halves": partial(rotate_both, write=halves),
    "halves of a head are paired and then interleaved; neighbours (x1, x2) are pairs": partial(
        rotate_both, read=halves
    ),
    "the wrong sign: pairs turn backwards. It is x1 cos - x2 sin, x1 sin + x2 cos": partial(
        rotate_both, turn=lambda cos, sin: (cos, sin, -sin, cos)
    ),
    "the result is the complex conjugate: the second number of each pair has the wrong sign": partial(
        rotate_both, turn=lambda cos, sin: (cos, -sin, -sin, -cos)
    ),
    "what is turned is the pair's complex conjugate: x2 enters with the wrong sign": partial(
        rotate_both, turn=lambda cos, sin: (cos, sin, sin, -cos)
    ),
    "one wrong sign: the first number of a pair is x1 cos - x2 sin": partial(
        rotate_both, turn=lambda cos, sin: (cos, sin, sin, cos)
    ),
    "one wrong sign: the second number of a pair is x1 sin + x2 cos": partial(
        rotate_both, turn=lambda cos, sin: (cos, -sin, -sin, cos)
    ),
    "sine and cosine are exchanged": partial(rotate_both, turn=lambda cos, sin: (sin, -cos, cos, sin)),
    "positions are counted from 1; the first is 0": partial(rotate_both, start=1),
    "pair i turns by theta^(-i/d), but the exponent is -2i/d": exponent(lambda i, d: -i / d),
    "pair i turns by theta^(-4i/d), but the exponent is -2i/d": exponent(lambda i, d: -4 * i / d),
    "pair i turns by theta^(2i/d): the exponent lacks its minus": exponent(lambda i, d: 2 * i / d),
    "the exponent counts pairs from 1, so that none turns by one radian a position": exponent(
        lambda i, d: -2 * (i + 1) / d
    ),
    "the exponent is -2(i-1)/d with i from 0; that formula counts from 1": exponent(lambda i, d: -2 * (i - 1) / d),
    "all pairs turn by the same angle; pair i turns by theta^(-2i/d)": exponent(lambda i, d: 0),
    "the argument theta is ignored, 10000 always taken": lambda query, key, theta: rotate_both(query, key, 1e4),
    **{
        f"theta is {wrong:g} whatever is asked for; its default is 10000": lambda query, key, theta, wrong=wrong: (
            rotate_both(query, key, wrong)
        )
        for wrong in (1e3, 1e5, 5e5, 1e6)
    },
    "nothing is rotated": lambda query, key, theta: (query, key),
    "the key is not rotated": lambda query, key, theta: (rotate_by_hand(query, theta), key),
    "the query is not rotated": lambda query, key, theta: (query, rotate_by_hand(key, theta)),
    "the key is returned before the query": lambda query, key, theta: rotate_both(key, query, theta),
    "positions run along the heads; they are the dimension before (b s h d)": lambda query, key, theta: (
        along_heads(query, theta),
        along_heads(key, theta),
    ),
}


# ------------------------------------------------------------------------------------------------- the check

TOLERANCE, DEFAULT_THETA = 1e-6, 10000.0
# What the assignment's rotary_embedding_actual.data publishes for a query of twos and a key of threes, shape 1 2 2 4
# (github.com/neubig/minllama-assignment, commit 2951cdd): position 0 is not turned, position 1 is this for every head.
PUBLISHED_QUERY = (-0.6023372411727905, 2.7635464668273926, 1.9799003601074219, 2.019899606704712)
PUBLISHED_KEY = (-0.903505802154541, 4.145319938659668, 2.969850540161133, 3.0298495292663574)
HINT = "are neighbouring numbers paired, and does pair i turn by theta^(-2i/d)?"


@dataclass(frozen=True)
class RotationCase:
    """A query and a key, what they should become, and what the lines about it begin with."""

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
    return RotationCase("published values, {name}", query, key, 20, 10000.0, tuple(expected))


def closed_form_cases() -> list[RotationCase]:
    generator = torch.Generator().manual_seed(0)
    cases = []
    for batch, length, heads, kv_heads, head_dim, theta in ((2, 7, 4, 2, 8, 10000.0), (1, 33, 3, 3, 6, 500.0)):
        query = torch.randn(batch, length, heads, head_dim, generator=generator)
        key = torch.randn(batch, length, kv_heads, head_dim, generator=generator)
        what = f"closed form, {{name}} {{shape}}, theta {theta:g}"
        cases.append(RotationCase(what, query, key, 64, theta, rotate_both(query, key, theta)))
    return cases


def report(case: RotationCase, answer: ChildAnswer) -> bool:
    """Print the largest error of query and key, and whether it is within the tolerance."""
    if answer.trouble or len(answer.tensors) != 2:
        what = case.what.format(name="query and key", shape=list(case.query.shape))
        print(f"{what}: {answer.line or f'it returns {len(answer.tensors)} tensors, not two'}: WRONG")
        return False
    verdicts = []
    for name, actual, expected in zip(("query", "key"), answer.tensors, case.expected, strict=True):
        what = case.what.format(name=name, shape=list(expected.shape))
        if actual.shape != expected.shape:
            print(f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}: WRONG")
            verdicts.append(False)
            continue
        error = (actual - expected.double()).abs().max().item()
        verdicts.append(error <= TOLERANCE)  # False for NaN as well
        print(f"{what}: largest error {error:.1e}, tolerance {TOLERANCE:.0e}: {'ok' if verdicts[-1] else 'WRONG'}")
    return all(verdicts)


def diagnosis(cases: list[RotationCase], answers: list[ChildAnswer]) -> str:
    """The mistake that gives the student's numbers in every case, or where to look."""
    for answer in answers:
        if answer.trouble:
            return f"apply_rotary_emb: {answer.line}"
    for sentence, mistake in MISTAKES.items():
        wrong = (mistake(case.query, case.key, case.theta) for case in cases)
        if all(alike(answer.tensors, numbers, 2e-3) for answer, numbers in zip(answers, wrong, strict=True)):
            return sentence
    return HINT


def check_rotation(student: Student) -> bool:
    """Ask every case, print its lines and the verdict. Returns whether all is right."""
    cases = [published_case(), *closed_form_cases()]
    answers = student.ask_all(case.question for case in cases)
    if not all([report(case, answer) for case, answer in zip(cases, answers, strict=True)]):
        print(f"Rotary embedding test FAILED: {diagnosis(cases, answers)}")
    elif trouble := student.end():
        print(f"Rotary embedding test FAILED: {trouble}")
    else:
        print("Rotary embedding test passed!")
        return True
    return False
