"""A consumer warpgroup of swapped-operand decode: one tile after the other of the ring, then its part of the output.

Consumers take turns at the tiles. Each has the whole Oᵀ in registers and a softmax of its own, so they wait for each
other only where a work item ends.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from mla_var3.kernel.cute_python.lib import rows, softmax, wgmma
from mla_var3.kernel.cute_python.lib.barriers import named_sync, release
from mla_var3.kernel.cute_python.lib.swapped import ring, swapped, work
from mla_var3.kernel.cute_python.lib.swapped.limits import ROW_TILES, SMEM_BYTES
from mla_var3.kernel.cute_python.lib.swapped.swapped import PANEL, TOKENS, VECTOR, WARPS, SwappedShape
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP

# Named barriers (0 is the block's own): one of all consumers, one of all and the producer, one of each consumer.
JOIN_ALL, START, JOIN = 1, 2, 3
STEP_BARRIERS = 2  # of a consumer's own that it passes with each tile


def fixed_bytes(tile_n: int, consumers: int, columns: int, element_bytes: int) -> int:
    """Shared memory besides the ring: barriers, boards and alignment (4 KiB are enough), q, and P of each consumer."""
    return 4096 + tile_n * (columns + consumers * TOKENS) * element_bytes


def most_slots(tile_n: int, consumers: int, columns: int, element_bytes: int) -> int:
    """Slots of the ring that fit a block."""
    return (SMEM_BYTES - fixed_bytes(tile_n, consumers, columns, element_bytes)) // ring.SLOT_BYTES


def storage_bytes(shape: SwappedShape, element_bytes: int, boards: int = 0) -> int:
    """What `shared_storage` takes, with so many boards more; needs no compiler."""
    n, consumers = shape.tile_n, shape.consumers
    barriers = 8 * (2 * shape.slots + 2 * work.DEPTH) + 4 * work.DEPTH
    total = -(-barriers // 16) * 16 + 4 * consumers * n * (WARPS * (1 + boards) + 1)
    for tile in (n * (shape.k + shape.p), consumers * n * TOKENS, shape.slots * ring.SLOT_ELEMENTS):
        total = -(-total // 1024) * 1024 + tile * element_bytes
    return total


# Two consumers with 32 rows each need more registers than a third of the file; then the producer is a warpgroup too.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240


def redistributes(shape: SwappedShape) -> bool:
    """Whether the producer's registers are needed by the consumers."""
    return shape.tile_n == ROW_TILES[-1] and shape.consumers == 2


def block_threads(shape: SwappedShape) -> int:
    """The consumers and one warp; or a whole warpgroup of which one warp works, since registers move by warpgroup."""
    return shape.consumers * WARPGROUP + (WARPGROUP if redistributes(shape) else 32)


