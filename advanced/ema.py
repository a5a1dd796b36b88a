"""An exponential moving average of the trained weights is what is evaluated and saved (Tarvainen & Valpola 2017,
"Mean teachers are better role models", arXiv:1703.01780, equation 1; for averages of weights in general Polyak &
Juditsky 1992).

After step t, with theta the weights that are trained:

    average_t = a_t * average_{t-1} + (1 - a_t) * theta_t,    a_t = min(decay, 1 - 1 / (t + 1))

At first the minimum makes it the mean of all weights so far, as in the authors' code. Without it the weights before
training would count for hundreds of steps. With `lora` A and B have an average each.
"""

from __future__ import annotations

from advanced.average import AveragingMethod, follow
from engine.methods import Step


class EMA(AveragingMethod):
    """decay: the share that stays of the average in each step, from 0 (no average at all) to below 1."""

    name = "ema"

    def __init__(self, decay: float = 0.99):
        super().__init__(decay=decay)
        self.decay = decay

    def after_step(self, step: Step) -> None:
        self.steps += 1
        follow(self.average, step.model, min(self.decay, 1 - 1 / (self.steps + 1)))
