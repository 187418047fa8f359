"""Blocks of query tokens, for batches whose requests differ in how many they have (`cu_seqlens_q`).

A request's query tokens are cut into blocks of `tokens`, the last one perhaps shorter, and a block is scheduled as a
request of its own (`prims.rows.Block`). Under a causal mask a block's last token sees fewer keys than the request has,
so its KV tiles are those of that token: blocks of a prefill chunk are as long as their triangle asks for.

How many blocks there are is known on the device only. The host takes the most that so many query tokens of so many
requests can have; those past the last one have no tokens and no keys.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.memory import SmemAllocator

from mla_var3.kernel.cute_python.prims.combine import list_request
from mla_var3.kernel.cute_python.prims.rows import BLOCK

THREADS = 512
WARP = 32


def most_blocks(query_tokens: int, requests: int, tokens: int) -> int:
    """Blocks of up to `tokens` that a batch can have; at least 1."""
    # Of r requests, at most min(r, query tokens) have a last block that is not full.
    return max(1, query_tokens // tokens + min(requests, query_tokens))


@cute.kernel
def cut_queries(
    cu_seqlens_q: cute.Tensor,  # (b + 1,) int32, global memory
    seq_lens: cute.Tensor,  # (b,) int32, global memory
    blocks: cute.Tensor,  # (blocks, BLOCK) int32, global memory
    table: cute.Tensor,  # of `prims.combine`
    tokens: cutlass.Constexpr,
    causal: cutlass.Constexpr,
):
    """Writes the blocks of a batch, lists those without keys, and says whether any has query tokens; one CTA."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = thread % WARP, thread // WARP
    memory = SmemAllocator()
    sums = memory.allocate_tensor(Int32, cute.make_layout(THREADS // WARP), 16)
    keyless = memory.allocate_tensor(Int32, cute.make_layout(1), 16)
    if thread == 0:
        keyless[0] = 0
    most, requests = blocks.shape[0], seq_lens.shape[0]
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    passed = Int32(0)  # blocks of the requests before
    for first in cutlass.range(0, requests, THREADS, unroll=1):
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
        for i in cutlass.range_constexpr(THREADS // WARP):
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
    for i in cutlass.range(passed + thread, most, THREADS, unroll=1):
        write_block(blocks, table, i, Int32(0), Int32(0), Int32(0), Int32(0))
    cute.arch.sync_threads()
    if thread == 0:
        table[keyless_place(table)] = keyless[0]


cut_queries.set_name_prefix("cut_queries", remove_cutlass_symbol=True, keep_mangled_name=False)


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


@cute.jit
def cut(
    cu_seqlens_q: cute.Tensor, seq_lens: cute.Tensor, blocks: cute.Tensor, table: cute.Tensor,
    tokens: cutlass.Constexpr, causal: cutlass.Constexpr, stream: Any,
) -> cute.Tensor:  # fmt: skip
    """Launches `cut_queries` ahead of the attention kernel, inside a host function. Gives the blocks' keys, which
    schedule as lengths of requests do: a (blocks,) view."""
    cut_queries(cu_seqlens_q, seq_lens, blocks, table, tokens, causal).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
    )
    return cute.make_tensor(blocks.iterator + (BLOCK - 1), cute.make_layout((blocks.shape[0],), stride=(BLOCK,)))
