"""The end of a block of swapped-operand decode whose two consumers meet once, in the same code.

Each consumer lays the columns that it does not finish, as they lie in its registers, into the panels of its own last
tile, which nobody reads any more. So nobody waits before giving, the first to end gives while the other still works,
and one barrier is all that is between the last product and the sum of both. `consumer.finish` passes the same columns
through the memory of q, one direction after the other, behind four barriers, and has a copy of itself for each.

Parts go where `lib.split.combine_fragments` reads them (`lib.latent.fragments` describes the order). They are divided
by their row's sum and brought below 2^15 by a power of two from a bound of the row's magnitudes: each consumer's
largest, times its weight. One barrier serves these, too. As marks, consumer 0 has the row's sum and consumer 1 has 0.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode

from mla_var3.kernel.cute_python.lib import softmax, wgmma
from mla_var3.kernel.cute_python.lib.barriers import named_sync
from mla_var3.kernel.cute_python.lib.latent import fragments
from mla_var3.kernel.cute_python.lib.rows import CHUNK
from mla_var3.kernel.cute_python.lib.swapped import ring, swapped
from mla_var3.kernel.cute_python.lib.swapped.consumer import JOIN_ALL
from mla_var3.kernel.cute_python.lib.swapped.limits import CONSUMERS
from mla_var3.kernel.cute_python.lib.swapped.swapped import PANEL, VECTOR, WARPS
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP

MAGNITUDES = "magnitudes"  # board of `consumer.shared_storage`


class Ending:
    """What both consumers work with at the end of a block. Python holds it; nothing is copied.

    results: `consumer.Results`, of which the first half of the panels is the one that the consumer finishes. thread:
    0..255. count: tiles of the block, taken in turn.
    """

    def __init__(self, results, shape, dtype, storage, thread, count) -> None:
        self.shape, self.dtype, self.count = shape, dtype, count
        self.me, self.thread = thread // WARPGROUP, thread % WARPGROUP
        self.half = shape.latent_panels // CONSUMERS
        self.kept, self.given = results.acc_o[: self.half], results.acc_o[self.half :]
        self.m, self.total = results.m, results.total
        self.ring, self.query = storage.ring.data_ptr(), storage.query.data_ptr()
        self.boards, self.maxima = storage.boards.data_ptr(), storage.maxima.data_ptr()
        self.magnitudes = getattr(storage, MAGNITUDES).data_ptr()
        columns = shape.tile_n // 4
        self.factor, self.their_factor = (cute.make_rmem_tensor(columns, Float32) for _ in range(2))
        self.scale = cute.make_rmem_tensor(columns, Float32)

    def staged(self) -> cute.Pointer:
        """Where the consumer's panels of results are staged: its half of the memory of q."""
        elements = self.half * self.shape.tile_n * PANEL
        return self.query + cute.assume(self.me * elements, divby=elements)


def last_slot(count: Int32, me: Int32, slots: int, panels: int) -> Int32:
    """First slot of the last tile that consumer `me` of two takes of a block's `count`; where it takes none, one that
    the other does not use."""
    last = count - 1
    tile = cutlass.max(last - ((last ^ me) & 1), me)
    return (tile * panels) % slots


