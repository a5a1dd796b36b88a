"""AdamW (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", arXiv:1711.05101)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch.optim import Optimizer


class AdamW(Optimizer):
    """Adam with decoupled weight decay, in the variant that produced the assignment's reference weights.

    For every parameter p with gradient g, at step t (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1, with the bias
    correction folded into the step size as the end of its section 2 suggests):

        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        alpha_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t)
        p <- p - alpha_t * m / (sqrt(v) + eps)
        p <- p - lr * weight_decay * p

    The decay comes *after* the main update and reads the updated p; `torch.optim.AdamW` decays first, and adds `eps` to
    the bias-corrected sqrt(v), so the two agree if `weight_decay` is 0 and `eps` is small beside sqrt(v). Notes on the
    assignment often write `p <- p - alpha_t * weight_decay * p` as the last line. With that line, the 1,000 steps of
    its optimizer_test.npy end 1.7e-5 from the published weights; with the lines above, 2e-7 from them.

    correct_bias=False uses alpha_t = lr. State per parameter: `step` (int), `m` and `v` (of the parameter's dtype, so
    in float16 an `eps` below 1e-7 would vanish). max_grad_norm: if the gradients of a group are longer together, each
    step first makes them this long (`torch.nn.utils.clip_grad_norm_`, which changes the gradients).
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

        closure: recomputes the loss, with gradients; its value is returned. m, v and the number of the step are kept
        in `self.state[p]`. Raises `RuntimeError` for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (beta1, beta2), decay = group["betas"], group["lr"] * group["weight_decay"]
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
                if decay > 0.0:  # not a product with 1 - decay: float32 would lose most digits of 1e-7
                    p.sub_(p, alpha=decay)
        return loss
