"""The output head in 8 bits for several texts: integer products that numba compiles, for `loop_engine`'s bound.

Inputs are rounded to 16 bits, so that one instruction multiplies and adds two of them in every lane: half as many as
for float32. Weights are widened to 16 bits, and two of a row meet two inputs of every text of a panel.

Shapes: those of `fast.loops_together`, and
    p pairs of inputs, D / 2 rounded up
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic, register_jitable

from fast.row_sums import INT16, INT32, INT64, LOOPS, Matrix, fetch, row_at

ROWS = 6  # of a weight, summed at once: with 16 lanes they fill 12 of the 16 registers of AVX2
PART = 4  # blocks of `ROWS` rows that a thread computes one after another


@register_jitable
def steps_of(inputs: int) -> int:
    """The largest rounded input: a sum of so many products with 8-bit numbers fits into 32 bits."""
    return min(2**15 - 1, (2**31 - 1) // (2**7 * inputs))


@njit(**LOOPS)
def in_pairs(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x: P D l, as rounded numbers, P p 2l, int16, times a scale for each text, P l.

    The scale is NaN, and so are the logits, if a number is not finite, if all are too small for a step of normal size,
    or if they are so large that a sum times a step may overflow.
    """
    panels, inputs, lanes = x.shape
    pairs, scales = np.zeros((panels, (inputs + 1) // 2, 2 * lanes), np.int16), np.empty((panels, lanes), np.float32)
    for panel in range(panels):
        largest, total = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
        for i in range(inputs):
            for lane in range(lanes):
                largest[lane] = max(largest[lane], abs(x[panel, i, lane]))
                total[lane] += abs(x[panel, i, lane])
        for lane in range(lanes):
            is_usual = largest[lane] > np.float32(1e-30) and total[lane] < np.float32(1e30)
            scales[panel, lane] = largest[lane] / np.float32(steps_of(inputs)) if is_usual else np.float32(np.nan)
            if is_usual:
                for i in range(inputs):
                    whole = np.floor(x[panel, i, lane] / scales[panel, lane] + np.float32(0.5))
                    pairs[panel, i // 2, 2 * lane + i % 2] = np.int16(whole)
    return pairs, scales


def block_code(lanes: int, context: Any, builder: Any, kinds: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
    """Even and odd products are added after the multiplication: so LLVM finds the instructions that do it at once."""
    wide, x, y = (context.make_array(kind)(context, builder, value) for kind, value in zip(kinds, given, strict=True))
    sums, numbers = ir.VectorType(INT32, lanes), ir.VectorType(INT16, 2 * lanes)
    nothing = ir.Constant(sums, ir.Undefined)

    def at(data: Any, index: Any, kind: ir.Type) -> Any:
        return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())

    def widened(values: Any) -> Any:
        return builder.sext(values, ir.VectorType(INT32, 2 * lanes))

    length = builder.extract_value(wide.shape, 1)  # 2p
    starts = [row_at(builder, wide, INT64(k)) for k in range(ROWS)]
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    i, *totals = builder.phi(INT64), *(builder.phi(sums) for _ in range(ROWS))
    inputs = widened(builder.load(at(x.data, builder.mul(i, INT64(lanes)), numbers), align=2))
    following = [builder.add(i, INT64(2))]
    for start, total in zip(starts, totals, strict=True):
        single = builder.insert_element(nothing, builder.load(at(start, i, INT32), align=2), INT32(0))
        pair = builder.shuffle_vector(single, nothing, ir.Constant(sums, [0] * lanes))
        products = builder.mul(widened(builder.bitcast(pair, numbers)), inputs)
        halves = (ir.Constant(sums, [*range(first, 2 * lanes, 2)]) for first in (0, 1))
        both = builder.add(*(builder.shuffle_vector(products, products, half) for half in halves))
        following.append(builder.add(total, both))
    for value, new in zip((i, *totals), following, strict=True):
        value.add_incoming(ir.Constant(value.type, None), before)  # zero
        value.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following[0], length), loop, after)
    builder.position_at_end(after)
    for k, total in enumerate(following[1:]):
        builder.store(total, at(y.data, INT64(k * lanes), sums), align=4)
    return context.get_dummy_value()


@intrinsic
def pairs_8(_, wide, x, y):  # numba reads the types from what it returns: no type hints
    """y = wide x for a panel of 8 lanes. wide: `ROWS` 2p, int16; x: p 2l, int16; y: `ROWS` l, int32"""
    kinds = wide, x, y
    return types.void(*kinds), lambda context, builder, _, given: block_code(8, context, builder, kinds, given)


@intrinsic
def pairs_16(_, wide, x, y):
    """`pairs_8` for 16 lanes."""
    kinds = wide, x, y
    return types.void(*kinds), lambda context, builder, _, given: block_code(16, context, builder, kinds, given)


@njit(parallel=True, **LOOPS)
def logits_in_8_bits(copy: Matrix, x: np.ndarray, y: np.ndarray) -> None:
    """The logits of an 8-bit copy, for inputs that are rounded to 16 bits. x: P D l, y: n v"""
    (rows, scale), (texts, features), (panels, inputs, lanes) = copy, y.shape, x.shape
    pairs, scales = in_pairs(x)
    for part in prange(-(-features // (ROWS * PART))):
        wide = np.zeros((ROWS, 2 * pairs.shape[1]), np.int16)
        sums, results = np.empty((ROWS, lanes), np.int32), np.empty((panels, ROWS * PART, lanes), np.float32)
        first, end = part * ROWS * PART, min((part + 1) * ROWS * PART, features)
        for a in range(first, end, ROWS):
            last = min(a + ROWS, end)
            for r in range(a, last):
                row, copied = rows[r], wide[r - a]
                for start in range(0, inputs, 64):
                    fetch(rows, r + ROWS, start)
                for i in range(inputs):
                    copied[i] = row[i]
            for panel in range(panels):
                if lanes == 8:
                    pairs_8(wide, pairs[panel], sums)
                else:
                    pairs_16(wide, pairs[panel], sums)
                for r in range(a, last):
                    for lane in range(lanes):
                        # the product of both scales may be too small for a float32 of full precision
                        product = np.float32(sums[r - a, lane]) * scales[panel, lane]
                        results[panel, r - first, lane] = product * scale[r]
        for text in range(texts):
            y[text, first:end] = results[text // lanes, : end - first, text % lanes]
