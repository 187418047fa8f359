r"""Decode over packed FP8 caches for Hopper (sm_90a), by indices: a cluster of two CTAs shares the columns of a token.

    Sᵀ (64 tokens x 2n) = K · Qᵀ     softmax down the columns     Oᵀ (512 x 2n) += Vᵀ · P       2n = 16 to 96 heads

Version 2 gives a query token of more than 64 heads to several CTAs, each of which reads and widens all columns of every
token it attends to, for its own heads. Here two CTAs form a cluster for all 2n heads. CTA r has the values' columns
256 r to 256 r + 255, and half of the rope columns. It reads only these, 336 bytes of a token's 656, and multiplies them
with the queries of all 2n heads. So the bytes from L2, the conversions of codes and the number of matrix instructions
are half as many as with two CTAs of n heads, and each matrix instruction is twice as wide. In return the CTAs exchange
two things for each KV tile, through distributed shared memory:

    scores          CTA r makes the softmax of heads n r to n r + n - 1. Each CTA has the sums over its columns for all
                    heads, and sends the other one those of its heads (`send_scores`: 4 n bytes a token), to be added
    probabilities   each CTA sends P of its heads, and their running maximum (`send_p`: 2 n bytes a token), since
                    products with values need those of all heads

Inside a CTA two consumers take turns, as in version 2: one has the softmax of even tiles, one that of odd tiles, and
each has 128 columns of the outputs, of all tiles. What one waits for was sent at least a quarter of its round before:

    EVEN   S2ᵀ → sums of others' heads | Oᵀ += V0ᵀ·P0 | softmax S2, P2 → both CTAs | Oᵀ += V1ᵀ·P1 | S4ᵀ ..
    ODD    softmax S1, P1 → both CTAs | Oᵀ += V0ᵀ·P0 | S3ᵀ → sums of others' heads | Oᵀ += V1ᵀ·P1 | softmax S3 ..

The columns of Oᵀ, of P and of Sᵀ are heads in the order of the CTA: its own n first, then the other's (`head_of`).

    mbarrier       arrives                                   waits
    full           producers, bytes of a tile                consumers of this CTA
    empty          consumers, once the tile is multiplied    producers of this CTA
    scores_full    the other CTA's sums, by parity           the consumer that makes the softmax
    max_full       running maxima of own heads, by parity    the other consumer of this CTA, for the next tile's
    p_full         P of both CTAs, by parity                 both consumers
    p_free         consumers of both CTAs: P is multiplied   who makes the next P of that parity; results on their way
    sums_full      the other CTA's sums of P, once a split   both consumers

Every wait is for something that an earlier tile, or an earlier step of the same tile, brings: the sums of tile t need
its load, which needs that tile t - stages is multiplied; the softmax of t needs those sums of both CTAs, the maximum of
t - 1 and that tile t - 2 is multiplied by all; products with tile t need P of t. Sums of tile t + 2 are sent behind the
wait for P of t (`run`): then their place is free, since whoever made P had read it. Both CTAs belong to one worker, so
they go through the same tiles. A cluster meets before its first exchange and behind its last one.

How codes become A operands, what happens to scales and to rows that no index names, is version 2's. Only layout v32 is
there, with indices, without lengths, and workers merge the splits that requests are cut into.
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
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cute_python import decode_host, host
from mla_var3.kernel.cute_python.prims import paged, softmax, wgmma
from mla_var3.kernel.cute_python.prims.sync import named_sync, warp_arrive
from mla_var3.kernel.cute_python.prims.wgmma import MMA_K, WARPGROUP
from mla_var3.kernel.cute_python.split_kv import combine, partials, rows, scheduler
from mla_var3.kernel.cute_python.split_kv.partials import Partials, Results
from mla_var3.kernel.cute_python.split_kv.scheduler import Costs, Pool, Schedule, Split
from mla_var3.kernel.cute_python.split_kv.walk import Cta, Group, Place, Tiles, begin_filled
from mla_var3.packed_cache import VALUES, layout_of
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.workload import sparse_decode

if TYPE_CHECKING:
    from mla_var3.workload.sparse_decode import SparseProblem

CTAS = 2  # of a cluster
HEADS = tuple(range(8, 49, 8))  # of a CTA's softmax: twice as many are the N side of an MMA, up to what registers hold
TOKENS = 64  # of a KV tile
PANEL = 64  # columns
CONSUMERS = 2
CONSUMER_THREADS = CONSUMERS * WARPGROUP
WARPS = WARPGROUP // 32
PRODUCERS = 4  # warps
THREADS = CONSUMER_THREADS + 32 * PRODUCERS
REGISTERS = (24, 240)  # of a producer's thread and a consumer's: one and two times these are three times 168
ROWS = TOKENS // PRODUCERS  # of a tile, of each producer warp; two lanes each
EVEN, ODD = 0, 1
OWN, PEER = 0, 1  # heads of this CTA, and of the other one
V32 = layout_of("v32")
ROW_BYTES = V32.token_bytes  # of a token in the cache: codes, four float32 scales, rope columns in bf16
COLUMNS = VALUES // CTAS  # codes of a token that a CTA has,
ROPE = V32.plain // CTAS  # and columns in bf16
SCALES, SCALE_BYTES = V32.scales, V32.scales * V32.scale_bytes
PLAIN_START = COLUMNS + SCALE_BYTES  # in a row of shared memory: codes, all scales, half of the rope
STRIDE = PLAIN_START + 2 * ROPE  # of such rows: an odd multiple of 16, so that eight rows lie in different banks
PANELS = COLUMNS // PANEL  # of codes, of a CTA
HALF_PANELS = PANELS // CONSUMERS  # of V, of one consumer
GROUPS = SCALES // CTAS  # factors of a token that a CTA's codes are multiplied with; one for each consumer's values
QUERY_PANELS = PANELS + 1  # the last one is the rope
MOST_STAGES = 8
BLOCKS = 2  # k blocks of 16 that are widened and multiplied together: half a panel of keys, 32 tokens of one of V
AHEAD = 2  # of which bytes are on the way into registers in front of the one that is widened
# Exponents of a token's scales are cut off there. Below, its bf16 columns times 2^-e would leave bf16's range.
LEAST_EXPONENT, MOST_EXPONENT = -60, 126
PANEL_WORDS = PANEL // 2  # of a row of results, in a panel
QUERY_EXPONENT = 14  # of the largest element of a query tile in fp16
MISC_BYTES = 2048  # of shared memory: barriers and alignment, rounded up


class Barrier(IntEnum):
    """Named barriers."""

    CTA = 0
    CONSUMERS = 1
    EVEN = 2  # the warps of one consumer
    ODD = 3


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on: heads, those of a CTA's softmax (n), query tokens, tokens of a page, and whether
    there are attention sinks."""

    h: int
    n: int
    s: int
    page: int
    sink: bool

    @property
    def both(self) -> int:
        """Heads of a cluster."""
        return CTAS * self.n

    @property
    def row_tiles(self) -> int:
        """Clusters of a query token."""
        return self.h // self.both

    @property
    def tiles(self) -> int:
        """CTAs of a request."""
        return CTAS * self.row_tiles * self.s

    @property
    def score_bytes(self) -> int:
        """Of a tile, from one CTA to the other: a float32 for each token and head."""
        return 4 * TOKENS * self.n

    @property
    def p_bytes(self) -> int:
        """Of a tile, from one CTA to the other."""
        return 2 * TOKENS * self.n

    @property
    def max_words(self) -> int:
        """float32 of the running maxima of a CTA's heads, behind which stands how often they have moved."""
        return self.n + 4

    @property
    def stages(self) -> int:
        """Tiles in shared memory."""
        taken = MISC_BYTES + 2 * self.both * PANEL * QUERY_PANELS + CONSUMERS * (self.score_bytes + CTAS * self.p_bytes)
        exchanges = CONSUMERS * WARPS * (self.n + 2 * self.both) + CONSUMERS * CTAS * self.max_words + 2 * self.both
        free = Device.assumed().smem_per_block - taken - 4 * exchanges
        return min(free // (TOKENS * (STRIDE + 2 * GROUPS)), MOST_STAGES)

    @property
    def pairs(self) -> int:
        """Columns of the accumulators that a thread holds, half of them: it holds two that lie next to each other."""
        return self.both // 8

    @property
    def partials(self) -> Partials:
        """Of a CTA: all heads of its cluster, in its order, and its columns."""
        return Partials(self.tiles, self.both, COLUMNS)

    @property
    def merge(self) -> combine.Merge:
        """What the walk knows of partials. No combine is launched."""
        return combine.Merge(self.h, 1, self.s, self.partials, self.costs)

    @property
    def costs(self) -> Costs:
        """In KV tiles, as version 2's."""
        return Costs(tokens=TOKENS, overhead=3, combine=1, listed=2, level=3)


def shared_storage(geometry: Geometry) -> type:
    """The CTA's shared memory."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.MemRange[kind, size]

    n, both, stages = geometry.n, geometry.both, geometry.stages
    fields = {
        "full": array(Int64, stages),  # mbarriers: see the module
        "empty": array(Int64, stages),
        "query_full": array(Int64, 1),
        "query_empty": array(Int64, 1),
        "scores_full": array(Int64, CONSUMERS),
        "max_full": array(Int64, CONSUMERS),
        "p_full": array(Int64, CONSUMERS),
        "p_free": array(Int64, CONSUMERS),
        "sums_full": array(Int64, 1),
        "valid": array(Int32, PRODUCERS * stages),  # [stage]: which indices name a token, two bits a row
        "largest": array(Int32, CONSUMERS * WARPS),  # of the query, of each warp
        "tokens": array(Int32, CONSUMERS * WARPS),  # not 0: rows of a warp's, in a split, name tokens
        "exchange": cute.struct.Align[array(Float32, CONSUMERS * WARPS * n), 16],  # maxima, then sums of P
        "magnitudes": cute.struct.Align[array(Float32, CONSUMERS * WARPS * both), 16],
        "maxima": cute.struct.Align[array(Float32, CONSUMERS * WARPS * both), 16],  # that outputs of a warp stand at
        "shared_max": cute.struct.Align[array(Float32, CONSUMERS * CTAS * geometry.max_words), 16],  # that P stands at
        "sums": cute.struct.Align[array(Float32, CONSUMERS * n), 16],  # the other CTA's, of both consumers
        "sinks": array(Float32, both if geometry.sink else 1),  # of the heads, times log2 e
        "factors": cute.struct.Align[array(Float16, stages * GROUPS * TOKENS), 16],
        "query": cute.struct.Align[array(Float16, both * PANEL * QUERY_PANELS), 1024],
        "p": cute.struct.Align[array(Float16, CONSUMERS * both * TOKENS), 1024],
        "scores": cute.struct.Align[array(Float32, CONSUMERS * n * TOKENS), 128],  # the other CTA's sums
        "rows": cute.struct.Align[array(Uint8, stages * TOKENS * STRIDE), 128],
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def stage_at(stage: Int32, phase: Int32, offset: Any, stages: int) -> tuple[Int32, Int32]:
    """(stage, phase) `offset` tiles further on in the ring; offset <= stages."""
    moved = stage + offset
    wrapped = Int32(moved >= stages)
    return moved - wrapped * stages, phase ^ wrapped


def stage_before(stage: Int32, phase: Int32, offset: int, stages: int) -> tuple[Int32, Int32]:
    """The same of `offset` tiles back."""
    moved = stage - offset
    wrapped = Int32(moved < 0)
    return moved + wrapped * stages, phase ^ wrapped


def head_of(column: Int32, rank: Int32, geometry: Geometry) -> Int32:
    """The head, of a cluster's, that a column of a CTA's accumulators is: its own come first."""
    moved = column + rank * geometry.n
    return moved - geometry.both * Int32(moved >= geometry.both)


# ------------------------------------------------------------------------------------------------ device: the other CTA
def of_peer(address: Int32, rank: Int32) -> Int32:
    """Where the other CTA of the cluster has the same of its shared memory. rank: of this one."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, 1 - rank]
    )


