"""A block of swapped-operand decode that may be on the chip before the call before has ended.

It makes its barriers, computes what it can, and waits for the kernel before (`griddepcontrol.wait`) ahead of the first
thing that it reads; then it asks for its length and its first page together (`lib.swapped.first_loads`). The combine,
or the next call, may come once its products are done.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass.memory import SmemAllocator

from mla_var3.kernel.cute_python.lib import paged
from mla_var3.kernel.cute_python.lib.barriers import named_arrive, named_sync
from mla_var3.kernel.cute_python.lib.latent import fragments, order
from mla_var3.kernel.cute_python.lib.split.combine_warps import wait_with
from mla_var3.kernel.cute_python.lib.split.divide import part_of
from mla_var3.kernel.cute_python.lib.swapped import first_loads, halves, halves_ending, swapped
from mla_var3.kernel.cute_python.lib.swapped.consumer import START, shared_storage
from mla_var3.kernel.cute_python.lib.swapped.limits import CONSUMERS, ROW_TILES
from mla_var3.kernel.cute_python.lib.swapped.plan import spans_of
from mla_var3.kernel.cute_python.lib.swapped.ready_plan import BOARDS
from mla_var3.kernel.cute_python.lib.swapped.swapped import TOKENS, WARPS
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP


@cute.jit
def run(
    q: cute.Tensor,  # (b, s, h, k + p) 16-bit, global memory, contiguous
    tma: cute.CopyAtom,  # a box of the cache, `tokens` x 64
    cache: cute.Tensor,  # TMA tensor (page, k + p, h_kv, num_pages)
    page_table: cute.Tensor,  # (b, max_pages) int32, global memory, contiguous
    seq_lens: cute.Tensor,  # (b,) int32, global memory
    target: cute.Tensor,  # (b, s, h, k) 16-bit, global memory, contiguous: the output, or memory for its parts
    marks: cute.Tensor,  # (b, h, s) fp32, global memory, contiguous: log-sum-exp, or memory for the marks of parts
    scale_log2: Float32,
    num_splits: Int32,
    inverse: Int32,
    ordered: Int32,  # not 0: more blocks than run at once, which take the longest requests first
    shape: cutlass.Constexpr,
    latent: cutlass.Constexpr,  # the same problem as the combine sees it
    longest_first: cutlass.Constexpr,
    tokens: cutlass.Constexpr,  # of a TMA box
    turned: cutlass.Constexpr = False,  # as for `halves_ending.finish_part`
):
    """The block of a kv head (x), split (y) and request (z) of the grid, with all query rows of the kv head."""
    dtype = q.element_type
    thread, _, _ = cute.arch.thread_idx()
    kv_head, split, rank = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = SmemAllocator().allocate(shared_storage(shape, dtype, BOARDS))
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    threads = CONSUMERS * WARPGROUP
    if warp == CONSUMERS * WARPS:
        # The producer makes the barriers itself, so that its first loads need not wait for the others.
        first_loads.make_barriers(tma, full, empty, shape.slots, WARPS)
    # Where the part begins if the request fills its row of the page table: read beside the length, not after it.
    width = page_table.shape[1]
    guessed, _ = part_of(Int32(width * shape.page) // TOKENS, split, num_splits, inverse)
    guess = cutlass.min(guessed * TOKENS // shape.page, width - 1)
    # A lane each: of a value that is the same in all, ptxas makes a uniform register at once, and waits for it.
    of_page = page_table[rank, None].iterator + cutlass.min(guess + thread % 32, width - 1)
    # Right if blocks take the requests in the order of the batch.
    of_length = seq_lens.iterator + rank
    # Nothing that a kernel before may have written is read, and nothing is written, ahead of this.
    wait_with(of_page.toint() | of_length.toint())
    seq_len = seq_lens[rank]
    if cutlass.const_expr(longest_first):
        lengths = order.ask_lengths(seq_lens, thread % 32, ordered)
    page = Int32(0)
    if warp >= CONSUMERS * WARPS:
        page = cute.make_tensor(of_page, cute.make_layout(1))[0]
        named_arrive(START, threads + 32)
    batch = rank
    if cutlass.const_expr(longest_first):
        if ordered != 0:
            batch = order.request_of(rank, seq_lens, thread % 32, lengths)
            seq_len = seq_lens[batch]
    # Waited for behind the jump over that, whose code then comes at the same time.
    page = cute.arch.shuffle_sync(page, 0)
    num_tiles, least = swapped.tiles_of(seq_len, shape)
    first, end = part_of(num_tiles, split, num_splits, inverse)

    if warp >= CONSUMERS * WARPS:
        if batch != rank:
            guess = Int32(-1)
        first_loads.produce(
            tma, cache, page_table[batch, None], guess, page, kv_head, first, end, storage.ring.data_ptr(), full,
            empty, shape.slots, shape.page // TOKENS, paged.EVICT_FIRST, tokens,
            spans_of(shape.panels, tokens),
        )  # fmt: skip
    else:
        swapped.load_queries(
            q, storage.query.data_ptr(), shape.tile_n, batch, kv_head, Int32(0), shape.rows, shape.group, thread,
            threads,
        )  # fmt: skip
        cute.arch.fence_view_async_shared()
        named_sync(START, threads + 32)
        # Of both consumers, in code of their own; they end in the same.
        results = halves.Results(shape, dtype)
        for me in cutlass.range_constexpr(CONSUMERS):
            if warp // WARPS == me:
                w = halves.HalfConsumer(
                    me, shape, dtype, thread - me * WARPGROUP, storage, scale_log2, seq_len, least, results
                )
                halves.consume(w, first, end)
        # The combine may come, or the next call. Let go at a block's start, the next call of a short request is there
        # before this one has begun: 0.1 us slower (b1 h16 t512).
        cute.arch.griddepcontrol_launch_dependents()
        e = halves_ending.Ending(results, shape, dtype, storage, thread, sends=True)
        if num_splits == 1:
            halves_ending.finish_whole(e, target, marks, batch, kv_head)
        else:
            parts = cute.recast_ptr(target.iterator, dtype=Float16)
            index = split * seq_lens.shape[0] + batch
            if first < end:
                halves_ending.finish_part(e, parts, marks.iterator, index, kv_head, latent, turned)
            else:
                fragments.store_no_keys(marks.iterator, index, kv_head, Int32(0), latent, thread)


@cute.jit
def dependent(num_splits: Int32, shape: cutlass.Constexpr) -> Int32:
    """Whether the blocks are programmatic dependents of the kernel before, 1 or 0. Whole results of 32 rows are not:
    b128 h32 took 142.1 us as one and 141.2 otherwise."""
    launched = Int32(1)
    if cutlass.const_expr(shape.tile_n == ROW_TILES[-1]):
        launched = Int32(cutlass.select_(num_splits > 1, Int32(1), Int32(0)))
    return launched
