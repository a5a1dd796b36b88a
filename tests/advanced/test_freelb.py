"""FreeLB: its gradient against a slow loop that looks the embeddings up without a hook."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from error_helpers import refused
from steps import move, prepared, step_of
from test_contract import Laboratory, laboratory  # noqa: F401 (a fixture)
from test_methods import LABELS, TOKENS
from test_sam import assembled, fitted
from test_smart import BOTH, IS_PAD, double, moved_by_hand
from torch import nn

from advanced import choose
from advanced.freelb import FreeLB
from engine.methods import Step


def computing(model: nn.Module, step: Step) -> float:
    """As a trainer computes gradients."""
    model.zero_grad()
    step.rewind()
    loss = F.nll_loss(step.task.forward(model, step.batch), LABELS)
    loss.backward()
    step.normal(2)  # as a penalty may draw
    return loss.item()


def slow_gradients(
    model: nn.Module, steps: int, radius: float, climb: float
) -> tuple[list[torch.Tensor], float, torch.Tensor]:
    """Algorithm 1, text by text where norms are concerned; with the last perturbation. The step's seed is 3.

    Only the tokens of a text are climbed with. A bidirectional model reads padding, so the loss has a gradient there.
    """
    dim, is_real, sizes = 32, (~IS_PAD)[..., None], (~IS_PAD).sum(dim=1).tolist()
    normal = torch.randn(3, 5, dim, generator=torch.Generator().manual_seed(3 * 1_000_003))
    d = torch.erf(normal / math.sqrt(2)) * is_real  # U(-1, 1)
    for text, size in enumerate(sizes):
        d[text] *= radius * math.sqrt(dim) / math.sqrt(size * dim)
    weights, sums, losses = [*model.parameters()], None, []
    for _ in range(steps):
        d = d.detach().double().requires_grad_()
        loss = F.nll_loss(moved_by_hand(model, TOKENS, d), LABELS)
        *found, ascent = torch.autograd.grad(loss, [*weights, d])
        sums = found if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
        losses.append(loss.item())
        last, d = d.detach(), d.detach().clone()
        for text, size in enumerate(sizes):
            up = ascent[text, :size]
            d[text, :size] += climb * math.sqrt(dim) * up / up.norm()
            d[text] *= min(1.0, radius * math.sqrt(dim) / d[text].norm().item())
    return [each / steps for each in sums], sum(losses) / steps, last


@BOTH
@pytest.mark.parametrize(("steps", "radius", "climb"), [(1, 0.3, 0.1), (3, 0.3, 0.2), (4, 0.05, 0.2)])
def test_the_gradient_is_the_mean_along_the_ascent(attention: str, steps: int, radius: float, climb: float):
    model = prepared(double(attention), method := FreeLB(steps, radius, climb))
    move(model, 0.02)
    step = step_of(model)
    plain = computing(model, step)
    loss = method.gradients(step, lambda: computing(model, step))
    expected, expected_loss, last = slow_gradients(model, steps, radius, climb)
    assert loss == pytest.approx(expected_loss, rel=1e-5) and method.perturbation is None
    for weight, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-7)
    if steps > 1:
        assert loss > plain  # it climbs
        lengths = last.flatten(1).norm(dim=1)
        assert (lengths <= radius * math.sqrt(32) * 1.0001).all() and not last[IS_PAD].any()
    again = method.gradients(step, lambda: computing(model, step))
    assert again == loss  # the same noise


@pytest.mark.parametrize("other", ["self-training", "distill"])
def test_other_sentences_than_those_of_the_batch_are_not_moved(other: str):
    refused(f"freelb and {other} cannot be combined: freelb moves the texts of a batch", choose, f"freelb,{other}")


def test_all_passes_of_a_step_have_the_same_dropout_masks(laboratory: Laboratory):
    """With next to no perturbation, the mean of three gradients is the plain one; with the default it is another."""
    plain, tiny, default = (
        fitted(assembled(laboratory, names, given)).classifier_head.weight
        for names, given in (("", ()), ("freelb", ("radius=1e-6",)), ("freelb", ()))
    )
    torch.testing.assert_close(tiny, plain, rtol=0, atol=1e-3)
    assert (default - plain).abs().max() > 1e-2
