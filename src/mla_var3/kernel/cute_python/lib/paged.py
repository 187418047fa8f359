"""Reading a paged latent cache with TMA: one box of 64 tokens x 64 columns each, and rows that must not be believed."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from mla_var3.kernel.cute_python.lib.latent.shape import TILE_N
from mla_var3.kernel.cute_python.lib.wgmma import k_major_layout, smem_view

BOX = TILE_N  # tokens and columns of one TMA box: a tile of tokens, one panel of columns

# L2 policy as createpolicy encodes it; CUTLASS passes the same value to its TMA loads.
EVICT_FIRST = 0x12F0000000000000


def make_page_tma(kv_cache: cute.Tensor, shared: bool = False, tokens: int = BOX) -> tuple[cute.CopyAtom, cute.Tensor]:
    """TMA atom and tensor for boxes of the cache.

    kv_cache: (num_pages, page, h_kv, width), global memory, contiguous. The TMA tensor has modes
    (page, width, h_kv, num_pages), so a box is named by (token box, column box, head, page). A coordinate past the
    end of a mode reads zeros. shared: boxes may go to several blocks of a cluster. tokens: of a box.
    """
    num_pages, page, h_kv, width = kv_cache.shape
    view = cute.make_tensor(
        kv_cache.iterator,
        cute.make_layout((page, width, h_kv, num_pages), stride=(h_kv * width, 1, width, page * h_kv * width)),
    )
    layout = k_major_layout(kv_cache.element_type, (tokens, BOX))
    copy = cpasync.CopyBulkTensorTileG2SMulticastOp() if shared else cpasync.CopyBulkTensorTileG2SOp()
    # One multicast part: a box goes whole to each block.
    atom, tensor = cpasync.make_tiled_tma_atom(copy, view, layout, (tokens, BOX), 1)
    return atom, tensor


@cute.jit
def load_panels(
    atom: cute.CopyAtom,
    boxes: cute.Tensor,  # TMA, (box, token box, column box, page) of one kv head
    panels: cute.Tensor,  # shared memory, (box, column box, stage)
    full: cute.Pointer,  # mbarriers of the stage, shared memory: one a panel
    token_box: Int32,
    page: Int32,
    columns: cutlass.Constexpr,  # which column boxes, a tuple
    stage: cutlass.Constexpr,
    policy: cutlass.Constexpr,  # L2 policy, or None
):
    """One warp loads some column boxes of a 64-token tile; each one's mbarrier completes a phase when it has landed."""
    for i in cutlass.range_constexpr(len(columns)):
        barrier = full + columns[i]
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, BOX * BOX * 2)
        source = boxes[None, token_box, columns[i], page]
        target = panels[None, columns[i], stage]
        if cutlass.const_expr(policy is None):
            cute.copy(atom, source, target, tma_bar_ptr=barrier)
        else:
            cute.copy(atom, source, target, tma_bar_ptr=barrier, cache_policy=Int64(policy))


@cute.jit
def partition_boxes(
    tma: cute.CopyAtom,
    cache: cute.Tensor,  # TMA, (page, width, num_pages) of one kv head
    kv_base: cute.Pointer,  # shared memory: the first stage
    shape: cutlass.Constexpr,
    num_stages: cutlass.Constexpr,
):
    """The cache of one kv head as TMA boxes (box, token box, column box, page), and the stages' panels for them."""
    layout = k_major_layout(kv_base.dtype, (TILE_N, shape.k + shape.p, num_stages))
    stages = smem_view(kv_base, 0, layout)
    panels = cute.flat_divide(stages, (BOX, BOX))  # (64, 64, 1, panels, stages)
    boxes = cute.flat_divide(cache, (BOX, BOX))  # (64, 64, page / 64, panels, pages)
    panels, boxes = cpasync.tma_partition(
        tma,
        0,
        cute.make_layout(1),
        cute.group_modes(panels[None, None, 0, None, None], 0, 2),
        cute.group_modes(boxes, 0, 2),
    )
    return boxes, panels


@cute.jit
def zero_rows(
    tile: cute.Pointer,  # shared memory, 16-bit: 64-token panels of 64 columns, swizzled within rows of 128 bytes
    first_row: Int32,
    thread: Int32,  # 0..127, one warpgroup
    columns: cutlass.Constexpr,  # which panels, a tuple
    places: cutlass.Constexpr = None,  # layout (8 elements, 8 chunks, row, panel), where panels lie otherwise
):
    """Zeroes rows first_row..63 (all when it is negative) of some panels: what a page holds past the end may be NaN.

    The swizzle only permutes 16-byte chunks within a row, so whole rows need no address arithmetic. The caller fences
    (async proxy) and joins the warpgroup before the next MMA reads the tile.
    """
    if cutlass.const_expr(places is None):
        places = cute.make_layout((8, 8, BOX, max(columns) + 1), stride=(1, 8, BOX, BOX * BOX))
    view = cute.make_tensor(tile, places)
    zeros = cute.make_rmem_tensor(8, tile.dtype)
    zeros.fill(0.0)
    for row in cutlass.range(cutlass.max(first_row, 0) + thread // 8, BOX, 16, unroll=1):
        for i in cutlass.range_constexpr(len(columns)):
            cute.autovec_copy(zeros, view[None, thread % 8, row, columns[i]])
