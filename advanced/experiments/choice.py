"""The values of a row's final runs, chosen by runs on data held out of train. No PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from advanced.experiments.models import Model
from advanced.experiments.rows import Row, Trial
from engine.metrics import entry_of

Attempt = Callable[[int, Mapping[str, Any]], Trial]  # a seed, and values for the keys that a row tunes
Done = Mapping[str, Mapping[str, Any]]  # results by key
MORE_RATES = 3  # beyond those that a row names


class Tried(NamedTuple):
    """A combination of the values that a row tunes. score: the mean of its runs; None: they are not all done."""

    combination: dict[str, Any]
    runs: list[Trial]
    score: float | None


def tuning(row: Row, attempt: Attempt, seeds: Sequence[int], model: Model, done: Done) -> list[Tried]:
    """What a group of seeds tries on data held out of train: combinations of `tune`, with their runs.

    attempt: makes the runs. A rate beyond the tried ones is added where their results show that the best is at an edge.
    """

    def tried_of(combination: dict[str, Any]) -> Tried:
        runs = [attempt(seed, combination) for seed in seeds]
        results = [done.get(run.key(model)) for run in runs]
        score = None if None in results else fmean(entry_of(each, "selection") for each in results)
        return Tried(combination, runs, score)

    rates = sorted(row.tune.get("lr", ()))
    most = len(rates) + MORE_RATES if len(rates) > 1 else 0
    while True:
        tried = [tried_of(combination) for combination in row.combinations(rates)]
        beyond = None
        if len(rates) < most and all(one.score is not None for one in tried):
            beyond = _beyond(rates, best_of(tried).combination["lr"])
        if beyond is None:
            return tried
        rates = sorted([*rates, beyond])


def chosen(
    row: Row, attempt: Attempt, groups: Sequence[Sequence[int]], seed: int, model: Model, done: Done
) -> dict[str, Any] | None:
    """The values of the final run of a seed; None while they are not known.

    groups: the seeds that choose: that of which `seed` is one, else the first.
    """
    if len(row.combinations()) == 1:
        return row.combinations()[0]
    seeds = next((each for each in groups if seed in each), groups[0])
    tried = tuning(row, attempt, seeds, model, done)
    return best_of(tried).combination if all(one.score is not None for one in tried) else None


def best_of(tried: Sequence[Tried]) -> Tried:
    """That of the highest score; of equal ones that of the smallest rate, else the first."""
    return max(tried, key=lambda one: (one.score, -one.combination.get("lr", 0.0)))


def _beyond(rates: Sequence[float], best: float) -> float | None:
    """The rate to try after these, in their order, if the best one is the first or the last of them."""
    if best == rates[-1]:
        return float(f"{best * rates[-1] / rates[-2]:.2g}")
    return float(f"{best * rates[0] / rates[1]:.2g}") if best == rates[0] else None
