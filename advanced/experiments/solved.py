"""Two baselines that are solved in seconds, and that a method has to beat before it is worth its time: a logistic
regression on the words of a text, and one on the states of the pretrained model, which stays as it is.

Their settings are chosen as those of all other rows, by the accuracy on what is held out of train.

Shapes: n sentences, D features, c classes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from advanced.experiments.judging import Splits, judged
from advanced.experiments.models import Model
from advanced.experiments.results import JUDGES
from advanced.experiments.rows import Trial, plan_of
from engine.data import Example

if TYPE_CHECKING:
    import numpy as np

    from engine.plan import ComputeSettings

COSTS = (0.01, 0.1, 1.0, 10.0, 100.0)  # C of the regression: a larger one fits the training sentences more closely
WORDS = ((1, 1), (1, 2))  # words alone, or with pairs of them


class Solved(NamedTuple):
    """A regression, the features that it reads, its settings, and its accuracy on what is held out."""

    regression: Any
    features: Any
    settings: dict[str, Any]
    score: float


def bag_of_words(trial: Trial, model: Model, work: Path, compute: ComputeSettings) -> dict[str, Any]:
    """Term frequencies, logarithmic, times inverse document frequencies, of words in lower case."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    splits, found = Splits.of(trial), []
    for words in WORDS:
        features = TfidfVectorizer(ngram_range=words, sublinear_tf=True, token_pattern=r"[^\s]+")
        features.fit(map(_text, splits.train))
        read = partial(_counted, features)
        found += [_solved(read, splits, cost, words=list(words)) for cost in COSTS]
    return _figures(found, splits)


def frozen_regression(trial: Trial, model: Model, work: Path, compute: ComputeSettings) -> dict[str, Any]:
    """The states that a classifier of this model would read, each feature scaled to mean 0 and variance 1."""
    from sklearn.preprocessing import StandardScaler

    from advanced.solved_probe import frozen_states
    from engine.families import encode_for
    from engine.runs import assemble
    from engine.saved import loader_of

    splits, run = Splits.of(trial), assemble(plan_of(trial, model), compute)

    def states(examples: list[Example]) -> np.ndarray:
        dataset = encode_for(run.model, run.tokenizer, examples)
        loader = loader_of(dataset, run.config, dict(trial.settings)["batch_size"], compute.device)
        return frozen_states(run.model, loader)[0]  # n D

    known = {id(examples): states(examples) for examples in splits if examples}
    scale = StandardScaler().fit(known[id(splits.train)])

    def read(examples: list[Example]) -> np.ndarray:
        return scale.transform(known[id(examples)])

    return _figures([_solved(read, splits, cost) for cost in COSTS], splits)


def _text(example: Example) -> str:
    return example.sentence.lower()


def _counted(features: Any, examples: list[Example]) -> Any:
    return features.transform(map(_text, examples))


def _labels(examples: list[Example]) -> list[int]:
    return [example.label for example in examples]


def _solved(read: Any, splits: Splits, cost: float, **settings: Any) -> Solved:
    from sklearn.linear_model import LogisticRegression

    regression = LogisticRegression(C=cost, max_iter=5000).fit(read(splits.train), _labels(splits.train))
    score = regression.score(read(splits.held_out), _labels(splits.held_out))
    return Solved(regression, read, {"C": cost, **settings}, float(score))


def _figures(found: list[Solved], splits: Splits) -> dict[str, Any]:
    best = max(found, key=lambda one: one.score)  # the first of equals: the least cost
    figures = {"selection": best.score, "figures": {"regression": best.settings}, "train_sentences": len(splits.train)}
    for name in JUDGES:
        if examples := getattr(splits, name):
            figures[name] = judged(best.regression.predict_proba(best.features(examples)), examples)
    return figures
