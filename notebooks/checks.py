"""What the notebook asks of its reader's code: the questions of `grading/`, answered in this process.

A check puts the reader's functions in the places of the package's own. If their numbers are right they stay there, so
that all later cells compute with the reader's code. If not, the package's own come back, and a sentence says why.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

import llama
import rope
from grading import adamw, questions, wire
from grading.editions import ATTENTION_KINDS
from grading.parts import all_parts, judge_parts, stored_numbers
from grading.rotary import alike
from grading.student_process import ChildAnswer, ChildQuestion, flat_tensors, without_given

Function = Callable[..., Any]
STAND_IN, NONE_FITS = "the package's own code is used", "no usual mistake gives these numbers"


def check(part: str, place: Any, *functions: Function) -> None:
    """Judge the reader's functions and print the verdict. place: the class or module whose functions they replace."""
    if any(map(is_blank, functions)):
        print(f"{part}: not written yet; {STAND_IN}")
        return
    with replaced(place, *functions):
        fault = fault_of(part)
    if not fault:
        _put(place, {function.__name__: function for function in functions})
    print(f"{part}: {f'WRONG: {fault} (so {STAND_IN})' if fault else 'right'}")


def check_small(part: str, function: Function) -> Function:
    """Judge a function that is not in the package. Returns it, or one that is right if it is not."""
    own = attend_by_hand if part == "one head" else SMALL_EXERCISES[part].right
    if is_blank(function):
        print(f"{part}: not written yet; one that is right is used")
        return own
    fault = head_fault(function) if part == "one head" else small_fault(part, function)
    print(f"{part}: {f'WRONG: {fault} (so one that is right is used)' if fault else 'right'}")
    return own if fault else function


def is_blank(function: Function) -> bool:
    """Whether a line of a function is still `...`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # no source, or a lambda in the middle of a line
        return False
    return any(isinstance(node, ast.Expr) and getattr(node.value, "value", 0) is ... for node in ast.walk(tree))


@contextmanager
def replaced(place: Any, *functions: Function) -> Iterator[None]:
    """In a `with` block: these functions in the places of those of the same names in a class or module."""
    own = {function.__name__: getattr(place, function.__name__) for function in functions}
    _put(place, {function.__name__: function for function in functions})
    try:
        yield
    finally:
        _put(place, own)


def _put(place: Any, functions: dict[str, Function]) -> None:
    for name, function in functions.items():
        for each in (place, llama) if place is rope else (place,):  # llama.py has imported it from rope.py
            setattr(each, name, function)


# ------------------------------------------------------------------------------------------ the grader's questions


class ReadersCode:
    """In the place of grading's `Student`: asks the code of this process, without a pipe and without a time limit."""

    def ask(self, question: ChildQuestion) -> ChildAnswer:
        asked = {"question": question.name, "settings": question.settings}
        header, data = wire.parse(wire.pack(asked, flat_tensors(question.tensors)))
        try:
            tensors = questions.answer(header, data)
        except questions.Wrong as error:
            return ChildAnswer(trouble=str(error))
        except Exception as error:  # whatever the reader's code raises
            return ChildAnswer(trouble=told(error))
        return without_given(ChildAnswer(tuple(tensors.values()), names=tuple(tensors)), question)

    def ask_all(self, asked: list[ChildQuestion]) -> list[ChildAnswer]:
        return [self.ask(question) for question in asked]


def told(error: Exception) -> str:
    """An exception with the innermost line of a cell that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    cells = [one.line for one in frames if "ipykernel" in one.filename or one.filename.startswith("<")]
    where = f" at `{cells[-1]}`" if cells and cells[-1] else ""
    hint = "; is a `return` missing?" if "NoneType" in str(error) else ""
    return f"{type(error).__name__}{where}: {error}{hint}"


def fault_of(part: str) -> str:
    """What the grader says of this part of the package as it now is in this process; "" if it is right."""
    if part == "AdamW":
        is_right, mistake, decay = adamw.check_few_steps(ReadersCode(), clips=False)
        unclear = f"{NONE_FITS}; see the lines above"
        return adamw.late_or_grouped_fault(ReadersCode(), decay) if is_right else mistake or unclear
    return _first_fault(part, ATTENTION_KINDS)


def _first_fault(part: str, kinds: tuple[str, ...]) -> str:
    parts = [one for one in all_parts(kinds) if one.name.partition(",")[0] == part]
    findings = judge_parts(ReadersCode(), parts, stored_numbers())
    return next((one.sentence for one in findings if one.verdict != "ok"), "")


def head_fault(attend: Function) -> str:
    """What the grader says of one causal head, a function of query, key and value."""

    def compute_query_key_value_scores(self, query, key, value):
        return attend(query, key, value)

    with replaced(llama.Attention, compute_query_key_value_scores):
        return _first_fault("scores and softmax", ("causal",))


# -------------------------------------------------------------------------- exercises that the assignment has not


def attend_by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One causal head. ... s d"""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    return scores.masked_fill(~llama.causal_mask(scores.shape[-1]), -math.inf).softmax(-1) @ value


