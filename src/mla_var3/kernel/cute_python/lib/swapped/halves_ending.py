"""The end of a block whose consumers (`halves`) each have half of the columns: whole sums, and they are done.

For whole results the consumers tell each other their sums. A part has marks for each consumer, so for it they wait only
for their own warps: a row's largest magnitude and its sum lie in all four.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode

from mla_var3.kernel.cute_python.lib import wgmma
from mla_var3.kernel.cute_python.lib.barriers import named_sync
from mla_var3.kernel.cute_python.lib.latent import fragments
from mla_var3.kernel.cute_python.lib.rows import CHUNK
from mla_var3.kernel.cute_python.lib.swapped import ending, swapped
from mla_var3.kernel.cute_python.lib.swapped.consumer import JOIN, JOIN_ALL
from mla_var3.kernel.cute_python.lib.swapped.limits import CONSUMERS
from mla_var3.kernel.cute_python.lib.swapped.swapped import PANEL, WARPS
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP


class Ending:
    """What both consumers work with at the end of a block. Python holds it; nothing is copied. thread: 0..255. sends:
    lanes add up columns by sending each other what they do not keep."""

    def __init__(self, results, shape, dtype, storage, thread, sends=False) -> None:
        self.shape, self.dtype, self.sends = shape, dtype, sends
        self.me, self.thread = thread // WARPGROUP, thread % WARPGROUP
        self.half = shape.latent_panels // CONSUMERS
        self.kept, self.m, self.total = results.acc_o, results.m, results.total
        self.query = storage.query.data_ptr()
        self.boards = storage.boards.data_ptr()
        self.magnitudes = getattr(storage, ending.MAGNITUDES).data_ptr()
        self.factor = cute.make_rmem_tensor(shape.tile_n // 4, Float32)

    def staged(self) -> cute.Pointer:
        """Where the consumer's panels of results are staged: its half of the memory of q."""
        elements = self.half * self.shape.tile_n * PANEL
        return self.query + cute.assume(self.me * elements, divby=elements)


def join_own(e: Ending) -> None:
    """Waits for the warps of this consumer."""
    cute.arch.barrier(barrier_id=JOIN + e.me, number_of_threads=WARPGROUP)


