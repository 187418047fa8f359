"""Two consumers of 64-token tiles half a pair apart: one's softmax runs under the other's products.

    even   softmax 0, P0 -> smem | P0·V0_L            | wait P1, P1·V1_L        | S0' = Q·K0'ᵀ
    odd    S1 = Q·K1ᵀ            | P0·V0_R, softmax 1 | P1·V1_R, P1 -> smem     | wait for S0' issued, S1' = Q·K1'ᵀ

Three rules keep the tensor cores busy. The odd scores are issued only when all of the even ones have been, so that the
two softmaxes do not fall together. Each P is relative to the running maximum that its own consumer knows, so nobody
waits for the other's maximum; the reader corrects its half of the output when the maximum has moved, which a lazy
maximum makes rare. And a 64 x 64 x 16 product with both operands in shared memory takes all of its bandwidth, which the
other consumer's softmax needs too: the usual softmax has no shuffle, and slices of the query that stay in registers are
spread over the k steps.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from mla_var3.kernel.cute_python.lib import softmax, wgmma
from mla_var3.kernel.cute_python.lib.barriers import named_arrive, named_sync, release
from mla_var3.kernel.cute_python.lib.latent.consumer import (
    CONSUMERS,
    EVEN,
    ODD,
    Consumer,
    hide_past_end,
    run_pairs,
    write_p,
)
from mla_var3.kernel.cute_python.lib.latent.lazy import SLACK, lazy_max, publish
from mla_var3.kernel.cute_python.lib.latent.shape import TILE_M, TILE_N

# Running maximum of a row that is only padding: its P is exp2(0 - PADDING) = 0. With the P of 1 that scores of 0 have,
# the product with V works on padding as on rows, which a chip at its power limit pays for in clock.
PADDING = 1.0e30
RESIDENT = 9  # 16-column slices of the query in registers, of 36: what fits beside the accumulators

# Named barriers (0 is the block's own, those from 5 on are `lib.latent.consumer`'s).
P0_READY, P1_READY, S0_ISSUED, S1_ISSUED = range(1, 5)


def resident_slices(slices: int) -> tuple[int, ...]:
    """Which of the query's slices stay in registers: evenly spread."""
    return tuple(i for i in range(slices) if (i + 1) * RESIDENT // slices > i * RESIDENT // slices)


class PhasedConsumer(Consumer):
    """A consumer, the running maximum of the rows (64,), and its resident slices of the query. zero_padding: P is 0 in
    rows past the request's. frees_first: the odd one frees the even stage before it issues its next product."""

    def __init__(
        self,
        me,
        shape,
        dtype,
        *common,
        row_max,
        shares,
        registers=(),
        zero_padding=False,
        frees_first=False,
        wait=cute.arch.mbarrier_wait,
        tile=None,
    ) -> None:
        self.wait = wait
        self.row_max, self.shares, self.zero_padding, self.frees_first = row_max, shares, zero_padding, frees_first
        self.mma_qs = wgmma.make_mma(dtype, TILE_N, a_in_registers=True)
        self.resident = resident_slices((shape.k + shape.p) // wgmma.MMA_K)
        # Ahead of the accumulators: behind them the code comes out otherwise than it was measured.
        self.q_regs = cute.make_rmem_tensor(
            cute.make_layout(((2, 2, 2), 1, max(len(self.resident), 1)), stride=((1, 2, 4), 0, 8)), dtype
        )
        super().__init__(me, shape, dtype, *common, registers, tile)


@cute.jit
def first_maximum(row: Int32, num_rows: cutlass.Constexpr) -> Float32:
    """What the running maximum of a row begins with where padding has P = 0; `row_max` begins with the same."""
    if cutlass.const_expr(num_rows % TILE_M == 0):
        return Float32(softmax.NO_KEY)
    return Float32(cutlass.select_(row < num_rows, Float32(softmax.NO_KEY), Float32(PADDING)))


@cute.jit
def load_resident(w: cutlass.Constexpr):
    """The query's resident slices into registers; the query tile is complete and joined."""
    atom = cute.make_copy_atom(cute.nvgpu.warp.LdMatrix8x8x16bOp(False, 4), w.dtype)
    copy = cute.make_tiled_copy_A(atom, w.mma_qs).get_slice(w.thread)
    source, target = copy.partition_S(w.q_tile), copy.retile(w.q_regs)
    for i in cutlass.range_constexpr(len(w.resident)):
        cute.copy(copy, source[None, 0, w.resident[i]], target[None, 0, i])


@cute.jit
def issue_panel(w: cutlass.Constexpr, panel: cutlass.Constexpr, zero_init: cutlass.Constexpr):
    """Issues the products of one 64-column panel of Q and K and commits them; waits for nothing."""
    warpgroup.fence()
    from_smem, from_registers = cute.make_mma_atom(w.mma_s.op), cute.make_mma_atom(w.mma_qs.op)
    from_smem.set(warpgroup.Field.ACCUMULATE, not zero_init)
    from_registers.set(warpgroup.Field.ACCUMULATE, not zero_init)
    blocks = wgmma.k_blocks((panel,))
    for i in cutlass.range_constexpr(len(blocks)):
        k = blocks[i]
        if cutlass.const_expr(k in w.resident):
            q = w.q_regs[None, None, w.resident.index(k)]
            cute.gemm(from_registers, w.acc_s, q, w.keys(k), w.acc_s)
        else:
            cute.gemm(from_smem, w.acc_s, w.frag_q[None, None, k], w.keys(k), w.acc_s)
        from_smem.set(warpgroup.Field.ACCUMULATE, True)
        from_registers.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def free(w: cutlass.Constexpr, stage: cutlass.Constexpr):
    """This warp no longer reads this consumer's part of a stage: tells the block's producer and, where blocks
    share what they load, the others'."""
    part = w.empty + (2 * stage + w.me)
    if cutlass.const_expr(w.shares):
        with cute.arch.elect_one():
            for block in cutlass.range_constexpr(w.shares):
                cute.arch.mbarrier_arrive(part, block)
    else:
        release(part)


@cute.jit
def even_scores(w: cutlass.Constexpr, parity: Int32, drain: cutlass.Constexpr):
    """S = Q·K0ᵀ, in the order in which the parts are refilled; waits for S. With `drain` the product with V1 is still
    in flight: its part of the stage is released as soon as it ends."""
    panels = (*w.shape.part(EVEN, EVEN), *w.shape.part(EVEN, ODD))
    for i in cutlass.range_constexpr(len(panels)):
        w.wait(w.full + panels[i], parity)
        issue_panel(w, panels[i], i == 0)
        if cutlass.const_expr(drain and i == 0):
            warpgroup.wait_group(1)
            free(w, ODD)
    named_arrive(S0_ISSUED, CONSUMERS)
    warpgroup.wait_group(0)


@cute.jit
def issue_odd_scores(w: cutlass.Constexpr, parity: Int32):
    """Issues S = Q·K1ᵀ once the even scores have been; waits for nothing."""
    named_sync(S0_ISSUED, CONSUMERS)
    panels = (*w.shape.part(ODD, ODD), *w.shape.part(ODD, EVEN))
    for i in cutlass.range_constexpr(len(panels)):
        w.wait(w.full + (w.shape.panels + panels[i]), parity)
        issue_panel(w, panels[i], i == 0)
    named_arrive(S1_ISSUED, CONSUMERS)


@cute.jit
def grows(w: cutlass.Constexpr):
    """Whether the lazy maximum of any of this warp's rows moves. No shuffle: any of the threads of a row tells."""
    rows = wgmma.as_rows(w.acc_s)
    above = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        best = cute.make_rmem_tensor(4, Float32)
        for j in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            best[j % 4] = rows[r, j] if j < 4 else cute.arch.fmax(best[j % 4], rows[r, j])
        most = cute.arch.fmax(cute.arch.fmax(best[0], best[1]), cute.arch.fmax(best[2], best[3]))
        above[r] = most * w.scale_log2 - w.m[r]
    return cute.arch.vote_any_sync(cute.arch.fmax(above[0], above[1]) > SLACK)


@cute.jit
def grow(w: cutlass.Constexpr, factor: cute.Tensor):
    """Moves the maximum of the rows that need it, publishes it, and gives what older results are to be scaled by."""
    for r in cutlass.range_constexpr(2):
        m = lazy_max(w.m[r], softmax.row_max(w.acc_s, r) * w.scale_log2)
        factor[r] = softmax.exp2(w.m[r] - m)
        w.m[r] = m
        w.total[r] = w.total[r] * factor[r]
        publish(w.row_max, w.thread, r, m)


@cute.jit
def take_over(w: cutlass.Constexpr, theirs: cute.Tensor):
    """The rows' maximum becomes `theirs`; scales what this consumer has."""
    factor = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        factor[r] = softmax.exp2(w.m[r] - theirs[r])
        w.m[r] = theirs[r]
        w.total[r] = w.total[r] * factor[r]
    wgmma.scale_rows(w.acc_o, factor)


@cute.jit
def follow(w: cutlass.Constexpr):
    """Takes over the maximum that the other consumer has published; nothing of this one's may be in flight."""
    theirs = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        theirs[r] = w.row_max[wgmma.acc_row(w.thread, r)]
    if cute.arch.vote_any_sync(theirs[0] != w.m[0] or theirs[1] != w.m[1]):
        take_over(w, theirs)


@cute.jit
def exponentials(w: cutlass.Constexpr):
    """S to P in place, and P's share of the row sums."""
    for r in cutlass.range_constexpr(2):
        w.total[r] = w.total[r] + softmax.row_exp2(w.acc_s, r, w.scale_log2, w.m[r])


@cute.jit
def send_p(w: cutlass.Constexpr, p_frag: cute.Tensor):
    """This consumer's P into the rope panel of its own stage, which nobody needs once the scores are made."""
    write_p(w, p_frag)
    named_arrive(P0_READY + w.me, CONSUMERS)


@cute.jit
def make_p(w: cutlass.Constexpr, first_token: Int32, masked: cutlass.Constexpr):
    """Softmax of the scores in acc_s, of this consumer's own tile, and P to the other one; nothing is in flight. Gives
    P, and leaves V of the tile without rows past the end."""
    if cutlass.const_expr(masked):
        softmax.mask_columns(w.acc_s, w.thread, first_token, w.limits)
    if grows(w):
        factor = cute.make_rmem_tensor(2, Float32)
        grow(w, factor)
        wgmma.scale_rows(w.acc_o, factor)
    exponentials(w)
    p = wgmma.to_dtype(w.acc_s, w.dtype)
    send_p(w, p)
    if cutlass.const_expr(masked):
        hide_past_end(w, w.me, first_token)
    return p


@cute.jit
def even_step(w: cutlass.Constexpr, pair: Int32, parity: Int32, masked: cutlass.Constexpr, more: cutlass.Constexpr):
    """The even consumer's part of a pair of tiles; S of the even tile is in acc_s. `more`: makes the next pair's S."""
    p = make_p(w, pair * (2 * TILE_N), masked)
    named_sync(S1_ISSUED, CONSUMERS)
    wgmma.gemm_issue(w.mma_rs, w.acc_o, wgmma.as_a_operand(p), w.frag_v[EVEN], range(4))
    warpgroup.wait_group(0)
    if cutlass.const_expr(more):
        free(w, EVEN)
    named_sync(P1_READY, CONSUMERS)
    if cutlass.const_expr(masked):
        hide_past_end(w, ODD, pair * (2 * TILE_N) + TILE_N)
    follow(w)
    wgmma.gemm_issue(w.mma_ss, w.acc_o, w.frag_p, w.frag_v[ODD], range(4))
    if cutlass.const_expr(more):
        even_scores(w, parity ^ 1, drain=True)
    else:
        warpgroup.wait_group(0)


@cute.jit
def odd_product(w: cutlass.Constexpr, p: cute.Tensor, more: cutlass.Constexpr):
    """O_R += P1·V1_R while P0·V0_R may still run; P1 goes to the other consumer meanwhile; releases both stages.

    With `frees_first` it waits for P0·V0_R before: that ends about when the softmax does, and what takes the even
    stage's place is asked for the sooner."""
    if cutlass.const_expr(w.frees_first):
        warpgroup.wait_group(0)
        if cutlass.const_expr(more):
            free(w, EVEN)
    wgmma.gemm_issue(w.mma_rs, w.acc_o, wgmma.as_a_operand(p), w.frag_v[ODD], range(4))
    send_p(w, p)
    if cutlass.const_expr(not w.frees_first):
        warpgroup.wait_group(1)
        if cutlass.const_expr(more):
            free(w, EVEN)
    warpgroup.wait_group(0)
    if cutlass.const_expr(more):
        free(w, ODD)


@cute.jit
def odd_step(w: cutlass.Constexpr, pair: Int32, parity: Int32, masked: cutlass.Constexpr, more: cutlass.Constexpr):
    """The odd consumer's part of a pair of tiles. `more`: another pair follows."""
    issue_odd_scores(w, parity)
    # Behind the scores, so that it runs under the softmax.
    named_sync(P0_READY, CONSUMERS)
    if cutlass.const_expr(masked):
        hide_past_end(w, EVEN, pair * (2 * TILE_N))
    follow(w)
    wgmma.gemm_issue(w.mma_ss, w.acc_o, w.frag_p, w.frag_v[EVEN], range(4))
    warpgroup.wait_group(1)
    if cutlass.const_expr(masked):
        softmax.mask_columns(w.acc_s, w.thread, pair * (2 * TILE_N) + TILE_N, w.limits)
        hide_past_end(w, ODD, pair * (2 * TILE_N) + TILE_N)
    factor = cute.make_rmem_tensor(2, Float32)
    factor.fill(1.0)
    grown = grows(w)
    if grown:
        grow(w, factor)
    exponentials(w)
    p = wgmma.to_dtype(w.acc_s, w.dtype)
    # The product is in both branches, with its waits: where they join, no register that a product in flight uses may
    # be chosen between.
    if grown:
        warpgroup.wait_group(0)
        wgmma.scale_rows(w.acc_o, factor)
        odd_product(w, p, more)
    else:
        odd_product(w, p, more)


@cute.jit
def reset(w: cutlass.Constexpr):
    """What a consumer begins with: no keys, and its resident slices of the query."""
    w.acc_o.fill(0.0)
    # Filled for all first: chosen in one loop, the machine code of both consumers comes out otherwise than measured.
    w.m.fill(softmax.NO_KEY)
    if cutlass.const_expr(w.zero_padding):
        for r in cutlass.range_constexpr(2):
            w.m[r] = first_maximum(w.first_row + wgmma.acc_row(w.thread, r), w.shape.rows)
    w.total.fill(0.0)
    load_resident(w)


@cute.jit
def consume(
    w: cutlass.Constexpr,
    step: cutlass.Constexpr,
    first: Int32,
    end: Int32,
    least: Int32,
    asks: cutlass.Constexpr = False,
):
    """All pairs of a block."""
    reset(w)
    if cutlass.const_expr(w.me == EVEN):
        even_scores(w, Int32(0), drain=False)
    run_pairs(w, step, first, end, least, asks)
