"""The texts of a padded batch one after another, without their padding, and how they are attended to.

Shapes: b batch   s position   n real tokens, of all texts or of a group   g texts of a group   t its longest text
r rows of any kind
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

TOGETHER = 512  # positions, padding included, of texts that are attended to in one call


class LengthGroup(NamedTuple):
    """Texts of like length, which are attended to in one call."""

    n_tokens: int
    size: tuple[int, int]  # g t
    at: torch.Tensor | None  # n: where each token stands in g t; None where all texts are equally long
    mask: torch.Tensor | None  # g 1 1 t, true at real tokens


class Texts(NamedTuple):
    """The real tokens of a batch, one text after another, the longest first."""

    at: torch.Tensor  # n: where each token stands in b s
    groups: tuple[LengthGroup, ...]

    @classmethod
    def of(cls, is_real: torch.Tensor) -> Texts:
        """is_real: b s. Every text has a real token."""
        lengths, order = is_real.sum(1).sort(descending=True, stable=True)  # b each
        text, position = is_real[order].nonzero(as_tuple=True)  # n each
        rest, groups = lengths.tolist(), []
        while rest:
            count = max(1, TOGETHER // rest[0])
            groups.append(_group(rest[:count], is_real.device))
            rest = rest[count:]
        return cls(order[text] * is_real.shape[1] + position, tuple(groups))


def _group(lengths: list[int], device: torch.device) -> LengthGroup:
    """Texts of these lengths, the longest first."""
    size = len(lengths), lengths[0]
    if lengths[0] == lengths[-1]:
        return LengthGroup(sum(lengths), size, None, None)
    is_real = torch.arange(lengths[0], device=device) < torch.tensor(lengths, device=device)[:, None]  # g t
    return LengthGroup(sum(lengths), size, is_real.flatten().nonzero()[:, 0], is_real[:, None, None])


class _TakeOut(torch.autograd.Function):
    """Rows of a tensor, each of which is taken once: the gradient is put back, and nothing has to be added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(at)
        ctx.n_rows = len(x)
        return x.index_select(0, at)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (at,) = ctx.saved_tensors
        return put_back(grad, at, ctx.n_rows), None


class _PutBack(torch.autograd.Function):
    """The reverse of `_TakeOut`, with zeros between the rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, at: torch.Tensor, n_rows: int) -> torch.Tensor:
        ctx.save_for_backward(at)
        return x.new_zeros(n_rows, *x.shape[1:]).index_copy_(0, at, x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (at,) = ctx.saved_tensors
        return take_out(grad, at), None, None


def take_out(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """x: r ..., at: n, no number twice -> n ..."""
    return _TakeOut.apply(x, at)


def put_back(x: torch.Tensor, at: torch.Tensor, n_rows: int) -> torch.Tensor:
    """x: n ..., at: n, no number twice -> r ..., zeros elsewhere"""
    return _PutBack.apply(x, at, n_rows)
