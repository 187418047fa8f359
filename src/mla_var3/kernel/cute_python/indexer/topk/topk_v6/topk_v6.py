r"""topk v6 in CuTe for sm_90: the k largest logits of few long rows, exactly; a cluster a row, which reads it once.

The CTAs of a cluster hold a row in registers, 8 to 32 logits a thread; lines of 128 bytes go to them in turn, for what
is chosen lies together. Each finds its candidates with one digit of 2,048 bins, linear in the logit: a whole bin is
taken, and nothing in it compared. The first CTA chooses the k among all candidates with a digit of the same kind. A
barrier stands where two of these lines meet:

    load      vectors of 16 bytes that lie in memory, while the row's range is on its way
    ends      floor, the least of the maxima of groups of logits, of which more than enough are not below it; and top
    count     part = (logit - a little below floor) / (top - that), cut to 0 ... 1: bin 2,048 · (1 - part)
    sum       a warp's part of the bins, added to the sums of the warps behind it
    select    the bin in which 1.5 times the CTA's part of the k are reached; the warps' counts of what is not below it
    stage     these logits and their columns
    send      to the first CTA, by distributed shared memory │ barrier of the cluster
    choose    ends, count, sum, select, place and write, of up to 4,096 candidates, by the first CTA: there what is in
              the bin is compared one with the other, a warp for each

A CTA has kept what is below its least candidate. Where that least one is not below the bin of the k-th the choice may
lack something. Then, where a CTA has more candidates than its share of the 4,096, and where a bin has more than the
list holds, the first CTA reads the row again for every digit of keys, whole numbers in the order of the logits (-0 as
+0, NaN as -inf): slow, and right in any case. Equal ones at the k-th place are chosen by digits of their columns there,
and by the list else. Sums are in a fixed order, so the result has the same bits in each run.

Against version 3, which has longer rows and more of them: what a CTA chooses is not ranked and not exact, a digit has
two barriers, and both choices have one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from mla_var3.device import Device, Requirement
from mla_var3.kernel.cute_python import host
from mla_var3.kernel.cute_python.prims.sync import wait_for_launch
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.workload import topk as workload
from mla_var3.workload.indexer_logits import PAGE

if TYPE_CHECKING:
    from mla_var3.workload.topk import TopkProblem

WARP = 32
LOWEST = 0x007FFFFF  # key of -inf
HIGHEST = 0xFF800000  # key of +inf
MOST = 0x7FFFFFFF  # the largest whole number; bits of NaN
EXACT = 0x4B000000  # bits of 2^23; a whole number more is as much more
ROOM = 1.2  # of a floor: how many times as many logits as are wanted are not below it
SLACK = 1 / 8  # of the distance from floor to top, that bins reach below: some floors are too high
FEW = 128  # chosen, fewer than which the largest logit is the top
BINS = 2048
DIGIT = 11  # bits
LISTED = 128  # of a bin, at most
MOST_K = 2048
MOST_T = 1 << 19
LINE = 8  # vectors
MOST_HELD = 32  # logits of a thread
HELD = (8, 16, 24, 32, 40)  # the last for rows of nearly the most logits that do not begin at multiples of 16 bytes
NONE = 0xFFFFFFFF  # deeper than any
CLUSTERS = (16, 8, 4, 2)  # CTAs of a row
THREADS = 1024  # of a CTA
WARPS = THREADS // WARP
GATHERED = 4096  # candidates that the first CTA of a cluster chooses among
SPARE = 12  # multiprocessors that clusters leave over: an H200 takes 15 of 8 CTAs and 30 of 4
LEAST_SHARE = 8192  # logits, below which a CTA more does not pay
PART = 128  # candidates, of which the first CTA is told the least: a warp sends so many


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on. bits: of a logit. s: rows that share a row of the page table, 0 without one.
    held: logits of a thread. ctas: of a row."""

    k: int
    bits: int
    s: int
    held: int
    ctas: int

    @property
    def own_bins(self) -> int:
        """Of a thread."""
        return BINS // THREADS

    @property
    def per_vector(self) -> int:
        return 128 // self.bits

    @property
    def share(self) -> int:
        """Candidates of a CTA, at most."""
        return GATHERED // self.ctas

    @property
    def own_k(self) -> int:
        """How many candidates a CTA has at least: more by half than are its part of the k."""
        return min(3 * self.k // (2 * self.ctas) + 16, self.share - 32)

    def above_floor(self, size: int, count: int) -> float:
        """How many of so many logits in random order are not below the least maximum of groups of the size."""
        groups = THREADS * self.held // size
        return (1 - groups ** (-groups / count)) * count

    @property
    def group(self) -> int:
        """Logits whose largest counts for the floor, of a thread or of neighbours: the most that leave enough."""
        most = THREADS * self.held
        sizes = [self.held << i for i in range(5, 0, -1)]
        sizes += [x for x in range(self.held, 0, -1) if self.held % x == 0]
        return next((x for x in sizes if self.above_floor(x, most) > ROOM * self.own_k), 1)

    @property
    def least_count(self) -> int:
        """Logits of a row in range from which on the floor of each CTA leaves enough of them."""
        most = THREADS * self.held
        counts = (x for x in range(self.own_k, most, 64) if self.above_floor(self.group, x) > ROOM * self.own_k)
        return next(counts, most) * self.ctas


def shared_storage(geometry: Geometry) -> type:
    """The CTA's shared memory."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.Align[cute.struct.MemRange[kind, size], 16]

    fields = {
        "bins": array(Int32, BINS + 1),  # and behind them what is in none; afterwards the columns that are chosen
        "sums": array(Int32, 2 * (WARP + 1)),  # of bins, and of what is chosen: those of the warps before each warp
        "ends": array(Int32, 2),  # whole numbers in the order of the values: of the floor, of the top less 1, negative
        "listed": array(Int32, 1),  # how many are listed
        "values": array(Float32, LISTED),
        "columns": array(Int32, LISTED),
        "own": array(Int32, 2 * geometry.share),  # a CTA's candidates: bits, columns
        "gathered": array(Int32, 2 * GATHERED),  # of all CTAs: bits, columns
        "least": array(Float32, GATHERED // PART),  # of as many candidates each
    }
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


class Memory(NamedTuple):
    """Shared memory, as the storage has it."""

    bins: cute.Tensor
    sums: cute.Tensor
    ends: cute.Tensor
    listed: cute.Tensor
    values: cute.Tensor
    columns: cute.Tensor
    own: cute.Tensor
    gathered: cute.Tensor
    least: cute.Tensor


class Source(NamedTuple):
    """What a thread reads. address: of its first vector. column: of that one's first logit. start, end: the row's
    columns in range."""

    address: Int64
    column: Int32
    start: Int32
    end: Int32


# ------------------------------------------------------------------------------------------------ device: loading
def pick(holds: Any, one: Uint32, other: Uint32) -> Uint32:
    """`select_` of unsigned numbers, which it makes signed."""
    return Uint32(cutlass.select_(holds, one, other))


@cute.jit
def key_of(value: Float32) -> Uint32:
    """A number in the order of the values, above 0: -0 is +0, and NaN -inf."""
    bits = (cute.arch.fmax(value, Float32(-math.inf)) + Float32(0.0)).bitcast(Int32)
    return (bits ^ ((bits >> 31) | Int32(-(1 << 31)))).bitcast(Uint32)


@cute.jit
def in_order(bits: Int32) -> Int32:
    """A whole number in the order of the values from a number's bits, and the bits from that. NaN is the largest."""
    return bits ^ ((bits >> 31) & Int32(MOST))


@cute.jit
def column_of(j: cutlass.Constexpr, source: cutlass.Constexpr, geometry: cutlass.Constexpr) -> Int32:
    """The column of a thread's j-th logit."""
    return source.column + (
        j // geometry.per_vector * THREADS * geometry.ctas * geometry.per_vector + j % geometry.per_vector
    )


@cute.jit
def load(words: cute.Tensor, source: cutlass.Constexpr, geometry: cutlass.Constexpr):
    """Starts loading (4, vectors) words of a thread: the vectors that hold a logit of the range."""
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(), Int32, num_bits_per_copy=128,
        l1c_evict_priority=cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE,
    )  # fmt: skip
    for v in cutlass.range_constexpr(cute.size(words, mode=[1])):
        column = column_of(v * geometry.per_vector, source, geometry)
        if (column + geometry.per_vector > source.start) & (column < source.end):
            at = source.address + v * THREADS * geometry.ctas * 16
            vector = cute.make_ptr(Int32, at, cute.AddressSpace.gmem, assumed_align=16)
            cute.copy(atom, cute.make_tensor(vector, cute.make_layout(4)), words[None, v])


