"""Query rows of a tile: row r of one request and kv head is query token r // group and head r % group of the group.

Where requests differ in how many query tokens they have, q and out are packed, (tokens, h, ·), and a request's tokens
are cut into blocks of equal size, the last of which may be shorter (`cut_queries`). Each block is scheduled as a
request of its own: wherever a kernel says request, it means a block there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from mla_var3.kernel.cute_python.split_kv.partials import Results, list_request, store_vector

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


@dataclass(frozen=True, eq=False)
class TileRows:
    """The query rows of a CTA: those of a query tile. kv_head: whose cache they attend to; first_row: of the tile, in
    the rows of a request and kv head. Compile-time constants: group: heads that share a cache; height: rows of the
    tile."""

    kv_head: Any
    first_row: Any
    group: int
    height: int


def has_strides(tensor: cute.Tensor) -> bool:
    """Whether a tensor (b, s, h, columns) is one of a strided call: its strides are given at the call, while those of a
    contiguous one follow from its sizes."""
    return not isinstance(tensor.stride[2], int)


def row_offset(tensor: cute.Tensor, request: Int32, kv_head: Int32, row: Int32, group: int) -> Int64:
    """Where a row of a (b, s, h, columns) tensor begins, in elements: in a strided one anywhere, at a multiple of 16
    bytes."""
    _, s, h, columns = tensor.shape
    token, head = row // group, kv_head * group + row % group
    if has_strides(tensor):
        return cute.assume(Int64(cute.crd2idx((request, token, head, 0), tensor.layout)), divby=CHUNK)
    return cute.assume(Int64(request) * (s * h * columns) + (token * h + head) * columns, divby=CHUNK)


def by_token(tensor: cute.Tensor, b: Any) -> cute.Tensor:
    """A (b, s, h, columns) tensor as one of b · s requests of a query token, (b · s, 1, h, columns)."""
    _, s, h, columns = tensor.shape
    if has_strides(tensor):
        of_request, of_token, of_head, _ = tensor.stride
        layout = cute.make_layout(((s, b), 1, h, columns), stride=((of_token, of_request), of_token, of_head, 1))
    else:
        layout = cute.make_layout((b * s, 1, h, columns), stride=(h * columns, h * columns, columns, 1))
    return cute.make_tensor(tensor.iterator, layout)


def lse_by_token(lse: cute.Tensor, b: Any) -> cute.Tensor:
    """A (b, h, s) tensor as (b · s, h, 1)."""
    _, h, s = lse.shape
    of_request, of_head, of_token = lse.stride
    layout = cute.make_layout(((s, b), h, 1), stride=((of_token, of_request), of_head, 0))
    return cute.make_tensor(lse.iterator, layout)


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
    block: Block,
    of_tile: cutlass.Constexpr,  # `TileRows`
    thread: Int32,  # 0..num_threads-1
    num_threads: cutlass.Constexpr,
):
    """Starts copying the rows of a tile, 16 bytes at a time (cp.async); rows past the end become zeros, and columns
    past the query's width hold nothing of use. The caller waits (cp_async_wait_group) and brings the threads together
    before anybody reads."""
    kv_head, first_row, group = of_tile.kv_head, of_tile.first_row, of_tile.group
    width, height = cutlass.const_expr(query.shape[3]), cute.size(tile, mode=[0])
    num_rows = block.count * group
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
            source = query.iterator + row_offset(query, block.first, kv_head, cutlass.min(row, num_rows - 1), group)
            for j in cutlass.range_constexpr(-(-width // (per_row * CHUNK))):
                chunk = j * per_row + thread % per_row
                if cutlass.const_expr((j + 1) * per_row * CHUNK > width):
                    filled = cutlass.select_(chunk < width // CHUNK, filled, Int32(0))
                    chunk = cutlass.min(chunk, width // CHUNK - 1)
                copy_chunk(target[(None, 0), i, j].iterator, source + chunk * CHUNK, filled)
    cute.arch.cp_async_commit_group()


# ------------------------------------------------------------------------------------------------ rows without keys
@cute.jit
def store_no_keys(
    results: Results,
    block: Block,
    of_tile: cutlass.Constexpr,  # `TileRows`
    thread: Int32,  # 0..num_threads-1
    num_threads: cutlass.Constexpr,
):
    """The results of a tile of a request without keys: zeros and +inf."""
    kv_head, group = of_tile.kv_head, of_tile.group
    per_row = cutlass.const_expr(num_threads // of_tile.height)
    row, columns = of_tile.first_row + thread // per_row, results.out.shape[3]
    if row < block.count * group:
        zeros = cute.make_rmem_tensor(4, Int32)
        zeros.fill(0)
        base = results.out.iterator.toint() + 2 * row_offset(results.out, block.first, kv_head, row, group)
        for i in cutlass.range(thread % per_row, columns // CHUNK, per_row, unroll=1):
            address = cute.make_ptr(Int32, base + Int64(2 * CHUNK * i), cute.AddressSpace.gmem, assumed_align=16)
            store_vector(zeros, address, True)
        if thread % per_row == 0:
            results.lse[block.first, kv_head * group + row % group, row // group] = Float32.inf


# ------------------------------------------------------------------------------------------------ packed queries
# How many blocks there are is known on the device only. The host takes the most that so many query tokens of so many
# requests can have; those past the last one have no tokens and no keys. Under a causal mask a block's last token sees
# fewer keys than the request has, so its KV tiles are those of that token.
WARP = 32


def packed(tensor: cute.Tensor) -> cute.Tensor:
    """A (tokens, h, columns) tensor as one of requests with a query token each, (tokens, 1, h, columns)."""
    tokens, h, columns = tensor.shape
    apart = tensor.stride[0]
    layout = cute.make_layout((tokens, 1, h, columns), stride=(apart, apart, tensor.stride[1], 1))
    return cute.make_tensor(tensor.iterator, layout)


def packed_lse(lse: cute.Tensor, block: int) -> cute.Tensor:
    """A (tokens, h) tensor as (first token, h, token behind it)."""
    tokens, h = lse.shape
    apart = lse.stride[0]
    return cute.make_tensor(lse.iterator, cute.make_layout((tokens, h, block), stride=(apart, lse.stride[1], apart)))


def most_blocks(query_tokens: int, requests: int, tokens: int) -> int:
    """Blocks of up to `tokens` that a batch can have; at least 1."""
    # Of r requests, at most min(r, query tokens) have a last block that is not full.
    return max(1, query_tokens // tokens + min(requests, query_tokens))


@cute.jit
def cut_queries(
    cu_seqlens_q: cute.Tensor,  # (b + 1,) int32, global memory
    seq_lens: cute.Tensor,  # (b,) int32, global memory
    blocks: cute.Tensor,  # (blocks, BLOCK) int32, global memory
    table: cute.Tensor,  # of `split_kv.combine`
    warps: cutlass.Constexpr,  # of the CTA
    tokens: cutlass.Constexpr,  # of a block
    causal: cutlass.Constexpr,
):
    """Writes the blocks of a batch, lists those without keys, and says whether any has query tokens, by one CTA; all of
    its threads see them behind it."""
    thread, _, _ = cute.arch.thread_idx()
    threads = cutlass.const_expr(warps * WARP)
    lane, warp = thread % WARP, thread // WARP
    memory = SmemAllocator()
    sums = memory.allocate_tensor(Int32, cute.make_layout(warps), 16)
    keyless = memory.allocate_tensor(Int32, cute.make_layout(1), 16)
    if thread == 0:
        keyless[0] = 0
    most, requests = blocks.shape[0], seq_lens.shape[0]
    passed = Int32(0)  # blocks of the requests before
    for first in cutlass.range(0, requests, threads, unroll=1):
        request = first + thread
        begin, count, length = Int32(0), Int32(0), Int32(0)
        if request < requests:
            begin, length = cu_seqlens_q[request], seq_lens[request]
            count = cutlass.max(cu_seqlens_q[request + 1] - begin, 0)
        own = (count + tokens - 1) // tokens
        until = own
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(until, 1 << i)
            until = until + cutlass.select_(lane >= (1 << i), other, Int32(0))
        if lane == WARP - 1:
            sums[warp] = until
        cute.arch.sync_threads()
        of_all = Int32(0)
        for i in cutlass.range_constexpr(warps):
            if i < warp:
                until = until + sums[i]
            of_all = of_all + sums[i]
        place = passed + until - own
        # The threads of a warp write the blocks of its requests together: one request may have nearly all of them.
        for i in cutlass.range(0, WARP, 1, unroll=1):
            at, blocks_of = cute.arch.shuffle_sync(place, i), cute.arch.shuffle_sync(own, i)
            token, left = cute.arch.shuffle_sync(begin, i), cute.arch.shuffle_sync(count, i)
            keys = cute.arch.shuffle_sync(length, i)
            for j in cutlass.range(lane, blocks_of, WARP, unroll=1):
                held = cutlass.min(left - j * tokens, tokens)
                sees = keys
                if cutlass.const_expr(causal):
                    sees = cutlass.max(keys - (left - j * tokens - held), 0)
                write_block(blocks, table, at + j, token + j * tokens, held, first + warp * WARP + i, sees)
                if sees <= 0:
                    keyless[0] = 1
        passed = passed + of_all
        cute.arch.sync_threads()
    for i in cutlass.range(passed + thread, most, threads, unroll=1):
        write_block(blocks, table, i, Int32(0), Int32(0), Int32(0), Int32(0))
    cute.arch.sync_threads()
    if thread == 0:
        table[keyless_place(table)] = keyless[0]


def keyless_place(table: cute.Tensor) -> Any:
    """Where in the table it is said whether a block with query tokens has no keys."""
    return cute.size(table) - 1


@cute.jit
def write_block(
    blocks: cute.Tensor, table: cute.Tensor, index: Int32, first: Int32, count: Int32, request: Int32, keys: Int32
):
    """Writes a block of `rows.Block`, and the keys that its last token sees, and lists it where it has none; nothing
    where the caller's tensors name more blocks than there is room for."""
    values = cute.make_rmem_tensor(BLOCK, Int32)
    values[0], values[1], values[2], values[3] = first, count, request, keys
    target = blocks.iterator + cute.assume(index * BLOCK, divby=BLOCK)
    if index < blocks.shape[0]:
        cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(BLOCK)))
        if keys <= 0:
            list_request(table, index, Int32(0), Int32(0))


def keys_of(blocks: cute.Tensor) -> cute.Tensor:
    """The blocks' keys, which schedule as lengths of requests do: a (blocks,) view."""
    return cute.make_tensor(blocks.iterator + (BLOCK - 1), cute.make_layout((blocks.shape[0],), stride=(BLOCK,)))
