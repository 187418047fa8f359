"""The end of a block of swapped-operand decode whose two consumers meet once.

Each consumer lays the columns that it does not finish, as they lie in its registers, into the panels of its own last
tile, which nobody reads any more. So nobody waits before giving, the first to end gives while the other still works,
and one barrier is all that is between the last product and the sum of both. `consumer.finish` passes the same columns
through the memory of q, one direction after the other, behind four barriers.

Parts go where `lib.split.combine_fragments` reads them (`lib.latent.fragments` describes the order). They are divided
by their row's sum and brought below 2^15 by a power of two from a bound of the row's magnitudes: each consumer's
largest, times its weight. One barrier serves these, too. As marks, consumer 0 has the row's sum and consumer 1 has 0.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from mla_var3.kernel.cute_python.lib import softmax
from mla_var3.kernel.cute_python.lib.barriers import named_sync
from mla_var3.kernel.cute_python.lib.latent import fragments
from mla_var3.kernel.cute_python.lib.rows import CHUNK
from mla_var3.kernel.cute_python.lib.swapped import ring, swapped
from mla_var3.kernel.cute_python.lib.swapped.consumer import EXCHANGE_VECTOR, JOIN, JOIN_ALL, stage
from mla_var3.kernel.cute_python.lib.swapped.swapped import PANEL, WARPS
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP

CONSUMERS = 2
MAGNITUDES = "magnitudes"  # board of `consumer.shared_storage`


def last_slot(count: Int32, me: int, slots: int, panels: int) -> Int32:
    """First slot of the last tile that consumer `me` takes of a block's `count`; where it takes none, one that the
    other does not use."""
    last = count - 1
    tile = cutlass.max(last - ((last ^ me) & 1), Int32(me))
    return (tile * panels) % slots


@cute.jit
def given_panel(w: cutlass.Constexpr, slot: Int32, i: cutlass.Constexpr) -> cute.Tensor:
    """fp32 accumulators of a panel in the i-th slot from `slot` on: (4, thread, vector)."""
    place, _ = ring.at(slot, Int32(0), i, w.shape.slots)
    base = w.ring + cute.assume(place * ring.SLOT_ELEMENTS, divby=ring.SLOT_ELEMENTS)
    layout = cute.make_layout(
        (EXCHANGE_VECTOR, WARPGROUP, w.shape.tile_n // 2 // EXCHANGE_VECTOR),
        stride=(1, EXCHANGE_VECTOR, EXCHANGE_VECTOR * WARPGROUP),
    )
    return cute.make_tensor(cute.recast_ptr(base, dtype=Float32), layout)


def vectors_of(acc: cute.Tensor, n: int) -> cute.Tensor:
    """A panel's accumulators as (4, vector): two columns by two rows each."""
    layout = cute.make_layout((EXCHANGE_VECTOR, n // 2 // EXCHANGE_VECTOR), stride=(1, EXCHANGE_VECTOR))
    return cute.make_tensor(acc.iterator, layout)


@cute.jit
def largest(w: cutlass.Constexpr) -> cute.Tensor:
    """(N/4,) registers: the largest magnitude of this warp's outputs in each of the thread's columns."""
    count = cutlass.const_expr(w.shape.tile_n // 4)
    found = cute.make_rmem_tensor(count, Float32)
    found.fill(0.0)
    for i in cutlass.range_constexpr(w.shape.latent_panels):
        columns = swapped.as_columns(w.acc_o[i])
        for c in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                found[c] = cute.arch.fmax(found[c], cute.math.absf(columns[c, r]))
    for c in cutlass.range_constexpr(count):
        found[c] = swapped.over_lanes(found[c], True)
    return found


@cute.jit
def join(w: cutlass.Constexpr, count: Int32, magnitudes: cute.Pointer, bounded: cutlass.Constexpr):
    """Adds the consumers' outputs and divides them by the rows' sums; past it this consumer's columns are whole.

    count: tiles of the block. Leaves the maxima of both in w.m and their sums in w.total. bounded: rows are also
    brought below 2^15 by powers of two, which w.factor then holds.
    """
    shape = w.shape
    n, columns = shape.tile_n, shape.tile_n // 4
    half = shape.latent_panels // CONSUMERS
    vectors = n // 2 // EXCHANGE_VECTOR
    other = 1 - w.me
    mine = last_slot(count, w.me, shape.slots, shape.panels)
    theirs = last_slot(count, other, shape.slots, shape.panels)
    given, kept = shape.finished_by(other), shape.finished_by(w.me)
    for i in cutlass.range_constexpr(half):
        target, source = given_panel(w, mine, i), vectors_of(w.acc_o[given[i]], n)
        for j in cutlass.range_constexpr(vectors):
            cute.autovec_copy(source[None, j], target[None, w.thread, j])
    warp = w.thread // 32
    if cutlass.const_expr(bounded):
        swapped.publish(largest(w), swapped.board_row(magnitudes + w.me * WARPS * n, n, warp), w.thread)
    for c in cutlass.range_constexpr(columns):
        w.total[c] = swapped.over_lanes(w.total[c], False)
    swapped.publish(w.total, swapped.board_row(w.board, n, warp), w.thread)
    if w.thread < 32:
        swapped.publish(w.m, swapped.board_row(w.maxima, n, Int32(w.me)), w.thread)
    named_sync(JOIN_ALL, CONSUMERS * WARPGROUP)

    part = cute.make_rmem_tensor((EXCHANGE_VECTOR, vectors, half), Float32)
    for i in cutlass.range_constexpr(half):
        source = given_panel(w, theirs, i)
        for j in cutlass.range_constexpr(vectors):
            cute.autovec_copy(source[None, w.thread, j], part[None, j, i])
    their_sum = cute.make_rmem_tensor(columns, Float32)
    their_factor = cute.make_rmem_tensor(columns, Float32)
    swapped.collect(their_factor, w.maxima + other * n, n, 1, w.thread, True)
    swapped.collect(w.total, w.boards + w.me * WARPS * n, n, WARPS, w.thread, False)
    swapped.collect(their_sum, w.boards + other * WARPS * n, n, WARPS, w.thread, False)
    for c in cutlass.range_constexpr(columns):
        best = cute.arch.fmax(w.m[c], their_factor[c])
        own, their = softmax.exp2(w.m[c] - best), softmax.exp2(their_factor[c] - best)
        w.m[c] = best
        w.total[c] = w.total[c] * own + their_sum[c] * their
        inverse = cute.arch.rcp_approx(w.total[c]) if w.total[c] > 0.0 else Float32(0.0)
        w.factor[c] = own * inverse
        their_factor[c] = their * inverse
    scale = cute.make_rmem_tensor(columns, Float32)
    if cutlass.const_expr(bounded):
        swapped.collect(scale, magnitudes + w.me * WARPS * n, n, WARPS, w.thread, True)
        swapped.collect(their_sum, magnitudes + other * WARPS * n, n, WARPS, w.thread, True)
        for c in cutlass.range_constexpr(columns):
            bound = scale[c] * w.factor[c] + their_sum[c] * their_factor[c]
            # NaN and inf of a caller's V take the largest exponent.
            exponent = cutlass.min(cutlass.max((bound.bitcast(Int32) >> 23) - 127, fragments.LEAST), 127)
            scale[c] = fragments.power_of_two(fragments.TOP - exponent)
            w.factor[c] = w.factor[c] * scale[c]
            their_factor[c] = their_factor[c] * scale[c]
    for i in cutlass.range_constexpr(half):
        acc = vectors_of(w.acc_o[kept[i]], n)
        for j in cutlass.range_constexpr(vectors):
            for e in cutlass.range_constexpr(EXCHANGE_VECTOR):
                c = 2 * j + e % 2
                acc[e, j] = acc[e, j] * w.factor[c] + part[e, j, i] * their_factor[c]
    if cutlass.const_expr(bounded):
        w.factor.store(scale.load())


@cute.jit
def finish_whole(
    w: cutlass.Constexpr,
    out: cute.Tensor,  # (b, s, h, k) 16-bit, global memory
    lse: cute.Tensor,  # (b, h, s) fp32, global memory
    batch: Int32,
    kv_head: Int32,
    count: Int32,
    magnitudes: cute.Pointer,
):
    """This consumer's columns of the results of a block with all rows; consumer 0 also writes the log-sum-exp."""
    shape = w.shape
    panels = shape.finished_by(w.me)
    join(w, count, magnitudes, bounded=False)
    stage(w, w.dtype)
    named_sync(JOIN + w.me, WARPGROUP)
    swapped.store_outputs(
        w.query, out, panels[0], len(panels), shape.tile_n, batch, kv_head, Int32(0), shape.rows, shape.group, w.thread
    )
    if cutlass.const_expr(w.me == 0):
        if w.thread < 4:
            for c in cutlass.range_constexpr(shape.tile_n // 4):
                row = swapped.acc_column(w.thread, c)
                if row < shape.rows:
                    value = w.m[c] + cute.math.log2(w.total[c], fastmath=True)
                    value = value * math.log(2.0) if w.total[c] > 0.0 else Float32.inf
                    lse[batch, kv_head * shape.group + row % shape.group, row // shape.group] = value


@cute.jit
def finish_part(
    w: cutlass.Constexpr,
    parts: cute.Pointer,  # fp16, global memory
    marks: cute.Pointer,  # fp32, global memory
    index: Int32,  # split · b + request
    kv_head: Int32,
    count: Int32,
    magnitudes: cute.Pointer,
    latent: cutlass.Constexpr,  # the problem as a `lib.latent.shape.Shape`, of one row tile
):
    """This consumer's half of the part of a block with all rows, and its marks."""
    shape = w.shape
    n, columns = shape.tile_n, shape.tile_n // 4
    sizes = fragments.Fragments.of(latent)
    panels = shape.finished_by(w.me)
    part = fragments.part_index(index, kv_head, Int32(0), latent)
    join(w, count, magnitudes, bounded=True)
    for c in cutlass.range_constexpr(columns):
        row = swapped.acc_column(w.thread, c)
        if w.thread < 4 and row < sizes.groups * fragments.GROUP:
            found = cute.make_rmem_tensor(2, Float32)
            lse = w.m[c] + cute.math.log2(w.total[c], fastmath=True) - cute.math.log2(w.factor[c], fastmath=True)
            found[0] = lse if w.total[c] > 0.0 else -Float32.inf
            found[1] = w.factor[c] if cutlass.const_expr(w.me == 0) else Float32(0.0)
            target = cute.zipped_divide(fragments.row_marks(marks, part, row, sizes), (2,))[None, w.me]
            cute.autovec_copy(found, target)
    stage(w, Float16)
    named_sync(JOIN + w.me, WARPGROUP)
    lane, warp = w.thread % 32, w.thread // 32
    staged = cute.recast_ptr(w.query + panels[0] * n * PANEL, dtype=Int32)
    values = cute.make_rmem_tensor(fragments.VECTOR // 2, Int32)
    units = n // fragments.GROUP * sizes.vectors
    for i in cutlass.range_constexpr(-(-units // WARPS)):
        unit = i * WARPS + warp
        group, vector = unit // sizes.vectors, unit % sizes.vectors
        row = group * fragments.GROUP + lane // 4
        for q in cutlass.range_constexpr(fragments.VECTOR // 2):
            chunk = vector * (fragments.COLUMNS // CHUNK) + q
            place = chunk // 8 * (n * PANEL) + row * PANEL + ((chunk % 8) ^ (row % 8)) * CHUNK
            values[q] = cute.make_tensor(staged + place // 2 + lane % 4, cute.make_layout(1))[0]
        if unit < units and group < sizes.groups:
            target = fragments.vector_at(parts, part, Int32(w.me), group, vector, lane, sizes)
            cute.autovec_copy(cute.recast_tensor(values, Float16), target)