def shared_storage(shape: SwappedShape, dtype: type, boards: tuple[str, ...] = ()) -> type:
    """The block's shared memory. boards: more of them, a float32 for each consumer, warp and query row."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.MemRange[kind, size]

    n, consumers = shape.tile_n, shape.consumers
    fields = {
        "full": array(Int64, shape.slots),  # panel loaded
        "empty": array(Int64, shape.slots),  # panel no longer read
        "item_barriers": array(Int64, 2 * work.DEPTH),
        "items": array(Int32, work.DEPTH),  # work items on their way to the consumers
        "boards": cute.struct.Align[array(Float32, consumers * WARPS * n), 16],  # maxima of the warps, then sums
        "maxima": cute.struct.Align[array(Float32, consumers * n), 16],  # running maxima at the end of an item
        **{name: cute.struct.Align[array(Float32, consumers * WARPS * n), 16] for name in boards},
        "query": cute.struct.Align[array(dtype, n * (shape.k + shape.p)), 1024],
        "p": cute.struct.Align[array(dtype, consumers * n * TOKENS), 1024],
        "ring": cute.struct.Align[array(dtype, shape.slots * ring.SLOT_ELEMENTS), 1024],
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def accumulator(shape: SwappedShape, dtype: type) -> cute.Tensor:
    """(registers of 64 x n) fp32, of one product."""
    mma = swapped.make_mma(dtype, shape.tile_n, OperandMajorMode.K)
    return cute.make_rmem_tensor(mma.partition_shape_C((TOKENS, shape.tile_n)), Float32)


class Results:
    """What a consumer has when its tiles are done, in registers. Python holds it; nothing is copied."""

    def __init__(self, shape: SwappedShape, dtype: type) -> None:
        self.acc_o = [accumulator(shape, dtype) for _ in range(shape.latent_panels)]
        self.m = cute.make_rmem_tensor(shape.tile_n // 4, Float32)  # running maximum of columns, times scale_log2
        self.total = cute.make_rmem_tensor(shape.tile_n // 4, Float32)  # this thread's part of the sums of the own P


class Consumer:
    """What a consumer warpgroup works with: descriptors, registers, barriers. Python holds it; nothing is copied.

    results: registers of the caller, of which the first hold the panels that this consumer finishes.
    """

    def __init__(self, me, shape, dtype, thread, storage, scale_log2, results=None) -> None:
        self.me, self.shape, self.dtype, self.thread, self.scale_log2 = me, shape, dtype, thread, scale_log2
        n = shape.tile_n
        self.full, self.empty = storage.full.data_ptr(), storage.empty.data_ptr()
        self.ring, self.query = storage.ring.data_ptr(), storage.query.data_ptr()
        self.boards, self.maxima = storage.boards.data_ptr(), storage.maxima.data_ptr()
        self.board = self.boards + me * WARPS * n

        self.mma_s = swapped.make_mma(dtype, n, OperandMajorMode.K)
        self.mma_o = swapped.make_mma(dtype, n, OperandMajorMode.MN)
        scores, output = self.mma_s.get_slice(thread), self.mma_o.get_slice(thread)
        box = (TOKENS, PANEL, shape.slots)
        keys = wgmma.smem_view(self.ring, 0, wgmma.k_major_layout(dtype, box))
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, dtype)
        values = wgmma.smem_view(self.ring, 0, cute.tile_to_shape(atom, box, order=(0, 1, 2)))
        queries = wgmma.smem_view(self.query, 0, wgmma.k_major_layout(dtype, (n, shape.k + shape.p)))
        p_base = storage.p.data_ptr() + me * n * TOKENS
        p_tile = wgmma.smem_view(p_base, 0, wgmma.k_major_layout(dtype, (n, TOKENS)))
        self.frag_k = self.mma_s.make_fragment_A(scores.partition_A(keys))  # (MMA, 1, 4, slots)
        self.frag_q = self.mma_s.make_fragment_B(scores.partition_B(queries))  # (MMA, 1, 4 · panels)
        self.frag_v = self.mma_o.make_fragment_A(output.partition_A(values))  # (MMA, 1, 4, slots)
        self.frag_p = self.mma_o.make_fragment_B(output.partition_B(p_tile))  # (MMA, 1, 4)
        self.copy = swapped.transposed_copy(dtype, self.mma_s, n, thread)
        self.p_target = self.copy.partition_D(swapped.transposed_panel(p_base, 0, dtype, n))

        self.acc_s = accumulator(shape, dtype)
        first = shape.finished_by(me)[0] if results else 0
        results = results or Results(shape, dtype)
        self.m, self.total = results.m, results.total
        self.acc_o = [results.acc_o[(i - first) % shape.latent_panels] for i in range(shape.latent_panels)]  # by panel
        self.factor = cute.make_rmem_tensor(n // 4, Float32)


@cute.jit
def scale_outputs(w: cutlass.Constexpr, branches: cutlass.Constexpr):
    """Multiplies the outputs with the columns' factors; where it `branches`, unless all of a warp's are 1."""
    if cutlass.const_expr(not branches):
        for i in cutlass.range_constexpr(w.shape.latent_panels):
            swapped.scale_columns(w.acc_o[i], w.factor)
    else:
        changed = w.factor[0] != 1.0
        for c in cutlass.range_constexpr(1, w.shape.tile_n // 4):
            changed = changed | (w.factor[c] != 1.0)
        if cute.arch.vote_any_sync(changed):
            for i in cutlass.range_constexpr(w.shape.latent_panels):
                swapped.scale_columns(w.acc_o[i], w.factor)


@cute.jit
def step(
    w: cutlass.Constexpr,
    tile: Int32,
    slot: Int32,
    phase: Int32,
    seq_len: Int32,
    least: Int32,
    first_row: Int32,
    lazy: cutlass.Constexpr = False,
):
    """One tile of this consumer, whose first panel is at (slot, phase) of the ring. lazy: as for `column_softmax`."""
    # Where registers are redistributed they are scarce: with a branch here ptxas waits after every MMA in flash_mla_v2.
    branches = cutlass.const_expr(lazy or not redistributes(w.shape))
    shape = w.shape
    warpgroup.fence()
    for i in cutlass.range_constexpr(shape.panels):
        place, parity = ring.at(slot, phase, i, shape.slots)
        ring.wait_full(w.full + place, w.empty + place, parity, shape.consumers)
        swapped.issue(w.mma_s, w.acc_s, w.frag_k[None, None, None, place], w.frag_q, 4 * i, zero_init=i == 0)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    for i in cutlass.range_constexpr(shape.latent_panels, shape.panels):
        place, _ = ring.at(slot, phase, i, shape.slots)
        release(w.empty + place)

    first_token = tile * TOKENS
    if cutlass.const_expr(not branches):
        swapped.mask_tokens(w.acc_s, w.thread, first_token, seq_len, first_row, shape)
    else:
        if first_token + TOKENS > least:
            swapped.mask_tokens(w.acc_s, w.thread, first_token, seq_len, first_row, shape)
    if first_token + TOKENS > seq_len:
        for i in cutlass.range_constexpr(shape.latent_panels):
            place, _ = ring.at(slot, phase, i, shape.slots)
            ring.zero_slot_rows(w.ring + place * ring.SLOT_ELEMENTS, seq_len - first_token, w.thread)
    swapped.column_softmax(
        w.acc_s, w.m, w.total, w.factor, w.board, shape.tile_n, w.scale_log2, w.thread, JOIN + w.me, lazy
    )
    cute.copy(w.copy, w.copy.retile(wgmma.to_dtype(w.acc_s, w.dtype)), w.p_target)
    cute.arch.fence_view_async_shared()
    named_sync(JOIN + w.me, WARPGROUP)

    scale_outputs(w, branches)
    warpgroup.fence()
    for i in cutlass.range_constexpr(shape.latent_panels):
        place, _ = ring.at(slot, phase, i, shape.slots)
        swapped.issue(w.mma_o, w.acc_o[i], w.frag_v[None, None, None, place], w.frag_p, 0)
        warpgroup.commit_group()
    for i in cutlass.range_constexpr(shape.latent_panels):
        warpgroup.wait_group(shape.latent_panels - 1 - i)
        place, _ = ring.at(slot, phase, i, shape.slots)
        release(w.empty + place)


@cute.jit
def exchange(w: cutlass.Constexpr):
    """Adds the two consumers' outputs, half of the columns each, through the memory of q (n KiB, read by nobody)."""
    half = w.shape.latent_panels // 2
    vectors = w.shape.tile_n // 2 // VECTOR  # of a panel, a thread
    view = cute.make_tensor(
        cute.recast_ptr(w.query, dtype=Float32),
        cute.make_layout(
            (VECTOR, WARPGROUP, vectors, half),
            stride=(1, VECTOR, VECTOR * WARPGROUP, VECTOR * WARPGROUP * vectors),
        ),
    )
    part = cute.make_rmem_tensor(VECTOR, Float32)
    for giver in cutlass.range_constexpr(2):
        given = w.shape.finished_by(1 - giver)
        for i in cutlass.range_constexpr(half):
            acc = swapped.vectors_of(w.acc_o[given[i]])
            for j in cutlass.range_constexpr(vectors):
                if cutlass.const_expr(w.me == giver):
                    cute.autovec_copy(acc[None, j], view[None, w.thread, j, i])
        named_sync(JOIN_ALL, 2 * WARPGROUP)
        for i in cutlass.range_constexpr(half):
            acc = swapped.vectors_of(w.acc_o[given[i]])
            for j in cutlass.range_constexpr(vectors):
                if cutlass.const_expr(w.me != giver):
                    cute.autovec_copy(view[None, w.thread, j, i], part)
                    for e in cutlass.range_constexpr(VECTOR):
                        acc[e, j] = acc[e, j] + part[e]
        named_sync(JOIN_ALL, 2 * WARPGROUP)


