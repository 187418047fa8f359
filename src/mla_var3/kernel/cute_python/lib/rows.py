"""Query rows of a tile: row r of one request and kv head is query token r // group and head r % group of the group."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

CHUNK = 8  # 16-bit elements in 16 bytes


def row_vector(tensor: cute.Tensor, batch: Int32, kv_head: Int32, row: Int32, group: int, columns: int) -> cute.Tensor:
    """The `columns` elements of one row of a contiguous (b, s, h, columns) tensor in global memory."""
    _, s, h, width = tensor.shape
    token = row // group
    head = kv_head * group + row % group
    offset = Int64(batch) * (s * h * width) + (token * h + head) * width
    return cute.make_tensor(tensor.iterator + cute.assume(offset, divby=CHUNK), cute.make_layout(columns))


@cute.jit
def issue_query_rows(
    query: cute.Tensor,  # global memory, (b, s, h, width)
    tile: cute.Tensor,  # shared memory, swizzled, (64, width)
    batch: Int32,
    kv_head: Int32,
    first_row: Int32,
    num_rows: cutlass.Constexpr,
    group: cutlass.Constexpr,
    thread: Int32,  # 0..num_threads-1
    num_threads: cutlass.Constexpr,
):
    """Starts copying rows first_row..first_row+63, 16 bytes at a time; rows past the end become zeros. The caller
    waits (cp_async_wait_group) and joins the threads before anybody reads."""
    width = cute.size(tile, mode=[1])
    per_row = 8  # threads on one row: 128 bytes, one swizzle row, a pass
    step = num_threads // per_row
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), query.element_type, num_bits_per_copy=128)
    copy = cute.make_tiled_copy_tv(
        atom, cute.make_ordered_layout((step, per_row), order=(1, 0)), cute.make_layout((1, CHUNK))
    )
    target = copy.get_slice(thread).partition_D(tile)  # (chunk, row pass, column pass)
    zeros = cute.make_rmem_tensor(CHUNK, query.element_type)
    zeros.fill(0.0)
    for i in cutlass.range_constexpr(cute.size(tile, mode=[0]) // step):
        row = first_row + i * step + thread // per_row
        if row < num_rows:
            source = cute.zipped_divide(row_vector(query, batch, kv_head, row, group, width), (CHUNK,))
            for j in cutlass.range_constexpr(width // (per_row * CHUNK)):
                cute.copy(atom, source[None, j * per_row + thread % per_row], target[(None, 0), i, j])
        else:
            for j in cutlass.range_constexpr(width // (per_row * CHUNK)):
                cute.autovec_copy(zeros, target[(None, 0), i, j])
    cute.arch.cp_async_commit_group()


@cute.jit
def load_query_rows(
    query: cute.Tensor,  # global memory, (b, s, h, width)
    tile: cute.Tensor,  # shared memory, swizzled, (64, width)
    batch: Int32,
    kv_head: Int32,
    first_row: Int32,
    num_rows: cutlass.Constexpr,
    group: cutlass.Constexpr,
    thread: Int32,  # 0..num_threads-1
    num_threads: cutlass.Constexpr,
):
    """Copies rows first_row..first_row+63 with 16-byte asynchronous copies and waits for this thread's; rows past the
    end become zeros. The caller fences (async proxy) and joins the threads."""
    issue_query_rows(query, tile, batch, kv_head, first_row, num_rows, group, thread, num_threads)
    cute.arch.cp_async_wait_group(0)


@cute.jit
def store_rows(
    tile: cute.Tensor,  # shared memory, swizzled, 16-bit, (64, columns)
    out: cute.Tensor,  # global memory, (b, s, h, width)
    first_column: Int32,  # of the tile, in out
    batch: Int32,
    kv_head: Int32,
    first_row: Int32,
    num_rows: cutlass.Constexpr,
    group: cutlass.Constexpr,
    thread: Int32,  # 0..127, one warpgroup
):
    """Writes the tile's rows, 16 bytes a thread and a whole row (or several) a warp; rows past the end are skipped."""
    columns = cute.size(tile, mode=[1])
    per_row = columns // CHUNK
    if cutlass.const_expr(per_row > 32):
        per_row = 32
    if cutlass.const_expr(columns % (per_row * CHUNK) != 0 or 128 % per_row != 0):
        per_row = 8
    step = 128 // per_row
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), out.element_type, num_bits_per_copy=128)
    copy = cute.make_tiled_copy_tv(
        atom, cute.make_ordered_layout((step, per_row), order=(1, 0)), cute.make_layout((1, CHUNK))
    )
    source = copy.get_slice(thread).partition_S(tile)
    width = out.shape[3]
    for i in cutlass.range_constexpr(cute.size(tile, mode=[0]) // step):
        row = first_row + i * step + thread // per_row
        if row < num_rows:
            target = cute.zipped_divide(row_vector(out, batch, kv_head, row, group, width), (CHUNK,))
            for j in cutlass.range_constexpr(columns // (per_row * CHUNK)):
                value = cute.make_rmem_tensor(CHUNK, out.element_type)
                cute.autovec_copy(source[(None, 0), i, j], value)
                cute.autovec_copy(value, target[None, first_column // CHUNK + j * per_row + thread % per_row])


def partial_row(partial_lse: cute.Tensor, split: Int32, batch: Int32, kv_head: Int32, row: Int32) -> Int64:
    """Index of a row in the (splits, b, h_kv, rows) workspaces."""
    _, b, h_kv, num_rows = partial_lse.shape
    return ((Int64(split) * b + batch) * h_kv + kv_head) * num_rows + row


@cute.jit
def store_accumulator_row(
    acc_row: cute.Tensor,  # registers, (N / 4,): this thread's part of one accumulator row
    target: cute.Tensor,  # (columns,) fp32, global memory
    first_column: Int32,
    thread: Int32,
):
    """Writes fp32 accumulators as they lie: 8 bytes a thread, one 32-byte sector a quad."""
    groups = cute.size(acc_row) // 2
    view = cute.make_tensor(target.iterator + first_column, cute.make_layout((2, 4, groups), stride=(1, 2, 8)))
    pair = cute.make_rmem_tensor(2, target.element_type)
    for j in cutlass.range_constexpr(groups):
        pair[0] = acc_row[2 * j]
        pair[1] = acc_row[2 * j + 1]
        cute.autovec_copy(pair, view[None, thread % 4, j])
