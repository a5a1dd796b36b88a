"""Other targets of the loss: each is PyTorch's own cross-entropy where that has it, and they compose."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight

from advanced.losses import ClassWeights, LabelSmoothing, Ordinal, SoftTargets
from engine.methods import Method
from engine.tasks import CLASSIFICATION, NO_TARGET, Task

CLASSES, NOMINAL = 5, 8  # six rows in a batch of eight
LOGITS = torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 4, 2, 2, 1, 3])
TRAIN = SimpleNamespace(dataset=SimpleNamespace(labels=[0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 4]))
BALANCED = torch.tensor(
    compute_class_weight("balanced", classes=np.arange(CLASSES), y=TRAIN.dataset.labels), dtype=torch.float32
)


def task_of(*methods: Method) -> Task:
    task = CLASSIFICATION
    for method in methods:
        task = method.task(task, TRAIN)
    return task


def loss_of(*methods: Method, logits: torch.Tensor = LOGITS, labels: torch.Tensor = LABELS) -> torch.Tensor:
    return task_of(*methods).loss(logits.log_softmax(-1), {"labels": labels}, NOMINAL)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("weight", [None, BALANCED])
def test_smoothing_and_weights_are_those_of_pytorch(epsilon: float, weight: torch.Tensor | None):
    methods = [LabelSmoothing(epsilon), *([] if weight is None else [ClassWeights()])]
    expected = F.cross_entropy(LOGITS, LABELS, weight=weight, label_smoothing=epsilon, reduction="sum") / NOMINAL
    torch.testing.assert_close(loss_of(*methods), expected)
    plain = CLASSIFICATION.loss(LOGITS.log_softmax(-1), {"labels": LABELS}, NOMINAL)
    assert torch.isclose(expected, plain) == (epsilon == 0.0 and weight is None)


@pytest.mark.parametrize("sharpness", [0.5, 1.5])
@pytest.mark.parametrize("weight", [None, BALANCED])
def test_ordinal_targets_are_a_softmax_of_squared_distances(sharpness: float, weight: torch.Tensor | None):
    expected = 0.0
    for logits, label in zip(LOGITS.tolist(), LABELS.tolist(), strict=True):
        raised = [math.exp(-sharpness * (label - k) ** 2) for k in range(CLASSES)]
        normal = math.log(sum(map(math.exp, logits)))
        for k in range(CLASSES):
            of_class = 1.0 if weight is None else weight[k].item()
            expected -= of_class * raised[k] / sum(raised) * (logits[k] - normal)
    methods = [Ordinal(sharpness), *([] if weight is None else [ClassWeights()])]
    assert loss_of(*methods).item() == pytest.approx(expected / NOMINAL, rel=1e-5)
    table = Ordinal(sharpness).targets(CLASSES)
    torch.testing.assert_close(table.sum(-1), torch.ones(CLASSES))
    assert table[1, 0] == table[1, 2] > table[1, 3] > table[1, 4]
    torch.testing.assert_close(loss_of(Ordinal(1e4)), loss_of())


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_weights_fall_with_the_frequency_and_are_one_on_average_over_the_data(power: float):
    labels = torch.tensor(TRAIN.dataset.labels)
    weights = ClassWeights(power).weights(labels, CLASSES)
    assert weights[labels].mean().item() == pytest.approx(1.0)
    ratios = (weights[0] / weights).tolist()
    assert ratios == pytest.approx([count**power for count in (1, 2, 3, 2, 4)], rel=1e-5)
    if power == 1.0:
        torch.testing.assert_close(weights, BALANCED)


def test_a_class_without_examples_has_no_weight():
    weights = ClassWeights().weights(torch.tensor([0, 0, 2, 2, 2]), 4)
    torch.testing.assert_close(weights, torch.tensor([5 / 4, 0.0, 5 / 6, 0.0]))


@pytest.mark.parametrize(("labels", "says"), [([0, 1, 1, 0], True), ([0, 1, 1], False)])
def test_where_all_classes_weigh_the_same_it_says_so(labels: list[int], says: bool, capsys: pytest.CaptureFixture):
    ClassWeights().task(CLASSIFICATION, SimpleNamespace(dataset=SimpleNamespace(labels=labels)))
    assert ("class-weights: each class has as many training sentences" in capsys.readouterr().err) == says


@pytest.mark.parametrize("methods", [[LabelSmoothing()], [Ordinal(), ClassWeights()]])
def test_parts_of_a_batch_add_up_and_a_row_that_no_loss_counts_counts_for_nothing(methods: list[Method]):
    parts = [loss_of(*methods, logits=LOGITS[rows], labels=LABELS[rows]) for rows in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(sum(parts), loss_of(*methods))
    logits = LOGITS[:1].clone().requires_grad_()
    nothing = loss_of(*methods, logits=logits, labels=torch.tensor([NO_TARGET]))
    nothing.backward()
    assert nothing == 0.0 and torch.equal(logits.grad, torch.zeros(1, CLASSES))


def test_what_is_computed_checked_and_evaluated_is_that_of_the_task():
    task = task_of(LabelSmoothing(), ClassWeights())
    assert isinstance(task, SoftTargets)
    outputs = task.forward(lambda ids, scale=1: ids * scale, {"token_ids": torch.ones(2)}, scale=3)
    assert outputs.tolist() == [3.0, 3.0]
    evaluation = task.evaluation(TRAIN.dataset)
    evaluation.add(torch.eye(CLASSES)[torch.tensor(TRAIN.dataset.labels)], {"indices": list(range(12))})
    assert evaluation.score == 1.0  # still the accuracy
    with pytest.raises(Exception, match="not log-probabilities"):
        task.check(torch.ones(1, CLASSES))
