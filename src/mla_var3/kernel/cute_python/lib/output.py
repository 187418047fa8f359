"""What a block writes: its rows of the output, or partial results for `combine`."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from mla_var3.kernel.cute_python.lib import rows, wgmma


@cute.jit
def store_output(
    acc_o: cute.Tensor,  # registers: 64 x half accumulator of one consumer, already divided by the row sums
    tiled_mma: cute.TiledMma,
    staging: cute.Tensor,  # shared memory, swizzled, (64, half): nobody else's
    out: cute.Tensor,  # (b, s, h, k), global memory
    first_column: cutlass.Constexpr,
    batch: Int32,
    kv_head: Int32,
    first_row: Int32,
    num_rows: cutlass.Constexpr,
    group: cutlass.Constexpr,
    thread: Int32,  # 0..127
    barrier: cutlass.Constexpr,  # named barrier of this warpgroup
):
    """Rounds one consumer's columns and writes them through shared memory, whole rows at a time."""
    copy = cute.make_tiled_copy_C(wgmma.stmatrix_atom(out.element_type), tiled_mma).get_slice(thread)
    cute.copy(copy, copy.retile(wgmma.to_dtype(acc_o, out.element_type)), copy.partition_D(staging))
    cute.arch.barrier(barrier_id=barrier, number_of_threads=wgmma.WARPGROUP)
    rows.store_rows(staging, out, first_column, batch, kv_head, first_row, num_rows, group, thread)


@cute.jit
def store_row_results(
    acc_row: cute.Tensor,  # registers: this thread's part of one accumulator row
    first_column: cutlass.Constexpr,
    total: Float32,  # sum of the row's exp2
    lse_log2: Float32,  # maximum plus log2 of the sum
    lse: cute.Tensor,  # (b, h, s) fp32, global memory
    partial_out: cute.Tensor,  # (splits, b, h_kv, rows, k) fp32, global memory
    partial_lse: cute.Tensor,  # (splits, b, h_kv, rows) fp32, global memory
    batch: Int32,
    kv_head: Int32,
    row: Int32,
    split: Int32,
    num_splits: Int32,
    group: cutlass.Constexpr,
    thread: Int32,  # 0..127
):
    """lse of a row, and its partial output when there is more than one split. first_column 0 writes the lse."""
    writes_lse = first_column == 0
    if num_splits == 1:
        if cutlass.const_expr(writes_lse):
            if thread % 4 == 0:
                value = lse_log2 * math.log(2.0) if total > 0.0 else Float32.inf
                lse[batch, kv_head * group + row % group, row // group] = value
    else:
        index = rows.partial_row(partial_lse, split, batch, kv_head, row)
        if cutlass.const_expr(writes_lse):
            if thread % 4 == 0:
                flat = cute.make_tensor(partial_lse.iterator + index, cute.make_layout(1))
                flat[0] = lse_log2 if total > 0.0 else -Float32.inf
        k = partial_out.shape[4]
        target = cute.make_tensor(partial_out.iterator + cute.assume(index * k, divby=k), cute.make_layout(k))
        rows.store_accumulator_row(acc_row, target, first_column, thread)


@cute.jit
def store_empty(
    out: cute.Tensor,  # (b, s, h, k), global memory
    lse: cute.Tensor,  # (b, h, s) fp32, global memory
    partial_lse: cute.Tensor,  # (splits, b, h_kv, rows) fp32, global memory
    batch: Int32,
    kv_head: Int32,
    first_row: Int32,
    num_rows: cutlass.Constexpr,
    group: cutlass.Constexpr,
    split: Int32,
    num_splits: Int32,
    thread: Int32,  # 0..255
):
    """A block without keys: zeros and +inf, or, with several splits, only the mark that makes `combine` skip it."""
    row = first_row + thread // 4
    if row < num_rows:
        if num_splits == 1:
            k = out.shape[3]
            zeros = cute.make_rmem_tensor(rows.CHUNK, out.element_type)
            zeros.fill(0.0)
            target = cute.zipped_divide(rows.row_vector(out, batch, kv_head, row, group, k), (rows.CHUNK,))
            for i in cutlass.range(thread % 4, k // rows.CHUNK, 4, unroll=1):
                cute.autovec_copy(zeros, target[None, i])
            if thread % 4 == 0:
                lse[batch, kv_head * group + row % group, row // group] = Float32.inf
        else:
            if thread % 4 == 0:
                index = rows.partial_row(partial_lse, split, batch, kv_head, row)
                flat = cute.make_tensor(partial_lse.iterator + index, cute.make_layout(1))
                flat[0] = -Float32.inf
