"""Combining parts in 16 bits, a warp to a piece of a row and a share of its parts.

out = Σ wᵢ Oᵢ / Σ wᵢ with wᵢ = 2^(lseᵢ - max), as in `combine_rows`, made for the least time between the last part's
arrival and the end, in which nothing else runs:

    addresses   all computed before the wait, which takes them as an operand: without one, ptxas moves the wait to the
                top, and 90 instructions that could have run during it come behind it
    loads       marks and parts are asked for together, right behind the wait
    weights     every warp makes those of its half of a row for itself, in registers: no barrier in front of the sums
    placement   as many blocks as the chip's SMs take evenly, and no more of them on one SM than that: a combine is
                placed while the attention's blocks end, and would crowd onto those SMs that are free first

Parts are those of `lib.latent.ending`. The order of every sum is fixed, so results are the same bits every run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float16, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from mla_var3.kernel.cute_python.lib import host
from mla_var3.kernel.cute_python.lib.latent.ending import MARKS
from mla_var3.kernel.cute_python.lib.softmax import exp2, natural_lse
from mla_var3.kernel.cute_python.lib.split import merge
from mla_var3.kernel.cute_python.lib.split.combine_rows import fake_parts
from mla_var3.kernel.cute_python.lib.split.splits import MAX_SPLITS
from mla_var3.kernel.cute_python.lib.split.spread import most_splits, spread
from mla_var3.runtime import CuteKernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_var3.device import Device
    from mla_var3.runtime.plan import KernelPlan

WARP = 32
SHARE = 4  # parts of a warp, up to 16 warps that share a piece
AHEAD = 8  # parts that a warp has in flight together
WARPS = 8  # of a block, where there is that much to do


@dataclass(frozen=True)
class Cut:
    """How the work is cut; the code is made for it.

    most: splits. vector: columns of a lane. units: pieces of rows a block. per_sm: blocks an SM may hold, or 0 for as
    many as fit. smem: bytes of shared memory of a block, None for what it needs.
    """

    most: int
    vector: int
    units: int
    per_sm: int
    smem: int | None

    @property
    def groups(self) -> int:
        """Warps that share the parts of a piece."""
        return min(-(-self.most // SHARE), 16)

    @property
    def share(self) -> int:
        """Parts of a warp."""
        return -(-self.most // self.groups)

    @property
    def columns(self) -> int:
        """Of a piece; it lies in one half of a row."""
        return WARP * self.vector

    @property
    def width(self) -> int:
        """Columns of a thread in the sum over the warps of a piece."""
        return max(2, self.vector // self.groups)

    @property
    def sums_bytes(self) -> int:
        """What the sums of a block's warps take in shared memory."""
        return 4 * self.columns * self.groups * self.units if self.groups > 1 else 0

    @property
    def name(self) -> str:
        return f"combine_warps{self.most}x{self.vector}x{self.units}x{self.per_sm}"


