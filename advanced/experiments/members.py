"""Several plain models of one division of the data, put together: the simplest gain there is, and so a baseline.

A vote (`advanced/vote.py`), and a uniform and a greedy soup (`advanced/soup.py`) of them; the greedy one is chosen on
what all of them have held out.

Shapes: n sentences, c classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advanced.experiments.judging import answers, fit_of, judge, judged, probabilities
from advanced.experiments.models import Model
from advanced.experiments.rows import Trial

if TYPE_CHECKING:
    import torch

    from engine.data import Example
    from engine.plan import ComputeSettings


def combine(
    trial: Trial, model: Model, work: Path, compute: ComputeSettings, train: Callable[..., Any]
) -> dict[str, Any]:
    """The figures of all three, of models that `train` makes or finds in `work`; the fit is that of the worst model."""
    import numpy as np

    from advanced.soup import mean_of, soup
    from engine.runs import compute_fast, load_classifier

    trained = [train(member, model, work, compute) for member in trial.each_member()]
    splits = trained[0].splits
    model_of_all, _ = load_classifier(trained[0].path)
    first = {name: tensor.clone() for name, tensor in model_of_all.state_dict().items()}
    each = [first, *(load_classifier(one.path)[0].state_dict() for one in trained[1:])]
    compute_fast(model_of_all, compute, trains=False)
    ask = partial(probabilities, model_of_all, trained[0].tokenizer, trial=trial, compute=compute)

    def asked(weights: dict[str, torch.Tensor], examples: list[Example]) -> np.ndarray:
        model_of_all.load_state_dict(weights)
        return ask(examples)  # n c

    def score(weights: dict[str, torch.Tensor]) -> float:
        return judged(asked(weights, splits.held_out), splits.held_out)["accuracy"]

    fit = max((fit_of(partial(asked, one), splits, trial) for one in each), key=itemgetter("fit_loss"))
    soups = {}
    for kind in ("uniform", "greedy"):
        kept, _ = soup(each, kind, score)
        soups[f"{kind} soup"] = mean_of([each[number] for number in kept])
    ways = {"vote": lambda examples: np.mean([asked(one, examples) for one in each], axis=0)}
    ways |= {name: partial(asked, weights) for name, weights in soups.items()}
    combined = {name: judge(answers(way, splits), splits) for name, way in ways.items()}
    seconds = sum(one.figures["seconds"] for one in trained)
    figures = {name: trained[0].figures[name] for name in ("trainable", "train_sentences")}
    return {**figures, **fit, "seconds": round(seconds, 1), "combined": combined, **combined["vote"]}
