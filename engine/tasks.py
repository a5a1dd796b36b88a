"""`Task`: how a model computes its outputs from a batch, the loss of the outputs, and their evaluation.

Shapes: b batch, s position, c classes, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.data import NO_GOLD_LABEL, has_gold_labels, majority_accuracy
from engine.processes import Batch, Distributed
from utils import UserError


@dataclass
class Evaluation:
    """Predictions and gold labels, both in the order of the data set (batches may have another order)."""

    predictions: list[int]
    labels: list[int]

    @property
    def accuracy(self) -> float:
        return sum(map(int.__eq__, self.predictions, self.labels)) / len(self.labels)

    @property
    def score(self) -> float:
        return self.accuracy

    @property
    def majority_accuracy(self) -> float:
        """The accuracy of always answering the most frequent gold label."""
        return majority_accuracy(self.labels)

    @property
    def has_gold_labels(self) -> bool:
        """Whether the labels can be gold labels; placeholders are all equal."""
        return has_gold_labels(self.labels)

    def add(self, log_probs: torch.Tensor, batch: Batch) -> None:
        """Record the predictions for some rows of a batch. log_probs: b c"""
        for index, prediction in zip(batch["indices"], log_probs.argmax(dim=-1).tolist(), strict=False):
            self.predictions[index] = prediction

    def finish(self, distributed: Distributed) -> None:
        self.predictions = distributed.merge(self.predictions)


@dataclass
class LanguageEvaluation:
    """The cross-entropy of a language model on a text. nats: the sum over its tokens."""

    nats: float = 0.0
    tokens: int = 0

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    @property
    def score(self) -> float:
        """Minus the loss: a higher score is better."""
        return -self.loss

    def add(self, logits: torch.Tensor, batch: Batch) -> None:
        """Add the losses of a batch. logits: b s v"""
        self.nats += next_token_losses(logits, batch["targets"]).cpu().double().sum().item()  # MPS has no float64
        self.tokens += int((batch["targets"] != NO_TARGET).sum())

    def finish(self, distributed: Distributed) -> None:
        both = distributed.total(torch.tensor([self.nats, self.tokens], dtype=torch.float64))
        self.nats, self.tokens = both[0].item(), int(both[1])


class Task:
    """How a model computes its outputs from a batch, the loss of the outputs, and their evaluation."""

    def forward(self, network: Callable[..., Any], batch: Batch, **changed: Any) -> torch.Tensor:
        """The outputs of the model, for `loss` and the evaluation. changed: further arguments of the model."""
        raise NotImplementedError

    def loss(self, outputs: torch.Tensor, batch: Batch, batch_size: int) -> torch.Tensor:
        """The loss of some rows of a batch. The losses of all parts of a batch sum to the loss of the batch."""
        raise NotImplementedError

    def check(self, outputs: torch.Tensor) -> None:
        """Raise `UserError` if the loss is not defined for such outputs. Called once per epoch."""

    def count_not_finite(self, outputs: Any) -> torch.Tensor:
        """The number of NaN values in the outputs."""
        return outputs.isnan().sum()

    def evaluation(self, dataset: Any) -> Any:
        """A new evaluation: `add` is called with every batch, then `finish`; a higher `score` is better."""
        raise NotImplementedError


LARGEST_LOG_PROBABILITY = 1e-3  # log(1), plus the rounding error of half precision


class Classification(Task):
    """One label for each text. The model: token ids b s -> log-probabilities b c."""

    def forward(self, network: Callable[..., Any], batch: Batch, **changed: Any) -> torch.Tensor:
        return network(batch["token_ids"], **changed)  # b c

    def loss(self, outputs: torch.Tensor, batch: Batch, batch_size: int) -> torch.Tensor:
        # divided by the full batch size even in a short last batch: the reference numbers depend on it
        return F.nll_loss(outputs, batch["labels"], reduction="sum") / batch_size

    def check(self, outputs: torch.Tensor) -> None:
        if bool((outputs > LARGEST_LOG_PROBABILITY).any()):
            raise UserError("the classifier's outputs are not log-probabilities (log_softmax), so the loss is none")

    def evaluation(self, dataset: Any) -> Evaluation:
        return Evaluation([NO_GOLD_LABEL] * len(dataset.labels), list(dataset.labels))


class OtherLoss(Task):
    """The task `plain` with another loss, which a subclass computes; its outputs and their evaluation stay."""

    def __init__(self, plain: Task):
        self.plain = plain

    def forward(self, network: Callable[..., Any], batch: Batch, **changed: Any) -> torch.Tensor:
        return self.plain.forward(network, batch, **changed)

    def check(self, outputs: torch.Tensor) -> None:
        self.plain.check(outputs)

    def evaluation(self, dataset: Any) -> Any:
        return self.plain.evaluation(dataset)


class NextToken(Task):
    """Prediction of every token from the tokens before it. The model: a causal `Llama`.

    A batch has `targets` b s and may have `weights` b s, which sum to 1 over the whole batch, for the loss.
    """

    def forward(self, network: Callable[..., Any], batch: Batch, **changed: Any) -> torch.Tensor:
        return network(batch["token_ids"], batch["targets"], **changed)[0]  # b s v

    def loss(self, outputs: torch.Tensor, batch: Batch, batch_size: int) -> torch.Tensor:
        losses = next_token_losses(outputs, batch["targets"])  # b s
        if "weights" in batch:
            return (losses * batch["weights"]).sum()
        return losses.sum() / (batch_size * losses.shape[1])

    def evaluation(self, dataset: Any) -> LanguageEvaluation:
        return LanguageEvaluation()


CLASSIFICATION = Classification()
NO_TARGET = -100  # the label that PyTorch's loss functions ignore


def next_token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropies in nats, 0 where the target is `NO_TARGET`. logits: b s v, targets: b s -> b s"""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)


LARGEST_EXPONENT = 709.0  # e^709 is still a float, e^710 is not


def perplexity_of(nats: float) -> float:
    """The perplexity, e^nats. nats: the mean loss of a token"""
    return math.inf if nats > LARGEST_EXPONENT else math.exp(nats)
