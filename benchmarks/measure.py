"""Contenders take turns; their times become medians, and ratios within a round with their range. Profiles of ours."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile

PAUSE = 0.3  # seconds: the threads of the one before spin for up to 0.2 s after their last task, and slow the next
MOST_NAMED = 6  # operations that are shown; the others are summed
OTHER_OPERATIONS, OUTSIDE_PYTORCH = "other operations", "Python and compiled loops"


class Ratio(NamedTuple):
    """The median of each round's ratio, the lowest and the highest."""

    median: float
    low: float
    high: float


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """over / under, round by round. Raises `ValueError` for unequal lengths."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


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
        runs: dict[str, Callable[[], object]],
        *,
        warm_up: int = 1,
        least: float = 0.0,
        most: int | None = None,
        drop: Callable[[str, Exception], None] | None = None,
    ) -> dict[str, list[float]]:
        """Each contender's cost in seconds in each round, by its name; the first `warm_up` rounds are not kept.

        runs: what each contender does; if it has a clock of its own, it returns its seconds, a float.
        least: seconds of a turn. Shorter work without a clock of its own is done again until they are over, and its
        mean counts: a pass of 50 ms would meet the machine at one moment.
        most: rounds that are kept at most.
        drop: called with the name of a contender that fails, and its error; unless it raises, the contender has no
        more turns and no costs. Without `drop` the error is raised.
        """
        costs: dict[str, list[float]] = {name: [] for name in runs}
        for round_ in range(warm_up + min(self.repeats, most or self.repeats)):
            for name in runs if round_ % 2 == 0 else reversed(runs):
                if name not in costs:
                    continue
                self.sleep(self.pause)
                try:
                    cost = self._cost(runs[name], least)
                except Exception as error:  # whatever a library meets on this machine
                    if drop is None:
                        raise
                    drop(name, error)
                    del costs[name]
                    continue
                if round_ >= warm_up:
                    costs[name].append(cost)
        return costs

    def _cost(self, run: Callable[[], object], least: float) -> float:
        start, runs, spent = self.clock(), 0, 0.0
        while runs == 0 or spent < least:
            own = run()
            if isinstance(own, float):
                return own
            runs, spent = runs + 1, self.clock() - start
        return spent / runs


class Share(NamedTuple):
    """An operation of PyTorch: its part of the whole time, how often it was called, and seconds a call."""

    operation: str
    share: float
    calls: int
    seconds: float


def shares(run: Callable[[], object]) -> list[Share]:
    """Profile one run: the longest operations first, then the sum of the others, then the time outside of PyTorch."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        start = time.perf_counter()
        run()
        whole = time.perf_counter() - start
    events = sorted(watched.key_averages(), key=lambda event: -event.self_cpu_time_total)
    operations = [(event.key, event.self_cpu_time_total * 1e-6, event.count) for event in events]
    named, others = operations[:MOST_NAMED], operations[MOST_NAMED:]
    rows = [(name.partition("::")[2] or name, seconds, calls) for name, seconds, calls in named]
    rows.append((OTHER_OPERATIONS, sum(seconds for _, seconds, _ in others), sum(calls for *_, calls in others)))
    rows.append((OUTSIDE_PYTORCH, max(0.0, whole - sum(seconds for _, seconds, _ in operations)), 1))
    return [Share(name, seconds / whole, calls, seconds / max(calls, 1)) for name, seconds, calls in rows]
