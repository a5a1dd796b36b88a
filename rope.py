"""Rotary position embeddings (Su et al. 2021, "RoFormer", arXiv:2104.09864, section 3.2.2 and equation 34).

A head's vector is read as pairs of neighbours (x1, x2), (x3, x4), ...; pair i at position m is turned by the angle
m * theta^(-2i/d). What is particular here: the pairs are *interleaved*, as in Meta's weights and the TinyLlamas.
Hugging Face rotates half-vectors (x1 with x_{d/2+1}) and permutes the query and key weights to match.

A model that was trained further on longer texts may have smaller angles, its `scaling`: see `SCALINGS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch

Scaling = tuple  # the name of one of SCALINGS, and its numbers


def apply_rotary_emb(
    query: torch.Tensor,
    key: torch.Tensor,
    head_dim: int,
    max_seq_len: int,
    theta: float = 10000.0,
    scaling: Scaling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn each pair of neighbours by the angle m * theta^(-2i/d): position m, pair i = 0, 1, ..., d/2 - 1.

    query: b s h d, key: b s g d (length before heads); the texts begin at position 0. Returns both in their own shape
    and dtype. For d = 2 the pair (1, 0) at position 1 is turned by 1 radian, to (0.54, 0.84).
    A text may be longer than `max_seq_len`: the angles have a closed form at every position.
    """
    length = query.shape[1]
    rows = table_rows(length, max_seq_len)
    cos, sin = rope_table(head_dim, rows, theta, query.device, scaling)  # at least s d/2
    cos, sin = cos[:length, None], sin[:length, None]  # s 1 d/2: one angle for all heads
    # equation 34: each pair, as a complex number, times cos + i sin
    pairs = (torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) for x in (query, key))  # b s h d/2, b s g d/2
    turned = (torch.view_as_real(x * torch.complex(cos, sin)).flatten(-2) for x in pairs)  # b s h d, b s g d
    query_out, key_out = (x.type_as(query) for x in turned)
    return query_out, key_out


def table_rows(length: int, max_seq_len: int, step: int = 2**15) -> int:
    """The rows of the table for `length` positions: those of the model, but at most the next multiple of `step`."""
    return min(max(length, max_seq_len), -(-length // step) * step)


@lru_cache(maxsize=16)
def rope_table(
    head_dim: int,
    max_seq_len: int,
    theta: float = 10000.0,
    device: torch.device | str = "cpu",
    scaling: Scaling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every angle, computed once for each shape and device.

    Returns two float32 tensors of shape (max_seq_len, head_dim / 2).
    """
    with torch.inference_mode(False):  # a table made under inference_mode could never be used in training afterwards
        angles = torch.outer(torch.arange(max_seq_len).float(), frequencies(head_dim, theta, scaling))  # s d/2
        return angles.cos().to(device), angles.sin().to(device)


def frequencies(head_dim: int, theta: float = 10000.0, scaling: Scaling | None = None) -> torch.Tensor:
    """The angle in radians by which each pair is turned from one position to the next. Returns d/2"""
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # d/2
    return plain if scaling is None else SCALINGS[scaling[0]](plain, *scaling[1:])


def _closer(plain: torch.Tensor, factor: float) -> torch.Tensor:
    """As if positions were `factor` times closer together (Chen et al. 2023, arXiv:2306.15595, section 3.2). d/2"""
    return plain / factor


def _slow_ones_closer(plain: torch.Tensor, factor: float, low: float, high: float, length: float) -> torch.Tensor:
    """`_closer` for slow pairs only, the rule of Llama 3.1 (Grattafiori et al. 2024, arXiv:2407.21783). d/2

    length: positions in the first training. A pair that makes fewer than `low` full turns in them becomes `factor`
    times slower, a pair that makes more than `high` turns stays as it is, and a pair between gets a weighted mean.
    """
    turns = length * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (share + (1.0 - share) / factor)


SCALINGS: dict[str, Callable[..., torch.Tensor]] = {"linear": _closer, "llama3": _slow_ones_closer}
