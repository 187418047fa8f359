"""The warp that fills the ring with the tiles of a work item."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from mla_var3.kernel.cute_python.lib.swapped import ring


@cute.jit
def make_barriers(tma: cute.CopyAtom, full: cute.Pointer, empty: cute.Pointer, slots: cutlass.Constexpr,
                  releases: cutlass.Constexpr, lane: Int32):  # fmt: skip
    """Makes the ring's barriers; by one warp. releases: arrivals that free a slot."""
    cpasync.prefetch_descriptor(tma)
    for i in cutlass.range_constexpr(-(-slots // 32)):
        if lane + 32 * i < slots:
            cute.arch.mbarrier_init(full + (lane + 32 * i), 1)
            cute.arch.mbarrier_init(empty + (lane + 32 * i), releases)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()


@cute.jit
def first_page(pages: cute.Tensor, split: Int32, num_splits: Int32, per_page: cutlass.Constexpr):
    """(page index at which a split starts if the request fills its row of the page table, the page there): can be read
    beside the length instead of after it."""
    width = cute.size(pages)
    guess = split * (width * per_page) // num_splits // per_page
    page = Int32(0)
    if guess < width:
        page = pages[guess]
    return guess, page


@cute.jit
def produce(
    tma: cute.CopyAtom,
    cache: cute.Tensor,
    pages: cute.Tensor,  # (max_pages,) int32, global memory: the request's row of the page table
    guess: Int32,
    page: Int32,  # of page index `guess`
    kv_head: Int32,
    first: Int32,
    end: Int32,
    base: cute.Pointer,
    full: cute.Pointer,
    empty: cute.Pointer,
    order: cutlass.Constexpr,  # column boxes in the order of the ring
    slots: cutlass.Constexpr,
    per_page: cutlass.Constexpr,
    policy: cutlass.Constexpr,
):
    """Tiles first .. end - 1, panel by panel, each as soon as its slot is free. By one warp."""
    if first < end:
        boxes, memory = ring.partition(tma, cache, base, slots)
        slot, phase = Int32(0), Int32(0)
        if first // per_page != guess:
            page = pages[first // per_page]
        for tile in cutlass.range(first, end, unroll=1):
            # Asked for a tile ahead, so that its latency is not in the way. The last one asks for itself again.
            following = pages[cutlass.min(tile + 1, end - 1) // per_page]
            ring.fill_tile(
                tma, boxes, memory, full, empty, tile % per_page, kv_head, page, slot, phase, order, slots, policy
            )  # fmt: skip
            slot, phase = ring.at(slot, phase, len(order), slots)
            page = following
