"""AdamW's step in few kernels: on a CPU one pass over memory for each parameter, elsewhere all parameters at once.

PyTorch's fused kernel corrects the bias of both moments itself, with sqrt(v) / sqrt(1 - beta2^t) + eps below the
fraction bar. For t = infinity both corrections are 1, so that a rate of alpha_t and the same eps give the line of
optimizer.py, p <- p - alpha_t * m / (sqrt(v) + eps), for every step. Weight decay comes after it, as there: the kernel
would decay first, by a factor that float32 rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine.equivalence import Case, Comparison, EquivalenceCheck, notice
from fast.apply import Choice
from optimizer import AdamW

SETTINGS = {"params", "lr", "betas", "eps", "weight_decay", "correct_bias", "max_grad_norm"}  # that may be read
Tensors = list[torch.Tensor]


class FusedAdamW(AdamW):
    """`AdamW` whose `step` computes lists of tensors, while it agrees with that of the class."""

    def step(self, *inputs: Any, **named: Any) -> Any:
        """As `AdamW.step`, which an edit may give more arguments."""
        if len(inputs) + len(named) > 1 or not named.keys() <= {"closure"} or not STEP_CHECK.holds():
            step = AdamW.step  # the class's own; PyTorch has wrapped it, as it has this one, in the calls of hooks
            return (step.__wrapped__ if getattr(step, "hooked", False) else step)(self, *inputs, **named)
        closure = (*inputs, named.get("closure"))[0]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                if group.get("max_grad_norm") is not None:
                    torch.nn.utils.clip_grad_norm_(group["params"], group["max_grad_norm"])
                for alpha, lists in self._by_step(group):
                    _update(*lists, alpha, group)
        return loss

    def _by_step(self, group: dict[str, Any]) -> Iterator[tuple[float, list[Tensors]]]:
        """The parameters that have a gradient, by the number of their next step: alpha_t, and p, g, m and v of each."""
        batches: dict[int, list[tuple[torch.Tensor, ...]]] = {}
        for p in (p for p in group["params"] if p.grad is not None):
            if p.grad.is_sparse:
                raise RuntimeError("AdamW needs dense gradients; for sparse ones there is torch.optim.SparseAdam")
            state = self.state[p]
            if not state:
                state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
            state["step"] += 1
            tensors = map(_local, (p.detach(), p.grad, state["m"], state["v"]))
            batches.setdefault(state["step"], []).append(tuple(tensors))
        for t, tensors in batches.items():
            alpha = group["lr"]
            if group["correct_bias"]:
                alpha *= math.sqrt(1 - group["betas"][1] ** t) / (1 - group["betas"][0] ** t)
            yield alpha, [list(each) for each in zip(*tensors, strict=True)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a sharded tensor (DTensor); any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _update(p: Tensors, g: Tensors, m: Tensors, v: Tensors, alpha: float, group: dict[str, Any]) -> None:
    """The update that optimizer.py gives, in place."""
    fits = [_fits(*each) for each in zip(p, g, m, v, strict=True)]
    for compute, is_chosen in ((_fused, True), (_together, False)):
        chosen = [[one for one, fit in zip(each, fits, strict=True) if fit == is_chosen] for each in (p, g, m, v)]
        if chosen[0]:
            compute(*chosen, alpha, group)
    if group["weight_decay"] > 0.0:
        torch._foreach_add_(p, p, alpha=-group["lr"] * group["weight_decay"])


def _fits(*tensors: torch.Tensor) -> bool:
    """Whether the kernel, which checks nothing, may have a parameter, its gradient, m and v."""
    return all(
        tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and tensor.is_contiguous()
        and tensor.shape == tensors[0].shape
        for tensor in tensors
    )


def _fused(p: Tensors, g: Tensors, m: Tensors, v: Tensors, alpha: float, group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    steps = [torch.tensor(math.inf)] * len(p)
    settings = {"lr": alpha, "beta1": beta1, "beta2": beta2, "eps": group["eps"], "weight_decay": 0.0}
    torch._fused_adamw_(p, g, m, v, [], steps, **settings, amsgrad=False, maximize=False)
    torch.autograd.graph.increment_version(p)  # which other kernels look at, and this one leaves as it is


def _together(p: Tensors, g: Tensors, m: Tensors, v: Tensors, alpha: float, group: dict[str, Any]) -> None:
    """The operations of optimizer.py, each for all tensors at once: an accelerator is fast with few kernels."""
    beta1, beta2 = group["betas"]
    torch._foreach_lerp_(m, g, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, g, g, 1 - beta2)
    denominators = torch._foreach_sqrt(v)
    torch._foreach_add_(denominators, group["eps"])
    torch._foreach_addcdiv_(p, m, denominators, -alpha)


def accelerate_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let kernels compute the steps of an `AdamW`. Its settings, state and parameters stay the same objects.

    An optimizer of another class stays as it is, and so does one that reads other settings.
    """
    more = {name for group in optimizer.param_groups for name in group} - SETTINGS
    if type(optimizer) is not AdamW:
        notice(f"{type(optimizer).__name__} is computed as it is written: it is not AdamW itself")
    elif more:
        notice(f"AdamW is computed as it is written: its kernel does not know {', '.join(sorted(more))}")
    elif STEP_CHECK.holds():
        optimizer.__class__ = FusedAdamW
        optimizer._patch_step_function()  # so that hooks of a step run, as for any optimizer


