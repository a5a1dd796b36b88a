"""Running what is left of a table, several runs at a time, each in a process of its own."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import NamedTuple

from advanced.experiments.grid import Model, Trial
from advanced.experiments.results import append_result
from advanced.experiments.trial import compute, end_with_parent
from storage import NameLock
from utils import UserError, warn


class Running(NamedTuple):
    """A run in a process of its own, so that the memory that it reports is its own."""

    trial: Trial
    lock: NameLock
    pool: ProcessPoolExecutor

    def end(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        self.lock.release()


class Runner:
    """left: the runs that are asked for and not done, asked anew after each. path: where a line is written for every
    run. work: folder of weights while a run lasts. workers: runs at a time."""

    def __init__(
        self, left: Callable[[], list[Trial]], model: Model, path: Path, work: Path, device: str, workers: int
    ):
        self.left, self.model, self.path, self.work = left, model, path, work
        self.device, self.workers = device, workers
        self.threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, (os.cpu_count() or 1) // workers)
        self.context = _context()
        self.running: dict[Future, Running] = {}
        self.failed: dict[str, str] = {}  # by key, why
        self.done = 0

    def run(self, minutes: float | None = None) -> None:
        """Keep every worker busy until nothing is left, or for so many minutes.

        A run that fails is named, and the others go on; raises `UserError` in the end.
        """
        end = time.monotonic() + 60 * (math.inf if minutes is None else minutes)
        try:
            while True:
                if time.monotonic() < end:
                    self.start()
                if not self.running:
                    break
                for future in wait(self.running, return_when=FIRST_COMPLETED).done:
                    self.finish(future)
        finally:
            for each in self.running.values():
                for process in each.pool._processes.values():
                    process.kill()
                each.end()
        left = sum(trial.key(self.model) not in self.failed for trial in self.left())
        print(f"{self.done} runs done, {len(self.failed)} failed, {left} that can be started now are left")
        if self.failed:
            raise UserError(f"{len(self.failed)} runs failed, for example: {next(iter(self.failed.values()))}")

    def start(self) -> None:
        for trial, lock in self.free():
            print(f"{_now()} start: {describe(trial)}", flush=True)
            pool = ProcessPoolExecutor(1, mp_context=self.context, initializer=end_with_parent)
            future = pool.submit(compute, trial, self.model, self.work, self.device, self.threads)
            self.running[future] = Running(trial, lock, pool)

    def finish(self, future: Future) -> None:
        each = self.running.pop(future)
        each.end()
        if (error := future.exception()) is None:
            append_result(self.path, future.result())
            self.done += 1
            print(f"{_now()} done: {describe(each.trial)}", flush=True)
            return
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        self.failed[each.trial.key(self.model)] = f"{describe(each.trial)}: {reason.splitlines()[0]}"
        warn(f"failed: {describe(each.trial)}: {reason.splitlines()[0]}")

    def free(self) -> Iterator[tuple[Trial, NameLock]]:
        """Runs that nobody else has taken and that have not failed, as many as there are workers without one."""
        taken = self.failed.keys() | {each.trial.key(self.model) for each in self.running.values()}
        places = self.workers - len(self.running)
        for trial in self.left() if places else ():
            if places == 0:
                return
            key = trial.key(self.model)
            lock = NameLock(self.work / f"{key}.lock")
            if key in taken or lock.acquire():
                continue
            taken.add(key)
            places -= 1
            yield trial, lock


def _context() -> BaseContext:
    """Where processes come from: a copy of one that has imported everything, which saves seconds for each run."""
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(["sklearn.metrics", "runs"])
    return context


def _now() -> str:
    return time.strftime("%H:%M:%S")


def describe(trial: Trial) -> str:
    rate = [f"lr={dict(trial.settings)['lr']:g}"] if trial.option == "finetune" else []
    chosen = " ".join([*rate, *trial.arguments])
    what = f"{trial.phase} {trial.row} on {trial.data} ({trial.size}), seed {trial.seed}"
    return f"{what}: {chosen}" if chosen else what
