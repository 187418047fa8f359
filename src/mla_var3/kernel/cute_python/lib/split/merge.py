"""Merging the partial results of split-KV with little latency: out = Σ wᵢ Oᵢ / Σ wᵢ with wᵢ = 2^(lseᵢ - max).

`combine` walks the splits of a row one after the other. Here several warps share out the splits of a row, and values
are on their way before their weights are known. Blocks are placed by programmatic dependent launch: they are resident,
waiting, before the last block of the main kernel ends. Splits without keys have lse = -inf; whatever lies in their
output is not used. Sums are in a fixed order, so results are the same bits every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from mla_var3.kernel.cute_python.lib import host
from mla_var3.kernel.cute_python.lib.rows import row_vector
from mla_var3.kernel.cute_python.lib.softmax import exp2, natural_lse
from mla_var3.kernel.cute_python.lib.split import combine
from mla_var3.runtime import CuteKernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_var3.runtime.plan import KernelPlan

VECTOR = 4
COLUMNS = 32 * VECTOR  # of a warp
WARPS = 8  # at most, of a block
MAX_SPLITS = 32 * WARPS
BATCH = 8  # splits whose values a warp has in flight together


def storage() -> type:
    """Weights of the splits, two numbers a warp, and the warps' sums."""
    fields = {
        "weights": cute.struct.MemRange[Float32, MAX_SPLITS],
        "maxima": cute.struct.MemRange[Float32, WARPS],
        "totals": cute.struct.MemRange[Float32, WARPS],
        "sums": cute.struct.Align[cute.struct.MemRange[Float32, WARPS * COLUMNS], 16],
    }
    return cute.struct(type("MergeStorage", (), {"__annotations__": fields}))


@cute.jit
def warp_all(value: Float32, largest: cutlass.Constexpr) -> Float32:
    """Maximum or sum over a warp, the same bits in every lane."""
    for i in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_bfly(value, offset=1 << i)
        value = cute.arch.fmax(value, other) if cutlass.const_expr(largest) else value + other
    return value


@cute.jit
def read(parts: cute.Tensor, values: cute.Tensor, lane: Int32, first: Int32, step: Int32, splits: Int32):
    """Starts reading this lane's columns of up to BATCH splits: first, first + step, …"""
    for j in cutlass.range_constexpr(BATCH):
        split = first + j * step
        if split < splits:
            cute.autovec_copy(values[None, lane, split], parts[None, j])


@cute.jit
def add(acc: cute.Tensor, parts: cute.Tensor, weights: cute.Tensor, first: Int32, step: Int32, splits: Int32):
    """acc += weight · part, in the order of the splits; what has no weight is not looked at (it may be NaN)."""
    for j in cutlass.range_constexpr(BATCH):
        split = first + j * step
        if split < splits:
            weight = weights[split]
            if weight > 0.0:
                for e in cutlass.range_constexpr(VECTOR):
                    acc[e] = acc[e] + weight * parts[e, j]


