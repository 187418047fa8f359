"""Handing out work items to persistent blocks: first come, first served, one counter in global memory.

Block i starts with item i. Every further one is the number of blocks plus what the counter stood at. Which block does
an item changes nothing in its result, so results stay the same bits. A block stops at the first number past the last
item; the one that gets the very last number puts the counter back to 0 for the next launch.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from mla_var3.kernel.cute_python.lib.barriers import release

DEPTH = 2  # items that the producer may be ahead of the consumers


class Queue:
    """Passes items from the producer warp to the consumers, in shared memory. Python holds it; nothing is copied."""

    def __init__(self, items: cute.Pointer, barriers: cute.Pointer, warps: int) -> None:
        self.items, self.full, self.empty, self.warps = items, barriers, barriers + DEPTH, warps


@cute.jit
def initialize(queue: cutlass.Constexpr, lane: Int32):
    """Makes the queue's barriers; by one warp."""
    if lane < DEPTH:
        cute.arch.mbarrier_init(queue.full + lane, 1)
        cute.arch.mbarrier_init(queue.empty + lane, queue.warps)


@cute.jit
def fetch(counter: cute.Tensor, num_items: Int32) -> Int32:
    """The next item of this block, the same in all lanes of the warp; num_items or more when there is none."""
    blocks, _, _ = cute.arch.grid_dim()
    lane = cute.arch.lane_idx()
    old = Int32(0)
    if lane == 0:
        old = cute.arch.atomic_add(counter.iterator.llvm_ptr, Int32(1))
        # All blocks together ask num_items times: once more than they get items for, each.
        if old == num_items - 1:
            counter[0] = 0
    return cute.arch.shuffle_sync(old, 0) + blocks


@cute.jit
def give(queue: cutlass.Constexpr, index: Int32, item: Int32):
    """The producer passes on its item number `index` after the first."""
    place = index % DEPTH
    cute.arch.mbarrier_wait(queue.empty + place, (index // DEPTH & 1) ^ 1)
    box = cute.make_tensor(queue.items + place, cute.make_layout(1))
    full = queue.full + place
    if cute.arch.lane_idx() == 0:
        box[0] = item
        cute.arch.mbarrier_arrive(full)
    cute.arch.sync_warp()


@cute.jit
def take(queue: cutlass.Constexpr, index: Int32) -> Int32:
    """A consumer warp's item number `index` after the first."""
    place = index % DEPTH
    cute.arch.mbarrier_wait(queue.full + place, index // DEPTH & 1)
    item = cute.make_tensor(queue.items + place, cute.make_layout(1))[0]
    cute.arch.sync_warp()
    release(queue.empty + place)
    return item
