r"""Absorbed MLA decode for Hopper (sm_90a) with up to 32 query rows: swapped operands, persistent CTAs, a tile
scheduler on the device.

    Sᵀ (64 tokens x n) = K · Qᵀ     softmax down the columns     Oᵀ (512 x n) += Vᵀ · P       n = 8, 16 or 32 rows

The latent has 512 columns or 256; K has 64 rope columns more, or 32, or none.

Read this first: `Consumer.run` is the main loop, with `own_tile` and `other_tile` for the two kinds of KV tiles that a
consumer meets. `load` is the producer. `consume` goes through the splits of a CTA (`split_kv.walk`), and the kernel,
`flash_mla_v24`, finds the first one and starts the roles. `split_kv/README.md` says how requests become splits and how
splits become outputs.

With at most 32 query rows a query tile of 64 would be mostly padding, which costs power and registers. So KV tiles are
on the M side of the MMA and query rows on the N side. A 64-token x 64-column panel of the cache is the A operand of
both products: K-major for the scores, transposed (MN-major) for the output. An accumulator column holds what belongs to
one query row.

A CTA computes all rows of a kv head. It goes through the splits of its worker, one KV tile of 64 tokens at a time:

    producer   one warp; keeps a ring of 64 x 64 panels full, by TMA, over all splits of the worker
    EVEN       scores of tiles 0, 2, ..;  Oᵀ_L += V_Lᵀ·P, latent columns 0..255, of all tiles
    ODD        scores of tiles 1, 3, ..;  Oᵀ_R += V_Rᵀ·P, latent columns 256..511, of all tiles

    EVEN   S0ᵀ = K0·Qᵀ, softmax S0, P0 -> smem | Oᵀ_L += V0_Lᵀ·P0 | wait P1 | Oᵀ_L += V1_Lᵀ·P1
    ODD    S1ᵀ = K1·Qᵀ | wait P0 | Oᵀ_R += V0_Rᵀ·P0 | softmax S1, P1 -> smem | Oᵀ_R += V1_Rᵀ·P1

P is the B operand, which the MMA always reads from shared memory, so both consumers read it there. Panels are freed one
by one. All of the ring but the panels that are being multiplied holds loads in flight, also while a split ends, which
keeps the memory busy. The consumers share the running maximum of the rows, which may lag by 2^8 (lazy rescale). Most
tiles move it for no row. The barrier at which the warps of a consumer meet anyway reports that (PTX `barrier.red.or`),
without a reduction.

A panel is one TMA box where pages are multiples of 64 tokens, and several boxes of 16 or 32 tokens where pages are
other multiples of 16. For any other page size four producer warps gather rows with cp.async (`load_rows`), each 16 rows
of every panel. Pages of the cache may lie apart.

`split_kv.scheduler` deals requests to workers from their lengths. Where `split_kv.combine` is launched, it merges all
partials: those of shares and of fixed splits, and on an even line those that this kernel lists. Where it is not
launched (`Pool.combined`), the workers merge. Of two or three splits, a worker adds the others' partials to its own
registers, while the rest of the chip still works (`Walk.merge_few`). More splits are merged in shares of rows, at the
workers' end (`Walk.end`). Accumulators are transposed before they are stored, 8 x 8 blocks at a time (`movmatrix`).

Where requests differ in their query tokens, `split_kv.rows` cuts these into blocks, and each block is scheduled as a
request of its own. A mask of the newest keys (trees of speculative tokens) is read in the tiles that have such keys.

Unites versions 14 and 18, whose splits were cut on the host; their devlogs have what each idea brought.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cute_python import decode_host, host
from mla_var3.kernel.cute_python.prims import paged, softmax, wgmma
from mla_var3.kernel.cute_python.prims.paged import PANEL, PANEL_BYTES, PANEL_ELEMENTS, TOKENS
from mla_var3.kernel.cute_python.prims.sync import (
    named_any,
    named_arrive,
    named_sync,
    wait_for_launch,
    warp_arrive,
)
from mla_var3.kernel.cute_python.prims.wgmma import MMA_K, MMA_M, WARPGROUP
from mla_var3.kernel.cute_python.split_kv import combine, partials, rows, scheduler
from mla_var3.kernel.cute_python.split_kv.launch import Inputs, Version
from mla_var3.kernel.cute_python.split_kv.partials import Partials, Results
from mla_var3.kernel.cute_python.split_kv.scheduler import Costs, Pool, Schedule, Split, SplitIndex
from mla_var3.kernel.cute_python.split_kv.walk import Cta, Group, Place, begin
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.runtime.scaling import any_scale
from mla_var3.workload import decode

if TYPE_CHECKING:
    from mla_var3.workload.decode import MlaProblem

ROW_TILES = (8, 16, 32)
CONSUMERS = 2
CONSUMER_THREADS = CONSUMERS * WARPGROUP
WARPS = WARPGROUP // 32
GATHERERS = 4  # producer warps where rows are gathered: as many registers a thread as with one
GATHERED = TOKENS // GATHERERS  # rows of a KV tile, of each of them
IN_FLIGHT = 6  # panels that each of them has in flight behind the one it waits for: 48 KiB
EVEN, ODD = 0, 1
COMBINE_BYTES = 2 * 9 * 1024  # shared memory that is left to CTAs of the combine


class Barrier(IntEnum):
    """Named barriers."""

    CTA = 0
    CONSUMERS = 1
    START = 2  # the ring's mbarriers are made, and the query is there
    EVEN = 3  # the warps of one consumer
    ODD = 4
    P_EVEN = 5  # P of an even tile is in shared memory
    P_ODD = 6
    PRODUCERS = 7  # the ring's mbarriers are made


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on: heads, query tokens, columns of latent and rope, tokens of a page, mask; n: rows
    of the query tile; stages: panels of the ring. packed: requests differ in their query tokens, and s is those of a
    block (`split_kv.rows`). tree: the caller's mask says which of the newest s keys a query token sees."""

    h: int
    h_kv: int
    s: int
    k: int
    p: int
    page: int
    causal: bool
    n: int
    stages: int
    packed: bool = False
    tree: bool = False

    @property
    def group(self) -> int:
        """Heads that share a cache."""
        return self.h // self.h_kv

    @property
    def rows(self) -> int:
        """Query rows that share a cache."""
        return self.s * self.group

    @property
    def box(self) -> int:
        """Tokens of a TMA box of the cache; 0: none fits its pages, and rows are gathered."""
        return paged.box_tokens(self.page)

    @property
    def producers(self) -> int:
        """Producer warps; as many arrivals fill a panel."""
        return 1 if self.box else GATHERERS

    @property
    def threads(self) -> int:
        return CONSUMER_THREADS + 32 * self.producers

    @property
    def panels(self) -> int:
        """64-column panels of a cached token. Of a last one that is not full TMA reads the rest as zeros."""
        return -(-(self.k + self.p) // PANEL)

    @property
    def slices(self) -> int:
        """16-column slices of a query or key: what the scores are multiplied over."""
        return (self.k + self.p) // MMA_K

    @property
    def latent_panels(self) -> int:
        return self.k // PANEL

    @property
    def half_panels(self) -> int:
        """Latent panels of one consumer."""
        return self.latent_panels // CONSUMERS

    @property
    def pairs(self) -> int:
        """Columns of the accumulators that a thread holds, half of them: it holds two that lie next to each other."""
        return self.n // 8

    @property
    def tiles(self) -> int:
        """Query tiles of a request: one for each kv head."""
        return self.h_kv

    @property
    def cluster(self) -> None:
        """No CTAs form a cluster,"""
        return None

    @property
    def sharing(self) -> int:
        """and each loads KV tiles for itself."""
        return 1

    @property
    def partials(self) -> Partials:
        return Partials(self.tiles, self.n, self.k, of_panels=True)

    @property
    def costs(self) -> Costs:
        """In KV tiles. A tile takes 2 us where all CTAs read, 1.2 us where few do; begin and end of a split take 3 us,
        and the combine 2 to 3 us."""
        return Costs(tokens=TOKENS, overhead=2, combine=1, listed=2, level=2)

    @property
    def merge(self) -> combine.Merge:
        return combine.Merge(self.h, self.h_kv, self.s, self.partials, self.costs)


def shared_storage(geometry: Geometry, dtype: type) -> type:
    """The CTA's shared memory."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.MemRange[kind, size]

    n = geometry.n
    exchange = cute.struct.Align[array(Float32, CONSUMERS * WARPS * n), 16]  # a value of each warp and row
    fields = {
        "full": array(Int64, geometry.stages),  # mbarriers: the panel has been loaded
        "empty": array(Int64, geometry.stages),  # mbarriers: the panel is no longer read
        "first": array(Int32, scheduler.FIRST_WORDS),
        "row_range": array(Int32, 2),  # of a merge that workers share: the first and the end
        "exchange": exchange,  # maxima, then sums of P
        "magnitudes": exchange,
        "row_max": cute.struct.Align[array(Float32, n), 16],  # running maximum that both consumers share
        "query": cute.struct.Align[array(dtype, n * PANEL * geometry.panels), 1024],
        "p": cute.struct.Align[array(dtype, CONSUMERS * n * TOKENS), 1024],
        "ring": cute.struct.Align[array(dtype, geometry.stages * PANEL_ELEMENTS), 1024],
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def query_tile(storage: Any, dtype: type, geometry: Geometry) -> cute.Tensor:
    """Q in shared memory: (n, columns of all panels), swizzled as the products read it."""
    layout = wgmma.k_major_layout(dtype, (geometry.n, PANEL * geometry.panels))
    return storage.query.get_tensor(layout.outer, swizzle=layout.inner)


def fixed_bytes(n: int, columns: int, element_bytes: int) -> int:
    """Shared memory besides the ring: mbarriers, exchange buffers and alignment (4 KiB are enough), Q in whole panels,
    and P of both consumers."""
    return 4096 + n * (-(-columns // PANEL) * PANEL + CONSUMERS * TOKENS) * element_bytes


# ------------------------------------------------------------------------------------------------ device: load
def ring_at(stage: Int32, phase: Int32, offset: int, stages: int) -> tuple[Int32, Int32]:
    """(stage, phase) `offset` panels further on in the ring; offset < stages."""
    moved = stage + offset
    wrapped = Int32(moved >= stages)
    return moved - wrapped * stages, phase ^ wrapped


class FirstPage(NamedTuple):
    """The page with which a worker's first split begins, if all requests fill the page table. entry: in the request's
    row of the page table (`paged.entry_of`), or -1: not known; page: what the page table has there."""

    entry: Int32
    page: Int32


@cute.jit
def load(
    inputs: Inputs,
    storage: cutlass.Constexpr,
    walk: cutlass.Constexpr,  # `Walk`
    split: Split,
    first_page: FirstPage,
    kv_head: Int32,
    geometry: cutlass.Constexpr,
):
    """What the producer warp does: it keeps the ring full, over all splits of the worker.

    The loop over panels stays a loop: unrolled, each panel of the first tile waits for its instructions.
    """
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    layout = wgmma.k_major_layout(storage.ring.data_ptr().dtype, (TOKENS, PANEL, geometry.stages))
    ring = wgmma.smem_view(storage.ring.data_ptr(), 0, layout)
    tma, page_table = inputs.tma, inputs.page_table
    boxes, places = paged.boxes_of(tma, inputs.cache[None, None, kv_head, None], ring, geometry.box)
    stage, phase = Int32(0), Int32(0)
    known, page = first_page.entry, first_page.page
    while walk.has_work(split):
        first, end, _ = walk.tiles_of(split)
        request = walk.queries.block(split.request).request
        entry = paged.entry_of(first, split.length, geometry.page)
        if first < end and entry != known:
            page = page_table[request, entry]
        known = Int32(-1)
        for tile in cutlass.range(first, end, unroll=1):
            # Loaded a tile ahead, to hide its latency; behind the last tile, the same entry again.
            entry = paged.entry_of(cutlass.min(tile + 1, end - 1), split.length, geometry.page)
            following = page_table[request, entry]
            pages = paged.pages_of(page, geometry.page)
            for i in cutlass.range(geometry.panels, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                # One lane is to be elected for the whole warp, not one for each group that left the wait together.
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, PANEL_BYTES)
                paged.load_panel(
                    tma, boxes, places[None, None, 0, stage], tile, i, pages, geometry.page, full + stage
                )  # fmt: skip
                stage, phase = ring_at(stage, phase, 1, geometry.stages)
            page = following
        split = walk.next_split(split)


@cute.jit
def load_rows(
    inputs: Inputs,
    storage: cutlass.Constexpr,
    walk: cutlass.Constexpr,  # `Walk`
    split: Split,
    kv_head: Int32,
    warp: Int32,  # 0..3
    geometry: cutlass.Constexpr,
):
    """`load` of a cache whose pages no TMA box fits: what one of four producer warps does. It gathers 16 rows of
    every panel.

    A panel's copies are published when `IN_FLIGHT` panels have been issued behind it, or earlier, where the next one
    finds no free stage: consumers may need those that are in flight before they free one.
    """
    cache, page_table = inputs.cache, inputs.page_table
    full, empty, ring = storage.full.data_ptr(), storage.empty.data_ptr(), storage.ring.data_ptr()
    first_row, lane = warp * GATHERED, cute.arch.lane_idx()  # a lane looks up the page of row first_row + lane
    stage, phase = Int32(0), Int32(0)
    oldest, pending = Int32(0), Int32(0)  # stage of the first panel that is not published, and number of those
    page = Int32(0)
    while walk.has_work(split):
        first, end, _ = walk.tiles_of(split)
        request, length = walk.queries.block(split.request).request, split.length
        if first < end:
            page = page_table[request, paged.row_entry_of(first * TOKENS + first_row + lane, length, geometry.page)]
        for tile in cutlass.range(first, end, unroll=1):
            # Loaded a tile ahead, to hide its latency; behind the last tile, the same entry again.
            ahead = cutlass.min(tile + 1, end - 1) * TOKENS + first_row + lane
            following = page_table[request, paged.row_entry_of(ahead, length, geometry.page)]
            token = tile * TOKENS + first_row
            sources = [
                paged.row_source_of(cache, page, token, i, length, kv_head) for i in range(0, GATHERED, paged.ROWS)
            ]
            for i in cutlass.range(geometry.panels, unroll=1):
                full_up = is_taken(empty + stage, phase)
                while pending > 0 and full_up:
                    oldest, pending = publish_oldest(full, oldest, pending, geometry)
                    full_up = is_taken(empty + stage, phase)
                cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                for j in cutlass.range_constexpr(len(sources)):
                    place, width = ring + stage * PANEL_ELEMENTS, geometry.k + geometry.p
                    paged.copy_rows(sources[j], i * PANEL, width, place, first_row + j * paged.ROWS)
                cute.arch.cp_async_commit_group()
                pending = pending + 1
                if pending > IN_FLIGHT:
                    oldest, pending = publish_oldest(full, oldest, pending, geometry)
                stage, phase = ring_at(stage, phase, 1, geometry.stages)
            page = following
        split = walk.next_split(split)
    while pending > 0:
        oldest, pending = publish_oldest(full, oldest, pending, geometry)


@cute.jit
def is_taken(empty: cute.Pointer, phase: Int32) -> Boolean:
    """Whether a stage of the ring still holds panels that are read; the same in all lanes."""
    return cute.arch.vote_any_sync(not cute.arch.mbarrier_test_wait(empty, phase ^ 1))


@cute.jit
def publish_oldest(full: cute.Pointer, oldest: Int32, pending: Int32, geometry: cutlass.Constexpr):
    """Publishes the oldest of a warp's `pending` panels, 1 .. IN_FLIGHT + 1; gives what is left."""
    for behind in cutlass.range_constexpr(IN_FLIGHT + 1):
        if pending == behind + 1:
            cute.arch.cp_async_wait_group(behind)
    paged.publish_rows([full + oldest])
    following, _ = ring_at(oldest, Int32(0), 1, geometry.stages)
    return following, pending - 1


# ------------------------------------------------------------------------------------------------ device: one consumer
def make_mma(dtype: type, n: int, a_major: OperandMajorMode) -> cute.TiledMma:
    """A 64 x n x 16 tiled MMA of one warpgroup, both operands in shared memory, B K-major, fp32 accumulators."""
    source = warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (MMA_M, n, MMA_K), source, a_major, OperandMajorMode.K)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


