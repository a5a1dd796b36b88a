"""One step of training, as methods see it, on a small batch with padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from test_methods import LABELS, TOKENS
from torch import nn

from engine.methods import Method, RandomState, Step, prepare
from engine.processes import LocalBatch
from engine.tasks import CLASSIFICATION, Task


def prepared(model: nn.Module, *methods: Method) -> nn.Module:
    prepare(model, methods)
    for method in methods:
        method.start(model)
    return model.train()


def step_of(
    model: nn.Module,
    number: int = 0,
    total: int = 10,
    task: Task = CLASSIFICATION,
    rows: slice = slice(0, 3),
    tokens: torch.Tensor = TOKENS,
    labels: torch.Tensor = LABELS,
) -> Step:
    """rows: those of this process."""
    batch = {"token_ids": tokens[rows], "labels": labels[rows]}
    part, before = LocalBatch(batch, rows.start, rows.stop, len(tokens)), RandomState(torch.device("cpu"))
    outputs = task.forward(model, batch)
    return Step(model, task, part, batch, outputs, 0, number, total, model, before, seed=3)


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return {name: torch.zeros_like(p) if g is None else g for name, p, g in zip(names, parameters, found, strict=True)}


def move(model: nn.Module, size: float = 0.05, seed: int = 1, names: Sequence[str] = ()) -> None:
    """Change the weights, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not names or name in names:
                parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter)
