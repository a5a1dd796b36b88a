"""Each part of your code against numbers that others computed: `python -m pytest tests`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import adapters  # noqa: E402

from grading import adamw, parts, rotary  # noqa: E402
from grading import small_model as small  # noqa: E402
from grading.editions import DEFAULT_EDITION, EDITIONS, NORMS  # noqa: E402
from grading.verdicts import small_config  # noqa: E402

EDITION = EDITIONS[DEFAULT_EDITION]
KIND = EDITION.attention


@pytest.fixture(autouse=True)
def the_editions_norm() -> None:
    small.NORM.set(EDITION.norm)


def call(run: Callable, *arguments: object) -> tuple[torch.Tensor, ...]:
    """What a part returns; the test fails in one line if it is not written yet."""
    reason = ""
    try:
        with torch.no_grad():
            returned = run(*arguments)
    except NotImplementedError as error:
        reason = str(error)
    if reason:
        pytest.fail(reason, pytrace=False)
    return returned if isinstance(returned, tuple) else (returned,)


def check(part: str, run: Callable, *arguments: object) -> None:
    """Compare what a part returns with the right numbers."""
    expected, returned = parts.stored_numbers(EDITION.norm)[part], call(run, *arguments)
    for actual, right in zip(returned, expected, strict=False):
        torch.testing.assert_close(actual.double(), right.double(), atol=1e-5, rtol=1e-5)


def config() -> dict:
    return {**small_config(KIND), "dropout": 0.0}


def test_norm():
    check(NORMS[EDITION.norm], adapters.run_norm, small.below(small.small_weights(), "norm."), small.states(), 0.1)


def test_rope():
    check("rotary embedding", adapters.run_rope, *small.rotary_inputs(), small.HEAD_DIM, 16)


@pytest.mark.parametrize("case", rotary.closed_form_cases(), ids=lambda case: f"theta {case.theta:g}")
def test_rope_of_other_sizes(case: rotary.RotationCase):
    head_dim = case.query.shape[-1]
    turned = call(adapters.run_rope, case.query, case.key, head_dim, case.max_seq_len, case.theta)
    for actual, right in zip(turned, case.expected, strict=True):
        torch.testing.assert_close(actual.double(), right.double(), atol=1e-5, rtol=1e-5)


def test_scores():
    mask = (small.MASK.bool(),) if KIND == "causal" else ()  # a bidirectional model gives none
    check(f"scores and softmax, {KIND}", adapters.run_scores, config(), *small.score_inputs(), *mask)


def test_attention():
    weights = small.below(small.small_weights(), "layers.0.attention.")
    check(f"grouped queries, {KIND}", adapters.run_attention, config(), weights, small.states())


def test_layer():
    weights = small.below(small.small_weights(), "layers.0.")
    check(f"layer, {KIND}", adapters.run_layer, config(), weights, small.states())


def test_model():
    check(f"embedding and head, {KIND}", adapters.run_llama, config(), small.small_weights(), small.TOKENS)


def test_generate():
    inputs = small.small_weights(), small.PROMPTS[:1], small.NEW_TOKENS
    check(f"generate, {KIND}", adapters.run_generate, config(), *inputs, 0.0)


@pytest.mark.parametrize("case", adamw.CLIPPED_CASES if EDITION.clips else adamw.FEW_CASES)
def test_adamw(case: str):
    settings = adamw.CLIPPED_CASES[case]
    decays = ({}, adamw.BY_ALPHA) if EDITION.clips else ({},)
    (weights,) = call(adapters.run_adamw, adamw.FIRST_WEIGHTS, adamw.gradients(), settings)
    expected = [adamw.adamw(**settings, **decay) for decay in decays]
    assert any(torch.allclose(weights.double(), one, atol=1e-5) for one in expected), f"{weights}, not {expected[0]}"


def test_classifier():
    inputs = small.small_weights(), small.head_weights(), small.PADDED, small.PAD
    check(f"embedding classifier, {KIND}", adapters.run_classifier, config(), *inputs)
