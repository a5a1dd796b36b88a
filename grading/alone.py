"""Parts that are asked alone: the questions with stand-ins, and the numbers that right and wrong code give with them.

`judge` asks so where a part that another one needs is wrong: the mistake of the second is then found as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from grading import mistakes, stand_ins
from grading import small_model as small
from grading.asking import ChildQuestion
from grading.checked import Alone, with_mistakes
from grading.small_model import DIM, VOCAB_SIZE, closed_form

LAYER_NAMES = ("attention", "feed_forward", "attention_norm", "ffn_norm")
MODEL_NAMES = ("layers.0", "layers.1", "norm")


def matrices(names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """A matrix for each part that a `stand_ins.Product` replaces."""
    return {name: closed_form(f"stand-in {name}", DIM, DIM, scale=0.5) for name in names}


def table() -> torch.Tensor:
    """What `stand_ins.summed` reads. v D"""
    return closed_form("stand-in table", VOCAB_SIZE, DIM, scale=0.1)


def attention_alone(question: ChildQuestion) -> Alone:
    inputs = question.tensors["x"].double(), small.in_double(question.tensors["weights"])
    table = {said: wrong for said, wrong in mistakes.ATTENTION_MISTAKES.items()
             if {*wrong} <= {"split", "spread", "merge", "project"}}  # fmt: skip
    for said, give in mistakes.TURN_MISTAKES.items():
        table[said] = dict(turn=partial(give, turn=stand_ins.turned))
    wrong = with_mistakes(_attention, table, *inputs)
    return Alone(question._replace(name="attention_alone"), partial(_attention, *inputs), wrong)


def _attention(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    turn: Callable = lambda q, k, v: (*stand_ins.turned(q, k), v),
    **wrong: Callable,
) -> torch.Tensor:
    """`small.attention` with the stand-ins for rotation and scores."""
    return small.attention(x, weights, False, turn=turn, attend=_attended, **wrong)


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
    return stand_ins.attended(query, key, value)


def layer_alone(question: ChildQuestion) -> Alone:
    given = matrices(LAYER_NAMES)
    parts = (stand_ins.Product(given[name].double()) for name in LAYER_NAMES)
    inputs = (question.tensors["x"].double(), *parts)
    asked = question._replace(tensors={**question.tensors, "replaced": given})
    wrong = with_mistakes(small.assembled, mistakes.LAYER_HALVES, *inputs)
    return Alone(asked, partial(small.assembled, *inputs), wrong)


def model_alone(question: ChildQuestion) -> Alone:
    given = matrices(MODEL_NAMES)
    parts = [stand_ins.Product(given[name].double()) for name in MODEL_NAMES]
    replaced = dict(layer=lambda h, weights, index, causal: parts[index](h), norm=lambda h, weights, eps: parts[2](h))
    inputs = (question.tensors["tokens"], False)
    asked = question._replace(tensors={**question.tensors, "replaced": given})
    wrong = with_mistakes(small.llama, mistakes.LLAMA_MISTAKES, *inputs, **replaced)
    return Alone(asked, partial(small.llama, *inputs, **replaced), wrong)


def generate_alone(question: ChildQuestion, causal: bool) -> Alone:
    wrong = with_mistakes(small.generate, mistakes.GENERATE_MISTAKES, causal, logits=_summed_logits)
    return Alone(with_table(question), partial(small.generate, causal, logits=_summed_logits), wrong)


def _summed(tokens: torch.Tensor, causal: bool) -> torch.Tensor:
    return stand_ins.summed(table().double(), tokens)


def _summed_logits(tokens: torch.Tensor, causal: bool) -> torch.Tensor:
    return _summed(tokens, causal)[:, [-1]] @ small.small_weights()["output.weight"].double().T


def zero_shot_alone(question: ChildQuestion, causal: bool) -> Alone:
    wrong = with_mistakes(small.zero_shot, mistakes.ZERO_SHOT_MISTAKES, causal, states=_summed)
    return Alone(with_table(question), partial(small.zero_shot, causal, states=_summed), wrong)


def embedding_alone(question: ChildQuestion, causal: bool) -> Alone:
    wrong = with_mistakes(small.embedding, mistakes.EMBEDDING_MISTAKES, causal, states=_summed)
    return Alone(with_table(question), partial(small.embedding, causal, states=_summed), wrong)


def with_table(question: ChildQuestion) -> ChildQuestion:
    return question._replace(tensors={**question.tensors, "table": table()})
