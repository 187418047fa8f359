r"""indexer_topk v1 in CuTe for Hopper (sm_90a): the lightning indexer's choice in decode, a cluster a query token.

    S (64 keys x heads) = K · Qᵀ in FP8
    logit = scale of the key · Σ over heads of weight · max(S, 0)          in shared memory, and nowhere else
    indices = the slots of the k largest logits, exactly

A query token is a cluster's: page i of its request goes to CTA i modulo `ctas`, so that tokens that lie together, and
are chosen together, are dealt out evenly. No logit is written to global memory, and there is no second launch.

    load      each of four warpgroups has `SLOTS` places for pages of its own: codes by TMA, scales by a bulk copy
    mma       wait;  S = K · Qᵀ, four products of 32 columns;  wait;  barrier of the warpgroup;  load another page there
    epilogue  Σ weight · max(S, 0) per key in registers → sum over the four lanes of a key → · scale → shared memory
    ---- barrier of the CTA
    select    a thread takes `held` logits as keys: whole numbers in the order of the logits (NaN as -inf; 0 is none).
              Digits of 11 bits → the CTA's largest, half as many again as are its part of the k → their keys and
              columns, and the least of them, to the first CTA, by distributed shared memory │ barrier of the cluster │
              the first CTA selects the k of them, and writes them through the page table

A CTA has kept what is below the least that it chose. If the k-th is not above the least of every CTA, the first CTA
reads the logits of all CTAs for every digit (`again`): slow, and right in any case; the others wait for it.

A cluster reads its row by at most 16 multiprocessors, so that this is for few requests that are not long. The
logits are those of mqa_logits v3, to the bit where it has one query token a tile; the selection is topk v3's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
from mla_var3.kernel.cute_python.prims.wgmma import WARPGROUP
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.workload import indexer_topk as workload
from mla_var3.workload.indexer_logits import PAGE, TOKEN_BYTES, D

if TYPE_CHECKING:
    from mla_var3.workload.indexer_topk import IndexerTopkProblem

WARP = 32
GROUPS = 4  # warpgroups
THREADS = GROUPS * WARPGROUP
WARPS = THREADS // WARP
SLOTS = 4  # pages that are loaded for a warpgroup: with those of all 135 KB are under way
MMA_K = 32  # FP8 columns of an MMA
HEADS = (16, 32, 64)
#: Above every |S|, which is at most 128 · 448²; a power of two, by which a product is exact.
UNIT = 2.0**25
CHUNK = 8  # candidates of a thread that are counted between two looks at which numbers are counted
ROOM = 1.2  # of a floor: how many times the CTA's part of the k logits are not below it
BINS = 2048
OWN_BINS = BINS // THREADS  # of a thread
DIGIT = 11  # bits
MOST_K = 2048
HELD = (1, 2, 4, 8, 16)  # logits of a thread
CLUSTERS = (4, 8, 16)
GATHERED = 4096  # candidates that the first CTA of a cluster chooses among
MOST = max(CLUSTERS) * THREADS * max(HELD)  # tokens of a request
#: Clusters of 16 and of 8 CTAs that the device runs at once, where a CTA takes a multiprocessor.
AT_ONCE = {16: 7, 8: 14}


class Barriers(IntEnum):
    """Named barriers; that of a warpgroup is PAGE_READ and its number behind it."""

    CTA = 0
    PAGE_READ = 1


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on. h: heads. s: query tokens of a request. ctas: of a row. held: logits of a
    thread."""

    h: int
    s: int
    k: int
    ctas: int
    held: int

    @property
    def group(self) -> int:
        """Logits of a thread whose largest one counts for the floor, the least of these: the most of which a row of
        random order has more than the CTA chooses that are not below it. 1 where only the least of all will do."""
        own, size = THREADS * self.held, self.held
        while size > 1:
            groups = own // size
            if (1 - groups ** (-1 / size)) * own >= ROOM * self.own_k:
                return size
            size //= 2
        return 1

    @property
    def pages(self) -> int:
        """Of a row, at most."""
        return self.ctas * self.held * (THREADS // PAGE)

    @property
    def share(self) -> int:
        """Candidates of a CTA among those that its cluster chooses among, at most."""
        return GATHERED // self.ctas

    @property
    def own_k(self) -> int:
        """How many a CTA chooses: more by half than are its part of the k."""
        return min(3 * self.k // (2 * self.ctas) + 16, self.share)


def array_of(kind: type, size: int) -> Any:
    """16-byte aligned shared memory."""
    return cute.struct.Align[cute.struct.MemRange[kind, size], 16]


def shared_storage(geometry: Geometry) -> type:
    """The CTA's shared memory."""
    places = GROUPS * SLOTS
    fields = {
        "full": cute.struct.MemRange[Int64, places],  # mbarriers: the page has been loaded
        "query_full": cute.struct.MemRange[Int64, 2],
        "sums": array_of(Int32, WARPS),
        "ends": array_of(Uint32, 2 * WARPS),
        "found": array_of(Int32, 4),  # of a digit: bin, how many are above it, how many in it
        "few": array_of(Uint32, 2 * WARP + 1),  # keys, how many columns lie behind them, how many these are
        "bins": array_of(Int32, BINS),
        "own": array_of(Int32, 2 * geometry.share),  # a CTA's candidates: keys, columns
        "gathered": array_of(Int32, 2 * GATHERED),  # of all CTAs: keys, columns
        "least": array_of(Uint32, 2 * geometry.ctas),  # of each CTA: key and columns behind, below which it kept all
        "logits": array_of(Float32, THREADS * geometry.held),  # of the CTA's pages
        "pages": array_of(Int32, geometry.pages),  # of the row, by the page table; the first CTA's alone
        "scales": array_of(Float32, places * PAGE),
        "query": cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, geometry.h * D], 1024],
        "keys": cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, places * PAGE * D], 1024],
    }
    # Not a class statement: postponed annotations are strings, and the struct wants types.
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


