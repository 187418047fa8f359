"""Reading a paged cache: with TMA, in boxes of up to 64 tokens by 64 columns, or, where no box fits its pages, row by
row; and rows that must not be believed.

Rows are gathered with cp.async, 16 bytes a lane, into panels of 64 tokens by 64 columns that lie in shared memory as
TMA would have laid them. Eight lanes copy a row of a panel, 128 bytes, so a warp copies four rows an instruction. A
lane looks up the page of one token and passes it on to those that copy its row. MMAs read panels through the async
proxy, which does not see what cp.async has written before a fence of the lane that wrote it: `publish_rows`.
"""

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
ROW_LANES = 8  # on a row of a panel that is gathered
ROWS = 32 // ROW_LANES  # of a panel, an instruction

# L2 policy as createpolicy encodes it; CUTLASS passes the same value to its TMA loads.
EVICT_FIRST = 0x12F0000000000000


def box_tokens(page: int) -> int:
    """Tokens of a TMA box of a cache with pages of `page` tokens: a tile's boxes and a page's cover both without a
    rest. 0: such boxes would be too small, and rows are to be gathered (`row_source_of`)."""
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


# ------------------------------------------------------------------------------------------------ rows, gathered
def row_entry_of(token: Int32, length: Int32, page: int) -> Int32:
    """Where in a request's row of the page table a token's page is; of tokens past the end of the request, the last
    one's: entries behind it may hold anything. length: of the request, at least 1."""
    return cutlass.min(token, length - 1) // page


@cute.jit
def row_source_of(
    cache: cute.Tensor,  # (num_pages, page, h_kv, width), global memory
    found: Int32,  # the page of token first + lane, at its `row_entry_of`
    first: Int32,
    row: Int32,  # a multiple of 4
    length: Int32,
    kv_head: Int32,
) -> Int64:
    """Address from which this lane copies of tokens first + row .. first + row + 3. Tokens past the end of the request
    are the last one again."""
    _, page, h_kv, width = cache.shape
    lane = cute.arch.lane_idx()
    holder = row + lane // ROW_LANES
    in_page = (cutlass.min(first + holder, length - 1) % page * h_kv + kv_head) * width + lane % ROW_LANES * CHUNK
    offset = Int64(cute.arch.shuffle_sync(found, holder)) * page_stride(cache) + in_page
    return cache.iterator.toint() + cache.element_type.width // 8 * offset


@cute.jit
def copy_rows(source: Int64, column: Int32, width: cutlass.Constexpr, panel: cute.Pointer, first_row: Int32):
    """Starts a warp's copy of four rows of a panel. source: of `row_source_of`; column: of the cache, which is `width`
    columns wide, with which the panel begins; first_row: of the panel, a multiple of 4. Where the cache ends inside the
    panel, its last columns are read again: behind them there may be no memory."""
    lane, dtype = cute.arch.lane_idx(), panel.dtype
    if cutlass.const_expr(width % PANEL != 0):
        column = column - cutlass.max(column + (lane % ROW_LANES + 1) * CHUNK - width, 0)
    row = first_row + lane // ROW_LANES
    place = panel + cute.assume(row * PANEL + ((lane % ROW_LANES) ^ (row % 8)) * CHUNK, divby=CHUNK)
    address = cute.make_ptr(dtype, source + dtype.width // 8 * column, cute.AddressSpace.gmem, assumed_align=16)
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128
    )  # fmt: skip
    chunk = cute.make_layout(CHUNK)
    cute.copy(atom, cute.make_tensor(address, chunk), cute.make_tensor(place.align(16), chunk))


@cute.jit
def publish_rows(barriers: cutlass.Constexpr):
    """Makes copies of this warp visible to MMAs, each lane having waited for its own, and arrives once at each of some
    mbarriers."""
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for barrier in barriers:
            cute.arch.mbarrier_arrive(barrier)


# ------------------------------------------------------------------------------------------------ rows past the end
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
