r"""Absorbed MLA decode for Hopper (sm_90a) and few query rows: swapped operands, and a deep ring of panels.

    Sᵀ (64 tokens x n) = K · Qᵀ     softmax down the columns     Oᵀ (512 x n) += Vᵀ · P       n = 8, 16 or 32 rows

With few query rows decode is bound by memory. So nothing is padded to 64 rows (padding costs power, and a chip at its
power limit is slower in everything), and all shared memory that q leaves is one ring of 64-token x 64-column panels:
200 KiB of which the consumers hold what they work on and the rest is on its way. One warp fills the ring, over tiles
and over the work items of the block alike, so loads do not pause where a tile or a request ends.

Consumer warpgroups take turns at the tiles. Each has the whole Oᵀ in registers (n/2 a thread for each 64 columns: 64
registers at n = 16) and a softmax of its own, so they never wait for each other until the end of an item, where their
outputs are added through the shared memory of q.

A work item is (row tile, kv head, split, request): one for each block, or handed out to fewer, persistent blocks. With
more than one split, fp32 partials and `merge_splits`. All addresses and counts come from `seq_lens` on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from mla_var3.device import Requirement
from mla_var3.kernel.cute_python.lib import host, paged
from mla_var3.kernel.cute_python.lib.barriers import named_arrive, named_sync
from mla_var3.kernel.cute_python.lib.decode import DecodePlan
from mla_var3.kernel.cute_python.lib.split import combine, merge
from mla_var3.kernel.cute_python.lib.split.memory_splits import choose_splits
from mla_var3.kernel.cute_python.lib.swapped import limits, ring, swapped, work
from mla_var3.kernel.cute_python.lib.swapped.consumer import (
    CONSUMER_REGISTERS,
    JOIN_ALL,
    PRODUCER_REGISTERS,
    START,
    Consumer,
    block_threads,
    finish,
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
from mla_var3.runtime import CuteKernel, KernelPipeline, Tiling, Verdict

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.problem import MlaProblem

MAX_ROW_TILES = 4


# ------------------------------------------------------------------------------------------------ device
@cute.jit
def item_of(item: Int32, num_splits: Int32, shape: cutlass.Constexpr):
    """(row tile, kv head, split, request) of a work item: what shares cached tokens is next to each other."""
    block = item % (shape.row_tiles * shape.h_kv)
    rest = item // (shape.row_tiles * shape.h_kv)
    return block % shape.row_tiles, block // shape.row_tiles, rest % num_splits, rest // num_splits


@cute.jit
def consume_item(
    w: cutlass.Constexpr,
    q: cute.Tensor,
    seq_lens: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    partial_out: cute.Tensor,
    partial_lse: cute.Tensor,
    num_splits: Int32,
    item: Int32,
    slot: Int32,
    phase: Int32,
):
    """One work item, whose first panel is at (slot, phase) of the ring; returns the place after its last."""
    shape = w.shape
    threads = shape.consumers * WARPGROUP
    row_tile, kv_head, split, batch = item_of(item, num_splits, shape)
    seq_len = seq_lens[batch]
    first, end, least = swapped.work_range(seq_len, row_tile, split, num_splits, shape)
    first_row = row_tile * shape.tile_n
    swapped.load_queries(
        q, w.query, shape.tile_n, batch, kv_head, first_row, shape.rows, shape.group,
        w.me * WARPGROUP + w.thread, threads,
    )  # fmt: skip
    cute.arch.fence_view_async_shared()
    reset(w)
    named_sync(JOIN_ALL, threads)
    for tile in cutlass.range(first, end, unroll=1):
        if (tile - first) % shape.consumers == w.me:
            step(w, tile, slot, phase, seq_len, least, first_row)
        slot, phase = ring.at(slot, phase, shape.panels, shape.slots)
    finish(w, out, lse, partial_out, partial_lse, batch, kv_head, row_tile, split, num_splits)
    # q's memory and the boards are read until here.
    named_sync(JOIN_ALL, threads)
    return slot, phase


@cute.jit
def consume(
    w: cutlass.Constexpr,
    queue: cutlass.Constexpr,
    q: cute.Tensor,
    seq_lens: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    partial_out: cute.Tensor,
    partial_lse: cute.Tensor,
    num_splits: Int32,
    num_items: Int32,
):
    """All work items of the block. A tile's place in the ring is counted as the producer counts it."""
    item, _, _ = cute.arch.block_idx()
    slot, phase, taken = Int32(0), Int32(0), Int32(0)
    while item < num_items:
        slot, phase = consume_item(
            w, q, seq_lens, out, lse, partial_out, partial_lse, num_splits, item, slot, phase
        )  # fmt: skip
        item = work.take(queue, taken)
        taken = taken + 1


