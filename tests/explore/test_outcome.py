"""How a classifier did: counted by hand, of one process or of several, and nothing of data without gold labels."""

from __future__ import annotations

import torch

from engine.processes import Distributed
from engine.tasks import WORST, WithProbabilities, confusion, outcome_of
from explore.inspected import examples_of

LABELS = [0, 0, 1, 2, 2, 2]
PROBABILITIES = [[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.1, 0.8, 0.1], [0.5, 0.3, 0.2], [0.2, 0.75, 0.05], [0.1, 0.1, 0.8]]
SENTENCES = [f"sentence {index}" for index in range(6)]


def judged(labels: list[int] = LABELS, rows: list[list[float]] = PROBABILITIES) -> WithProbabilities:
    """The result after one batch of all sentences, the last one first."""
    result = WithProbabilities([-1] * len(labels), [*labels])
    order = [*range(len(labels))][::-1]
    result.add(torch.tensor(rows).log()[order], {"indices": order})
    return result


def test_gold_labels_are_rows_and_predictions_columns():
    assert confusion(LABELS, judged().predictions, 3) == [[1, 1, 0], [0, 1, 0], [1, 1, 1]]


def test_an_outcome_has_what_can_be_counted():
    outcome = outcome_of("dev", SENTENCES, judged(), ["a", "b", "c"])
    assert (outcome["accuracy"], outcome["majority"], outcome["count"]) == (0.5, 0.5, 6)
    errors = [(each["index"], each["label"], each["prediction"]) for each in outcome["errors"]]
    assert errors == [(4, 2, 1), (1, 0, 1), (3, 2, 0)]  # 0.05, 0.1 and 0.2 for the gold label
    assert outcome["errors"][0] == {
        "index": 4, "sentence": "sentence 4", "label": 2, "prediction": 1, "probability": 0.75, "gold_probability": 0.05
    }  # fmt: skip
    right = judged([0, 1, 1, 0, 1, 2])
    outcome = outcome_of("dev", SENTENCES, right, ["a", "b", "c"])
    assert outcome["accuracy"] == 1.0 and outcome["majority"] == 0.5 and outcome["errors"] == []


def test_placeholders_are_no_gold_labels():
    for label in (0, -1):
        outcome = outcome_of("test", SENTENCES, judged([label] * 6), ["a", "b", "c"])
        assert outcome == {"split": "test", "label_names": ["a", "b", "c"], "count": 6}


def test_of_many_errors_the_worst_are_kept():
    rows = [[0.5 + index / 1000, 0.5 - index / 1000] for index in range(100)]
    errors = outcome_of("dev", [f"{index}" for index in range(100)], judged([1] * 99 + [0], rows), ["a", "b"])["errors"]
    assert [error["index"] for error in errors] == [*range(98, 98 - WORST, -1)]


def test_of_several_processes_each_adds_what_it_was_asked():
    halves = []
    for first in (0, 3):
        half = WithProbabilities([-1] * 6, [*LABELS])
        order = [*range(first, first + 3)]
        half.add(torch.tensor(PROBABILITIES[first : first + 3]).log(), {"indices": order})
        halves.append(half)

    class Two(Distributed):
        def total(self, value: torch.Tensor) -> torch.Tensor:
            return value + torch.tensor(halves[1].probabilities)

        def merge(self, predictions: list[int]) -> list[int]:
            return [max(pair) for pair in zip(predictions, halves[1].predictions, strict=True)]

    halves[0].finish(Two())
    assert halves[0].predictions == judged().predictions
    assert torch.allclose(torch.tensor(halves[0].probabilities), torch.tensor(PROBABILITIES))


def test_half_of_the_examples_are_the_worst_errors_and_the_others_the_first():
    found = examples_of(SENTENCES, LABELS, judged(), 4)
    assert [(each.text, each.gold) for each in found] == [
        ("sentence 4", 2), ("sentence 1", 0), ("sentence 0", 0), ("sentence 2", 1)
    ]  # fmt: skip
    assert [each.note for each in found] == ["among the worst errors"] * 2 + [""] * 2
    assert [each.text for each in examples_of(SENTENCES, LABELS, judged(), 20)] == [
        f"sentence {index}" for index in (4, 1, 3, 0, 2, 5)
    ]
