"""Blocks with a single tile, and an order of steps for blocks that wait for memory.

A part of a request is a number of pairs of tiles, so the shortest is two tiles long. Where there are as many parts as
tiles, each gets one: the even consumer makes its scores, both multiply their half of V, and nothing is loaded, masked
and multiplied for a partner that it does not have.

`apart`: the consumers leave each other alone, but for P.

    even   S0 = Q·K0ᵀ, softmax 0, P0 -> smem | P0·V0_L | wait P1 | P1·V1_L
    odd    S1 = Q·K1ᵀ | wait P0 | P0·V0_R | softmax 1, P1 -> smem | P1·V1_R

In the order of `steps` the even consumer's first product is issued behind the odd scores, so that softmaxes run under
products; its half of the even stage is held until the odd tile has arrived. Here it is asked for again as soon as that
product ends, and nothing that has ended is held while a panel is waited for.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from mla_var3.kernel.cute_python.lib import wgmma
from mla_var3.kernel.cute_python.lib.barriers import named_sync
from mla_var3.kernel.cute_python.lib.latent.consumer import CONSUMERS, EVEN, EVEN_JOIN, hide_past_end, run_pairs
from mla_var3.kernel.cute_python.lib.latent.shape import TILE_N, work_range
from mla_var3.kernel.cute_python.lib.phased.steps import (
    P0_READY,
    P1_READY,
    S0_ISSUED,
    even_scores,
    even_step,
    follow,
    free,
    issue_panel,
    make_p,
    odd_step,
    reset,
)
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP


@cute.jit
def part_range(seq_len: Int32, row_tile: Int32, split: Int32, num_splits: Int32, shape: cutlass.Constexpr):
    """(first, end, number of tiles, keys that every row of the tile may see, alone) of a block: of pairs as
    `work_range` gives them, or, `alone`, of tiles, of which the block has one or none."""
    first, end, num_tiles, least = work_range(seq_len, row_tile, split, num_splits, shape)
    alone = num_tiles <= num_splits
    if alone:
        first = cutlass.min(split, num_tiles)
        end = cutlass.min(split + 1, num_tiles)
    return first, end, num_tiles, least, alone


@cute.jit
def issue_scores(w: cutlass.Constexpr, parity: Int32):
    """Issues S = Q·Kᵀ of the consumer's own tile, each panel as soon as it is there."""
    panels = (*w.shape.part(w.me, w.me), *w.shape.part(w.me, 1 - w.me))
    for i in cutlass.range_constexpr(len(panels)):
        w.wait(w.full + (w.me * w.shape.panels + panels[i]), parity)
        issue_panel(w, panels[i], i == 0)


@cute.jit
def own_tile(w: cutlass.Constexpr, first_token: Int32, masked: cutlass.Constexpr, more: cutlass.Constexpr):
    """Softmax of the scores in acc_s, P to the other consumer, and this one's product with V. `more`: the stage is
    loaded again."""
    p = make_p(w, first_token, masked)
    wgmma.gemm_issue(w.mma_rs, w.acc_o, wgmma.as_a_operand(p), w.frag_v[w.me], range(4))
    warpgroup.wait_group(0)
    if cutlass.const_expr(more):
        free(w, w.me)


@cute.jit
def other_tile(w: cutlass.Constexpr, first_token: Int32, masked: cutlass.Constexpr, more: cutlass.Constexpr):
    """This consumer's product with the V of the tile whose P the other one makes; waits for all that is in flight."""
    other = 1 - w.me
    named_sync(P0_READY if other == EVEN else P1_READY, CONSUMERS)
    if cutlass.const_expr(masked):
        hide_past_end(w, other, first_token)
    follow(w)
    wgmma.gemm_issue(w.mma_ss, w.acc_o, w.frag_p, w.frag_v[other], range(4))
    warpgroup.wait_group(0)
    if cutlass.const_expr(more):
        free(w, other)


@cute.jit
def even_step_apart(
    w: cutlass.Constexpr, pair: Int32, parity: Int32, masked: cutlass.Constexpr, more: cutlass.Constexpr
):
    """The even consumer's part of a pair of tiles. `more`: another pair follows."""
    first_token = pair * (2 * TILE_N)
    issue_scores(w, parity)
    warpgroup.wait_group(0)
    own_tile(w, first_token, masked, more)
    other_tile(w, first_token + TILE_N, masked, more)


@cute.jit
def odd_step_apart(
    w: cutlass.Constexpr, pair: Int32, parity: Int32, masked: cutlass.Constexpr, more: cutlass.Constexpr
):
    """The odd consumer's part of a pair of tiles. `more`: another pair follows."""
    first_token = pair * (2 * TILE_N)
    issue_scores(w, parity)
    other_tile(w, first_token, masked, more)
    own_tile(w, first_token + TILE_N, masked, more)


@cute.jit
def only_tile(w: cutlass.Constexpr, first_token: Int32, masked: cutlass.Constexpr):
    """A consumer's part of the block's only tile, whose scores the even one has made."""
    if cutlass.const_expr(w.me == EVEN):
        own_tile(w, first_token, masked, more=False)
    else:
        other_tile(w, first_token, masked, more=False)


@cute.jit
def consume(
    w: cutlass.Constexpr,
    first: Int32,
    end: Int32,
    least: Int32,
    alone: cutlass.Boolean,
    apart: cutlass.Constexpr,
):
    """All of a block: pairs first..end-1, or tile `first`."""
    reset(w)
    if cutlass.const_expr(not apart and w.me == EVEN):
        even_scores(w, Int32(0), drain=False)
    if alone:
        if cutlass.const_expr(w.me != EVEN):
            if cutlass.const_expr(not apart):
                named_sync(S0_ISSUED, CONSUMERS)  # as many as in front of a pair
        elif cutlass.const_expr(apart):
            issue_scores(w, Int32(0))
            warpgroup.wait_group(0)
        if (first + 1) * TILE_N <= least:
            only_tile(w, first * TILE_N, masked=False)
        else:
            only_tile(w, first * TILE_N, masked=True)
        if cutlass.const_expr(w.me == EVEN):
            # The odd one waits for P0 and, in front of it, for S0. The same number of waits, behind all that counts,
            # keeps racecheck's count of both consumers' barriers together (docs/debugging.md).
            for _ in cutlass.range_constexpr(1 if apart else 2):
                named_sync(EVEN_JOIN + w.me, WARPGROUP)
    elif cutlass.const_expr(apart):
        run_pairs(w, even_step_apart if w.me == EVEN else odd_step_apart, first, end, least, True)
    else:
        run_pairs(w, even_step if w.me == EVEN else odd_step, first, end, least, True)
