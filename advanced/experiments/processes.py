"""Runs in processes of their own on this machine: an executor of `concurrent.futures`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from threading import Lock
from typing import Any

from advanced.experiments.trial import end_with_parent


class Processes(ThreadPoolExecutor):
    """An executor of so many threads, each of which waits for a process; a killed process costs its own call alone.

    A call has a new process, so that the peak memory that it reports is its own. keeps: a process does one call after
    another, until one fails: CUDA counts the memory of each run, and takes seconds to begin.
    """

    def __init__(self, workers: int, keeps: bool = False):
        super().__init__(workers)
        self.keeps, self.context, self.lock, self.is_ended = keeps, _context(), Lock(), False
        self.idle: list[ProcessPoolExecutor] = []
        self.busy: list[ProcessPoolExecutor] = []

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future:
        return super().submit(self._call, function, *args)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        with self.lock:
            if self.is_ended:
                raise RuntimeError("the executor is shut down")
            how = {"mp_context": self.context, "initializer": end_with_parent}
            pool = self.idle.pop() if self.idle else ProcessPoolExecutor(1, **how)
            future = pool.submit(function, *args)
            self.busy.append(pool)
        is_kept = future.exception() is None and self.keeps  # in this order: the first one waits
        with self.lock:
            self.busy.remove(pool)
            if is_kept:
                self.idle.append(pool)
        if not is_kept:
            pool.shutdown()
        return future.result()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """cancel_futures: also end the processes that work."""
        with self.lock:
            self.is_ended = cancel_futures
            for pool in self.busy if cancel_futures else ():
                for process in pool._processes.values():
                    process.kill()
        super().shutdown(wait, cancel_futures=cancel_futures)
        for pool in self.idle:
            pool.shutdown()


def _context() -> BaseContext:
    """How processes are started: copied from one that has imported the libraries, which saves seconds for each run."""
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(["sklearn.metrics", "engine.runs"])
    return context
