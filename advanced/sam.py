"""SAM: the gradient of the worst weights nearby is the one that is followed (Foret et al. 2021, "Sharpness-Aware
Minimization", arXiv:2010.01412, equations 2 and 3 with p = 2).

With L the loss of the batch and g its gradient at the weights w, each step takes the gradient

    g_SAM = gradient of L at w + e,    e = rho * g / |g|

in the place of g, and applies it to w. |g| is the norm of all gradients together. L is the loss with the penalties of
all methods, and both passes have the same dropout masks and other random numbers, so that e climbs the function whose
gradient is taken. Frozen weights do not move. AdamW's weight decay is no part of L.

The authors' code has the same masks in both passes, too, and an L2 term in L. On several devices it takes an e of each
device's own rows; here e is that of the whole batch, so the number of processes does not change the result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.methods import Method, Step
from engine.processes import gradient_norm


class SAM(Method):
    """rho: how far the weights move, as the norm of all movements together."""

    name = "sam"

    def __init__(self, rho: float = 0.05):
        super().__init__(rho=rho)
        self.rho = rho

    def gradients(self, step: Step, compute: Callable[[], float]) -> float:
        loss = compute()
        weights = [weight for weight in step.model.parameters() if weight.grad is not None]
        norm = gradient_norm(weights)
        if norm == 0.0:  # e has no direction
            return loss
        before = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.add_(weight.grad, alpha=self.rho / norm)
        try:
            compute()
        finally:
            with torch.no_grad():
                for weight, own in zip(weights, before, strict=True):
                    weight.copy_(own)  # subtracting e again would leave its rounding
        return loss
