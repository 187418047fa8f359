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
AT_ONCE = 8  # lengths that a lane reads together


@cute.jit
def read_lengths(lengths: cute.Tensor, seq_lens: cute.Tensor, first: Int32):
    """Into `lengths`, (AT_ONCE,) registers: those of requests first, first + 32, ...; past the end of the batch the
    last one's. All are in flight together."""
    for i in cutlass.range_constexpr(AT_ONCE):
        lengths[i] = seq_lens[cutlass.min(first + i * WARP, seq_lens.shape[0] - 1)]


@cute.jit
def ask_lengths(seq_lens: cute.Tensor, lane: Int32, ordered: Int32) -> cute.Tensor:
    """The first lengths that `lane` reads, or zeros where `ordered` is 0. Nothing waits for them here."""
    lengths = cute.make_rmem_tensor(AT_ONCE, Int32)
    lengths.fill(0)
    if ordered != 0:
        read_lengths(lengths, seq_lens, lane)
    return lengths


@cute.jit
def request_of(rank: Int32, seq_lens: cute.Tensor, lane: Int32, lengths: cute.Tensor) -> Int32:
    """`request_at`, with the first lengths known (`ask_lengths`): where there are no others and all are the same, as in
    a batch that starts together, in a few instructions."""
    most, fewest = lengths[0], lengths[0]
    for i in cutlass.range_constexpr(1, AT_ONCE):
        most, fewest = cutlass.max(most, lengths[i]), cutlass.min(fewest, lengths[i])
    most = cute.arch.warp_redux_sync(most, kind="max")
    fewest = cute.arch.warp_redux_sync(fewest, kind="min")
    found = rank
    if most > fewest or seq_lens.shape[0] > AT_ONCE * WARP:
        found = request_at(rank, seq_lens, lane)
    return found


@cute.jit
def load_steps(seq_lens: cute.Tensor, first: Int32, lane: Int32) -> cute.Tensor:
    """(AT_ONCE,) registers: the steps of requests first + lane, first + lane + 32, …; -1 past the end of the batch.

    All loads are in flight together, which they are not in an unrolled loop that may end between them: one after the
    other they cost 2.6 us a block with 256 requests.
    """
    b = seq_lens.shape[0]
    lengths = cute.make_rmem_tensor(AT_ONCE, Int32)
    read_lengths(lengths, seq_lens, first + lane)
    for i in cutlass.range_constexpr(AT_ONCE):
        steps = (cutlass.max(lengths[i], 0) + (STEP - 1)) // STEP
        lengths[i] = Int32(cutlass.select_(first + lane + i * WARP < b, steps, Int32(-1)))
    return lengths


@cute.jit
def count_from(seq_lens: cute.Tensor, least: Int32, lane: Int32) -> Int32:
    """How many requests have `least` steps or more (at least 0); all lanes of a warp get it."""
    mine = Int32(0)
    for first in cutlass.range(0, seq_lens.shape[0], AT_ONCE * WARP, unroll=1):
        steps = load_steps(seq_lens, first, lane)
        for i in cutlass.range_constexpr(AT_ONCE):
            mine = mine + Int32(cutlass.select_(steps[i] >= least, Int32(1), Int32(0)))
    return cute.arch.warp_redux_sync(mine, kind="add")


@cute.jit
def request_at(rank: Int32, seq_lens: cute.Tensor, lane: Int32) -> Int32:
    """The request of a rank 0 .. b - 1, longest first, equally long ones in the order of the batch. Warps work it out
    for themselves, with all lanes. If all are equally long it is `rank`, for the price of reading the lengths."""
    most, fewest = Int32(-1), Int32(0x7FFFFFFF)
    for first in cutlass.range(0, seq_lens.shape[0], AT_ONCE * WARP, unroll=1):
        steps = load_steps(seq_lens, first, lane)
        for i in cutlass.range_constexpr(AT_ONCE):
            most = cutlass.max(most, steps[i])
            fewest = cutlass.min(fewest, Int32(cutlass.select_(steps[i] >= 0, steps[i], Int32(0x7FFFFFFF))))
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
            steps = load_steps(seq_lens, first, lane)
            for i in cutlass.range_constexpr(AT_ONCE):
                same = Int32(cute.arch.vote_ballot_sync(steps[i] == low))
                count = Int32(cute.arch.popc(same))
                if found < 0 and before < count:
                    below = Int32(cute.arch.popc(same & ((Int32(1) << lane) - 1)))
                    chosen = Int32(cute.arch.vote_ballot_sync(((same >> lane) & 1) == 1 and below == before))
                    found = first + i * WARP + Int32(31 - cute.arch.clz(chosen))
                before = before - count
            first = first + AT_ONCE * WARP
    return found
