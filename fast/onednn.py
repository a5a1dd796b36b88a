"""oneDNN's matrix products. `torch.compile` uses them, and no public function reaches them.

Shapes:  r rows, batch and positions together   i input features   o output features
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from engine.equivalence import Case, Comparison, difference

PACKED_FOR = 64  # rows; the layout that oneDNN picks for this many is within 2 % of the best one for 8 to 4000


@cache
def why_no_onednn(dtype: torch.dtype = torch.float32) -> str | None:
    """Why oneDNN's products cannot be used; None if they can.

    An operator may exist and fail on this processor, so small products are computed, with packed and unpacked weights.
    """
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"

    def onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layouts = weight, pack(weight), weight.t().contiguous().t()
        return *(onednn_linear(x, layout) for layout in layouts), onednn_linear(x, weight, bias)

    def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = F.linear(x.float(), weight.float())
        return *(product.to(dtype),) * 3, (product + bias.float()).to(dtype)

    def sides() -> Comparison:
        weight, bias = torch.randn(40, 24).to(dtype), torch.randn(40).to(dtype)
        cases = [Case(f"{rows} rows", (torch.randn(rows, 24).to(dtype), weight, bias)) for rows in (1, 3, 65)]
        return Comparison(plain, onednn, cases)

    return difference(sides, tolerance=2e-2 if dtype == torch.bfloat16 else 1e-5)


def has_onednn(dtype: torch.dtype = torch.float32) -> bool:
    """Whether oneDNN is switched on and its products are right."""
    return torch.backends.mkldnn.enabled and why_no_onednn(dtype) is None


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` computed by oneDNN. x: ... i, weight: o i, plain or packed, bias: o. Returns ... o"""
    return torch.ops.mkldnn._linear_pointwise(x, _in_layout(weight), bias, "none", [], "")


def onednn_gated(x: torch.Tensor, gate: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """silu(x W1^T) * (x W3^T), where each product applies what follows to its sums. x: ... i; weights: o i -> ... o"""
    gates = torch.ops.mkldnn._linear_pointwise(x, _in_layout(gate), None, "swish", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, gates, _in_layout(factor), None, "mul")


@cache
def has_gated_products() -> bool:
    """Whether these work in bfloat16 on this processor. To be asked where `has_onednn` says that others do."""

    def sides() -> Comparison:
        gate, factor = torch.randn(2, 40, 24).bfloat16()
        cases = [Case(f"{rows} rows", (torch.randn(rows, 24).bfloat16(), gate, factor)) for rows in (1, 3, 65)]

        def plain(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
            gates, factors = (F.linear(x.float(), weight.float()) for weight in weights)
            return [(F.silu(gates) * factors).bfloat16()]

        return Comparison(plain, lambda x, *weights: [onednn_gated(x, *map(pack, weights))], cases)

    return difference(sides, tolerance=2e-2) is None


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight in the layout that oneDNN reads fastest. o i"""
    return torch.ops.mkldnn._reorder_linear_weight(_in_layout(weight), PACKED_FOR)


def _in_layout(weight: torch.Tensor) -> torch.Tensor:
    """A weight that oneDNN has a kernel for. For a part of another tensor its reference code takes seconds."""
    if weight.is_mkldnn or weight.is_contiguous() or weight.t().is_contiguous():
        return weight
    return weight.contiguous()


class _OneDNN(torch.autograd.Function):
    """y = x W^T + b and the gradient of x by oneDNN; the gradient of W by oneDNN or PyTorch."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, trains_weights: bool, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.trains_weights = trains_weights
        return onednn_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = onednn_linear(grad, weight.t()) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (onednn_weight_gradient if ctx.trains_weights else weight_gradient)(grad, x)
        grad_bias = rows_of(grad).sum(0) if ctx.needs_input_grad[3] else None
        return grad_x, grad_weight, None, grad_bias


def onednn_trained(
    x: torch.Tensor, weight: torch.Tensor, trains_weights: bool = True, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`F.linear` with gradients, by oneDNN. x: ... i, weight: o i, bias: o. Returns ... o

    trains_weights: False if PyTorch is faster for the gradient of the weight.
    """
    return _OneDNN.apply(x, weight, trains_weights, bias)


def onednn_weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`weight_gradient` by oneDNN, which copies the left one of two transposed matrices: here the narrower one."""
    grad, x = rows_of(grad), rows_of(x)
    if grad.shape[1] <= x.shape[1]:
        return onednn_linear(grad.t(), x.t())
    return onednn_linear(x.t(), grad.t()).t().contiguous()


def weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of W in y = x W^T: grad^T x over all rows. grad: ... o, x: ... i. Returns o i"""
    return rows_of(grad).t() @ rows_of(x)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x: ... i -> r i"""
    return x.reshape(-1, x.shape[-1])
