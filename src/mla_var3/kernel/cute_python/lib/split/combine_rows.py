"""Combining parts in 16 bits: out = Σ wᵢ Oᵢ / Σ wᵢ, wᵢ = 2^(lseᵢ - max).

`combine_groups` for parts that `lib.latent.ending` wrote: fp16, laid out as the output, divided by their own sums, each
half of a row scaled by a power of two of its own. Half the bytes, 16 of them a thread, and no rounding that counts.

Parts are asked for before it is known what they count. Tried on an H200 and left out: the marks asked for ahead of the
parts (no gain), and the code run once dry while it waits for the kernel before (1 % on the shortest request, a loss of
1 to 4 % elsewhere).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float16, Float32, Int64
from cutlass.memory import SmemAllocator

from mla_var3.kernel.cute_python.lib import host
from mla_var3.kernel.cute_python.lib.latent.ending import MARKS
from mla_var3.kernel.cute_python.lib.softmax import exp2
from mla_var3.kernel.cute_python.lib.split.splits import MAX_SPLITS
from mla_var3.runtime import CuteKernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_var3.problem import MlaProblem
    from mla_var3.runtime.plan import KernelPlan

VECTOR = 8  # 16-bit elements in 16 bytes
WARP = 32


def most_splits(splits: int) -> int:
    """The number of splits up to which the code is made that serves `splits`: less of it for fewer."""
    return next(most for most in (2, 4, 8, 16, 32, 64, MAX_SPLITS) if most >= splits)


def num_groups(most: int) -> int:
    """Groups that share the splits of a row: about four splits each, 1024 threads at most."""
    return 1 if most <= 8 else min(most // 4, 16)


def rows_together(most: int) -> int:
    """Rows of a block: several where there are few splits, because blocks cost more than what is read."""
    return 4 if most <= 8 else 1


@cute.jit
def write_weights(
    marks: cute.Tensor,  # (MARKS, splits) fp32, global memory
    weights: cute.Tensor,  # (32 n, 2) fp32, shared memory: of the halves of a row
    summary: cute.Tensor,  # (2,) fp32, shared memory: the maximum (0 when no split has keys) and the sum of weights
    lane: cutlass.Int32,
):
    """One warp turns the marks of a row into what each half of each part counts."""
    splits = cute.size(marks, mode=[1])
    rounds = cute.size(weights, mode=[0]) // WARP
    mine = cute.make_rmem_tensor((MARKS, rounds), Float32)
    best = -Float32.inf
    for i in cutlass.range_constexpr(rounds):
        mine[0, i] = -Float32.inf
        if lane + i * WARP < splits:
            cute.autovec_copy(marks[None, lane + i * WARP], mine[None, i])
    for i in cutlass.range_constexpr(rounds):
        best = cute.arch.fmax(best, mine[0, i])
    for i in cutlass.range_constexpr(5):
        best = cute.arch.fmax(best, cute.arch.shuffle_sync_bfly(best, offset=1 << i))
    shift = best if best > -Float32.inf else Float32(0.0)
    total = Float32(0.0)
    for i in cutlass.range_constexpr(rounds):
        weight = exp2(mine[0, i] - shift)
        for half in cutlass.range_constexpr(2):
            # Without keys only the first mark was written.
            weights[lane + i * WARP, half] = exp2(mine[1 + half, i] - shift) if weight > 0.0 else Float32(0.0)
        total = total + weight
    for i in cutlass.range_constexpr(5):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << i)
    if lane == 0:
        summary[0] = shift
        summary[1] = total


@cute.jit
def add(acc: cute.Tensor, part: cute.Tensor, weight: Float32):
    """acc += weight · part, (VECTOR,) registers each."""
    for j in cutlass.range_constexpr(VECTOR):
        # A split without keys wrote nothing: what is read there may be NaN.
        acc[j] = acc[j] + (weight * Float32(part[j]) if weight > 0.0 else Float32(0.0))


@cute.kernel
def combine_rows(
    parts: cute.Tensor,  # (splits, b, s, h, k) fp16, global memory, contiguous
    marks: cute.Tensor,  # (splits, b, h, s, MARKS) fp32, global memory, contiguous
    out: cute.Tensor,  # (b, s, h, k) 16-bit, global memory, contiguous
    lse: cute.Tensor,  # (b, h, s) fp32, natural log, global memory, contiguous
    most: cutlass.Constexpr,  # splits
):
    groups, together = num_groups(most), rows_together(most)
    thread, y, _ = cute.arch.thread_idx()
    block, token, batch = cute.arch.block_idx()
    group, mine = y % groups, y // groups
    splits, b, s, h, k = parts.shape
    chunks = k // VECTOR
    there = block * together + mine < h
    head = cutlass.min(block * together + mine, h - 1)
    stride = Int64(b) * (s * h)  # rows of a split
    index = (Int64(batch) * s + token) * h + head
    mark = (Int64(batch) * h + head) * s + token
    row_marks = cute.make_tensor(
        marks.iterator + cute.assume(mark * MARKS, divby=MARKS),
        cute.make_layout((MARKS, splits), stride=(1, cute.assume(stride * MARKS, divby=MARKS))),
    )
    values = cute.make_tensor(
        parts.iterator + cute.assume(index * k, divby=k),
        cute.make_layout((VECTOR, chunks, splits), stride=(1, VECTOR, cute.assume(stride * k, divby=k))),
    )
    memory = SmemAllocator()
    all_weights = memory.allocate_tensor(Float32, cute.make_layout((-(-most // WARP) * WARP, 2, together)), 16)
    all_summaries = memory.allocate_tensor(Float32, cute.make_layout((2, together)), 8)
    weights, summary = all_weights[None, None, mine], all_summaries[None, mine]
    sums = memory.allocate_tensor(Float32, cute.make_layout((VECTOR, chunks, groups)), 16)

    acc = cute.make_rmem_tensor(VECTOR, Float32)
    acc.fill(0.0)
    half = thread // (chunks // 2)
    ahead = min(-(-most // groups), 4)
    early = cute.make_rmem_tensor((VECTOR, ahead), Float16)

    cute.arch.griddepcontrol_wait()
    # On their way before it is known what they count.
    for n in cutlass.range_constexpr(ahead):
        cute.autovec_copy(values[None, thread, cutlass.min(group + n * groups, splits - 1)], early[None, n])
    if group == 0 and thread < WARP:
        write_weights(row_marks, weights, summary, thread)
    cute.arch.sync_threads()
    for n in cutlass.range_constexpr(ahead):
        i = group + n * groups
        if i < splits:
            add(acc, early[None, n], weights[i, half])
    if cutlass.const_expr(most > ahead * groups):
        part = cute.make_rmem_tensor(VECTOR, Float16)
        for i in cutlass.range(group + ahead * groups, splits, groups, unroll=4):
            cute.autovec_copy(values[None, thread, i], part)
            add(acc, part, weights[i, half])
    theirs = cute.make_rmem_tensor(VECTOR, Float32)
    if cutlass.const_expr(groups > 1):
        cute.autovec_copy(acc, sums[None, thread, group])
        cute.arch.sync_threads()
    if group == 0 and there:
        for g in cutlass.range(1, groups, unroll=4):
            cute.autovec_copy(sums[None, thread, g], theirs)
            for j in cutlass.range_constexpr(VECTOR):
                acc[j] = acc[j] + theirs[j]
        total = summary[1]
        inverse = 1.0 / total if total > 0.0 else Float32(0.0)
        packed = cute.make_rmem_tensor(VECTOR, out.element_type)
        for j in cutlass.range_constexpr(VECTOR):
            packed[j] = (acc[j] * inverse).to(out.element_type)
        row = cute.make_tensor(out.iterator + cute.assume(index * k, divby=k), cute.make_layout((VECTOR, chunks)))
        cute.autovec_copy(packed, row[None, thread])
        if thread == 0:
            value = Float32.inf
            if total > 0.0:
                value = (cute.math.log2(total, fastmath=True) + summary[0]) * math.log(2.0)
            lse[batch, head, token] = value


combine_rows.set_name_prefix("combine_rows", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def launch_combine_rows(
    parts: cute.Tensor,
    marks: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    most: cutlass.Constexpr,
    stream: CUstream,
):
    """Host function: grid (h / rows, s, b), (k / 8, groups · rows) threads a block."""
    groups, together = num_groups(most), rows_together(most)
    _, b, s, h, k = parts.shape
    combine_rows(parts, marks, out, lse, most).launch(
        grid=((h + together - 1) // together, s, b),
        block=(k // VECTOR, groups * together, 1),
        stream=stream,
        use_pdl=True,
    )


def fake_parts(pd: MlaProblem) -> tuple[Any, ...]:
    """(parts, marks, out, lse) to compile from; the numbers of requests and of splits are given at the call."""
    b, n = host.symbols(2)
    return (
        host.fake(Float16, n, b, pd.s, pd.h, pd.k),
        host.fake(Float32, n, b, pd.h, pd.s, MARKS),
        host.fake(host.element_type(pd.dtype), b, pd.s, pd.h, pd.k),
        host.fake(Float32, b, pd.h, pd.s, align=4),
    )


def combine_kernel(plan: KernelPlan, partials: Sequence[Any], outputs: Sequence[Any], splits: int) -> CuteKernel:
    """The second stage: (parts, marks) into outputs (out, lse). Without them, compiles only."""
    pd, most = plan.problem, most_splits(splits)

    def arguments() -> tuple[Any, ...]:
        return (*fake_parts(pd), most)

    return host.stage(plan, combine_rows, launch_combine_rows, f"combine_rows{most}", arguments, partials, outputs)