@cute.jit
def issue(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,  # registers, (MMA, 1, 1)
    frag_a: cute.Tensor,  # descriptors, (MMA, 1, 4): one panel
    frag_b: cute.Tensor,  # descriptors, (MMA, 1, K)
    first_b: cutlass.Constexpr,
    zero_init: cutlass.Constexpr = False,
    count: cutlass.Constexpr = PANEL // MMA_K,
):
    """acc (+)= panel · B[first_b .. first_b + count - 1]; the caller fences before and commits after."""
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not zero_init)
    for i in cutlass.range_constexpr(count):
        cute.gemm(atom, acc, frag_a[None, None, i], frag_b[None, None, first_b + i], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)


class Registers(NamedTuple):
    """What a consumer's thread keeps of a split. The code of both consumers shares it."""

    acc_o: list[cute.Tensor]  # a (64, n) fp32 accumulator of each own latent panel
    row_max: cute.Tensor  # (n / 4,) fp32: the running maximum of the thread's columns
    row_sum: cute.Tensor  # (n / 4,) fp32: this thread's share of the sums of the own P

    @classmethod
    def make(cls, dtype: type, geometry: Geometry) -> Registers:
        panel = make_mma(dtype, geometry.n, OperandMajorMode.K).partition_shape_C((TOKENS, geometry.n))
        acc_o = [cute.make_rmem_tensor(panel, Float32) for _ in range(geometry.half_panels)]
        return cls(acc_o, *(cute.make_rmem_tensor(geometry.n // 4, Float32) for _ in range(2)))


@dataclass(frozen=True, eq=False)
class Consumer:
    """Views and registers of one consumer warpgroup. `me`: EVEN or ODD; thread: 0..127."""

    me: int
    geometry: Geometry
    dtype: Any
    thread: Any
    scale_log2: Any
    full: Any  # mbarriers, as in `shared_storage`
    empty: Any
    ring: Any  # shared memory
    exchange: Any  # of this consumer: (WARPS, n)
    shared_max: Any  # (n,)
    mma_s: Any  # Sᵀ = K·Qᵀ
    mma_o: Any  # Oᵀ += Vᵀ·P
    frag_k: Any  # descriptors: panels as K, (MMA, 1, 4, stages);
    frag_v: Any  # as V, (MMA, 1, 4, stages);
    frag_q: Any  # Q, (MMA, 1, 4 · panels);
    frag_p: Any  # P of each consumer, (MMA, 1, 4)
    p_copy: Any
    p_target: Any  # where the own P goes
    acc_s: Any  # (64, n) fp32 registers
    acc_o: Any  # a (64, n) fp32 accumulator of each own latent panel, which both consumers' code shares,
    row_max: Any  # as the running maximum of the thread's columns
    row_sum: Any  # and this thread's share of the sums of the own P
    factor: Any
    block: Any  # `rows.Block` of the split
    mask: Any  # (b, s, s) uint8, global memory, or None: whether a query token sees each of the newest s keys

    @classmethod
    def make(cls, me, geometry, storage, dtype, thread, scale_log2, registers, block, mask) -> Consumer:
        """Views of a thread's part. registers: `Registers`."""
        n = geometry.n
        ring, p = storage.ring.data_ptr(), storage.p.data_ptr()
        mma_s, mma_o = make_mma(dtype, n, OperandMajorMode.K), make_mma(dtype, n, OperandMajorMode.MN)
        scores, output = mma_s.get_slice(thread), mma_o.get_slice(thread)
        box = (TOKENS, PANEL, geometry.stages)
        keys = wgmma.smem_view(ring, 0, wgmma.k_major_layout(dtype, box))
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, dtype)
        values = wgmma.smem_view(ring, 0, cute.tile_to_shape(atom, box, order=(0, 1, 2)))
        query = wgmma.k_major_layout(dtype, (n, PANEL * geometry.panels))
        p_layout = wgmma.k_major_layout(dtype, (n, TOKENS))
        # Stores a 64 x n accumulator with its 64 rows next to each other: as K-major n x 64.
        store = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(True, 4 if n % 16 == 0 else 2), dtype)
        p_copy = cute.make_tiled_copy_C(store, mma_s).get_slice(thread)
        target = wgmma.smem_view(p, me * n * TOKENS, wgmma.mn_major_layout(dtype, (TOKENS, n)))
        return cls(
            me=me,
            geometry=geometry,
            dtype=dtype,
            thread=thread,
            scale_log2=scale_log2,
            full=storage.full.data_ptr(),
            empty=storage.empty.data_ptr(),
            ring=ring,
            exchange=storage.exchange.data_ptr() + me * WARPS * n,
            shared_max=storage.row_max.data_ptr(),
            mma_s=mma_s,
            mma_o=mma_o,
            frag_k=mma_s.make_fragment_A(scores.partition_A(keys)),
            frag_v=mma_o.make_fragment_A(output.partition_A(values)),
            frag_q=mma_s.make_fragment_B(scores.partition_B(wgmma.smem_view(storage.query.data_ptr(), 0, query))),
            frag_p=[
                mma_o.make_fragment_B(output.partition_B(wgmma.smem_view(p, maker * n * TOKENS, p_layout)))
                for maker in (EVEN, ODD)
            ],
            p_copy=p_copy,
            p_target=p_copy.partition_D(target),
            acc_s=cute.make_rmem_tensor(mma_s.partition_shape_C((TOKENS, n)), Float32),
            acc_o=registers.acc_o,
            row_max=registers.row_max,
            row_sum=registers.row_sum,
            factor=cute.make_rmem_tensor(n // 4, Float32),
            block=block,
            mask=mask,
        )

    # -------------------------------------------------------------------------------------------- scores
    @cute.jit
    def issue_scores(self, stage: Int32, phase: Int32):
        """Sᵀ = K·Qᵀ of an own tile whose first panel is at (stage, phase), each panel as soon as it is there.

        A parity distinguishes neighbouring phases only. That is enough: what the stage held before belongs to a tile at
        least two back, and this consumer has waited for it, or for the P that the other one made of it.
        """
        warpgroup.fence()
        for i in cutlass.range_constexpr(self.geometry.panels):
            place, parity = ring_at(stage, phase, i, self.geometry.stages)
            cute.arch.mbarrier_wait(self.full + place, parity)
            # Of a last panel that is not full, what has columns: Q has none there.
            count = cutlass.const_expr(min(PANEL // MMA_K, self.geometry.slices - 4 * i))
            keys = self.frag_k[None, None, None, place]
            issue(self.mma_s, self.acc_s, keys, self.frag_q, 4 * i, zero_init=i == 0, count=count)
        warpgroup.commit_group()

    @cute.jit
    def mask_tokens(self, first_token: Int32, length: Int32):
        """Sets scores of tokens that a column's query may not see to -inf."""
        columns = wgmma.as_columns(self.acc_s)
        for c in cutlass.range_constexpr(cute.size(columns, mode=[0])):
            limit = length - first_token
            if cutlass.const_expr(self.geometry.causal):
                limit = limit - self.block.count + 1 + wgmma.acc_column(self.thread, c) // self.geometry.group
            for i in cutlass.range_constexpr(2):
                columns[c, i] = columns[c, i] if wgmma.acc_row(self.thread, i) < limit else -Float32.inf
        if cutlass.const_expr(self.mask is not None):
            self.mask_newest(first_token - (length - self.geometry.s))

    @cute.jit
    def mask_newest(self, first_row: Int32):
        """Sets scores of the newest s keys that a column's query may not see to -inf. first_row: of the tile, in tokens
        from the first of those keys on."""
        columns, s = wgmma.as_columns(self.acc_s), self.geometry.s
        for c in cutlass.range_constexpr(cute.size(columns, mode=[0])):
            token = cutlass.min(wgmma.acc_column(self.thread, c) // self.geometry.group, s - 1)
            place = self.mask.iterator + (self.block.request * s + token) * s
            for i in cutlass.range_constexpr(2):
                key = first_row + wgmma.acc_row(self.thread, i)
                seen = cute.make_tensor(place + cutlass.min(cutlass.max(key, 0), s - 1), cute.make_layout(1))
                columns[c, i] = columns[c, i] if key < 0 or seen[0] != 0 else -Float32.inf

    # -------------------------------------------------------------------------------------------- softmax
    @cute.jit
    def exceeds(self) -> Boolean:
        """Whether the running maximum of any column has to move; the same in all warps, which meet here."""
        columns = wgmma.as_columns(self.acc_s)
        count = cutlass.const_expr(self.geometry.n // 4)
        above = cute.make_rmem_tensor(count, Float32)
        for c in cutlass.range_constexpr(count):
            above[c] = cute.arch.fmax(columns[c, 0], columns[c, 1]) * self.scale_log2 - self.row_max[c]
        most = above[0]
        for c in cutlass.range_constexpr(1, count):
            most = cute.arch.fmax(most, above[c])
        return named_any(Barrier.EVEN + self.me, WARPGROUP, most > softmax.SLACK)

    @cute.jit
    def move_max(self):
        """Moves the maximum of the columns that need it, publishes it to the other consumer, and rescales."""
        columns = wgmma.as_columns(self.acc_s)
        n, count = self.geometry.n, self.geometry.n // 4
        lane, warp = self.thread % 32, self.thread // 32
        best = cute.make_rmem_tensor(count, Float32)
        for c in cutlass.range_constexpr(count):
            best[c] = cute.arch.fmax(columns[c, 0], columns[c, 1])
            for i in cutlass.range_constexpr(3):
                best[c] = cute.arch.fmax(best[c], cute.arch.shuffle_sync_bfly(best[c], offset=4 << i))
        softmax.publish(best, self.exchange + warp * n, lane)
        named_sync(Barrier.EVEN + self.me, WARPGROUP)
        softmax.collect(best, self.exchange, WARPS, lane, True)
        for c in cutlass.range_constexpr(count):
            new = softmax.lazy_max(self.row_max[c], best[c] * self.scale_log2)
            self.factor[c] = softmax.exp2(self.row_max[c] - new)
            self.row_max[c] = new
        if warp == 0:
            softmax.publish(self.row_max, self.shared_max, lane)
        self.rescale()

    @cute.jit
    def follow_max(self):
        """Takes over the maximum that the other consumer has published."""
        count = cutlass.const_expr(self.geometry.n // 4)
        theirs = cute.make_rmem_tensor(count, Float32)
        softmax.collect(theirs, self.shared_max, 1, self.thread % 32, True)
        changed = theirs[0] != self.row_max[0]
        for c in cutlass.range_constexpr(1, count):
            changed = changed | (theirs[c] != self.row_max[c])
        if cute.arch.vote_any_sync(changed):
            self.take_max(theirs)

    @cute.jit
    def take_max(self, theirs: cute.Tensor):
        """The columns' maximum becomes `theirs`; rescales."""
        # As many barriers as the other one has passed in `move_max`: racecheck counts them (docs/debugging.md).
        named_sync(Barrier.EVEN + self.me, WARPGROUP)
        for c in cutlass.range_constexpr(self.geometry.n // 4):
            self.factor[c] = softmax.exp2(self.row_max[c] - theirs[c])
            self.row_max[c] = theirs[c]
        self.rescale()

    @cute.jit
    def rescale(self):
        """Multiplies outputs and sums with the columns' factors."""
        for c in cutlass.range_constexpr(self.geometry.n // 4):
            self.row_sum[c] = self.row_sum[c] * self.factor[c]
        for i in cutlass.range_constexpr(self.geometry.half_panels):
            wgmma.scale_columns(self.acc_o[i], self.factor)

    # -------------------------------------------------------------------------------------------- tiles
    @cute.jit
    def zero_past_end(self, left: Int32, stage: Int32, phase: Int32):
        """Zeroes V from token `left` of a tile on, in this consumer's panels."""
        for i in cutlass.range_constexpr(self.geometry.half_panels):
            place, _ = ring_at(stage, phase, self.me * self.geometry.half_panels + i, self.geometry.stages)
            paged.zero_rows(self.ring + place * PANEL_ELEMENTS, left, self.thread, 1)

    @cute.jit
    def multiply(self, maker: cutlass.Constexpr, stage: Int32, phase: Int32):
        """Oᵀ += Vᵀ·P of this consumer's panels, with the P that `maker` has made; frees each panel when it is done."""
        count = self.geometry.half_panels
        warpgroup.fence()
        for i in cutlass.range_constexpr(count):
            place, _ = ring_at(stage, phase, self.me * count + i, self.geometry.stages)
            issue(self.mma_o, self.acc_o[i], self.frag_v[None, None, None, place], self.frag_p[maker], 0)
            warpgroup.commit_group()
        for i in cutlass.range_constexpr(count):
            warpgroup.wait_group(count - 1 - i)
            place, _ = ring_at(stage, phase, self.me * count + i, self.geometry.stages)
            warp_arrive(self.empty + place)

    @cute.jit
    def own_tile(self, first_token: Int32, length: Int32, unmasked: Int32, stage: Int32, phase: Int32):
        """A tile whose scores are in flight to acc_s: softmax, P to both consumers, and this one's product."""
        geometry = self.geometry
        warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(geometry.latent_panels, geometry.panels):
            place, _ = ring_at(stage, phase, i, geometry.stages)
            warp_arrive(self.empty + place)
        if first_token + TOKENS > unmasked:
            self.mask_tokens(first_token, length)
            self.zero_past_end(length - first_token, stage, phase)
        if self.exceeds():
            self.move_max()
        columns = wgmma.as_columns(self.acc_s)
        for c in cutlass.range_constexpr(geometry.n // 4):
            for i in cutlass.range_constexpr(2):
                columns[c, i] = softmax.exp2(columns[c, i] * self.scale_log2 - self.row_max[c])
            self.row_sum[c] = self.row_sum[c] + (columns[c, 0] + columns[c, 1])
        cute.copy(self.p_copy, self.p_copy.retile(wgmma.to_dtype(self.acc_s, self.dtype)), self.p_target)
        cute.arch.fence_view_async_shared()
        # In this order: racecheck follows what was written to the other consumer where a barrier of all of its own
        # warps comes before the arrival, and reports it where none does (docs/debugging.md).
        named_sync(Barrier.EVEN + self.me, WARPGROUP)
        named_arrive(Barrier.P_EVEN + self.me, CONSUMER_THREADS)
        self.multiply(self.me, stage, phase)

    @cute.jit
    def other_tile(self, first_token: Int32, length: Int32, stage: Int32, phase: Int32):
        """This consumer's product with the V of a tile whose P the other one makes; ends what is in flight."""
        other = 1 - self.me
        named_sync(Barrier.P_EVEN + other, CONSUMER_THREADS)
        if first_token + TOKENS > length:
            self.zero_past_end(length - first_token, stage, phase)
            cute.arch.fence_view_async_shared()
            named_sync(Barrier.EVEN + self.me, WARPGROUP)
        self.follow_max()
        self.multiply(other, stage, phase)

    @cute.jit
    def run(self, first: Int32, end: Int32, unmasked: Int32, length: Int32, stage: Int32, phase: Int32):
        """Tiles first..end-1 of a split. unmasked: keys that every row may see. (stage, phase): of the first panel."""
        geometry = self.geometry
        for i in cutlass.range_constexpr(geometry.half_panels):
            self.acc_o[i].fill(0.0)
        self.row_max.fill(softmax.NO_KEY)
        self.row_sum.fill(0.0)
        if cutlass.const_expr(self.me == EVEN):
            # ODD reads it behind P0.
            if self.thread < 32:
                softmax.publish(self.row_max, self.shared_max, self.thread)
        for tile in cutlass.range(first, end, CONSUMERS, unroll=1):
            stage1, phase1 = ring_at(stage, phase, geometry.panels, geometry.stages)
            token = tile * TOKENS
            if cutlass.const_expr(self.me == EVEN):
                self.issue_scores(stage, phase)
                self.own_tile(token, length, unmasked, stage, phase)
                if tile + 1 < end:
                    self.other_tile(token + TOKENS, length, stage1, phase1)
            elif tile + 1 < end:
                self.issue_scores(stage1, phase1)
                self.other_tile(token, length, stage, phase)
                self.own_tile(token + TOKENS, length, unmasked, stage1, phase1)
            else:
                self.other_tile(token, length, stage, phase)
            stage, phase = ring_at(stage1, phase1, geometry.panels, geometry.stages)
        if cutlass.const_expr(self.me == ODD):
            # racecheck follows barriers of all only where each consumer has waited as often (docs/debugging.md). EVEN
            # has, once more, where a tile is left over; who does not make the last tile's P, where V is zeroed.
            zeroes, left = Int32(end * TOKENS > length), (end - first) % 2
            if zeroes != left:
                named_sync(Barrier.EVEN + self.me, WARPGROUP)


# ------------------------------------------------------------------------------------------------ device: epilogue
@cute.jit
def transpose(word: Int32) -> Int32:
    """An 8 x 8 block of 16-bit elements, two of a row a lane: rows become columns (PTX `movmatrix`)."""
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[word]
    )


@cute.jit
def share_sums(row_sum: cute.Tensor, storage: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr):
    """(n / 4,) registers for each consumer: its sums of P in the thread's columns, over all tokens; row_sum is lost."""
    exchange = storage.exchange.data_ptr()
    softmax.publish_sums(row_sum, exchange + thread // 32 * geometry.n, thread % 32)
    named_sync(Barrier.CONSUMERS, CONSUMER_THREADS)
    sums = [cute.make_rmem_tensor(geometry.n // 4, Float32) for _ in range(CONSUMERS)]
    for i in cutlass.range_constexpr(CONSUMERS):
        softmax.collect(sums[i], exchange + i * (WARPS * geometry.n), WARPS, thread % 32, False)
    return sums


@cute.jit
def add_partial(
    registers: cutlass.Constexpr,  # `Registers`
    sums: cutlass.Constexpr,  # of `share_sums`
    results: Results,
    kv_head: Int32,
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
    slot: Int32,
):
    """Adds a partial: transposed within quads as it was for the store, it lies as the accumulators do."""
    acc_o, row_max, _ = registers
    outputs, stats = results.outputs, results.stats
    count, layout = geometry.n // 4, geometry.partials
    me, lane, warp = thread // WARPGROUP, thread % 32, thread // 32 % WARPS
    mine, theirs = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32)
    for c in cutlass.range_constexpr(count):
        found = cute.make_rmem_tensor(partials.STATS, Float32)
        index = layout.row(slot, kv_head, wgmma.acc_column(lane, c))
        cute.autovec_copy(layout.stats(stats.iterator, index), found)
        top = cute.arch.fmax(row_max[c], cute.arch.fmax(found[0], found[2]))
        mine[c] = softmax.exp2(row_max[c] - top)
        row_max[c] = top
        for i in cutlass.range_constexpr(CONSUMERS):
            sums[i][c] = sums[i][c] * mine[c] + found[2 * i + 1] * softmax.exp2(found[2 * i] - top)
        theirs[c] = softmax.exp2(cutlass.select_(me > 0, found[2], found[0]) - top)
    for g in cutlass.range_constexpr(geometry.pairs):
        row = 8 * g + lane // 4
        source = layout.outputs(outputs.iterator, layout.row(slot, kv_head, row))
        for first in cutlass.range_constexpr(0, geometry.half_panels, 2):
            vector = cute.make_rmem_tensor(4, Int32)
            vector.fill(0)
            quad = (me * geometry.half_panels + first) // 2 * 4 + warp
            if row < geometry.rows:
                place = source + cute.assume((quad * partials.QUAD + lane % 4) * partials.VECTOR, divby=partials.VECTOR)
                words = cute.make_tensor(cute.recast_ptr(place, dtype=Int32), cute.make_layout(4))
                cute.autovec_copy(words, vector)
            for j in cutlass.range_constexpr(4):
                vector[j] = transpose(vector[j])
            values = cute.recast_tensor(vector, Float16)
            for j in cutlass.range_constexpr(4):
                columns = wgmma.as_columns(acc_o[first + j // 2])
                for e in cutlass.range_constexpr(2):
                    c = 2 * g + e
                    columns[c, j % 2] = columns[c, j % 2] * mine[c] + Float32(values[2 * j + e]) * theirs[c]


@cute.jit
def epilogue(
    registers: cutlass.Constexpr,  # `Registers`
    sums: cutlass.Constexpr,  # of `share_sums`
    storage: cutlass.Constexpr,
    results: Results,
    block: rows.Block,
    place: Place,  # where the results go
    kv_head: Int32,
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
):
    """Divides whole results by their row sums, or scales a partial one (`split_kv.partials`), and writes this
    consumer's half of the rows, 16 bytes a thread. The same code for both consumers: what runs once a split is fetched
    from L2."""
    acc_o, row_max, _ = registers
    out, lse, outputs, stats = results
    slot, whole = place.slot, place.whole
    n, count, layout = geometry.n, geometry.n // 4, geometry.partials
    me, lane, warp = thread // WARPGROUP, thread % 32, thread // 32
    magnitudes = storage.magnitudes.data_ptr()
    own_rows = cute.assume(me * (WARPS * n), divby=n)
    factor = cute.make_rmem_tensor(count, Float32)
    if whole:
        for c in cutlass.range_constexpr(count):
            total = sums[EVEN][c] + sums[ODD][c]
            factor[c] = cutlass.select_(total > 0.0, cute.arch.rcp_approx(total), Float32(0.0))
            row = wgmma.acc_column(lane, c)
            if thread < 4 and row < block.count * geometry.group:
                head, token = kv_head * geometry.group + row % geometry.group, row // geometry.group
                lse[block.first, head, token] = softmax.natural_lse(total, row_max[c])
    else:
        factor.fill(0.0)
        for i in cutlass.range_constexpr(geometry.half_panels):
            columns = wgmma.as_columns(acc_o[i])
            for c in cutlass.range_constexpr(count):
                for r in cutlass.range_constexpr(2):
                    factor[c] = factor[c] + cute.math.absf(columns[c, r])
        softmax.publish_sums(factor, magnitudes + warp * n, lane)
        cute.arch.barrier(barrier_id=Barrier.EVEN + me, number_of_threads=WARPGROUP)
        softmax.collect(factor, magnitudes + own_rows, WARPS, lane, False)
        for c in cutlass.range_constexpr(count):
            exponent = partials.exponent_of(factor[c])
            factor[c] = partials.power_of_two(partials.TARGET_EXPONENT - exponent)
            if thread % WARPGROUP < 4:
                index = layout.row(slot, kv_head, wgmma.acc_column(lane, c))
                own = cutlass.select_(me > 0, sums[ODD][c], sums[EVEN][c])
                partials.store_stats(layout.stats(stats.iterator, index), me, row_max[c], own, exponent)
    words = []  # (2 · n / 8,) of each panel: two query rows next to each other, columns lane / 4 and 8 further on
    for i in cutlass.range_constexpr(geometry.half_panels):
        wgmma.scale_columns(acc_o[i], factor)
        words.append(cute.make_rmem_tensor(2 * geometry.pairs, Int32))
    if whole:
        for i in cutlass.range_constexpr(geometry.half_panels):
            store_words(words[i], wgmma.to_dtype(acc_o[i], out.element_type))
    else:
        for i in cutlass.range_constexpr(geometry.half_panels):
            store_words(words[i], wgmma.to_dtype(acc_o[i], Float16))
    for g in cutlass.range_constexpr(geometry.pairs):
        row = 8 * g + lane // 4
        base = outputs.iterator.toint() + 2 * layout.row(slot, kv_head, row) * layout.columns
        if whole:
            base = out.iterator.toint() + 2 * rows.row_offset(out, block.first, kv_head, row, geometry.group)
        for first in cutlass.range_constexpr(0, geometry.half_panels, 2):
            vector = cute.make_rmem_tensor(4, Int32)
            for j in cutlass.range_constexpr(4):
                vector[j] = transpose(words[first + j // 2][2 * g + j % 2])
            quad = (me * geometry.half_panels + first) // 2 * 4 + warp % WARPS
            column = quad * (partials.QUAD * partials.VECTOR) + lane % 4 * partials.VECTOR
            if whole:
                partials.transpose_quad(vector, lane)
                column = layout.column(quad, lane % 4)
            address = cute.make_ptr(Int32, base + Int64(2 * column), cute.AddressSpace.gmem, assumed_align=16)
            partials.store_vector(vector, address, row < block.count * geometry.group)


@cute.jit
def store_words(words: cute.Tensor, rounded: cute.Tensor):
    """The 16-bit elements of an accumulator as words."""
    words.store(cute.recast_tensor(rounded, Int32).load().reshape(words.shape))


# ------------------------------------------------------------------------------------------------ device: consume
@cute.jit
def consume(
    q: cute.Tensor,
    storage: cutlass.Constexpr,
    results: Results,
    walk: cutlass.Constexpr,  # `Walk`
    split: Split,
    scale_log2: Float32,
    of_tile: cutlass.Constexpr,  # `rows.TileRows`
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
):
    """What the consumers do, over all splits of the worker. The copy of the first one's query rows has been issued."""
    dtype, kv_head = q.element_type, of_tile.kv_head
    registers = Registers.make(dtype, geometry)
    q_tile = query_tile(storage, dtype, geometry)
    row_range = storage.row_range.get_tensor(cute.make_layout(2))
    group = Group(Barrier.CONSUMERS, CONSUMER_THREADS)
    stage, phase = Int32(0), Int32(0)
    is_first = Boolean(True)
    keyless = walk.line.empty
    if cutlass.const_expr(geometry.packed):
        keyless = walk.table[rows.keyless_place(walk.table)]
    walk.store_empty(results, keyless, of_tile, thread, CONSUMER_THREADS)
    split_index = SplitIndex(Int32(0), Int32(1))
    while walk.has_work(split):
        tiles = walk.tiles_of(split)
        first, end, _ = tiles
        block = walk.queries.block(split.request)
        split_index = SplitIndex(Int32(0), Int32(1))
        is_cut = walk.announce(split, tiles, row_range, thread)
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        # Past it Q is complete, and both consumers are done with the split before.
        if is_first:
            named_sync(Barrier.START, geometry.threads)
        else:
            named_sync(Barrier.CONSUMERS, CONSUMER_THREADS)
        is_first = Boolean(False)
        if first < end:
            unmasked = cutlass.max(split.length, 0)
            if cutlass.const_expr(geometry.causal):
                unmasked = cutlass.max(unmasked - block.count + 1, 0)
            elif cutlass.const_expr(geometry.tree):
                unmasked = cutlass.max(unmasked - geometry.s, 0)
            for me in cutlass.range_constexpr(CONSUMERS):
                if thread // WARPGROUP == me:
                    lane, mask = thread - me * WARPGROUP, walk.queries.mask
                    w = Consumer.make(me, geometry, storage, dtype, lane, scale_log2, registers, block, mask)
                    w.run(first, end, unmasked, split.length, stage, phase)
            moved = stage + (end - first) * geometry.panels
            phase = phase ^ (moved // geometry.stages & 1)
            stage = moved % geometry.stages
        following = walk.next_split(split)
        if walk.has_work(following):
            # All scores are made: nobody reads Q any more.
            named_sync(Barrier.CONSUMERS, CONSUMER_THREADS)
            rows.copy_query_rows(q, q_tile, walk.queries.block(following.request), of_tile, thread, CONSUMER_THREADS)
        else:
            # Let go at a CTA's start, the next call of a short request is there before this one has begun.
            cute.arch.griddepcontrol_launch_dependents()
        if first < end:
            place = walk.place_of(split, tiles)
            sums = share_sums(registers.row_sum, storage, thread, geometry)
            add = functools.partial(add_partial, registers, sums, results, kv_head, thread, geometry)
            place = walk.merge_few(place, split, tiles, is_cut, add, group, thread)
            split_index, signal = place.split_index, walk.signal_of(place)
            epilogue(registers, sums, storage, results, block, place, kv_head, thread, geometry)
            named_sync(Barrier.CONSUMERS, CONSUMER_THREADS)
            walk.publish(signal, thread)
        else:
            rows.store_no_keys(results, block, of_tile, thread, CONSUMER_THREADS)
        split = following
    walk.end(results, split_index, split.request, row_range, group, thread, (8, 1))


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def flash_mla_v24(
    inputs: Inputs,
    results: Results,  # packed, lse is (first token, h, token behind it)
    flags: cute.Tensor,  # int32, global memory: 0 in front of a launch and behind it
    schedule: Schedule,
    scale_log2: Float32,
    pool: Pool,
    geometry: cutlass.Constexpr,
):
    """The CTA of a kv head (x) and worker (y, from the last one)."""
    q, page_table = inputs.q, inputs.page_table
    dtype = q.element_type
    thread, _, _ = cute.arch.thread_idx()
    kv_head, block, _ = cute.arch.block_idx()
    worker = pool.workers - 1 - block  # a worker waits for later ones (README.md), which this way are launched first
    lane, warp = thread % 32, cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = SmemAllocator().allocate(shared_storage(geometry, dtype))
    q_tile = query_tile(storage, dtype, geometry)
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    if warp == CONSUMERS * WARPS:
        # The producer makes the mbarriers itself, so that its first loads need not wait for the others.
        if cutlass.const_expr(geometry.box):
            cpasync.prefetch_descriptor(inputs.tma)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(geometry.stages):
                cute.arch.mbarrier_init(full + i, geometry.producers)
                cute.arch.mbarrier_init(empty + i, WARPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

    queries = rows.Queries(geometry.s, schedule.blocks, inputs.mask)
    of_tile = rows.TileRows(kv_head, Int32(0), geometry.group, ROW_TILES[-1])
    entry, page, expected = Int32(-1), Int32(0), Int32(-1)
    if cutlass.const_expr(geometry.packed):
        # Nothing that a kernel before may have written is read, and nothing is written, ahead of this.
        cute.arch.griddepcontrol_wait()
    else:
        # Where the worker begins if all requests fill the page table: loaded together with the lengths, not behind
        # them.
        requests, width = page_table.shape
        split = scheduler.filled_split(worker, requests, pool)
        at, _, _, _ = scheduler.tiles_range(split, pool.filled, geometry.costs)
        entry = at * TOKENS // geometry.page
        if cutlass.const_expr(geometry.box not in (0, TOKENS)):
            entry = paged.entry_of(at, split.length, geometry.page)
        entry = cutlass.max(cutlass.min(entry, width - 1), 0)
        expected = cutlass.min(split.request, requests - 1)
        of_page = page_table[expected, None].iterator + entry
        wait_for_launch(of_page.toint())  # as above
        page = cute.make_tensor(of_page, cute.make_layout(1))[0]
        if warp < CONSUMERS * WARPS:
            rows.copy_query_rows(q, q_tile, queries.block(expected), of_tile, thread, CONSUMER_THREADS)
    walk, split = begin(
        schedule, flags, inputs.seq_lens, queries, pool, Cta(worker, kv_head, thread, warp, lane),
        storage.first.data_ptr(), CONSUMER_THREADS, geometry.merge,
    )  # fmt: skip
    if split.request != expected:
        entry = Int32(-1)
        if warp < CONSUMERS * WARPS and walk.has_work(split):
            cute.arch.cp_async_wait_group(0)
            rows.copy_query_rows(q, q_tile, queries.block(split.request), of_tile, thread, CONSUMER_THREADS)

    if warp >= CONSUMERS * WARPS:
        if walk.has_work(split):
            named_arrive(Barrier.START, geometry.threads)
        if cutlass.const_expr(geometry.box):
            load(inputs, storage, walk, split, FirstPage(entry, page), kv_head, geometry)
        else:
            named_sync(Barrier.PRODUCERS, 32 * GATHERERS)
            load_rows(inputs, storage, walk, split, kv_head, warp - CONSUMERS * WARPS, geometry)
    else:
        consume(q, storage, results, walk, split, scale_log2, of_tile, thread, geometry)


flash_mla_v24.set_name_prefix("flash_mla_v24", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: MlaProblem) -> Verdict:
    """Whether this version computes a problem."""
    if pd.k not in (256, 512):
        return Verdict.no(
            f"k = {pd.k} must be 256 or 512: each consumer owns half of the latent, an even number of panels"
        )
    if pd.p not in (0, PANEL // 2, PANEL):
        return Verdict.no(f"the rope part of p = {pd.p} columns must be 0, {PANEL // 2} or {PANEL}: one panel at most")
    rows_of_all = pd.group if pd.packed else pd.rows  # of a block of packed queries, one token at the least
    if rows_of_all > ROW_TILES[-1]:
        return Verdict.no(
            f"s·h/h_kv = {rows_of_all} query rows share a cache; a CTA has room for {ROW_TILES[-1]}: use flash_mla_v23"
        )
    return Verdict.yes()


@dataclass(frozen=True)
class FlashMlaV24Tiling(Tiling):
    """tile_n: rows of the query tile, 8, 16 or 32; 0: the smallest that holds the problem's. num_pipeline_stages: 64 x
    64 panels in the ring; 0: as many as fit. workers: CTAs for each kv head; 0: as many as fill the device.
    split_tokens: tokens of a split, a multiple of 64, so that a request's splits depend on nothing but its length; 0:
    the scheduler chooses. query_tokens: of packed queries, tokens of a block; 0: as many as a tile has rows for."""

    launch_fields: ClassVar[tuple[str, ...]] = ("workers", "split_tokens")

    tile_n: int = 0
    num_pipeline_stages: int = 0
    workers: int = 0
    split_tokens: int = 0
    query_tokens: int = 0

    def tokens(self, pd: MlaProblem) -> int:
        """Query tokens of a request, or of a block of packed ones."""
        return (self.query_tokens or max(1, ROW_TILES[-1] // pd.group)) if pd.packed else pd.s

    def geometry(self, pd: MlaProblem) -> Geometry:
        """What the code is made for, with everything chosen."""
        s = self.tokens(pd)
        n = self.tile_n or next((n for n in ROW_TILES if n >= s * pd.group), ROW_TILES[-1])
        most = Device.assumed().smem_per_block - (COMBINE_BYTES if n < ROW_TILES[-1] else 0)
        free = most - fixed_bytes(n, pd.k + pd.p, pd.element_bytes)
        stages = self.num_pipeline_stages or free // PANEL_BYTES
        causal = pd.causal and (pd.packed or s > 1)
        return Geometry(pd.h, pd.h_kv, s, pd.k, pd.p, pd.page_size, causal, n, stages, pd.packed, pd.tree)

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        if self.tile_n not in (0, *ROW_TILES):
            return Verdict.no(f"tile_n = {self.tile_n}, and this version is written for 8, 16 and 32")
        if self.query_tokens < 0 or (self.query_tokens and not pd.packed):
            return Verdict.no(f"query_tokens = {self.query_tokens} is for packed queries only, and at least 0")
        if not 0 <= self.workers <= scheduler.MOST_WORKERS:
            return Verdict.no(f"workers = {self.workers} must be between 0 and {scheduler.MOST_WORKERS:,}")
        if self.split_tokens < 0 or self.split_tokens % TOKENS:
            return Verdict.no(f"split_tokens = {self.split_tokens} is not a multiple of {TOKENS}")
        if not (taken := takes(pd)):
            return taken
        geometry = self.geometry(pd)
        if geometry.n < geometry.rows:
            return Verdict.no(f"tile_n = {geometry.n} must hold the {geometry.rows} query rows that share a cache")
        if geometry.stages < CONSUMERS * geometry.panels:
            return Verdict.no(
                f"num_pipeline_stages = {geometry.stages} panels must hold the {geometry.panels} of a tile for each of "
                f"{CONSUMERS} consumers"
            )
        smem = geometry.stages * PANEL_BYTES + fixed_bytes(geometry.n, pd.k + pd.p, pd.element_bytes)
        if device is not None and smem > device.smem_per_block:
            return Verdict.no(
                f"{smem:,} bytes of shared memory for q and {geometry.stages} panels are over the "
                f"{device.smem_per_block:,} that a CTA of {device.key} may have"
            )
        if not (counted := limits.decode_sizes(pd)):
            return counted
        workers = self.workers or (max(1, device.num_sms // pd.h_kv) if device is not None else 1)
        requests = rows.most_blocks(pd.query_tokens, pd.b, geometry.s) if pd.packed else pd.b
        tokens, fixed = pd.max_pages * pd.page_size, self.split_tokens // TOKENS
        return decode_host.schedule_sizes(requests, tokens, workers, fixed, geometry.partials, geometry.costs)


class FlashMlaV24Plan(KernelPlan):
    """One compiled kernel a problem class and tile; b, lengths, page table width, workers and split_tokens are
    arguments."""

    workload = decode.WORKLOAD
    tiling_type = FlashMlaV24Tiling
    tiling: FlashMlaV24Tiling
    uses = (
        "adaptive-tiles", "dependent-launch", "device-tile-scheduler", "fast-exp2-softmax", "loading/page-wise-tma",
        "split-kv", "swapped-operands", "two-warpgroup-output",
    )  # fmt: skip
    requires = Requirement(
        archs=("sm_90a",),
        dtypes=("bf16", "fp16"),
        features=("wgmma", "tma"),
        problem=takes,
        options=("strided_pages", "packed", "tree", "strided", "strided_out"),
    )

    def default_tiling(self) -> Tiling:
        pd = self.problem
        if not pd.packed:
            return FlashMlaV24Tiling()
        # All of a tile where some have several: of a request in two blocks the cache is read twice, which costs more
        # than rows without a token.
        return FlashMlaV24Tiling(query_tokens=1 if pd.query_tokens <= pd.b else max(1, ROW_TILES[-1] // pd.group))

    def autotune_configs(self) -> list[Tiling]:
        return [self.default_tiling()]

    def workers(self) -> int:
        """Workers of a kv head: the tiling's, or those that fill the device."""
        return self.tiling.workers or max(1, host.target(self).num_sms // self.problem.h_kv)

    @any_scale(0)
    def plan(self, *inputs: Any) -> CuteKernel:
        self.require()
        version = Version(flash_mla_v24, self.tiling.geometry(self.problem))
        fixed = self.tiling.split_tokens // TOKENS
        return decode_host.decode_kernel(self, "flash_mla_v24", version, inputs, self.workers(), fixed)

    def plan_empty(self) -> CuteKernel:
        self.require()
        version = Version(flash_mla_v24, self.tiling.geometry(self.problem))
        return decode_host.decode_kernel(self, "flash_mla_v24", version, (), 0, 0)
