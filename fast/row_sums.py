"""Rows of a weight times the inputs of one text, in float32, bfloat16, 8 and 4 bits.

Rows are fetched from memory long before they are read: a processor that is busy with arithmetic or with lanes fetches
too little by itself. 8-bit rows are multiplied as integers, which takes fewer instructions than to make them float32:
each input is 256 times one integer of 16 bits and another, nearly as exact as a float32. That loop and those over half
bytes are written for LLVM: numba's own did not get those instructions, or are slow.

Shapes:  o, i a matrix's output and input features   n = i / 32 groups
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

# A register of 16 lanes holds half a group of numbers of 4 bits, see `fast.compact.quantise_4`. Each becomes a float
# without being converted: its bits are put into those of a power of two, which is subtracted again.
LANES = 16  # half a group
AHEAD = 2048  # bytes between those that are read and those that are fetched
FLOAT, INT16, INT32, INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
BYTES = ir.IntType(8).as_pointer()
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)
NOTHING = ir.Constant(FLOATS, ir.Undefined)
# The bits of a byte that are a number, those of a power of two whose last bits they can be, and that power.
LOW, HIGH = (0x0F, 0x4B000000, 2.0**23), (0xF0, 0x49000000, 2.0**19)

Row = tuple[Any, Any]  # where its bytes begin, and its scales


def row_at(builder: Any, rows: Any, row: Any) -> Any:
    """The address of a row."""
    return builder.gep(rows.data, [builder.mul(row, builder.extract_value(rows.shape, 1))])


def row_and_scales_at(builder: Any, rows: Any, scale: Any, row: Any) -> Row:
    """rows: o i/2, uint8; scale: o n, bfloat16 as uint16"""
    return row_at(builder, rows, row), row_at(builder, scale, row)


def floats_at(builder: Any, data: Any, start: Any) -> Any:
    """The address of 16 floats."""
    return builder.bitcast(builder.gep(data, [start]), FLOATS.as_pointer())


def fetch_later(builder: Any, start: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [BYTES, INT32, INT32, INT32])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", (BYTES,), kind)
    address = builder.gep(start, [INT64(AHEAD)])
    builder.call(prefetch, [address, INT32(0), INT32(3), INT32(1)])  # to be read, kept; data


def group_at(builder: Any, row: Row, group: Any) -> tuple[Any, Any, Any]:
    """The first and the last 16 numbers of a group, and its scale in all lanes. Fetches later bytes."""
    start = builder.gep(row[0], [builder.mul(group, INT64(LANES))])
    fetch_later(builder, start)
    of_bytes = ir.VectorType(ir.IntType(8), LANES)
    both = builder.zext(builder.load(builder.bitcast(start, of_bytes.as_pointer()), align=1), INTS)

    def half(mask: int, bits: int, power: float) -> Any:
        number = builder.and_(both, ir.Constant(INTS, [mask] * LANES))
        number = builder.bitcast(builder.or_(number, ir.Constant(INTS, [bits] * LANES)), FLOATS)
        return builder.fsub(number, ir.Constant(FLOATS, [power + 8] * LANES))

    upper = builder.zext(builder.load(builder.gep(row[1], [group])), INT32)  # bfloat16: the upper half of a float32
    scale = builder.bitcast(builder.shl(upper, INT32(16)), FLOAT)
    single = builder.insert_element(NOTHING, scale, INT32(0))
    return half(*LOW), half(*HIGH), builder.shuffle_vector(single, NOTHING, ir.Constant(INTS, [0] * LANES))


def for_groups(builder: Any, count: Any, sums: int, step: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """A loop: `step` takes a group's number and the sums so far, and returns the new ones. Returns the last."""
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    group, *totals = builder.phi(INT64), *(builder.phi(FLOATS) for _ in range(sums))
    following = [*step(group, totals), builder.add(group, INT64(1))]
    for value, new in zip((*totals, group), following, strict=True):
        value.add_incoming(ir.Constant(value.type, None), before)  # zero
        value.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following[-1], count), loop, after)
    builder.position_at_end(after)
    return following[:-1]


