"""The processes that share a run, and the rows of a batch that each of them computes.

Shapes: b batch, s position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

Batch = dict[str, Any]  # token_ids b s, and what else a task needs of it


class LocalBatch(NamedTuple):
    """The rows of a batch that one process computes, padded as the whole batch is: `start` to `end` of `total`."""

    batch: Batch
    start: int
    end: int
    total: int

    @property
    def share(self) -> float:
        return (self.end - self.start) / self.total


class Distributed:
    """The processes that share a run. This one is alone; `torchrun.TorchDistributed` is one of several.

    All processes go through the same batches in the same order and compute their rows of each. In the other methods
    they wait for one another, so all of them must call these methods alike.
    """

    is_first = True  # who prints, and writes files

    def spread(self, model: nn.Module, device: torch.device) -> None:
        """Put `model` where it computes; the copies of several processes become one. Before its optimizer is made."""
        model.to(device)

    def network(self, model: nn.Module) -> Callable[..., Any]:
        """The callable that computes `model` after `spread`."""
        return model

    def local_batches(self, loader: Iterable[Batch]) -> Iterator[LocalBatch]:
        """This process's rows of every batch."""
        for batch in loader:
            yield LocalBatch(batch, 0, len(batch["token_ids"]), len(batch["token_ids"]))

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of the sum of all processes' losses."""
        loss.backward()

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of all processes' values."""
        return value

    def merge(self, predictions: list[int]) -> list[int]:
        """All processes' predictions, from lists that hold `NO_GOLD_LABEL` where another process predicts."""
        return predictions

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on the first process, where alone it is called. For what only its disk holds."""
        return make()

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The state dict of the whole model; of use on the first process alone."""
        return model.state_dict()

    def whole(self, state: Any) -> Any:
        """Nested values with every tensor in it whole; of use on the first process alone."""
        return state

    def piece(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Of a whole tensor, what this process holds of `like`. Raises `ValueError` if their shapes differ."""
        if whole.shape != like.shape:
            raise ValueError(f"{list(whole.shape)} is not {list(like.shape)}")
        return whole


SINGLE_PROCESS = Distributed()


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def on_device(batch: Batch, device: torch.device) -> Batch:
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
