r"""Absorbed MLA decode for Hopper (sm_90a): flash_mla_v16 whose tiles come in boxes of whole tokens.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, 576)    V = latent (t, 512)

A tile of the cache is 64 tokens that lie behind each other, 72 KiB in one piece. flash_mla_v16 asks for it by panels of
64 columns, 128 bytes of each token; this version by 8 tokens and half of their latent columns, 512 bytes of each, which
takes less power to read (`lib.latent.tokens`). A block's first pair comes in smaller boxes, panel by panel, so that its
first products begin as early. Where parts are single pairs there is no other pair, and it is flash_mla_v16.

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
from mla_var3.kernel.cute_python.lib.latent import loads, tokens
from mla_var3.kernel.cute_python.lib.latent.consumer import THREADS
from mla_var3.kernel.cute_python.lib.phased import early
from mla_var3.kernel.cute_python.lib.phased.plan import PairsPlan, PairsTiling


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def flash_mla_v19(
    q: cute.Tensor,  # (b, s, h, k + p) 16-bit, global memory, contiguous
    tma: cute.CopyAtom,  # one 64 x 64 box of the cache
    cache: cute.Tensor,  # TMA tensor (page, k + p, h_kv, num_pages)
    tma_whole: cute.CopyAtom,  # 8 tokens by half of the latent columns
    halves: cute.Tensor,  # TMA tensor (page, 64, panel, h_kv, num_pages)
    tma_small: cute.CopyAtom,  # 8 tokens by 64 columns
    panels: cute.Tensor,  # TMA tensor (page, k + p, h_kv, num_pages)
    page_table: cute.Tensor,  # (b, max_pages) int32, global memory, contiguous
    seq_lens: cute.Tensor,  # (b,) int32, global memory
    target: cute.Tensor,  # (b, s, h, k) 16-bit, global memory, contiguous: the output, or memory for its parts
    marks: cute.Tensor,  # (b, h, s) fp32, global memory, contiguous: log-sum-exp, or memory for the marks of parts
    scale_log2: Float32,
    num_splits: Int32,
    ordered: Int32,  # not 0: more blocks than run at once, which take the longest requests first
    shape: cutlass.Constexpr,
    longest_first: cutlass.Constexpr,
    dependent: cutlass.Constexpr,
):
    # A dependent is without the code that puts requests in order, which costs a short call 0.2 us where it is not run.
    early.run(
        q, tma, cache, page_table, seq_lens, target, marks, scale_log2, num_splits, ordered, shape,
        longest_first and not dependent, frees_first=True, as_fragments=True,
        odd_tile=loads.THERE if dependent else loads.ASKED, dependent=dependent,
        by_tokens=None if dependent else tokens.TokenBoxes(tma_whole, halves, tma_small, panels),
    )  # fmt: skip


flash_mla_v19.set_name_prefix("flash_mla_v19", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla_v19(
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
    dependent: cutlass.Constexpr,
    stream: CUstream,
):
    """Makes the TMA descriptor of the cache and launches one block a row tile, kv head, split and request."""
    shares = loads.shared_loads(shape)
    tma, cache = paged.make_page_tma(kv_cache, shares)
    flash_mla_v19(
        q, tma, cache, *tokens.make_tma(kv_cache, shape, bool(shares)),
        *tokens.make_small_tma(kv_cache, bool(shares)), page_table, seq_lens, target, marks,
        scale * math.log2(math.e), num_splits, ordered, shape, longest_first, dependent,
    ).launch(
        grid=(shape.row_tiles * shape.h_kv, num_splits, q.shape[0]),
        block=(THREADS, 1, 1),
        cluster=(2 if shares else 1, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=dependent,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ plan
@dataclass(frozen=True)
class FlashMlaV19Tiling(PairsTiling):
    """The tiling of `PairsPlan`."""


class FlashMlaV19Plan(PairsPlan):
    """Plan of flash_mla_v19."""

    tiling_type = FlashMlaV19Tiling
    kernel_fn = staticmethod(flash_mla_v19)
    host_fn = staticmethod(launch_flash_mla_v19)