def sums_code(context: Any, builder: Any, kinds: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
    v, v_scale, w, w_scale, x = (context.make_array(kinds[i])(context, builder, given[i]) for i in (0, 1, 3, 4, 6))
    rows = row_and_scales_at(builder, v, v_scale, given[2]), row_and_scales_at(builder, w, w_scale, given[5])

    def add(a: Any, b: Any, c: Any) -> Any:
        return builder.fadd(a, builder.fmul(b, c, flags=("contract",)), flags=("contract",))

    def step(group: Any, totals: list[Any]) -> list[Any]:
        first = builder.mul(group, INT64(2 * LANES))
        starts = first, builder.add(first, INT64(LANES))
        inputs = [builder.load(floats_at(builder, x.data, start), align=4) for start in starts]
        new = []
        for row, total in zip(rows, totals, strict=True):
            low, high, scale = group_at(builder, row, group)
            new.append(add(total, add(builder.fmul(low, inputs[0]), high, inputs[1]), scale))
        return new

    def sum_of_lanes(total: Any) -> Any:
        for width in (8, 4, 2, 1):
            halves = (ir.Constant(ir.VectorType(INT32, width), [*range(k, k + width)]) for k in (0, width))
            total = builder.fadd(*(builder.shuffle_vector(total, total, half) for half in halves))
        return builder.extract_element(total, INT32(0))

    totals = for_groups(builder, builder.extract_value(v_scale.shape, 1), 2, step)
    return context.make_tuple(builder, types.UniTuple(types.float32, 2), [*map(sum_of_lanes, totals)])


def widen_code(context: Any, builder: Any, kinds: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
    rows, scale, wide = (context.make_array(kinds[i])(context, builder, given[i]) for i in (0, 1, 3))
    row = row_and_scales_at(builder, rows, scale, given[2])

    def step(group: Any, _: list[Any]) -> list[Any]:
        *halves, factor = group_at(builder, row, group)
        first = builder.mul(group, INT64(2 * LANES))
        for half, start in zip(halves, (first, builder.add(first, INT64(LANES))), strict=True):
            builder.store(builder.fmul(half, factor), floats_at(builder, wide.data, start), align=4)
        return []

    for_groups(builder, builder.extract_value(scale.shape, 1), 0, step)
    return context.get_dummy_value()


def fetch_code(context: Any, builder: Any, kinds: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
    rows = context.make_array(kinds[0])(context, builder, given[0])
    start = row_at(builder, rows, given[1])
    fetch_later(builder, builder.gep(builder.bitcast(start, BYTES), [given[2]]))
    return context.get_dummy_value()


@intrinsic
def fetch(_, rows, r, start):
    """Fetch a line of memory, `AHEAD` bytes after the one that begins with byte `start` of a row. rows: o i"""
    kinds = rows, r, start
    return types.void(*kinds), lambda context, builder, _, given: fetch_code(context, builder, kinds, given)


@intrinsic
def nibble_sums(_, v, v_scale, r, w, w_scale, s, x):  # numba reads the types from what it returns: no type hints
    """Row r of v and row s of w times x. v, w: o i/2, uint8; v_scale, w_scale: o n, bfloat16 as uint16; x: i"""
    kinds = v, v_scale, r, w, w_scale, s, x
    returned = types.UniTuple(types.float32, 2)
    return returned(*kinds), lambda context, builder, _, given: sums_code(context, builder, kinds, given)


@intrinsic
def widen_nibbles(_, rows, scale, r, wide):
    """Write row r as float32. rows: o i/2, uint8; scale: o n, bfloat16 as uint16; wide: i"""
    kinds = rows, scale, r, wide
    return types.void(*kinds), lambda context, builder, _, given: widen_code(context, builder, kinds, given)


# --------------------------------------------------------------------------------------------------------- sums of rows

# Sums of floats may be reordered, but infinities and NaNs stay possible, so that a damaged checkpoint shows.
# Division is NumPy's: a check for zero would keep loops out of vector lanes.
LOOPS = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy", "cache": True}
BLOCK = 32  # 8-bit numbers that are summed at once
PAIRS = BLOCK // 2  # 32-bit sums, of pairs of products
INT8 = ir.IntType(8)


class Matrix(NamedTuple):
    """A weight as rows times a scale for each row, or for each group of a row.

    rows: o i, float32, int8, or the bits of bfloat16 as uint16; scale: o, float32. Or, see `compact.quantise_4`,
    rows: o i/2, uint8; scale: o i/32, the bits of bfloat16 as uint16.
    """

    rows: np.ndarray
    scale: np.ndarray


def byte_sums_code(context: Any, builder: Any, kinds: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
    """Even and odd products are added after the multiplication: so LLVM finds the instructions that do it at once."""
    v, w, high, low = (context.make_array(kinds[i])(context, builder, given[i]) for i in (0, 2, 4, 5))
    starts = row_at(builder, v, given[1]), row_at(builder, w, given[3])
    end = builder.mul(builder.sdiv(builder.extract_value(high.shape, 0), INT64(BLOCK)), INT64(BLOCK))
    before, loop, body, after = builder.block, *map(builder.append_basic_block, ("loop", "body", "after"))
    builder.branch(loop)
    builder.position_at_end(loop)
    i, *totals = builder.phi(INT64), *(builder.phi(ir.VectorType(INT32, PAIRS)) for _ in range(4))
    builder.cbranch(builder.icmp_signed("<", i, end), body, after)
    builder.position_at_end(body)

    def numbers_at(data: Any, kind: ir.Type) -> Any:
        start = builder.bitcast(builder.gep(data, [i]), ir.VectorType(kind, BLOCK).as_pointer())
        return builder.sext(builder.load(start, align=1), ir.VectorType(INT32, BLOCK))

    def pairs(left: Any, right: Any) -> Any:
        products = builder.mul(left, right)
        halves = (ir.Constant(ir.VectorType(INT32, PAIRS), [*range(first, BLOCK, 2)]) for first in (0, 1))
        return builder.add(*(builder.shuffle_vector(products, products, half) for half in halves))

    new, inputs = [builder.add(i, INT64(BLOCK))], [numbers_at(x.data, INT16) for x in (high, low)]
    for start in starts:
        fetch_later(builder, builder.gep(start, [i]))
        numbers = numbers_at(start, INT8)
        new += [builder.add(totals[len(new) - 1 + k], pairs(numbers, x)) for k, x in enumerate(inputs)]
    for value, following in zip((i, *totals), new, strict=True):
        value.add_incoming(ir.Constant(value.type, None), before)  # zero
        value.add_incoming(following, body)
    builder.branch(loop)
    builder.position_at_end(after)
    sums = [_sum_of_lanes(builder, *totals[first : first + 2]) for first in (0, 2)]
    return context.make_tuple(builder, types.UniTuple(types.float32, 2), sums)


def _sum_of_lanes(builder: Any, high: Any, low: Any) -> Any:
    floats = ir.VectorType(FLOAT, PAIRS)
    high, low = builder.sitofp(high, floats), builder.sitofp(low, floats)
    total = builder.fadd(builder.fmul(high, ir.Constant(floats, [256.0] * PAIRS)), low)
    kind = ir.FunctionType(FLOAT, [FLOAT, floats])
    add = builder.module.declare_intrinsic(f"llvm.vector.reduce.fadd.v{PAIRS}f32", (), kind)
    return builder.call(add, [ir.Constant(FLOAT, 0.0), total], fastmath=("reassoc",))


@intrinsic
def byte_sums(_, v, r, w, s, high, low):  # numba reads the types from what it returns: no type hints
    """Row r of v and row s of w times x, without what is left after whole blocks. v, w: o i, int8

    x: 256 high + low, i each, int16. No sum of 1/16 of the products may leave 32 bits.
    """
    kinds = v, r, w, s, high, low
    returned = types.UniTuple(types.float32, 2)
    return returned(*kinds), lambda context, builder, _, given: byte_sums_code(context, builder, kinds, given)


# ----------------------------------------------------------------------------------------------- a row times the inputs


def number(stored: np.number) -> np.float32:
    """A stored number of a `Matrix` as float32. Compiled code only."""
    raise NotImplementedError


@overload(number)
def _number(stored):  # numba compares its signature with those of the functions inside: no type hints
    if stored == types.uint16:  # bfloat16 is the upper half of a float32
        return lambda stored: np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)
    return lambda stored: np.float32(stored)


@njit(**LOOPS)
def dot(row: np.ndarray, x: np.ndarray) -> np.float32:
    total = np.float32(0)
    for i in range(len(x)):
        total += number(row[i]) * x[i]
    return total


# What `two_sums` reads in the place of x: for 8-bit rows what `in_two_parts` gives, else x itself.
Inputs = np.ndarray | tuple[np.ndarray, np.ndarray, np.float32]


def inputs(weight: Matrix, x: np.ndarray) -> Inputs:
    """x: i. Compiled code only."""
    raise NotImplementedError


@overload(inputs)
def _inputs(weight, x):
    return (lambda weight, x: in_two_parts(x)) if _has_8_bits(weight) else (lambda weight, x: x)


def two_sums(v: Matrix, r: int, w: Matrix, s: int, x: Inputs) -> tuple[np.float32, np.float32]:
    """Row r of v and row s of w times x. x: i, see `inputs`. Compiled code only."""
    raise NotImplementedError


@overload(two_sums, jit_options={"forceinline": True})
def _two_sums(v, r, w, s, x):
    if v.types[0].dtype == types.uint8:
        return lambda v, r, w, s, x: nibble_sums(v.rows, v.scale, r, w.rows, w.scale, s, x)
    sums = integer_sums if _has_8_bits(v) else float_sums
    return lambda v, r, w, s, x: sums(v, r, w, s, x)


def _has_8_bits(weight: types.BaseTuple) -> bool:
    return weight.types[0].dtype == types.int8


@njit(forceinline=True, **LOOPS)
def float_sums(v: Matrix, r: int, w: Matrix, s: int, x: np.ndarray) -> tuple[np.float32, np.float32]:
    a, b = np.float32(0), np.float32(0)
    for start in range(0, len(x) * v.rows.itemsize, 64):
        fetch(v.rows, r, start)
        fetch(w.rows, s, start)
    for i in range(len(x)):
        a += number(v.rows[r, i]) * x[i]
        b += number(w.rows[s, i]) * x[i]
    return a * v.scale[r], b * w.scale[s]


@njit(forceinline=True, **LOOPS)
def integer_sums(
    v: Matrix, r: int, w: Matrix, s: int, x: tuple[np.ndarray, np.ndarray, np.float32]
) -> tuple[np.float32, np.float32]:
    high, low, scale = x
    a, b = byte_sums(v.rows, r, w.rows, s, high, low)
    for i in range(len(high) // BLOCK * BLOCK, len(high)):
        whole = np.float32(256) * np.float32(high[i]) + np.float32(low[i])
        a += np.float32(v.rows[r, i]) * whole
        b += np.float32(w.rows[s, i]) * whole
    return a * (v.scale[r] * scale), b * (w.scale[s] * scale)


@njit(**LOOPS)
def in_two_parts(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """x as (256 high + low) * scale, which is NaN if x is not finite. x: i -> i and i, int16

    high: at most 15 bits, fewer from 8192 inputs on, see `byte_sums`.
    """
    largest, total = np.float32(1e-30), np.float32(0)
    for i in range(len(x)):
        largest = max(largest, abs(x[i]))
        total += abs(x[i])
    high, low = np.zeros(len(x), np.int16), np.zeros(len(x), np.int16)
    if not total < np.inf:
        return high, low, np.float32(np.nan)
    scale = largest / np.float32(min(2**15 - 1, 2**28 // len(x)))
    for i in range(len(x)):
        whole = x[i] / scale
        part = np.floor(whole + np.float32(0.5))
        high[i] = np.int16(part)
        low[i] = np.int16(np.floor((whole - part) * np.float32(256) + np.float32(0.5)))
    return high, low, scale / np.float32(256)
