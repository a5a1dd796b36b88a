"""Runs on the workers of a Dask cluster: an executor of `concurrent.futures`.

A worker is given a run with the SHA-256 of each of its files. If it lacks some, it answers so, this program sends them
to it, and it keeps them by their checksums. Each run has a folder of its own, in which the files have their names.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from multiprocessing import current_process
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from advanced import choose, named_files
from advanced.experiments.models import Model
from advanced.experiments.processes import Processes
from advanced.experiments.rows import SPLITS, Trial, name_of_data, path_of
from advanced.experiments.trial import commit_of_code
from engine.plan import RECORD, checksum, files_of
from utils import UserError, atomic_write

if TYPE_CHECKING:
    from distributed import Worker

CONNECT_SECONDS = 10.0
POLL_SECONDS = 0.5  # between two looks whether a run is still wanted
MOST_BYTES = 4_000_000_000  # of a file: a message of Dask holds no more


class ClusterError(UserError):
    """The cluster failed, and not a run: the grid ends, and can go on later."""


class Lacking(NamedTuple):
    """The answer of a worker that lacks files. digests: their SHA-256."""

    worker: str
    digests: list[str]


class Cluster(ThreadPoolExecutor):
    """An executor of threads, each of which waits for a run on a worker. Dask repeats the run of a worker that dies.

    address: of the scheduler. workers: runs at a time; None: as many as the workers have threads now.
    Raises `UserError` if Dask is not installed, and `ClusterError` if no scheduler or no worker answers.
    """

    def __init__(self, address: str, workers: int | None = None):
        try:
            from distributed import Client
        except ModuleNotFoundError as error:
            needed = f'--cluster needs the package {error.name}: pip install "distributed>=2025.1"'
            raise UserError(needed) from None
        for name in ("distributed", "distributed.client"):  # what they would report ends in an error line here
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            self.client = Client(address, timeout=CONNECT_SECONDS)
            self.client.wait_for_workers(1, timeout=CONNECT_SECONDS)
            self.client.run(commit_of_code)  # a worker that cannot import this program would end when it got a run
        except Exception as error:  # of several classes, and those of workers as texts
            usable = "no scheduler answers that has workers with this program"
            raise ClusterError(f"--cluster {address}: {usable}: {str(error) or type(error).__name__}") from None
        self.address, self.sending = address, Lock()
        self.workers = workers or sum(self.client.nthreads().values())
        super().__init__(self.workers)

    def submit(self, compute: Callable[..., Any], /, trial: Trial, model: Model, work: Path, *how: Any) -> Future:
        """Like `compute(trial, model, work, *how)`, with a folder of the worker in the place of `work`."""
        return super().submit(self._call, compute, trial, model, *how)

    def _call(self, compute: Callable[..., Any], trial: Trial, model: Model, *how: Any) -> Any:
        files, there = folder_of(trial, model)
        digests = {name: checksum(path) for name, path in files.items()}
        paths = {digest: Path(files[name]) for name, digest in digests.items()}
        try:
            while True:
                answer = self.client.submit(compute_there, digests, compute, trial, there, *how, pure=False).result()
                if not isinstance(answer, Lacking):
                    return answer
                self._send(answer, paths)
        except Exception as error:
            if isinstance(error, CancelledError) or self.client.status != "running":
                raise ClusterError(f"the scheduler {self.address} went away; the same command goes on later") from None
            raise

    def _send(self, lacking: Lacking, paths: Mapping[str, Path]) -> None:
        """Send files to a worker, for one run at a time, so that it gets none twice.

        Raises `UserError` or `OSError` if it cannot keep them; nothing if it has died: another one is given the run.
        """
        how = {"workers": [lacking.worker], "on_error": "return"}
        with self.sending:
            left = self.client.run(lacking_of, lacking.digests, **how).get(lacking.worker)
            for digest in left if isinstance(left, list) else ():
                if paths[digest].stat().st_size > MOST_BYTES:
                    raise UserError(f"{paths[digest]} has over 4 GB, which --cluster cannot send")
                error = self.client.run(take, digest, paths[digest].read_bytes(), **how).get(lacking.worker)
                if isinstance(error, UserError) or getattr(error, "errno", None):  # of the disk, not of the connection
                    raise error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """cancel_futures: also let the workers end what they compute."""
        if cancel_futures:
            self.client.close()
        super().shutdown(wait, cancel_futures=cancel_futures)


def folder_of(trial: Trial, model: Model) -> tuple[dict[str, str], Model]:
    """The paths of a run's files, by their names in the run's folder, and the model of the table as it is there.

    Raises `UserError` for a file of a method whose name leads out of that folder.
    """
    start, judged = model.beside(trial.checkpoint), dict(trial.settings)["judged_on"] or trial.data
    files = {name_of_data(data, split): path_of(data, split) for data in (trial.data, judged) for split in SPLITS}
    checkpoint = Path(start.checkpoint)
    own = [checkpoint / name for name in (*files_of(checkpoint), RECORD)] if checkpoint.is_dir() else [checkpoint]
    own += [checkpoint.with_suffix(".json"), Path(start.tokenizer)]
    files |= {_relative(path): str(path) for path in own if path.is_file()}
    methods = choose(trial.method, trial.arguments, trial.option) if trial.method else ()
    for path in (path for paths in named_files(methods) for path in paths.split(",")):
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise UserError(f"{path}: with --cluster, a method's file is named by a path that begins in this folder")
        files[path] = path
    places = {"checkpoint": _relative(model.checkpoint), "tokenizer": _relative(start.tokenizer)}
    return files, replace(model, **places, recorded={}, keys={})


def _relative(path: str | Path) -> str:
    return os.path.abspath(path).lstrip(os.sep)


# ---------------------------------------------------------------------------------------------------------- on a worker


def compute_there(
    digests: Mapping[str, str], compute: Callable[..., Any], trial: Trial, model: Model,
    device: str, threads: int, commit: str | None,
) -> Any:  # fmt: skip
    """Do a run in a process of its own, or answer which files are lacking. threads: 0: the share of a worker's thread.

    Raises `ClusterError` if the worker runs other code, or may start no processes.
    """
    from distributed import get_worker

    worker = get_worker()
    if current_process().daemon:
        raise ClusterError(f"the worker {worker.address} may start no processes; start it with --no-nanny")
    if (found := commit_of_code()) != commit:
        raise ClusterError(f"the worker {worker.address} runs the code of commit {found}, and not of {commit}")
    if lacking := lacking_of([*digests.values()], worker):
        return Lacking(worker.address, lacking)
    threads = threads or max(1, (os.cpu_count() or 1) // worker.state.nthreads)
    with TemporaryDirectory(dir=worker.local_directory) as folder, Processes(1) as processes:
        for name, digest in digests.items():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).symlink_to(_kept(worker, digest))
        future = processes.submit(_compute_in, folder, compute, trial, model, device, threads, commit)
        task = worker.state.tasks[worker.get_current_task()]
        while not wait([future], POLL_SECONDS).done:
            if task.state == "cancelled":
                processes.shutdown(cancel_futures=True)
        return future.result()


def _compute_in(folder: str, compute: Callable[..., Any], trial: Trial, model: Model, *how: Any) -> Any:
    os.chdir(folder)
    return compute(trial, model, Path(folder), *how)


def _kept(worker: Worker, digest: str) -> Path:
    """A file of the folder that all workers with the same --local-directory share."""
    return Path(worker.local_directory).parent / "min-llama" / digest


def lacking_of(digests: Sequence[str], dask_worker: Worker) -> list[str]:
    return [digest for digest in dict.fromkeys(digests) if not _kept(dask_worker, digest).exists()]


def take(digest: str, content: bytes, dask_worker: Worker) -> None:
    """Keep a file. Raises `UserError` if it is not that of the digest, and `OSError` of the disk."""
    if hashlib.sha256(content).hexdigest() != digest:
        raise UserError("a file of the run has changed since the grid began")
    _kept(dask_worker, digest).parent.mkdir(exist_ok=True)
    with atomic_write(_kept(dask_worker, digest), "wb") as file:
        file.write(content)
