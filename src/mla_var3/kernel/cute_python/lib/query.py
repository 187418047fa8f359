"""Copying the query tile into shared memory without waiting for it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from mla_var3.kernel.cute_python.lib.rows import CHUNK, row_vector


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
