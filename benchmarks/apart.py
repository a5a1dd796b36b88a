"""Other processes: a contender that computes in one of its own, and programs that are run to their end.

Compiled libraries bring OpenMP threads along. Once these have computed in a process, PyTorch's threads no longer wait
awake for the next parallel loop there, and all other contenders take up to twice as long. Code that `torch.compile`
has made may end its process, which must not end the run.
The clock stays on this side: a question and its answer take 0.05 ms, a pass or a step tens of milliseconds.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bert.config import BertConfig
from config import LlamaConfig
from engine.storage import load_tensors, save_tensors
from utils import ROOT, UserError


class LibraryModel(NamedTuple):
    """What a library makes its model of. dtype: of the weights in the library's file, or of its arithmetic."""

    folder: Path
    state: dict[str, torch.Tensor]
    config: LlamaConfig | BertConfig
    threads: int
    dtype: str


class Failure(NamedTuple):
    """What the other process answers in the place of a result."""

    reason: str


class Apart:
    """An object of class `kind` ("package.module.Class"), made from `model`, in another process.

    Raises `RuntimeError` if making it or asking it fails, or if its process ends.
    """

    def __init__(self, kind: str, model: LibraryModel):
        model.folder.mkdir(exist_ok=True)
        weights = model.folder / "state.pt"
        if not weights.exists():
            save_tensors(weights, {"state": model.state})
        context = multiprocessing.get_context("spawn")  # a forked process would lack PyTorch's threads
        self.connection, theirs = context.Pipe()
        work = (theirs, kind, model._replace(state={}), weights)
        self.process = context.Process(target=_serve, args=work, daemon=True)
        self.process.start()
        theirs.close()
        self._receive()

    def generate(self, prompt: torch.Tensor, new: int) -> torch.Tensor:
        """The most likely continuation. prompt: 1 s -> 1 (s + new)"""
        return torch.cat((prompt, torch.tensor([self._ask("generate", prompt[0].tolist(), new)])), dim=1)

    def classify(self, *inputs: torch.Tensor | None) -> torch.Tensor:
        """Log-probabilities. inputs: what the model takes, b s each; one that is None is left out -> b c"""
        return torch.from_numpy(self._ask("classify", *(each.numpy() for each in inputs if each is not None)))

    def train_step(self, token_ids: torch.Tensor, labels: torch.Tensor) -> None:
        """One step of fine-tuning. token_ids: b s, labels: b"""
        self._ask("train_step", token_ids.numpy(), labels.numpy())

    def close(self) -> None:
        self.connection.close()
        self.process.join()

    def _ask(self, method: str, *arguments: Any) -> Any:
        with suppress(OSError):  # the process has ended; its status is read below
            self.connection.send((method, arguments))
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            raise RuntimeError(f"its process ended with {_status(self.process.exitcode)}") from None
        if isinstance(answer, Failure):
            raise RuntimeError(answer.reason)
        return answer


def _serve(connection: Connection, kind: str, model: LibraryModel, weights: Path) -> None:
    """Answer until the other side closes the connection."""
    try:
        module, _, name = kind.rpartition(".")
        contender = getattr(importlib.import_module(module), name)(model._replace(state=load_tensors(weights)["state"]))
        connection.send(None)
        while True:
            method, arguments = connection.recv()
            connection.send(getattr(contender, method)(*arguments))
    except EOFError:
        return
    except Exception as error:  # whatever a compiled library meets on this machine
        connection.send(Failure(reason_of(error)))


def _status(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"


def reason_of(error: Exception) -> str:
    """One line."""
    said = " ".join(str(error).split())
    return said if type(error) in (RuntimeError, UserError) else f"{type(error).__name__}: {said}"


# -------------------------------------------------------------------------------------------- programs run to their end


def run_python(
    what: str, command: Sequence[object], threads: int, *, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> tuple[float, str]:
    """Run Python to its end; returns the seconds and what it printed. what: the program, for errors.

    env: replaces this process's environment. Raises `UserError`, with the last line of its errors, if it fails.
    """
    env = {**(os.environ if env is None else env), "OMP_NUM_THREADS": str(threads)}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, encoding="utf-8"
    )
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        raise UserError(f"{what} ended with {_status(done.returncode)}: {last}")
    return seconds, done.stdout


def seconds_and_megabytes(what: str, command: Sequence[object], threads: int) -> tuple[float, float]:
    """The time and the peak memory of a program that prints its peak in bytes last. Raises as `run_python`."""
    seconds, printed = run_python(what, command, threads)
    return seconds, int(printed.split()[-1]) / 1e6
