"""Matrices of large models that are not trained: float32 numbers that lie in memory in fewer bits, once.

To all code a `CompactWeight` is a float32 tensor. An operation on it reads its numbers widened to float32; the kernels
of `linear.py` and the loops read what is stored.

Shapes:  r rows   i input features   o output features   n = i / 32 groups of 4-bit numbers
"""

from __future__ import annotations

import copy
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from utils import UserError

GROUP = 32  # numbers of 4 bits with one scale
WIDENED_TOGETHER = 512  # rows that stay in the processor's cache
QUANTISED_TOGETHER = 512  # enough work for a thread not to wait for Python's others
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
        """
        if self.stored.dtype == torch.uint8 or x.dtype == torch.bfloat16:
            some = zip(self.stored.split(WIDENED_TOGETHER), self.scale.split(WIDENED_TOGETHER), strict=True)
            return torch.cat([F.linear(x, widened(*rows).to(x.dtype)) for rows in some], dim=-1)
        piece = torch.empty(WIDENED_TOGETHER, self.shape[1])  # new memory for each takes longer than the conversion
        pieces = ((rows, piece[: len(rows)]) for rows in self.stored.split(WIDENED_TOGETHER))
        y = torch.cat([F.linear(x, wide.copy_(rows)) for rows, wide in pieces], dim=-1)
        return y if self.scale is None else y.mul_(self.scale)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function._schema.is_mutable:
            raise RuntimeError(f"{function} would write to a weight that was loaded to be read only")
        weight = args[0]
        with torch.inference_mode(False):  # a view of a tensor from outside of that mode must be one as well
            if function in (aten.detach.default, aten.alias.default, aten.clone.default):
                return cls(weight.stored, weight.scale)
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
    scale = x.abs().amax(-1) / 127  # r
    scale = scale.clamp(min=torch.finfo(x.dtype).tiny)  # a row of zeros stays zeros
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
    q = (groups / scale.float().where(scale != 0, 1)).add_(8.5).clamp_(0, 15).to(torch.uint8)  # rounds down
    return (q[..., :16] | q[..., 16:] << 4).flatten(1), scale[..., 0]


def require_groups(features: int) -> None:
    if features % GROUP:
        raise UserError(f"int4 takes {GROUP} numbers of a row together, and a row here has {features}; use int8")


def widened(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Rows as float32. stored, scale: of a `CompactWeight`, or the same index of both. Returns ... i"""
    if stored.dtype != torch.uint8:
        return stored.float() if scale is None else stored.float().mul_(scale[..., None])
    halves = stored.unflatten(-1, (-1, GROUP // 2))  # ... n 16
    q = torch.cat([halves & 15, halves >> 4], dim=-1).float().sub_(8)  # ... n 32
    return q.mul_(scale.float()[..., None]).flatten(-2)


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
    with torch.inference_mode(False):  # other threads of Python are not in that mode, and write to these
        of_one = in_few_bits(tensor[:1].float())
        stored, scale = (torch.empty((len(tensor), *each.shape[1:]), dtype=each.dtype) for each in of_one)

    def write(first: int) -> None:
        rows = slice(first, first + QUANTISED_TOGETHER)
        stored[rows], scale[rows] = in_few_bits(tensor[rows].float())

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # PyTorch's own would wait for one another after each of thousands of small operations
    try:
        with ThreadPoolExecutor(threads) as pool:
            deque(pool.map(write, range(0, len(tensor), QUANTISED_TOGETHER)), maxlen=0)  # raises what a thread raised
    finally:
        torch.set_num_threads(threads)
    return CompactWeight(stored, scale)
