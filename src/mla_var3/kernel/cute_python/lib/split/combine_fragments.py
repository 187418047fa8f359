"""Combining parts that lie in the order of the accumulators (`lib.latent.fragments`).

out = Σ wᵢ Xᵢ / Σ (wᵢ sᵢ + wᵢ' sᵢ') with w = 2^(A - max), ' the other consumer's: a warp takes 8 / fine rows of one
vector, and of those a share of the parts; `fine` parts lie beside each other in its lanes. Each lane knows all marks of
its own row and of its own parts, so that nothing is exchanged before the sums: those are relative to the maximum of
each share, and the last step, over the shares, brings them together. As in `combine_warps`, addresses are computed
before the wait, and blocks spread evenly over the SMs. The order of every sum is fixed: results are the same bits every
run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float16, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from mla_var3.kernel.cute_python.lib import host
from mla_var3.kernel.cute_python.lib.latent.fragments import (
    COLUMNS,
    GROUP,
    MARKS,
    TURNED_ROWS,
    TURNED_WARPS,
    VECTOR,
    Fragments,
    row_marks,
    turned_column,
    turned_row,
    vector_at,
)
from mla_var3.kernel.cute_python.lib.latent.shape import TILE_M, Shape
from mla_var3.kernel.cute_python.lib.softmax import exp2, natural_lse
from mla_var3.kernel.cute_python.lib.split.combine_warps import wait_with
from mla_var3.kernel.cute_python.lib.split.cut import AHEAD, WARP, Room, cut_beside, cut_work
from mla_var3.runtime import CuteKernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_var3.runtime.plan import KernelPlan


@cute.jit
def transpose(words: cute.Tensor, lane: Int32, apart: cutlass.Constexpr = 1):
    """(4,) words of four lanes, `apart` from each other: word i of lane j becomes word j of lane i."""
    for bit in cutlass.range_constexpr(2):
        step = 1 << bit
        odd = (lane >> bit) & 1
        for i in cutlass.range_constexpr(4):
            if cutlass.const_expr(i & step == 0):
                sent = cutlass.select_(odd > 0, words[i], words[i + step])
                came = cute.arch.shuffle_sync_bfly(sent, offset=step * apart)
                words[i] = cutlass.select_(odd > 0, came, words[i])
                words[i + step] = cutlass.select_(odd > 0, words[i + step], came)


@cute.jit
def turn(words: cute.Tensor, lane: Int32):
    """(4,) words, eight 16-bit elements, of the eight lanes with the same lane % 4: element i of the j-th of them
    becomes element j of the i-th."""
    odd = (lane >> 2) & 1
    for i in cutlass.range_constexpr(4):
        came = cute.arch.shuffle_sync_bfly(words[i], offset=4)
        low = (words[i] & 0xFFFF) | (came << 16)
        high = ((came >> 16) & 0xFFFF) | (words[i] & Int32(-65536))
        words[i] = cutlass.select_(odd > 0, high, low)
    transpose(words, lane >> 3, 8)


@cute.jit
def rounded(values: cute.Tensor, inverse: Float32, dtype: cutlass.Constexpr) -> cute.Tensor:
    """values · inverse, rounded once."""
    packed = cute.make_rmem_tensor(cute.size(values), dtype)
    for i in cutlass.range_constexpr(cute.size(values)):
        packed[i] = (values[i] * inverse).to(dtype)
    return packed


@cute.kernel
def combine_fragments(
    parts: cute.Tensor,  # fp16, global memory: (split, request, block, consumer, row group, vector, thread, 8)
    marks: cute.Tensor,  # fp32, global memory: (split, request, block, row, consumer, MARKS)
    out: cute.Tensor,  # (b, s, h, k) 16-bit, global memory, contiguous
    lse: cute.Tensor,  # (b, h, s) fp32, natural log, global memory, contiguous
    splits: Int32,
    cut: cutlass.Constexpr,
    shape: cutlass.Constexpr,
    turned: cutlass.Constexpr,  # the order of parts whose accumulators have rows of the query for columns
):
    thread, _, _ = cute.arch.thread_idx()
    block, tile, batch = cute.arch.block_idx()
    if cutlass.const_expr(cut.lets_go):
        cute.arch.griddepcontrol_launch_dependents()
    sizes = Fragments.of(shape)
    b = out.shape[0]
    rows = TURNED_ROWS if turned else GROUP // cut.fine  # of a unit
    across = sizes.vectors // cut.wide
    units = cut.units_of(sizes)
    lane = thread % WARP
    warp = cute.arch.make_warp_uniform(thread // WARP)
    mine = warp // cut.warps
    unit = block * cut.units + mine
    there = unit < units
    unit = cutlass.min(unit, units - 1)
    sub, vector = unit % cut.fine, unit // cut.fine % across * cut.wide
    group, me = unit // (cut.fine * across) % sizes.groups, unit // (cut.fine * across * sizes.groups)
    share = warp % cut.warps * cut.fine + lane // cut.lanes
    place = sub * cut.lanes + lane % cut.lanes  # in the vector
    my_row = group * GROUP + place // 4  # in the tile
    if cutlass.const_expr(turned):
        my_row = group * GROUP + turned_row(place, vector, sizes)

    # Past the last split its own are read once more: those weigh nothing.
    which = [
        Int64(cutlass.min(share + j * cut.shares, splits - 1) * b + batch) * sizes.blocks + tile
        for j in range(cut.share)
    ]
    of_marks = [row_marks(marks.iterator, part, my_row, sizes) for part in which]
    of_parts = [
        [vector_at(parts.iterator, part, me, group, vector + i, place, sizes) for i in range(cut.wide)]
        for part in which
    ]
    addresses = Int64(0)
    for source in (*of_marks, *(x for vectors in of_parts for x in vectors)):
        addresses = addresses | source.iterator.toint()
    wait_with(addresses)

    ahead = min(cut.share, AHEAD)
    most, total = -Float32.inf, Float32(0.0)
    acc = cute.make_rmem_tensor((VECTOR, cut.wide), Float32)
    acc.fill(0.0)
    for begin in cutlass.range_constexpr(0, cut.share, ahead):
        found = cute.make_rmem_tensor((MARKS, ahead), Float32)
        values = cute.make_rmem_tensor((VECTOR, cut.wide, ahead), Float16)
        for j in cutlass.range_constexpr(ahead):
            cute.autovec_copy(of_marks[begin + j], found[None, j])
            for i in cutlass.range_constexpr(cut.wide):
                cute.autovec_copy(of_parts[begin + j][i], values[None, i, j])
        before = most
        for j in cutlass.range_constexpr(ahead):
            inside = share + (begin + j) * cut.shares < splits
            for c in cutlass.range_constexpr(2):
                found[2 * c, j] = cutlass.select_(inside, found[2 * c, j], -Float32.inf)
                most = cute.arch.fmax(most, found[2 * c, j])
        shift = cutlass.select_(most > -Float32.inf, most, Float32(0.0))
        if cutlass.const_expr(begin > 0):
            older = exp2(before - shift)
            total = total * older
            acc.store(acc.load() * older)
        words = cute.recast_tensor(values, Int32)
        for j in cutlass.range_constexpr(ahead):
            left, right = exp2(found[0, j] - shift), exp2(found[2, j] - shift)
            total = total + (left * found[1, j] + right * found[3, j])
            weight = cutlass.select_(me > 0, right, left)
            for i in cutlass.range_constexpr(cut.wide):
                for n in cutlass.range_constexpr(VECTOR // 2):
                    # Without keys a part was not written: it may be NaN.
                    words[n, i, j] = cutlass.select_(weight > 0.0, words[n, i, j], Int32(0))
                for n in cutlass.range_constexpr(VECTOR):
                    acc[n, i] = acc[n, i] + weight * Float32(values[n, i, j])

    first_row = tile % shape.row_tiles * TILE_M
    kv_head = tile // shape.row_tiles
    if cutlass.const_expr(cut.shares == 1):
        row = first_row + my_row
        head, token = kv_head * shape.group + row % shape.group, row // shape.group
        inverse = cutlass.select_(total > 0.0, cute.arch.rcp_approx(total), Float32(0.0))
        for i in cutlass.range_constexpr(cut.wide):
            packed = rounded(acc[None, i], inverse, out.element_type)
            if cutlass.const_expr(turned):
                turn(cute.recast_tensor(packed, Int32), lane)
            else:
                transpose(cute.recast_tensor(packed, Int32), lane)
            if there and row < shape.rows:
                column = me * shape.half + (vector + i) * COLUMNS + place % 4 * VECTOR
                if cutlass.const_expr(turned):
                    column = me * shape.half + turned_column(place // 4, vector + i, sizes)
                offset = ((Int64(batch) * shape.s + token) * shape.h + head) * shape.k + column
                target = out.iterator + cute.assume(offset, divby=VECTOR)
                cute.autovec_copy(packed, cute.make_tensor(target, cute.make_layout(VECTOR)))
        if there and row < shape.rows:
            tells = vector == 0 and place % 4 == 0
            if cutlass.const_expr(turned):
                tells = vector % TURNED_WARPS == 0 and place // 4 == 0
            if me == 0 and tells:
                lse[batch, head, token] = natural_lse(total, shift)
    else:
        width = max(2, VECTOR // cut.shares)  # columns of a thread in the last step
        memory = SmemAllocator()
        sums = memory.allocate_tensor(Float32, cute.make_layout((cut.lanes * VECTOR, cut.shares, cut.units)), 16)
        stats = memory.allocate_tensor(Float32, cute.make_layout((2, rows, cut.shares, cut.units)), 16)
        own = cute.zipped_divide(sums[None, share, mine], (VECTOR,))[None, lane % cut.lanes]
        cute.autovec_copy(acc[None, 0], own)
        if lane % cut.lanes // 4 == 0 if turned else lane % 4 == 0:
            stat = cute.make_rmem_tensor(2, Float32)
            stat[0], stat[1] = most, total
            told = lane % 4 if turned else lane % cut.lanes // 4
            cute.autovec_copy(stat, stats[None, told, share, mine])
        cute.arch.sync_threads()
        at = warp % cut.warps * WARP + lane
        pairs = VECTOR // width  # threads on a lane's vector
        of_lane, first = at // pairs, at % pairs
        place = sub * cut.lanes + of_lane
        row = first_row + group * GROUP + place // 4
        # Turned, a thread has pairs of columns that lie beside each other in two lanes.
        a_row, beside = cut.lanes * pairs // TURNED_ROWS, cut.lanes // 8
        if cutlass.const_expr(turned):
            of_lane, first = at // a_row, at % a_row  # one of the four lanes that have the first columns of the rows
            row = first_row + group * GROUP + turned_row(of_lane, vector, sizes)
        if there and at < cut.lanes * pairs and row < shape.rows:
            stat = cute.make_rmem_tensor((2, cut.shares), Float32)
            theirs = cute.make_rmem_tensor((2, width // 2, cut.shares), Float32)
            for g in cutlass.range_constexpr(cut.shares):
                cute.autovec_copy(stats[None, of_lane if turned else of_lane // 4, g, mine], stat[None, g])
                two = cute.zipped_divide(sums[None, g, mine], (2,))
                for i in cutlass.range_constexpr(width // 2):
                    # Pairs next to each other are in threads next to each other: a row's stores fill whole sectors.
                    if cutlass.const_expr(turned):
                        pair = first + i * a_row
                        source = (of_lane + pair % beside * 8) * VECTOR + pair // beside
                        for n in cutlass.range_constexpr(2):
                            theirs[n, i, g] = sums[source + n * (4 * VECTOR), g, mine]
                    else:
                        cute.autovec_copy(two[None, of_lane * (VECTOR // 2) + first + i * pairs], theirs[None, i, g])
            best = stat[0, 0]
            for g in cutlass.range_constexpr(1, cut.shares):
                best = cute.arch.fmax(best, stat[0, g])
            shift = best if best > -Float32.inf else Float32(0.0)
            total = Float32(0.0)
            ours = cute.make_rmem_tensor((2, width // 2), Float32)
            ours.fill(0.0)
            for g in cutlass.range_constexpr(cut.shares):
                weight = exp2(stat[0, g] - shift)
                total = total + weight * stat[1, g]
                for i in cutlass.range_constexpr(width // 2):
                    for n in cutlass.range_constexpr(2):
                        ours[n, i] = ours[n, i] + weight * theirs[n, i, g]
            inverse = cute.arch.rcp_approx(total) if total > 0.0 else Float32(0.0)
            head, token = kv_head * shape.group + row % shape.group, row // shape.group
            column = me * shape.half + vector * COLUMNS + place % 4 * 2
            offset = ((Int64(batch) * shape.s + token) * shape.h + head) * shape.k + column
            for i in cutlass.range_constexpr(width // 2):
                at_column = offset + (first + i * pairs) * 8
                if cutlass.const_expr(turned):
                    pair = first + i * a_row
                    column = me * shape.half + turned_column(pair // beside, vector, sizes)
                    column = column + sub * (cut.lanes // 4) + pair % beside * 2
                    at_column = ((Int64(batch) * shape.s + token) * shape.h + head) * shape.k + column
                target = out.iterator + cute.assume(at_column, divby=2)
                packed = rounded(ours[None, i], inverse, out.element_type)
                cute.autovec_copy(packed, cute.make_tensor(target, cute.make_layout(2)))
            tells = vector == 0 and place % 4 == 0 and first == 0
            if cutlass.const_expr(turned):
                tells = vector % TURNED_WARPS == 0 and sub == 0 and first == 0
            if me == 0 and tells:
                lse[batch, head, token] = natural_lse(total, shift)


combine_fragments.set_name_prefix("combine_fragments", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def launch_combine_fragments(
    parts: cute.Tensor,
    marks: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    splits: Int32,
    cut: cutlass.Constexpr,
    shape: cutlass.Constexpr,
    turned: cutlass.Constexpr,
    stream: CUstream,
):
    """Host function: a block for some units of a block of the attention kernel, `cut.warps` warps each.

    One block an SM is all that is promised: without that, ptxas saves registers by asking for half of the parts once
    their weights are known, a second way to L2 and back.
    """
    sizes = Fragments.of(shape)
    combine_fragments(parts, marks, out, lse, splits, cut, shape, turned).launch(
        grid=(cut.blocks_of(sizes), sizes.blocks, out.shape[0]),
        block=(cut.threads, 1, 1),
        smem=cut.smem,
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )


def combine_kernel(
    plan: KernelPlan,
    partials: Sequence[Any],
    outputs: Sequence[Any],
    splits: int,
    room: Room | None = None,
    turned: bool = False,
) -> CuteKernel:
    """The second stage: (parts, marks) into outputs (out, lse). Without them, compiles only. room: where its blocks
    leave the SMs of the attention kernel to the next call's; None: its blocks spread over all SMs. turned: the order of
    the parts (`lib.latent.fragments`)."""
    pd = plan.problem
    shape = Shape.of(pd)
    sizes = Fragments.of(shape)
    requests = outputs[0].shape[0] if outputs else pd.b
    work = (requests * sizes.blocks, sizes, splits, host.target(plan))
    cut = cut_work(*work) if room is None else cut_beside(*work, room)

    name = f"{cut.name}t" if turned else cut.name

    def arguments() -> tuple[Any, ...]:
        b, elements, floats = host.symbols(3)
        return (
            host.fake(Float16, elements),
            host.fake(Float32, floats),
            host.fake(host.element_type(pd.dtype), b, pd.s, pd.h, pd.k),
            host.fake(Float32, b, pd.h, pd.s, align=4),
            Int32(1),
            cut,
            shape,
            turned,
        )

    return host.stage(
        plan, combine_fragments, launch_combine_fragments, name, arguments, partials, outputs, splits
    )  # fmt: skip
