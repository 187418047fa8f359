r"""Absorbed MLA decode for Hopper (sm_90a) and few query rows: flash_mla_v2 with flash_mla_v8's start and parts.

    Sᵀ (64 tokens x n) = K · Qᵀ     softmax down the columns     Oᵀ (512 x n) += Vᵀ · P       n = 8, 16 or 32 rows

Tiles, ring and products are flash_mla_v2's (`lib.swapped`). What differs is what a call pays once:

    start     length and first page are asked for in the first instructions; no division where nothing is split
    maximum   lags behind by up to 2^8, so that outputs are rarely scaled
    ending    `lib.swapped.ending`: the consumers meet once; parts are fp16, as flash_mla_v8's
    combine   `lib.split.combine_fragments`
    blocks    one a kv head, split and request; where more than run at once, the longest requests first

All addresses and counts come from `seq_lens` on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float16, Float32, Int32
from cutlass.memory import SmemAllocator

from mla_var3.kernel.cute_python.lib import paged
from mla_var3.kernel.cute_python.lib.barriers import named_arrive, named_sync
from mla_var3.kernel.cute_python.lib.latent import order
from mla_var3.kernel.cute_python.lib.swapped import ending, produce, ring, swapped
from mla_var3.kernel.cute_python.lib.swapped.consumer import (
    CONSUMER_REGISTERS,
    JOIN,
    PRODUCER_REGISTERS,
    START,
    STEP_BARRIERS,
    Consumer,
    Results,
    block_threads,
    redistributes,
    reset,
    shared_storage,
    step,
)
from mla_var3.kernel.cute_python.lib.swapped.plan import PanelPlan, PanelTiling
from mla_var3.kernel.cute_python.lib.swapped.swapped import TOKENS, WARPS
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP


# ------------------------------------------------------------------------------------------------ device
@cute.kernel
def flash_mla_v9(
    q: cute.Tensor,  # (b, s, h, k + p) 16-bit, global memory, contiguous
    tma: cute.CopyAtom,  # one 64 x 64 box of the cache
    cache: cute.Tensor,  # TMA tensor (page, k + p, h_kv, num_pages)
    page_table: cute.Tensor,  # (b, max_pages) int32, global memory, contiguous
    seq_lens: cute.Tensor,  # (b,) int32, global memory
    target: cute.Tensor,  # (b, s, h, k) 16-bit, global memory, contiguous: the output, or memory for its parts
    marks: cute.Tensor,  # (b, h, s) fp32, global memory, contiguous: log-sum-exp, or memory for the marks of parts
    scale_log2: Float32,
    num_splits: Int32,
    ordered: Int32,  # not 0: more blocks than run at once, which take the longest requests first
    shape: cutlass.Constexpr,
    latent: cutlass.Constexpr,  # the same problem as the combine sees it
    longest_first: cutlass.Constexpr,
):
    dtype = q.element_type
    thread, _, _ = cute.arch.thread_idx()
    kv_head, split, rank = cute.arch.block_idx()
    # Asked for before anything else: right if blocks take the requests in the order of the batch.
    seq_len = seq_lens[rank]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    guess, page = Int32(0), Int32(0)
    if warp >= shape.consumers * WARPS:
        # Where the part begins if the request fills its row of the page table: read beside the length, not after it.
        tokens = page_table.shape[1] * shape.page
        guessed, _, _ = swapped.part_range(Int32(tokens), split, num_splits, shape)
        guess = cutlass.min(guessed * TOKENS // shape.page, page_table.shape[1] - 1)
        page = page_table[rank, guess]
    storage = SmemAllocator().allocate(shared_storage(shape, dtype, (ending.MAGNITUDES,)))
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    threads = shape.consumers * WARPGROUP
    batch = rank
    if warp == shape.consumers * WARPS:
        # The producer makes the barriers itself, so that its first loads need not wait for the others.
        produce.make_barriers(tma, full, empty, shape.slots, WARPS, thread % 32)
        named_arrive(START, threads + 32)
    if cutlass.const_expr(longest_first):
        if ordered != 0:
            batch = order.request_at(rank, seq_lens, thread % 32)
            seq_len = seq_lens[batch]
    first, end, least = swapped.part_range(seq_len, split, num_splits, shape)

    if warp >= shape.consumers * WARPS:
        if cutlass.const_expr(redistributes(shape)):
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if warp == shape.consumers * WARPS:
            if batch != rank:
                guess = Int32(-1)
            produce.produce(
                tma, cache, page_table[batch, None], guess, page, kv_head, first, end, storage.ring.data_ptr(), full,
                empty, tuple(range(shape.panels)), shape.slots, shape.page // TOKENS, paged.EVICT_FIRST,
            )  # fmt: skip
    else:
        if cutlass.const_expr(redistributes(shape)):
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        swapped.load_queries(
            q, storage.query.data_ptr(), shape.tile_n, batch, kv_head, Int32(0), shape.rows, shape.group, thread,
            threads,
        )  # fmt: skip
        cute.arch.fence_view_async_shared()
        named_sync(START, threads + 32)
        # Of both consumers, which take turns at the tiles in code of their own and end in the same.
        results = Results(shape, dtype)
        reset(results)
        for me in cutlass.range_constexpr(shape.consumers):
            if warp // WARPS == me:
                w = Consumer(me, shape, dtype, thread - me * WARPGROUP, storage, scale_log2, results)
                slot, phase = Int32(0), Int32(0)
                for tile in cutlass.range(first, end, unroll=1):
                    if (tile - first) % shape.consumers == me:
                        step(w, tile, slot, phase, seq_len, least, Int32(0), lazy=True)
                    slot, phase = ring.at(slot, phase, shape.panels, shape.slots)
                if cutlass.const_expr(me == 1):
                    # The first one has a tile more. racecheck follows barriers of all only where each consumer has
                    # passed as many of its own.
                    if (end - first) % shape.consumers == 1:
                        for _ in cutlass.range_constexpr(STEP_BARRIERS):
                            named_sync(JOIN + me, WARPGROUP)
        cute.arch.griddepcontrol_launch_dependents()  # the combine may start
        e = ending.Ending(results, shape, dtype, storage, thread, end - first)
        if num_splits == 1:
            ending.finish_whole(e, target, marks, batch, kv_head)
        else:
            parts = cute.recast_ptr(target.iterator, dtype=Float16)
            ending.finish_part(e, parts, marks.iterator, split * seq_lens.shape[0] + batch, kv_head, latent)


flash_mla_v9.set_name_prefix("flash_mla_v9", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla_v9(
    q: cute.Tensor,
    kv_cache: cute.Tensor,  # (num_pages, page, h_kv, k + p) 16-bit, global memory, contiguous
    page_table: cute.Tensor,
    seq_lens: cute.Tensor,
    target: cute.Tensor,
    marks: cute.Tensor,
    scale: Float32,
    num_splits: Int32,
    ordered: Int32,
    shape: cutlass.Constexpr,
    latent: cutlass.Constexpr,
    longest_first: cutlass.Constexpr,
    stream: CUstream,
):
    """Makes the TMA descriptor of the cache and launches one block a kv head, split and request."""
    tma, cache = paged.make_page_tma(kv_cache)
    flash_mla_v9(
        q, tma, cache, page_table, seq_lens, target, marks, scale * math.log2(math.e), num_splits, ordered,
        shape, latent, longest_first,
    ).launch(
        grid=(shape.h_kv, num_splits, q.shape[0]),
        block=(block_threads(shape), 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ plan
@dataclass(frozen=True)
class FlashMlaV9Tiling(PanelTiling):
    """The tiling of `PanelPlan`."""


class FlashMlaV9Plan(PanelPlan):
    """Plan of flash_mla_v9."""

    tiling_type = FlashMlaV9Tiling
    kernel_fn = staticmethod(flash_mla_v9)
    host_fn = staticmethod(launch_flash_mla_v9)
