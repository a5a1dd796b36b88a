"""FreeLB: the gradient is the mean of those at several perturbed embeddings of a text, each one found by climbing from
the one before (Zhu et al. 2020, "FreeLB", arXiv:1909.11764, algorithm 1).

With L the loss of the batch, X the embeddings of a text, d their perturbation and K steps:

    d_0 = U(-1, 1) * radius / sqrt(N)                           N: the numbers in X
    g   = 1 / K * sum over t < K of the gradient of L(X + d_t) for the weights
    d_t+1 = P(d_t + step * h / |h|),    h = the gradient of L(X + d_t) for d

|.| is the norm over all numbers of a text, and P scales d so that |d| is at most the radius. A pass gives both
gradients, so K ascents cost K steps of training. L is the loss with the penalties of all methods. Padding is not moved,
and its gradient, which a bidirectional Llama has, counts for nothing in h.

In paper and code sizes are absolute; here radius and step are in units of the norm of a token's embedding, so that they
mean the same in all checkpoints: a radius of .1 is 10 % of one token, shared by all of a text. All passes of a step
have the same dropout masks, as the paper wants it (section 3.3) and both versions of the authors' code do it. Their
code for RoBERTa makes K + 1 passes; the settings that they publish for ALBERT mostly have no radius (0 for no P).

Shapes: b batch   s position   D model dim
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from advanced.perturbation import PerturbingMethod, real_tokens
from engine.methods import Step, pretrained_of


class FreeLB(PerturbingMethod):
    """The paper's letters: steps K, radius epsilon, step alpha."""

    name = "freelb"

    def __init__(self, steps: int = 3, radius: float = 0.1, step: float = 0.05):
        super().__init__(steps=steps, radius=radius, step=step)
        self.steps, self.radius, self.step = steps, radius, step

    def gradients(self, step: Step, compute: Callable[[], float]) -> float:
        step.rewind()  # the same noise, however often the gradients are computed
        weights = [weight for weight in step.model.parameters() if weight.requires_grad]
        is_real, dim = real_tokens(step), pretrained_of(step.model).config.dim  # b s 1
        radius, climb = (size * math.sqrt(dim) for size in (self.radius, self.step))  # of the unit of a perturbation
        uniform = 2 * torch.special.ndtr(step.normal(is_real.shape[1], dim)) - 1  # b s D
        d = uniform * is_real * radius / (is_real.sum(dim=1, keepdim=True).clamp(min=1) * dim).sqrt()
        loss, sums = 0.0, {}
        for _ in range(self.steps):
            self.perturbation = d.detach().requires_grad_()
            try:
                loss += compute() / self.steps
                ascent = self.perturbation.grad * is_real  # b s D; a bidirectional model also reads padding
            finally:
                self.perturbation = None
            for weight in weights:
                if weight.grad is not None:
                    sums[weight] = sums.get(weight, 0.0) + weight.grad / self.steps
            d = within(d + climb * ascent / norms(ascent).clamp(min=torch.finfo(ascent.dtype).tiny), radius)
        for weight, mean in sums.items():
            weight.grad.copy_(mean)
        return loss


def norms(perturbation: torch.Tensor) -> torch.Tensor:
    """The norm of each text's perturbation. b s D -> b 1 1"""
    return torch.linalg.vector_norm(perturbation, dim=(1, 2), keepdim=True)


def within(perturbation: torch.Tensor, radius: float) -> torch.Tensor:
    """Scaled to the radius where it is longer. b s D -> b s D"""
    return perturbation * (radius / norms(perturbation).clamp(min=radius))
