"""RMSNorm and SwiGLU with their gradients written out: fewer passes over memory, and less memory kept.

PyTorch's autograd keeps every intermediate result and makes one pass for each operation. These kernels keep only the
inputs and compute the rest again, which takes less time than storing it and reading it back.

Shapes:  D model dim   f feed-forward dim
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from engine.equivalence import Case, Comparison, EquivalenceCheck, notice
from fast.kernel import Kernel, has_hooks, own_methods
from fast.linear import Bf16Linear, has_gated_products, onednn_gated, readable
from llama import FeedForward, RMSNorm


class CheckedKernel(Kernel):
    """A kernel that computes only while it agrees with the code that it replaces."""

    __slots__ = ()

    def may_compute(self, check: EquivalenceCheck) -> bool:
        """Whether the kernel may compute for this module now."""
        own = own_methods(self)
        if own:
            notice(f"{check.name} is computed as it is written: one has its own {', '.join(sorted(own))}")
        return not own and check.holds()


def has_more(name: str, others: tuple, named: dict[str, Any]) -> bool:
    """Whether a call has arguments beside one, `name`: the caller was edited, and the kernel does not know them."""
    return len(others) + len(named) > 1 or not named.keys() <= {name}


class FusedRMSNorm(CheckedKernel, RMSNorm):
    """`RMSNorm` with its own backward pass. out_dtype: what the layers that read it compute in."""

    __slots__ = ("out_dtype",)
    replaces = RMSNorm

    def __init__(self, dim: int, eps: float = 1e-6, *, out_dtype: torch.dtype = torch.float32):
        super().__init__(dim, eps)
        self.out_dtype = out_dtype

    @classmethod
    def from_norm(cls, norm: RMSNorm, out_dtype: torch.dtype = torch.float32) -> FusedRMSNorm:
        kernel = cls.sharing(norm)
        kernel.out_dtype = out_dtype
        return kernel

    def forward(self, x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        """x: ... D -> ... D. Other arguments are for an edited `RMSNorm`."""
        # a model converted to another number format is computed as it is written
        if others or named or x.dtype != torch.float32 or not self.may_compute(RMS_NORM_CHECK):
            return super().forward(x, *others, **named)
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
        grad, normed = grad.to(x.dtype), x * scale  # ... D
        along = grad * normed  # ... D: g n
        grad_weight = along.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None  # D
        mean = (along @ weight)[..., None].div_(x.shape[-1])  # ... 1
        grad_x = torch.mul(grad, weight, out=along).addcmul_(normed, mean, value=-1.0).mul_(scale)
        return grad_x, grad_weight, None, None


class FusedFeedForward(CheckedKernel, FeedForward):
    """`FeedForward` whose gate silu(a) * b keeps nothing but a and b."""

    __slots__ = ()
    replaces = FeedForward

    def forward(self, x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        """x: ... D -> ... D, through ... f"""
        x = readable(x, self, "w1", "w3")
        if others or named or not self.may_compute(FEED_FORWARD_CHECK):
            return super().forward(x, *others, **named)
        gated = swiglu(self.w1(x), self.w3(x)) if torch.is_grad_enabled() else self._gated(x)
        return self.dropout(self.w2(readable(gated, self, "w2")))

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        """silu(w1 x) * w3 x where nothing is trained, in two products if both are oneDNN's. ... D -> ... f"""
        layers = self.w1, self.w3
        if x.dtype == torch.bfloat16 and all(map(_gives_bf16, layers)):
            packed = [layer.packed(x) for layer in layers]
            if all(weight is not None for weight in packed) and has_gated_products():
                return onednn_gated(x, *packed)
        return _gate(self.w1(x), self.w3(x))


def _gives_bf16(layer: nn.Module) -> bool:
    """Whether a layer is a product in bfloat16 and nothing else, with a result in bfloat16."""
    if type(layer) is not Bf16Linear or layer.bias is not None or has_hooks(layer) or own_methods(layer):
        return False
    return (layer.read_dtype or layer.out_dtype) == torch.bfloat16


def _gate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """silu(a) * b, without gradients. ... f each"""
    gates = F.silu(a)
    # PyTorch 2.13 multiplies float32 sooner in place, and bfloat16 half as fast as into new memory
    return gates * b if a.dtype == torch.bfloat16 else gates.mul_(b)


def swiglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """silu(a) * b, with gradients. ... f each"""
    return _SwiGLU.apply(a, b)


class _SwiGLU(torch.autograd.Function):
    """y = silu(a) * b (Shazeer 2020, arXiv:2002.05202, equation 5), where silu(a) = a * sigmoid(a)."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return _gate(a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """db = g silu(a); da = g b silu'(a), where PyTorch has the derivative of silu as one kernel."""
        a, b = ctx.saved_tensors
        gates = F.silu(a)
        grad_b = gates * grad
        along = torch.mul(grad, b, out=gates)  # whose memory grad_a gets as well
        return torch.ops.aten.silu_backward.grad_input(along, a, grad_input=along), grad_b


def _sides_of(plain: nn.Module, kernel: CheckedKernel) -> Comparison:
    """A module and its kernel on the same weights, trained and not, for small and large numbers."""
    for parameter in plain.parameters():
        nn.init.normal_(parameter)

    def ask(module: nn.Module) -> Any:
        return lambda x, training: module.train(training).forward(x)

    cases, parameters = [], tuple(plain.parameters())
    for name, shape, scale in (
        ("a batch", (3, 5), 1.0),
        ("many texts", (81, 2), 0.1),
        ("a long text", (1, 1100), 1.0),
        ("tiny numbers", (2, 3), 1e-6),
        ("large numbers", (2, 3), 1e3),
    ):
        x = torch.randn(*shape, 8) * scale
        cases.append(Case(name, (x, False)))
        if scale >= 1.0 and shape[0] < 81:
            cases.append(Case(f"{name}, trained", (x.clone().requires_grad_(), True), parameters))
    return Comparison(ask(plain), ask(kernel), cases)


def _norms() -> Comparison:
    norm = RMSNorm(8, 1e-6)
    return _sides_of(norm, FusedRMSNorm.from_norm(norm))


def _feed_forwards() -> Comparison:
    feed_forward = FeedForward(8, 12, 4, 0.5)
    return _sides_of(feed_forward, FusedFeedForward.sharing(feed_forward))


RMS_NORM_CHECK = EquivalenceCheck("RMSNorm", (RMSNorm,), _norms, reads={"eps", "weight", "training"})
FEED_FORWARD_CHECK = EquivalenceCheck(
    "FeedForward", (FeedForward,), _feed_forwards, reads={"w1", "w2", "w3", "dropout", "training"}
)
