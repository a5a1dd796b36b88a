"""The sentences that a run is trained on and judged with, and its figures on those that judge it.

Shapes: n sentences, c classes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from advanced.experiments.rows import Trial, label_names_of, path_of
from advanced.experiments.schema import JUDGES
from engine.data import Example, create_data, divide, has_gold_labels, pack, read_label_names, set_aside
from utils import UserError

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

MOST_OF_TRAIN = 1000  # training sentences whose loss is measured after training


class Splits(NamedTuple):
    """The sentences of a run. held_out: what its values and its epoch are chosen on. test: [] without gold labels.

    rest: those that `shots` leaves aside, without their labels.
    """

    train: list[Example]
    held_out: list[Example]
    dev: list[Example]
    test: list[Example]
    rest: list[Example]

    @classmethod
    def of(cls, trial: Trial) -> Splits:
        settings, names = dict(trial.settings), read_label_names(path_of(trial.data, "label_names"))
        train, judged = create_data(path_of(trial.data, "train"), len(names)), settings["judged_on"] or trial.data
        if len(read_label_names(path_of(judged, "label_names"))) != len(names):
            raise UserError(f"{judged} has not as many classes as {trial.data}, so it cannot judge what that trains")
        dev, (_, test) = create_data(path_of(judged, "dev")), test_of(judged, trial.data)
        if settings["second_test"]:  # the same sentences in every run
            taken = {*random.Random(0).sample(range(len(train)), settings["second_test"])}
            test = [train[place] for place in sorted(taken)]
            train = [example for place, example in enumerate(train) if place not in taken]
        if trial.option == "prompt":
            return cls(train, [], dev, test, [])
        how = trial.seed, trial.shots, settings["hold_out"]
        return cls(*divide(train, *how), dev, test, set_aside(train, *how))


def test_of(judged: str, data: str) -> tuple[str, list[Example]]:
    """The split that is the test of a run, and its sentences: where "test" has no gold labels, none, or if nothing is
    trained on `judged`, those of "train"."""
    test = create_data(path_of(judged, "test"), is_test=True)
    if has_gold_labels([example.label for example in test]):
        return "test", test
    return ("train", create_data(path_of(judged, "train"))) if judged != data else ("test", [])


def judged(found: np.ndarray, examples: list[Example]) -> dict[str, Any]:
    """A line's entry for one split. Predictions and labels are packed, so that others need no data to compare.

    found: probabilities, n c
    """
    from sklearn.metrics import f1_score

    predictions, labels = found.argmax(axis=1).tolist(), [example.label for example in examples]
    right = sum(map(int.__eq__, predictions, labels))
    macro = f1_score(labels, predictions, average="macro", zero_division=0)
    figures = {"accuracy": round(right / len(labels), 5), "macro_f1": round(float(macro), 5)}
    return {**figures, "predictions": pack(predictions), "labels": pack(labels)}


def probabilities(model: nn.Module, tokenizer: Any, examples: list[Example], trial: Trial) -> np.ndarray:
    """The probabilities of the labels, scaled to a sum of 1, of each sentence: n c"""
    from engine.families import encode_for
    from engine.runs import log_probabilities

    dataset = encode_for(model.eval(), tokenizer, examples)
    found = log_probabilities(model, dataset, dict(trial.settings)["batch_size"])
    return found.float().softmax(dim=-1).numpy()


def fit_of(ask: Callable[[list[Example]], np.ndarray], splits: Splits, trial: Trial) -> dict[str, Any]:
    """The entries of a line that say how well training fitted, on a sample of its sentences (see `results.fits`).

    fit_loss: the mean cross-entropy, in nats.
    """
    import numpy as np

    sample = random.Random(0).sample(splits.train, min(MOST_OF_TRAIN, len(splits.train)))
    right = ask(sample)[np.arange(len(sample)), [example.label for example in sample]]
    loss = -np.log(np.maximum(right, np.finfo(np.float32).tiny)).mean()
    return {"fit_loss": round(float(loss), 4), "classes": len(label_names_of(trial))}


def answers(ask: Callable[[list[Example]], np.ndarray], splits: Splits) -> dict[str, np.ndarray]:
    """The probabilities, n c, for the sentences of each split that judges. ask: those for some sentences."""
    return {name: ask(examples) for name in JUDGES if (examples := getattr(splits, name))}


def judge(found: Mapping[str, np.ndarray], splits: Splits) -> dict[str, Any]:
    """The figures of `answers`: used once, after everything is chosen."""
    return {name: judged(each, getattr(splits, name)) for name, each in found.items()}