# ------------------------------------------------------------------------------------------------ device: the producer
@cute.jit
def produce(
    tma: cute.CopyAtom,
    cache: cute.Tensor,
    page_table: cute.Tensor,
    seq_lens: cute.Tensor,
    base: cute.Pointer,
    full: cute.Pointer,
    empty: cute.Pointer,
    queue: cutlass.Constexpr,
    counter: cute.Tensor,
    num_splits: Int32,
    num_items: Int32,
    shape: cutlass.Constexpr,
):
    """One warp fills the ring with the tiles of all the block's work items, one after the other."""
    item, _, _ = cute.arch.block_idx()
    boxes, slots = ring.partition(tma, cache, base, shape.slots)
    per_page = shape.page // TOKENS
    order = tuple(range(shape.panels))
    # A second row tile finds the tokens in the L2.
    policy = paged.EVICT_FIRST if shape.row_tiles == 1 else None
    slot, phase, given = Int32(0), Int32(0), Int32(0)
    width = page_table.shape[1]
    while item < num_items:
        row_tile, kv_head, split, batch = item_of(item, num_splits, shape)
        pages = page_table[batch, None]
        # Where the item starts if the request fills its row of the page table (or is not split): read beside the
        # length instead of after it.
        guess = split * (width * per_page) // num_splits // per_page
        page = Int32(0)
        if guess < width:
            page = pages[guess]
        first, end, _ = swapped.work_range(seq_lens[batch], row_tile, split, num_splits, shape)
        if first < end:
            if first // per_page != guess:
                page = pages[first // per_page]
            for tile in cutlass.range(first, end, unroll=1):
                # Asked for a tile ahead, so that its latency is not in the way. The last one asks for itself again.
                following = pages[cutlass.min(tile + 1, end - 1) // per_page]
                ring.fill_tile(
                    tma, boxes, slots, full, empty, tile % per_page, kv_head, page, slot, phase, order, shape.slots,
                    policy,
                )  # fmt: skip
                slot, phase = ring.at(slot, phase, shape.panels, shape.slots)
                page = following
        # Asked for as late as possible, so that blocks end together; what is in the ring covers the wait.
        item = work.fetch(counter, num_items)
        work.give(queue, given, item)
        given = given + 1


@cute.kernel
def flash_mla_v2(
    q: cute.Tensor,  # (b, s, h, k + p) 16-bit, global memory, contiguous
    tma: cute.CopyAtom,  # one 64 x 64 box of the cache
    cache: cute.Tensor,  # TMA tensor (page, k + p, h_kv, num_pages)
    page_table: cute.Tensor,  # (b, max_pages) int32, global memory, contiguous
    seq_lens: cute.Tensor,  # (b,) int32, global memory
    out: cute.Tensor,  # (b, s, h, k) 16-bit, global memory, contiguous
    lse: cute.Tensor,  # (b, h, s) fp32, global memory, contiguous
    partial_out: cute.Tensor,  # (splits, b, h_kv, rows, k) fp32, global memory, contiguous; unused with one split
    partial_lse: cute.Tensor,  # (splits, b, h_kv, rows) fp32, log2 domain, global memory; unused with one split
    counter: cute.Tensor,  # (1,) int32, global memory: work items handed out after the first of each block; 0 in, 0 out
    scale_log2: Float32,
    num_splits: Int32,
    num_items: Int32,
    shape: cutlass.Constexpr,
):
    dtype = q.element_type
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = SmemAllocator().allocate(shared_storage(shape, dtype))
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    queue = work.Queue(storage.items.data_ptr(), storage.item_barriers.data_ptr(), shape.consumers * WARPS)
    # The blocks of `merge_splits` may be placed once all blocks of this kernel are; they wait for it to end.
    cute.arch.griddepcontrol_launch_dependents()

    if warp >= shape.consumers * WARPS:
        if cutlass.const_expr(redistributes(shape)):
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if warp == shape.consumers * WARPS:
            # It makes the barriers itself, so that its first loads need not wait for the others.
            cpasync.prefetch_descriptor(tma)
            lane = thread % 32
            for i in cutlass.range_constexpr(-(-shape.slots // 32)):
                if lane + 32 * i < shape.slots:
                    cute.arch.mbarrier_init(full + (lane + 32 * i), 1)
                    cute.arch.mbarrier_init(empty + (lane + 32 * i), WARPS)
            work.initialize(queue, lane)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            named_arrive(START, shape.consumers * WARPGROUP + 32)
            base = storage.ring.data_ptr()
            produce(tma, cache, page_table, seq_lens, base, full, empty, queue, counter, num_splits, num_items, shape)
    else:
        if cutlass.const_expr(redistributes(shape)):
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        named_sync(START, shape.consumers * WARPGROUP + 32)
        for me in cutlass.range_constexpr(shape.consumers):
            if warp // WARPS == me:
                w = Consumer(me, shape, dtype, thread - me * WARPGROUP, storage, scale_log2)
                consume(w, queue, q, seq_lens, out, lse, partial_out, partial_lse, num_splits, num_items)


flash_mla_v2.set_name_prefix("flash_mla_v2", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_flash_mla_v2(
    q: cute.Tensor,
    kv_cache: cute.Tensor,  # (num_pages, page, h_kv, k + p) 16-bit, global memory, contiguous
    page_table: cute.Tensor,
    seq_lens: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    partial_out: cute.Tensor,
    partial_lse: cute.Tensor,
    counter: cute.Tensor,
    scale: Float32,
    num_splits: Int32,
    num_blocks: Int32,
    shape: cutlass.Constexpr,
    stream: CUstream,
):
    """Makes the TMA descriptor of the cache and launches `num_blocks` blocks over all work items."""
    tma, cache = paged.make_page_tma(kv_cache)
    num_items = q.shape[0] * num_splits * (shape.row_tiles * shape.h_kv)
    flash_mla_v2(
        q, tma, cache, page_table, seq_lens, out, lse, partial_out, partial_lse, counter,
        scale * math.log2(math.e), num_splits, num_items, shape,
    ).launch(
        grid=(num_blocks, 1, 1),
        block=(block_threads(shape), 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ plan
def _takes(pd: MlaProblem) -> Verdict:
    if not (taken := limits.takes_panels(pd, "flash_mla_v2")):
        return taken
    if pd.rows > MAX_ROW_TILES * ROW_TILES[-1]:
        return Verdict.no(
            f"s·h/h_kv = {pd.rows} query rows share a cache; over {MAX_ROW_TILES * ROW_TILES[-1]} of them every "
            f"{ROW_TILES[-1]} would read it again: use flash_mla"
        )
    return Verdict.yes()


@dataclass(frozen=True)
class FlashMlaV2Tiling(Tiling):
    """0 means: chosen for the problem.

    tile_n: query rows of a block (8, 16 or 32). num_consumers: warpgroups that take turns at the tiles (1 or 2).
    num_pipeline_stages: 64 x 64 panels in the ring. num_splits: parts of each request's keys. num_blocks: of the
    grid, which share out the work items (0: a block for each).
    """

    launch_fields: ClassVar[tuple[str, ...]] = ("num_splits", "num_blocks")

    tile_n: int = 0
    num_consumers: int = 0
    num_pipeline_stages: int = 0
    num_splits: int = 0
    num_blocks: int = 0

    def resolved(self, pd: MlaProblem) -> FlashMlaV2Tiling:
        """With tile_n, num_consumers and num_pipeline_stages chosen."""
        tile_n = self.tile_n or limits.row_tile(pd.rows)
        consumers = self.num_consumers or 2
        slots = self.num_pipeline_stages or most_slots(tile_n, consumers, pd.k + pd.p, pd.element_bytes)
        return replace(self, tile_n=tile_n, num_consumers=consumers, num_pipeline_stages=slots)

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        if self.tile_n not in (0, *ROW_TILES):
            return Verdict.no(f"tile_n = {self.tile_n}, and this version is written for 8, 16 and 32")
        if self.num_consumers not in (0, 1, 2):
            return Verdict.no(f"num_consumers = {self.num_consumers} must be 1 or 2, or 0 (chosen)")
        if not 0 <= self.num_splits <= merge.MAX_SPLITS:
            return Verdict.no(
                f"num_splits = {self.num_splits} is outside 0 (chosen for the sizes) to {merge.MAX_SPLITS}"
            )
        if self.num_blocks < 0:
            return Verdict.no(f"num_blocks = {self.num_blocks} must not be negative")
        if not (taken := _takes(pd)):
            return taken
        full = self.resolved(pd)
        panels = (pd.k + pd.p) // PANEL
        if full.num_pipeline_stages < panels * full.num_consumers:
            return Verdict.no(
                f"num_pipeline_stages = {full.num_pipeline_stages} panels must hold the {panels} of a tile for each of "
                f"{full.num_consumers} consumers"
            )
        fixed = fixed_bytes(full.tile_n, full.num_consumers, pd.k + pd.p, pd.element_bytes)
        return limits.fits_block(full.num_pipeline_stages, fixed, device)


class FlashMlaV2Plan(DecodePlan):
    """One compiled kernel a problem class, tile_n, consumers and slots; b, lengths, splits and blocks are arguments."""

    tiling_type = FlashMlaV2Tiling
    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=_takes)

    def default_tiling(self) -> FlashMlaV2Tiling:
        return FlashMlaV2Tiling()

    def autotune_configs(self) -> list[Tiling]:
        tiles = -(-self.problem.max_pages * self.problem.page_size // TOKENS)
        sms = host.target(self).num_sms
        splits = sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, sms) if n <= tiles})
        return [
            FlashMlaV2Tiling(),
            *(FlashMlaV2Tiling(num_consumers=c, num_splits=n) for c in (1, 2) for n in splits),
        ]

    @property
    def shape(self) -> SwappedShape:
        tiling = self.tiling.resolved(self.problem)
        return SwappedShape.of(self.problem, tiling.tile_n, tiling.num_consumers, tiling.num_pipeline_stages)

    def num_splits(self, b: int, max_pages: int) -> int:
        """Parts of each request's keys: the tiling's, or the model's for requests as long as the page table is wide."""
        if self.tiling.num_splits:
            return self.tiling.num_splits
        shape = self.shape
        tiles = -(-max_pages * self.problem.page_size // TOKENS)
        return choose_splits(
            b * shape.h_kv * shape.row_tiles, tiles, b * self.problem.s * self.problem.h, shape.k,
            host.target(self).num_sms,
        )  # fmt: skip

    def num_blocks(self, b: int, splits: int) -> int:
        """Blocks of the grid: the tiling's, or one a work item."""
        items = b * self.shape.h_kv * self.shape.row_tiles * splits
        return min(self.tiling.num_blocks or items, items)

    def _arguments(self) -> tuple[Any, ...]:
        """Fake arguments of the host function, without the stream."""
        pd, kind = self.problem, host.element_type(self.problem.dtype)
        b, pages, width = host.symbols(3)
        *partials, out, lse = combine.fake_partials(kind, b, pd.s, pd.h, pd.h_kv, pd.k)
        return (
            host.fake(kind, b, pd.s, pd.h, pd.k + pd.p),
            host.fake(kind, pages, pd.page_size, pd.h_kv, pd.k + pd.p, align=128),
            host.fake(Int32, b, width, align=4),
            host.fake(Int32, b, align=4),
            out, lse, *partials, host.fake(Int32, 1, align=4), Float32(1.0), Int32(1), Int32(1), self.shape,
        )  # fmt: skip

    def make(self, inputs: Any, outputs: Any, partials: Any, splits: int) -> CuteKernel | KernelPipeline:
        compile_fn = host.compiler(launch_flash_mla_v2, self._arguments, "flash_mla_v2")
        call, blocks, counter = None, 0, None
        if inputs:
            import torch

            call = host.function(self, "flash_mla_v2", compile_fn)
            blocks = self.num_blocks(inputs[0].shape[0], splits)
            counter = inputs[0].new_zeros(1, dtype=torch.int32)
        scale = self.problem.scale
        main = CuteKernel(
            flash_mla_v2,
            host.launcher(call, *inputs, *outputs, *partials, counter, scale, splits, blocks),
            inputs,
            partials if splits > 1 else outputs,
            self.tiling,
            compile_fn=compile_fn,
            name="flash_mla_v2",
            workspace_tensors=(*(partials if splits > 1 else ()), *([counter] if inputs else ())),
            plan=self,
        )
        if splits == 1:
            return main
        second = merge.merge_kernel(self, partials, outputs)
        return KernelPipeline([main, second], name="flash_mla_v2", tiling=self.tiling, plan=self)
