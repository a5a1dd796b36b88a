"""Memory: matrices that lie in fewer bits, and freed memory that is kept for the next step.

To all code a `CompactWeight`, a matrix of a large model that is not trained, is a float32 tensor. An operation on it
reads its numbers widened to float32; the kernels of `linear.py` and the loops read what is stored.

Shapes:  r rows   i input features   o output features   n = i / 32 groups of 4-bit numbers
"""

from __future__ import annotations

import copy
import ctypes
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from utils import UserError

GROUP = 32  # numbers of 4 bits with one scale
WIDENED_TOGETHER = 512  # rows that stay in the processor's cache
ROUNDED_TOGETHER = 128  # the same for conversions of many steps, whose results between lie in the cache as well
BYTES_OF_PRODUCT = 2**24  # of the bfloat16 rows of one product: several small products take longer than a large one
aten = torch.ops.aten


class CompactWeight(torch.Tensor):
    """A matrix, o i, whose numbers are `stored` in bfloat16, or as 8-bit integers times the `scale` of a row, o, or in
    4 bits, see `quantise_4`.

    It is read-only: writing to it raises `RuntimeError`.
    """

    @staticmethod
    def __new__(cls, stored: torch.Tensor, scale: torch.Tensor | None = None) -> CompactWeight:
        features = stored.shape[1] * (2 if stored.dtype == torch.uint8 else 1)
        weight = torch.Tensor._make_wrapper_subclass(cls, (len(stored), features), dtype=torch.float32)
        weight.stored, weight.scale = stored, scale
        return weight

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def data_ptr(self) -> int:
        return self.stored.data_ptr()

    def __deepcopy__(self, memo: dict) -> torch.nn.Parameter:
        made = type(self)(copy.deepcopy(self.stored, memo), copy.deepcopy(self.scale, memo))
        return torch.nn.Parameter(made, self.requires_grad)

    def rows(self, index: int | torch.Tensor) -> torch.Tensor:
        """Some rows in float32. index: ... -> ... i"""
        return widened(self.stored[index], None if self.scale is None else self.scale[index])

    def widened(self) -> torch.Tensor:
        return widened(self.stored, self.scale)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """`F.linear`, widening some rows at a time. x: ... i -> ... o, of the same dtype: float32, or bfloat16 if the
        weight has 8 or 4 bits; then products are those of its numbers rounded to bfloat16, summed in float32.
        Not differentiable: the rows of one product take the memory of the last one's.
        """
        if x.dtype == torch.bfloat16:
            return torch.cat([F.linear(x, rows) for rows in self._rows_in_bfloat16()], dim=-1)
        if self.stored.dtype == torch.uint8:
            some = zip(self.stored.split(WIDENED_TOGETHER), self.scale.split(WIDENED_TOGETHER), strict=True)
            return torch.cat([F.linear(x, widened(*rows)) for rows in some], dim=-1)
        piece = torch.empty(WIDENED_TOGETHER, self.shape[1])  # new memory for each takes longer than the conversion
        pieces = ((rows, piece[: len(rows)]) for rows in self.stored.split(WIDENED_TOGETHER))
        y = torch.cat([F.linear(x, wide.copy_(rows)) for rows, wide in pieces], dim=-1)
        return y if self.scale is None else y.mul_(self.scale)

    def _rows_in_bfloat16(self) -> Iterator[torch.Tensor]:
        """As many rows at a time as one product takes, each time in the same memory. The weight has a scale."""
        together = max(1, BYTES_OF_PRODUCT // (2 * self.shape[1]))
        wide = torch.empty(min(together, len(self)), self.shape[1], dtype=torch.bfloat16)
        for stored, scale in zip(self.stored.split(together), self.scale.split(together), strict=True):
            rows = wide[: len(stored)]
            for to, *some in zip(*(each.split(ROUNDED_TOGETHER) for each in (rows, stored, scale)), strict=True):
                to.copy_(widened(*some))
            yield rows

    # What loading and inference do with a weight is answered before it comes to `__torch_dispatch__`, at whose first
    # call PyTorch 2.13 imports modules for half a second: `detach`, taking a row, embeddings.

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.rows(index) if type(index) is int and self._is_only_read() else super().__getitem__(index)

    def _is_only_read(self) -> bool:
        return not (torch.is_grad_enabled() and self.requires_grad)

    def detach(self) -> CompactWeight:
        with torch.inference_mode(False):  # a view of a tensor from outside of that mode must be one as well
            return type(self)(self.stored, self.scale)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is F.embedding and kwargs.get("padding_idx") is kwargs.get("max_norm") is None:
            ids, weight = args
            if isinstance(ids, torch.Tensor) and isinstance(weight, cls) and weight._is_only_read():
                return weight.rows(ids)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function._schema.is_mutable:
            raise RuntimeError(f"{function} would write to a weight that was loaded to be read only")
        weight = args[0]
        with torch.inference_mode(False):  # a view of a tensor from outside of that mode must be one as well
            if function in (aten.detach.default, aten.alias.default, aten.clone.default):
                return weight.detach()
            if function is aten.embedding.default:
                return weight.rows(args[1])
            if function is aten.select.int and args[1] == 0:
                return weight.rows(args[2])
            args, kwargs = tree_map_only(cls, cls.widened, (args, kwargs or {}))
            return function(*args, **kwargs)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row as 8-bit integers times a scale of its own, its largest number being 127. x: r i -> r i and r"""
    if isinstance(x, CompactWeight) and x.stored.dtype == torch.int8:
        return x.stored, x.scale
    largest = torch.maximum(x.amax(-1), -x.amin(-1))  # r: two passes that only read take less time than a copy of |x|
    scale = (largest / 127).clamp(min=torch.finfo(x.dtype).tiny)  # a row of zeros stays zeros
    return (x / scale[:, None]).round_().to(torch.int8), scale


def quantise_4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each group of 32 numbers of a row as q times a scale, q from -8 to 7. weight: o i -> o i/2, uint8, and o n

    That number of a group which is furthest from 0 becomes -8 times the scale, as in Q4_0 of GGUF files; scales of less
    squared error made SmolLM2's loss larger. q + 8 lies in half a byte: the first 16 of a group in the lower halves of
    its 16 bytes, the others in the upper ones. Scales are bfloat16, so that q times a scale is exact in float32.
    Raises `UserError` if i is no multiple of 32.
    """
    if isinstance(weight, CompactWeight) and weight.stored.dtype == torch.uint8:
        return weight.stored, weight.scale
    require_groups(weight.shape[1])
    groups = weight.float().unflatten(1, (-1, GROUP))  # o n 32
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (least.where(-least >= most, most) / -8).bfloat16()  # o n 1: NaN stays
    q = (groups / scale.float().where(scale != 0, 1)).add_(8.5)
    q = q.to(torch.int8).clamp_(0, 15).view(torch.uint8)  # rounds down; converting to uint8 takes twice the time
    return torch.add(q[..., :16], q[..., 16:], alpha=16).flatten(1), scale[..., 0]


def require_groups(features: int) -> None:
    if features % GROUP:
        raise UserError(f"int4 takes {GROUP} numbers of a row together, and a row here has {features}; use int8")


def widened(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Rows as float32. stored, scale: of a `CompactWeight`, or the same index of both. Returns ... i"""
    if stored.dtype != torch.uint8:
        return stored.float() if scale is None else stored.float().mul_(scale[..., None])
    halves = stored.unflatten(-1, (-1, GROUP // 2))  # ... n 16
    q = torch.cat([halves & 15, halves >> 4], dim=-1).view(torch.int8).sub_(8)  # ... n 32
    return q.float().mul_(scale.float()[..., None]).flatten(-2)


def compacted(name: str, tensor: torch.Tensor, precision: str) -> torch.Tensor:
    """A tensor of a state dict as a model that computes in this precision keeps it, if it is not trained.

    Vectors are float32 in any precision; embeddings are bfloat16 in int8, unless they are the output matrix as well.
    In int4 the matrices of the layers have 4 bits, the others what they have in int8: the output matrix in 4 bits costs
    more loss than it saves time.
    """
    tensor = tensor.detach()  # a file may hold parameters
    if tensor.dim() < 2 or precision == "fp32":
        return tensor.float()
    if precision == "bf16" or name.endswith("tok_embeddings.weight"):
        return CompactWeight(tensor.bfloat16())
    in_few_bits = quantise_4 if precision == "int4" and "layers." in name else quantise
    keep_freed_memory()  # else each step waits for new memory longer than it computes
    with torch.inference_mode(False):  # whoever loads the model, it can be used outside of that mode
        of_one = in_few_bits(tensor[:1].float())
        stored, scale = (torch.empty((len(tensor), *each.shape[1:]), dtype=each.dtype) for each in of_one)
    for rows, *kept in zip(*(each.split(ROUNDED_TOGETHER) for each in (tensor, stored, scale)), strict=True):
        for whole, part in zip(kept, in_few_bits(rows.float()), strict=True):
            whole.copy_(part)
    return CompactWeight(stored, scale)


# --------------------------------------------------------------------------------------------------------- freed memory
# A step frees its results, and the next one needs as much memory again. If the system takes freed memory back, it
# gives it out again in pages of some kilobytes and clears each one: with some hundred megabytes a step, that takes
# longer than the computation.

# Of glibc's malloc.h. Without these calls both thresholds move by themselves, up to 32 MiB and 64 MiB.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_PIECE = 32 * 2**20  # bytes that are kept: glibc takes no higher threshold
KEPT_BYTES = 2**31 - 1  # at the end of the heap
USERS_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keep freed pieces of up to 32 MiB, if the C library is glibc. Returns whether they are kept.

    Another C library, or a user's own settings of glibc, stay as they are.
    """
    if any(name in os.environ for name in USERS_SETTINGS):
        return False
    try:
        libc = ctypes.CDLL(None)
        _, mallopt = libc.gnu_get_libc_version, libc.mallopt
    except (AttributeError, OSError, TypeError):  # not Linux, or a C library without it
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_PIECE) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
