r"""Absorbed MLA decode for Hopper (sm_90a): flash_mla_v5 with an earlier start, and nothing multiplied for padding.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, 576)    V = latent (t, 512)

Loop, endings, parts and their combine are flash_mla_v5's (`lib.phased`, `lib.latent.ending`, `lib.split.combine_rows`).
What differs is what a block does until its first scores (`lib.phased.early`), and what padding costs:

    start     lengths, and the page where a request's part begins if it fills the page table, are asked for in the first
              instructions; barriers are announced before the query is asked for, so that the loads of the cache do not
              wait for it; requests are put in order only where there are more blocks than run at once
    padding   rows past the request's (fewer than 64 heads x tokens) have probabilities of 0, not the 1 that scores of 0
              give: the tensor cores take less power for zeros, and a hot chip keeps a higher clock

Shared memory: Q 72 KiB, two stages of 72 KiB. Split-KV: grid (row tiles x h_kv, splits, b). All addresses and counts
come from `seq_lens` on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from mla_var3.kernel.cute_python.lib import paged
from mla_var3.kernel.cute_python.lib.latent import loads
from mla_var3.kernel.cute_python.lib.latent.consumer import THREADS
from mla_var3.kernel.cute_python.lib.latent.parts_plan import OrderedPlan, PartsTiling
from mla_var3.kernel.cute_python.lib.phased import early


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def flash_mla_v6(
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
    early.run(
        q, tma, cache, page_table, seq_lens, target, marks, scale_log2, num_splits, ordered, shape, longest_first,
        frees_first=False,
    )  # fmt: skip


flash_mla_v6.set_name_prefix("flash_mla_v6", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla_v6(
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
    flash_mla_v6(
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
class FlashMlaV6Tiling(PartsTiling):
    """The tiling of `PartsPlan`."""


class FlashMlaV6Plan(OrderedPlan):
    """Plan of flash_mla_v6."""

    tiling_type = FlashMlaV6Tiling
    kernel_fn = staticmethod(flash_mla_v6)
    host_fn = staticmethod(launch_flash_mla_v6)
