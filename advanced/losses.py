"""Other targets than the gold label alone: smoothed over all classes, softened towards near ones, weighted by class.

All three are cross-entropies with a row of numbers in the place of the label, T[y] for the gold label y:

    loss = - sum_k T[y, k] log P(k)

T is the identity for the plain loss. Each method changes the T of the methods before it, so they compose. The sum over
a batch is divided by the nominal batch size, as in the plain loss. The evaluation is not changed: it is accuracy.

Shapes: b batch   c classes
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.data import DataLoader

from engine.methods import Method
from engine.processes import Batch
from engine.tasks import NO_TARGET, OtherLoss, Task
from utils import warn

Table = torch.Tensor  # T, c c


class SoftTargets(OtherLoss):
    """A classification task with other targets. change: the new table from that of the given task, c c -> c c"""

    def __init__(self, task: Task, change: Callable[[Table], Table]):
        super().__init__(task)
        self.change = change

    def table(self, classes: int) -> Table:
        """A row of targets for each gold label: c c"""
        is_soft = isinstance(self.plain, SoftTargets)
        return self.change(self.plain.table(classes) if is_soft else torch.eye(classes))

    def loss(self, outputs: torch.Tensor, batch: Batch, batch_size: int) -> torch.Tensor:
        labels = batch["labels"]  # b
        table = self.table(outputs.shape[-1]).to(outputs)  # c c
        losses = -(table[labels.clamp(min=0)] * outputs).sum(dim=-1)  # b
        return (losses * (labels != NO_TARGET)).sum() / batch_size  # a process without rows has no target


class LabelSmoothing(Method):
    """(1 - epsilon) of the target, and epsilon / c for each class (Szegedy et al. 2016, arXiv:1512.00567, section 7).

    epsilon: the share that is spread over all classes, the gold one among them.
    """

    name = "label-smoothing"

    def __init__(self, epsilon: float = 0.1):
        super().__init__(epsilon=epsilon)
        self.epsilon = epsilon

    def task(self, task: Task, train: DataLoader) -> Task:
        return SoftTargets(task, lambda table: (1 - self.epsilon) * table + self.epsilon / len(table))


class Ordinal(Method):
    """Soft labels for classes that have an order (Diaz & Marathe 2019, "Soft Labels for Ordinal Regression").

    T[y, k] is the softmax over k of -sharpness * (y - k)^2, the squared distance being one of the metrics that the
    paper's formula leaves open. The larger the sharpness, the nearer to the plain loss.
    """

    name = "ordinal"

    def __init__(self, sharpness: float = 1.5):
        super().__init__(sharpness=sharpness)
        self.sharpness = sharpness

    def task(self, task: Task, train: DataLoader) -> Task:
        return SoftTargets(task, lambda table: table @ self.targets(len(table)))

    def targets(self, classes: int) -> Table:
        ranks = torch.arange(classes)
        return (-self.sharpness * (ranks[:, None] - ranks).float().square()).softmax(dim=-1)  # c c


class ClassWeights(Method):
    """Weights against the imbalance of classes (King & Zeng 2001, "Logistic Regression in Rare Events Data").

    With f_k the share of class k in the training data, its weight is proportional to f_k^-power, and is 1 on average
    over the training data; for power 1 that is 1 / (c f_k), with c the classes that occur. T has its columns weighted,
    as in PyTorch's cross-entropy: softened targets are weighted by the class that they are for. A class without
    examples, of which nothing is known, has the weight 0.
    """

    name = "class-weights"

    def __init__(self, power: float = 1.0):
        super().__init__(power=power)
        self.power = power

    def task(self, task: Task, train: DataLoader) -> Task:
        labels = torch.tensor(train.dataset.labels)
        if len({*labels.bincount().tolist()}) == 1:
            warn("class-weights: each class has as many training sentences, so all of them weigh the same")
        return SoftTargets(task, lambda table: table * self.weights(labels, len(table)))

    def weights(self, labels: torch.Tensor, classes: int) -> torch.Tensor:
        """labels: of the training data. Returns c"""
        shares = torch.bincount(labels, minlength=classes) / len(labels)  # c
        weights = torch.where(shares > 0, shares.clamp(min=1e-9) ** -self.power, 0.0)  # c
        return weights / (shares * weights).sum()
