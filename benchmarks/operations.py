"""The time that each operation takes in a piece of work, which explains a missed goal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile

MOST_NAMED = 6  # operations that are shown; the others are summed
OTHER_OPERATIONS, OUTSIDE_PYTORCH = "other operations", "Python and compiled loops"


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
