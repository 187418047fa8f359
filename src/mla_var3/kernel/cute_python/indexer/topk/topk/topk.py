r"""topk v0 in CuTe for sm_90: the k largest logits of rows, exactly; a row is read once, and may be several CTAs'.

A CTA reads a slice of a row from left to right and holds candidates in shared memory: up to k that it kept, and behind
them a region of each warp's own, into which the warp puts what is not below the CTA's threshold.

    batch         512 threads · 2 vectors of 16 bytes, loaded a batch ahead
                  logit → key: whole numbers in the order of the logits (-0 as +0, NaN as -inf)
                  key >= threshold: into the warp's region, in the order of the columns
    select        when a region would overflow, and at the end: the k largest of all candidates stay, and the threshold
                  becomes the k-th plus one: what comes later and equals it lies in a higher column, and loses

The threshold rises quickly: of a row in random order only about k · ln(t / k) logits are ever candidates. In the worst
order, ascending, all are candidates, and `select` runs every 8,192 logits.

    select   radix select with digits of 11 bits, of what keys differ in: from the interval [least, largest] of the
             candidates, 2,048 bins of equal width → the bin that the k-th is in → the same for that bin, until a bin is
             to be taken whole. Of equal keys at the k-th place the lowest columns: the same once more, by columns.
             A candidate's place among the kept follows from counts and sums in a fixed order, so the result has the
             same bits in each run.

Where rows are few, several CTAs take slices of a row. Each writes its candidates, key and column, to a workspace; the
one that finishes last goes through those of all slices as through a row (`merge`). Slices are cut on the device, from
the row's range. Lengths are read there too.

The base version. The running threshold is the heap of a streaming selection; radix digits of a range, not of the
number, are new here: floating-point numbers that lie close together share their first digits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
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
VECTORS = 2  # of 16 bytes, of a thread and batch
REGION = 512  # candidates of a warp behind those that are kept: more than a batch of bf16 can add
BINS = 2048
DIGIT = 11  # bits
OWN_BINS = BINS // THREADS
MOST_K = 2048
LEAST_SLICE = 8192  # logits, below which a CTA more does not pay for its merge
MOST_SLICES = 64


# ------------------------------------------------------------------------------------------------ what code is made for
@dataclass(frozen=True)
class Geometry:
    """What the code is specialised on. bits: of a logit. s: rows that share a row of the page table, 0 without one.
    sliced: whether rows are several CTAs'."""

    k: int
    bits: int
    s: int
    sliced: bool

    @property
    def per_vector(self) -> int:
        return 128 // self.bits

    @property
    def batch(self) -> int:
        """Logits."""
        return THREADS * VECTORS * self.per_vector

    @property
    def held(self) -> int:
        """Kept candidates of a thread, at most."""
        return -(-self.k // THREADS)


def shared_storage(geometry: Geometry) -> type:
    """The CTA's shared memory."""

    def array(kind: type, size: int) -> Any:
        return cute.struct.MemRange[kind, size]

    candidates = geometry.held * THREADS + WARPS * REGION
    fields = {
        "sums": array(Int32, WARPS),
        "ends": array(Uint32, 2 * WARPS),  # the least and the largest key of each warp
        "found": array(Int32, 4),  # of a digit: bin, how many are above it, how many in it
        "bins": cute.struct.Align[array(Int32, BINS), 16],
        "keys": cute.struct.Align[array(Uint32, candidates), 16],
        "columns": cute.struct.Align[array(Int32, candidates), 16],
    }
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


class Memory(NamedTuple):
    """Shared memory, as the storage has it. keys, columns: kept candidates first, then those of each warp."""

    sums: cute.Tensor
    ends: cute.Tensor
    found: cute.Tensor
    bins: cute.Tensor
    keys: cute.Tensor
    columns: cute.Tensor


def memory_in(storage: Any, geometry: Geometry) -> Memory:
    candidates = geometry.held * THREADS + WARPS * REGION
    return Memory(
        storage.sums.get_tensor(cute.make_layout(WARPS)),
        storage.ends.get_tensor(cute.make_layout(2 * WARPS)),
        storage.found.get_tensor(cute.make_layout(4)),
        storage.bins.get_tensor(cute.make_layout(BINS)),
        storage.keys.get_tensor(cute.make_layout(candidates)),
        storage.columns.get_tensor(cute.make_layout(candidates)),
    )


# ------------------------------------------------------------------------------------------------ device: keys
def pick(holds: Any, one: Uint32, other: Uint32) -> Uint32:
    """`select_` of unsigned numbers, which it makes signed."""
    return Uint32(cutlass.select_(holds, one, other))


@cute.jit
def key_of(value: Float32) -> Uint32:
    """A number in the order of the values: -0 is +0, and NaN -inf."""
    bits = (cute.arch.fmax(value, Float32(-math.inf)) + Float32(0.0)).bitcast(Int32)
    return (bits ^ ((bits >> 31) | Int32(-(1 << 31)))).bitcast(Uint32)


@cute.jit
def load_vectors(target: cute.Tensor, base: Int64, first: Int32, end: Int32):
    """Starts loading a thread's vectors, (4 words, vectors). base: address of vector 0; first: the thread's first
    vector; those from `end` on are not read."""
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(), Int32, num_bits_per_copy=128,
        l1c_evict_priority=cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE,
    )  # fmt: skip
    for v in cutlass.range_constexpr(VECTORS):
        at = first + v * THREADS
        if at < end:
            source = cute.make_ptr(Int32, base + Int64(at) * 16, cute.AddressSpace.gmem, assumed_align=16)
            cute.copy(atom, cute.make_tensor(source, cute.make_layout(4)), target[None, v])


