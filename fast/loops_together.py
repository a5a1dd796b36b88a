"""The loops that numba compiles for generating several texts at once: one more token for each of them.

Every weight is read from memory once for all texts. Four rows of a weight meet four texts at a time: their sixteen sums
stay in registers, and each number that is loaded takes part in four products. So the inputs always have a multiple of
four rows; what the rows beyond the last text hold is computed and never read.

Shapes: those of `fast.loops`, and
    n texts   N texts, to the next multiple of `TEXTS`
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange, types
from numba.core.typing import Context
from numba.extending import intrinsic, overload

from fast.loops import LOOPS, LayerWeights, Matrix, Norm, attend_with, norm_row, number, rotate_row, silu

ROWS, TEXTS = 4, 4  # of a weight and of the inputs, whose products are summed at once
PART = 16  # blocks of `ROWS` rows that a thread computes one after another


@intrinsic
def wide_registers(_: Context):  # numba reads the types from what it returns: no further type hints
    """Let the loops of the calling function use registers of 512 bits, where a processor has them: LLVM prefers 256."""

    def generate(context, builder, signature, arguments):
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')  # llvmlite knows no attributes with values
        return context.get_dummy_value()

    return types.void(), generate


# --------------------------------------------------------------------------------------------------- blocks of a weight


def four_rows(rows: np.ndarray, at: tuple[int, int, int, int], room: np.ndarray) -> tuple[np.ndarray, ...]:
    """Four rows of a weight as float32: the rows themselves, or copies in `room` (4 i). Compiled code only."""
    raise NotImplementedError


@overload(four_rows)
def _four_rows(rows, at, room):
    if rows.dtype == types.float32:
        return lambda rows, at, room: (rows[at[0]], rows[at[1]], rows[at[2]], rows[at[3]])

    def widened(rows, at, room):
        for k in range(ROWS):
            row, wide = rows[at[k]], room[k]
            for i in range(len(row)):
                wide[i] = number(row[i])
        return room[0], room[1], room[2], room[3]

    return widened


@njit(**LOOPS)
def four_by_four(
    w: tuple[np.ndarray, ...], x: np.ndarray, y: np.ndarray, at: tuple[int, int, int, int], scale: np.ndarray
) -> None:
    """The products of four rows and four texts. w: four of i; x: 4 i; y: 4 o, written at the columns `at`; scale: o"""
    wide_registers()
    w0, w1, w2, w3 = w
    x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
    c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = np.float32(0)
    for i in range(len(w0)):
        a0 += w0[i] * x0[i]
        a1 += w0[i] * x1[i]
        a2 += w0[i] * x2[i]
        a3 += w0[i] * x3[i]
        b0 += w1[i] * x0[i]
        b1 += w1[i] * x1[i]
        b2 += w1[i] * x2[i]
        b3 += w1[i] * x3[i]
        c0 += w2[i] * x0[i]
        c1 += w2[i] * x1[i]
        c2 += w2[i] * x2[i]
        c3 += w2[i] * x3[i]
        d0 += w3[i] * x0[i]
        d1 += w3[i] * x1[i]
        d2 += w3[i] * x2[i]
        d3 += w3[i] * x3[i]
    a, b, c, d = at
    y[0, a], y[1, a], y[2, a], y[3, a] = a0 * scale[a], a1 * scale[a], a2 * scale[a], a3 * scale[a]
    y[0, b], y[1, b], y[2, b], y[3, b] = b0 * scale[b], b1 * scale[b], b2 * scale[b], b3 * scale[b]
    y[0, c], y[1, c], y[2, c], y[3, c] = c0 * scale[c], c1 * scale[c], c2 * scale[c], c3 * scale[c]
    y[0, d], y[1, d], y[2, d], y[3, d] = d0 * scale[d], d1 * scale[d], d2 * scale[d], d3 * scale[d]


@njit(**LOOPS)
def parts_of(features: int) -> int:
    """The number of parts that a weight with so many output features is computed in."""
    return -(-features // (ROWS * PART))


@njit(**LOOPS)
def product_part(weight: Matrix, x: np.ndarray, y: np.ndarray, part: int) -> None:
    """One part of y = x W^T. x: N i, y: N o

    Where o is no multiple of four, the last row is computed more than once, with the same result.
    """
    rows, scale = weight
    room, last = np.empty((ROWS, x.shape[1]), np.float32), len(rows) - 1
    for first in range(part * ROWS * PART, min((part + 1) * ROWS * PART, last + 1), ROWS):
        at = first, min(first + 1, last), min(first + 2, last), min(first + 3, last)
        block = four_rows(rows, at, room)
        for text in range(0, len(x), TEXTS):
            four_by_four(block, x[text : text + TEXTS], y[text : text + TEXTS], at, scale)


@njit(parallel=True, **LOOPS)
def matmul(weight: Matrix, x: np.ndarray, y: np.ndarray) -> None:
    """y = x W^T. x: N i, y: N o"""
    for part in prange(parts_of(len(weight.rows))):
        product_part(weight, x, y, part)


# --------------------------------------------------------------------------------------- one new position of every text


@njit(parallel=True, **LOOPS)
def project_together(
    to_query: Matrix, to_key: Matrix, to_value: Matrix, x: np.ndarray,
    query: np.ndarray, key: np.ndarray, value: np.ndarray,
) -> None:  # fmt: skip
    """Query, key and value of x, in one loop. x: N D, query: N (h d), key and value: N (g d)"""
    of_query, of_key = parts_of(query.shape[1]), parts_of(key.shape[1])
    for part in prange(of_query + 2 * of_key):
        if part < of_query:
            product_part(to_query, x, query, part)
        elif part < of_query + of_key:
            product_part(to_key, x, key, part - of_query)
        else:
            product_part(to_value, x, value, part - of_query - of_key)


@njit(parallel=True, **LOOPS)
def gate_together(w1: Matrix, w3: Matrix, x: np.ndarray, y: np.ndarray) -> None:
    """y = silu(w1 x) * w3 x. x: N D, y: N f"""
    features = y.shape[1]
    times = np.empty_like(y)
    for part in prange(parts_of(features)):
        product_part(w1, x, y, part)
        product_part(w3, x, times, part)
        first, end = part * ROWS * PART, min((part + 1) * ROWS * PART, features)
        for text in range(len(y)):
            for i in range(first, end):
                y[text, i] = silu(y[text, i]) * times[text, i]


@njit(**LOOPS)
def norm_together(x: np.ndarray, norm: Norm) -> np.ndarray:
    """x: N D -> N D"""
    y = np.empty_like(x)
    for text in range(len(x)):
        y[text] = norm_row(x[text], norm)
    return y


@njit(parallel=True, **LOOPS)
def attend_together(query: np.ndarray, keys: np.ndarray, values: np.ndarray, first: np.ndarray, end: int) -> None:
    """Replace each query by what it attends to. query: N (h d); keys, values: n g t d; seen: from first (n) to end"""
    texts, groups, _, dim = keys.shape
    heads = query.shape[1] // dim
    for which in prange(texts * heads):
        text, h = which // heads, which % heads
        group, start = h * groups // heads, first[text]
        attend_with(query[text, h * dim : (h + 1) * dim], keys[text, group, start:end], values[text, group, start:end])


@njit(**LOOPS)
def layer_step_together(
    x: np.ndarray, weights: LayerWeights, angles: tuple[np.ndarray, np.ndarray],
    keys: np.ndarray, values: np.ndarray, first: np.ndarray, end: int,
) -> None:  # fmt: skip
    """`LlamaLayer.forward` for position end - 1 of every text. Adds to x (N D), writes to keys and values (n g t d).

    angles: cosines and sines, n d/2 each. first: n, the first position that a text sees.
    """
    texts, groups, _, dim = keys.shape
    query = np.empty((len(x), len(weights.query.scale)), np.float32)
    key, value = np.empty((len(x), groups * dim), np.float32), np.empty((len(x), groups * dim), np.float32)
    normed = norm_together(x, weights.attention_norm)
    project_together(weights.query, weights.key, weights.value, normed, query, key, value)
    cos, sin = angles
    for text in range(texts):
        rotate_row(query[text], cos[text], sin[text])
        rotate_row(key[text], cos[text], sin[text])
        keys[text, :, end - 1] = key[text].reshape(groups, dim)
        values[text, :, end - 1] = value[text].reshape(groups, dim)
    attend_together(query, keys, values, first, end)
    added, gate = np.empty_like(x), np.empty((len(x), len(weights.w1.scale)), np.float32)
    matmul(weights.output, query, added)
    x += added
    gate_together(weights.w1, weights.w3, norm_together(x, weights.ffn_norm), gate)
    matmul(weights.w2, gate, added)
    x += added
