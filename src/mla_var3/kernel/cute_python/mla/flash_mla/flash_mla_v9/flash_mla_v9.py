r"""Absorbed MLA decode for Hopper (sm_90a) and few query rows: flash_mla_v2 with flash_mla_v8's start and parts.

    Sᵀ (64 tokens x n) = K · Qᵀ     softmax down the columns     Oᵀ (512 x n) += Vᵀ · P       n = 8, 16 or 32 rows

Tiles, ring and products are flash_mla_v2's (`lib.swapped`). What differs is what a call pays once:

    start     length and first page are asked for in the first instructions; no division where nothing is split
    maximum   lags behind by up to 2^8, so that outputs are rarely scaled
    ending    `lib.swapped.ending`: the consumers meet once; parts are fp16, as flash_mla_v8's
    combine   `lib.split.combine_fragments`
    blocks    one a kv head, split and request; where more than run at once, the longest requests first

All addresses and counts come from `seq_lens` on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float16, Float32, Int32
from cutlass.memory import SmemAllocator

from mla_var3.device import Requirement
from mla_var3.kernel.cute_python.lib import paged
from mla_var3.kernel.cute_python.lib.barriers import named_arrive, named_sync
from mla_var3.kernel.cute_python.lib.latent import order
from mla_var3.kernel.cute_python.lib.latent.parts_plan import FragmentsPlan
from mla_var3.kernel.cute_python.lib.latent.shape import Shape
from mla_var3.kernel.cute_python.lib.split.splits import MAX_SPLITS
from mla_var3.kernel.cute_python.lib.swapped import ending, limits, produce, ring, swapped
from mla_var3.kernel.cute_python.lib.swapped.consumer import (
    CONSUMER_REGISTERS,
    JOIN,
    PRODUCER_REGISTERS,
    START,
    STEP_BARRIERS,
    Consumer,
    Results,
    block_threads,
    fixed_bytes,
    most_slots,
    redistributes,
    reset,
    shared_storage,
    step,
)
from mla_var3.kernel.cute_python.lib.swapped.limits import ROW_TILES
from mla_var3.kernel.cute_python.lib.swapped.swapped import PANEL, TOKENS, WARPS, SwappedShape
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP
from mla_var3.runtime import Tiling, Verdict

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.problem import MlaProblem


# ------------------------------------------------------------------------------------------------ device
@cute.jit
def tiles_of(seq_len: Int32, split: Int32, num_splits: Int32, shape: cutlass.Constexpr):
    """(first tile, end tile, keys that every query may see); parts of one size, the last one shorter."""
    _, end, least = swapped.work_range(seq_len, Int32(0), Int32(0), Int32(1), shape)
    first = Int32(0)
    if num_splits > 1:  # a division takes a tenth of a microsecond, and the first load waits for it
        each = (end + num_splits - 1) // num_splits
        first = cutlass.min(split * each, end)
        end = cutlass.min(first + each, end)
    return first, end, least


@cute.kernel
def flash_mla_v9(
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
    latent: cutlass.Constexpr,  # the same problem as the combine sees it
    longest_first: cutlass.Constexpr,
):
    dtype = q.element_type
    thread, _, _ = cute.arch.thread_idx()
    kv_head, split, rank = cute.arch.block_idx()
    # Asked for before anything else: right if blocks take the requests in the order of the batch.
    seq_len = seq_lens[rank]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    guess, page = Int32(0), Int32(0)
    if warp >= shape.consumers * WARPS:
        # Where the part begins if the request fills its row of the page table: read beside the length, not after it.
        tokens = page_table.shape[1] * shape.page
        guessed, _, _ = tiles_of(Int32(tokens), split, num_splits, shape)
        guess = cutlass.min(guessed * TOKENS // shape.page, page_table.shape[1] - 1)
        page = page_table[rank, guess]
    storage = SmemAllocator().allocate(shared_storage(shape, dtype, (ending.MAGNITUDES,)))
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    threads = shape.consumers * WARPGROUP
    batch = rank
    if warp == shape.consumers * WARPS:
        # The producer makes the barriers itself, so that its first loads need not wait for the others.
        produce.make_barriers(tma, full, empty, shape.slots, WARPS, thread % 32)
        named_arrive(START, threads + 32)
    if cutlass.const_expr(longest_first):
        if ordered != 0:
            batch = order.request_at(rank, seq_lens, thread % 32)
            seq_len = seq_lens[batch]
    first, end, least = tiles_of(seq_len, split, num_splits, shape)

    if warp >= shape.consumers * WARPS:
        if cutlass.const_expr(redistributes(shape)):
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if warp == shape.consumers * WARPS:
            if batch != rank:
                guess = Int32(-1)
            produce.produce(
                tma, cache, page_table[batch, None], guess, page, kv_head, first, end, storage.ring.data_ptr(), full,
                empty, tuple(range(shape.panels)), shape.slots, shape.page // TOKENS, paged.EVICT_FIRST,
            )  # fmt: skip
    else:
        if cutlass.const_expr(redistributes(shape)):
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        swapped.load_queries(
            q, storage.query.data_ptr(), shape.tile_n, batch, kv_head, Int32(0), shape.rows, shape.group, thread,
            threads,
        )  # fmt: skip
        cute.arch.fence_view_async_shared()
        named_sync(START, threads + 32)
        # Of both consumers, which take turns at the tiles in code of their own and end in the same.
        results = Results(shape, dtype)
        reset(results)
        for me in cutlass.range_constexpr(shape.consumers):
            if warp // WARPS == me:
                w = Consumer(me, shape, dtype, thread - me * WARPGROUP, storage, scale_log2, results)
                slot, phase = Int32(0), Int32(0)
                for tile in cutlass.range(first, end, unroll=1):
                    if (tile - first) % shape.consumers == me:
                        step(w, tile, slot, phase, seq_len, least, Int32(0), lazy=True)
                    slot, phase = ring.at(slot, phase, shape.panels, shape.slots)
                if cutlass.const_expr(me == 1):
                    # The first one has a tile more. racecheck follows barriers of all only where each consumer has
                    # passed as many of its own.
                    if (end - first) % shape.consumers == 1:
                        for _ in cutlass.range_constexpr(STEP_BARRIERS):
                            named_sync(JOIN + me, WARPGROUP)
        cute.arch.griddepcontrol_launch_dependents()  # the combine may start
        e = ending.Ending(results, shape, dtype, storage, thread, end - first)
        if num_splits == 1:
            ending.finish_whole(e, target, marks, batch, kv_head)
        else:
            parts = cute.recast_ptr(target.iterator, dtype=Float16)
            ending.finish_part(e, parts, marks.iterator, split * seq_lens.shape[0] + batch, kv_head, latent)


flash_mla_v9.set_name_prefix("flash_mla_v9", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla_v9(
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
    stream: CUstream,
):
    """Makes the TMA descriptor of the cache and launches one block a kv head, split and request."""
    tma, cache = paged.make_page_tma(kv_cache)
    flash_mla_v9(
        q, tma, cache, page_table, seq_lens, target, marks, scale * math.log2(math.e), num_splits, ordered,
        shape, latent, longest_first,
    ).launch(
        grid=(shape.h_kv, num_splits, q.shape[0]),
        block=(block_threads(shape), 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ plan
def _takes(pd: MlaProblem) -> Verdict:
    if not (taken := limits.takes_panels(pd, "flash_mla_v9")):
        return taken
    if pd.rows > ROW_TILES[-1]:
        return Verdict.no(
            f"s·h/h_kv = {pd.rows} query rows share a cache; a block has room for {ROW_TILES[-1]}: use flash_mla_v8"
        )
    return Verdict.yes()


@dataclass(frozen=True)
class FlashMlaV9Tiling(Tiling):
    """0 means: chosen for the problem.

    tile_n: query rows of a block (8, 16 or 32). num_pipeline_stages: 64 x 64 panels in the ring. num_splits: parts of
    each request's keys. longest_first: where more blocks than run at once, they take the longest requests first.
    """

    launch_fields: ClassVar[tuple[str, ...]] = ("num_splits",)

    tile_n: int = 0
    num_pipeline_stages: int = 0
    num_splits: int = 0
    longest_first: bool = True

    def resolved(self, pd: MlaProblem) -> FlashMlaV9Tiling:
        """With tile_n and num_pipeline_stages chosen."""
        tile_n = self.tile_n or limits.row_tile(pd.rows)
        slots = self.num_pipeline_stages or most_slots(tile_n, ending.CONSUMERS, pd.k + pd.p, pd.element_bytes)
        return replace(self, tile_n=tile_n, num_pipeline_stages=slots)

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        if self.tile_n not in (0, *ROW_TILES):
            return Verdict.no(f"tile_n = {self.tile_n}, and this version is written for 8, 16 and 32")
        if not 0 <= self.num_splits <= MAX_SPLITS:
            return Verdict.no(f"num_splits = {self.num_splits} is outside 0 (chosen for the sizes) to {MAX_SPLITS}")
        if not (taken := _takes(pd)):
            return taken
        full = self.resolved(pd)
        if full.tile_n < pd.rows:
            return Verdict.no(f"tile_n = {full.tile_n} must hold the {pd.rows} query rows that share a cache")
        panels = (pd.k + pd.p) // PANEL
        if full.num_pipeline_stages < panels * ending.CONSUMERS:
            return Verdict.no(
                f"num_pipeline_stages = {full.num_pipeline_stages} panels must hold the {panels} of a tile for each of "
                f"{ending.CONSUMERS} consumers"
            )
        fixed = fixed_bytes(full.tile_n, ending.CONSUMERS, pd.k + pd.p, pd.element_bytes)
        return limits.fits_block(full.num_pipeline_stages, fixed, device)


class FlashMlaV9Plan(FragmentsPlan):
    """One compiled kernel a problem class, tile_n and slots; b, lengths, page table width and splits are arguments."""

    tiling_type = FlashMlaV9Tiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=_takes)
    kernel_fn = staticmethod(flash_mla_v9)
    host_fn = staticmethod(launch_flash_mla_v9)

    @property
    def shape(self) -> SwappedShape:
        tiling = self.tiling.resolved(self.problem)
        return SwappedShape.of(self.problem, tiling.tile_n, ending.CONSUMERS, tiling.num_pipeline_stages)

    def blocks(self, b: int) -> int:
        return b * self.shape.h_kv

    def constants(self) -> tuple[Any, ...]:
        return (self.shape, Shape.of(self.problem), self.tiling.longest_first)
