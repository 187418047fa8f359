r"""topk v3 in CuTe for sm_90: the k largest logits of rows, exactly; a row is a CTA's, or that of a cluster.

A thread holds candidates in registers, as keys: whole numbers in the order of the logits (-0 as +0, NaN as -inf; 0 is
none). A radix select over them finds the k-th, with its digits counted in shared memory. Which logits are candidates:

    held      all of the row: 8, 16 or 32 a thread. Rows of up to 16,384 logits a CTA
    streamed  those that are not below a bound from a sample, which the row is then read against, once, from left to
              right: a thread puts them into slots of its own in shared memory, and takes them from there

    sample    8,192 logits, in lines of 128 bytes from all over the row → the m-th largest of them, a little below
              where the k-th of the row is expected: m = k · f + 4 · sqrt(k · f) + 4, of a sample that is f of the row
    stream    vectors of 16 bytes, a batch of them at a time, logit >= bound: into the thread's next slot
    select    digits of 11 bits: the bins of 2,048 counters → the bin that the k-th is in → the same for that bin, until
              a bin is to be taken whole, or has up to 32: each lane of a warp counts those that are above its own. Of
              equal keys at the k-th place the lowest columns: by digits of columns, or by that count. Keys below a
              floor, of which there are more than k above, are not counted by the first digit
    write     places by counts and sums in a fixed order, so the result has the same bits in each run

    cluster   each CTA selects more of its own than are its part of the k → stores their keys and columns, and the least
              of them, to the first CTA, by distributed shared memory │ barrier │ the first CTA selects the k of them

A bound can be wrong: fewer than k logits are above it, or more than slots; a CTA of a cluster may have too many of the
k, so that the k-th is not above the least that it chose; and a row that does not begin at a multiple of 16 bytes may
have a vector more than registers hold. Then a CTA reads the row again for every digit (`again`): slow, and right in any
case. Lines of a row go to the CTAs of a cluster in turn, for what is chosen lies together.

Against version 1: CTAs of a cluster choose by themselves, where they added up their bins for every digit; candidates
are counted and taken without branches, and ranks take the place of the last digits.
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
from mla_var3.kernel.cute_python.prims.sync import named_any
from mla_var3.runtime import CuteKernel, KernelPlan, Tiling, Verdict, limits
from mla_var3.workload import topk as workload
from mla_var3.workload.indexer_logits import PAGE

if TYPE_CHECKING:
    from mla_var3.workload.topk import TopkProblem

WARP = 32
READ = 2048  # vectors of 16 bytes in a batch of a stream, and in the sample of a row
SLOTS = {256: 28, 512: 22}  # candidates of a thread that streams, fewer than which there have to be, by threads
SPARE = 4  # slots of a thread behind its last: a vector is put there without a look at each of its logits
CHUNK = 8  # candidates of a thread that are passed over where no thread of the warp has so many
LOWEST = 0x007FFFFF  # key of -inf
MORE_THAN_ANY = 0xFFFFFFFF  # a key that no logit has
ROOM = 1.2  # of a floor: how many times k logits are not below it
LINE = 8  # vectors
BINS = 2048
DIGIT = 11  # bits
MOST_K = 2048
HELD = (8, 16, 32)  # logits of a thread
CLUSTERS = (1, 2, 4, 8, 16)
THREADS = (256, 512)  # of a CTA
GATHERED = 4096  # candidates that the first CTA of a cluster chooses among
LEAST_SHARE = 4096  # logits, below which a CTA more does not pay for its part in the sums


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on. bits: of a logit. s: rows that share a row of the page table, 0 without one.
    ctas: of a row. held: logits of a thread; 0: rows are streamed. threads: of a CTA."""

    k: int
    bits: int
    s: int
    ctas: int
    held: int
    threads: int

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def own_bins(self) -> int:
        """Of a thread."""
        return BINS // self.threads

    @property
    def per_vector(self) -> int:
        return 128 // self.bits

    @property
    def group(self) -> int:
        """Logits of a thread whose largest one counts for the floor, the least of these: the most of which a row of
        random order has more than k that are not below it. 0 where there is no such floor."""
        own, size = self.threads * self.held, self.held
        while size > 1:
            groups = own // size
            if (1 - groups ** (-1 / size)) * own >= ROOM * self.own_k:
                return size
            size //= 2
        return 0

    @property
    def resident(self) -> int:
        """CTAs of an SM, at least: registers are limited for them."""
        if self.held:
            return 1024 // self.threads
        return 1 if self.ctas > 1 else 2 if self.threads > 256 else 3

    @property
    def candidates(self) -> int:
        """Of a thread."""
        return self.held or self.slots

    @property
    def share(self) -> int:
        """Candidates of a CTA among those that its cluster chooses among, at most."""
        return GATHERED // self.ctas

    @property
    def own_k(self) -> int:
        """How many a CTA chooses; in a cluster more by half than are its part of the k."""
        return self.k if self.ctas == 1 else min(3 * self.k // (2 * self.ctas) + 16, self.share)

    @property
    def slots(self) -> int:
        return SLOTS[self.threads]

    @property
    def batch(self) -> int:
        """Vectors of a thread in a batch of a stream, and in a sample."""
        return READ // self.threads


def shared_storage(geometry: Geometry) -> type:
    """The CTA's shared memory."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.Align[cute.struct.MemRange[kind, size], 16]

    slots = 4 if geometry.held else (geometry.slots + SPARE) * geometry.threads
    fields = {
        "sums": array(Int32, geometry.warps),
        "ends": array(Uint32, 2 * geometry.warps),
        "found": array(Int32, 4),  # of a digit: bin, how many are above it, how many in it
        "few": array(Uint32, 2 * WARP + 1),  # keys, how many columns lie behind them, how many these are
        "bins": array(Int32, BINS),
        "own": array(Int32, 2 * geometry.share if geometry.ctas > 1 else 4),  # a CTA's candidates: keys, columns
        "gathered": array(Int32, 2 * GATHERED if geometry.ctas > 1 else 4),  # of all CTAs: keys, columns
        "least": array(Uint32, 2 * geometry.ctas),  # of each CTA: key and columns behind, below which it has kept all
        "values": array(Float32, slots),  # and right behind them
        "columns": array(Int32, slots),
    }
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


class Memory(NamedTuple):
    """Shared memory, as the storage has it. values, columns: (slots, threads)."""

    sums: cute.Tensor
    ends: cute.Tensor
    found: cute.Tensor
    few: cute.Tensor
    bins: cute.Tensor
    own: cute.Tensor
    gathered: cute.Tensor
    least: cute.Tensor
    values: cute.Tensor
    columns: cute.Tensor


def memory_in(storage: Any, geometry: Geometry) -> Memory:
    slots = 4 if geometry.held else (geometry.slots + SPARE) * geometry.threads
    return Memory(
        storage.sums.get_tensor(cute.make_layout(geometry.warps)),
        storage.ends.get_tensor(cute.make_layout(2 * geometry.warps)),
        storage.found.get_tensor(cute.make_layout(4)),
        storage.few.get_tensor(cute.make_layout(2 * WARP + 1)),
        storage.bins.get_tensor(cute.make_layout(BINS)),
        storage.own.get_tensor(cute.make_layout(2 * geometry.share if geometry.ctas > 1 else 4)),
        storage.gathered.get_tensor(cute.make_layout(2 * GATHERED if geometry.ctas > 1 else 4)),
        storage.least.get_tensor(cute.make_layout(2 * geometry.ctas)),
        storage.values.get_tensor(cute.make_layout(slots)),
        storage.columns.get_tensor(cute.make_layout(slots)),
    )


class Source(NamedTuple):
    """What a CTA reads. base: address of vector 0 of the row. first: column of vector 0's first logit. start, end:
    columns in range. vectors: of the row. rank: of the CTA among those of the row."""

    base: Int64
    first: Int32
    start: Int32
    end: Int32
    vectors: Int32
    rank: Int32


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
def value_of(key: Uint32) -> Float32:
    """The number of a key above `LOWEST`."""
    bits = key.bitcast(Int32)
    return (bits ^ (~(bits >> 31) | Int32(-(1 << 31)))).bitcast(Float32)


@cute.jit
def load_vector(target: cute.Tensor, source: cutlass.Constexpr, at: Int32):
    """Starts loading (4,) words of a vector of the row, if it has one there."""
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(), Int32, num_bits_per_copy=128,
        l1c_evict_priority=cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE,
    )  # fmt: skip
    if at < source.vectors:
        address = cute.make_ptr(Int32, source.base + Int64(at) * 16, cute.AddressSpace.gmem, assumed_align=16)
        cute.copy(atom, cute.make_tensor(address, cute.make_layout(4)), target)


@cute.jit
def logit_in(words: cute.Tensor, e: cutlass.Constexpr, bits: cutlass.Constexpr) -> Float32:
    """Logit e of a vector of (4,) words."""
    if cutlass.const_expr(bits == 32):
        word = words[e]
    else:
        word = words[e // 2] << 16 if cutlass.const_expr(e % 2 == 0) else words[e // 2] & Int32(-65536)
    return Int32(word).bitcast(Float32)


@cute.jit
def keys_in(keys: cute.Tensor, words: cute.Tensor, at: Int32, source: cutlass.Constexpr, geometry: cutlass.Constexpr):
    """Fills the keys of a vector of (4,) words; those out of range are 0."""
    for e in cutlass.range_constexpr(geometry.per_vector):
        keys[e] = key_of(logit_in(words, e, geometry.bits))
    # Vectors in between are in range as a whole.
    if (at == 0) | (at >= source.vectors - 1):
        for e in cutlass.range_constexpr(geometry.per_vector):
            column = source.first + at * geometry.per_vector + e
            keys[e] = pick((column >= source.start) & (column < source.end), keys[e], Uint32(0))


@cute.jit
def own_vector(i: Int32, source: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr) -> Int32:
    """Which vector of the row is a thread's i-th: lines go to the CTAs in turn."""
    if cutlass.const_expr(geometry.ctas == 1):
        vector = i * geometry.threads + thread
    else:
        line = (i * (geometry.threads // LINE) + thread // LINE) * geometry.ctas + source.rank
        vector = line * LINE + thread % LINE
    return vector


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
    for i in cutlass.range_constexpr(cute.size(memory.sums)):
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
    lane, warp, warps = thread % WARP, thread // WARP, cutlass.const_expr(cute.size(memory.sums))
    least, largest = cute.arch.warp_redux_sync(one, "min"), cute.arch.warp_redux_sync(other, "max")
    if lane == 0:
        memory.ends[warp], memory.ends[warps + warp] = least, largest
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(warps):
        low, high = memory.ends[i], memory.ends[warps + i]
        least, largest = pick(low < least, low, least), pick(high > largest, high, largest)
    return least, largest


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
def find_bin(memory: cutlass.Constexpr, need: Int32, thread: Int32, geometry: cutlass.Constexpr):
    """(bin, candidates in bins above it, candidates in it) of the bin that the need-th largest is in; a bin of -1 where
    there are fewer. Bins are zero afterwards. Three barriers, the first in front of it all."""
    cute.arch.sync_threads()
    bins = memory.bins
    lane, warp = thread % WARP, thread // WARP
    first = BINS - geometry.own_bins * (thread + 1)
    counts = [bins[first + geometry.own_bins - 1 - i] for i in range(geometry.own_bins)]
    for i in cutlass.range_constexpr(geometry.own_bins):
        memory.bins[first + i] = Int32(0)
    own = counts[0]
    for i in cutlass.range_constexpr(1, geometry.own_bins):
        own = own + counts[i]
    of_warp = cute.arch.warp_redux_sync(own, "add")
    if lane == 0:
        memory.sums[warp] = of_warp
    if thread == 0:
        memory.few[2 * WARP] = Uint32(0)
    cute.arch.sync_threads()
    above, total = Int32(0), Int32(0)
    for i in cutlass.range_constexpr(geometry.warps):
        part = memory.sums[i]
        total = total + part
        above = above + cutlass.select_(warp > i, part, Int32(0))
    if (above < need) & (need <= above + of_warp):
        above = above + upto_lane(own, lane) - own
        for i in cutlass.range_constexpr(geometry.own_bins):
            if (above < need) & (need <= above + counts[i]):
                memory.found[0], memory.found[1], memory.found[2] = first + geometry.own_bins - 1 - i, above, counts[i]
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


@cute.jit
def behind(column: Int32, source: cutlass.Constexpr) -> Uint32:
    """How many columns of the range lie behind one: the larger, the better among equals."""
    return (source.end - 1 - column).bitcast(Uint32)


@cute.jit
def column_of(
    j: cutlass.Constexpr, memory: cutlass.Constexpr, source: cutlass.Constexpr, thread: Int32, of: cutlass.Constexpr,
    geometry: cutlass.Constexpr,
) -> Int32:  # fmt: skip
    """The column of a thread's j-th candidate, `of` the CTA or of all "gathered" ones."""
    if cutlass.const_expr(of == "gathered"):
        column = memory.gathered[GATHERED + j * geometry.threads + thread]
    elif cutlass.const_expr(geometry.held > 0):
        i, e = cutlass.const_expr(j // geometry.per_vector), cutlass.const_expr(j % geometry.per_vector)
        column = source.first + own_vector(Int32(i), source, thread, geometry) * geometry.per_vector + e
    else:
        column = memory.columns[j * geometry.threads + thread]
    return column


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
    memory: cutlass.Constexpr, keys: cute.Tensor, most: Int32, source: cutlass.Constexpr, again: Boolean,
    digit: cutlass.Constexpr, thread: Int32, of: cutlass.Constexpr, geometry: cutlass.Constexpr,
):  # fmt: skip
    """Counts all candidates, or all logits of the row again, in the bins of a digit. most: candidates of a thread of
    the warp, at most."""
    low, width, shift, ties, tied = digit
    bins, span = address_of(memory.bins, Int32(0)), span_of(width, low)
    candidates = cutlass.const_expr(cute.size(keys))
    if again:
        words = cute.make_rmem_tensor(cute.make_layout(4), Int32)
        some = cute.make_rmem_tensor(geometry.per_vector, Uint32)
        for at in cutlass.range(thread, source.vectors, geometry.threads, unroll=1):
            load_vector(words, source, at)
            keys_in(some, words, at, source, geometry)
            for e in cutlass.range_constexpr(geometry.per_vector):
                value = pick(ties > 0, behind(source.first + at * geometry.per_vector + e, source), some[e])
                if (ties == 0) | (some[e] == tied):
                    count_one(bins, value, low, span, shift)
    else:
        for first in cutlass.range_constexpr(0, candidates, CHUNK):
            if most > first:
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
    memory: cutlass.Constexpr, keys: cute.Tensor, most: Int32, source: cutlass.Constexpr, floor: Uint32,
    largest: Uint32, again: Boolean, thread: Int32, of: cutlass.Constexpr, geometry: cutlass.Constexpr,
):  # fmt: skip
    """(again, low, low_behind): the largest are those with a key above `low`, or with that key and at least
    `low_behind` columns behind them. They are k, of more than k logits of the row; or of a cluster's CTA from `own_k`
    to `share`, or all of its candidates where these are fewer. again: k are not among the candidates above the floor.

    floor: all candidates that are not below it are there. largest: of their keys."""
    part = cutlass.const_expr(of == "own" and geometry.ctas > 1)  # the CTA's, of which others are gathered too
    least = Uint32(1)
    if cutlass.const_expr(part and geometry.held == 0):
        least = floor
    room = cutlass.const_expr(geometry.share - geometry.own_k if part else 0)
    low, width, need = floor, width_of(largest - floor), Int32(geometry.own_k if part else geometry.k)
    if again:
        low, width = Uint32(1), Int32(32)
    ties, tied, searching, low_behind = Int32(0), Uint32(0), Int32(1), Uint32(0)
    while searching > 0:
        shift = cutlass.max(width - DIGIT, 0)
        digit = Digit(low, width, shift, ties, tied)
        count_all(memory, keys, most, source, again, digit, thread, of, geometry)
        bin_, above, inside = find_bin(memory, need, thread, geometry)
        if bin_ < 0:
            # Fewer than are wanted are not below the floor: all that there is, from the first digit.
            if cutlass.const_expr(part):
                if low == least:
                    searching = Int32(0)
            elif cutlass.const_expr(geometry.held == 0 or of == "gathered"):
                again = Boolean(True)
            low, width = least, Int32(32)
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
                width = width_of((source.end - source.start).bitcast(Uint32))
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
    memory: cutlass.Constexpr, keys: cute.Tensor, most: Int32, source: cutlass.Constexpr, bad: Boolean, low: Uint32,
    low_behind: Uint32, thread: Int32, geometry: cutlass.Constexpr,
):  # fmt: skip
    """Brings what the CTA has chosen to the cluster's first CTA: (GATHERED,) keys and columns, each CTA's share of
    them behind those of the CTAs in front of it, with 0 for keys that there are not; and the least that it has chosen,
    or where it is `bad` more than any key. Ends with a barrier of the cluster."""
    share = cutlass.const_expr(geometry.share)
    bits = chosen_bits(memory, keys, source, low, low_behind, thread, "own", geometry)
    place, total = block_sum(Int32(cute.arch.popc(bits)), memory, thread)
    for first in cutlass.range_constexpr(0, geometry.candidates, CHUNK):
        if most > first:
            for j in cutlass.range_constexpr(first, min(first + CHUNK, geometry.candidates)):
                if (bits >> j) & 1 > 0:
                    memory.own[place] = keys[j].bitcast(Int32)
                    memory.own[share + place] = column_of(j, memory, source, thread, "own", geometry)
                place = place + ((bits >> j) & 1)
    cute.arch.sync_threads()
    cute.arch.cluster_wait()  # the first CTA has begun
    for i in cutlass.range(thread, share // 4, geometry.threads, unroll=1):
        at = i * 4
        some = [Int32(cutlass.select_(at + e < total, memory.own[at + e], Int32(0))) for e in range(4)]
        place = source.rank * share + at
        store_other(address_of(memory.gathered, place), Int32(0), some)
        columns = [memory.own[share + at + e] for e in range(4)]
        store_other(address_of(memory.gathered, GATHERED + place), Int32(0), columns)
    if thread == 0:
        least = pick(bad, Uint32(MORE_THAN_ANY), low)
        cute.arch.inline_ptx(
            "st.shared::cluster.v2.u32 [{$r0}], {{$r1}, {$r2}};",
            read_only_args=[
                of_other(address_of(memory.least, 2 * source.rank), Int32(0)), least.bitcast(Int32),
                low_behind.bitcast(Int32),
            ],
        )  # fmt: skip
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def choose_gathered(
    memory: cutlass.Constexpr, source: cutlass.Constexpr, target: cutlass.Constexpr, thread: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """What a cluster's first CTA does with all that are gathered. A CTA has kept what is below the least that it chose:
    if that could be among the k, the row is read again."""
    each = cutlass.const_expr(GATHERED // geometry.threads)
    keys = cute.make_rmem_tensor(each, Uint32)
    for j in cutlass.range_constexpr(each):
        keys[j] = memory.gathered[j * geometry.threads + thread].bitcast(Uint32)
    floor = Uint32(1)
    for i in cutlass.range_constexpr(geometry.ctas):
        floor = pick(memory.least[2 * i] > floor, memory.least[2 * i], floor)
    _, largest = block_ends(memory, floor, largest_of(keys, each), thread)
    again, low, low_behind, trying = floor == Uint32(MORE_THAN_ANY), Uint32(0), Uint32(0), Int32(1)
    while trying > 0:
        again, low, low_behind = kth(
            memory, keys, Int32(each), source, floor, largest, again, thread, "gathered", geometry
        )
        lacks = Boolean(False)
        for i in cutlass.range_constexpr(geometry.ctas):
            lacks = lacks | ((memory.least[2 * i] == low) & (memory.least[2 * i + 1] > low_behind))
        trying = Int32(lacks & ~again)
        again = again | lacks
    write(memory, keys, Int32(each), source, again, (low, low_behind), target, thread, "gathered", geometry)


# ------------------------------------------------------------------------------------------------ device: candidates
@cute.jit
def hold(keys: cute.Tensor, source: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr):
    """Fills a thread's keys with its logits of the row."""
    vectors = cutlass.const_expr(geometry.held // geometry.per_vector)
    words = cute.make_rmem_tensor(cute.make_layout((4, vectors)), Int32)
    words.fill(0)
    for v in cutlass.range_constexpr(vectors):
        load_vector(words[None, v], source, own_vector(Int32(v), source, thread, geometry))
    by_vector = cute.make_tensor(keys.iterator, cute.make_layout((geometry.per_vector, vectors)))
    for v in cutlass.range_constexpr(vectors):
        keys_in(by_vector[None, v], words[None, v], own_vector(Int32(v), source, thread, geometry), source, geometry)


@cute.jit
def largest_of(keys: cute.Tensor, count: cutlass.Constexpr) -> Uint32:
    largest = keys[0]
    for j in cutlass.range_constexpr(1, count):
        largest = pick(keys[j] > largest, keys[j], largest)
    return largest


@cute.jit
def bound_of(memory: cutlass.Constexpr, source: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr):
    """A key that about k · (1 + 4 / sqrt(k · f)) logits of the row are not below, by a sample that is f of it; 1 where
    the slots hold the CTA's share of the row anyway."""
    bound = Uint32(1)
    each = cutlass.const_expr(geometry.per_vector)
    if source.vectors > ((geometry.slots - 1) // each) * geometry.threads * geometry.ctas:
        count = cutlass.const_expr(geometry.batch * each)
        keys = cute.make_rmem_tensor(cute.make_layout((each, geometry.batch)), Uint32)
        words = cute.make_rmem_tensor(cute.make_layout((4, geometry.batch)), Int32)
        words.fill(0)
        lines = source.vectors // LINE
        of_sample = cutlass.const_expr(READ // LINE * geometry.ctas)
        ats = []
        for v in cutlass.range_constexpr(geometry.batch):
            s = v * geometry.threads + thread
            line = ((s // LINE) * geometry.ctas + source.rank).to(Int64) * lines.to(Int64) // of_sample
            ats.append(line.to(Int32) * LINE + s % LINE)
            load_vector(words[None, v], source, ats[v])
        for v in cutlass.range_constexpr(geometry.batch):
            keys_in(keys[None, v], words[None, v], ats[v], source, geometry)
        flat = cute.make_tensor(keys.iterator, cute.make_layout(count))
        # As many keys as there are threads are not below the least of the threads' largest.
        largest = largest_of(flat, count)
        low, largest = block_ends(memory, pick(largest > Uint32(1), largest, Uint32(1)), largest, thread)
        expected = Float32(geometry.k * READ) / Float32(source.vectors)
        need = Int32(expected + 4.0 * cute.math.sqrt(expected)) + 4
        enough, width, searching = need // 4, width_of(largest - low), Int32(1)
        if need > geometry.threads:
            low, width = Uint32(1), Int32(32)
        bins = address_of(memory.bins, Int32(0))
        while searching > 0:
            shift = cutlass.max(width - DIGIT, 0)
            for j in cutlass.range_constexpr(count):
                count_one(bins, flat[j], low, span_of(width, low), shift)
            bin_, above, inside = find_bin(memory, need, thread, geometry)
            low, width = low + (cutlass.max(bin_, 0).bitcast(Uint32) << Uint32(shift)), cutlass.max(shift, 1)
            need = need - above
            if (inside <= enough) | (shift == 0) | (bin_ < 0):
                searching = Int32(0)
        bound = low
    return bound


@cute.jit
def take(to: Int32, value: Float32, column: Int32, bound: Float32, geometry: cutlass.Constexpr) -> Int32:
    """Puts a logit that is not below the bound, and its column, into the slot at `to`; gives where the next one is.
    Without a branch."""
    slot = cutlass.const_expr(geometry.threads * 4)
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ge.f32 p, {$r1}, {$r2}; @p st.shared.b32 [{$r0}], {$r1}; "
        f"@p st.shared.b32 [{{$r0}} + {(geometry.slots + SPARE) * slot}], {{$r3}}; mov.b32 {{$w0}}, {{$r0}}; "
        f"@p add.u32 {{$w0}}, {{$w0}}, {slot}; }}",
        write_only_types=[Int32],
        read_only_args=[to, value, bound, column],
    )


@cute.jit
def stream(
    memory: cutlass.Constexpr, keys: cute.Tensor, source: cutlass.Constexpr, bound: Uint32, thread: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """Fills a thread's keys with those of its logits that are not below the bound, and its slots with their columns.
    Gives (how many a thread of the warp has at most, whether a thread of the CTA has too many). One barrier."""
    words = cute.make_rmem_tensor(cute.make_layout((4, geometry.batch)), Int32)
    blocks = (source.vectors + geometry.threads * geometry.ctas - 1) // (geometry.threads * geometry.ctas)
    start = address_of(memory.values, thread)
    to, last = start, start + geometry.slots * geometry.threads * 4
    if bound > Uint32(LOWEST):
        least = value_of(bound)
        for i in cutlass.range(0, blocks, geometry.batch, unroll=1):
            for v in cutlass.range_constexpr(geometry.batch):
                load_vector(words[None, v], source, own_vector(i + v, source, thread, geometry))
            for v in cutlass.range_constexpr(geometry.batch):
                at = own_vector(i + v, source, thread, geometry)
                column = source.first + at * geometry.per_vector
                if (at == 0) | (at >= source.vectors - 1):
                    mask_edge(words[None, v], column, source, geometry)
                to = cutlass.min(to, last)
                for e in cutlass.range_constexpr(geometry.per_vector):
                    if cutlass.const_expr(e == 4):
                        to = cutlass.min(to, last)
                    to = take(to, logit_in(words[None, v], e, geometry.bits), column + e, least, geometry)
    else:
        # All, NaN too, are not below the bound.
        for i in cutlass.range(0, blocks, 1, unroll=1):
            at = own_vector(i, source, thread, geometry)
            words.fill(0)
            load_vector(words[None, 0], source, at)
            for e in cutlass.range_constexpr(geometry.per_vector):
                column = source.first + at * geometry.per_vector + e
                to = cutlass.min(to, last)
                if (at < source.vectors) & (column >= source.start) & (column < source.end):
                    finite = cute.arch.fmax(logit_in(words[None, 0], e, geometry.bits), Float32(-math.inf))
                    to = take(to, finite, column, Float32(-math.inf), geometry)
    # A barrier too, which keeps what is read below behind what was put there.
    bad = named_any(0, geometry.threads, to >= last)
    count = (cutlass.min(to, last) - start) // (geometry.threads * 4)
    most = cute.arch.warp_redux_sync(count, "max")
    for first in cutlass.range_constexpr(0, geometry.slots, CHUNK):
        for j in cutlass.range_constexpr(first, min(first + CHUNK, geometry.slots)):
            keys[j] = Uint32(0)
        if most > first:
            for j in cutlass.range_constexpr(first, min(first + CHUNK, geometry.slots)):
                key = key_of(memory.values[j * geometry.threads + thread])
                keys[j] = pick(count > j, key, Uint32(0))
    return most, bad


@cute.jit
def mask_edge(words: cute.Tensor, column: Int32, source: cutlass.Constexpr, geometry: cutlass.Constexpr):
    """Makes NaN, which is not above any bound, of the logits of a vector that are out of range. column: its first."""
    for i in cutlass.range_constexpr(4):
        if cutlass.const_expr(geometry.bits == 32):
            if (column + i < source.start) | (column + i >= source.end):
                words[i] = Int32(0x7FC00000)
        else:
            for half in cutlass.range_constexpr(2):
                at = column + 2 * i + half
                if (at < source.start) | (at >= source.end):
                    words[i] = words[i] | (0x7FC00000 if half else 0x7FC0)


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.jit
def index_of(column: Int32, table: cute.Tensor | None, row: Int32, geometry: cutlass.Constexpr) -> Int32:
    """What is written for a column: itself, or with a page table its slot of the cache."""
    index = column
    if cutlass.const_expr(table is not None):
        index = table[row // geometry.s, column // PAGE] * PAGE + column % PAGE
    return index


class Target(NamedTuple):
    """Where indices are written. indices: (rows, k). table: (b, width) of a paged cache, or None."""

    table: cute.Tensor | None
    indices: cute.Tensor
    row: Int32


@cute.jit
def put_again(
    memory: cutlass.Constexpr, place: Int32, source: cutlass.Constexpr, low: Uint32, low_behind: Uint32, thread: Int32,
    puts: cutlass.Constexpr, geometry: cutlass.Constexpr,
) -> Int32:  # fmt: skip
    """Reads the row again; gives the place behind a thread's chosen columns, which with `puts` are put from `place` on
    into the memory of the bins."""
    words, keys = cute.make_rmem_tensor(cute.make_layout(4), Int32), cute.make_rmem_tensor(geometry.per_vector, Uint32)
    for at in cutlass.range(thread, source.vectors, geometry.threads, unroll=1):
        load_vector(words, source, at)
        keys_in(keys, words, at, source, geometry)
        for e in cutlass.range_constexpr(geometry.per_vector):
            column = source.first + at * geometry.per_vector + e
            if chosen(keys[e], column, low, low_behind, source):
                if cutlass.const_expr(puts):
                    memory.bins[place] = column
                place = place + 1
    return place


@cute.jit
def write(
    memory: cutlass.Constexpr, keys: cute.Tensor, most: Int32, source: cutlass.Constexpr, again: Boolean,
    last: cutlass.Constexpr, target: cutlass.Constexpr, thread: Int32, of: cutlass.Constexpr,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """Writes the indices of what is chosen. They are put in order in the memory of the bins. last: key of the last that
    is chosen, and the columns behind it."""
    low, low_behind = last
    bits, count, candidates = Int32(0), Int32(0), cutlass.const_expr(cute.size(keys))
    if again:
        count = put_again(memory, count, source, low, low_behind, thread, False, geometry)
    else:
        bits = chosen_bits(memory, keys, source, low, low_behind, thread, of, geometry)
        count = cute.arch.popc(bits)
    place, total = block_sum(Int32(count), memory, thread)
    if again:
        place = put_again(memory, place, source, low, low_behind, thread, True, geometry)
    else:
        for first in cutlass.range_constexpr(0, candidates, CHUNK):
            if most > first:
                for j in cutlass.range_constexpr(first, min(first + CHUNK, candidates)):
                    if (bits >> j) & 1 > 0:
                        memory.bins[place] = column_of(j, memory, source, thread, of, geometry)
                    place = place + ((bits >> j) & 1)
    cute.arch.sync_threads()
    for i in cutlass.range(thread, total, geometry.threads, unroll=1):
        target.indices[target.row, i] = index_of(memory.bins[i], target.table, target.row, geometry)


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
    block, _, _ = cute.arch.block_idx()
    storage = SmemAllocator().allocate(shared_storage(geometry))
    memory = memory_in(storage, geometry)
    row, rank = block // geometry.ctas, block % geometry.ctas
    for i in cutlass.range_constexpr(geometry.own_bins):
        memory.bins[i * geometry.threads + thread] = Int32(0)
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    end = cutlass.min(ends[row], logits.shape[1])
    start = Int32(0)
    if cutlass.const_expr(starts is not None):
        start = cutlass.max(starts[row], 0)
    count = cutlass.max(end - start, 0)
    if count <= geometry.k:
        all_threads = cutlass.const_expr(geometry.threads * geometry.ctas)
        for i in cutlass.range(rank * geometry.threads + thread, geometry.k, all_threads, unroll=1):
            index = Int32(-1)
            if i < count:
                index = index_of(start + i, table, row, geometry)
            indices[row, i] = index
    else:
        size = cutlass.const_expr(geometry.bits // 8)
        address = logits.iterator.toint() + (Int64(row) * logits.stride[0] + start) * size
        skew = Int32(address % 16) // size
        vectors = (skew + count + geometry.per_vector - 1) // geometry.per_vector
        if cutlass.const_expr(geometry.ctas > 1):
            cute.arch.cluster_arrive()  # this CTA has begun
        source = Source(address - skew * size, start - skew, start, end, vectors, rank)
        keys = cute.make_rmem_tensor(geometry.candidates, Uint32)
        if cutlass.const_expr(geometry.held > 0):
            hold(keys, source, thread, geometry)
            most, least, largest = Int32(geometry.held), Uint32(1), largest_of(keys, geometry.held)
            if cutlass.const_expr(geometry.group > 0):
                least = Uint32(0xFFFFFFFF)
                for first in cutlass.range_constexpr(0, geometry.held, geometry.group):
                    group = cute.make_tensor(keys.iterator + first, cute.make_layout(geometry.group))
                    its = largest_of(group, geometry.group)
                    least = pick(its < least, its, least)
            bad = vectors > geometry.held // geometry.per_vector * geometry.threads * geometry.ctas
            floor, largest = block_ends(memory, pick(least > Uint32(1), least, Uint32(1)), largest, thread)
        else:
            floor = bound_of(memory, source, thread, geometry)
            most, bad = stream(memory, keys, source, floor, thread, geometry)
            _, largest = block_ends(memory, floor, largest_of(keys, geometry.slots), thread)
        target = Target(table, indices, row)
        if cutlass.const_expr(geometry.ctas == 1):
            again, low, low_behind = kth(memory, keys, most, source, floor, largest, bad, thread, "own", geometry)
            write(memory, keys, most, source, again, (low, low_behind), target, thread, "own", geometry)
        else:
            _, low, low_behind = kth(
                memory, keys, most, source, floor, largest, Boolean(False), thread, "own", geometry
            )
            gather(memory, keys, most, source, bad, low, low_behind, thread, geometry)
            if rank == 0:
                choose_gathered(memory, source, target, thread, geometry)


topk.set_name_prefix("topk_v3", remove_cutlass_symbol=True, keep_mangled_name=False)


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
    """Launches the CTAs of every row, as a programmatic dependent."""
    rows = logits.shape[0]
    flat = cute.make_tensor(ends.iterator, cute.make_layout((rows,)))
    topk(logits, starts, flat, table, indices, geometry).launch(
        grid=(rows * geometry.ctas, 1, 1),
        block=(geometry.threads, 1, 1),
        cluster=(geometry.ctas, 1, 1) if geometry.ctas > 1 else None,
        stream=stream_,
        min_blocks_per_mp=geometry.resident,
        preferred_smem_carveout=100,  # else it is asked of a GPU while compiling
        use_pdl=True,
    )


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: TopkProblem) -> Verdict:
    if pd.topk > MOST_K:
        return Verdict.no(f"topk = {pd.topk}: at most {MOST_K:,} are chosen")
    return limits.all_of(
        limits.offsets(pd.rows * max(CLUSTERS), f"CTAs of {pd.rows:,} rows"),
        limits.offsets(pd.rows * pd.topk, f"indices of {pd.rows:,} rows"),
    )


@dataclass(frozen=True)
class TopkTiling(Tiling):
    """ctas: of a row, a cluster; 0: as many as fill the device with rows of the problem's length. held: whether rows
    that registers hold are held there. threads: of a CTA, 256 or 512; 0: 256 where rows are more than the device takes
    at once with 512 and so many hold a row, else 512."""

    # The name of what is compiled says what they come to.
    launch_fields: ClassVar[tuple[str, ...]] = ("ctas", "held", "threads")

    ctas: int = 0
    held: bool = True
    threads: int = 0

    def validate(self, pd: TopkProblem, device: Device | None = None) -> Verdict:
        if self.ctas not in (0, *CLUSTERS):
            return Verdict.no(f"ctas = {self.ctas} must be 0 or one of {', '.join(map(str, CLUSTERS))}")
        if self.threads not in (0, *THREADS):
            return Verdict.no(f"threads = {self.threads} must be 0 or one of {', '.join(map(str, THREADS))}")
        return takes(pd)

    def geometry(self, pd: TopkProblem, rows: int, t: int, sms: int) -> Geometry:
        """For rows of up to t logits."""
        most = min(sms // max(rows, 1), -(-t // LEAST_SHARE))
        ctas = self.ctas or max(x for x in CLUSTERS if x <= max(most, 1))
        few, many = THREADS
        narrow = self.held and ctas == 1 and rows > 2 * sms and t <= few * max(HELD)
        threads = self.threads or (few if narrow else many)
        held = next((x for x in HELD if self.held and t <= x * threads * ctas), 0)
        bits, s = 32 if pd.dtype == "fp32" else 16, pd.s if pd.table else 0
        return Geometry(pd.topk, bits, s, ctas, held, threads)


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
        held = [TopkTiling(ctas, threads=threads) for threads in THREADS for ctas in CLUSTERS]
        streamed = [TopkTiling(1, False, 256), TopkTiling(1, False, 512), TopkTiling(8, False)]
        return [TopkTiling(), *held, *streamed]

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
        rows, t = inputs[0].shape if inputs else (pd.rows, pd.t)
        geometry = self.tiling.geometry(pd, rows, t, host.target(self).num_sms)
        given: tuple[Any, ...] = ()
        if inputs:
            if pd.table:
                logits, ends, table = inputs
                starts = None
            else:
                (logits, starts, ends), table = inputs, None
            given = (logits, starts, ends, table, outputs[0])

        def arguments() -> tuple[Any, ...]:
            n, t_, b, width = host.symbols(4)
            kind = Float32 if pd.dtype == "fp32" else BFloat16
            rows_apart = make_fake_tensor(kind, (n, t_), (cute.sym_int64(), 1), assumed_align=kind.width // 8)
            starts = None if pd.table else host.fake(Int32, n, align=4)
            ends = host.fake(Int32, b, pd.s, align=4) if pd.table else host.fake(Int32, n, align=4)
            table = make_fake_tensor(Int32, (b, width), (cute.sym_int64(), 1), assumed_align=4) if pd.table else None
            return rows_apart, starts, ends, table, host.fake(Int32, n, pd.topk, align=4), geometry

        name = f"topk_v3_{geometry.ctas}_{geometry.held}_{geometry.threads}"
        return host.stage(self, topk, launch_topk, name, arguments, given, inputs, outputs)
