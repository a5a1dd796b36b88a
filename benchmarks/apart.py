"""A contender in a process of its own.

Compiled libraries bring OpenMP threads along. Where they have once computed, PyTorch's no longer wait awake for the
next parallel loop, and whatever runs in them afterwards, all other contenders, takes up to twice as long.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from config import LlamaConfig
from engine.storage import load_tensors, save_tensors

Generate = Callable[[torch.Tensor, int], torch.Tensor]


class Apart:
    """`kind(folder, state, config, threads, dtype)` elsewhere. Raises what that raises, as a `RuntimeError`."""

    def __init__(
        self, kind: type, folder: Path, state: dict[str, torch.Tensor], config: LlamaConfig, threads: int, dtype: str
    ):
        weights = folder / "state.pt"
        if not weights.exists():
            save_tensors(weights, {"state": state})
        context = multiprocessing.get_context("spawn")  # a fork would have PyTorch's threads in name only
        self.connection, theirs = context.Pipe()
        work = (theirs, kind, folder, weights, config, threads, dtype)
        self.process = context.Process(target=_serve, args=work, daemon=True)
        self.process.start()
        theirs.close()
        self._receive()

    def generate(self, prompt: torch.Tensor, new: int) -> torch.Tensor:
        """prompt: 1 s -> 1 (s + new)"""
        self.connection.send((prompt.tolist(), new))
        return torch.tensor(self._receive())

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


def _serve(
    connection: Connection, kind: type, folder: Path, weights: Path, config: LlamaConfig, threads: int, dtype: str
) -> None:
    """Answer until nobody asks any more."""
    try:
        generate: Generate = kind(folder, load_tensors(weights)["state"], config, threads, dtype).generate
        connection.send(None)
        while True:
            prompt, new = connection.recv()
            connection.send(generate(torch.tensor(prompt), new).tolist())
    except EOFError:
        return
    except Exception as error:  # whatever a compiled library meets on this machine
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))
