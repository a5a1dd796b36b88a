"""A contender in a process of its own: a compiled library, or code that PyTorch has compiled.

Compiled libraries bring OpenMP threads along. Once these have computed in a process, PyTorch's threads no longer wait
awake for the next parallel loop there, and all other contenders take up to twice as long. Compiled code may end its
process, which must not end the run.
The clock stays on this side: a question and its answer take 0.05 ms, a pass or a step tens of milliseconds.
"""

from __future__ import annotations

import importlib
import multiprocessing
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.faults import OwnFault, is_own_fault, reason_of
from bert.config import BertConfig
from config import LlamaConfig
from engine.storage import load_tensors, save_tensors


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
    is_own_fault: bool


class Apart:
    """An object of class `kind` ("package.module.Class"), made from `model`, in another process.

    Raises `OwnFault` if our code fails there, and `RuntimeError` if the library fails or its process ends.
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

    def classify(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Log-probabilities. inputs: what the model takes, b s each -> b c"""
        return torch.from_numpy(self._ask("classify", *(each.numpy() for each in inputs)))

    def train_step(self, *batch: torch.Tensor) -> None:
        """One step of fine-tuning. batch: token ids, b s, and labels, b"""
        self._ask("train_step", *(each.numpy() for each in batch))

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
            raise (OwnFault if answer.is_own_fault else RuntimeError)(answer.reason)
        return answer


def _status(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"


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
        connection.send(Failure(reason_of(error), is_own_fault(error)))
