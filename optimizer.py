"""AdamW (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", arXiv:1711.05101)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.optim import Optimizer

Tensors = list[torch.Tensor]
CACHE_PIECE = 2**18  # numbers; four float32 tensors of this size are 4 MiB


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
            if group.get("max_grad_norm") is not None:  # resume points of before have none
                torch.nn.utils.clip_grad_norm_(group["params"], group["max_grad_norm"])
            for t, parameters in self._by_step(group["params"]).items():
                alpha = group["lr"]
                if group["correct_bias"]:
                    alpha *= math.sqrt(1 - group["betas"][1] ** t) / (1 - group["betas"][0] ** t)
                for piece in self._pieces(parameters):
                    self._update(*piece, alpha, group)
        return loss

    def _by_step(self, parameters: list[torch.nn.Parameter]) -> dict[int, list[torch.nn.Parameter]]:
        """The parameters that have a gradient, grouped by the number of their next step; counts that step."""
        batches: dict[int, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = 0
                state["m"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["v"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["step"] += 1
            batches.setdefault(state["step"], []).append(parameter)
        return batches

    def _pieces(self, parameters: list[torch.nn.Parameter]) -> Iterator[tuple[Tensors, Tensors, Tensors, Tensors]]:
        """Lists of parameters, gradients, m and v; the tensors of one list are updated together.

        An accelerator is fast with few kernels, so it gets all tensors at once. A CPU waits for memory, so it gets
        pieces that stay in its cache during the whole update.
        """
        quads = [tuple(map(_local, (p.detach(), p.grad, self.state[p]["m"], self.state[p]["v"]))) for p in parameters]
        if parameters[0].device.type != "cpu":
            yield tuple(map(list, zip(*quads, strict=True)))
            return
        for quad in quads:
            if all(tensor.is_contiguous() for tensor in quad):
                yield from (tuple([part] for part in parts) for parts in zip(*map(_split, quad), strict=True))
            else:
                yield tuple([tensor] for tensor in quad)

    @staticmethod
    def _update(parameters: Tensors, gradients: Tensors, m: Tensors, v: Tensors, alpha: float, group: dict) -> None:
        """The update that the docstring of the class gives, in place, on lists of tensors."""
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(m, gradients, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_sqrt(v)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(parameters, m, denominators, -alpha)
        if group["weight_decay"] > 0.0:
            # not a product with 1 - lr * weight_decay: in float32 that would lose most digits of a decay like 1e-7
            torch._foreach_add_(parameters, parameters, alpha=-group["lr"] * group["weight_decay"])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a sharded tensor (DTensor); any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _split(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.view(-1).split(CACHE_PIECE)
