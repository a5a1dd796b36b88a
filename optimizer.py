"""AdamW (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", arXiv:1711.05101)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch.optim import Optimizer


class AdamW(Optimizer):
    """Adam with decoupled weight decay, in the variant that produced the assignment's reference weights.

    For a parameter p with gradient g, at step t (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1 and end of section 2):

        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        alpha_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t)
        p <- p - alpha_t * m / (sqrt(v) + eps)
        p <- p - lr * weight_decay * p

    The decay comes *after* the main update and reads the updated p; `torch.optim.AdamW` decays first, and adds `eps` to
    the bias-corrected sqrt(v). Notes on the assignment often write `p <- p - alpha_t * weight_decay * p`: with that
    line, its 1,000 steps end 1.7e-5 from the published weights; with the lines above, 2e-7 from them.

    correct_bias=False uses alpha_t = lr. max_grad_norm: if the gradients of a group are longer together, each step
    first makes them this long; None: never. Raises `ValueError` for hyper-parameters out of range.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        max_grad_norm: float | None = None,
    ):
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, correct_bias=correct_bias)
        super().__init__(params, defaults | {"max_grad_norm": max_grad_norm})

    def add_param_group(self, param_group: dict) -> None:
        """Add parameters with settings of their own. Raises `ValueError` for hyper-parameters out of range."""
        settings = {**self.defaults, **param_group}
        for name in ("lr", "eps", "weight_decay"):
            if not 0.0 <= settings[name] < math.inf:
                raise ValueError(f"{name}={settings[name]} must be at least 0 and finite")
        for index, beta in enumerate(settings["betas"]):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"betas[{index}]={beta} must be from 0 to below 1")
        limit = settings["max_grad_norm"]
        if limit is not None and not 0.0 < limit < math.inf:
            raise ValueError(f"max_grad_norm={limit} must be None, or above 0 and finite")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One update of every parameter that has a gradient: the five lines of the class's docstring, in place.

        `self.state[p]` keeps m, v (like p) and the step. For p = 1, g = 2, lr = 0.1 and no decay the first step gives
        m = 0.2, v = 0.004, alpha_1 = 0.0316, p = 0.9. closure: recomputes the loss, whose value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            if group.get("max_grad_norm") is not None:
                torch.nn.utils.clip_grad_norm_(group["params"], group["max_grad_norm"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError("AdamW needs dense gradients; for sparse ones there is torch.optim.SparseAdam")
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].lerp_(p.grad, 1 - beta1)
                state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                alpha = group["lr"]
                if group["correct_bias"]:
                    alpha *= math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                p.addcdiv_(state["m"], state["v"].sqrt().add_(group["eps"]), value=-alpha)
                if group["weight_decay"] > 0.0:  # not a product with 1 - 1e-7: float32 would lose most digits
                    p.add_(p, alpha=-group["lr"] * group["weight_decay"])
        return loss
