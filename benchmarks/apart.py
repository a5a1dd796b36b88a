"""A compiled library as a contender, in a process of its own.

Compiled libraries bring OpenMP threads along. Once these have computed in a process, PyTorch's threads no longer wait
awake for the next parallel loop there, and all other contenders take up to twice as long.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from config import LlamaConfig
from engine.storage import load_tensors, save_tensors


class LibraryModel(NamedTuple):
    """What a library makes its model of. dtype: of the weights in the library's file, or of its arithmetic."""

    folder: Path
    state: dict[str, torch.Tensor]
    config: LlamaConfig
    threads: int
    dtype: str


class Apart:
    """`kind(model)` in another process; its `generate` takes ids and a number, and returns that many new ids.

    Raises `RuntimeError` with the library's own message if the library fails.
    """

    def __init__(self, kind: type, model: LibraryModel):
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
        self.connection.send((prompt[0].tolist(), new))
        return torch.cat((prompt, torch.tensor([self._receive()])), dim=1)

    def close(self) -> None:
        self.connection.close()
        self.process.join()

    def _receive(self) -> Any:
        try:
            answer = self.connection.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"its process ended with status {self.process.exitcode}") from None
        if isinstance(answer, Exception):
            raise RuntimeError(str(answer))
        return answer


def _serve(connection: Connection, kind: type, model: LibraryModel, weights: Path) -> None:
    """Answer until the other side closes the connection."""
    try:
        contender = kind(model._replace(state=load_tensors(weights)["state"]))
        connection.send(None)
        while True:
            connection.send(contender.generate(*connection.recv()))
    except EOFError:
        return
    except Exception as error:  # whatever a compiled library meets on this machine
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))
