"""Soup: the mean of the weights of several fine-tuned models is one model, which costs no more than each of them
(Wortsman et al. 2022, "Model soups", arXiv:2203.05482, section 2 and recipe 1).

    uniform     the mean of all models
    greedy      the models, best first, are added one by one; one stays if the score of the mean does not fall

The models should have been fine-tuned from the same checkpoint, with other rates, seeds or methods; the weights of
models from different checkpoints have no mean that predicts anything. As in recipe 1, a model is added if the score
rises or stays; the authors' code adds it only if the score rises. The scores are those on dev or, with
`--hold_out`, on a held-out part of the training data, which must be the same for all models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

Weights = dict[str, torch.Tensor]


def mean_of(states: Sequence[Weights]) -> Weights:
    """The mean of each tensor, computed in double precision."""
    return {
        name: torch.stack([state[name].double() for state in states]).mean(dim=0).to(tensor.dtype)
        for name, tensor in states[0].items()
    }


def soup(states: Sequence[Weights], kind: str, score: Callable[[Weights], float]) -> tuple[list[int], list[float]]:
    """The numbers of the models that are kept, in the order in which they were added, and the score of each model.

    kind: "uniform", which scores nothing, or "greedy". score: of weights; a higher one is better.
    """
    if kind == "uniform":
        return [*range(len(states))], []
    scores = [score(state) for state in states]
    kept: list[int] = []
    best = -math.inf
    for number in sorted(range(len(states)), key=lambda number: -scores[number]):
        mixed = score(mean_of([states[each] for each in (*kept, number)])) if kept else scores[number]
        if mixed >= best:
            kept, best = [*kept, number], mixed
    return kept, scores
