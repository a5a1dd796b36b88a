"""Two baselines that are solved in seconds, and that a method has to beat before it is worth its time: a logistic
regression on the words of a text, and one on the states of the pretrained model, which stays as it is.

Their settings are chosen as those of all other rows, by the accuracy on what is held out of train.

Shapes: n sentences, D features, c classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from advanced.experiments.judging import Splits, judge
from advanced.experiments.models import Model
from advanced.experiments.rows import Trial, plan_of
from advanced.experiments.schema import JUDGES
from engine.data import Example

if TYPE_CHECKING:
    import numpy as np

    from engine.plan import ComputeSettings

COSTS = (0.01, 0.1, 1.0, 10.0, 100.0)  # C of the regression: a larger one fits the training sentences more closely
WORDS = ((1, 1), (1, 2))  # words alone, or with pairs of them
READ = ("train", "held_out", *JUDGES)


class Solved(NamedTuple):
    """A regression, the features of each split that it reads, its settings, and its accuracy on what is held out."""

    regression: Any
    features: Mapping[str, Any]
    settings: dict[str, Any]
    score: float


def bag_of_words(trial: Trial, model: Model, work: Path, compute: ComputeSettings) -> dict[str, Any]:
    """Term frequencies, logarithmic, times inverse document frequencies, of words in lower case."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    splits, found = Splits.of(trial), []
    texts = {name: [each.sentence.lower() for each in examples] for name, examples in _read(splits).items()}
    for words in WORDS:
        counts = TfidfVectorizer(ngram_range=words, sublinear_tf=True, token_pattern=r"[^\s]+").fit(texts["train"])
        features = {name: counts.transform(each) for name, each in texts.items()}
        found += [_solved(features, splits, cost, words=list(words)) for cost in COSTS]
    return _figures(found, splits)


def frozen_regression(trial: Trial, model: Model, work: Path, compute: ComputeSettings) -> dict[str, Any]:
    """The states that a classifier of this model would read, each feature scaled to mean 0 and variance 1."""
    from sklearn.preprocessing import StandardScaler

    from advanced.solved_probe import frozen_states
    from engine.families import encode_for
    from engine.runs import assemble, loader_of

    splits, run = Splits.of(trial), assemble(plan_of(trial, model), compute)

    def states(examples: list[Example]) -> np.ndarray:
        dataset = encode_for(run.model, run.tokenizer, examples)
        loader = loader_of(dataset, run.config, dict(trial.settings)["batch_size"], compute.device)
        return frozen_states(run.model, loader)[0]  # n D

    plain = {name: states(examples) for name, examples in _read(splits).items()}
    scale = StandardScaler().fit(plain["train"])
    features = {name: scale.transform(each) for name, each in plain.items()}
    return _figures([_solved(features, splits, cost) for cost in COSTS], splits)


def _read(splits: Splits) -> dict[str, list[Example]]:
    """The sentences that are read: not those that a draw of a few leaves aside."""
    return {name: examples for name in READ if (examples := getattr(splits, name))}


def _labels(examples: list[Example]) -> list[int]:
    return [example.label for example in examples]


def _solved(features: Mapping[str, Any], splits: Splits, cost: float, **settings: Any) -> Solved:
    from sklearn.linear_model import LogisticRegression

    from advanced.solved_probe import on_one_thread

    with on_one_thread():
        regression = LogisticRegression(C=cost, max_iter=5000).fit(features["train"], _labels(splits.train))
    score = regression.score(features["held_out"], _labels(splits.held_out))
    return Solved(regression, features, {"C": cost, **settings}, float(score))


def _figures(found: list[Solved], splits: Splits) -> dict[str, Any]:
    best = max(found, key=lambda one: one.score)  # the first of equals: the least cost
    figures = {"selection": best.score, "figures": {"regression": best.settings}, "train_sentences": len(splits.train)}
    probabilities = {
        name: best.regression.predict_proba(best.features[name]) for name in JUDGES if name in best.features
    }
    return {**figures, **judge(probabilities, splits)}
