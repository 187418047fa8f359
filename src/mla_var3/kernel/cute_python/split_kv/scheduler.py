"""A tile scheduler on the device: split-KV work dealt to persistent workers from the requests' lengths.

A worker is all CTAs with one y of the grid, one for each query tile of a request; they go through the same splits. A
request of `length` tokens has ceil(length / tokens of a KV tile) KV tiles. Where there is no schedule, one warp of each
CTA reads all lengths and finds the worker's first split (`share_first`). Before that every warp tests whether all
requests fill the page table (`are_as_long`), unless queries are packed; if they do, nobody searches. Then every warp
goes from split to split by itself (`next_split`).

The host reads no lengths, so a CUDA graph may be replayed with other lengths; equal lengths give equal splits. From the
numbers of requests and workers the host decides whether a combine is launched (`make_pool`).

Requests lie behind each other on a line, and worker w takes the points [w · span, (w + 1) · span) of it:

    whole   A point is a request.
    even    A point is a KV tile, and each request begins with `lead` points for what a split costs besides its tiles. A
            request is split only where it crosses from one worker to the next. No worker has more points than all of
            them divided by the workers, rounded up; the last ones may have fewer. A request without keys has no point.
            Where a combine is launched, it merges the splits. Else the workers merge them: up to `TREE_SPLITS` splits
            as a binary tree (`takes` says which split takes which), more of them in shares of rows
            (`split_kv.combine.merge_rows`). The sparse kernels merge any number of splits as a tree.
    shares  A point is one of the equal chunks of a request, its shares. Equally many workers stand ready for each
            request; a short one has fewer shares than that. `split_kv.combine` merges the partials.
    fixed   A point is a chunk of as many KV tiles as the caller says, so that the splits of a request depend on nothing
            but its own length. `split_kv.combine` merges the partials.

The caller asks for fixed splits. A model of the slowest worker's time chooses between the first three.

Calls may share their lengths, as the layers of a model do in a step. A small kernel can then find all workers' first
splits ahead of them (`make_schedule`), as FlashMLA's does (`get_mla_metadata`): finding one takes a microsecond, in
which a CTA has nothing to load yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from mla_var3.kernel.cute_python.prims.sync import grid_wait, has_dependents, launch_dependents
from mla_var3.kernel.cute_python.split_kv import rows

WARP = 32
PER_LANE = 8  # lengths of a lane
BATCH = WARP * PER_LANE  # requests that a warp holds at once
WHOLE = 1 << 29  # more than any request has tiles or points
# Halves of a worker for each request from which on a combine is launched: with fewer, most requests are whole or cut
# once.
WORTH_A_COMBINE = 3
TREE_SPLITS = 3  # splits up to which a request's workers merge them as a tree: of more, its levels take too long
MOST_WORKERS = (1 << 13) - 1  # what a word counts up to where workers share the merge (`split_kv.combine`)


@dataclass(frozen=True)
class Costs:
    """What a kernel's model of time knows. tokens: tokens of a KV tile. All other fields are times, and their unit is
    the time that a KV tile takes. overhead: the begin and the end of a split, at least 1. combine: the kernel that
    merges shares. listed: the same kernel where it first reads which splits there are. level: one level of the tree in
    which workers merge splits; a merge in shares of rows is charged as a tree of `TREE_SPLITS` splits."""

    tokens: int
    overhead: int
    combine: int
    listed: int
    level: int


class Line(NamedTuple):
    """How requests lie on the line: see the module. lead: points ahead of a request's first KV tile; 0 unless the line
    is even. step: KV tiles of a point. On a line of shares that differs from request to request: the line of the batch
    has the longest request's, the line that `first_split` returns has that of the worker's own request. span: points of
    a worker. empty: requests that have no point."""

    lead: Int32
    step: Int32
    span: Int32
    empty: Int32


class Pool(NamedTuple):
    """What the host knows. fixed: KV tiles of a fixed split, or 0. tokens: tokens that a request may have.
    filled, width: the line if all requests fill the page table, and the points of a request on it. shares: workers for
    each request where requests may be in shares; 1: they may not; 0: splits are fixed. combined: whether
    a combine is launched behind the attention. scheduled: whether workers' first splits are in a schedule
    (`make_schedule`)."""

    workers: Int32
    fixed: Int32
    tokens: Int32
    filled: Line
    width: Int32
    shares: Int32
    combined: Int32
    scheduled: Int32


class Split(NamedTuple):
    """A worker's place on the line, and so the split that begins there. point: where it is. end: the end of the
    worker's points. request: the one at the point. start: the request's first point. length: the request's tokens."""

    point: Int32
    end: Int32
    request: Int32
    start: Int32
    length: Int32


