"""Moving averages of trained weights, by the names of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

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
