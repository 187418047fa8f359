"""What producers do ahead of their first load, without waiting for the rest of their block: a warp makes the barriers
of its own part of a stage, and part and page are found without a division.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from mla_var3.kernel.cute_python.lib.latent.shape import TILE_N
from mla_var3.kernel.cute_python.lib.split.divide import part_of
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP


@cute.jit
def pairs_of(
    num_tiles: Int32,
    split: Int32,
    num_splits: Int32,
    inverse: Int32,
    singles: cutlass.Constexpr = True,  # parts may be single tiles
):
    """(first, end, alone) of a block's part: pairs of tiles, or, `alone`, tiles, of which it has one or none; None for
    `alone` where it is never so."""
    first, end = part_of((num_tiles + 1) >> 1, split, num_splits, inverse)
    alone = None
    if cutlass.const_expr(singles):
        alone = num_tiles <= num_splits
        if alone:
            first = cutlass.min(split, num_tiles)
            end = cutlass.min(split + 1, num_tiles)
    return first, end, alone


@cute.jit
def guess_page(
    stage: Int32,
    split: Int32,
    num_splits: Int32,
    inverse: Int32,
    width: Int32,
    shape: cutlass.Constexpr,
    singles: cutlass.Constexpr = True,  # as for `pairs_of`
):
    """Where in its row of the page table, `width` wide, a part begins if the request fills that row."""
    per_page = shape.page // TILE_N
    tiles = width * per_page
    first, _, alone = pairs_of(tiles, split, num_splits, inverse, singles)
    tile = 2 * first + stage
    if cutlass.const_expr(singles):
        if alone:
            tile = first
    return cutlass.min(tile, tiles - 1) // per_page


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
        cute.arch.mbarrier_init(empty + part, max(shares, 1) * WARPGROUP // 32)
        for i in cutlass.range_constexpr(own):
            cute.arch.mbarrier_init(stage + (part & 1) * own + i, 1)
        if (part >> 1) != (part & 1):  # the part with the rope's box (`Shape.part`)
            cute.arch.mbarrier_init(stage + shape.rope, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()
