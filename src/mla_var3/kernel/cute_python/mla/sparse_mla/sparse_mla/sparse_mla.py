r"""Sparse decode over a bf16 cache for Hopper (sm_90a), 64 heads of a query token a tile: persistent CTAs, rows
gathered by cp.async. Packed caches are version 2's.

    out[row, :] = softmax(scale · q[row] · Kᵀ) · V      K = the tokens that the row's indices name, V = K[:, :512]

A CTA keeps one place in a request: 64 heads of one of its query tokens. It goes through its worker's splits of the
batch, two KV tiles of 64 indices at a time; the tiles of an extra cache follow those of the first.

    producer   eight warps, each with eight rows of every tile: index -> row into L2, a pair of tiles ahead -> shared
               memory, half a stage (left or right V columns) at a time
    EVEN       S0 = Q·K0ᵀ of even tiles; O_L += P·V_L, output columns 0..255 in registers
    ODD        S1 = Q·K1ᵀ of odd tiles;  O_R += P·V_R, output columns 256..511

The consumers are half a pair of tiles out of phase, so that the softmax of one overlaps the products of the other:

    EVEN   softmax S0, P0 -> smem | O_L += P0·V0_L             | O_L += P1·V1_L             | S0' = Q·K0'ᵀ
    ODD    S1 = Q·K1ᵀ             | O_R += P0·V0_R, softmax S1 | O_R += P1·V1_R, P1 -> smem | S1' = Q·K1'ᵀ
    freed                         | 0L                0R       | 1R                      1L |

That schedule, the splits and their merging are those of dense decode (flash_mla, version 23), without its clusters. The
registers of 512 threads just do: products with V are made in instructions of 128 columns, as one of 256 does not
compile for 128 registers a thread.

An index that names no token is masked: its row becomes zeros, and a word a stage says which scores are -inf.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from mla_var3.device import Requirement
from mla_var3.kernel.cute_python import decode_host, host
from mla_var3.kernel.cute_python.prims import softmax, wgmma
from mla_var3.kernel.cute_python.prims.sync import named_arrive, named_sync, warp_arrive
from mla_var3.kernel.cute_python.prims.wgmma import WARPGROUP
from mla_var3.kernel.cute_python.split_kv import combine, partials, rows, scheduler
from mla_var3.kernel.cute_python.split_kv.partials import Partials, Results
from mla_var3.kernel.cute_python.split_kv.scheduler import Costs, Pool, Schedule, Split
from mla_var3.kernel.cute_python.split_kv.walk import Cta, Group, Place, begin
from mla_var3.packed_cache import VALUES
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.runtime.scaling import any_scale
from mla_var3.workload import sparse_decode

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.sparse_decode import SparseProblem

ROWS = 64  # of a query tile: one warpgroup MMA
TOKENS = 64  # of a KV tile
PANEL = 64  # columns: 128 bytes of bf16, one row of the shared memory swizzle
PANEL_ELEMENTS = TOKENS * PANEL
STAGES = 2  # one for EVEN's tiles, one for ODD's: the schedule is written for two, and another number skips tiles
CONSUMERS = 2 * WARPGROUP  # threads
THREADS = 4 * WARPGROUP
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 56, 200  # 128 · (2 · 56 + 2 · 200) = 65536, all of a multiprocessor's
EVEN, ODD = 0, 1
LEFT, RIGHT = 0, 1  # halves of a stage's V columns: EVEN's and ODD's
# Columns of a product with V: of 256, an instruction has more registers than a thread of 512 is compiled for.
OUTPUT_N = 128
PRODUCERS = 8  # warps
LINE = 128  # bytes, of L2
LANES = 4  # on the 64 columns of a row: two chunks of 16 bytes each
GROUP = 32 // LANES  # rows of a tile that a producer warp has
WORDS = TOKENS // GROUP  # that say of a tile which indices name a token: one for each warp's rows, four bits a row
# Half stages in the order in which consumers free them, and producers fill them.
FILLED = ((EVEN, LEFT), (EVEN, RIGHT), (ODD, RIGHT), (ODD, LEFT))
# Running maximum of a row that is only padding: its P is exp2(0 - PADDING) = 0. With the P of 1 that scores of 0 have,
# the product with V works on padding as on rows, which a chip at its power limit pays for in clock.
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
    SETUP = 8  # the CTA's mbarriers are made


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on: heads, query tokens, columns of a cached token, tokens of the caches' pages
    (extra_page: 0 where there is no extra cache), and which optional inputs there are."""

    h: int
    s: int
    columns: int
    page: int
    extra_page: int
    lengths: bool
    extra_lengths: bool
    sink: bool

    @property
    def k(self) -> int:
        """Columns of a value."""
        return VALUES

    @property
    def row_tiles(self) -> int:
        """Query tiles of a query token."""
        return -(-self.h // ROWS)

    @property
    def tiles(self) -> int:
        """Query tiles of a request."""
        return self.row_tiles * self.s

    @property
    def panels(self) -> int:
        """64-column panels of a cached token."""
        return self.columns // PANEL

    @property
    def row_bytes(self) -> int:
        """From one token of a page to the next."""
        return 2 * self.columns

    @property
    def p_panel(self) -> int:
        """The panel of a stage behind the latent's, for P: that of rope columns, once the scores of the stage are
        made."""
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
    def merge(self) -> combine.Merge:
        return combine.Merge(self.h, 1, self.s, self.partials, self.costs)

    @property
    def combines(self) -> bool:
        """Whether a combine may be launched: it takes query rows to lie behind each other in their tiles."""
        return self.s == 1 or self.h % ROWS == 0

    @property
    def costs(self) -> Costs:
        """In KV tiles, as dense decode's."""
        return Costs(tokens=TOKENS, overhead=3, combine=1, listed=2, level=3)


def shared_storage(geometry: Geometry, dtype: type) -> type:
    """The CTA's shared memory: up to 72 KiB of Q, two stages of 72 KiB, and under 2 KiB of barriers and row values."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.MemRange[kind, size]

    fields = {
        "full": array(Int64, 2 * STAGES),  # mbarriers, [stage][half]: panels are there
        "empty": array(Int64, 2 * STAGES),  # mbarriers, [stage][half]: panels are no longer read
        "first": array(Int32, scheduler.FIRST_WORDS),
        "valid": cute.struct.Align[array(Int32, WORDS * STAGES), 16],  # [stage]: which indices name a token
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
def make_barriers(full: cute.Pointer, empty: cute.Pointer):
    """One thread's work: `full` waits for the warps that fill half a stage, `empty` for those that read it."""
    for i in cutlass.range_constexpr(2 * STAGES):
        cute.arch.mbarrier_init(full + i, PRODUCERS)
        cute.arch.mbarrier_init(empty + i, WARPGROUP // 32)


class Cache(NamedTuple):
    """A cache and what says which of its tokens are attended to."""

    tokens: cute.Tensor  # (pages, page, columns) bf16, global memory; pages apart
    indices: cute.Tensor  # (b, s, topk) int32, global memory
    lengths: cute.Tensor | None  # (b,) int32, global memory


@cute.jit
def count_of(cache: cutlass.Constexpr, request: Int32) -> Int32:
    """Indices of a request that count."""
    count = Int32(cache.indices.shape[2])
    if cutlass.const_expr(cache.lengths is not None):
        count = cutlass.max(cutlass.min(count, cache.lengths[request]), 0)
    return count


class Pair(NamedTuple):
    """Two KV tiles as a producer's lane sees them. indices: of its row in each, as they are in memory (`read_pair`), or
    the cached token and -1 where none is named (`named`). tiles: how many there are, 0 to 2. Of each: is_extra: whether
    it is the extra cache's; left: indices from its first one on that count."""

    indices: tuple[Int32, ...]
    tiles: Int32
    is_extra: tuple[Boolean, ...]
    left: tuple[Int32, ...]


class Progress(NamedTuple):
    """Where a producer is: a split, and its tile."""

    split: Split
    tile: Int32
    end: Int32  # of the split's tiles


@cute.jit
def read_pair(caches: cutlass.Constexpr, place: Progress, token: Int32, row: Int32) -> Pair:
    """The pair of tiles at a place, and this lane's row of each. The tiles of the extra cache follow the first one's.
    Only loads, which nothing here waits for."""
    request, found, extras, left = place.split.request, [], [], []
    tiles = cutlass.min(cutlass.max(place.end - place.tile, 0), STAGES)
    if not scheduler.has_work(place.split):
        tiles, request = Int32(0), Int32(0)
    for stage in cutlass.range_constexpr(STAGES):
        number, count, is_extra = place.tile + stage, count_of(caches[0], request), Boolean(False)
        source = caches[0].indices[request, token, None].iterator
        if cutlass.const_expr(len(caches) > 1):
            of_first = scheduler.ceil_div(count, TOKENS)
            is_extra = number >= of_first
            behind = caches[1].indices[request, token, None].iterator
            number = cutlass.select_(is_extra, number - of_first, number)
            count = cutlass.select_(is_extra, count_of(caches[1], request), count)
            address = cutlass.select_(is_extra, behind.toint(), source.toint())
            source = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
        count = cutlass.select_(stage < tiles, count, Int32(0))
        at = cutlass.max(cutlass.min(number * TOKENS + row, count - 1), 0)
        found.append(cute.make_tensor(source + at, cute.make_layout(1))[0])
        extras.append(is_extra)
        left.append(count - number * TOKENS)
    return Pair(tuple(found), tiles, tuple(extras), tuple(left))


@cute.jit
def named(pair: Pair, caches: cutlass.Constexpr, row: Int32) -> Pair:
    """The pair with cached tokens for indices."""
    found = []
    for stage in cutlass.range_constexpr(STAGES):
        most = caches[0].tokens.shape[0] * caches[0].tokens.shape[1]
        if cutlass.const_expr(len(caches) > 1):
            extra = caches[1].tokens.shape[0] * caches[1].tokens.shape[1]
            most = cutlass.select_(pair.is_extra[stage], extra, most)
        index = pair.indices[stage]
        is_there = (row < pair.left[stage]) & (index >= 0) & (index < most)
        found.append(cutlass.select_(is_there, index, Int32(-1)))
    return Pair(tuple(found), pair.tiles, pair.is_extra, pair.left)


@cute.jit
def next_place(place: Progress, walk: cutlass.Constexpr) -> Progress:
    """The place of the pair behind one, perhaps of the worker's next split with tiles; by a whole warp."""
    split, tile, end = place.split, place.tile + STAGES, place.end
    searching = tile >= end
    while searching:
        split = walk.next_split(split)
        tile, end, _ = walk.tiles_of(split)
        searching = walk.has_work(split) & (tile >= end)
    return Progress(split, tile, end)


def page_address(cache: Cache, index: Int32) -> Int64:
    """Where the page of a cached token begins."""
    tokens = cache.tokens
    return tokens.iterator.toint() + Int64(index // tokens.shape[1]) * (
        tokens.stride[0] * (tokens.element_type.width // 8)
    )


def row_address(cache: Cache, index: Int32, geometry: Geometry) -> Int64:
    """Where a cached token's row begins."""
    return page_address(cache, index) + index % cache.tokens.shape[1] * geometry.row_bytes


def of_cache(caches: Any, is_extra: Boolean, address: Any, index: Int32, geometry: Geometry) -> Int64:
    """`address` of a token of the one cache or the other; of none, that of the first one's token 0."""
    at = [address(cache, cutlass.max(index, 0), geometry) for cache in caches]
    return at[0] if len(at) == 1 else cutlass.select_(is_extra, at[1], at[0])


@cute.jit
def prefetch(caches: cutlass.Constexpr, pair: Pair, geometry: cutlass.Constexpr):
    """Starts bringing the rows of a pair into L2: the four lanes of a row take its lines in turn."""
    column = cute.arch.lane_idx() % LANES
    for stage in cutlass.range_constexpr(STAGES):
        index, is_extra = pair.indices[stage], pair.is_extra[stage]
        if index >= 0:
            row = of_cache(caches, is_extra, row_address, index, geometry)
            for i in cutlass.range_constexpr(-(-geometry.row_bytes // (LINE * LANES))):
                # The last byte's line too, where a row does not begin with one.
                byte = cutlass.min((i * LANES + column) * LINE, geometry.row_bytes - 1)
                cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[row + byte])


def chunk_place(panel: cute.Pointer, row: Int32, chunk: Any) -> cute.Pointer:
    """Where 16 bytes of a panel's row lie: K-major with the 128-byte swizzle."""
    return (panel + cute.assume(row * PANEL + (chunk ^ (row % 8)) * 8, divby=8)).align(16)


@cute.jit
def copy_rows(
    caches: cutlass.Constexpr,
    is_extra: Boolean,
    index: Int32,  # of the lane's row
    stage: cute.Pointer,
    row: Int32,  # of the tile
    panels: cutlass.Constexpr,
    geometry: cutlass.Constexpr,
):
    """Starts copying a lane's columns of a row, two chunks of each panel (cp.async); where there is no token, zeros."""
    column = cute.arch.lane_idx() % LANES
    source = of_cache(caches, is_extra, row_address, index, geometry)
    filled = cutlass.select_(index >= 0, Int32(16), Int32(0))
    for i in cutlass.range_constexpr(len(panels)):
        for chunk in cutlass.range_constexpr(2):
            number = 2 * column + chunk
            target = chunk_place(stage + panels[i] * PANEL_ELEMENTS, row, number)
            cute.arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
                read_only_args=[target.toint(), source + (2 * PANEL * panels[i] + number * 16), filled],
            )


@cute.jit
def load(
    caches: cutlass.Constexpr,  # `Cache`, and perhaps the extra one
    storage: cutlass.Constexpr,
    walk: cutlass.Constexpr,  # `Walk`
    split: Split,
    token: Int32,  # of the request's query tokens
    warp: Int32,  # 0..PRODUCERS-1
    geometry: cutlass.Constexpr,
):
    """What a producer warp does, over all splits of the worker: eight rows of every half stage, in the order in which
    the consumers free them."""
    row = warp * GROUP + cute.arch.lane_idx() // LANES
    valid = storage.valid.get_tensor(cute.make_layout((WORDS, STAGES)))
    tile, end, _ = walk.tiles_of(split)
    place = Progress(split, tile, end)
    if walk.has_work(split) & (tile >= end):
        place = next_place(place, walk)
    pair = named(read_pair(caches, place, token, row), caches, row)
    parities = [Int32(1), Int32(1)]  # of the stages; the first pass finds them free
    place = next_place(place, walk)
    coming = read_pair(caches, place, token, row)
    while pair.tiles > 0:
        place = next_place(place, walk)
        further = read_pair(caches, place, token, row)
        for u in cutlass.range_constexpr(len(FILLED)):
            stage, half = FILLED[u]
            if cutlass.const_expr(u == 1):
                coming = named(coming, caches, row)
                prefetch(caches, coming, geometry)
            if pair.tiles > stage:
                own, index = storage.stages.data_ptr() + stage * geometry.stage_elements, pair.indices[stage]
                cute.arch.mbarrier_wait(storage.empty.data_ptr() + (2 * stage + half), parities[stage])
                if cutlass.const_expr(half == LEFT):
                    valid[warp, stage] = Int32(cute.arch.vote_ballot_sync(index >= 0))
                copy_rows(caches, pair.is_extra[stage], index, own, row, geometry.freed_by(stage, half), geometry)
                cute.arch.inline_ptx("cp.async.wait_all;")
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                warp_arrive(storage.full.data_ptr() + (2 * stage + half))
        parities[EVEN] = parities[EVEN] ^ 1
        if pair.tiles > ODD:
            parities[ODD] = parities[ODD] ^ 1
        pair, coming = coming, further


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
    mma_s: Any  # S = Q·Kᵀ;
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
    valid: Any  # (WORDS,) shared memory: which indices of the own stage name a token

    @classmethod
    def make(cls, me, geometry, storage, q_tile, thread, scale_log2, registers) -> Consumer:
        """Views of a thread's part. registers: `Registers`."""
        dtype, stages = q_tile.element_type, storage.stages.data_ptr()
        mma_s = wgmma.make_mma(dtype, TOKENS)
        mma_rs = wgmma.make_mma(dtype, OUTPUT_N, a_in_registers=True, b_major=OperandMajorMode.MN)
        mma_ss = wgmma.make_mma(dtype, OUTPUT_N, b_major=OperandMajorMode.MN)
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
            valid=storage.valid.get_tensor(cute.make_layout((WORDS, STAGES)))[None, me],
        )

    # -------------------------------------------------------------------------------------------- scores
    @cute.jit
    def issue_panel(self, panel: cutlass.Constexpr, zero_init: cutlass.Constexpr):
        """S (+)= Q·Kᵀ of one 64-column panel; commits it and waits for nothing."""
        wgmma.gemm_issue(self.mma_s, self.acc_s, self.frag_q, self.frag_k, wgmma.k_blocks((panel,)), zero_init)

    @cute.jit
    def even_scores(self, parity: Int32, drain: cutlass.Constexpr):
        """S0 = Q·K0ᵀ, in the order in which the halves are refilled; waits for S0. With `drain` the product with V1 is
        in flight: its half of the odd stage is freed as soon as that ends."""
        panels = (*self.geometry.freed_by(EVEN, EVEN), *self.geometry.freed_by(EVEN, ODD))
        for i in cutlass.range_constexpr(len(panels)):
            if cutlass.const_expr(i % self.geometry.half_panels == 0 and i < self.geometry.k // PANEL):
                half = LEFT if i == 0 else RIGHT
                cute.arch.mbarrier_wait(self.full + (2 * EVEN + half), parity)
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
            if cutlass.const_expr(i % self.geometry.half_panels == 0 and i < self.geometry.k // PANEL):
                half = RIGHT if i == 0 else LEFT
                cute.arch.mbarrier_wait(self.full + (2 * ODD + half), parity)
            self.issue_panel(panels[i], i == 0)
        named_arrive(Barrier.SCORES_ODD, CONSUMERS)

    @cute.jit
    def free(self, stage: cutlass.Constexpr):
        """This warp no longer reads its half of a stage."""
        warp_arrive(self.empty + (2 * stage + self.me))

    # -------------------------------------------------------------------------------------------- softmax
    @cute.jit
    def mask_scores(self):
        """Sets scores of indices that name no token to -inf. No branch around it: across one, ptxas waits for every
        product."""
        scores, words = wgmma.as_rows(self.acc_s), cute.make_rmem_tensor(WORDS, Int32)
        cute.autovec_copy(self.valid, words)
        for j in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            # Two columns of a row in each 8 x 8 block, whose eight rows of K are a word.
            is_there = words[j // 2] & ((1 << j % 2 * LANES) << self.thread % 4 * 2 * LANES)
            for r in cutlass.range_constexpr(2):
                scores[r, j] = cutlass.select_(is_there != 0, scores[r, j], -Float32.inf)

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
    def issue_values(self, mma: cute.TiledMma, p: cute.Tensor, stage: cutlass.Constexpr):
        """O += P·V of this consumer's half, in instructions of OUTPUT_N columns; commits it and waits for nothing."""
        blocks = self.geometry.half // OUTPUT_N
        layout = cute.make_layout(((2, 2, OUTPUT_N // 8), 1, blocks), stride=((1, 2, 4), 0, OUTPUT_N // 2))
        output = cute.make_tensor(self.acc_o.iterator, layout)
        wgmma.gemm_issue(mma, output, p, self.frag_v[stage], range(TOKENS // wgmma.MMA_K))

    # -------------------------------------------------------------------------------------------- steps
    @cute.jit
    def even_step(self, parity: Int32, more: cutlass.Constexpr):
        """EVEN's share of a pair of tiles; S0 is in acc_s. more: makes the next pair's S0."""
        self.mask_scores()
        if self.exceeds():
            factor = cute.make_rmem_tensor(2, Float32)
            self.move_max(factor)
            wgmma.scale_rows(self.acc_o, factor)
        self.exponentials()
        p = wgmma.to_dtype(self.acc_s, self.dtype)
        self.send_p(p)
        named_sync(Barrier.SCORES_ODD, CONSUMERS)
        # O_L += P0·V0_L
        self.issue_values(self.mma_rs, wgmma.as_a_operand(p), EVEN)
        warpgroup.wait_group(0)
        self.free(EVEN)
        named_sync(Barrier.P_ODD, CONSUMERS)
        self.follow_max()
        # O_L += P1·V1_L
        self.issue_values(self.mma_ss, self.frag_p, ODD)
        if cutlass.const_expr(more):
            self.even_scores(parity ^ 1, drain=True)
        else:
            warpgroup.wait_group(0)
            self.free(ODD)

    @cute.jit
    def odd_step(self, parity: Int32, more: cutlass.Constexpr):
        """ODD's share of a pair of tiles; nothing is in flight before or behind it."""
        self.issue_odd_scores(parity)
        # Behind the scores, so that the product runs under the softmax.
        named_sync(Barrier.P_EVEN, CONSUMERS)
        self.follow_max()
        # O_R += P0·V0_R
        self.issue_values(self.mma_ss, self.frag_p, EVEN)
        warpgroup.wait_group(1)  # S1
        self.mask_scores()
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
        self.issue_values(self.mma_rs, wgmma.as_a_operand(p), ODD)
        self.send_p(p)
        warpgroup.wait_group(0)
        self.free(ODD)

    @cute.jit
    def last_tile(self):
        """A tile without a partner: EVEN has made its scores, and both multiply their half of its V."""
        if cutlass.const_expr(self.me == EVEN):
            self.mask_scores()
            if self.exceeds():
                factor = cute.make_rmem_tensor(2, Float32)
                self.move_max(factor)
                wgmma.scale_rows(self.acc_o, factor)
            self.exponentials()
            p = wgmma.to_dtype(self.acc_s, self.dtype)
            self.send_p(p)
            # O_L += P0·V0_L
            self.issue_values(self.mma_rs, wgmma.as_a_operand(p), EVEN)
            # As often as ODD waits below: racecheck follows barriers of all only where both have waited as often.
            for _ in cutlass.range_constexpr(2):
                named_sync(Barrier.EVEN, WARPGROUP)
            warpgroup.wait_group(0)
            self.free(EVEN)
        else:
            named_sync(Barrier.SCORES_EVEN, CONSUMERS)
            named_sync(Barrier.P_EVEN, CONSUMERS)
            self.follow_max()
            # O_R += P0·V0_R
            self.issue_values(self.mma_ss, self.frag_p, EVEN)
            warpgroup.wait_group(0)
            self.free(EVEN)

    @cute.jit
    def begin(self, first_row: Int32):
        """What a split begins with: no keys."""
        shared_max = self.shared_max
        self.acc_o.fill(0.0)
        for r in cutlass.range_constexpr(2):
            row = first_row + wgmma.acc_row(self.thread, r)
            self.row_max[r] = first_maximum(row, self.geometry)
            if cutlass.const_expr(self.me == EVEN):
                # ODD reads it behind P0.
                if self.thread % 4 == 0:
                    shared_max[wgmma.acc_row(self.thread, r)] = self.row_max[r]
        self.row_sum.fill(0.0)

    @cute.jit
    def run(self, first: Int32, end: Int32, parity: Int32):
        """Tiles first..end-1 of a split, in pairs and perhaps a last one. parity: of this consumer's first tile."""
        last = first + (end - 1 - first) // STAGES * STAGES  # tile with which the last step begins
        step = self.even_step if cutlass.const_expr(self.me == EVEN) else self.odd_step
        if cutlass.const_expr(self.me == EVEN):
            self.even_scores(parity, drain=False)
        for _ in cutlass.range(first, last, STAGES, unroll=1):
            step(parity, more=True)
            parity = parity ^ 1
        if last + 1 == end:
            self.last_tile()
        else:
            step(parity, more=False)


@cute.jit
def first_maximum(row: Int32, geometry: cutlass.Constexpr) -> Float32:
    """What the running maximum of a row begins with."""
    if cutlass.const_expr(geometry.h % ROWS == 0):
        return Float32(softmax.NO_KEY)
    return Float32(cutlass.select_(row < geometry.h, Float32(softmax.NO_KEY), Float32(PADDING)))


@dataclass(frozen=True, eq=False)
class Token:
    """Query token `token` of every request, as `split_kv.rows` has blocks of them; q, out and lse are those of b · s
    requests of one token."""

    token: Int32
    s: int

    def block(self, request: Int32) -> rows.Block:
        return rows.Block(request * self.s + self.token, 1, request)


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
    sink: cute.Tensor | None,  # (h,) fp32, global memory: a logit more in a head's softmax
    token: Int32,  # the query token, of all requests
    place: Place,  # where the results go
    tile: Int32,  # query tile of the request
    first_row: Int32,
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
):
    """Divides whole results by their row sums, the sink's share among them, or scales a partial one
    (`split_kv.partials`), and writes this consumer's half of the rows, 16 bytes a thread. The same code for both
    consumers: what runs once a split is fetched from L2."""
    acc_o, row_max, row_sum = registers
    out, lse, outputs, stats = results
    slot, whole = place.slot, place.whole
    layout = geometry.partials
    me, lane = thread // WARPGROUP, thread % WARPGROUP
    words = cute.make_rmem_tensor(cute.size(acc_o) // 2, Int32)  # pairs of columns: (row, 4 of a vector, vectors)
    factor = cute.make_rmem_tensor(2, Float32)
    bases = cute.make_rmem_tensor(2, Int64)  # where the thread's rows begin
    if whole:
        for r in cutlass.range_constexpr(2):
            if thread % 4 == 0:
                row_sums[wgmma.acc_row(lane, r), me] = row_sum[r]
        named_sync(Barrier.CONSUMERS, CONSUMERS)
        for r in cutlass.range_constexpr(2):
            row = first_row + wgmma.acc_row(lane, r)
            head = cutlass.min(row, geometry.h - 1)
            total = row_sum[r] + row_sums[wgmma.acc_row(lane, r), 1 - me]
            over = total
            if cutlass.const_expr(geometry.sink):
                over = total + softmax.exp2(sink[head] * math.log2(math.e) - row_max[r])
            factor[r] = cutlass.select_(total > 0.0, 1.0 / over, Float32(0.0))
            bases[r] = out.iterator.toint() + 2 * rows.row_offset(out, token, Int32(0), head, geometry.h)
            if thread % 4 == 0 and me == 0 and row < geometry.h:
                lse[token, head, 0] = softmax.natural_lse(total, row_max[r])
        wgmma.scale_rows(acc_o, factor)
        words.store(cute.recast_tensor(wgmma.to_dtype(acc_o, out.element_type), Int32).load().reshape(words.shape))
    else:
        for r in cutlass.range_constexpr(2):
            exponent = partials.exponent_of(row_magnitude(acc_o, r))
            factor[r] = partials.power_of_two(partials.TARGET_EXPONENT - exponent)
            index = layout.row(slot, tile, wgmma.acc_row(lane, r))
            bases[r] = outputs.iterator.toint() + 2 * (index * layout.columns)
            if thread % 4 == 0:
                partials.store_stats(layout.stats(stats.iterator, index), me, row_max[r], row_sum[r], exponent)
        wgmma.scale_rows(acc_o, factor)
        words.store(cute.recast_tensor(wgmma.to_dtype(acc_o, Float16), Int32).load().reshape(words.shape))
    for r in cutlass.range_constexpr(2):
        inside = first_row + wgmma.acc_row(lane, r) < geometry.h
        base = bases[r] + Int64(me * (2 * geometry.half) + lane % 4 * 16)
        for v in cutlass.range_constexpr(geometry.half // 32):
            vector = cute.make_rmem_tensor(4, Int32)
            for g in cutlass.range_constexpr(4):
                vector[g] = words[r + 2 * (4 * v + g)]
            if whole:
                partials.transpose_quad(vector, lane)
            address = cute.make_ptr(Int32, base + 64 * v, cute.AddressSpace.gmem, assumed_align=16)
            partials.store_vector(vector, address, inside)


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
class Scales(NamedTuple):
    """sink: (h,) fp32, global memory, or None: a logit more in a head's softmax. scale_log2: log2 e times the softmax's
    scale."""

    sink: cute.Tensor | None
    scale_log2: Float32


@cute.jit
def consume(
    q: cute.Tensor,
    storage: cutlass.Constexpr,
    results: Results,
    scales: cutlass.Constexpr,  # `Scales`
    walk: cutlass.Constexpr,  # `Walk`
    split: Split,
    of_tile: cutlass.Constexpr,  # `rows.TileRows`
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
):
    """What the consumers do, over all splits of the worker. The copy of the first one's query rows has been issued."""
    first_row, tile = of_tile.first_row, walk.tile
    q_tile = query_tile(storage, q.element_type, geometry)
    registers = Registers.make(q.element_type, geometry)
    row_sums = storage.row_sums.get_tensor(cute.make_layout((ROWS, 2)))
    me, group = thread // WARPGROUP, Group(Barrier.CONSUMERS, CONSUMERS)
    add = functools.partial(add_partial, registers, results, tile, thread, geometry)
    parity = Int32(0)  # of this consumer's stage
    walk.store_empty(results, walk.line.empty, of_tile, thread, CONSUMERS)
    while walk.has_work(split):
        tiles = walk.tiles_of(split)
        first, end, _ = tiles
        block = walk.queries.block(split.request)
        following = split
        walk.list_splits(split, tiles, thread)
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        # Past it Q is complete, and both consumers are done with the split before.
        named_sync(Barrier.CONSUMERS, CONSUMERS)
        if first < end:
            for consumer in cutlass.range_constexpr(2):
                if me == consumer:
                    lane = thread - consumer * WARPGROUP
                    w = Consumer.make(consumer, geometry, storage, q_tile, lane, scales.scale_log2, registers)
                    w.begin(first_row)
                    w.run(first, end, parity)
                    following = walk.next_split(split)
                    if cutlass.const_expr(consumer == EVEN):
                        # P1 has been read, or there is none: all scores are made, and nobody reads Q any more.
                        if walk.has_work(following):
                            of_next = walk.queries.block(following.request)
                            rows.copy_query_rows(q, q_tile, of_next, of_tile, lane, WARPGROUP)
            parity = parity ^ ((end - first + 1 - me) // STAGES & 1)
            if not walk.has_work(following):
                cute.arch.griddepcontrol_launch_dependents()
            for r in cutlass.range_constexpr(2):
                registers.row_sum[r] = softmax.quad_sum(registers.row_sum[r])
            place = walk.place_of(split, tiles)
            place = walk.merge_all(place, split, tiles, add, group, thread)
            epilogue(registers, row_sums, results, scales.sink, block.first, place, tile, first_row, thread, geometry)
            named_sync(Barrier.CONSUMERS, CONSUMERS)
            walk.publish_all(split, tiles, thread)
        else:
            rows.store_no_keys(results, block, of_tile, thread, CONSUMERS)
            following = walk.next_split(split)
            if thread < WARPGROUP and walk.has_work(following):
                rows.copy_query_rows(q, q_tile, walk.queries.block(following.request), of_tile, thread, WARPGROUP)
        split = following


# ------------------------------------------------------------------------------------------------ device: the kernels
@cute.kernel
def sparse_mla(
    q: cute.Tensor,  # (b · s, 1, h, columns) bf16, global memory, columns contiguous
    caches: cutlass.Constexpr | tuple[Cache, ...],  # the cache, and perhaps the extra one
    lengths: cute.Tensor,  # (b,) int32, global memory: 64 for each tile of a request's indices
    sink: cute.Tensor | None,  # (h,) fp32, global memory
    results: Results,  # out (b · s, 1, h, 512), lse (b · s, h, 1)
    flags: cute.Tensor,  # int32, global memory: 0 in front of a launch and behind it
    schedule: Schedule,
    scale_log2: Float32,
    pool: Pool,
    geometry: cutlass.Constexpr,
):
    """The CTA of a query tile (x) and worker (y, from the last one)."""
    dtype = q.element_type
    thread, _, _ = cute.arch.thread_idx()
    tile, block, _ = cute.arch.block_idx()
    worker = pool.workers - 1 - block  # a worker waits for later ones (README.md), which this way are launched first
    lane = thread % 32
    token, first_row = tile // geometry.row_tiles, tile % geometry.row_tiles * ROWS
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = SmemAllocator().allocate(shared_storage(geometry, dtype))
    q_tile = query_tile(storage, dtype, geometry)
    if warp == 0:
        with cute.arch.elect_one():
            make_barriers(storage.full.data_ptr(), storage.empty.data_ptr())
        cute.arch.mbarrier_init_fence()
    queries, of_tile = Token(token, geometry.s), rows.TileRows(Int32(0), first_row, geometry.h, ROWS)
    # Nothing that a kernel before may have written is read, and nothing is written, ahead of this.
    cute.arch.griddepcontrol_wait()
    walk, split = begin(
        schedule, flags, lengths, queries, pool, Cta(worker, tile, thread, warp, lane), storage.first.data_ptr(),
        CONSUMERS, geometry.merge,
    )  # fmt: skip
    if warp < CONSUMERS // 32 and walk.has_work(split):
        rows.copy_query_rows(q, q_tile, queries.block(split.request), of_tile, thread, CONSUMERS)
    named_sync(Barrier.SETUP, THREADS)
    if warp >= CONSUMERS // 32:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        load(caches, storage, walk, split, token, warp - CONSUMERS // 32, geometry)
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        consume(q, storage, results, Scales(sink, scale_log2), walk, split, of_tile, thread, geometry)


sparse_mla.set_name_prefix("sparse_mla", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.kernel
def add_lengths(lengths: cute.Tensor, caches: tuple[Cache, ...]):
    """lengths: (b,) int32, global memory: 64 for each tile of a request's indices of both caches; one CTA."""
    thread, _, _ = cute.arch.thread_idx()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    for request in cutlass.range(thread, lengths.shape[0], CONSUMERS, unroll=1):
        tiles = Int32(0)
        for cache in caches:
            tiles = tiles + scheduler.ceil_div(count_of(cache, request), TOKENS)
        lengths[request] = tiles * TOKENS


add_lengths.set_name_prefix("add_lengths", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_sparse_mla(
    q: cute.Tensor,  # (b, s, h, columns) bf16, columns contiguous, as are those of out and of indices
    cache: cute.Tensor,  # (pages, page, columns) bf16, contiguous within a page
    indices: cute.Tensor,  # (b, s, topk) int32
    cache_lengths: cute.Tensor | None,  # (b,) int32
    extra_cache: cute.Tensor | None,
    extra_indices: cute.Tensor | None,
    extra_lengths: cute.Tensor | None,
    lengths: cute.Tensor,  # (b,) int32: 64 for each tile of a request's indices; written where it depends on lengths
    sink: cute.Tensor | None,
    out: cute.Tensor,  # (b, s, h, 512) bf16
    lse: cute.Tensor,  # (b, h, s) fp32
    of_partials: cute.Tensor,  # `Partials.views`
    flags: cute.Tensor,
    words: cute.Tensor,  # `scheduler.schedule_in`
    scale: Float32,
    workers: Int32,
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Launches a CTA for each query tile and worker, as a programmatic dependent."""
    b = q.shape[0]
    caches = (Cache(cache, indices, cache_lengths),)
    if cutlass.const_expr(geometry.extra_page > 0):
        caches = (*caches, Cache(extra_cache, extra_indices, extra_lengths))
    tokens = Int32(0)
    for each in caches:
        tokens = tokens + scheduler.ceil_div(each.indices.shape[2], TOKENS) * TOKENS
    if cutlass.const_expr(geometry.extra_page > 0 and (geometry.lengths or geometry.extra_lengths)):
        add_lengths(lengths, caches).launch(grid=(1, 1, 1), block=(CONSUMERS, 1, 1), stream=stream, use_pdl=True)

    of_lse = rows.lse_by_token(lse, b)
    schedule = scheduler.schedule_in(words, workers, False)
    results = Results(rows.by_token(out, b), of_lse, *geometry.partials.views(of_partials))
    if cutlass.const_expr(geometry.combines):
        pool = scheduler.make_pool(b, tokens, workers, Int32(0), Int32(scheduler.OWN), geometry.costs)
    else:
        pool = scheduler.make_merged_pool(b, tokens, workers, geometry.costs)
    sparse_mla(
        rows.by_token(q, b), caches, lengths, sink, results, flags, schedule, scale * math.log2(math.e), pool, geometry
    ).launch(
        grid=(geometry.tiles, workers, 1),
        block=(THREADS, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )  # fmt: skip
    if cutlass.const_expr(geometry.combines):
        of_token = Results(out, lse, results.outputs, results.stats)
        ctas = 2 * workers * geometry.tiles
        combine.launch(of_token, schedule.table, lengths, None, pool, ctas, geometry.merge, stream, sink)


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: SparseProblem) -> Verdict:
    """Whether this version computes a problem."""
    if pd.layout != "bf16":
        return Verdict.no(f"layout {pd.layout} is packed: use sparse_mla_v2")
    return Verdict.yes()


@dataclass(frozen=True)
class SparseMlaTiling(Tiling):
    """workers: CTAs for each query tile of a request; 0: as many as fill the device."""

    launch_fields: ClassVar[tuple[str, ...]] = ("workers",)

    workers: int = 0

    def geometry(self, pd: SparseProblem) -> Geometry:
        """What the code is made for."""
        return Geometry(pd.h, pd.s, pd.columns, pd.page, pd.extra_page, pd.lengths, pd.extra_lengths, pd.sink)

    def validate(self, pd: SparseProblem, device: Device | None = None) -> Verdict:
        if STAGES != len((EVEN, ODD)):
            return Verdict.no(f"STAGES = {STAGES}, and the schedule is written for two: one for each consumer's tiles")
        if not 0 <= self.workers <= scheduler.MOST_WORKERS:
            return Verdict.no(f"workers = {self.workers} must be between 0 and {scheduler.MOST_WORKERS:,}")
        geometry = self.geometry(pd)
        smem = 2048 + 2 * (geometry.panels * ROWS * PANEL + STAGES * geometry.stage_elements)
        if device is not None and smem > device.smem_per_block:
            return Verdict.no(
                f"{smem:,} bytes of shared memory for q and {STAGES} stages are over the {device.smem_per_block:,} "
                f"that a CTA of {device.key} may have"
            )
        if device is not None and geometry.tiles > device.num_sms:
            return Verdict.no(
                f"{geometry.tiles} query tiles of a request are more than the {device.num_sms} multiprocessors of "
                f"{device.key}: workers wait for each other and must all be running"
            )
        if not (counted := limits.sparse_sizes(pd)):
            return counted
        workers = self.workers or (max(1, device.num_sms // geometry.tiles) if device is not None else 1)
        tokens = sum(-(-each // TOKENS) * TOKENS for each in (pd.topk, pd.extra))
        return decode_host.schedule_sizes(pd.b, tokens, workers, 0, geometry.partials, geometry.costs)


class SparseMlaPlan(KernelPlan):
    """One compiled kernel a problem class; b, numbers of tokens and indices, and workers are arguments."""

    workload = sparse_decode.WORKLOAD
    tiling_type = SparseMlaTiling
    tiling: SparseMlaTiling
    requires = Requirement(
        archs=("sm_90a",), dtypes=("bf16",), features=("wgmma", "setmaxnreg"), problem=takes,
        options=("strided", "strided_out"),
    )  # fmt: skip

    def default_tiling(self) -> Tiling:
        return SparseMlaTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [self.default_tiling()]

    def workers(self) -> int:
        """Workers of a query tile: the tiling's, or those that fill the device."""
        return self.tiling.workers or max(1, host.target(self).num_sms // self.tiling.geometry(self.problem).tiles)

    @any_scale(0)
    def plan(self, *inputs: Any) -> CuteKernel:
        import torch

        self.require()
        pd, geometry, workers = self.problem, self.tiling.geometry(self.problem), self.workers()
        given = sparse_decode.named(pd, *inputs)
        q = given["q"]
        b = q.shape[0]
        outputs = sparse_decode.new_outputs(pd, q)
        parts = [
            [given.get(f"{prefix}{name}") for name in ("cache", "indices", "lengths")] for prefix in ("", "extra_")
        ]
        if pd.lengths and not pd.extra:
            lengths = given["lengths"]
        else:
            tiles = sum(-(-part[1].shape[2] // TOKENS) for part in parts if part[1] is not None)
            lengths = torch.full((b,), tiles * TOKENS, dtype=torch.int32, device=q.device)
        spaces = decode_host.workspaces(q, geometry.partials, b, workers)
        arguments = (q, *parts[0], *parts[1], lengths, given.get("sink"), *outputs, *spaces, pd.scale, workers)
        return self._make(arguments, inputs, outputs, (*spaces, lengths))

    def plan_empty(self) -> CuteKernel:
        self.require()
        return self._make((), (), ())

    def _make(self, given: Any, inputs: Any, outputs: Any, workspaces: Any = ()) -> CuteKernel:
        pd, geometry = self.problem, self.tiling.geometry(self.problem)

        def cache(page: int) -> Any:
            kind, row, apart = host.element_type(pd.dtype), pd.columns, cute.sym_int64(divisibility=8)
            return make_fake_tensor(kind, (*host.symbols(1), page, row), (apart, row, 1), assumed_align=16)

        fake = decode_host.fake_apart if pd.strided else host.fake

        def indices(b: Any) -> Any:
            return fake(Int32, b, pd.s, *host.symbols(1), align=4)

        def arguments() -> tuple[Any, ...]:
            (b,) = host.symbols(1)
            extra = pd.extra > 0
            kind = host.element_type(pd.dtype)
            return (
                fake(kind, b, pd.s, pd.h, pd.columns),
                cache(pd.page),
                indices(b),
                host.fake(Int32, b, align=4) if pd.lengths else None,
                cache(pd.extra_page) if extra else None,
                indices(b) if extra else None,
                host.fake(Int32, b, align=4) if pd.extra_lengths else None,
                host.fake(Int32, b, align=4),
                host.fake(Float32, pd.h, align=4) if pd.sink else None,
                *decode_host.fake_results(kind, (b, pd.s, pd.h, VALUES), (b, pd.h, pd.s), pd.strided_out),
                *decode_host.fake_workspaces(),
                Float32(1.0),
                Int32(1),
                geometry,
            )

        return host.stage(
            self, sparse_mla, launch_sparse_mla, "sparse_mla", arguments, given, inputs, outputs, workspaces
        )
