"""AdamW (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", arXiv:1711.05101)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch.optim import Optimizer


class AdamW(Optimizer):
    """Adam with decoupled weight decay, in the variant that the assignment's reference weights were made with.

    For every parameter p with gradient g, at step t (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1, with the bias
    correction folded into the step size as the end of its section 2 suggests):

        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        alpha_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t)
        p <- p - alpha_t * m / (sqrt(v) + eps)
        p <- p - lr * weight_decay * p

    The decay comes *after* the main update and sees the updated p; `torch.optim.AdamW` decays first, and adds `eps` to
    the bias-corrected sqrt(v), so the two agree where `weight_decay` is 0 and `eps` is small beside sqrt(v).

    correct_bias=False uses alpha_t = lr. State per parameter: `step` (int), `m` and `v` (of the parameter's dtype, so
    in float16 an `eps` below 1e-7 would vanish).
    Raises `ValueError` for hyper-parameters out of range.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
    ):
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, correct_bias=correct_bias)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict) -> None:
        """Add parameters with settings of their own. Raises `ValueError` for hyper-parameters out of range."""
        settings = {**self.defaults, **param_group}
        for name in ("lr", "eps", "weight_decay"):
            if not 0.0 <= settings[name] < math.inf:
                raise ValueError(f"{name}={settings[name]} must be at least 0 and finite")
        for index, beta in enumerate(settings["betas"]):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"betas[{index}]={beta} must be from 0 to below 1")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One update of every parameter that has a gradient.

        closure: recomputes the loss, with gradients; its value is returned.
        Raises `RuntimeError` for a sparse gradient, before anything is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p.grad is not None and p.grad.is_sparse for group in self.param_groups for p in group["params"]):
            raise RuntimeError("AdamW needs dense gradients; for sparse ones there is torch.optim.SparseAdam")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.nn.Parameter, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["m"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["v"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        m, v = state["m"], state["v"]
        beta1, beta2 = group["betas"]

        m.lerp_(parameter.grad, 1 - beta1)
        v.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)

        alpha = group["lr"]
        if group["correct_bias"]:
            alpha *= math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        parameter.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-alpha)
        if group["weight_decay"] > 0.0:
            # not mul_(1 - lr * weight_decay): in float32 that factor would lose most digits of a decay like 1e-7
            parameter.add_(parameter, alpha=-group["lr"] * group["weight_decay"])
