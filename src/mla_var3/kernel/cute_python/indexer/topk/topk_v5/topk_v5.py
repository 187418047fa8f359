r"""topk v5 in CuTe for sm_90: the k largest logits of short rows, exactly; one CTA a row, which reads it once.

A thread holds 8 to 40 logits of the row in registers. One digit of 2,048 bins, linear in the logit, finds the bin that
the k-th is in; what is in the bin is compared one with the other. A barrier stands where two of these lines meet:

    load     vectors of 16 bytes. Of few rows all that lie in memory, while the row's range is on its way
    ends     floor, the least of the maxima of groups of logits, of which more than k logits are not below it; and top,
             which few logits are above
    count    part = (logit - a little below floor) / (top - that), cut to 0 ... 1: bin 2,048 · (1 - part)
    sum      a warp's part of the bins, added to the sums of the warps behind it
    select   every warp for itself: the part that the k-th is in, and the bin. A thread counts its logits above the bin,
             and puts those in the bin into a list; the warps' counts are added up as sums were
    place    a thread's columns behind those of the threads before it. Of the list a warp ranks one with a ballot
    write    all, through the page table

A part is one multiplication and addition, rounded once, so it is in the order of the logits; NaN, which is what a
logit out of range is made, gives 0. The edges of the bin are compared with the same sum, so nothing depends on how it
was rounded. Three things take digits of keys, whole numbers in the order of the logits (-0 as +0, NaN as -inf), from
the first on: a bin that is to be taken in part and has more than fit into the list; fewer than k above the floor, which
happens to rows in no random order; logits that lie so close together, or so far apart, that bins do not tell them from
each other. Where the last digit leaves equal logits in a bin, places among them go by sums over the CTA, from the
lowest column on. Sums are in a fixed order and places in the list go by the logit and its column, so the result has the
same bits in each run.

Against version 4, which binned by the bits of logits: there a bin near 0 had few values and one further away many, so
that a row whose floor is below 0 had 50 to 170 logits in the list, one comparison after the other. Bins here have some
four wherever the floor is, and a warp compares up to 32 at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32
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
ROOM = 1.2  # of a floor: how many times k logits are not below it
BINS = 2048
DIGIT = 11  # bits
LISTED = 128  # of a bin, at most
SLACK = 1 / 8  # of the distance from floor to top, that bins reach below: some floors are too high for k
SMEM = 228 << 10  # bytes of shared memory of an SM
FEW = 256  # chosen, fewer than which the largest logit is the top
MOST_K = 2048
MOST_T = 32768
MOST_HELD = 32  # logits of a thread
HELD = (8, 16, 24, 32, 40)  # the last for rows of nearly the most logits that do not begin at multiples of 16 bytes
THREADS = (256, 512, 1024)  # of a CTA
RESIDENT = {256: 4, 512: 2, 1024: 1}  # CTAs of an SM, at least: registers are limited for them


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on. bits: of a logit. s: rows that share a row of the page table, 0 without one.
    held: logits of a thread. threads: of a CTA. early: logits are loaded before the row's range is known. most: CTAs of
    an SM, 1 or 2; 0: as many as fit."""

    k: int
    bits: int
    s: int
    held: int
    threads: int
    early: bool
    most: int = 0

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def resident(self) -> int:
        """CTAs of an SM, at least. Words of bf16 and the logits in them are in registers at the same time."""
        return RESIDENT[self.threads] - (self.bits == 16 and self.threads == 256)

    @property
    def room(self) -> int:
        """Bytes of shared memory that keep more CTAs than `most` away."""
        return SMEM // (self.most + 1) if self.most else 0

    @property
    def own_bins(self) -> int:
        """Of a thread."""
        return BINS // self.threads

    @property
    def per_vector(self) -> int:
        return 128 // self.bits

    def above_floor(self, size: int, count: int) -> float:
        """How many of so many logits in random order are not below the least maximum of groups of the size."""
        groups = self.threads * self.held // size
        return (1 - groups ** (-groups / count)) * count

    @property
    def group(self) -> int:
        """Logits whose largest counts for the floor, of a thread or of neighbours: the most that leave more than k."""
        most = self.threads * self.held
        sizes = [self.held << i for i in range(5, 0, -1)]
        sizes += [x for x in range(self.held, 0, -1) if self.held % x == 0]
        return next((x for x in sizes if self.above_floor(x, most) > ROOM * self.k), 1)

    @property
    def least_count(self) -> int:
        """Logits in range from which on the floor leaves enough of them."""
        most = self.threads * self.held
        counts = (x for x in range(self.k, most, 64) if self.above_floor(self.group, x) > ROOM * self.k)
        return next(counts, most)


