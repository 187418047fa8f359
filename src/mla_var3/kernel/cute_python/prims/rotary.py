"""Pairs of 64 rope columns in the registers of a warp, turned by cosines and sines.

Eight lanes take a head's columns, 16 bytes each, so that a warp reads and writes whole lines of 128 bytes, four heads
at a time. (Four lanes with 16 bytes of each half would need no exchange, and took up to a sixth longer: their stores
fill half lines.)

    lane of eight   0      1       2       3       4       5       6       7
    columns         0..7   8..15   16..23  24..31  32..39  40..47  48..55  56..63
    interleaved     pairs (2i, 2i + 1) lie in one lane     halves: pairs (i, i + 32) in two, four lanes apart
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mla_var3.kernel.cute_python.prims.sync import wait_for_launch
from mla_var3.kernel.cute_python.prims.vectors import VECTOR, WARP, load_vector, store_vector, vectors

ROPE = 64  # columns
LANES = ROPE // VECTOR  # of a head
AT_A_TIME = WARP // LANES  # heads of a warp
HALF = ROPE // 2


@cute.jit
def load_turns(table: cute.Tensor, position: Any, place: Int32, shape: cutlass.Constexpr):
    """(cosines, sines) in float32 of the pairs that a lane has a part of: four, or eight of halves. place: of the lane
    among its head's. Sines are those that the pair's other column is multiplied with: of lower halves negative. All
    are NaN where the table has no such position."""
    count = cutlass.const_expr(VECTOR // 2 if shape.interleaved else VECTOR)
    turns = (cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32))
    first = place * count if cutlass.const_expr(shape.interleaved) else place % (LANES // 2) * count
    row = table.iterator + cute.assume(Int64(position) * ROPE, divby=ROPE)
    for part in cutlass.range_constexpr(2):
        turns[part].fill(float("nan"))
    if position >= 0 and position < table.shape[0]:
        for part in cutlass.range_constexpr(2):
            source = row + (part * HALF + cute.assume(first, divby=4))
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), turns[part])
    if cutlass.const_expr(not shape.interleaved):
        for i in cutlass.range_constexpr(count):
            turns[1][i] = turns[1][i] if place >= LANES // 2 else -turns[1][i]
    return turns


@cute.jit
def turn(vector: cute.Tensor, turns: Any, shape: cutlass.Constexpr):
    """Turns a lane's columns, in registers; by whole warps."""
    cosines, sines = turns
    if cutlass.const_expr(shape.interleaved):
        for i in cutlass.range_constexpr(VECTOR // 2):
            x, y = Float32(vector[2 * i]), Float32(vector[2 * i + 1])
            vector[2 * i] = (x * cosines[i] - y * sines[i]).to(vector.element_type)
            vector[2 * i + 1] = (y * cosines[i] + x * sines[i]).to(vector.element_type)
    else:
        other = cute.make_rmem_tensor(VECTOR, vector.element_type)
        words, others = cute.recast_tensor(vector, Int32), cute.recast_tensor(other, Int32)
        for i in cutlass.range_constexpr(cute.size(words)):
            others[i] = cute.arch.shuffle_sync_bfly(words[i], offset=LANES // 2)
        for i in cutlass.range_constexpr(VECTOR):
            turned = Float32(vector[i]) * cosines[i] + Float32(other[i]) * sines[i]
            vector[i] = turned.to(vector.element_type)


@cute.jit
def turn_queries(
    q: cute.Tensor,
    out: cute.Tensor,
    positions: cute.Tensor,
    table: cute.Tensor,
    token: Int32,
    chunk: Int32,
    lane: Int32,
    shape: cutlass.Constexpr,
):
    """4 · `shape.heads` query heads of a token: a lane turns `shape.heads` by the same cosines and sines.

    q (n, h, columns) and out (n, h, any, whose last ROPE columns are written) in global memory, tokens and heads apart
    by multiples of 8 elements; positions (n,); table (positions, ROPE) float32. chunk: which heads. shape: has h,
    columns, interleaved, heads, and exact: whether every lane has all of its heads.
    """
    place = lane % LANES
    first = chunk * (AT_A_TIME * shape.heads) + lane // LANES
    column = cute.assume(place * VECTOR, divby=VECTOR)
    source = q.iterator + cute.assume(Int64(token) * q.stride[0], divby=VECTOR) + (shape.columns - ROPE) + column
    target = out.iterator + cute.assume(Int64(token) * out.stride[0], divby=VECTOR)
    target = target + cute.assume(out.shape[2] - ROPE, divby=VECTOR) + column
    held = vectors(q.element_type, shape.heads)
    held.fill(0)
    wait_for_launch(source.toint())
    position = positions[token]
    for i in cutlass.range_constexpr(shape.heads):
        head = first + i * AT_A_TIME
        if head < shape.h if cutlass.const_expr(not shape.exact) else True:
            load_vector(held[None, i], source + cute.assume(Int64(head) * q.stride[1], divby=VECTOR))
    # ptxas moves loads down to their use, behind others that wait for the position, but not past this.
    cute.arch.sync_warp()
    turns = load_turns(table, position, place, shape)
    cute.arch.sync_warp()
    for i in cutlass.range_constexpr(shape.heads):
        head = first + i * AT_A_TIME
        turn(held[None, i], turns, shape)
        if head < shape.h if cutlass.const_expr(not shape.exact) else True:
            store_vector(held[None, i], target + cute.assume(Int64(head) * out.stride[1], divby=VECTOR))
