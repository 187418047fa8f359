"""Combining partial results that are stored as the output is: out = Σ wᵢ Oᵢ / Σ wᵢ, wᵢ = 2^(lseᵢ - max).

`combine_groups` for partial outputs of the output's own type and layout, each divided by its own sum: half the bytes,
16 of them a thread. Rounding a part to 16 bits is one more rounding of the size of the output's own.
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
from mla_var3.kernel.cute_python.lib.split.combine_groups import WARP, write_weights
from mla_var3.kernel.cute_python.lib.split.splits import MAX_SPLITS
from mla_var3.runtime import CuteKernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_var3.runtime.plan import KernelPlan

VECTOR = 8  # 16-bit elements in 16 bytes


def num_groups(splits: int) -> int:
    """Groups that share the splits of a row: about four splits each, 1024 threads at most."""
    return 1 if splits <= 2 else 4 if splits <= 16 else 8 if splits <= 32 else 16


@cute.kernel
def combine_rows(
    partial_out: cute.Tensor,  # (splits, b, s, h, k) 16-bit, global memory, contiguous
    partial_lse: cute.Tensor,  # (splits, b, h, s) fp32, log2 domain, global memory, contiguous
    out: cute.Tensor,  # (b, s, h, k) 16-bit, global memory, contiguous
    lse: cute.Tensor,  # (b, h, s) fp32, natural log, global memory, contiguous
    groups: cutlass.Constexpr,
):
    thread, group, _ = cute.arch.thread_idx()
    head, token, batch = cute.arch.block_idx()
    splits, b, s, h, k = partial_out.shape
    stride = Int64(b) * (s * h)  # rows of a split
    index = (Int64(batch) * s + token) * h + head
    lse_index = (Int64(batch) * h + head) * s + token
    lses = cute.make_tensor(partial_lse.iterator + lse_index, cute.make_layout(splits, stride=stride))
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
    part = cute.make_rmem_tensor(VECTOR, out.element_type)
    for i in cutlass.range(group, splits, groups, unroll=4):
        weight = weights[i]
        cute.autovec_copy(values[None, thread, i], part)
        for j in cutlass.range_constexpr(VECTOR):
            # A split without keys wrote nothing: what is read there may be NaN.
            acc[j] = acc[j] + (weight * Float32(part[j]) if weight > 0.0 else Float32(0.0))
    theirs = cute.make_rmem_tensor(VECTOR, Float32)
    if cutlass.const_expr(groups > 1):
        cute.autovec_copy(acc, sums[None, thread, group])
        cute.arch.sync_threads()
    if group == 0:
        for g in cutlass.range(1, groups, unroll=4):
            cute.autovec_copy(sums[None, thread, g], theirs)
            for j in cutlass.range_constexpr(VECTOR):
                acc[j] = acc[j] + theirs[j]
        total = summary[1]
        inverse = 1.0 / total if total > 0.0 else Float32(0.0)
        for j in cutlass.range_constexpr(VECTOR):
            part[j] = (acc[j] * inverse).to(out.element_type)
        row = cute.make_tensor(out.iterator + cute.assume(index * k, divby=k), cute.make_layout((VECTOR, k // VECTOR)))
        cute.autovec_copy(part, row[None, thread])
        if thread == 0:
            value = Float32.inf
            if total > 0.0:
                value = (cute.math.log2(total, fastmath=True) + summary[0]) * math.log(2.0)
            lse[batch, head, token] = value


combine_rows.set_name_prefix("combine_rows", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def launch_combine_rows(
    partial_out: cute.Tensor,
    partial_lse: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    groups: cutlass.Constexpr,
    stream: CUstream,
):
    """Host function: grid (h, s, b), (k / 8, groups) threads a block."""
    _, b, s, h, k = partial_out.shape
    combine_rows(partial_out, partial_lse, out, lse, groups).launch(
        grid=(h, s, b), block=(k // VECTOR, groups, 1), stream=stream, use_pdl=True
    )


def combine_kernel(plan: KernelPlan, partials: Sequence[Any], outputs: Sequence[Any], splits: int) -> CuteKernel:
    """The second stage: (partial_out, partial_lse) into outputs (out, lse). Without them, compiles only."""
    pd, groups = plan.problem, num_groups(splits)

    def arguments() -> tuple[Any, ...]:
        b, n = host.symbols(2)
        kind = host.element_type(pd.dtype)
        return (
            host.fake(kind, n, b, pd.s, pd.h, pd.k),
            host.fake(Float32, n, b, pd.h, pd.s, align=4),
            host.fake(kind, b, pd.s, pd.h, pd.k),
            host.fake(Float32, b, pd.h, pd.s, align=4),
            groups,
        )

    name = f"combine_rows{groups}"
    compile_fn = host.compiler(launch_combine_rows, arguments, name)
    call = host.function(plan, name, compile_fn) if outputs else None
    return CuteKernel(
        combine_rows,
        host.launcher(call, *partials, *outputs),
        partials,
        outputs,
        plan.tiling,
        compile_fn=compile_fn,
        name=name,
        plan=plan,
    )