@cute.kernel
def merge_splits(
    partial_out: cute.Tensor,  # (splits, b, h_kv, rows, k) fp32, global memory, contiguous
    partial_lse: cute.Tensor,  # (splits, b, h_kv, rows) fp32, log2 domain, global memory, contiguous
    out: cute.Tensor,  # (b, s, h, k) 16-bit, global memory, contiguous
    lse: cute.Tensor,  # (b, h, s) fp32, natural log, global memory, contiguous
    sharing: Int32,  # warps that share out the splits of 128 columns
    side: Int32,  # groups of 128 columns in a block: sharing · side warps, 32 times that >= splits
):
    thread, _, _ = cute.arch.thread_idx()
    block, kv_head, batch = cute.arch.block_idx()
    splits, b, h_kv, rows, k = partial_out.shape
    blocks = k // COLUMNS // side  # of a row
    row = block // blocks
    group = lse.shape[1] // h_kv
    stride = Int64(b) * (h_kv * rows)
    index = (Int64(batch) * h_kv + kv_head) * rows + row
    lane = thread % 32
    warp = cute.arch.make_warp_uniform(thread // 32)
    part = warp % sharing
    columns = block % blocks * side + warp // sharing
    memory = SmemAllocator().allocate(storage())
    weights = memory.weights.get_tensor(cute.make_layout(MAX_SPLITS))
    maxima = memory.maxima.get_tensor(cute.make_layout(WARPS))
    totals = memory.totals.get_tensor(cute.make_layout(WARPS))
    sums = memory.sums.get_tensor(cute.make_layout((VECTOR, 32, WARPS)))
    lses = cute.make_tensor(partial_lse.iterator + index, cute.make_layout(splits, stride=stride))
    values = cute.make_tensor(
        partial_out.iterator + cute.assume(index * k + columns * COLUMNS, divby=COLUMNS),
        cute.make_layout((VECTOR, 32, splits), stride=(1, VECTOR, cute.assume(stride * k, divby=k))),
    )
    parts = cute.make_rmem_tensor((VECTOR, BATCH), Float32)
    parts.fill(0.0)

    cute.arch.griddepcontrol_wait()

    read(parts, values, lane, part, sharing, splits)
    mine = lses[thread] if thread < splits else -Float32.inf
    maxima[warp] = warp_all(mine, True)
    cute.arch.sync_threads()
    best = -Float32.inf
    for i in cutlass.range(sharing * side, unroll=1):
        best = cute.arch.fmax(best, maxima[i])
    shift = best if best > -Float32.inf else Float32(0.0)
    weight = exp2(mine - shift)
    weights[thread] = weight
    totals[warp] = warp_all(weight, False)
    cute.arch.sync_threads()
    total = Float32(0.0)
    for i in cutlass.range(sharing * side, unroll=1):
        total = total + totals[i]

    acc = cute.make_rmem_tensor(VECTOR, Float32)
    acc.fill(0.0)
    add(acc, parts, weights, part, sharing, splits)
    for first in cutlass.range(part + BATCH * sharing, splits, BATCH * sharing, unroll=1):
        read(parts, values, lane, first, sharing, splits)
        add(acc, parts, weights, first, sharing, splits)
    if sharing > 1:
        cute.autovec_copy(acc, sums[None, lane, warp])
        cute.arch.sync_threads()

    if part == 0:
        for i in cutlass.range(warp + 1, warp + sharing, unroll=1):
            cute.autovec_copy(sums[None, lane, i], parts[None, 0])
            for e in cutlass.range_constexpr(VECTOR):
                acc[e] = acc[e] + parts[e, 0]
        inverse = 1.0 / total if total > 0.0 else Float32(0.0)
        packed = cute.make_rmem_tensor(VECTOR, out.element_type)
        for e in cutlass.range_constexpr(VECTOR):
            packed[e] = (acc[e] * inverse).to(out.element_type)
        target = cute.zipped_divide(row_vector(out, batch, kv_head, row, group, k), (VECTOR,))
        cute.autovec_copy(packed, target[None, columns * 32 + lane])
        if columns == 0 and lane == 0:
            lse[batch, kv_head * group + row % group, row // group] = natural_lse(total, shift)


merge_splits.set_name_prefix("merge_splits", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def launch_merge_splits(
    partial_out: cute.Tensor,
    partial_lse: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    sharing: Int32,
    side: Int32,
    stream: CUstream,
):
    """Host function: one block for every `side` groups of 128 columns of a row, `sharing` warps on each."""
    _, b, h_kv, rows, k = partial_out.shape
    merge_splits(partial_out, partial_lse, out, lse, sharing, side).launch(
        grid=(rows * (k // COLUMNS // side), h_kv, b),
        block=(32 * sharing * side, 1, 1),
        max_number_threads=(32 * WARPS, 1, 1),
        stream=stream,
        use_pdl=True,
    )


def arrange(splits: int, k: int) -> tuple[int, int]:
    """(sharing, side) of the launch. A warp reads up to eight splits at once: with no more, a block takes a whole row
    (fewer blocks, all resident early); with more, eight warps share them out."""
    return (1, k // COLUMNS) if splits <= BATCH else (WARPS, 1)


def merge_kernel(plan: KernelPlan, partials: Sequence[Any], outputs: Sequence[Any]) -> CuteKernel:
    """The second stage: (partial_out, partial_lse) into outputs (out, lse). Without them, compiles only."""
    pd = plan.problem

    def arguments() -> tuple[Any, ...]:
        (b,) = host.symbols(1)
        return (*combine.fake_partials(host.element_type(pd.dtype), b, pd.s, pd.h, pd.h_kv, pd.k), Int32(1), Int32(1))

    launch = arrange(partials[0].shape[0], pd.k) if outputs else ()
    return host.stage(plan, merge_splits, launch_merge_splits, "merge_splits", arguments, partials, outputs, *launch)
