r"""topk v1 in CuTe for sm_90: the k largest logits of rows, exactly; a row is a CTA's, or that of a cluster.

A thread holds candidates in registers, as keys: whole numbers in the order of the logits (-0 as +0, NaN as -inf; 0 is
none). A radix select over them finds the k-th, with its digits counted in shared memory and, in a cluster, added up
through distributed shared memory. Which logits are candidates:

    held      all of the row: 8, 16 or 32 a thread. Rows of up to 16,384 logits a CTA
    streamed  those that are not below a bound from a sample, which the row is then read against, once, from left to
              right: a thread puts them into slots of its own in shared memory, and takes them from there

    sample    8,192 logits, in lines of 128 bytes from all over the row → the m-th largest of them, a little below
              where the k-th of the row is expected: m = k · f + 4 · sqrt(k · f) + 4, of a sample that is f of the row
    stream    vectors of 16 bytes, VECTORS of them a batch ahead, key >= bound: into the thread's next slot
    select    digits of 11 bits: the bins of 2,048 counters → the bin that the k-th is in → the same for that bin, until
              a bin is to be taken whole. Of equal keys at the k-th place the lowest columns: the same once more, by
              columns. Keys below a floor, of which there are more than k above, are not counted by the first digit
    write     places by counts and sums in a fixed order, so the result has the same bits in each run

    cluster, of bins     local counts │ barrier │ CTA r adds up bins r · 2048 / C … of all, and stores the sums to all │
                         barrier │ every CTA finds the same bin

A bound can be wrong: fewer than k logits are above it, or more than slots; and a row that does not begin at a multiple
of 16 bytes may have a vector more than registers hold. Then the row is read again for every digit (`again`): slow, and
right in any case.

Changed against version 0, whose selects took most of its time, several of them a row: one select a row, from registers,
of little more than k candidates; few long rows by clusters, whose CTAs hold the row, where slices were merged. A
threshold from a sample is that of quickselect (Floyd and Rivest, 1975).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

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
THREADS = 512
WARPS = THREADS // WARP
VECTORS = 4  # of 16 bytes, of a thread and batch of a stream
SLOTS = 20  # candidates of a thread that streams
SAMPLED = 4  # vectors of a thread
LINE = 8  # vectors
BINS = 2048
DIGIT = 11  # bits
OWN_BINS = BINS // THREADS
MOST_K = 2048
HELD = (8, 16, 32)  # logits of a thread
CLUSTERS = (1, 2, 4, 8, 16)
LEAST_SHARE = 4096  # logits, below which a CTA more does not pay for its part in the sums


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on. bits: of a logit. s: rows that share a row of the page table, 0 without one.
    ctas: of a row. held: logits of a thread; 0: rows are streamed."""

    k: int
    bits: int
    s: int
    ctas: int
    held: int

    @property
    def per_vector(self) -> int:
        return 128 // self.bits

    @property
    def resident(self) -> int:
        """CTAs of an SM, at least: registers are limited for them."""
        return 1 if self.ctas > 1 else 2

    @property
    def candidates(self) -> int:
        """Of a thread."""
        return self.held or SLOTS


