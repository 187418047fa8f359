"""A CTA's way through the splits of its worker, as a recipe for a kernel.

A version is one attention kernel. Its producers are the warps that load KV tiles, and its consumers are those that
compute. Both roles go through all splits of the worker with `has_work`, `tiles_of` and `next_split`. Everything else in
the loop is the consumers' work:

    sync.grid_wait()                                        or `wait_for_launch`: `begin` reads lengths, which a kernel
                                                            before may have written
    walk, split = begin(...)                                by all threads of the CTA
    walk.store_empty(...)                                   zeros for requests that have no place on the line
    split_index = SplitIndex(0, 1)
    while walk.has_work(split):
        tiles = walk.tiles_of(split)                        first and end KV tile, and the tiles of the request
        split_index = SplitIndex(0, 1)                      set back for each split; `end` gets the last split's
        is_cut = walk.announce(split, tiles, row_range, thread)
        if tiles.first < tiles.end:
            ...                                             loads and products
            following = walk.next_split(split)
            place = walk.place_of(split, tiles)             where the results go, unless workers merge
            place = walk.merge_few(place, split, tiles, is_cut, ...)    adds the partials that the tree gives this split
            split_index, signal = place.split_index, walk.signal_of(place)
            ...                                             writes the output, or the partial into its slot
            named_sync(...)                                 a barrier of all threads that wrote
            walk.publish(signal, thread)
        else:                                               a request without keys: nothing is merged or published
            rows.store_no_keys(...)
            following = walk.next_split(split)
        split = following
    walk.end(results, split_index, split.request, row_range, ...)

The sparse kernels take a second path, on which workers merge any number of splits as a tree: `list_splits` takes the
place of `announce`, `merge_all` that of `merge_few`, and `publish_all` that of `signal_of` and `publish`. That path has
no `is_cut`, keeps no `split_index`, and calls no `end`. README.md has the life of a split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from mla_var3.kernel.cute_python.prims.sync import named_sync, raise_flag, take_flag
from mla_var3.kernel.cute_python.split_kv import combine, rows, scheduler
from mla_var3.kernel.cute_python.split_kv.combine import Merge
from mla_var3.kernel.cute_python.split_kv.partials import Results, list_request
from mla_var3.kernel.cute_python.split_kv.scheduler import Line, Pool, Schedule, Split, SplitIndex


class Cta(NamedTuple):
    """Where a thread is. worker: the CTA's worker. tile: the CTA's query tile, counted in a request. thread: its number
    in the CTA. warp: its warp, the same value in all lanes (`make_warp_uniform`). lane: its number in the warp."""

    worker: Int32
    tile: Int32
    thread: Int32
    warp: Int32
    lane: Int32


class Tiles(NamedTuple):
    """The KV tiles of a split, first to end, and how many its request has. A split may have none: a request without
    keys."""

    first: Int32
    end: Int32
    of_request: Int32


class Place(NamedTuple):
    """Where a split's results go. split_index: which split of its request it is, where workers merge that request;
    (0, 1) for whole requests, for shares and fixed splits, and wherever a combine merges: such a split raises no flag.
    slot: the slot of its partial; on an even line it is right only behind `merge_few` or `merge_all`. whole: the
    results go to the output, since the split is a whole request or the root of its request's tree."""

    split_index: SplitIndex
    slot: Int32
    whole: Boolean


class Group(NamedTuple):
    """Threads that wait for each other. Both fields are compile-time constants. barrier: the number of the named
    barrier. threads: how many threads meet there."""

    barrier: Any
    threads: int


