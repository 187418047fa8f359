r"""Absorbed MLA decode for Hopper (sm_90a): attention in latent space, K and V are one tile loaded once.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, 576)    V = latent (t, 512)

One block computes 64 query rows (tokens x heads of one latent cache) against a range of 64-token tiles ("blocks" of
the cache), two at a time. Three warpgroups: a producer with one warp for each of the four parts of the two stages, and
two consumers that each own half of the 64 x 512 fp32 output in registers (L: columns 0..255, R: 256..511). The even
consumer makes the scores of even tiles, the odd one of odd tiles; each multiplies both tiles' probabilities with its
half of V, so while one is in its softmax the other keeps the tensor cores busy:

    even  softmax 0 | O_L += P0·V0_L | rescale, P0 -> smem | O_L += P1·V1_L | S0' = Q·K0'ᵀ
                  \ max 0            / max 1         \ P0   / P1
    odd     S1 = Q·K1ᵀ | max, rescale | O_R += P0·V0_R and exp 1 | O_R += P1·V1_R | S1' = Q·K1'ᵀ

    freed     0L after P0·V0_L      0R after P0·V0_R      1R after P1·V1_R      1L after P1·V1_L

The own P goes to the MMA from registers; the other's P through shared memory, in the rope panel of its own stage,
which nobody needs once the scores are made. The idea of two half outputs and a shared running maximum is FlashMLA's
("seesaw"); the producer warps for each part and P in the rope panel are not.

Shared memory: Q 72 KiB, two stages of 72 KiB. Split-KV: grid (row tiles x h_kv, splits, b); with more than one split,
fp32 partials and `combine`. All addresses and counts come from `seq_lens` on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from mla_var3.kernel.cute_python.lib import output, paged, rows, softmax, wgmma
from mla_var3.kernel.cute_python.lib.barriers import named_arrive, named_sync, release
from mla_var3.kernel.cute_python.lib.latent import loads
from mla_var3.kernel.cute_python.lib.latent.consumer import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    CONSUMERS_JOIN,
    EVEN,
    ODD,
    PRODUCER_REGISTERS,
    THREADS,
    Consumer,
    finish,
    hide_past_end,
    make_scores,
    run_pairs,
    shared_storage,
    write_p,
)
from mla_var3.kernel.cute_python.lib.latent.lazy import publish
from mla_var3.kernel.cute_python.lib.latent.plan import LatentPlan, LatentTiling
from mla_var3.kernel.cute_python.lib.latent.shape import TILE_M, TILE_N, work_range
from mla_var3.kernel.cute_python.lib.split import combine
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP
from mla_var3.runtime import CuteKernel

# Named barriers (0 is the block's own, those from 5 on are `lib.latent.consumer`'s).
MAX0_READY, MAX1_READY, P0_READY, P1_READY = range(1, 5)


class SeesawConsumer(Consumer):
    """A consumer, and the running maxima after the even and the odd tile, (64,) each, that the two share."""

    def __init__(self, *common, maxima) -> None:
        super().__init__(*common)
        self.max0, self.max1 = maxima


# ------------------------------------------------------------------------------------------------ device: consumers
@cute.jit
def even_step(w: cutlass.Constexpr, pair: Int32, parity: Int32, masked: cutlass.Constexpr, more: cutlass.Constexpr):
    """The even consumer's part of a pair of tiles; S of the even tile is in acc_s. `more`: makes the next pair's S."""
    if cutlass.const_expr(masked):
        softmax.mask_columns(w.acc_s, w.thread, pair * (2 * TILE_N), w.limits)
    m0 = cute.make_rmem_tensor(2, Float32)
    factor = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        m0[r] = cute.arch.fmax(w.m[r], softmax.row_max(w.acc_s, r) * w.scale_log2)
        factor[r] = softmax.exp2(w.m[r] - m0[r])
        publish(w.max0, w.thread, r, m0[r])
    named_arrive(MAX0_READY, CONSUMERS)
    for r in cutlass.range_constexpr(2):
        w.total[r] = w.total[r] * factor[r] + softmax.row_exp2(w.acc_s, r, w.scale_log2, m0[r])
    p0 = wgmma.to_dtype(w.acc_s, w.dtype)
    wgmma.scale_rows(w.acc_o, factor)
    if cutlass.const_expr(masked):
        hide_past_end(w, EVEN, pair * (2 * TILE_N))
    wgmma.gemm_issue(w.mma_rs, w.acc_o, wgmma.as_a_operand(p0), w.frag_v[EVEN], range(4))

    named_sync(MAX1_READY, CONSUMERS)
    for r in cutlass.range_constexpr(2):
        m1 = w.max1[wgmma.acc_row(w.thread, r)]
        factor[r] = softmax.exp2(m0[r] - m1)
        w.m[r] = m1
        w.total[r] = w.total[r] * factor[r]
    wgmma.scale_rows(w.acc_s, factor)
    write_p(w, wgmma.to_dtype(w.acc_s, w.dtype))
    named_arrive(P0_READY, CONSUMERS)

    warpgroup.wait_group(0)
    if cutlass.const_expr(more):
        release(w.empty + (2 * EVEN + EVEN))
    wgmma.scale_rows(w.acc_o, factor)
    if cutlass.const_expr(masked):
        hide_past_end(w, ODD, pair * (2 * TILE_N) + TILE_N)
    named_sync(P1_READY, CONSUMERS)
    wgmma.gemm_issue(w.mma_ss, w.acc_o, w.frag_p, w.frag_v[ODD], range(4))
    if cutlass.const_expr(more):
        make_scores(w, parity ^ 1, drain=True)
    else:
        warpgroup.wait_group(0)


@cute.jit
def odd_step(w: cutlass.Constexpr, pair: Int32, parity: Int32, masked: cutlass.Constexpr, more: cutlass.Constexpr):
    """The odd consumer's part of a pair of tiles; S of the odd tile is in acc_s. `more`: makes the next pair's S."""
    if cutlass.const_expr(masked):
        softmax.mask_columns(w.acc_s, w.thread, pair * (2 * TILE_N) + TILE_N, w.limits)
    best = cute.make_rmem_tensor(2, Float32)
    factor = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        best[r] = softmax.row_max(w.acc_s, r) * w.scale_log2
    named_sync(MAX0_READY, CONSUMERS)
    for r in cutlass.range_constexpr(2):
        m1 = cute.arch.fmax(w.max0[wgmma.acc_row(w.thread, r)], best[r])
        factor[r] = softmax.exp2(w.m[r] - m1)
        w.m[r] = m1
        publish(w.max1, w.thread, r, m1)
    named_arrive(MAX1_READY, CONSUMERS)
    # The even tile first: its P comes while this consumer would compute exponentials, and its part of the stage is the
    # one that is needed again soonest. Against the other order, one run on a hot H200: 1 to 4 % less time on nine of
    # eleven shapes, within 1 % on the two with one short request.
    wgmma.scale_rows(w.acc_o, factor)
    if cutlass.const_expr(masked):
        hide_past_end(w, EVEN, pair * (2 * TILE_N))
    named_sync(P0_READY, CONSUMERS)
    wgmma.gemm_issue(w.mma_ss, w.acc_o, w.frag_p, w.frag_v[EVEN], range(4))
    for r in cutlass.range_constexpr(2):
        w.total[r] = w.total[r] * factor[r] + softmax.row_exp2(w.acc_s, r, w.scale_log2, w.m[r])
    p1 = wgmma.to_dtype(w.acc_s, w.dtype)
    write_p(w, p1)
    named_arrive(P1_READY, CONSUMERS)
    if cutlass.const_expr(masked):
        hide_past_end(w, ODD, pair * (2 * TILE_N) + TILE_N)
    wgmma.gemm_issue(w.mma_rs, w.acc_o, wgmma.as_a_operand(p1), w.frag_v[ODD], range(4))
    if cutlass.const_expr(more):
        warpgroup.wait_group(1)
        release(w.empty + (2 * EVEN + ODD))
    warpgroup.wait_group(0)
    if cutlass.const_expr(more):
        release(w.empty + (2 * ODD + ODD))
        make_scores(w, parity ^ 1, drain=False)


@cute.jit
def consume(w: cutlass.Constexpr, step: cutlass.Constexpr, first: Int32, end: Int32, least: Int32):
    """All pairs of a block."""
    w.acc_o.fill(0.0)
    w.m.fill(softmax.NO_KEY)
    w.total.fill(0.0)
    make_scores(w, Int32(0), drain=False)
    run_pairs(w, step, first, end, least)


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def flash_mla(
    q: cute.Tensor,  # (b, s, h, k + p) 16-bit, global memory, contiguous
    tma: cute.CopyAtom,  # one 64 x 64 box of the cache
    cache: cute.Tensor,  # TMA tensor (page, k + p, h_kv, num_pages)
    page_table: cute.Tensor,  # (b, max_pages) int32, global memory, contiguous
    seq_lens: cute.Tensor,  # (b,) int32, global memory
    out: cute.Tensor,  # (b, s, h, k) 16-bit, global memory, contiguous
    lse: cute.Tensor,  # (b, h, s) fp32, global memory, contiguous
    partial_out: cute.Tensor,  # (splits, b, h_kv, rows, k) fp32, global memory, contiguous; unused with one split
    partial_lse: cute.Tensor,  # (splits, b, h_kv, rows) fp32, log2 domain, global memory; unused with one split
    scale_log2: Float32,
    num_splits: Int32,
    shape: cutlass.Constexpr,
):
    dtype = q.element_type
    thread, _, _ = cute.arch.thread_idx()
    block, split, batch = cute.arch.block_idx()
    row_tile = block % shape.row_tiles
    kv_head = block // shape.row_tiles
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    seq_len = seq_lens[batch]
    first, end, num_tiles, least = work_range(seq_len, row_tile, split, num_splits, shape)

    q_layout = wgmma.k_major_layout(dtype, (TILE_M, shape.k + shape.p))
    storage = SmemAllocator().allocate(shared_storage(shape, dtype, ("max0", "max1")))
    q_tile = storage.query.get_tensor(q_layout.outer, swizzle=q_layout.inner)
    kv_base = storage.stages.data_ptr()
    full = storage.full.data_ptr()
    empty = storage.empty.data_ptr()
    if warp == 0:
        with cute.arch.elect_one():
            loads.init_barriers(full, empty, shape, False)
        cpasync.prefetch_descriptor(tma)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    if warp >= CONSUMERS // 32:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        loads.produce_parts(
            tma, cache[None, None, kv_head, None], kv_base, page_table[batch, None], full, empty, first, end,
            num_tiles, warp, row_tile, shape, False,
        )  # fmt: skip
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        if first < end:
            first_row = row_tile * TILE_M
            rows.load_query_rows(q, q_tile, batch, kv_head, first_row, shape.rows, shape.group, thread, CONSUMERS)
            cute.arch.fence_view_async_shared()
            named_sync(CONSUMERS_JOIN, CONSUMERS)
            one_a_row = cute.make_layout(TILE_M)
            maxima = (storage.max0.get_tensor(one_a_row), storage.max1.get_tensor(one_a_row))
            common = (q_tile, kv_base, full, empty, scale_log2, seq_len, first_row)
            sums = (storage.sums0.get_tensor(one_a_row), storage.sums1.get_tensor(one_a_row))
            if warp < WARPGROUP // 32:
                w = SeesawConsumer(EVEN, shape, dtype, thread, *common, maxima=maxima)
                consume(w, even_step, first, end, least)
                finish(w, out, lse, partial_out, partial_lse, sums, batch, kv_head, row_tile, split, num_splits)
            else:
                w = SeesawConsumer(ODD, shape, dtype, thread - WARPGROUP, *common, maxima=maxima)
                consume(w, odd_step, first, end, least)
                finish(w, out, lse, partial_out, partial_lse, sums, batch, kv_head, row_tile, split, num_splits)
        else:
            output.store_empty(
                out, lse, partial_lse, batch, kv_head, row_tile * TILE_M, shape.rows, shape.group,
                split, num_splits, thread,
            )  # fmt: skip


flash_mla.set_name_prefix("flash_mla", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla(
    q: cute.Tensor,
    kv_cache: cute.Tensor,  # (num_pages, page, h_kv, k + p) 16-bit, global memory, contiguous
    page_table: cute.Tensor,
    seq_lens: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    partial_out: cute.Tensor,
    partial_lse: cute.Tensor,
    scale: Float32,
    num_splits: Int32,
    shape: cutlass.Constexpr,
    stream: CUstream,
):
    """Makes the TMA descriptor of the cache and launches one block a row tile, kv head, split and request."""
    tma, cache = paged.make_page_tma(kv_cache)
    flash_mla(
        q, tma, cache, page_table, seq_lens, out, lse, partial_out, partial_lse,
        scale * math.log2(math.e), num_splits, shape,
    ).launch(
        grid=(shape.row_tiles * shape.h_kv, num_splits, q.shape[0]),
        block=(THREADS, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ plan
@dataclass(frozen=True)
class FlashMlaTiling(LatentTiling):
    """Only the number of splits is free."""


class FlashMlaPlan(LatentPlan):
    """Plan of flash_mla."""

    tiling_type = FlashMlaTiling
    kernel_fn = staticmethod(flash_mla)
    host_fn = staticmethod(launch_flash_mla)

    def combine(self, partials: Sequence[Any], outputs: Sequence[Any], splits: int) -> CuteKernel:
        return combine.combine_kernel(self, partials, outputs)
