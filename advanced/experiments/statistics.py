"""What a difference between two methods is worth: its interval, and corrections for many comparisons.

A figure of S seeds and n sentences is a table D of S n numbers whose mean is the figure: for accuracy 1 where a seed's
model is right and 0 elsewhere, for a difference of two methods the difference of such tables, for macro-F1 see
`macro_f1_table`. Seeds and sentences are both drawn from many, so each has an effect of its own (a two-way layout with
random effects and one observation a cell; Searle, Casella & McCulloch 1992, chapter 4):

    D_sn = mean + seed_s + sentence_n + rest_sn

    V = MS_seeds + MS_sentences - MS_rest        variance of the mean = V / (S n)

The mean squares are those of the analysis of variance. t = mean / sqrt(V / (S n)) has Satterthwaite's degrees
of freedom

    V^2 / (MS_seeds^2 / (S-1) + MS_sentences^2 / (n-1) + MS_rest^2 / ((S-1) (n-1)))

and at least 1: V is a difference, and where it comes out near 0 the formula gives so few that an interval would be
thousands wide.

A bootstrap that draws both seeds and sentences counts the rest three times over (Owen 2007, "The pigeonhole bootstrap",
arXiv:0712.1111), and with few seeds it understates their effect. `tests/advanced/test_statistics.py` measures how often
equal methods differ by chance.

Shapes: S seeds   n sentences   c classes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit  # of Student's t; scikit-learn installs it; scipy.stats is slow to import

LEVEL = 0.05  # of tests; intervals are of 1 - LEVEL
POWER = 0.8  # of `Difference.detectable`


class Difference(NamedTuple):
    """A figure, or the difference of two methods' figures. degrees: of freedom of Student's t.

    has_few_seeds: it is of one or two seeds of a trained method, so the interval says how much another choice of
    sentences would change, but too little about other seeds.
    """

    mean: float
    error: float
    degrees: float
    has_few_seeds: bool = False

    @property
    def low(self) -> float:
        return self.mean - self._reach(1 - LEVEL / 2)

    @property
    def high(self) -> float:
        return self.mean + self._reach(1 - LEVEL / 2)

    @property
    def p(self) -> float:
        """The probability of a value at least as far from 0 if the true one is 0."""
        if self.error == 0:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * stdtr(self.degrees, -abs(self.mean) / self.error))

    @property
    def detectable(self) -> float:
        """The smallest true difference that such a comparison finds with a probability of `POWER`."""
        return self._reach(1 - LEVEL / 2) + self._reach(POWER)

    def _reach(self, quantile: float) -> float:
        return float(self.error * stdtrit(self.degrees, quantile))


def two_way(table: np.ndarray) -> Difference:
    """Mean and error of a table over its seeds and sentences: see the head of this file. table: S n

    Of a single seed only the sentences are drawn. Where the estimate V is not positive, MS_rest is taken.
    """
    table = np.asarray(table, dtype=np.float64)
    seeds, sentences = table.shape
    mean, of_seeds, of_sentences = table.mean(), table.mean(1, keepdims=True), table.mean(0)
    by_sentence = seeds * ((of_sentences - mean) ** 2).sum() / (sentences - 1)
    if seeds == 1:
        return Difference(float(mean), math.sqrt(by_sentence / sentences), sentences - 1)
    by_seed = sentences * ((of_seeds - mean) ** 2).sum() / (seeds - 1)
    freedom = seeds - 1, sentences - 1, (seeds - 1) * (sentences - 1)
    rest = ((table - of_seeds - of_sentences + mean) ** 2).sum() / freedom[2]
    variance = by_seed + by_sentence - rest
    if variance <= 0:
        return Difference(float(mean), math.sqrt(rest / table.size), freedom[2])
    below = sum(square**2 / free for square, free in zip((by_seed, by_sentence, rest), freedom, strict=True))
    return Difference(float(mean), math.sqrt(variance / table.size), max(1.0, variance**2 / below))


def macro_f1_table(predictions: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """A table whose rows have each seed's macro-F1 as their mean: the figure, and the influence of each sentence.

    F1 of a class is 2 a / b, with a the share of sentences that are rightly given the class, and b the share of those
    given it plus the share of those that have it. The influence of a sentence is the derivative by its weight
    (Hampel 1974). A class that is neither predicted nor gold counts 0. predictions: S n, labels: n -> S n
    """
    table = np.zeros(predictions.shape)
    for label in range(classes):
        given, gold = predictions == label, labels == label  # S n, n
        right, either = given & gold, given.astype(np.float64) + gold  # S n
        a, b = right.mean(1, keepdims=True), either.mean(1, keepdims=True)  # S 1
        b = np.where(b > 0, b, 1.0)
        table += (2 * a / b + 2 * (right - a) / b - 2 * a * (either - b) / b**2) / classes
    return table


def pooled(differences: Sequence[Difference]) -> Difference:
    """The mean of a method's differences on several data sets, which are taken as independent; all count alike."""
    squares = [each.error**2 for each in differences]
    below = sum(square**2 / each.degrees for square, each in zip(squares, differences, strict=True))
    degrees = sum(squares) ** 2 / below if below else math.inf
    mean, error = sum(each.mean for each in differences) / len(squares), math.sqrt(sum(squares)) / len(squares)
    return Difference(mean, error, degrees, any(each.has_few_seeds for each in differences))


def holm(ps: Sequence[float]) -> list[float]:
    """The p-values, each corrected for all of them (Holm 1979): below `LEVEL`, a difference stands among so many."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=lambda place: ps[place])):
        largest = max(largest, (len(ps) - rank) * ps[place])
        adjusted[place] = min(1.0, largest)
    return adjusted
