r"""Absorbed MLA decode for Hopper (sm_90a): flash_mla_v10 whose blocks stand ready when they may begin.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, 576)    V = latent (t, 512)

For calls of few requests, which leave SMs without a block: the combine goes there (`lib.split.cut.Room`), so that the
next call's blocks, programmatic dependents of it, come while it runs, and have made their barriers when it ends
(`lib.phased.ready`). Loop, loads and endings are flash_mla_v10's; parts are single tiles, or pairs of them, by tiling.

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

from mla_var3.device import SUBPARTITIONS
from mla_var3.kernel.cute_python.lib import host, paged
from mla_var3.kernel.cute_python.lib.latent import loads
from mla_var3.kernel.cute_python.lib.latent.consumer import THREADS
from mla_var3.kernel.cute_python.lib.latent.parts_plan import PartsTiling, ShortPartsPlan
from mla_var3.kernel.cute_python.lib.latent.shape import TILE_N
from mla_var3.kernel.cute_python.lib.phased import ready
from mla_var3.kernel.cute_python.lib.split.cut import Room
from mla_var3.kernel.cute_python.lib.split.divide import inverse_of
from mla_var3.runtime import Tiling


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def flash_mla_v15(
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
    singles: cutlass.Constexpr,
):
    ready.run(
        q, tma, cache, page_table, seq_lens, target, marks, scale_log2, num_splits, inverse, ordered, shape,
        longest_first, singles,
    )  # fmt: skip


flash_mla_v15.set_name_prefix("flash_mla_v15", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla_v15(
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
    singles: cutlass.Constexpr,
    stream: CUstream,
):
    """Makes the TMA descriptor of the cache and launches one block a row tile, kv head, split and request; where
    requests are split, as a programmatic dependent of the kernel before."""
    shares = loads.shared_loads(shape)
    tma, cache = paged.make_page_tma(kv_cache, shares)
    flash_mla_v15(
        q, tma, cache, page_table, seq_lens, target, marks, scale * math.log2(math.e), num_splits,
        inverse_of(num_splits), ordered, shape, longest_first, singles,
    ).launch(
        grid=(shape.row_tiles * shape.h_kv, num_splits, q.shape[0]),
        block=(THREADS, 1, 1),
        cluster=(2 if shares else 1, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=Int32(cutlass.select_(num_splits > 1, Int32(1), Int32(0))),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ plan
@dataclass(frozen=True)
class FlashMlaV15Tiling(PartsTiling):
    """The tiling of `ShortPartsPlan`. singles: whether parts may be single tiles (`lib.phased.short`)."""

    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {**PartsTiling.choices, "singles": (True, False)}

    singles: bool = True


class FlashMlaV15Plan(ShortPartsPlan):
    """Plan of flash_mla_v15."""

    tiling_type = FlashMlaV15Tiling
    kernel_fn = staticmethod(flash_mla_v15)
    host_fn = staticmethod(launch_flash_mla_v15)

    def default_tiling(self) -> Tiling:
        """Single tiles where the model of splits takes as many parts as tiles. Code for both costs pairs of tiles more
        than it looks: b1 h128 t4096 10.2 us with it and 9.7 without; b1 h128 t1024 is 7.6 us in single tiles and 8.7
        in pairs."""
        pd = self.problem
        tiles = -(-pd.max_pages * pd.page_size // TILE_N)
        return self.tiling_type(singles=self.equal_splits(pd.b, pd.max_pages) >= tiles)

    def room(self, requests: int, splits: int) -> Room:
        """The SMs that this version's blocks leave: it takes all registers of its own."""
        device = host.target(self)
        registers = device.regs_per_sm // SUBPARTITIONS
        return Room(device.num_sms - self.blocks(requests) * splits, registers, device.smem_per_sm)

    def constants(self) -> tuple[Any, ...]:
        return (*super().constants(), self.tiling.singles)
