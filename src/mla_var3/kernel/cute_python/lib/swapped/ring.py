"""A ring of 64-token x 64-column panels of a paged cache, filled by TMA ahead of the tiles that are computed.

A slot is freed panel by panel, so the ring always holds what is being worked on and, in all the rest of it, bytes on
their way: that is what keeps the memory busy. Tiles follow each other in the ring without gaps, over the work items of
a block too; a tile's place is (slot, phase) of its first panel.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from mla_var3.kernel.cute_python.lib.wgmma import k_major_layout, smem_view

BOX = 64
SLOT_ELEMENTS = BOX * BOX
SLOT_BYTES = 2 * SLOT_ELEMENTS


def at(slot: Int32, phase: Int32, offset: int, slots: int) -> tuple[Int32, Int32]:
    """(slot, phase) `offset` panels further on; offset < slots."""
    moved = slot + offset
    wrapped = Int32(moved >= slots)
    return moved - wrapped * slots, phase ^ wrapped


@cute.jit
def partition(
    tma: cute.CopyAtom,
    cache: cute.Tensor,  # TMA, (page, width, h_kv, num_pages)
    base: cute.Pointer,  # shared memory: the ring
    slots: cutlass.Constexpr,
    tokens: cutlass.Constexpr = BOX,  # of a box
):
    """(TMA boxes (box, token box, column box, kv head, page), slots (box, box of the slot, slot)) of `cute.copy`."""
    ring = smem_view(base, 0, k_major_layout(base.dtype, (BOX, BOX, slots)))
    ring = cute.flat_divide(ring, (tokens, BOX))[None, None, None, 0, None]
    boxes = cute.flat_divide(cache, (tokens, BOX))
    ring, boxes = cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(ring, 0, 2), cute.group_modes(boxes, 0, 2)
    )
    return boxes, ring


@cute.jit
def fill_tile(
    tma: cute.CopyAtom,
    boxes: cute.Tensor,
    ring: cute.Tensor,  # of `partition`, with whole panels for boxes
    full: cute.Pointer,  # mbarriers, one a slot
    empty: cute.Pointer,  # mbarriers, one a slot
    token_box: Int32,
    kv_head: Int32,
    page: Int32,
    slot: Int32,
    phase: Int32,
    order: cutlass.Constexpr,  # column boxes in the order of the ring, a tuple
    slots: cutlass.Constexpr,
    policy: cutlass.Constexpr,  # L2 policy, or None
):
    """One warp loads a tile, panel by panel, each as soon as its slot is free."""
    for i in cutlass.range_constexpr(len(order)):
        place, parity = at(slot, phase, i, slots)
        cute.arch.mbarrier_wait(empty + place, parity ^ 1)
        # One lane is to be elected for the whole warp, not one for each group of lanes that left the wait together.
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + place, SLOT_BYTES)
        source = boxes[None, token_box, order[i], kv_head, page]
        if cutlass.const_expr(policy is None):
            cute.copy(tma, source, ring[None, 0, place], tma_bar_ptr=full + place)
        else:
            cute.copy(tma, source, ring[None, 0, place], tma_bar_ptr=full + place, cache_policy=Int64(policy))


@cute.jit
def wait_full(full: cute.Pointer, empty: cute.Pointer, parity: Int32, consumers: cutlass.Constexpr):
    """Waits until a slot holds the panel of the phase with this parity.

    Parity alone tells only neighbouring phases apart. A consumer that takes every second tile never waited for what
    the other one had in this slot before, and loads land in any order: if that panel were still on its way, the parity
    would already look right. So it first waits until the panel before has been released, as the producer did. This is
    exact when the ring holds a tile for each consumer.
    """
    if cutlass.const_expr(consumers > 1):
        cute.arch.mbarrier_wait(empty, parity ^ 1)
    cute.arch.mbarrier_wait(full, parity)


@cute.jit
def zero_slot_rows(slot: cute.Pointer, first_row: Int32, thread: Int32):
    """Zeroes rows first_row..63 (all when it is negative) of one panel: what a page holds past the end may be NaN.

    The swizzle only permutes 16-byte chunks within a row. thread: 0..127. The caller fences (async proxy) and joins
    the warpgroup before the next MMA reads the panel.
    """
    view = cute.make_tensor(slot, cute.make_layout((8, 8, BOX), stride=(1, 8, BOX)))
    zeros = cute.make_rmem_tensor(8, slot.dtype)
    zeros.fill(0.0)
    for row in cutlass.range(cutlass.max(first_row, 0) + thread // 8, BOX, 16, unroll=1):
        cute.autovec_copy(zeros, view[None, thread % 8, row])
