"""Matrices of large models that are not trained: float32 numbers that lie in memory in fewer bits, once.

To all code a `CompactWeight` is a float32 tensor. An operation on it reads its numbers widened to float32; the kernels
of `linear.py` and the loops read what is stored.

Shapes:  r rows   i input features   o output features
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

WIDENED_TOGETHER, QUANTISED_TOGETHER = 512, 64  # rows that stay in the processor's cache
aten = torch.ops.aten


class CompactWeight(torch.Tensor):
    """A matrix, o i, whose numbers are `stored` in bfloat16, or as 8-bit integers times the `scale` of a row, o.

    It is read-only: writing to it raises `RuntimeError`.
    """

    @staticmethod
    def __new__(cls, stored: torch.Tensor, scale: torch.Tensor | None = None) -> CompactWeight:
        weight = torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=torch.float32)
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
        numbers = self.stored[index].float()
        return numbers if self.scale is None else numbers * self.scale[index][..., None]

    def widened(self) -> torch.Tensor:
        numbers = self.stored.float()
        return numbers if self.scale is None else numbers.mul_(self.scale[:, None])

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """`F.linear` in float32, widening some rows at a time. x: ... i -> ... o"""
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
    if isinstance(x, CompactWeight) and x.scale is not None:
        return x.stored, x.scale
    scale = x.abs().amax(-1) / 127  # r
    scale = scale.clamp(min=torch.finfo(x.dtype).tiny)  # a row of zeros stays zeros
    return (x / scale[:, None]).round_().to(torch.int8), scale


def compacted(name: str, tensor: torch.Tensor, precision: str) -> torch.Tensor:
    """A tensor of a state dict as a model that computes in this precision keeps it, if it is not trained.

    Vectors are float32 in any precision; embeddings are bfloat16 in int8, unless they are the output matrix as well.
    """
    if tensor.dim() < 2 or precision == "fp32":
        return tensor.float()
    if precision == "bf16" or name.endswith("tok_embeddings.weight"):
        return CompactWeight(tensor.bfloat16())
    stored, scale = torch.empty(tensor.shape, dtype=torch.int8), torch.empty(len(tensor))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for one another after each of thousands of small operations
    try:
        for first in range(0, len(tensor), QUANTISED_TOGETHER):
            rows = slice(first, first + QUANTISED_TOGETHER)
            stored[rows], scale[rows] = quantise(tensor[rows].float())
    finally:
        torch.set_num_threads(threads)
    return CompactWeight(stored, scale)
