r"""Absorbed MLA decode for Hopper (sm_90a): flash_mla_v16 in clusters of four row tiles.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, 576)    V = latent (t, 512)

Of more than 128 query rows a cache, as two or more query tokens of 128 heads are, four row tiles load the cache for
each other where two did: half of the bytes leave L2, and moving them is energy that a chip at its power limit has for
products instead. A part of a stage is loaded again when the slowest of four blocks has read it. The rest is
flash_mla_v16's.

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
from mla_var3.kernel.cute_python.lib.phased import early
from mla_var3.kernel.cute_python.lib.phased.plan import PairsPlan, PairsTiling


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def flash_mla_v17(
    q: cute.Tensor,  # (b, s, h, k + p) 16-bit, global memory, contiguous
    tma: cute.CopyAtom,  # one 64 x 64 box of the cache
    cache: cute.Tensor,  # TMA tensor (page, k + p, h_kv, num_pages)
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
    cluster: cutlass.Constexpr,  # blocks, at most
):
    # A dependent is without the code that puts requests in order, which costs a short call 0.2 us where it is not run.
    early.run(
        q, tma, cache, page_table, seq_lens, target, marks, scale_log2, num_splits, ordered, shape,
        longest_first and not dependent, frees_first=True, as_fragments=True,
        odd_tile=loads.THERE if dependent else loads.ASKED, most=cluster, dependent=dependent,
    )  # fmt: skip


flash_mla_v17.set_name_prefix("flash_mla_v17", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla_v17(
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
    cluster: cutlass.Constexpr,  # blocks, at most
    stream: CUstream,
):
    """Makes the TMA descriptor of the cache and launches one block a row tile, kv head, split and request."""
    shares = loads.shared_loads(shape, cluster)
    tma, cache = paged.make_page_tma(kv_cache, shares)
    flash_mla_v17(
        q, tma, cache, page_table, seq_lens, target, marks, scale * math.log2(math.e), num_splits, ordered,
        shape, longest_first, dependent, cluster,
    ).launch(
        grid=(shape.row_tiles * shape.h_kv, num_splits, q.shape[0]),
        block=(THREADS, 1, 1),
        cluster=(max(shares, 1), 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=dependent,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ plan
@dataclass(frozen=True)
class FlashMlaV17Tiling(PairsTiling):
    """The tiling of `PairsPlan`. cluster: its blocks, at most."""

    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {**PairsTiling.choices, "cluster": (2, 4)}

    cluster: int = 4


class FlashMlaV17Plan(PairsPlan):
    """Plan of flash_mla_v17."""

    tiling_type = FlashMlaV17Tiling
    kernel_fn = staticmethod(flash_mla_v17)
    host_fn = staticmethod(launch_flash_mla_v17)

    def constants(self) -> tuple[Any, ...]:
        return (*super().constants(), self.tiling.cluster)