@cute.jit
def publish_sums(e: cutlass.Constexpr, values: cute.Tensor, board: cute.Pointer):
    """A thread's values of its columns, added up over the warp, on the warp's row of a board of both consumers."""
    if cutlass.const_expr(not e.sends):
        for c in cutlass.range_constexpr(e.shape.tile_n // 4):
            values[c] = swapped.over_lanes(values[c], False)
    row = swapped.board_row(board, e.shape.tile_n, e.me * WARPS + e.thread // 32)
    if cutlass.const_expr(e.sends):
        swapped.publish_sums(values, row, e.thread)
    else:
        swapped.publish(values, row, e.thread)


@cute.jit
def stage(e: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """Scales this consumer's columns, rounds them to a 16-bit type, and lays them, one row after the other, into the
    memory of q, which nobody reads any more."""
    n = e.shape.tile_n
    mma = swapped.make_mma(e.dtype, n, OperandMajorMode.K)
    copy = swapped.transposed_copy(e.dtype, mma, n, e.thread)
    for i in cutlass.range_constexpr(e.half):
        swapped.scale_columns(e.kept[i], e.factor)
        target = swapped.transposed_panel(e.staged(), i * n * PANEL, e.dtype, n)
        source = cute.recast_tensor(wgmma.to_dtype(e.kept[i], dtype), e.dtype)
        cute.copy(copy, copy.retile(source), copy.partition_D(target))
    join_own(e)


@cute.jit
def finish_whole(
    e: cutlass.Constexpr,
    out: cute.Tensor,  # (b, s, h, k) 16-bit, global memory
    lse: cute.Tensor,  # (b, h, s) fp32, global memory
    batch: Int32,
    kv_head: Int32,
):
    """The results of a block with all rows of a kv head."""
    shape = e.shape
    n, count = shape.tile_n, shape.tile_n // 4
    publish_sums(e, e.total, e.boards)
    named_sync(JOIN_ALL, CONSUMERS * WARPGROUP)
    swapped.collect(e.total, e.boards, n, CONSUMERS * WARPS, e.thread, False)
    for c in cutlass.range_constexpr(count):
        e.factor[c] = cute.arch.rcp_approx(e.total[c]) if e.total[c] > 0.0 else Float32(0.0)
    stage(e, e.dtype)
    ending.store_whole(e, out, lse, batch, kv_head)


@cute.jit
def finish_part(
    e: cutlass.Constexpr,
    parts: cute.Pointer,  # fp16, global memory
    marks: cute.Pointer,  # fp32, global memory
    index: Int32,  # split · b + request
    kv_head: Int32,
    latent: cutlass.Constexpr,  # the problem as a `lib.latent.shape.Shape`, of one row tile
    turned: cutlass.Constexpr = False,  # the order of the part (`lib.latent.fragments`)
):
    """This consumer's half of the part of a block with all rows of a kv head, and its marks."""
    shape = e.shape
    n, count = shape.tile_n, shape.tile_n // 4
    sizes = fragments.Fragments.of(latent)
    part = fragments.part_index(index, kv_head, Int32(0), latent)
    found = cute.make_rmem_tensor(count, Float32)
    found.fill(0.0)
    for acc in e.kept:
        columns = swapped.as_columns(acc)
        for c in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                found[c] = found[c] + cute.math.absf(columns[c, r])
    publish_sums(e, found, e.magnitudes)
    publish_sums(e, e.total, e.boards)
    join_own(e)
    own_rows = cute.assume(e.me * (WARPS * n), divby=n)
    swapped.collect(found, e.magnitudes + own_rows, n, WARPS, e.thread, False)
    swapped.collect(e.total, e.boards + own_rows, n, WARPS, e.thread, False)
    for c in cutlass.range_constexpr(count):
        exponent = fragments.bounded_exponent(found[c])
        e.factor[c] = fragments.power_of_two(fragments.TOP - exponent)
        row = swapped.acc_column(e.thread, c)
        if e.thread < 4 and row < sizes.groups * fragments.GROUP:
            pair = cute.make_rmem_tensor(2, Float32)
            pair[0], pair[1] = e.m[c] + Float32(exponent - fragments.TOP), e.total[c] * e.factor[c]
            target = cute.zipped_divide(fragments.row_marks(marks, part, row, sizes), (2,))[None, e.me]
            cute.autovec_copy(pair, target)
    if cutlass.const_expr(turned):
        store_turned(e, parts, part, sizes)
    else:
        store_staged(e, parts, part, sizes)


@cute.jit
def store_turned(e: cutlass.Constexpr, parts: cute.Pointer, part: Int64, sizes: cutlass.Constexpr):
    """This consumer's columns as they lie: what a thread has of one row are a vector."""
    # All rounded first: one by one, ptxas gives the loop of products 116 registers for 72 with 8 rows.
    kept = []
    for i in cutlass.range_constexpr(e.half):
        swapped.scale_columns(e.kept[i], e.factor)
        kept.append(swapped.as_columns(wgmma.to_dtype(e.kept[i], Float16)))
    base = fragments.vector_at(parts, part, e.me, Int32(0), e.thread // 32, e.thread % 32, sizes).iterator
    values = cute.make_rmem_tensor(fragments.VECTOR, Float16)
    for c in cutlass.range_constexpr(2 * sizes.groups):
        for i in cutlass.range_constexpr(e.half):
            for r in cutlass.range_constexpr(2):
                values[2 * i + r] = kept[i][c, r]
        offset = (c // 2 * sizes.vectors + c % 2 * fragments.TURNED_WARPS) * (32 * fragments.VECTOR)
        cute.autovec_copy(values, cute.make_tensor(base + offset, cute.make_layout(fragments.VECTOR)))


@cute.jit
def store_staged(e: cutlass.Constexpr, parts: cute.Pointer, part: Int64, sizes: cutlass.Constexpr):
    """This consumer's columns as rows, by way of shared memory."""
    n = e.shape.tile_n
    stage(e, Float16)
    warp = e.thread // 32
    # Half of a panel's columns is a vector, so that a warp's are every fourth, at offsets that the compiler knows.
    lane = e.thread % 32
    row = lane // 4
    staged = cute.recast_ptr(e.staged(), dtype=Int32) + (warp // 2 * (n * PANEL) + row * PANEL) // 2 + lane % 4
    base = fragments.vector_at(parts, part, e.me, Int32(0), warp, lane, sizes).iterator
    values = cute.make_rmem_tensor(fragments.VECTOR // 2, Int32)
    for group in cutlass.range_constexpr(sizes.groups):
        for first in cutlass.range_constexpr(0, sizes.vectors, WARPS):
            if first + warp < sizes.vectors:
                for q in cutlass.range_constexpr(fragments.VECTOR // 2):
                    chunk = (warp % 2 * (fragments.COLUMNS // CHUNK) + q) ^ row
                    place = (
                        first // 2 * (n * PANEL // 2) + group * (fragments.GROUP * PANEL // 2) + chunk * (CHUNK // 2)
                    )
                    values[q] = cute.make_tensor(staged + place, cute.make_layout(1))[0]
                offset = (group * sizes.vectors + first) * (32 * fragments.VECTOR)
                target = cute.make_tensor(base + offset, cute.make_layout(fragments.VECTOR))
                cute.autovec_copy(cute.recast_tensor(values, Float16), target)
