"""Filling the two stages, by one block for itself or by the blocks of a cluster, two or four, for all of them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64

from mla_var3.kernel.cute_python.lib.barriers import named_arrive, named_sync
from mla_var3.kernel.cute_python.lib.latent import tokens
from mla_var3.kernel.cute_python.lib.latent.consumer import CONSUMERS, EVEN, ODD
from mla_var3.kernel.cute_python.lib.latent.shape import STAGES, TILE_N, Shape
from mla_var3.kernel.cute_python.lib.paged import BOX, EVICT_FIRST, load_panels, partition_boxes
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP

# Named barriers, one for each producer of odd tiles: the even tile of the first pair has been asked for, in both parts.
# With one for both, two places of the code would wait at it, to which synccheck objects.
EVEN_ASKED = 9
EVEN_ASKED_THREADS = 3 * 32  # the producers of the even tiles, and one of the odd ones

# When the odd tile of a block's first pair is asked for: with the even one; once that has been asked for; or, where
# the block has no other pair, once it is there. All blocks of a call start at once, and the memory answers in any order
# what they ask for together, while the first scores wait for one tile.
TOGETHER, ASKED, THERE = range(3)


def shared_loads(shape: Shape, most: int = 2) -> int:
    """How many row tiles of a request form a cluster and load the cache for each other: 2, or 4 if `most` allows; 0
    where that leaves some over."""
    return next((blocks for blocks in (4, 2) if blocks <= most and shape.row_tiles % blocks == 0), 0)


@cute.jit
def init_barriers(
    full: cute.Pointer,  # mbarriers, shared memory: one a panel and stage
    empty: cute.Pointer,  # mbarriers, shared memory: one a part and stage
    shape: cutlass.Constexpr,
    shares: cutlass.Constexpr,
):
    """One thread's work before the block's barrier: `full` waits for bytes, `empty` for the warps of a part's reader,
    in all blocks with `shares`."""
    for i in cutlass.range_constexpr(STAGES * shape.panels):
        cute.arch.mbarrier_init(full + i, 1)
    for i in cutlass.range_constexpr(2 * STAGES):
        cute.arch.mbarrier_init(empty + i, max(shares, 1) * WARPGROUP // 32)


@cute.jit
def load_shared_panels(
    atom: cute.CopyAtom,
    boxes: cute.Tensor,  # TMA, (box, token box, column box, page) of one kv head
    panels: cute.Tensor,  # shared memory, (box, column box, stage)
    full: cute.Pointer,  # mbarriers of the stage, shared memory: one a panel
    token_box: Int32,
    page: Int32,
    rank: Int32,  # of this block in its cluster
    columns: cutlass.Constexpr,  # which column boxes, a tuple
    stage: cutlass.Constexpr,
    blocks: cutlass.Constexpr,  # of the cluster
):
    """`paged.load_panels` by the blocks of a cluster for all: each expects every panel and asks for its share."""
    for i in cutlass.range_constexpr(len(columns)):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + columns[i], BOX * BOX * 2)
    for i in cutlass.range_constexpr(len(columns)):
        if rank == columns[i] % blocks:
            cute.copy(
                atom,
                boxes[None, token_box, columns[i], page],
                panels[None, columns[i], stage],
                tma_bar_ptr=full + columns[i],
                mcast_mask=Int16((1 << blocks) - 1),
                cache_policy=Int64(EVICT_FIRST),
            )


@cute.jit
def guess_page(
    part: Int32,
    split: Int32,
    num_splits: Int32,
    width: Int32,
    shape: cutlass.Constexpr,
    by_tiles: cutlass.Constexpr = False,
) -> Int32:
    """Where in its row of the page table, `width` wide, a part begins if the request fills that row."""
    per_page = shape.page // TILE_N
    tiles = width * per_page
    pairs = ((tiles + 1) // 2 + num_splits - 1) // num_splits
    tile = 2 * split * pairs + part // 2
    if cutlass.const_expr(by_tiles):
        if tiles <= num_splits:
            tile = split
    return cutlass.min(tile, tiles - 1) // per_page


@cute.jit
def produce(
    tma: cute.CopyAtom,
    boxes: cute.Tensor,  # TMA, (box, token box, column box, page)
    panels: cute.Tensor,  # shared memory, (box, column box, stage)
    pages: cute.Tensor,  # (max_pages,) int32, global memory: this request's row of the page table
    full: cute.Pointer,
    empty: cute.Pointer,
    first: Int32,
    end: Int32,
    num_tiles: Int32,
    rank: Int32,
    page_size: cutlass.Constexpr,
    stage: cutlass.Constexpr,
    part: cutlass.Constexpr,  # of the stage
    columns: cutlass.Constexpr,
    shares: cutlass.Constexpr,
    guess: Int32 | None = None,  # an entry of `pages`
    guessed: Int32 | None = None,  # what it holds, asked for earlier
    alone: cutlass.Boolean | None = None,  # not None and true: first and end are tiles, of the even stage
    odd_tile: cutlass.Constexpr = TOGETHER,  # when it is asked for; other than at once, only where `alone` is None
    last_even: cute.Pointer | None = None,  # mbarrier, shared memory: of the even tile's panel that is read last
    source: cutlass.Constexpr = None,  # a `tokens.TokenSource`: other boxes than `boxes`
):
    """One warp keeps one part of one stage filled, for its block or, with `shares`, for all of a cluster: `empty` then
    counts all blocks' consumers. An odd number of tiles ends with the last tile once more: it is masked and its V
    zeroed like any token past the end, and no table entry past the end is read.

    No block leaves while the other may still signal or write it, without a barrier at the end: parts are freed for a
    next pair only, each producer waits for every such signal before it loads that pair, and a block's consumers wait
    for all panels of the last one, whichever block asked for them.
    """
    per_page = page_size // TILE_N
    tiles = Int32(2)  # of a step
    if cutlass.const_expr(alone is not None):
        if alone:
            tiles = Int32(1)
            if cutlass.const_expr(stage == ODD):
                end = first
    for pair in cutlass.range(first, end, unroll=1):
        tile = cutlass.min(tiles * pair + stage, num_tiles - 1)
        if cutlass.const_expr(guess is None):
            page = pages[tile // per_page]
        else:
            page = guessed
            if tile // per_page != guess:
                page = pages[tile // per_page]
        cute.arch.mbarrier_wait(empty, ((pair - first) & 1) ^ 1)
        if cutlass.const_expr(odd_tile != TOGETHER and stage == ODD):
            if pair == first:
                named_sync(EVEN_ASKED + part, EVEN_ASKED_THREADS)
            if cutlass.const_expr(odd_tile == THERE):
                if pair == first and first + 1 == end:
                    cute.arch.mbarrier_wait(last_even, 0)
        if cutlass.const_expr(source is not None):
            tokens.load(source, full, tile % per_page, page, rank)
        elif cutlass.const_expr(shares):
            load_shared_panels(tma, boxes, panels, full, tile % per_page, page, rank, columns, stage, shares)
        else:
            load_panels(tma, boxes, panels, full, tile % per_page, page, columns, stage, EVICT_FIRST)
        if cutlass.const_expr(odd_tile != TOGETHER and stage == EVEN):
            if pair == first:
                for waiting in cutlass.range_constexpr(2):
                    named_arrive(EVEN_ASKED + waiting, EVEN_ASKED_THREADS)


@cute.jit
def produce_parts(
    tma: cute.CopyAtom,
    cache: cute.Tensor,  # TMA, (page, width, num_pages) of one kv head
    kv_base: cute.Pointer,  # shared memory: the first stage
    pages: cute.Tensor,  # (max_pages,) int32, global memory: this request's row of the page table
    full: cute.Pointer,
    empty: cute.Pointer,
    first: Int32,
    end: Int32,
    num_tiles: Int32,
    warp: Int32,  # of the block; the first ones are the consumers'
    row_tile: Int32,
    shape: cutlass.Constexpr,
    shares: cutlass.Constexpr,
    guess: Int32 | None = None,
    guessed: Int32 | None = None,
    alone: cutlass.Boolean | None = None,
    odd_tile: cutlass.Constexpr = TOGETHER,
    by_tokens: cutlass.Constexpr = None,  # of one kv head (`tokens.TokenBoxes`): tiles come in boxes of whole tokens
):
    """What the producing warpgroup does: one warp for each part of each stage (`produce`)."""
    boxes, panels = partition_boxes(tma, cache, kv_base, shape, STAGES)
    last_even = full + shape.part(EVEN, ODD)[-1]
    for part in cutlass.range_constexpr(2 * STAGES):
        if warp == CONSUMERS // 32 + part:
            columns = shape.part(part // 2, part % 2)
            source = None
            if cutlass.const_expr(by_tokens is not None):
                source = tokens.TokenSource(by_tokens, kv_base, shape, part // 2, part % 2, shares, tma, boxes, panels)
            produce(
                tma, boxes, panels, pages, full + part // 2 * shape.panels, empty + part, first, end, num_tiles,
                row_tile % max(shares, 1), shape.page, part // 2, part % 2, columns, shares, guess, guessed,
                alone, odd_tile, last_even, source,
            )  # fmt: skip
