"""The loops that numba compiles for generating several texts at once: one more token for each of them.

Every weight is read from memory once for all texts. A vector register holds one feature of all texts of a panel. Six
rows of a weight meet a panel with their sums in registers: each number of a weight is loaded once and multiplied
with a whole register, while later rows are fetched from memory. Lanes without a text are computed and never read.

Shapes: those of `fast.loops`, and
    n texts   P panels   l lanes of a panel, 8 or 16: one for each text
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic, overload

from fast.loops import LayerWeights, Norm, attend_with, rescore, silu
from fast.row_sums import LOOPS, Matrix, number, row_at, widen_nibbles

ROWS = 6  # of a weight, summed at once: with 16 lanes they fill 12 of the 16 registers of AVX2
CHUNK = 16  # inputs after which the next 64 bytes of as many later rows are fetched, side by side: one by one is slower
PART = 4  # blocks of `ROWS` rows that a thread computes one after another; of larger ones some threads get one less

FLOAT, INT32, INT64, BYTES = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()
FETCH = ir.FunctionType(ir.VoidType(), [BYTES, INT32, INT32, INT32])  # of llvm.prefetch


# ------------------------------------------------------------------------------------------------ one block of a weight


def block_code(lanes: int, context: Any, builder: Any, kinds: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
    """Write the code of a block for LLVM: no loop of numba's keeps its sums in registers. Arguments: see `block_8`."""
    wide, x, y, rows, scale = (context.make_array(kinds[i])(context, builder, given[i]) for i in (0, 2, 3, 5, 6))
    at, to = ([builder.extract_value(given[i], k) for k in range(ROWS)] for i in (1, 4))
    vector, length = ir.VectorType(FLOAT, lanes), builder.extract_value(wide.shape, 1)

    def lanes_at(data: Any, row: Any) -> Any:
        start = builder.gep(data, [builder.mul(row, INT64(lanes))])
        return builder.bitcast(start, vector.as_pointer())

    def in_all_lanes(number: Any) -> Any:
        single = builder.insert_element(ir.Constant(vector, ir.Undefined), number, INT32(0))
        zeros = ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes)
        return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), zeros)

    numbers = [row_at(builder, wide, row) for row in at]
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
    fetch = builder.module.declare_intrinsic("llvm.prefetch", (BYTES,), FETCH)
    builder.branch(loop)
    builder.position_at_end(loop)
    i, *sums = builder.phi(INT64), *(builder.phi(vector) for _ in range(ROWS))
    for value in (i, *sums):
        value.add_incoming(ir.Constant(value.type, None), before)  # zero
    with builder.if_then(builder.icmp_signed("==", builder.and_(i, INT64(CHUNK - 1)), INT64(0))):
        column = builder.lshr(i, INT64(kinds[6].ndim - 1))  # where a byte has two numbers, half of i
        for row in to:
            later = builder.gep(row_at(builder, rows, builder.add(row, INT64(ROWS))), [column])
            # to be read; into the second cache; data
            builder.call(fetch, [builder.bitcast(later, BYTES), INT32(0), INT32(2), INT32(1)])
    adding = builder.block
    inputs = builder.load(lanes_at(x.data, i), align=4)
    for data, total in zip(numbers, sums, strict=True):
        product = builder.fmul(in_all_lanes(builder.load(builder.gep(data, [i]))), inputs, flags=("contract",))
        total.add_incoming(builder.fadd(total, product, flags=("contract",)), adding)
    following = builder.add(i, INT64(1))
    i.add_incoming(following, adding)
    builder.cbranch(builder.icmp_signed("<", following, length), loop, after)
    builder.position_at_end(after)
    for row, total in zip(to, sums, strict=True):
        result = total.incomings[1][0]
        if kinds[6].ndim == 1:  # else there is one for each group, and `wide` holds products with it
            result = builder.fmul(result, in_all_lanes(builder.load(builder.gep(scale.data, [row]))))
        builder.store(result, lanes_at(y.data, row), align=4)
    return context.get_dummy_value()


@intrinsic
def block_8(_, wide, at, x, y, to, rows, scale):  # numba reads the types from what it returns: no type hints
    """y[to] = scale[to] * (wide[at] x) for a panel of 8 lanes, while rows after `to` are fetched.

    wide: rows of a weight as float32, ... i; at: the numbers of `ROWS` of them; x: i l; y: o l; rows, scale: of the
    `Matrix`; to: the numbers of the same rows there.
    """
    kinds = wide, at, x, y, to, rows, scale
    return types.void(*kinds), lambda context, builder, _, given: block_code(8, context, builder, kinds, given)


