r"""Absorbed MLA decode for Hopper (sm_90a), few query rows: swapped operands, splits joined inside the kernel.

    Sᵀ (64 tokens x n) = K · Qᵀ     softmax down the columns     Oᵀ (512 x n) += Vᵀ · P       n = 8, 16 or 32 rows

Like flash_mla_v2 (tokens on M, nothing padded to 64 rows, one deep ring of 64 x 64 panels), with less of everything
that does not read the cache:

- Both consumer warpgroups work on one tile (`lib.few.pair`), so a tile is through in half the time, the ring holds one
  tile that is worked on, and outputs need not be added at the end.
- The splits of a request are blocks of a cluster. They add their outputs through distributed shared memory
  (`lib.few.join`); only what several clusters have of one request goes through global memory, and the last one to
  arrive adds it. There is no second kernel.
- The kernel is a programmatic dependent launch: blocks are placed and barriers made while the kernel before ends.

A block computes one (row tile, kv head, split, request). All addresses and counts come from `seq_lens` on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from mla_var3.device import Requirement
from mla_var3.kernel.cute_python.lib import host, paged
from mla_var3.kernel.cute_python.lib.barriers import named_arrive, named_sync
from mla_var3.kernel.cute_python.lib.few import join, pair, schedule
from mla_var3.kernel.cute_python.lib.few.pair import (
    BOTH,
    START,
    THREADS,
    Consumer,
    fixed_bytes,
    most_slots,
    shared_storage,
)
from mla_var3.kernel.cute_python.lib.few.plan import FewPlan
from mla_var3.kernel.cute_python.lib.swapped import limits, produce, ring, swapped
from mla_var3.kernel.cute_python.lib.swapped.limits import ROW_TILES
from mla_var3.kernel.cute_python.lib.swapped.swapped import PANEL, TOKENS, WARPS, SwappedShape
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP
from mla_var3.runtime import Tiling, Verdict

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.problem import MlaProblem

MAX_ROW_TILES = 4
BLOCK_THREADS = THREADS + 32


# ------------------------------------------------------------------------------------------------ device
@cute.jit
def consume(
    w: cutlass.Constexpr,
    q: cute.Tensor,
    seq_len: Int32,
    out: cute.Tensor,
    lse: cute.Tensor,
    workspace: cute.Tensor,
    counter: cute.Tensor,
    batch: Int32,
    kv_head: Int32,
    row_tile: Int32,
    item: Int32,
    split: Int32,
    num_splits: Int32,
    cluster: Int32,
    part: cutlass.Constexpr,
):
    """The tiles of the block's work item, and its part of the result."""
    shape = w.shape
    first, end, least = swapped.work_range(seq_len, row_tile, split, num_splits, shape)
    first_row = row_tile * shape.tile_n
    pair.reset(w)
    slot, phase = Int32(0), Int32(0)
    for tile in cutlass.range(first, end, unroll=1):
        pair.step(w, tile, slot, phase, seq_len, least, first_row)
        slot, phase = ring.at(slot, phase, shape.panels, shape.slots)
    pair.normalize(w)
    if num_splits == 1:
        pair.write_output(w, out, lse, batch, kv_head, first_row)
    else:
        # Behind this nobody reads the ring.
        named_sync(BOTH, THREADS)
        cute.arch.cluster_wait()
        rank = split % cluster
        pair.leave_part(w, part, cluster, rank)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        parts = cute.recast_ptr(w.ring, dtype=Float32)
        join.join(
            parts, w.lses, w.flag, workspace, counter, out, lse, item, split // cluster, num_splits // cluster, cluster,
            rank, batch, kv_head, first_row, shape.rows, shape.group, part, w.me * WARPGROUP + w.thread, BOTH,
        )  # fmt: skip
        cute.arch.cluster_wait()


