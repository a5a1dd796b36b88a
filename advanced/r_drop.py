"""R-Drop: two passes with different dropout shall predict the same (Wu et al. 2021, arXiv:2106.14448, equation 4).

With P_1 and P_2 the predictions of two passes over the same text, each with its own dropout masks, the loss is

    -log P_1(y) - log P_2(y) + weight / 2 * (KL(P_1 || P_2) + KL(P_2 || P_1))

The first term is the task's loss; this method adds the others. (The example in the README of the authors' code halves
the first two terms, so a weight there counts twice as much; the code of their experiments does not. Their code for BERT
and ViT adds the divergence as a sum over the batch to terms that are means, so that a weight there counts as many times
as the batch has texts; here, as in the paper, all terms are means.)

Without dropout or other noise in the model the divergence is 0 and the method only doubles the loss; a notice says so.
The paper's models have dropout of .1 in every layer. A Llama has none, so that its two passes differ by the head's
dropout alone; --dropout 0.1 gives it to one.

Shapes: b batch   c classes
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from engine.methods import Method, Step
from engine.tasks import Task
from utils import warn


class RDrop(Method):
    """weight: of the divergence, alpha in the paper."""

    name = "r-drop"

    def __init__(self, weight: float = 1.0):
        super().__init__(weight=weight)
        self.weight = weight
        self.batch_size = 0

    def start(self, model: nn.Module) -> None:
        if not any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
            warn("r-drop: there is no dropout in this model; without other noise its two passes are one")

    def task(self, task: Task, train: DataLoader) -> Task:
        self.batch_size = train.batch_sampler.batch_size
        return task

    def penalty(self, step: Step) -> torch.Tensor:
        outputs = step.forward(same_masks=False)  # b c
        loss = step.task.loss(outputs, step.batch, len(outputs))  # the mean over these rows
        loss = loss + self.weight / 2 * symmetric_divergence(step.outputs, outputs).mean()
        # as in the first term, a text counts for as much in a short last batch as in the others
        return loss * (step.local.total / self.batch_size)


def symmetric_divergence(outputs: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """KL(P || Q) + KL(Q || P) of the distributions over classes. Both are log-probabilities: b c and b c -> b"""
    p, q = (F.log_softmax(each, dim=-1) for each in (outputs, others))  # scores need not add up to 1
    return ((p.exp() - q.exp()) * (p - q)).sum(dim=-1)
