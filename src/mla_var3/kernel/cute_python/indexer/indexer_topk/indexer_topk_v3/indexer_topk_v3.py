r"""indexer_topk v3 in CuTe for Hopper (sm_90a): the indexer's choice, whose candidates come from the CTAs of the logits.

    scores   the kernel of mqa_logits v4 for one query token over pages: persistent CTAs with equal pieces of a line of
             KV tiles. It stores the logits to memory, and keeps those of its piece in shared memory too. At the end of a
             request's part of the piece the consumers choose among these:
                 ends    the least and the largest of them                                               one barrier
                 count   each in one of 512 bins, linear from the largest to the least                   one barrier
                 cut     the first bins that together have no more logits than may be sent              two barriers
                 send    what is in them, with its column, in the order of columns → memory              one barrier
             and the largest logit that was not sent is a bound. As many may be sent as 1.5 times the part's share of
             the k, and 16 more.
    choose   a CTA a row, a programmatic dependent: gathers the candidates of all CTAs in shared memory, in the order
             of columns, and chooses the k among them as topk v5 does among the logits of a row: a digit of 2,048 bins
             linear in the logit, then comparisons of what is in the bin of the k-th.

A logit that was not sent is at most the bound of its CTA. Where the largest bound is not behind the bin of the k-th, or
candidates are too few or too many, or their bins do not tell them apart, `choose` reads all of the row's logits, one
radix digit of their keys after the other. Candidates lie in the order of columns and places are sums in a fixed order,
so ties go to the lower index, and the result has the same bits in each run.

Against version 0: the second kernel reads some 5,000 candidates of a row of 128k logits, and not the row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from mla_var3.device import Device, Requirement
from mla_var3.errors import UserError
from mla_var3.kernel.cute_python import host
from mla_var3.kernel.cute_python.prims import wgmma
from mla_var3.kernel.cute_python.prims.sync import named_sync, wait_for_launch, warp_arrive
from mla_var3.kernel.cute_python.prims.wgmma import WARPGROUP
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.workload import indexer_topk as workload
from mla_var3.workload.indexer_logits import PAGE, TOKEN_BYTES, D, new_logits

if TYPE_CHECKING:
    from mla_var3.workload.indexer_topk import IndexerTopkProblem

KEYS = 64  # of a KV tile: the M side of an MMA, and the tokens of a page
COLUMNS = 256  # most of an MMA
MMA_K = 32  # FP8 columns of an MMA
WARP = 32
HEADS = (16, 32, 64)
#: Registers of a thread of the producers and of the consumers, by consumers: of 65536 that a launch gives evenly.
REGISTERS = {2: (24, 240), 4: (24, 112)}
PRODUCTS = D // MMA_K  # of a KV tile with a part of a query tile
MOST_STAGES = 24
PAD = 8  # words behind a token's weights: those of four tokens lie in other banks of shared memory
EVICT_FIRST = 0x12F0000000000000  # an L2 cache policy, as createpolicy makes it
INFO = 4  # words in front of a query tile's ranges
FIRST_KEY, TILES, ROW = 0, 1, 2  # of these words
NOBODY = (1 << 31) - 1
#: KV tiles' time that the change from one query tile to the next takes, of tiles with more than 128 columns and others.
UNIT_POINTS = (4, 1)
#: Above every |S|, which is at most 128 · 448²; a power of two, by which a product is exact.
UNIT = 2.0**25
MOST_TILES = 128  # KV tiles of a CTA's piece: their logits are kept in shared memory
CUT_BINS = 512  # one for each thread of the consumers
SENT = 512  # candidates of a CTA and row, at most
SLOTS = 132  # CTAs
SHARE, MORE = 1.5, 16  # candidates of a part: of its share of the k, and beside it
MOST_ROWS = 64
MOST_K = 2048
THREADS = 1024  # of `choose`
HELD = 8  # candidates of a thread
LISTED = 128  # of a bin, at most
BINS = 2048
DIGIT = 11  # bits
EXACT = 0x4B000000  # bits of 2^23
LOWEST = 0x007FFFFF  # key of -inf
HIGHEST = 0xFF800000  # key of +inf
MOST = 0x7FFFFFFF
MOST_PAGES = 8192


class Barrier(IntEnum):
    """Named barriers. KEPT: of all consumers."""

    KEPT = 1


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on. h: heads. s: query tokens of a request, 0 in prefill. tokens: of a query tile.
    consumers: warpgroups that multiply. query_parts: of a query tile, each with products of its own. turns: whether
    consumers take turns with their products. beyond: a query token with as many keys in range, or fewer, gets no
    logits."""

    h: int
    s: int
    tokens: int
    consumers: int
    query_parts: int
    turns: bool
    beyond: int = 0
    k: int = 0

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
        return self.query_stages * (self.n * D + 4 * (self.tokens * self.pitch + self.info)) + 3072 + 4 * (
            MOST_TILES * KEYS + CUT_BINS + 64
        )

    @property
    def stages(self) -> int:
        """KV tiles in shared memory."""
        most = Device.assumed().smem_per_block - self.fixed_bytes
        return min(most // (KEYS * (D + 4)), MOST_STAGES)

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
        "kept": cute.struct.Align[array(Float32, MOST_TILES * KEYS), 16],
        "histogram": array(Int32, CUT_BINS),
        "totals": array(Int32, 2 * WARP),  # of warps: of bins, and of what is sent
        "ends": array(Int32, 4),  # least, largest, bound, as whole numbers in the order of the values; the cut
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
def load(inputs: cutlass.Constexpr, storage: cutlass.Constexpr, lane: Int32, geometry: cutlass.Constexpr):
    """What the producer warp does."""
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
            stage, phase = load_keys(inputs, storage, keys, unit, first, count, stage, phase, lane, geometry)
        unit = unit + 1
    # No tiles: the end.
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.mbarrier_wait(query_empty + query_stage, query_phase ^ 1)
    cute.arch.sync_warp()
    if lane == 0:
        info[TILES, query_stage] = 0
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(query_full + query_stage)
    cute.arch.cp_async_mbarrier_arrive_noinc(query_full + query_stage)


@cute.jit
def load_keys(
    inputs: cutlass.Constexpr,
    storage: cutlass.Constexpr,
    keys: cutlass.Constexpr,  # of `boxes_of`
    unit: Int32,
    first: Int32,
    count: Int32,
    stage: Int32,
    phase: Int32,
    lane: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """KV tiles first .. first + count - 1 of a unit; gives the next one's (stage, phase)."""
    full, empty, scales = storage.full.data_ptr(), storage.empty.data_ptr(), storage.scales.data_ptr()
    boxes, places = keys
    pages, request = Int32(0), Int32(0)
    if cutlass.const_expr(inputs.table is not None):
        request = unit // geometry.chunks
    for i in cutlass.range(count, unroll=1):
        tile = first + i
        if cutlass.const_expr(inputs.table is not None):
            if i % WARP == 0:
                # Of the next 32 tiles; entries behind the unit's last one are not read.
                pages = inputs.table[request, cutlass.min(tile + lane, first + count - 1)]
            page = cute.arch.shuffle_sync(pages, i % WARP)
        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, KEYS * D)
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
        for half in cutlass.range_constexpr(KEYS // WARP):
            row = half * WARP + lane
            if cutlass.const_expr(inputs.table is not None):
                source = inputs.scales[None, page].iterator + row
            else:
                # What stands for keys past the last one is never stored.
                source = inputs.scales.iterator + cutlass.min(tile * KEYS + row, inputs.scales.shape[0] - 1)
            copy_async(source, scales + stage * KEYS + row, 1)
        cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
        stage, phase = next_stage(stage, phase, 1, geometry.stages)
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
    mirror: cute.Tensor, at: Int32,
):  # fmt: skip
    """Stores a lane's logit of a tile, where it is in range: value · factor of the key. NaN becomes -inf. And keeps it
    from `at` on, NaN where it is out of range."""
    value = cute.arch.fmax(values[0] * factors[0], Float32(-math.inf))
    # A key in front of the range is far behind it as an unsigned number.
    inside = Uint32(target.inside[0]) < Uint32(target.length[0])
    if kept.stores:
        mirror[at + target.row[0]] = cutlass.select_(inside, value, Float32(math.nan))
        if inside:
            place = cute.make_ptr(Float32, target.address[0], cute.AddressSpace.gmem)
            cute.make_tensor(place, cute.make_layout(1))[0] = value


# ------------------------------------------------------------------------------------------------ device: candidates
class Found(NamedTuple):
    """What `scores` hands to `choose`, in global memory."""

    counts: cute.Tensor  # (rows, SLOTS) int32: candidates of a row that a CTA sent
    bounds: cute.Tensor  # (rows, SLOTS) fp32: no logit that it did not send is above
    sent: cute.Tensor  # (rows, SLOTS, SENT) int64: the bits of the logit, and the column in the upper half


def in_order(bits: Int32) -> Int32:
    """A whole number in the order of the values from a number's bits, and the bits from that."""
    return bits ^ ((bits >> 31) & Int32(MOST))


@cute.jit
def least_and_largest(to: Int32, least: Float32, largest: Float32, lane: Int32):
    """Joins a warp's numbers to two words in shared memory: the least of one and of the bits' complement of the other."""
    low = cute.arch.warp_redux_sync(in_order(least.bitcast(Int32)), "min")
    high = cute.arch.warp_redux_sync(in_order(largest.bitcast(Int32)), "max")
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.lt.s32 p, {$r1}, 2; @p red.shared.min.s32 [{$r0}], {$r2}; }",
        read_only_args=[to + 4 * lane, lane, Int32(cutlass.select_(lane == 0, low, ~high))],
    )


