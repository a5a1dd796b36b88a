"""How cost grows with the size of the work: exponents fitted to measured costs, beside those of the algorithm.

Cost = c * size ** exponent is a line in logarithms, fitted by least squares. The algorithm takes the operations
of its products, counted by work.py: linear in texts and layers, with a quadratic part (attention) in the text's length.
Fixed costs lower an exponent, most of all at small sizes, so the verdict looks at the largest sizes alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LARGEST = 3  # sizes that the verdict looks at
GROWTH_NOISE = 0.2  # what an exponent may lie above the algorithm's


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """The slope of the line through (log size, log cost), by least squares."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(cost) for cost in costs]).slope


@dataclass
class Growth:
    """One kind of work. costs: of each size, in each round, seconds or MB. expected: of each size, any unit."""

    work: str
    sizes: Sequence[int]
    costs: Sequence[Sequence[float]]
    expected: Sequence[float]
    unit: str = "s"

    @property
    def medians(self) -> list[float]:
        return [statistics.median(rounds) for rounds in self.costs]

    @property
    def fitted(self) -> float:
        return exponent(self.sizes, self.medians)

    @property
    def local(self) -> tuple[float, float]:
        """The lowest and the highest exponent between neighbouring sizes."""
        pairs = zip(self.sizes, self.sizes[1:], self.medians, self.medians[1:], strict=False)
        slopes = [math.log(b / a) / math.log(larger / smaller) for smaller, larger, a, b in pairs]
        return min(slopes), max(slopes)

    @property
    def is_faster(self) -> bool:
        """Whether cost grows faster than the algorithm's, beyond noise: at the largest sizes, in every round."""
        sizes, allowed = self.sizes[-LARGEST:], exponent(self.sizes[-LARGEST:], self.expected[-LARGEST:]) + GROWTH_NOISE
        return all(exponent(sizes, costs[-LARGEST:]) > allowed for costs in zip(*self.costs, strict=True))

    @property
    def verdict(self) -> str:
        return "GROWS FASTER than its algorithm" if self.is_faster else "not faster than its algorithm"
