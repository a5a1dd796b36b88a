"""The task of pre-training: masked tokens and next sentences, with their loss and their evaluation.

Shapes: b batch   s position   n masked tokens   v vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from engine.processes import Batch, Distributed
from engine.tasks import NO_TARGET, Task, perplexity_of


class PretrainingOutputs(NamedTuple):
    """Log-probabilities: of the next sentence, b 2 (None for a model without it), and of the masked tokens, n v."""

    next: torch.Tensor | None
    words: torch.Tensor


@dataclass
class Tally:
    """The sum of the losses of predictions in nats, their number, and the number of right ones."""

    nats: float = 0.0
    count: int = 0
    right: int = 0

    @property
    def loss(self) -> float:
        return self.nats / self.count if self.count else math.nan

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.loss) if self.count else math.nan

    @property
    def accuracy(self) -> float:
        return self.right / self.count if self.count else math.nan

    def add(self, nats: torch.Tensor, is_right: torch.Tensor) -> None:
        """nats, is_right: n"""
        self.nats += nats.sum().item()
        self.count += len(nats)
        self.right += int(is_right.sum())


def losses_and_hits(log_probabilities: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """n v, n -> the loss of each in nats, and whether it is right: n, n"""
    scores, targets = log_probabilities.cpu().double(), targets.cpu()  # MPS has no float64
    return F.nll_loss(scores, targets, reduction="none"), scores.argmax(-1) == targets


@dataclass
class PretrainingEvaluation:
    """How well masked tokens and next sentences are predicted.

    hidden: the masked tokens in whose place [MASK] stands. Of the others a part stays as it is, and to say these again
    is no sign that anything was learned of the text. mask_id: that of [MASK]; without it none are counted.
    """

    mask_id: int | None = None
    words: Tally = field(default_factory=Tally)
    hidden: Tally = field(default_factory=Tally)
    nexts: Tally = field(default_factory=Tally)

    @property
    def score(self) -> float:
        """Minus the sum of both losses, which training makes smaller: the higher, the better."""
        return -(self.words.loss + (self.nexts.loss if self.nexts.count else 0.0))

    def add(self, outputs: PretrainingOutputs, batch: Batch) -> None:
        is_asked = batch["targets"] != NO_TARGET  # b s
        nats, is_right = losses_and_hits(outputs.words, batch["targets"][is_asked])  # n, n
        self.words.add(nats, is_right)
        if self.mask_id is not None:
            is_hidden = batch["token_ids"][is_asked].cpu() == self.mask_id  # n
            self.hidden.add(nats[is_hidden], is_right[is_hidden])
        if outputs.next is not None:
            self.nexts.add(*losses_and_hits(outputs.next, batch["next"]))

    def finish(self, distributed: Distributed) -> None:
        for tally in (self.words, self.hidden, self.nexts):
            totals = distributed.total(torch.tensor([tally.nats, tally.count, tally.right], dtype=torch.float64))
            tally.nats, tally.count, tally.right = totals[0].item(), int(totals[1]), int(totals[2])


class Pretraining(Task):
    """Masked tokens and, if the model has them, next sentences (section 3.1): the sum of the mean cross-entropies.

    The model: `BertForPreTraining` or `BertForMaskedLM`. A batch has `segment_ids`, `is_real` and `targets` b s,
    `weights` b s that sum to 1 over the whole batch and, for the former, `next` b. evaluations: all that were made.
    """

    def __init__(self) -> None:
        self.evaluations: list[PretrainingEvaluation] = []

    def forward(self, network: Callable[..., Any], batch: Batch, **changed: Any) -> PretrainingOutputs:
        is_asked = batch["targets"] != NO_TARGET  # b s
        answers = network(batch["token_ids"], batch["segment_ids"], batch["is_real"], at=is_asked, **changed)
        return PretrainingOutputs(*answers) if isinstance(answers, tuple) else PretrainingOutputs(None, answers)

    def loss(self, outputs: PretrainingOutputs, batch: Batch, batch_size: int) -> torch.Tensor:
        is_asked = batch["targets"] != NO_TARGET
        losses = F.nll_loss(outputs.words.float(), batch["targets"][is_asked], reduction="none")  # n
        loss = (losses * batch["weights"][is_asked]).sum()
        if outputs.next is None:
            return loss
        return loss + F.nll_loss(outputs.next.float(), batch["next"], reduction="sum") / batch_size

    def count_not_finite(self, outputs: PretrainingOutputs) -> torch.Tensor:
        return sum(part.isnan().sum() for part in outputs if part is not None)

    def evaluation(self, dataset: Any) -> PretrainingEvaluation:
        self.evaluations.append(PretrainingEvaluation(dataset.tokenizer.mask_id))
        return self.evaluations[-1]
