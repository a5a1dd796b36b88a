"""Moving averages of trained weights, by the names of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

Weights = dict[str, torch.Tensor]


def trained_weights(model: nn.Module) -> Weights:
    """Copies: what an average begins with."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


@torch.no_grad()
def follow(averages: Weights, model: nn.Module, stays: float) -> None:
    """average <- stays * average + (1 - stays) * weight"""
    for name, average in averages.items():
        average.mul_(stays).add_(model.get_parameter(name), alpha=1 - stays)


def load_averages(averages: Weights, saved: Mapping[str, torch.Tensor], piece: Callable[..., torch.Tensor]) -> None:
    """piece: see `Method.load_state`. Raises `ValueError` for those of another model."""
    if saved.keys() != averages.keys():
        raise ValueError("the averages of another model")
    for name, average in averages.items():
        average.copy_(piece(saved[name], average))
