"""A CTA's way through the splits of its worker: begin; while there is work, the split's request and KV tiles; publish.

    walk, split = begin(...)
    while walk.has_work(split):
        tiles = walk.tiles_of(split)                        first and end KV tile; the request's
        ...                                                 loads and products
        following = walk.next_split(split)
        place = walk.place_of(split, tiles)                 where its results go
        place = walk.merge_few(place, split, ...)           adds what the tree gives this split
        ...                                                 writes the output, or the partial into its slot
        walk.publish(walk.signal_of(place), thread)
        split = following
    walk.end(...)

Producers and consumers each go through all splits; only consumers merge and publish. README.md has the life of a split.
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
    """A thread's place. worker: of the CTA; tile: its query tile, of a request. thread: in the CTA; warp: the same in
    all of its lanes (`make_warp_uniform`); lane: in the warp."""

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
    """Where a split's results go. split_index: which split of its request it is. slot: of its partial. whole: it goes
    to the output, since the split is a whole request or the root of its request's tree."""

    split_index: SplitIndex
    slot: Int32
    whole: Boolean


class Group(NamedTuple):
    """Threads that meet. Both numbers are compile-time constants. barrier: named barrier; threads: how many."""

    barrier: Any
    threads: int


@dataclass(frozen=True, eq=False)
class Walk:
    """What stays the same from a CTA's first split to its last.

    seq_lens: (requests,) int32, global memory: keys of a request, or of a block of packed queries. queries: where their
    query rows are, with `block(request)` (`rows.Queries`). pool, line: how the batch is dealt. worker, tile: as in
    `Cta`. table: of `split_kv.combine`. flags: (slots · query tiles,) int32, global memory. merge: compile-time
    constants.
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

    def has_work(self, split: Split) -> Boolean:
        """False behind the worker's last split."""
        return scheduler.has_work(split)

    def tiles_of(self, split: Split) -> Tiles:
        """The split's KV tiles."""
        first, end, of_request, _ = scheduler.tiles_range(split, self.line, self.merge.costs)
        return Tiles(first, end, of_request)

    def next_split(self, split: Split) -> Split:
        """The worker's split behind this one; by a whole warp."""
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
        """The results of this worker's share of the requests without keys, where there are any (keyless > 0): they
        have no place on an even line. of_tile: `rows.TileRows`."""
        if keyless > 0:
            for request in cutlass.range(self.worker, self.seq_lens.shape[0], self.pool.workers, unroll=1):
                if self.seq_lens[request] <= 0:
                    block = self.queries.block(request)
                    rows.store_no_keys(results, block, of_tile, thread, num_threads)
                    if thread == 0:
                        list_request(self.table, request, Int32(0), Int32(0))

    @cute.jit
    def announce(self, split: Split, tiles: Tiles, row_range: cute.Tensor, thread: Int32) -> Boolean:
        """What comes first in a split: of a request's first one, says how many splits there are. Returns whether the
        split is one of several that workers merge. row_range: (2,) int32, shared memory."""
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
        """`announce` where workers merge as a tree only: of a request's first split, lists how many there are."""
        if tiles.first == 0 and thread == 0 and combine.lists(self.line, self.pool):
            count, base = scheduler.slots_of(self.worker, split, tiles.of_request, self.line, self.pool)
            list_request(self.table, split.request, count, base)

    # ---------------------------------------------------------------------------------------- merge
    def place_of(self, split: Split, tiles: Tiles) -> Place:
        """Where the results of a split go as long as nothing is merged: of a whole request, or of a share of one."""
        whole = tiles.end - tiles.first == tiles.of_request
        return Place(SplitIndex(Int32(0), Int32(1)), split.point, whole)

    @cute.jit
    def merge_tree(
        self, split_index: SplitIndex, request: Int32, add: cutlass.Constexpr, group: cutlass.Constexpr, thread: Int32
    ):
        """Adds to a split the partials that the tree gives it, in the tree's order. add(slot): adds one to the
        registers, by all threads of `group`."""
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
        """`merge_tree` for a split of a request of few; those of more are merged in shares of rows, in `end`. place: of
        `place_of`; is_cut: of `announce`."""
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
        """`merge_tree` for a split of a request of any number. place: of `place_of`."""
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
        """(slot of the flag, what is added to it) for `publish`: worked out ahead of the epilogue."""
        return combine.flag_of(place.split_index, place.slot)

    @cute.jit
    def publish(self, signal: cutlass.Constexpr, thread: Int32):
        """Says that a partial is there; behind a barrier of those that wrote it. signal: of `signal_of`."""
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
        """What comes behind the worker's last split, of `split_index` and `request`: the merge in shares of rows.
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
    searcher: cutlass.Constexpr,  # first thread of the warp that reads the lengths where there is no schedule
    merge: cutlass.Constexpr,
):
    """(the walk, the worker's first split with something to do); by all threads of a CTA. Also tells the combine which
    kind of splits there are."""
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
    """`begin` where the code is made for requests that all fill the page table: nothing is read."""
    split = scheduler.filled_split(cta.worker, seq_lens.shape[0], pool)
    if cta.tile == 0 and cta.worker == 0 and cta.thread == searcher:
        combine.write_split_kind(schedule.table, pool.filled, Boolean(True), pool)
    walk = Walk(seq_lens, queries, pool, pool.filled, cta.worker, cta.tile, schedule.table, flags, merge)
    return walk, split