@cute.jit
def upto_lane(value: Int32) -> Int32:
    """The sum of a value over the lanes of a warp up to this one."""
    upto = value
    for bit in cutlass.range_constexpr(5):
        upto = cute.arch.inline_ptx(
            f"{{ .reg .pred p; .reg .b32 a; shfl.sync.up.b32 a|p, {{$r0}}, {1 << bit}, 0, -1; "
            "mov.b32 {$w0}, {$r0}; @p add.u32 {$w0}, {$w0}, a; }",
            write_only_types=[Int32], read_only_args=[upto],
        )  # fmt: skip
    return upto


def cut_bin(value: Float32, scale: Float32, offset: Float32) -> Int32:
    """The bin of a logit, from 0 for the largest; the last one of NaN."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 x; fma.rn.sat.f32 x, {$r0}, {$r1}, {$r2}; fma.rn.f32 x, x, {$r3}, {$r4}; cvt.rzi.s32.f32 {$w0}, x; }",
        write_only_types=[Int32],
        read_only_args=[value, scale, offset, Float32(1 - CUT_BINS), Float32(CUT_BINS - 1)],
    )


@cute.jit
def before_warp(totals: cute.Tensor, which: cutlass.Constexpr, warp: Int32, warps: cutlass.Constexpr) -> Int32:
    """The sum of the totals of the warps in front of one."""
    before = Int32(0)
    for i in cutlass.range_constexpr(warps):
        before = before + cutlass.select_(i < warp, totals[which * WARP + i], Int32(0))
    return before


@cute.jit
def send(
    found: cutlass.Constexpr, storage: cutlass.Constexpr, row: Int32, first_key: Int32, keys: Int32, length: Int32,
    me: Int32, thread: Int32, geometry: cutlass.Constexpr,
):  # fmt: skip
    """Chooses among a row's logits in `kept`, of so many keys from one on, and writes the candidates; by all consumers.
    length: of the row."""
    threads = cutlass.const_expr(geometry.consumers * WARPGROUP)
    mine, lane = me * WARPGROUP + thread, thread % WARP
    warp, warps = mine // WARP, cutlass.const_expr(threads // WARP)
    kept, bins = storage.kept.data_ptr(), storage.histogram.data_ptr()
    histogram = storage.histogram.get_tensor(cute.make_layout(CUT_BINS))
    totals = storage.totals.get_tensor(cute.make_layout(2 * WARP))
    ends = storage.ends.get_tensor(cute.make_layout(4))
    held = storage.kept.get_tensor(cute.make_layout(MOST_TILES * KEYS))
    cta, _, _ = cute.arch.block_idx()
    each = (keys + (threads - 1)) // threads
    own_first = mine * each
    own_end = cutlass.min(own_first + each, keys)
    named_sync(Barrier.KEPT, threads)
    if mine < 4:
        ends[mine] = Int32(MOST) if mine < 3 else Int32(CUT_BINS)
    least, largest = Float32(math.nan), Float32(math.nan)
    for i in cutlass.range(own_first, own_end, unroll=2):
        value = held[i]
        finite = cutlass.select_(value > Float32(-math.inf), value, Float32(math.nan))
        least, largest = cute.arch.fmin(least, finite), cute.arch.fmax(largest, finite)
    histogram[mine] = Int32(0)
    largest = cute.arch.fmax(largest, Float32(-math.inf))
    least = cute.arch.fmin(least, Float32(math.inf))
    named_sync(Barrier.KEPT, threads)
    least_and_largest(ends.iterator.toint(), least, largest, lane)
    named_sync(Barrier.KEPT, threads)
    low, high = in_order(ends[0]).bitcast(Float32), in_order(~ends[1]).bitcast(Float32)
    scale = cute.arch.rcp_approx(high - low)
    offset = -low * scale
    for i in cutlass.range(own_first, own_end, unroll=2):
        value = held[i]
        if value == value:
            bin_ = cut_bin(value, scale, offset)
            cute.arch.inline_ptx(
                "red.shared.add.u32 [{$r0}], 1;", read_only_args=[(bins + bin_).toint()]
            )
    named_sync(Barrier.KEPT, threads)
    # A thread has a bin.
    own = histogram[mine]
    upto = upto_lane(own)
    if lane == WARP - 1:
        totals[warp] = upto
    named_sync(Barrier.KEPT, threads)
    upto = upto + before_warp(totals, 0, warp, warps)
    share = Float32(keys) * (Float32(SHARE * geometry.k) / Float32(length))
    most = cutlass.min(Int32(share) + MORE, SENT)
    if (upto > most) & (upto - own <= most):
        ends[3] = mine
    named_sync(Barrier.KEPT, threads)
    cut, count, bound = ends[3], Int32(0), Float32(-math.inf)
    for i in cutlass.range(own_first, own_end, unroll=2):
        value = held[i]
        goes = (cut_bin(value, scale, offset) < cut) & (value == value)
        count = count + Int32(goes)
        bound = cute.arch.fmax(bound, cutlass.select_(goes, Float32(-math.inf), value))
    upto = upto_lane(count)
    if lane == WARP - 1:
        totals[WARP + warp] = upto
    highest = cute.arch.warp_redux_sync(in_order(bound.bitcast(Int32)), "max")
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.eq.s32 p, {$r1}, 0; @p red.shared.min.s32 [{$r0}], {$r2}; }",
        read_only_args=[(ends.iterator + 2).toint(), lane, ~highest],
    )
    named_sync(Barrier.KEPT, threads)
    place = upto - count + before_warp(totals, 1, warp, warps)
    for i in cutlass.range(own_first, own_end, unroll=1):
        value = held[i]
        if (cut_bin(value, scale, offset) < cut) & (value == value):
            word = (Int64(first_key + i) << 32) | (Int64(value.bitcast(Int32)) & Int64(0xFFFFFFFF))
            found.sent[row, cta, place] = word
            place = place + 1
    if mine == threads - 1:
        found.counts[row, cta] = place
        found.bounds[row, cta] = in_order(~ends[2]).bitcast(Float32)
    named_sync(Barrier.KEPT, threads)


# ------------------------------------------------------------------------------------------------ device: consume
@cute.jit
def consume(
    logits: cute.Tensor, found: cutlass.Constexpr, storage: cutlass.Constexpr, me: Int32, thread: Int32,
    geometry: cutlass.Constexpr,
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
    mirror = storage.kept.get_tensor(cute.make_layout(MOST_TILES * KEYS))
    while tiles > 0:
        cute.arch.mbarrier_wait(query_full + query_stage, query_phase)
        info = infos[None, query_stage]
        tiles, key = info[TILES], info[FIRST_KEY] + skip * KEYS
        own = cutlass.max(tiles - skip + (consumers - 1), 0) // consumers
        if own > 0:
            for j in cutlass.range_constexpr(n // 4 // vector):
                cute.autovec_copy(of_weights[None, lane % 4, j, query_stage], vectors[None, j])
        target = targets_of(logits, info, key, kept, lane, warp, geometry)
        at, first_key, row, start, end = skip * KEYS, info[FIRST_KEY], info[ROW], info[INFO], info[INFO + 1]
        for _ in cutlass.range(own, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            # S = K · Qᵀ
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
                if cutlass.const_expr(i == len(issues) - 1):
                    warp_arrive(empty + stage)
                part, blocks = issues[i]
                if cutlass.const_expr(blocks[-1] == PRODUCTS - 1):
                    add_weighted(chains, accs[part], weights, part, geometry)
            sums = lane_sums([chain[0] + chain[1] * Float32(UNIT) for chain in chains], lane, geometry)
            store_sums(sums, factors, target, kept, mirror, at)
            at = at + consumers * KEYS
            advance(target, consumers * KEYS, kind.width // 8)
            stage, phase = next_stage(stage, phase, consumers, geometry.stages)
        skip = skip + own * consumers - tiles
        if tiles > 0:
            send(found, storage, row, first_key, tiles * KEYS, end - start, me, thread, geometry)
        warp_arrive(query_empty + query_stage)
        query_stage, query_phase = next_stage(query_stage, query_phase, 1, geometry.query_stages)


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def scores(
    inputs: Inputs,
    logits: cute.Tensor,  # (query tokens, columns) fp32, rows apart, global memory
    found: Found,
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
                cute.arch.mbarrier_init(storage.full.data_ptr() + i, 1 + WARP)
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
    if thread < inputs.ends.shape[0]:
        cta, _, _ = cute.arch.block_idx()
        found.counts[thread, cta] = Int32(0)
        found.bounds[thread, cta] = Float32(-math.inf)
    units = (inputs.ends.shape[0] + geometry.tokens - 1) // geometry.tokens
    if cutlass.const_expr(geometry.s > 0):
        units = inputs.ends.shape[0] // geometry.s * geometry.chunks
    find_piece(inputs, storage, units, thread, geometry)
    if warp >= geometry.consumers * (WARPGROUP // WARP):
        cute.arch.setmaxregister_decrease(REGISTERS[geometry.consumers][0])
        if warp == geometry.consumers * (WARPGROUP // WARP):
            load(inputs, storage, thread % WARP, geometry)
    else:
        cute.arch.setmaxregister_increase(REGISTERS[geometry.consumers][1])
        me = cute.arch.make_warp_uniform(thread // WARPGROUP)
        consume(logits, found, storage, me, thread % WARPGROUP, geometry)


scores.set_name_prefix("indexer_topk_v3_scores", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ choose: shared memory
WARPS = THREADS // WARP


def choose_storage() -> type:
    """The CTA's shared memory."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.Align[cute.struct.MemRange[kind, size], 16]

    fields = {
        "bins": array(Int32, BINS + 1),  # and behind them what is in none; afterwards the columns that are chosen
        "sums": array(Int32, 2 * (WARP + 1)),  # of bins, and of what is chosen: those of the warps before each warp
        "ends": array(Int32, 4),  # least, largest, bound; how many are listed
        "listed": array(Float32, LISTED),
        "places": array(Int32, LISTED),  # of what is listed, among the candidates
        "firsts": array(Int32, SLOTS + 28),  # of each CTA's candidates, among all
        "values": array(Float32, THREADS * HELD),
        "columns": array(Int32, THREADS * HELD),
        "pages": array(Int32, MOST_PAGES),
    }
    return cute.struct(type("ChooseStorage", (), {"__annotations__": fields}))


