"""Does the runs of a table that are left, several at a time, each in a process of its own."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NamedTuple

from advanced.experiments.models import Model
from advanced.experiments.results import (
    append_result,
    keep_probabilities,
    probabilities_beside,
    read_results,
    results_beside,
)
from advanced.experiments.rows import Trial, size_in_words
from advanced.experiments.trial import (
    DIRTY,
    PROBABILITIES,
    clear,
    commit_of_code,
    compute_trial,
    end_with_parent,
    named,
)
from engine.storage import NameLock
from utils import UserError, warn


class Running(NamedTuple):
    """A run in a process of its own. locks: on the names of all files that it writes."""

    trial: Trial
    locks: ExitStack
    pool: ProcessPoolExecutor


class Runner:
    """left: returns the runs that are not done; called anew after each run. path: the file of results. work: a folder
    for weights while a run lasts. workers: runs at a time. kept: returns the keys of models that others will combine.

    On a CPU each run has a new process, so that the peak memory that it reports is its own. CUDA counts the memory
    of each run, and takes seconds to begin: there a process does one run after another, until one fails.

    Raises `UserError` where the code differs from its commit, which every line of figures names.
    """

    def __init__(
        self,
        left: Callable[[], list[Trial]],
        model: Model,
        path: Path,
        work: Path,
        device: str,
        workers: int,
        kept: Callable[[], Collection[str]] = tuple,
    ):
        self.left, self.model, self.path, self.work, self.kept = left, model, path, work, kept
        self.device, self.workers = device, workers
        self.threads = _threads_of_environment() or max(1, (os.cpu_count() or 1) // workers)
        self.commit = commit_of_code()
        if self.commit and self.commit.endswith(DIRTY):
            raise UserError("the code or a table differs from its last commit, which results name: commit it first")
        self.context = _context()
        self.running: dict[Future, Running] = {}
        self.idle: list[ProcessPoolExecutor] = []
        self.failed: dict[str, str] = {}  # by key, why
        self.done = 0

    def run(self, end: float = math.inf) -> None:
        """Do all runs. end: the `time.monotonic` after which none is started.

        A run that fails is named in a notice, and the others go on; then `UserError` is raised.
        """
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
                self.end(each)
            for pool in self.idle:
                pool.shutdown()
        left = sum(trial.key(self.model) not in self.failed for trial in self.left())
        print(f"{self.done} runs done, {len(self.failed)} failed, {left} that can be started now are left")
        if self.failed:
            raise UserError(f"{len(self.failed)} runs failed, for example: {next(iter(self.failed.values()))}")

    def start(self) -> None:
        take_over(self.left, self.model, self.path, self.work)
        for trial, locks in self.free():
            print(f"{_now()} start: {describe(trial)}", flush=True)
            how = {"mp_context": self.context, "initializer": end_with_parent}
            pool = self.idle.pop() if self.idle else ProcessPoolExecutor(1, **how)
            model = replace(self.model, keys={})  # so that the key in the line is that of the files as they are then
            future = pool.submit(compute_trial, trial, model, self.work, self.device, self.threads, self.commit)
            self.running[future] = Running(trial, locks, pool)

    def end(self, each: Running, is_kept: bool = False) -> None:
        """End the process, unless it is kept for another run, and give up the locks; another process may then take the
        run if its line is not written."""
        if is_kept:
            self.idle.append(each.pool)
        else:
            each.pool.shutdown(cancel_futures=True)
        each.locks.close()

    def finish(self, future: Future) -> None:
        each = self.running.pop(future)
        key, error = each.trial.key(self.model), future.exception()
        try:
            if error is None and future.result()["key"] != key:
                error = UserError("its files have changed since the grid began")
            if error is None:
                result = future.result()
                if found := result.pop(PROBABILITIES, None):
                    keep(self.path, self.work, result, found)
                append_result(self.path, result)
                clear(each.trial, self.model, self.work, self.kept())
        finally:
            self.end(each, is_kept=error is None and self.device == "cuda")
        if error is None:
            self.done += 1
            print(f"{_now()} done: {describe(each.trial)}", flush=True)
            return
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        self.failed[key] = f"{describe(each.trial)}: {reason.splitlines()[0]}"
        warn(f"failed: {describe(each.trial)}: {reason.splitlines()[0]}")

    def free(self) -> Iterator[tuple[Trial, ExitStack]]:
        """Lock and yield runs that no process has taken and that have not failed, one for each idle worker."""
        taken = self.failed.keys() | {each.trial.key(self.model) for each in self.running.values()}
        places = self.workers - len(self.running)
        for trial in self.left() if places else ():
            if places == 0:
                return
            key = trial.key(self.model)
            if key in taken or (locks := self.lock(trial)) is None:
                continue
            if trial not in self.left():  # another process has ended it since
                locks.close()
                continue
            taken.add(key)
            places -= 1
            yield trial, locks

    def lock(self, trial: Trial) -> ExitStack | None:
        """Lock the names of the files that a run writes; None: another run has one of them.

        A run with members writes theirs, and the first of them is the plain run of its seed. If both trained at a time,
        one would be judged by weights from the middle of the other's training.
        """
        with ExitStack() as held:
            for key in dict.fromkeys(one.key(self.model) for one in (trial, *trial.each_member())):
                lock = NameLock(self.work / f"{key}.lock")
                if not lock.acquire():
                    return None
                held.callback(lock.release)
            return held.pop_all()


def keep(path: Path, work: Path, result: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Write probabilities; other processes, which write to the same file, wait. A notice says where that file is
    damaged: the figures of the run are kept all the same."""
    lock = NameLock(work / f"{path.name}.lock")
    while not lock.acquire():
        time.sleep(0.1)
    try:
        keep_probabilities(path, result, found)
    except UserError as error:
        warn(f"the probabilities of the run {result['key']} are not kept: {error}")
    finally:
        lock.release()


def take_over(left: Callable[[], list[Trial]], model: Model, path: Path, work: Path) -> None:
    """Copy the lines, and the probabilities, of runs that are left and that other tables of the checkpoint have done.

    The copied tuning may decide which final runs are left, so this repeats until nothing more is found. The lock of a
    run keeps two processes from writing its line twice.
    """
    found = True
    while found:
        found, others = False, results_beside(path, model.name)
        for trial in left():
            key = trial.key(model)
            if key not in others or not (lock := NameLock(work / f"{key}.lock")).acquire():
                continue
            try:
                if key not in read_results([path]):
                    result = {**others[key], **named(trial, trial.model(model))}
                    if kept := probabilities_beside(path, result, model.name):
                        keep(path, work, result, kept)
                    append_result(path, result)
                    print(f"{_now()} taken over from another table: {describe(trial)}", flush=True)
                    found = True
            finally:
                lock.release()


def _context() -> BaseContext:
    """How processes are started: copied from one that has imported the libraries, which saves seconds for each run."""
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(["sklearn.metrics", "engine.runs"])
    return context


def _threads_of_environment() -> int:
    """The first number of OMP_NUM_THREADS, or 0. Raises `UserError` if it is no number."""
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip() or "0"
    if not text.isdecimal():
        raise UserError(f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}: not a number of threads")
    return int(text)


def _now() -> str:
    return time.strftime("%H:%M:%S")


def describe(trial: Trial) -> str:
    rate = [f"lr={dict(trial.settings)['lr']:g}"] if trial.option == "finetune" else []
    chosen = " ".join([*rate, *trial.arguments])
    what = f"{trial.phase} {trial.row} on {trial.data} ({size_in_words(trial.shots)}), seed {trial.seed}"
    return f"{what}: {chosen}" if chosen else what
