"""Several plain models of one division of the data, put together: the simplest gain there is, and so a baseline.

    vote            the mean of their probabilities (Lakshminarayanan et al. 2017, arXiv:1612.01474)
    uniform soup    the mean of their weights (Wortsman et al. 2022, arXiv:2203.05482, section 2)
    greedy soup     from the best on held-out data on, each that does not lower the accuracy there (its recipe 1)

Shapes: n sentences, c classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advanced.experiments.judging import Splits, judged, probabilities
from advanced.experiments.models import Model
from advanced.experiments.results import JUDGES
from advanced.experiments.rows import Trial

if TYPE_CHECKING:
    import torch

    from engine.data import Example
    from engine.plan import ComputeSettings

Weights = dict[str, "torch.Tensor"]


def combine(
    trial: Trial, model: Model, work: Path, compute: ComputeSettings, train: Callable[..., Any]
) -> dict[str, Any]:
    """The figures of all three, of models that `train` makes or finds in `work`."""
    import numpy as np

    from engine.saved import load_classifier

    trained = [train(member, model, work, compute) for member in trial.each_member()]
    splits = trained[0].splits
    model_of_all, _ = load_classifier(trained[0].path)
    each = [load_classifier(one.path)[0].state_dict() for one in trained]
    ask = partial(probabilities, model_of_all, trained[0].tokenizer, trial=trial, compute=compute)

    def asked(weights: Weights, examples: list[Example]) -> np.ndarray:
        model_of_all.load_state_dict(weights)
        return ask(examples=examples)  # n c

    def score(weights: Weights) -> float:
        return judged(asked(weights, splits.held_out), splits.held_out)["accuracy"]

    soups = {"uniform soup": mean_of(each), "greedy soup": greedy(each, [score(one) for one in each], score)}
    vote = _judge(lambda examples: np.mean([asked(one, examples) for one in each], axis=0), splits)
    combined = {"vote": vote, **{name: _judge(partial(asked, weights), splits) for name, weights in soups.items()}}
    seconds = sum(one.figures["seconds"] for one in trained)
    figures = {name: trained[0].figures[name] for name in ("trainable", "train_sentences")}
    return {**figures, "seconds": round(seconds, 1), "combined": combined, **vote}


def mean_of(each: Sequence[Weights]) -> Weights:
    """What is no floating-point number, as a count, is that of the first."""
    import torch

    stacked = {name: [weights[name] for weights in each] for name in each[0]}
    return {
        name: torch.stack(tensors).mean(dim=0) if tensors[0].is_floating_point() else tensors[0]
        for name, tensors in stacked.items()
    }


def greedy(each: Sequence[Weights], scores: Sequence[float], score: Callable[[Weights], float]) -> Weights:
    """scores: of each on held-out data. score: that of a mean of some."""
    order = sorted(range(len(each)), key=lambda place: -scores[place])
    kept, best = [order[0]], scores[order[0]]
    for place in order[1:]:
        found = score(mean_of([each[one] for one in (*kept, place)]))
        if found >= best:
            kept, best = [*kept, place], found
    return mean_of([each[place] for place in kept])


def _judge(ask: Callable[[list[Example]], Any], splits: Splits) -> dict[str, Any]:
    return {name: judged(ask(examples), examples) for name in JUDGES if (examples := getattr(splits, name))}
