"""Combining the partial results of split-KV with the splits shared out: out = Σ wᵢ Oᵢ / Σ wᵢ, wᵢ = 2^(lseᵢ - max).

One block a query row; k / 4 threads a group, four columns a thread, and group g sums splits g, g + groups, ... All
weights are made by one warp at once, and the groups' loads are in flight together, so the time hardly grows with the
number of splits. It starts while the kernel before it ends (programmatic dependent launch) and waits for its results.
Splits without keys have lse = -inf: what was not written is read and thrown away. The order of every sum is fixed, so
results are the same bits every run.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int64
from cutlass.memory import SmemAllocator

from mla_var3.kernel.cute_python.lib import host
from mla_var3.kernel.cute_python.lib.rows import row_vector
from mla_var3.kernel.cute_python.lib.softmax import exp2
from mla_var3.kernel.cute_python.lib.split.combine import VECTOR, fake_partials
from mla_var3.kernel.cute_python.lib.split.splits import MAX_SPLITS
from mla_var3.runtime import CuteKernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_var3.runtime.plan import KernelPlan

WARP = 32


def num_groups(splits: int) -> int:
    """Groups that share the splits of a row: about four splits each, 1024 threads at most."""
    return 1 if splits <= 2 else 4 if splits <= 16 else 8


@cute.jit
def write_weights(
    lses: cute.Tensor,  # (splits,) fp32, log2 domain, global memory
    weights: cute.Tensor,  # (MAX_SPLITS,) fp32, shared memory
    summary: cute.Tensor,  # (2,) fp32, shared memory: the maximum (0 when no split has keys) and the sum of weights
    lane: cutlass.Int32,
):
    """One warp turns all lse of a row into weights."""
    splits = cute.size(lses)
    mine = cute.make_rmem_tensor(MAX_SPLITS // WARP, Float32)
    best = -Float32.inf
    for i in cutlass.range_constexpr(MAX_SPLITS // WARP):
        mine[i] = -Float32.inf
        if lane + i * WARP < splits:
            mine[i] = lses[lane + i * WARP]
    for i in cutlass.range_constexpr(MAX_SPLITS // WARP):
        best = cute.arch.fmax(best, mine[i])
    for i in cutlass.range_constexpr(5):
        best = cute.arch.fmax(best, cute.arch.shuffle_sync_bfly(best, offset=1 << i))
    shift = best if best > -Float32.inf else Float32(0.0)
    total = Float32(0.0)
    for i in cutlass.range_constexpr(MAX_SPLITS // WARP):
        weight = exp2(mine[i] - shift)
        weights[lane + i * WARP] = weight
        total = total + weight
    for i in cutlass.range_constexpr(5):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << i)
    if lane == 0:
        summary[0] = shift
        summary[1] = total


@cute.kernel
def combine_groups(
    partial_out: cute.Tensor,  # (splits, b, h_kv, rows, k) fp32, global memory, contiguous
    partial_lse: cute.Tensor,  # (splits, b, h_kv, rows) fp32, log2 domain, global memory, contiguous
    out: cute.Tensor,  # (b, s, h, k) 16-bit, global memory, contiguous
    lse: cute.Tensor,  # (b, h, s) fp32, natural log, global memory, contiguous
    groups: cutlass.Constexpr,
):
    thread, group, _ = cute.arch.thread_idx()
    row, kv_head, batch = cute.arch.block_idx()
    splits, b, h_kv, rows, k = partial_out.shape
    heads = lse.shape[1] // h_kv
    stride = Int64(b) * (h_kv * rows)
    index = (Int64(batch) * h_kv + kv_head) * rows + row
    lses = cute.make_tensor(partial_lse.iterator + index, cute.make_layout(splits, stride=stride))
    values = cute.make_tensor(
        partial_out.iterator + cute.assume(index * k, divby=k),
        cute.make_layout((VECTOR, k // VECTOR, splits), stride=(1, VECTOR, cute.assume(stride * k, divby=k))),
    )
    memory = SmemAllocator()
    weights = memory.allocate_tensor(Float32, cute.make_layout(MAX_SPLITS), 16)
    summary = memory.allocate_tensor(Float32, cute.make_layout(2), 8)
    sums = memory.allocate_tensor(Float32, cute.make_layout((VECTOR, k // VECTOR, groups)), 16)

    cute.arch.griddepcontrol_wait()
    if group == 0 and thread < WARP:
        write_weights(lses, weights, summary, thread)
    cute.arch.sync_threads()

    acc = cute.make_rmem_tensor(VECTOR, Float32)
    acc.fill(0.0)
    part = cute.make_rmem_tensor(VECTOR, Float32)
    for i in cutlass.range(group, splits, groups, unroll=4):
        weight = weights[i]
        cute.autovec_copy(values[None, thread, i], part)
        for j in cutlass.range_constexpr(VECTOR):
            acc[j] = acc[j] + (weight * part[j] if weight > 0.0 else Float32(0.0))
    if cutlass.const_expr(groups > 1):
        cute.autovec_copy(acc, sums[None, thread, group])
        cute.arch.sync_threads()
    if group == 0:
        for g in cutlass.range_constexpr(1, groups):
            cute.autovec_copy(sums[None, thread, g], part)
            for j in cutlass.range_constexpr(VECTOR):
                acc[j] = acc[j] + part[j]
        total = summary[1]
        inverse = 1.0 / total if total > 0.0 else Float32(0.0)
        packed = cute.make_rmem_tensor(VECTOR, out.element_type)
        for j in cutlass.range_constexpr(VECTOR):
            packed[j] = (acc[j] * inverse).to(out.element_type)
        target = cute.zipped_divide(row_vector(out, batch, kv_head, row, heads, k), (VECTOR,))
        cute.autovec_copy(packed, target[None, thread])
        if thread == 0:
            value = Float32.inf
            if total > 0.0:
                value = (cute.math.log2(total, fastmath=True) + summary[0]) * math.log(2.0)
            lse[batch, kv_head * heads + row % heads, row // heads] = value


combine_groups.set_name_prefix("combine_groups", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def launch_combine_groups(
    partial_out: cute.Tensor,
    partial_lse: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    groups: cutlass.Constexpr,
    stream: CUstream,
):
    """Host function: grid (rows, h_kv, b), (k / 4, groups) threads a block."""
    _, b, h_kv, rows, k = partial_out.shape
    combine_groups(partial_out, partial_lse, out, lse, groups).launch(
        grid=(rows, h_kv, b), block=(k // VECTOR, groups, 1), stream=stream, use_pdl=True
    )


def combine_kernel(plan: KernelPlan, partials: Sequence[Any], outputs: Sequence[Any], splits: int) -> CuteKernel:
    """The second stage: (partial_out, partial_lse) into outputs (out, lse). Without them, compiles only."""
    pd, groups = plan.problem, num_groups(splits)

    def arguments() -> tuple[Any, ...]:
        (b,) = host.symbols(1)
        return (*fake_partials(host.element_type(pd.dtype), b, pd.s, pd.h, pd.h_kv, pd.k), groups)

    return host.stage(
        plan, combine_groups, launch_combine_groups, f"combine_groups{groups}", arguments, partials, outputs
    )
