r"""Absorbed MLA decode for Hopper (sm_90a) and few query rows: flash_mla_v13 with blocks that stand ready.

    Sᵀ (64 tokens x n) = K · Qᵀ     softmax down the columns     Oᵀ (512 x n) += Vᵀ · P       n = 8, 16 or 32 rows

Products, ring, parts and their sums are flash_mla_v13's. What differs is who is on the chip at the end of a call:

    start      the launch is a programmatic dependent of the kernel before it: blocks come as soon as that one's make
               room, make their barriers, and wait for its end ahead of the first thing they read
    combine    its blocks fit beside the attention's (`lib.split.cut.Room`), so that it is there before those end, and
               the next call's blocks take their places while it runs

All addresses and counts come from `seq_lens` on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from mla_var3.kernel.cute_python.lib import paged
from mla_var3.kernel.cute_python.lib.split.divide import inverse_of
from mla_var3.kernel.cute_python.lib.swapped import ready
from mla_var3.kernel.cute_python.lib.swapped.ready_plan import THREADS, ReadyPlan, ReadyTiling


# ------------------------------------------------------------------------------------------------ device
@cute.kernel
def flash_mla_v14(
    q: cute.Tensor,  # (b, s, h, k + p) 16-bit, global memory, contiguous
    tma: cute.CopyAtom,  # a box of the cache, `tokens` x 64
    cache: cute.Tensor,  # TMA tensor (page, k + p, h_kv, num_pages)
    page_table: cute.Tensor,  # (b, max_pages) int32, global memory, contiguous
    seq_lens: cute.Tensor,  # (b,) int32, global memory
    target: cute.Tensor,  # (b, s, h, k) 16-bit, global memory, contiguous: the output, or memory for its parts
    marks: cute.Tensor,  # (b, h, s) fp32, global memory, contiguous: log-sum-exp, or memory for the marks of parts
    scale_log2: Float32,
    num_splits: Int32,
    inverse: Int32,
    ordered: Int32,  # not 0: more blocks than run at once, which take the longest requests first
    shape: cutlass.Constexpr,
    latent: cutlass.Constexpr,  # the same problem as the combine sees it
    longest_first: cutlass.Constexpr,
    tokens: cutlass.Constexpr,  # of a TMA box
):
    ready.run(
        q, tma, cache, page_table, seq_lens, target, marks, scale_log2, num_splits, inverse, ordered, shape, latent,
        longest_first, tokens,
    )  # fmt: skip


flash_mla_v14.set_name_prefix("flash_mla_v14", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla_v14(
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
    latent: cutlass.Constexpr,
    longest_first: cutlass.Constexpr,
    tokens: cutlass.Constexpr,  # of a TMA box
    stream: CUstream,
):
    """Makes the TMA descriptor of the cache and launches one block a kv head, split and request."""
    tma, cache = paged.make_page_tma(kv_cache, tokens=tokens)
    flash_mla_v14(
        q, tma, cache, page_table, seq_lens, target, marks, scale * math.log2(math.e), num_splits,
        inverse_of(num_splits), ordered, shape, latent, longest_first, tokens,
    ).launch(
        grid=(shape.h_kv, num_splits, q.shape[0]),
        block=(THREADS, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=ready.dependent(num_splits, shape),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ plan
@dataclass(frozen=True)
class FlashMlaV14Tiling(ReadyTiling):
    """The tiling of `ReadyPlan`."""


class FlashMlaV14Plan(ReadyPlan):
    """Plan of flash_mla_v14."""

    tiling_type = FlashMlaV14Tiling
    kernel_fn = staticmethod(flash_mla_v14)
    host_fn = staticmethod(launch_flash_mla_v14)
