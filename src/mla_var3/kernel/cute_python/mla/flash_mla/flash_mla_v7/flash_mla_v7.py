r"""Absorbed MLA decode for Hopper (sm_90a): flash_mla_v6 with a combine that is half as long.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, 576)    V = latent (t, 512)

Start, loop and endings are flash_mla_v6's (`lib.phased.early` and below), with two differences:

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

from mla_var3.kernel.cute_python.lib import paged
from mla_var3.kernel.cute_python.lib.latent import loads
from mla_var3.kernel.cute_python.lib.latent.consumer import THREADS
from mla_var3.kernel.cute_python.lib.latent.parts_plan import OrderedPlan, PartsTiling
from mla_var3.kernel.cute_python.lib.phased import early
from mla_var3.kernel.cute_python.lib.split import combine_warps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_var3.runtime import CuteKernel


# ------------------------------------------------------------------------------------------------ device: the kernel
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
    early.run(
        q, tma, cache, page_table, seq_lens, target, marks, scale_log2, num_splits, ordered, shape, longest_first,
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


class FlashMlaV7Plan(OrderedPlan):
    """Plan of flash_mla_v7."""

    tiling_type = FlashMlaV7Tiling
    kernel_fn = staticmethod(flash_mla_v7)
    host_fn = staticmethod(launch_flash_mla_v7)

    def combine(self, partials: Sequence[Any], outputs: Sequence[Any], splits: int) -> CuteKernel:
        return combine_warps.combine_kernel(self, partials, outputs, splits)
