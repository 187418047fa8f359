"""A block with an early start, from its first instruction to its results.

Lengths, and the page where a request's part begins if it fills the page table, are asked for in the first instructions.
Barriers are announced before the query is asked for, so that the loads of the cache do not wait for it. Requests are
put in order only where there are more blocks than run at once.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from mla_var3.kernel.cute_python.lib import rows, wgmma
from mla_var3.kernel.cute_python.lib.barriers import named_arrive, named_sync
from mla_var3.kernel.cute_python.lib.latent import loads, order, tokens
from mla_var3.kernel.cute_python.lib.latent.consumer import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    THREADS,
    shared_storage,
)
from mla_var3.kernel.cute_python.lib.latent.shape import TILE_M, work_range
from mla_var3.kernel.cute_python.lib.phased import block as consumers
from mla_var3.kernel.cute_python.lib.phased import short
from mla_var3.kernel.cute_python.lib.split.combine_warps import wait_with

BARRIERS_MADE = 8  # named barrier of a block without a cluster, behind `lib.latent.consumer`'s


@cute.jit
def run(
    q: cute.Tensor,  # (b, s, h, k + p) 16-bit, global memory, contiguous
    tma: cute.CopyAtom,  # one 64 x 64 box of the cache
    cache: cute.Tensor,  # TMA tensor (page, k + p, h_kv, num_pages)
    page_table: cute.Tensor,  # (b, max_pages) int32, global memory, contiguous
    seq_lens: cute.Tensor,  # (b,) int32, global memory
    target: cute.Tensor,  # (splits · b, s, h, k) 16-bit, global memory, contiguous: the output, or its parts
    marks: cute.Tensor,  # fp32, global memory, contiguous: log-sum-exp (b, h, s), or of parts (splits · b, h, 4 · s)
    scale_log2: Float32,
    num_splits: Int32,
    ordered: Int32,  # not 0: more blocks than run at once, which take the longest requests first
    shape: cutlass.Constexpr,
    longest_first: cutlass.Constexpr,
    frees_first: cutlass.Constexpr,  # as for `steps.PhasedConsumer`
    as_fragments: cutlass.Constexpr = False,  # as for `block.consume`
    by_tiles: cutlass.Constexpr = False,  # where there are as many parts as tiles, each is one
    apart: cutlass.Constexpr = False,  # as for `short.consume`, with by_tiles
    odd_tile: cutlass.Constexpr = loads.TOGETHER,  # as for `loads.produce`
    most: cutlass.Constexpr = 2,  # blocks of a cluster
    dependent: cutlass.Constexpr = False,  # launched so that it may be there before the kernel before it has ended
    by_tokens: cutlass.Constexpr = None,  # a `tokens.TokenBoxes`: tiles come in boxes of whole tokens
):
    """The block of a row tile and kv head (x), split (y) and request (z) of the grid; P is 0 in rows of padding."""
    dtype = q.element_type
    thread, _, _ = cute.arch.thread_idx()
    block, split, rank = cute.arch.block_idx()
    seq_len = Int32(0)
    if cutlass.const_expr(not dependent):
        # Asked for before anything else: right if blocks take the requests in the order of the batch.
        seq_len = seq_lens[rank]
    row_tile = block % shape.row_tiles
    kv_head = block // shape.row_tiles
    shares = loads.shared_loads(shape, most)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    guess, guessed = Int32(-1), Int32(0)
    if warp >= CONSUMERS // 32:
        guess = loads.guess_page(warp - CONSUMERS // 32, split, num_splits, page_table.shape[1], shape, by_tiles)
        if cutlass.const_expr(not dependent):
            guessed = page_table[rank, guess]
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
        if cutlass.const_expr(by_tokens is not None):
            cpasync.prefetch_descriptor(by_tokens.whole)
        cute.arch.mbarrier_init_fence()
    # The producers wait for the barriers, and not for the query to be asked for.
    if cutlass.const_expr(shares):
        cute.arch.cluster_arrive_relaxed()
    elif warp < CONSUMERS // 32:
        named_arrive(BARRIERS_MADE, THREADS)
    if cutlass.const_expr(dependent):
        of_page = page_table[rank, None].iterator + cutlass.max(guess, 0)
        of_length = seq_lens.iterator + rank
        # Nothing that a kernel before may have written is read, and nothing is written, ahead of this.
        wait_with(of_page.toint() | of_length.toint())
        seq_len = cute.make_tensor(of_length, cute.make_layout(1))[0]
        if warp >= CONSUMERS // 32:
            guessed = cute.make_tensor(of_page, cute.make_layout(1))[0]
    first_row = row_tile * TILE_M
    if warp < CONSUMERS // 32:
        rows.issue_query_rows(
            q, q_tile, rank, kv_head, first_row, shape.rows, shape.group, thread, CONSUMERS
        )  # fmt: skip
    batch = rank
    if cutlass.const_expr(longest_first):
        if ordered != 0:
            batch = order.request_at(rank, seq_lens, thread % 32)
            if batch != rank and warp < CONSUMERS // 32:
                cute.arch.cp_async_wait_group(0)
                rows.issue_query_rows(
                    q, q_tile, batch, kv_head, first_row, shape.rows, shape.group, thread, CONSUMERS
                )  # fmt: skip
    index, whole = split * seq_lens.shape[0] + batch, num_splits == 1
    if batch != rank:
        seq_len = seq_lens[batch]
    alone = None
    if cutlass.const_expr(by_tiles):
        first, end, num_tiles, least, alone = short.part_range(seq_len, row_tile, split, num_splits, shape)
    else:
        first, end, num_tiles, least = work_range(seq_len, row_tile, split, num_splits, shape)
    if cutlass.const_expr(shares):
        if cutlass.const_expr(shape.causal):
            # All blocks of a cluster take the tiles of the one that sees most keys.
            last = row_tile | (shares - 1)
            if cutlass.const_expr(by_tiles):
                first, end, num_tiles, _, alone = short.part_range(seq_len, last, split, num_splits, shape)
            else:
                first, end, num_tiles, _ = work_range(seq_len, last, split, num_splits, shape)
        cute.arch.cluster_wait()

    of_head = None if by_tokens is None else by_tokens.of_head(kv_head)
    if warp >= CONSUMERS // 32:
        if cutlass.const_expr(not shares):
            named_sync(BARRIERS_MADE, THREADS)
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if batch != rank:
            guess = Int32(-1)
        loads.produce_parts(
            tma, cache[None, None, kv_head, None], kv_base, page_table[batch, None], full, empty, first, end,
            num_tiles, warp, row_tile, shape, shares, guess, guessed, alone, odd_tile, of_head,
        )  # fmt: skip
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        consumers.consume(
            storage, q_tile, target, marks, scale_log2, seq_len, first, end, least, index, kv_head, first_row, whole,
            warp, thread, shape, shares, zero_padding=True, frees_first=frees_first, as_fragments=as_fragments,
            alone=alone, apart=apart, tile=None if by_tokens is None else tokens.TokenTile(shape, dtype),
        )  # fmt: skip
