"""WiSE-FT: a mixture of the pretrained and the fine-tuned weights (Wortsman et al. 2022, arXiv:2109.01903, section 3):

    theta = (1 - alpha) * theta_0 + alpha * theta_1

theta_0 are the weights before training, theta_1 the evaluation weights of the last epoch, for example their moving
average. Several alphas from 0 to 1, both ends included, are scored on the data that epochs are chosen on, which is held
out of the training data. The best mixture counts as one more epoch, so it is saved if it is better than every epoch.
Alpha = 1 is the last epoch itself, to the last bit: it is scored with the others and kept if none is better.
Among others with equal scores the one nearest to 1/2 is chosen, which the paper recommends without held-out data, and
of two equally near the larger one.

The head is not mixed, because its theta_0 is random, nor are tensors that other methods have added. A model that
predicts label words has no head and is mixed as a whole. Gains are expected on other data than was trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from engine.methods import Method, pretrained_of
from engine.weights import blueprint
from utils import join_names, warn


class WiSEFT(Method):
    """points: how many alphas are tried."""

    name = "wise-ft"

    def __init__(self, points: int = 11):
        super().__init__(points=points)
        self.alphas = [point / (points - 1) for point in range(points)]
        self.before: dict[str, torch.Tensor] = {}  # theta_0; a tied matrix is one of them, not two
        self.found: dict[str, Any] = {}

    def start(self, model: nn.Module) -> None:
        pretrained = pretrained_of(model)
        names = blueprint(pretrained.config, type(pretrained)).state_dict().keys()
        self.before = {
            name: parameter.detach().clone()
            for name, parameter in pretrained.named_parameters()
            if name in names and parameter.requires_grad
        }

    def finish(self, model: nn.Module, evaluate: Callable[[], float]) -> bool:
        pretrained, scores = pretrained_of(model), []
        after = {name: pretrained.get_parameter(name).detach().clone() for name in self.before}
        for alpha in self.alphas:
            self.mix(pretrained, after, alpha)
            scores.append(evaluate())
        alpha = best_of(self.alphas, scores)
        self.found = {"alphas": self.alphas, "scores": scores, "alpha": alpha}
        self.mix(pretrained, after, alpha)
        if alpha == 0.0:
            warn(f"wise-ft: no mixture scores better than the pretrained weights; {self.what_is_left(model)}")
        return alpha < 1.0

    def what_is_left(self, model: nn.Module) -> str:
        """In words, what training has changed if alpha is 0."""
        mixed = {pretrained_of(model).get_parameter(name) for name in self.before}
        trained = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
        kept = [name for name, each in trained if each not in mixed]
        return f"of the training only {join_names(kept)} is left" if kept else "nothing is left of the training"

    @torch.no_grad()
    def mix(self, pretrained: nn.Module, after: dict[str, torch.Tensor], alpha: float) -> None:
        """Give the model theta. lerp returns its ends exactly."""
        for name, before in self.before.items():
            pretrained.get_parameter(name).copy_(torch.lerp(before, after[name], alpha))

    def figures(self) -> dict[str, Any]:
        return self.found

    def state(self) -> dict[str, Any]:
        return {"found": self.found}

    def load_state(self, state: dict[str, Any], piece: Callable[..., torch.Tensor]) -> None:
        found = state["found"]
        if found and (found.keys() != {"alphas", "scores", "alpha"} or found["alphas"] != self.alphas):
            raise ValueError("the mixtures of another run")
        self.found = found


def best_of(alphas: list[float], scores: list[float]) -> float:
    """The alpha of the highest score; of equal ones 1, else the one nearest to 1/2, else the larger one.

    alphas: evenly spaced from 0 to 1.
    """

    last = len(alphas) - 1

    def order(place: int) -> tuple[float, bool, int, int]:
        return scores[place], place == last, -abs(2 * place - last), place  # whole numbers: .8 is as near to 1/2 as .2

    return alphas[max(range(len(alphas)), key=order)]
