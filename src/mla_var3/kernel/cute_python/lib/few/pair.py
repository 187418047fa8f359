"""Two consumer warpgroups on one tile of swapped-operand decode.

    Sᵀ (64 tokens x n) = Σ over panels K·Qᵀ      each warpgroup half of the panels; partial sums are exchanged
    Oᵀ (k x n) += Vᵀ · P                         each warpgroup its half of the latent columns

The panels whose scores a warpgroup makes are the ones whose values it multiplies, so only the rope panel is read by
both. Both do the whole softmax (same bits), each with a P of its own. Against a tile a warpgroup: a tile is through in
half the time, the ring holds one tile that is worked on instead of two, each has half of the output in registers, and
nothing is left to add when a work item ends.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from mla_var3.kernel.cute_python.lib import softmax, wgmma
from mla_var3.kernel.cute_python.lib.barriers import named_sync, release
from mla_var3.kernel.cute_python.lib.few import join
from mla_var3.kernel.cute_python.lib.swapped import ring, swapped
from mla_var3.kernel.cute_python.lib.swapped.limits import SMEM_BYTES
from mla_var3.kernel.cute_python.lib.swapped.swapped import PANEL, TOKENS, VECTOR, WARPS, SwappedShape
from mla_var3.kernel.cute_python.lib.wgmma import MMA_K, WARPGROUP

CONSUMERS = 2
THREADS = CONSUMERS * WARPGROUP

# Named barriers (0 is the block's own): both consumers, consumers and producer, each consumer.
BOTH, START, JOIN = 1, 2, 3


def fixed_bytes(tile_n: int, columns: int, element_bytes: int) -> int:
    """Shared memory besides the ring: barriers, boards and alignment (in 5 KiB), q, P and S of each consumer."""
    return 5120 + tile_n * (columns + CONSUMERS * TOKENS) * element_bytes + CONSUMERS * tile_n * TOKENS * 4


def most_slots(tile_n: int, columns: int, element_bytes: int) -> int:
    """Slots of the ring that fit a block."""
    return (SMEM_BYTES - fixed_bytes(tile_n, columns, element_bytes)) // ring.SLOT_BYTES


def shared_storage(shape: SwappedShape, dtype: type) -> type:
    """The block's shared memory."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.MemRange[kind, size]

    n = shape.tile_n
    fields = {
        "full": array(Int64, shape.slots),  # panel loaded
        "empty": array(Int64, shape.slots),  # panel no longer read
        "flag": array(Int32, 4),
        "boards": cute.struct.Align[array(Float32, CONSUMERS * WARPS * n), 16],  # maxima of the warps, then sums
        "lses": cute.struct.Align[array(Float32, n * join.MAX_CLUSTER), 16],  # of the rows, from the cluster's blocks
        "exchange": cute.struct.Align[array(Float32, CONSUMERS * n * TOKENS), 16],  # each one's part of S
        "query": cute.struct.Align[array(dtype, n * (shape.k + shape.p)), 1024],
        "p": cute.struct.Align[array(dtype, CONSUMERS * n * TOKENS), 1024],
        "ring": cute.struct.Align[array(dtype, shape.slots * ring.SLOT_ELEMENTS), 1024],
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


class Consumer:
    """What a consumer warpgroup works with: descriptors, registers, barriers. Python holds it; nothing is copied."""

    def __init__(self, me, shape, dtype, thread, storage, scale_log2) -> None:
        self.me, self.shape, self.dtype, self.thread, self.scale_log2 = me, shape, dtype, thread, scale_log2
        n = shape.tile_n
        self.full, self.empty = storage.full.data_ptr(), storage.empty.data_ptr()
        self.ring, self.query = storage.ring.data_ptr(), storage.query.data_ptr()
        self.board = storage.boards.data_ptr() + me * WARPS * n
        self.lses, self.flag = storage.lses.data_ptr(), storage.flag.data_ptr()
        halves = shape.latent_panels // 2
        self.own = tuple(range(me * halves, (me + 1) * halves))

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
        both = cute.make_layout((VECTOR, WARPGROUP, n // 8, CONSUMERS), stride=(1, VECTOR, VECTOR * WARPGROUP, n * 64))
        self.exchange = cute.make_tensor(storage.exchange.data_ptr(), both)

        def accumulator() -> cute.Tensor:
            return cute.make_rmem_tensor(self.mma_s.partition_shape_C((TOKENS, n)), Float32)

        def per_column() -> cute.Tensor:
            return cute.make_rmem_tensor(n // 4, Float32)

        self.acc_s = accumulator()
        self.acc_o = [accumulator() for _ in self.own]
        self.m = per_column()  # running maximum of the columns, times scale_log2
        self.total = per_column()  # this thread's part of the sums of P
        self.factor = per_column()


@cute.jit
def column_softmax(w: cutlass.Constexpr):
    """One step of the online softmax down the columns of the scores. Its barrier is of both consumers: behind it both
    have read the other's part of S, which may then be overwritten."""
    columns = swapped.as_columns(w.acc_s)
    n, count = w.shape.tile_n, cutlass.const_expr(w.shape.tile_n // 4)
    best = cute.make_rmem_tensor(count, Float32)
    for c in cutlass.range_constexpr(count):
        best[c] = swapped.over_lanes(cute.arch.fmax(columns[c, 0], columns[c, 1]), True)
    swapped.publish(best, swapped.board_row(w.board, n, w.thread // 32), w.thread)
    named_sync(BOTH, THREADS)
    swapped.collect(best, w.board, n, WARPS, w.thread, True)
    for c in cutlass.range_constexpr(count):
        new = cute.arch.fmax(w.m[c], best[c] * w.scale_log2)
        w.factor[c] = softmax.exp2(w.m[c] - new)
        w.m[c] = new
        for i in cutlass.range_constexpr(2):
            columns[c, i] = softmax.exp2(columns[c, i] * w.scale_log2 - new)
        w.total[c] = w.total[c] * w.factor[c] + (columns[c, 0] + columns[c, 1])


@cute.jit
def scores(w: cutlass.Constexpr, slot: Int32, phase: Int32):
    """S of a tile, the same in both consumers. Waiting for own panels only is safe: the barrier of the tile before says
    that all of its panels had landed, so a slot's parity cannot be two phases old."""
    shape = w.shape
    warpgroup.fence()
    for i in cutlass.range_constexpr(len(w.own)):
        place, parity = ring.at(slot, phase, w.own[i], shape.slots)
        cute.arch.mbarrier_wait(w.full + place, parity)
        swapped.issue(w.mma_s, w.acc_s, w.frag_k[None, None, None, place], w.frag_q, 4 * w.own[i], zero_init=i == 0)
    rope, parity = ring.at(slot, phase, shape.latent_panels, shape.slots)
    cute.arch.mbarrier_wait(w.full + rope, parity)
    atom = cute.make_mma_atom(w.mma_s.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    each = PANEL // MMA_K // CONSUMERS
    for i in cutlass.range_constexpr(w.me * each, (w.me + 1) * each):
        cute.gemm(
            atom, w.acc_s, w.frag_k[None, None, i, rope], w.frag_q[None, None, 4 * shape.latent_panels + i], w.acc_s
        )
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    mine = swapped.vectors_of(w.acc_s)
    for j in cutlass.range_constexpr(shape.tile_n // 8):
        cute.autovec_copy(mine[None, j], w.exchange[None, w.thread, j, w.me])
    named_sync(BOTH, THREADS)
    if cutlass.const_expr(w.me == 0):
        release(w.empty + rope)
    other = cute.make_rmem_tensor(VECTOR, Float32)
    for j in cutlass.range_constexpr(shape.tile_n // 8):
        cute.autovec_copy(w.exchange[None, w.thread, j, 1 - w.me], other)
        for e in cutlass.range_constexpr(VECTOR):
            mine[e, j] = mine[e, j] + other[e]


@cute.jit
def step(w: cutlass.Constexpr, tile: Int32, slot: Int32, phase: Int32, seq_len: Int32, least: Int32, first_row: Int32):
    """One tile, whose first panel is at (slot, phase) of the ring."""
    shape = w.shape
    scores(w, slot, phase)
    first_token = tile * TOKENS
    if first_token + TOKENS > least:
        swapped.mask_tokens(w.acc_s, w.thread, first_token, seq_len, first_row, shape)
    if first_token + TOKENS > seq_len:
        for i in cutlass.range_constexpr(len(w.own)):
            place, _ = ring.at(slot, phase, w.own[i], shape.slots)
            ring.zero_slot_rows(w.ring + place * ring.SLOT_ELEMENTS, seq_len - first_token, w.thread)
    column_softmax(w)
    cute.copy(w.copy, w.copy.retile(wgmma.to_dtype(w.acc_s, w.dtype)), w.p_target)
    cute.arch.fence_view_async_shared()
    named_sync(JOIN + w.me, WARPGROUP)

    changed = w.factor[0] != 1.0
    for c in cutlass.range_constexpr(1, shape.tile_n // 4):
        changed = changed | (w.factor[c] != 1.0)
    if cute.arch.vote_any_sync(changed):
        for i in cutlass.range_constexpr(len(w.own)):
            swapped.scale_columns(w.acc_o[i], w.factor)
    warpgroup.fence()
    for i in cutlass.range_constexpr(len(w.own)):
        place, _ = ring.at(slot, phase, w.own[i], shape.slots)
        swapped.issue(w.mma_o, w.acc_o[i], w.frag_v[None, None, None, place], w.frag_p, 0)
        warpgroup.commit_group()
    for i in cutlass.range_constexpr(len(w.own)):
        warpgroup.wait_group(len(w.own) - 1 - i)
        place, _ = ring.at(slot, phase, w.own[i], shape.slots)
        release(w.empty + place)


@cute.jit
def reset(w: cutlass.Constexpr):
    """Empty outputs and sums."""
    for i in cutlass.range_constexpr(len(w.own)):
        w.acc_o[i].fill(0.0)
    w.m.fill(softmax.NO_KEY)
    w.total.fill(0.0)


@cute.jit
def normalize(w: cutlass.Constexpr):
    """Divides the output by the sums and leaves the columns' lse (log2, -inf without keys) in `factor`."""
    n, count = w.shape.tile_n, w.shape.tile_n // 4
    for c in cutlass.range_constexpr(count):
        w.total[c] = swapped.over_lanes(w.total[c], False)
    swapped.publish(w.total, swapped.board_row(w.board, n, w.thread // 32), w.thread)
    named_sync(JOIN + w.me, WARPGROUP)
    swapped.collect(w.total, w.board, n, WARPS, w.thread, False)
    for c in cutlass.range_constexpr(count):
        w.factor[c] = 1.0 / w.total[c] if w.total[c] > 0.0 else Float32(0.0)
    for i in cutlass.range_constexpr(len(w.own)):
        swapped.scale_columns(w.acc_o[i], w.factor)
    for c in cutlass.range_constexpr(count):
        value = w.m[c] + cute.math.log2(w.total[c], fastmath=True)
        w.factor[c] = value if w.total[c] > 0.0 else -Float32.inf


@cute.jit
def write_output(
    w: cutlass.Constexpr, out: cute.Tensor, lse: cute.Tensor, batch: Int32, kv_head: Int32, first_row: Int32
):
    """The only split: this consumer's columns, rounded, through the memory of q (the last S is made), and the lse."""
    shape = w.shape
    for i in cutlass.range_constexpr(len(w.own)):
        target = swapped.transposed_panel(w.query, w.own[i] * shape.tile_n * PANEL, w.dtype, shape.tile_n)
        source = wgmma.to_dtype(w.acc_o[i], w.dtype)
        cute.copy(w.copy, w.copy.retile(source), w.copy.partition_D(target))
    named_sync(JOIN + w.me, WARPGROUP)
    swapped.store_outputs(
        w.query, out, w.own[0], len(w.own), shape.tile_n, batch, kv_head, first_row, shape.rows, shape.group, w.thread
    )
    if cutlass.const_expr(w.me == 0):
        if w.thread < 4:
            for c in cutlass.range_constexpr(shape.tile_n // 4):
                row = first_row + swapped.acc_column(w.thread, c)
                if row < shape.rows:
                    value = w.factor[c] * math.log(2.0) if w.factor[c] > -Float32.inf else Float32.inf
                    lse[batch, kv_head * shape.group + row % shape.group, row // shape.group] = value


@cute.jit
def leave_part(w: cutlass.Constexpr, part: cutlass.Constexpr, cluster: Int32, rank: Int32):
    """One of several splits: the output into the memory of the ring, the lse to all blocks of the cluster. The caller
    has joined both consumers (nobody reads the ring) and waited until the blocks of the cluster run."""
    n = w.shape.tile_n
    vectors = cute.make_tensor(
        cute.recast_ptr(w.ring, dtype=Float32),
        cute.make_layout((VECTOR, WARPGROUP, n // 8, w.shape.latent_panels),
                         stride=(1, VECTOR, VECTOR * WARPGROUP, n * PANEL)),
    )  # fmt: skip
    for i in cutlass.range_constexpr(len(w.own)):
        mine = swapped.vectors_of(w.acc_o[i])
        for j in cutlass.range_constexpr(n // 8):
            cute.autovec_copy(mine[None, j], vectors[None, w.thread, j, w.own[i]])
    if cutlass.const_expr(w.me == 0):
        if w.thread < 4 * join.MAX_CLUSTER:
            pair = cute.make_rmem_tensor(2, Float32)
            for j in cutlass.range_constexpr(n // 8):
                pair[0] = w.factor[2 * j]
                pair[1] = w.factor[2 * j + 1]
                first = (w.thread % 4) * 2 + 8 * j
                join.share_lse(w.lses, pair, first, cluster, rank, w.thread // 4, part)