def choose_update(device: torch.device) -> Choice:
    found = STEP_CHECK.difference()
    if device.type != "cpu":
        return Choice("AdamW", "plain" if found else "together", found or f"few kernels on {device.type}")
    return Choice("AdamW", "plain" if found else "fused", found or "one pass over memory")


# ----------------------------------------------------------------------------------------- comparison with optimizer.py

STEPS, LATE = 4, 10**5  # that are compared: the last of them is a late one, because an edit may count steps


def _sides() -> Comparison:
    def ask(kind: type[AdamW]) -> Callable[..., list[torch.Tensor]]:
        return lambda settings, *tensors: _steps(kind, settings, *tensors)

    return Comparison(ask(AdamW), ask(FusedAdamW), list(_cases()))


def _steps(
    kind: type[AdamW], settings: dict[str, Any], values: torch.Tensor, gradients: torch.Tensor
) -> list[torch.Tensor]:
    """Some steps of three parameters, one in a group of its own. values: 3 n, gradients: steps 3 n

    The first is a matrix without a gradient at first; the second lies apart in memory, where the kernel computes
    nothing.
    """
    shaped = (values[0][None], values[1][::2], values[2])  # an edit may treat matrices and vectors apart
    parameters = [torch.nn.Parameter(each) for each in shaped]
    optimizer = kind([{"params": parameters[:2], **settings}, {"params": parameters[2:]}], lr=0.03)

    def closure() -> torch.Tensor:
        return sum(parameter.square().sum() for parameter in parameters)

    losses = []
    for step, rows in enumerate(gradients):
        for place, parameter in enumerate(parameters):
            gradient = rows[place, : parameter.numel()].clone().view(parameter.shape)
            parameter.grad = None if step == 0 and place == 0 else gradient
            if step == STEPS - 1:
                optimizer.state[parameter]["step"] += LATE
        loss = optimizer.step(closure) if step == 1 else optimizer.step()
        losses += [] if loss is None else [loss]
    states = [optimizer.state[parameter] for parameter in parameters]
    moments = [state[name] for state in states for name in ("m", "v")]
    return [*parameters, *moments, *losses, torch.tensor([float(state["step"]) for state in states])]


def _cases() -> Iterator[Case]:
    """Small parameters, so that the update is most of the result."""

    def tensors(length: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(3, length) * 0.01, torch.randn(STEPS, 3, length) * scale

    often = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-6}
    yield Case("steps", (often, *tensors(1000, 1.0)))
    yield Case("small gradients", (often, *tensors(7, 1e-6)))
    yield Case("large gradients", (often, *tensors(7, 1e3)))
    yield Case("weight decay", ({**often, "weight_decay": 0.3}, *tensors(65, 1.0)))
    yield Case("clipping", ({**often, "max_grad_norm": 0.7}, *tensors(33, 1.0)))
    yield Case("decay without bias correction", (
        {"lr": 0.01, "betas": (0.5, 0.0), "eps": 0.1, "weight_decay": 2.0, "correct_bias": False}, *tensors(33, 1.0),
    ))  # fmt: skip


STEP_CHECK = EquivalenceCheck("AdamW.step", ((AdamW, "step"),), _sides, reads={"param_groups", "state"})