@cute.jit
def stage(w: cutlass.Constexpr):
    """Rounds this consumer's part of the output columns into the memory of q, one row of the output after the other."""
    panels = w.shape.finished_by(w.me)
    for i in cutlass.range_constexpr(len(panels)):
        target = swapped.transposed_panel(w.query, panels[i] * w.shape.tile_n * PANEL, w.dtype, w.shape.tile_n)
        source = wgmma.to_dtype(w.acc_o[panels[i]], w.dtype)
        cute.copy(w.copy, w.copy.retile(source), w.copy.partition_D(target))


@cute.jit
def finish(
    w: cutlass.Constexpr,
    out: cute.Tensor,
    lse: cute.Tensor,
    partial_out: cute.Tensor,
    partial_lse: cute.Tensor,
    batch: Int32,
    kv_head: Int32,
    row_tile: Int32,
    split: Int32,
    num_splits: Int32,
):
    """Joins the consumers' sums and outputs and writes this consumer's part of the columns."""
    shape = w.shape
    n, count = shape.tile_n, shape.tile_n // 4
    first_row = row_tile * n
    for c in cutlass.range_constexpr(count):
        w.total[c] = swapped.over_lanes(w.total[c], False)
    swapped.publish(w.total, swapped.board_row(w.board, n, w.thread // 32), w.thread)
    if w.thread < 32:
        swapped.publish(w.m, swapped.board_row(w.maxima, n, Int32(w.me)), w.thread)
    # Past this barrier no MMA of the item is under way, so q's memory is free.
    named_sync(JOIN_ALL, shape.consumers * WARPGROUP)
    best = cute.make_rmem_tensor(count, Float32)
    total = cute.make_rmem_tensor(count, Float32)
    swapped.collect(best, w.maxima, n, shape.consumers, w.thread, True)
    total.fill(0.0)
    for i in cutlass.range_constexpr(shape.consumers):
        swapped.collect(w.total, w.boards + i * WARPS * n, n, WARPS, w.thread, False)
        if cutlass.const_expr(shape.consumers > 1):
            swapped.collect(w.factor, w.maxima + i * n, n, 1, w.thread, True)
            for c in cutlass.range_constexpr(count):
                w.total[c] = w.total[c] * softmax.exp2(w.factor[c] - best[c])
        for c in cutlass.range_constexpr(count):
            total[c] = total[c] + w.total[c]
    for c in cutlass.range_constexpr(count):
        inverse = 1.0 / total[c] if total[c] > 0.0 else Float32(0.0)
        w.factor[c] = softmax.exp2(w.m[c] - best[c]) * inverse
    for i in cutlass.range_constexpr(shape.latent_panels):
        swapped.scale_columns(w.acc_o[i], w.factor)
    if cutlass.const_expr(shape.consumers > 1):
        exchange(w)

    panels = shape.finished_by(w.me)
    if num_splits == 1:
        stage(w)
        named_sync(JOIN + w.me, WARPGROUP)
        swapped.store_outputs(
            w.query, out, panels[0], len(panels), n, batch, kv_head, first_row, shape.rows, shape.group, w.thread
        )
    else:
        for i in cutlass.range_constexpr(len(panels)):
            swapped.store_partial(
                w.acc_o[panels[i]], partial_out, partial_lse, panels[i], split, batch, kv_head, first_row,
                shape.rows, w.thread,
            )  # fmt: skip
    if cutlass.const_expr(w.me == 0):
        if w.thread < 4:
            for c in cutlass.range_constexpr(count):
                row = first_row + swapped.acc_column(w.thread, c)
                if row < shape.rows:
                    value = best[c] + cute.math.log2(total[c], fastmath=True)
                    if num_splits == 1:
                        value = value * math.log(2.0) if total[c] > 0.0 else Float32.inf
                        lse[batch, kv_head * shape.group + row % shape.group, row // shape.group] = value
                    else:
                        index = rows.partial_row(partial_lse, split, batch, kv_head, row)
                        flat = cute.make_tensor(partial_lse.iterator + index, cute.make_layout(1))
                        flat[0] = value if total[c] > 0.0 else -Float32.inf


@cute.jit
def reset(w: cutlass.Constexpr):
    """Empty outputs and sums, of a `Consumer` or of its `Results`."""
    for i in cutlass.range_constexpr(len(w.acc_o)):
        w.acc_o[i].fill(0.0)
    w.m.fill(softmax.NO_KEY)
    w.total.fill(0.0)
