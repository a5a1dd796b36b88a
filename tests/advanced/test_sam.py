"""SAM: the gradient that it follows, against a closed form and a slow loop without hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from steps import step_of
from test_contract import Laboratory, laboratory  # noqa: F401 (a fixture)
from test_methods import classifier
from torch import nn

from advanced import choose
from advanced.sam import SAM
from engine import families, runs
from engine.data import create_data
from engine.runs import loader_of
from optimizer import AdamW

Loss = Callable[[nn.Module, dict[str, Any]], torch.Tensor]


def assembled(laboratory: Laboratory, names: str, assignments: tuple[str, ...] = ()) -> runs.Run:
    """One epoch with dropout; the first layer is frozen."""
    plan = laboratory.plan("", epochs=1, hidden_dropout_prob=0.3)
    run = laboratory.assemble(replace(plan, methods=choose(names, assignments) if names else ()))
    run.model.llama.layers[0].requires_grad_(False)
    return run


def fitted(run: runs.Run) -> nn.Module:
    data = families.encode_for(run.model, run.tokenizer, create_data(run.plan.train.path))
    list(runs.fine_tune(run, data, data, None))
    return run.model


def slow_sam(run: runs.Run, loss: Loss, rho: float) -> nn.Module:
    """The same epoch: two passes with the same random numbers, the second one at moved weights."""
    model, data = run.model, families.encode_for(run.model, run.tokenizer, create_data(run.plan.train.path))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = AdamW(trained.values(), lr=run.plan.lr)
    model.train()
    for batch in loader_of(data, run.config, 4, torch.device("cpu"), shuffle=True):
        before = torch.get_rng_state()
        first = torch.autograd.grad(loss(model, batch), [*trained.values()])
        norm = torch.cat([each.flatten() for each in first]).norm()
        own = {name: weight.detach().clone() for name, weight in trained.items()}
        moved = {name: own[name] + rho * each / norm for name, each in zip(own, first, strict=True)}
        model.load_state_dict(moved, strict=False)
        torch.set_rng_state(before)
        second = torch.autograd.grad(loss(model, batch), [*trained.values()])
        model.load_state_dict(own, strict=False)
        for weight, gradient in zip(trained.values(), second, strict=True):
            weight.grad = gradient
        optimizer.step()
    return model


def plain_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return F.nll_loss(model(batch["token_ids"]), batch["labels"], reduction="sum") / 4


def loss_of_r_drop(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    first, other = (model(batch["token_ids"]) for _ in range(2))
    divergence = sum(F.kl_div(q, p, log_target=True, reduction="sum") for p, q in ((first, other), (other, first)))
    return sum(F.nll_loss(each, batch["labels"], reduction="sum") / 4 for each in (first, other)) + divergence / 8


@pytest.mark.parametrize(("names", "loss"), [("sam", plain_loss), ("r-drop,sam", loss_of_r_drop)])
def test_every_step_is_that_of_two_slow_passes(laboratory: Laboratory, names: str, loss: Loss):
    """With dropout, a frozen layer, and a penalty that draws masks of its own."""
    model = fitted(assembled(laboratory, names, ("sam.rho=0.5",)))
    slow = slow_sam(assembled(laboratory, ""), loss, 0.5)
    for name, weight in slow.state_dict().items():  # Adam makes much of the rounding of a small gradient
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-4, atol=3e-4)
    plain = fitted(assembled(laboratory, names.removesuffix("sam").removesuffix(",")))
    assert (plain.classifier_head.weight - model.classifier_head.weight).abs().max() > 1e-2


def test_on_a_quadratic_the_gradient_is_the_closed_form_and_the_weights_stay():
    """L = w' A w / 2, whose gradient is A w: at w + rho A w / |A w|."""
    model, matrix = classifier().double().requires_grad_(False), torch.tensor([[3.0, 1.0], [1.0, 2.0]]).double()
    model.register_parameter("w", nn.Parameter(torch.tensor([0.3, -1.1]).double()))
    before = model.w.detach().clone()

    def compute() -> float:
        loss = model.w @ matrix @ model.w / 2
        (model.w.grad,) = torch.autograd.grad(loss, model.w)
        return loss.item()

    loss = SAM(rho=0.2).gradients(step_of(model), compute)
    uphill = matrix @ before
    torch.testing.assert_close(model.w.grad, matrix @ (before + 0.2 * uphill / uphill.norm()))
    assert torch.equal(model.w, before) and loss == pytest.approx((before @ matrix @ before / 2).item())
    with torch.no_grad():
        model.w.zero_()  # the lowest point: nowhere is up
    SAM(rho=0.2).gradients(step_of(model), compute)
    assert not model.w.any() and not model.w.grad.any()
