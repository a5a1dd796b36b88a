"""The loops that numba compiles for generating one text, and what `fast.loops_together` shares with them.

numba compiles anew when a function's own file changes: `fast.compiled` sees to those that call into this file.

One new position uses each weight once, so the time goes into reading memory. There are few parallel loops, because
threads wait for one another at the end of each, and each thread reads two rows far apart together, because two streams
were faster than one or four.

Shapes:
    D model dim   h query heads   g key/value heads   d head dim   f feed-forward dim   v vocabulary   t key position
    i, o a matrix's input and output features
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from fast.row_sums import LOOPS, Inputs, Matrix, dot, inputs, two_sums

LANES = 16  # float32 numbers in a vector register of AVX-512, and in two or four of other processors


class Norm(NamedTuple):
    weight: np.ndarray  # D
    eps: float


class LayerWeights(NamedTuple):
    attention_norm: Norm
    query: Matrix  # (h d) D
    key: Matrix  # (g d) D
    value: Matrix  # (g d) D
    output: Matrix  # D (h d)
    ffn_norm: Norm
    w1: Matrix  # f D
    w2: Matrix  # D f
    w3: Matrix  # f D


# ------------------------------------------------------------------------------------------------------------ attention


@njit(**{**LOOPS, "fastmath": {"contract"}})
def exp(x: np.float32) -> np.float32:
    """e^x within 2 units of the last place for x from -87 to 88, and held there beyond; NaN stays NaN.

    e^x = 2^n e^r, |r| <= ln(2) / 2: the power of two is put together from its bits, e^r is its Taylor series. There is
    no call in it, so that a loop of these runs in vector lanes, ten times as fast as one of the library's.
    """
    x = min(max(x, np.float32(-87)), np.float32(88))
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))  # 1 / ln(2)
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.1219444e-4)  # n ln(2), whose first part is exact
    series = np.float32(1 / 5040)
    for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        series = series * r + np.float32(factor)
    return series * np.int32((np.int32(n) + 127) * 2**23).view(np.float32)


@njit(**LOOPS)
def silu(a: np.float32) -> np.float32:
    return a / (np.float32(1) + exp(-a))


@njit(**LOOPS)
def attend_with(head: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    """Replace one query by what it attends to. head: d; keys, values: t d, the positions that it sees"""
    weights, largest = scores(keys, head)
    scale = np.float32(1) / np.sqrt(np.float32(len(head)))
    total = np.float32(0)
    for t in range(len(weights)):
        weights[t] = exp((weights[t] - largest) * scale)
        total += weights[t]
    mean(values, weights, total, head)


@njit(**LOOPS)
def scores(keys: np.ndarray, query: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """The product of each key and a query, four at a time, and the largest. keys: t d, query: d -> t"""
    y, largest = np.empty(len(keys), np.float32), np.float32(-np.inf)
    whole = len(keys) // 4 * 4
    for t in range(0, whole, 4):
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(len(query)):
            a += keys[t, i] * query[i]
            b += keys[t + 1, i] * query[i]
            c += keys[t + 2, i] * query[i]
            d += keys[t + 3, i] * query[i]
        y[t], y[t + 1], y[t + 2], y[t + 3] = a, b, c, d
        largest = max(largest, max(max(a, b), max(c, d)))
    for t in range(whole, len(keys)):
        y[t] = dot(keys[t], query)
        largest = max(largest, y[t])
    return y, largest


@njit(**LOOPS)
def mean(values: np.ndarray, weights: np.ndarray, total: np.float32, y: np.ndarray) -> None:
    """The weighted mean of values, four at a time. values: t d, weights: t, total: their sum, y: d"""
    y[:] = 0
    whole = len(values) // 4 * 4
    for t in range(0, whole, 4):
        a, b, c, d = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        for i in range(len(y)):
            y[i] += a * values[t, i] + b * values[t + 1, i] + c * values[t + 2, i] + d * values[t + 3, i]
    for t in range(whole, len(values)):
        for i in range(len(y)):
            y[i] += weights[t] * values[t, i]
    for i in range(len(y)):
        y[i] /= total


# ----------------------------------------------------------------------------------------------------- one new position


@njit(forceinline=True, **LOOPS)
def two_rows(weight: Matrix, x: Inputs, y: np.ndarray, first: int) -> None:
    """An element of each half of y = W x, `first` in the first. x: i, see `inputs`; y: o

    With an odd o the last is computed twice, with the same result.
    """
    second = min(first + (len(y) + 1) // 2, len(y) - 1)
    y[first], y[second] = two_sums(weight, first, weight, second, x)


@njit(parallel=True, **LOOPS)
def matvec(weight: Matrix, x: np.ndarray, y: np.ndarray) -> None:
    """y = W x. x: i, y: o"""
    given = inputs(weight, x)
    for r in prange((len(y) + 1) // 2):
        two_rows(weight, given, y, r)


@njit(parallel=True, **LOOPS)
def project_heads(
    to_query: Matrix, to_key: Matrix, to_value: Matrix, x: np.ndarray,
    query: np.ndarray, key: np.ndarray, value: np.ndarray,
) -> None:  # fmt: skip
    """Query, key and value of x, in one loop. x: D, query: (h d), key and value: (g d)"""
    of_query, of_key = (len(query) + 1) // 2, (len(key) + 1) // 2
    given = inputs(to_query, x)
    for r in prange(of_query + 2 * of_key):
        if r < of_query:
            two_rows(to_query, given, query, r)
        elif r < of_query + of_key:
            two_rows(to_key, given, key, r - of_query)
        else:
            two_rows(to_value, given, value, r - of_query - of_key)


@njit(parallel=True, **LOOPS)
def gate_row(w1: Matrix, w3: Matrix, x: np.ndarray, y: np.ndarray) -> None:
    """y = silu(w1 x) * w3 x. x: D, y: f"""
    given = inputs(w1, x)
    for r in prange(len(y)):
        a, b = two_sums(w1, r, w3, r, given)
        y[r] = silu(a) * b


@njit(**LOOPS)
def norm_row(x: np.ndarray, norm: Norm) -> np.ndarray:
    """x: D -> D"""
    square = np.float32(0)
    for i in range(len(x)):
        square += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(square / np.float32(len(x)) + np.float32(norm.eps))
    return x * scale * norm.weight


@njit(**LOOPS)
def rotate_row(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """RoPE in place, see rope.py. x: (h d); cos, sin: d/2"""
    half = len(cos)
    for head in range(len(x) // (2 * half)):
        for pair in range(half):
            i = 2 * (head * half + pair)
            real, imag = x[i], x[i + 1]
            x[i] = real * cos[pair] - imag * sin[pair]
            x[i + 1] = real * sin[pair] + imag * cos[pair]


@njit(parallel=True, **LOOPS)
def attend_row(query: np.ndarray, keys: np.ndarray, values: np.ndarray, end: int) -> None:
    """Replace each query by what it attends to. query: (h d); keys, values: g t d, seen before position end"""
    groups, _, dim = keys.shape
    heads = len(query) // dim
    for h in prange(heads):
        group = h * groups // heads
        attend_with(query[h * dim : (h + 1) * dim], keys[group, :end], values[group, :end])


@njit(**LOOPS)
def layer_step_row(
    x: np.ndarray, weights: LayerWeights, angle: tuple[np.ndarray, np.ndarray],
    keys: np.ndarray, values: np.ndarray, end: int,
) -> None:  # fmt: skip
    """`LlamaLayer.forward` for the new position end - 1. Adds to x (D), writes to keys and values (g t d)."""
    groups, _, dim = keys.shape
    query = np.empty(len(weights.query.scale), np.float32)
    key, value = np.empty(groups * dim, np.float32), np.empty(groups * dim, np.float32)
    normed = norm_row(x, weights.attention_norm)
    project_heads(weights.query, weights.key, weights.value, normed, query, key, value)
    rotate_row(query, *angle)
    rotate_row(key, *angle)
    keys[:, end - 1] = key.reshape(groups, dim)
    values[:, end - 1] = value.reshape(groups, dim)
    attend_row(query, keys, values, end)
    added, gate = np.empty_like(x), np.empty(len(weights.w1.scale), np.float32)
    matvec(weights.output, query, added)
    x += added
    gate_row(weights.w1, weights.w3, norm_row(x, weights.ffn_norm), gate)
    matvec(weights.w2, gate, added)
    x += added


# ---------------------------------------------------------------------------------------------------- the screened head


@njit(**LOOPS)
def rescore(rows: np.ndarray, x: np.ndarray, error: np.ndarray, norm: float, logits: np.ndarray, at_most: int) -> bool:
    """Make the largest of the approximate logits the true one: compute anew those that can be the largest.

    rows: v D; x: D; error: v, which times `norm` bounds how far a logit is off; logits: v. Returns False, with nothing
    done, if more than `at_most` can be the largest.
    """
    size = np.float32(norm)
    floor = highest_floor(logits, error, size)
    candidates, found = np.empty(at_most + 1, np.int64), 0
    for v in range(len(error)):
        # spelled so that NaN is a candidate, and shows
        if not logits[v] + error[v] * size < floor and found <= at_most:
            candidates[found] = v
            found += 1
    if found > at_most:
        return False
    for v in candidates[:found]:
        logits[v] = dot(rows[v], x)
    return True


@njit(**LOOPS)
def highest_floor(logits: np.ndarray, error: np.ndarray, size: np.float32) -> np.float32:
    """The largest lower bound of a true logit."""
    highest = np.full(LANES, -np.inf, np.float32)
    whole = len(logits) // LANES * LANES
    for start in range(0, whole, LANES):
        for i in range(LANES):
            highest[i] = max(highest[i], logits[start + i] - error[start + i] * size)
    for v in range(whole, len(logits)):
        highest[0] = max(highest[0], logits[v] - error[v] * size)
    return highest.max()
