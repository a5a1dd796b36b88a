"""Results of a classifier on a data set: the confusion matrix, and the errors with the least likely gold label.

Shapes: b batch, n sentences, c classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.data import NO_GOLD_LABEL, has_gold_labels
from engine.processes import Batch, Distributed
from engine.tasks import Classification, Evaluation

WORST = 30  # the number of errors to keep


@dataclass
class WithProbabilities(Evaluation):
    """An evaluation that keeps the probabilities of all classes beside the predicted class."""

    probabilities: list[list[float]] = field(default_factory=list)  # n c

    def add(self, log_probs: torch.Tensor, batch: Batch) -> None:
        super().add(log_probs, batch)
        if not self.probabilities:
            self.probabilities = [[0.0] * log_probs.shape[-1] for _ in self.labels]
        for index, row in zip(batch["indices"], log_probs.float().softmax(-1).tolist(), strict=False):
            self.probabilities[index] = row

    def finish(self, distributed: Distributed) -> None:
        """Combine the processes: for each sentence, one process has the probabilities and the others have zeros."""
        super().finish(distributed)
        self.probabilities = distributed.total(torch.tensor(self.probabilities)).tolist()


class Judging(Classification):
    """Classification whose evaluation keeps the probabilities (`WithProbabilities`)."""

    def evaluation(self, dataset: Any) -> WithProbabilities:
        return WithProbabilities([NO_GOLD_LABEL] * len(dataset.labels), list(dataset.labels))


def outcome_of(
    split: str, sentences: Sequence[str], result: WithProbabilities, label_names: Sequence[str]
) -> dict[str, Any]:
    """The results as plain values, for a line of figures and for the HTML page."""
    content = {"split": split, "label_names": list(label_names), "count": len(sentences)}
    if not has_gold_labels(result.labels):
        return content  # the labels of a test file may be placeholders
    return content | {
        "accuracy": result.accuracy,
        "majority": result.majority_accuracy,
        "confusion": confusion(result.labels, result.predictions, len(label_names)),
        "errors": worst_errors(sentences, result),
    }


def confusion(labels: Sequence[int], predictions: Sequence[int], classes: int) -> list[list[int]]:
    """The number of sentences for each gold label (row) and predicted label (column)."""
    counts = [[0] * classes for _ in range(classes)]
    for label, prediction in zip(labels, predictions, strict=True):
        counts[label][prediction] += 1
    return counts


def worst_errors(sentences: Sequence[str], result: WithProbabilities) -> list[dict[str, Any]]:
    """The errors whose gold label had the lowest probabilities, at most WORST."""
    wrong = [
        {
            "index": index,
            "sentence": sentences[index],
            "label": label,
            "prediction": prediction,
            "probability": round(row[prediction], 5),
            "gold_probability": round(row[label], 5),
        }
        for index, (label, prediction, row) in enumerate(
            zip(result.labels, result.predictions, result.probabilities, strict=True)
        )
        if label != prediction
    ]
    return sorted(wrong, key=lambda error: error["gold_probability"])[:WORST]