class Memory(NamedTuple):
    """Shared memory of `choose`."""

    bins: cute.Tensor
    sums: cute.Tensor
    ends: cute.Tensor
    listed: cute.Tensor
    places: cute.Tensor
    firsts: cute.Tensor
    values: cute.Tensor
    columns: cute.Tensor
    pages: cute.Tensor


# ------------------------------------------------------------------------------------------------ choose: a digit
@cute.jit
def key_of(value: Float32) -> Uint32:
    """A number in the order of the values, above 0: -0 is +0, and NaN -inf."""
    bits = (cute.arch.fmax(value, Float32(-math.inf)) + Float32(0.0)).bitcast(Int32)
    return (bits ^ ((bits >> 31) | Int32(-(1 << 31)))).bitcast(Uint32)


@cute.jit
def address_of(array: cute.Tensor, at: Int32) -> Int32:
    return (array.iterator + at).toint()


@cute.jit
def add_behind(memory: cutlass.Constexpr, of_warp: Int32, which: cutlass.Constexpr, thread: Int32):
    """Adds a warp's number to the sums of all warps behind it."""
    lane = thread % WARP
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ge.s32 p, {$r1}, {$r2}; @p red.shared.add.u32 [{$r0}], {$r3}; }",
        read_only_args=[address_of(memory.sums, which * (WARP + 1) + lane + 1), lane, thread // WARP, of_warp],
    )


