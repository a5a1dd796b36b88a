"""RMSNorm and SwiGLU with their gradients written out: fewer passes over memory, and less of it kept.

PyTorch's autograd keeps every intermediate result and makes one pass for each operation. These keep the inputs alone
and compute the rest again, which costs less than storing it and reading it back.

Shapes:  D model dim   f feed-forward dim
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fast.linear import Bf16Linear, Int8Linear, OneDNNLinear
from llama import Attention, FeedForward, Llama, LlamaLayer, RMSNorm


class FusedRMSNorm(RMSNorm):
    """`RMSNorm` with its own backward pass. `out_dtype`: what the layers that read it compute in."""

    out_dtype = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: ... D -> ... D"""
        if x.dtype != torch.float32:  # somebody has converted the whole model
            return super().forward(x)
        if torch.is_grad_enabled():
            return _RMSNorm.apply(x, self.weight, self.eps, self.out_dtype)
        return _normed(x, _scale(x, self.eps), self.weight, self.out_dtype)


def _scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps), in one pass over x. x: ... D -> ... 1"""
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square().div(x.shape[-1])
    return (mean_square + eps).rsqrt()


def _normed(x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """x: ... D, scale: ... 1, weight: D -> ... D"""
    return (x * scale).mul_(weight).to(out_dtype)


class _RMSNorm(torch.autograd.Function):
    """y = n * w, where n = x * s and s = (mean(x^2) + eps)^(-1/2)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
        scale = _scale(x, eps)  # ... 1
        ctx.save_for_backward(x, weight, scale)
        return _normed(x, scale, weight, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """dx = s * (g w - n * mean(g w n)), and dw is the sum of g n over all rows."""
        x, weight, scale = ctx.saved_tensors
        normed = x * scale  # ... D
        along = grad.to(x.dtype) * normed  # ... D: g n
        grad_weight = along.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None  # D
        mean = (along @ weight)[..., None].div_(x.shape[-1])  # ... 1
        grad_x = normed.mul_(mean).neg_().addcmul_(grad, weight).mul_(scale)
        return grad_x, grad_weight, None, None


class FusedFeedForward(FeedForward):
    """`FeedForward` whose gate silu(a) * b keeps nothing but a and b."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: ... D -> ... D, through ... f"""
        a, b = self.w1(x), self.w3(x)
        gated = _SwiGLU.apply(a, b) if torch.is_grad_enabled() else F.silu(a).mul_(b)
        return self.dropout(self.w2(gated))


class _SwiGLU(torch.autograd.Function):
    """y = silu(a) * b (Shazeer 2020, arXiv:2002.05202, equation 5), where silu(a) = a * sigmoid(a)."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return F.silu(a).mul_(b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """db = g silu(a); da = g b silu'(a), where PyTorch has the derivative of silu as one kernel."""
        a, b = ctx.saved_tensors
        grad_b = F.silu(a).mul_(grad)
        grad_a = torch.ops.aten.silu_backward(grad * b, a)
        return grad_a, grad_b


LINEARS = {nn.Linear, OneDNNLinear, Bf16Linear, Int8Linear}
LAYERS = {LlamaLayer, Attention, FeedForward, FusedFeedForward, RMSNorm, FusedRMSNorm}
KNOWN = {nn.ModuleList, nn.Embedding, nn.Dropout} | LAYERS | LINEARS


def is_untouched(llama: Llama) -> bool:
    """Whether all that its forward pass does is known: no module inside or forward replaced, no hook."""
    return all(
        (type(module) in KNOWN or module is llama)
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
        for module in llama.modules()
    )