@intrinsic
def block_16(_, wide, at, x, y, to, rows, scale):
    """`block_8` for 16 lanes."""
    kinds = wide, at, x, y, to, rows, scale
    return types.void(*kinds), lambda context, builder, _, given: block_code(16, context, builder, kinds, given)


def as_float32(weight: Matrix, to: tuple[int, ...], room: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Rows of a weight as float32, in place or copied to `room` (`ROWS` i), and their numbers. Compiled code only.

    They are still to be multiplied by the scale of a row, but not by that of a group.
    """
    raise NotImplementedError


@overload(as_float32)
def _as_float32(weight, to, room):
    if weight.types[0].dtype == types.float32:
        return lambda weight, to, room: (weight.rows, to)

    def copied(weight, to, room):
        for k in range(ROWS):
            row, wide = weight.rows[to[k]], room[k]
            for i in range(len(row)):
                wide[i] = number(row[i])
        return room, (0, 1, 2, 3, 4, 5)

    def copied_from_4_bits(weight, to, room):
        for k in range(ROWS):
            widen_nibbles(weight.rows, weight.scale, to[k], room[k])
        return room, (0, 1, 2, 3, 4, 5)

    return copied_from_4_bits if weight.types[0].dtype == types.uint8 else copied


@njit(**LOOPS)
def parts_of(features: int) -> int:
    """The number of parts that a weight with so many output features is computed in."""
    return -(-features // (ROWS * PART))


@njit(**LOOPS)
def product_part(weight: Matrix, x: np.ndarray, y: np.ndarray, part: int) -> None:
    """One part of y = W x. x: P i l, y: P o l

    Where o is no multiple of `ROWS`, the last row is computed more than once, with the same result.
    """
    rows, scale = weight
    room, last = np.empty((ROWS, x.shape[1]), np.float32), len(rows) - 1
    for a in range(part * ROWS * PART, min((part + 1) * ROWS * PART, last + 1), ROWS):
        to = a, min(a + 1, last), min(a + 2, last), min(a + 3, last), min(a + 4, last), min(a + 5, last)
        wide, at = as_float32(weight, to, room)
        for panel in range(len(x)):
            if x.shape[2] == 8:
                block_8(wide, at, x[panel], y[panel], to, rows, scale)
            else:
                block_16(wide, at, x[panel], y[panel], to, rows, scale)


@njit(parallel=True, **LOOPS)
def matmul(weight: Matrix, x: np.ndarray, y: np.ndarray) -> None:
    """y = W x. x: P i l, y: P o l"""
    for part in prange(parts_of(len(weight.rows))):
        product_part(weight, x, y, part)


# --------------------------------------------------------------------------------------- one new position of every text


@njit(parallel=True, **LOOPS)
def project_together(
    to_query: Matrix, to_key: Matrix, to_value: Matrix, x: np.ndarray,
    query: np.ndarray, key: np.ndarray, value: np.ndarray,
) -> None:  # fmt: skip
    """Query, key and value of x, in one loop. x: P D l, query: P (h d) l, key and value: P (g d) l"""
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
    """y = silu(w1 x) * w3 x. x: P D l, y: P f l"""
    features, factor = y.shape[1], np.empty_like(y)
    for part in prange(parts_of(features)):
        product_part(w1, x, y, part)
        product_part(w3, x, factor, part)
        first, end = part * ROWS * PART, min((part + 1) * ROWS * PART, features)
        for panel in range(len(y)):
            gated, factors = y[panel, first:end].reshape(-1), factor[panel, first:end].reshape(-1)
            for i in range(len(gated)):
                gated[i] = silu(gated[i]) * factors[i]


@njit(**LOOPS)
def norm_together(x: np.ndarray, norm: Norm) -> np.ndarray:
    """x: P D l -> P D l"""
    y, (panels, dim, lanes) = np.empty_like(x), x.shape
    for panel in range(panels):
        scale = np.zeros(lanes, np.float32)
        for i in range(dim):
            for lane in range(lanes):
                scale[lane] += x[panel, i, lane] * x[panel, i, lane]
        scale = np.float32(1) / np.sqrt(scale / np.float32(dim) + np.float32(norm.eps))
        for i in range(dim):
            for lane in range(lanes):
                y[panel, i, lane] = x[panel, i, lane] * scale[lane] * norm.weight[i]
    return y


@njit(**LOOPS)
def rotate_together(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """RoPE in place. x: P (h d) l; cos, sin: P d/2 l"""
    panels, features, lanes = x.shape
    for panel in range(panels):
        for i in range(0, features, 2):
            pair = i // 2 % cos.shape[1]
            for lane in range(lanes):
                real, imag = x[panel, i, lane], x[panel, i + 1, lane]
                c, s = cos[panel, pair, lane], sin[panel, pair, lane]
                x[panel, i, lane] = real * c - imag * s
                x[panel, i + 1, lane] = real * s + imag * c


@njit(parallel=True, **LOOPS)
def attend_together(
    query: np.ndarray, key: np.ndarray, value: np.ndarray,
    keys: np.ndarray, values: np.ndarray, end: int,
) -> None:  # fmt: skip
    """Write keys and values of position end - 1, and replace each query by what it attends to.

    query: P (h d) l; key, value: P (g d) l; keys, values: n g t d, seen before position end. Heads of one group
    write the same key and value: so none waits for another.
    """
    texts, groups, _, dim = keys.shape
    lanes, heads = query.shape[2], query.shape[1] // dim
    for which in prange(texts * heads):
        text, h = which // heads, which % heads
        group = h * groups // heads
        panel, lane, of_group = text // lanes, text % lanes, slice(group * dim, (group + 1) * dim)
        keys[text, group, end - 1] = key[panel, of_group, lane]
        values[text, group, end - 1] = value[panel, of_group, lane]
        place = query[panel, h * dim : (h + 1) * dim, lane]  # d, far apart
        head = place.copy()
        attend_with(head, keys[text, group, :end], values[text, group, :end])
        place[:] = head


@njit(**LOOPS)
def layer_step_together(
    x: np.ndarray, weights: LayerWeights, angles: tuple[np.ndarray, np.ndarray],
    keys: np.ndarray, values: np.ndarray, end: int,
) -> None:  # fmt: skip
    """`LlamaLayer.forward` for position end - 1 of every text. Adds to x (P D l), writes to keys and values (n g t d).

    angles: cosines and sines, P d/2 l each.
    """
    (panels, _, lanes), width = x.shape, keys.shape[1] * keys.shape[3]
    query = np.empty((panels, len(weights.query.scale), lanes), np.float32)
    key, value = np.empty((panels, width, lanes), np.float32), np.empty((panels, width, lanes), np.float32)
    normed = norm_together(x, weights.attention_norm)
    project_together(weights.query, weights.key, weights.value, normed, query, key, value)
    rotate_together(query, *angles)
    rotate_together(key, *angles)
    attend_together(query, key, value, keys, values, end)
    added, gate = np.empty_like(x), np.empty((panels, len(weights.w1.scale), lanes), np.float32)
    matmul(weights.output, query, added)
    x += added
    gate_together(weights.w1, weights.w3, norm_together(x, weights.ffn_norm), gate)
    matmul(weights.w2, gate, added)
    x += added


# ------------------------------------------------------------------------------------------------------------- the head


@njit(parallel=True, **LOOPS)
def logits_together(weight: Matrix, x: np.ndarray, y: np.ndarray) -> None:
    """`matmul` whose results lie in rows, one for each text. x: P D l, y: n v"""
    (panels, _, lanes), (texts, features) = x.shape, y.shape
    room = np.empty((panels, features, lanes), np.float32)
    for part in prange(parts_of(features)):
        product_part(weight, x, room, part)
        first, end = part * ROWS * PART, min((part + 1) * ROWS * PART, features)
        for text in range(texts):
            y[text, first:end] = room[text // lanes, first:end, text % lanes]


@njit(parallel=True, **LOOPS)
def rescore_together(
    rows: np.ndarray, x: np.ndarray, error: np.ndarray, norms: np.ndarray, logits: np.ndarray, at_most: int
) -> bool:
    """`rescore` for every text; False if it is for one of them. x: n D, norms: n, logits: n v"""
    is_done = np.empty(len(x), np.bool_)
    for text in prange(len(x)):
        is_done[text] = rescore(rows, x[text], error, norms[text], logits[text], at_most)
    return is_done.all()
