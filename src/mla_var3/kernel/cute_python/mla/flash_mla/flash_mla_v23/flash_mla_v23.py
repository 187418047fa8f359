r"""Absorbed MLA decode for Hopper (sm_90a) with query tiles of 64 rows: persistent CTAs, a tile scheduler on the
device.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = [latent | rope] (t, 576)    V = latent (t, 512)

The latent has 512 columns or 256, and the rope part 64, 32 or none.

Read this first: `Consumer.run` is the main loop. One pass of it is `even_step` or `odd_step` and computes a pair of KV
tiles. `load` is the producer. `consume` goes through the splits of a CTA (`split_kv.walk`) and calls `Consumer.run` and
`epilogue` for each. The kernel, `flash_mla_v23`, finds the first split and starts the roles. `split_kv/README.md` says
how requests become splits and how splits become outputs.

A CTA computes one query tile: 64 rows of the s · h / h_kv that share a cache. It goes through the splits of its worker
and takes two KV tiles of 64 tokens at a time. Where a kv head has an even number of query tiles, two CTAs form a
cluster: they belong to the same worker, and each loads half of every KV tile for both (TMA multicast).

    producer   four warps; each keeps one half (left or right V columns) of one of two stages filled, by TMA
    EVEN       S0 = Q·K0ᵀ of even tiles; O_L += P·V_L, output columns 0..255 in registers
    ODD        S1 = Q·K1ᵀ of odd tiles;  O_R += P·V_R, output columns 256..511

The two consumers run half a pair of tiles out of phase, so that the softmax of one overlaps the products of the other:

    EVEN   softmax S0, P0 -> smem | O_L += P0·V0_L             | O_L += P1·V1_L             | S0' = Q·K0'ᵀ
    ODD    S1 = Q·K1ᵀ             | O_R += P0·V0_R, softmax S1 | O_R += P1·V1_R, P1 -> smem | S1' = Q·K1'ᵀ
    freed                         | 0L                0R       | 1R                      1L |

A consumer takes its own P as an operand from registers. The other consumer reads that P from shared memory. It lies in
the rope panel of its stage, which nobody needs once the scores are made; without rope columns it has a panel of its
own. Each P is relative to the running maximum that its own consumer knows. The reader rescales its half of the output
when the maximum has moved, which happens rarely, because the maximum may lag by 2^8.

A quarter of Q's columns stay in registers. A 64 x 64 x 16 product with both operands in shared memory takes all of the
bandwidth of shared memory, and the other consumer's softmax needs some of it.

A panel of a KV tile is one TMA box where pages are multiples of 64 tokens, and several boxes of 16 or 32 tokens where
pages are other multiples of 16. For any other page size the producers gather rows with cp.async, and each CTA loads for
itself. Where a panel is loaded in parts, all four warps load every half (`load_in_parts`). Pages of the cache may lie
apart.

While a split ends, the producer already loads the next one, and EVEN copies the next query rows while the results
leave. A split that is a whole request goes to `out`. Where `split_kv.combine` is launched, a programmatic dependent, it
merges all partials: those of shares and of fixed splits, and on an even line those that this kernel lists. Where it is
not launched (`Pool.combined`), the workers merge. Of two or three splits, a worker adds the others' partials to its own
registers, while the rest of the chip still works (`Walk.merge_few`). More splits are merged in shares of rows, at the
workers' end (`Walk.end`).

Where requests differ in their query tokens, `split_kv.rows` cuts these into blocks, and each block is scheduled as a
request of its own. A mask of the newest keys (trees of speculative tokens) is read in the tiles that have such keys.

What waits for what:

    barrier           who arrives                                 who waits, and for what
    full[stage, i]    TMA with panel i of a KV tile; where rows   both consumers, ahead of the products with panel i
                      are gathered, the producers' threads
    empty[stage, h]   the warps of the consumer that has half h   the producer warp of that stage and half: it loads
                      of V, in all CTAs that share loads          the next tile over it, or leaves
    P_EVEN            EVEN, once P0 is in shared memory           ODD: O_R += P0·V0_R
    P_ODD             ODD, once P1 is in shared memory            EVEN: O_L += P1·V1_L
    SCORES_EVEN       EVEN, once the products of S0 are issued    ODD: issues S1, so that the softmaxes do not coincide
    SCORES_ODD        ODD, once the products of S1 are issued     EVEN: O_L += P0·V0_L, queued behind S1
    EVEN, ODD         the warps of one consumer                   the same: V is zero past the request's end, P is sent
    CONSUMERS         both consumers                              both: the query tile is complete and the last split
                                                                  over; row sums are there; results are written
    SETUP             the consumers, once the mbarriers are made  the producers (CTAs of a cluster meet at its barrier)
    FIRST_TILE_*      the producer warps of the even stage, once  the odd stage's producer warp of that half: its first
                      the first even tile's loads are issued      load is issued behind them

Two half outputs with a shared running maximum are FlashMLA's ("seesaw"). Unites versions 8, 10, 15 and 16, whose splits
were cut on the host; their devlogs have what each idea brought.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from mla_var3.device import Requirement
from mla_var3.kernel.cute_python import decode_host, host
from mla_var3.kernel.cute_python.prims import paged, softmax, wgmma
from mla_var3.kernel.cute_python.prims.paged import PANEL, PANEL_ELEMENTS, TOKENS
from mla_var3.kernel.cute_python.prims.sync import (
    named_arrive,
    named_sync,
    wait_for_launch,
    warp_arrive,
)
from mla_var3.kernel.cute_python.prims.wgmma import WARPGROUP
from mla_var3.kernel.cute_python.split_kv import combine, partials, rows, scheduler
from mla_var3.kernel.cute_python.split_kv.launch import Inputs, Version
from mla_var3.kernel.cute_python.split_kv.partials import Partials, Results
from mla_var3.kernel.cute_python.split_kv.scheduler import Costs, Pool, Schedule, Split, SplitIndex
from mla_var3.kernel.cute_python.split_kv.walk import Cta, Group, Place, begin
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.runtime.scaling import any_scale
from mla_var3.workload import decode

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.decode import MlaProblem

ROWS = 64  # of a query tile: one warpgroup MMA
STAGES = 2  # one for EVEN's tiles, one for ODD's: the schedule is written for two, and another number skips tiles
CONSUMERS = 2 * WARPGROUP  # threads
THREADS = 3 * WARPGROUP
EVEN, ODD = 0, 1
PRODUCERS = 4  # warps
GATHERED = TOKENS // PRODUCERS  # rows of a KV tile, of each of them
LEFT, RIGHT = 0, 1  # halves of a stage's V columns: EVEN's and ODD's
RESIDENT = 9  # 16-column slices of the query in registers, of 36: what fits beside the accumulators
# The same where rows are gathered. The producers have more of the registers then, and a spill in the loop would wait
# behind the copies that they have issued.
RESIDENT_GATHERED = 7
# The running maximum of a row that is only padding, so that its P is exp2(0 - PADDING) = 0. Scores of 0 would have a P
# of 1, and the product with V would work on padding as on rows: a chip at its power limit pays for that in clock.
PADDING = 1.0e30


class Barrier(IntEnum):
    """Named barriers."""

    CTA = 0
    P_EVEN = 1  # P0 is in shared memory
    P_ODD = 2
    SCORES_EVEN = 3  # the products of S0 have been issued
    SCORES_ODD = 4
    CONSUMERS = 5
    EVEN = 6  # the warps of one consumer
    ODD = 7
    SETUP = 8  # the CTA's mbarriers are made
    FIRST_TILE_LEFT = 9  # the load of a half of the worker's first even tile has been issued
    FIRST_TILE_RIGHT = 10


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on: heads, query tokens, columns of latent and rope, tokens of a page, mask. packed:
    requests differ in their query tokens, and s is those of a block (`split_kv.rows`). tree: the caller's mask says
    which of the newest s keys a query token sees."""

    h: int
    h_kv: int
    s: int
    k: int
    p: int
    page: int
    causal: bool
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
    def row_tiles(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def tiles(self) -> int:
        """Query tiles of a request."""
        return self.row_tiles * self.h_kv

    @property
    def box(self) -> int:
        """Tokens of a TMA box of the cache; 0: none fits its pages, and rows are gathered."""
        return paged.box_tokens(self.page)

    @property
    def boxes(self) -> int:
        """TMA boxes of a panel."""
        return TOKENS // self.box if self.box else 0

    @property
    def pair(self) -> int:
        """CTAs of a cluster. They read the same KV tiles, and from one side of L2."""
        return 2 if self.row_tiles % 2 == 0 else 1

    @property
    def cluster(self) -> tuple[int, int, int]:
        return self.pair, 1, 1

    @property
    def sharing(self) -> int:
        """CTAs that load KV tiles for each other, by TMA multicast."""
        return self.pair if self.box else 1

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread of the producers and of the consumers: of 384 · 168 = 64512 that a launch gives."""
        return (24, 240) if self.box else (40, 232)

    @property
    def panels(self) -> int:
        """64-column panels of a cached token. Of a last one that is not full TMA reads the rest as zeros."""
        return -(-(self.k + self.p) // PANEL)

    @property
    def slices(self) -> int:
        """16-column slices of a query or key: what the scores are multiplied over."""
        return (self.k + self.p) // wgmma.MMA_K

    @property
    def p_panel(self) -> int:
        """The panel of a stage behind the latent's, for P: that of rope columns, once the scores of the stage are made.

        Without rope columns nothing is loaded there, and no mbarrier stands between a P and the next one. What does:
        EVEN writes P0 once it is past P_ODD of the pair before, and ODD arrives there when its product with that P0 has
        ended (`odd_product`). ODD writes P1 once it is past P_EVEN of its own pair, and EVEN arrives there when its
        product with the last P1 has ended, which its scores wait for (`even_scores`). That also holds for a tile
        without a partner. Between splits all consumers meet at CONSUMERS, when no product is in flight.
        """
        return self.k // PANEL

    @property
    def half(self) -> int:
        """Output columns of one consumer."""
        return self.k // 2

    @property
    def half_panels(self) -> int:
        return self.half // PANEL

    @property
    def stage_elements(self) -> int:
        return PANEL_ELEMENTS * (self.p_panel + 1)

    def freed_by(self, stage: int, consumer: int) -> tuple[int, ...]:
        """Loaded panels of a stage that a consumer frees: its half of V, and the rope panel, if there is one, where it
        reads the other's P."""
        first = consumer * self.half_panels
        own = tuple(range(first, first + self.half_panels))
        return own if stage == consumer else (*own, *range(self.p_panel, self.panels))

    @property
    def partials(self) -> Partials:
        return Partials(self.tiles, ROWS, self.k)

    @property
    def costs(self) -> Costs:
        """In KV tiles. A pair of query tiles takes 1.6 us for one, a single query tile 2.5 us, with memory as the
        limit; the begin and end of a split, in which the loop drains and fills, count as three of either. A combine
        that is launched takes as long where it has nothing to do, but for 1 us, or 2 to 3 where it reads which splits
        there are."""
        return Costs(tokens=TOKENS, overhead=3, combine=1, listed=2, level=3)

    @property
    def merge(self) -> combine.Merge:
        return combine.Merge(self.h, self.h_kv, self.s, self.partials, self.costs)


def shared_storage(geometry: Geometry, dtype: type) -> type:
    """The CTA's shared memory: up to 72 KiB of Q, two stages of up to 72 KiB, and under 2 KiB of barriers and row
    values."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.MemRange[kind, size]

    fields = {
        "full": array(Int64, STAGES * geometry.panels),  # mbarriers: a panel has been loaded
        "empty": array(Int64, 2 * STAGES),  # mbarriers, [stage][half]: panels are no longer read
        "first": array(Int32, scheduler.FIRST_WORDS),
        "row_range": array(Int32, 2),  # of a merge that workers share: the first and the end
        "row_max": array(Float32, ROWS),  # running maximum that both consumers share
        "row_sums": array(Float32, 2 * ROWS),  # each consumer's sum of its own P
        "query": cute.struct.Align[array(dtype, ROWS * PANEL * geometry.panels), 1024],
        "stages": cute.struct.Align[array(dtype, STAGES * geometry.stage_elements), 1024],
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def query_tile(storage: Any, dtype: type, geometry: Geometry) -> cute.Tensor:
    """Q in shared memory: (ROWS, columns of all panels), swizzled as the products read it."""
    layout = wgmma.k_major_layout(dtype, (ROWS, PANEL * geometry.panels))
    return storage.query.get_tensor(layout.outer, swizzle=layout.inner)


# ------------------------------------------------------------------------------------------------ device: load
@cute.jit
def make_barriers(full: cute.Pointer, empty: cute.Pointer, geometry: cutlass.Constexpr):
    """One thread's work: `full` waits for bytes, or where rows are gathered for the producers' threads, `empty` for the
    warps that read, in all CTAs that share loads."""
    for i in cutlass.range_constexpr(STAGES * geometry.panels):
        cute.arch.mbarrier_init(full + i, 1 if geometry.box else WARPGROUP)
    for i in cutlass.range_constexpr(2 * STAGES):
        cute.arch.mbarrier_init(empty + i, geometry.sharing * WARPGROUP // 32)


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
    rank: Int32,  # in the cluster
    stage: Int32,
    half: Int32,
    geometry: cutlass.Constexpr,
):
    """What one producer warp does: it keeps its half of its stage filled, over all splits of the worker. One copy of
    the code for all four: a call begins with fetching it.

    The warps of the odd stage have nothing to load for a last tile without a partner.
    """
    full, empty = storage.full.data_ptr() + stage * geometry.panels, storage.empty.data_ptr() + (2 * stage + half)
    # Panels of all stages behind each other.
    layout = wgmma.k_major_layout(storage.stages.data_ptr().dtype, (TOKENS, STAGES * PANEL * (geometry.p_panel + 1)))
    panels = wgmma.smem_view(storage.stages.data_ptr(), 0, layout)
    tma, page_table = inputs.tma, inputs.page_table
    boxes, places = paged.boxes_of(tma, inputs.cache[None, None, kv_head, None], panels, geometry.box)
    places = cute.domain_offset((0, 0, stage * (geometry.p_panel + 1)), places)
    parity = Int32(1)  # the first pass finds its panels free
    is_first = Boolean(True)
    known, page = first_page.entry, first_page.page
    while walk.has_work(split):
        first, end, _ = walk.tiles_of(split)
        request = walk.queries.block(split.request).request
        for tile in cutlass.range(first + stage, end, STAGES, unroll=1):
            entry = paged.entry_of(tile, split.length, geometry.page)
            if entry != known:
                page = page_table[request, entry]
            known = Int32(-1)
            pages = paged.pages_of(page, geometry.page)
            cute.arch.mbarrier_wait(empty, parity)
            parity = parity ^ 1
            if stage == ODD:
                # All CTAs start at once, and memory serves loads that are in flight together in any order, while the
                # first scores need the even tile. So the odd one is issued behind it; of a single pair, once it is
                # there.
                if is_first:
                    if half == LEFT:
                        named_sync(Barrier.FIRST_TILE_LEFT, 3 * 32)
                    else:
                        named_sync(Barrier.FIRST_TILE_RIGHT, 3 * 32)
                    if first + STAGES >= end:
                        last_read = geometry.freed_by(EVEN, ODD)[-1]
                        cute.arch.mbarrier_wait(storage.full.data_ptr() + last_read, 0)
            for i in cutlass.range_constexpr(geometry.half_panels):
                panel = half * geometry.half_panels + i
                load_panel(tma, boxes, places, tile, panel, pages, full, rank, geometry)
            if cutlass.const_expr(geometry.panels > geometry.p_panel):
                if stage != half:
                    load_panel(tma, boxes, places, tile, geometry.p_panel, pages, full, rank, geometry)
            if stage == EVEN:
                if is_first and first + 1 < end:
                    for waiting in cutlass.range_constexpr(2):
                        named_arrive(Barrier.FIRST_TILE_LEFT + waiting, 3 * 32)
            is_first = Boolean(False)
        known, is_first = Int32(-1), Boolean(False)
        split = walk.next_split(split)
    if cutlass.const_expr(geometry.sharing > 1):
        # No CTA leaves before the other one has freed the last panels: that signals an mbarrier in its shared memory.
        cute.arch.mbarrier_wait(empty, parity)


@cute.jit
def load_panel(
    tma: cute.CopyAtom,
    boxes: cute.Tensor,  # of `paged.boxes_of`
    places: cute.Tensor,
    tile: Int32,
    panel: Any,
    pages: cutlass.Constexpr,
    full: cute.Pointer,  # mbarriers of the stage
    rank: Int32,
    geometry: cutlass.Constexpr,
):
    """Loads a panel of a tile. Each CTA of a cluster expects every panel and issues the loads of its share."""
    blocks = geometry.sharing
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + panel, paged.PANEL_BYTES)
    if rank == panel % blocks:
        paged.load_panel(
            tma, boxes, places[None, None, panel], tile, panel, pages, geometry.page, full + panel, blocks
        )  # fmt: skip


@cute.jit
def load_in_parts(
    inputs: Inputs,
    storage: cutlass.Constexpr,
    walk: cutlass.Constexpr,  # `Walk`
    split: Split,
    kv_head: Int32,
    rank: Int32,  # in the cluster
    warp: Int32,  # of the producers
    geometry: cutlass.Constexpr,
):
    """`load` where a panel is several TMA boxes, or none fits and rows are gathered. One warp would take too long to
    issue half a stage in pieces, so all four load each half, in the order in which halves are freed: of every panel a
    warp gathers 16 rows, or loads one box.

    No warp waits for its copies: they arrive at an mbarrier, and consumers make them visible to their products
    (`Consumer.wait_panel`).
    """
    cache, page_table = inputs.cache, inputs.page_table
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    layout = wgmma.k_major_layout(storage.stages.data_ptr().dtype, (TOKENS, PANEL * geometry.panels))
    lane = cute.arch.lane_idx()
    if cutlass.const_expr(geometry.box):
        own = warp % geometry.boxes * geometry.box  # where in a tile this lane's page is
    else:
        own = warp * GATHERED + lane % GATHERED
    parities = [Int32(1), Int32(1)]  # of the stages; the first pass finds its panels free
    while walk.has_work(split):
        first, end, _ = walk.tiles_of(split)
        length = split.length
        request = walk.queries.block(split.request).request
        for pair in cutlass.range(first, end, STAGES, unroll=1):
            tokens = [(pair + i) * TOKENS for i in range(STAGES)]
            pages = [page_table[request, paged.row_entry_of(i + own, length, geometry.page)] for i in tokens]
            for stage in cutlass.range_constexpr(STAGES):
                if pair + stage < end:
                    own_stage = storage.stages.data_ptr() + stage * geometry.stage_elements
                    own_full = full + stage * geometry.panels
                    if cutlass.const_expr(not geometry.box):
                        begin = tokens[stage] + warp * GATHERED
                        sources = [
                            paged.row_source_of(cache, pages[stage], begin, row, length, kv_head)
                            for row in range(0, GATHERED, paged.ROWS)
                        ]
                    for half in (stage, 1 - stage):
                        panels = geometry.freed_by(stage, half)
                        cute.arch.mbarrier_wait(empty + (2 * stage + half), parities[stage])
                        if cutlass.const_expr(geometry.box):
                            load_boxes(
                                inputs.tma, cache[None, None, kv_head, None], wgmma.smem_view(own_stage, 0, layout),
                                own_full, panels, tokens[stage], pages[stage], rank, warp, geometry,
                            )  # fmt: skip
                        else:
                            gather_rows(sources, own_stage, own_full, panels, warp, geometry)
                    parities[stage] = parities[stage] ^ 1
        split = walk.next_split(split)
    if cutlass.const_expr(geometry.sharing > 1):
        for i in cutlass.range_constexpr(2 * STAGES):  # as in `load`
            cute.arch.mbarrier_wait(empty + i, parities[i // 2])


@cute.jit
def gather_rows(
    sources: cutlass.Constexpr,  # `paged.row_source_of` of this warp's rows
    own_stage: cute.Pointer,  # shared memory
    full: cute.Pointer,  # mbarriers of the stage
    panels: cutlass.Constexpr,
    warp: Int32,
    geometry: cutlass.Constexpr,
):
    """Starts what one of four warps gathers of some panels; its copies arrive at the mbarrier of the first one."""
    for panel, j in itertools.product(panels, range(len(sources))):
        place, row = own_stage + panel * PANEL_ELEMENTS, warp * GATHERED + j * paged.ROWS
        paged.copy_rows(sources[j], panel * PANEL, geometry.k + geometry.p, place, row)
    cute.arch.cp_async_mbarrier_arrive_noinc(full + panels[0])


@cute.jit
def load_boxes(
    tma: cute.CopyAtom,
    cache: cute.Tensor,  # TMA tensor of one head, (page, k + p, num_pages)
    own_stage: cute.Tensor,  # (TOKENS, columns of all panels), shared memory
    full: cute.Pointer,  # mbarriers of the stage
    panels: cutlass.Constexpr,
    first_token: Int32,  # of the tile
    page: Int32,  # of this warp's box
    rank: Int32,
    warp: Int32,
    geometry: cutlass.Constexpr,
):
    """What one of four warps loads of some panels: its box of each, or, with two boxes a panel, of every other one."""
    blocks, boxes, box = geometry.sharing, geometry.boxes, geometry.box
    sources, places = paged.boxes_of(tma, cache, own_stage, box)
    mine = warp % boxes
    at = (first_token + mine * box) % geometry.page // box
    if warp == 0:
        with cute.arch.elect_one():
            for panel in panels:
                cute.arch.mbarrier_arrive_and_expect_tx(full + panel, paged.PANEL_BYTES)
    for panel in panels:
        # Each CTA of a cluster expects every panel and issues the loads of its share.
        if rank == panel % blocks and warp // boxes == panel // blocks % (PRODUCERS // boxes):
            paged.load_box(
                tma, sources[None, at, panel, page], places[None, mine, panel], full + panel, blocks
            )  # fmt: skip


# ------------------------------------------------------------------------------------------------ device: one consumer
class Registers(NamedTuple):
    """What a consumer's thread keeps of a split. The code of both consumers shares it."""

    acc_o: cute.Tensor  # (64, k / 2) fp32: this consumer's half of the output
    row_max: cute.Tensor  # (2,) fp32: the running maximum of the thread's two rows
    row_sum: cute.Tensor  # (2,) fp32: this thread's share of the sums of the own P

    @classmethod
    def make(cls, dtype: type, geometry: Geometry) -> Registers:
        output = wgmma.make_mma(dtype, geometry.half).partition_shape_C((ROWS, geometry.half))
        acc_o = cute.make_rmem_tensor(output, Float32)
        return cls(acc_o, *(cute.make_rmem_tensor(2, Float32) for _ in range(2)))


def resident_slices(slices: int, gathered: bool) -> tuple[int, ...]:
    """Which 16-column slices of the query stay in registers: evenly spread over the k steps."""
    most = RESIDENT_GATHERED if gathered else RESIDENT
    return tuple(i for i in range(slices) if (i + 1) * most // slices > i * most // slices)


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
    stages: Any  # shared memory
    shared_max: Any  # (ROWS,) shared memory
    q_tile: Any  # (ROWS, columns of all panels) shared memory
    resident: tuple[int, ...]  # 16-column slices of Q in q_regs
    q_regs: Any
    mma_qs: Any  # S = Q·Kᵀ with Q in registers,
    mma_s: Any  # with Q in shared memory;
    mma_rs: Any  # O += P·V with P in registers,
    mma_ss: Any  # with P in shared memory
    frag_q: Any  # descriptors: Q,
    frag_k: Any  # the own KV tile as K,
    frag_v: Any  # both KV tiles' own half as V,
    frag_p: Any  # the other consumer's P
    p_copy: Any
    p_target: Any  # where the own P goes
    acc_s: Any  # (64, 64) fp32 registers
    acc_o: Any  # (64, k / 2) fp32 registers, which both consumers' code shares,
    row_max: Any  # as the running maximum of the thread's two rows
    row_sum: Any  # and this thread's share of the sums of the own P
    limits: Any  # keys that each of the two rows may see
    mask: Any  # (b, s, s) uint8, global memory, or None: whether a query token sees each of the newest s keys,
    mask_rows: Any  # and where the two rows' tokens have theirs

    @classmethod
    def make(cls, me, geometry, storage, q_tile, mask, thread, scale_log2, registers) -> Consumer:
        """Views of a thread's part. registers: `Registers`."""
        dtype, stages = q_tile.element_type, storage.stages.data_ptr()
        # Ahead of the accumulators: behind them, ptxas spills.
        mma_qs = wgmma.make_mma(dtype, TOKENS, a_in_registers=True)
        resident = resident_slices(geometry.slices, not geometry.box)
        q_regs = cute.make_rmem_tensor(
            cute.make_layout(((2, 2, 2), 1, max(len(resident), 1)), stride=((1, 2, 4), 0, 8)), dtype
        )
        mma_s = wgmma.make_mma(dtype, TOKENS)
        mma_rs = wgmma.make_mma(dtype, geometry.half, a_in_registers=True, b_major=OperandMajorMode.MN)
        mma_ss = wgmma.make_mma(dtype, geometry.half, b_major=OperandMajorMode.MN)
        scores, output = mma_s.get_slice(thread), mma_ss.get_slice(thread)
        keys = wgmma.k_major_layout(dtype, (TOKENS, PANEL * geometry.panels))
        values = wgmma.mn_major_layout(dtype, (geometry.half, TOKENS))
        square = wgmma.k_major_layout(dtype, (ROWS, TOKENS))
        left, behind = me * geometry.half_panels * PANEL_ELEMENTS, geometry.p_panel * PANEL_ELEMENTS

        def at(stage: int, offset: int, layout: Any) -> cute.Tensor:
            return wgmma.smem_view(stages, stage * geometry.stage_elements + offset, layout)

        p_copy = cute.make_tiled_copy_C(wgmma.stmatrix_atom(dtype), mma_s).get_slice(thread)
        return cls(
            me=me,
            geometry=geometry,
            dtype=dtype,
            thread=thread,
            scale_log2=scale_log2,
            full=storage.full.data_ptr(),
            empty=storage.empty.data_ptr(),
            stages=stages,
            shared_max=storage.row_max.get_tensor(cute.make_layout(ROWS)),
            q_tile=q_tile,
            resident=resident,
            q_regs=q_regs,
            mma_qs=mma_qs,
            mma_s=mma_s,
            mma_rs=mma_rs,
            mma_ss=mma_ss,
            frag_q=mma_s.make_fragment_A(scores.partition_A(q_tile)),
            frag_k=mma_s.make_fragment_B(scores.partition_B(at(me, 0, keys))),
            frag_v=[mma_ss.make_fragment_B(output.partition_B(at(i, left, values))) for i in (EVEN, ODD)],
            frag_p=mma_ss.make_fragment_A(output.partition_A(at(1 - me, behind, square))),
            p_copy=p_copy,
            p_target=p_copy.partition_D(at(me, behind, square)),
            acc_s=cute.make_rmem_tensor(mma_s.partition_shape_C((ROWS, TOKENS)), Float32),
            acc_o=registers.acc_o,
            row_max=registers.row_max,
            row_sum=registers.row_sum,
            limits=cute.make_rmem_tensor(2, Int32),
            mask=mask,
            mask_rows=None if mask is None else cute.make_rmem_tensor(2, Int32),
        )

    # -------------------------------------------------------------------------------------------- scores
    @cute.jit
    def load_resident(self):
        """The query's resident slices into registers; the query tile is complete and joined."""
        atom = cute.make_copy_atom(cute.nvgpu.warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_A(atom, self.mma_qs).get_slice(self.thread)
        source, target = copy.partition_S(self.q_tile), copy.retile(self.q_regs)
        for i in cutlass.range_constexpr(len(self.resident)):
            cute.copy(copy, source[None, 0, self.resident[i]], target[None, 0, i])

    @cute.jit
    def wait_panel(self, stage: cutlass.Constexpr, panel: cutlass.Constexpr, parity: Int32):
        """Waits until a panel of a stage is there; of gathered rows, with the first panel of a half for all of it."""
        full = self.full + (stage * self.geometry.panels + panel)
        if cutlass.const_expr(self.geometry.box):
            cute.arch.mbarrier_wait(full, parity)
        elif cutlass.const_expr(panel in (0, self.geometry.half_panels)):
            cute.arch.mbarrier_wait(full, parity)
            # cp.async writes through another proxy than the one that products read through.
            cute.arch.fence_view_async_shared()

    @cute.jit
    def issue_panel(self, panel: cutlass.Constexpr, zero_init: cutlass.Constexpr):
        """S (+)= Q·Kᵀ of one 64-column panel, as far as it has columns; commits it and waits for nothing."""
        warpgroup.fence()
        from_smem, from_registers = cute.make_mma_atom(self.mma_s.op), cute.make_mma_atom(self.mma_qs.op)
        from_smem.set(warpgroup.Field.ACCUMULATE, not zero_init)
        from_registers.set(warpgroup.Field.ACCUMULATE, not zero_init)
        blocks = [k for k in wgmma.k_blocks((panel,)) if k < self.geometry.slices]
        for i in cutlass.range_constexpr(len(blocks)):
            k = blocks[i]
            if cutlass.const_expr(k in self.resident):
                q = self.q_regs[None, None, self.resident.index(k)]
                cute.gemm(from_registers, self.acc_s, q, self.frag_k[None, None, k], self.acc_s)
            else:
                q = self.frag_q[None, None, k]
                cute.gemm(from_smem, self.acc_s, q, self.frag_k[None, None, k], self.acc_s)
            from_smem.set(warpgroup.Field.ACCUMULATE, True)
            from_registers.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def even_scores(self, parity: Int32, drain: cutlass.Constexpr):
        """S0 = Q·K0ᵀ, in the order in which the halves are refilled; waits for S0. With `drain` the product with V1 is
        in flight: its half of the odd stage is freed as soon as that ends."""
        panels = (*self.geometry.freed_by(EVEN, EVEN), *self.geometry.freed_by(EVEN, ODD))
        for i in cutlass.range_constexpr(len(panels)):
            self.wait_panel(EVEN, panels[i], parity)
            self.issue_panel(panels[i], i == 0)
            if cutlass.const_expr(drain and i == 0):
                warpgroup.wait_group(1)
                self.free(ODD)
        named_arrive(Barrier.SCORES_EVEN, CONSUMERS)
        warpgroup.wait_group(0)

    @cute.jit
    def issue_odd_scores(self, parity: Int32):
        """S1 = Q·K1ᵀ once all of S0 has been issued, so that the two softmaxes do not fall together; waits for nothing
        else."""
        named_sync(Barrier.SCORES_EVEN, CONSUMERS)
        panels = (*self.geometry.freed_by(ODD, ODD), *self.geometry.freed_by(ODD, EVEN))
        for i in cutlass.range_constexpr(len(panels)):
            self.wait_panel(ODD, panels[i], parity)
            self.issue_panel(panels[i], i == 0)
        named_arrive(Barrier.SCORES_ODD, CONSUMERS)

    @cute.jit
    def free(self, stage: cutlass.Constexpr):
        """This warp no longer reads its half of a stage: signals the producers of all CTAs of the cluster."""
        warp_arrive(self.empty + (2 * stage + self.me), self.geometry.sharing)

    # -------------------------------------------------------------------------------------------- softmax
    @cute.jit
    def mask_scores(self, first_token: Int32, length: Int32):
        """Sets scores of keys that a row may not see to -inf."""
        softmax.mask_columns(self.acc_s, self.thread, first_token, self.limits)
        if cutlass.const_expr(self.mask is not None):
            first_column, s = first_token - (length - self.geometry.s), self.geometry.s
            softmax.mask_newest(self.acc_s, self.thread, first_column, s, self.mask.iterator, self.mask_rows)

    @cute.jit
    def exceeds(self):
        """Whether the running maximum of any of this warp's rows has to move. No shuffle: one thread of a row is
        enough."""
        above = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            above[r] = softmax.thread_max(self.acc_s, r) * self.scale_log2 - self.row_max[r]
        return cute.arch.vote_any_sync(cute.arch.fmax(above[0], above[1]) > softmax.SLACK)

    @cute.jit
    def move_max(self, factor: cute.Tensor):
        """Moves the maximum of the rows that need it, publishes it to the other consumer, and gives what older results
        are to be multiplied with."""
        shared_max = self.shared_max
        for r in cutlass.range_constexpr(2):
            m = softmax.lazy_max(self.row_max[r], softmax.row_max(self.acc_s, r) * self.scale_log2)
            factor[r] = softmax.exp2(self.row_max[r] - m)
            self.row_max[r] = m
            self.row_sum[r] = self.row_sum[r] * factor[r]
            if self.thread % 4 == 0:
                shared_max[wgmma.acc_row(self.thread, r)] = m

    @cute.jit
    def follow_max(self):
        """Takes over the maximum that the other consumer has published, and rescales; nothing may be in flight."""
        theirs = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            theirs[r] = self.shared_max[wgmma.acc_row(self.thread, r)]
        if cute.arch.vote_any_sync(theirs[0] != self.row_max[0] or theirs[1] != self.row_max[1]):
            self.take_max(theirs)

    @cute.jit
    def take_max(self, theirs: cute.Tensor):
        """The rows' maximum becomes `theirs`; rescales what this consumer has."""
        factor = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            factor[r] = softmax.exp2(self.row_max[r] - theirs[r])
            self.row_max[r] = theirs[r]
            self.row_sum[r] = self.row_sum[r] * factor[r]
        wgmma.scale_rows(self.acc_o, factor)

    @cute.jit
    def exponentials(self):
        """P = exp2(S · scale - max) in place, and its share of the row sums."""
        for r in cutlass.range_constexpr(2):
            total = softmax.row_exp2(self.acc_s, r, self.scale_log2, self.row_max[r])
            self.row_sum[r] = self.row_sum[r] + total

    @cute.jit
    def send_p(self, p: cute.Tensor):
        """This consumer's P into its panel of its own stage."""
        cute.copy(self.p_copy, self.p_copy.retile(p), self.p_target)
        cute.arch.fence_view_async_shared()
        named_arrive(Barrier.P_EVEN + self.me, CONSUMERS)

    @cute.jit
    def mask_tile(self, first_token: Int32, length: Int32):
        """Masks the own scores, and zeroes the own tile's V from the request's end on, all columns, ahead of the own P:
        who has P may multiply with it."""
        self.mask_scores(first_token, length)
        values = self.stages + self.me * self.geometry.stage_elements
        paged.zero_rows(values, length - first_token, self.thread, 2 * self.geometry.half_panels)
        cute.arch.fence_view_async_shared()
        named_sync(Barrier.EVEN + self.me, WARPGROUP)

    # -------------------------------------------------------------------------------------------- steps
    @cute.jit
    def even_step(self, first_token: Int32, length: Int32, parity: Int32, masked: Boolean, more: Boolean):
        """EVEN's share of a pair of tiles; S0 is in acc_s. more: makes the next even tile's S0."""
        if masked:
            self.mask_tile(first_token, length)
        if self.exceeds():
            factor = cute.make_rmem_tensor(2, Float32)
            self.move_max(factor)
            wgmma.scale_rows(self.acc_o, factor)
        self.exponentials()
        p = wgmma.to_dtype(self.acc_s, self.dtype)
        self.send_p(p)
        named_sync(Barrier.SCORES_ODD, CONSUMERS)
        # O_L += P0·V0_L
        wgmma.gemm_issue(self.mma_rs, self.acc_o, wgmma.as_a_operand(p), self.frag_v[EVEN], range(4))
        warpgroup.wait_group(0)
        self.free(EVEN)
        named_sync(Barrier.P_ODD, CONSUMERS)
        self.follow_max()
        # O_L += P1·V1_L
        wgmma.gemm_issue(self.mma_ss, self.acc_o, self.frag_p, self.frag_v[ODD], range(4))
        # Both branches wait: no product is in flight where they join.
        if more:
            self.even_scores(parity ^ 1, drain=True)
        else:
            warpgroup.wait_group(0)
            self.free(ODD)

    @cute.jit
    def odd_step(self, first_token: Int32, length: Int32, parity: Int32, masked: Boolean, more: Boolean):
        """ODD's share of a pair of tiles; nothing is in flight before or behind it."""
        self.issue_odd_scores(parity)
        # Behind the scores, so that the product runs under the softmax.
        named_sync(Barrier.P_EVEN, CONSUMERS)
        self.follow_max()
        # O_R += P0·V0_R
        wgmma.gemm_issue(self.mma_ss, self.acc_o, self.frag_p, self.frag_v[EVEN], range(4))
        warpgroup.wait_group(1)  # S1
        if masked:
            self.mask_tile(first_token + TOKENS, length)
        factor = cute.make_rmem_tensor(2, Float32)
        factor.fill(1.0)
        moves = self.exceeds()
        if moves:
            self.move_max(factor)
        self.exponentials()
        p = wgmma.to_dtype(self.acc_s, self.dtype)
        # The product is in both branches, with its waits: where they join, no register that a product in flight uses
        # may be chosen between.
        if moves:
            warpgroup.wait_group(0)
            wgmma.scale_rows(self.acc_o, factor)
            self.odd_product(p)
        else:
            self.odd_product(p)

    @cute.jit
    def odd_product(self, p: cute.Tensor):
        """O_R += P1·V1_R; P1 goes to EVEN meanwhile. It waits for P0·V0_R first: that ends about when the softmax
        does, and the sooner the even stage is free, the sooner its next tile is loaded."""
        warpgroup.wait_group(0)
        self.free(EVEN)
        wgmma.gemm_issue(self.mma_rs, self.acc_o, wgmma.as_a_operand(p), self.frag_v[ODD], range(4))
        self.send_p(p)
        warpgroup.wait_group(0)
        self.free(ODD)

    @cute.jit
    def last_tile(self, first_token: Int32, length: Int32, masked: Boolean):
        """A tile without a partner: EVEN has made its scores, and both multiply their half of its V."""
        if cutlass.const_expr(self.me == EVEN):
            # As often as ODD waits below: racecheck follows barriers of all only where both have waited as often.
            if masked:
                self.mask_tile(first_token, length)
            else:
                named_sync(Barrier.EVEN, WARPGROUP)
            if self.exceeds():
                factor = cute.make_rmem_tensor(2, Float32)
                self.move_max(factor)
                wgmma.scale_rows(self.acc_o, factor)
            self.exponentials()
            p = wgmma.to_dtype(self.acc_s, self.dtype)
            self.send_p(p)
            # O_L += P0·V0_L
            wgmma.gemm_issue(self.mma_rs, self.acc_o, wgmma.as_a_operand(p), self.frag_v[EVEN], range(4))
            named_sync(Barrier.EVEN, WARPGROUP)
            warpgroup.wait_group(0)
            self.free(EVEN)
        else:
            named_sync(Barrier.SCORES_EVEN, CONSUMERS)
            named_sync(Barrier.P_EVEN, CONSUMERS)
            self.follow_max()
            # O_R += P0·V0_R
            wgmma.gemm_issue(self.mma_ss, self.acc_o, self.frag_p, self.frag_v[EVEN], range(4))
            warpgroup.wait_group(0)
            self.free(EVEN)

    @cute.jit
    def begin(self, first_row: Int32, length: Int32, block: rows.Block):
        """What a split begins with: no keys, and its query in shared memory and, a quarter of it, in registers."""
        shared_max = self.shared_max
        self.acc_o.fill(0.0)
        for r in cutlass.range_constexpr(2):
            row = first_row + wgmma.acc_row(self.thread, r)
            self.row_max[r] = first_maximum(row, block.count, self.geometry)
            if cutlass.const_expr(self.me == EVEN):
                # ODD reads it behind P0.
                if self.thread % 4 == 0:
                    shared_max[wgmma.acc_row(self.thread, r)] = self.row_max[r]
            limit = length
            if cutlass.const_expr(self.geometry.causal):
                limit = length - block.count + 1 + row // self.geometry.group
            self.limits[r] = limit
            if cutlass.const_expr(self.mask is not None):
                token = cutlass.min(row // self.geometry.group, self.geometry.s - 1)
                self.mask_rows[r] = (block.request * self.geometry.s + token) * self.geometry.s
        self.row_sum.fill(0.0)
        self.load_resident()

    @cute.jit
    def run(self, first: Int32, end: Int32, unmasked: Int32, length: Int32, parity: Int32):
        """Tiles first..end-1 of a split, in pairs and perhaps a last one. unmasked: keys that every row of the tile may
        see; tiles below need no mask. parity: of this consumer's first tile.

        One copy of a step: where the last pair had another, with a mask or without scores to make, a split's end was
        code that had to be fetched. Both counts go down: from bounds, ptxas works them out anew in every step, and
        moves them into uniform registers."""
        step = self.even_step if cutlass.const_expr(self.me == EVEN) else self.odd_step
        if cutlass.const_expr(self.me == EVEN):
            self.even_scores(parity, drain=False)
        left, plain = end - first, unmasked // TOKENS - first  # tiles; and of those that need no mask
        while left >= STAGES:
            step((end - left) * TOKENS, length, parity, plain < STAGES, left > STAGES)
            left, plain, parity = left - STAGES, plain - STAGES, parity ^ 1
        if left > 0:
            self.last_tile((end - 1) * TOKENS, length, plain < 1)


@cute.jit
def first_maximum(row: Int32, tokens: Any, geometry: cutlass.Constexpr) -> Float32:
    """What the running maximum of a row begins with. tokens: of the query."""
    if cutlass.const_expr(geometry.rows % ROWS == 0 and not geometry.packed):
        return Float32(softmax.NO_KEY)
    return Float32(cutlass.select_(row < tokens * geometry.group, Float32(softmax.NO_KEY), Float32(PADDING)))


@cute.jit
def keys_of_all_rows(length: Int32, tokens: Any, first_row: Int32, geometry: cutlass.Constexpr) -> Int32:
    """Keys that every row of a query tile may see. tokens: of the query. first_row: of the tile."""
    unmasked = cutlass.max(length, 0)
    if cutlass.const_expr(geometry.causal):
        unmasked = cutlass.max(unmasked - tokens + 1 + first_row // geometry.group, 0)
    elif cutlass.const_expr(geometry.tree):
        unmasked = cutlass.max(unmasked - tokens, 0)
    return unmasked


# ------------------------------------------------------------------------------------------------ device: epilogue
@cute.jit
def add_partial(
    registers: cutlass.Constexpr,  # `Registers`
    results: Results,
    tile: Int32,  # query tile of the request
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
    slot: Int32,
):
    """Adds a partial: it lies as the accumulators do (`split_kv.partials`)."""
    acc_o, row_max, row_sum = registers
    outputs, stats = results.outputs, results.stats
    layout, row = geometry.partials, wgmma.as_rows(acc_o)
    me, lane = thread // WARPGROUP, thread % WARPGROUP
    for r in cutlass.range_constexpr(2):
        index = layout.row(slot, tile, wgmma.acc_row(lane, r))
        found = cute.make_rmem_tensor(partials.STATS, Float32)
        cute.autovec_copy(layout.stats(stats.iterator, index), found)
        top = cute.arch.fmax(row_max[r], cute.arch.fmax(found[0], found[2]))
        mine, theirs = softmax.exp2(row_max[r] - top), softmax.exp2(cutlass.select_(me > 0, found[2], found[0]) - top)
        row_max[r] = top
        row_sum[r] = row_sum[r] * mine + cutlass.select_(me > 0, found[3], found[1]) * theirs
        source = layout.outputs(outputs.iterator, index)
        source = source + cute.assume(me * geometry.half + lane % 4 * partials.VECTOR, divby=partials.VECTOR)
        for v in cutlass.range_constexpr(geometry.half // 32):
            vector = cute.make_rmem_tensor(partials.VECTOR, Float16)
            cute.autovec_copy(cute.make_tensor(source + 32 * v, cute.make_layout(partials.VECTOR)), vector)
            for n in cutlass.range_constexpr(partials.VECTOR):
                column = v * partials.VECTOR + n
                row[r, column] = row[r, column] * mine + Float32(vector[n]) * theirs


@cute.jit
def epilogue(
    registers: cutlass.Constexpr,  # `Registers`
    row_sums: cute.Tensor,  # (ROWS, 2) fp32, shared memory
    results: Results,
    block: rows.Block,
    place: Place,  # where the results go
    of_tile: cutlass.Constexpr,  # `rows.TileRows`
    tile: Int32,  # query tile of the request
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
):
    """Divides whole results by their row sums, or scales a partial one (`split_kv.partials`), and writes this
    consumer's half of the rows, 16 bytes a thread. The same code for both consumers: what runs once a split is fetched
    from L2."""
    acc_o, row_max, row_sum = registers
    out, lse, outputs, stats = results
    layout = geometry.partials
    me, lane = thread // WARPGROUP, thread % WARPGROUP
    first_row, kv_head = of_tile.first_row, of_tile.kv_head
    of_thread = Int64(me * (2 * geometry.half) + lane % partials.QUAD * 16)  # bytes from where a row begins
    if place.whole:
        for r in cutlass.range_constexpr(2):
            if thread % 4 == 0:
                row_sums[wgmma.acc_row(lane, r), me] = row_sum[r]
        named_sync(Barrier.CONSUMERS, CONSUMERS)
        for r in cutlass.range_constexpr(2):
            row = first_row + wgmma.acc_row(lane, r)
            inside = row < block.count * geometry.group
            total = row_sum[r] + row_sums[row - first_row, 1 - me]
            factor = cutlass.select_(total > 0.0, 1.0 / total, Float32(0.0))
            base = out.iterator.toint() + 2 * rows.row_offset(out, block.first, kv_head, row, geometry.group)
            store_row(acc_o, r, factor, out.element_type, base + of_thread, inside, lane, True)
            if thread % 4 == 0 and me == 0 and inside:
                head, token = kv_head * geometry.group + row % geometry.group, row // geometry.group
                lse[block.first, head, token] = softmax.natural_lse(total, row_max[r])
    else:
        for r in cutlass.range_constexpr(2):
            row = wgmma.acc_row(lane, r)
            index = layout.row(place.slot, tile, row)
            exponent = partials.exponent_of(row_magnitude(acc_o, r))
            factor = partials.power_of_two(partials.TARGET_EXPONENT - exponent)
            base = outputs.iterator.toint() + 2 * (index * layout.columns)
            inside = first_row + row < block.count * geometry.group
            store_row(acc_o, r, factor, Float16, base + of_thread, inside, lane, False)
            if thread % 4 == 0:
                partials.store_stats(layout.stats(stats.iterator, index), me, row_max[r], row_sum[r], exponent)


@cute.jit
def store_row(
    acc_o: cute.Tensor,
    r: cutlass.Constexpr,  # which of the thread's two rows
    factor: Float32,
    dtype: cutlass.Constexpr,
    target: Int64,  # where the thread's first vector goes
    inside: Boolean,  # whether it goes anywhere
    lane: Int32,
    transposed: cutlass.Constexpr,  # whether the quad puts its vectors in order
):
    """Writes this consumer's half of a row times a factor. A vector is worked out while those before it leave: an SM
    stores 45 bytes a cycle, so that a tile's 64 KiB take longer than all that is done with them."""
    row = wgmma.as_rows(acc_o)
    for v in cutlass.range_constexpr(cute.size(row, mode=[1]) // partials.VECTOR):
        scaled = cute.make_rmem_tensor(partials.VECTOR, Float32)
        for n in cutlass.range_constexpr(partials.VECTOR):
            scaled[n] = row[r, v * partials.VECTOR + n] * factor
        words = cute.recast_tensor(wgmma.to_dtype(scaled, dtype), Int32)
        if cutlass.const_expr(transposed):
            partials.transpose_quad(words, lane)
        address = cute.make_ptr(Int32, target + 64 * v, cute.AddressSpace.gmem, assumed_align=16)
        partials.store_vector(words, address, inside)


@cute.jit
def row_magnitude(acc_o: cute.Tensor, r: cutlass.Constexpr) -> Float32:
    """Sum of the magnitudes of a row of the accumulator, over the four threads that share it."""
    row = wgmma.as_rows(acc_o)
    sums = cute.make_rmem_tensor(4, Float32)
    sums.fill(0.0)
    for j in cutlass.range_constexpr(cute.size(row, mode=[1])):
        sums[j % 4] = sums[j % 4] + cute.math.absf(row[r, j])
    return softmax.quad_sum((sums[0] + sums[1]) + (sums[2] + sums[3]))


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
    # Made of its two parts once more: ptxas is to see what they have in common with the tile's rows.
    tile = of_tile.kv_head * geometry.row_tiles + walk.tile % geometry.row_tiles
    walk, first_row = dataclasses.replace(walk, tile=tile), of_tile.first_row
    q_tile = query_tile(storage, q.element_type, geometry)
    registers = Registers.make(q.element_type, geometry)
    row_sums = storage.row_sums.get_tensor(cute.make_layout((ROWS, 2)))
    row_range = storage.row_range.get_tensor(cute.make_layout(2))
    me, group = thread // WARPGROUP, Group(Barrier.CONSUMERS, CONSUMERS)
    add = functools.partial(add_partial, registers, results, tile, thread, geometry)
    parity = Int32(0)  # of this consumer's stage
    keyless = walk.line.empty
    if cutlass.const_expr(geometry.packed):
        keyless = walk.table[rows.keyless_place(walk.table)]
    walk.store_empty(results, keyless, of_tile, thread, CONSUMERS)
    split_index = SplitIndex(Int32(0), Int32(1))
    while walk.has_work(split):
        tiles = walk.tiles_of(split)
        first, end, _ = tiles
        block = walk.queries.block(split.request)
        following = split
        split_index = SplitIndex(Int32(0), Int32(1))
        is_cut = walk.announce(split, tiles, row_range, thread)
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        # Past it Q is complete, and both consumers are done with the split before.
        named_sync(Barrier.CONSUMERS, CONSUMERS)
        if first < end:
            unmasked = keys_of_all_rows(split.length, block.count, first_row, geometry)
            for consumer in cutlass.range_constexpr(2):
                if me == consumer:
                    lane, mask = thread - consumer * WARPGROUP, walk.queries.mask
                    w = Consumer.make(consumer, geometry, storage, q_tile, mask, lane, scale_log2, registers)
                    w.begin(first_row, split.length, block)
                    w.run(first, end, unmasked, split.length, parity)
            parity = parity ^ ((end - first + 1 - me) // STAGES & 1)
            following = walk.next_split(split)
            if me == EVEN and walk.has_work(following):
                # P1 has been read, or there is none: all scores are made, and nobody reads Q any more.
                rows.copy_query_rows(q, q_tile, walk.queries.block(following.request), of_tile, thread, WARPGROUP)
            if not walk.has_work(following):
                cute.arch.griddepcontrol_launch_dependents()
            for r in cutlass.range_constexpr(2):
                registers.row_sum[r] = softmax.quad_sum(registers.row_sum[r])
            place = walk.place_of(split, tiles)
            place = walk.merge_few(place, split, tiles, is_cut, add, group, thread)
            split_index, signal = place.split_index, walk.signal_of(place)
            epilogue(registers, row_sums, results, block, place, of_tile, tile, thread, geometry)
            named_sync(Barrier.CONSUMERS, CONSUMERS)
            walk.publish(signal, thread)
        else:
            rows.store_no_keys(results, block, of_tile, thread, CONSUMERS)
            following = walk.next_split(split)
            if thread < WARPGROUP and walk.has_work(following):
                rows.copy_query_rows(q, q_tile, walk.queries.block(following.request), of_tile, thread, WARPGROUP)
        split = following
    walk.end(results, split_index, split.request, row_range, group, thread, (8, 2))


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def flash_mla_v23(
    inputs: Inputs,
    results: Results,  # packed, lse is (first token, h, token behind it)
    flags: cute.Tensor,  # int32, global memory: 0 in front of a launch and behind it
    schedule: Schedule,
    scale_log2: Float32,
    pool: Pool,
    geometry: cutlass.Constexpr,
):
    """The CTA of a query tile (x) and worker (y, from the last one)."""
    q, page_table = inputs.q, inputs.page_table
    dtype = q.element_type
    thread, _, _ = cute.arch.thread_idx()
    tile, block, _ = cute.arch.block_idx()
    worker = pool.workers - 1 - block  # a worker waits for later ones (README.md), which this way are launched first
    lane = thread % 32
    row_tile, kv_head = tile % geometry.row_tiles, tile // geometry.row_tiles
    rank = row_tile % geometry.sharing
    first_row = row_tile * ROWS
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = SmemAllocator().allocate(shared_storage(geometry, dtype))
    q_tile = query_tile(storage, dtype, geometry)
    if warp == 0:
        with cute.arch.elect_one():
            make_barriers(storage.full.data_ptr(), storage.empty.data_ptr(), geometry)
        if cutlass.const_expr(geometry.box):
            cpasync.prefetch_descriptor(inputs.tma)
        cute.arch.mbarrier_init_fence()
    if cutlass.const_expr(geometry.sharing > 1):
        cute.arch.cluster_arrive_relaxed()
    elif warp < CONSUMERS // 32:
        named_arrive(Barrier.SETUP, THREADS)

    queries, of_tile = (
        rows.Queries(geometry.s, schedule.blocks, inputs.mask),
        rows.TileRows(kv_head, first_row, geometry.group, ROWS),
    )
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
        stage = (warp - CONSUMERS // 32) // 2  # of a producer
        entry = (at + stage) * TOKENS // geometry.page
        entry = cutlass.max(cutlass.min(entry, width - 1), 0)
        expected = cutlass.min(split.request, requests - 1)
        of_page = page_table[expected, None].iterator + entry
        wait_for_launch(of_page.toint())  # as above
        page = cute.make_tensor(of_page, cute.make_layout(1))[0]
        if warp < CONSUMERS // 32:
            rows.copy_query_rows(q, q_tile, queries.block(expected), of_tile, thread, CONSUMERS)
    walk, split = begin(
        schedule, flags, inputs.seq_lens, queries, pool, Cta(worker, tile, thread, warp, lane),
        storage.first.data_ptr(), CONSUMERS, geometry.merge,
    )  # fmt: skip
    if split.request != expected:
        entry = Int32(-1)
        if warp < CONSUMERS // 32 and walk.has_work(split):
            cute.arch.cp_async_wait_group(0)
            rows.copy_query_rows(q, q_tile, queries.block(split.request), of_tile, thread, CONSUMERS)
    if cutlass.const_expr(geometry.sharing > 1):
        cute.arch.cluster_wait()

    if warp >= CONSUMERS // 32:
        if cutlass.const_expr(geometry.sharing == 1):
            named_sync(Barrier.SETUP, THREADS)
        cute.arch.setmaxregister_decrease(geometry.registers[0])
        if cutlass.const_expr(geometry.boxes == 1):
            producer = warp - CONSUMERS // 32
            load(
                inputs, storage, walk, split, FirstPage(entry, page), kv_head, rank, producer // 2, producer % 2,
                geometry,
            )  # fmt: skip
        else:
            load_in_parts(inputs, storage, walk, split, kv_head, rank, warp - CONSUMERS // 32, geometry)
    else:
        cute.arch.setmaxregister_increase(geometry.registers[1])
        consume(q, storage, results, walk, split, scale_log2, of_tile, thread, geometry)


flash_mla_v23.set_name_prefix("flash_mla_v23", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: MlaProblem) -> Verdict:
    """Whether this version computes a problem."""
    if pd.k not in (256, 512):
        return Verdict.no(
            f"k = {pd.k} must be 256 or 512: each consumer owns half of the latent, an even number of panels"
        )
    if pd.p not in (0, PANEL // 2, PANEL):
        return Verdict.no(f"the rope part of p = {pd.p} columns must be 0, {PANEL // 2} or {PANEL}: one panel at most")
    return Verdict.yes()


@dataclass(frozen=True)
class FlashMlaV23Tiling(Tiling):
    """workers: how many, each of one CTA for each query tile of a request; 0: as many as fill the device. split_tokens:
    tokens of a split, a multiple of 64, so that a request's splits depend on nothing but its length; 0: the scheduler
    chooses. query_tokens: of packed queries, tokens of a block; 0: as many as two query tiles have rows for."""

    launch_fields: ClassVar[tuple[str, ...]] = ("workers", "split_tokens")

    workers: int = 0
    split_tokens: int = 0
    query_tokens: int = 0

    def geometry(self, pd: MlaProblem) -> Geometry:
        """What the code is made for, with everything chosen."""
        s = (self.query_tokens or max(1, 2 * ROWS // pd.group)) if pd.packed else pd.s
        causal = pd.causal and (pd.packed or s > 1)
        return Geometry(pd.h, pd.h_kv, s, pd.k, pd.p, pd.page_size, causal, pd.packed, pd.tree)

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        if STAGES != len((EVEN, ODD)):
            return Verdict.no(f"STAGES = {STAGES}, and the schedule is written for two: one for each consumer's tiles")
        if self.query_tokens < 0 or (self.query_tokens and not pd.packed):
            return Verdict.no(f"query_tokens = {self.query_tokens} is for packed queries only, and at least 0")
        if not 0 <= self.workers <= scheduler.MOST_WORKERS:
            return Verdict.no(f"workers = {self.workers} must be between 0 and {scheduler.MOST_WORKERS:,}")
        if self.split_tokens < 0 or self.split_tokens % TOKENS:
            return Verdict.no(f"split_tokens = {self.split_tokens} is not a multiple of {TOKENS}")
        if not (taken := takes(pd)):
            return taken
        geometry = self.geometry(pd)
        elements = geometry.panels * ROWS * PANEL + STAGES * geometry.stage_elements
        smem = 2048 + elements * pd.element_bytes
        if device is not None and smem > device.smem_per_block:
            return Verdict.no(
                f"{smem:,} bytes of shared memory for q and {STAGES} stages are over the {device.smem_per_block:,} "
                f"that a CTA of {device.key} may have"
            )
        if not (counted := limits.decode_sizes(pd)):
            return counted
        workers = self.workers or (max(1, device.num_sms // geometry.tiles) if device is not None else 1)
        requests = rows.most_blocks(pd.query_tokens, pd.b, geometry.s) if pd.packed else pd.b
        tokens, fixed = pd.max_pages * pd.page_size, self.split_tokens // TOKENS
        return decode_host.schedule_sizes(requests, tokens, workers, fixed, geometry.partials, geometry.costs)


class FlashMlaV23Plan(KernelPlan):
    """One compiled kernel a problem class; b, lengths, page table width, workers and split_tokens are arguments."""

    workload = decode.WORKLOAD
    tiling_type = FlashMlaV23Tiling
    tiling: FlashMlaV23Tiling
    uses = (
        "clusters-multicast", "dependent-launch", "device-tile-scheduler", "fast-exp2-softmax", "loading/page-wise-tma",
        "power-aware-tiling", "seesaw-schedule", "split-kv", "two-warpgroup-output",
    )  # fmt: skip
    requires = Requirement(
        archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma", "setmaxnreg"), problem=takes,
        options=("strided_pages", "packed", "tree", "strided", "strided_out"),
    )  # fmt: skip

    def default_tiling(self) -> Tiling:
        pd = self.problem
        if not pd.packed:
            return FlashMlaV23Tiling()
        # One query tile where the mean request fills no more: rows without a token cost as much as others.
        held = ROWS if pd.query_tokens * pd.group <= ROWS * pd.b else 2 * ROWS
        return FlashMlaV23Tiling(query_tokens=max(1, held // pd.group))

    def autotune_configs(self) -> list[Tiling]:
        return [self.default_tiling()]

    def workers(self) -> int:
        """Workers of a query tile: the tiling's, or those that fill the device."""
        return self.tiling.workers or max(1, host.target(self).num_sms // self.tiling.geometry(self.problem).tiles)

    @any_scale(0)
    def plan(self, *inputs: Any) -> CuteKernel:
        self.require()
        version = Version(flash_mla_v23, self.tiling.geometry(self.problem))
        fixed = self.tiling.split_tokens // TOKENS
        return decode_host.decode_kernel(self, "flash_mla_v23", version, inputs, self.workers(), fixed)

    def plan_empty(self) -> CuteKernel:
        self.require()
        version = Version(flash_mla_v23, self.tiling.geometry(self.problem))
        return decode_host.decode_kernel(self, "flash_mla_v23", version, (), 0, 0)