def shared_storage(geometry: Geometry) -> type:
    """The CTA's shared memory."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.Align[cute.struct.MemRange[kind, size], 16]

    slots = 4 if geometry.held else SLOTS * THREADS
    fields = {
        "sums": array(Int32, WARPS),
        "ends": array(Uint32, WARPS),
        "found": array(Int32, 4),  # of a digit: bin, how many are above it, how many in it
        "shared": array(Uint32, 4),  # floor, whether slots were too few, how many are chosen
        "bins": array(Int32, BINS),
        "added": array(Int32, BINS if geometry.ctas > 1 else 4),  # bins of the cluster
        "keys": array(Uint32, slots),
        "columns": array(Int32, slots),
    }
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


class Memory(NamedTuple):
    """Shared memory, as the storage has it. keys, columns: (slots, threads)."""

    sums: cute.Tensor
    ends: cute.Tensor
    found: cute.Tensor
    shared: cute.Tensor
    bins: cute.Tensor
    added: cute.Tensor
    keys: cute.Tensor
    columns: cute.Tensor


def memory_in(storage: Any, geometry: Geometry) -> Memory:
    slots = 4 if geometry.held else SLOTS * THREADS
    return Memory(
        storage.sums.get_tensor(cute.make_layout(WARPS)),
        storage.ends.get_tensor(cute.make_layout(WARPS)),
        storage.found.get_tensor(cute.make_layout(4)),
        storage.shared.get_tensor(cute.make_layout(4)),
        storage.bins.get_tensor(cute.make_layout(BINS)),
        storage.added.get_tensor(cute.make_layout(BINS if geometry.ctas > 1 else 4)),
        storage.keys.get_tensor(cute.make_layout(slots)),
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


class Digit(NamedTuple):
    """Which keys are counted, and by which of their bits. low: the smallest key of the interval. width: bits of keys
    above `low` that are not known yet. shift: bits behind the digit. least: keys below it are not counted."""

    low: Uint32
    width: Int32
    shift: Int32
    least: Uint32


class Target(NamedTuple):
    """Where indices are written. indices: (rows, k). row: the CTA's. table: (b, pages) of a paged cache, or None."""

    indices: cute.Tensor
    row: Int32
    table: cute.Tensor | None


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
def key_in(words: cute.Tensor, at: Int32, e: cutlass.Constexpr, source: cutlass.Constexpr, bits: cutlass.Constexpr):
    """(key, column) of logit e of a vector of (4,) words; the key is 0 where the logit is out of range."""
    if cutlass.const_expr(bits == 32):
        word = words[e]
    else:
        word = words[e // 2] << 16 if cutlass.const_expr(e % 2 == 0) else words[e // 2] & Int32(-65536)
    column = source.first + at * (128 // bits) + e
    inside = (column >= source.start) & (column < source.end)
    return pick(inside, key_of(Int32(word).bitcast(Float32)), Uint32(0)), column


@cute.jit
def own_vector(i: Int32, source: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr) -> Int32:
    """Which vector of the row is a thread's i-th: blocks of a vector a thread go to the CTAs in turn."""
    return (i * geometry.ctas + source.rank) * THREADS + thread


@cute.jit
def held_column(j: cutlass.Constexpr, source: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr) -> Int32:
    """The column of a thread's j-th logit, of rows that are held."""
    i, e = cutlass.const_expr(j // geometry.per_vector), cutlass.const_expr(j % geometry.per_vector)
    return source.first + own_vector(Int32(i), source, thread, geometry) * geometry.per_vector + e


# ------------------------------------------------------------------------------------------------ device: sums
@cute.jit
def block_sum(value: Int32, memory: cutlass.Constexpr, thread: Int32):
    """(sum of the value over all threads before this one, over all), by all threads. One barrier, behind which `sums`
    is read: another has to lie in front of its next use."""
    lane, warp = thread % WARP, thread // WARP
    upto = value
    for bit in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(upto, offset=1 << bit)
        upto = upto + cutlass.select_(lane >= 1 << bit, other, Int32(0))
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
def meet(geometry: cutlass.Constexpr):
    """A barrier of all CTAs of the row, behind which each sees what the others stored."""
    if cutlass.const_expr(geometry.ctas > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


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
def read_other(address: Int32) -> Int32:
    return cute.arch.inline_ptx(
        "ld.shared::cluster.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )


@cute.jit
def add_up(memory: cutlass.Constexpr, source: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr):
    """The cluster's bins: each CTA adds up a share of all CTAs' bins and stores the sums to all of them."""
    share = cutlass.const_expr(BINS // geometry.ctas // 4)  # in fours
    meet(geometry)
    if thread < share:
        at = (source.rank * share + thread) * 4
        own, sums = address_of(memory.bins, at), [Int32(0)] * 4
        for other in cutlass.range_constexpr(geometry.ctas):
            four = cute.arch.inline_ptx(
                "ld.shared::cluster.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Int32] * 4, read_only_args=[of_other(own, Int32(other))],
            )  # fmt: skip
            sums = [x + y for x, y in zip(sums, four, strict=True)]
        to = address_of(memory.added, at)
        for other in cutlass.range_constexpr(geometry.ctas):
            cute.arch.inline_ptx(
                "st.shared::cluster.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[of_other(to, Int32(other)), *sums],
            )
    meet(geometry)


@cute.jit
def find_bin(
    memory: cutlass.Constexpr, source: cutlass.Constexpr, need: Int32, thread: Int32, alone: cutlass.Constexpr,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """(bin, candidates in bins above it, candidates in it) of the bin that the need-th largest is in; a bin of -1 where
    there are fewer. alone: of this CTA's bins, not the cluster's. Bins are zero afterwards. Barriers in front and
    behind."""
    together = cutlass.const_expr(geometry.ctas > 1 and not alone)
    if thread == 0:
        memory.found[0], memory.found[1], memory.found[2] = Int32(-1), Int32(0), Int32(0)
    if cutlass.const_expr(together):
        add_up(memory, source, thread, geometry)
    else:
        cute.arch.sync_threads()
    bins = memory.added if cutlass.const_expr(together) else memory.bins
    first = BINS - OWN_BINS * (thread + 1)
    counts = [bins[first + OWN_BINS - 1 - i] for i in range(OWN_BINS)]
    for i in cutlass.range_constexpr(OWN_BINS):
        memory.bins[first + i] = Int32(0)
    own = counts[0]
    for i in cutlass.range_constexpr(1, OWN_BINS):
        own = own + counts[i]
    above, _ = block_sum(own, memory, thread)
    for i in cutlass.range_constexpr(OWN_BINS):
        if (above < need) & (need <= above + counts[i]):
            memory.found[0] = first + OWN_BINS - 1 - i
            memory.found[1] = above
            memory.found[2] = counts[i]
        above = above + counts[i]
    cute.arch.sync_threads()
    found = (memory.found[0], memory.found[1], memory.found[2])
    cute.arch.sync_threads()
    return found


@cute.jit
def count_one(memory: cutlass.Constexpr, value: Uint32, low: Uint32, width: Int32, shift: Int32, least: Uint32):
    """Counts a value in the bin of its digit, if it is in the interval and not below the least."""
    apart = value - low
    near = ((apart >> Uint32(cutlass.min(width, 31))) == Uint32(0)) | (width > 31)
    if (value >= least) & near:
        address = address_of(memory.bins, (apart >> Uint32(shift)).bitcast(Int32))
        cute.arch.inline_ptx("red.shared.add.u32 [{$r0}], 1;", read_only_args=[address])


# ------------------------------------------------------------------------------------------------ device: select
@cute.jit
def column_of(
    j: cutlass.Constexpr, memory: cutlass.Constexpr, source: cutlass.Constexpr, thread: Int32,
    geometry: cutlass.Constexpr,
) -> Int32:  # fmt: skip
    """The column of a thread's j-th candidate."""
    if cutlass.const_expr(geometry.held > 0):
        column = held_column(j, source, thread, geometry)
    else:
        column = memory.columns[j * THREADS + thread]
    return column


@cute.jit
def count_all(
    memory: cutlass.Constexpr, keys: cute.Tensor, source: cutlass.Constexpr, again: Boolean, digit: cutlass.Constexpr,
    ties: Int32, tied: Uint32, thread: Int32, geometry: cutlass.Constexpr,
):  # fmt: skip
    """Counts all candidates, or all logits of the row again, in the bins of a digit: of keys, or where ties > 0 of the
    complements of columns of those with the key `tied`."""
    if again:
        words = cute.make_rmem_tensor(cute.make_layout(4), Int32)
        blocks = (source.vectors + THREADS * geometry.ctas - 1) // (THREADS * geometry.ctas)
        for i in cutlass.range(0, blocks, 1, unroll=1):
            at = own_vector(i, source, thread, geometry)
            words.fill(0)
            load_vector(words, source, at)
            for e in cutlass.range_constexpr(geometry.per_vector):
                key, column = key_in(words, at, e, source, geometry.bits)
                value = pick(ties > 0, (~column).bitcast(Uint32), key)
                if (ties == 0) | (key == tied):
                    count_one(memory, value, digit.low, digit.width, digit.shift, digit.least)
    elif ties == 0:
        for j in cutlass.range_constexpr(geometry.candidates):
            count_one(memory, keys[j], digit.low, digit.width, digit.shift, digit.least)
    else:
        for j in cutlass.range_constexpr(geometry.candidates):
            if keys[j] == tied:
                column = column_of(j, memory, source, thread, geometry)
                count_one(memory, (~column).bitcast(Uint32), digit.low, digit.width, digit.shift, Uint32(0))


@cute.jit
def floors(memory: cutlass.Constexpr, floor: Uint32, bad: Boolean, thread: Int32, geometry: cutlass.Constexpr):
    """(the largest floor of all CTAs of the row, whether one of them has too few slots). Barriers."""
    largest, any_bad = floor, Int32(bad)
    if cutlass.const_expr(geometry.ctas > 1):
        if thread == 0:
            memory.shared[0], memory.shared[1] = floor, Int32(bad).bitcast(Uint32)
        meet(geometry)
        for other in cutlass.range_constexpr(geometry.ctas):
            its = read_other(of_other(address_of(memory.shared, Int32(0)), Int32(other))).bitcast(Uint32)
            largest = pick(its > largest, its, largest)
            any_bad = any_bad | read_other(of_other(address_of(memory.shared, Int32(1)), Int32(other)))
    return largest, any_bad > 0


@cute.jit
def kth(
    memory: cutlass.Constexpr, keys: cute.Tensor, source: cutlass.Constexpr, floor: Uint32, bad: Boolean,
    thread: Int32, geometry: cutlass.Constexpr,
):  # fmt: skip
    """(again, low, low column): the k largest of more than k logits are those with a key above `low`, or with that key
    and the complement of their column not below `low column`; again: not all of them are candidates.

    floor: keys of this CTA below it are no candidates, or need not be counted. bad: candidates are missing above it."""
    most_floor, any_bad = floors(memory, floor, bad, thread, geometry)
    again, least = any_bad, floor
    if any_bad:
        least = Uint32(1)
    low, width, need = Uint32(0), Int32(32), Int32(geometry.k)
    ties, tied, searching = Int32(0), Uint32(0), Int32(1)
    while searching > 0:
        shift = cutlass.max(width - DIGIT, 0)
        count_all(memory, keys, source, again, Digit(low, width, shift, least), ties, tied, thread, geometry)
        bin_, above, inside = find_bin(memory, source, need, thread, False, geometry)
        low, width, need = low + (bin_.bitcast(Uint32) << Uint32(shift)), shift, need - above
        sure = low >= most_floor
        if (bin_ < 0) | ((shift == 0) & ~sure):
            # The k-th is, or may be, below a CTA's floor: all that there is, once more from the first digit.
            low, width, need = Uint32(0), Int32(32), Int32(geometry.k)
            least, most_floor = Uint32(1), Uint32(0)
            if cutlass.const_expr(geometry.held == 0):
                again = Boolean(True)
        elif (inside == need) & sure:
            searching = Int32(0)
        elif shift == 0:
            # More equal the k-th than are needed: those of the lowest columns, of the largest complements.
            ties, tied, low, width = Int32(1), low, Uint32(0), Int32(32)
            least, most_floor = Uint32(0), Uint32(0)
    return again, pick(ties > 0, tied, low), pick(ties > 0, low, Uint32(0))


@cute.jit
def chosen(key: Uint32, column: Int32, low: Uint32, low_column: Uint32):
    return (key > low) | ((key == low) & ((~column).bitcast(Uint32) >= low_column))


# ------------------------------------------------------------------------------------------------ device: candidates
@cute.jit
def hold(keys: cute.Tensor, source: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr):
    """Fills a thread's keys with its logits of the row."""
    vectors = cutlass.const_expr(geometry.held // geometry.per_vector)
    words = cute.make_rmem_tensor(cute.make_layout((4, vectors)), Int32)
    words.fill(0)
    for v in cutlass.range_constexpr(vectors):
        load_vector(words[None, v], source, own_vector(Int32(v), source, thread, geometry))
    for v in cutlass.range_constexpr(vectors):
        at = own_vector(Int32(v), source, thread, geometry)
        for e in cutlass.range_constexpr(geometry.per_vector):
            key, _ = key_in(words[None, v], at, e, source, geometry.bits)
            keys[v * geometry.per_vector + e] = key


@cute.jit
def least_of_largest(memory: cutlass.Constexpr, keys: cute.Tensor, thread: Int32, geometry: cutlass.Constexpr):
    """The least of the threads' largest keys, at least 1: as many keys as there are threads are not below it. One
    barrier."""
    lane, warp = thread % WARP, thread // WARP
    largest = keys[0]
    for j in cutlass.range_constexpr(1, geometry.held):
        largest = pick(keys[j] > largest, keys[j], largest)
    least = cute.arch.warp_redux_sync(largest, "min")
    if lane == 0:
        memory.ends[warp] = least
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(WARPS):
        least = pick(memory.ends[i] < least, memory.ends[i], least)
    return pick(least > Uint32(1), least, Uint32(1))


@cute.jit
def bound_of(memory: cutlass.Constexpr, source: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr):
    """A key that about k · (1 + 4 / sqrt(k · f)) logits of the row are not below, by a sample that is f of it; 1 where
    the slots hold the CTA's share of the row anyway."""
    bound = Uint32(1)
    each = cutlass.const_expr(geometry.per_vector)
    if source.vectors > (SLOTS // each) * THREADS * geometry.ctas:
        count = cutlass.const_expr(SAMPLED * each)
        keys = cute.make_rmem_tensor(count, Uint32)
        words = cute.make_rmem_tensor(cute.make_layout((4, SAMPLED)), Int32)
        words.fill(0)
        lines, of_sample = source.vectors // LINE, cutlass.const_expr(SAMPLED * THREADS // LINE * geometry.ctas)
        ats = []
        for v in cutlass.range_constexpr(SAMPLED):
            s = v * THREADS + thread
            line = ((s // LINE) * geometry.ctas + source.rank).to(Int64) * lines.to(Int64) // of_sample
            ats.append(line.to(Int32) * LINE + s % LINE)
            load_vector(words[None, v], source, ats[v])
        for v in cutlass.range_constexpr(SAMPLED):
            for e in cutlass.range_constexpr(each):
                key, _ = key_in(words[None, v], ats[v], e, source, geometry.bits)
                keys[v * each + e] = key
        expected = Float32(geometry.k * SAMPLED * THREADS) / Float32(source.vectors)
        need = Int32(expected + 4.0 * cute.math.sqrt(expected)) + 4
        enough, low, width, searching = need // 4, Uint32(0), Int32(32), Int32(1)
        while searching > 0:
            shift = cutlass.max(width - DIGIT, 0)
            for j in cutlass.range_constexpr(count):
                count_one(memory, keys[j], low, width, shift, Uint32(1))
            bin_, above, inside = find_bin(memory, source, need, thread, True, geometry)
            need = need - above
            low, width = low + (cutlass.max(bin_, 0).bitcast(Uint32) << Uint32(shift)), shift
            if (inside <= enough) | (shift == 0) | (bin_ < 0):
                searching = Int32(0)
        bound = pick(low > Uint32(1), low, Uint32(1))
    return bound


@cute.jit
def stream(
    memory: cutlass.Constexpr, keys: cute.Tensor, source: cutlass.Constexpr, bound: Uint32, thread: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """Fills a thread's keys with those of its logits that are not below the bound, and its slots with their columns;
    gives whether a thread of the CTA has more of them than slots. One barrier."""
    words, ahead = [cute.make_rmem_tensor(cute.make_layout((4, VECTORS)), Int32) for _ in range(2)]
    words.fill(0)
    ahead.fill(0)
    blocks = (source.vectors + THREADS * geometry.ctas - 1) // (THREADS * geometry.ctas)
    for v in cutlass.range_constexpr(VECTORS):
        load_vector(words[None, v], source, own_vector(Int32(v), source, thread, geometry))
    count = Int32(0)
    for i in cutlass.range(0, blocks, VECTORS, unroll=1):
        for v in cutlass.range_constexpr(VECTORS):
            load_vector(ahead[None, v], source, own_vector(i + VECTORS + v, source, thread, geometry))
        for v in cutlass.range_constexpr(VECTORS):
            at = own_vector(i + v, source, thread, geometry)
            for e in cutlass.range_constexpr(geometry.per_vector):
                key, column = key_in(words[None, v], at, e, source, geometry.bits)
                if key >= bound:
                    if count < SLOTS:
                        memory.keys[count * THREADS + thread] = key
                        memory.columns[count * THREADS + thread] = column
                    count = count + 1
        cute.autovec_copy(ahead, words)
    for j in cutlass.range_constexpr(SLOTS):
        keys[j] = Uint32(0)
        if j < count:
            keys[j] = memory.keys[j * THREADS + thread]
    return named_any(0, THREADS, count > SLOTS)


# ------------------------------------------------------------------------------------------------ device: the kernel
@cute.jit
def index_of(column: Int32, table: cute.Tensor | None, row: Int32, geometry: cutlass.Constexpr) -> Int32:
    """What is written for a column: itself, or with a page table its slot of the cache."""
    index = column
    if cutlass.const_expr(table is not None):
        index = table[row // geometry.s, column // PAGE] * PAGE + column % PAGE
    return index


@cute.jit
def write(
    memory: cutlass.Constexpr, keys: cute.Tensor, source: cutlass.Constexpr, again: Boolean, low: Uint32,
    low_column: Uint32, target: cutlass.Constexpr, thread: Int32, geometry: cutlass.Constexpr,
):  # fmt: skip
    """Writes the indices of what is chosen: a CTA's behind those of the CTAs in front of it. They are put in order in
    the memory of the bins."""
    count = Int32(0)
    blocks = (source.vectors + THREADS * geometry.ctas - 1) // (THREADS * geometry.ctas)
    words = cute.make_rmem_tensor(cute.make_layout(4), Int32)
    if again:
        for i in cutlass.range(0, blocks, 1, unroll=1):
            at = own_vector(i, source, thread, geometry)
            words.fill(0)
            load_vector(words, source, at)
            for e in cutlass.range_constexpr(geometry.per_vector):
                key, column = key_in(words, at, e, source, geometry.bits)
                count = count + Int32(chosen(key, column, low, low_column))
    else:
        for j in cutlass.range_constexpr(geometry.candidates):
            if keys[j] >= low:
                column = column_of(j, memory, source, thread, geometry)
                count = count + Int32(chosen(keys[j], column, low, low_column))
    place, total = block_sum(count, memory, thread)
    base = Int32(0)
    if cutlass.const_expr(geometry.ctas > 1):
        if thread == 0:
            memory.shared[2] = total.bitcast(Uint32)
        meet(geometry)
        for other in cutlass.range_constexpr(geometry.ctas):
            its = read_other(of_other(address_of(memory.shared, Int32(2)), Int32(other)))
            base = base + cutlass.select_(source.rank > other, its, Int32(0))
    if again:
        for i in cutlass.range(0, blocks, 1, unroll=1):
            at = own_vector(i, source, thread, geometry)
            words.fill(0)
            load_vector(words, source, at)
            for e in cutlass.range_constexpr(geometry.per_vector):
                key, column = key_in(words, at, e, source, geometry.bits)
                if chosen(key, column, low, low_column):
                    memory.bins[place] = column
                    place = place + 1
    else:
        for j in cutlass.range_constexpr(geometry.candidates):
            if keys[j] >= low:
                column = column_of(j, memory, source, thread, geometry)
                if chosen(keys[j], column, low, low_column):
                    memory.bins[place] = column
                    place = place + 1
    cute.arch.sync_threads()
    for i in cutlass.range(thread, total, THREADS, unroll=1):
        target.indices[target.row, base + i] = index_of(memory.bins[i], target.table, target.row, geometry)
    if cutlass.const_expr(geometry.ctas > 1):
        meet(geometry)  # a CTA's shared memory is there until the others have read its count


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
    for i in cutlass.range_constexpr(OWN_BINS):
        memory.bins[i * THREADS + thread] = Int32(0)
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    end = cutlass.min(ends[row], logits.shape[1])
    start = Int32(0)
    if cutlass.const_expr(starts is not None):
        start = cutlass.max(starts[row], 0)
    count = cutlass.max(end - start, 0)
    if count <= geometry.k:
        for i in cutlass.range(rank * THREADS + thread, geometry.k, THREADS * geometry.ctas, unroll=1):
            index = Int32(-1)
            if i < count:
                index = index_of(start + i, table, row, geometry)
            indices[row, i] = index
    else:
        size = cutlass.const_expr(geometry.bits // 8)
        address = logits.iterator.toint() + (Int64(row) * logits.stride[0] + start) * size
        skew = Int32(address % 16) // size
        vectors = (skew + count + geometry.per_vector - 1) // geometry.per_vector
        source = Source(address - skew * size, start - skew, start, end, vectors, rank)
        keys = cute.make_rmem_tensor(geometry.candidates, Uint32)
        if cutlass.const_expr(geometry.held > 0):
            hold(keys, source, thread, geometry)
            floor = least_of_largest(memory, keys, thread, geometry)
            bad = vectors > geometry.held // geometry.per_vector * THREADS * geometry.ctas
        else:
            floor = bound_of(memory, source, thread, geometry)
            bad = stream(memory, keys, source, floor, thread, geometry)
        again, low, low_column = kth(memory, keys, source, floor, bad, thread, geometry)
        write(memory, keys, source, again, low, low_column, Target(indices, row, table), thread, geometry)


topk.set_name_prefix("topk_v1", remove_cutlass_symbol=True, keep_mangled_name=False)


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
        block=(THREADS, 1, 1),
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
    that registers hold are held there."""

    ctas: int = 0
    held: bool = True

    def validate(self, pd: TopkProblem, device: Device | None = None) -> Verdict:
        if self.ctas not in (0, *CLUSTERS):
            return Verdict.no(f"ctas = {self.ctas} must be 0 or one of {', '.join(map(str, CLUSTERS))}")
        return takes(pd)

    def ctas_of(self, rows: int, t: int, sms: int) -> int:
        """How many CTAs take a row of up to t logits."""
        if self.ctas:
            return self.ctas
        most = min(sms // max(rows, 1), -(-t // LEAST_SHARE))
        return max(x for x in CLUSTERS if x <= max(most, 1))

    def held_of(self, t: int, ctas: int) -> int:
        """How many logits of rows of up to t a thread holds; 0: they are streamed."""
        return next((x for x in HELD if self.held and t <= x * THREADS * ctas), 0)


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
        return [TopkTiling(), *(TopkTiling(x) for x in CLUSTERS), TopkTiling(1, held=False), TopkTiling(8, held=False)]

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
        ctas = self.tiling.ctas_of(rows, t, host.target(self).num_sms)
        bits = 32 if pd.dtype == "fp32" else 16
        geometry = Geometry(pd.topk, bits, pd.s if pd.table else 0, ctas, self.tiling.held_of(t, ctas))
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

        name = f"topk_v1_{ctas}_{geometry.held}"
        return host.stage(self, topk, launch_topk, name, arguments, given, inputs, outputs)
