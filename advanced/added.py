"""What the methods that add parameters to a model share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from base_llama import AttentionContext
from engine.methods import Method

State = dict[str, torch.Tensor]


def trainable_parameters(model: nn.Module) -> int:
    """The number of trained numbers; a matrix that stands in two places counts once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


class AddingMethod(Method):
    """A method whose tensors cannot be merged. mark: a part of their names in a state dict, and of no other names."""

    mark = ""

    def export(self, state: State) -> tuple[State, State]:
        own = {name: tensor for name, tensor in state.items() if self.mark in name}
        return {name: tensor for name, tensor in state.items() if name not in own}, own


class AddedVectors(AddingMethod):
    """Trained vectors before the text of a frozen model. length: how many, p."""

    freezes = True
    begins_as_base = False

    def __init__(self, length: int = 16):
        super().__init__(length=length)
        self.length = length


def context_among(inputs: Iterable[Any], named: Mapping[str, Any]) -> AttentionContext | None:
    """The `AttentionContext` among a layer's arguments, positional or named; None for a whole text."""
    return next((each for each in (*inputs, *named.values()) if isinstance(each, AttentionContext)), None)