@cute.jit
def hold(logits: cute.Tensor, words: cute.Tensor, source: cutlass.Constexpr, geometry: cutlass.Constexpr):
    """Fills a thread's logits from its words. Those out of range are NaN."""
    each = cutlass.const_expr(geometry.per_vector)
    for j in cutlass.range_constexpr(geometry.held):
        v, e = cutlass.const_expr(j // each), cutlass.const_expr(j % each)
        if cutlass.const_expr(geometry.bits == 32):
            word = words[e, v]
        else:
            word = words[e // 2, v] << 16 if cutlass.const_expr(e % 2 == 0) else words[e // 2, v] & Int32(-65536)
        logits[j] = Int32(word).bitcast(Float32)
    if (source.column < source.start) | (column_of(geometry.held - 1, source, geometry) >= source.end):
        for j in cutlass.range_constexpr(geometry.held):
            column = column_of(j, source, geometry)
            inside = (column >= source.start) & (column < source.end)
            logits[j] = cutlass.select_(inside, logits[j], Float32(math.nan))


# ------------------------------------------------------------------------------------------------ device: sums
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


@cute.jit
def ends_of(
    memory: cutlass.Constexpr, logits: cute.Tensor, group_: cutlass.Constexpr, k: cutlass.Constexpr, enough: Any,
    thread: Int32,
):  # fmt: skip
    """(floor, top) of all threads' logits: the least of the maxima of groups, or the least logit where there are not
    enough for these; and the largest logit, or where k is not small, so that few large ones do not make bins wide, the
    largest of what is the lesser of the maxima of a thread's halves. NaN or -inf where there are no logits. One
    barrier."""
    held = cutlass.const_expr(cute.size(logits))
    half, group = cutlass.const_expr(held // 2), cutlass.const_expr(min(group_, held))
    unit = cutlass.const_expr(math.gcd(half, group))
    units = [logits[first] for first in range(0, held, unit)]
    for i in cutlass.range_constexpr(len(units)):
        for j in cutlass.range_constexpr(i * unit + 1, (i + 1) * unit):
            units[i] = cute.arch.fmax(units[i], logits[j])
    halves = [units[0], units[half // unit]]
    for i in cutlass.range_constexpr(len(halves)):
        for j in cutlass.range_constexpr(1, half // unit):
            halves[i] = cute.arch.fmax(halves[i], units[i * (half // unit) + j])
    if cutlass.const_expr(k < FEW):
        top = cute.arch.fmax(halves[0], halves[1])
    else:
        top = cute.arch.fmin(halves[0], halves[1])
    floor = Float32(math.nan)
    if enough:
        for first in cutlass.range_constexpr(0, len(units), group // unit):
            its = units[first]
            for i in cutlass.range_constexpr(first + 1, first + group // unit):
                its = cute.arch.fmax(its, units[i])
            floor = cute.arch.fmin(floor, its)
        for i in cutlass.range_constexpr((group_ // held).bit_length() - 1):
            floor = cute.arch.fmax(floor, cute.arch.shuffle_sync_bfly(floor, offset=1 << i))
    else:
        for j in cutlass.range_constexpr(held):
            floor = cute.arch.fmin(floor, logits[j])
    low = cute.arch.warp_redux_sync(in_order(floor.bitcast(Int32)), "min")
    high = cute.arch.warp_redux_sync(in_order(cute.arch.fmax(top, Float32(-math.inf)).bitcast(Int32)), "max")
    # A lane for each: the compiler brings a warp's atomic operations on one address together, which takes longer.
    lane = thread % WARP
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.lt.s32 p, {$r1}, 2; @p red.shared.min.s32 [{$r0}], {$r2}; }",
        read_only_args=[address_of(memory.ends, lane), lane, Int32(cutlass.select_(lane == 0, low, ~high))],
    )
    cute.arch.sync_threads()
    ends = cute.make_rmem_tensor(2, Int32)
    cute.autovec_copy(memory.ends, ends)
    return in_order(ends[0]).bitcast(Float32), in_order(~ends[1]).bitcast(Float32)


# ------------------------------------------------------------------------------------------------ device: a digit
@cute.jit
def count_parts(memory: cutlass.Constexpr, logits: cute.Tensor, scale: Float32, offset: Float32):
    """Counts a thread's logits in their bins: the number of bin 0 is 2^23 as a float, and one more is one more of the
    bits. What has no part, or 0, is counted behind the last bin."""
    bins = address_of(memory.bins, Int32(0)) - Int32(EXACT * 4 % (1 << 32))
    for j in cutlass.range_constexpr(cute.size(logits)):
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
def count_one(bins: Int32, depth: Uint32, shift: Int32):
    """Counts a depth in the bin of its digit, and a larger one behind the last bin."""
    cute.arch.inline_ptx(
        "{ .reg .b32 a; shr.u32 a, {$r1}, {$r2}; min.u32 a, a, {$r3}; shl.b32 a, a, 2; add.u32 a, a, {$r0}; "
        "red.shared.add.u32 [a], 1; }",
        read_only_args=[bins, depth, shift, Uint32(BINS)],
    )


@cute.jit
def width_of(span: Uint32) -> Int32:
    """How many bits a number has, at least 1."""
    zeros = cute.arch.inline_ptx("clz.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[span])
    return cutlass.max(32 - zeros, 1)


@cute.jit
def parts_of(floor: Float32, top: Float32):
    """(scale, offset) of parts. Bins reach an eighth of the distance below the floor."""
    scale = cute.arch.rcp_approx((top - floor) * Float32(1 + SLACK))
    return scale, Float32(SLACK / (1 + SLACK)) - floor * scale


@cute.jit
def clear(memory: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr):
    for i in cutlass.range_constexpr(geometry.own_bins):
        memory.bins[i * THREADS + thread] = Int32(0)
    if thread < 2 * (WARP + 1):
        memory.sums[thread] = Int32(0)
    if thread == 0:
        memory.ends[0], memory.ends[1], memory.listed[0] = Int32(MOST), Int32(MOST), Int32(0)


@cute.jit
def find_bin(memory: cutlass.Constexpr, need: Int32, thread: Int32, geometry: cutlass.Constexpr):
    """(bin, how many are in bins before it, how many in it) of the bin that the need-th is in; a bin of -1 where there
    are fewer. Every warp finds it. Two barriers, the first in front of it all."""
    own_bins, lane = cutlass.const_expr(geometry.own_bins), thread % WARP
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


# ------------------------------------------------------------------------------------------------ device: candidates
@cute.jit
def part_of(logit: Float32, scale: Float32, offset: Float32) -> Float32:
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[logit, scale, offset]
    )


@cute.jit
def count_from(logits: cute.Tensor, scale: Float32, offset: Float32, edge: Float32) -> Int32:
    """How many of a thread's logits have at least a part. Without a branch."""
    own = Int32(0)
    for j in cutlass.range_constexpr(cute.size(logits)):
        own = cute.arch.inline_ptx(
            "{ .reg .pred p; .reg .f32 x; fma.rn.f32 x, {$r1}, {$r2}, {$r3}; setp.ge.f32 p, x, {$r4}; "
            "mov.b32 {$w0}, {$r0}; @p add.s32 {$w0}, {$w0}, 1; }",
            write_only_types=[Int32], read_only_args=[own, logits[j], scale, offset, edge],
        )  # fmt: skip
    return own


@cute.jit
def stage(
    memory: cutlass.Constexpr, logits: cute.Tensor, source: cutlass.Constexpr, scale: Float32, offset: Float32,
    edge: Float32, place: Int32, geometry: cutlass.Constexpr,
):  # fmt: skip
    """Puts a thread's candidates and their columns from a place on. Without a branch."""
    to = address_of(memory.own, place)
    for j in cutlass.range_constexpr(geometry.held):
        to = cute.arch.inline_ptx(
            "{ .reg .pred p; .reg .f32 x; fma.rn.f32 x, {$r1}, {$r2}, {$r3}; setp.ge.f32 p, x, {$r4}; "
            f"@p st.shared.b32 [{{$r0}}], {{$r1}}; @p st.shared.b32 [{{$r0}} + {4 * geometry.share}], {{$r5}}; "
            "mov.b32 {$w0}, {$r0}; @p add.u32 {$w0}, {$w0}, 4; }",
            write_only_types=[Int32],
            read_only_args=[to, logits[j], scale, offset, edge, column_of(j, source, geometry)],
        )


@cute.jit
def of_first(address: Int32) -> Int32:
    """Where the first CTA of the cluster has the same of its shared memory."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, Int32(0)]
    )


@cute.jit
def store_four(address: Int32, words: cutlass.Constexpr):
    """Stores four words to where the first CTA has the same of its shared memory."""
    cute.arch.inline_ptx(
        "st.shared::cluster.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[of_first(address), *words]
    )  # fmt: skip


@cute.jit
def send(
    memory: cutlass.Constexpr, count: Int32, instead: Float32, rank: Int32, thread: Int32, geometry: cutlass.Constexpr
):
    """Sends so many candidates to the first CTA, NaN behind them, and the least of each part of them; or, if that is a
    number, another instead."""
    at = thread * 4
    if at < geometry.share:
        place, least, words = rank * geometry.share + at, Float32(math.nan), []
        for e in cutlass.range_constexpr(4):
            words.append(Int32(cutlass.select_(at + e < count, memory.own[at + e], Int32(MOST))))
            least = cute.arch.fmin(least, words[e].bitcast(Float32))
        store_four(address_of(memory.gathered, place), words)
        columns = [memory.own[geometry.share + at + e] for e in range(4)]
        store_four(address_of(memory.gathered, GATHERED + place), columns)
        of_warp = in_order(cute.arch.warp_redux_sync(in_order(least.bitcast(Int32)), "min"))
        least = cutlass.select_(instead == instead, instead, of_warp.bitcast(Float32))
        if thread % WARP == 0:
            cute.arch.inline_ptx(
                "st.shared::cluster.b32 [{$r0}], {$r1};",
                read_only_args=[of_first(address_of(memory.least, place // PART)), least.bitcast(Int32)],
            )


@cute.jit
def find_candidates(
    memory: cutlass.Constexpr, held: cute.Tensor, source: cutlass.Constexpr, rank: Int32, thread: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """Finds the CTA's candidates among a thread's logits `held`, and sends them to the first CTA."""
    enough = source.end - source.start >= geometry.least_count
    floor, top = ends_of(memory, held, geometry.group, geometry.own_k, enough, thread)
    scale, offset = parts_of(floor, top)
    count_parts(memory, held, scale, offset)
    bin_, before, inside = find_bin(memory, Int32(geometry.own_k), thread, geometry)
    # Where there are fewer than are wanted, all that have a part.
    edge = edge_of(Int32(cutlass.select_(bin_ < 0, Int32(BINS), bin_ + 1)))
    # Where floor and top are equal there are no bins: no logit has a part.
    bad = ~((scale > 0.0) & (scale < math.inf)) | ((bin_ >= 0) & (before + inside > geometry.share))
    edge = cutlass.select_(bad, Float32(math.nan), edge)
    own = count_from(held, scale, offset, edge)
    upto = upto_lane(own)
    add_behind(memory, cute.arch.shuffle_sync(upto, WARP - 1), 1, thread)
    cute.arch.sync_threads()
    count = memory.sums[WARP + 1 + WARPS]
    stage(memory, held, source, scale, offset, edge, memory.sums[WARP + 1 + thread // WARP] + upto - own, geometry)
    # Of a row that is so short the floor is the least logit: nothing is kept but NaN.
    instead = cutlass.select_((bin_ < 0) & ~enough, Float32(-math.inf), Float32(math.nan))
    instead = cutlass.select_(bad, Float32(math.inf), instead)
    cute.arch.sync_threads()
    clear(memory, thread, geometry)
    cute.arch.cluster_wait()  # the first CTA has begun
    send(memory, count, instead, rank, thread, geometry)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


# ------------------------------------------------------------------------------------------------ device: the choice
class Choice(NamedTuple):
    """What is chosen, by logit · scale + offset: all of at least `above`, and `need` of the others of at least `least`,
    which are `inside`."""

    scale: Float32
    offset: Float32
    above: Float32
    least: Float32
    need: Int32
    inside: Int32


@cute.jit
def place_chosen(
    memory: cutlass.Constexpr, logits: cute.Tensor, columns: cute.Tensor, choice: cutlass.Constexpr, thread: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """Puts the columns of what is chosen of a thread's candidates, those in the bin by their ranks. Two barriers."""
    size = cutlass.const_expr(cute.size(logits))
    own = count_from(logits, choice.scale, choice.offset, choice.above)
    in_bin = count_from(logits, choice.scale, choice.offset, choice.least) - own
    if in_bin > 0:
        place = cute.arch.inline_ptx(
            "atom.shared.add.u32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32],
            read_only_args=[address_of(memory.listed, Int32(0)), in_bin],
        )  # fmt: skip
        for j in cutlass.range_constexpr(size):
            part = part_of(logits[j], choice.scale, choice.offset)
            if (part >= choice.least) & ~(part >= choice.above):
                memory.values[place], memory.columns[place] = logits[j], columns[j]
                place = place + 1
    upto = upto_lane(own)
    add_behind(memory, cute.arch.shuffle_sync(upto, WARP - 1), 1, thread)
    cute.arch.sync_threads()
    to = address_of(memory.bins, memory.sums[WARP + 1 + thread // WARP] + upto - own)
    for j in cutlass.range_constexpr(size):
        to = cute.arch.inline_ptx(
            "{ .reg .pred p; .reg .f32 x; fma.rn.f32 x, {$r1}, {$r2}, {$r3}; setp.ge.f32 p, x, {$r4}; "
            "@p st.shared.b32 [{$r0}], {$r5}; mov.b32 {$w0}, {$r0}; @p add.u32 {$w0}, {$w0}, 4; }",
            write_only_types=[Int32],
            read_only_args=[to, logits[j], choice.scale, choice.offset, choice.above, columns[j]],
        )  # fmt: skip
    lane = thread % WARP
    for i in cutlass.range(thread // WARP, choice.inside, WARPS, unroll=1):
        value, column, larger = memory.values[i], memory.columns[i], Int32(0)
        for first in cutlass.range(0, choice.inside, WARP, unroll=1):
            at = first + lane
            other, its = memory.values[at], memory.columns[at]
            above = (other > value) | ((other == value) & (its < column))
            larger = larger + cute.arch.popc(cute.arch.vote_ballot_sync(above & (at < choice.inside)))
        if (lane == 0) & (larger < choice.need):
            memory.bins[geometry.k - choice.need + larger] = column
    cute.arch.sync_threads()


@cute.jit
def choose(
    memory: cutlass.Constexpr, whole: cutlass.Constexpr, source: cutlass.Constexpr, thread: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """Puts the columns of the k among all candidates into the memory of the bins. whole: all of the row, to be read
    again."""
    each, k = cutlass.const_expr(GATHERED // THREADS), cutlass.const_expr(geometry.k)
    logits, columns = cute.make_rmem_tensor(each, Float32), cute.make_rmem_tensor(each, Int32)
    for j in cutlass.range_constexpr(each):
        logits[j] = memory.gathered[j * THREADS + thread].bitcast(Float32)
        columns[j] = memory.gathered[GATHERED + j * THREADS + thread]
    floor, top = ends_of(memory, logits, 1, k, False, thread)
    scale, offset = parts_of(floor, top)
    count_parts(memory, logits, scale, offset)
    bin_, before, inside = find_bin(memory, Int32(k), thread, geometry)
    need, above, least = k - before, edge_of(bin_), edge_of(bin_ + 1)
    # What a CTA has kept is below its least candidate.
    its = memory.least[thread % WARP]
    for i in cutlass.range_constexpr((geometry.share // PART).bit_length() - 1):
        its = cute.arch.fmin(its, cute.arch.shuffle_sync_bfly(its, offset=1 << i))
    lacks = cute.arch.vote_ballot_sync(part_of(its, scale, offset) >= least)
    again = (bin_ < 0) | (lacks != 0) | ~(scale > 0.0) | ((inside != need) & (inside > LISTED))
    if again:
        choose_again(memory, whole, source.start, source.end, thread, geometry)
    else:
        if inside == need:
            # A bin that is taken as a whole is above.
            above, need, inside = least, Int32(0), Int32(0)
        place_chosen(memory, logits, columns, Choice(scale, offset, above, least, need, inside), thread, geometry)


# ------------------------------------------------------------------------------------------------ device: again
@cute.jit
def keys_at(
    keys: cute.Tensor, words: cute.Tensor, at: Int32, whole: cutlass.Constexpr, start: Int32, end: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """Loads vector `at` of the row, and makes its keys, 0 for those out of range."""
    each = cutlass.const_expr(geometry.per_vector)
    vector = cute.make_ptr(Int32, whole.address + Int64(at) * 16, cute.AddressSpace.gmem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(vector, cute.make_layout(4)), words)
    for e in cutlass.range_constexpr(each):
        if cutlass.const_expr(geometry.bits == 32):
            word = words[e]
        else:
            word = words[e // 2] << 16 if cutlass.const_expr(e % 2 == 0) else words[e // 2] & Int32(-65536)
        column = whole.column + at * each + e
        inside = (column >= start) & (column < end)
        keys[e] = pick(inside, key_of(Int32(word).bitcast(Float32)), Uint32(0))


@cute.jit
def choose_again(
    memory: cutlass.Constexpr, whole: cutlass.Constexpr, start: Int32, end: Int32, thread: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """Chooses by one CTA that reads the row for every digit: of keys, and of the columns of those equal the k-th."""
    each, bins = cutlass.const_expr(geometry.per_vector), address_of(memory.bins, Int32(0))
    keys, words = cute.make_rmem_tensor(each, Uint32), cute.make_rmem_tensor(4, Int32)
    first, last = (start - whole.column) // each + thread, (end - 1 - whole.column) // each + 1
    need, shift, highest = Int32(geometry.k), Int32(32), Uint32(HIGHEST)
    tied, base, searching = Int32(0), Int32(0), Int32(1)
    while searching > 0:
        shift = cutlass.max(shift - DIGIT, 0)
        cute.arch.sync_threads()
        clear(memory, thread, geometry)
        cute.arch.sync_threads()
        for at in cutlass.range(first, last, THREADS, unroll=1):
            keys_at(keys, words, at, whole, start, end, geometry)
            for e in cutlass.range_constexpr(each):
                behind = (whole.column + at * each + e - base).bitcast(Uint32)
                depth = pick(tied > 0, pick(keys[e] == highest, behind, Uint32(NONE)), highest - keys[e])
                count_one(bins, depth, shift)
        bin_, before, inside = find_bin(memory, need, thread, geometry)
        need, step = need - before, bin_ << shift
        if tied > 0:
            base = base + step
        else:
            highest = highest - step.bitcast(Uint32)
        if inside == need:
            searching = Int32(0)
        elif shift == 0:
            # More equal the k-th than are needed: those of the lowest columns.
            tied, base, shift = Int32(1), start, width_of((end - start).bitcast(Uint32))
    span = (Uint32(1) << Uint32(shift)) - Uint32(1)
    lowest, upto_column = Uint32(LOWEST), Int32(MOST)
    if tied > 0:
        lowest, upto_column = highest, base + span.bitcast(Int32)
    elif highest - Uint32(LOWEST) > span:
        lowest = highest - span
    own = Int32(0)
    for at in cutlass.range(first, last, THREADS, unroll=1):
        keys_at(keys, words, at, whole, start, end, geometry)
        for e in cutlass.range_constexpr(each):
            chosen = (keys[e] > lowest) | ((keys[e] == lowest) & (whole.column + at * each + e <= upto_column))
            own = own + Int32(chosen)
    upto = upto_lane(own)
    cute.arch.sync_threads()
    add_behind(memory, cute.arch.shuffle_sync(upto, WARP - 1), 1, thread)
    cute.arch.sync_threads()
    place = memory.sums[WARP + 1 + thread // WARP] + upto - own
    for at in cutlass.range(first, last, THREADS, unroll=1):
        keys_at(keys, words, at, whole, start, end, geometry)
        for e in cutlass.range_constexpr(each):
            column = whole.column + at * each + e
            if (keys[e] > lowest) | ((keys[e] == lowest) & (column <= upto_column)):
                memory.bins[place] = column
                place = place + 1
    cute.arch.sync_threads()


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.jit
def index_of(column: Int32, table: cute.Tensor | None, row: Int32, geometry: cutlass.Constexpr) -> Int32:
    """What is written for a column: itself, or with a page table its slot of the cache."""
    index = column
    if cutlass.const_expr(table is not None):
        index = table[row // geometry.s, column // PAGE] * PAGE + column % PAGE
    return index


@cute.kernel
def topk(
    logits: cute.Tensor,  # (rows, t) fp32 or bf16, rows apart, global memory
    starts: cute.Tensor | None,  # (rows,)
    ends: cute.Tensor,  # (rows,)
    table: cute.Tensor | None,  # (b, width), rows apart
    indices: cute.Tensor,  # (rows, k)
    geometry: cutlass.Constexpr,
):
    """A CTA of a cluster, which has a row."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    storage = SmemAllocator().allocate(shared_storage(geometry))
    memory = Memory(
        storage.bins.get_tensor(cute.make_layout(BINS + 1)),
        storage.sums.get_tensor(cute.make_layout(2 * (WARP + 1))),
        storage.ends.get_tensor(cute.make_layout(2)),
        storage.listed.get_tensor(cute.make_layout(1)),
        storage.values.get_tensor(cute.make_layout(LISTED)),
        storage.columns.get_tensor(cute.make_layout(LISTED)),
        storage.own.get_tensor(cute.make_layout(2 * geometry.share)),
        storage.gathered.get_tensor(cute.make_layout(2 * GATHERED)),
        storage.least.get_tensor(cute.make_layout(GATHERED // PART)),
    )
    row, rank = block // geometry.ctas, block % geometry.ctas
    clear(memory, thread, geometry)
    width, k = logits.shape[1], cutlass.const_expr(geometry.k)
    size, each = cutlass.const_expr(geometry.bits // 8), cutlass.const_expr(geometry.per_vector)
    address = logits.iterator.toint() + Int64(row) * logits.stride[0] * size
    skew = Int32(address & 15) // size
    vector = (thread // LINE * geometry.ctas + rank) * LINE + thread % LINE
    address, column = address - skew * size, vector * each - skew
    words = cute.make_rmem_tensor(cute.make_layout((4, geometry.held // each)), Int32)
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_launch_dependents()
    wait_for_launch(address)
    load(words, Source(address + vector * 16, column, Int32(0), width), geometry)
    end = cutlass.min(ends[row], width)
    start = Int32(0)
    if cutlass.const_expr(starts is not None):
        start = cutlass.max(starts[row], 0)
    count = cutlass.max(end - start, 0)
    if count <= k:
        for i in cutlass.range(rank * THREADS + thread, k, THREADS * geometry.ctas, unroll=1):
            index = Int32(-1)
            if i < count:
                index = index_of(start + i, table, row, geometry)
            indices[row, i] = index
    else:
        # This CTA has begun. Nothing is released: a fence would wait for the loads.
        cute.arch.cluster_arrive_relaxed()
        source = Source(address + vector * 16, column, start, end)
        held = cute.make_rmem_tensor(geometry.held, Float32)
        hold(held, words, source, geometry)
        find_candidates(memory, held, source, rank, thread, geometry)
        if rank == 0:
            choose(memory, Source(address, -skew, Int32(0), width), source, thread, geometry)
            for first in cutlass.range_constexpr(0, k, THREADS):
                at = first + thread
                if cutlass.const_expr(first + THREADS <= k):
                    indices[row, at] = index_of(memory.bins[at], table, row, geometry)
                elif at < k:
                    indices[row, at] = index_of(memory.bins[at], table, row, geometry)


topk.set_name_prefix("topk_v6", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_topk(
    logits: cute.Tensor,
    starts: cute.Tensor | None,
    ends: cute.Tensor,  # (rows,) or (b, s) int32, contiguous
    table: cute.Tensor | None,
    indices: cute.Tensor,
    geometry: cutlass.Constexpr,
    stream_: CUstream,
):
    """Launches a cluster for every row, as a programmatic dependent."""
    rows = logits.shape[0]
    flat = cute.make_tensor(ends.iterator, cute.make_layout((rows,)))
    topk(logits, starts, flat, table, indices, geometry).launch(
        grid=(rows * geometry.ctas, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(geometry.ctas, 1, 1),
        stream=stream_,
        min_blocks_per_mp=1,
        preferred_smem_carveout=100,  # else it is asked of a GPU while compiling
        use_pdl=True,
    )


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: TopkProblem) -> Verdict:
    if pd.topk > MOST_K:
        return Verdict.no(f"topk = {pd.topk}: at most {MOST_K:,} are chosen")
    if pd.t > MOST_T:
        return Verdict.no(f"t = {pd.t}: rows of up to {MOST_T:,} logits are taken")
    return limits.all_of(
        limits.offsets(pd.rows * max(CLUSTERS), f"CTAs of {pd.rows:,} rows"),
        limits.offsets(pd.rows * pd.topk, f"indices of {pd.rows:,} rows"),
    )


@dataclass(frozen=True)
class TopkTiling(Tiling):
    """ctas: of a row, 2, 4, 8 or 16; 0: as many as the device takes of all rows at once, if each then has enough
    logits, else as few as hold a row."""

    # The name of what is compiled says what they come to.
    launch_fields: ClassVar[tuple[str, ...]] = ("ctas",)

    ctas: int = 0

    def validate(self, pd: TopkProblem, device: Device | None = None) -> Verdict:
        if self.ctas not in (0, *CLUSTERS):
            return Verdict.no(f"ctas = {self.ctas} must be 0 or one of {', '.join(map(str, sorted(CLUSTERS)))}")
        most = self.ctas * THREADS * MOST_HELD
        if self.ctas and pd.t > most:
            return Verdict.no(f"ctas = {self.ctas}: as many hold rows of up to {most:,}")
        return takes(pd)

    def geometry(self, pd: TopkProblem, rows: int, t: int, sms: int, aligned: bool = True) -> Geometry:
        """For rows of up to t logits. aligned: all begin at a multiple of 16 bytes."""
        most = t if aligned else t + (3 if pd.dtype == "fp32" else 7)
        fit = [x for x in CLUSTERS if most <= x * THREADS * MOST_HELD] or CLUSTERS[:1]
        busy = [x for x in fit if rows * x <= sms - SPARE and t >= x * LEAST_SHARE]
        ctas = self.ctas if self.ctas in fit else busy[0] if busy else fit[-1]
        held = next(x for x in HELD if most <= x * THREADS * ctas)
        bits, s = 32 if pd.dtype == "fp32" else 16, pd.s if pd.table else 0
        return Geometry(pd.topk, bits, s, held, ctas)


class TopkPlan(KernelPlan):
    """Inputs and output (indices,) of `workload.topk`. A compiled kernel for a problem class, the CTAs of a row and the
    logits of a thread; sizes, lengths and strides are arguments."""

    workload = workload.WORKLOAD
    tiling_type = TopkTiling
    tiling: TopkTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("fp32", "bf16"), problem=takes)

    def default_tiling(self) -> TopkTiling:
        return TopkTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [tiling for x in (0, *CLUSTERS) if (tiling := TopkTiling(x)).validate(self.problem, self.device)]

    def plan(self, *inputs: Any) -> CuteKernel:
        rows = len(inputs[0])
        return self.plan_into(inputs, (inputs[1].new_empty((rows, self.problem.topk)),))

    def plan_into(self, inputs: Any, outputs: Any) -> CuteKernel:
        """A kernel on indices of the caller's, (rows, k) int32, contiguous."""
        self.require()
        return self._make(inputs, outputs)

    def plan_empty(self) -> CuteKernel:
        self.require()
        return self._make((), ())

    def _make(self, inputs: Any, outputs: Any) -> CuteKernel:
        pd = self.problem
        rows, t, aligned = pd.rows, pd.t, True
        given: tuple[Any, ...] = ()
        if inputs:
            if pd.table:
                logits, ends, table = inputs
                starts = None
            else:
                (logits, starts, ends), table = inputs, None
            given = (logits, starts, ends, table, outputs[0])
            rows, t = logits.shape
            aligned = logits.data_ptr() % 16 == 0 and logits.stride(0) * logits.element_size() % 16 == 0
        geometry = self.tiling.geometry(pd, rows, t, host.target(self).num_sms, aligned)

        def arguments() -> tuple[Any, ...]:
            n, t_, b, width = host.symbols(4)
            kind = Float32 if pd.dtype == "fp32" else BFloat16
            rows_apart = make_fake_tensor(kind, (n, t_), (cute.sym_int64(), 1), assumed_align=kind.width // 8)
            starts = None if pd.table else host.fake(Int32, n, align=4)
            ends = host.fake(Int32, b, pd.s, align=4) if pd.table else host.fake(Int32, n, align=4)
            table = make_fake_tensor(Int32, (b, width), (cute.sym_int64(), 1), assumed_align=4) if pd.table else None
            return rows_apart, starts, ends, table, host.fake(Int32, n, pd.topk, align=4), geometry

        name = f"topk_v6_{geometry.held}_{geometry.ctas}"
        return host.stage(self, topk, launch_topk, name, arguments, given, inputs, outputs)
