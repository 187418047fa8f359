r"""Absorbed MLA decode for Hopper (sm_90a) and few query rows: flash_mla_v14 whose parts lie as its accumulators do.

    Sᵀ (64 tokens x n) = K · Qᵀ     softmax down the columns     Oᵀ (512 x n) += Vᵀ · P       n = 8, 16 or 32 rows

What a thread has of a query row when its tiles are done, eight columns of the latent, is a vector of a part: 16 bytes,
which it rounds and stores from registers (`lib.latent.fragments`, turned). In flash_mla_v14 parts are rows again before
they are stored, by way of shared memory and behind a barrier. The combine turns what it has added up, once for all
parts. With a latent of under 512 columns a thread has too little of a row, and parts are flash_mla_v14's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from mla_var3.kernel.cute_python.lib import paged
from mla_var3.kernel.cute_python.lib.latent.fragments import Fragments
from mla_var3.kernel.cute_python.lib.latent.shape import Shape
from mla_var3.kernel.cute_python.lib.split.divide import inverse_of
from mla_var3.kernel.cute_python.lib.swapped import ready
from mla_var3.kernel.cute_python.lib.swapped.ready_plan import THREADS, ReadyPlan, ReadyTiling


# ------------------------------------------------------------------------------------------------ device
@cute.kernel
def flash_mla_v18(
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
        longest_first, tokens, turned=Fragments.of(latent).turns,
    )  # fmt: skip


flash_mla_v18.set_name_prefix("flash_mla_v18", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla_v18(
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
    flash_mla_v18(
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
class FlashMlaV18Tiling(ReadyTiling):
    """The tiling of `ReadyPlan`."""


class FlashMlaV18Plan(ReadyPlan):
    """Plan of flash_mla_v18."""

    tiling_type = FlashMlaV18Tiling
    kernel_fn = staticmethod(flash_mla_v18)
    host_fn = staticmethod(launch_flash_mla_v18)

    @property
    def turned(self) -> bool:
        return Fragments.of(Shape.of(self.problem)).turns