class SmallExercise(NamedTuple):
    """A function of one's own: inputs, the right result, and what each usual mistake gives."""

    inputs: tuple
    right: Function
    mistakes: dict[str, Function]


def count_by_hand(ids: torch.Tensor, v: int) -> torch.Tensor:
    """How often each token follows each, one pair after the other."""
    counts = torch.zeros(v, v)
    for first, second in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True):
        counts[first, second] += 1
    return counts


def loss_by_hand(p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    pairs = zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True)
    return -torch.stack([p[first, second].log() for first, second in pairs]).mean()


SMALL_IDS = torch.tensor((0, 1, 2, 1, 2, 2, 0, 1, 3))
SMALL_COUNTS = count_by_hand(SMALL_IDS, 4)
SMALL_TABLE = (SMALL_COUNTS + 1) / (SMALL_COUNTS + 1).sum(-1, keepdim=True)
SMALL_EXERCISES = {
    "counts": SmallExercise((SMALL_IDS, 4), count_by_hand, {
        "rows and columns are exchanged: counts[a, b] is how often b follows a":
            lambda ids, v: count_by_hand(ids, v).T,
        "a pair that stands twice is counted once: += with indices does not add up; use index_put_, accumulate=True":
            lambda ids, v: count_by_hand(ids, v).clamp(max=1),
        "the last token is followed by the first; no such pair is in the text":
            lambda ids, v: count_by_hand(torch.cat((ids, ids[:1])), v),
        "each token is paired with itself: shift one of the two by one":
            lambda ids, v: torch.bincount(ids, minlength=v).float().diag(),
    }),
    "probabilities": SmallExercise((SMALL_COUNTS,), lambda counts: (counts + 1) / (counts + 1).sum(-1, keepdim=True), {
        "a pair that was never seen has probability 0, and its loss is infinite: add 1 to every count":
            lambda counts: counts / counts.sum(-1, keepdim=True),
        "columns sum to 1, rows should: sum over dim=-1": lambda counts: (counts + 1) / (counts + 1).sum(0),
        "columns are divided by the sums of rows: the sum lacks keepdim=True":
            lambda counts: (counts + 1) / (counts + 1).sum(-1),
        "the whole table sums to 1, each row should": lambda counts: (counts + 1) / (counts + 1).sum(),
        "1 is added to the counts, but not in the sums, so that rows sum to more than 1":
            lambda counts: (counts + 1) / counts.sum(-1, keepdim=True),
        "rows do not sum to 1: (counts + 1) / ... needs the parentheses":
            lambda counts: counts + 1 / counts.sum(-1, keepdim=True),
        "softmax is for logits; counts are divided by their sum": lambda counts: (counts + 1).softmax(-1),
    }),
    "mean loss": SmallExercise((SMALL_TABLE, SMALL_IDS), loss_by_hand, {
        "the sign is missing: a log-probability is negative, a loss is positive": lambda p, ids: -loss_by_hand(p, ids),
        "losses are summed, not averaged": lambda p, ids: loss_by_hand(p, ids) * (len(ids) - 1),
        "the log is missing: it is a mean of probabilities": lambda p, ids: -p[ids[:-1], ids[1:]].mean(),
        "the log is taken of the mean; take the mean of the logs": lambda p, ids: -p[ids[:-1], ids[1:]].mean().log(),
        "the table is read as p[next, token]; it is p[token, next]": lambda p, ids: loss_by_hand(p.T, ids),
        "the logarithm has base 2; it is the natural one": lambda p, ids: loss_by_hand(p, ids) / math.log(2),
        "there are len(ids) - 1 pairs, not len(ids)": lambda p, ids: loss_by_hand(p, ids) * (1 - 1 / len(ids)),
        "each token is paired with itself; shift one of the two by one": lambda p, ids: -p[ids, ids].log().mean(),
        "p holds probabilities, and F.cross_entropy takes logits":
            lambda p, ids: torch.nn.functional.cross_entropy(p[ids[:-1]], ids[1:]),
    }),
}  # fmt: skip


def small_fault(part: str, function: Function) -> str:
    """The usual mistake that gives what this function returns, or what else is wrong; "" if nothing is."""
    inputs, right, mistakes = SMALL_EXERCISES[part]
    given = [each.clone() if isinstance(each, torch.Tensor) else each for each in inputs]  # a function may change it
    try:
        returned = function(*given)
        returned = questions.numbers_of(torch.tensor(returned) if isinstance(returned, float) else returned, None)
    except questions.Wrong as error:
        return str(error)
    except Exception as error:  # whatever the reader's code raises
        return told(error)
    if alike((returned,), (right(*inputs),)):
        return ""
    if returned.shape != right(*inputs).shape:
        return f"it returns {[*returned.shape]} numbers, not {[*right(*inputs).shape]}"
    fitting = (said for said, wrong in mistakes.items() if alike((returned,), (wrong(*inputs),)))
    return next(fitting, NONE_FITS)
