"""AdamW's update by PyTorch's fused kernel: one pass over memory in the place of six.

The kernel corrects the bias of both moments itself, with sqrt(v) / sqrt(1 - beta2^t) + eps below the fraction bar. For
t = infinity both corrections are 1, so that a rate of alpha_t and the same eps give the line of optimizer.py,
p <- p - alpha_t * m / (sqrt(v) + eps), for every step. Weight decay comes after it, as there: the kernel would decay
first, by a factor that float32 rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fast.apply import Choice
from fast.equivalence import Case, Comparison, EquivalenceCheck, notice
from optimizer import AdamW

SETTINGS = {"params", "lr", "betas", "eps", "weight_decay", "correct_bias", "max_grad_norm"}  # that may be read
INPUTS = 6  # of `_update`


class FusedAdamW(AdamW):
    """`AdamW` whose `_update` is one kernel, for float32 on a CPU, while it agrees with that of the class."""

    def _update(self, *inputs: Any, **named: Any) -> None:
        """Inputs as for `AdamW._update`. Others are for an edited one."""
        if named or len(inputs) != INPUTS or not UPDATE_CHECK.holds() or not _fit(*inputs[:4]):
            super()._update(*inputs, **named)
        else:
            _fused_update(*inputs)


def _fit(*lists: list[torch.Tensor]) -> bool:
    """Whether the kernel, which checks nothing, may have these parameters, gradients, m and v."""
    return all(
        tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and tensor.is_contiguous()
        and tensor.shape == tensors[0].shape
        for tensors in zip(*lists, strict=True)
        for tensor in tensors
    )


def _fused_update(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    m: list[torch.Tensor],
    v: list[torch.Tensor],
    alpha: float,
    group: dict[str, Any],
) -> None:
    beta1, beta2 = group["betas"]
    steps = [torch.tensor(math.inf)] * len(parameters)
    settings = {"lr": alpha, "beta1": beta1, "beta2": beta2, "eps": group["eps"], "weight_decay": 0.0}
    torch._fused_adamw_(parameters, gradients, m, v, [], steps, **settings, amsgrad=False, maximize=False)
    torch.autograd.graph.increment_version(parameters)  # which other kernels look at, and this one leaves as it is
    if group["weight_decay"] > 0.0:
        torch._foreach_add_(parameters, parameters, alpha=-group["lr"] * group["weight_decay"])


def accelerate_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let the kernel compute the updates of an `AdamW`. Its settings, state and parameters stay the same objects.

    An optimizer of another class stays as it is, and so does one whose `_update` is gone or reads other settings.
    """
    more = {name for group in optimizer.param_groups for name in group} - SETTINGS
    if type(optimizer) is not AdamW:
        notice(f"{type(optimizer).__name__} is computed as it is written: it is not AdamW itself")
    elif more:
        notice(f"AdamW is computed as it is written: its kernel does not know {', '.join(sorted(more))}")
    elif not hasattr(AdamW, "_update"):
        notice("AdamW is computed as it is written: it has no _update, which a kernel could compute")
    elif UPDATE_CHECK.holds():
        optimizer.__class__ = FusedAdamW


def choose_update(device: torch.device) -> Choice:
    if device.type != "cpu":
        return Choice("AdamW", "plain", f"PyTorch's own kernels on {device.type}")
    found = UPDATE_CHECK.difference()
    return Choice("AdamW", "plain" if found else "fused", found or "one pass over memory")


def _sides() -> Comparison:
    def ask(kind: type[AdamW]) -> Callable[..., tuple[torch.Tensor, ...]]:
        def run(settings: dict[str, Any], alpha: float, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            optimizer = kind([torch.nn.Parameter(tensors[0])], **settings)
            optimizer._update(*([tensor] for tensor in tensors), alpha, optimizer.param_groups[0])
            return tensors

        return run

    return Comparison(ask(AdamW), ask(FusedAdamW), list(_cases()))


def _cases() -> Iterator[Case]:
    """Small parameters, so that the update is most of the result."""

    def tensors(length: int, scale: float) -> tuple[torch.Tensor, ...]:
        parameter, gradient, m, v = torch.randn(4, length)
        return parameter * 0.01, gradient * scale, m * scale, (v * scale).square()

    often = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-6}
    yield Case("a step", (often, 0.03, *tensors(1000, 1.0)))
    yield Case("small gradients", (often, 0.03, *tensors(7, 1e-6)))
    yield Case("large gradients", (often, 0.03, *tensors(7, 1e3)))
    yield Case("weight decay", ({**often, "weight_decay": 0.3}, 0.03, *tensors(65, 1.0)))
    yield Case("decay without bias correction", (
        {"lr": 0.01, "betas": (0.5, 0.0), "eps": 0.1, "weight_decay": 2.0, "correct_bias": False}, 0.01,
        *tensors(33, 1.0),
    ))  # fmt: skip
    yield Case("a first step", (often, 0.01, *(t * (i < 2) for i, t in enumerate(tensors(33, 1.0)))))


UPDATE_CHECK = EquivalenceCheck("AdamW._update", ((AdamW, "_update"),), _sides, reads=set())
