"""Does the runs of a table that are left, several at a time, by an executor of `concurrent.futures`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from advanced.experiments.cluster import ClusterError
from advanced.experiments.models import Model
from advanced.experiments.processes import Processes
from advanced.experiments.results import (
    append_result,
    keep_probabilities,
    probabilities_beside,
    read_results,
    results_beside,
)
from advanced.experiments.rows import Trial, size_in_words
from advanced.experiments.trial import DIRTY, PROBABILITIES, clear, commit_of_code, compute_trial, named
from engine.storage import NameLock
from utils import UserError, warn


class Runner:
    """left: returns the runs that are not done; called anew after each run. path: the file of results. work: a folder
    for weights while a run lasts. workers: runs at a time. kept: returns the keys of models that others will combine.
    executor: computes the runs, with threads of its choice if the environment says none, and is shut down after the
    last; None: processes of this machine.

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
        executor: Executor | None = None,
    ):
        self.left, self.model, self.path, self.work, self.kept = left, model, path, work, kept
        self.device, self.workers = device, workers
        here = max(1, (os.cpu_count() or 1) // workers)
        self.threads = _threads_of_environment() or (here if executor is None else 0)
        self.commit = commit_of_code()
        if self.commit and self.commit.endswith(DIRTY):
            raise UserError("the code or a table differs from its last commit, which results name: commit it first")
        self.executor = executor or Processes(workers, keeps=device == "cuda")
        self.running: dict[Future, tuple[Trial, ExitStack]] = {}  # with locks on the names of all files that it writes
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
            self.executor.shutdown(cancel_futures=True)
            for _, locks in self.running.values():
                locks.close()
        left = sum(trial.key(self.model) not in self.failed for trial in self.left())
        print(f"{self.done} runs done, {len(self.failed)} failed, {left} that can be started now are left")
        if self.failed:
            raise UserError(f"{len(self.failed)} runs failed, for example: {next(iter(self.failed.values()))}")

    def start(self) -> None:
        take_over(self.left, self.model, self.path, self.work)
        for trial, locks in self.free():
            print(f"{_now()} start: {describe(trial)}", flush=True)
            model = replace(self.model, keys={})  # so that the key in the line is that of the files as they are then
            how = self.work, self.device, self.threads, self.commit
            self.running[self.executor.submit(compute_trial, trial, model, *how)] = trial, locks

    def finish(self, future: Future) -> None:
        """Keep the figures of a run, and give up its locks; a process may then take it if its line is not written.

        Raises the `ClusterError` that ended the run.
        """
        trial, locks = self.running.pop(future)
        with locks:
            key, error = trial.key(self.model), future.exception()
            if isinstance(error, ClusterError):
                raise error
            if error is None and future.result()["key"] != key:
                error = UserError("its files have changed since the grid began")
            if error is None:
                result = future.result()
                if found := result.pop(PROBABILITIES, None):
                    keep(self.path, self.work, result, found)
                append_result(self.path, result)
                clear(trial, self.model, self.work, self.kept())
        if error is None:
            self.done += 1
            print(f"{_now()} done: {describe(trial)}", flush=True)
            return
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        self.failed[key] = f"{describe(trial)}: {reason.splitlines()[0]}"
        warn(f"failed: {describe(trial)}: {reason.splitlines()[0]}")

    def free(self) -> Iterator[tuple[Trial, ExitStack]]:
        """Lock and yield runs that no process has taken and that have not failed, one for each idle worker."""
        taken = self.failed.keys() | {trial.key(self.model) for trial, _ in self.running.values()}
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