def cut_work(tokens: int, h: int, k: int, splits: int, device: Device) -> Cut:
    """The cut for `tokens` query tokens over all requests, each h rows of k columns in `splits` parts.

    Measured on an H200: with blocks of one size left to themselves b1 s1 h128 t65536 (128 rows, 64 parts) takes
    38.7 us, spread evenly 37.3; b8 s2 h16 t8192 27.8 and 27.1; b1 s1 h16 t131072 (16 rows, 128 parts) 45.0 in pieces
    of 256 columns and 43.9 in pieces of 128 or 64.
    """
    most = most_splits(splits)
    widths = [v for v in (8, 4, 2) if k // 2 % (WARP * v) == 0]
    vector = next((v for v in widths if 3 * tokens * h * k // (WARP * v) >= device.num_sms), widths[-1])
    pieces = h * k // (WARP * vector)  # of a token
    groups = Cut(most, vector, 1, 0, None).groups
    units = max(1, WARPS // groups)
    # With all 256 splits a thread holds 16 parts: 1024 threads would spill them.
    if groups >= WARPS and most < MAX_SPLITS:
        units = min(max(1, -(-tokens * pieces // device.num_sms)), WARP // groups)
    units = min(units, pieces)
    blocks = tokens * -(-pieces // units)
    per_sm, smem = spread(blocks, device)
    cut = Cut(most, vector, units, per_sm, None)
    return replace(cut, smem=max(cut.sums_bytes, smem)) if per_sm else cut


@cute.jit
def wait_with(addresses: Int64):
    """`griddepcontrol.wait` behind the computation of `addresses`, which are not 0."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s64 p, {$r0}, 0; @p griddepcontrol.wait; }", read_only_args=[addresses]
    )


@cute.jit
def warp_max(value: Float32) -> Float32:
    """Maximum over a warp: one instruction on integers that compare as the floats do, five shuffles on floats."""
    bits = value.bitcast(Int32)
    most = Int32(cute.arch.warp_redux_sync(bits ^ ((bits >> 31) & 0x7FFFFFFF), "max"))
    return (most ^ ((most >> 31) & 0x7FFFFFFF)).bitcast(Float32)


@cute.jit
def make_weights(
    marks: cute.Tensor,  # (MARKS, n) fp32, registers: of this lane's splits; the first is -inf without keys
    half: Int32,
    weights: cute.Tensor,  # (n,) fp32, registers: what this half of each of them counts
) -> tuple[Float32, Float32]:
    """Returns the maximum over all splits (0 when none has keys) and this lane's part of the sum of their weights."""
    n = cute.size(weights)
    best = marks[0, 0]
    for j in cutlass.range_constexpr(1, n):
        best = cute.arch.fmax(best, marks[0, j])
    best = warp_max(best)
    shift = best if best > -Float32.inf else Float32(0.0)
    total = Float32(0.0)
    for j in cutlass.range_constexpr(n):
        mark = marks[2, j] if half > 0 else marks[1, j]
        # Without keys only the first mark was written.
        weights[j] = exp2(mark - shift) if marks[0, j] > -Float32.inf else Float32(0.0)
        total = total + exp2(marks[0, j] - shift)
    return shift, total


@cute.jit
def store(acc: cute.Tensor, inverse: Float32, target: cute.Tensor):
    """acc · inverse to consecutive elements of `target`, rounded once."""
    packed = cute.make_rmem_tensor(cute.size(acc), target.element_type)
    for i in cutlass.range_constexpr(cute.size(acc)):
        packed[i] = (acc[i] * inverse).to(target.element_type)
    cute.autovec_copy(packed, target)


@cute.kernel
def combine_warps(
    parts: cute.Tensor,  # (splits, b, s, h, k) fp16, global memory, contiguous
    marks: cute.Tensor,  # (splits, b, h, s, MARKS) fp32, global memory, contiguous
    out: cute.Tensor,  # (b, s, h, k) 16-bit, global memory, contiguous
    lse: cute.Tensor,  # (b, h, s) fp32, natural log, global memory, contiguous
    cut: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    block, token, batch = cute.arch.block_idx()
    splits, b, s, h, k = parts.shape
    groups, share, vector = cut.groups, cut.share, cut.vector
    pieces = k // cut.columns
    rounds = -(-cut.most // WARP)  # splits of a lane, of which it reads the marks
    lane = thread % WARP
    warp = cute.arch.make_warp_uniform(thread // WARP)
    group, mine = warp % groups, warp // groups
    there = block * cut.units + mine < h * pieces
    unit = cutlass.min(block * cut.units + mine, h * pieces - 1)
    head, piece = unit // pieces, unit % pieces
    stride = Int64(b) * (s * h)  # rows of a split
    row = (Int64(batch) * s + token) * h + head
    mark = (Int64(batch) * h + head) * s + token
    column = piece * cut.columns + lane * vector

    # Past the last split its own are read once more: those weigh nothing.
    of_marks = [
        cute.make_tensor(
            marks.iterator
            + cute.assume((cutlass.min(lane + j * WARP, splits - 1) * stride + mark) * MARKS, divby=MARKS),
            cute.make_layout(MARKS),
        )
        for j in range(rounds)
    ]
    of_parts = [
        cute.make_tensor(
            parts.iterator
            + cute.assume((cutlass.min(group + j * groups, splits - 1) * stride + row) * k + column, divby=vector),
            cute.make_layout(vector),
        )
        for j in range(share)
    ]
    addresses = Int64(0)
    for source in (*of_marks, *of_parts):
        addresses = addresses | source.iterator.toint()
    wait_with(addresses)

    found = cute.make_rmem_tensor((MARKS, rounds), Float32)
    values = cute.make_rmem_tensor((vector, share), Float16)
    for j in cutlass.range_constexpr(rounds):
        cute.autovec_copy(of_marks[j], found[None, j])
    for j in cutlass.range_constexpr(min(share, AHEAD)):
        cute.autovec_copy(of_parts[j], values[None, j])
    for j in cutlass.range_constexpr(rounds):
        found[0, j] = found[0, j] if lane + j * WARP < splits else -Float32.inf
    weights = cute.make_rmem_tensor(rounds, Float32)
    shift, total = make_weights(found, piece // (pieces // 2), weights)
    acc = cute.make_rmem_tensor(vector, Float32)
    acc.fill(0.0)
    words = cute.recast_tensor(values, Int32)
    for j in cutlass.range_constexpr(share):
        if cutlass.const_expr(j >= AHEAD):
            cute.autovec_copy(of_parts[j], values[None, j])
        weight = Float32(cute.arch.shuffle_sync(weights[j * groups // WARP], group + j * groups % WARP))
        for i in cutlass.range_constexpr(vector // 2):
            # A split without keys wrote nothing: what is read there may be NaN.
            words[i, j] = words[i, j] if weight > 0.0 else Int32(0)
        for i in cutlass.range_constexpr(vector):
            acc[i] = acc[i] + weight * Float32(values[i, j])
    total = merge.warp_all(total, False)
    inverse = cute.arch.rcp_approx(total) if total > 0.0 else Float32(0.0)

    first = row * k + piece * cut.columns  # of the output, this piece's
    if cutlass.const_expr(groups == 1):
        if there:
            to = out.iterator + cute.assume(first + lane * vector, divby=vector)
            store(acc, inverse, cute.make_tensor(to, cute.make_layout(vector)))
    else:
        width = cut.width
        sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout((cut.columns, groups, cut.units)), 16)
        cute.autovec_copy(acc, cute.zipped_divide(sums[None, group, mine], (vector,))[None, lane])
        cute.arch.sync_threads()
        at = group * WARP + lane
        if there and at < cut.columns // width:
            ours = cute.make_rmem_tensor(width, Float32)
            theirs = cute.make_rmem_tensor((width, groups), Float32)
            for g in cutlass.range_constexpr(groups):
                cute.autovec_copy(cute.zipped_divide(sums[None, g, mine], (width,))[None, at], theirs[None, g])
            ours.fill(0.0)
            for g in cutlass.range_constexpr(groups):
                for i in cutlass.range_constexpr(width):
                    ours[i] = ours[i] + theirs[i, g]
            to = out.iterator + cute.assume(first + at * width, divby=width)
            store(ours, inverse, cute.make_tensor(to, cute.make_layout(width)))
    if there and piece == 0 and group == 0 and lane == 0:
        lse[batch, head, token] = natural_lse(total, shift)


combine_warps.set_name_prefix("combine_warps", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def launch_combine_warps(
    parts: cute.Tensor,
    marks: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    cut: cutlass.Constexpr,
    stream: CUstream,
):
    """Host function: a block for `units` pieces of the rows of a token, a warp for each of them and of its groups."""
    _, b, s, h, k = parts.shape
    pieces = h * (k // cut.columns)
    combine_warps(parts, marks, out, lse, cut).launch(
        grid=((pieces + cut.units - 1) // cut.units, s, b),
        block=(WARP * cut.units * cut.groups, 1, 1),
        smem=cut.smem,
        stream=stream,
        use_pdl=True,
    )


def combine_kernel(plan: KernelPlan, partials: Sequence[Any], outputs: Sequence[Any], splits: int) -> CuteKernel:
    """The second stage: (parts, marks) into outputs (out, lse). Without them, compiles only."""
    pd = plan.problem
    requests = outputs[0].shape[0] if outputs else pd.b
    cut = cut_work(requests * pd.s, pd.h, pd.k, splits, host.target(plan))

    def arguments() -> tuple[Any, ...]:
        return (*fake_parts(pd), cut)

    return host.stage(plan, combine_warps, launch_combine_warps, cut.name, arguments, partials, outputs)
