r"""Absorbed MLA decode for Hopper (sm_90a): flash_mla_v3 with an ending made for short blocks and many splits.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, 576)    V = latent (t, 512)

The loop over the keys, clusters and multicast are flash_mla_v3's (`lib.phased`). What differs is how a block ends
(`lib.latent.ending`, which also says how parts keep their precision) and how parts of a request meet: a part is stored
as a result is, in 16 bits and whole lines, divided by its own sum, and `combine_rows` reads half of the bytes. Both
consumers run one copy of the code for it. Blocks take the longest requests first (`lib.latent.order`).

Shared memory: Q 72 KiB, two stages of 72 KiB. Split-KV: grid (row tiles x h_kv, splits, b). All addresses and counts
come from `seq_lens` on the device.
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

from mla_var3.kernel.cute_python.lib import paged, rows, wgmma
from mla_var3.kernel.cute_python.lib.latent import loads, order
from mla_var3.kernel.cute_python.lib.latent.consumer import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    THREADS,
    shared_storage,
)
from mla_var3.kernel.cute_python.lib.latent.parts_plan import PartsPlan, PartsTiling
from mla_var3.kernel.cute_python.lib.latent.shape import TILE_M, work_range
from mla_var3.kernel.cute_python.lib.phased import block as consumers


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def flash_mla_v5(
    q: cute.Tensor,  # (b, s, h, k + p) 16-bit, global memory, contiguous
    tma: cute.CopyAtom,  # one 64 x 64 box of the cache
    cache: cute.Tensor,  # TMA tensor (page, k + p, h_kv, num_pages)
    page_table: cute.Tensor,  # (b, max_pages) int32, global memory, contiguous
    seq_lens: cute.Tensor,  # (b,) int32, global memory
    target: cute.Tensor,  # (splits · b, s, h, k) 16-bit, global memory, contiguous: the output, or its parts
    marks: cute.Tensor,  # fp32, global memory, contiguous: log-sum-exp (b, h, s), or of parts (splits · b, h, 4 · s)
    scale_log2: Float32,
    num_splits: Int32,
    shape: cutlass.Constexpr,
    longest_first: cutlass.Constexpr,
):
    dtype = q.element_type
    thread, _, _ = cute.arch.thread_idx()
    block, split, rank = cute.arch.block_idx()
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
    # On its way before anything is known of the requests: right if all are equally long.
    first_row = row_tile * TILE_M
    if warp < CONSUMERS // 32:
        rows.issue_query_rows(
            q, q_tile, rank, kv_head, first_row, shape.rows, shape.group, thread, CONSUMERS
        )  # fmt: skip
    batch = rank
    if cutlass.const_expr(longest_first):
        batch = order.request_at(rank, seq_lens, thread % 32)
        if batch != rank and warp < CONSUMERS // 32:
            cute.arch.cp_async_wait_group(0)
            rows.issue_query_rows(
                q, q_tile, batch, kv_head, first_row, shape.rows, shape.group, thread, CONSUMERS
            )  # fmt: skip
    index, whole = split * seq_lens.shape[0] + batch, num_splits == 1
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
        consumers.consume(
            storage, q_tile, target, marks, scale_log2, seq_len, first, end, least, index, kv_head, first_row, whole,
            warp, thread, shape, shares, zero_padding=False,
        )  # fmt: skip


flash_mla_v5.set_name_prefix("flash_mla_v5", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla_v5(
    q: cute.Tensor,
    kv_cache: cute.Tensor,  # (num_pages, page, h_kv, k + p) 16-bit, global memory, contiguous
    page_table: cute.Tensor,
    seq_lens: cute.Tensor,
    target: cute.Tensor,
    marks: cute.Tensor,
    scale: Float32,
    num_splits: Int32,
    shape: cutlass.Constexpr,
    longest_first: cutlass.Constexpr,
    stream: CUstream,
):
    """Makes the TMA descriptor of the cache and launches one block a row tile, kv head, split and request."""
    shares = loads.shared_loads(shape)
    tma, cache = paged.make_page_tma(kv_cache, shares)
    flash_mla_v5(
        q, tma, cache, page_table, seq_lens, target, marks, scale * math.log2(math.e), num_splits, shape,
        longest_first,
    ).launch(
        grid=(shape.row_tiles * shape.h_kv, num_splits, q.shape[0]),
        block=(THREADS, 1, 1),
        cluster=(2 if shares else 1, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ plan
@dataclass(frozen=True)
class FlashMlaV5Tiling(PartsTiling):
    """The tiling of `PartsPlan`."""


class FlashMlaV5Plan(PartsPlan):
    """Plan of flash_mla_v5."""

    tiling_type = FlashMlaV5Tiling
    kernel_fn = staticmethod(flash_mla_v5)
    host_fn = staticmethod(launch_flash_mla_v5)
