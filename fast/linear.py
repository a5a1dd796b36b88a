"""Linear layers on the kernel that suits the machine and the precision, and oneDNN's products, on which many run.

The layers differ from `nn.Linear` in nothing else. `torch.compile` uses oneDNN's products; no public function has them.

Shapes:  r rows, batch and positions together   i input features   o output features
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from engine.equivalence import Case, Comparison, difference
from fast.compact import CompactWeight, quantise, quantise_4, require_groups, widened
from fast.kernel import Kernel, WeightState

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


# ----------------------------------------------------------------------------------------------------------- the layers

SMALL_PRODUCT = 2**20  # multiplications: some 20 microseconds


def is_small(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product takes less time than PyTorch needs to look up oneDNN's kernel for it."""
    return x.shape[:-1].numel() * weight.numel() < SMALL_PRODUCT


class KernelLinear(Kernel, nn.Linear):
    """A linear layer that, while it is not trained, keeps a copy of its weight in a kernel's own layout.

    The copy is not in the state dict. `train()`, `eval()` and every training step drop it, and a write to the weight
    makes the next call renew it, see `fast.kernel`. keeps_copies: False if a weight must not lie twice in memory, such
    as one that is gathered only while its layer computes; then a copy lasts for one call.

    The constructor and `from_linear` take the arguments of `set_formats` as keywords. Only `OneDNNLinear` takes the
    bias of the layer that it replaces; another kernel that is given a bias later computes as `nn.Linear` does.
    """

    __slots__ = ("keeps_copies", "_copy", "_copied")
    replaces = nn.Linear

    def __init__(self, in_features: int, out_features: int, **formats: Any):
        super().__init__(in_features, out_features, bias=False)
        self.set_formats(**formats)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **formats: Any) -> KernelLinear:
        """A kernel in the place of a layer: it shares the weight and everything else that the layer holds."""
        kernel = cls.sharing(linear)
        kernel.set_formats(**formats)
        return kernel

    def set_formats(self, *, keeps_copies: bool = True) -> None:
        """Once, when the kernel is made. A compact weight is read as it is stored."""
        self.keeps_copies = keeps_copies and not isinstance(self.weight, CompactWeight)

    def copy_of_weight(self, *steps: Callable[..., Any]) -> Any:
        """The weight after `steps`, one after another: computed once for each state of the weight, or in each call."""
        if not self.keeps_copies:
            return reduce(_then, steps, self.weight if isinstance(self.weight, CompactWeight) else self.weight.detach())
        if self._copied is None or self._copied[0] != steps or not self._copied[1].stands(self.weight):
            state = WeightState(self.weight)
            self._copy, self._copied = reduce(_then, steps, state.weight), (steps, state)
        return self._copy

    def product_of_copy(self, x: torch.Tensor, packs: bool, rounded: Callable) -> torch.Tensor:
        """x W^T in x's dtype with the rounded weight; packs: by oneDNN, if the product is large. ... i -> ... o"""
        if isinstance(self.weight, CompactWeight):
            return self.weight.linear(x)
        steps = (rounded,) if x.dtype == torch.float32 else (rounded, to_bf16)
        if packs and has_onednn(x.dtype) and not is_small(x, self.weight):
            return onednn_linear(x, self.copy_of_weight(*steps, pack))
        return F.linear(x, self.copy_of_weight(*steps))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x) if self.bias is None else super().forward(x.to(self.weight.dtype))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T by the kernel. ... i -> ... o"""
        raise NotImplementedError

    def drop_copy(self) -> None:
        self._copy = self._copied = None

    def train(self, mode: bool = True) -> KernelLinear:
        self.drop_copy()
        return super().train(mode)

    def is_trained(self, x: torch.Tensor) -> bool:
        has_gradient = any(t is not None and t.requires_grad for t in (x, self.weight, self.bias))
        return torch.is_grad_enabled() and has_gradient


def _then(weight: torch.Tensor, step: Callable[..., Any]) -> Any:
    return step(weight)


class OneDNNLinear(KernelLinear):
    """float32 through oneDNN: a packed weight while it is not trained, the weight itself while it is.

    packs, trains, trains_weights: each True only if oneDNN is faster there on this machine (`fast.apply`); otherwise
    PyTorch computes. trains_weights: also the gradient of the weight, if `trains`.
    """

    __slots__ = ("packs", "trains", "trains_weights")

    def set_formats(
        self, *, packs: bool = True, trains: bool = True, trains_weights: bool = True, keeps_copies: bool = True
    ) -> None:
        super().set_formats(keeps_copies=keeps_copies)
        self.packs, self.trains, self.trains_weights = packs and self.keeps_copies, trains, trains_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_float = x.dtype == self.weight.dtype == torch.float32
        is_plain = x.device.type != "cpu" or not is_float or torch.is_autocast_enabled("cpu")
        if is_plain or is_small(x, self.weight):
            return F.linear(x, self.weight, self.bias)
        if self.is_trained(x):
            self.drop_copy()
            if self.trains:
                return onednn_trained(x, self.weight, self.trains_weights, self.bias)
        elif self.packs:
            return onednn_linear(x, self.copy_of_weight(pack), self.bias)
        return F.linear(x, self.weight, self.bias)


# ------------------------------------------------------------------------------------------------------------- bfloat16


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.stored if isinstance(x, CompactWeight) and x.scale is None else x.bfloat16()


def round_to_bf16(x: torch.Tensor) -> torch.Tensor:
    """The nearest numbers that bfloat16 has, as float32."""
    return x.bfloat16().float()


class Bf16Linear(KernelLinear):
    """Products of bfloat16 numbers, summed in float32; the weight that is trained and saved stays float32.

    out_dtype: of the result. Every other layer can read float32. bfloat16 is what autocast would give; on a CPU
    PyTorch's gradients of attention are several times slower in it, so there what feeds attention in training is
    float32 unless others are taken (`fast.attention.trained_by_products`).
    read_dtype: of the result while nothing is trained; None for `out_dtype`.
    """

    __slots__ = ("out_dtype", "read_dtype")

    def set_formats(
        self,
        *,
        out_dtype: torch.dtype = torch.float32,
        read_dtype: torch.dtype | None = None,
        keeps_copies: bool = True,
    ) -> None:
        super().set_formats(keeps_copies=keeps_copies)
        self.out_dtype, self.read_dtype = out_dtype, read_dtype

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_trained(x):
            self.drop_copy()
            return _ProductIn16Bits.apply(x, self.weight, to_bf16, self.keeps_copies).to(self.out_dtype)
        packed = self.packed(x)
        x = x.bfloat16()
        y = F.linear(x, self.copy_of_weight(to_bf16)) if packed is None else onednn_linear(x, packed)
        return y.to(self.read_dtype or self.out_dtype)

    def packed(self, x: torch.Tensor) -> torch.Tensor | None:
        """The weight in oneDNN's layout, where oneDNN is to compute and x needs no gradient; else None."""
        if self.is_trained(x) or x.device.type != "cpu" or not self.keeps_copies or not has_onednn(torch.bfloat16):
            return None
        return self.copy_of_weight(to_bf16, pack)


