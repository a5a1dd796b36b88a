"""What is asked of a BERT beyond classes: masked words, next sentences, spans.

Shapes: b batch   s position   n tokens that are asked for   v vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tasks import NO_TARGET, Batch, Task, World


class Answers(NamedTuple):
    """Log-probabilities: of the next sentence, b 2 (None for a model without it), and of the masked tokens, n v."""

    next: torch.Tensor | None
    words: torch.Tensor


@dataclass
class PretrainingEvaluation:
    """How well masked tokens and next sentences are predicted, in nats and in shares that are right.

    hidden: the masked tokens in whose place [MASK] stands. Of the others a part stays as it is, and to say these again
    is no sign that anything was learned of the text. mask_id: that of [MASK]; without it none are counted.
    """

    mask_id: int | None = None
    word_nats: float = 0.0
    words: int = 0
    right_words: int = 0
    hidden_nats: float = 0.0
    hidden: int = 0
    right_hidden: int = 0
    next_nats: float = 0.0
    nexts: int = 0
    right_nexts: int = 0

    @property
    def word_loss(self) -> float:
        return self.word_nats / self.words

    @property
    def next_loss(self) -> float:
        return self.next_nats / self.nexts if self.nexts else 0.0

    @property
    def perplexity(self) -> float:
        """Of the masked tokens."""
        return _exp(self.word_loss)

    @property
    def word_accuracy(self) -> float:
        return self.right_words / self.words

    @property
    def hidden_perplexity(self) -> float:
        return _exp(self.hidden_nats / self.hidden) if self.hidden else math.nan

    @property
    def hidden_accuracy(self) -> float:
        return self.right_hidden / self.hidden if self.hidden else math.nan

    @property
    def next_accuracy(self) -> float:
        return self.right_nexts / self.nexts if self.nexts else math.nan

    @property
    def score(self) -> float:
        """The higher, the better: what is trained is the sum of both losses."""
        return -(self.word_loss + self.next_loss)

    def add(self, outputs: Answers, batch: Batch) -> None:
        is_asked = batch["targets"] != NO_TARGET  # b s
        targets = batch["targets"][is_asked].cpu()  # n
        words = outputs.words.cpu().double()  # MPS has no float64
        nats, is_right = F.nll_loss(words, targets, reduction="none"), words.argmax(-1) == targets  # n
        self.word_nats += nats.sum().item()
        self.words += len(targets)
        self.right_words += int(is_right.sum())
        if self.mask_id is not None:
            is_hidden = batch["token_ids"][is_asked].cpu() == self.mask_id  # n
            self.hidden_nats += nats[is_hidden].sum().item()
            self.hidden += int(is_hidden.sum())
            self.right_hidden += int(is_right[is_hidden].sum())
        if outputs.next is not None:
            nexts = outputs.next.cpu().double()
            self.next_nats += F.nll_loss(nexts, batch["next"].cpu(), reduction="sum").item()
            self.nexts += len(batch["next"])
            self.right_nexts += int((outputs.next.argmax(-1) == batch["next"]).sum())

    def finish(self, world: World) -> None:
        names = [name for name in vars(self) if name != "mask_id"]
        totals = world.total(torch.tensor([float(getattr(self, name)) for name in names], dtype=torch.float64))
        for name, total in zip(names, totals.tolist(), strict=True):
            setattr(self, name, total if name.endswith("nats") else int(total))


def _exp(loss: float) -> float:
    """A perplexity, also of a loss that no number is the exponential of."""
    return math.exp(min(loss, 700.0))


class Pretraining(Task):
    """Masked tokens and, if the model has them, next sentences (section 3.1): the sum of the mean cross-entropies.

    The model: `BertForPreTraining` or `BertForMaskedLM`. A batch has `segment_ids`, `is_real` and `targets` b s,
    `weights` b s that sum to 1 over the whole batch and, for the former, `next` b.
    """

    def forward(self, network: Callable[..., Any], batch: Batch, **changed: Any) -> Answers:
        is_asked = batch["targets"] != NO_TARGET  # b s
        answers = network(batch["token_ids"], batch["segment_ids"], batch["is_real"], at=is_asked, **changed)
        return Answers(*answers) if isinstance(answers, tuple) else Answers(None, answers)

    def loss(self, outputs: Answers, batch: Batch, batch_size: int) -> torch.Tensor:
        is_asked = batch["targets"] != NO_TARGET
        losses = F.nll_loss(outputs.words.float(), batch["targets"][is_asked], reduction="none")  # n
        loss = (losses * batch["weights"][is_asked]).sum()
        if outputs.next is None:
            return loss
        return loss + F.nll_loss(outputs.next.float(), batch["next"], reduction="sum") / batch_size

    def faults(self, outputs: Answers) -> torch.Tensor:
        return sum(part.isnan().sum() for part in outputs if part is not None)

    def evaluation(self, dataset: Any) -> PretrainingEvaluation:
        return PretrainingEvaluation(dataset.tokenizer.mask_id)
