r"""Absorbed MLA decode for Hopper (sm_90a): flash_mla_v7 with parts that are stored as they lie in registers.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, 576)    V = latent (t, 512)

Start and loop are flash_mla_v7's (`lib.phased.early` and below), with three differences where a request is in parts:

    ending    `lib.latent.fragments`: no consumer waits for the other, nothing passes through shared memory
    combine   `lib.split.combine_fragments`, which reads parts in that order
    last pair masked, and its V zeroed past the end, only where the request ends in it: in one part of a request

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
from mla_var3.kernel.cute_python.lib.latent.parts_plan import FragmentsPlan, PartsTiling
from mla_var3.kernel.cute_python.lib.phased import early


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def flash_mla_v8(
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
):
    early.run(
        q, tma, cache, page_table, seq_lens, target, marks, scale_log2, num_splits, ordered, shape, longest_first,
        frees_first=True, as_fragments=True,
    )  # fmt: skip


flash_mla_v8.set_name_prefix("flash_mla_v8", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla_v8(
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
    flash_mla_v8(
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
class FlashMlaV8Tiling(PartsTiling):
    """The tiling of `PartsPlan`."""


class FlashMlaV8Plan(FragmentsPlan):
    """Plan of flash_mla_v8."""

    tiling_type = FlashMlaV8Tiling
    kernel_fn = staticmethod(flash_mla_v8)
    host_fn = staticmethod(launch_flash_mla_v8)
