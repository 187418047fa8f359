"""Query rows of a tile: row r of one request and kv head is query token r // group and head r % group of the group."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

CHUNK = 8  # 16-bit elements in 16 bytes


def row_offset(tensor: cute.Tensor, request: Int32, kv_head: Int32, row: Int32, group: int) -> Int64:
    """Where a row of a contiguous (b, s, h, columns) tensor begins, in elements."""
    _, s, h, columns = tensor.shape
    token, head = row // group, kv_head * group + row % group
    return cute.assume(Int64(request) * (s * h * columns) + (token * h + head) * columns, divby=CHUNK)


@cute.jit
def copy_query_rows(
    query: cute.Tensor,  # global memory, (b, s, h, width), width a multiple of 8
    tile: cute.Tensor,  # shared memory, swizzled, (rows, width up to a multiple of 64)
    request: Int32,
    kv_head: Int32,
    first_row: Int32,
    num_rows: cutlass.Constexpr,
    group: cutlass.Constexpr,
    thread: Int32,  # 0..num_threads-1
    num_threads: cutlass.Constexpr,
):
    """Starts copying the rows of a tile, 16 bytes at a time (cp.async); rows past the end become zeros, and columns
    past the query's width hold nothing of use. The caller waits (cp_async_wait_group) and joins the threads before
    anybody reads."""
    width, height = cutlass.const_expr(query.shape[3]), cute.size(tile, mode=[0])
    per_row = 8  # threads on one row: 128 bytes, one swizzle row, a pass
    step = cutlass.const_expr(min(num_threads // per_row, height))
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), query.element_type, num_bits_per_copy=128)
    copy = cute.make_tiled_copy_tv(
        atom, cute.make_ordered_layout((step, per_row), order=(1, 0)), cute.make_layout((1, CHUNK))
    )
    target = copy.get_slice(thread).partition_D(tile)  # (chunk, row pass, column pass)
    zeros = cute.make_rmem_tensor(CHUNK, query.element_type)
    zeros.fill(0.0)
    if thread < step * per_row:
        for i in cutlass.range_constexpr(height // step):
            row = first_row + i * step + thread // per_row
            if row < num_rows:
                source = query.iterator + row_offset(query, request, kv_head, row, group)
                chunks = cute.zipped_divide(cute.make_tensor(source, cute.make_layout(width)), (CHUNK,))
                for j in cutlass.range_constexpr(width // (per_row * CHUNK)):
                    cute.copy(atom, chunks[None, j * per_row + thread % per_row], target[(None, 0), i, j])
                if cutlass.const_expr(width % (per_row * CHUNK) != 0):
                    # No branch: behind one, ptxas takes addresses that follow for not uniform.
                    last = cutlass.const_expr(width // (per_row * CHUNK))
                    chunk = cutlass.min(last * per_row + thread % per_row, width // CHUNK - 1)
                    cute.copy(atom, chunks[None, chunk], target[(None, 0), i, last])
            else:
                for j in cutlass.range_constexpr(cute.size(tile, mode=[1]) // (per_row * CHUNK)):
                    cute.autovec_copy(zeros, target[(None, 0), i, j])
    cute.arch.cp_async_commit_group()
