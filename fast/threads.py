"""The number of threads of the compiled loops. Importing this module imports numba."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numba
import torch


class BestThreads:
    """The number of threads that decodes a token soonest: all of PyTorch's, or one if other programs use the processor.

    Threads wait for each other many times in a token, also for one that another process has displaced. Results do not
    depend on their number. The other number is tried for `TRY` tokens, again after `FIRST` tokens, and after twice as
    many each time that nothing has changed, up to `LAST`.
    """

    TRY, FIRST, LAST = 3, 48, 384

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.most = 0
        self._restart(1)

    def _restart(self, most: int) -> None:
        self.most, self.present, self.tokens, self.pause = most, most, 0, self.FIRST
        self.before = most
        self.seconds: dict[int, list[float]] = {most: [], 1: []}

    @contextmanager
    def timed(self) -> Iterator[int]:
        """Gives the number of threads for one more token, and notes its time."""
        most = torch.get_num_threads()
        if most != self.most:
            self._restart(most)
        start = self.clock()
        yield self.present
        if most > 1:
            self._note(self.clock() - start)

    def _note(self, seconds: float) -> None:
        of_present = self.seconds[self.present]
        of_present.append(seconds)
        del of_present[: -self.TRY]
        self.tokens += 1
        other = 1 if self.present == self.most else self.most
        if self.tokens == self.TRY:  # try the other number
            self.before, self.present, self.seconds[other] = self.present, other, []
        elif self.tokens == 2 * self.TRY:
            self.present = min(self.seconds, key=lambda number: sorted(self.seconds[number])[self.TRY // 2])
            self.pause = min(2 * self.pause, self.LAST) if self.present == self.before else self.FIRST
        elif self.tokens >= self.pause:
            self.tokens = 0


def use_threads(threads: int) -> None:
    """Run the loops on so many threads, and leave PyTorch its own number."""
    of_pytorch = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    # numba's first threads come from OpenMP, where it sets the number of threads for PyTorch as well
    if torch.get_num_threads() != of_pytorch:
        torch.set_num_threads(of_pytorch)
