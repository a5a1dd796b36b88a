"""Asking a student's code by way of its `tests/adapters.py`, where it has another structure than the assignment.

Imported in the student's process. A question goes to the adapters only if the code lacks the module, name or argument
that it needs; the hand-out's adapters call the assignment's own names, and so fail as the code itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from grading.editions import ADAPTERS
from grading.returned import check_slope

STAND_INS = {"replaced", "table"}  # arguments of questions that adapters are not asked


def call(name: str, question: Callable, arguments: dict[str, Any]) -> Any:
    """The answer to a question, or that of the adapters. Raises the question's exception if they have none."""
    try:
        return question(**arguments)
    except (ImportError, AttributeError, TypeError) as error:
        path = Path(ADAPTERS).resolve()  # the process runs in the student's folder
        if name not in ADAPTED or STAND_INS & {*arguments} or not path.is_file():
            raise
        spec = importlib.util.spec_from_file_location("adapters", path)
        adapters = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(adapters)
        try:
            return ADAPTED[name](adapters, **arguments)
        except NotAdapted:
            raise error from None


class NotAdapted(Exception):
    """The adapters have no function for this form of a question."""


def norm(adapters: ModuleType, name: str, arguments: list, weights: dict, x: torch.Tensor) -> Any:
    if name == "FeedForward":
        raise NotAdapted
    return adapters.run_norm(weights, x, arguments[-1])


def rotate(adapters: ModuleType, theta: float | None = None, **inputs: Any) -> Any:
    return adapters.run_rope(**inputs, **({} if theta is None else {"theta": theta}))


def scores(adapters: ModuleType, mask: torch.Tensor | None = None, **inputs: Any) -> Any:
    """The mask is given as well where `run_scores` has an argument for it, and the function behind it takes it."""
    unmasked = adapters.run_scores(**inputs)
    if mask is not None and "mask" in inspect.signature(adapters.run_scores).parameters:
        with contextlib.suppress(TypeError):
            return unmasked, adapters.run_scores(**inputs, mask=mask.bool())
    return unmasked


def attention(adapters: ModuleType, **inputs: Any) -> Any:
    return adapters.run_attention(**inputs)


def layer(adapters: ModuleType, **inputs: Any) -> Any:
    return adapters.run_layer(**inputs)


def llama(adapters: ModuleType, config: dict, weights: dict, tokens: torch.Tensor) -> Any:
    logits, hidden = adapters.run_llama(config, weights, tokens)
    return logits, hidden, hidden @ weights["output.weight"].T


def generate(
    adapters: ModuleType, config: dict, weights: dict, tokens: torch.Tensor, new: int, hot: tuple = (1e-3, 1e4)
) -> Any:
    asked = [(row[None], 0.0) for row in tokens] + [(tokens[:1], temperature) for temperature in hot]
    return [adapters.run_generate(config, weights, text, new, temperature) for text, temperature in asked]


def few_steps(adapters: ModuleType, weights: torch.Tensor, gradients: torch.Tensor, **settings: Any) -> Any:
    if {"own", "late"} & {*settings}:
        raise NotAdapted
    return adapters.run_adamw(weights, gradients, settings)


def gradients(adapters: ModuleType, question: str, **arguments: Any) -> tuple:
    check_slope(lambda given: ADAPTED[question](adapters, **arguments | given), arguments)
    return ()


ADAPTED: dict[str, Callable] = {
    "norm_or_feed_forward": norm, "rotate": rotate, "scores": scores, "attention": attention, "layer": layer,
    "llama": llama, "generate": generate, "few_steps": few_steps, "gradients": gradients,
}  # fmt: skip