@cute.jit
def given_panel(e: cutlass.Constexpr, slot: Int32, i: cutlass.Constexpr) -> cute.Tensor:
    """fp32 accumulators of a panel in the i-th slot from `slot` on: (4, thread, vector)."""
    place, _ = ring.at(slot, Int32(0), i, e.shape.slots)
    base = e.ring + cute.assume(place * ring.SLOT_ELEMENTS, divby=ring.SLOT_ELEMENTS)
    layout = cute.make_layout(
        (VECTOR, WARPGROUP, e.shape.tile_n // 2 // VECTOR),
        stride=(1, VECTOR, VECTOR * WARPGROUP),
    )
    return cute.make_tensor(cute.recast_ptr(base, dtype=Float32), layout)


@cute.jit
def largest(e: cutlass.Constexpr) -> cute.Tensor:
    """(N/4,) registers: the largest magnitude of this warp's outputs in each of the thread's columns."""
    count = cutlass.const_expr(e.shape.tile_n // 4)
    found = cute.make_rmem_tensor(count, Float32)
    found.fill(0.0)
    for acc in (*e.kept, *e.given):
        columns = swapped.as_columns(acc)
        for c in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                found[c] = cute.arch.fmax(found[c], cute.math.absf(columns[c, r]))
    for c in cutlass.range_constexpr(count):
        found[c] = swapped.over_lanes(found[c], True)
    return found


@cute.jit
def join(e: cutlass.Constexpr, bounded: cutlass.Constexpr):
    """Adds the consumers' outputs and divides them by the rows' sums; past it each consumer's columns are whole.

    Leaves the maxima of both in e.m and their sums in e.total. bounded: rows are also brought below 2^15 by powers of
    two, which e.scale then holds.
    """
    shape = e.shape
    n, columns = shape.tile_n, shape.tile_n // 4
    vectors = n // 2 // VECTOR
    other = 1 - e.me
    mine = last_slot(e.count, e.me, shape.slots, shape.panels)
    theirs = last_slot(e.count, other, shape.slots, shape.panels)
    for i in cutlass.range_constexpr(e.half):
        target, source = given_panel(e, mine, i), swapped.vectors_of(e.given[i])
        for j in cutlass.range_constexpr(vectors):
            cute.autovec_copy(source[None, j], target[None, e.thread, j])
    warp = e.me * WARPS + e.thread // 32
    if cutlass.const_expr(bounded):
        swapped.publish(largest(e), swapped.board_row(e.magnitudes, n, warp), e.thread)
    for c in cutlass.range_constexpr(columns):
        e.total[c] = swapped.over_lanes(e.total[c], False)
    swapped.publish(e.total, swapped.board_row(e.boards, n, warp), e.thread)
    if e.thread < 32:
        swapped.publish(e.m, swapped.board_row(e.maxima, n, e.me), e.thread)
    # Past it no product of the block is under way, either: the memory of q is free.
    named_sync(JOIN_ALL, CONSUMERS * WARPGROUP)

    part = cute.make_rmem_tensor((VECTOR, vectors, e.half), Float32)
    for i in cutlass.range_constexpr(e.half):
        source = given_panel(e, theirs, i)
        for j in cutlass.range_constexpr(vectors):
            cute.autovec_copy(source[None, e.thread, j], part[None, j, i])
    their_sum = cute.make_rmem_tensor(columns, Float32)
    own_rows, their_rows = cute.assume(e.me * (WARPS * n), divby=n), cute.assume(other * (WARPS * n), divby=n)
    swapped.collect(e.their_factor, e.maxima + cute.assume(other * n, divby=n), n, 1, e.thread, True)
    swapped.collect(e.total, e.boards + own_rows, n, WARPS, e.thread, False)
    swapped.collect(their_sum, e.boards + their_rows, n, WARPS, e.thread, False)
    for c in cutlass.range_constexpr(columns):
        best = cute.arch.fmax(e.m[c], e.their_factor[c])
        own, their = softmax.exp2(e.m[c] - best), softmax.exp2(e.their_factor[c] - best)
        e.m[c] = best
        e.total[c] = e.total[c] * own + their_sum[c] * their
        inverse = cute.arch.rcp_approx(e.total[c]) if e.total[c] > 0.0 else Float32(0.0)
        e.factor[c] = own * inverse
        e.their_factor[c] = their * inverse
    if cutlass.const_expr(bounded):
        swapped.collect(e.scale, e.magnitudes + own_rows, n, WARPS, e.thread, True)
        swapped.collect(their_sum, e.magnitudes + their_rows, n, WARPS, e.thread, True)
        for c in cutlass.range_constexpr(columns):
            exponent = fragments.bounded_exponent(e.scale[c] * e.factor[c] + their_sum[c] * e.their_factor[c])
            e.scale[c] = fragments.power_of_two(fragments.TOP - exponent)
            e.factor[c] = e.factor[c] * e.scale[c]
            e.their_factor[c] = e.their_factor[c] * e.scale[c]
    for i in cutlass.range_constexpr(e.half):
        acc = swapped.vectors_of(e.kept[i])
        for j in cutlass.range_constexpr(vectors):
            for x in cutlass.range_constexpr(VECTOR):
                c = 2 * j + x % 2
                acc[x, j] = acc[x, j] * e.factor[c] + part[x, j, i] * e.their_factor[c]


@cute.jit
def stage(e: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """Rounds both consumers' columns to a 16-bit type, into the memory of q, one row after the other."""
    n = e.shape.tile_n
    mma = swapped.make_mma(e.dtype, n, OperandMajorMode.K)
    copy = swapped.transposed_copy(e.dtype, mma, n, e.thread)
    for i in cutlass.range_constexpr(e.half):
        target = swapped.transposed_panel(e.staged(), i * n * PANEL, e.dtype, n)
        source = cute.recast_tensor(wgmma.to_dtype(e.kept[i], dtype), e.dtype)
        cute.copy(copy, copy.retile(source), copy.partition_D(target))
    named_sync(JOIN_ALL, CONSUMERS * WARPGROUP)


@cute.jit
def store_whole(
    e: cutlass.Constexpr,  # an ending whose results are staged, whose maxima and sums are of both consumers
    out: cute.Tensor,  # (b, s, h, k) 16-bit, global memory
    lse: cute.Tensor,  # (b, h, s) fp32, global memory
    batch: Int32,
    kv_head: Int32,
):
    """Writes the results of a block with all rows of a kv head."""
    shape = e.shape
    swapped.store_outputs(
        e.query, out, e.me * e.half, e.half, shape.tile_n, batch, kv_head, Int32(0), shape.rows, shape.group, e.thread
    )
    if e.me == 0 and e.thread < 4:
        for c in cutlass.range_constexpr(shape.tile_n // 4):
            row = swapped.acc_column(e.thread, c)
            if row < shape.rows:
                value = softmax.natural_lse(e.total[c], e.m[c])
                lse[batch, kv_head * shape.group + row % shape.group, row // shape.group] = value


@cute.jit
def finish_whole(
    e: cutlass.Constexpr,
    out: cute.Tensor,  # (b, s, h, k) 16-bit, global memory
    lse: cute.Tensor,  # (b, h, s) fp32, global memory
    batch: Int32,
    kv_head: Int32,
):
    """The results of a block with all rows of a kv head."""
    join(e, bounded=False)
    stage(e, e.dtype)
    store_whole(e, out, lse, batch, kv_head)


@cute.jit
def finish_part(
    e: cutlass.Constexpr,
    parts: cute.Pointer,  # fp16, global memory
    marks: cute.Pointer,  # fp32, global memory
    index: Int32,  # split · b + request
    kv_head: Int32,
    latent: cutlass.Constexpr,  # the problem as a `lib.latent.shape.Shape`, of one row tile
):
    """The part of a block with all rows of a kv head, and its marks."""
    shape = e.shape
    n = shape.tile_n
    sizes = fragments.Fragments.of(latent)
    part = fragments.part_index(index, kv_head, Int32(0), latent)
    join(e, bounded=True)
    if e.thread < 4:
        for c in cutlass.range_constexpr(n // 4):
            row = swapped.acc_column(e.thread, c)
            if row < sizes.groups * fragments.GROUP:
                found = cute.make_rmem_tensor(2, Float32)
                lse = e.m[c] + cute.math.log2(e.total[c], fastmath=True) - cute.math.log2(e.scale[c], fastmath=True)
                found[0] = lse if e.total[c] > 0.0 else -Float32.inf
                found[1] = e.scale[c] if e.me == 0 else Float32(0.0)
                target = cute.zipped_divide(fragments.row_marks(marks, part, row, sizes), (2,))[None, e.me]
                cute.autovec_copy(found, target)
    stage(e, Float16)
    lane, warp = e.thread % 32, e.thread // 32
    staged = cute.recast_ptr(e.staged(), dtype=Int32)
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
            target = fragments.vector_at(parts, part, e.me, group, vector, lane, sizes)
            cute.autovec_copy(cute.recast_tensor(values, Float16), target)