def shared_storage(geometry: Geometry) -> type:
    """The CTA's shared memory."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.Align[cute.struct.MemRange[kind, size], 16]

    fields = {
        "bins": array(Int32, BINS + 1),  # and behind them what is in none; afterwards the columns that are chosen
        "sums": array(Int32, 2 * (WARP + 1)),  # of bins, and of what is chosen: those of the warps before each warp
        "ends": array(Int32, 2),  # as whole numbers in the order of the values: the floor, and less 1 the top, negative
        "listed": array(Int32, 1),  # how many are listed
        "bounds": array(Float32, 4 * WARP),  # of the choice, for each warp: scale, offset, above, least
        "values": array(Float32, LISTED),
        "columns": array(Int32, LISTED),
        "pages": array(Int32, geometry.threads * geometry.held // PAGE if geometry.s else 1),
    }
    if geometry.room:
        fields["room"] = array(Int32, geometry.room // 4)
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


class Memory(NamedTuple):
    """Shared memory, as the storage has it."""

    bins: cute.Tensor
    sums: cute.Tensor
    ends: cute.Tensor
    listed: cute.Tensor
    bounds: cute.Tensor
    values: cute.Tensor
    columns: cute.Tensor
    pages: cute.Tensor


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
def value_of(key: Uint32) -> Float32:
    """The number of a key; NaN of those above that of +inf."""
    bits = key.bitcast(Int32)
    return (bits ^ (~(bits >> 31) | Int32(-(1 << 31)))).bitcast(Float32)


@cute.jit
def in_order(bits: Int32) -> Int32:
    """A whole number in the order of the values from a number's bits, and the bits from that. NaN is the largest."""
    return bits ^ ((bits >> 31) & Int32(MOST))


