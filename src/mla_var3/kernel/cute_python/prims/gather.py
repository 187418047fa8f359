"""Gathering tokens of a paged cache whose pages no TMA box fits: cp.async, 16 bytes a lane, into panels of 64
tokens by 64 columns that lie in shared memory as TMA would have laid them.

Eight lanes copy a row of a panel, 128 bytes, so a warp copies four rows an instruction. A lane looks up the page of one
token and passes it on to those that copy its row. MMAs read panels through the async proxy, which does
not see what cp.async has written before a fence of the lane that wrote it: `publish`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from mla_var3.kernel.cute_python.prims.paged import CHUNK, PANEL, page_stride

LANES = 8  # on a row of a panel
ROWS = 32 // LANES  # of a panel, an instruction


def entry_of(token: Int32, length: Int32, page: int) -> Int32:
    """Where in a request's row of the page table a token's page is; of tokens past the end of the request, the last
    one's: entries behind it may hold anything. length: of the request, at least 1."""
    return cutlass.min(token, length - 1) // page


@cute.jit
def source_of(
    cache: cute.Tensor,  # (num_pages, page, h_kv, width), global memory
    found: Int32,  # the page of token first + lane, at its `entry_of`
    first: Int32,
    row: Int32,  # a multiple of 4
    length: Int32,
    kv_head: Int32,
) -> Int64:
    """Address from which this lane copies of tokens first + row .. first + row + 3. Tokens past the end of the request
    are the last one again."""
    _, page, h_kv, width = cache.shape
    lane = cute.arch.lane_idx()
    holder = row + lane // LANES
    in_page = (cutlass.min(first + holder, length - 1) % page * h_kv + kv_head) * width + lane % LANES * CHUNK
    offset = Int64(cute.arch.shuffle_sync(found, holder)) * page_stride(cache) + in_page
    return cache.iterator.toint() + cache.element_type.width // 8 * offset


@cute.jit
def copy_rows(source: Int64, column: Int32, width: cutlass.Constexpr, panel: cute.Pointer, first_row: Int32):
    """Starts a warp's copy of four rows of a panel. source: of `source_of`; column: of the cache, which is `width`
    columns wide, with which the panel begins; first_row: of the panel, a multiple of 4. Where the cache ends inside the
    panel, its last columns are read again: behind them there may be no memory."""
    lane, dtype = cute.arch.lane_idx(), panel.dtype
    if cutlass.const_expr(width % PANEL != 0):
        column = column - cutlass.max(column + (lane % LANES + 1) * CHUNK - width, 0)
    row = first_row + lane // LANES
    place = panel + cute.assume(row * PANEL + ((lane % LANES) ^ (row % 8)) * CHUNK, divby=CHUNK)
    address = cute.make_ptr(dtype, source + dtype.width // 8 * column, cute.AddressSpace.gmem, assumed_align=16)
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128
    )  # fmt: skip
    chunk = cute.make_layout(CHUNK)
    cute.copy(atom, cute.make_tensor(address, chunk), cute.make_tensor(place.align(16), chunk))


@cute.jit
def publish(barriers: cutlass.Constexpr):
    """Makes copies of this warp visible to MMAs, each lane having waited for its own, and arrives once at each of some
    mbarriers."""
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for barrier in barriers:
            cute.arch.mbarrier_arrive(barrier)
