"""Producers that depend on nothing of their block: each warp makes the barriers of its own part of a stage and asks for
its first panels as soon as the page and the length are known.

The first tiles of a call arrive as soon as they are asked for, and until then nothing else happens. So what is in front
of the first load is short, none of it waits for what it does not need, and loops over panels stay loops: the first
tiles wait for each line of code.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from mla_var3.kernel.cute_python.lib.latent.loads import BOTH
from mla_var3.kernel.cute_python.lib.latent.shape import STAGES, TILE_N
from mla_var3.kernel.cute_python.lib.paged import BOX, EVICT_FIRST, partition_boxes
from mla_var3.kernel.cute_python.lib.split.divide import divide
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP


@cute.jit
def part_of(num_tiles: Int32, split: Int32, num_splits: Int32, inverse: Int32):
    """(first, end, alone) of a block's part: pairs of tiles, or, `alone`, tiles, of which it has one or none."""
    num_pairs = (num_tiles + 1) >> 1
    each = divide(num_pairs + num_splits - 1, inverse)
    first = cutlass.min(split * each, num_pairs)
    end = cutlass.min(first + each, num_pairs)
    alone = num_tiles <= num_splits
    if alone:
        first = cutlass.min(split, num_tiles)
        end = cutlass.min(split + 1, num_tiles)
    return first, end, alone


@cute.jit
def guess_page(stage: Int32, split: Int32, num_splits: Int32, inverse: Int32, width: Int32, shape: cutlass.Constexpr):
    """Where in its row of the page table, `width` wide, a part begins if the request fills that row."""
    per_page = shape.page // TILE_N
    tiles = width * per_page
    first, _, alone = part_of(tiles, split, num_splits, inverse)
    tile = 2 * first + stage
    if alone:
        tile = first
    return cutlass.min(tile, tiles - 1) // per_page


@cute.jit
def column_box(i: Int32, half: Int32, shape: cutlass.Constexpr) -> Int32:
    """Column box i of `Shape.part`: those of a half of V, then the rope's."""
    own = cutlass.const_expr(len(shape.left))
    return cutlass.select_(i < own, half * own + i, Int32(shape.rope))


@cute.jit
def boxes_of(part: Int32, shape: cutlass.Constexpr) -> Int32:
    """How many column boxes a part has: a half of V, and the rope's box where the other consumer reads P there."""
    return Int32(len(shape.left)) + ((part >> 1) ^ (part & 1))


@cute.jit
def make_barriers(
    tma: cute.CopyAtom,
    full: cute.Pointer,  # mbarriers, shared memory: one a panel and stage
    empty: cute.Pointer,  # mbarriers, shared memory: one a part and stage
    part: Int32,  # of this warp
    shape: cutlass.Constexpr,
    shares: cutlass.Constexpr,
):
    """One warp's barriers: those that `loads.init_barriers` makes for all parts."""
    cpasync.prefetch_descriptor(tma)
    stage = full + (part >> 1) * shape.panels
    own = cutlass.const_expr(len(shape.left))
    with cute.arch.elect_one():
        cute.arch.mbarrier_init(empty + part, (2 if shares else 1) * WARPGROUP // 32)
        for i in cutlass.range_constexpr(own):
            cute.arch.mbarrier_init(stage + (part & 1) * own + i, 1)
        if boxes_of(part, shape) > own:
            cute.arch.mbarrier_init(stage + shape.rope, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()


@cute.jit
def ask(
    tma: cute.CopyAtom,
    cache: cute.Tensor,  # TMA, (page, width, num_pages) of one kv head
    kv_base: cute.Pointer,  # shared memory: the first stage
    pages: cute.Tensor,  # (max_pages,) int32, global memory: this request's row of the page table
    full: cute.Pointer,
    first: Int32,
    end: Int32,
    num_tiles: Int32,
    alone: cutlass.Boolean,  # first and end are tiles, of the even stage
    part: Int32,  # of this warp, 2 · stage + half
    rank: Int32,  # of this block in its cluster of two
    guess: Int32,  # an entry of `pages`
    page: Int32,  # what it holds
    shape: cutlass.Constexpr,
    shares: cutlass.Constexpr,
):
    """The first round of `loads.produce`, for which nothing is to be free: a warp asks for its part of the first pair.

    One loop for all parts, and not a copy for each: a turn of it takes longer, but the code is fetched once, and before
    the length is there. (As the loop of all pairs it cost 1 to 4 %: the last panel of a part left later.)
    """
    boxes, panels = partition_boxes(tma, cache, kv_base, shape, STAGES)
    per_page = shape.page // TILE_N
    stage, half = part >> 1, part & 1
    own, count = cutlass.const_expr(len(shape.left)), boxes_of(part, shape)
    barriers = full + stage * shape.panels
    tile = 2 * first + stage
    wanted = first < end
    if alone:
        tile = first
        wanted = wanted & (stage == 0)
    if wanted:
        tile = cutlass.min(tile, num_tiles - 1)
        if tile // per_page != guess:
            page = pages[tile // per_page]
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(own):
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + (half * own + i), BOX * BOX * 2)
            if count > own:
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + shape.rope, BOX * BOX * 2)
        start, step = Int32(0), Int32(1)
        if cutlass.const_expr(shares):
            start, step = rank ^ half, Int32(2)
        for i in cutlass.range(start, count, step, unroll=1):
            column = column_box(i, half, shape)
            source, target = boxes[None, tile % per_page, column, page], panels[None, column, stage]
            if cutlass.const_expr(shares):
                cute.copy(
                    tma, source, target, tma_bar_ptr=barriers + column, mcast_mask=Int16(BOTH),
                    cache_policy=Int64(EVICT_FIRST),
                )  # fmt: skip
            else:
                cute.copy(tma, source, target, tma_bar_ptr=barriers + column, cache_policy=Int64(EVICT_FIRST))
