"""Averages of trained weights, by the names of the parameters, and a method that evaluates and saves one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from engine.methods import Method
from engine.processes import Distributed

Weights = dict[str, torch.Tensor]


def trained_weights(model: nn.Module) -> Weights:
    """Copies of the weights that are trained: an average begins with them."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


@torch.no_grad()
def follow(averages: Weights, model: nn.Module, stays: float) -> None:
    """average <- stays * average + (1 - stays) * weight"""
    for name, average in averages.items():
        average.mul_(stays).add_(model.get_parameter(name), alpha=1 - stays)


@contextmanager
def exchanged(averages: Weights, model: nn.Module, is_counted: bool = True) -> Iterator[None]:
    """Inside it the model has the averages, and `averages` holds the model's weights.

    is_counted: whether autograd counts the change, by which kernels notice new weights. Inside a step it must not:
    autograd has kept these weights for the backward pass, before which they come back unchanged to the last bit.
    """
    _exchange(averages, model, is_counted)
    try:
        yield
    finally:
        _exchange(averages, model, is_counted)


@torch.no_grad()
def _exchange(averages: Weights, model: nn.Module, is_counted: bool) -> None:
    if hasattr(model, "reshard"):  # a weight that is split over processes is written to where it is split
        model.reshard()
    for name, average in averages.items():
        weight = model.get_parameter(name)
        weight = weight if is_counted else weight.data
        own = weight.detach().clone()
        weight.copy_(average)
        average.copy_(own)


def load_averages(averages: Weights, saved: Mapping[str, torch.Tensor], piece: Callable[..., torch.Tensor]) -> None:
    """piece: see `Method.load_state`. Raises `ValueError` for the averages of another model."""
    if saved.keys() != averages.keys():
        raise ValueError("the averages of another model")
    for name, average in averages.items():
        average.copy_(piece(saved[name], average))


class AveragingMethod(Method):
    """Evaluates and saves an average of the trained weights, which a subclass makes in `after_step`.

    steps: the weights in the average, without those before training; as long as it is 0, the model itself is evaluated.
    """

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.steps = 0
        self.average: Weights = {}

    def start(self, model: nn.Module) -> None:
        self.average = trained_weights(model)

    def begin(self, model: nn.Module, train: DataLoader, distributed: Distributed) -> None:
        self.average = trained_weights(model)  # another method may have changed them

    def evaluation_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        return exchanged(self.average, model) if self.steps else nullcontext()

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "average": self.average}

    def load_state(self, state: dict[str, Any], piece: Callable[..., torch.Tensor]) -> None:
        if not isinstance(state["steps"], int):
            raise ValueError("no number of steps")
        load_averages(self.average, state["average"], piece)
        self.steps = state["steps"]
