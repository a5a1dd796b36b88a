"""A linear head solved in the place of trained: logistic regression on the states that it reads, by scikit-learn.

    min over W, b:  |W|^2 / 2 + C * sum over the texts of -log softmax(W z + b)_y,    z = (h - mean) / deviation

h is what the head reads of a text in evaluation mode, whatever the way of reading; the weights below it stay. mean is
that of all texts, a vector, and deviation one number for all of h - mean, so that one C means the same in all models;
W and b are then rewritten for h. C is chosen by cross-validation on the training texts alone: from the smallest on, as
long as the log-likelihood of the texts that are left out rises. There are fewer folds if a class has few texts; with a
single text in one, C is 1.

The logits of the classes that occur are centred (softmax does not see it), so a class without a text, whose logit is 0,
is never the likeliest.

Shapes: n texts   D model dim   c classes
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from engine.methods import Method, pretrained_of
from engine.processes import SINGLE_PROCESS, Distributed, device_of, on_device
from engine.runs import loader_of
from utils import UserError

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

HEADS = ("classifier_head", "classifier")  # possible names of the linear head in a classifier
STRENGTHS = tuple(10.0**power for power in range(-4, 5))  # of C
DEFAULT_STRENGTH = 1.0
FOLDS = 5
ITERATIONS = 1000  # of the solver, at most


def head_of(model: nn.Module) -> nn.Linear:
    """The linear head of a classifier. Raises `UserError` if it has none."""
    for name in HEADS:
        if hasattr(model, name):
            return getattr(model, name)
    raise UserError("this classifier has no linear head that could be solved")


@torch.no_grad()  # inference mode would leave a split model with tensors that cannot be trained
def frozen_states(
    model: nn.Module, loader: DataLoader, distributed: Distributed = SINGLE_PROCESS
) -> tuple[np.ndarray, np.ndarray]:
    """What the head reads of each text, in the order of the data set, and the labels: n D and n.

    Leaves the model in evaluation mode. Every one of several processes computes all texts.
    """
    labels, found = np.array(loader.dataset.labels), {}
    hook = head_of(model.eval()).register_forward_pre_hook(lambda head, inputs: read.append(inputs[0]))
    try:
        for batch in loader:
            read: list[torch.Tensor] = []
            distributed.network(model)(on_device(batch, device_of(model))["token_ids"])
            found |= zip(batch["indices"], read[0].double().cpu().numpy(), strict=True)
    finally:
        hook.remove()
    return np.stack([found[index] for index in range(len(labels))]), labels


def solve(
    states: np.ndarray, labels: np.ndarray, num_labels: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, float]:
    """The weight c D and the bias c of the head, and the chosen C. states: n D, labels: n. seed: of the folds.

    Raises `UserError` if all labels are equal.
    """
    present, mean = np.unique(labels), states.mean(axis=0)
    if len(present) < 2:
        raise UserError("all training texts have the same label, so there is no head to solve")
    deviation = (states - mean).std() or 1.0
    states = (states - mean) / deviation
    with on_one_thread():
        strength = chosen_strength(states, labels, seed)
        solution = _regression(strength).fit(states, labels)
    weight, bias = np.zeros((num_labels, len(mean))), np.zeros(num_labels)
    for of_all, solved in ((weight, solution.coef_), (bias, solution.intercept_)):
        if len(present) == 2:  # scikit-learn has the difference of the two
            solved = np.concatenate((np.zeros_like(solved), solved))
        of_all[present] = solved - solved.mean(axis=0)
    weight /= deviation
    return weight, bias - weight @ mean, strength


def chosen_strength(states: np.ndarray, labels: np.ndarray, seed: int) -> float:
    """The C before the first one that predicts left-out texts worse; of equals the smaller one."""
    from sklearn.model_selection import StratifiedKFold, cross_val_score

    folds = min(FOLDS, np.unique(labels, return_counts=True)[1].min())
    if folds < 2:
        return DEFAULT_STRENGTH
    split, best = StratifiedKFold(folds, shuffle=True, random_state=seed), -np.inf
    for number, strength in enumerate(STRENGTHS):
        score = cross_val_score(_regression(strength), states, labels, cv=split, scoring="neg_log_loss").mean()
        if score <= best:
            return STRENGTHS[number - 1]
        best = score
    return STRENGTHS[-1]


def on_one_thread() -> threadpool_limits:
    """A context in which scikit-learn's solver has one thread: its steps are so short that two threads only wait.

    On two idle cores 1,700 states of 384 numbers take 0.3 s, with two threads 2.7 s; 8,544 take 4.1 s, and 6.6 s.
    """
    import sklearn.linear_model  # noqa: F401 (it loads the library whose threads are limited)
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1, "blas")


def _regression(strength: float) -> LogisticRegression:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=strength, max_iter=ITERATIONS)


def solve_head(model: nn.Module, train: DataLoader, distributed: Distributed = SINGLE_PROCESS) -> float:
    """Give the head of a classifier the solution for the texts of a loader. Returns the chosen C."""
    config, size = pretrained_of(model).config, train.batch_sampler.batch_size
    loader = loader_of(train.dataset, config, size, device_of(model))  # in an order that is not drawn
    states, labels = frozen_states(model, loader, distributed)

    def solution() -> tuple[torch.Tensor, torch.Tensor, float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a solver that has not converged is near enough
            weight, bias, strength = solve(states, labels, head_of(model).out_features)
        return torch.from_numpy(weight), torch.from_numpy(bias), strength

    weight, bias, strength = distributed.from_first(solution)
    with torch.no_grad():
        for parameter, solved in ((head_of(model).weight, weight), (head_of(model).bias, bias)):
            parameter.copy_(distributed.piece(solved, parameter))
    return strength


class SolvedHead(Method):
    """Solves the head before the first step. strength: the chosen C; None: no head was solved."""

    is_solved = True
    strength: float | None = None

    def begin(self, model: nn.Module, train: DataLoader, distributed: Distributed) -> None:
        if self.is_solved:
            self.strength = solve_head(model, train, distributed)

    def figures(self) -> dict[str, Any]:
        return {"C": f"{self.strength:g}"} if self.is_solved else {}

    def state(self) -> dict[str, Any]:
        return {"C": self.strength} if self.is_solved else {}

    def load_state(self, state: dict[str, Any], piece: Callable[..., torch.Tensor]) -> None:
        if self.is_solved and not isinstance(state["C"], float):
            raise ValueError("no strength of the penalty")
        self.strength = state["C"] if self.is_solved else None
