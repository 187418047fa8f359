r"""Absorbed MLA decode for Hopper (sm_90a) where tensor work is the limit: two consumers half a pair of tiles apart.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, 576)    V = latent (t, 512)

Blocks, tiles, stages and the split of the output over two consumer warpgroups are flash_mla_v1's. What differs is the
order of the work (`lib.phased.steps`), and who loads: where a request has an even number of row tiles, two of them form
a cluster, and each asks for every second panel of the cache for both (`lib.latent.loads`). The loop asks L2 for as much
as it gives otherwise.

Shared memory: Q 72 KiB, two stages of 72 KiB. Split-KV: grid (row tiles x h_kv, splits, b); with more than one split,
fp32 partials and `combine_groups`. All addresses and counts come from `seq_lens` on the device.

Against flash_mla_v1: the even scores first and the odd ones under the even softmax; P relative to its own consumer's
maximum; the odd product with the even V behind the odd scores; a maximum without shuffles; nine slices of the query in
registers; multicast. Tried on an H200 and left out: a prefetch of each tile to L2 a pair ahead (slower without the
cluster; with it, 1 to 2 % faster on a cool chip and not faster on a hot one).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from mla_var3.kernel.cute_python.lib import output, paged, rows, softmax, wgmma
from mla_var3.kernel.cute_python.lib.barriers import named_sync
from mla_var3.kernel.cute_python.lib.latent import loads
from mla_var3.kernel.cute_python.lib.latent.consumer import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    CONSUMERS_JOIN,
    EVEN,
    ODD,
    PRODUCER_REGISTERS,
    THREADS,
    finish,
    shared_storage,
)
from mla_var3.kernel.cute_python.lib.latent.plan import LatentPlan, LatentTiling
from mla_var3.kernel.cute_python.lib.latent.shape import TILE_M, work_range
from mla_var3.kernel.cute_python.lib.phased import steps
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def flash_mla_v3(
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
    shares = loads.shared_loads(shape)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    q_layout = wgmma.k_major_layout(dtype, (TILE_M, shape.k + shape.p))
    storage = SmemAllocator().allocate(shared_storage(shape, dtype, ("row_max",)))
    q_tile = storage.query.get_tensor(q_layout.outer, swizzle=q_layout.inner)
    kv_base = storage.stages.data_ptr()
    full = storage.full.data_ptr()
    empty = storage.empty.data_ptr()
    if warp == 0:
        with cute.arch.elect_one():
            loads.init_barriers(full, empty, shape, shares)
        cpasync.prefetch_descriptor(tma)
    # On its way before anything is known of the request.
    first_row = row_tile * TILE_M
    if warp < CONSUMERS // 32:
        rows.issue_query_rows(
            q, q_tile, batch, kv_head, first_row, shape.rows, shape.group, thread, CONSUMERS
        )  # fmt: skip
    seq_len = seq_lens[batch]
    first, end, num_tiles, least = work_range(seq_len, row_tile, split, num_splits, shape)
    cute.arch.mbarrier_init_fence()
    if cutlass.const_expr(shares):
        if cutlass.const_expr(shape.causal):
            # Both blocks of a cluster take the tiles of the one that sees more keys.
            first, end, num_tiles, _ = work_range(seq_len, row_tile | 1, split, num_splits, shape)
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()

    if warp >= CONSUMERS // 32:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        loads.produce_parts(
            tma, cache[None, None, kv_head, None], kv_base, page_table[batch, None], full, empty, first, end,
            num_tiles, warp, row_tile, shape, shares,
        )  # fmt: skip
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        if first < end:
            one_a_row = cute.make_layout(TILE_M)
            row_max = storage.row_max.get_tensor(one_a_row)
            if thread < TILE_M:
                row_max[thread] = softmax.NO_KEY
            cute.arch.cp_async_wait_group(0)
            cute.arch.fence_view_async_shared()
            named_sync(CONSUMERS_JOIN, CONSUMERS)
            common = (q_tile, kv_base, full, empty, scale_log2, seq_len, first_row)
            sums = (storage.sums0.get_tensor(one_a_row), storage.sums1.get_tensor(one_a_row))
            if warp < WARPGROUP // 32:
                w = steps.PhasedConsumer(EVEN, shape, dtype, thread, *common, row_max=row_max, shares=shares)
                steps.consume(w, steps.even_step, first, end, least)
                cute.arch.griddepcontrol_launch_dependents()  # `combine_groups` may start
                finish(w, out, lse, partial_out, partial_lse, sums, batch, kv_head, row_tile, split, num_splits)
            else:
                w = steps.PhasedConsumer(ODD, shape, dtype, thread - WARPGROUP, *common, row_max=row_max, shares=shares)
                steps.consume(w, steps.odd_step, first, end, least)
                cute.arch.griddepcontrol_launch_dependents()  # `combine_groups` may start
                finish(w, out, lse, partial_out, partial_lse, sums, batch, kv_head, row_tile, split, num_splits)
        else:
            output.store_empty(
                out, lse, partial_lse, batch, kv_head, first_row, shape.rows, shape.group,
                split, num_splits, thread,
            )  # fmt: skip


flash_mla_v3.set_name_prefix("flash_mla_v3", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla_v3(
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
    shares = loads.shared_loads(shape)
    tma, cache = paged.make_page_tma(kv_cache, shares)
    flash_mla_v3(
        q, tma, cache, page_table, seq_lens, out, lse, partial_out, partial_lse,
        scale * math.log2(math.e), num_splits, shape,
    ).launch(
        grid=(shape.row_tiles * shape.h_kv, num_splits, q.shape[0]),
        block=(THREADS, 1, 1),
        cluster=(2 if shares else 1, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ plan
@dataclass(frozen=True)
class FlashMlaV3Tiling(LatentTiling):
    """Only the number of splits is free."""


class FlashMlaV3Plan(LatentPlan):
    """Plan of flash_mla_v3."""

    tiling_type = FlashMlaV3Tiling
    kernel_fn = staticmethod(flash_mla_v3)
    host_fn = staticmethod(launch_flash_mla_v3)
