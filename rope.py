"""Rotary position embeddings (Su et al. 2021, "RoFormer", arXiv:2104.09864, section 3.2.2 and equation 34).

A head's vector is read as pairs of neighbours (x1, x2), (x3, x4), ...; pair i at position m is turned by the angle
m * theta^(-2i/d). What is particular here: the pairs are *interleaved*, as in Meta's weights and the TinyLlamas.
Hugging Face rotates half-vectors (x1 with x_{d/2+1}) and permutes the query and key weights to match.

A model that was trained further on longer texts may have smaller angles, its `scaling`: see `SCALINGS`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

Scaling = tuple  # the name of one of SCALINGS, and its numbers


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
        angles = _angles(torch.arange(max_seq_len), head_dim, theta, scaling)  # s d/2
        return angles.cos().to(device), angles.sin().to(device)


def _angles(positions: torch.Tensor, head_dim: int, theta: float, scaling: Scaling | None) -> torch.Tensor:
    """Every pair's angle at every position. positions: ... -> ... d/2"""
    return positions[..., None].float() * frequencies(head_dim, theta, scaling, positions.device)


def frequencies(
    head_dim: int, theta: float = 10000.0, scaling: Scaling | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The angle in radians by which each pair is turned from one position to the next. Returns d/2"""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim  # d/2
    plain = 1.0 / theta**exponents
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


SCALINGS = {"linear": _closer, "llama3": _slow_ones_closer}


def apply_rotary_emb(
    query: torch.Tensor,
    key: torch.Tensor,
    head_dim: int,
    max_seq_len: int,
    theta: float = 10000.0,
    *,
    start_pos: int | torch.Tensor = 0,
    query_start: int | torch.Tensor | None = None,
    scaling: Scaling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions.

    query: b s h d, key: b s g d (length before heads). start_pos: the position in the text of the first token of the
    tensors, an int for all rows or a tensor of shape b (negative for a row that starts in padding: there the angle is
    0). query_start: as start_pos, of the queries alone; None: they begin where the keys do. A text may be longer than
    `max_seq_len`: the angles have a closed form at every position.
    Returns both in their own shape and dtype; the rotation itself is computed in float32.
    """
    angles, query_start = (head_dim, max_seq_len, theta), start_pos if query_start is None else query_start
    return rotate(query, *angles, query_start, scaling), rotate(key, *angles, start_pos, scaling)


def rotate(
    x: torch.Tensor,
    head_dim: int,
    max_seq_len: int,
    theta: float = 10000.0,
    start_pos: int | torch.Tensor = 0,
    scaling: Scaling | None = None,
) -> torch.Tensor:
    """`apply_rotary_emb` for one tensor, queries or keys. x: b s h d -> b s h d"""
    length = x.shape[1]
    if isinstance(start_pos, int):
        cos, sin = rope_table(head_dim, max(max_seq_len, start_pos + length), theta, x.device, scaling)
        cos, sin = cos[start_pos : start_pos + length], sin[start_pos : start_pos + length]  # s d/2
    else:  # no table: reading the largest position from a tensor would make a GPU wait
        positions = (start_pos[:, None] + torch.arange(length, device=x.device)).clamp(min=0)  # b s
        angles = _angles(positions, head_dim, theta, scaling)  # b s d/2
        cos, sin = angles.cos(), angles.sin()
    return _rotate_pairs(x, cos.unsqueeze(-2), sin.unsqueeze(-2))  # (b) s 1 d/2: one angle for all heads


def _rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoFormer's equation 34: each pair, as a complex number, times cos + i sin. x: b s h d -> b s h d"""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # b s h d/2
    rotated = torch.view_as_real(pairs * torch.complex(cos, sin))  # b s h d/2 2
    return rotated.flatten(-2).type_as(x)  # b s h d
