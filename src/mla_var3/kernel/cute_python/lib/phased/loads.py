"""Filling the two stages, by one block for itself or by the two blocks of a cluster for both."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from mla_var3.kernel.cute_python.lib.latent.shape import TILE_N
from mla_var3.kernel.cute_python.lib.paged import BOX, EVICT_FIRST, load_panels
from mla_var3.kernel.cute_python.lib.wgmma import k_major_layout

BOTH = 0b11  # multicast mask of a cluster's two blocks


def make_shared_page_tma(kv_cache: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
    """`paged.make_page_tma` for boxes that go to both blocks of a cluster."""
    num_pages, page, h_kv, width = kv_cache.shape
    view = cute.make_tensor(
        kv_cache.iterator,
        cute.make_layout((page, width, h_kv, num_pages), stride=(h_kv * width, 1, width, page * h_kv * width)),
    )
    layout = k_major_layout(kv_cache.element_type, (BOX, BOX))
    # One multicast part: a box goes whole to each block, and the blocks take turns in asking for boxes.
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SMulticastOp(), view, layout, (BOX, BOX), 1)


@cute.jit
def load_shared_panels(
    atom: cute.CopyAtom,
    boxes: cute.Tensor,  # TMA, (box, token box, column box, page) of one kv head
    panels: cute.Tensor,  # shared memory, (box, column box, stage)
    full: cute.Pointer,  # mbarriers of the stage, shared memory: one a panel
    token_box: Int32,
    page: Int32,
    rank: Int32,  # of this block in its cluster of two
    columns: cutlass.Constexpr,  # which column boxes, a tuple
    stage: cutlass.Constexpr,
):
    """`paged.load_panels` by two blocks for both: each expects every panel and asks for every second one."""
    for i in cutlass.range_constexpr(len(columns)):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + columns[i], BOX * BOX * 2)
    for i in cutlass.range_constexpr(len(columns)):
        if rank == columns[i] % 2:
            cute.copy(
                atom,
                boxes[None, token_box, columns[i], page],
                panels[None, columns[i], stage],
                tma_bar_ptr=full + columns[i],
                mcast_mask=Int16(BOTH),
                cache_policy=Int64(EVICT_FIRST),
            )


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
    columns: cutlass.Constexpr,
    shares: cutlass.Constexpr,
):
    """`paged.produce`, for a block alone or, with `shares`, for both of a cluster: `empty` then counts both blocks'
    consumers.

    No block leaves while the other may still signal or write it, without a barrier at the end: parts are freed for a
    next pair only, each producer waits for every such signal before it loads that pair, and a block's consumers wait
    for all panels of the last one, whichever block asked for them.
    """
    per_page = page_size // TILE_N
    for pair in cutlass.range(first, end, unroll=1):
        tile = cutlass.min(2 * pair + stage, num_tiles - 1)
        page = pages[tile // per_page]
        cute.arch.mbarrier_wait(empty, ((pair - first) & 1) ^ 1)
        if cutlass.const_expr(shares):
            load_shared_panels(tma, boxes, panels, full, tile % per_page, page, rank, columns, stage)
        else:
            load_panels(tma, boxes, panels, full, tile % per_page, page, columns, stage, EVICT_FIRST)
