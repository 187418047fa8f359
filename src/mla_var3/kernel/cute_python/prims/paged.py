"""Reading a paged cache with TMA, in boxes of up to 64 tokens by 64 columns, and rows that must not be believed."""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from mla_var3.kernel.cute_python.prims.wgmma import k_major_layout

PANEL = 64  # columns of a box: 128 bytes, one row of the shared memory swizzle
TOKENS = 64  # of a KV tile
PANEL_ELEMENTS = TOKENS * PANEL
PANEL_BYTES = 2 * PANEL_ELEMENTS
CHUNK = 8  # 16-bit elements in 16 bytes, which strides of a cache are multiples of
SMALLEST_BOX = 16  # tokens: below it a panel would take more TMA loads than it is worth

# L2 policy as createpolicy encodes it; CUTLASS passes the same value to its TMA loads.
EVICT_FIRST = 0x12F0000000000000


def box_tokens(page: int) -> int:
    """Tokens of a TMA box of a cache with pages of `page` tokens: a tile's boxes and a page's cover both without a
    rest. 0: such boxes would be too small, and rows are to be gathered (`prims.gather`)."""
    tokens = math.gcd(page, TOKENS)
    return tokens if tokens >= SMALLEST_BOX else 0


def page_stride(kv_cache: cute.Tensor) -> Any:
    """Elements from one page of a (num_pages, page, h_kv, width) cache to the next."""
    num_pages, page, h_kv, width = kv_cache.shape
    stride = kv_cache.stride[0]
    if isinstance(stride, int):
        return stride
    # What a tensor says of the stride of a mode of size 1 means nothing.
    return cute.assume(cutlass.select_(num_pages > 1, stride, Int64(page * h_kv * width)), divby=CHUNK)


def make_page_tma(kv_cache: cute.Tensor, multicast: bool = False, tokens: int = TOKENS):
    """(TMA atom, tensor) for boxes of the cache, `tokens` x 64 columns.

    kv_cache: (num_pages, page, h_kv, width), global memory, contiguous but for the stride between pages. The TMA
    tensor has modes (page, width, h_kv, num_pages), so a box is named by (token box, column box, head, page). A
    coordinate past the end of a mode reads zeros. multicast: boxes may go to several CTAs of a cluster.
    """
    num_pages, page, h_kv, width = kv_cache.shape
    view = cute.make_tensor(
        kv_cache.iterator,
        cute.make_layout((page, width, h_kv, num_pages), stride=(h_kv * width, 1, width, page_stride(kv_cache))),
    )
    layout = k_major_layout(kv_cache.element_type, (tokens, PANEL))
    copy = cpasync.CopyBulkTensorTileG2SMulticastOp() if multicast else cpasync.CopyBulkTensorTileG2SOp()
    # One multicast part: a box goes whole to each CTA.
    return cpasync.make_tiled_tma_atom(copy, view, layout, (tokens, PANEL), 1)


def boxes_of(tma: cute.CopyAtom, cache: cute.Tensor, panels: cute.Tensor, tokens: int = TOKENS):
    """(boxes, places) of `cute.copy`: the cache as (box, token box, column box, kv head, page), and panels in shared
    memory, (64 tokens, 64 columns, panels...), as (box, box of the panel, panels...)."""
    places = cute.flat_divide(panels, (tokens, PANEL))
    boxes = cute.flat_divide(cache, (tokens, PANEL))
    places, boxes = cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(places, 0, 2), cute.group_modes(boxes, 0, 2)
    )
    return boxes, places


@cute.jit
def load_box(tma: cute.CopyAtom, box: cute.Tensor, place: cute.Tensor, barrier: cute.Pointer, blocks: int = 1):
    """One TMA load; its bytes arrive at an mbarrier, of a cluster of several `blocks` at that of each CTA."""
    if cutlass.const_expr(blocks == 1):
        cute.copy(tma, box, place, tma_bar_ptr=barrier, cache_policy=Int64(EVICT_FIRST))
    else:
        mask = Int16((1 << blocks) - 1)
        cute.copy(tma, box, place, tma_bar_ptr=barrier, mcast_mask=mask, cache_policy=Int64(EVICT_FIRST))


def entry_of(tile: Int32, length: Int32, page: int) -> Int32:
    """Where in a request's row of the page table the page of a tile is; where a tile is several boxes, that of this
    lane's box, lane i having box i. Of boxes past the end of the request it is the last page: entries behind it may
    hold anything. length: of the request, at least 1."""
    box = box_tokens(page)
    if box == TOKENS:
        return tile // (page // TOKENS)
    token = tile * TOKENS + cute.arch.lane_idx() % (TOKENS // box) * box
    return cutlass.min(token, length - 1) // page


def pages_of(found: Int32, page: int) -> list[Int32]:
    """The pages of a tile's boxes, in all lanes. found: at this lane's `entry_of`."""
    box = box_tokens(page)
    return [found] if box == TOKENS else [cute.arch.shuffle_sync(found, i) for i in range(TOKENS // box)]


def load_panel(
    tma: cute.CopyAtom,
    boxes: cute.Tensor,  # of `boxes_of`
    places: cute.Tensor,  # of `boxes_of`, one panel: (box, box of the panel)
    tile: Int32,
    panel: Any,  # 64 columns of the cache
    pages: list[Int32],  # of `pages_of`
    page: int,
    barrier: cute.Pointer,
    blocks: int = 1,
):
    """The TMA loads of a panel of a tile."""
    for i, of_box in enumerate(pages):
        if len(pages) == 1:
            at = tile % (page // TOKENS)
        else:
            box = box_tokens(page)
            at = (tile * TOKENS + i * box) % page // box
        load_box(tma, boxes[None, at, panel, of_box], places[None, i], barrier, blocks)


@cute.jit
def zero_rows(panel: cute.Pointer, first_row: Int32, thread: Int32, panels: cutlass.Constexpr):
    """Zeroes rows first_row..63 (all when it is negative) of some 64-token panels behind each other: what a page holds
    past the end of a request may be NaN, and 0 · NaN is NaN.

    The swizzle only permutes 16-byte chunks within a row, so whole rows need no address arithmetic. The caller fences
    (async proxy) and joins the warpgroup before the next MMA reads them. thread: 0..127.
    """
    layout = cute.make_layout((8, 8, TOKENS, panels), stride=(1, 8, PANEL, PANEL_ELEMENTS))
    view = cute.make_tensor(panel, layout)
    zeros = cute.make_rmem_tensor(8, panel.dtype)
    zeros.fill(0.0)
    for row in cutlass.range(cutlass.max(first_row, 0) + thread // 8, TOKENS, 16, unroll=1):
        for i in cutlass.range_constexpr(panels):
            cute.autovec_copy(zeros, view[None, thread % 8, row, i])