class Memory(NamedTuple):
    """Shared memory of the selection, as the storage has it."""

    sums: cute.Tensor
    ends: cute.Tensor
    found: cute.Tensor
    few: cute.Tensor
    bins: cute.Tensor
    own: cute.Tensor
    gathered: cute.Tensor
    least: cute.Tensor
    logits: cute.Tensor
    pages: cute.Tensor


def memory_in(storage: Any, geometry: Geometry) -> Memory:
    return Memory(
        storage.sums.get_tensor(cute.make_layout(WARPS)),
        storage.ends.get_tensor(cute.make_layout(2 * WARPS)),
        storage.found.get_tensor(cute.make_layout(4)),
        storage.few.get_tensor(cute.make_layout(2 * WARP + 1)),
        storage.bins.get_tensor(cute.make_layout(BINS)),
        storage.own.get_tensor(cute.make_layout(2 * geometry.share)),
        storage.gathered.get_tensor(cute.make_layout(2 * GATHERED)),
        storage.least.get_tensor(cute.make_layout(2 * geometry.ctas)),
        storage.logits.get_tensor(cute.make_layout(THREADS * geometry.held)),
        storage.pages.get_tensor(cute.make_layout(geometry.pages)),
    )


def tiles_in(base: cute.Pointer, rows: int, count: int) -> cute.Tensor:
    """(rows, 128, count) codes in shared memory, swizzled."""
    return wgmma.smem_view(base, 0, wgmma.k_major_layout(Float8E4M3FN, (rows, D, count)))


class Inputs(NamedTuple):
    """Of the kernel."""

    query_tma: cute.CopyAtom
    query: cute.Tensor  # TMA tensor (query tokens x heads, 128)
    key_tma: cute.CopyAtom
    keys: cute.Tensor  # TMA tensor (64, 128, pages)
    scales: cute.Tensor  # (64, pages)
    weights: cute.Tensor  # (query tokens, h)
    ends: cute.Tensor  # (query tokens,)
    table: cute.Tensor  # (b, width)
    indices: cute.Tensor  # (query tokens, k)


class Source(NamedTuple):
    """What a CTA chooses among. end: of the row, its first column that is out of range. rank: of the CTA."""

    end: Int32
    rank: Int32


# ------------------------------------------------------------------------------------------------ device: load
@cute.jit
def load_page(inputs: cutlass.Constexpr, storage: cutlass.Constexpr, page: Int32, place: Int32):
    """Starts loading a page into a place, by a warp."""
    full = storage.full.data_ptr() + place
    places = cute.group_modes(tiles_in(storage.keys.data_ptr(), PAGE, GROUPS * SLOTS), 0, 2)
    boxes = cute.group_modes(cute.flat_divide(inputs.keys, (PAGE, D)), 0, 2)
    places, boxes = cpasync.tma_partition(inputs.key_tma, 0, cute.make_layout(1), places, boxes)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, PAGE * TOKEN_BYTES)
    cute.copy(inputs.key_tma, boxes[None, 0, 0, page], places[None, place], tma_bar_ptr=full)
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            f"[{{$r0}}], [{{$r1}}], {PAGE * 4}, [{{$r2}}];",
            read_only_args=[
                (storage.scales.data_ptr() + place * PAGE).toint(), inputs.scales[None, page].iterator.toint(),
                full.toint(),
            ],
        )  # fmt: skip


@cute.jit
def load_query(inputs: cutlass.Constexpr, storage: cutlass.Constexpr, row: Int32, geometry: cutlass.Constexpr):
    """Starts loading the row's query, by a warp."""
    full = storage.query_full.data_ptr()
    places = cute.group_modes(tiles_in(storage.query.data_ptr(), geometry.h, 1), 0, 2)
    boxes = cute.group_modes(cute.flat_divide(inputs.query, (geometry.h, D)), 0, 2)
    places, boxes = cpasync.tma_partition(inputs.query_tma, 0, cute.make_layout(1), places, boxes)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, geometry.h * D)
    cute.copy(inputs.query_tma, boxes[None, row, 0], places[None, 0], tma_bar_ptr=full)


