"""Consumers of swapped-operand decode that each keep half of the latent columns, and make the scores of every second
tile for both.

    even   S0ᵀ = K0·Qᵀ, softmax 0, P0 -> smem | Oᵀ_L += V0_Lᵀ·P0 | wait P1 | Oᵀ_L += V1_Lᵀ·P1
    odd    S1ᵀ = K1·Qᵀ | wait P0 | Oᵀ_R += V0_Rᵀ·P0 | softmax 1, P1 -> smem | Oᵀ_R += V1_Rᵀ·P1

P is an operand from shared memory in any case, so the other consumer reads it there, too. Against `consumer`, whose
consumers each have the whole Oᵀ of their own tiles: half of the accumulators, and no outputs to add up at the end. The
running maximum of the rows is shared, as in `lib.phased.steps`.

A score that lifts a maximum is rare once a few tiles are done, as the maximum may lag behind by 2^8. So nothing is
reduced over lanes and warps to see that none does: the barrier that the warps of a consumer meet at tells (PTX
`barrier.red.or`).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from mla_var3.kernel.cute_python.lib import softmax, wgmma
from mla_var3.kernel.cute_python.lib.barriers import named_any, named_arrive, named_sync, release
from mla_var3.kernel.cute_python.lib.latent.lazy import SLACK, lazy_max
from mla_var3.kernel.cute_python.lib.swapped import ring, swapped
from mla_var3.kernel.cute_python.lib.swapped.consumer import JOIN, accumulator
from mla_var3.kernel.cute_python.lib.swapped.limits import CONSUMERS
from mla_var3.kernel.cute_python.lib.swapped.swapped import PANEL, TOKENS, WARPS, SwappedShape
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP

EVEN, ODD = 0, 1
P_READY = JOIN + CONSUMERS  # named barriers, one a consumer: its P is in shared memory


class Results:
    """What a consumer has when its tiles are done, in registers. Python holds it; nothing is copied."""

    def __init__(self, shape: SwappedShape, dtype: type) -> None:
        self.acc_o = [accumulator(shape, dtype) for _ in range(shape.latent_panels // CONSUMERS)]
        self.m = cute.make_rmem_tensor(shape.tile_n // 4, Float32)  # running maximum of columns, times scale_log2
        self.total = cute.make_rmem_tensor(shape.tile_n // 4, Float32)  # this thread's part of the sums of the own P


class HalfConsumer:
    """What a consumer warpgroup works with: descriptors, registers, barriers. Python holds it; nothing is copied."""

    def __init__(self, me, shape, dtype, thread, storage, scale_log2, seq_len, least, results) -> None:
        self.me, self.shape, self.dtype, self.thread, self.scale_log2 = me, shape, dtype, thread, scale_log2
        self.seq_len, self.least = seq_len, least
        n = shape.tile_n
        self.full, self.empty = storage.full.data_ptr(), storage.empty.data_ptr()
        self.ring = storage.ring.data_ptr()
        self.row_max = storage.maxima.data_ptr()
        self.board = storage.boards.data_ptr() + me * WARPS * n
        self.mine = shape.finished_by(me)

        self.mma_s = swapped.make_mma(dtype, n, OperandMajorMode.K)
        self.mma_o = swapped.make_mma(dtype, n, OperandMajorMode.MN)
        scores, output = self.mma_s.get_slice(thread), self.mma_o.get_slice(thread)
        box = (TOKENS, PANEL, shape.slots)
        keys = wgmma.smem_view(self.ring, 0, wgmma.k_major_layout(dtype, box))
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, dtype)
        values = wgmma.smem_view(self.ring, 0, cute.tile_to_shape(atom, box, order=(0, 1, 2)))
        queries = wgmma.smem_view(storage.query.data_ptr(), 0, wgmma.k_major_layout(dtype, (n, shape.k + shape.p)))
        self.frag_k = self.mma_s.make_fragment_A(scores.partition_A(keys))  # (MMA, 1, 4, slots)
        self.frag_q = self.mma_s.make_fragment_B(scores.partition_B(queries))  # (MMA, 1, 4 · panels)
        self.frag_v = self.mma_o.make_fragment_A(output.partition_A(values))  # (MMA, 1, 4, slots)
        self.frag_p = []  # of each consumer's P: (MMA, 1, 4)
        for maker in range(CONSUMERS):
            p_tile = wgmma.smem_view(storage.p.data_ptr(), maker * n * TOKENS, wgmma.k_major_layout(dtype, (n, TOKENS)))
            self.frag_p.append(self.mma_o.make_fragment_B(output.partition_B(p_tile)))
        self.copy = swapped.transposed_copy(dtype, self.mma_s, n, thread)
        self.p_target = self.copy.partition_D(swapped.transposed_panel(storage.p.data_ptr(), me * n * TOKENS, dtype, n))
        self.acc_s = accumulator(shape, dtype)
        self.acc_o, self.m, self.total = results.acc_o, results.m, results.total
        self.factor = cute.make_rmem_tensor(n // 4, Float32)


@cute.jit
def issue_scores(w: cutlass.Constexpr, slot: Int32, phase: Int32):
    """Issues Sᵀ = K·Qᵀ of this consumer's own tile, each panel as soon as it is there; waits for nothing else.

    A slot's parity tells neighbouring phases apart only. What the slot held before is at least two tiles back: this
    consumer has waited for it, or for the P that the other one made of it.
    """
    warpgroup.fence()
    for i in cutlass.range_constexpr(w.shape.panels):
        place, parity = ring.at(slot, phase, i, w.shape.slots)
        cute.arch.mbarrier_wait(w.full + place, parity)
        swapped.issue(w.mma_s, w.acc_s, w.frag_k[None, None, None, place], w.frag_q, 4 * i, zero_init=i == 0)
    warpgroup.commit_group()


@cute.jit
def scale_results(w: cutlass.Constexpr):
    """Multiplies outputs and sums with the columns' factors."""
    for c in cutlass.range_constexpr(w.shape.tile_n // 4):
        w.total[c] = w.total[c] * w.factor[c]
    for i in cutlass.range_constexpr(len(w.acc_o)):
        swapped.scale_columns(w.acc_o[i], w.factor)


@cute.jit
def grows(w: cutlass.Constexpr):
    """Whether the lazy maximum of any column moves; the same in all warps of the consumer, which meet here."""
    columns = swapped.as_columns(w.acc_s)
    count = cutlass.const_expr(w.shape.tile_n // 4)
    above = cute.make_rmem_tensor(count, Float32)
    for c in cutlass.range_constexpr(count):
        above[c] = cute.arch.fmax(columns[c, 0], columns[c, 1]) * w.scale_log2 - w.m[c]
    most = above[0]
    for c in cutlass.range_constexpr(1, count):
        most = cute.arch.fmax(most, above[c])
    return named_any(JOIN + w.me, WARPGROUP, most > SLACK)


@cute.jit
def grow(w: cutlass.Constexpr):
    """Moves the maximum of the columns that need it, publishes it, and scales what this consumer has."""
    columns = swapped.as_columns(w.acc_s)
    n, count = w.shape.tile_n, w.shape.tile_n // 4
    best = cute.make_rmem_tensor(count, Float32)
    for c in cutlass.range_constexpr(count):
        best[c] = swapped.over_lanes(cute.arch.fmax(columns[c, 0], columns[c, 1]), True)
    swapped.publish(best, swapped.board_row(w.board, n, w.thread // 32), w.thread)
    named_sync(JOIN + w.me, WARPGROUP)
    swapped.collect(best, w.board, n, WARPS, w.thread, True)
    for c in cutlass.range_constexpr(count):
        new = lazy_max(w.m[c], best[c] * w.scale_log2)
        w.factor[c] = softmax.exp2(w.m[c] - new)
        w.m[c] = new
    if w.thread < 32:
        swapped.publish(w.m, swapped.board_row(w.row_max, n, Int32(0)), w.thread)
    scale_results(w)


@cute.jit
def take_over(w: cutlass.Constexpr, theirs: cute.Tensor):
    """The columns' maximum becomes `theirs`; scales what this consumer has."""
    # As many barriers as the other one has passed in `grow`: racecheck counts them (docs/debugging.md).
    named_sync(JOIN + w.me, WARPGROUP)
    for c in cutlass.range_constexpr(w.shape.tile_n // 4):
        w.factor[c] = softmax.exp2(w.m[c] - theirs[c])
        w.m[c] = theirs[c]
    scale_results(w)


@cute.jit
def follow(w: cutlass.Constexpr):
    """Takes over the maximum that the other consumer has published."""
    count = cutlass.const_expr(w.shape.tile_n // 4)
    theirs = cute.make_rmem_tensor(count, Float32)
    swapped.collect(theirs, w.row_max, w.shape.tile_n, 1, w.thread, True)
    changed = theirs[0] != w.m[0]
    for c in cutlass.range_constexpr(1, count):
        changed = changed | (theirs[c] != w.m[c])
    if cute.arch.vote_any_sync(changed):
        take_over(w, theirs)


@cute.jit
def hide_past_end(w: cutlass.Constexpr, first_token: Int32, slot: Int32, phase: Int32):
    """Zeroes V past the end of the request in this consumer's panels of a tile: what a page holds there may be NaN."""
    for i in cutlass.range_constexpr(len(w.mine)):
        place, _ = ring.at(slot, phase, w.mine[i], w.shape.slots)
        ring.zero_slot_rows(w.ring + place * ring.SLOT_ELEMENTS, w.seq_len - first_token, w.thread)


@cute.jit
def multiply(w: cutlass.Constexpr, maker: cutlass.Constexpr, slot: Int32, phase: Int32):
    """Oᵀ += Vᵀ·P of this consumer's panels, with the P that `maker` has made; frees each panel when it is done."""
    warpgroup.fence()
    count = len(w.mine)
    for i in cutlass.range_constexpr(count):
        place, _ = ring.at(slot, phase, w.mine[i], w.shape.slots)
        swapped.issue(w.mma_o, w.acc_o[i], w.frag_v[None, None, None, place], w.frag_p[maker], 0)
        warpgroup.commit_group()
    for i in cutlass.range_constexpr(count):
        warpgroup.wait_group(count - 1 - i)
        place, _ = ring.at(slot, phase, w.mine[i], w.shape.slots)
        release(w.empty + place)


@cute.jit
def own_tile(w: cutlass.Constexpr, tile: Int32, slot: Int32, phase: Int32):
    """Waits for the scores in acc_s; their softmax, P to both consumers, and this one's product."""
    shape = w.shape
    warpgroup.wait_group(0)
    for i in cutlass.range_constexpr(shape.latent_panels, shape.panels):
        place, _ = ring.at(slot, phase, i, shape.slots)
        release(w.empty + place)
    first_token = tile * TOKENS
    if first_token + TOKENS > w.least:
        swapped.mask_tokens(w.acc_s, w.thread, first_token, w.seq_len, Int32(0), shape)
        hide_past_end(w, first_token, slot, phase)
    if grows(w):
        grow(w)
    columns = swapped.as_columns(w.acc_s)
    for c in cutlass.range_constexpr(shape.tile_n // 4):
        for i in cutlass.range_constexpr(2):
            columns[c, i] = softmax.exp2(columns[c, i] * w.scale_log2 - w.m[c])
        w.total[c] = w.total[c] + (columns[c, 0] + columns[c, 1])
    cute.copy(w.copy, w.copy.retile(wgmma.to_dtype(w.acc_s, w.dtype)), w.p_target)
    cute.arch.fence_view_async_shared()
    # In this order: racecheck follows what was written to the other consumer where a barrier of all of its own warps
    # comes before the arrival, and reports it where none does (docs/debugging.md).
    named_sync(JOIN + w.me, WARPGROUP)
    named_arrive(P_READY + w.me, CONSUMERS * WARPGROUP)
    multiply(w, w.me, slot, phase)


@cute.jit
def other_tile(w: cutlass.Constexpr, tile: Int32, slot: Int32, phase: Int32):
    """This consumer's product with the V of the tile whose P the other one makes; ends what is in flight."""
    other = 1 - w.me
    named_sync(P_READY + other, CONSUMERS * WARPGROUP)
    first_token = tile * TOKENS
    if first_token + TOKENS > w.seq_len:
        hide_past_end(w, first_token, slot, phase)
        cute.arch.fence_view_async_shared()
        named_sync(JOIN + w.me, WARPGROUP)
    follow(w)
    multiply(w, other, slot, phase)


@cute.jit
def consume(w: cutlass.Constexpr, first: Int32, end: Int32):
    """Tiles first..end-1."""
    shape = w.shape
    for i in cutlass.range_constexpr(len(w.acc_o)):
        w.acc_o[i].fill(0.0)
    w.m.fill(softmax.NO_KEY)
    w.total.fill(0.0)
    slot, phase = Int32(0), Int32(0)
    for tile in cutlass.range(first, end, CONSUMERS, unroll=1):
        slot1, phase1 = ring.at(slot, phase, shape.panels, shape.slots)
        if cutlass.const_expr(w.me == EVEN):
            issue_scores(w, slot, phase)
            own_tile(w, tile, slot, phase)
            if tile + 1 < end:
                other_tile(w, tile + 1, slot1, phase1)
        elif tile + 1 < end:
            issue_scores(w, slot1, phase1)
            other_tile(w, tile, slot, phase)
            own_tile(w, tile + 1, slot1, phase1)
        else:
            other_tile(w, tile, slot, phase)
        slot, phase = ring.at(slot1, phase1, shape.panels, shape.slots)
    if cutlass.const_expr(w.me == ODD):
        # racecheck follows barriers of all only where each consumer has waited as often (docs/debugging.md). The even
        # one has, once more, where a tile is left over; who does not make the last tile's P, where V is hidden.
        hides = Int32(end * TOKENS > w.seq_len)
        left = (end - first) % 2
        if end > first and hides != left:
            named_sync(JOIN + w.me, WARPGROUP)