@cute.jit
def count_parts(
    memory: cutlass.Constexpr, logits: cute.Tensor, scale: Float32, offset: Float32
):
    """Counts a thread's logits in their bins: the number of bin 0 is 2^23 as a float, and one more is one more of the
    bits. What has no part, or 0, is counted behind the last bin."""
    bins = address_of(memory.bins, Int32(0)) - Int32(EXACT * 4 % (1 << 32))
    for j in cutlass.range_constexpr(HELD):
        cute.arch.inline_ptx(
            "{ .reg .f32 x; .reg .b32 a; fma.rn.sat.f32 x, {$r1}, {$r2}, {$r3}; fma.rz.f32 x, x, {$r4}, {$r5}; "
            "mov.b32 a, x; shl.b32 a, a, 2; add.u32 a, a, {$r0}; red.shared.add.u32 [a], 1; }",
            read_only_args=[bins, logits[j], scale, offset, Float32(-BINS), Float32((1 << 23) + BINS)],
        )


@cute.jit
def edge_of(bin_: Int32) -> Float32:
    """The least part that is in a bin in front of this one; NaN where there is none."""
    part = ((EXACT + BINS - bin_).bitcast(Float32) - Float32(1 << 23)) * Float32(1 / BINS)
    return Int32(cutlass.select_(bin_ > 0, part.bitcast(Int32) + 1, Int32(MOST))).bitcast(Float32)


