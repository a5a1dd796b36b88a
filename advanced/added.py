"""What the methods that add parameters to a model share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from engine.methods import Method

State = dict[str, torch.Tensor]


def trainable_parameters(model: nn.Module) -> int:
    """The number of trained numbers; a matrix that stands in two places counts once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def layers_named(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """The layers whose names in the modules that hold them are among these."""
    return [layer for name, layer in model.named_modules() if name.rpartition(".")[2] in names]


@contextmanager
def replaced(weights: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> Iterator[None]:
    """Inside it, parameters have these other values."""
    own = []
    with torch.no_grad():
        for parameter, value in weights:
            own.append((parameter, parameter.detach().clone()))
            parameter.copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in own:  # computing them back would leave rounding
                parameter.copy_(value)


def split_groups(
    groups: Iterable[dict[str, Any]], levels: Mapping[nn.Parameter, int], factor: float
) -> list[dict[str, Any]]:
    """Split every group by the level of its parameters, 0 if none is given; its rate is multiplied by factor^level."""
    split = []
    for group in groups:
        for level in sorted({levels.get(parameter, 0) for parameter in group["params"]}):
            chosen = [parameter for parameter in group["params"] if levels.get(parameter, 0) == level]
            split.append({**group, "params": chosen, "lr": group["lr"] * factor**level})
    return split


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