@dataclass(frozen=True, eq=False)
class Walk:
    """What stays the same from a CTA's first split to its last.

    seq_lens: (requests,) int32, global memory: keys of a request, or of a block of packed queries. queries: where their
    query rows are, with `block(request)` (`rows.Queries`). pool, line: how the batch is dealt. worker, tile: as in
    `Cta`. table: the splits table that the combine reads (`Schedule.table`), not a page table. flags: (slots · query
    tiles,) int32, global memory. merge: compile-time constants (`combine.Merge`). full: whether the code is made for
    requests that all fill the page table; then no length is read, and no request is without keys.
    """

    seq_lens: Any
    queries: Any
    pool: Pool
    line: Line
    worker: Any
    tile: Any
    table: Any
    flags: Any
    merge: Merge
    full: bool = False

    def has_work(self, split: Split) -> Boolean:
        """False behind the worker's last split."""
        return scheduler.has_work(split)

    def tiles_of(self, split: Split) -> Tiles:
        """The split's KV tiles."""
        first, end, of_request, _ = scheduler.tiles_range(split, self.line, self.merge.costs)
        return Tiles(first, end, of_request)

    def next_split(self, split: Split) -> Split:
        """The worker's split behind this one; by a whole warp."""
        if self.full:
            return scheduler.next_full_split(split, self.seq_lens.shape[0], self.line, self.merge.costs)
        return scheduler.next_split(split, self.seq_lens, self.line, self.merge.costs)

    def flag(self, slot: Int32) -> cute.Pointer:
        """The flag of a slot and this query tile."""
        return self.flags.iterator + (slot * self.merge.partials.tiles + self.tile)

    # ---------------------------------------------------------------------------------------- begin
    @cute.jit
    def store_empty(
        self, results: Results, keyless: Int32, of_tile: cutlass.Constexpr, thread: Int32,
        num_threads: cutlass.Constexpr,
    ):  # fmt: skip
        """Writes the results of this worker's part of the requests without keys, where there are any (keyless > 0):
        they have no point on an even line, so the loop over splits does not meet them. of_tile: `rows.TileRows`."""
        if keyless > 0:
            for request in cutlass.range(self.worker, self.seq_lens.shape[0], self.pool.workers, unroll=1):
                if self.seq_lens[request] <= 0:
                    block = self.queries.block(request)
                    rows.store_no_keys(results, block, of_tile, thread, num_threads)
                    if thread == 0:
                        list_request(self.table, request, Int32(0), Int32(0))

    @cute.jit
    def announce(self, split: Split, tiles: Tiles, row_range: cute.Tensor, thread: Int32) -> Boolean:
        """Begins a split. For the first split of a request, one thread lists the request's splits for the combine, or,
        where workers will merge them in shares of rows, says in the request's flag that this worker has begun. Returns
        whether this split is one of several that workers merge. row_range: (2,) int32, shared memory, which keeps until
        `end` how many shares of rows others have left to this worker."""
        is_cut = self.line.lead > 0 and self.pool.combined == 0 and tiles.end - tiles.first < tiles.of_request
        if tiles.first == 0 and thread == 0 and (is_cut or combine.lists(self.line, self.pool)):
            count, base = scheduler.slots_of(self.worker, split, tiles.of_request, self.line, self.pool)
            if combine.lists(self.line, self.pool):
                list_request(self.table, split.request, count, base)
            elif count > scheduler.TREE_SPLITS:
                combine.begin_row_merge(self.flag(base), row_range)
        return is_cut

    @cute.jit
    def list_splits(self, split: Split, tiles: Tiles, thread: Int32):
        """`announce` where workers merge as a tree only. For the first split of a request, one thread lists the
        request's splits for the combine, if one is launched."""
        if tiles.first == 0 and thread == 0 and combine.lists(self.line, self.pool):
            count, base = scheduler.slots_of(self.worker, split, tiles.of_request, self.line, self.pool)
            list_request(self.table, split.request, count, base)

    # ---------------------------------------------------------------------------------------- merge
    def place_of(self, split: Split, tiles: Tiles) -> Place:
        """Where the results of a split go if workers merge nothing: to the output if the split is the whole request,
        else to the slot of its point. That slot is final for shares and fixed splits. On an even line it is not, so
        `merge_few` or `merge_all` is always called on the result."""
        whole = tiles.end - tiles.first == tiles.of_request
        return Place(SplitIndex(Int32(0), Int32(1)), split.point, whole)

    @cute.jit
    def merge_tree(
        self, split_index: SplitIndex, request: Int32, add: cutlass.Constexpr, group: cutlass.Constexpr, thread: Int32
    ):
        """Adds to a split the partials that the tree gives it, in the tree's order. add(slot) adds one partial to the
        registers and is called by all threads of `group`."""
        step = scheduler.first_stride(split_index)
        while scheduler.takes(split_index, step):
            slot = scheduler.slot_of(self.worker + step, request)
            if thread == 0:
                take_flag(self.flag(slot))
            named_sync(group.barrier, group.threads)
            add(slot)
            step = scheduler.next_stride(split_index, step)

    @cute.jit
    def merge_few(
        self, place: Place, split: Split, tiles: Tiles, is_cut: Boolean, add: cutlass.Constexpr,
        group: cutlass.Constexpr, thread: Int32,
    ) -> Place:  # fmt: skip
        """The final place of a split; called for every split that has tiles. On an even line this sets the slot. Where
        workers merge a request of up to `TREE_SPLITS` splits, this also calls `merge_tree`; more splits are merged in
        shares of rows, in `end`. place: what `place_of` returned. is_cut: what `announce` returned."""
        split_index, slot, whole = place
        if self.line.lead > 0:
            slot = scheduler.slot_of(self.worker, split.request)
            if is_cut:
                split_index = scheduler.split_index_of(self.worker, split, tiles.of_request, self.line)
                if split_index.count <= scheduler.TREE_SPLITS:
                    self.merge_tree(split_index, split.request, add, group, thread)
                    whole = split_index.index == 0
        return Place(split_index, slot, whole)

    @cute.jit
    def merge_all(
        self, place: Place, split: Split, tiles: Tiles, add: cutlass.Constexpr, group: cutlass.Constexpr, thread: Int32
    ) -> Place:
        """`merge_few` where workers merge as a tree only, whatever the number of a request's splits. place: what
        `place_of` returned."""
        split_index, slot, whole = place
        if self.line.lead > 0:
            slot = scheduler.slot_of(self.worker, split.request)
            if self.pool.combined == 0 and not whole:
                split_index = scheduler.split_index_of(self.worker, split, tiles.of_request, self.line)
                self.merge_tree(split_index, split.request, add, group, thread)
                whole = split_index.index == 0
        return Place(split_index, slot, whole)

    # ---------------------------------------------------------------------------------------- publish
    def signal_of(self, place: Place) -> tuple[Any, Any]:
        """(slot of the flag, what is added to it) for `publish`; computed before the results are written."""
        return combine.flag_of(place.split_index, place.slot)

    @cute.jit
    def publish(self, signal: cutlass.Constexpr, thread: Int32):
        """Raises the flag of a partial that another worker waits for; behind a barrier of the threads that wrote the
        partial. Adds nothing where nobody waits: for output rows, where a combine merges, and for a split of many that
        is not the request's last, which `end` reports. signal: what `signal_of` returned."""
        slot, raised = signal
        raise_flag(self.flag(slot), Int32(thread == 0) * raised)

    @cute.jit
    def publish_all(self, split: Split, tiles: Tiles, thread: Int32):
        """`publish` where workers merge as a tree only."""
        sends = (thread == 0) & (self.line.lead > 0) & (tiles.first > 0) & (self.pool.combined == 0)
        raise_flag(self.flag(scheduler.slot_of(self.worker, split.request)), Int32(sends))

    @cute.jit
    def end(
        self, results: Results, split_index: SplitIndex, request: Int32, row_range: cute.Tensor,
        group: cutlass.Constexpr, thread: Int32, shape: cutlass.Constexpr,
    ):  # fmt: skip
        """The merge in shares of rows, behind the worker's last split. split_index: of that split. request: of the
        place behind that split, which is `split.request` behind the loop. Only a worker whose last split leaves its
        request unfinished merges rows, and the place behind such a split has the same request (`scheduler.next_place`).
        shape: as those of `combine.SHAPES`."""
        tensors = combine.Tensors(results, self.queries)
        combine.merge_rows(tensors, self, row_range, split_index, request, group.barrier, thread, shape)


