"""Contenders take turns; their times become medians, and ratios within a round with their range."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

PAUSE = 0.3  # seconds: the threads of the one before spin for up to 0.2 s after their last task, and slow the next


class Contender(NamedTuple):
    """A program under measurement. `run` returns its cost in seconds if it has a clock of its own, else None."""

    name: str
    run: Callable[[], float | None]


class Ratio(NamedTuple):
    """The median of each round's ratio, the lowest and the highest."""

    median: float
    low: float
    high: float


class Turns:
    """Runs contenders in turns, A B C C B A A B C ..., so that whatever changes on the machine meets all of them.

    Forth and back, since what a contender leaves behind (files in memory, a warm processor) helps or slows the next.

    pause: seconds between two turns.
    """

    def __init__(
        self,
        repeats: int,
        pause: float = PAUSE,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.repeats, self.pause, self.clock, self.sleep = repeats, pause, clock, sleep

    def take(
        self,
        contenders: Sequence[Contender],
        warm_up: int = 1,
        least: float = 0.0,
        drop: Callable[[str, Exception], None] | None = None,
    ) -> dict[str, list[float]]:
        """Each contender's cost in each round, by its name; the first `warm_up` rounds are not kept.

        least: seconds of a turn. Shorter work without a clock of its own is done again until they are over, and its
        mean counts: a pass of 50 ms would meet the machine at one moment.
        drop: called with the name of a contender that fails, and its error; it has no more turns and no costs. Without
        `drop`, and from the first contender, which is ours, the error is raised.
        """
        costs: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for round_ in range(warm_up + self.repeats):
            for contender in contenders if round_ % 2 == 0 else reversed(contenders):
                if contender.name not in costs:
                    continue
                self.sleep(self.pause)
                try:
                    cost = self._cost(contender, least)
                except Exception as error:  # whatever a library meets on this machine
                    if drop is None or contender is contenders[0]:
                        raise
                    drop(contender.name, error)
                    del costs[contender.name]
                    continue
                if round_ >= warm_up:
                    costs[contender.name].append(cost)
        return costs

    def _cost(self, contender: Contender, least: float) -> float:
        start, runs, spent = self.clock(), 0, 0.0
        while runs == 0 or spent < least:
            own = contender.run()
            if own is not None:
                return own
            runs, spent = runs + 1, self.clock() - start
        return spent / runs


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """over / under, round by round. Raises `ValueError` for unequal lengths."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))
