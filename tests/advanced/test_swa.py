"""SWA: the mean that is evaluated is that of the weights after the steps of the last part."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_contract import Laboratory, laboratory  # noqa: F401 (a fixture)

from advanced import choose
from engine.methods import Method, Step
from utils import UserError

NAME = "llama.layers.1.feed_forward.w2.weight"


class Recorder(Method):
    """The weights after each step."""

    name = "recorder"

    def __init__(self):
        super().__init__()
        self.weights: list[torch.Tensor] = []

    def after_step(self, step: Step) -> None:
        self.weights.append(step.model.get_parameter(NAME).detach().clone())


@pytest.mark.parametrize(
    ("assignments", "averaged"),
    [
        (["start=0.5"], range(9, 18)),
        (["start=0.34"], range(6, 18)),
        (["start=0"], range(18)),
        (["start=0.5", "every=epoch"], (11, 17)),
        (["every=epoch"], (17,)),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else "",
)
def test_the_mean_is_that_of_the_weights_after_the_last_steps(
    laboratory: Laboratory, assignments: list[str], averaged: range, monkeypatch: pytest.MonkeyPatch
):
    """Three epochs of six steps; in each, what is judged is the mean so far, or the model where there is none."""
    plan = replace(laboratory.plan("", epochs=3), methods=choose("swa", assignments))
    run, recorder, judged = laboratory.assemble(plan), Recorder(), []
    run.trainer.methods.append(recorder)
    evaluate = run.trainer.evaluate

    def judging(*args: object) -> object:
        judged.append(run.model.get_parameter(NAME).detach().clone())
        return evaluate(*args)

    monkeypatch.setattr(run.trainer, "evaluate", judging)
    laboratory.train(run, laboratory.checkpointer(run))
    assert len(recorder.weights) == 18 and len(judged) == 3
    for steps, weight in zip((6, 12, 18), judged, strict=True):
        so_far = [recorder.weights[number] for number in averaged if number < steps]
        expected = torch.stack(so_far).mean(dim=0) if so_far else recorder.weights[steps - 1]
        torch.testing.assert_close(weight, expected)
    assert torch.equal(run.model.get_parameter(NAME), recorder.weights[-1])  # training goes on from its own weights


def test_a_rate_that_falls_is_refused():
    with pytest.raises(
        UserError, match="swa: it cannot be combined with schedule.decay=cosine, .*; add schedule.decay=none"
    ):
        choose("swa,schedule")
    assert len(choose("swa,schedule", ["decay=none"])) == 2
    with pytest.raises(UserError, match="ema and swa cannot be combined: each says which average is evaluated"):
        choose("ema,swa")