# ------------------------------------------------------------------------------------------------ arithmetic
def ceil_div(number: Any, divisor: Any) -> Any:
    """number / divisor, rounded up; of numbers that are not negative."""
    return (number + divisor - 1) // divisor


def kv_tiles_of(length: Any, costs: Costs) -> Any:
    """KV tiles of a request; none where the length is not positive."""
    return ceil_div(cutlass.max(length, 0), costs.tokens)


@cute.jit
def line_of(
    total: Int32,
    longest: Int32,
    chunks: Int32,
    requests: Int32,
    empty: Int32,  # of them
    workers: Int32,
    fixed: Int32,
    width: Int32,  # workers for each request, where they may be in shares; 1: they may not
    combined: Int32,  # whether a combine is launched
    costs: cutlass.Constexpr,
) -> Line:
    """The line of a batch. total, longest: tiles. chunks: of `fixed` tiles, over all requests."""
    lead, step, span, pointless = Int32(0), fixed, Int32(1), Int32(0)
    if fixed > 0:
        span = ceil_div(chunks, workers)
    else:
        span, step = ceil_div(requests, workers), Int32(WHOLE)
        slowest = span * (longest + costs.overhead)
        if width > 1:
            chunk = cutlass.max(ceil_div(longest, width), 1)
            if chunk + (costs.overhead + costs.combine) < slowest:
                step, span, slowest = chunk, Int32(1), chunk + (costs.overhead + costs.combine)
        # No worker has more than its share, and the overhead of a request that began before it.
        share = cutlass.max(ceil_div(total + costs.overhead * (requests - empty), workers), 1)
        merging = costs.level * levels_of(cutlass.min(longest // share + 2, TREE_SPLITS))
        if combined > 0:
            merging = Int32(costs.listed)
        if share + costs.overhead + merging < slowest:
            lead, step, span, pointless = Int32(costs.overhead), Int32(1), share, empty
    return Line(lead, step, span, pointless)


def levels_of(splits: Any) -> Any:
    """Levels of a binary tree of so many splits; counted up to 8."""
    levels = Int32(0)
    for i in range(8):
        levels = levels + Int32(splits > (1 << i))
    return levels


def in_shares(line: Line, fixed: Any) -> Any:
    """Whether requests are in shares."""
    return (fixed == 0) & (line.lead == 0) & (line.step < WHOLE)


def split_evenly(tiles: Any, width: Any) -> tuple[Any, Any]:
    """(tiles of a share, shares) of a request that has `width` workers; at least 1 of both."""
    step = cutlass.max(ceil_div(tiles, width), 1)
    return step, cutlass.max(ceil_div(tiles, step), 1)


@cute.jit
def make_pool(
    requests: Int32, tokens: Int32, workers: Int32, fixed: Int32, mode: Int32, costs: cutlass.Constexpr
) -> Pool:
    """The pool of a batch of at least one request, whose page table holds up to `tokens` tokens; on the host. mode:
    `OWN`, `MADE` or `SHARED`."""
    tiles, width = kv_tiles_of(tokens, costs), Int32(1)
    if fixed > 0:
        width = cutlass.max(ceil_div(tiles, fixed), 1)
    combined, shares = Int32(1), Int32(0)
    if fixed == 0:
        combined, shares = Int32(2 * workers >= WORTH_A_COMBINE * requests), Int32(1)
        if combined > 0:
            shares = cutlass.max(workers // requests, 1)
    line = line_of(
        requests * tiles, tiles, requests * width, requests, Int32(0), workers, fixed, shares, combined, costs
    )  # fmt: skip
    width = cutlass.max(ceil_div(tiles, line.step), 1)
    if in_shares(line, fixed):
        shares = width
    if line.lead > 0:
        width = line.lead + tiles
    return Pool(workers, fixed, tokens, line, width, shares, combined, Int32(mode > OWN))


@cute.jit
def make_merged_pool(requests: Int32, tokens: Int32, workers: Int32, costs: cutlass.Constexpr) -> Pool:
    """`make_pool` of a batch whose workers merge its splits, whatever their number: no combine is launched, and no
    request is in shares."""
    tiles = kv_tiles_of(tokens, costs)
    shares, combined = Int32(1), Int32(0)
    line = line_of(
        requests * tiles, tiles, Int32(0), requests, Int32(0), workers, Int32(0), shares, combined, costs
    )  # fmt: skip
    width = cutlass.max(ceil_div(tiles, line.step), 1)
    if line.lead > 0:
        width = line.lead + tiles
    return Pool(workers, Int32(0), tokens, line, width, shares, combined, Int32(0))


@cute.jit
def chunks_of(tiles: Int32, step: Int32, inverse: Float32) -> Int32:
    """ceil(tiles / step), at least 1; inverse: 1 / step, nearly. Exact under 2^23 tiles."""
    last = cutlass.max(tiles - 1, 0)
    quotient = Int32(Float32(last) * inverse)
    left = last - quotient * step
    quotient = quotient + Int32(left >= step) - Int32(left < 0)
    return quotient + 1


def place_of(point: Any, start: Any, tiles: Any, line: Line) -> Any:
    """The KV tile of a request at which a point of the line falls, 0 .. tiles."""
    return cutlass.min(cutlass.max((point - start - line.lead) * line.step, 0), tiles)


def tiles_range(split: Split, line: Line, costs: Costs) -> tuple[Any, Any, Any, Any]:
    """(first KV tile, end KV tile, KV tiles of the request, point behind) of a split."""
    tiles = kv_tiles_of(split.length, costs)
    of_request = cutlass.select_(line.lead > 0, split.start + line.lead + tiles, split.point + 1)
    behind = cutlass.min(of_request, split.end)
    return place_of(split.point, split.start, tiles, line), place_of(behind, split.start, tiles, line), tiles, behind


def has_work(split: Split) -> Boolean:
    """False behind a worker's last split."""
    return split.point < split.end


# ------------------------------------------------------------------------------------------------ a worker's splits
@cute.jit
def filled_split(worker: Int32, requests: Int32, pool: Pool) -> Split:
    """A worker's first split if all requests fill the page table: known before a length is read."""
    point = worker * pool.filled.span
    request = point // pool.width
    end = cutlass.select_(request < requests, point + pool.filled.span, point)
    return Split(point, end, request, request * pool.width, pool.tokens)


@cute.jit
def read_kv_tiles(seq_lens: cute.Tensor, first: Int32, lane: Int32, costs: cutlass.Constexpr) -> cute.Tensor:
    """(PER_LANE,) registers: tiles of requests first + PER_LANE · lane on, -1 past the end of the batch. All loads are
    in flight together."""
    requests = seq_lens.shape[0]
    tiles = cute.make_rmem_tensor(PER_LANE, Int32)
    for i in cutlass.range_constexpr(PER_LANE):
        tiles[i] = seq_lens[cutlass.min(first + lane * PER_LANE + i, requests - 1)]
    for i in cutlass.range_constexpr(PER_LANE):
        inside = first + lane * PER_LANE + i < requests
        tiles[i] = cutlass.select_(inside, kv_tiles_of(tiles[i], costs), Int32(-1))
    return tiles


@cute.jit
def are_as_long(seq_lens: cute.Tensor, tokens: Int32, lane: Int32, costs: cutlass.Constexpr) -> Boolean:
    """Whether all requests have as many tiles as one of `tokens` tokens; said of at most BATCH requests. Few
    instructions: everything in a CTA waits for it."""
    requests = seq_lens.shape[0]
    most = kv_tiles_of(tokens, costs) * costs.tokens
    lengths = cute.make_rmem_tensor(PER_LANE, Int32)
    lengths.fill(most)
    for i in cutlass.range_constexpr(PER_LANE):
        if i * WARP + lane < requests:
            lengths[i] = seq_lens[i * WARP + lane]
    differs = requests > BATCH
    for i in cutlass.range_constexpr(PER_LANE):
        differs = differs | (lengths[i] > most) | (lengths[i] <= most - costs.tokens)
    return not cute.arch.vote_any_sync(differs)


@cute.jit
def lay_out(seq_lens: cute.Tensor, lane: Int32, pool: Pool, costs: cutlass.Constexpr) -> Line:
    """The line of a batch, from its lengths; the same in all lanes of a warp."""
    requests = seq_lens.shape[0]
    total, longest, chunks, empty = Int32(0), Int32(0), Int32(0), Int32(0)
    for first in cutlass.range(0, requests, BATCH, unroll=1):
        tiles = read_kv_tiles(seq_lens, first, lane, costs)
        for i in cutlass.range_constexpr(PER_LANE):
            total = total + cutlass.max(tiles[i], 0)
            longest = cutlass.max(longest, tiles[i])
            empty = empty + Int32(tiles[i] == 0)
        if pool.fixed > 0:
            inverse = cute.arch.rcp_approx(Float32(pool.fixed))
            for i in cutlass.range_constexpr(PER_LANE):
                chunks = chunks + cutlass.select_(tiles[i] >= 0, chunks_of(tiles[i], pool.fixed, inverse), Int32(0))
    total = Int32(cute.arch.warp_redux_sync(total, kind="add"))
    longest = Int32(cute.arch.warp_redux_sync(longest, kind="max"))
    chunks = Int32(cute.arch.warp_redux_sync(chunks, kind="add"))
    empty = Int32(cute.arch.warp_redux_sync(empty, kind="add"))
    return line_of(total, longest, chunks, requests, empty, pool.workers, pool.fixed, pool.shares, pool.combined, costs)


@cute.jit
def widths_of(tiles: cute.Tensor, line: Line) -> cute.Tensor:
    """(PER_LANE,) registers: points of requests on the line, 0 past the end of the batch."""
    widths = cute.make_rmem_tensor(PER_LANE, Int32)
    inverse = cute.arch.rcp_approx(Float32(line.step))
    for i in cutlass.range_constexpr(PER_LANE):
        even = cutlass.select_(tiles[i] > 0, line.lead + tiles[i], Int32(0))
        width = cutlass.select_(line.lead > 0, even, chunks_of(tiles[i], line.step, inverse))
        widths[i] = cutlass.select_(tiles[i] >= 0, width, Int32(0))
    return widths


@cute.jit
def sum_before(value: Int32, lane: Int32):
    """(sum over the lanes before this one, over all lanes)."""
    until = value
    for i in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(until, 1 << i)
        until = until + cutlass.select_(lane >= (1 << i), other, Int32(0))
    return until - value, cute.arch.shuffle_sync(until, WARP - 1)


@cute.jit
def locate(point: Int32, seq_lens: cute.Tensor, line: Line, lane: Int32, costs: cutlass.Constexpr):
    """(request, its first point) at a point of the line; the number of requests past the last one."""
    requests = seq_lens.shape[0]
    found, start, passed, first = requests, Int32(0), Int32(0), Int32(0)
    while found == requests and first < requests:
        widths = widths_of(read_kv_tiles(seq_lens, first, lane, costs), line)
        mine = Int32(0)
        for i in cutlass.range_constexpr(PER_LANE):
            mine = mine + widths[i]
        before, of_all = sum_before(mine, lane)
        begin, request = passed + before, first + lane * PER_LANE
        holds = point >= begin and point < begin + mine
        for i in cutlass.range_constexpr(PER_LANE - 1):
            further = Int32(point >= begin + widths[i]) & Int32(request == first + lane * PER_LANE + i)
            begin, request = begin + further * widths[i], request + further
        holder = Int32(cute.arch.vote_ballot_sync(holds))
        if holder != 0:
            source = Int32(31 - cute.arch.clz(holder))
            found, start = cute.arch.shuffle_sync(request, source), cute.arch.shuffle_sync(begin, source)
        passed, first = passed + of_all, first + BATCH
    return found, start


@cute.jit
def first_split(
    worker: Int32, seq_lens: cute.Tensor, line: Line, pool: Pool, lane: Int32, costs: cutlass.Constexpr
):  # fmt: skip
    """Two results: the `Split` at the worker's first point, and the `Line` for this worker. The split may have no KV
    tiles (`skip_empty` goes on to one that has). The line is that of the batch, but where requests are in shares its
    step is that of the worker's own request."""
    requests = seq_lens.shape[0]
    point, step = worker * line.span, line.step
    request, start, length = requests, Int32(0), Int32(0)
    if in_shares(line, pool.fixed):
        request = worker // pool.shares
        start, length = request * pool.shares, seq_lens[cutlass.min(request, requests - 1)]
        step, shares = split_evenly(kv_tiles_of(length, costs), pool.shares)
        # A short request has fewer shares than workers.
        request = cutlass.select_(point - start < shares, request, requests)
    else:
        request, start = locate(point, seq_lens, line, lane, costs)
        length = seq_lens[cutlass.min(request, requests - 1)]
    end = cutlass.select_(request < requests, point + line.span, point)
    return Split(point, end, request, start, length), Line(line.lead, step, line.span, line.empty)


@cute.jit
def next_with_keys(request: Int32, seq_lens: cute.Tensor):
    """(the first request from this one on that has keys, or the number of requests; its length); by a whole warp, which
    reads as many lengths at once."""
    requests, lane = Int32(seq_lens.shape[0]), cute.arch.lane_idx()
    found, length = requests, Int32(0)
    while found == requests and request < requests:
        own = Int32(0)
        if request + lane < requests:
            own = seq_lens[request + lane]
        holders = Int32(cute.arch.vote_ballot_sync(own > 0))
        if holders != 0:
            first = Int32(31 - cute.arch.clz(holders & -holders))
            found, length = Int32(request + first), cute.arch.shuffle_sync(own, first)
        request = request + WARP
    return found, length


@cute.jit
def next_place(split: Split, seq_lens: cute.Tensor, line: Line, costs: cutlass.Constexpr) -> Split:
    """The `Split` that begins where this one ends; by a whole warp. It may have no KV tiles, and it has no work
    (`has_work`) if this was the worker's last one. It keeps this split's request if that is not finished."""
    _, _, tiles, behind = tiles_range(split, line, costs)
    request, start, length, end = split.request, split.start, split.length, split.end
    if (behind - start - line.lead) * line.step >= tiles:
        request, start = request + 1, behind
        if line.empty > 0:
            request, length = next_with_keys(request, seq_lens)
        elif request < seq_lens.shape[0]:
            length = seq_lens[request]
        if request >= seq_lens.shape[0]:
            end = behind
    return Split(behind, end, request, start, length)


@cute.jit
def skip_empty(split: Split, seq_lens: cute.Tensor, line: Line, costs: cutlass.Constexpr) -> Split:
    """This split, or the worker's next one with something to do: a worker may have the lead of a request and none of
    its tiles."""
    if line.lead > 0:
        searching = has_work(split)
        while searching:
            first, end, _, _ = tiles_range(split, line, costs)
            searching = first == end
            if searching:
                split = next_place(split, seq_lens, line, costs)
                searching = has_work(split)
    return split


@cute.jit
def next_split(split: Split, seq_lens: cute.Tensor, line: Line, costs: cutlass.Constexpr) -> Split:
    """A worker's split behind this one."""
    return skip_empty(next_place(split, seq_lens, line, costs), seq_lens, line, costs)


def next_full_split(split: Split, requests: Any, line: Line, costs: Costs) -> Split:
    """`next_split` where all requests fill the page table: without a loop, and without reading a length."""
    _, _, tiles, behind = tiles_range(split, line, costs)
    is_done = (behind - split.start - line.lead) * line.step >= tiles
    request, start = split.request + Int32(is_done), cutlass.select_(is_done, behind, split.start)
    # Nothing is left behind the last request, nor of points that are all in the lead of the next one.
    goes_on = (request < requests) & (split.end > start + line.lead)
    return Split(behind, cutlass.select_(goes_on, split.end, behind), request, start, split.length)


# ------------------------------------------------------------------------------------------------ a schedule
# Who finds a worker's first split: each of its CTAs; a kernel ahead of the attention, in the same call; or one that an
# earlier call has launched.
OWN, MADE, SHARED = 0, 1, 2
# int32 of what a worker begins with: its first split with something to do, its line, and whether all requests fill the
# page table; made whole vectors of 16 bytes.
FIRST_WORDS = 12
WARPS = 32  # of the kernel that makes a schedule, one CTA


class Schedule(NamedTuple):
    """What calls over the same lengths may share; int32, global memory. firsts: (workers, FIRST_WORDS), what each
    worker begins with. table: the splits table that `split_kv.combine` reads, and its kind word. blocks: the blocks of
    packed queries (`split_kv.rows`), else None."""

    firsts: cute.Tensor
    table: cute.Tensor
    blocks: Any

    def lengths(self, seq_lens: cute.Tensor) -> cute.Tensor:
        """Keys of what is scheduled: of requests, or of blocks those that the last token sees."""
        return seq_lens if self.blocks is None else rows.keys_of(self.blocks)


def schedule_words(requests: int, workers: int, packed: bool) -> int:
    """int32 of a `Schedule`. requests: blocks, where queries are packed."""
    return FIRST_WORDS * workers + (rows.BLOCK * requests if packed else 0) + 2 * (requests + 1)


@cute.jit
def schedule_in(words: cute.Tensor, workers: Int32, packed: cutlass.Constexpr) -> Schedule:
    """The `Schedule` in `schedule_words` that are aligned to 16 bytes."""
    behind, blocks = words.iterator + cute.assume(workers * FIRST_WORDS, divby=4), None
    left = cute.size(words) - workers * FIRST_WORDS
    if cutlass.const_expr(packed):
        most = (left - 2) // (rows.BLOCK + 2)
        blocks = cute.make_tensor(behind, cute.make_layout((most, rows.BLOCK), stride=(rows.BLOCK, 1)))
        behind, left = behind + cute.assume(most * rows.BLOCK, divby=rows.BLOCK), left - most * rows.BLOCK
    firsts = cute.make_tensor(words.iterator, cute.make_layout((workers, FIRST_WORDS), stride=(FIRST_WORDS, 1)))
    return Schedule(firsts, cute.make_tensor(behind, cute.make_layout(left)), blocks)


@cute.jit
def write_first(target: cute.Tensor, split: Split, line: Line, is_filled: Boolean):
    """Writes what a worker begins with, (FIRST_WORDS,); one thread."""
    for i, value in enumerate((*split, *line, Int32(is_filled))):
        target[i] = value


def read_first(source: cute.Tensor) -> tuple[Split, Line, Boolean]:
    """(first split, line, whether all requests fill the page table), from (FIRST_WORDS,)."""
    values = cute.make_rmem_tensor(FIRST_WORDS, Int32)
    cute.autovec_copy(source, values)
    found = [values[i] for i in range(FIRST_WORDS)]
    return Split(*found[:5]), Line(*found[5:9]), found[9] > 0


@cute.kernel
def make_schedule(
    schedule: Schedule,
    seq_lens: cute.Tensor,  # (b,) int32, global memory
    cu_seqlens_q: cute.Tensor | None,  # (b + 1,) int32, global memory, where queries are packed
    pool: Pool,
    tokens: cutlass.Constexpr,  # of a block
    causal: cutlass.Constexpr,
    costs: cutlass.Constexpr,
):
    """Cuts packed queries into blocks, and finds all workers' first splits where the pool has them planned; one CTA."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = thread % WARP, cute.arch.make_warp_uniform(thread // WARP)
    launch_dependents()
    grid_wait()
    if cutlass.const_expr(schedule.blocks is not None):
        rows.cut_queries(cu_seqlens_q, seq_lens, schedule.blocks, schedule.table, WARPS, tokens, causal)
    lengths = schedule.lengths(seq_lens)
    if pool.scheduled > 0:
        is_filled = Boolean(False)
        if cutlass.const_expr(schedule.blocks is None):
            is_filled = are_as_long(lengths, pool.tokens, lane, costs)
        of_batch = lay_out(lengths, lane, pool, costs)
        for worker in cutlass.range(warp, pool.workers, WARPS, unroll=1):
            line, split = pool.filled, filled_split(worker, lengths.shape[0], pool)
            if is_filled:
                length = lengths[cutlass.min(split.request, lengths.shape[0] - 1)]
                split = Split(split.point, split.end, split.request, split.start, length)
            else:
                split, line = first_split(worker, lengths, of_batch, pool, lane, costs)
            split = skip_empty(split, lengths, line, costs)
            if lane == 0:
                write_first(schedule.firsts[worker, None], split, line, is_filled)


make_schedule.set_name_prefix("make_schedule", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def prepare(
    schedule: Schedule,
    seq_lens: cute.Tensor,
    cu_seqlens_q: cute.Tensor | None,
    pool: Pool,
    mode: Int32,
    tokens: cutlass.Constexpr,
    causal: cutlass.Constexpr,
    costs: cutlass.Constexpr,
    stream: Any,
):
    """Launches `make_schedule` ahead of the attention kernel, inside a host function, where this call needs it."""
    needed = mode == MADE
    if cutlass.const_expr(schedule.blocks is not None):
        needed = mode < SHARED
    if needed:
        make_schedule(schedule, seq_lens, cu_seqlens_q, pool, tokens, causal, costs).launch(
            grid=(1, 1, 1), block=(WARPS * WARP, 1, 1), stream=stream, use_pdl=has_dependents()
        )


@cute.jit
def share_first(
    memory: cute.Pointer,  # (FIRST_WORDS,) int32, shared memory
    worker: Int32,
    seq_lens: cute.Tensor,
    pool: Pool,
    mine: Boolean,  # whether this warp is the one that finds the first split
    lane: Int32,
    costs: cutlass.Constexpr,
):
    """(a worker's first split with something to do, its line); all threads of a CTA call this, and one warp finds both
    for all. If every warp searched by itself it would take three times as long, as warps take turns to issue."""
    first = cute.make_tensor(memory, cute.make_layout(FIRST_WORDS))
    if mine:
        line = lay_out(seq_lens, lane, pool, costs)
        split, line = first_split(worker, seq_lens, line, pool, lane, costs)
        split = skip_empty(split, seq_lens, line, costs)
        if lane == 0:
            write_first(first, split, line, Boolean(False))
    cute.arch.sync_threads()
    split, line, _ = read_first(first)
    return split, line


@cute.jit
def first_of(
    schedule: Schedule,
    memory: cute.Pointer,
    worker: Int32,
    seq_lens: cute.Tensor,
    pool: Pool,
    mine: Boolean,
    lane: Int32,
    costs: cutlass.Constexpr,
):
    """Three results: a worker's first split with something to do, its line, and whether all requests fill the page
    table. Called by all threads of a CTA. They come from the schedule if the pool has one, else from the lengths.
    memory and mine: as in `share_first`."""
    line, split, is_filled = pool.filled, filled_split(worker, seq_lens.shape[0], pool), Boolean(False)
    if pool.scheduled > 0:
        split, line, is_filled = read_first(schedule.firsts[worker, None])
    else:
        if cutlass.const_expr(schedule.blocks is None):
            length = seq_lens[cutlass.min(split.request, seq_lens.shape[0] - 1)]
            is_filled = are_as_long(seq_lens, pool.tokens, lane, costs)
            split = Split(split.point, split.end, split.request, split.start, length)
        if is_filled:
            split = skip_empty(split, seq_lens, line, costs)
        else:
            split, line = share_first(memory, worker, seq_lens, pool, mine, lane, costs)
    return split, line, is_filled


# ------------------------------------------------------------------------------------------------ splits of a request
class SplitIndex(NamedTuple):
    """Which split of its request a split is, on an even line. index: 0 for the request's first split. count: how many
    splits the request has."""

    index: Int32
    count: Int32


@cute.jit
def split_index_of(worker: Int32, split: Split, tiles: Int32, line: Line) -> SplitIndex:
    """The index of a split on an even line, and how many splits its request has. The splits of a request belong to
    workers that follow each other. If there are several, the first of them is the last split of its worker, and the
    last of them is the first split of its worker, so waiting for later splits makes no circle (README.md)."""
    begin = split.start + line.lead
    first = begin // line.span  # the worker of the request's first split
    return SplitIndex(worker - first, (begin + tiles - 1) // line.span - first + 1)


def takes(split_index: SplitIndex, stride: Any) -> Any:
    """Whether a split takes what the one `stride` further on has, a power of two: a binary tree, whose root is split
    0."""
    return (split_index.index % (2 * stride) == 0) & (split_index.index + stride < split_index.count)


def takes_last(split_index: SplitIndex) -> Any:
    """Whether a split takes the partial of the request's last split and also other partials. Then it takes the last
    split's first: the last split of the request is the first one of its worker, and so is there early, while the
    workers of the other splits finish when this split's own worker does."""
    stride = split_index.count - 1 - split_index.index
    return (stride > 1) & (stride & (stride - 1) == 0) & takes(split_index, stride)


def first_stride(split_index: SplitIndex) -> Any:
    """The first stride of a split that may take what others have (`takes`)."""
    return cutlass.select_(takes_last(split_index), split_index.count - 1 - split_index.index, Int32(1))


def next_stride(split_index: SplitIndex, stride: Any) -> Any:
    """The stride behind one; past the last one it is one that is not taken."""
    last = Int32(takes_last(split_index)) * (split_index.count - 1 - split_index.index)
    following = cutlass.select_(stride == last, Int32(1), 2 * stride)
    return cutlass.select_(following == last, split_index.count, following)


def slot_of(worker: Any, request: Any) -> Any:
    """The slot of a worker's split of a request on an even line. The workers of a request follow each other, so its
    slots lie behind each other. No other split has the sum worker + request: the next request has a number higher by
    one, and its first worker is at the earliest this request's last one."""
    return worker + request


@cute.jit
def slots_of(worker: Int32, split: Split, tiles: Int32, line: Line, pool: Pool):
    """(splits of a request, slot of the first one); called by the worker that has the request's first split."""
    count, base = Int32(0), split.start
    if pool.fixed > 0:
        count = ceil_div(tiles, pool.fixed)
    else:
        count, base = split_index_of(worker, split, tiles, line).count, slot_of(worker, split.request)
    return count, base


def most_slots(requests: int, workers: int, tiles: int, fixed: int) -> int:
    """Slots that a batch may take. tiles: of the longest request that its page table can hold; on the host."""
    return requests * -(-tiles // fixed) if fixed else requests + workers
