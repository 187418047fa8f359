r"""mqa_logits v4 in CuTe for Hopper (sm_90a): the lightning indexer's logits, persistent CTAs, keys on the M side.

    S (64 keys x n) = K · Qᵀ in FP8       n = query tokens of a tile x heads, 256 in prefill
    logits[token, key] = scale[key] · Σ over the token's heads of weight · max(S, 0)

A query tile has as many query tokens as fill the 256 columns of an MMA (4 of 64 heads): what is loaded of the keys for
a tile serves four tokens, so that L2 is asked for the keys a quarter as often. Keys are rows of the accumulator. The
columns of a query tile are dealt to the four lanes that share a row, so that of a tile of four tokens (or eight, or
sixteen) a thread has all heads of its own tokens: the weighted sum over heads is a relu and an FMA an accumulator, and
no step of it crosses lanes. One TMA load of four dimensions puts columns where they are wanted.

All CTAs share the work evenly: a query tile with its KV tiles of 64 keys is a unit, the units lie behind each other on
a line, and CTA i of G takes the i-th of G equal pieces. On the line a unit has a point for each KV tile, and some in
front of them (`UNIT_POINTS`) for the change from one query tile to the next. Logits of different keys have nothing to
do with each other, so a piece may begin and end in the middle of a unit, and nothing is merged. Each CTA finds its
piece from the ranges in memory (`find_piece`).

    load (a warp)   query tile: codes by TMA, weights by cp.async, the tokens' ranges → one of `query_stages`
                    KV tile: codes by TMA, scales by cp.async → one of `stages`
                    in long calls over pages, with query tiles of at most 64 columns, four warps, each with every
                    fourth KV tile, whose scales come by a bulk copy
    consumers       each takes every `consumers`-th KV tile of the CTA's piece:
        mma         wait full;  wait for the turn;  S = K · Qᵀ, four products of 32 columns with each part of the query
                    tile;  when all but the last are done, hand the turn on;  wait;  free the stage
        epilogue    Σ weight · max(S, 0) per key and token, in registers, of a part while the next one is multiplied
                    → sum over the lanes of a token, if it has several, each of which keeps a share of the sums
                    → · scale → logits

A token's range cuts single stores, so a tile needs no mask before the sum, and what a page holds behind a request's end
is never stored. A sum that is NaN is stored as -inf.

Where a thread has all heads of one token of a wide tile and logits are float32, the products take turns, so that those
of one consumer run beside the epilogue of the other:

    consumer 0      | products |   epilogue   |        | products |   epilogue   |
    consumer 1                 | products |   epilogue   |        | products |

Without turns both issue at about the same time, the tensor cores serve both evenly, and both are in their epilogue at
once while the tensor cores have nothing to do. Where a thread has several tokens of a wide tile, the tile is multiplied
in two parts without turns, and the sums of the first part are made beside the products of the second.

Against version 3: turns; pages leave L2 first, so that logits stay there; three tokens have two consumers with the
registers for their addresses, which grow from tile to tile and are not made anew; a query tile's weights are read
without bank conflicts; more stages where query tiles are small. Keys on the M side and the reduction in registers are
DeepGEMM's (sm90_fp8_mqa_logits).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from mla_var3.device import Device, Requirement
from mla_var3.errors import UserError
from mla_var3.kernel.cute_python import host
from mla_var3.kernel.cute_python.prims import wgmma
from mla_var3.kernel.cute_python.prims.sync import named_arrive, warp_arrive
from mla_var3.kernel.cute_python.prims.wgmma import WARPGROUP
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.workload import indexer_logits
from mla_var3.workload.indexer_logits import PAGE, TOKEN_BYTES, D

if TYPE_CHECKING:
    from mla_var3.workload.indexer_logits import IndexerLogitsProblem

KEYS = 64  # of a KV tile: the M side of an MMA, and the tokens of a page
COLUMNS = 256  # most of an MMA
MMA_K = 32  # FP8 columns of an MMA
WARP = 32
HEADS = (16, 32, 64)
#: Registers of a thread of the producers and of the consumers, by consumers: of 65536 that a launch gives evenly.
REGISTERS = {2: (24, 240), 4: (24, 112)}
PRODUCTS = D // MMA_K  # of a KV tile with a part of a query tile
MOST_STAGES = 24
MOST_PRODUCERS = 4  # warps of the producers' warpgroup
MANY_TOKENS = 1 << 21  # cached, of all requests, from which on calls are long
PAD = 8  # words behind a token's weights: those of four tokens lie in other banks of shared memory
EVICT_FIRST = 0x12F0000000000000  # an L2 cache policy, as createpolicy makes it
INFO = 4  # words in front of a query tile's ranges
FIRST_KEY, TILES, ROW = 0, 1, 2  # of these words
NOBODY = (1 << 31) - 1
#: KV tiles' time that the change from one query tile to the next takes, of tiles with more than 128 columns and others.
UNIT_POINTS = (4, 1)
#: Above every |S|, which is at most 128 · 448²; a power of two, by which a product is exact.
UNIT = 2.0**25


class Barrier(IntEnum):
    """Named barriers. TURN + i: consumer i may issue its products."""

    TURN = 1


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on. h: heads. s: query tokens of a request, 0 in prefill. tokens: of a query tile.
    consumers: warpgroups that multiply. query_parts: of a query tile, each with products of its own. turns: whether
    consumers take turns with their products. beyond: a query token with as many keys in range, or fewer, gets no
    logits. producers: warps that load KV tiles, each every so many-th stage; where they are several, the scales of a
    page come by one bulk copy."""

    h: int
    s: int
    tokens: int
    consumers: int
    query_parts: int
    turns: bool
    beyond: int = 0
    producers: int = 1

    @property
    def bulk(self) -> bool:
        """Whether the scales of a page come by one bulk copy."""
        return self.producers > 1

    @property
    def n(self) -> int:
        """Columns of a query tile, and of the products."""
        return self.tokens * self.h

    @property
    def chunks(self) -> int:
        """Query tiles of a request, where requests have a page table."""
        return -(-self.s // self.tokens)

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP

    @property
    def evicts(self) -> bool:
        """Whether pages leave L2 first. What a request's other query tiles read too stays."""
        return 0 < self.s <= self.tokens

    @property
    def unit_points(self) -> int:
        return UNIT_POINTS[self.n <= COLUMNS // 2]

    @property
    def pitch(self) -> int:
        """Words from a token's weights to the next one's, in shared memory."""
        return self.h + PAD

    @property
    def query_stages(self) -> int:
        """Query tiles in shared memory."""
        return 2 if self.n > COLUMNS // 2 or self.n <= COLUMNS // 4 else 3

    @property
    def info(self) -> int:
        """Words that say what a query tile is."""
        return INFO + 2 * self.tokens

    @property
    def fixed_bytes(self) -> int:
        """Of shared memory: query tiles with weights and ranges, barriers, alignment."""
        return self.query_stages * (self.n * D + 4 * (self.tokens * self.pitch + self.info)) + 3072

    @property
    def stages(self) -> int:
        """KV tiles in shared memory."""
        most = Device.assumed().smem_per_block - self.fixed_bytes
        return min(most // (KEYS * (D + 4)), MOST_STAGES) // self.producers * self.producers

    @property
    def together(self) -> int:
        """Query tokens whose columns lie between each other, so that each has its own of a row's four lanes: 4, 2 or
        1."""
        return next(count for count in (4, 2, 1) if self.tokens % count == 0)

    @property
    def lanes(self) -> int:
        """Lanes that have columns of a token."""
        return 4 // self.together

    @property
    def run(self) -> int:
        """Columns of a token that lie behind each other."""
        return 2 * self.lanes

    @property
    def groups(self) -> int:
        """Of tokens together."""
        return self.tokens // self.together

    @property
    def sums(self) -> int:
        """A thread's sums in front of the exchange: a group's, of two keys."""
        return 2 * self.groups

    @property
    def kept(self) -> int:
        """Sums that a lane is left with."""
        left = self.sums
        for _ in range(self.lanes.bit_length() - 1):
            left = left // 2 if left % 2 == 0 else left
        return left

    @property
    def paired(self) -> bool:
        """Whether a lane is left with both keys of its tokens."""
        return self.sums % (2 * self.lanes) == 0

    @property
    def targets(self) -> int:
        """Places of a lane's logits; of both keys of a token one."""
        return self.kept // 2 if self.paired else self.kept


def shared_storage(geometry: Geometry) -> type:
    """The CTA's shared memory."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.MemRange[kind, size]

    stages, queries = geometry.stages, geometry.query_stages
    fields = {
        "full": array(Int64, stages),  # mbarriers: the KV tile has been loaded
        "empty": array(Int64, stages),  # mbarriers: it is no longer read
        "query_full": array(Int64, queries),
        "query_empty": array(Int64, queries),
        "sums": array(Int32, WARP),  # of a warp's tiles
        "piece": array(Int32, 4),  # unit, first point in it, points
        "info": array(Int32, queries * geometry.info),
        "weights": cute.struct.Align[array(Float32, queries * geometry.tokens * geometry.pitch), 16],
        "scales": cute.struct.Align[array(Float32, stages * KEYS), 16],
        "query": cute.struct.Align[array(Float8E4M3FN, queries * geometry.n * D), 1024],
        "keys": cute.struct.Align[array(Float8E4M3FN, stages * KEYS * D), 1024],
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def tiles_in(base: cute.Pointer, rows: int, count: int) -> cute.Tensor:
    """(rows, 128, count) codes in shared memory, swizzled."""
    return wgmma.smem_view(base, 0, wgmma.k_major_layout(Float8E4M3FN, (rows, D, count)))


def query_box(geometry: Geometry, more: tuple[int, ...] = ()) -> cute.ComposedLayout:
    """Where a box of a query tile lies: (heads of a run, tokens together, runs, 128, [...more]) codes, swizzled."""
    shape, step = (geometry.run, geometry.together, geometry.h // geometry.run, D), geometry.together * geometry.h * D
    strides = (D, geometry.run * D, 8 * D, 1)
    behind = (step, geometry.groups * step)[: len(more)]
    inner = wgmma.k_major_layout(Float8E4M3FN, (8, D)).inner
    return cute.make_composed_layout(inner, 0, cute.make_layout((*shape, *more), stride=(*strides, *behind)))


# ------------------------------------------------------------------------------------------------ device: who does what
class Inputs(NamedTuple):
    """Of the kernel. starts is None where there is a page table, and table is None where there is none."""

    query_tma: cute.CopyAtom
    query: cute.Tensor  # TMA tensor (heads of a run, query tokens, runs, 128)
    key_tma: cute.CopyAtom
    keys: cute.Tensor  # TMA tensor (t, 128), or (64, 128, pages)
    scales: cute.Tensor  # (t,), or (64, pages)
    weights: cute.Tensor  # (query tokens, h)
    starts: cute.Tensor | None  # (query tokens,)
    ends: cute.Tensor  # (query tokens,)
    table: cute.Tensor | None  # (b, width)
    columns: Int32  # of the logits


def row_of(inputs: Any, unit: Int32, i: Any, geometry: Geometry) -> tuple[Any, Any]:
    """(row, whether there is one) of query token i of a unit."""
    if geometry.s:
        token = unit % geometry.chunks * geometry.tokens + i
        row = unit // geometry.chunks * geometry.s + token
        return row, (token < geometry.s) & (row < inputs.ends.shape[0])
    row = unit * geometry.tokens + i
    return row, row < inputs.ends.shape[0]


def range_of(inputs: Any, unit: Int32, i: Any, geometry: Geometry) -> tuple[Int32, Int32]:
    """(start, end) of query token i of a unit; an empty range where there is no such token. Without a branch, so that
    the loads of several tokens are under way together."""
    row, there = row_of(inputs, unit, i, geometry)
    row = cutlass.min(row, inputs.ends.shape[0] - 1)
    end = cutlass.select_(there, cutlass.min(inputs.ends[row], inputs.columns), Int32(0))
    start = Int32(0) if inputs.starts is None else cutlass.max(inputs.starts[row], 0)
    if geometry.beyond:
        end = cutlass.select_(end - start > geometry.beyond, end, start)
    return start, end


def tiles_within(low: Int32, high: Int32) -> tuple[Int32, Int32]:
    """(first, count) KV tiles of tokens whose ranges lie between low and high, low the larger where there are none."""
    first = low // KEYS
    return first, cutlass.max((high + (KEYS - 1)) // KEYS - first, 0)


def joined(low: Int32, high: Int32, start: Int32, end: Int32) -> tuple[Int32, Int32]:
    """The least start and the largest end of ranges, with one more that counts if it is not empty."""
    counts = end > start
    low = cutlass.min(low, cutlass.select_(counts, start, Int32(NOBODY)))
    return low, cutlass.max(high, cutlass.select_(counts, end, Int32(0)))


@cute.jit
def tiles_of(inputs: cutlass.Constexpr, unit: Int32, geometry: cutlass.Constexpr):
    """(first, count) KV tiles of a unit."""
    low, high = Int32(NOBODY), Int32(0)
    for i in cutlass.range_constexpr(geometry.tokens):
        low, high = joined(low, high, *range_of(inputs, unit, i, geometry))
    return tiles_within(low, high)


def points_of(count: Int32, geometry: Geometry) -> Int32:
    """Points of a unit on the line."""
    return cutlass.select_(count > 0, count + geometry.unit_points, Int32(0))


@cute.jit
def find_piece(
    inputs: cutlass.Constexpr, storage: cutlass.Constexpr, units: Int32, thread: Int32, geometry: cutlass.Constexpr
):
    """Finds the CTA's piece of the line, by all threads: unit, its first point of the unit, points → `piece`. Each
    thread counts the points of some units that lie behind each other."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    sums = storage.sums.get_tensor(cute.make_layout(WARP))
    piece = storage.piece.get_tensor(cute.make_layout(4))
    warps = geometry.threads // WARP
    each = (units + geometry.threads - 1) // geometry.threads
    first_unit = cutlass.min(thread * each, units)
    end_unit = cutlass.min(first_unit + each, units)
    own = Int32(0)
    for unit in cutlass.range(first_unit, end_unit, unroll=2):
        _, count = tiles_of(inputs, unit, geometry)
        own = own + points_of(count, geometry)
    # Inclusive sums over the lanes of a warp, then over warps.
    lane, warp = thread % WARP, thread // WARP
    upto = own
    for bit in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(upto, offset=1 << bit, mask_and_clamp=0)
        upto = upto + cutlass.select_(lane >= 1 << bit, other, Int32(0))
    if lane == WARP - 1:
        sums[warp] = upto
    if thread == 0:
        piece[0], piece[1], piece[2] = Int32(0), Int32(0), Int32(0)
    cute.arch.sync_threads()
    total, before = Int32(0), upto - own
    for i in cutlass.range_constexpr(warps):
        part = sums[i]
        total = total + part
        before = before + cutlass.select_(warp > i, part, Int32(0))
    share = (total + ctas - 1) // ctas
    begin = cutlass.min(cta * share, total)
    left = cutlass.min(share, total - begin)
    if (left > 0) & (before <= begin) & (begin < before + own):
        at = before
        for unit in cutlass.range(first_unit, end_unit, unroll=1):
            _, count = tiles_of(inputs, unit, geometry)
            points = points_of(count, geometry)
            if (at <= begin) & (begin < at + points):
                piece[0], piece[1], piece[2] = unit, begin - at, left
            at = at + points
    cute.arch.sync_threads()


@cute.jit
def ask_for_lengths(inputs: cutlass.Constexpr, thread: Int32):
    """Asks L2 for the lengths and the page table, which are read behind each other; each of some threads of the grid
    for a line of 128 bytes."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    each = 128 // 4
    line = thread * ctas + cta
    of_ends = (inputs.ends.shape[0] + (each - 1)) // each
    address = inputs.ends.iterator.toint() + Int64(line) * 128
    there = line < of_ends
    if cutlass.const_expr(inputs.table is not None):
        requests, width = inputs.table.shape
        wide = (width + (each - 1)) // each
        row = (line - of_ends) // wide
        column = (line - of_ends - row * wide) * each
        of_table = inputs.table.iterator.toint() + (Int64(row) * inputs.table.stride[0] + column) * 4
        address = cutlass.select_(there, address, of_table)
        there = there | (row < requests)
    if there:
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


# ------------------------------------------------------------------------------------------------ device: load
def next_stage(stage: Int32, phase: Int32, offset: int, stages: int) -> tuple[Int32, Int32]:
    """(stage, phase) `offset` places further on in a ring; offset <= stages."""
    moved = stage + offset
    wrapped = Int32(moved >= stages)
    return moved - wrapped * stages, phase ^ wrapped


def boxes_of(tma: cute.CopyAtom, source: cute.Tensor, places: cute.Tensor, rows: int) -> tuple[Any, Any]:
    """(boxes, places) of `cute.copy`: boxes (box, row tile, [page]) of a TMA tensor, places (box, stage)."""
    boxes = cute.group_modes(cute.flat_divide(source, (rows, D)), 0, 2)
    places, boxes = cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(places, 0, 2), boxes)
    return boxes, places


@cute.jit
def copy_async(source: cute.Pointer, target: cute.Pointer, count: cutlass.Constexpr):
    """Starts a lane's copy of `count` float32 into shared memory."""
    mode = cpasync.LoadCacheMode.ALWAYS if count < 4 else cpasync.LoadCacheMode.GLOBAL
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=mode), Float32, num_bits_per_copy=32 * count)
    words = cute.make_layout(count)
    cute.copy(
        atom, cute.make_tensor(source.align(4 * count), words), cute.make_tensor(target.align(4 * count), words)
    )  # fmt: skip


@cute.jit
def load(
    inputs: cutlass.Constexpr, storage: cutlass.Constexpr, lane: Int32, me: Int32, geometry: cutlass.Constexpr
):  # fmt: skip
    """What a producer warp does; the first one loads the query tiles too."""
    query_full, query_empty = storage.query_full.data_ptr(), storage.query_empty.data_ptr()
    box = (geometry.run, geometry.together, geometry.h // geometry.run, D)
    places = query_box(geometry, (geometry.groups, geometry.query_stages))
    held = cute.group_modes(wgmma.smem_view(storage.query.data_ptr(), 0, places), 0, 4)
    keys = boxes_of(inputs.key_tma, inputs.keys, tiles_in(storage.keys.data_ptr(), KEYS, geometry.stages), KEYS)
    info = storage.info.get_tensor(cute.make_layout((geometry.info, geometry.query_stages)))
    weights = storage.weights.data_ptr()
    piece = storage.piece.get_tensor(cute.make_layout(4))
    unit, skipped, left = piece[0], piece[1], piece[2]
    stage, phase = Int32(0), Int32(0)
    query_stage, query_phase = Int32(0), Int32(0)
    # A lane's query token; the ranges of a unit are read while the one before it is loaded.
    mine = cutlass.min(lane, geometry.tokens - 1)
    next_start, next_end = range_of(inputs, unit, mine, geometry)
    while left > 0:
        start, end = next_start, next_end
        next_start, next_end = range_of(inputs, unit + 1, mine, geometry)
        low, high = joined(Int32(NOBODY), Int32(0), start, end)
        low, high = cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max")
        first, tiles = tiles_within(low, high)
        # The points of this unit in the piece, and the tiles that these are.
        points = cutlass.min(points_of(tiles, geometry) - skipped, left)
        until = cutlass.max(skipped + points - geometry.unit_points, 0)
        before = cutlass.max(skipped - geometry.unit_points, 0)
        count = until - before
        first, skipped = first + before, Int32(0)
        left = left - points
        if count > 0:
            if me == 0 if cutlass.const_expr(geometry.producers > 1) else True:
                cute.arch.mbarrier_wait(query_empty + query_stage, query_phase ^ 1)
                cute.arch.sync_warp()
                row, _ = row_of(inputs, unit, 0, geometry)
                if lane < geometry.tokens:
                    info[INFO + lane, query_stage] = start
                    info[INFO + geometry.tokens + lane, query_stage] = end
                if lane == 0:
                    info[FIRST_KEY, query_stage] = first * KEYS
                    info[TILES, query_stage] = count
                    info[ROW, query_stage] = row
                last = inputs.weights.shape[0] - 1
                place = weights + query_stage * geometry.tokens * geometry.pitch
                for i in cutlass.range_constexpr(-(-geometry.n // (4 * WARP))):
                    column = (i * WARP + lane) * 4
                    if column < geometry.n:
                        token, head = column // geometry.h, column % geometry.h
                        source = inputs.weights.iterator + (Int64(cutlass.min(row + token, last)) * geometry.h + head)
                        copy_async(source, place + token * geometry.pitch + head, 4)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(query_full + query_stage, geometry.n * D)
                # Past the last token are zeros; where a request's tokens do not fill its last tile, those of the next
                # request are read. Nothing of either is stored.
                from_row = cute.domain_offset((0, row, 0, 0), inputs.query)
                boxes = cute.group_modes(cute.flat_divide(from_row, box), 0, 4)
                query_places, boxes = cpasync.tma_partition(inputs.query_tma, 0, cute.make_layout(1), held, boxes)
                for i in cutlass.range_constexpr(geometry.groups):
                    cute.copy(
                        inputs.query_tma, boxes[None, 0, i, 0, 0], query_places[None, i, query_stage],
                        tma_bar_ptr=query_full + query_stage,
                    )  # fmt: skip
                cute.arch.cp_async_mbarrier_arrive_noinc(query_full + query_stage)
            query_stage, query_phase = next_stage(query_stage, query_phase, 1, geometry.query_stages)
            own = Tiles(unit, first, count)
            stage, phase = load_keys(inputs, storage, keys, own, stage, phase, lane, me, geometry)
        unit = unit + 1
    # No tiles: the end.
    if me == 0 if cutlass.const_expr(geometry.producers > 1) else True:
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.mbarrier_wait(query_empty + query_stage, query_phase ^ 1)
        cute.arch.sync_warp()
        if lane == 0:
            info[TILES, query_stage] = 0
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(query_full + query_stage)
        cute.arch.cp_async_mbarrier_arrive_noinc(query_full + query_stage)


class Tiles(NamedTuple):
    """KV tiles first .. first + count - 1 of a unit."""

    unit: Int32
    first: Int32
    count: Int32


@cute.jit
def load_keys(
    inputs: cutlass.Constexpr,
    storage: cutlass.Constexpr,
    keys: cutlass.Constexpr,  # of `boxes_of`
    tiles: cutlass.Constexpr,  # `Tiles`
    stage: Int32,
    phase: Int32,
    lane: Int32,
    me: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """KV tiles of a unit, of which a producer loads those of its own stages; gives the next one's (stage, phase)."""
    unit, first, count = tiles
    full, empty, scales = storage.full.data_ptr(), storage.empty.data_ptr(), storage.scales.data_ptr()
    boxes, places = keys
    producers = cutlass.const_expr(geometry.producers)
    pages, request, skip, own = Int32(0), Int32(0), Int32(0), count
    end_stage, end_phase = stage, phase
    if cutlass.const_expr(producers > 1):
        skip = (me - stage) & (producers - 1)
        own = cutlass.max(count - skip + (producers - 1), 0) // producers
        moved = stage + count % geometry.stages
        wrapped = Int32(moved >= geometry.stages)
        end_stage = moved - wrapped * geometry.stages
        end_phase = phase ^ ((count // geometry.stages + wrapped) & 1)
        stage, phase = next_stage(stage, phase, skip, geometry.stages)
    if cutlass.const_expr(inputs.table is not None):
        request = unit // geometry.chunks
    for i in cutlass.range(own, unroll=1):
        tile = first + skip + i * producers
        if cutlass.const_expr(inputs.table is not None):
            if i % WARP == 0:
                # Of the next 32 tiles; entries behind the unit's last one are not read.
                pages = inputs.table[request, cutlass.min(tile + lane * producers, first + count - 1)]
            page = cute.arch.shuffle_sync(pages, i % WARP)
        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, KEYS * (D + (4 if geometry.bulk else 0)))
        if cutlass.const_expr(inputs.table is not None):
            if cutlass.const_expr(geometry.evicts):
                cute.copy(
                    inputs.key_tma, boxes[None, 0, 0, page], places[None, stage], tma_bar_ptr=full + stage,
                    cache_policy=Int64(EVICT_FIRST),
                )  # fmt: skip
            else:
                cute.copy(inputs.key_tma, boxes[None, 0, 0, page], places[None, stage], tma_bar_ptr=full + stage)
        else:
            cute.copy(inputs.key_tma, boxes[None, tile, 0], places[None, stage], tma_bar_ptr=full + stage)
        if cutlass.const_expr(geometry.bulk):
            with cute.arch.elect_one():
                cute.arch.inline_ptx(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, "
                    "[{$r3}];",
                    read_only_args=[
                        (scales + stage * KEYS).toint(), inputs.scales[None, page].iterator.toint(), Int32(KEYS * 4),
                        (full + stage).toint(),
                    ],
                )  # fmt: skip
        else:
            for half in cutlass.range_constexpr(KEYS // WARP):
                row = half * WARP + lane
                if cutlass.const_expr(inputs.table is not None):
                    source = inputs.scales[None, page].iterator + row
                else:
                    # What stands for keys past the last one is never stored.
                    source = inputs.scales.iterator + cutlass.min(tile * KEYS + row, inputs.scales.shape[0] - 1)
                copy_async(source, scales + stage * KEYS + row, 1)
            cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
        stage, phase = next_stage(stage, phase, producers, geometry.stages)
    if cutlass.const_expr(producers > 1):
        stage, phase = end_stage, end_phase
    return stage, phase


# ------------------------------------------------------------------------------------------------ device: mma
def make_mma(n: int) -> cute.TiledMma:
    """A 64 x n x 32 tiled FP8 MMA of one warpgroup, both operands K-major in shared memory, fp32 accumulators."""
    source, major = warpgroup.OperandSource.SMEM, OperandMajorMode.K
    op = warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, (KEYS, n, MMA_K), source, major, major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


def issues_of(geometry: Geometry) -> list[tuple[int, tuple[int, ...]]]:
    """What is issued together, and waited for together: (part, blocks of 32 columns of the sum) each. A turn ends with
    the first of them."""
    every = tuple(range(PRODUCTS))
    if geometry.turns:
        return [(0, every[:-1]), (0, every[-1:])]
    return [(part, every) for part in range(geometry.query_parts)]


# ------------------------------------------------------------------------------------------------ device: epilogue
class Kept(NamedTuple):
    """The sums that a lane is left with: sum `first + j`, of key row (first + j) % 2 and the lane's token of group
    (first + j) // 2, for j below `Geometry.kept`. stores: whether the lane is the one of those with the same sums that
    stores them."""

    first: Int32
    stores: Any


def kept_by(lane: Int32, geometry: Geometry) -> Kept:
    """What `lane_sums` leaves a lane with."""
    first: Any = 0
    stores: Any = True
    left = geometry.sums
    for bit in range(geometry.lanes.bit_length() - 2, -1, -1):
        upper = lane // (1 << bit) % 2
        if left % 2 == 0:
            left //= 2
            first = first + upper * left
        else:
            stores = stores & (upper == 0)
    return Kept(first, stores)


@cute.jit
def lane_sums(sums: cutlass.Constexpr, lane: Int32, geometry: cutlass.Constexpr):
    """The sums over a token's lanes of each of a list of values: those that `kept_by` says. Lanes send each other what
    they do not keep."""
    values = sums
    for bit in cutlass.range_constexpr(geometry.lanes.bit_length() - 2, -1, -1):
        upper, half = lane // (1 << bit) % 2 == 1, len(values) // 2
        if cutlass.const_expr(len(values) % 2 == 0):
            sent = [cutlass.select_(upper, values[j], values[j + half]) for j in range(half)]
            own = [cutlass.select_(upper, values[j + half], values[j]) for j in range(half)]
            values = [own[j] + cute.arch.shuffle_sync_bfly(sent[j], offset=1 << bit) for j in range(half)]
        else:
            values = [value + cute.arch.shuffle_sync_bfly(value, offset=1 << bit) for value in values]
    return values


@cute.jit
def saturated(value: Float32) -> Float32:
    """max(value, 0) / UNIT of a value that is at most UNIT; 0 of NaN."""
    return cute.arch.inline_ptx(
        "mul.sat.f32 {$w0}, {$r0}, 0f33000000;", write_only_types=[Float32], read_only_args=[value]
    )


@cute.jit
def add_weighted(
    chains: cutlass.Constexpr, acc: cute.Tensor, weights: cute.Tensor, part: cutlass.Constexpr,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """Adds weight · max(S, 0) of a part's columns to a thread's sums, of registers acc (MMA, 1, 1) and weights
    (n / 4,). chains: of group i and key row r at 2 i + r, the sums of even and of odd columns, the latter over UNIT."""
    rows = wgmma.as_rows(acc)
    each, columns = geometry.n // 4 // geometry.groups, geometry.n // 4 // geometry.query_parts
    # Columns in turn by either of two pipes, each with a chain of its own: a maximum, whose pipe takes a warp every
    # other cycle, or a product with saturation. Both are exact, and make 0 of NaN.
    order = sorted(range(part * columns, (part + 1) * columns), key=lambda at: (at % each, at))
    for k in cutlass.range_constexpr(columns):
        at = order[k]
        odd = at % 2
        for r in cutlass.range_constexpr(2):
            product, chain = rows[r, at - part * columns], chains[2 * (at // each) + r]
            if cutlass.const_expr(odd == 1):
                positive = saturated(product)
            else:
                positive = cute.arch.fmax(product, Float32(0.0))
            term = positive * weights[at]
            chain[odd] = term if cutlass.const_expr(chain[odd] is None) else chain[odd] + term


class Target(NamedTuple):
    """Where a lane's logits of a tile go: registers (`Geometry.targets`,) each. row: of the tile's 64; of both keys the
    first. inside: how far the key is behind the start of the token's range. length: of the range. address: of the
    logit. `advance` moves them to another tile."""

    row: cute.Tensor
    inside: cute.Tensor
    length: cute.Tensor
    address: cute.Tensor


@cute.jit
def targets_of(
    logits: cute.Tensor, info: cute.Tensor, key: Int32, kept: cutlass.Constexpr, lane: Int32, warp: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """Of a query tile, whose words are `info`, and the KV tile whose first key is `key`."""
    made = [cute.make_rmem_tensor(geometry.targets, kind) for kind in (Int32, Int32, Int32, Int64)]
    row, inside, length, address = made
    size = logits.element_type.width // 8
    for j in cutlass.range_constexpr(geometry.targets):
        at = kept.first + (2 * j if geometry.paired else j)
        token, half = at // 2 * geometry.together + lane % 4 // geometry.lanes, at % 2
        start, end = info[INFO + token], info[INFO + geometry.tokens + token]
        row[j] = warp * 16 + lane // 4 + 8 * half
        inside[j], length[j] = key + row[j] - start, cutlass.max(end - start, 0)
        address[j] = logits.iterator.toint() + (Int64(info[ROW] + token) * logits.stride[0] + (key + row[j])) * size
    return Target(row, inside, length, address)


@cute.jit
def advance(target: cutlass.Constexpr, keys: cutlass.Constexpr, size: cutlass.Constexpr):
    """Moves a lane's targets by so many keys."""
    for j in cutlass.range_constexpr(cute.size(target.inside)):
        target.inside[j] = target.inside[j] + keys
        target.address[j] = target.address[j] + keys * size


@cute.jit
def store_sums(
    values: cutlass.Constexpr, factors: cutlass.Constexpr, target: cutlass.Constexpr, kept: cutlass.Constexpr,
    kind: cutlass.Constexpr, geometry: cutlass.Constexpr,
):  # fmt: skip
    """Stores a lane's logits of a tile, where they are in range: value · factor of the key. NaN becomes -inf."""
    size = kind.width // 8
    for j in cutlass.range_constexpr(geometry.targets):
        for half in cutlass.range_constexpr(2 if geometry.paired else 1):
            i = 2 * j + half if geometry.paired else j
            value = cute.arch.fmax(values[i] * factors[i % len(factors)], Float32(-math.inf))
            # A key in front of the range is far behind it as an unsigned number.
            if (Uint32(target.inside[j] + 8 * half) < Uint32(target.length[j])) & kept.stores:
                place = cute.make_ptr(kind, target.address[j] + 8 * half * size, cute.AddressSpace.gmem)
                cute.make_tensor(place, cute.make_layout(1))[0] = value.to(kind)


# ------------------------------------------------------------------------------------------------ device: consume
@cute.jit
def consume(
    logits: cute.Tensor, storage: cutlass.Constexpr, me: Int32, thread: Int32, geometry: cutlass.Constexpr
):  # fmt: skip
    """What a consumer does: `me` of `consumers`, thread 0..127."""
    n, kind, consumers = geometry.n, logits.element_type, geometry.consumers
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    query_full, query_empty = storage.query_full.data_ptr(), storage.query_empty.data_ptr()
    infos = storage.info.get_tensor(cute.make_layout((geometry.info, geometry.query_stages)))
    # Neighbouring columns, in the order of a lane's: (column, (lane of a token, token together), (run, group), stage).
    # A lane that has all columns of a token reads four of them at once, others two.
    together, pitch, vector = geometry.together, geometry.pitch, 4 if geometry.lanes == 1 else 2
    run = geometry.lanes * vector
    of_weights = storage.weights.get_tensor(
        cute.make_layout(
            (vector, (geometry.lanes, together), (geometry.h // run, geometry.groups), geometry.query_stages),
            stride=(1, (vector, pitch), (run, together * pitch), geometry.tokens * pitch),
        )
    )
    scales = storage.scales.get_tensor(cute.make_layout((KEYS, geometry.stages)))
    lane, warp = thread % WARP, thread // WARP
    tiled_mma = make_mma(n // geometry.query_parts)
    mine = tiled_mma.get_slice(thread)
    keys = tiled_mma.make_fragment_A(mine.partition_A(tiles_in(storage.keys.data_ptr(), KEYS, geometry.stages)))
    # Parts of a query tile lie behind each other.
    parts, columns = geometry.query_parts, n // geometry.query_parts
    held = tiles_in(storage.query.data_ptr(), columns, parts * geometry.query_stages)
    queries = tiled_mma.make_fragment_B(mine.partition_B(held))
    accs = [cute.make_rmem_tensor(tiled_mma.partition_shape_C((KEYS, columns)), Float32) for _ in range(parts)]
    weights = cute.make_rmem_tensor(n // 4, Float32)
    vectors = cute.make_tensor(weights.iterator, cute.make_layout((vector, n // 4 // vector)))
    kept = kept_by(lane, geometry)
    stage, phase = Int32(0) + me, Int32(0)
    query_stage, query_phase = Int32(0), Int32(0)
    skip = me  # tiles of the query tile that are others' before the first of mine
    tiles = Int32(1)
    issues = issues_of(geometry)
    following = cutlass.select_(me == consumers - 1, Int32(0), me + 1)
    if cutlass.const_expr(geometry.turns):
        if me == consumers - 1:
            named_arrive(Barrier.TURN, 2 * WARPGROUP)
    while tiles > 0:
        cute.arch.mbarrier_wait(query_full + query_stage, query_phase)
        info = infos[None, query_stage]
        tiles, key = info[TILES], info[FIRST_KEY] + skip * KEYS
        own = cutlass.max(tiles - skip + (consumers - 1), 0) // consumers
        if own > 0:
            for j in cutlass.range_constexpr(n // 4 // vector):
                cute.autovec_copy(of_weights[None, lane % 4, j, query_stage], vectors[None, j])
        target = targets_of(logits, info, key, kept, lane, warp, geometry)
        for _ in cutlass.range(own, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            # S = K · Qᵀ
            if cutlass.const_expr(geometry.turns):
                cute.arch.barrier(barrier_id=Barrier.TURN + me, number_of_threads=2 * WARPGROUP)
            for i in cutlass.range_constexpr(len(issues)):
                part, blocks = issues[i]
                wgmma.gemm_issue(
                    tiled_mma, accs[part], keys[None, None, None, stage],
                    queries[None, None, None, query_stage * parts + part], blocks, blocks[0] == 0,
                )  # fmt: skip
            if cutlass.const_expr(geometry.paired):
                factors = [scales[target.row[0], stage], scales[target.row[0] + 8, stage]]
            else:
                factors = [scales[target.row[j], stage] for j in range(geometry.targets)]
            chains = [[None, None] for _ in range(geometry.sums)]
            for i in cutlass.range_constexpr(len(issues)):
                warpgroup.wait_group(len(issues) - 1 - i)
                if cutlass.const_expr(geometry.turns and i == 0):
                    # While the last product is under way, the next consumer issues its own.
                    cute.arch.barrier_arrive(barrier_id=Barrier.TURN + following, number_of_threads=2 * WARPGROUP)
                if cutlass.const_expr(i == len(issues) - 1):
                    warp_arrive(empty + stage)
                part, blocks = issues[i]
                if cutlass.const_expr(blocks[-1] == PRODUCTS - 1):
                    add_weighted(chains, accs[part], weights, part, geometry)
            sums = lane_sums([chain[0] + chain[1] * Float32(UNIT) for chain in chains], lane, geometry)
            store_sums(sums, factors, target, kept, kind, geometry)
            advance(target, consumers * KEYS, kind.width // 8)
            stage, phase = next_stage(stage, phase, consumers, geometry.stages)
        skip = skip + own * consumers - tiles
        warp_arrive(query_empty + query_stage)
        query_stage, query_phase = next_stage(query_stage, query_phase, 1, geometry.query_stages)


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def mqa_logits_v4(
    inputs: Inputs,
    logits: cute.Tensor,  # (query tokens, columns) fp32 or bf16, rows apart, global memory
    geometry: cutlass.Constexpr,
):
    """One of the persistent CTAs."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = SmemAllocator().allocate(shared_storage(geometry))
    if warp == 0:
        cpasync.prefetch_descriptor(inputs.query_tma)
        cpasync.prefetch_descriptor(inputs.key_tma)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(geometry.stages):
                cute.arch.mbarrier_init(storage.full.data_ptr() + i, 1 if geometry.bulk else 1 + WARP)
                cute.arch.mbarrier_init(storage.empty.data_ptr() + i, WARPGROUP // WARP)
            for i in cutlass.range_constexpr(geometry.query_stages):
                cute.arch.mbarrier_init(storage.query_full.data_ptr() + i, 1 + WARP)
                cute.arch.mbarrier_init(storage.query_empty.data_ptr() + i, geometry.consumers * WARPGROUP // WARP)
        cute.arch.mbarrier_init_fence()
    # What L2 holds is what a kernel before writes, too.
    if warp >= geometry.consumers * (WARPGROUP // WARP):
        ask_for_lengths(inputs, thread % WARPGROUP)
    # Nothing that a kernel before may have written is read, and nothing is written, ahead of this.
    cute.arch.griddepcontrol_wait()
    units = (inputs.ends.shape[0] + geometry.tokens - 1) // geometry.tokens
    if cutlass.const_expr(geometry.s > 0):
        units = inputs.ends.shape[0] // geometry.s * geometry.chunks
    find_piece(inputs, storage, units, thread, geometry)
    if warp >= geometry.consumers * (WARPGROUP // WARP):
        cute.arch.setmaxregister_decrease(REGISTERS[geometry.consumers][0])
        producer = warp - geometry.consumers * (WARPGROUP // WARP)
        if producer < geometry.producers if cutlass.const_expr(geometry.producers > 1) else producer == 0:
            load(inputs, storage, thread % WARP, producer, geometry)
    else:
        cute.arch.setmaxregister_increase(REGISTERS[geometry.consumers][1])
        me = cute.arch.make_warp_uniform(thread // WARPGROUP)
        consume(logits, storage, me, thread % WARPGROUP, geometry)


mqa_logits_v4.set_name_prefix("mqa_logits_v4", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_mqa_logits_v4(
    q: cute.Tensor,  # (n, h, 128) or (b, s, h, 128) uint8, contiguous
    keys: cute.Tensor,  # (t, 128) uint8, contiguous; or the cache, (pages, 64, 132) uint8, pages apart
    scales: cute.Tensor | None,  # (t,) fp32
    weights: cute.Tensor,  # (query tokens, h) fp32, contiguous
    starts: cute.Tensor | None,  # (n,) int32
    ends: cute.Tensor,  # (n,) or (b, s) int32, contiguous
    table: cute.Tensor | None,  # (b, width) int32, rows apart
    logits: cute.Tensor,
    sms: Int32,
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Launches as many CTAs as the device has multiprocessors, as a programmatic dependent."""
    h, rows = geometry.h, weights.shape[0]
    copy = cpasync.CopyBulkTensorTileG2SOp()
    codes = cute.recast_ptr(q.iterator, dtype=Float8E4M3FN)
    run = geometry.run
    query = cute.make_tensor(codes, cute.make_layout((run, rows, h // run, D), stride=(D, h * D, run * D, 1)))
    query_tma, query = cpasync.make_tiled_tma_atom(
        copy, query, query_box(geometry), (run, geometry.together, h // run, D), 1
    )  # fmt: skip
    codes = cute.recast_ptr(keys.iterator, dtype=Float8E4M3FN)
    if cutlass.const_expr(table is None):
        cached = cute.make_tensor(codes, cute.make_layout((keys.shape[0], D), stride=(D, 1)))
    else:
        pages, stride = keys.shape[0], cute.assume(keys.stride[0], divby=16)
        cached = cute.make_tensor(codes, cute.make_layout((PAGE, D, pages), stride=(D, 1, stride)))
        behind = cute.recast_ptr(keys.iterator + PAGE * D, dtype=Float32)
        scales = cute.make_tensor(behind, cute.make_layout((PAGE, pages), stride=(1, stride // 4)))
    key_tma, cached = cpasync.make_tiled_tma_atom(
        copy, cached, wgmma.k_major_layout(Float8E4M3FN, (KEYS, D)), (KEYS, D), 1
    )  # fmt: skip
    flat = cute.make_tensor(ends.iterator, cute.make_layout((rows,)))
    inputs = Inputs(query_tma, query, key_tma, cached, scales, weights, starts, flat, table, Int32(logits.shape[1]))
    mqa_logits_v4(inputs, logits, geometry).launch(
        grid=(sms, 1, 1),
        block=(geometry.threads, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: IndexerLogitsProblem) -> Verdict:
    if pd.heads not in HEADS:
        return Verdict.no(f"heads = {pd.heads}: an indexer of {', '.join(map(str, HEADS))} heads is taken")
    return limits.all_of(
        limits.offsets(pd.rows * pd.heads, "rows of q"),
        limits.offsets(pd.rows * (pd.columns // KEYS + 2), f"the KV tiles of {pd.rows:,} query tokens"),
    )


@dataclass(frozen=True)
class MqaLogitsV4Tiling(Tiling):
    """tokens: query tokens of a tile; 0: as many as fill an MMA, or as requests have. consumers: warpgroups that
    multiply, 2 or 4; 0: a choice. query_parts: in which a query tile is multiplied, 1 or 2; 0: a choice. turns: whether
    consumers take turns where there is one part of more than 128 columns and logits are float32. ctas: of the grid; 0:
    one for each multiprocessor. beyond: a query token with as many keys in range, or fewer, gets no logits; a top-k of
    as many chooses all of them. producers: warps that load KV tiles, 1, or 4 over pages; 0: 4 where a query tile over
    pages has at most 64 columns, else 1. The default plan takes 0 from 2,097,152 cached tokens on, else 1."""

    launch_fields: ClassVar[tuple[str, ...]] = ("ctas",)

    tokens: int = 0
    consumers: int = 0
    query_parts: int = 0
    turns: bool = True
    ctas: int = 0
    beyond: int = 0
    producers: int = 1

    def geometry(self, pd: IndexerLogitsProblem) -> Geometry:
        """What the code is made for, with everything chosen."""
        s, most = pd.s if pd.table else 0, max(1, COLUMNS // pd.heads)
        tokens = self.tokens or (most if not s else -(-s // -(-s // most)))
        n = tokens * pd.heads
        consumers = self.consumers or (4 if n <= COLUMNS // 4 else 2)
        one = Geometry(pd.heads, s, tokens, consumers, 1, False)
        # A part's sums end with its products if a thread has several tokens. What two parts of 32 heads gain is less
        # than they cost where logits of contiguous keys are stored in bf16.
        stored = pd.heads == 32 and pd.dtype == "bf16" and not pd.table
        parts = self.query_parts or (2 if n > COLUMNS // 2 and one.groups > 1 and not stored else 1)
        turns = self.turns and parts == 1 and n > COLUMNS // 2 and pd.dtype == "fp32"
        # Where columns are few, a KV tile's products take less time than one warp takes to load the next.
        producers = self.producers or (MOST_PRODUCERS if pd.table and n <= COLUMNS // 4 else 1)
        return replace(one, query_parts=parts, turns=turns, beyond=self.beyond, producers=producers)

    def validate(self, pd: IndexerLogitsProblem, device: Device | None = None) -> Verdict:
        if self.consumers not in (0, *REGISTERS):
            return Verdict.no(f"consumers = {self.consumers} must be one of 0, {', '.join(map(str, REGISTERS))}")
        if self.query_parts not in (0, 1, 2):
            return Verdict.no(f"query_parts = {self.query_parts} must be 0, 1 or 2")
        if self.producers not in (0, 1, MOST_PRODUCERS) or (self.producers > 1 and not pd.table):
            return Verdict.no(f"producers = {self.producers} must be 0, 1, or over pages {MOST_PRODUCERS}")
        if not (taken := takes(pd)):
            return taken
        geometry = self.geometry(pd)
        if self.tokens < 0 or geometry.n > COLUMNS:
            return Verdict.no(
                f"tokens = {self.tokens}: of {pd.heads} heads a tile takes 1 to {COLUMNS // pd.heads}, 0 is a choice"
            )
        if geometry.n % (8 * geometry.query_parts):
            return Verdict.no(f"{geometry.n} columns do not divide into {geometry.query_parts} parts of 8 and more")
        if registers(geometry.n) > REGISTERS[geometry.consumers][1]:
            return Verdict.no(f"{geometry.n} columns do not fit in the registers of {geometry.consumers} consumers")
        if self.ctas < 0 or self.beyond < 0:
            return Verdict.no(f"ctas = {self.ctas} and beyond = {self.beyond} must be at least 0")
        return Verdict.yes()


def registers(n: int) -> int:
    """What a consumer's thread takes: accumulators, weights, and addresses and sums beside them."""
    return n // 2 + n // 4 + 16


class MqaLogitsV4Plan(KernelPlan):
    """Inputs and output (logits,) of `workload.indexer_logits`. One compiled kernel a problem class; sizes, lengths and
    strides are arguments."""

    workload = indexer_logits.WORKLOAD
    tiling_type = MqaLogitsV4Tiling
    tiling: MqaLogitsV4Tiling
    requires = Requirement(
        archs=("sm_90a",), dtypes=("fp32", "bf16"), features=("wgmma", "tma", "setmaxnreg"), problem=takes
    )

    def default_tiling(self) -> MqaLogitsV4Tiling:
        # Four producer warps pay where calls are long, and cost up to a tenth where they are short.
        pd, own = self.problem, MqaLogitsV4Tiling()
        long = pd.table and pd.b * pd.t >= MANY_TOKENS and own.geometry(pd).n <= COLUMNS // 4
        return replace(own, producers=0) if long else own

    def autotune_configs(self) -> list[Tiling]:
        tilings = [
            MqaLogitsV4Tiling(tokens, consumers, parts, turns)
            for tokens in (0, 1, 2)
            for consumers in REGISTERS
            for parts, turns in ((1, True), (1, False), (2, False))
        ]
        return [tiling for tiling in tilings if tiling.validate(self.problem, self.device)]

    def plan(self, *inputs: Any) -> CuteKernel:
        problem = indexer_logits.rebound(self.problem, *inputs)
        return self.plan_into(inputs, (indexer_logits.new_logits(problem, inputs[0], problem.rows, problem.columns),))

    def plan_into(self, inputs: Any, outputs: Any) -> CuteKernel:
        """A kernel on logits of the caller's (rows, columns), whose rows may lie apart."""
        self.require()
        aligned = {"q": (inputs[0], 16), "keys": (inputs[1], 16), "weights": (inputs[3 - self.problem.table], 16)}
        for name, (tensor, bytes_) in aligned.items():
            if tensor.data_ptr() % bytes_:
                raise UserError(
                    f"{name} starts at {tensor.data_ptr():#x}: it must start at a multiple of {bytes_} bytes."
                )
        if self.problem.table and inputs[1].stride(0) % 16:
            raise UserError(f"the pages of cache are {inputs[1].stride(0)} bytes apart: use a multiple of 16.")
        return self._make(inputs, outputs)

    def plan_empty(self) -> CuteKernel:
        self.require()
        return self._make((), ())

    def _make(self, inputs: Any, outputs: Any) -> CuteKernel:
        pd, geometry = self.problem, self.tiling.geometry(self.problem)
        given: tuple[Any, ...] = ()
        if inputs:
            sms = self.tiling.ctas or host.target(self).num_sms
            if pd.table:
                q, cache, weights, ends, table = inputs
                given = (q, cache, None, weights, None, ends, table, outputs[0], sms)
            else:
                q, keys, scales, weights, starts, ends = inputs
                given = (q, keys, scales, weights, starts, ends, None, outputs[0], sms)

        def arguments() -> tuple[Any, ...]:
            n, t, b, pages, width = host.symbols(5)
            kind = Float32 if pd.dtype == "fp32" else cutlass.BFloat16
            logits = make_fake_tensor(kind, host.symbols(2), (cute.sym_int64(), 1), assumed_align=4)
            weights = host.fake(Float32, n, pd.heads)
            if not pd.table:
                q, keys, scales = (
                    host.fake(Uint8, n, pd.heads, D),
                    host.fake(Uint8, t, D),
                    host.fake(Float32, t, align=4),
                )
                starts, ends, table = host.fake(Int32, n, align=4), host.fake(Int32, n, align=4), None
            else:
                q, scales, starts = host.fake(Uint8, b, pd.s, pd.heads, D), None, None
                keys = make_fake_tensor(
                    Uint8,
                    (pages, PAGE, TOKEN_BYTES),
                    (cute.sym_int64(divisibility=16), TOKEN_BYTES, 1),
                    assumed_align=16,
                )
                ends = host.fake(Int32, b, pd.s, align=4)
                table = make_fake_tensor(Int32, (b, width), (cute.sym_int64(), 1), assumed_align=4)
            return q, keys, scales, weights, starts, ends, table, logits, Int32(1), geometry

        return host.stage(self, mqa_logits_v4, launch_mqa_logits_v4, "mqa_logits_v4", arguments, given, inputs, outputs)