@cute.kernel
def flash_mla_v4(
    q: cute.Tensor,  # (b, s, h, k + p) 16-bit, global memory, contiguous
    tma: cute.CopyAtom,  # one 64 x 64 box of the cache
    cache: cute.Tensor,  # TMA tensor (page, k + p, h_kv, num_pages)
    page_table: cute.Tensor,  # (b, max_pages) int32, global memory, contiguous
    seq_lens: cute.Tensor,  # (b,) int32, global memory
    out: cute.Tensor,  # (b, s, h, k) 16-bit, global memory, contiguous
    lse: cute.Tensor,  # (b, h, s) fp32, global memory, contiguous
    workspace: cute.Tensor,  # fp32, global memory: see `join.workspace_part`; unused with one cluster an item
    counter: cute.Tensor,  # (items · cluster,) int32, global memory; 0 in, 0 out
    scale_log2: Float32,
    num_splits: Int32,
    cluster: Int32,
    shape: cutlass.Constexpr,
):
    dtype = q.element_type
    thread, _, _ = cute.arch.thread_idx()
    split, head_tile, batch = cute.arch.block_idx()
    _, head_tiles, _ = cute.arch.grid_dim()
    row_tile = head_tile % shape.row_tiles
    kv_head = head_tile // shape.row_tiles
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = SmemAllocator().allocate(shared_storage(shape, dtype))
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    part = join.PartShape(shape.tile_n, shape.k)
    if num_splits > 1:
        cute.arch.cluster_arrive_relaxed()

    if warp >= pair.CONSUMERS * WARPS:
        # It makes the barriers itself, so that its first loads need not wait for the others.
        produce.make_barriers(tma, full, empty, shape.slots, WARPS, thread % 32)
        named_arrive(START, BLOCK_THREADS)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        pages = page_table[batch, None]
        per_page = shape.page // TOKENS
        guess, page = produce.first_page(pages, split, num_splits, per_page)
        first, end, _ = swapped.work_range(seq_lens[batch], row_tile, split, num_splits, shape)
        # A second row tile finds the tokens in the L2.
        policy = paged.EVICT_FIRST if shape.row_tiles == 1 else None
        produce.produce(
            tma, cache, pages, guess, page, kv_head, first, end, storage.ring.data_ptr(), full, empty,
            tuple(range(shape.panels)), shape.slots, per_page, policy,
        )  # fmt: skip
        if num_splits > 1:
            for _ in cutlass.range_constexpr(2):
                cute.arch.cluster_wait()
                cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
    else:
        cute.arch.griddepcontrol_wait()
        swapped.load_queries(
            q, storage.query.data_ptr(), shape.tile_n, batch, kv_head, row_tile * shape.tile_n, shape.rows, shape.group,
            thread, THREADS,
        )  # fmt: skip
        cute.arch.fence_view_async_shared()
        named_sync(START, BLOCK_THREADS)
        seq_len = seq_lens[batch]
        item = batch * head_tiles + head_tile
        for me in cutlass.range_constexpr(pair.CONSUMERS):
            if warp // WARPS == me:
                w = Consumer(me, shape, dtype, thread - me * WARPGROUP, storage, scale_log2)
                consume(
                    w, q, seq_len, out, lse, workspace, counter, batch, kv_head, row_tile, item, split, num_splits,
                    cluster, part,
                )  # fmt: skip