# ------------------------------------------------------------------------------------------------ device: mma, epilogue
def make_mma(n: int) -> cute.TiledMma:
    """A 64 x n x 32 tiled FP8 MMA of one warpgroup, both operands K-major in shared memory, fp32 accumulators."""
    source, major = warpgroup.OperandSource.SMEM, OperandMajorMode.K
    op = warpgroup.MmaF8Op(Float8E4M3FN, Float8E4M3FN, Float32, (PAGE, n, MMA_K), source, major, major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


@cute.jit
def saturated(value: Float32) -> Float32:
    """max(value, 0) / UNIT of a value that is at most UNIT; 0 of NaN."""
    return cute.arch.inline_ptx(
        "mul.sat.f32 {$w0}, {$r0}, 0f33000000;", write_only_types=[Float32], read_only_args=[value]
    )


@cute.jit
def logit_of(acc: cute.Tensor, weights: cute.Tensor, lane: Int32, geometry: cutlass.Constexpr) -> Float32:
    """Σ weight · max(S, 0) over the heads, of the lane's key: row lane // 4 of the warp's 16, and 8 more in the upper
    two of the four lanes that have columns of a row."""
    rows, each = wgmma.as_rows(acc), geometry.h // 4
    # Columns in turn by either of two pipes, each with a chain of its own: a maximum, or a product with saturation.
    # Both are exact, and make 0 of NaN.
    chains = [[None, None] for _ in range(2)]
    for c in cutlass.range_constexpr(each):
        for r in cutlass.range_constexpr(2):
            if cutlass.const_expr(c % 2 == 1):
                positive = saturated(rows[r, c])
            else:
                positive = cute.arch.fmax(rows[r, c], Float32(0.0))
            term = positive * weights[c]
            chains[r][c % 2] = term if cutlass.const_expr(c < 2) else chains[r][c % 2] + term
    one, other = [chain[0] + chain[1] * Float32(UNIT) for chain in chains]
    upper = lane // 2 % 2 == 1
    own, sent = cutlass.select_(upper, other, one), cutlass.select_(upper, one, other)
    value = own + cute.arch.shuffle_sync_bfly(sent, offset=2)
    return value + cute.arch.shuffle_sync_bfly(value, offset=1)


@cute.jit
def score(
    inputs: cutlass.Constexpr, storage: cutlass.Constexpr, row: Int32, source: cutlass.Constexpr, entry: Int32,
    thread: Int32, geometry: cutlass.Constexpr,
):  # fmt: skip
    """Makes the logits of the CTA's pages: those of its i-th page at 64 i. entry: lane j has the page table's of the
    warpgroup's j-th page, which is the CTA's page j · GROUPS + warpgroup. Ends with a barrier."""
    lane, warp = thread % WARP, cute.arch.make_warp_uniform(thread // WARP)
    group, warp_of_group = warp // (WARPGROUP // WARP), warp % (WARPGROUP // WARP)
    pages = (source.end + (PAGE - 1)) // PAGE
    own = (pages - source.rank + (geometry.ctas - 1)) // geometry.ctas
    count = (own - group + (GROUPS - 1)) // GROUPS
    if warp_of_group == 0:
        for j in cutlass.range(cutlass.min(count, SLOTS), unroll=1):
            load_page(inputs, storage, cute.arch.shuffle_sync(entry, j), group * SLOTS + j)
    if source.rank == 0:
        of_row = storage.pages.get_tensor(cute.make_layout(geometry.pages))
        for i in cutlass.range(thread, pages, THREADS, unroll=1):
            of_row[i] = inputs.table[row // geometry.s, i]
    h = geometry.h
    weights = cute.make_rmem_tensor(h // 4, Float32)
    pairs = cute.make_tensor(weights.iterator, cute.make_layout((2, h // 8)))
    row_weights = cute.make_tensor(
        inputs.weights.iterator + Int64(row) * h, cute.make_layout((2, WARP // 8, h // 8), stride=(1, 2, 8))
    )
    for j in cutlass.range_constexpr(h // 8):
        cute.autovec_copy(row_weights[None, lane % 4, j], pairs[None, j])
    full, logits = storage.full.data_ptr(), storage.logits.get_tensor(cute.make_layout(THREADS * geometry.held))
    scales = storage.scales.get_tensor(cute.make_layout((PAGE, GROUPS * SLOTS)))
    tiled_mma = make_mma(h)
    mine = tiled_mma.get_slice(thread % WARPGROUP)
    keys = tiled_mma.make_fragment_A(mine.partition_A(tiles_in(storage.keys.data_ptr(), PAGE, GROUPS * SLOTS)))
    query = tiled_mma.make_fragment_B(mine.partition_B(tiles_in(storage.query.data_ptr(), h, 1)))
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((PAGE, h)), Float32)
    key = warp_of_group * 16 + lane // 4 + 8 * (lane // 2 % 2)
    cute.arch.mbarrier_wait(storage.query_full.data_ptr(), 0)
    for j in cutlass.range(count, unroll=1):
        place = group * SLOTS + j % SLOTS
        cute.arch.mbarrier_wait(full + place, j // SLOTS % 2)
        # S = K · Qᵀ
        wgmma.gemm_issue(
            tiled_mma, acc, keys[None, None, None, place], query[None, None, None, 0], tuple(range(D // MMA_K)), True
        )
        scale = scales[key, place]
        warpgroup.wait_group(0)
        cute.arch.barrier(barrier_id=group + int(Barriers.PAGE_READ), number_of_threads=WARPGROUP)
        if (warp_of_group == 0) & (j + SLOTS < count):
            load_page(inputs, storage, cute.arch.shuffle_sync(entry, j + SLOTS), place)
        logit = cute.arch.fmax(logit_of(acc, weights, lane, geometry) * scale, Float32(-math.inf))
        if lane % 2 == 0:
            logits[(j * GROUPS + group) * PAGE + key] = logit
    cute.arch.sync_threads()


# ------------------------------------------------------------------------------------------------ device: keys
def pick(holds: Any, one: Uint32, other: Uint32) -> Uint32:
    """`select_` of unsigned numbers, which it makes signed."""
    return Uint32(cutlass.select_(holds, one, other))


@cute.jit
def key_of(value: Float32) -> Uint32:
    """A number in the order of the values, above 0: -0 is +0, and NaN -inf."""
    bits = (cute.arch.fmax(value, Float32(-math.inf)) + Float32(0.0)).bitcast(Int32)
    return (bits ^ ((bits >> 31) | Int32(-(1 << 31)))).bitcast(Uint32)


@cute.jit
def behind(column: Int32, source: cutlass.Constexpr) -> Uint32:
    """How many columns of the row lie behind one: the larger, the better among equals."""
    return (source.end - 1 - column).bitcast(Uint32)


@cute.jit
def column_of(
    j: cutlass.Constexpr, memory: cutlass.Constexpr, source: cutlass.Constexpr, thread: Int32, of: cutlass.Constexpr,
    geometry: cutlass.Constexpr,
) -> Int32:  # fmt: skip
    """The column of a thread's j-th candidate, `of` the CTA or of all "gathered" ones."""
    if cutlass.const_expr(of == "gathered"):
        column = memory.gathered[GATHERED + j * THREADS + thread]
    else:
        page = (j * (THREADS // PAGE) + thread // PAGE) * geometry.ctas + source.rank
        column = page * PAGE + thread % PAGE
    return column


@cute.jit
def hold(
    memory: cutlass.Constexpr, keys: cute.Tensor, source: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr
):
    """Fills a thread's keys with its logits; those out of range are 0."""
    for j in cutlass.range_constexpr(geometry.held):
        key = key_of(memory.logits[j * THREADS + thread])
        keys[j] = pick(column_of(j, memory, source, thread, "own", geometry) < source.end, key, Uint32(0))


@cute.jit
def key_again(memory: cutlass.Constexpr, column: Int32, geometry: cutlass.Constexpr) -> Uint32:
    """The key of a column of the row, from the CTA that has its logit."""
    page = column // PAGE
    address = address_of(memory.logits, page // geometry.ctas * PAGE + column % PAGE)
    value = cute.arch.inline_ptx(
        "ld.shared::cluster.f32 {$w0}, [{$r0}];", write_only_types=[Float32],
        read_only_args=[of_other(address, page % geometry.ctas)],
    )  # fmt: skip
    return key_of(value)


# ------------------------------------------------------------------------------------------------ device: sums
@cute.jit
def block_sum(value: Int32, memory: cutlass.Constexpr, thread: Int32):
    """(sum of the value over all threads before this one, over all), by all threads. One barrier, behind which `sums`
    is read: another has to lie in front of its next use."""
    lane, warp = thread % WARP, thread // WARP
    upto = upto_lane(value, lane)
    if lane == WARP - 1:
        memory.sums[warp] = upto
    cute.arch.sync_threads()
    total, before = Int32(0), upto - value
    for i in cutlass.range_constexpr(WARPS):
        part = memory.sums[i]
        total = total + part
        before = before + cutlass.select_(warp > i, part, Int32(0))
    return before, total


@cute.jit
def upto_lane(value: Int32, lane: Int32) -> Int32:
    """The sum of a value over the lanes of a warp up to this one."""
    upto = value
    for bit in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(upto, offset=1 << bit)
        upto = upto + cutlass.select_(lane >= 1 << bit, other, Int32(0))
    return upto


@cute.jit
def block_ends(memory: cutlass.Constexpr, one: Uint32, other: Uint32, thread: Int32):
    """(the least of the first, the largest of the second number) over all threads. One barrier, behind which `ends` is
    read."""
    lane, warp = thread % WARP, thread // WARP
    least, largest = cute.arch.warp_redux_sync(one, "min"), cute.arch.warp_redux_sync(other, "max")
    if lane == 0:
        memory.ends[warp], memory.ends[WARPS + warp] = least, largest
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(WARPS):
        low, high = memory.ends[i], memory.ends[WARPS + i]
        least, largest = pick(low < least, low, least), pick(high > largest, high, largest)
    return least, largest


@cute.jit
def largest_of(keys: cute.Tensor, count: cutlass.Constexpr) -> Uint32:
    largest = keys[0]
    for j in cutlass.range_constexpr(1, count):
        largest = pick(keys[j] > largest, keys[j], largest)
    return largest


@cute.jit
def address_of(array: cute.Tensor, at: Int32) -> Int32:
    return (array.iterator + at).toint()


@cute.jit
def of_other(address: Int32, rank: Int32) -> Int32:
    """Where another CTA of the cluster has the same of its shared memory."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


@cute.jit
def find_bin(memory: cutlass.Constexpr, need: Int32, thread: Int32):
    """(bin, candidates in bins above it, candidates in it) of the bin that the need-th largest is in; a bin of -1 where
    there are fewer. Bins are zero afterwards. Three barriers, the first in front of it all."""
    cute.arch.sync_threads()
    bins = memory.bins
    lane, warp = thread % WARP, thread // WARP
    first = BINS - OWN_BINS * (thread + 1)
    counts = [bins[first + OWN_BINS - 1 - i] for i in range(OWN_BINS)]
    for i in cutlass.range_constexpr(OWN_BINS):
        memory.bins[first + i] = Int32(0)
    own = counts[0]
    for i in cutlass.range_constexpr(1, OWN_BINS):
        own = own + counts[i]
    of_warp = cute.arch.warp_redux_sync(own, "add")
    if lane == 0:
        memory.sums[warp] = of_warp
    if thread == 0:
        memory.few[2 * WARP] = Uint32(0)
    cute.arch.sync_threads()
    above, total = Int32(0), Int32(0)
    for i in cutlass.range_constexpr(WARPS):
        part = memory.sums[i]
        total = total + part
        above = above + cutlass.select_(warp > i, part, Int32(0))
    if (above < need) & (need <= above + of_warp):
        above = above + upto_lane(own, lane) - own
        for i in cutlass.range_constexpr(OWN_BINS):
            if (above < need) & (need <= above + counts[i]):
                memory.found[0], memory.found[1], memory.found[2] = first + OWN_BINS - 1 - i, above, counts[i]
            above = above + counts[i]
    cute.arch.sync_threads()
    return cutlass.select_(need <= total, memory.found[0], Int32(-1)), memory.found[1], memory.found[2]


# ------------------------------------------------------------------------------------------------ device: count
@cute.jit
def count_one(bins: Int32, value: Uint32, low: Uint32, span: Uint32, shift: Int32):
    """Counts a value in the bin of its digit, if it is one of low, ..., low + span. Without a branch."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b32 a; sub.u32 a, {$r1}, {$r2}; setp.le.u32 p, a, {$r3}; shr.u32 a, a, {$r4}; "
        "shl.b32 a, a, 2; add.u32 a, a, {$r0}; @p red.shared.add.u32 [a], 1; }",
        read_only_args=[bins, value, low, span, shift],
    )


@cute.jit
def span_of(width: Int32, low: Uint32) -> Uint32:
    """2 to the width, 1 to 32, less 1; less where `low` and so much would be more than 32 bits hold, as 0 and other
    numbers below `low` would be counted there."""
    span, most = Uint32(0xFFFFFFFF) >> Uint32(32 - width), Uint32(0xFFFFFFFF) - low
    return pick(span < most, span, most)


@cute.jit
def width_of(span: Uint32) -> Int32:
    """How many bits a number has, at least 1."""
    zeros = cute.arch.inline_ptx("clz.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[span])
    return cutlass.max(32 - zeros, 1)


class Digit(NamedTuple):
    """Which bits of which numbers are counted: of keys, or where ties > 0 of what lies behind those with the key
    `tied`. low: the least of them that counts. width: bits of the numbers above it. shift: bits behind the digit."""

    low: Uint32
    width: Int32
    shift: Int32
    ties: Int32
    tied: Uint32


@cute.jit
def count_all(
    memory: cutlass.Constexpr, keys: cute.Tensor, source: cutlass.Constexpr, again: Boolean, digit: cutlass.Constexpr,
    thread: Int32, of: cutlass.Constexpr, geometry: cutlass.Constexpr,
):  # fmt: skip
    """Counts all candidates, or all logits of the row again, in the bins of a digit."""
    low, width, shift, ties, tied = digit
    bins, span = address_of(memory.bins, Int32(0)), span_of(width, low)
    candidates = cutlass.const_expr(cute.size(keys))
    if again:
        for column in cutlass.range(thread, source.end, THREADS, unroll=1):
            key = key_again(memory, column, geometry)
            if (ties == 0) | (key == tied):
                count_one(bins, pick(ties > 0, behind(column, source), key), low, span, shift)
    else:
        for first in cutlass.range_constexpr(0, candidates, CHUNK):
            some_of = cutlass.const_expr(range(first, min(first + CHUNK, candidates)))
            if ties == 0:
                for j in cutlass.range_constexpr(len(some_of)):
                    count_one(bins, keys[some_of[j]], low, span, shift)
            else:
                for j in cutlass.range_constexpr(len(some_of)):
                    if keys[some_of[j]] == tied:
                        value = behind(column_of(some_of[j], memory, source, thread, of, geometry), source)
                        count_one(bins, value, low, span, shift)


# ------------------------------------------------------------------------------------------------ device: select
@cute.jit
def rank_few(
    memory: cutlass.Constexpr, keys: cute.Tensor, source: cutlass.Constexpr, low: Uint32, width: Int32, need: Int32,
    inside: Int32, thread: Int32, of: cutlass.Constexpr, geometry: cutlass.Constexpr,
):  # fmt: skip
    """(key, columns behind) of the need-th largest of the few candidates, up to 32, that are in the interval: a lane
    has one, and counts those that are larger. One barrier."""
    span, most = (Uint32(1) << Uint32(width)) - Uint32(1), Uint32(0xFFFFFFFF) - low
    span = pick(span < most, span, most)
    for j in cutlass.range_constexpr(cute.size(keys)):
        if keys[j] - low <= span:
            place = cute.arch.inline_ptx(
                "atom.shared.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32],
                read_only_args=[address_of(memory.few, Int32(2 * WARP))],
            )  # fmt: skip
            memory.few[place] = keys[j]
            memory.few[WARP + place] = behind(column_of(j, memory, source, thread, of, geometry), source)
    cute.arch.sync_threads()
    lane = thread % WARP
    key, its_behind, larger = memory.few[lane], memory.few[WARP + lane], Int32(0)
    for i in cutlass.range(inside, unroll=1):
        other, other_behind = memory.few[i], memory.few[WARP + i]
        larger = larger + Int32((other > key) | ((other == key) & (other_behind > its_behind)))
    wanted = (lane < inside) & (larger == need - 1)
    key = cute.arch.warp_redux_sync(pick(wanted, key, Uint32(0)), "max")
    return key, cute.arch.warp_redux_sync(pick(wanted, its_behind, Uint32(0)), "max")


@cute.jit
def kth(
    memory: cutlass.Constexpr, keys: cute.Tensor, source: cutlass.Constexpr, floor: Uint32, largest: Uint32,
    again: Boolean, thread: Int32, of: cutlass.Constexpr, geometry: cutlass.Constexpr,
):  # fmt: skip
    """(again, low, low_behind): the largest are those with a key above `low`, or with that key and at least
    `low_behind` columns behind them. They are k, of more than k logits of the row; or of one CTA from `own_k` to
    `share`, or all of its logits where these are fewer. again: k are not among the candidates above the floor.

    floor: all candidates that are not below it are there. largest: of their keys."""
    part = cutlass.const_expr(of == "own")
    room = cutlass.const_expr(geometry.share - geometry.own_k if part else 0)
    low, width, need = floor, width_of(largest - floor), Int32(geometry.own_k if part else geometry.k)
    if again:
        low, width = Uint32(1), Int32(32)
    ties, tied, searching, low_behind = Int32(0), Uint32(0), Int32(1), Uint32(0)
    while searching > 0:
        shift = cutlass.max(width - DIGIT, 0)
        digit = Digit(low, width, shift, ties, tied)
        count_all(memory, keys, source, again, digit, thread, of, geometry)
        bin_, above, inside = find_bin(memory, need, thread)
        if bin_ < 0:
            # Fewer than are wanted are not below the floor: all that there is, from the first digit.
            if cutlass.const_expr(part):
                if low == Uint32(1):
                    searching = Int32(0)
            else:
                again = Boolean(True)
            low, width = Uint32(1), Int32(32)
        else:
            low, width, need = low + (bin_.bitcast(Uint32) << Uint32(shift)), shift, need - above
            if inside - need <= room:
                searching = Int32(0)
            elif (inside <= WARP) & (ties == 0) & ~again:
                low, low_behind = rank_few(
                    memory, keys, source, low, width, need, inside, thread, of, geometry
                )  # fmt: skip
                searching = Int32(0)
            elif shift == 0:
                # More equal the k-th than are needed: those of the lowest columns.
                ties, tied, low = Int32(1), low, Uint32(0)
                width = width_of(source.end.bitcast(Uint32))
    return again, pick(ties > 0, tied, low), pick(ties > 0, low, low_behind)


@cute.jit
def chosen(key: Uint32, column: Int32, low: Uint32, low_behind: Uint32, source: cutlass.Constexpr):
    return (key > low) | ((key == low) & (behind(column, source) >= low_behind))


@cute.jit
def chosen_bits(
    memory: cutlass.Constexpr, keys: cute.Tensor, source: cutlass.Constexpr, low: Uint32, low_behind: Uint32,
    thread: Int32, of: cutlass.Constexpr, geometry: cutlass.Constexpr,
) -> Int32:  # fmt: skip
    """Which of a thread's candidates are chosen, a bit each."""
    bits = Int32(0)
    for j in cutlass.range_constexpr(cute.size(keys)):
        bits = bits | (Int32(keys[j] > low) << j)
        if keys[j] == low:
            column = column_of(j, memory, source, thread, of, geometry)
            bits = bits | (Int32(chosen(keys[j], column, low, low_behind, source)) << j)
    return bits


# ------------------------------------------------------------------------------------------------ device: cluster
@cute.jit
def store_other(address: Int32, rank: Int32, words: cutlass.Constexpr):
    """Stores four words to where another CTA of the cluster has the same of its shared memory."""
    cute.arch.inline_ptx(
        "st.shared::cluster.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[of_other(address, rank), *words],
    )  # fmt: skip


@cute.jit
def gather(
    memory: cutlass.Constexpr, keys: cute.Tensor, source: cutlass.Constexpr, low: Uint32, low_behind: Uint32,
    thread: Int32, geometry: cutlass.Constexpr,
):  # fmt: skip
    """Brings what the CTA has chosen to the cluster's first CTA: (GATHERED,) keys and columns, each CTA's share of
    them behind those of the CTAs in front of it, with 0 for keys that there are not; and the least that it has chosen.
    Ends with a barrier of the cluster."""
    share = cutlass.const_expr(geometry.share)
    bits = chosen_bits(memory, keys, source, low, low_behind, thread, "own", geometry)
    place, total = block_sum(Int32(cute.arch.popc(bits)), memory, thread)
    for j in cutlass.range_constexpr(geometry.held):
        if (bits >> j) & 1 > 0:
            memory.own[place] = keys[j].bitcast(Int32)
            memory.own[share + place] = column_of(j, memory, source, thread, "own", geometry)
        place = place + ((bits >> j) & 1)
    cute.arch.sync_threads()
    cute.arch.cluster_wait()  # the first CTA has begun
    for i in cutlass.range(thread, share // 4, THREADS, unroll=1):
        at = i * 4
        some = [Int32(cutlass.select_(at + e < total, memory.own[at + e], Int32(0))) for e in range(4)]
        place = source.rank * share + at
        store_other(address_of(memory.gathered, place), Int32(0), some)
        columns = [memory.own[share + at + e] for e in range(4)]
        store_other(address_of(memory.gathered, GATHERED + place), Int32(0), columns)
    if thread == 0:
        cute.arch.inline_ptx(
            "st.shared::cluster.v2.u32 [{$r0}], {{$r1}, {$r2}};",
            read_only_args=[
                of_other(address_of(memory.least, 2 * source.rank), Int32(0)), low.bitcast(Int32),
                low_behind.bitcast(Int32),
            ],
        )  # fmt: skip
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def choose_gathered(
    memory: cutlass.Constexpr, source: cutlass.Constexpr, inputs: cutlass.Constexpr, row: Int32, thread: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """What a cluster's first CTA does with all that are gathered. A CTA has kept what is below the least that it chose:
    if that could be among the k, the logits of all are read again."""
    each = cutlass.const_expr(GATHERED // THREADS)
    keys = cute.make_rmem_tensor(each, Uint32)
    for j in cutlass.range_constexpr(each):
        keys[j] = memory.gathered[j * THREADS + thread].bitcast(Uint32)
    floor = Uint32(1)
    for i in cutlass.range_constexpr(geometry.ctas):
        floor = pick(memory.least[2 * i] > floor, memory.least[2 * i], floor)
    _, largest = block_ends(memory, floor, largest_of(keys, each), thread)
    again, low, low_behind, trying = Boolean(False), Uint32(0), Uint32(0), Int32(1)
    while trying > 0:
        again, low, low_behind = kth(memory, keys, source, floor, largest, again, thread, "gathered", geometry)
        lacks = Boolean(False)
        for i in cutlass.range_constexpr(geometry.ctas):
            lacks = lacks | ((memory.least[2 * i] == low) & (memory.least[2 * i + 1] > low_behind))
        trying = Int32(lacks & ~again)
        again = again | lacks
    write(memory, keys, source, again, (low, low_behind), inputs, row, thread, geometry)


# ------------------------------------------------------------------------------------------------ device: write
@cute.jit
def put_again(
    memory: cutlass.Constexpr, place: Int32, source: cutlass.Constexpr, low: Uint32, low_behind: Uint32, thread: Int32,
    puts: cutlass.Constexpr, geometry: cutlass.Constexpr,
) -> Int32:  # fmt: skip
    """Reads the logits of all CTAs; gives the place behind a thread's chosen columns, which with `puts` are put from
    `place` on into the memory of the bins."""
    for column in cutlass.range(thread, source.end, THREADS, unroll=1):
        if chosen(key_again(memory, column, geometry), column, low, low_behind, source):
            if cutlass.const_expr(puts):
                memory.bins[place] = column
            place = place + 1
    return place


@cute.jit
def write(
    memory: cutlass.Constexpr, keys: cute.Tensor, source: cutlass.Constexpr, again: Boolean, last: cutlass.Constexpr,
    inputs: cutlass.Constexpr, row: Int32, thread: Int32, geometry: cutlass.Constexpr,
):  # fmt: skip
    """Writes the slots of what is chosen, in an order that is put together in the memory of the bins. last: key of the
    last that is chosen, and the columns behind it."""
    low, low_behind = last
    bits, count = Int32(0), Int32(0)
    if again:
        count = put_again(memory, count, source, low, low_behind, thread, False, geometry)
    else:
        bits = chosen_bits(memory, keys, source, low, low_behind, thread, "gathered", geometry)
        count = cute.arch.popc(bits)
    place, total = block_sum(Int32(count), memory, thread)
    if again:
        place = put_again(memory, place, source, low, low_behind, thread, True, geometry)
    else:
        for j in cutlass.range_constexpr(cute.size(keys)):
            if (bits >> j) & 1 > 0:
                memory.bins[place] = column_of(j, memory, source, thread, "gathered", geometry)
            place = place + ((bits >> j) & 1)
    cute.arch.sync_threads()
    for i in cutlass.range(thread, total, THREADS, unroll=1):
        column = memory.bins[i]
        inputs.indices[row, i] = memory.pages[column // PAGE] * PAGE + column % PAGE


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.kernel
def indexer_topk_v1(inputs: Inputs, geometry: cutlass.Constexpr):
    """A CTA of a row."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    storage = SmemAllocator().allocate(shared_storage(geometry))
    memory = memory_in(storage, geometry)
    row, rank = block // geometry.ctas, block % geometry.ctas
    if warp == 0:
        cpasync.prefetch_descriptor(inputs.query_tma)
        cpasync.prefetch_descriptor(inputs.key_tma)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(GROUPS * SLOTS):
                cute.arch.mbarrier_init(storage.full.data_ptr() + i, 1)
            cute.arch.mbarrier_init(storage.query_full.data_ptr(), 1)
        cute.arch.mbarrier_init_fence()
    for i in cutlass.range_constexpr(OWN_BINS):
        memory.bins[i * THREADS + thread] = Int32(0)
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_wait()
    # The length, and beside it the entry of the page table that a lane has to know if the row is so long.
    page = (thread % WARP * GROUPS + thread // WARPGROUP) * geometry.ctas + rank
    width = inputs.table.shape[1]
    entry = inputs.table[row // geometry.s, cutlass.min(page, width - 1)]
    end = cutlass.max(cutlass.min(inputs.ends[row], width * PAGE), 0)
    if end <= geometry.k:
        cute.arch.griddepcontrol_launch_dependents()
        for i in cutlass.range(rank * THREADS + thread, geometry.k, THREADS * geometry.ctas, unroll=1):
            index = Int32(-1)
            if i < end:
                index = inputs.table[row // geometry.s, i // PAGE] * PAGE + i % PAGE
            inputs.indices[row, i] = index
    else:
        cute.arch.cluster_arrive()  # this CTA has begun
        if warp == 0:
            load_query(inputs, storage, row, geometry)
        source = Source(end, rank)
        score(inputs, storage, row, source, entry, thread, geometry)
        cute.arch.griddepcontrol_launch_dependents()
        keys = cute.make_rmem_tensor(geometry.held, Uint32)
        hold(memory, keys, source, thread, geometry)
        least, largest = Uint32(0xFFFFFFFF), largest_of(keys, geometry.held)
        for first in cutlass.range_constexpr(0, geometry.held, geometry.group):
            group = cute.make_tensor(keys.iterator + first, cute.make_layout(geometry.group))
            its = largest_of(group, geometry.group)
            least = pick(its < least, its, least)
        floor, largest = block_ends(memory, pick(least > Uint32(1), least, Uint32(1)), largest, thread)
        _, low, low_behind = kth(memory, keys, source, floor, largest, Boolean(False), thread, "own", geometry)
        gather(memory, keys, source, low, low_behind, thread, geometry)
        if rank == 0:
            choose_gathered(memory, source, inputs, row, thread, geometry)
        # What a CTA has in its memory is there until the first one needs it no more.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


indexer_topk_v1.set_name_prefix("indexer_topk_v1", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_indexer_topk_v1(
    q: cute.Tensor,  # (b, s, h, 128) uint8, contiguous
    cache: cute.Tensor,  # (pages, 64, 132) uint8, pages apart
    weights: cute.Tensor,  # (query tokens, h) fp32, contiguous
    ends: cute.Tensor,  # (b, s) int32, contiguous
    table: cute.Tensor,  # (b, width) int32, rows apart
    indices: cute.Tensor,  # (query tokens, k) int32, contiguous
    geometry: cutlass.Constexpr,
    stream: CUstream,
):
    """Launches a cluster for every query token, as a programmatic dependent."""
    h, rows = geometry.h, weights.shape[0]
    copy = cpasync.CopyBulkTensorTileG2SOp()
    codes = cute.recast_ptr(q.iterator, dtype=Float8E4M3FN)
    query = cute.make_tensor(codes, cute.make_layout((rows * h, D), stride=(D, 1)))
    query_tma, query = cpasync.make_tiled_tma_atom(
        copy, query, wgmma.k_major_layout(Float8E4M3FN, (h, D)), (h, D), 1
    )  # fmt: skip
    pages, apart = cache.shape[0], cute.assume(cache.stride[0], divby=16)
    codes = cute.recast_ptr(cache.iterator, dtype=Float8E4M3FN)
    keys = cute.make_tensor(codes, cute.make_layout((PAGE, D, pages), stride=(D, 1, apart)))
    key_tma, keys = cpasync.make_tiled_tma_atom(
        copy, keys, wgmma.k_major_layout(Float8E4M3FN, (PAGE, D)), (PAGE, D), 1
    )  # fmt: skip
    behind_codes = cute.recast_ptr(cache.iterator + PAGE * D, dtype=Float32)
    scales = cute.make_tensor(behind_codes, cute.make_layout((PAGE, pages), stride=(1, apart // 4)))
    flat = cute.make_tensor(ends.iterator, cute.make_layout((rows,)))
    inputs = Inputs(query_tma, query, key_tma, keys, scales, weights, flat, table, indices)
    indexer_topk_v1(inputs, geometry).launch(
        grid=(rows * geometry.ctas, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(geometry.ctas, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
        preferred_smem_carveout=100,  # else it is asked of a GPU while compiling
        use_pdl=True,
    )


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: IndexerTopkProblem) -> Verdict:
    if not pd.table:
        return Verdict.no("the indexer and its top-k in one kernel read pages: give a page table")
    if pd.heads not in HEADS:
        return Verdict.no(f"heads = {pd.heads}: an indexer of {', '.join(map(str, HEADS))} heads is taken")
    if pd.topk > MOST_K:
        return Verdict.no(f"topk = {pd.topk}: at most {MOST_K:,} are chosen")
    if pd.columns > MOST:
        return Verdict.no(f"t = {pd.t}: a cluster takes up to {MOST:,} tokens of a request")
    return limits.all_of(
        limits.offsets(pd.rows * max(CLUSTERS), f"CTAs of {pd.rows:,} rows"),
        limits.offsets(pd.rows * pd.topk, f"indices of {pd.rows:,} rows"),
        limits.offsets(pd.rows * pd.heads, "rows of q"),
    )


@dataclass(frozen=True)
class IndexerTopkTiling(Tiling):
    """ctas: of a row, a cluster; 0: as many as run at once with all rows, and hold the row."""

    launch_fields: ClassVar[tuple[str, ...]] = ("ctas",)

    ctas: int = 0

    def validate(self, pd: IndexerTopkProblem, device: Device | None = None) -> Verdict:
        if self.ctas not in (0, *CLUSTERS):
            return Verdict.no(f"ctas = {self.ctas} must be 0 or one of {', '.join(map(str, CLUSTERS))}")
        if not (taken := takes(pd)):
            return taken
        most = self.ctas * THREADS * max(HELD)
        if self.ctas and pd.columns > most:
            return Verdict.no(f"ctas = {self.ctas}: as many hold {most:,} tokens of a request")
        return Verdict.yes()

    def geometry(self, pd: IndexerTopkProblem, rows: int, columns: int) -> Geometry:
        """For requests of up to so many tokens."""
        fits = [x for x in CLUSTERS if columns <= x * THREADS * max(HELD)]
        if not fits or (self.ctas and self.ctas not in fits):
            raise UserError(f"the page table has {columns:,} tokens: so many do not fit in {self.ctas or 16} CTAs.")
        ctas = self.ctas or max(next((x for x, most in AT_ONCE.items() if rows <= most), fits[0]), fits[0])
        held = next(x for x in HELD if columns <= x * THREADS * ctas)
        return Geometry(pd.heads, pd.s, pd.topk, ctas, held)


class IndexerTopkPlan(KernelPlan):
    """Inputs and output (indices,) of `workload.indexer_topk`, over pages. A compiled kernel for a problem class, the
    CTAs of a row and the logits of a thread; sizes, lengths and strides are arguments."""

    workload = workload.WORKLOAD
    tiling_type = IndexerTopkTiling
    tiling: IndexerTopkTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("fp32",), features=("wgmma", "tma"), problem=takes)

    def default_tiling(self) -> IndexerTopkTiling:
        return IndexerTopkTiling()

    def autotune_configs(self) -> list[Tiling]:
        tilings = [IndexerTopkTiling(ctas) for ctas in (0, *CLUSTERS)]
        return [tiling for tiling in tilings if tiling.validate(self.problem, self.device)]

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
        return self._make(inputs, outputs)

    def plan_empty(self) -> CuteKernel:
        self.require()
        return self._make((), ())

    def _make(self, inputs: Any, outputs: Any) -> CuteKernel:
        pd = self.problem
        rows, columns = (inputs[3].numel(), inputs[4].shape[1] * PAGE) if inputs else (pd.rows, pd.columns)
        geometry = self.tiling.geometry(pd, rows, columns)
        given: tuple[Any, ...] = (*inputs, outputs[0]) if inputs else ()

        def arguments() -> tuple[Any, ...]:
            n, b, pages, width = host.symbols(4)
            cache = make_fake_tensor(
                Uint8, (pages, PAGE, TOKEN_BYTES), (cute.sym_int64(divisibility=16), TOKEN_BYTES, 1), assumed_align=16
            )
            table = make_fake_tensor(Int32, (b, width), (cute.sym_int64(), 1), assumed_align=4)
            return (
                host.fake(Uint8, b, pd.s, pd.heads, D), cache, host.fake(Float32, n, pd.heads),
                host.fake(Int32, b, pd.s, align=4), table, host.fake(Int32, n, pd.topk, align=4), geometry,
            )  # fmt: skip

        name = f"indexer_topk_v1_{geometry.ctas}_{geometry.held}"
        return host.stage(self, indexer_topk_v1, launch_indexer_topk_v1, name, arguments, given, inputs, outputs)
