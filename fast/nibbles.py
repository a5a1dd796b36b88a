"""Weights of 4 bits in compiled loops: code written for LLVM, because numba's own loops over half bytes are slow.

A register of 16 lanes holds half a group of numbers, see `fast.compact.quantise_4`. A number of 4 bits becomes a float
without being converted: its bits are put into those of a power of two, which is subtracted again. Rows are fetched from
memory long before they are read: a processor that is busy with lanes fetches too little by itself.

Shapes:  o, i a matrix's output and input features   n = i / 32 groups
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

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
