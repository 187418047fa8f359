"""The combine of split-KV: out = Σ wᵢ Xᵢ / Σ (wᵢ sᵢ + wᵢ' sᵢ') with w = 2^(A - max), ' the other half's.

X, A and s are the partials and their statistics (`partials`). A warp sums a query row over all of its splits, or, where
there are many, over every n-th of them; then the warps of a row merge through shared memory, and each thread writes
pairs of columns. The order of every sum follows from how many splits a request has.

The attention kernel writes one word that says which kind of splits the batch has. Shares (`scheduler`) follow from the
lengths. The first partials are loaded together with that word, as if all lengths filled the page table; if they do not,
that is done again. Splits on an even line, or of a length that the caller fixes, are listed in the splits table
(`Schedule.table`): how many each request has, and the slot of the first. The kernel is a programmatic dependent of the
attention kernel, and the next kernel may be one of it.

Where no combine is launched, the workers of a request of many splits merge these themselves, a share of the rows each
and all at once (`merge_rows`), as a reduce-scatter does.

A row takes few instructions, and the kernel few lines of code. With 64 vectors of 16 bytes in a row and two splits, a
combine is bound by the instructions that it issues, and the first thing that it waits for is its own code, which comes
from L2 or memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from mla_var3.kernel.cute_python.prims.softmax import NO_KEY, exp2, natural_lse
from mla_var3.kernel.cute_python.prims.sync import (
    grid_wait,
    has_dependents,
    launch_dependents,
    named_sync,
    wait_for_launch,
)
from mla_var3.kernel.cute_python.split_kv.partials import QUAD, STATS, VECTOR, Partials, Results, transpose_quad
from mla_var3.kernel.cute_python.split_kv.rows import Queries, row_offset
from mla_var3.kernel.cute_python.split_kv.scheduler import (
    MOST_WORKERS,
    TREE_SPLITS,
    Costs,
    Line,
    Pool,
    SplitIndex,
    in_shares,
    kv_tiles_of,
    slot_of,
    split_evenly,
)

WARPS, WARP = 8, 32  # of a CTA, threads of one
THREADS = WARPS * WARP
# Splits that a warp reads together, and vectors of each in a lane, where a row has as many: a kernel each, of which the
# host takes one by the number of splits.
SHAPES = ((2, 2), (4, 2), (8, 1), (16, 1))
UP_TO = (2, 4, 64)  # splits, for the first ones
PER_LANE = 4
BATCH = WARP * PER_LANE  # requests whose splits are read together
# Kinds of splits that a batch has: all requests are in shares and fill the page table; they are in shares; the table
# lists their splits; or nothing is left to merge, since no request is split or the workers have merged.
FULL, SHARES, LISTED, MERGED = 0, 1, 2, 3


@dataclass(frozen=True)
class Merge:
    """What the code is made for. h, h_kv: heads. s: query tokens. partials: their layout. costs: the scheduler's."""

    h: int
    h_kv: int
    s: int
    partials: Partials
    costs: Costs
    light: bool = False

    @property
    def group(self) -> int:
        return self.h // self.h_kv

    @property
    def rows(self) -> int:
        """Query rows of a request and kv head."""
        return self.s * self.group

    @property
    def all_rows(self) -> int:
        """Query rows of a request."""
        return self.h_kv * self.rows

    @property
    def row_vectors(self) -> int:
        """Vectors of a row in each of its lanes: one or two, of which the second is in the right half."""
        return max(1, self.partials.columns // (VECTOR * WARP))

    @property
    def row_lanes(self) -> int:
        """Lanes of a warp that have a row's vectors; where they are half of them, the others do the same."""
        return min(WARP, self.partials.columns // VECTOR)

    def lane_of_row(self, lane: Any) -> Any:
        return lane if self.row_lanes == WARP else lane % self.row_lanes


class Splits(NamedTuple):
    """A request's splits. base: slot of the first one; the others lie behind it."""

    request: Int32
    count: Int32
    base: Int32


@dataclass(frozen=True, eq=False)
class Tensors:
    """What partials are merged from and into. results: partials, out and lse. queries: `rows.Queries`, which say where
    a request's rows are in out. sink: (h,) fp32, global memory, or None: a logit more in a head's softmax."""

    results: Results
    queries: Any
    sink: Any = None


class Row(NamedTuple):
    """Columns of a query row that a warp merges. row: of the request and kv head. first_vector: the first of its
    vectors in a lane."""

    request: Int32
    kv_head: Int32
    row: Int32
    first_vector: Int32


class Warps(NamedTuple):
    """Which of the warps of a row this one is. rank: among those of the row; log2_warps: how many these are, log2.
    warp, lane: in the CTA, and in the warp."""

    rank: Int32
    log2_warps: Int32
    warp: Int32
    lane: Int32


# ------------------------------------------------------------------------------------------------ which splits
def lists(line: Line, pool: Pool) -> Any:
    """Whether the attention kernel lists the splits of each request: of a length that the caller fixes, or on an even
    line."""
    return (pool.fixed > 0) | ((line.lead > 0) & (pool.combined > 0))


def write_split_kind(table: cute.Tensor, line: Line, is_filled: Boolean, pool: Pool) -> None:
    """Writes the batch's kind word; one thread of the attention kernel. is_filled: all requests are as long as the
    page table is wide."""
    shares = cutlass.select_(is_filled, Int32(FULL), Int32(SHARES))
    others = cutlass.select_(lists(line, pool), Int32(LISTED), Int32(MERGED))
    table[2 * (cute.size(table) // 2 - 1)] = cutlass.select_(in_shares(line, pool.fixed), shares, others)


def log2_warps_of(count: Any, together: int) -> Any:
    """log2 of the warps of a row."""
    log2_warps = Int32(0)
    for i in range(WARPS.bit_length() - 1):
        log2_warps = log2_warps + Int32(count > (together << i))
    return log2_warps


def log2_warps_for(rows: Any, blocks: Any) -> Any:
    """log2 of the warps of a row where all rows are to be summed at once. A longest request of many splits would have
    several warps for the rows of all others, most of them with nothing to add, and so several rounds of rows."""
    log2_warps = Int32(0)
    for i in range(1, WARPS.bit_length()):
        log2_warps = log2_warps + Int32((rows << i) <= blocks * WARPS)
    return log2_warps


@cute.jit
def list_splits(table: cute.Pointer, first: Int32, requests: Int32, listed: cute.Tensor, lane: Int32):
    """Lists the split ones of BATCH requests, by one warp; (how many there are, the most splits of one).

    table: of (splits, base), int32, global memory. listed: (3, BATCH) int32, shared memory: request, splits, base.
    """
    found = cute.make_rmem_tensor((2, PER_LANE), Int32)
    found.fill(0)
    for i in cutlass.range_constexpr(PER_LANE):
        request = first + i * WARP + lane
        if request < requests:
            source = cute.make_tensor(table + cute.assume(2 * request, divby=2), cute.make_layout(2))
            cute.autovec_copy(source, found[None, i])
    count, most = Int32(0), Int32(0)
    for i in cutlass.range_constexpr(PER_LANE):
        is_split = found[0, i] > 1
        votes = Int32(cute.arch.vote_ballot_sync(is_split))
        if is_split:
            place = count + Int32(cute.arch.popc(votes & ((Int32(1) << lane) - 1)))
            listed[0, place], listed[1, place] = first + i * WARP + lane, found[0, i]
            listed[2, place] = found[1, i]
        count = count + Int32(cute.arch.popc(votes))
        most = cutlass.max(most, found[0, i])
    return count, Int32(cute.arch.warp_redux_sync(most, kind="max"))


# ------------------------------------------------------------------------------------------------ the sums
@dataclass(frozen=True, eq=False)
class Sums:
    """What a lane adds up of a row, in registers. columns: (VECTOR, vectors). of_row: the maximum and the total."""

    columns: Any
    of_row: Any

    @classmethod
    def make(cls, vectors: int) -> Sums:
        return cls(cute.make_rmem_tensor((VECTOR, vectors), Float32), cute.make_rmem_tensor(2, Float32))

    def clear(self) -> None:
        self.columns.fill(0.0)
        self.of_row[0], self.of_row[1] = Float32(NO_KEY), Float32(0.0)

    @cute.jit
    def move_max(self, top: Float32):
        """The maximum becomes `top`, which is not below it."""
        older = exp2(self.of_row[0] - top)
        self.of_row[0], self.of_row[1] = top, self.of_row[1] * older
        for i in cutlass.range_constexpr(cute.size(self.columns)):
            self.columns[i] = self.columns[i] * older


@cute.jit
def add_splits(
    results: Results,
    word: cute.Tensor,  # (1,) int32, global memory: `SHARES`, `LISTED` or `MERGED`
    kind: Int32,  # the word, or -1: not read yet
    splits: Splits,
    row: Int64,  # of the first slot's partials
    first_vector: Int32,  # of the row, in a lane
    warps: Warps,
    sums: cutlass.Constexpr,
    merge: cutlass.Constexpr,
    together: cutlass.Constexpr,
) -> Int32:
    """Adds up this warp's splits of a row, `together` at a time. Returns the kind word."""
    outputs, stats = results.outputs, results.stats
    rank, log2_warps, _, lane = warps
    layout, vectors = merge.partials, cute.size(sums.columns, mode=[1])
    # With one vector of a row in a lane, the upper half of the row's lanes has the right half of the columns.
    lane = merge.lane_of_row(lane)
    in_right = lane >= merge.row_lanes // 2 if cutlass.const_expr(merge.row_vectors == 1) else first_vector > 0
    values = cute.make_rmem_tensor((VECTOR, vectors, together), Float16)
    found = cute.make_rmem_tensor((STATS, together), Float32)
    sums.clear()
    for begin in cutlass.range(rank * together, splits.count, Int32(together) << log2_warps, unroll=1):
        for j in cutlass.range_constexpr(together):
            split = begin
            if cutlass.const_expr(j > 0):
                split = cutlass.min(begin + j, splits.count - 1)  # past the last one that is read once more
            index = row + Int64(splits.base + split) * (layout.tiles * layout.rows)
            cute.autovec_copy(layout.stats(stats.iterator, index), found[None, j])
            for v in cutlass.range_constexpr(vectors):
                vector = (first_vector + v) * WARP + lane
                place = layout.outputs(outputs.iterator, index) + cute.assume(vector * VECTOR, divby=VECTOR)
                cute.autovec_copy(cute.make_tensor(place, cute.make_layout(VECTOR)), values[None, v, j])
        if kind < 0:
            kind = word[0]
        top = sums.of_row[0]
        for j in cutlass.range_constexpr(together):
            top = cute.arch.fmax(top, cute.arch.fmax(found[0, j], found[2, j]))
        if begin >= together << log2_warps:
            sums.move_max(top)
        sums.of_row[0] = top
        for j in cutlass.range_constexpr(together):
            weights = [exp2(found[2 * n, j] - top) for n in range(2)]
            if cutlass.const_expr(j > 0):
                weights = [cutlass.select_(begin + j < splits.count, weight, Float32(0.0)) for weight in weights]
            sums.of_row[1] = sums.of_row[1] + (weights[0] * found[1, j] + weights[1] * found[3, j])
            for v in cutlass.range_constexpr(vectors):
                weight = weights[v]
                if cutlass.const_expr(vectors == 1):
                    weight = cutlass.select_(in_right, weights[1], weights[0])
                for n in cutlass.range_constexpr(VECTOR):
                    sums.columns[n, v] = sums.columns[n, v] + weight * Float32(values[n, v, j])
    return kind


@cute.jit
def inverse_of(total: Float32, top: Float32, sink: cute.Tensor | None, head: Int32) -> Float32:
    """1 / (total + the sink's share), relative to 2^top; 0 where a row has no key."""
    over = total
    if cutlass.const_expr(sink is not None):
        over = total + exp2(sink[head] * math.log2(math.e) - top)
    return Float32(cutlass.select_(total > 0.0, cute.arch.rcp_approx(over), Float32(0.0)))


@cute.jit
def store_shared(
    tensors: cutlass.Constexpr,  # `Tensors`
    exchange: cute.Tensor,  # (columns of a lane and two of the row, WARP, WARPS) fp32, shared memory
    place: Row,
    there: Boolean,  # whether there is such a row
    warps: Warps,
    sums: cutlass.Constexpr,
    merge: cutlass.Constexpr,
):
    """Adds up what the warps of a row have and writes it, a pair of columns a thread: neighbours write neighbours."""
    out, lse = tensors.results.out, tensors.results.lse
    request, kv_head, row, first_vector = place
    _, log2_warps, warp, lane = warps
    count = cutlass.const_expr(cute.size(sums.columns))
    for n in cutlass.range_constexpr(count):
        exchange[n, lane, warp] = sums.columns[n]
    for n in cutlass.range_constexpr(2):
        exchange[count + n, lane, warp] = sums.of_row[n]
    cute.arch.sync_threads()
    warps, first = Int32(1) << log2_warps, warp >> log2_warps << log2_warps
    weights = cute.make_rmem_tensor(WARPS, Float32)
    top, total = Float32(NO_KEY), Float32(0.0)
    for i in cutlass.range_constexpr(WARPS):
        weights[i] = Float32(NO_KEY)
        if i < warps:
            weights[i] = exchange[count, lane, first + i]
        top = cute.arch.fmax(top, weights[i])
    for i in cutlass.range_constexpr(WARPS):
        if i < warps:
            weights[i] = exp2(weights[i] - top)
            total = total + weights[i] * exchange[count + 1, lane, first + i]
    inverse = inverse_of(total, top, tensors.sink, kv_head * merge.group + row % merge.group)
    if there:
        first_token = tensors.queries.block(request).first
        offset = row_offset(out, first_token, kv_head, row, merge.group)
        pairs = cute.size(sums.columns) * merge.row_lanes // 2
        for pair in cutlass.range((warp - first) * WARP + lane, pairs, warps * WARP, unroll=1):
            quad, block, of_quad = pair // (QUAD * QUAD), pair // QUAD % QUAD, pair % QUAD
            vector = quad * QUAD + of_quad
            value = cute.make_rmem_tensor(2, Float32)
            value.fill(0.0)
            for i in cutlass.range_constexpr(WARPS):
                if i < warps:
                    for n in cutlass.range_constexpr(2):
                        of_lane = vector // WARP * VECTOR + 2 * block + n
                        value[n] = value[n] + weights[i] * exchange[of_lane, vector % WARP, first + i]
            packed = cute.make_rmem_tensor(2, out.element_type)
            for n in cutlass.range_constexpr(2):
                packed[n] = (value[n] * inverse).to(out.element_type)
            column = merge.partials.column(first_vector * (WARP // QUAD) + quad, block) + 2 * of_quad
            target = out.iterator + cute.assume(offset + column, divby=2)
            cute.autovec_copy(packed, cute.make_tensor(target, cute.make_layout(2)))
        if warp == first and lane == 0 and first_vector == 0:
            head, token = kv_head * merge.group + row % merge.group, row // merge.group
            lse[first_token, head, token] = natural_lse(total, top)
    cute.arch.sync_threads()


@cute.jit
def store(
    tensors: cutlass.Constexpr,  # `Tensors`
    place: Row,
    sums: cutlass.Constexpr,
    lane: Int32,
    merge: cutlass.Constexpr,
):
    """Writes a warp's columns of a row and its log-sum-exp. The four lanes of a quad put their vectors in order."""
    out, lse = tensors.results.out, tensors.results.lse
    request, kv_head, row, first_vector = place
    total = sums.of_row[1]
    inverse = inverse_of(total, sums.of_row[0], tensors.sink, kv_head * merge.group + row % merge.group)
    first_token = tensors.queries.block(request).first
    offset = row_offset(out, first_token, kv_head, row, merge.group)
    for v in cutlass.range_constexpr(cute.size(sums.columns, mode=[1])):
        packed = cute.make_rmem_tensor(VECTOR, out.element_type)
        for n in cutlass.range_constexpr(VECTOR):
            packed[n] = (sums.columns[n, v] * inverse).to(out.element_type)
        transpose_quad(cute.recast_tensor(packed, Int32), lane)
        vector = (first_vector + v) * WARP + merge.lane_of_row(lane)
        column = merge.partials.column(vector // QUAD, lane % QUAD)
        target = out.iterator + cute.assume(offset + column, divby=VECTOR)
        cute.autovec_copy(packed, cute.make_tensor(target, cute.make_layout(VECTOR)))
    if lane == 0 and first_vector == 0:
        head, token = kv_head * merge.group + row % merge.group, row // merge.group
        lse[first_token, head, token] = natural_lse(total, sums.of_row[0])


# ------------------------------------------------------------------------------------------------ shared by workers
# The flag of a query tile of a request of many splits counts the workers that merge a share of its rows: all but that
# of the last split, which begins with it and has other requests left to do. From low bits to high ones: shares that are
# taken; workers that read the flag no more; whether the first split has begun; of the first and the last split, how
# many are there.
#
# No worker may wait for one that has not started, which may find room only when those that wait have ended. The worker
# of the first split is launched last. Others that come before it has begun leave their shares to it, and end.
GONE, BEGUN, THERE = MOST_WORKERS + 1, 1 << 26, 1 << 27


def flag_of(split_index: SplitIndex, slot: Any) -> tuple[Any, Any]:
    """(slot of the flag, what is added to it) when the partial of a split in `slot` is there. 0 is added where nobody
    waits for the partial, and for a split of many that is not the request's last: `merge_rows` reports that one."""
    is_last = Int32(split_index.index == split_index.count - 1)
    if_many, if_few = is_last * THERE, Int32(split_index.index > 0)
    many = split_index.count > TREE_SPLITS
    return cutlass.select_(many, slot - split_index.index, slot), cutlass.select_(many, if_many, if_few)


@cute.jit
def begin_row_merge(flag: cute.Pointer, row_range: cute.Tensor):
    """Says in the flag that the worker of a request's first split has begun, and takes its share of rows, for
    `merge_rows`; one thread. row_range[0] becomes the number of shares that others had taken before."""
    row_range[0] = cute.arch.atomic_add(flag, Int32(BEGUN + 1), sem="relaxed", scope="gpu") % GONE


@cute.jit
def take_rows(flag: cute.Pointer, row_range: cute.Tensor, split_index: SplitIndex):
    """Says that a split's partial is there, and waits for the others (release and acquire); one thread, between
    barriers of those that wrote and of those that read. row_range becomes the first and end share that this worker
    merges."""
    is_first = split_index.index == 0
    own = cutlass.select_(is_first, Int32(THERE), Int32(1))
    seen = cute.arch.atomic_add(flag, own, sem="acq_rel", scope="gpu")
    first, end = seen % GONE, seen % GONE + 1
    if is_first:
        # It has those that were taken before it had begun, and the one that it took then.
        first, end = Int32(0), row_range[0] + 1
    seen, all_there = seen + own, BEGUN + 2 * THERE + split_index.count - 1
    while (seen & BEGUN) != 0 and (seen & ~(BEGUN - GONE)) != all_there:
        seen = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
    row_range[0], row_range[1] = first, cutlass.select_((seen & BEGUN) != 0, end, first)


@cute.jit
def merge_rows(
    tensors: cutlass.Constexpr,  # `Tensors`
    walk: cutlass.Constexpr,  # `walk.Walk`
    row_range: cute.Tensor,  # (2,) int32, shared memory: first and end of the shares of rows to merge
    split_index: SplitIndex,  # the worker's last split
    request: Int32,
    barrier: cutlass.Constexpr,  # of the threads
    thread: Int32,  # 0..THREADS-1
    shape: cutlass.Constexpr,  # as those of `SHAPES`
):
    """What a worker does last, behind a barrier of those that wrote its last partial: if that is one of many and others
    follow, it merges a share of the query tile's rows over all splits, once these are there."""
    merge, tile = walk.merge, walk.tile
    slot = slot_of(walk.worker, request)
    together, vectors = shape[0], min(shape[1], merge.row_vectors)
    slices = merge.row_vectors // vectors
    layout, sums = merge.partials, Sums.make(vectors)
    if split_index.count > TREE_SPLITS and split_index.index < split_index.count - 1:
        base, number = slot - split_index.index, split_index.count - 1
        flag, gone = walk.flags.iterator + (base * layout.tiles + tile), Int32(0)
        if thread == 0:
            take_rows(flag, row_range, split_index)
        named_sync(barrier, THREADS)
        if thread == 0:
            gone = cute.arch.atomic_add(flag, Int32(GONE), sem="relaxed", scope="gpu") // GONE % (BEGUN // GONE) + 1
        of_head = layout.tiles // merge.h_kv
        kv_head, first_row = tile // of_head, tile % of_head * layout.rows
        rows = cutlass.min(tensors.queries.block(request).count * merge.group - first_row, layout.rows)
        lane, warp = thread % WARP, cute.arch.make_warp_uniform(thread // WARP)
        splits, kind = Splits(request, split_index.count, base), Int32(LISTED)
        warps = Warps(Int32(0), Int32(0), warp, lane)
        for share in cutlass.range(row_range[0], row_range[1], unroll=1):
            for place in cutlass.range(share + warp * number, rows * slices, WARPS * number, unroll=1):
                row, first_vector = place // slices, place % slices * vectors
                add_splits(
                    tensors.results, walk.flags, kind, splits, Int64(tile * layout.rows + row), first_vector, warps,
                    sums, merge, together,
                )  # fmt: skip
                store(tensors, Row(request, kv_head, first_row + row, first_vector), sums, lane, merge)
        if gone == number:
            cute.make_tensor(flag, cute.make_layout(1))[0] = 0


# ------------------------------------------------------------------------------------------------ the kernel
@cute.kernel
def combine(
    results: Results,
    table: cute.Tensor,  # (2 (b + 1),) int32, global memory: of `partials.list_request`; then (`SHARES` or so, -)
    seq_lens: cute.Tensor,  # (b,) int32, global memory
    query_blocks: cute.Tensor | None,  # of `split_kv.rows`, or None: out and lse are packed, and requests are blocks
    sink: cute.Tensor | None,  # (h,) fp32, global memory: a logit more in a head's softmax (`workload.sparse_decode`)
    width: Int32,  # `Pool.shares`
    merge: cutlass.Constexpr,
    shape: cutlass.Constexpr,  # of `SHAPES`
):
    """A CTA's items, every `blocks`-th: rows of all requests, if they are in shares, or of the listed ones."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    # The next kernel's CTAs may come; if they are dependents, they wait for this one's end.
    launch_dependents()
    lane, warp = thread % WARP, cute.arch.make_warp_uniform(thread // WARP)
    memory = SmemAllocator()
    together, vectors = shape[0], min(shape[1], merge.row_vectors)
    slices = merge.row_vectors // vectors  # of a row's columns, a warp each
    exchange_rows = VECTOR * vectors + 2
    exchange = memory.allocate_tensor(
        Float32, cute.make_layout((exchange_rows, WARP, WARPS), stride=(WARP, 1, exchange_rows * WARP)), 16
    )
    listed = memory.allocate_tensor(Int32, cute.make_layout((3, BATCH)), 16)
    shared = memory.allocate_tensor(Int32, cute.make_layout(2), 16)
    queries = Queries(merge.s, query_blocks)
    tensors, requests = Tensors(results, queries, sink), results.out.shape[0]
    if cutlass.const_expr(query_blocks is not None):
        requests = query_blocks.shape[0]
    word = cute.make_tensor(table.iterator + 2 * requests, cute.make_layout(1))
    layout, sums = merge.partials, Sums.make(vectors)

    kind, item, following, log2_warps = Int32(-1), block, Int32(0), log2_warps_of(width, together)
    rows = cutlass.select_(width > 1, requests * (merge.all_rows * slices), Int32(0))  # times slices
    if rows == 0:
        grid_wait()
        kind = word[0]
    searching = Boolean(True)
    while searching:
        per_cta = Int32(WARPS) >> log2_warps
        if item * per_cta < rows:
            place = item * per_cta + (warp >> log2_warps)
            there = place < rows
            place = cutlass.min(place, rows - 1)
            slice_, place = place % slices, place // slices
            index, row = place // merge.all_rows, place % merge.all_rows
            splits = Splits(index, width, index * width)
            if kind == LISTED:
                splits = Splits(listed[0, index], listed[1, index], listed[2, index])
            elif kind == SHARES:
                _, shares = split_evenly(kv_tiles_of(seq_lens[index], merge.costs), width)
                splits = Splits(index, shares, index * width)
            kv_head, row = row // merge.rows, row % merge.rows
            tile = kv_head * (layout.tiles // merge.h_kv) + row // layout.rows
            first_row = Int64(tile * layout.rows + row % layout.rows)
            rank = warp & ((Int32(1) << log2_warps) - 1)
            # Waits once: behind the first item the attention kernel has ended.
            wait_for_launch(results.outputs.iterator.toint() + first_row + Int64(rank + splits.base))
            known = kind >= 0
            warps = Warps(rank, log2_warps, warp, lane)
            kind = add_splits(
                results, word, kind, splits, first_row, slice_ * vectors, warps, sums, merge, together
            )  # fmt: skip
            if not known:
                # A warp that had no split to load has not read it.
                kind = word[0]
            there = there and splits.count > 1 and (known or kind == FULL)
            if cutlass.const_expr(queries.blocks is not None):
                there = there and row < queries.block(splits.request).count * merge.group
            of_row = Row(splits.request, kv_head, row, slice_ * vectors)
            if log2_warps > 0:
                store_shared(tensors, exchange, of_row, there, warps, sums, merge)
            elif there:
                store(tensors, of_row, sums, lane, merge)
            if known or kind == FULL:
                item = item + blocks
            elif kind != SHARES:
                rows = Int32(0)
        elif kind == LISTED:
            item = item - (rows + per_cta - 1) // per_cta
            cute.arch.sync_threads()
            if warp == 0:
                count, most = list_splits(table.iterator, following, requests, listed, lane)
                if lane == 0:
                    shared[0], shared[1] = count, most
            cute.arch.sync_threads()
            rows, following = shared[0] * (merge.all_rows * slices), following + BATCH
            log2_warps = log2_warps_of(shared[1], together)
            # Of splits that the caller fixes (width 0) how a row is summed depends on its own request alone.
            if width > 0:
                log2_warps = cutlass.min(log2_warps, log2_warps_for(rows, blocks))
        per_cta = Int32(WARPS) >> log2_warps
        searching = item * per_cta < rows
        if kind == LISTED:
            searching = searching or following < requests


combine.set_name_prefix("combine", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def launch(
    results: Results,
    table: cute.Tensor,
    seq_lens: cute.Tensor,
    query_blocks: cute.Tensor | None,  # of `split_kv.rows`, or None
    pool: Pool,
    ctas: Int32,  # how many there are to be where there are no shares
    merge: cutlass.Constexpr,
    stream: Any,
    sink: cute.Tensor | None = None,
):
    """Launches the combine behind the attention kernel, inside a host function, where that may leave it something."""
    width = pool.shares
    arguments = (results, table, seq_lens, query_blocks, sink, width, ctas, merge)
    if pool.combined > 0:
        # Listed splits are as many as the lengths ask for: few warps a row, so that there are few rounds of rows.
        if width <= UP_TO[0] and in_shares(pool.filled, pool.fixed):
            launch_one(*arguments, SHAPES[0], stream)
        elif width <= UP_TO[1]:
            launch_one(*arguments, SHAPES[1], stream)
        elif width <= UP_TO[2]:
            launch_one(*arguments, SHAPES[2], stream)
        else:
            launch_one(*arguments, SHAPES[3], stream)


@cute.jit
def launch_one(
    results: Results,
    table: cute.Tensor,
    seq_lens: cute.Tensor,
    query_blocks: cute.Tensor | None,
    sink: cute.Tensor | None,
    width: Int32,
    ctas: Int32,
    merge: cutlass.Constexpr,
    shape: cutlass.Constexpr,
    stream: Any,
):
    per_cta = Int32(WARPS) >> log2_warps_of(width, shape[0])
    slices = merge.row_vectors // min(shape[1], merge.row_vectors)
    requests = results.out.shape[0] if cutlass.const_expr(query_blocks is None) else query_blocks.shape[0]
    needed = (merge.all_rows * slices * requests + per_cta - 1) // per_cta
    blocks = Int32(cutlass.select_(width > 1, cutlass.min(needed, ctas), ctas))
    combine(results, table, seq_lens, query_blocks, sink, width, merge, shape).launch(
        grid=(blocks, 1, 1),
        block=(THREADS, 1, 1),
        min_blocks_per_mp=1,
        max_number_threads=(640, 1, 1) if merge.light else [0, 0, 0],
        # As the attention has it: an SM that is to change what it has for shared memory has to run empty first.
        preferred_smem_carveout=100,
        stream=stream,
        use_pdl=has_dependents(),
    )
