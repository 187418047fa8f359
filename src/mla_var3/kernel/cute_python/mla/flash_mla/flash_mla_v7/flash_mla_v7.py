r"""Absorbed MLA decode for Hopper (sm_90a): flash_mla_v6 with a combine that is half as long.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, 576)    V = latent (t, 512)

Start, loop and endings are flash_mla_v6's, with two differences:

    combine   `lib.split.combine_warps`: nothing but loads behind the wait for the parts, no barrier in front of the
              sums, and blocks that spread evenly over the SMs
    refill    the odd consumer frees the even stage before it issues its next product

Shared memory: Q 72 KiB, two stages of 72 KiB. Split-KV: grid (row tiles x h_kv, splits, b). All addresses and counts
come from `seq_lens` on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from mla_var3.kernel.cute_python.lib import host, paged, rows, wgmma
from mla_var3.kernel.cute_python.lib.barriers import named_arrive, named_sync
from mla_var3.kernel.cute_python.lib.latent import loads, order
from mla_var3.kernel.cute_python.lib.latent.consumer import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    THREADS,
    shared_storage,
)
from mla_var3.kernel.cute_python.lib.latent.parts_plan import PartsPlan, PartsTiling
from mla_var3.kernel.cute_python.lib.latent.shape import TILE_M, Shape, work_range
from mla_var3.kernel.cute_python.lib.phased import block as consumers
from mla_var3.kernel.cute_python.lib.split import combine_warps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_var3.runtime import CuteKernel

# ------------------------------------------------------------------------------------------------ device: the kernel
BARRIERS_MADE = 8  # named barrier of a block without a cluster, behind `lib.latent.consumer`'s


@cute.kernel
def flash_mla_v7(
    q: cute.Tensor,  # (b, s, h, k + p) 16-bit, global memory, contiguous
    tma: cute.CopyAtom,  # one 64 x 64 box of the cache
    cache: cute.Tensor,  # TMA tensor (page, k + p, h_kv, num_pages)
    page_table: cute.Tensor,  # (b, max_pages) int32, global memory, contiguous
    seq_lens: cute.Tensor,  # (b,) int32, global memory
    target: cute.Tensor,  # (splits · b, s, h, k) 16-bit, global memory, contiguous: the output, or its parts
    marks: cute.Tensor,  # fp32, global memory, contiguous: log-sum-exp (b, h, s), or of parts (splits · b, h, 4 · s)
    scale_log2: Float32,
    num_splits: Int32,
    ordered: Int32,  # not 0: more blocks than run at once, which take the longest requests first
    shape: cutlass.Constexpr,
    longest_first: cutlass.Constexpr,
):
    dtype = q.element_type
    thread, _, _ = cute.arch.thread_idx()
    block, split, rank = cute.arch.block_idx()
    # Asked for before anything else: right if blocks take the requests in the order of the batch.
    seq_len = seq_lens[rank]
    row_tile = block % shape.row_tiles
    kv_head = block // shape.row_tiles
    shares = loads.shared_loads(shape)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    guess, guessed = Int32(-1), Int32(0)
    if warp >= CONSUMERS // 32:
        guess = loads.guess_page(warp - CONSUMERS // 32, split, num_splits, page_table.shape[1], shape)
        guessed = page_table[rank, guess]
    q_layout = wgmma.k_major_layout(dtype, (TILE_M, shape.k + shape.p))
    storage = SmemAllocator().allocate(shared_storage(shape, dtype, ("row_max",)))
    q_tile = storage.query.get_tensor(q_layout.outer, swizzle=q_layout.inner)
    kv_base = storage.stages.data_ptr()
    full = storage.full.data_ptr()
    empty = storage.empty.data_ptr()
    if warp == 0:
        with cute.arch.elect_one():
            loads.init_barriers(full, empty, shape, shares)
        cpasync.prefetch_descriptor(tma)
        cute.arch.mbarrier_init_fence()
    # The producers wait for the barriers, and not for the query to be asked for.
    if cutlass.const_expr(shares):
        cute.arch.cluster_arrive_relaxed()
    elif warp < CONSUMERS // 32:
        named_arrive(BARRIERS_MADE, THREADS)
    first_row = row_tile * TILE_M
    if warp < CONSUMERS // 32:
        rows.issue_query_rows(
            q, q_tile, rank, kv_head, first_row, shape.rows, shape.group, thread, CONSUMERS
        )  # fmt: skip
    batch = rank
    if cutlass.const_expr(longest_first):
        if ordered != 0:
            batch = order.request_at(rank, seq_lens, thread % 32)
            if batch != rank and warp < CONSUMERS // 32:
                cute.arch.cp_async_wait_group(0)
                rows.issue_query_rows(
                    q, q_tile, batch, kv_head, first_row, shape.rows, shape.group, thread, CONSUMERS
                )  # fmt: skip
    index, whole = split * seq_lens.shape[0] + batch, num_splits == 1
    if batch != rank:
        seq_len = seq_lens[batch]
    first, end, num_tiles, least = work_range(seq_len, row_tile, split, num_splits, shape)
    if cutlass.const_expr(shares):
        if cutlass.const_expr(shape.causal):
            # Both blocks of a cluster take the tiles of the one that sees more keys.
            first, end, num_tiles, _ = work_range(seq_len, row_tile | 1, split, num_splits, shape)
        cute.arch.cluster_wait()

    if warp >= CONSUMERS // 32:
        if cutlass.const_expr(not shares):
            named_sync(BARRIERS_MADE, THREADS)
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if batch != rank:
            guess = Int32(-1)
        loads.produce_parts(
            tma, cache[None, None, kv_head, None], kv_base, page_table[batch, None], full, empty, first, end,
            num_tiles, warp, row_tile, shape, shares, guess, guessed,
        )  # fmt: skip
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        consumers.consume(
            storage, q_tile, target, marks, scale_log2, seq_len, first, end, least, index, kv_head, first_row, whole,
            warp, thread, shape, shares, zero_padding=True,
            frees_first=True,
        )  # fmt: skip


flash_mla_v7.set_name_prefix("flash_mla_v7", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla_v7(
    q: cute.Tensor,
    kv_cache: cute.Tensor,  # (num_pages, page, h_kv, k + p) 16-bit, global memory, contiguous
    page_table: cute.Tensor,
    seq_lens: cute.Tensor,
    target: cute.Tensor,
    marks: cute.Tensor,
    scale: Float32,
    num_splits: Int32,
    ordered: Int32,
    shape: cutlass.Constexpr,
    longest_first: cutlass.Constexpr,
    stream: CUstream,
):
    """Makes the TMA descriptor of the cache and launches one block a row tile, kv head, split and request."""
    shares = loads.shared_loads(shape)
    tma, cache = paged.make_page_tma(kv_cache, shares)
    flash_mla_v7(
        q, tma, cache, page_table, seq_lens, target, marks, scale * math.log2(math.e), num_splits, ordered,
        shape, longest_first,
    ).launch(
        grid=(shape.row_tiles * shape.h_kv, num_splits, q.shape[0]),
        block=(THREADS, 1, 1),
        cluster=(2 if shares else 1, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ plan
@dataclass(frozen=True)
class FlashMlaV7Tiling(PartsTiling):
    """The tiling of `PartsPlan`."""


class FlashMlaV7Plan(PartsPlan):
    """Plan of flash_mla_v7."""

    tiling_type = FlashMlaV7Tiling
    kernel_fn = staticmethod(flash_mla_v7)
    host_fn = staticmethod(launch_flash_mla_v7)
    scalar_types = (*PartsPlan.scalar_types, Int32)

    def scalars(self, b: int, splits: int) -> tuple[float | int, ...]:
        shape = Shape.of(self.problem)
        waits = b * splits * shape.row_tiles * shape.h_kv > host.target(self).num_sms
        return (*super().scalars(b, splits), int(waits))

    def combine(self, partials: Sequence[Any], outputs: Sequence[Any], splits: int) -> CuteKernel:
        return combine_warps.combine_kernel(self, partials, outputs, splits)