def send_vector(target: Int32, values: list[Any], barrier: Int32) -> None:
    """Starts storing 16 bytes to the other CTA; they arrive at its mbarrier. Both addresses are `of_peer`."""
    cute.arch.inline_ptx(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
        "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        read_only_args=[target, *values, barrier],
    )


def send_bytes(target: Int32, source: Int32, size: int, barrier: Int32) -> None:
    """Starts a bulk copy to the other CTA, which arrives at its mbarrier. target and barrier are `of_peer`."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, Int32(size), barrier],
    )


@cute.jit
def arrive_at_both(barrier: cute.Pointer, rank: Int32):
    """One arrival of this warp at an mbarrier of each CTA."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)
        cute.arch.mbarrier_arrive(barrier, 1 - rank)


# ------------------------------------------------------------------------------------------------ device: load
class Row(NamedTuple):
    """A producer lane's row of a tile. index: as it is in memory (`read_row`), or -1 where it names no token (`named`).
    left: indices from the tile's first one on. there: whether there is a tile. request: whose tile it is. asks: whether
    the request's query is loaded behind the tile."""

    index: Int32
    left: Int32
    there: Boolean
    request: Int32
    asks: Boolean


class Progress(NamedTuple):
    """Where a producer is: a split, and its tile. asks: the tile behind which the split's query is loaded."""

    split: Split
    tile: Int32
    end: Int32  # of the split's tiles
    asks: Int32


class Inputs(NamedTuple):
    """What the kernel reads, in global memory."""

    tma: cute.CopyAtom  # a query tile's columns of a panel
    q: cute.Tensor  # TMA tensor (h, columns, s, b), bf16
    cache: cute.Tensor  # (pages, page, bytes of a token) uint8; pages apart
    indices: cute.Tensor  # (b, s, topk) int32
    lengths: cute.Tensor  # (b,) int32, of which only the number is read
    sink: cute.Tensor | None  # (h,) fp32: a logit more in a head's softmax


class Ranks(NamedTuple):
    """Where a CTA is. rank: in its cluster. token: of a request's query tokens. row_tile: of the query token's
    clusters. first_row: the first head of its cluster."""

    rank: Int32
    token: Int32
    row_tile: Int32
    first_row: Int32


@cute.jit
def read_row(inputs: cutlass.Constexpr, place: Progress, token: Int32, row: Int32) -> Row:
    """This lane's row of the tile at a place. Only a load, which nothing here waits for."""
    there = scheduler.has_work(place.split) & (place.tile < place.end)
    request = cutlass.select_(there, place.split.request, Int32(0))
    first, width = place.tile * TOKENS, Int32(inputs.indices.shape[2])
    at = cutlass.min(first + row, width - 1)
    index = cute.make_tensor(inputs.indices[request, token, None].iterator + at, cute.make_layout(1))[0]
    return Row(index, width - first, there, request, there & (place.tile == place.asks))


@cute.jit
def named(found: Row, inputs: cutlass.Constexpr, row: Int32) -> Row:
    """The row with a cached token for its index."""
    most = inputs.cache.shape[0] * inputs.cache.shape[1]
    is_token = (row < found.left) & (found.index >= 0) & (found.index < most)
    return Row(cutlass.select_(is_token, found.index, Int32(-1)), *found[1:])


@cute.jit
def next_place(place: Progress, walk: cutlass.Constexpr, geometry: cutlass.Constexpr) -> Progress:
    """The place of the tile behind one, perhaps of the worker's next split; by a whole warp."""
    split, tile, end, asks = place
    tile = tile + 1
    if walk.has_work(split) & (tile >= end):  # its next split has tiles, or there is none
        split = walk.next_split(split)
        tile, end, _ = walk.tiles_of(split)
        asks = cutlass.max(cutlass.min(tile + geometry.stages - 3, end - 1), tile)
    return Progress(split, tile, end, asks)


@cute.jit
def copy_row(cache: cute.Tensor, index: Int32, storage: cutlass.Constexpr, stage: Int32, row: Int32, rank: Int32):
    """Starts copying this CTA's bytes of a cached token, by its two lanes. In the cache codes are bytes 0 to 511,
    scales 512 to 527 and the rope 528 to 655; a row of a tile is 256 codes, the scales, and half of the rope."""
    side = cute.arch.lane_idx() % 2
    # Codes, in the second CTA with the scales behind them; then the scales with the rope behind them, or the rope.
    source = cutlass.select_(side == 0, COLUMNS * rank, VALUES + (SCALE_BYTES + 2 * ROPE) * rank)
    begin = cutlass.select_(side == 0, Int32(0), COLUMNS + SCALE_BYTES * rank)
    size = cutlass.select_(side == 0, COLUMNS + SCALE_BYTES * rank, SCALE_BYTES + 2 * ROPE - SCALE_BYTES * rank)
    page = cache.shape[1]
    token = cache.iterator.toint() + Int64(index // page) * cache.stride[0] + index % page * ROW_BYTES
    target = (storage.rows.data_ptr() + (stage * TOKENS + row) * STRIDE).toint() + begin
    copy_bytes(target, token + source, size, (storage.full.data_ptr() + stage).toint())


def copy_bytes(target: Int32, source: Int64, size: Int32, full: Int32) -> None:
    """Starts a bulk copy into shared memory, which arrives at the mbarrier `full`. All but that at multiples of 16."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, size, full],
    )


@cute.jit
def clear_row(storage: cutlass.Constexpr, stage: Int32, row: Int32):
    """Zeros in place of a row that no index names, by the row's two lanes. Nothing is read: a row of zeros in global
    memory would be one that all CTAs copy at once, and requests for one line of L2 queue up."""
    side, chunks = cute.arch.lane_idx() % 2, STRIDE // 16
    # The second lane begins 64 bytes behind the first one: so what eight lanes store together lies in different banks.
    apart = 64
    target = (storage.rows.data_ptr() + (stage * TOKENS + row) * STRIDE).toint() + side * apart
    for chunk in cutlass.range(chunks - apart // 16, unroll=4):
        cute.arch.inline_ptx(
            "st.shared.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};", read_only_args=[target + 16 * chunk, Int32(0)]
        )


@cute.jit
def load(
    inputs: cutlass.Constexpr,  # `Inputs`
    storage: cutlass.Constexpr,
    walk: cutlass.Constexpr,  # `Walk`
    split: Split,
    ranks: cutlass.Constexpr,  # `Ranks`
    warp: Int32,  # 0..PRODUCERS-1
    geometry: cutlass.Constexpr,
):
    """What a producer warp does, over all splits of the worker: 16 rows of every tile, and one of them the queries.
    Indices are read two tiles ahead."""
    token, rank = ranks.token, ranks.rank
    row = warp * ROWS + cute.arch.lane_idx() // 2
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    valid = storage.valid.get_tensor(cute.make_layout((PRODUCERS, geometry.stages)))
    tile, end, _ = walk.tiles_of(split)
    place = Progress(split, tile, end, Int32(-1))  # its query is loaded at once
    if (warp == 0) & walk.has_work(place.split):
        load_query(inputs, storage, place.split.request, ranks, geometry)
    first = named(read_row(inputs, place, token, row), inputs, row)
    place = next_place(place, walk, geometry)
    second = read_row(inputs, place, token, row)
    stage, phase, parity = Int32(0), Int32(0), Int32(0)
    blank = Int32(0)  # a bit a stage: whether this lane's row holds zeros already
    while first.there:
        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
        votes = Int32(cute.arch.vote_ballot_sync(first.index >= 0))
        with cute.arch.elect_one():
            valid[warp, stage] = votes
            copied = Int32(cute.arch.popc(votes)) // 2 * STRIDE
            if votes == -1:
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, copied)
            else:
                cute.arch.mbarrier_expect_tx(full + stage, copied)
        if first.index >= 0:
            copy_row(inputs.cache, first.index, storage, stage, row, rank)
        of_stage = Int32(1) << stage
        if votes != -1:
            # Behind the copies, whose way is longer.
            if (first.index < 0) & ((blank & of_stage) == 0):
                clear_row(storage, stage, row)
            cute.arch.sync_warp()
            warp_arrive(full + stage)
            # Ahead of copies into these rows, a round of the stages later.
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
        blank = cutlass.select_(first.index < 0, blank | of_stage, blank & ~of_stage)
        stage, phase = stage_at(stage, phase, 1, geometry.stages)
        if (warp == 0) & first.asks:
            cute.arch.mbarrier_wait(storage.query_empty.data_ptr(), parity)
            parity = parity ^ 1
            load_query(inputs, storage, first.request, ranks, geometry)
        # Behind the copies, so that these wait for no index; the one read here is used a tile later.
        first = named(second, inputs, row)
        place = next_place(place, walk, geometry)
        second = read_row(inputs, place, token, row)


# ------------------------------------------------------------------------------------------------ device: the query
def query_tile(storage: Any, geometry: Geometry) -> cute.Tensor:
    """Q in shared memory as it is loaded: (heads, columns of all panels), bf16, swizzled as the products read it."""
    layout = wgmma.k_major_layout(BFloat16, (geometry.both, PANEL * QUERY_PANELS))
    return wgmma.smem_view(cute.recast_ptr(storage.query.data_ptr(), dtype=BFloat16), 0, layout)


@cute.jit
def load_query(
    inputs: cutlass.Constexpr, storage: cutlass.Constexpr, request: Int32, ranks: cutlass.Constexpr,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """A warp's: starts the load of a query tile: the columns of this CTA's panels and all of the rope, of its own heads
    and then of the other CTA's."""
    rank, full = ranks.rank, storage.query_full.data_ptr()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * geometry.both * PANEL * QUERY_PANELS)
    q = inputs.q[None, None, ranks.token, None]
    boxes, places = paged.boxes_of(inputs.tma, q, query_tile(storage, geometry), geometry.n)
    for panel in cutlass.range(QUERY_PANELS, unroll=1):
        of_cache = cutlass.select_(panel < PANELS, rank * PANELS + panel, Int32(CTAS * PANELS))
        for side in cutlass.range_constexpr(CTAS):
            row_tile = ranks.row_tile * CTAS + (rank if side == OWN else 1 - rank)
            paged.load_box(inputs.tma, boxes[None, row_tile, of_cache, request], places[None, side, panel], full)


