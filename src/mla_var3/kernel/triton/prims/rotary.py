"""Pairs of rope columns, turned by cosines and sines."""

from __future__ import annotations

import triton
import triton.language as tl

from mla_var3.kernel.triton.prims.numerics import round_to


@triton.jit
def load_turns(Table, position, table_rows, P: tl.constexpr):
    """Cosines and sines, (P / 2,) each, of a position (int64) in a table of so many rows; NaN outside of it."""
    HALF: tl.constexpr = P // 2
    half = tl.arange(0, HALF)
    at = position + tl.zeros([HALF], tl.int64)
    inside = (at >= 0) & (at < table_rows)
    row = Table + at * P + half
    nan = float("nan")
    return tl.load(row, mask=inside, other=nan), tl.load(row + HALF, mask=inside, other=nan)


@triton.jit
def turned(rows, valid, cosines, sines, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and second columns, (heads, P / 2) float32, of each pair of the rows that begin at `rows`, turned."""
    HALF: tl.constexpr = P // 2
    if INTERLEAVED:
        x = tl.load(rows[:, None] + tl.arange(0, P)[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, (x.shape[0], HALF, 2)))
    else:
        half = tl.arange(0, HALF)[None, :]
        first = tl.load(rows[:, None] + half, mask=valid[:, None], other=0.0).to(tl.float32)
        second = tl.load(rows[:, None] + HALF + half, mask=valid[:, None], other=0.0).to(tl.float32)
    cosines, sines = cosines[None, :], sines[None, :]
    return first * cosines - second * sines, second * cosines + first * sines


@triton.jit
def put(
    rows, valid, first, second, DTYPE: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, INTERPRET: tl.constexpr
):
    """Stores what `turned` gives."""
    first, second = round_to(first, DTYPE, INTERPRET), round_to(second, DTYPE, INTERPRET)
    store_pairs(rows, valid, first, second, P, INTERLEAVED)


@triton.jit
def store_pairs(rows, valid, first, second, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Stores first and second columns, (rows, P / 2), of each pair."""
    HALF: tl.constexpr = P // 2
    if INTERLEAVED:
        both = tl.reshape(tl.join(first, second), (first.shape[0], P))
        tl.store(rows[:, None] + tl.arange(0, P)[None, :], both, mask=valid[:, None])
    else:
        half = tl.arange(0, HALF)[None, :]
        tl.store(rows[:, None] + half, first, mask=valid[:, None])
        tl.store(rows[:, None] + HALF + half, second, mask=valid[:, None])
