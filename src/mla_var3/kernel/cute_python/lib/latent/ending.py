"""The end of a block as one piece of code for both consumers, and for whole results and parts of them.

Code that runs once a block is fetched from L2, or from DRAM behind a stream of the cache, 128 bytes at a time: it costs
more than what it does. So both consumers run the same instructions, and a part of a result is stored as a result is: in
16 bits, divided by its own sum, into a tensor that is laid out as the output.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from mla_var3.kernel.cute_python.lib import rows, softmax, wgmma
from mla_var3.kernel.cute_python.lib.barriers import named_sync
from mla_var3.kernel.cute_python.lib.latent.consumer import CONSUMERS, CONSUMERS_JOIN
from mla_var3.kernel.cute_python.lib.latent.shape import PANEL, TILE_M
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP

PER_ROW = PANEL // rows.CHUNK  # threads on a row: 128 bytes of it, one row of a panel
ROWS_AT_ONCE = CONSUMERS // PER_ROW


def result_registers(shape: cutlass.Constexpr) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
    """(accumulator, maxima, sums) of either consumer."""
    acc = wgmma.make_mma(cutlass.BFloat16, shape.half).partition_shape_C((TILE_M, shape.half))
    return cute.make_rmem_tensor(acc, Float32), cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)


@cute.jit
def finish(
    registers: tuple[cute.Tensor, cute.Tensor, cute.Tensor],  # of `result_registers`
    sums: cute.Tensor,  # (64, 2) fp32, shared memory: the consumers' row sums
    kv_base: cute.Pointer,  # the stages, which nobody reads any more
    target: cute.Tensor,  # (parts · b, s, h, k) 16-bit, global memory
    target_lse: cute.Tensor,  # (parts · b, h, s) fp32, global memory
    index: Int32,  # part · b + request
    kv_head: Int32,
    first_row: Int32,
    whole: cutlass.Boolean,  # not a part: the log-sum-exp is natural, and +inf without keys
    shape: cutlass.Constexpr,
    thread: Int32,  # 0..255
):
    """Joins the consumers' row sums and writes the rows that there are."""
    acc_o, m, total = registers
    dtype = target.element_type
    me, lane = thread // WARPGROUP, thread % WARPGROUP
    for r in cutlass.range_constexpr(2):
        total[r] = softmax.quad_sum(total[r])
        if thread % 4 == 0:
            sums[wgmma.acc_row(lane, r), me] = total[r]
    # Past this barrier nobody reads the stages any more, so the output may be staged in them.
    named_sync(CONSUMERS_JOIN, CONSUMERS)
    inverse = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        total[r] = total[r] + sums[wgmma.acc_row(lane, r), 1 - me]
        inverse[r] = 1.0 / total[r] if total[r] > 0.0 else Float32(0.0)
        row = first_row + wgmma.acc_row(lane, r)
        if me == 0 and thread % 4 == 0 and row < shape.rows:
            value = Float32.inf if whole else -Float32.inf
            if total[r] > 0.0:
                unit = Float32(math.log(2.0)) if whole else Float32(1.0)
                value = (m[r] + cute.math.log2(total[r], fastmath=True)) * unit
            target_lse[index, kv_head * shape.group + row % shape.group, row // shape.group] = value
    wgmma.scale_rows(acc_o, inverse)

    own = cute.assume(me * (shape.half * TILE_M), divby=shape.half * TILE_M)
    staging = wgmma.smem_view(kv_base, own, wgmma.k_major_layout(dtype, (TILE_M, shape.half)))
    mma = wgmma.make_mma(dtype, shape.half)
    copy = cute.make_tiled_copy_C(wgmma.stmatrix_atom(dtype), mma).get_slice(lane)
    cute.copy(copy, copy.retile(wgmma.to_dtype(acc_o, dtype)), copy.partition_D(staging))
    named_sync(CONSUMERS_JOIN, CONSUMERS)
    store_rows(kv_base, target, index, kv_head, first_row, shape, thread)


@cute.jit
def store_rows(
    kv_base: cute.Pointer,
    target: cute.Tensor,
    index: Int32,
    kv_head: Int32,
    first_row: Int32,
    shape: cutlass.Constexpr,
    thread: Int32,
):
    """Copies the staged tile's rows, 16 bytes a thread, in a loop that is not unrolled far."""
    dtype = target.element_type
    tile = wgmma.smem_view(kv_base, 0, wgmma.k_major_layout(dtype, (TILE_M, shape.k)))
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128)
    copy = cute.make_tiled_copy_tv(
        atom, cute.make_ordered_layout((ROWS_AT_ONCE, PER_ROW), order=(1, 0)), cute.make_layout((1, rows.CHUNK))
    )
    source = copy.get_slice(thread).partition_S(tile)  # (chunk, row pass, panel)
    for i in cutlass.range_constexpr(TILE_M // ROWS_AT_ONCE):
        row = first_row + i * ROWS_AT_ONCE + thread // PER_ROW
        if row < shape.rows:
            columns = rows.row_vector(target, index, kv_head, row, shape.group, shape.k)
            chunks = cute.zipped_divide(columns, (rows.CHUNK,))
            for j in cutlass.range(shape.k // PANEL, unroll=4):
                value = cute.make_rmem_tensor(rows.CHUNK, dtype)
                cute.autovec_copy(source[(None, 0), i, j], value)
                cute.autovec_copy(value, chunks[None, j * PER_ROW + thread % PER_ROW])


@cute.jit
def store_empty(
    target: cute.Tensor,  # (parts · b, s, h, k) 16-bit, global memory
    target_lse: cute.Tensor,  # (parts · b, h, s) fp32, global memory
    index: Int32,
    kv_head: Int32,
    first_row: Int32,
    whole: cutlass.Boolean,
    shape: cutlass.Constexpr,
    thread: Int32,  # 0..255
):
    """A block without keys: zeros and +inf, or, of a part, only the -inf that makes the combine pass over it."""
    row = first_row + thread // 4
    if row < shape.rows:
        if whole:
            zeros = cute.make_rmem_tensor(rows.CHUNK, target.element_type)
            zeros.fill(0.0)
            columns = rows.row_vector(target, index, kv_head, row, shape.group, shape.k)
            chunks = cute.zipped_divide(columns, (rows.CHUNK,))
            for i in cutlass.range(thread % 4, shape.k // rows.CHUNK, 4, unroll=1):
                cute.autovec_copy(zeros, chunks[None, i])
        if thread % 4 == 0:
            value = Float32.inf if whole else -Float32.inf
            target_lse[index, kv_head * shape.group + row % shape.group, row // shape.group] = value
