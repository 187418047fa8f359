"""Batches, and what each worker of a batch does: the room's own functions, called in the order in which a CTA does.

`Deal.steps` goes through a `split_kv.walk.Walk` as `consume` does in the versions of flash_mla and sparse_mla, and
notes what happens: what is computed, what is waited for, what is written, and who is told. It executes none of them.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from device_on_cpu import Pointer, Room, Tensor, make_layout, make_registers
from hypothesis import strategies as st

from mla_var3.kernel.cute_python.split_kv.combine import Merge
from mla_var3.kernel.cute_python.split_kv.partials import Partials
from mla_var3.kernel.cute_python.split_kv.scheduler import Costs, Line, Pool, Split, SplitIndex

#: What the versions have: flash_mla 23 and the sparse ones, and flash_mla 24.
COSTS = (
    Costs(tokens=64, overhead=3, combine=1, listed=2, level=3),
    Costs(tokens=64, overhead=2, combine=1, listed=2, level=2),
)


class Lengths:
    """Lengths as the kernel reads them: an index past the end is an error."""

    def __init__(self, values: tuple[int, ...]) -> None:
        self.values, self.shape = values, (len(values),)
        self.points: dict[Line, list[int]] = {}

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < len(self.values):
            raise IndexError(f"length {index} of {len(self.values)}")
        return self.values[index]


# ------------------------------------------------------------------------------------------------ a warp's work, alone
def locate(point: int, seq_lens: Lengths, line: Line, _: Any, costs: Costs) -> tuple[int, int]:
    """`scheduler.locate` without a warp: the request at a point of the line, and its first point."""
    begins = seq_lens.points.get(line)
    if begins is None:
        begins = seq_lens.points[line] = [0]
        for length in seq_lens.values:
            units = -(-max(length, 0) // costs.tokens)
            width = (line.lead + units if units else 0) if line.lead else max(1, -(-units // line.step))
            begins.append(begins[-1] + width)
    if point >= begins[-1]:
        return len(seq_lens.values), 0
    request = bisect.bisect_right(begins, point) - 1
    return request, begins[request]


def next_with_keys(request: int, seq_lens: Lengths) -> tuple[int, int]:
    """`scheduler.next_with_keys` without a warp."""
    for found in range(request, len(seq_lens.values)):
        if seq_lens.values[found] > 0:
            return found, seq_lens.values[found]
    return len(seq_lens.values), 0


def are_as_long(seq_lens: Lengths, tokens: int, _: Any, costs: Costs) -> bool:
    """`scheduler.are_as_long` without a warp."""
    most = -(-tokens // costs.tokens)
    return len(seq_lens.values) <= 256 and all(-(-length // costs.tokens) == most for length in seq_lens.values)


def lay_out_in(room: Room) -> Any:
    """`scheduler.lay_out` without a warp."""

    def lay_out(seq_lens: Lengths, _: Any, pool: Pool, costs: Costs) -> Line:
        units = [-(-max(length, 0) // costs.tokens) for length in seq_lens.values]
        chunks = sum(max(1, -(-n // pool.fixed)) for n in units) if pool.fixed else 0
        found: Line = room.scheduler.line_of(
            sum(units), max(units), chunks, len(units), units.count(0), pool.workers, pool.fixed, pool.shares,
            pool.combined, costs,
        )  # fmt: skip
        return found

    return lay_out


class QuietRoom(Room):
    """The room with these in place of what takes a warp (`test_warps` holds each to the one that it stands for), and
    with a note, in `noted`, in place of what a worker does to others' memory. begin_row_merge, merge_rows: those of
    `split_kv.combine` that a note stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Step] = []
        with_these = {"locate": locate, "next_with_keys": next_with_keys, "are_as_long": are_as_long}
        vars(self.scheduler).update(with_these, lay_out=lay_out_in(self))
        self.begin_row_merge, self.merge_rows = self.combine.begin_row_merge, self.combine.merge_rows
        vars(self.walk).update(
            take_flag=lambda flag: self.noted.append(Take(flag.offset)),
            raise_flag=lambda flag, value: self.noted.append(Raise(flag.offset, int(value))) if value else None,
            list_request=lambda table, *entry: self.noted.append(Listed(*entry)),
            named_sync=lambda barrier, threads: None,
        )
        vars(self.rows).update(store_no_keys=lambda _, block, *__: self.noted.append(NoKeys(block.request)))
        vars(self.combine).update(
            begin_row_merge=lambda flag, row_range: self.noted.append(BeginShares(flag.offset)),
            merge_rows=self.note_merge,
        )

    def note_merge(self, _: Any, walk: Any, __: Any, split_index: SplitIndex, request: int, *___: Any) -> None:
        if split_index.count > self.scheduler.TREE_SPLITS and split_index.index < split_index.count - 1:
            self.noted.append(MergeShare(split_index, request, self.scheduler.slot_of(walk.worker, request)))


