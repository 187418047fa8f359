"""A block that may be on the chip before the call before has ended: all that needs nothing from memory comes first.

It makes its barriers (a warp those of its own panels, `lib.latent.first_loads`), meets the other block of its cluster,
and finds where in the page table it begins; then it waits for the kernels before (`griddepcontrol.wait`), and asks for
the length and the page together. Of what follows, nothing is divided, and where the code goes on is decided before the
length is waited for.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from mla_var3.kernel.cute_python.lib import rows, wgmma
from mla_var3.kernel.cute_python.lib.barriers import wait
from mla_var3.kernel.cute_python.lib.latent import first_loads, loads, order
from mla_var3.kernel.cute_python.lib.latent.consumer import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    shared_storage,
)
from mla_var3.kernel.cute_python.lib.latent.shape import TILE_M, TILE_N, visible
from mla_var3.kernel.cute_python.lib.phased import block as consumers
from mla_var3.kernel.cute_python.lib.split.combine_warps import wait_with


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
    inverse: Int32,  # of num_splits (`lib.split.divide`)
    ordered: Int32,  # not 0: more blocks than run at once, which take the longest requests first
    shape: cutlass.Constexpr,
    longest_first: cutlass.Constexpr,
    singles: cutlass.Constexpr,  # parts may be single tiles, where there are as many parts as tiles
):
    """The block of a row tile and kv head (x), split (y) and request (z) of the grid."""
    dtype = q.element_type
    thread, _, _ = cute.arch.thread_idx()
    block, split, rank = cute.arch.block_idx()
    lane = thread % 32
    row_tile = block % shape.row_tiles
    kv_head = block // shape.row_tiles
    shares = loads.shared_loads(shape)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    part = warp - CONSUMERS // 32  # of a producer
    storage = SmemAllocator().allocate(shared_storage(shape, dtype, ("row_max",)))
    q_layout = wgmma.k_major_layout(dtype, (TILE_M, shape.k + shape.p))
    q_tile = storage.query.get_tensor(q_layout.outer, swizzle=q_layout.inner)
    kv_base, full, empty = storage.stages.data_ptr(), storage.full.data_ptr(), storage.empty.data_ptr()
    width = page_table.shape[1]
    guess = Int32(0)
    if warp >= CONSUMERS // 32:
        first_loads.make_barriers(tma, full, empty, part, shape, shares)
        guess = first_loads.guess_page(part >> 1, split, num_splits, inverse, width, shape, singles)
    if cutlass.const_expr(shares):
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
    # By a lane each: of a value that is the same in all, ptxas makes a uniform register at once, and waits for it.
    of_page = page_table[rank, None].iterator + cutlass.min(guess + lane, width - 1)
    of_length = seq_lens.iterator + cutlass.min(rank + lane, seq_lens.shape[0] - 1)
    # Nothing that a kernel before may have written is read, and nothing is written, ahead of this.
    wait_with(of_page.toint() | of_length.toint())
    seq_len = cute.make_tensor(of_length, cute.make_layout(1))[0]
    page = cute.make_tensor(of_page, cute.make_layout(1))[0]
    if cutlass.const_expr(longest_first):
        lengths = order.ask_lengths(seq_lens, lane, ordered)
    first_row = row_tile * TILE_M
    if warp < CONSUMERS // 32:
        rows.issue_query_rows(
            q, q_tile, rank, kv_head, first_row, shape.rows, shape.group, thread, CONSUMERS
        )  # fmt: skip
    batch = rank
    if cutlass.const_expr(longest_first):
        if ordered != 0:
            batch = order.request_of(rank, seq_lens, lane, lengths)
            if batch != rank and warp < CONSUMERS // 32:
                cute.arch.cp_async_wait_group(0)
                rows.issue_query_rows(
                    q, q_tile, batch, kv_head, first_row, shape.rows, shape.group, thread, CONSUMERS
                )  # fmt: skip
    # Waited for behind the jump over that, whose code then comes at the same time.
    seq_len, page = cute.arch.shuffle_sync(seq_len, 0), cute.arch.shuffle_sync(page, 0)
    if batch != rank:
        seq_len = seq_lens[batch]
        guess = Int32(-1)
    most, least = visible(seq_len, row_tile, shape)
    if cutlass.const_expr(shares and shape.causal):
        # Both blocks of a cluster take the tiles of the one that sees more keys.
        most, _ = visible(seq_len, row_tile | 1, shape)
    num_tiles = (most + TILE_N - 1) >> (TILE_N.bit_length() - 1)
    first, end, alone = first_loads.pairs_of(num_tiles, split, num_splits, inverse, singles)

    if warp >= CONSUMERS // 32:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        loads.produce_parts(
            tma, cache[None, None, kv_head, None], kv_base, page_table[batch, None], full, empty, first, end, num_tiles,
            warp, row_tile, shape, shares, guess, page, alone,
        )  # fmt: skip
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        index, whole = split * seq_lens.shape[0] + batch, num_splits == 1
        consumers.consume(
            storage, q_tile, target, marks, scale_log2, seq_len, first, end, least, index, kv_head, first_row, whole,
            warp, thread, shape, shares, zero_padding=True, frees_first=True, as_fragments=True, alone=alone,
            wait=wait,
        )  # fmt: skip
