"""`Distributed`, the processes that share a run, and `LocalBatch`, the rows of a batch that one of them computes.

Shapes: b batch, s position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

Batch = dict[str, Any]  # token_ids b s, and other entries that a task needs


class LocalBatch(NamedTuple):
    """The rows `start` to `end` of a batch of `total` rows, for one process; padded as the whole batch is."""

    batch: Batch
    start: int
    end: int
    total: int

    @property
    def share(self) -> float:
        return (self.end - self.start) / self.total


class Distributed:
    """The processes that share a run. This class is for a single process, `torchrun.TorchDistributed` for several.

    All processes go through the same batches in the same order, and each computes its rows of each batch. In the other
    methods they wait for one another, so all processes must call the same methods in the same order.
    """

    is_first = True  # whether this process prints and writes files

    def spread(self, model: nn.Module, device: torch.device) -> None:
        """Move `model` to its device and connect its copies in all processes. Call it before making the optimizer."""
        model.to(device)

    def network(self, model: nn.Module) -> Callable[..., Any]:
        """The function to call instead of `model` after `spread`."""
        return model

    def local_batches(self, loader: Iterable[Batch]) -> Iterator[LocalBatch]:
        """This process's rows of every batch."""
        for batch in loader:
            yield LocalBatch(batch, 0, len(batch["token_ids"]), len(batch["token_ids"]))

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of the sum of all processes' losses."""
        loss.backward()

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of all processes' values."""
        return value

    def merge(self, predictions: list[int]) -> list[int]:
        """The predictions of all processes; each list holds `NO_GOLD_LABEL` for the rows of other processes."""
        return predictions

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Call `make` in the first process only, and return its result in all: for files that only its disk has."""
        return make()

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The state dict of the whole model; valid in the first process only."""
        return model.state_dict()

    def whole(self, state: Any) -> Any:
        """Gather every sharded tensor in nested values; valid in the first process only."""
        return state

    def piece(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor that this process has of `like`. Raises `ValueError` if their shapes differ."""
        if whole.shape != like.shape:
            raise ValueError(f"{list(whole.shape)} is not {list(like.shape)}")
        return whole


SINGLE_PROCESS = Distributed()


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def gradient_norm(weights: Iterable[torch.Tensor]) -> float:
    """The norm of all gradients together, also of weights that are split over the processes."""
    norm = nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def on_device(batch: Batch, device: torch.device) -> Batch:
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
