"""Two consumer warpgroups of a block: each owns half of the 64 x k output, and makes the scores of every second tile.

Their shared memory, what each works with, and what a version's schedule does not change: the loop over pairs of tiles,
P handed to the other consumer in the rope panel of its stage, V past the end of a request, and the end of a block.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from mla_var3.kernel.cute_python.lib import output, paged, softmax, wgmma
from mla_var3.kernel.cute_python.lib.barriers import named_sync, release
from mla_var3.kernel.cute_python.lib.latent.lazy import publish
from mla_var3.kernel.cute_python.lib.latent.shape import STAGES, TILE_M, TILE_N, Shape
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP

CONSUMERS = 2 * WARPGROUP
THREADS = 3 * WARPGROUP
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # 128 · (24 + 2 · 240) = 64512 of 65536
EVEN, ODD = 0, 1

# Named barriers: 0 is the block's own, 1 to 4 are the schedule's.
CONSUMERS_JOIN, EVEN_JOIN, ODD_JOIN = 5, 6, 7


def shared_storage(shape: Shape, dtype: type, maxima: tuple[str, ...]) -> type:
    """The block's shared memory. maxima: names of the running maxima of the rows, 64 float32 each."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.MemRange[kind, size]

    fields = {
        "full": array(Int64, STAGES * shape.panels),  # panel loaded
        "empty": array(Int64, 2 * STAGES),  # part no longer read
        **{name: array(Float32, TILE_M) for name in maxima},
        "sums0": array(Float32, TILE_M),  # row sums of the even consumer
        "sums1": array(Float32, TILE_M),  # and of the odd one
        "query": cute.struct.Align[array(dtype, TILE_M * (shape.k + shape.p)), 1024],
        "stages": cute.struct.Align[array(dtype, STAGES * shape.stage_elements), 1024],
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def shared_bytes(shape: Shape, element_bytes: int) -> int:
    """Bytes that `shared_storage` takes: mbarriers, maxima and sums in the first 2 KiB, then three 64-row tiles."""
    return 2048 + 3 * shape.stage_elements * element_bytes


class Consumer:
    """What a consumer warpgroup works with: descriptors, registers, barriers. Python holds it; nothing is copied."""

    def __init__(
        self, me, shape, dtype, thread, q_tile, kv_base, full, empty, scale_log2, seq_len, first_row, registers=(),
        tile=None,
    ) -> None:  # fmt: skip
        self.tile = tile
        self.me, self.shape, self.dtype, self.thread = me, shape, dtype, thread
        self.kv_base, self.full, self.empty = kv_base, full, empty
        self.scale_log2, self.seq_len, self.q_tile, self.first_row = scale_log2, seq_len, q_tile, first_row

        self.mma_s = wgmma.make_mma(dtype, TILE_N)
        self.mma_rs = wgmma.make_mma(dtype, shape.half, a_in_registers=True, b_major=OperandMajorMode.MN)
        self.mma_ss = wgmma.make_mma(dtype, shape.half, b_major=OperandMajorMode.MN)
        keys = wgmma.k_major_layout(dtype, (TILE_N, shape.k + shape.p))
        values = wgmma.mn_major_layout(dtype, (shape.half, TILE_N))
        square = wgmma.k_major_layout(dtype, (TILE_M, TILE_N))
        staging = wgmma.k_major_layout(dtype, (TILE_M, shape.half))
        scores, ours = self.mma_s.get_slice(thread), self.mma_ss.get_slice(thread)
        half, panel = me * shape.half * TILE_N, shape.rope * paged.BOX * TILE_N

        def stage(i: int) -> int:
            return i * shape.stage_elements

        self.frag_q = self.mma_s.make_fragment_A(scores.partition_A(q_tile))
        if tile is None:
            own = wgmma.smem_view(kv_base, stage(me), keys)
            self.frag_k = self.mma_s.make_fragment_B(scores.partition_B(own))
            of_v = [wgmma.smem_view(kv_base, stage(i) + half, values) for i in (EVEN, ODD)]
        else:
            of_k = tile.keys(kv_base + stage(me))
            self.frag_k = [self.mma_s.make_fragment_B(scores.partition_B(view)) for view in of_k]
            of_v = [tile.values(kv_base + (stage(i) + half)) for i in (EVEN, ODD)]
        self.frag_v = [self.mma_ss.make_fragment_B(ours.partition_B(view)) for view in of_v]
        theirs = wgmma.smem_view(kv_base, stage(1 - me) + panel, square)
        self.frag_p = self.mma_ss.make_fragment_A(ours.partition_A(theirs))
        self.p_copy = cute.make_tiled_copy_C(wgmma.stmatrix_atom(dtype), self.mma_s).get_slice(thread)
        self.p_target = self.p_copy.partition_D(wgmma.smem_view(kv_base, stage(me) + panel, square))
        self.staging = wgmma.smem_view(kv_base, half, staging)

        self.acc_s = cute.make_rmem_tensor(self.mma_s.partition_shape_C((TILE_M, TILE_N)), Float32)
        # The output so far, the rows' running maximum times scale_log2, and this thread's part of the own P's sums.
        self.acc_o, self.m, self.total = registers or (
            cute.make_rmem_tensor(self.mma_ss.partition_shape_C((TILE_M, shape.half)), Float32),
            cute.make_rmem_tensor(2, Float32),
            cute.make_rmem_tensor(2, Float32),
        )
        self.limits = cute.make_rmem_tensor(2, Int32)  # keys that each row may see
        for r in range(2):
            limit = seq_len
            if shape.causal:
                limit = seq_len - shape.s + 1 + (first_row + wgmma.acc_row(thread, r)) // shape.group
            self.limits[r] = limit

    def keys(self, k: int) -> cute.Tensor:
        """The descriptors of 16 columns of the own tile."""
        return self.frag_k[None, None, k] if self.tile is None else self.tile.block(self.frag_k, k)


@cute.jit
def make_scores(w: cutlass.Constexpr, parity: Int32, drain: cutlass.Constexpr):
    """S = Q·Kᵀ of the consumer's own tile, in the order in which the parts are refilled; waits for S. With `drain`
    one older group is in flight (the product with the other stage's V): its part is released as soon as it ends."""
    own, other = w.me, 1 - w.me
    first = w.shape.part(own, own)
    panels = (*first, *w.shape.part(own, other))
    for i in cutlass.range_constexpr(len(panels)):
        cute.arch.mbarrier_wait(w.full + (own * w.shape.panels + panels[i]), parity)
        blocks = wgmma.k_blocks(panels[i : i + 1])
        wgmma.gemm_issue(w.mma_s, w.acc_s, w.frag_q, w.frag_k, blocks, zero_init=i == 0)
        if cutlass.const_expr(drain and i == len(first) - 1):
            warpgroup.wait_group(len(first))
            release(w.empty + (2 * other + own))
    warpgroup.wait_group(0)


@cute.jit
def hide_past_end(w: cutlass.Constexpr, stage: cutlass.Constexpr, first_token: Int32):
    """Zeroes this consumer's half of V in the rows of a stage that lie past the end of the request."""
    base = w.kv_base + stage * w.shape.stage_elements
    if cutlass.const_expr(w.tile is None):
        columns = w.shape.right if w.me else w.shape.left
        paged.zero_rows(base, w.seq_len - first_token, w.thread, columns)
    else:
        half = base + w.me * w.tile.half
        paged.zero_rows(half, w.seq_len - first_token, w.thread, w.shape.left, w.tile.places)
    cute.arch.fence_view_async_shared()
    named_sync(EVEN_JOIN + w.me, WARPGROUP)


@cute.jit
def write_p(w: cutlass.Constexpr, p_frag: cute.Tensor):
    """This consumer's P into the rope panel of its own stage, visible to MMAs after the next barrier."""
    cute.copy(w.p_copy, w.p_copy.retile(p_frag), w.p_target)
    cute.arch.fence_view_async_shared()


@cute.jit
def run_pairs(
    w: cutlass.Constexpr,
    step: cutlass.Constexpr,
    first: Int32,
    end: Int32,
    least: Int32,
    asks: cutlass.Constexpr = False,
):
    """All pairs of a block. Pairs before `plain` need no mask; the last one takes the masking path, with `asks` only
    where it has to: of a request in several parts, one part's."""
    plain = end - 1
    if cutlass.const_expr(w.shape.causal):
        plain = cutlass.max(cutlass.min(least // (2 * TILE_N), end - 1), first)
    for pair in cutlass.range(first, plain, unroll=1):
        step(w, pair, (pair - first) & 1, masked=False, more=True)
    if cutlass.const_expr(w.shape.causal):
        for pair in cutlass.range(plain, end - 1, unroll=1):
            step(w, pair, (pair - first) & 1, masked=True, more=True)
    parity = (end - 1 - first) & 1
    if cutlass.const_expr(asks):
        if end * (2 * TILE_N) <= least:
            step(w, end - 1, parity, masked=False, more=False)
        else:
            step(w, end - 1, parity, masked=True, more=False)
    else:
        step(w, end - 1, parity, masked=True, more=False)


@cute.jit
def finish(
    w: cutlass.Constexpr,
    out: cute.Tensor,  # (b, s, h, k), global memory
    lse: cute.Tensor,  # (b, h, s) fp32, global memory
    partial_out: cute.Tensor,  # (splits, b, h_kv, rows, k) fp32, global memory
    partial_lse: cute.Tensor,  # (splits, b, h_kv, rows) fp32, global memory
    sums: tuple[cute.Tensor, cute.Tensor],  # (64,) fp32 each, shared memory: the consumers' row sums
    batch: Int32,
    kv_head: Int32,
    row_tile: Int32,
    split: Int32,
    num_splits: Int32,
):
    """Joins the two row sums and writes this consumer's half of the output."""
    shape = w.shape
    lane_row = wgmma.acc_row(w.thread, 0)
    for r in cutlass.range_constexpr(2):
        w.total[r] = softmax.quad_sum(w.total[r])
        publish(sums[w.me], w.thread, r, w.total[r])
    # Past this barrier nobody reads the stages any more, so the output may be staged in them.
    named_sync(CONSUMERS_JOIN, CONSUMERS)
    inverse = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        w.total[r] = w.total[r] + sums[1 - w.me][lane_row + 8 * r]
        inverse[r] = 1.0 / w.total[r] if w.total[r] > 0.0 else Float32(0.0)
    wgmma.scale_rows(w.acc_o, inverse)

    first_row = row_tile * TILE_M
    if num_splits == 1:
        output.store_output(
            w.acc_o, w.mma_ss, w.staging, out, w.me * shape.half, batch, kv_head, first_row, shape.rows, shape.group,
            w.thread, EVEN_JOIN + w.me,
        )  # fmt: skip
    for r in cutlass.range_constexpr(2):
        row = first_row + lane_row + 8 * r
        if row < shape.rows:
            lse_log2 = w.m[r] + cute.math.log2(w.total[r], fastmath=True)
            output.store_row_results(
                wgmma.as_rows(w.acc_o)[r, None], w.me * shape.half, w.total[r], lse_log2, lse, partial_out, partial_lse,
                batch, kv_head, row, split, num_splits, shape.group, w.thread,
            )  # fmt: skip
