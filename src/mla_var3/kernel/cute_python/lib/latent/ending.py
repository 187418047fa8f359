"""The end of a block as one piece of code for both consumers, and for whole results and parts of them.

Code that runs once a block is fetched from L2, or from DRAM behind a stream of the cache, 128 bytes at a time: it costs
more than what it does. So both consumers run the same instructions, and a part of a result is stored as a result is: in
16 bits, divided by its own sum, into a tensor that is laid out as the output.

Parts are fp16, whatever the output is, and each consumer scales its half of a row by a power of two so that the
largest element lies in [2^14, 2^15): a part's rounding, 2^-12 of an element that matters, vanishes beside that of a
bf16 output, and neither large nor small values leave fp16's range. (With parts in bf16 the worst row's cosine
difference was over 5e-6.) The marks of a part's row, float32 in the log2 domain: its log-sum-exp, and for each half the
log-sum-exp plus the exponent that was taken off; (-inf, ...) without keys.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64

from mla_var3.kernel.cute_python.lib import rows, softmax, wgmma
from mla_var3.kernel.cute_python.lib.barriers import named_sync
from mla_var3.kernel.cute_python.lib.latent.consumer import CONSUMERS, CONSUMERS_JOIN
from mla_var3.kernel.cute_python.lib.latent.shape import PANEL, TILE_M
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP

PER_ROW = PANEL // rows.CHUNK  # threads on a row: 128 bytes of it, one row of a panel
ROWS_AT_ONCE = CONSUMERS // PER_ROW
MARKS = 4  # float32 of a row of a part, the last one unused
TOP = 14  # exponent that the largest element of a row's half is brought to


def result_registers(shape: cutlass.Constexpr) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
    """(accumulator, maxima, sums) of either consumer."""
    acc = wgmma.make_mma(cutlass.BFloat16, shape.half).partition_shape_C((TILE_M, shape.half))
    return cute.make_rmem_tensor(acc, Float32), cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)


@cute.jit
def finish(
    registers: tuple[cute.Tensor, cute.Tensor, cute.Tensor],  # of `result_registers`
    sums: cute.Tensor,  # (64, 2) fp32, shared memory: the consumers' row sums
    kv_base: cute.Pointer,  # the stages, which nobody reads any more
    target: cute.Tensor,  # (parts · b, s, h, k) 16-bit, global memory; parts are fp16, whatever its type says
    marks: cute.Tensor,  # fp32, global memory, contiguous: (b, h, s), or of parts (parts · b, h, s · MARKS)
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
    factor = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        total[r] = total[r] + sums[wgmma.acc_row(lane, r), 1 - me]
        factor[r] = 1.0 / total[r] if total[r] > 0.0 else Float32(0.0)
        lse_log2 = m[r] + cute.math.log2(total[r], fastmath=True) if total[r] > 0.0 else -Float32.inf
        at = marks_of(index, kv_head, first_row + wgmma.acc_row(lane, r), marks, whole, shape)
        writes = thread % 4 == 0 and first_row + wgmma.acc_row(lane, r) < shape.rows
        if whole:
            if writes and me == 0:
                at[0] = lse_log2 * math.log(2.0) if total[r] > 0.0 else Float32.inf
        else:
            exponent = top_exponent(acc_o, r, factor[r])
            factor[r] = factor[r] * softmax.exp2(TOP - exponent)
            if writes:
                if me == 0:
                    at[0] = lse_log2
                at[1 + me] = lse_log2 + (exponent - TOP)
    wgmma.scale_rows(acc_o, factor)

    own = cute.assume(me * (shape.half * TILE_M), divby=shape.half * TILE_M)
    if whole:
        stage_rows(acc_o, kv_base, own, dtype, shape, lane)
    else:
        stage_rows(acc_o, kv_base, own, Float16, shape, lane)
    named_sync(CONSUMERS_JOIN, CONSUMERS)
    store_rows(kv_base, target, index, kv_head, first_row, shape, thread)


@cute.jit
def marks_of(
    index: Int32,
    kv_head: Int32,
    row: Int32,
    marks: cute.Tensor,
    whole: cutlass.Boolean,
    shape: cutlass.Constexpr,
) -> cute.Tensor:
    """The marks of a row, (MARKS,); of a whole result only the first."""
    head = index * shape.h + kv_head * shape.group + row % shape.group
    each = Int32(1) if whole else Int32(MARKS)
    offset = Int64(head * shape.s + row // shape.group) * each
    return cute.make_tensor(marks.iterator + offset, cute.make_layout(MARKS))


@cute.jit
def top_exponent(acc_o: cute.Tensor, r: cutlass.Constexpr, factor: Float32) -> Float32:
    """The exponent of the largest element of this consumer's half of a row, times `factor`; -112 if all are 0."""
    row = wgmma.as_rows(acc_o)
    largest = Float32(0.0)
    for j in cutlass.range_constexpr(cute.size(row, mode=[1])):
        largest = cute.arch.fmax(largest, cute.math.absf(row[r, j]))
    for i in cutlass.range_constexpr(2):
        largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << i))
    return cute.arch.fmax(cute.math.floor(cute.math.log2(largest * factor, fastmath=True)), Float32(TOP - 126))


@cute.jit
def stage_rows(
    acc_o: cute.Tensor,
    kv_base: cute.Pointer,
    own: Int32,
    dtype: cutlass.Constexpr,
    shape: cutlass.Constexpr,
    lane: Int32,
):
    """Rounds this consumer's half of the rows into shared memory, `own` elements from the stages' start."""
    base = cute.recast_ptr(kv_base, dtype=dtype)
    staging = wgmma.smem_view(base, own, wgmma.k_major_layout(dtype, (TILE_M, shape.half)))
    copy = cute.make_tiled_copy_C(wgmma.stmatrix_atom(dtype), wgmma.make_mma(dtype, shape.half)).get_slice(lane)
    cute.copy(copy, copy.retile(wgmma.to_dtype(acc_o, dtype)), copy.partition_D(staging))


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
    marks: cute.Tensor,  # as for `finish`
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
            marks_of(index, kv_head, row, marks, whole, shape)[0] = Float32.inf if whole else -Float32.inf