@cute.jit
def widen_query(storage: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr) -> Float32:
    """Makes a query tile what the products read, in place: columns that keys have as codes in fp16, in the order of
    `key_words`, others in bf16, all divided by a power of two, which is returned: that of the largest number among
    them, since a head that is inf or NaN must not take all others' columns below what fp16 holds. It may be another one
    in the other CTA, whose sums are sent with it multiplied in. By both consumers, who wait for each other in it."""
    items = geometry.both * QUERY_PANELS * (PANEL // MMA_K)
    words, found = cute.make_rmem_tensor((4, 2), Int32), cute.make_rmem_tensor((4, 2), Int32)
    most = Int32(0)  # two magnitudes' bits and 0x80 more, with which those of inf and NaN are negative
    for item in cutlass.range(thread, items, CONSUMER_THREADS, unroll=2):
        copy_slice(storage, item, words, False, geometry)
        for j in cutlass.range_constexpr(8):
            most = cute.arch.inline_ptx(
                "max.s16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32],
                read_only_args=[most, (words[j] & 0x7FFF7FFF) + 0x00800080],
            )  # fmt: skip
    most = cutlass.max(most & 0xFFFF, (most >> 16) & 0xFFFF)
    most = Int32(cute.arch.warp_redux_sync(most, kind="max"))
    largest = storage.largest.get_tensor(cute.make_layout(CONSUMERS * WARPS))
    largest[thread // 32] = most
    named_sync(Barrier.CONSUMERS, CONSUMER_THREADS)
    for i in cutlass.range_constexpr(CONSUMERS * WARPS):
        most = cutlass.max(most, largest[i])
    exponent = cutlass.max((most >> 7) - 128 - QUERY_EXPONENT, LEAST_EXPONENT)
    factor = partials.power_of_two(-exponent)
    pair = (127 - exponent) << 7
    pair = pair | (pair << 16)
    for item in cutlass.range(thread, items, CONSUMER_THREADS, unroll=2):
        copy_slice(storage, item, words, False, geometry)
        if item // geometry.both < PANELS * (PANEL // MMA_K):
            # Of 16 columns, the MMA's first eight are 0, 1, 4, 5, ..
            for j in cutlass.range_constexpr(8):
                found[j // 2, j % 2] = to_half(words[j], factor)
        else:
            for j in cutlass.range_constexpr(8):
                found[j] = times_bf16(words[j], pair)
        copy_slice(storage, item, found, True, geometry)
    return partials.power_of_two(exponent)


def copy_slice(storage: Any, item: Int32, words: cute.Tensor, stores: bool, geometry: Geometry) -> None:
    """16 columns of a row of Q, (4, 2) words, from or to shared memory; neighbouring items are neighbouring rows."""
    row, part = item % geometry.both, item // geometry.both
    base = storage.query.data_ptr() + cute.assume(part // 4 * (geometry.both * PANEL), divby=geometry.both * PANEL)
    for j in range(2):
        place = chunk_place(base, row, part % 4 * 2 + j)
        memory = cute.make_tensor(cute.recast_ptr(place, dtype=Int32), cute.make_layout(4))
        cute.autovec_copy(words[None, j], memory) if stores else cute.autovec_copy(memory, words[None, j])


def chunk_place(panel: cute.Pointer, row: Int32, chunk: Any) -> cute.Pointer:
    """Where 16 bytes of a panel's row lie: K-major with the 128-byte swizzle."""
    return (panel + cute.assume(row * PANEL + (chunk ^ (row % 8)) * 8, divby=8)).align(16)


# ------------------------------------------------------------------------------------------------ device: words
def to_half(word: Int32, factor: Float32) -> Int32:
    """Two bf16 times a factor, as two fp16."""
    text = "{ .reg .b32 x, y; .reg .f32 f, g; shl.b32 x, {$r0}, 16; and.b32 y, {$r0}, 0xffff0000; mov.b32 f, x; "
    text += "mov.b32 g, y; mul.f32 f, f, {$r1}; mul.f32 g, g, {$r1}; cvt.rn.f16x2.f32 {$w0}, g, f; }"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[word, factor])


def times_bf16(word: Int32, factors: Int32) -> Int32:
    """Two bf16 times two others."""
    return cute.arch.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[word, factors]
    )


def half_pair(value: Float32) -> Int32:
    """A number in fp16, twice."""
    return cute.arch.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def permute(low: Int32, high: Int32, selector: int) -> Int32:
    """Four of the eight bytes of two words (PTX `prmt`)."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector};", write_only_types=[Int32], read_only_args=[low, high]
    )


def widen(codes: Int32, factors: Int32) -> tuple[Int32, Int32]:
    """Four codes as two words of two fp16, in order, times two factors (fp16)."""
    text = "{ .reg .b16 c, d; .reg .b32 x, y; mov.b32 {c, d}, {$r0}; "
    text += "cvt.rn.f16x2.e4m3x2 x, c; cvt.rn.f16x2.e4m3x2 y, d; "
    text += "mul.rn.f16x2 {$w0}, x, {$r1}; mul.rn.f16x2 {$w1}, y, {$r1}; }"
    return cute.arch.inline_ptx(text, write_only_types=[Int32, Int32], read_only_args=[codes, factors])


def code_words(found: tuple[Int32, ...], words: cute.Tensor, factors: cute.Tensor) -> None:
    """(4, 2) words of an A operand from codes of two columns of a token, and of the next one: they become two tokens of
    a column, and of the next."""
    for m in range(4):
        block, b = m // 2, m % 2
        codes = permute(found[m], found[m], 0x3120)
        words[2 * b, block], words[2 * b + 1, block] = widen(codes, factors[m])


def load_matrices(address: Int32, transposed: bool = False) -> tuple[Int32, ...]:
    """Four 8 x 8 matrices of 16-bit elements from shared memory, a word of each; a lane gives the address of a row."""
    text = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 "
    text += "{{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return cute.arch.inline_ptx(text, write_only_types=[Int32] * 4, read_only_args=[address])


def a_operand(words: cute.Tensor, dtype: type) -> cute.Tensor:
    """(4, k blocks) words as the A operand ((2, 2, 2), 1, k blocks) of an MMA."""
    blocks = words.shape[1]
    layout = cute.make_layout(((2, 2, 2), 1, blocks), stride=((1, 2, 4), 0, 8))
    return cute.make_tensor(cute.recast_ptr(words.iterator, dtype=dtype), layout)


@cute.jit
def issue(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,  # registers, (MMA, 1, 1)
    frag_a: cute.Tensor,  # registers, (MMA, 1, BLOCKS)
    frag_b: cute.Tensor,  # descriptors, (MMA, 1, K)
    first_b: Any,
    zero_init: cutlass.Constexpr = False,
):
    """Issues acc (+)= A · B[first_b ..] and commits it; waits for nothing."""
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not zero_init)
    for i in cutlass.range_constexpr(BLOCKS):
        cute.gemm(atom, acc, frag_a[None, None, i], frag_b[None, None, first_b + i], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


# ------------------------------------------------------------------------------------------------ device: one consumer
class Registers(NamedTuple):
    """What a consumer's thread keeps of a split. The code of both consumers shares it."""

    acc_o: list[cute.Tensor]  # a (64, 2n) fp32 accumulator of each own panel of V
    row_sum: cute.Tensor  # (n / 4,) fp32: this thread's share of the sums of the own P


@dataclass(frozen=True, eq=False)
class Consumer:
    """Views and registers of one consumer warpgroup. `me`: EVEN or ODD, the same in all threads of a warp: both run
    the same code, which is fetched once. thread: 0..127. rank: of the CTA."""

    me: Any
    rank: Any
    geometry: Geometry
    thread: Any
    scale_log2: Any  # of a score in fp32
    storage: Any
    exchange: Any  # of this consumer: (WARPS, n)
    maxima: Any  # of this warp: (2n,), that its outputs stand at
    seen: Any  # (2,) registers: how often the maxima of own heads, and of the others, had moved by then
    mma_s: Any  # Sᵀ = K·Qᵀ in fp16,
    mma_plain: Any  # in bf16
    mma_o: Any  # Oᵀ += Vᵀ·P
    frag_q: Any  # descriptors: Q, (MMA, 1, 4 · panels);
    frag_plain: Any  # in bf16, of the rope: (MMA, 1, 4)
    frag_p: Any  # (MMA, 1, 4): of own tiles, and of the other consumer's
    p_copy: Any
    p_target: Any  # where the own P goes
    acc_s: Any  # (64, 2n) fp32 registers
    own_s: Any  # (64, n): its first half, the own heads
    scaled: Any  # of the thread's two tokens: 2^e times scale_log2,
    exponents: Any  # e, or -inf where an index names none,
    weights: Any  # and 2^-e
    acc_o: Any  # a (64, 2n) fp32 accumulator of each own panel of V, which both consumers' code shares,
    row_sum: Any  # as this thread's share of the sums of the own P' · 2^-e
    tokens: Any  # (1,), shared memory: not 0 once rows of this warp's have named tokens

    @classmethod
    def make(cls, me, rank, geometry, storage, thread, scale_log2, registers) -> Consumer:
        """Views of a thread's part. registers: `Registers`."""
        n, both, query, p = geometry.n, geometry.both, storage.query.data_ptr(), storage.p.data_ptr()
        mma_s, mma_plain, mma_o = (
            wgmma.make_mma(dtype, both, a_in_registers=True) for dtype in (Float16, BFloat16, Float16)
        )
        mma_half = wgmma.make_mma(Float16, n, a_in_registers=True)
        scores, plain, output = (mma.get_slice(thread) for mma in (mma_s, mma_plain, mma_o))
        of_half = wgmma.smem_view(query, 0, wgmma.k_major_layout(Float16, (both, PANEL * QUERY_PANELS)))
        of_plain = wgmma.smem_view(
            cute.recast_ptr(query, dtype=BFloat16), PANELS * both * PANEL, wgmma.k_major_layout(BFloat16, (both, PANEL))
        )
        p_layout = wgmma.k_major_layout(Float16, (both, TOKENS))
        # Stores a 64 x n accumulator with its 64 rows next to each other: as K-major n x 64.
        store = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(True, 4 if n % 16 == 0 else 2), Float16)
        p_copy = cute.make_tiled_copy_C(store, mma_half).get_slice(thread)
        places = [cute.assume(maker * (both * TOKENS), divby=both * TOKENS) for maker in (me, 1 - me)]
        p_target = wgmma.smem_view(p, places[0], wgmma.mn_major_layout(Float16, (TOKENS, n)))
        acc_s = cute.make_rmem_tensor(mma_s.partition_shape_C((TOKENS, both)), Float32)
        half = cute.make_rmem_tensor(mma_half.partition_shape_C((TOKENS, n)), Float32).layout
        return cls(
            me=me,
            rank=rank,
            geometry=geometry,
            thread=thread,
            scale_log2=scale_log2,
            storage=storage,
            exchange=storage.exchange.data_ptr() + cute.assume(me * (WARPS * n), divby=n),
            maxima=storage.maxima.data_ptr() + cute.assume((me * WARPS + thread // 32) * both, divby=both),
            seen=cute.make_rmem_tensor(CTAS, Int32),
            mma_s=mma_s,
            mma_plain=mma_plain,
            mma_o=mma_o,
            frag_q=mma_s.make_fragment_B(scores.partition_B(of_half)),
            frag_plain=mma_plain.make_fragment_B(plain.partition_B(of_plain)),
            frag_p=[mma_o.make_fragment_B(output.partition_B(wgmma.smem_view(p, place, p_layout))) for place in places],
            p_copy=p_copy,
            p_target=p_copy.partition_D(p_target),
            acc_s=acc_s,
            own_s=cute.make_tensor(acc_s.iterator, half),
            scaled=cute.make_rmem_tensor(2, Float32),
            exponents=cute.make_rmem_tensor(2, Float32),
            weights=cute.make_rmem_tensor(2, Float32),
            acc_o=registers.acc_o,
            row_sum=registers.row_sum,
            tokens=cute.make_tensor(storage.tokens.data_ptr() + (me * WARPS + thread // 32), cute.make_layout(1)),
        )

    def tile_rows(self, stage: Int32) -> cute.Pointer:
        """Where a tile's rows begin."""
        return self.storage.rows.data_ptr() + cute.assume(stage * (TOKENS * STRIDE), divby=16)

    def barrier(self, name: str, which: Any) -> cute.Pointer:
        """One of the mbarriers of shared memory."""
        return getattr(self.storage, name).data_ptr() + which

    def max_words(self, maker: Any, side: int) -> cute.Pointer:
        """(n + 4,): the running maxima that P of a consumer's last tile stands at, of own heads (OWN) or the other
        CTA's (PEER), and as a number how often they have moved."""
        words = self.geometry.max_words
        return self.storage.shared_max.data_ptr() + cute.assume((maker * CTAS + side) * words, divby=4)

    # -------------------------------------------------------------------------------------------- factors
    @cute.jit
    def note_tokens(self, names: Int32):
        """Notes whether one of the warp's rows of a tile names a token."""
        tokens = self.tokens
        if (names & 0x55555555) != 0:
            tokens[0] = Int32(1)

    def scales_of(self, stage: Int32, row: Int32) -> tuple[Int32, list[Float32]]:
        """(e, the factor of each of this CTA's groups, times 2^-e) of a token. e is that of all scales: the same in
        both CTAs."""
        found = cute.make_rmem_tensor(SCALES, Float32)
        place = self.tile_rows(stage) + cute.assume(row * STRIDE + COLUMNS, divby=16)
        source = cute.recast_ptr(place.align(16), dtype=Float32)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(SCALES)), found)
        top = cute.math.absf(found[0])
        for g in range(1, SCALES):
            top = cute.arch.fmax(top, cute.math.absf(found[g]))
        exponent = cutlass.min(cutlass.max((top.bitcast(Int32) >> 23) - 127, LEAST_EXPONENT), MOST_EXPONENT)
        inverse = partials.power_of_two(-exponent)
        own = [cutlass.select_(self.rank > 0, found[GROUPS + g], found[g]) for g in range(GROUPS)]
        return exponent, [value * inverse for value in own]

    @cute.jit
    def read_factors(self, stage: Int32, pairs: cute.Tensor, plain: cute.Tensor):
        """Of the thread's two tokens of an own tile: what scores and probabilities are multiplied with; pairs (2,
        groups): each factor in fp16, twice; plain (2,): 2^-e in bf16, twice. The factors go to shared memory too, for
        the products with V."""
        lane, warp = self.thread % 32, self.thread // 32
        names = self.storage.valid.get_tensor(cute.make_layout((PRODUCERS, self.geometry.stages)))[warp, stage]
        self.note_tokens(names)
        for r in cutlass.range_constexpr(2):
            exponent, values = self.scales_of(stage, wgmma.acc_row(self.thread, r))
            self.scaled[r] = self.scale_log2 * partials.power_of_two(exponent)
            self.weights[r] = partials.power_of_two(-exponent)
            word = (127 - exponent) << 7
            plain[r] = word | (word << 16)
            for g in cutlass.range_constexpr(GROUPS):
                pairs[r, g] = half_pair(values[g])
            is_token = (names >> (lane // 4 * 2 + 16 * r)) & 1
            self.exponents[r] = Float32(cutlass.select_(is_token > 0, Float32(exponent), -Float32.inf))
        # Token 16 w + 8 r + a of the tile is in k block w; of the block's tokens, 2 i, 2 i + 1 and 8 behind are lane
        # i's. Of the four lanes that have two tokens each stores one factor of one of them.
        r, g = lane // 2 % 2, lane % 2
        base = self.storage.factors.data_ptr() + (stage * GROUPS * TOKENS + lane // 8 * 16 + warp * 4 + lane // 4 % 2)
        of_first = cutlass.select_(g > 0, pairs[0, 1], pairs[0, 0])
        of_second = cutlass.select_(g > 0, pairs[1, 1], pairs[1, 0])
        store_half((base + (g * TOKENS + 2 * r)).toint(), cutlass.select_(r > 0, of_second, of_first))

    # -------------------------------------------------------------------------------------------- scores
    def load_keys(self, address: Int32, panel: int, half: int) -> tuple[Int32, ...]:
        """Half a panel's bytes, or those of the rope. address: of the lane's row, and of 16 bytes in it."""
        if panel < PANELS:
            return load_matrices(address + (panel * PANEL + 32 * half))
        return (*load_matrices(address + PLAIN_START), *load_matrices(address + (PLAIN_START + 32)))

    def key_words(self, found: tuple[Int32, ...], panel: int, pairs: cute.Tensor, plain: cute.Tensor) -> cute.Tensor:
        """Half a panel as an A operand. Of codes a lane has four neighbouring columns of a token and k block, which the
        MMA takes for 2 i, 2 i + 1 and 8 behind: Q's columns lie that way too (`widen_query`). bf16 columns stay so."""
        words = cute.make_rmem_tensor(cute.make_layout((4, BLOCKS)), Int32)
        if panel == PANELS:
            for i in range(8):
                words[i % 4, i // 4] = times_bf16(found[i], plain[i % 2])
            return a_operand(words, BFloat16)
        for m in range(4):
            block, r = m // 2, m % 2
            words[r, block], words[2 + r, block] = widen(found[m], pairs[r, panel * PANEL // (VALUES // SCALES)])
        return a_operand(words, Float16)

    def issue_scores(self, stage: Int32) -> None:
        """acc_s = K·Qᵀ of an own tile over this CTA's columns; all products have ended."""
        lane = self.thread % 32
        pairs, plain = cute.make_rmem_tensor(cute.make_layout((2, GROUPS)), Int32), cute.make_rmem_tensor(2, Int32)
        row = self.thread // 32 * 16 + lane % 16
        address = self.tile_rows(stage).toint() + (row * STRIDE + lane // 16 * 16)
        parts = [*((panel, half) for panel in range(PANELS) for half in range(2)), (PANELS, 0)]
        found = [self.load_keys(address, *part) for part in parts[:AHEAD]]
        self.read_factors(stage, pairs, plain)
        for i, (panel, half) in enumerate(parts):
            if i + AHEAD < len(parts):
                found.append(self.load_keys(address, *parts[i + AHEAD]))
            keys = self.key_words(found[i], panel, pairs, plain)
            if panel == PANELS:
                issue(self.mma_plain, self.acc_s, keys, self.frag_plain, 2 * self.rank)
            else:
                issue(self.mma_s, self.acc_s, keys, self.frag_q, 4 * panel + 2 * half, i == 0)
            if i > 0:
                warpgroup.wait_group(1)
        warpgroup.wait_group(0)

    @cute.jit
    def scores(self, stage: Int32, phase: Int32):
        """This CTA's share of Sᵀ = K·Qᵀ of an own tile, times the tokens' scales, of own heads plus their e."""
        cute.arch.mbarrier_wait(self.barrier("full", stage), phase)
        self.issue_scores(stage)
        columns = wgmma.as_columns(self.acc_s)
        for c in cutlass.range_constexpr(self.geometry.both // 4):
            for r in cutlass.range_constexpr(2):
                score = columns[c, r] * self.scaled[r]
                columns[c, r] = score + self.exponents[r] if c < self.geometry.n // 4 else score

    @cute.jit
    def send_scores(self):
        """Sends the other CTA its heads' share of an own tile, thread by thread, and expects its own heads'."""
        n = cutlass.const_expr(self.geometry.n)
        full = self.barrier("scores_full", self.me)
        if self.thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.geometry.score_bytes)
        target = of_peer(self.score_place().toint(), self.rank)
        there = of_peer(full.toint(), self.rank)
        for j in cutlass.range_constexpr(n // 8):
            values = [self.acc_s[n // 2 + 4 * j + i] for i in range(4)]
            send_vector(target + j * (16 * WARPGROUP), values, there)

    def score_place(self) -> cute.Pointer:
        """Where this thread's vectors of 16 bytes of the other CTA's sums are, each 128 of them behind the last."""
        vectors = self.me * (self.geometry.n * TOKENS) + self.thread * 4
        return (self.storage.scores.data_ptr() + cute.assume(vectors, divby=4)).align(16)

    @cute.jit
    def add_scores(self, parity: Int32):
        """Adds what the other CTA has sent."""
        cute.arch.mbarrier_wait(self.barrier("scores_full", self.me), parity)
        vector = cute.make_rmem_tensor(4, Float32)
        for j in cutlass.range_constexpr(self.geometry.n // 8):
            place = (self.score_place() + j * (4 * WARPGROUP)).align(16)
            cute.autovec_copy(cute.make_tensor(place, cute.make_layout(4)), vector)
            for i in cutlass.range_constexpr(4):
                self.acc_s[4 * j + i] = self.acc_s[4 * j + i] + vector[i]

    # -------------------------------------------------------------------------------------------- softmax
    def sync(self) -> None:
        """All warps of this consumer meet."""
        cute.arch.barrier(barrier_id=Barrier.EVEN + self.me, number_of_threads=WARPGROUP)

    def any_thread(self, holds: Boolean) -> Boolean:
        """`sync`, which returns whether `holds` in any thread."""
        text = "{ .reg .pred in, any; setp.ne.b32 in, {$r0}, 0; "
        text += f"barrier.cta.red.or.pred.aligned any, {{$r1}}, {WARPGROUP}, in; selp.b32 {{$w0}}, 1, 0, any; }}"
        found = cute.arch.inline_ptx(
            text, write_only_types=[Int32], read_only_args=[Int32(holds), Int32(Barrier.EVEN + self.me)]
        )
        return found != 0

    @cute.jit
    def exceeds(self, row_max: cute.Tensor) -> Boolean:
        """Whether the running maximum of any own head has to move; the same in all warps, which meet here."""
        columns = wgmma.as_columns(self.own_s)
        most = cute.arch.fmax(columns[0, 0], columns[0, 1]) - row_max[0]
        for c in cutlass.range_constexpr(1, self.geometry.n // 4):
            most = cute.arch.fmax(most, cute.arch.fmax(columns[c, 0], columns[c, 1]) - row_max[c])
        return self.any_thread(most > softmax.SLACK)

    @cute.jit
    def move_max(self, row_max: cute.Tensor):
        """Moves the maximum of the own heads that need it. Sums and outputs follow."""
        columns = wgmma.as_columns(self.own_s)
        n, count = self.geometry.n, self.geometry.n // 4
        lane, warp = self.thread % 32, self.thread // 32
        best = cute.make_rmem_tensor(count, Float32)
        for c in cutlass.range_constexpr(count):
            best[c] = cute.arch.fmax(columns[c, 0], columns[c, 1])
            for i in cutlass.range_constexpr(3):
                best[c] = cute.arch.fmax(best[c], cute.arch.shuffle_sync_bfly(best[c], offset=4 << i))
        softmax.publish(best, self.exchange + cute.assume(warp * n, divby=n), lane)
        self.sync()
        softmax.collect(best, self.exchange, WARPS, lane, True)
        for c in cutlass.range_constexpr(count):
            row_max[c] = softmax.lazy_max(row_max[c], best[c])

    def moves(self, maker: Any, side: int) -> Int32:
        """How often the maxima have moved that P of a consumer's last tile stands at."""
        word = cute.recast_ptr(self.max_words(maker, side) + self.geometry.n, dtype=Int32)
        return cute.arch.make_warp_uniform(cute.make_tensor(word, cute.make_layout(1))[0])

    @cute.jit
    def follow_max(self, maker: Int32, sums: Boolean):
        """Brings outputs to the maxima that P of a consumer's last tile stands at, if these have moved; sums: and this
        consumer's sums, of own heads."""
        count = cutlass.const_expr(self.geometry.both // 4)
        lane, seen = self.thread % 32, self.seen
        moved = [self.moves(maker, side) for side in range(CTAS)]
        if (moved[0] != seen[0]) | (moved[1] != seen[1]):
            theirs, mine = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32)
            for side in cutlass.range_constexpr(CTAS):
                seen[side] = moved[side]
                half = cute.make_tensor(theirs.iterator + side * (count // 2), cute.make_layout(count // 2))
                softmax.collect(half, self.max_words(maker, side), 1, lane, True)
            softmax.collect(mine, self.maxima, 1, lane, True)
            cute.arch.sync_warp()
            softmax.publish(theirs, self.maxima, lane)
            cute.arch.sync_warp()
            for c in cutlass.range_constexpr(count):
                mine[c] = softmax.exp2(mine[c] - theirs[c])
            if sums:
                for c in cutlass.range_constexpr(count // 2):
                    self.row_sum[c] = self.row_sum[c] * mine[c]
            for i in cutlass.range_constexpr(HALF_PANELS):
                wgmma.scale_columns(self.acc_o[i], mine)

    @cute.jit
    def own_softmax(self, tile: Int32, parity: Int32, other: Int32):
        """P of an own tile, whose sums over this CTA's columns are in acc_s, to both CTAs. The maximum goes on from
        that of the tile before, which the other consumer has made. Outputs and sums stand at that of this consumer's
        own tile before. tile: of the split. parity, other: of this tile and of the one before, among their
        consumer's."""
        n, lane, warp = self.geometry.n, self.thread % 32, self.thread // 32
        row_max, moved = cute.make_rmem_tensor(n // 4, Float32), Int32(0)
        row_max.fill(softmax.NO_KEY)
        if tile > 0:
            cute.arch.mbarrier_wait(self.barrier("max_full", 1 - self.me), other)
            softmax.collect(row_max, self.max_words(1 - self.me, OWN), 1, lane, True)
            moved = self.moves(1 - self.me, OWN)
        self.add_scores(parity)
        if self.exceeds(row_max):
            self.move_max(row_max)
            moved = moved + 1
        if moved != self.seen[OWN]:
            older = cute.make_rmem_tensor(n // 4, Float32)
            softmax.collect(older, self.maxima, 1, lane, True)
            for c in cutlass.range_constexpr(n // 4):
                self.row_sum[c] = self.row_sum[c] * softmax.exp2(older[c] - row_max[c])
        columns = wgmma.as_columns(self.own_s)
        for c in cutlass.range_constexpr(n // 4):
            for r in cutlass.range_constexpr(2):
                columns[c, r] = softmax.exp2(columns[c, r] - row_max[c])
                self.row_sum[c] = self.row_sum[c] + columns[c, r] * self.weights[r]
        cute.arch.mbarrier_wait(self.barrier("p_free", self.me), parity ^ 1)
        cute.copy(self.p_copy, self.p_copy.retile(wgmma.to_dtype(self.own_s, Float16)), self.p_target)
        if warp == 0:
            words = self.max_words(self.me, OWN)
            softmax.publish(row_max, words, lane)
            if lane == 0:
                cute.make_tensor(cute.recast_ptr(words + n, dtype=Int32), cute.make_layout(1))[0] = moved
        cute.arch.fence_view_async_shared()
        self.sync()
        self.send_p()

    @cute.jit
    def send_p(self):
        """Sends P of the own heads and their maxima to the other CTA, and says that they are in this one."""
        geometry, full = self.geometry, self.barrier("p_full", self.me)
        if self.thread == 0:
            max_bytes = 4 * geometry.max_words
            cute.arch.mbarrier_arrive(self.barrier("max_full", self.me))
            cute.arch.mbarrier_arrive_and_expect_tx(full, geometry.p_bytes + max_bytes)
            there = of_peer(full.toint(), self.rank)
            source = self.storage.p.data_ptr().toint() + self.me * (CTAS * geometry.p_bytes)
            send_bytes(of_peer(source, self.rank) + geometry.p_bytes, source, geometry.p_bytes, there)
            words = self.max_words(self.me, OWN).toint()
            send_bytes(of_peer(words, self.rank) + max_bytes, words, max_bytes, there)

    # -------------------------------------------------------------------------------------------- values
    def value_parts(self) -> list[tuple[int, int]]:
        """(own panel, half of the tokens), in the order in which they are multiplied."""
        return [(panel, half) for half in range(2) for panel in range(HALF_PANELS)]

    def load_values(self, stage: Int32, panel: int, half: int) -> tuple[Int32, ...]:
        """The bytes of 32 tokens in an own panel. Warp w has columns 16 w .. 16 w + 15, a lane two neighbours."""
        lane, warp = self.thread % 32, self.thread // 32
        tile = self.tile_rows(stage).toint() + 32 * half * STRIDE
        address = tile + (lane * STRIDE + (self.me * HALF_PANELS + panel) * PANEL + warp * 16)
        return load_matrices(address, transposed=True)

    def load_factors(self, stage: Int32) -> list[cute.Tensor]:
        """Of each half of a tile's tokens (4,) words, of two tokens each: what their columns are multiplied with. All
        own panels are of one group."""
        found = []
        for half in range(2):
            factors = cute.make_rmem_tensor(4, Int32)
            token = (stage * GROUPS + self.me) * TOKENS + self.thread % 4 * 16 + 8 * half
            place = self.storage.factors.data_ptr() + cute.assume(token, divby=8)
            source = cute.recast_ptr(place.align(16), dtype=Int32)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), factors)
            found.append(factors)
        return found

    def begin_values(self, stage: Int32) -> list[Any]:
        """Loads the bytes that `multiply` begins with."""
        return [self.load_values(stage, *part) for part in self.value_parts()[:AHEAD]]

    def multiply(self, maker: int, stage: Int32, found: list[Any]) -> None:
        """Oᵀ += Vᵀ·P of this consumer's panels with a tile of its own (0) or the other's (1); frees the tile, and P in
        both CTAs."""
        parts, p, of_maker = self.value_parts(), self.frag_p[maker], 1 - self.me if maker else self.me
        factors = self.load_factors(stage)
        for i, (panel, half) in enumerate(parts):
            if i + AHEAD < len(parts):
                found.append(self.load_values(stage, *parts[i + AHEAD]))
            words = cute.make_rmem_tensor(cute.make_layout((4, BLOCKS)), Int32)
            code_words(found[i], words, factors[half])
            issue(self.mma_o, self.acc_o[panel], a_operand(words, Float16), p, 2 * half)
            if i > 0:
                warpgroup.wait_group(1)
        warp_arrive(self.barrier("empty", stage))
        warpgroup.wait_group(0)
        arrive_at_both(self.barrier("p_free", of_maker), self.rank)

    # -------------------------------------------------------------------------------------------- tiles
    @cute.jit
    def run(self, count: Int32, stage: Int32, phase: Int32, own_uses: Int32, other_uses: Int32):
        """A split of `count` tiles. (stage, phase): of the first one. own_uses, other_uses: parities of how many tiles
        this consumer and the other one have made P of. All registers are what a row without keys has."""
        stages, seen, tokens = self.geometry.stages, self.seen, self.tokens
        of_all = cute.make_rmem_tensor(self.geometry.both // 4, Float32)
        of_all.fill(softmax.NO_KEY)
        tokens[0] = Int32(0)
        softmax.publish(of_all, self.maxima, self.thread % 32)
        cute.arch.sync_warp()
        seen.fill(0)
        stage, phase = stage_at(stage, phase, self.me, stages)
        # Two more than there are tiles: a consumer multiplies its own tile a round after its softmax.
        for tile in cutlass.range(self.me, count + 2, CONSUMERS, unroll=1):
            own = own_uses ^ (tile // 2 & 1)
            other = other_uses ^ ((tile // 2 + 1 + self.me) & 1)
            before, phase_before = stage_before(stage, phase, 1, stages)
            last, _ = stage_before(stage, phase, 2, stages)
            if tile < count:
                self.scores(stage, phase)
            # Behind its last scores, of which a consumer may have none, the query may be replaced.
            if (tile + CONSUMERS >= count) & ((tile < count) | (tile == 1)):
                warp_arrive(self.barrier("query_empty", 0))
            if tile >= CONSUMERS:
                found = self.begin_values(last)
                cute.arch.mbarrier_wait(self.barrier("p_full", self.me), own ^ 1)
                # Not earlier: the other CTA has read what was sent of the tile before, since P of it has come.
                if tile < count:
                    self.send_scores()
                self.follow_max(self.me, Boolean(False))
                self.multiply(0, last, found)
            else:
                if tile < count:
                    self.send_scores()
            if tile < count:
                self.own_softmax(tile, own, other)
            if (tile >= 1) & (tile <= count):
                cute.arch.mbarrier_wait(self.barrier("full", before), phase_before)
                found = self.begin_values(before)
                cute.arch.mbarrier_wait(self.barrier("p_full", 1 - self.me), other)
                self.follow_max(1 - self.me, tile == count)
                self.multiply(1, before, found)
            stage, phase = stage_at(stage, phase, CONSUMERS, stages)


@dataclass(frozen=True, eq=False)
class Token:
    """Query token `token` of every request, as `split_kv.rows` has blocks of them; q, out and lse are those of b · s
    requests of one token."""

    token: Int32
    s: int

    def block(self, request: Int32) -> rows.Block:
        return rows.Block(request * self.s + self.token, 1, request)


# ------------------------------------------------------------------------------------------------ device: epilogue
@dataclass(frozen=True, eq=False)
class Head:
    """The softmax of one head at a split's end; thread `number` of each consumer holds that of column `number`."""

    number: Any  # thread of the consumer
    maximum: Any  # (1,) registers
    sums: Any  # (CONSUMERS,) registers: each one's sums of P, over all tokens

    @classmethod
    def make(cls, thread: Int32) -> Head:
        return cls(thread % WARPGROUP, cute.make_rmem_tensor(1, Float32), cute.make_rmem_tensor(CONSUMERS, Float32))

    @cute.jit
    def collect(
        self, row_sum: cute.Tensor, acc_o: cutlass.Constexpr, storage: cutlass.Constexpr, thread: Int32, rank: Int32,
        parity: Int32, geometry: cutlass.Constexpr,
    ):  # fmt: skip
        """Adds up all threads' shares of the own heads' sums, which are lost, and exchanges them with the other CTA.
        The consumers meet here. parity: of the split, among the worker's. Where no index of the split names a token,
        makes results what a row without keys has. They are that already, but for queries that are not finite: times a
        row of zeros these give NaN, which no -inf takes away."""
        n, both = geometry.n, geometry.both
        exchange, full = storage.exchange.data_ptr(), storage.sums_full.data_ptr()
        publish_sums(row_sum, exchange + thread // 32 * n, thread % 32)
        named_sync(Barrier.CONSUMERS, CONSUMER_THREADS)
        self.sums.fill(0.0)
        if self.number < both:
            self.maximum[0] = storage.maxima.data_ptr()[self.number]
        if self.number < n:
            for i in cutlass.range_constexpr(CONSUMERS):
                self.sums[i] = of_warps(exchange + i * (WARPS * n), self.number, n)
        tokens = storage.tokens.get_tensor(cute.make_layout(CONSUMERS * WARPS))
        found = tokens[0]
        for i in cutlass.range_constexpr(1, CONSUMERS * WARPS):
            found = found | tokens[i]
        if cute.arch.make_warp_uniform(found) == 0:
            for i in cutlass.range_constexpr(CONSUMERS):
                self.sums[i] = Float32(0.0)
            for i in cutlass.range_constexpr(HALF_PANELS):
                acc_o[i].fill(0.0)
        theirs = storage.sums.get_tensor(cute.make_layout((CONSUMERS, n)))
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * CONSUMERS * n)
        if thread < n:
            place = storage.sums.data_ptr() + cute.assume(self.number * CONSUMERS, divby=CONSUMERS)
            cute.arch.inline_ptx(
                "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [{$r0}], {{$r1}, {$r2}}, [{$r3}];",
                read_only_args=[
                    of_peer(place.toint(), rank), self.sums[EVEN], self.sums[ODD], of_peer(full.toint(), rank)
                ],
            )  # fmt: skip
        cute.arch.mbarrier_wait(full, parity)
        if (self.number >= n) & (self.number < both):
            for i in cutlass.range_constexpr(CONSUMERS):
                self.sums[i] = theirs[i, self.number - n]


def of_warps(exchange: cute.Pointer, head: Int32, n: int) -> Float32:
    """The sum of what the warps of a consumer have published of a head."""
    values = [exchange[i * n + head] for i in range(WARPS)]
    return (values[0] + values[1]) + (values[2] + values[3])


def publish_sums(values: cute.Tensor, exchange: cute.Pointer, lane: Int32) -> None:
    """`softmax.publish_sums`, which takes a power of two of columns, up to 32, of all columns."""
    first, size = 0, cute.size(values)
    while first < size:
        count = min(8, 1 << ((size - first).bit_length() - 1))
        part = cute.make_tensor(values.iterator + first, cute.make_layout(count))
        softmax.publish_sums(part, exchange + 4 * first, lane)
        first += count


def word_place(thread: Int32, c: int, panel: int, in_order: Any) -> tuple[Int32, Int32]:
    """(head of the query tile, word of its row) of a thread's two results in column c of a panel of its consumer's:
    neighbouring columns, which are rows a and a + 8 of the MMA, a = lane / 4. in_order: the row has its columns in
    order, else as `split_kv.partials` wants them: pairs of four blocks of eight beside each other."""
    me, lane, warp = thread // WARPGROUP, thread % 32, thread // 32 % WARPS
    a, quad = lane // 4, (me * HALF_PANELS + panel) * 2 + warp // 2
    within = cutlass.select_(in_order, warp % 2 * 8 + a, a % 4 * 4 + warp % 2 * 2 + a // 4)
    return wgmma.acc_column(lane, c), quad * 16 + within


@cute.jit
def add_partial(
    acc_o: cutlass.Constexpr,  # of this consumer
    found: cutlass.Constexpr,  # `Head`
    storage: cutlass.Constexpr,
    results: Results,
    tile: Int32,  # CTA of the request
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
    slot: Int32,
):
    """Adds a partial, of the same columns and heads in the same order; behind a barrier of all consumers."""
    outputs, stats = results.outputs, results.stats
    both, count, layout = geometry.both, geometry.both // 4, geometry.partials
    me, lane = thread // WARPGROUP, thread % 32
    exchange = storage.exchange.data_ptr() + cute.assume(me * (WARPS * geometry.n), divby=geometry.n)
    if found.number < both:
        theirs_of = cute.make_rmem_tensor(partials.STATS, Float32)
        cute.autovec_copy(layout.stats(stats.iterator, layout.row(slot, tile, found.number)), theirs_of)
        top = cute.arch.fmax(found.maximum[0], cute.arch.fmax(theirs_of[0], theirs_of[2]))
        older = softmax.exp2(found.maximum[0] - top)
        found.maximum[0] = top
        for i in cutlass.range_constexpr(CONSUMERS):
            weight = softmax.exp2(theirs_of[2 * i] - top)
            found.sums[i] = found.sums[i] * older + theirs_of[2 * i + 1] * weight
            if me == i:
                exchange[both + found.number] = weight
        exchange[found.number] = older
    cute.arch.barrier(barrier_id=Barrier.EVEN + me, number_of_threads=WARPGROUP)
    mine, theirs = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32)
    softmax.collect(mine, exchange, 1, lane, False)
    softmax.collect(theirs, exchange + both, 1, lane, False)
    for c in cutlass.range_constexpr(count):
        for i in cutlass.range_constexpr(HALF_PANELS):
            column, word = word_place(thread, c, i, Boolean(False))
            source = layout.outputs(outputs.iterator, layout.row(slot, tile, column))
            pair = cute.make_rmem_tensor(2, Float16)
            source = source + cute.assume(2 * word, divby=2)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), pair)
            columns = wgmma.as_columns(acc_o[i])
            for r in cutlass.range_constexpr(2):
                columns[c, r] = columns[c, r] * mine[c] + Float32(pair[r]) * theirs[c]


@cute.jit
def weigh_whole(
    found: cutlass.Constexpr,  # `Head`
    weights: cute.Pointer,  # (2n,) fp32, shared memory: what this consumer's outputs are to be multiplied with
    sinks: cute.Pointer,  # shared memory
    lse: cute.Tensor,
    place: Int32,  # the query token's, of all requests
    ranks: cutlass.Constexpr,  # `Ranks`
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
):
    """What outputs of a whole request are multiplied with: one over their sums, the sink's share among them. And the
    log-sum-exp of own heads."""
    if found.number < geometry.both:
        total, maximum = found.sums[EVEN] + found.sums[ODD], found.maximum[0]
        over = total
        if cutlass.const_expr(geometry.sink):
            over = total + softmax.exp2(sinks[found.number] - maximum)
        weights[found.number] = cutlass.select_(total > 0.0, cute.arch.rcp_approx(over), Float32(0.0))
        if thread < geometry.n:
            head = ranks.first_row + head_of(found.number, ranks.rank, geometry)
            lse[place, head, 0] = softmax.natural_lse(total, maximum)


@cute.jit
def weigh_partial(
    acc_o: cutlass.Constexpr, found: cutlass.Constexpr, weights: cute.Pointer, results: Results, slot: Int32,
    tile: Int32, thread: Int32, geometry: cutlass.Constexpr,
):  # fmt: skip
    """What outputs of a share of a request are multiplied with: a power of two (`split_kv.partials`). And its
    statistics. weights: as of `weigh_whole`, the first row of a buffer of the consumer's warps."""
    both, count = geometry.both, geometry.both // 4
    me, lane, warp = thread // WARPGROUP, thread % 32, thread // 32 % WARPS
    magnitudes = cute.make_rmem_tensor(count, Float32)
    magnitudes.fill(0.0)
    for i in cutlass.range_constexpr(HALF_PANELS):
        columns = wgmma.as_columns(acc_o[i])
        for c in cutlass.range_constexpr(count):
            for r in cutlass.range_constexpr(2):
                magnitudes[c] = magnitudes[c] + cute.math.absf(columns[c, r])
    publish_sums(magnitudes, weights + warp * both, lane)
    cute.arch.barrier(barrier_id=Barrier.EVEN + me, number_of_threads=WARPGROUP)
    if found.number < both:
        exponent = partials.exponent_of(of_warps(weights, found.number, both))
        weights[found.number] = partials.power_of_two(partials.TARGET_EXPONENT - exponent)
        own = cutlass.select_(me > 0, found.sums[ODD], found.sums[EVEN])
        layout = geometry.partials
        of_row = layout.stats(results.stats.iterator, layout.row(slot, tile, found.number))
        partials.store_stats(of_row, me, found.maximum[0], own, exponent)


@cute.jit
def epilogue(
    acc_o: cutlass.Constexpr,  # of this consumer
    weights: cute.Pointer,  # (2n,) fp32, shared memory; the consumer's threads have yet to meet
    storage: cutlass.Constexpr,
    results: Results,
    token: Int32,  # the query token, of all requests
    place: Place,  # where the results go
    tile: Int32,  # CTA of the request
    ranks: cutlass.Constexpr,  # `Ranks`
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
):
    """Multiplies results with their weights and writes them, once P of this consumer's last tile is free. The same code
    for both consumers, so that there is half as much to fetch."""
    out, _, outputs, _ = results
    slot, whole = place.slot, place.whole
    both, count, layout = geometry.both, geometry.both // 4, geometry.partials
    me, lane = thread // WARPGROUP, thread % 32
    factor = cute.make_rmem_tensor(count, Float32)
    cute.arch.barrier(barrier_id=Barrier.EVEN + me, number_of_threads=WARPGROUP)
    softmax.collect(factor, weights, 1, lane, False)
    base = outputs.iterator.toint() + 2 * layout.row(slot, tile, Int32(0)) * layout.columns
    if whole:
        first = rows.row_offset(out, token, Int32(0), ranks.first_row, geometry.h)
        base = out.iterator.toint() + 2 * first + 2 * COLUMNS * ranks.rank
    # Through shared memory, a panel at a time where the consumer's P was: rows are written 128 bytes at a time.
    exchange = cute.recast_ptr(storage.p.data_ptr(), dtype=Int32)
    exchange = exchange + cute.assume(me * (both * TOKENS // 2), divby=32)
    for i in cutlass.range_constexpr(HALF_PANELS):
        wgmma.scale_columns(acc_o[i], factor)
        words = cute.make_rmem_tensor(2 * geometry.pairs, Int32)
        if whole:
            store_words(words, wgmma.to_dtype(acc_o[i], out.element_type))
        else:
            store_words(words, wgmma.to_dtype(acc_o[i], Float16))
        if cutlass.const_expr(i > 0):
            cute.arch.barrier(barrier_id=Barrier.EVEN + me, number_of_threads=WARPGROUP)
        _, word = word_place(thread, 0, i, whole)
        for r in cutlass.range_constexpr(2):
            # Columns r, r + 8, ..: behind the first one's place by as many rows.
            row = wgmma.acc_column(lane, r)
            place_of_row = exchange + exchange_word(row, word % PANEL_WORDS)
            for c in cutlass.range_constexpr(r, count, 2):
                both_halves = permute(words[c - r], words[c - r + 1], 0x7632 if r else 0x5410)
                place_of_row[c // 2 * 8 * PANEL_WORDS] = both_halves
        cute.arch.barrier(barrier_id=Barrier.EVEN + me, number_of_threads=WARPGROUP)
        chunk = thread % 8
        for row in cutlass.range(thread % WARPGROUP // 8, both, WARPGROUP // 8, unroll=1):
            vector = cute.make_rmem_tensor(4, Int32)
            source = (exchange + cute.assume(exchange_word(row, 4 * chunk), divby=4)).align(16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), vector)
            of_row = cutlass.select_(whole, head_of(row, ranks.rank, geometry) * (2 * VALUES), row * (2 * COLUMNS))
            target = base + Int64(of_row + ((me * HALF_PANELS + i) * PANEL + 8 * chunk) * 2)
            target = cute.make_ptr(Int32, target, cute.AddressSpace.gmem, assumed_align=16)
            cute.autovec_copy(vector, cute.make_tensor(target, cute.make_layout(4)))
    # Ahead of the next P, of which the other CTA's heads come by a bulk copy.
    cute.arch.fence_view_async_shared()


def exchange_word(row: Int32, word: Any) -> Any:
    """Where a word of a panel's results lies: 16-byte chunks of a row are permuted, so that neither the threads that
    write nor those that read have a bank in common."""
    return row * PANEL_WORDS + ((word // 4) ^ (row % 8)) * 4 + word % 4


def store_half(address: Int32, word: Int32) -> None:
    """The lower half of a word, to shared memory."""
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, {$r1}; st.shared.b16 [{$r0}], low; }"
    cute.arch.inline_ptx(text, read_only_args=[address, word])


@cute.jit
def store_words(words: cute.Tensor, rounded: cute.Tensor):
    """The 16-bit elements of an accumulator as words."""
    words.store(cute.recast_tensor(rounded, Int32).load().reshape(words.shape))


# ------------------------------------------------------------------------------------------------ device: consume
@cute.jit
def merge_all(
    walk: cutlass.Constexpr,  # `Walk`
    place: Place,
    split: Split,
    tiles: Tiles,
    add: cutlass.Constexpr,  # `add_partial`, but for the slot
    thread: Int32,  # 0..255
) -> Place:
    """`Walk.merge_all` with one branch around all that only a cut request needs."""
    split_index, slot, whole = place
    if (not whole) & (walk.line.lead > 0):
        slot = scheduler.slot_of(walk.worker, split.request)
        if walk.pool.combined == 0:
            own = scheduler.split_index_of(walk.worker, split, tiles.of_request, walk.line)
            walk.merge_tree(own, split.request, add, Group(Barrier.CONSUMERS, CONSUMER_THREADS), thread)
            whole = own.index == 0
    return Place(split_index, slot, whole)


@cute.jit
def consume(
    storage: cutlass.Constexpr,
    results: Results,
    sink: cute.Tensor | None,
    scale_log2: Float32,
    walk: cutlass.Constexpr,  # `Walk`
    split: Split,
    ranks: cutlass.Constexpr,  # `Ranks`
    thread: Int32,  # 0..255
    geometry: cutlass.Constexpr,
):
    """What the consumers do, over all splits of the worker."""
    tile, both = walk.tile, geometry.both
    panel = wgmma.make_mma(Float16, both, a_in_registers=True).partition_shape_C((TOKENS, both))
    acc_o = [cute.make_rmem_tensor(panel, Float32) for _ in range(HALF_PANELS)]
    registers, found = Registers(acc_o, cute.make_rmem_tensor(geometry.n // 4, Float32)), Head.make(thread)
    row_sum = registers.row_sum
    add = functools.partial(add_partial, acc_o, found, storage, results, tile, thread, geometry)
    me = cute.arch.make_warp_uniform(thread // WARPGROUP)
    if cutlass.const_expr(geometry.sink):
        # Read once, as a split's end would wait for them.
        if thread < both:
            head = ranks.first_row + head_of(thread, ranks.rank, geometry)
            storage.sinks.data_ptr()[thread] = sink[head] * math.log2(math.e)
    stage, phase, parity = Int32(0), Int32(0), Int32(0)
    even_uses, odd_uses = Int32(0), Int32(0)  # parities of how many tiles each consumer has made P of
    while walk.has_work(split):
        tiles = walk.tiles_of(split)
        first, end, _ = tiles
        block = walk.queries.block(split.request)
        cute.arch.mbarrier_wait(storage.query_full.data_ptr(), parity)
        # Said here, or the last split's results would keep their registers while the query is loaded.
        for i in cutlass.range_constexpr(HALF_PANELS):
            acc_o[i].fill(0.0)
        row_sum.fill(0.0)
        of_query = widen_query(storage, thread, geometry)
        cute.arch.fence_view_async_shared()
        named_sync(Barrier.CONSUMERS, CONSUMER_THREADS)
        w = Consumer.make(me, ranks.rank, geometry, storage, thread % WARPGROUP, scale_log2 * of_query, registers)
        own_uses = cutlass.select_(me > 0, odd_uses, even_uses)
        w.run(end - first, stage, phase, own_uses, even_uses ^ odd_uses ^ own_uses)
        even_uses, odd_uses = even_uses ^ ((end - first + 1) // 2 & 1), odd_uses ^ ((end - first) // 2 & 1)
        moved = stage + (end - first)
        phase = phase ^ (moved // geometry.stages & 1)
        stage = moved % geometry.stages
        following = walk.next_split(split)
        if not walk.has_work(following):
            cute.arch.griddepcontrol_launch_dependents()
        place = walk.place_of(split, tiles)
        found.collect(row_sum, acc_o, storage, thread, ranks.rank, parity, geometry)
        parity = parity ^ 1
        weights = storage.magnitudes.data_ptr() + cute.assume(me * (WARPS * both), divby=both)
        place = merge_all(walk, place, split, tiles, add, thread)
        if place.whole:
            sinks = storage.sinks.data_ptr()
            weigh_whole(found, weights, sinks, results.lse, block.first, ranks, thread, geometry)
        else:
            weigh_partial(acc_o, found, weights, results, place.slot, tile, thread, geometry)
        # All have multiplied with the last P, and the copy of it to the other CTA has come, once it is free.
        own_uses = cutlass.select_(me > 0, odd_uses, even_uses)
        cute.arch.mbarrier_wait(storage.p_free.data_ptr() + me, own_uses ^ 1)
        epilogue(acc_o, weights, storage, results, block.first, place, tile, ranks, thread, geometry)
        named_sync(Barrier.CONSUMERS, CONSUMER_THREADS)
        walk.publish_all(split, tiles, thread)
        split = following


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def sparse_mla_v3(
    inputs: Inputs,
    results: Results,  # out (b · s, 1, h, 512), lse (b · s, h, 1)
    flags: cute.Tensor,  # int32, global memory: 0 in front of a launch and behind it
    schedule: Schedule,
    scale_log2: Float32,
    pool: Pool,
    geometry: cutlass.Constexpr,
):
    """The CTA of half of a query token's columns (x) and worker (y, from the last one)."""
    thread, _, _ = cute.arch.thread_idx()
    tile, block, _ = cute.arch.block_idx()
    worker = pool.workers - 1 - block  # a worker waits for later ones (README.md), which this way are launched first
    rank, cluster = tile % CTAS, tile // CTAS
    row_tile = cluster % geometry.row_tiles
    ranks = Ranks(rank, cluster // geometry.row_tiles, row_tile, row_tile * geometry.both)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = SmemAllocator().allocate(shared_storage(geometry))
    if warp == CONSUMERS * WARPS:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(geometry.stages):
                cute.arch.mbarrier_init(storage.full.data_ptr() + i, PRODUCERS)
                cute.arch.mbarrier_init(storage.empty.data_ptr() + i, CONSUMERS * WARPS)
            for i in cutlass.range_constexpr(CONSUMERS):
                cute.arch.mbarrier_init(storage.scores_full.data_ptr() + i, 1)
                cute.arch.mbarrier_init(storage.max_full.data_ptr() + i, 1)
                cute.arch.mbarrier_init(storage.p_full.data_ptr() + i, 1)
                cute.arch.mbarrier_init(storage.p_free.data_ptr() + i, CTAS * CONSUMERS * WARPS)
            cute.arch.mbarrier_init(storage.sums_full.data_ptr(), 1)
            cute.arch.mbarrier_init(storage.query_full.data_ptr(), 1)
            cute.arch.mbarrier_init(storage.query_empty.data_ptr(), CONSUMERS * WARPS)
        cpasync.prefetch_descriptor(inputs.tma)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()
    cute.arch.cluster_arrive()
    # Nothing that a kernel before may have written is read, and nothing is written, ahead of this.
    cute.arch.griddepcontrol_wait()
    queries = Token(ranks.token, geometry.s)
    cta, searcher = Cta(worker, tile, thread, warp, thread % 32), CONSUMER_THREADS
    walk, split = begin_filled(schedule, flags, inputs.lengths, queries, pool, cta, searcher, geometry.merge)
    cute.arch.cluster_wait()  # both CTAs' mbarriers are made
    if warp >= CONSUMERS * WARPS:
        cute.arch.setmaxregister_decrease(REGISTERS[0])
        load(inputs, storage, walk, split, ranks, warp - CONSUMERS * WARPS, geometry)
    else:
        cute.arch.setmaxregister_increase(REGISTERS[1])
        consume(storage, results, inputs.sink, scale_log2, walk, split, ranks, thread, geometry)
    # No CTA leaves while the other one may still send to it, or arrive at its mbarriers.
    cute.arch.sync_warp()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


sparse_mla_v3.set_name_prefix("sparse_mla_v3", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
def make_query_tma(q: cute.Tensor, heads: int) -> tuple[Any, cute.Tensor]:
    """(TMA atom, tensor (h, columns, s, b)) for boxes of `heads` heads x 64 columns of a query token. q: (b, s, h,
    columns), columns contiguous and rows multiples of 16 bytes apart. A head past the last one reads zeros."""
    b, s, h, columns = q.shape
    of_request, of_token, of_head, _ = q.stride
    # What a tensor says of the stride of a mode of size 1 means nothing.
    of_head = of_head if h > 1 else columns
    of_token = of_token if s > 1 else h * columns
    of_request = cute.assume(cutlass.select_(b > 1, Int64(of_request), Int64(s * h * columns)), divby=paged.CHUNK)
    view = cute.make_layout((h, columns, s, b), stride=(of_head, 1, of_token, of_request))
    layout = wgmma.k_major_layout(q.element_type, (heads, PANEL))
    load = cpasync.CopyBulkTensorTileG2SOp()
    return cpasync.make_tiled_tma_atom(load, cute.make_tensor(q.iterator, view), layout, (heads, PANEL), 1)


@cute.jit
def launch_sparse_mla_v3(
    q: cute.Tensor,  # (b, s, h, columns) bf16, columns contiguous
    cache: cute.Tensor,  # (pages, page, bytes of a token) uint8, contiguous within a page
    indices: cute.Tensor,  # (b, s, topk) int32; its last dimension contiguous
    lengths: cute.Tensor,  # (b,) int32, of which only the number is read
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
    """Launches a cluster for each query tile and worker, as a programmatic dependent."""
    b, tokens = q.shape[0], scheduler.ceil_div(indices.shape[2], TOKENS) * TOKENS
    schedule = scheduler.schedule_in(words, workers, False)
    results = Results(rows.by_token(out, b), rows.lse_by_token(lse, b), *geometry.partials.views(of_partials))
    pool = scheduler.make_merged_pool(b, tokens, workers, geometry.costs)
    tma, q_boxes = make_query_tma(q, geometry.n)
    inputs = Inputs(tma, q_boxes, cache, indices, lengths, sink)
    sparse_mla_v3(inputs, results, flags, schedule, scale * math.log2(math.e), pool, geometry).launch(
        grid=(geometry.tiles, workers, 1),
        block=(THREADS, 1, 1),
        cluster=(CTAS, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: SparseProblem) -> Verdict:
    """Whether this version computes a problem."""
    if pd.layout != "v32" or pd.paged or pd.extra or pd.lengths or pd.strided_out:
        return Verdict.no(
            "sparse_mla_v3 takes layout v32 by indices, without lengths, an extra cache or strides of out: use "
            "sparse_mla_v2"
        )
    if pd.h % 16:
        return Verdict.no(f"h = {pd.h} is not a multiple of 16: use sparse_mla_v2")
    return Verdict.yes()


@dataclass(frozen=True)
class SparseMlaV3Tiling(Tiling):
    """heads: of a CTA's softmax, half of those of a cluster, a multiple of 8 up to 48; 0: the most that divide half of
    the heads. workers: clusters for each query tile of a request; 0: as many as fill the device."""

    launch_fields: ClassVar[tuple[str, ...]] = ("workers",)

    heads: int = 0
    workers: int = 0

    def geometry(self, pd: SparseProblem) -> Geometry:
        """What the code is made for."""
        n = self.heads or max((n for n in HEADS if pd.h % (CTAS * n) == 0), default=HEADS[0])
        return Geometry(pd.h, n, pd.s, pd.page, pd.sink)

    def validate(self, pd: SparseProblem, device: Device | None = None) -> Verdict:
        if not 0 <= self.workers <= scheduler.MOST_WORKERS:
            return Verdict.no(f"workers = {self.workers} must be between 0 and {scheduler.MOST_WORKERS:,}")
        if self.heads not in (0, *HEADS):
            return Verdict.no(f"heads = {self.heads} must be 0 or one of {', '.join(map(str, HEADS))}")
        geometry = self.geometry(pd)
        if pd.h % geometry.both:
            return Verdict.no(f"{pd.h} heads are not a multiple of the {geometry.both} of a cluster")
        if device is not None and geometry.tiles > device.num_sms:
            return Verdict.no(
                f"{geometry.tiles} CTAs of a request are more than the {device.num_sms} multiprocessors of "
                f"{device.key}: workers wait for each other and must all be running"
            )
        if not (counted := limits.sparse_sizes(pd)):
            return counted
        workers = self.workers or (max(1, device.num_sms // geometry.tiles) if device is not None else 1)
        tokens = -(-pd.topk // TOKENS) * TOKENS
        return decode_host.schedule_sizes(pd.b, tokens, workers, 0, geometry.partials, geometry.costs)


class SparseMlaV3Plan(KernelPlan):
    """One compiled kernel a `code_class`; b, numbers of tokens and indices, and workers are arguments."""

    workload = sparse_decode.WORKLOAD
    tiling_type = SparseMlaV3Tiling
    tiling: SparseMlaV3Tiling
    uses = (
        "clusters-multicast", "dependent-launch", "device-tile-scheduler", "fast-exp2-softmax",
        "loading/packed-fp8-keys", "split-kv", "swapped-operands", "two-warpgroup-output",
    )  # fmt: skip
    requires = Requirement(
        archs=("sm_90a",),
        dtypes=("bf16",),
        features=("wgmma", "setmaxnreg", "cluster"),
        problem=takes,
        options=("strided",),
    )
    reads_any_strides = True

    def default_tiling(self) -> Tiling:
        return SparseMlaV3Tiling()

    def autotune_configs(self) -> list[Tiling]:
        return [SparseMlaV3Tiling()]

    def workers(self) -> int:
        """Workers of a query tile: the tiling's, or those that fill the device."""
        return self.tiling.workers or max(1, host.target(self).num_sms // self.tiling.geometry(self.problem).tiles)

    def plan(self, *inputs: Any) -> CuteKernel:
        import torch

        self.require()
        pd, geometry, workers = self.problem, self.tiling.geometry(self.problem), self.workers()
        given = sparse_decode.named(pd, *inputs)
        q = given["q"]
        b = q.shape[0]
        outputs = sparse_decode.new_outputs(pd, q)
        tiles = -(-given["indices"].shape[-1] // TOKENS)
        lengths = torch.full((b,), tiles * TOKENS, dtype=torch.int32, device=q.device)
        spaces = decode_host.workspaces(q, geometry.partials, b, workers)
        arguments = (
            q, given["cache"], given["indices"], lengths, given.get("sink"), *outputs, *spaces, pd.scale, workers
        )  # fmt: skip
        return self._make(arguments, inputs, outputs, (*spaces, lengths))

    def plan_empty(self) -> CuteKernel:
        self.require()
        return self._make((), (), ())

    def _make(self, given: Any, inputs: Any, outputs: Any, workspaces: Any = ()) -> CuteKernel:
        pd, geometry, kind = self.problem, self.tiling.geometry(self.problem), host.element_type(self.problem.dtype)

        def arguments() -> tuple[Any, ...]:
            b, pages, width = host.symbols(3)
            apart = cute.sym_int64(divisibility=16)
            return (
                decode_host.fake_apart(kind, b, pd.s, pd.h, pd.columns),
                make_fake_tensor(Uint8, (pages, pd.page, ROW_BYTES), (apart, ROW_BYTES, 1), assumed_align=16),
                decode_host.fake_apart(Int32, b, pd.s, width, align=4),
                host.fake(Int32, b, align=4),
                host.fake(Float32, pd.h, align=4) if pd.sink else None,
                *decode_host.fake_results(kind, (b, pd.s, pd.h, VALUES), (b, pd.h, pd.s), False),
                *decode_host.fake_workspaces(),
                Float32(1.0),
                Int32(1),
                geometry,
            )

        return host.stage(
            self, sparse_mla_v3, launch_sparse_mla_v3, "sparse_mla_v3", arguments, given, inputs, outputs, workspaces
        )
