"""An exponential moving average of the trained weights is what is evaluated and saved (Tarvainen & Valpola 2017,
"Mean teachers are better role models", arXiv:1703.01780, equation 1; for averages of weights in general Polyak &
Juditsky 1992).

After step t, with theta the weights that are trained:

    average_t = a_t * average_{t-1} + (1 - a_t) * theta_t,    a_t = min(decay, 1 - 1 / (t + 1))

The minimum, which the authors' code has too, makes it the true mean of what came so far at first: without it the
weights before training would count for hundreds of steps. With `lora` the averages are of A and of B, each by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from advanced.average import Weights, follow, load_averages, trained_weights
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

    @contextmanager
    def evaluation_weights(self, model: nn.Module) -> Iterator[None]:
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    @torch.no_grad()
    def _exchange(self, model: nn.Module) -> None:
        """The model has the average, and this the model's weights."""
        for name, average in self.average.items():
            weight = model.get_parameter(name)
            trained = weight.detach().clone()
            weight.copy_(average)
            average.copy_(trained)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "average": self.average}

    def load_state(self, state: dict[str, Any], piece: Callable[..., torch.Tensor]) -> None:
        if not isinstance(state["steps"], int):
            raise ValueError("no number of steps")
        load_averages(self.average, state["average"], piece)
        self.steps = state["steps"]
