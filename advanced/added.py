"""What methods that add parameters to a model have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from base_llama import AttentionContext

State = dict[str, torch.Tensor]


def trainable_parameters(model: nn.Module) -> int:
    """How many numbers are trained; a matrix that stands in two places counts once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def split_state(state: State, mark: str) -> tuple[State, State]:
    """What `Method.export` returns where nothing can be merged: a state dict without the names that contain `mark`,
    and these."""
    own = {name: tensor for name, tensor in state.items() if mark in name}
    return {name: tensor for name, tensor in state.items() if name not in own}, own


def context_among(inputs: Iterable[Any], named: Mapping[str, Any]) -> AttentionContext | None:
    """The `AttentionContext` that a layer's `attention` was called with, however it was; None for a whole text."""
    return next((each for each in (*inputs, *named.values()) if isinstance(each, AttentionContext)), None)
