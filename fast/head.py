"""The output head where only the likeliest token is wanted: most of its weights are read as 8-bit numbers only.

The head is the largest matrix of a small model. A copy in 8 bits tells which few tokens can be the likeliest, by a
bound that holds for every input, and only those are computed from the weights themselves.

Shapes:  b rows   v vocabulary   D model dim
"""

from __future__ import annotations

import numpy as np
import torch

from fast.cpu import has_int8_products
from fast.linear import has_onednn, int8_linear, quantise
from fast.loops import Matrix, matvec, rescore

MAX_CANDIDATES = 1 / 16  # of the vocabulary: beyond that, computing all logits is faster than picking


class ScreenedHead:
    """A head and its 8-bit copy, with the bound on how far the copy's logits can be from the true ones.

    With w = s q + e for a row of the head and x = t p + f for an input, both rounded, w.x and s t (q.p) differ by
    e.x + s q.f, at most |e| |x| + |s q| |f| (Cauchy-Schwarz); f is 0 where the input is not rounded. The true logit and
    the other are float32 sums of D products, in whatever order, and so off by at most D u / (1 - D u) times |w| |x| and
    |s q| |t p|, u = 2^-24 (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 3.1); sums of
    integers are exact.
    """

    def __init__(self, weight: torch.Tensor, rows: np.ndarray):
        """weight: v D, float32; rows: the same numbers, as `Matrix` stores them."""
        self.rows = rows
        self.quantised, self.scale = quantise(weight)  # v D, v
        rounded = self.quantised.double() * self.scale.double()[:, None]  # v D
        size, lost = rounded.norm(dim=-1), (weight.double() - rounded).norm(dim=-1)  # v each
        terms = (weight.shape[1] + 4) * 2.0**-24  # D products, their sum, the scales and the norm
        rounding = terms / (1 - terms) * (weight.double().norm(dim=-1) + size)
        more = 1 + 1e-5  # the comparison is made in float32 as well
        self.error = ((lost + rounding) * more).float().numpy()  # v, over |x|
        self.size = (size * more).float().numpy()  # v, over |f|

    def logits(self, x: np.ndarray) -> np.ndarray | None:
        """Exact for each row's largest, approximate and less for others; None if too many may be it. x: b D -> b v"""
        if len(x) == 1:
            logits, lost = self.exact_input_logits(x)
        elif has_onednn() and has_int8_products():
            logits, lost = self.rounded_input_logits(x)
        else:
            return None
        return self.pick(x, logits, lost, int(MAX_CANDIDATES * len(self.error)))

    def exact_input_logits(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The copy's logits. x: 1 D -> 1 v; and |f|, 1"""
        logits = np.empty((1, len(self.scale)), np.float32)
        matvec(Matrix(self.quantised.numpy(), self.scale.numpy()), x[0], logits[0])
        return logits, np.zeros(1)

    def rounded_input_logits(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The copy's logits of inputs that are rounded to 8 bits. x: b D -> b v; and |f|, b"""
        p, t = quantise(torch.from_numpy(x))  # b D, b
        logits = int8_linear(p, t, self.quantised, self.scale)  # b v
        lost = (torch.from_numpy(x).double() - p.double() * t.double()[:, None]).norm(dim=-1)
        return logits.numpy(), lost.numpy()

    def pick(self, x: np.ndarray, logits: np.ndarray, lost: np.ndarray, at_most: int) -> np.ndarray | None:
        """`logits` after all that can be a row's largest are computed anew; None if they are more than `at_most`."""
        norm = np.linalg.norm(x.astype(np.float64), axis=1) + lost  # b: at least |x| and |t p|
        more = 1 + 1e-6  # the comparison is made in float32
        of_input = (norm * more).astype(np.float32), (lost * more).astype(np.float32)
        return logits if rescore(self.rows, x, (self.error, self.size), of_input, logits, at_most) else None