flash_mla_v4.set_name_prefix("flash_mla_v4", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla_v4(
    q: cute.Tensor,
    kv_cache: cute.Tensor,  # (num_pages, page, h_kv, k + p) 16-bit, global memory, contiguous
    page_table: cute.Tensor,
    seq_lens: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    workspace: cute.Tensor,
    counter: cute.Tensor,
    scale: Float32,
    num_splits: Int32,
    cluster: Int32,
    shape: cutlass.Constexpr,
    stream: CUstream,
):
    """Makes the TMA descriptor of the cache and launches one block a row tile, kv head, split and request."""
    tma, cache = paged.make_page_tma(kv_cache)
    flash_mla_v4(
        q, tma, cache, page_table, seq_lens, out, lse, workspace, counter,
        scale * math.log2(math.e), num_splits, cluster, shape,
    ).launch(
        grid=(num_splits, shape.row_tiles * shape.h_kv, q.shape[0]),
        block=(BLOCK_THREADS, 1, 1),
        cluster=(cluster, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ plan
def _takes(pd: MlaProblem) -> Verdict:
    if not (taken := limits.takes_panels(pd, "flash_mla_v4")):
        return taken
    if pd.rows > MAX_ROW_TILES * ROW_TILES[-1]:
        return Verdict.no(
            f"s·h/h_kv = {pd.rows} query rows share a cache; over {MAX_ROW_TILES * ROW_TILES[-1]} of them every "
            f"{ROW_TILES[-1]} would read it again: use flash_mla"
        )
    return Verdict.yes()


@dataclass(frozen=True)
class FlashMlaV4Tiling(Tiling):
    """0 means: chosen for the problem.

    tile_n: query rows of a block (8, 16 or 32). num_pipeline_stages: 64 x 64 panels in the ring. num_splits: parts of
    each request's keys. cluster: blocks of a cluster, a divisor of the splits.
    """

    launch_fields: ClassVar[tuple[str, ...]] = ("num_splits", "cluster")

    tile_n: int = 0
    num_pipeline_stages: int = 0
    num_splits: int = 0
    cluster: int = 0

    def resolved(self, pd: MlaProblem) -> FlashMlaV4Tiling:
        """With tile_n and num_pipeline_stages chosen."""
        tile_n = self.tile_n or limits.row_tile(pd.rows)
        slots = self.num_pipeline_stages or most_slots(tile_n, pd.k + pd.p, pd.element_bytes)
        return replace(self, tile_n=tile_n, num_pipeline_stages=slots)

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        if self.tile_n not in (0, *ROW_TILES):
            return Verdict.no(f"tile_n = {self.tile_n}, and this version is written for 8, 16 and 32")
        if not 0 <= self.num_splits <= schedule.MAX_SPLITS:
            return Verdict.no(f"num_splits = {self.num_splits} is outside 0 (chosen) to {schedule.MAX_SPLITS}")
        if not 0 <= self.cluster <= join.MAX_CLUSTER:
            return Verdict.no(f"cluster = {self.cluster} is outside 0 (chosen) to {join.MAX_CLUSTER}")
        if self.cluster and (not self.num_splits or self.num_splits % self.cluster):
            return Verdict.no(f"cluster = {self.cluster} must divide num_splits = {self.num_splits}; give both")
        if not (taken := _takes(pd)):
            return taken
        full = self.resolved(pd)
        panels = (pd.k + pd.p) // PANEL
        if full.num_pipeline_stages < panels:
            return Verdict.no(
                f"num_pipeline_stages = {full.num_pipeline_stages} must hold the {panels} panels of a tile"
            )
        fixed = fixed_bytes(full.tile_n, pd.k + pd.p, pd.element_bytes)
        return limits.fits_block(full.num_pipeline_stages, fixed, device)


class FlashMlaV4Plan(FewPlan):
    """One compiled kernel a problem class, tile_n and slots; b, lengths, splits and cluster are arguments."""

    tiling_type = FlashMlaV4Tiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=_takes)
    name = "flash_mla_v4"
    kernel_fn = flash_mla_v4
    host_fn = staticmethod(launch_flash_mla_v4)

    def default_tiling(self) -> FlashMlaV4Tiling:
        return FlashMlaV4Tiling()

    def autotune_configs(self) -> list[Tiling]:
        tiles = -(-self.problem.max_pages * self.problem.page_size // TOKENS)
        splits = [n for n in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128) if n <= tiles]
        return [
            FlashMlaV4Tiling(),
            *(FlashMlaV4Tiling(num_splits=n, cluster=c) for n in splits for c in (1, 2, 4, 8) if n % c == 0),
        ]

    @property
    def shape(self) -> SwappedShape:
        tiling = self.tiling.resolved(self.problem)
        return SwappedShape.of(self.problem, tiling.tile_n, pair.CONSUMERS, tiling.num_pipeline_stages)

    @property
    def part(self) -> join.PartShape:
        return join.PartShape(self.shape.tile_n, self.shape.k)

    def choose_splits(self, items: int, tiles: int) -> int:
        return schedule.choose_splits(
            items, tiles, host.target(self).num_sms, tile_us=0.0159, least_us=2.0 if self.shape.tile_n == 32 else 1.3
        )
