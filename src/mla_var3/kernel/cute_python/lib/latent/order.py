"""Which request a block works on: the longest first, worked out on the device from the lengths.

Blocks start in the order of their indices, and each that ends makes room for the next. With the longest requests first,
the last ones to start are short and all SMs end together; in the order of the batch, a long request that starts last
runs alone. Nothing is cut for it, no workspace is needed, and a request's result does not change.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from mla_var3.kernel.cute_python.lib.latent.shape import TILE_N

WARP = 32
STEP = 2 * TILE_N  # tokens that a block takes at once


@cute.jit
def steps_of(seq_lens: cute.Tensor, request: Int32) -> Int32:
    """Steps of a request; -1 past the end of the batch."""
    steps = Int32(-1)
    if request < seq_lens.shape[0]:
        steps = (cutlass.max(seq_lens[request], 0) + (STEP - 1)) // STEP
    return steps


@cute.jit
def count_from(seq_lens: cute.Tensor, least: Int32, lane: Int32) -> Int32:
    """How many requests have `least` steps or more (at least 0); all lanes of a warp get it."""
    mine = Int32(0)
    for first in cutlass.range(0, seq_lens.shape[0], WARP, unroll=4):
        mine = mine + (1 if steps_of(seq_lens, first + lane) >= least else 0)
    return cute.arch.warp_redux_sync(mine, kind="add")


@cute.jit
def request_at(rank: Int32, seq_lens: cute.Tensor, lane: Int32) -> Int32:
    """The request of a rank 0 .. b - 1, longest first, equally long ones in the order of the batch. Warps work it out
    for themselves, with all lanes. If all are equally long it is `rank`, for the price of reading the lengths."""
    most, fewest = Int32(-1), Int32(0x7FFFFFFF)
    for first in cutlass.range(0, seq_lens.shape[0], WARP, unroll=4):
        steps = steps_of(seq_lens, first + lane)
        most = cutlass.max(most, steps)
        if steps >= 0:
            fewest = cutlass.min(fewest, steps)
    most = cute.arch.warp_redux_sync(most, kind="max")
    fewest = cute.arch.warp_redux_sync(fewest, kind="min")
    found = rank
    if most > fewest:
        # The largest number of steps that more than `rank` requests have: it is that of the request.
        low, high = fewest, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            if count_from(seq_lens, middle, lane) > rank:
                low = middle
            else:
                high = middle
        before = rank - count_from(seq_lens, low + 1, lane)  # of the equally long ones
        found = Int32(-1)
        first = Int32(0)
        while found < 0:
            same = Int32(cute.arch.vote_ballot_sync(steps_of(seq_lens, first + lane) == low))
            count = Int32(cute.arch.popc(same))
            if before < count:
                below = Int32(cute.arch.popc(same & ((Int32(1) << lane) - 1)))
                chosen = Int32(cute.arch.vote_ballot_sync(((same >> lane) & 1) == 1 and below == before))
                found = first + Int32(31 - cute.arch.clz(chosen))
            before = before - count
            first = first + WARP
    return found
