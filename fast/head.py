"""The output head for greedy decoding, which needs only the likeliest token: most weights are read as 8-bit numbers.

The head is the largest matrix of a small model. Logits of an 8-bit copy, with a bound on their error that holds for
every input, show which few tokens can be the likeliest. Only those are computed from the weights themselves.

Shapes:  v vocabulary   D model dim
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fast.linear import quantise
from fast.loops import matvec, rescore
from fast.loops_head import steps_of
from fast.row_sums import Matrix

MAX_CANDIDATES = 1 / 16  # of the vocabulary: beyond that, computing all logits is faster than picking
ROWS_TOGETHER = 2048  # that fit into the processor's cache


class ScreenedHead:
    """A head and its 8-bit copy, with the bound on how far the copy's logits can be from the true ones.

    With w = s q + e for a row of the head, w.x and s (q.x) differ by e.x, at most |e| |x| (Cauchy-Schwarz). The true
    logit and the other are float32 sums of D products, in whatever order, and so off by at most D u / (1 - D u) times
    |w| |x| and |s q| |x|, u = 2^-24 (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 3.1).
    The copy meets inputs of 24 bits (`row_sums.in_two_parts`): each is off by little more than u max|x| up to 8192
    inputs, D / 8192 times that beyond, which in s (q.x) is less than D u |s q| |x|. Of several texts it meets inputs of
    16 bits (`loops_head.in_pairs`): each is off by half a step, max|x| / r, and so all by at most sqrt(D) |x| / 2r.
    """

    def __init__(self, weight: torch.Tensor, rows: np.ndarray):
        """weight: v D, float32 or bfloat16; rows: the same numbers, as `Matrix` stores them."""
        self.rows = rows
        parts = [_bound(piece.float()) for piece in weight.split(ROWS_TOGETHER)]
        quantised, scale, error = (torch.cat(part) for part in zip(*parts, strict=True))  # v D, v, v
        self.copy = Matrix(quantised.numpy(), scale.numpy())
        self.error = error.numpy()

    def logits(self, x: np.ndarray) -> np.ndarray | None:
        """The largest is exact, others are approximate and smaller; None if too many can be the largest. x: D -> v"""
        return self.pick(x, self.approximate(x))

    def approximate(self, x: np.ndarray) -> np.ndarray:
        """The copy's logits. x: D -> v"""
        logits = np.empty(len(self.error), np.float32)
        matvec(self.copy, x, logits)
        return logits

    def pick(
        self, x: np.ndarray, logits: np.ndarray, at_most: int | None = None, *, by: Callable[..., bool] = rescore
    ) -> np.ndarray | None:
        """`logits`, of which all that can be the largest are made exact; None if they are more than `at_most`.

        by: `rescore` for one text, x: D and logits: v, or a loop over several that calls it, x: n D and logits: n v.
        """
        at_most = int(MAX_CANDIDATES * len(self.error)) if at_most is None else at_most
        norm = np.linalg.norm(x.astype(np.float64), axis=-1) * (1 + 1e-6)  # the comparison is made in float32
        return logits if by(self.rows, x, self.error, norm, logits, at_most) else None


def _bound(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The 8-bit copy of some rows, r D, its scales, and the bound for inputs of length 1, r each."""
    quantised, scale = quantise(weight)
    lost = weight - quantised * scale[:, None]  # r D: s q is rounded, which `rounding` covers
    size = torch.linalg.vector_norm(weight, dim=-1, dtype=torch.float64)  # r: |s q| is at most |w| + |e|
    error = torch.linalg.vector_norm(lost, dim=-1, dtype=torch.float64)
    # D products and their sum, D inputs, two scales, s q here, its distance from w, the norm
    terms = (2 * weight.shape[1] + 8) * 2.0**-24
    rounding = terms / (1 - terms) * (2 * size + error)
    coarse = 0.51 * weight.shape[1] ** 0.5 / steps_of(weight.shape[1]) * (size + error)  # 0.01: x / step is rounded too
    more = 1 + 1e-5  # the comparison is made in float32 as well
    return quantised, scale, ((error + rounding + coarse) * more).float()
