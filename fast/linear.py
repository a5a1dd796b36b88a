"""Linear layers on the kernel that suits the machine and the precision. They differ from `nn.Linear` in nothing else.

Shapes:  r rows, batch and positions together   i input features   o output features
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fast.equivalence import Case, Comparison, difference
from fast.kernel import Kernel

SMALL = 2**20  # multiplications: some 20 microseconds
PACKED_FOR = 64  # rows; the layout that oneDNN picks for this many is within 2 % of the best one for 8 to 4000


@cache
def why_no_onednn(dtype: torch.dtype = torch.float32) -> str | None:
    """Why oneDNN's products, which `torch.compile` uses and no public function reaches, cannot be had; else None.

    An operator may exist and fail on this processor, so it is asked for a small product, packed and not.
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
    """Whether oneDNN's products are right here, and nobody has switched oneDNN off."""
    return torch.backends.mkldnn.enabled and why_no_onednn(dtype) is None


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` computed by oneDNN. x: ... i, weight: o i, plain or packed, bias: o. Returns ... o"""
    return torch.ops.mkldnn._linear_pointwise(x, _in_layout(weight), bias, "none", [], "")


def _in_layout(weight: torch.Tensor) -> torch.Tensor:
    """A weight that oneDNN has a kernel for. A part of another tensor takes its reference code, seconds a product."""
    if weight.is_mkldnn or weight.is_contiguous() or weight.t().is_contiguous():
        return weight
    return weight.contiguous()


def is_small(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product is over before oneDNN, which PyTorch must look up a kernel for each time, would begin."""
    return x.shape[:-1].numel() * weight.numel() < SMALL


def state_of(weight: torch.Tensor) -> tuple[int, Any]:
    """Changes when a weight is replaced or written to."""
    # PyTorch does not count what is written to an inference tensor, so its state is never the same
    return weight.data_ptr(), object() if weight.is_inference() else weight._version


class KernelLinear(Kernel, nn.Linear):
    """A linear layer that, while it is not trained, keeps a copy of its weight in a kernel's own layout.

    Of all of these, `OneDNNLinear` alone has a bias, if the layer has one that it stands in for.
    The copy is no part of the state dict. It is dropped by `train()` and `eval()` and by every training step, and made
    anew when the weight was written to, so that it is never older than the weight. keeps_copies: False where a weight
    must not lie twice in memory, such as one that is gathered for the time of its layer's computation alone; what is
    made of it then lasts no longer than a call.

    Formats and ways to compute are keywords of the constructor and of `from_linear`: those of `set_formats`.
    """

    __slots__ = ("keeps_copies", "_copy", "_copied")
    replaces = nn.Linear

    def __init__(self, in_features: int, out_features: int, **formats: Any):
        super().__init__(in_features, out_features, bias=False)
        self.set_formats(**formats)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **formats: Any) -> KernelLinear:
        """A kernel in the place of a layer: it shares the weight and all else that the layer holds."""
        kernel = cls.sharing(linear)
        kernel.set_formats(**formats)
        return kernel

    def set_formats(self, *, keeps_copies: bool = True) -> None:
        """Once, where the kernel is made."""
        self.keeps_copies = keeps_copies

    def copy_of_weight(self, make: Callable[[torch.Tensor], Any]) -> Any:
        """`make(weight)`, computed once for each state of the weight, or in each call."""
        if not self.keeps_copies:
            return make(self.weight.detach())
        state = (make, *state_of(self.weight))
        if self._copied is None or self._copied[0] != state:
            # what was read is kept alive with its copy, so that no other weight can come to lie at its address
            weight = self.weight.detach()
            self._copy, self._copied = make(weight), (state, weight)
        return self._copy

    def product_of_copy(self, x: torch.Tensor, packs: bool, make: Callable, make_packed: Callable) -> torch.Tensor:
        """x W^T in float32, with a copy of the weight, or a packed one where it `packs`. ... i -> ... o"""
        if packs and x.dtype == torch.float32 and not is_small(x, self.weight):
            return onednn_linear(x, self.copy_of_weight(make_packed))
        return F.linear(x, self.copy_of_weight(make))

    def drop_copy(self) -> None:
        self._copy = self._copied = None

    def train(self, mode: bool = True) -> KernelLinear:
        self.drop_copy()
        return super().train(mode)

    def is_trained(self, x: torch.Tensor) -> bool:
        has_gradient = any(t is not None and t.requires_grad for t in (x, self.weight, self.bias))
        return torch.is_grad_enabled() and has_gradient


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight in the layout that oneDNN reads fastest."""
    return torch.ops.mkldnn._reorder_linear_weight(_in_layout(weight), PACKED_FOR)


def _to_bf16(weight: torch.Tensor) -> torch.Tensor:
    return weight.bfloat16()


def _pack_bf16(weight: torch.Tensor) -> torch.Tensor:
    return pack(weight.bfloat16())


class OneDNNLinear(KernelLinear):
    """float32 through oneDNN: where it is not trained with a packed weight, where it is trained with the weight itself.

    With the bias of the layer that it stands in for, if that has one.

    packs, trains, trains_weights: each only where oneDNN is the faster one here (`fast.apply`); else PyTorch computes
    as ever. trains_weights: also the gradient of the weight, where it trains at all.
    """

    __slots__ = ("packs", "trains", "trains_weights")

    def set_formats(
        self, *, packs: bool = True, trains: bool = True, trains_weights: bool = True, keeps_copies: bool = True
    ) -> None:
        super().set_formats(keeps_copies=keeps_copies)
        self.packs, self.trains, self.trains_weights = packs and keeps_copies, trains, trains_weights

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


class _OneDNN(torch.autograd.Function):
    """y = x W^T + b and the gradient of x by oneDNN, and that of W by whoever is faster."""

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
        grad_bias = _rows(grad).sum(0) if ctx.needs_input_grad[3] else None
        return grad_x, grad_weight, None, grad_bias


def onednn_trained(
    x: torch.Tensor, weight: torch.Tensor, trains_weights: bool = True, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`F.linear` with gradients, by oneDNN. x: ... i, weight: o i, bias: o. Returns ... o

    trains_weights: False where PyTorch is the faster one for the gradient of the weight.
    """
    return _OneDNN.apply(x, weight, trains_weights, bias)


def onednn_weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`weight_gradient` by oneDNN.

    Of the two, both read against their layout, oneDNN has the left one copied: the narrower.
    """
    grad, x = _rows(grad), _rows(x)
    if grad.shape[1] <= x.shape[1]:
        return onednn_linear(grad.t(), x.t())
    return onednn_linear(x.t(), grad.t()).t().contiguous()


def weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of W in y = x W^T: grad^T x over all rows. grad: ... o, x: ... i. Returns o i"""
    return _rows(grad).t() @ _rows(x)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x: ... i -> r i"""
    return x.reshape(-1, x.shape[-1])


class Bf16Linear(KernelLinear):
    """Products of bfloat16 numbers, summed in float32; the weight that is trained and saved stays float32.

    out_dtype: of what it returns, float32 being what every other layer can read. bfloat16 is what autocast would give;
    on a CPU the backward pass of attention is several times slower in it, so what feeds attention in training is
    float32 there. read_dtype: the same where nothing is trained; None for no difference.
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_trained(x):
            self.drop_copy()
            return _Bf16.apply(x, self.weight, self.keeps_copies).to(self.out_dtype)
        if x.device.type == "cpu" and self.keeps_copies and has_onednn(torch.bfloat16):
            y = onednn_linear(x.bfloat16(), self.copy_of_weight(_pack_bf16))
        else:
            y = F.linear(x.bfloat16(), self.copy_of_weight(_to_bf16))
        return y.to(self.read_dtype or self.out_dtype)


class _Bf16(torch.autograd.Function):
    """y = x W^T and both gradients as products of bfloat16 matrices. keeps_copy: of the weight, for the second pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, keeps_copy: bool) -> torch.Tensor:
        x16, weight16 = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(x16, weight16 if keeps_copy else weight)
        ctx.dtypes = x.dtype, weight.dtype
        return F.linear(x16, weight16)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x16, weight = ctx.saved_tensors
        grad16 = grad.bfloat16()
        grad_x = (grad16 @ weight.bfloat16()).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        grad_weight = weight_gradient(grad16, x16).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def readable(x: Any, module: nn.Module, *readers: str) -> Any:
    """x as the layers of these names in a module can read it: one put in a kernel's place may know float32 alone."""
    if not isinstance(x, torch.Tensor) or x.dtype != torch.bfloat16:
        return x
    return x if all(_reads_bf16(layer) for name in readers if (layer := module._modules.get(name))) else x.float()


def _reads_bf16(layer: nn.Module) -> bool:
    if isinstance(layer, Bf16Linear):
        return True
    return next((weight.dtype for weight in layer.parameters()), torch.bfloat16) == torch.bfloat16


def round_to_bf16(x: torch.Tensor) -> torch.Tensor:
    """The nearest numbers that bfloat16 has, as float32."""
    return x.bfloat16().float()


def _pack_rounded(weight: torch.Tensor) -> torch.Tensor:
    return pack(round_to_bf16(weight))


class RoundedLinear(KernelLinear):
    """What `Bf16Linear` computes, by float32 products of rounded numbers, for CPUs whose bfloat16 products are slow.

    packs: whether oneDNN is the faster one where nothing is trained.
    """

    __slots__ = ("packs",)

    def set_formats(self, *, packs: bool = False, keeps_copies: bool = True) -> None:
        super().set_formats(keeps_copies=keeps_copies)
        self.packs = packs and keeps_copies  # what is packed for one product alone saves nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_trained(x):
            self.drop_copy()
            return _Rounded.apply(x, self.weight, self.keeps_copies)
        return round_to_bf16(self.product_of_copy(round_to_bf16(x), self.packs, round_to_bf16, _pack_rounded))


class _Rounded(torch.autograd.Function):
    """`_Bf16` with a rounding wherever that has one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, keeps_copy: bool) -> torch.Tensor:
        x16, weight16 = round_to_bf16(x), round_to_bf16(weight)
        ctx.save_for_backward(x16, weight16 if keeps_copy else weight)
        ctx.keeps_copy = keeps_copy
        return round_to_bf16(F.linear(x16, weight16))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x16, weight = ctx.saved_tensors
        weight16 = weight if ctx.keeps_copy else round_to_bf16(weight)
        grad16 = round_to_bf16(grad)
        grad_x = round_to_bf16(grad16 @ weight16) if ctx.needs_input_grad[0] else None
        grad_weight = round_to_bf16(weight_gradient(grad16, x16)) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


class Int8Linear(KernelLinear):
    """Weights of 8 bits, one scale for each output feature (Dettmers et al. 2022, arXiv:2208.07339, section 2.1).

    `round_weight` puts the weight on the grid q * scale, q from -127 to 127, once and for all. `rounds_inputs`: each
    row of a batch is rounded to 8 bits as well on the way in, so that the product is one of integers. That is not
    differentiable: where a gradient is wanted (of a layer below; the weight has none) the rounded weight meets the
    batch as it is. packs: whether oneDNN is the faster one for float32 products.
    """

    __slots__ = ("packs", "rounds_inputs")

    def set_formats(self, *, packs: bool = False, rounds_inputs: bool = True, keeps_copies: bool = True) -> None:
        super().set_formats(keeps_copies=keeps_copies)
        self.packs, self.rounds_inputs = packs and keeps_copies, rounds_inputs

    def round_weight(self) -> None:
        quantised, scale = quantise(self.weight.detach())
        with torch.no_grad():
            self.weight.copy_(quantised * scale[:, None])
        self.weight.requires_grad_(False)

    def eight_bits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight as integers, o i, and their scales, o."""
        return quantise(self.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu" or x.dtype != torch.float32 or self.is_trained(x):
            return F.linear(x, self.weight)
        if not self.rounds_inputs:
            return self.product_of_copy(x, self.packs, on_grid, _pack_on_grid)
        rows = _rows(x)  # r i
        if has_integer_products():
            y = int8_linear(*quantise(rows), *self.copy_of_weight(quantise))  # r o
        else:
            integers, scale = quantise(rows)
            y = self.product_of_copy(integers.float(), self.packs, on_grid, _pack_on_grid).mul_(scale[:, None])  # r o
        return y.view(*x.shape[:-1], -1)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row as 8-bit integers times a scale of its own, its largest number being 127. x: r i -> r i and r"""
    scale = torch.linalg.vector_norm(x, ord=float("inf"), dim=-1) / 127  # r
    scale = scale.clamp(min=torch.finfo(x.dtype).tiny)  # a row of zeros stays zeros
    return (x / scale[:, None]).round_().to(torch.int8), scale


def on_grid(weight: torch.Tensor) -> torch.Tensor:
    """A weight rounded to 8 bits; itself if it is already, as all are that were not loaded later. o i -> o i"""
    quantised, scale = quantise(weight)
    rounded = quantised * scale[:, None]
    return weight if torch.equal(rounded, weight) else rounded


def _pack_on_grid(weight: torch.Tensor) -> torch.Tensor:
    return pack(on_grid(weight))


@cache
def has_integer_products() -> bool:
    """Whether products of 8-bit integers are there and right: x86 without VNNI adds pairs of them in 16 bits."""
    largest = torch.full((2, 64), 127, dtype=torch.int8)
    try:
        return bool((torch._int_mm(largest, largest.t()) == 64 * 127**2).all())
    except (AttributeError, RuntimeError):
        return False


def int8_linear(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """`F.linear` of what `quantise` gave for x and weight. x: r i and r, weight: o i and o. Returns r o, float32

    i is at most 133144, or sums of products would not fit 32 bits.
    """
    if x.shape[1] == 1 or not has_integer_products():  # of one feature PyTorch 2.13 gives zeros
        products = F.linear(x.float(), weight.float())  # exact up to 1040 features, then rounded as float32 is
    else:
        products = torch._int_mm(x, weight.t())
    return (products * weight_scale).mul_(x_scale[:, None])