@cute.jit
def logit_of(words: cute.Tensor, v: cutlass.Constexpr, e: cutlass.Constexpr, geometry: cutlass.Constexpr) -> Float32:
    """Logit e of vector v."""
    if cutlass.const_expr(geometry.bits == 32):
        bits = words[e, v]
    else:
        bits = words[e // 2, v] << 16 if cutlass.const_expr(e % 2 == 0) else words[e // 2, v] & Int32(-65536)
    return Int32(bits).bitcast(Float32)


# ------------------------------------------------------------------------------------------------ device: select
@cute.jit
def sum_before(value: Int32, thread: Int32, lane: Int32) -> Int32:
    """The sum of a value over the lanes of a warp up to this one."""
    upto = value
    for bit in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(upto, offset=1 << bit)
        upto = upto + cutlass.select_(lane >= 1 << bit, other, Int32(0))
    return upto


@cute.jit
def block_sum(value: Int32, memory: cutlass.Constexpr, thread: Int32):
    """(sum of the value over all threads before this one, over all), by all threads. One barrier, behind which `sums`
    is read: another has to lie in front of its next use."""
    lane, warp = thread % WARP, thread // WARP
    upto = sum_before(value, thread, lane)
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
def count_one(
    memory: cutlass.Constexpr, at: Int32, low: Uint32, width: Int32, shift: Int32, ties: Int32, tied: Uint32
):  # fmt: skip
    """Counts a candidate in the bin of its digit, if it is in the interval."""
    key = memory.keys[at]
    value = pick(ties > 0, (~memory.columns[at]).bitcast(Uint32), key)
    apart = value - low
    near = (apart >> Uint32(cutlass.min(width, 31))) == Uint32(0)
    inside = (value >= low) & (near | (width > 31)) & ((ties == 0) | (key == tied))
    if inside:
        digit = (apart >> Uint32(shift)).bitcast(Int32)
        address = (memory.bins.iterator + digit).toint()
        cute.arch.inline_ptx("red.shared.add.u32 [{$r0}], 1;", read_only_args=[address])


@cute.jit
def find_bin(memory: cutlass.Constexpr, need: Int32, thread: Int32):
    """(bin, candidates in bins above it, candidates in it) of the bin that the need-th largest is in. Bins are zero
    afterwards. Three barriers, the first in front of it all."""
    cute.arch.sync_threads()
    first = BINS - OWN_BINS * (thread + 1)
    counts = [memory.bins[first + OWN_BINS - 1 - i] for i in range(OWN_BINS)]
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
    return memory.found[0], memory.found[1], memory.found[2]


@cute.jit
def least_and_largest(
    memory: cutlass.Constexpr, kept: Int32, own: Int32, thread: Int32, geometry: cutlass.Constexpr
):  # fmt: skip
    """Of all candidates' keys. One barrier, behind which `ends` is read."""
    lane, warp = thread % WARP, thread // WARP
    least, largest = Uint32(0xFFFFFFFF), Uint32(0)
    for i in cutlass.range_constexpr(geometry.held):
        if i * THREADS + thread < kept:
            key = memory.keys[i * THREADS + thread]
            least, largest = pick(key < least, key, least), pick(key > largest, key, largest)
    region = geometry.held * THREADS + warp * REGION
    for i in cutlass.range(lane, own, WARP, unroll=1):
        key = memory.keys[region + i]
        least, largest = pick(key < least, key, least), pick(key > largest, key, largest)
    least = cute.arch.warp_redux_sync(least, "min")
    largest = cute.arch.warp_redux_sync(largest, "max")
    if lane == 0:
        memory.ends[warp], memory.ends[WARPS + warp] = least, largest
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(WARPS):
        low, high = memory.ends[i], memory.ends[WARPS + i]
        least, largest = pick(low < least, low, least), pick(high > largest, high, largest)
    return least, largest


@cute.jit
def bound_of(memory: cutlass.Constexpr, kept: Int32, own: Int32, thread: Int32, geometry: cutlass.Constexpr):
    """(low, low column): the k largest of more than k candidates are those with a key above `low`, or with that key and
    the complement of their column not below `low column`."""
    lane, warp = thread % WARP, thread // WARP
    region = geometry.held * THREADS + warp * REGION
    low, largest = least_and_largest(memory, kept, own, thread, geometry)
    width = 32 - leading_zeros(largest - low)
    need, ties, tied, searching = Int32(geometry.k), Int32(0), Uint32(0), Int32(1)
    while searching > 0:
        shift = cutlass.max(width - DIGIT, 0)
        for i in cutlass.range_constexpr(geometry.held):
            if i * THREADS + thread < kept:
                count_one(memory, i * THREADS + thread, low, width, shift, ties, tied)
        for i in cutlass.range(lane, own, WARP, unroll=1):
            count_one(memory, region + i, low, width, shift, ties, tied)
        bin_, above, inside = find_bin(memory, need, thread)
        need = need - above
        low = low + (bin_.bitcast(Uint32) << Uint32(shift))
        width = shift
        if inside == need:
            searching = Int32(0)
        elif shift == 0:
            # More candidates equal the k-th than are needed: those of the lowest columns, of the largest complements.
            ties, tied, low, width = Int32(1), low, Uint32(0), Int32(32)
    return pick(ties > 0, tied, low), pick(ties > 0, low, Uint32(0))


@cute.jit
def leading_zeros(value: Uint32) -> Int32:
    return cute.arch.inline_ptx("clz.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


@cute.jit
def chosen(key: Uint32, column: Int32, low: Uint32, low_column: Uint32):
    return (key > low) | ((key == low) & ((~column).bitcast(Uint32) >= low_column))


@cute.jit
def select(memory: cutlass.Constexpr, kept: Int32, own: Int32, thread: Int32, geometry: cutlass.Constexpr):
    """Keeps the k largest candidates, or all where these are fewer; by all threads, behind a barrier. kept: how many
    are kept already; own: how many are in this warp's region, which is empty afterwards. Gives (how many are kept, the
    key of the k-th or one below it and above that of the next; 0 where all are kept)."""
    lane, warp = thread % WARP, thread // WARP
    region = geometry.held * THREADS + warp * REGION
    _, total = block_sum(cutlass.select_(lane == 0, own, Int32(0)), memory, thread)
    cute.arch.sync_threads()
    low, low_column = Uint32(0), Uint32(0)
    if total + kept > geometry.k:
        low, low_column = bound_of(memory, kept, own, thread, geometry)
    keys, columns = [cute.make_rmem_tensor(geometry.held, kind) for kind in (Uint32, Int32)]
    stays = cute.make_rmem_tensor(geometry.held, Int32)
    count = Int32(0)
    for i in cutlass.range_constexpr(geometry.held):
        at = i * THREADS + thread
        stays[i] = Int32(0)
        if at < kept:
            keys[i], columns[i] = memory.keys[at], memory.columns[at]
            stays[i] = Int32(chosen(keys[i], columns[i], low, low_column))
        count = count + stays[i]
    for i in cutlass.range(lane, own, WARP, unroll=1):
        count = count + Int32(chosen(memory.keys[region + i], memory.columns[region + i], low, low_column))
    place, stay = block_sum(count, memory, thread)
    # All have read what they kept.
    for i in cutlass.range_constexpr(geometry.held):
        if stays[i] > 0:
            memory.keys[place], memory.columns[place] = keys[i], columns[i]
        place = place + stays[i]
    for i in cutlass.range(lane, own, WARP, unroll=1):
        key, column = memory.keys[region + i], memory.columns[region + i]
        if chosen(key, column, low, low_column):
            memory.keys[place], memory.columns[place] = key, column
            place = place + 1
    cute.arch.sync_threads()
    return stay, low


# ------------------------------------------------------------------------------------------------ device: stream
class Source(NamedTuple):
    """What candidates come from. base: address of vector 0, of logits, or of keys of a workspace. columns: address of
    the same of a workspace's columns. first: column of the first logit of vector 0. start, end: columns in range.
    vectors: how many there are."""

    base: Int64
    columns: Int64
    first: Int32
    start: Int32
    end: Int32
    vectors: Int32


@cute.jit
def wanted(
    keys: cute.Tensor, columns: cute.Tensor, words: cute.Tensor, others: cute.Tensor, source: cutlass.Constexpr,
    vector: Int32, threshold: Uint32, merging: cutlass.Constexpr, geometry: cutlass.Constexpr,
):  # fmt: skip
    """Fills a thread's keys and columns of a batch; gives a bit for each that is a candidate."""
    each = cutlass.const_expr(4 if merging else geometry.per_vector)
    bits = Int32(0)
    for v in cutlass.range_constexpr(VECTORS):
        at = vector + v * THREADS
        for e in cutlass.range_constexpr(each):
            j = v * each + e
            if cutlass.const_expr(merging):
                keys[j], columns[j] = words[e, v].bitcast(Uint32), others[e, v]
                inside = (at < source.vectors) & (columns[j] >= 0)
            else:
                keys[j] = key_of(logit_of(words, v, e, geometry))
                columns[j] = source.first + at * each + e
                inside = (columns[j] >= source.start) & (columns[j] < source.end)
            bits = bits | (Int32(inside & (keys[j] >= threshold)) << j)
    return bits


@cute.jit
def stream(
    memory: cutlass.Constexpr, source: cutlass.Constexpr, thread: Int32, merging: cutlass.Constexpr,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """Goes through a source; gives how many candidates are kept in the end, k or all."""
    lane, warp = thread % WARP, thread // WARP
    region = geometry.held * THREADS + warp * REGION
    each = cutlass.const_expr(4 if merging else geometry.per_vector)
    keys, columns = [cute.make_rmem_tensor(VECTORS * each, kind) for kind in (Uint32, Int32)]
    layout = cute.make_layout((4, VECTORS))
    words, next_words = [cute.make_rmem_tensor(layout, Int32) for _ in range(2)]
    others, next_others = [cute.make_rmem_tensor(layout, Int32) for _ in range(2)]
    for x in (words, next_words, others, next_others):
        x.fill(0)
    kept, own, threshold = Int32(0), Int32(0), Uint32(0)
    load_vectors(words, source.base, thread, source.vectors)
    if cutlass.const_expr(merging):
        load_vectors(others, source.columns, thread, source.vectors)
    for first in cutlass.range(0, source.vectors, THREADS * VECTORS, unroll=1):
        vector = first + thread
        load_vectors(next_words, source.base, vector + THREADS * VECTORS, source.vectors)
        if cutlass.const_expr(merging):
            load_vectors(next_others, source.columns, vector + THREADS * VECTORS, source.vectors)
        bits = wanted(keys, columns, words, others, source, vector, threshold, merging, geometry)
        upto = sum_before(Int32(cute.arch.popc(bits)), thread, lane)
        added = cute.arch.shuffle_sync(upto, WARP - 1)
        if named_any(0, THREADS, own + added > REGION):
            kept, low = select(memory, kept, own, thread, geometry)
            own = Int32(0)
            # What comes later and equals the k-th lies in a higher column; but not among other slices' candidates.
            threshold = low if cutlass.const_expr(merging) else low + Uint32(1)
            if kept < geometry.k:
                threshold = Uint32(0)
            bits = wanted(keys, columns, words, others, source, vector, threshold, merging, geometry)
            upto = sum_before(Int32(cute.arch.popc(bits)), thread, lane)
            added = cute.arch.shuffle_sync(upto, WARP - 1)
        if added > 0:
            place = region + own + upto - Int32(cute.arch.popc(bits))
            for j in cutlass.range_constexpr(VECTORS * each):
                if (bits >> j) & 1 > 0:
                    memory.keys[place], memory.columns[place] = keys[j], columns[j]
                    place = place + 1
        own = own + added
        cute.autovec_copy(next_words, words)
        if cutlass.const_expr(merging):
            cute.autovec_copy(next_others, others)
    cute.arch.sync_threads()
    kept, _ = select(memory, kept, own, thread, geometry)
    return kept


# ------------------------------------------------------------------------------------------------ device: the kernel
class Workspace(NamedTuple):
    """keys, columns: (rows, slices, held · threads) of candidates, column -1 where there is none. flags: (rows,), 0 in
    front of a launch and behind it: how many slices of the row are done."""

    keys: cute.Tensor
    columns: cute.Tensor
    flags: cute.Tensor


@cute.jit
def write(
    memory: cutlass.Constexpr, kept: Int32, table: cute.Tensor | None, indices: cute.Tensor, row: Int32, thread: Int32,
    geometry: cutlass.Constexpr,
):  # fmt: skip
    """A row's indices: columns, or with a page table slots of the cache; -1 behind them."""
    for i in cutlass.range_constexpr(geometry.held):
        place = i * THREADS + thread
        if place < geometry.k:
            index = Int32(-1)
            if place < kept:
                index = memory.columns[place]
                if cutlass.const_expr(table is not None):
                    index = table[row // geometry.s, index // PAGE] * PAGE + index % PAGE
            indices[row, place] = index


@cute.kernel
def topk(
    logits: cute.Tensor,  # (rows, t) fp32 or bf16, rows apart, global memory
    starts: cute.Tensor | None,  # (rows,)
    ends: cute.Tensor,  # (rows,)
    table: cute.Tensor | None,  # (b, width), rows apart
    indices: cute.Tensor,  # (rows, k)
    workspace: Workspace | None,
    slices: Int32,  # of a row
    geometry: cutlass.Constexpr,
):
    """The CTA of a slice of a row."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    storage = SmemAllocator().allocate(shared_storage(geometry))
    memory = memory_in(storage, geometry)
    row, slice_ = block // slices, block % slices
    for i in cutlass.range_constexpr(OWN_BINS):
        memory.bins[i * THREADS + thread] = Int32(0)
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    end = cutlass.min(ends[row], logits.shape[1])
    start = Int32(0)
    if cutlass.const_expr(starts is not None):
        start = cutlass.max(starts[row], 0)
    if cutlass.const_expr(geometry.sliced):
        share = (cutlass.max(end - start, 0) + slices - 1) // slices
        share = cutlass.max((share + 7) // 8 * 8, LEAST_SLICE // 2)
        start = start + slice_ * share
        end = cutlass.min(end, start + share)
    size = geometry.bits // 8
    address = logits.iterator.toint() + (Int64(row) * logits.stride[0] + start) * size
    skew = Int32(address % 16) // size
    vectors = (skew + cutlass.max(end - start, 0) + geometry.per_vector - 1) // geometry.per_vector
    vectors = cutlass.select_(end > start, vectors, Int32(0))
    source = Source(address - skew * size, Int64(0), start - skew, start, end, vectors)
    kept = stream(memory, source, thread, False, geometry)
    finishes = Int32(1)
    if cutlass.const_expr(geometry.sliced):
        room = geometry.held * THREADS
        at = Int64(block) * room
        for i in cutlass.range_constexpr(geometry.held):
            place = i * THREADS + thread
            workspace.keys[at + place] = memory.keys[place]
            workspace.columns[at + place] = cutlass.select_(place < kept, memory.columns[place], Int32(-1))
        cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_threads()
        if thread == 0:
            flag = (workspace.flags.iterator + row).toint()
            done = cute.arch.inline_ptx(
                "atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[flag]
            )
            memory.found[3] = Int32(done == slices - 1)
            if done == slices - 1:
                workspace.flags[row] = Int32(0)
        cute.arch.sync_threads()
        finishes = memory.found[3]
        if finishes > 0:
            cute.arch.fence_acq_rel_gpu()
            at = Int64(row) * slices * room * 4
            source = Source(
                workspace.keys.iterator.toint() + at, workspace.columns.iterator.toint() + at, Int32(0), Int32(0),
                Int32(0), slices * (room // 4),
            )  # fmt: skip
            kept = stream(memory, source, thread, True, geometry)
    if finishes > 0:
        write(memory, kept, table, indices, row, thread, geometry)


topk.set_name_prefix("topk", remove_cutlass_symbol=True, keep_mangled_name=False)


# ------------------------------------------------------------------------------------------------ host
@cute.jit
def launch_topk(
    logits: cute.Tensor,
    starts: cute.Tensor | None,
    ends: cute.Tensor,  # (rows,) or (b, s) int32, contiguous
    table: cute.Tensor | None,
    indices: cute.Tensor,
    keys: cute.Tensor | None,  # int32: of the workspace
    columns: cute.Tensor | None,
    flags: cute.Tensor | None,
    slices: Int32,
    geometry: cutlass.Constexpr,
    stream_: CUstream,
):
    """Launches a CTA for every slice of every row, as a programmatic dependent."""
    rows = logits.shape[0]
    flat = cute.make_tensor(ends.iterator, cute.make_layout((rows,)))
    workspace = None
    if cutlass.const_expr(keys is not None):
        words = cute.make_tensor(cute.recast_ptr(keys.iterator, dtype=Uint32), keys.layout)
        workspace = Workspace(words, columns, flags)
    topk(logits, starts, flat, table, indices, workspace, slices, geometry).launch(
        grid=(rows * slices, 1, 1), block=(THREADS, 1, 1), stream=stream_, use_pdl=True
    )


# ------------------------------------------------------------------------------------------------ plan
def takes(pd: TopkProblem) -> Verdict:
    if pd.topk > MOST_K:
        return Verdict.no(f"topk = {pd.topk}: at most {MOST_K:,} are chosen")
    return limits.all_of(
        limits.offsets(pd.rows * MOST_SLICES, f"CTAs of {pd.rows:,} rows"),
        limits.offsets(pd.rows * pd.topk, f"indices of {pd.rows:,} rows"),
    )


@dataclass(frozen=True)
class TopkTiling(Tiling):
    """slices: CTAs of a row; 0: as many as fill the device with rows of the problem's length."""

    slices: int = 0

    def validate(self, pd: TopkProblem, device: Device | None = None) -> Verdict:
        if not 0 <= self.slices <= MOST_SLICES:
            return Verdict.no(f"slices = {self.slices} must be 0 to {MOST_SLICES}")
        return takes(pd)

    def slices_of(self, rows: int, t: int, sms: int) -> int:
        """How many CTAs take a row of up to t logits."""
        if self.slices:
            return self.slices
        return max(1, min(sms // max(rows, 1), -(-t // LEAST_SLICE), MOST_SLICES))


class TopkPlan(KernelPlan):
    """Inputs and output (indices,) of `workload.topk`. One compiled kernel a problem class, and one where rows are cut;
    sizes, lengths and strides are arguments."""

    workload = workload.WORKLOAD
    tiling_type = TopkTiling
    tiling: TopkTiling
    requires = Requirement(archs=("sm_90a",), dtypes=("fp32", "bf16"), problem=takes)

    def default_tiling(self) -> TopkTiling:
        return TopkTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [TopkTiling(slices) for slices in (0, 1, 4, 8, 16, 32, 64)]

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
        slices = self.tiling.slices_of(rows, t, host.target(self).num_sms)
        geometry = Geometry(pd.topk, 32 if pd.dtype == "fp32" else 16, pd.s if pd.table else 0, slices > 1)
        given: tuple[Any, ...] = ()
        spaces: tuple[Any, ...] = ()
        if inputs:
            if pd.table:
                logits, ends, table = inputs
                starts = None
            else:
                (logits, starts, ends), table = inputs, None
            if slices > 1:
                candidates = [ends.new_empty(rows * slices * geometry.held * THREADS) for _ in range(2)]
                spaces = (*candidates, ends.new_zeros(rows))
            given = (logits, starts, ends, table, outputs[0], *(spaces or (None, None, None)), slices)

        def arguments() -> tuple[Any, ...]:
            n, t_, b, width, words = host.symbols(5)
            kind = Float32 if pd.dtype == "fp32" else BFloat16
            rows_apart = make_fake_tensor(kind, (n, t_), (cute.sym_int64(), 1), assumed_align=kind.width // 8)
            starts = None if pd.table else host.fake(Int32, n, align=4)
            ends = host.fake(Int32, b, pd.s, align=4) if pd.table else host.fake(Int32, n, align=4)
            table = make_fake_tensor(Int32, (b, width), (cute.sym_int64(), 1), assumed_align=4) if pd.table else None
            space = [host.fake(Int32, words), host.fake(Int32, words), host.fake(Int32, n, align=4)]
            spaces = space if geometry.sliced else [None] * 3
            return rows_apart, starts, ends, table, host.fake(Int32, n, pd.topk, align=4), *spaces, Int32(1), geometry

        name = "topk_sliced" if geometry.sliced else "topk"
        return host.stage(self, topk, launch_topk, name, arguments, given, inputs, outputs, spaces)
