"""What heads and layers do, found out by asking them: by gradients, which say what a number depends on.

Shapes: b batch   s position   D model dim
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


class ProbeResult(NamedTuple):
    """What a model with a head makes of a text: its outputs, of which tokens it read the last hidden states, and
    whether it read the first one through the pooler."""

    outputs: tuple[torch.Tensor, ...]
    is_read: list[bool]
    is_pooled: bool


def reading_of(model: nn.Module, input_ids: list[int], segment_ids: list[int]) -> ProbeResult:
    """model: of `heads.py`, in evaluation mode."""
    states: list[torch.Tensor] = []

    def cut(layer: nn.Module, inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
        states.append(hidden.detach().requires_grad_())
        return states[0]

    hook = model.encoder.layers[-1].register_forward_hook(cut)
    outputs = model(torch.tensor([input_ids]), torch.tensor([segment_ids]))
    hook.remove()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(map(_mixed, outputs)).backward()
    pooler = model.encoder.pooler
    return ProbeResult(outputs, _depends(states[0].grad[0]), pooler is not None and pooler.weight.grad is not None)


def who_sees_whom(layer: Callable[[torch.Tensor], torch.Tensor], length: int, dim: int) -> list[list[bool]]:
    """For each position, on which ones its output depends. layer: 1 s D -> 1 s D"""
    x = torch.randn(1, length, dim, generator=torch.Generator().manual_seed(0)).requires_grad_()
    states = layer(x)[0]  # s D
    return [_depends(torch.autograd.grad(_mixed(state), x, retain_graph=True)[0][0]) for state in states]


def order_of(layer: nn.Module, dim: int) -> list[str]:
    """The names of a layer's parts, in the order in which they compute."""
    names: list[str] = []
    parts = layer.named_children()
    hooks = [part.register_forward_hook(lambda *_, name=name: names.append(name)) for name, part in parts]
    layer(torch.zeros(1, 1, dim))
    for hook in hooks:
        hook.remove()
    return names


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """One number that depends on all of them, on each in its own way."""
    return (numbers * torch.arange(1.0, numbers.numel() + 1).view_as(numbers)).sum()


def _depends(gradient: torch.Tensor) -> list[bool]:
    """s D -> s"""
    return (gradient != 0).any(dim=-1).tolist()
