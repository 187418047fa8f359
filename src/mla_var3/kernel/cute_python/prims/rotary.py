"""Pairs of 64 rope columns in the registers of a warp, turned by cosines and sines.

Four lanes take a head's columns, each 16 bytes of the first half and the same place of the second, so that it holds
whole pairs in both conventions:

    lane of four    0       1       2       3       0       1       2       3
    columns         0..7    8..15   16..23  24..31  32..39  40..47  48..55  56..63
    interleaved     pairs (2i, 2i + 1) lie in one vector         halves: pairs (i, i + 32) in the lane's two
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mla_var3.kernel.cute_python.prims.sync import wait_for_launch
from mla_var3.kernel.cute_python.prims.vectors import VECTOR, WARP, load_vector, store_vector, vectors

ROPE = 64  # columns
LANES = ROPE // (2 * VECTOR)  # of a head
AT_A_TIME = WARP // LANES  # heads of a warp
HALF = ROPE // 2


@cute.jit
def load_turns(table: cute.Tensor, position: Any, place: Int32, shape: cutlass.Constexpr):
    """(cosines, sines) of a lane's eight pairs in float32: (VECTOR,) each. place: of the lane among its head's."""
    turns = (cute.make_rmem_tensor(VECTOR, Float32), cute.make_rmem_tensor(VECTOR, Float32))
    row = table.iterator + cute.assume(Int64(position) * ROPE, divby=ROPE)
    for part in cutlass.range_constexpr(2):
        for half in cutlass.range_constexpr(2):
            # Interleaved, a vector has four pairs; the lane's two vectors are those of pairs 4 place .. and 16 further.
            first = place * 4 + half * (HALF // 2) if shape.interleaved else place * VECTOR + half * 4
            source = row + (part * HALF + cute.assume(first, divby=4))
            into = cute.make_tensor(turns[part].iterator + half * 4, cute.make_layout(4))
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), into)
    return turns


@cute.jit
def turn(low: cute.Tensor, high: cute.Tensor, turns: Any, shape: cutlass.Constexpr):
    """Turns a lane's eight pairs, in registers: low and high are its vectors of the two halves."""
    cosines, sines = turns
    for i in cutlass.range_constexpr(VECTOR):
        if cutlass.const_expr(shape.interleaved):
            vector, at, other = (low if i < 4 else high), 2 * (i % 4), 2 * (i % 4) + 1
            x, y = Float32(vector[at]), Float32(vector[other])
            vector[at] = (x * cosines[i] - y * sines[i]).to(low.element_type)
            vector[other] = (y * cosines[i] + x * sines[i]).to(low.element_type)
        else:
            x, y = Float32(low[i]), Float32(high[i])
            low[i] = (x * cosines[i] - y * sines[i]).to(low.element_type)
            high[i] = (y * cosines[i] + x * sines[i]).to(low.element_type)


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
    """8 · `shape.heads` query heads of a token: a lane turns `shape.heads` by the same cosines and sines.

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
    lows, highs = vectors(q.element_type, shape.heads), vectors(q.element_type, shape.heads)
    lows.fill(0)
    highs.fill(0)
    wait_for_launch(source.toint())
    position = positions[token]
    for i in cutlass.range_constexpr(shape.heads):
        head = first + i * AT_A_TIME
        if head < shape.h if cutlass.const_expr(not shape.exact) else True:
            row = source + cute.assume(Int64(head) * q.stride[1], divby=VECTOR)
            load_vector(lows[None, i], row)
            load_vector(highs[None, i], row + HALF)
    # ptxas moves loads down to their use, behind others that wait for the position, but not past this.
    cute.arch.sync_warp()
    turns = load_turns(table, position, place, shape)
    cute.arch.sync_warp()
    for i in cutlass.range_constexpr(shape.heads):
        head = first + i * AT_A_TIME
        turn(lows[None, i], highs[None, i], turns, shape)
        if head < shape.h if cutlass.const_expr(not shape.exact) else True:
            row = target + cute.assume(Int64(head) * out.stride[1], divby=VECTOR)
            store_vector(lows[None, i], row)
            store_vector(highs[None, i], row + HALF)
