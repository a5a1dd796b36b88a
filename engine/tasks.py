"""What is asked of a model: what it computes from a batch, the loss of that, and how good it is (`Task`).

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
    """Predictions beside the gold labels, in the order of the data, whatever that of the batches was."""

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
        """Whether the labels can be gold: placeholders are all the same."""
        return has_gold_labels(self.labels)

    def add(self, log_probs: torch.Tensor, batch: Batch) -> None:
        """Note what a part of a batch is classified as. log_probs: b c"""
        for index, prediction in zip(batch["indices"], log_probs.argmax(dim=-1).tolist(), strict=False):
            self.predictions[index] = prediction

    def finish(self, distributed: Distributed) -> None:
        self.predictions = distributed.merge(self.predictions)


@dataclass
class LanguageEvaluation:
    """How well a language model predicts the tokens of a text: their cross-entropy, in nats."""

    nats: float = 0.0
    tokens: int = 0

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    @property
    def score(self) -> float:
        """The higher, the better."""
        return -self.loss

    def add(self, logits: torch.Tensor, batch: Batch) -> None:
        """logits: b s v"""
        self.nats += next_token_losses(logits, batch["targets"]).cpu().double().sum().item()  # MPS has no float64
        self.tokens += int((batch["targets"] != NO_TARGET).sum())

    def finish(self, distributed: Distributed) -> None:
        both = distributed.total(torch.tensor([self.nats, self.tokens], dtype=torch.float64))
        self.nats, self.tokens = both[0].item(), int(both[1])


class Task:
    """What is asked of a model: what it computes from a batch, the loss of that, and how good it is."""

    def forward(self, network: Callable[..., Any], batch: Batch, **changed: Any) -> torch.Tensor:
        """What the loss and the evaluation read. changed: further arguments of the model."""
        raise NotImplementedError

    def loss(self, outputs: torch.Tensor, batch: Batch, batch_size: int) -> torch.Tensor:
        """The loss of some rows of a batch: a sum over them, so that the parts of a batch add up."""
        raise NotImplementedError

    def check(self, outputs: torch.Tensor) -> None:
        """Raise `UserError` if the outputs cannot be what the loss is of. Asked once an epoch."""

    def count_not_finite(self, outputs: Any) -> torch.Tensor:
        """How many of the outputs are not numbers."""
        return outputs.isnan().sum()

    def evaluation(self, dataset: Any) -> Any:
        """An object that is shown every batch (`add`) and has a `score` at the end: the higher, the better."""
        raise NotImplementedError


LARGEST_LOG_PROBABILITY = 1e-3  # of probability 1, give or take what half precision rounds


class Classification(Task):
    """One label for each text. The model: token ids b s -> log-probabilities b c."""

    def forward(self, network: Callable[..., Any], batch: Batch, **changed: Any) -> torch.Tensor:
        return network(batch["token_ids"], **changed)  # b c

    def loss(self, outputs: torch.Tensor, batch: Batch, batch_size: int) -> torch.Tensor:
        # divided by the nominal batch size even in a short last batch: the reference numbers rest on it
        return F.nll_loss(outputs, batch["labels"], reduction="sum") / batch_size

    def check(self, outputs: torch.Tensor) -> None:
        if bool((outputs > LARGEST_LOG_PROBABILITY).any()):
            raise UserError("the classifier's outputs are not log-probabilities (log_softmax), so the loss is none")

    def evaluation(self, dataset: Any) -> Evaluation:
        return Evaluation([NO_GOLD_LABEL] * len(dataset.labels), list(dataset.labels))


class NextToken(Task):
    """Every token from those before it. The model: a causal `Llama`.

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
NO_TARGET = -100  # the label that PyTorch's loss functions leave out


def next_token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropies in nats, 0 where the target is `NO_TARGET`. logits: b s v, targets: b s -> b s"""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)


LARGEST_EXPONENT = 709.0  # e to it is a float; a little more is not


def perplexity_of(nats: float) -> float:
    """nats: the mean loss of a token"""
    return math.inf if nats > LARGEST_EXPONENT else math.exp(nats)
