"""Query rows of a tile: row r of one request and kv head is query token r // group and head r % group of the group.

Where requests differ in how many query tokens they have, q and out are packed, (tokens, h, ·), and a request's tokens
are cut into blocks of equal size, the last of which may be shorter (`prims.blocks`). Each block is scheduled as a
request of its own: wherever a kernel says request, it means a block there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

CHUNK = 8  # 16-bit elements in 16 bytes


class Block(NamedTuple):
    """Query tokens that are scheduled together. first: where they are in q, out and lse (`row_offset`); count: how
    many; request: its row of the page table."""

    first: Any
    count: Any
    request: Any


BLOCK = 4  # int32 of a block in memory: first, count, request, and keys that its last token sees


@dataclass(frozen=True, eq=False)
class Queries:
    """What says where query tokens are. tokens: of each request, or of a block. blocks: (blocks, BLOCK) int32, global
    memory, where they are packed. mask: (b, s, s) uint8, global memory, where there is one of the newest keys."""

    tokens: int
    blocks: Any = None
    mask: Any = None

    def block(self, request: Int32) -> Block:
        """The block of a request: where none are packed, all of its query tokens."""
        if self.blocks is None:
            return Block(request, self.tokens, request)
        values = cute.make_rmem_tensor(BLOCK, Int32)
        source = self.blocks.iterator + cute.assume(request * BLOCK, divby=BLOCK)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(BLOCK)), values)
        return Block(values[0], values[1], values[2])


def row_offset(tensor: cute.Tensor, request: Int32, kv_head: Int32, row: Int32, group: int) -> Int64:
    """Where a row of a contiguous (b, s, h, columns) tensor begins, in elements."""
    _, s, h, columns = tensor.shape
    token, head = row // group, kv_head * group + row % group
    return cute.assume(Int64(request) * (s * h * columns) + (token * h + head) * columns, divby=CHUNK)


def copy_chunk(target: cute.Pointer, source: cute.Pointer, filled: Int32) -> None:
    """Starts copying 16 bytes from global to shared memory (cp.async), of which the first `filled` are read and the
    others become zeros. target: where they would lie without the 128-byte swizzle, in a tile aligned to 1024 bytes. No
    branch: behind one, ptxas may take addresses that follow for not uniform."""
    place = target.toint()
    place = place ^ ((place >> 3) & 0x70)  # chunk ^ row % 8
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[place, source.toint(), filled],
    )


@cute.jit
def copy_query_rows(
    query: cute.Tensor,  # global memory, (b, s, h, width), width a multiple of 8
    tile: cute.Tensor,  # shared memory, swizzled, (rows, width up to a multiple of 64)
    request: Int32,
    kv_head: Int32,
    first_row: Int32,
    num_rows: Any,  # of the request
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
    if thread < step * per_row:
        for i in cutlass.range_constexpr(height // step):
            row = first_row + i * step + thread // per_row
            filled = cutlass.select_(row < num_rows, Int32(2 * CHUNK), Int32(0))
            source = query.iterator + row_offset(query, request, kv_head, cutlass.min(row, num_rows - 1), group)
            for j in cutlass.range_constexpr(-(-width // (per_row * CHUNK))):
                chunk = j * per_row + thread % per_row
                if cutlass.const_expr((j + 1) * per_row * CHUNK > width):
                    filled = cutlass.select_(chunk < width // CHUNK, filled, Int32(0))
                    chunk = cutlass.min(chunk, width // CHUNK - 1)
                copy_chunk(target[(None, 0), i, j].iterator, source + chunk * CHUNK, filled)
    cute.arch.cp_async_commit_group()


# ------------------------------------------------------------------------------------------------ packed queries
def packed(tensor: cute.Tensor) -> cute.Tensor:
    """A contiguous (tokens, h, columns) tensor as one of requests with a query token each, (tokens, 1, h, columns)."""
    tokens, h, columns = tensor.shape
    layout = cute.make_layout((tokens, 1, h, columns), stride=(h * columns, h * columns, columns, 1))
    return cute.make_tensor(tensor.iterator, layout)


def packed_lse(lse: cute.Tensor, block: int) -> cute.Tensor:
    """A contiguous (tokens, h) tensor as (first token, h, token behind it)."""
    tokens, h = lse.shape
    return cute.make_tensor(lse.iterator, cute.make_layout((tokens, h, block), stride=(h, 1, h)))
