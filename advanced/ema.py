"""An exponential moving average of the trained weights is what is evaluated and saved (Tarvainen & Valpola 2017,
"Mean teachers are better role models", arXiv:1703.01780, equation 1; for averages of weights in general Polyak &
Juditsky 1992).

After step t, with theta the weights that are trained:

    average_t = a_t * average_{t-1} + (1 - a_t) * theta_t,    a_t = min(decay, 1 - 1 / (t + 1))

At first the minimum makes it the mean of all weights so far, as in the authors' code. Without it the weights before
training would count for hundreds of steps. With `lora` A and B have an average each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from advanced.average import Weights, exchanged, follow, load_averages, trained_weights
from engine.methods import Method, Step


class EMA(Method):
    """decay: the share that stays of the average in each step, from 0 (no average at all) to below 1."""

    name = "ema"

    def __init__(self, decay: float = 0.99):
        super().__init__(decay=decay)
        self.decay = decay
        self.steps = 0
        self.average: Weights = {}

    def start(self, model: nn.Module) -> None:
        self.average = trained_weights(model)

    def after_step(self, step: Step) -> None:
        self.steps += 1
        follow(self.average, step.model, min(self.decay, 1 - 1 / (self.steps + 1)))

    def evaluation_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        return exchanged(self.average, model)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "average": self.average}

    def load_state(self, state: dict[str, Any], piece: Callable[..., torch.Tensor]) -> None:
        if not isinstance(state["steps"], int):
            raise ValueError("no number of steps")
        load_averages(self.average, state["average"], piece)
        self.steps = state["steps"]