class RoundedLinear(KernelLinear):
    """What `Bf16Linear` computes, by float32 products of rounded numbers, for CPUs whose bfloat16 products are slow.

    packs: whether oneDNN is faster while nothing is trained.
    """

    __slots__ = ("packs",)

    def set_formats(self, *, packs: bool = False, keeps_copies: bool = True) -> None:
        super().set_formats(keeps_copies=keeps_copies)
        self.packs = packs and self.keeps_copies  # to pack a weight for one product saves nothing

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_trained(x):
            self.drop_copy()
            return _ProductIn16Bits.apply(x, self.weight, round_to_bf16, self.keeps_copies)
        return round_to_bf16(self.product_of_copy(round_to_bf16(x), self.packs, round_to_bf16))


class _ProductIn16Bits(torch.autograd.Function):
    """y = x W^T and both gradients, as products of matrices in bfloat16 or rounded to it.

    rounded: `to_bf16` or `round_to_bf16`. keeps_copy: of the rounded weight, for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, rounded: Callable, keeps_copy: bool) -> torch.Tensor:
        x16, weight16 = rounded(x), rounded(weight)
        ctx.save_for_backward(x16, weight16 if keeps_copy else weight)
        ctx.rounded, ctx.keeps_copy, ctx.dtypes = rounded, keeps_copy, (x.dtype, weight.dtype)
        return rounded(F.linear(x16, weight16))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x16, weight = ctx.saved_tensors
        weight16, grad16 = weight if ctx.keeps_copy else ctx.rounded(weight), ctx.rounded(grad)
        grad_x = ctx.rounded(grad16 @ weight16).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.rounded(weight_gradient(grad16, x16)).to(ctx.dtypes[1])
        return grad_x, grad_weight, None, None


def readable(x: Any, module: nn.Module, *readers: str) -> Any:
    """x, as float32 unless all layers of these names in a module read bfloat16 (a replaced layer may not)."""
    if not isinstance(x, torch.Tensor) or x.dtype != torch.bfloat16:
        return x
    return x if all(_reads_bf16(layer) for name in readers if (layer := module._modules.get(name))) else x.float()


def _reads_bf16(layer: nn.Module) -> bool:
    if isinstance(layer, Bf16Linear):
        return True
    return next((weight.dtype for weight in layer.parameters()), torch.bfloat16) == torch.bfloat16


# --------------------------------------------------------------------------------------------------------------- 8 bits


def on_grid(in_few_bits: Callable[..., tuple[torch.Tensor, ...]], weight: torch.Tensor) -> torch.Tensor:
    """A rounded weight; itself if it is rounded already, as all are that were not loaded later. o i -> o i"""
    rounded = widened(*in_few_bits(weight))
    return weight if torch.equal(rounded, weight) else rounded


class Int8Linear(KernelLinear):
    """Weights of 8 bits, one scale for each output feature (Dettmers et al. 2022, arXiv:2208.07339, section 2.1).

    `round_weight` puts the weight on the grid q * scale, q from -127 to 127, once and for all.
    inputs_to: what each row of a batch is rounded to. torch.int8: the product is one of integers; torch.bfloat16: of
    bfloat16 numbers, summed in float32; None: not at all. Rounding is not differentiable: if a layer below needs a
    gradient, the rounded weight meets the batch as it is. (The weight has no gradient.)
    packs: whether oneDNN is faster for other products than those of integers.
    """

    __slots__ = ("packs", "inputs_to")
    in_few_bits, on_grid = staticmethod(quantise), staticmethod(partial(on_grid, quantise))

    def set_formats(self, *, packs: bool = False, inputs_to: torch.dtype | None = torch.int8, **formats: Any) -> None:
        super().set_formats(**formats)
        self.packs, self.inputs_to = packs and self.keeps_copies, inputs_to

    def round_weight(self) -> None:
        quantised, scale = self.in_few_bits(self.weight.detach())
        if not isinstance(self.weight, CompactWeight):
            with torch.no_grad():
                self.weight.copy_(widened(quantised, scale))
            self.weight.requires_grad_(False)
        elif self.weight.stored is not quantised:  # loaded for another precision
            self.weight = nn.Parameter(CompactWeight(quantised, scale), requires_grad=False)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu" or x.dtype != torch.float32 or self.is_trained(x):
            return F.linear(x, self.weight)
        if self.inputs_to != torch.int8:
            return self.product_of_copy(x.to(self.inputs_to or x.dtype), self.packs, self.on_grid).float()
        rows = rows_of(x)  # r i
        if has_integer_products():
            y = int8_linear(*quantise(rows), *self.copy_of_weight(quantise))  # r o
        else:
            integers, scale = quantise(rows)
            y = self.product_of_copy(integers.float(), self.packs, self.on_grid).mul_(scale[:, None])  # r o
        return y.view(*x.shape[:-1], y.shape[-1])  # not -1: there may be no rows


class Int4Linear(Int8Linear):
    """Weights of 4 bits in groups of 32, see `quantise_4`. inputs_to: torch.bfloat16 or None.

    Raises `UserError` when it is made for a number of input features that is no multiple of 32.
    """

    __slots__ = ()
    in_few_bits, on_grid = staticmethod(quantise_4), staticmethod(partial(on_grid, quantise_4))

    def set_formats(self, *, inputs_to: torch.dtype | None = None, **formats: Any) -> None:
        require_groups(self.in_features)
        super().set_formats(inputs_to=inputs_to, **formats)


@cache
def has_integer_products() -> bool:
    """Whether PyTorch multiplies 8-bit integers correctly here: x86 without VNNI adds pairs of them in 16 bits."""
    largest = torch.full((2, 64), 127, dtype=torch.int8)
    try:
        return bool((torch._int_mm(largest, largest.t()) == 64 * 127**2).all())
    except (AttributeError, RuntimeError):
        return False


def int8_linear(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """`F.linear` of quantised x and weight (see `quantise`). x: r i and r, weight: o i and o. Returns r o, float32

    i is at most 133144, or sums of products would not fit 32 bits.
    """
    if x.shape[1] == 1 or not has_integer_products():  # of one feature PyTorch 2.13 gives zeros
        products = F.linear(x.float(), weight.float())  # exact up to 1040 features, then rounded as float32 is
    else:
        products = torch._int_mm(x, weight.t())
    return (products * weight_scale).mul_(x_scale[:, None])
