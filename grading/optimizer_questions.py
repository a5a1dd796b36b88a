"""The questions of `optimizer_test.py` to a student's AdamW, each a function. Imported in the student's process."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from grading.returned import Wrong


def own_adamw() -> type:
    """The student's AdamW. Imports the module."""
    return importlib.import_module("optimizer").AdamW


def train(weight: torch.Tensor, inputs: torch.Tensor, optimizer: type | None = None, **settings) -> torch.Tensor:
    """The assignment's toy problem: a 3 -> 2 linear layer learns (x0 + x1, -x2). Returns its weight, 2 3.

    weight: the layer's first one. inputs: steps 3. optimizer: None takes the student's AdamW.
    """
    layer = torch.nn.Linear(3, 2, bias=False)
    layer.load_state_dict({"weight": weight})
    optimizer = (optimizer or own_adamw())(layer.parameters(), **settings)
    for x in inputs:
        target = torch.stack((x[0] + x[1], -x[2]))
        optimizer.zero_grad()
        (target - layer(x)).square().sum().backward()
        optimizer.step()
    return layer.weight.detach()


def few_steps(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    optimizer: type | None = None,
    own: list[dict] | None = None,
    late: int = 0,
    **settings,
) -> torch.Tensor:
    """The parameters after some steps, rows of a matrix. weights: the first ones. gradients: steps, then as weights.

    own: the settings of each parameter, which is then a group of its own. late: in how many steps, the first ones,
    the first parameter has no gradient.
    """
    parameters = [torch.nn.Parameter(row.clone()) for row in weights]
    groups = [{"params": [parameter], **each} for parameter, each in zip(parameters, own or (), strict=False)]
    optimizer = (optimizer or own_adamw())(groups or parameters, **settings)
    for step, gradient in enumerate(gradients):
        for parameter, row in zip(parameters, gradient, strict=True):
            parameter.grad = None if step < late and parameter is parameters[0] else row.clone()
        optimizer.step()
    return torch.stack([parameter.detach() for parameter in parameters])


def step_with_closure(weights: torch.Tensor, gradient: torch.Tensor, **settings) -> Any:
    """The loss that `step` returns for a closure, and the parameter after that step."""
    parameter, calls = torch.nn.Parameter(weights.clone()), []
    optimizer = own_adamw()([parameter], **settings)

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        parameter.grad = gradient
        return (parameter * gradient).sum()

    loss = optimizer.step(closure)
    if not all(calls):
        raise Wrong("step(closure) calls the closure without gradients: call it under torch.enable_grad()")
    if not calls or loss is None:
        raise Wrong("step(closure) returns no loss: call the closure, and return what it returns")
    if len(calls) > 1:
        raise Wrong(f"step(closure) calls the closure {len(calls)} times: once is enough")
    return loss, parameter