@cute.jit
def column_of(j: cutlass.Constexpr, source: cutlass.Constexpr, geometry: cutlass.Constexpr) -> Int32:
    """The column of a thread's j-th logit."""
    return source.column + (j // geometry.per_vector * geometry.threads * geometry.per_vector + j % geometry.per_vector)


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
            at = source.address + v * geometry.threads * 16
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


@cute.jit
def to_keys(logits: cute.Tensor, source: cutlass.Constexpr, geometry: cutlass.Constexpr):
    """Puts keys in the place of logits, 0 for those out of range."""
    for j in cutlass.range_constexpr(geometry.held):
        column = column_of(j, source, geometry)
        inside = (column >= source.start) & (column < source.end)
        logits[j] = pick(inside, key_of(logits[j]), Uint32(0)).bitcast(Float32)


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
    memory: cutlass.Constexpr, logits: cute.Tensor, source: cutlass.Constexpr, thread: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """(floor, top): the least of the maxima of groups of all threads' logits, or the least logit where these are few;
    and the largest logit, or, so that few large ones do not make bins wide, the largest of what is the lesser of the
    maxima of a thread's halves. NaN or -inf where there are no logits. One barrier."""
    half, group = cutlass.const_expr(geometry.held // 2), cutlass.const_expr(min(geometry.group, geometry.held))
    unit = cutlass.const_expr(math.gcd(half, group))
    units = [logits[first] for first in range(0, geometry.held, unit)]
    for i in cutlass.range_constexpr(len(units)):
        for j in cutlass.range_constexpr(i * unit + 1, (i + 1) * unit):
            units[i] = cute.arch.fmax(units[i], logits[j])
    halves = [units[0], units[half // unit]]
    for i in cutlass.range_constexpr(len(halves)):
        for j in cutlass.range_constexpr(1, half // unit):
            halves[i] = cute.arch.fmax(halves[i], units[i * (half // unit) + j])
    if cutlass.const_expr(geometry.k < FEW):
        top = cute.arch.fmax(halves[0], halves[1])
    else:
        top = cute.arch.fmin(halves[0], halves[1])
    floor = Float32(math.nan)
    if source.end - source.start >= geometry.least_count:
        for first in cutlass.range_constexpr(0, len(units), group // unit):
            its = units[first]
            for i in cutlass.range_constexpr(first + 1, first + group // unit):
                its = cute.arch.fmax(its, units[i])
            floor = cute.arch.fmin(floor, its)
        for i in cutlass.range_constexpr((geometry.group // geometry.held).bit_length() - 1):
            floor = cute.arch.fmax(floor, cute.arch.shuffle_sync_bfly(floor, offset=1 << i))
    else:
        for j in cutlass.range_constexpr(geometry.held):
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
def count_parts(
    memory: cutlass.Constexpr, logits: cute.Tensor, scale: Float32, offset: Float32, geometry: cutlass.Constexpr
):
    """Counts a thread's logits in their bins: the number of bin 0 is 2^23 as a float, and one more is one more of the
    bits. What has no part, or 0, is counted behind the last bin."""
    bins = address_of(memory.bins, Int32(0)) - Int32(EXACT * 4 % (1 << 32))
    for j in cutlass.range_constexpr(geometry.held):
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
def count_keys(
    memory: cutlass.Constexpr, keys: cute.Tensor, highest: Uint32, shift: Int32, geometry: cutlass.Constexpr
):
    """Counts how far a thread's keys lie below one, in the bins of this number's digit."""
    bins = address_of(memory.bins, Int32(0))
    for j in cutlass.range_constexpr(geometry.held):
        cute.arch.inline_ptx(
            "{ .reg .b32 a; shr.u32 a, {$r1}, {$r2}; min.u32 a, a, {$r3}; shl.b32 a, a, 2; add.u32 a, a, {$r0}; "
            "red.shared.add.u32 [a], 1; }",
            read_only_args=[bins, highest - keys[j].bitcast(Uint32), shift, Uint32(BINS)],
        )


@cute.jit
def clear(memory: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr):
    for i in cutlass.range_constexpr(geometry.own_bins):
        memory.bins[i * geometry.threads + thread] = Int32(0)
    if thread < 2 * (WARP + 1):
        memory.sums[thread] = Int32(0)


@cute.jit
def find_bin(memory: cutlass.Constexpr, need: Int32, thread: Int32, geometry: cutlass.Constexpr):
    """(bin, how many are in bins before it, how many in it) of the bin that the need-th is in; a bin of -1 where there
    are fewer. Every warp finds it. Two barriers, the first in front of it all."""
    own_bins, lane = cutlass.const_expr(geometry.own_bins), thread % WARP
    cute.arch.sync_threads()
    by_thread = cute.make_tensor(memory.bins.iterator, cute.make_layout((own_bins, geometry.threads)))
    counts = cute.make_rmem_tensor(own_bins, Int32)
    cute.autovec_copy(by_thread[None, thread], counts)
    own = sum_of(counts)
    add_behind(memory, cute.arch.warp_redux_sync(own, "add"), 0, thread)
    cute.arch.sync_threads()
    total = memory.sums[geometry.warps]
    short = (lane < geometry.warps) & (memory.sums[lane + 1] < need)
    warp = cutlass.min(cute.arch.popc(cute.arch.vote_ballot_sync(short)), geometry.warps - 1)
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


class Choice(NamedTuple):
    """What is chosen, by logit · scale + offset: all of at least `above`, and `need` of the others of at least `least`,
    which are `inside`. tied: these are equal."""

    scale: Float32
    offset: Float32
    above: Float32
    least: Float32
    need: Int32
    inside: Int32
    tied: Boolean


@cute.jit
def search(
    memory: cutlass.Constexpr, held: cute.Tensor, source: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr
):
    """Finds the bin of the k-th, and gives the fields of a `Choice`. held: a thread's logits, and afterwards the values
    of their keys where digits of these were counted."""
    floor, top = ends_of(memory, held, source, thread, geometry)
    # Bins reach an eighth of the distance below the floor.
    scale = cute.arch.rcp_approx((top - floor) * Float32(1 + SLACK))
    offset = Float32(SLACK / (1 + SLACK)) - floor * scale
    need = Int32(geometry.k)
    count_parts(memory, held, scale, offset, geometry)
    bin_, before, inside = find_bin(memory, need, thread, geometry)
    need, tied = need - before, Boolean(False)
    above, least = edge_of(bin_), edge_of(bin_ + 1)
    # A scale of 0 makes NaN of +inf.
    if (bin_ < 0) | ((inside != need) & (inside > LISTED)) | ~(scale > 0.0):
        # The sum keeps the compiler from looking at columns in front of the branch.
        column = source.column + cutlass.min(need - geometry.k - MOST_T, 0) + (before + MOST_T)
        to_keys(held, Source(source.address, column, *source[2:]), geometry)
        scale, offset = Float32(1.0), Float32(0.0)
        need, shift, highest, searching = Int32(geometry.k), Int32(32), Uint32(HIGHEST), Int32(1)
        while searching > 0:
            shift = cutlass.max(shift - DIGIT, 0)
            cute.arch.sync_threads()
            clear(memory, thread, geometry)
            cute.arch.sync_threads()
            count_keys(memory, held, highest, shift, geometry)
            bin_, before, inside = find_bin(memory, need, thread, geometry)
            highest, need = highest - (bin_.bitcast(Uint32) << Uint32(shift)), need - before
            if (inside == need) | (inside <= LISTED) | (shift == 0):
                searching = Int32(0)
        lowest, span = Uint32(LOWEST), (Uint32(1) << Uint32(shift)) - Uint32(1)
        if highest - Uint32(LOWEST) > span:
            lowest = highest - span
        above, least = value_of(highest + Uint32(1)), value_of(lowest)
        for j in cutlass.range_constexpr(geometry.held):
            held[j] = value_of(held[j].bitcast(Uint32))
        tied = (inside > LISTED) & (inside != need)
    if inside == need:
        # A bin that is taken as a whole is above.
        above, need, inside = least, Int32(0), Int32(0)
    return scale, offset, above, least, need, inside, tied


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.jit
def count_chosen(logits: cute.Tensor, choice: cutlass.Constexpr, geometry: cutlass.Constexpr):
    """How many of a thread's logits are above the bin, and how many are in it. Without a branch."""
    own, all_ = Int32(0), Int32(0)
    for j in cutlass.range_constexpr(geometry.held):
        own, all_ = cute.arch.inline_ptx(
            "{ .reg .pred p; .reg .f32 x; fma.rn.f32 x, {$r2}, {$r3}, {$r4}; "
            "setp.ge.f32 p, x, {$r5}; mov.b32 {$w0}, {$r0}; @p add.s32 {$w0}, {$w0}, 1; "
            "setp.ge.f32 p, x, {$r6}; mov.b32 {$w1}, {$r1}; @p add.s32 {$w1}, {$w1}, 1; }",
            write_only_types=[Int32, Int32],
            read_only_args=[own, all_, logits[j], choice.scale, choice.offset, choice.above, choice.least],
        )  # fmt: skip
    return own, all_ - own


@cute.jit
def bound_in(memory: cutlass.Constexpr, thread: Int32):
    """Scale, offset, above and least of the choice, from memory: what is computed with them is new to the compiler.
    Else it keeps each sum and comparison of another pass, which costs more than a new one."""
    bound = cute.make_rmem_tensor(4, Float32)
    cute.autovec_copy(cute.make_tensor(memory.bounds.iterator + thread // WARP * 4, cute.make_layout(4)), bound)
    return bound[0], bound[1], bound[2], bound[3]


@cute.jit
def list_bin(
    memory: cutlass.Constexpr, logits: cute.Tensor, source: cutlass.Constexpr, thread: Int32, count: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """Puts a thread's logits that are in the bin, so many, into the list, with their columns. Few threads have one."""
    if count > 0:
        scale, offset, above, least = bound_in(memory, thread)
        place = cute.arch.inline_ptx(
            "atom.shared.add.u32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32],
            read_only_args=[address_of(memory.listed, Int32(0)), count],
        )  # fmt: skip
        to, behind = address_of(memory.values, place), memory.columns.iterator.toint() - memory.values.iterator.toint()
        for j in cutlass.range_constexpr(geometry.held):
            to = cute.arch.inline_ptx(
                "{ .reg .pred p, q; .reg .f32 x; .reg .b32 a; fma.rn.f32 x, {$r1}, {$r2}, {$r3}; "
                "setp.ge.f32 q, x, {$r4}; not.pred q, q; setp.ge.f32 p, x, {$r5}; and.pred p, p, q; "
                "add.u32 a, {$r0}, {$r6}; @p st.shared.b32 [{$r0}], {$r1}; @p st.shared.b32 [a], {$r7}; "
                "mov.b32 {$w0}, {$r0}; @p add.u32 {$w0}, {$w0}, 4; }",
                write_only_types=[Int32],
                read_only_args=[
                    to, logits[j], scale, offset, above, least, behind, column_of(j, source, geometry),
                ],
            )  # fmt: skip


@cute.jit
def place_above(
    memory: cutlass.Constexpr, logits: cute.Tensor, source: cutlass.Constexpr, thread: Int32, place: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """Puts the columns of a thread's logits above the bin from a place on. Without a branch."""
    to = address_of(memory.bins, place)
    scale, offset, above, _ = bound_in(memory, thread)
    for j in cutlass.range_constexpr(geometry.held):
        to = cute.arch.inline_ptx(
            "{ .reg .pred p; .reg .f32 x; fma.rn.f32 x, {$r1}, {$r2}, {$r3}; setp.ge.f32 p, x, {$r4}; "
            "@p st.shared.b32 [{$r0}], {$r5}; mov.b32 {$w0}, {$r0}; @p add.u32 {$w0}, {$w0}, 4; }",
            write_only_types=[Int32],
            read_only_args=[to, logits[j], scale, offset, above, column_of(j, source, geometry)],
        )


@cute.jit
def place_listed(memory: cutlass.Constexpr, choice: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr):
    """Puts those of the list that fewer than are needed are above, each where the number of these says. A warp counts
    them for one of the list at a time."""
    lane = thread % WARP
    for i in cutlass.range(thread // WARP, choice.inside, geometry.warps, unroll=1):
        value, column, larger = memory.values[i], memory.columns[i], Int32(0)
        for first in cutlass.range(0, choice.inside, WARP, unroll=1):
            at = first + lane
            other, its = memory.values[at], memory.columns[at]
            above = (other > value) | ((other == value) & (its < column))
            larger = larger + cute.arch.popc(cute.arch.vote_ballot_sync(above & (at < choice.inside)))
        if (lane == 0) & (larger < choice.need):
            memory.bins[geometry.k - choice.need + larger] = column


@cute.jit
def place_tied(
    memory: cutlass.Constexpr, logits: cute.Tensor, source: cutlass.Constexpr, choice: cutlass.Constexpr, thread: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """Puts as many of the equal ones as are needed, from the lowest column on."""
    each, found = cutlass.const_expr(geometry.per_vector), Int32(0)
    for first in cutlass.range_constexpr(0, geometry.held, each):
        own = Int32(0)
        for e in cutlass.range_constexpr(each):
            own = own + Int32(logits[first + e] == choice.least)
        cute.arch.sync_threads()
        if thread < 2 * (WARP + 1):
            memory.sums[thread] = Int32(0)
        cute.arch.sync_threads()
        upto = upto_lane(own)
        add_behind(memory, cute.arch.shuffle_sync(upto, WARP - 1), 0, thread)
        cute.arch.sync_threads()
        place = found + memory.sums[thread // WARP] + upto - own
        found = found + memory.sums[geometry.warps]
        for e in cutlass.range_constexpr(each):
            if (logits[first + e] == choice.least) & (place < choice.need):
                memory.bins[geometry.k - choice.need + place] = column_of(first + e, source, geometry)
            place = place + Int32(logits[first + e] == choice.least)


@cute.kernel
def topk(
    logits: cute.Tensor,  # (rows, t) fp32 or bf16, rows apart, global memory
    starts: cute.Tensor | None,  # (rows,)
    ends: cute.Tensor,  # (rows,)
    table: cute.Tensor | None,  # (b, width), rows apart
    indices: cute.Tensor,  # (rows, k)
    geometry: cutlass.Constexpr,
):
    """A CTA of a row."""
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    storage = SmemAllocator().allocate(shared_storage(geometry))
    memory = Memory(
        storage.bins.get_tensor(cute.make_layout(BINS + 1)),
        storage.sums.get_tensor(cute.make_layout(2 * (WARP + 1))),
        storage.ends.get_tensor(cute.make_layout(2)),
        storage.listed.get_tensor(cute.make_layout(1)),
        storage.bounds.get_tensor(cute.make_layout(4 * WARP)),
        storage.values.get_tensor(cute.make_layout(LISTED)),
        storage.columns.get_tensor(cute.make_layout(LISTED)),
        storage.pages.get_tensor(cute.make_layout(geometry.threads * geometry.held // PAGE if geometry.s else 1)),
    )
    clear(memory, thread, geometry)
    if thread == 0:
        memory.ends[0], memory.ends[1], memory.listed[0] = Int32(MOST), Int32(MOST), Int32(0)
    width, k = logits.shape[1], cutlass.const_expr(geometry.k)
    size, each = cutlass.const_expr(geometry.bits // 8), cutlass.const_expr(geometry.per_vector)
    address = logits.iterator.toint() + Int64(row) * logits.stride[0] * size
    skew = Int32(address & 15) // size
    address, column = address - skew * size + thread * 16, thread * each - skew
    words = cute.make_rmem_tensor(cute.make_layout((4, geometry.held // each)), Int32)
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_launch_dependents()
    wait_for_launch(address)
    if cutlass.const_expr(geometry.early):
        load(words, Source(address, column, Int32(0), width), geometry)
    page = Int32(0)
    if cutlass.const_expr(table is not None):
        if (thread < table.shape[1]) & (thread * PAGE < width):
            page = table[row // geometry.s, thread]
    end = cutlass.min(ends[row], width)
    start = Int32(0)
    if cutlass.const_expr(starts is not None):
        start = cutlass.max(starts[row], 0)
    count = cutlass.max(end - start, 0)
    source = Source(address, column, start, end)
    if cutlass.const_expr(table is not None):
        if thread < cute.size(memory.pages):
            memory.pages[thread] = page
    if count <= k:
        cute.arch.sync_threads()
        for i in cutlass.range(thread, k, geometry.threads, unroll=1):
            index = Int32(-1)
            if i < count:
                index = index_of(start + i, memory, geometry)
            indices[row, i] = index
    else:
        if cutlass.const_expr(not geometry.early):
            load(words, source, geometry)
        held = cute.make_rmem_tensor(geometry.held, Float32)
        hold(held, words, source, geometry)
        choice = Choice(*search(memory, held, source, thread, geometry))
        bound = cute.make_rmem_tensor(4, Float32)
        for i in cutlass.range_constexpr(4):
            bound[i] = choice[i]
        if thread % WARP == 0:
            to = cute.make_tensor(memory.bounds.iterator + thread // WARP * 4, cute.make_layout(4))
            cute.autovec_copy(bound, to)
        own, in_bin = count_chosen(held, choice, geometry)
        cute.arch.sync_warp()
        list_bin(memory, held, source, thread, Int32(cutlass.select_(choice.tied, Int32(0), in_bin)), geometry)
        upto = upto_lane(own)
        add_behind(memory, cute.arch.shuffle_sync(upto, WARP - 1), 1, thread)
        cute.arch.sync_threads()
        place = memory.sums[WARP + 1 + thread // WARP] + upto - own
        place_above(memory, held, source, thread, place, geometry)
        if choice.tied:
            place_tied(memory, held, source, choice, thread, geometry)
        else:
            place_listed(memory, choice, thread, geometry)
        cute.arch.sync_threads()
        for first in cutlass.range_constexpr(0, k, geometry.threads):
            at = first + thread
            if cutlass.const_expr(first + geometry.threads <= k):
                indices[row, at] = index_of(memory.bins[at], memory, geometry)
            elif at < k:
                indices[row, at] = index_of(memory.bins[at], memory, geometry)


@cute.jit
def index_of(column: Int32, memory: cutlass.Constexpr, geometry: cutlass.Constexpr) -> Int32:
    """What is written for a column: itself, or with a page table its slot of the cache."""
    index = column
    if cutlass.const_expr(geometry.s > 0):
        index = memory.pages[column // PAGE] * PAGE + column % PAGE
    return index


topk.set_name_prefix("topk_v5", remove_cutlass_symbol=True, keep_mangled_name=False)


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
    """Launches a CTA for every row, as a programmatic dependent."""
    rows = logits.shape[0]
    flat = cute.make_tensor(ends.iterator, cute.make_layout((rows,)))
    topk(logits, starts, flat, table, indices, geometry).launch(
        grid=(rows, 1, 1),
        block=(geometry.threads, 1, 1),
        stream=stream_,
        min_blocks_per_mp=geometry.resident,
        preferred_smem_carveout=100,  # else it is asked of a GPU while compiling
        use_pdl=True,
    )


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: TopkProblem) -> Verdict:
    if pd.topk > MOST_K:
        return Verdict.no(f"topk = {pd.topk}: at most {MOST_K:,} are chosen")
    if pd.t > MOST_T:
        return Verdict.no(f"t = {pd.t}: rows of up to {MOST_T:,} logits are taken")
    return limits.offsets(pd.rows * pd.topk, f"indices of {pd.rows:,} rows")


@dataclass(frozen=True)
class TopkTiling(Tiling):
    """threads: of a CTA, 256, 512 or 1,024; 0: the most that have logits and of which the device takes all rows at
    once, where there are such, else the least that hold a row. early: whether logits are loaded before the row's range
    is known, where the device takes all rows at once.

    Where it takes all rows at once, CTAs are kept from sharing an SM if there are as many SMs as rows, and three from
    sharing one if there are half as many: CTAs of a dependent launch gather on few SMs else."""

    # The name of what is compiled says what they come to.
    launch_fields: ClassVar[tuple[str, ...]] = ("threads", "early")

    threads: int = 0
    early: bool = True

    def validate(self, pd: TopkProblem, device: Device | None = None) -> Verdict:
        if self.threads not in (0, *THREADS):
            return Verdict.no(f"threads = {self.threads} must be 0 or one of {', '.join(map(str, THREADS))}")
        most = self.threads * MOST_HELD
        if self.threads and pd.t > most:
            return Verdict.no(f"threads = {self.threads}: as many hold rows of up to {most:,}")
        return takes(pd)

    @staticmethod
    def skew(pd: TopkProblem) -> int:
        """Logits by which a row may begin behind a multiple of 16 bytes."""
        return 3 if pd.dtype == "fp32" else 7

    def geometry(self, pd: TopkProblem, rows: int, t: int, sms: int, aligned: bool = True) -> Geometry:
        """For rows of up to t logits. aligned: all begin at a multiple of 16 bytes."""
        most = t if aligned else t + self.skew(pd)
        fit = [x for x in THREADS if most <= x * MOST_HELD] or THREADS[-1:]
        at_once = [x for x in fit if rows <= sms * RESIDENT[x]]
        busy = [x for x in at_once if x * min(HELD) < 2 * most]  # more than half of the threads have logits
        threads = self.threads if self.threads in fit else busy[-1] if busy else fit[0]
        held = next(x for x in HELD if most <= x * threads)
        bits, s = 32 if pd.dtype == "fp32" else 16, pd.s if pd.table else 0
        # CTAs of 1,024 threads are apart by their registers, and three of an SM are nearly as many as fit.
        share = -(-rows // sms)
        of = share if threads in at_once and threads < THREADS[-1] and share < 3 else 0
        return Geometry(pd.topk, bits, s, held, threads, self.early and threads in at_once, of)


class TopkPlan(KernelPlan):
    """Inputs and output (indices,) of `workload.topk`. A compiled kernel for a problem class, the threads of a CTA and
    the logits of a thread; sizes, lengths and strides are arguments."""

    workload = workload.WORKLOAD
    tiling_type = TopkTiling
    tiling: TopkTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("fp32", "bf16"), problem=takes)

    def default_tiling(self) -> TopkTiling:
        return TopkTiling()

    def autotune_configs(self) -> list[Tiling]:
        tilings = [TopkTiling(threads, early) for early in (True, False) for threads in (0, *THREADS)]
        return [tiling for tiling in tilings if tiling.validate(self.problem, self.device)]

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

        name = f"topk_v5_{geometry.held}_{geometry.threads}{'_early' if geometry.early else ''}"
        name += f"_of_{geometry.most}" if geometry.most else ""
        return host.stage(self, topk, launch_topk, name, arguments, given, inputs, outputs)