ROOM = QuietRoom()


# ------------------------------------------------------------------------------------------------ a batch
@dataclass(frozen=True)
class Batch:
    """A call. tokens: that the page table has room for. fixed: tiles of a split that the caller fixes, or 0. combines:
    whether there may be a combine behind the attention. joined: where there is none, workers merge whatever number of
    splits a request has in a tree, as the sparse versions let them; else up to `TREE_SPLITS`, and more in shares of
    rows."""

    lengths: tuple[int, ...]
    tokens: int
    workers: int
    fixed: int = 0
    costs: Costs = COSTS[0]
    combines: bool = True
    joined: bool = False

    @cached_property
    def units(self) -> tuple[int, ...]:
        return tuple(-(-max(length, 0) // self.costs.tokens) for length in self.lengths)

    @cached_property
    def table_units(self) -> int:
        """Tiles of a request that fills its row of the page table."""
        return -(-self.tokens // self.costs.tokens)


#: Batches that everything is asked of, whatever the random ones are: what each of them is there for.
KNOWN = {
    "one request of no keys": Batch((0,), 64, 1),
    "one request of one key": Batch((1,), 64, 132),
    "requests without keys only": Batch((0,) * 7, 1000, 4),
    "one long request alone": Batch((200_000,), 200_000, 132),
    "one long among hundreds": Batch((*(100,) * 300, 150_000, *(1,) * 99), 150_000, 132),
    "one long among hundreds without keys": Batch((*(0,) * 300, 150_000, *(0,) * 99), 150_000, 132),
    "shares, and page tables that are full": Batch((8192,) * 2, 8192, 66),
    "shares of unlike lengths": Batch((8192, 100, 0, 4000), 8192, 66),
    "splits of 128 tokens": Batch((0, 1, 128, 129, 5000), 8192, 13, fixed=2),
    "splits of 128 tokens that fill all page tables": Batch((64 * 7,) * 3, 64 * 7, 5, fixed=2),
    "splits of 128 tokens where workers could merge a tree": Batch((64 * 7, 0, 300), 64 * 7, 5, fixed=2, joined=True),
    "workers merge two or three splits": Batch((3000,) * 30, 3000, 20),
    "workers merge shares of rows": Batch((*(60,) * 20, 30_000), 30_000, 24),
    "two long ones behind each other": Batch((*(60,) * 20, 30_000, 29_000, 0, 60), 30_000, 24),
    "gaps without keys": Batch((0, 2000, 0, 0, 900, 0, 3000, 64) * 6, 3000, 20),
    "workers merge a tree of many splits": Batch((*(60,) * 20, 30_000), 30_000, 24, combines=False, joined=True),
    "a combine reads listed splits": Batch((9000, 100, 5000, 0, 70), 10_000, 16),
    "as many workers as requests": Batch((64,) * 132, 64, 132),
}


@st.composite
def batches(draw: Any, most_workers: int = 264, hundreds: bool = True) -> Batch:
    """Batches of all kinds: lengths of 0, of 1, at the edges of tiles, equal ones, one long among many."""
    costs = draw(st.sampled_from(COSTS))
    edges = [0, 1, costs.tokens - 1, costs.tokens, costs.tokens + 1, 2 * costs.tokens, 9 * costs.tokens + 1]
    several = st.lists(st.sampled_from(edges) | st.integers(0, 6_000), min_size=1, max_size=40)
    equal = st.builds(
        lambda length, b: [length] * b, st.sampled_from(edges) | st.integers(0, 6_000), st.integers(1, 40)
    )

    def one_long(b: int, short: int, long: int, where: int, gaps: int) -> list[int]:
        lengths = [0 if gaps and i % gaps == 0 else short + i % 3 for i in range(b)]
        lengths[where % b] = long
        return lengths

    few_or_many = st.integers(2, 600) if hundreds else st.integers(2, 40)
    long = st.builds(
        one_long,
        few_or_many,
        st.integers(0, 200),
        st.integers(1_000, 200_000),
        st.integers(0, 10**6),
        st.integers(0, 4),
    )
    lengths = draw(st.one_of(several, equal, long))
    workers = draw(st.integers(1, 24) | st.sampled_from([w for w in (66, 132, 264) if w <= most_workers] or [1]))
    fixed = draw(st.just(0) | st.just(0) | st.integers(1, 40))
    room_left = draw(st.sampled_from([0, 0, 1, 500, 20_000]))
    # Of flash_mla's versions, of the sparse ones, and of those where they are told to launch no combine.
    of_sparse = [(True, True)] if fixed else [(True, True), (False, True)]
    combines, joined = draw(st.sampled_from([(True, False), *of_sparse]))
    return Batch(tuple(lengths), max(1, max(lengths) + room_left), workers, fixed, costs, combines, joined)


# ------------------------------------------------------------------------------------------------ what a worker does
@dataclass(frozen=True)
class Tiles:
    """KV tiles first to end of a request are computed."""

    request: int
    first: int
    end: int


@dataclass(frozen=True)
class NoKeys:
    """The results of a request without keys are written."""

    request: int


@dataclass(frozen=True)
class Listed:
    """A request's entry of the combine's table is written."""

    request: int
    count: int
    base: int


@dataclass(frozen=True)
class BeginShares:
    """The worker of a request's first split says that it has begun (`combine.begin_row_merge`)."""

    base: int


@dataclass(frozen=True)
class Take:
    """Waits for the partial result in a slot, lowers its flag and adds it."""

    slot: int


@dataclass(frozen=True)
class Output:
    """What the worker holds of a request is its result."""

    request: int


@dataclass(frozen=True)
class Partial:
    """What the worker holds of a request goes to a slot."""

    request: int
    slot: int


@dataclass(frozen=True)
class Raise:
    """`value` is added to the flag of a slot: what was written before is there."""

    slot: int
    value: int


@dataclass(frozen=True)
class MergeShare:
    """The worker merges a share of the rows of its last split's request (`combine.merge_rows`)."""

    split_index: SplitIndex
    request: int
    slot: int


Step = Tiles | NoKeys | Listed | BeginShares | Take | Output | Partial | Raise | MergeShare


@dataclass
class Deal:
    """A batch and its schedule."""

    batch: Batch
    room: QuietRoom = field(default_factory=lambda: ROOM)

    @cached_property
    def lengths(self) -> Lengths:
        return Lengths(self.batch.lengths)

    @cached_property
    def pool(self) -> Pool:
        batch, scheduler = self.batch, self.room.scheduler
        requests, costs = len(batch.lengths), batch.costs
        if batch.combines:
            made: Pool = scheduler.make_pool(requests, batch.tokens, batch.workers, batch.fixed, scheduler.OWN, costs)
            return made
        merged: Pool = scheduler.make_merged_pool(requests, batch.tokens, batch.workers, costs)
        return merged

    @cached_property
    def line(self) -> Line:
        """By the lengths, whatever the page table's width is."""
        found: Line = self.room.scheduler.lay_out(self.lengths, 0, self.pool, self.batch.costs)
        return found

    def first_of(self, worker: int) -> tuple[Split, Line]:
        """A worker's first split with something to do, by the lengths, and its line."""
        scheduler, costs = self.room.scheduler, self.batch.costs
        split, line = scheduler.first_split(worker, self.lengths, self.line, self.pool, 0, costs)
        return scheduler.skip_empty(split, self.lengths, line, costs), line

    def behind(self, split: Split, line: Line) -> Split:
        """The worker's next split: further on, so that it comes to an end."""
        found: Split = self.room.scheduler.next_split(split, self.lengths, line, self.batch.costs)
        assert found.point > split.point, f"{found} is not behind {split}"
        return found

    def splits(self, worker: int) -> Iterator[tuple[Split, Line, int, int, int]]:
        """(split, line, first tile, end tile, tiles of the request) of all splits of a worker, in order."""
        scheduler, costs = self.room.scheduler, self.batch.costs
        split, line = self.first_of(worker)
        while scheduler.has_work(split):
            first, end, units, _ = scheduler.tiles_range(split, line, costs)
            yield split, line, first, end, units
            split = self.behind(split, line)

    @cached_property
    def dealt(self) -> list[list[tuple[int, int, int]]]:
        """(request, first tile, end tile) of each worker's splits."""
        workers = range(self.batch.workers)
        return [[(s.request, first, end) for s, _, first, end, _ in self.splits(w)] for w in workers]

    def walk(self, worker: int, line: Line, merge: Merge, tile: int, flags: Any) -> Any:
        """The room's `Walk` of a worker and query tile."""
        queries = self.room.rows.Queries(merge.s)
        return self.room.walk.Walk(self.lengths, queries, self.pool, line, worker, tile, None, flags, merge)

    def steps(self, worker: int) -> list[Step]:
        """What the consumers of a worker do, in order, as far as one thread of a query tile knows it."""
        joined, noted = self.batch.joined, list[Step]()
        self.room.noted = noted
        split, line = self.first_of(worker)
        merge = Merge(1, 1, 1, Partials(1, 64, 256), self.batch.costs)
        walk = self.walk(worker, line, merge, 0, Tensor(Pointer([]), make_layout(0)))
        group, row_range, thread = self.room.walk.Group(0, 256), make_registers(2), 0
        walk.store_empty(None, line.empty, None, thread, 256)
        split_index = SplitIndex(0, 1)
        while walk.has_work(split):
            tiles, split_index, is_cut = walk.tiles_of(split), SplitIndex(0, 1), False
            if joined:
                walk.list_splits(split, tiles, thread)
            else:
                is_cut = walk.announce(split, tiles, row_range, thread)
            following = walk.next_split(split)
            assert following.point > split.point, f"{following} is not behind {split}"
            if tiles.first < tiles.end:
                noted.append(Tiles(split.request, tiles.first, tiles.end))
                place = walk.place_of(split, tiles)
                if joined:
                    place = walk.merge_all(place, split, tiles, self.added, group, thread)
                else:
                    place = walk.merge_few(place, split, tiles, is_cut, self.added, group, thread)
                    split_index = place.split_index
                noted.append(Output(split.request) if place.whole else Partial(split.request, place.slot))
                if joined:
                    walk.publish_all(split, tiles, thread)
                else:
                    walk.publish(walk.signal_of(place), thread)
            else:
                self.room.rows.store_no_keys(None, walk.queries.block(split.request), None, thread, 256)
            split = following
        if not joined:
            walk.end(None, split_index, split.request, row_range, group, thread, (8, 2))
        return noted

    def added(self, slot: int) -> None:
        """What a merge adds is what it has waited for last."""
        assert self.room.noted[-1] == Take(slot)

    @cached_property
    def all_steps(self) -> list[list[Step]]:
        return [self.steps(worker) for worker in range(self.batch.workers)]
