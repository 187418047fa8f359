"""A producer whose first loads leave early: what `produce` does, in fewer and warmer instructions.

The first tile of a call arrives as soon as it is asked for, and until then nothing else happens. What stood in front of
it in version 9, by stamps on an H200: 0.6 us for barriers that each lane of a warp made one of (an mbarrier's address
is a uniform register, so ptxas makes a loop over the lanes of it), and as long again for the page, which ptxas waited
for in front of the barriers, to have it in a uniform register too.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from mla_var3.kernel.cute_python.lib.swapped import ring


@cute.jit
def make_barriers(tma: cute.CopyAtom, full: cute.Pointer, empty: cute.Pointer, slots: cutlass.Constexpr,
                  releases: cutlass.Constexpr):  # fmt: skip
    """Makes the ring's barriers; by one lane of one warp. releases: arrivals that free a slot."""
    cpasync.prefetch_descriptor(tma)
    with cute.arch.elect_one():
        for i in cutlass.range_constexpr(slots):
            cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init(empty + i, releases)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()


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
    slots: cutlass.Constexpr,
    per_page: cutlass.Constexpr,  # tiles
    policy: cutlass.Constexpr,  # L2 policy
    tokens: cutlass.Constexpr,  # of a box
    spans: cutlass.Constexpr,  # panels of a tile that are loaded together, a tuple
):
    """Tiles first .. end - 1, by one warp. Of panels that are loaded together, the first `tokens` of all come first.

    Loops over panels stay loops: unrolled, each panel of the first tile waits for its instructions.
    """
    each = cutlass.const_expr(ring.BOX // tokens)
    if first < end:
        boxes, places = ring.partition(tma, cache, base, slots, tokens)
        slot, phase = Int32(0), Int32(0)
        if first // per_page != guess:
            page = pages[first // per_page]
        for tile in cutlass.range(first, end, unroll=1):
            # Asked for a tile ahead, so that its latency is not in the way. The last one asks for itself again.
            following = pages[cutlass.min(tile + 1, end - 1) // per_page]
            token_box = tile % per_page * each
            panel = Int32(0)
            for span in cutlass.range_constexpr(len(spans)):
                start = slot
                for i in cutlass.range(spans[span], unroll=1):
                    cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
                    # One lane is to be elected for the whole warp, not one for each group that left the wait together.
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + slot, ring.SLOT_BYTES)
                    if cutlass.const_expr(each == 1):
                        cute.copy(
                            tma, boxes[None, token_box, panel + i, kv_head, page], places[None, 0, slot],
                            tma_bar_ptr=full + slot, cache_policy=Int64(policy),
                        )  # fmt: skip
                    slot, phase = ring.at(slot, phase, 1, slots)
                if cutlass.const_expr(each > 1):
                    for row in cutlass.range_constexpr(each):
                        place = start
                        for i in cutlass.range(spans[span], unroll=1):
                            cute.copy(
                                tma, boxes[None, token_box + row, panel + i, kv_head, page], places[None, row, place],
                                tma_bar_ptr=full + place, cache_policy=Int64(policy),
                            )  # fmt: skip
                            place, _ = ring.at(place, Int32(0), 1, slots)
                panel += spans[span]
            page = following