@cute.jit
def find_bin(memory: cutlass.Constexpr, need: Int32, thread: Int32):
    """(bin, how many are in bins before it, how many in it) of the bin that the need-th is in; a bin of -1 where there
    are fewer. Every warp finds it. Two barriers, the first in front of it all."""
    own_bins, lane = cutlass.const_expr(BINS // THREADS), thread % WARP
    cute.arch.sync_threads()
    by_thread = cute.make_tensor(memory.bins.iterator, cute.make_layout((own_bins, THREADS)))
    counts = cute.make_rmem_tensor(own_bins, Int32)
    cute.autovec_copy(by_thread[None, thread], counts)
    own = sum_of(counts)
    add_behind(memory, cute.arch.warp_redux_sync(own, "add"), 0, thread)
    cute.arch.sync_threads()
    total = memory.sums[WARPS]
    short = (lane < WARPS) & (memory.sums[lane + 1] < need)
    warp = cutlass.min(cute.arch.popc(cute.arch.vote_ballot_sync(short)), WARPS - 1)
    before = memory.sums[warp]
    cute.autovec_copy(by_thread[None, warp * WARP + lane], counts)
    own = sum_of(counts)
    before = before + upto_lane(own) - own
    its_lane = cute.arch.popc(cute.arch.vote_ballot_sync(before + own < need))
    # The lane's bins but the last are passed while they are too few.
    bin_, inside = (warp * WARP + lane) * own_bins, counts[0]
    for i in cutlass.range_constexpr(own_bins - 1):
        passed = before + inside < need
        before = before + cutlass.select_(passed, inside, Int32(0))
        bin_, inside = bin_ + Int32(passed), cutlass.select_(passed, counts[i + 1], inside)
    bin_ = cute.arch.shuffle_sync(bin_, its_lane)
    inside, before = cute.arch.shuffle_sync(inside, its_lane), cute.arch.shuffle_sync(before, its_lane)
    return Int32(cutlass.select_(need <= total, bin_, Int32(-1))), before, inside


@cute.jit
def sum_of(counts: cute.Tensor) -> Int32:
    total = counts[0]
    for i in cutlass.range_constexpr(1, cute.size(counts)):
        total = total + counts[i]
    return total


@cute.jit
def clear(memory: cutlass.Constexpr, thread: Int32):
    for i in cutlass.range_constexpr(BINS // THREADS):
        memory.bins[i * THREADS + thread] = Int32(0)
    if thread < 2 * (WARP + 1):
        memory.sums[thread] = Int32(0)


# ------------------------------------------------------------------------------------------------ choose: the row again
@cute.jit
def place_sums(memory: cutlass.Constexpr, own: Int32, thread: Int32):
    """(sum of the threads before, of all) of a number of each thread. Three barriers."""
    cute.arch.sync_threads()
    if thread < 2 * (WARP + 1):
        memory.sums[thread] = Int32(0)
    cute.arch.sync_threads()
    upto = upto_lane(own)
    add_behind(memory, cute.arch.shuffle_sync(upto, WARP - 1), 0, thread)
    cute.arch.sync_threads()
    return memory.sums[thread // WARP] + upto - own, memory.sums[WARPS]


@cute.jit
def choose_all(memory: cutlass.Constexpr, logits: cute.Tensor, row: Int32, count: Int32, thread: Int32, k: cutlass.Constexpr):
    """Chooses among all logits of a row, and puts the columns into `bins`, in their order."""
    need, shift, highest, searching = Int32(k), Int32(32), Uint32(HIGHEST), Int32(1)
    inside = Int32(0)
    while searching > 0:
        shift = cutlass.max(shift - DIGIT, 0)
        cute.arch.sync_threads()
        clear(memory, thread)
        cute.arch.sync_threads()
        bins = address_of(memory.bins, Int32(0))
        for i in cutlass.range(thread, count, THREADS, unroll=4):
            cute.arch.inline_ptx(
                "{ .reg .b32 a; shr.u32 a, {$r1}, {$r2}; min.u32 a, a, {$r3}; shl.b32 a, a, 2; add.u32 a, a, {$r0}; "
                "red.shared.add.u32 [a], 1; }",
                read_only_args=[bins, highest - key_of(logits[row, i]), shift, Uint32(BINS)],
            )
        bin_, before, inside = find_bin(memory, need, thread)
        highest, need = highest - (bin_.bitcast(Uint32) << Uint32(shift)), need - before
        if (inside == need) | (shift == 0):
            searching = Int32(0)
    lowest, span = Uint32(LOWEST), (Uint32(1) << Uint32(shift)) - Uint32(1)
    if highest - Uint32(LOWEST) > span:
        lowest = highest - span
    # All above `highest`, and of those from `lowest` to it the first `need`.
    cute.arch.sync_threads()
    done, passed = Int32(0), Int32(0)
    for i in cutlass.range(0, count, THREADS, unroll=1):
        at = i + thread
        key = Uint32(0)
        if at < count:
            key = key_of(logits[row, at])
        above, tied = Int32(key > highest), Int32((key <= highest) & (key >= lowest))
        tied_before, all_tied = place_sums(memory, tied, thread)
        goes = above + Int32((tied > 0) & (passed + tied_before < need))
        place, all_ = place_sums(memory, goes, thread)
        if goes > 0:
            memory.bins[done + place] = at
        done, passed = done + all_, passed + all_tied


# ------------------------------------------------------------------------------------------------ choose: the kernel
def part_edge(bin_: Int32) -> Float32:
    """The least part that is in a bin in front of this one; NaN where there is none."""
    part = ((EXACT + BINS - bin_).bitcast(Float32) - Float32(1 << 23)) * Float32(1 / BINS)
    return Int32(cutlass.select_(bin_ > 0, part.bitcast(Int32) + 1, Int32(MOST))).bitcast(Float32)


def part_of(value: Float32, scale: Float32, offset: Float32) -> Float32:
    return cute.arch.inline_ptx(
        "fma.rn.sat.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[value, scale, offset]
    )


@cute.jit
def gather(memory: cutlass.Constexpr, found: cutlass.Constexpr, row: Int32, thread: Int32):
    """Brings a row's candidates into shared memory, in the order of columns; how many there are, at most as many as fit.
    Joins the bounds."""
    warp, lane = thread // WARP, thread % WARP
    each = cutlass.const_expr(5)  # CTAs of a lane, and of a warp
    if warp == 0:
        # The sums of the CTAs' counts: a lane has some that lie behind each other.
        counts = cute.make_rmem_tensor(each, Int32)
        counts.fill(0)
        bound = Float32(-math.inf)
        for i in cutlass.range_constexpr(each):
            slot = lane * each + i
            if slot < SLOTS:
                counts[i] = found.counts[row, slot]
            bound = cute.arch.fmax(bound, found.bounds[row, cutlass.min(slot, SLOTS - 1)])
        own = counts[0]
        for i in cutlass.range_constexpr(1, each):
            own = own + counts[i]
        at = upto_lane(own) - own
        for i in cutlass.range_constexpr(each):
            memory.firsts[lane * each + i] = at
            at = at + counts[i]
        highest = cute.arch.warp_redux_sync(in_order(bound.bitcast(Int32)), "max")
        if lane == 0:
            memory.ends[2] = highest
    cute.arch.sync_threads()
    loaded = [4, 2, 2, 2, 2]  # of a CTA's candidates, by a lane and at once
    words = cute.make_rmem_tensor(sum(loaded), Int64)
    firsts, counts = cute.make_rmem_tensor(each, Int32), cute.make_rmem_tensor(each, Int32)
    for s in cutlass.range_constexpr(each):
        slot = cutlass.min(s * WARPS + warp, SLOTS)
        firsts[s] = memory.firsts[slot]
        counts[s] = cutlass.min(memory.firsts[slot + 1] - firsts[s], THREADS * HELD - firsts[s])
    for s in cutlass.range_constexpr(each):
        for v in cutlass.range_constexpr(loaded[s]):
            if v * WARP + lane < counts[s]:
                words[sum(loaded[:s]) + v] = found.sent[row, s * WARPS + warp, v * WARP + lane]
    for s in cutlass.range_constexpr(each):
        for v in cutlass.range_constexpr(loaded[s]):
            if v * WARP + lane < counts[s]:
                put(memory, firsts[s] + v * WARP + lane, words[sum(loaded[:s]) + v])
        for i in cutlass.range(loaded[s] * WARP + lane, counts[s], WARP, unroll=4):
            put(memory, firsts[s] + i, found.sent[row, s * WARPS + warp, i])
    return memory.firsts[SLOTS]


@cute.jit
def put(memory: cutlass.Constexpr, at: Int32, word: Int64):
    memory.values[at] = Int32(word).bitcast(Float32)
    memory.columns[at] = Int32(word >> 32)


@cute.jit
def choose_few(memory: cutlass.Constexpr, count: Int32, thread: Int32, k: cutlass.Constexpr) -> Boolean:
    """Chooses among the candidates, and puts their columns into `bins`; whether these are the right ones."""
    lane, right = thread % WARP, Boolean(False)
    held = cute.make_rmem_tensor(HELD, Float32)
    least, largest = Float32(math.nan), Float32(-math.inf)
    for j in cutlass.range_constexpr(HELD):
        at = thread * HELD + j
        held[j] = Float32(math.nan)
        if at < count:
            held[j] = memory.values[at]
        least, largest = cute.arch.fmin(least, held[j]), cute.arch.fmax(largest, held[j])
    least = cute.arch.fmin(least, Float32(math.inf))
    least_and_largest(memory.ends.iterator.toint(), least, largest, lane)
    cute.arch.sync_threads()
    floor, top = in_order(memory.ends[0]).bitcast(Float32), in_order(~memory.ends[1]).bitcast(Float32)
    bound = in_order(memory.ends[2]).bitcast(Float32)
    # Bins reach a little below the least, whose part is not 0.
    scale = cute.arch.rcp_approx((top - floor) * Float32(1 + 1 / 64))
    offset = Float32(1 / 65) - floor * scale
    count_parts(memory, held, scale, offset)
    bin_, before, inside = find_bin(memory, Int32(k), thread)
    need = k - before
    above, least = part_edge(bin_), part_edge(bin_ + 1)
    behind = (part_of(bound, scale, offset) < least) & (bound < top) | (bound == Float32(-math.inf))
    right = (bin_ >= 0) & ((inside == need) | (inside <= LISTED)) & (scale > 0.0) & behind & (least > 0.0)
    if right:
        if inside == need:
            above, need, inside = least, Int32(0), Int32(0)
        own = Int32(0)
        for j in cutlass.range_constexpr(HELD):
            part = part_of(held[j], scale, offset)
            own = own + Int32(part >= above)
            if (part >= least) & ~(part >= above) & (inside > 0):
                place = cute.arch.inline_ptx(
                    "atom.shared.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32],
                    read_only_args=[address_of(memory.ends, Int32(3))],
                )  # fmt: skip
                memory.listed[place] = held[j]
                memory.places[place] = thread * HELD + j
        upto = upto_lane(own)
        add_behind(memory, cute.arch.shuffle_sync(upto, WARP - 1), 1, thread)
        # Behind it nobody reads bins as counts, and the list is complete.
        cute.arch.sync_threads()
        place = memory.sums[WARP + 1 + thread // WARP] + upto - own
        for j in cutlass.range_constexpr(HELD):
            if part_of(held[j], scale, offset) >= above:
                memory.bins[place] = memory.columns[thread * HELD + j]
                place = place + 1
        for i in cutlass.range(thread // WARP, inside, WARPS, unroll=1):
            value, its, larger = memory.listed[i], memory.places[i], Int32(0)
            for first in cutlass.range(0, inside, WARP, unroll=1):
                at = first + lane
                other, others = Float32(math.nan), Int32(0)
                if at < inside:
                    other, others = memory.listed[at], memory.places[at]
                over = (other > value) | ((other == value) & (others < its))
                larger = larger + cute.arch.popc(cute.arch.vote_ballot_sync(over & (at < inside)))
            if (lane == 0) & (larger < need):
                memory.bins[k - need + larger] = memory.columns[its]
    return right


@cute.kernel
def choose(
    logits: cute.Tensor,  # (rows, t) fp32, rows apart, global memory
    found: Found,
    ends: cute.Tensor,  # (rows,)
    table: cute.Tensor,  # (rows, width), rows apart
    indices: cute.Tensor,  # (rows, k)
    k: cutlass.Constexpr,
):
    """A CTA of a row."""
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    storage = SmemAllocator().allocate(choose_storage())
    memory = Memory(
        storage.bins.get_tensor(cute.make_layout(BINS + 1)),
        storage.sums.get_tensor(cute.make_layout(2 * (WARP + 1))),
        storage.ends.get_tensor(cute.make_layout(4)),
        storage.listed.get_tensor(cute.make_layout(LISTED)),
        storage.places.get_tensor(cute.make_layout(LISTED)),
        storage.firsts.get_tensor(cute.make_layout(SLOTS + 28)),
        storage.values.get_tensor(cute.make_layout(THREADS * HELD)),
        storage.columns.get_tensor(cute.make_layout(THREADS * HELD)),
        storage.pages.get_tensor(cute.make_layout(MOST_PAGES)),
    )
    clear(memory, thread)
    if thread < 4:
        memory.ends[thread] = Int32(MOST) if thread < 3 else Int32(0)
    cute.arch.griddepcontrol_launch_dependents()
    wait_for_launch(logits.iterator.toint())
    width = cutlass.min(table.shape[1] * PAGE, logits.shape[1])
    count = cutlass.max(cutlass.min(ends[row], width), 0)
    for i in cutlass.range(thread, (count + (PAGE - 1)) // PAGE, THREADS, unroll=2):
        memory.pages[i] = table[row, i]
    if count <= k:
        cute.arch.sync_threads()
        for i in cutlass.range(thread, k, THREADS, unroll=1):
            index = Int32(-1)
            if i < count:
                index = memory.pages[i // PAGE] * PAGE + i % PAGE
            indices[row, i] = index
    else:
        candidates = gather(memory, found, row, thread)
        cute.arch.sync_threads()
        right = Boolean(False)
        if (candidates >= k) & (candidates <= THREADS * HELD):
            right = choose_few(memory, candidates, thread, k)
        if ~right:
            choose_all(memory, logits, row, count, thread, k)
        cute.arch.sync_threads()
        for first in cutlass.range_constexpr(0, k, THREADS):
            at = first + thread
            if at < k:
                column = memory.bins[at]
                indices[row, at] = memory.pages[column // PAGE] * PAGE + column % PAGE


choose.set_name_prefix("indexer_topk_v3_choose", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_indexer_topk_v3(
    q: cute.Tensor,  # (b, 1, h, 128) uint8, contiguous
    keys: cute.Tensor,  # the cache, (pages, 64, 132) uint8, pages apart
    weights: cute.Tensor,  # (b, h) fp32, contiguous
    ends: cute.Tensor,  # (b, 1) int32, contiguous
    table: cute.Tensor,  # (b, width) int32, rows apart
    indices: cute.Tensor,  # (b, k) int32, contiguous
    logits: cute.Tensor,
    counts: cute.Tensor,
    bounds: cute.Tensor,
    sent: cute.Tensor,
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Launches both kernels, as programmatic dependents."""
    h, rows = geometry.h, weights.shape[0]
    copy = cpasync.CopyBulkTensorTileG2SOp()
    codes = cute.recast_ptr(q.iterator, dtype=Float8E4M3FN)
    run = geometry.run
    query = cute.make_tensor(codes, cute.make_layout((run, rows, h // run, D), stride=(D, h * D, run * D, 1)))
    query_tma, query = cpasync.make_tiled_tma_atom(
        copy, query, query_box(geometry), (run, geometry.together, h // run, D), 1
    )  # fmt: skip
    codes = cute.recast_ptr(keys.iterator, dtype=Float8E4M3FN)
    pages, stride = keys.shape[0], cute.assume(keys.stride[0], divby=16)
    cached = cute.make_tensor(codes, cute.make_layout((PAGE, D, pages), stride=(D, 1, stride)))
    behind = cute.recast_ptr(keys.iterator + PAGE * D, dtype=Float32)
    scales = cute.make_tensor(behind, cute.make_layout((PAGE, pages), stride=(1, stride // 4)))
    key_tma, cached = cpasync.make_tiled_tma_atom(
        copy, cached, wgmma.k_major_layout(Float8E4M3FN, (KEYS, D)), (KEYS, D), 1
    )  # fmt: skip
    flat = cute.make_tensor(ends.iterator, cute.make_layout((rows,)))
    inputs = Inputs(query_tma, query, key_tma, cached, scales, weights, None, flat, table, Int32(logits.shape[1]))
    found = Found(counts, bounds, sent)
    scores(inputs, logits, found, geometry).launch(
        grid=(SLOTS, 1, 1), block=(geometry.threads, 1, 1), min_blocks_per_mp=1, stream=stream, use_pdl=True
    )
    choose(logits, found, flat, table, indices, geometry.k).launch(
        grid=(rows, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream, use_pdl=True,
        preferred_smem_carveout=100,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: IndexerTopkProblem) -> Verdict:
    if not pd.table or pd.s != 1:
        return Verdict.no("candidates are of one query token over pages")
    if pd.heads not in HEADS:
        return Verdict.no(f"heads = {pd.heads}: an indexer of {', '.join(map(str, HEADS))} heads is taken")
    if pd.topk > MOST_K:
        return Verdict.no(f"topk = {pd.topk}: at most {MOST_K:,} are chosen")
    if pd.rows > MOST_ROWS:
        return Verdict.no(f"{pd.rows} rows: up to {MOST_ROWS} are taken")
    tiles = -(-pd.columns // KEYS)
    if tiles > MOST_PAGES or pd.rows * (tiles + 1) > MOST_TILES * SLOTS:
        return Verdict.no(f"t = {pd.t}: a CTA keeps the logits of {MOST_TILES} KV tiles")
    return Verdict.yes()


@dataclass(frozen=True)
class IndexerTopkTiling(Tiling):
    """No knobs."""

    def geometry(self, pd: IndexerTopkProblem) -> Geometry:
        return Geometry(pd.heads, 1, 1, 4, 1, False, pd.topk, pd.topk)

    def validate(self, pd: IndexerTopkProblem, device: Device | None = None) -> Verdict:
        return takes(pd)


class IndexerTopkPlan(KernelPlan):
    """Inputs and output (indices,) of `workload.indexer_topk`, over pages with one query token."""

    workload = workload.WORKLOAD
    tiling_type = IndexerTopkTiling
    tiling: IndexerTopkTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("fp32",), features=("wgmma", "tma", "setmaxnreg"), problem=takes)

    def default_tiling(self) -> IndexerTopkTiling:
        return IndexerTopkTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [IndexerTopkTiling()]

    def plan(self, *inputs: Any) -> CuteKernel:
        return self.plan_into(inputs, (inputs[3].new_empty((inputs[3].numel(), self.problem.topk)),))

    def plan_into(self, inputs: Any, outputs: Any) -> CuteKernel:
        """A kernel on indices of the caller's, (rows, k) int32, contiguous."""
        self.require()
        for name, tensor in (("q", inputs[0]), ("cache", inputs[1])):
            if tensor.data_ptr() % 16:
                raise UserError(f"{name} starts at {tensor.data_ptr():#x}: it must start at a multiple of 16 bytes.")
        if inputs[1].stride(0) % 16:
            raise UserError(f"the pages of cache are {inputs[1].stride(0)} bytes apart: use a multiple of 16.")
        rows = inputs[3].numel()
        pages = inputs[4].shape[1]
        if pages > MOST_PAGES or rows > MOST_ROWS or rows * (pages + 1) > MOST_TILES * SLOTS:
            raise UserError(f"the page table has {rows} rows of {pages * PAGE:,} tokens: so many are not taken.")
        return self._make(inputs, outputs)

    def plan_empty(self) -> CuteKernel:
        self.require()
        return self._make((), ())

    def _make(self, inputs: Any, outputs: Any) -> CuteKernel:
        pd, geometry = self.problem, self.tiling.geometry(self.problem)
        given: tuple[Any, ...] = ()
        workspaces: tuple[Any, ...] = ()
        if inputs:
            rows, columns = inputs[3].numel(), inputs[4].shape[1] * PAGE
            logits = new_logits(pd, inputs[0], rows, columns)
            counts = inputs[3].new_zeros((rows, SLOTS))
            bounds = inputs[2].new_zeros((rows, SLOTS))
            sent = inputs[3].new_zeros((rows, SLOTS, SENT, 2)).view(dtype=INT64()).squeeze(-1)
            workspaces = (logits, counts, bounds, sent)
            given = (*inputs, outputs[0], *workspaces)

        def arguments() -> tuple[Any, ...]:
            n, b, pages, width = host.symbols(4)
            cache = make_fake_tensor(
                Uint8, (pages, PAGE, TOKEN_BYTES), (cute.sym_int64(divisibility=16), TOKEN_BYTES, 1), assumed_align=16
            )
            table = make_fake_tensor(Int32, (b, width), (cute.sym_int64(), 1), assumed_align=4)
            logits = make_fake_tensor(Float32, host.symbols(2), (cute.sym_int64(), 1), assumed_align=4)
            return (
                host.fake(Uint8, b, 1, pd.heads, D), cache, host.fake(Float32, n, pd.heads),
                host.fake(Int32, b, 1, align=4), table, host.fake(Int32, n, pd.topk, align=4), logits,
                host.fake(Int32, n, SLOTS, align=4), host.fake(Float32, n, SLOTS, align=4),
                host.fake(Int64, n, SLOTS, SENT, align=8), geometry,
            )  # fmt: skip

        return host.stage(
            self, scores, launch_indexer_topk_v3, "indexer_topk_v3", arguments, given, inputs, outputs, workspaces
        )  # fmt: skip


def INT64() -> Any:
    import torch

    return torch.int64
