"""Combining the partial results of split-KV: out = Σ wᵢ Oᵢ / Σ wᵢ with wᵢ = 2^(lseᵢ - max).

One block a query row, one thread for four columns. Splits without keys have lse = -inf: their output is not read
(nobody wrote it). The order of the sum is the order of the splits, so results are the same bits every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int64

from mla_var3.kernel.cute_python.lib import host
from mla_var3.kernel.cute_python.lib.rows import row_vector
from mla_var3.kernel.cute_python.lib.softmax import exp2, natural_lse
from mla_var3.runtime import CuteKernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_var3.runtime.plan import KernelPlan

VECTOR = 4


@cute.kernel
def combine(
    partial_out: cute.Tensor,  # (splits, b, h_kv, rows, k) fp32, global memory, contiguous
    partial_lse: cute.Tensor,  # (splits, b, h_kv, rows) fp32, log2 domain, global memory, contiguous
    out: cute.Tensor,  # (b, s, h, k) 16-bit, global memory, contiguous
    lse: cute.Tensor,  # (b, h, s) fp32, natural log, global memory, contiguous
):
    thread, _, _ = cute.arch.thread_idx()
    row, kv_head, batch = cute.arch.block_idx()
    splits, b, h_kv, rows, k = partial_out.shape
    group = lse.shape[1] // h_kv
    stride = Int64(b) * (h_kv * rows)
    index = (Int64(batch) * h_kv + kv_head) * rows + row

    lses = cute.make_tensor(partial_lse.iterator + index, cute.make_layout(splits, stride=stride))
    values = cute.make_tensor(
        partial_out.iterator + cute.assume(index * k, divby=k),
        cute.make_layout((VECTOR, k // VECTOR, splits), stride=(1, VECTOR, cute.assume(stride * k, divby=k))),
    )
    best = -Float32.inf
    for i in cutlass.range(splits, unroll=4):
        best = cute.arch.fmax(best, lses[i])
    shift = best if best > -Float32.inf else Float32(0.0)

    acc = cute.make_rmem_tensor(VECTOR, Float32)
    acc.fill(0.0)
    part = cute.make_rmem_tensor(VECTOR, Float32)
    total = Float32(0.0)
    for i in cutlass.range(splits, unroll=4):
        weight = exp2(lses[i] - shift)
        if weight > 0.0:
            cute.autovec_copy(values[None, thread, i], part)
            total = total + weight
            for j in cutlass.range_constexpr(VECTOR):
                acc[j] = acc[j] + weight * part[j]

    inverse = 1.0 / total if total > 0.0 else Float32(0.0)
    packed = cute.make_rmem_tensor(VECTOR, out.element_type)
    for j in cutlass.range_constexpr(VECTOR):
        packed[j] = (acc[j] * inverse).to(out.element_type)
    target = cute.zipped_divide(row_vector(out, batch, kv_head, row, group, k), (VECTOR,))
    cute.autovec_copy(packed, target[None, thread])
    if thread == 0:
        lse[batch, kv_head * group + row % group, row // group] = natural_lse(total, shift)


combine.set_name_prefix("combine", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def launch_combine(
    partial_out: cute.Tensor,
    partial_lse: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    stream: CUstream,
):
    """Host function: grid (rows, h_kv, b), k / 4 threads a block."""
    _, b, h_kv, rows, k = partial_out.shape
    combine(partial_out, partial_lse, out, lse).launch(grid=(rows, h_kv, b), block=(k // VECTOR, 1, 1), stream=stream)


def fake_partials(kind: type, b: Any, s: int, h: int, h_kv: int, k: int) -> tuple[Any, Any, Any, Any]:
    """(partial_out, partial_lse, out, lse) to compile from; the number of splits is given at the call."""
    (splits,) = host.symbols(1)
    rows = s * h // h_kv
    return (
        host.fake(Float32, splits, b, h_kv, rows, k),
        host.fake(Float32, splits, b, h_kv, rows, align=4),
        host.fake(kind, b, s, h, k),
        host.fake(Float32, b, h, s, align=4),
    )


def combine_kernel(plan: KernelPlan, partials: Sequence[Any], outputs: Sequence[Any]) -> CuteKernel:
    """The second stage: (partial_out, partial_lse) into outputs (out, lse). Without them, compiles only."""
    pd = plan.problem

    def arguments() -> tuple[Any, ...]:
        (b,) = host.symbols(1)
        return fake_partials(host.element_type(pd.dtype), b, pd.s, pd.h, pd.h_kv, pd.k)

    return host.stage(plan, combine, launch_combine, "combine", arguments, partials, outputs)