@cute.jit
def begin(
    schedule: Schedule,
    flags: cute.Tensor,
    seq_lens: cute.Tensor,
    queries: cutlass.Constexpr,
    pool: Pool,
    cta: Cta,
    memory: cute.Pointer,  # (scheduler.FIRST_WORDS,) int32, shared memory
    searcher: cutlass.Constexpr,  # first thread of the warp that finds the first split where there is no schedule
    merge: cutlass.Constexpr,
):
    """(the walk, the worker's first split with something to do); by all threads of a CTA. The searcher of one CTA also
    writes the word that tells the combine which kind of splits the batch has."""
    split, line, is_filled = scheduler.first_of(
        schedule, memory, cta.worker, seq_lens, pool, cta.warp == searcher // 32, cta.lane, merge.costs
    )  # fmt: skip
    if cta.tile == 0 and cta.worker == 0 and cta.thread == searcher:
        combine.write_split_kind(schedule.table, line, is_filled, pool)
    walk = Walk(seq_lens, queries, pool, line, cta.worker, cta.tile, schedule.table, flags, merge)
    return walk, split


@cute.jit
def begin_filled(
    schedule: Schedule,
    flags: cute.Tensor,
    seq_lens: cute.Tensor,
    queries: cutlass.Constexpr,
    pool: Pool,
    cta: Cta,
    searcher: cutlass.Constexpr,
    merge: cutlass.Constexpr,
):
    """`begin` where the code is made for requests that all fill the page table: neither this nor the walk reads a
    length, and each split has tiles. A worker with points of a request's lead and none of its tiles has no work: for
    a split without tiles the loop would write zeros to `out`, where another worker writes the request's results."""
    line, split = pool.filled, scheduler.filled_split(cta.worker, seq_lens.shape[0], pool)
    split = split._replace(end=cutlass.select_(split.end > split.start + line.lead, split.end, split.point))
    if cta.tile == 0 and cta.worker == 0 and cta.thread == searcher:
        combine.write_split_kind(schedule.table, line, Boolean(True), pool)
    walk = Walk(seq_lens, queries, pool, line, cta.worker, cta.tile, schedule.table, flags, merge, full=True)
    return walk, split
