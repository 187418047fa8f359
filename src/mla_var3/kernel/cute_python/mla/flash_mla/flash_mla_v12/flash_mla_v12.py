r"""Absorbed MLA decode for Hopper (sm_90a): flash_mla_v10 with less in front of its first load, and not faster for it.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, 576)    V = latent (t, 512)

Loop, loads, endings and combine are flash_mla_v10's. What differs is in `lib.phased.prompt`: each producer warp makes
its own mbarriers, nothing is waited for before it is needed, and nothing is divided.

Shared memory: Q 72 KiB, two stages of 72 KiB. Split-KV: grid (row tiles x h_kv, splits, b). All addresses and counts
come from `seq_lens` on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from mla_var3.kernel.cute_python.lib import paged
from mla_var3.kernel.cute_python.lib.latent import loads
from mla_var3.kernel.cute_python.lib.latent.consumer import THREADS
from mla_var3.kernel.cute_python.lib.latent.parts_plan import PartsTiling, ShortPartsPlan
from mla_var3.kernel.cute_python.lib.latent.shape import TILE_M
from mla_var3.kernel.cute_python.lib.phased import prompt
from mla_var3.kernel.cute_python.lib.split.divide import inverse_of
from mla_var3.runtime import Tiling

FULL = 96  # blocks of a batch that waits for memory as a whole, without being split


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def flash_mla_v12(
    q: cute.Tensor,  # (b, s, h, k + p) 16-bit, global memory, contiguous
    tma: cute.CopyAtom,  # one 64 x 64 box of the cache
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
    longest_first: cutlass.Constexpr,
    apart: cutlass.Constexpr,
):
    prompt.run(
        q, tma, cache, page_table, seq_lens, target, marks, scale_log2, num_splits, inverse, ordered, shape,
        longest_first, apart,
    )  # fmt: skip


flash_mla_v12.set_name_prefix("flash_mla_v12", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla_v12(
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
    apart: cutlass.Constexpr,
    stream: CUstream,
):
    """Makes the TMA descriptor of the cache and launches one block a row tile, kv head, split and request."""
    shares = loads.shared_loads(shape)
    tma, cache = paged.make_page_tma(kv_cache, shares)
    flash_mla_v12(
        q, tma, cache, page_table, seq_lens, target, marks, scale * math.log2(math.e), num_splits,
        inverse_of(num_splits), ordered, shape, longest_first, apart,
    ).launch(
        grid=(shape.row_tiles * shape.h_kv, num_splits, q.shape[0]),
        block=(THREADS, 1, 1),
        cluster=(2 if shares else 1, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ plan
@dataclass(frozen=True)
class FlashMlaV12Tiling(PartsTiling):
    """The tiling of `ShortPartsPlan`. apart: whether the consumers leave each other alone (`lib.phased.short`)."""

    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **PartsTiling.choices,
        "apart": (False, True),
    }

    apart: bool = False


class FlashMlaV12Plan(ShortPartsPlan):
    """Plan of flash_mla_v12."""

    tiling_type = FlashMlaV12Tiling
    kernel_fn = staticmethod(flash_mla_v12)
    host_fn = staticmethod(launch_flash_mla_v12)

    def default_tiling(self) -> Tiling:
        """Apart where one row tile a request fills the chip unsplit. Side by side: b128 with 32 and 64 heads -2 % hot,
        64 heads +0.5 to +1.5 % cool; 8 requests in 16 parts +2 % (the trace of the devlog, part 9)."""
        pd = self.problem
        return self.tiling_type(apart=pd.rows <= TILE_M and self.blocks(pd.b) >= FULL)

    def constants(self) -> tuple[Any, ...]:
        return (*super().constants(), self.tiling.apart)
