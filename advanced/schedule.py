"""A learning rate that rises at first and then falls: linear warm-up (Goyal et al. 2017, arXiv:1706.02677, section
2.2), then half a cosine (Loshchilov & Hutter 2017, "SGDR", arXiv:1608.03983, equation 5, without restarts), or a line.

With T steps in all, w of them the warm-up, step t = 0, 1, ... has the rate of the plan times

    (t + 1) / w                                 t < w
    (1 + cos(pi (t - w) / (T - w))) / 2         afterwards; or 1 - (t - w) / (T - w); or 1

so that no step has the rate 0. w is a share of T, rounded down, so a short run may have no warm-up. T is the number of
steps in the plan, also for a run that stops earlier.
"""

from __future__ import annotations

import math

from engine.methods import Method


class Schedule(Method):
    """warmup: the share of all steps in which the rate rises. decay: cosine, linear or none."""

    name = "schedule"

    def __init__(self, warmup: float = 0.06, decay: str = "cosine"):
        super().__init__(warmup=warmup, decay=decay)
        self.warmup, self.decay = warmup, decay

    def rate(self, number: int, total: int) -> float:
        rising = int(self.warmup * total)
        if number < rising:
            return (number + 1) / rising
        progress = (number - rising) / (total - rising)
        return {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress, "none": 1.0}[self.decay]
