"""A grid of CTAs that goes through the steps of a schedule, with flags in memory and in any order.

A CTA is a greenlet, which gives way in front of every access to a flag. CTAs are launched from the last worker on, as
the kernels number them, and only so many are on the device at once: one more comes when one has ended. Where nobody
that is there can go on, that is a deadlock. What a split has computed is a range of tiles, so that a merge can say what
it found: the flags are right if every merge finds all that it needs, and each query row is written once.

`begin_row_merge`, `take_rows` and `merge_rows` of `split_kv.combine` run themselves.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from device_on_cpu import Layout, Pointer, Tensor, int32, make_registers
from greenlet import getcurrent, greenlet
from schedule_properties import combine_reads
from schedule_walked import (
    BeginShares,
    Deal,
    Listed,
    MergeShare,
    NoKeys,
    Output,
    Partial,
    QuietRoom,
    Raise,
    Take,
    Tiles,
)


class Flags(list[int]):
    """Words that count how often they were written."""

    written = 0

    def __setitem__(self, index: Any, value: Any) -> None:
        self.written += 1
        super().__setitem__(index, value)


class Cta(greenlet):
    """A CTA. seen: how often flags had been written when it last read one."""

    grid: Grid
    seen: int


def atomic_add(flag: Pointer, value: int, sem: str, scope: str) -> int:
    cta = getcurrent()
    cta.parent.switch("goes on")
    before: int = flag.load()
    flag.store(int32(before + value))
    cta.seen = cta.grid.flags.written
    return before


def load(flag: Pointer, _: Any = None, sem: str = "acquire", scope: str = "gpu") -> int:
    """Reads a flag again: nothing for a CTA to do before somebody has written one."""
    cta = getcurrent()
    cta.parent.switch("waits")
    cta.seen = cta.grid.flags.written
    found: int = flag.load()
    return found


def add_splits(results: Any, word: Any, kind: Any, splits: Any, *_: Any) -> Any:
    """In place of the sum: whether what it would read is there."""
    getcurrent().grid.find_all(splits.request, range(splits.base, splits.base + splits.count))
    return kind


def store(tensors: Any, place: Any, *_: Any) -> None:
    getcurrent().grid.rows[tuple(place)] += 1


def room_of_a_grid() -> QuietRoom:
    room = QuietRoom()
    stand_ins = {"add_splits": add_splits, "store": store, "named_sync": lambda *_: None}
    vars(room.combine).update(stand_ins, Sums=SimpleNamespace(make=lambda vectors: None))
    room.combine.cute.arch.atomic_add, room.combine.cute.arch.load = atomic_add, load
    return room


GRID = room_of_a_grid()


@dataclass
class Grid:
    """A query tile's CTAs, of which up to `resident` are there at once. merge: of `split_kv.combine`."""

    deal: Deal
    merge: Any
    tile: int
    resident: int
    seed: int
    rows: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)
    outputs: Counter[int] = field(default_factory=Counter)
    partials: dict[int, tuple[int, list[tuple[int, int]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        batch = self.deal.batch
        self.flags = Flags([0] * ((len(batch.lengths) + batch.workers) * self.merge.partials.tiles))
        self.shape = (8, min(2, self.merge.row_vectors))

    # ------------------------------------------------------------------------------------------------ a CTA
    def flag(self, slot: int) -> Pointer:
        return Pointer(self.flags, slot * self.merge.partials.tiles + self.tile)

    def find(self, slot: int) -> tuple[int, list[tuple[int, int]]]:
        assert slot in self.partials, f"slot {slot} is read before it is written"
        return self.partials[slot]

    def find_all(self, request: int, slots: Iterable[int]) -> None:
        found = [self.find(slot) for slot in slots]
        assert {whose for whose, _ in found} == {request}
        self.complete(request, [part for _, parts in found for part in parts])

    def complete(self, request: int, parts: list[tuple[int, int]]) -> None:
        ends = [0, *(end for _, end in sorted(parts))]
        assert [first for first, _ in sorted(parts)] == ends[:-1] and ends[-1] == self.deal.batch.units[request]

    def work(self, worker: int) -> None:
        """What a CTA does, as far as others see it."""
        room = self.deal.room
        flags = Tensor(Pointer(self.flags), Layout((len(self.flags),), (1,)))
        shares, held = make_registers(2), list[tuple[int, int]]()
        for step in self.deal.steps(worker):
            if isinstance(step, BeginShares):
                room.begin_row_merge(self.flag(step.base), shares)
            elif isinstance(step, Tiles):
                held = [(step.first, step.end)]
            elif isinstance(step, Take):
                getcurrent().seen = -1  # it has not read this flag
                while load(self.flag(step.slot)) == 0:
                    pass
                self.flag(step.slot).store(0)
                held = held + self.find(step.slot)[1]
            elif isinstance(step, Output):
                self.complete(step.request, held)
                self.outputs[step.request] += 1
            elif isinstance(step, Partial):
                assert step.slot not in self.partials
                self.partials[step.slot] = step.request, held
            elif isinstance(step, Raise):
                atomic_add(self.flag(step.slot), step.value, "release", "gpu")
            elif isinstance(step, NoKeys):
                self.outputs[step.request] += 1
            elif isinstance(step, MergeShare):
                walk = self.deal.walk(worker, self.deal.line, self.merge, self.tile, flags)
                tensors = room.combine.Tensors(None, walk.queries)
                # The first thread takes the shares and lowers the flag; of each other warp, its rows.
                for thread in range(0, room.combine.THREADS, room.combine.WARP):
                    room.merge_rows(tensors, walk, shares, step.split_index, step.request, 0, thread, self.shape)
            else:
                assert isinstance(step, Listed)

    # ------------------------------------------------------------------------------------------------ the device
    def run(self) -> None:
        """Runs all CTAs to their end and looks at what they leave."""
        chance = random.Random(self.seed)
        to_come, there, waiting = list(range(self.deal.batch.workers)), list[Cta](), set[Cta]()
        while to_come or there:
            while to_come and len(there) < self.resident:
                worker = to_come.pop()
                cta = Cta(lambda worker=worker: self.work(worker))
                cta.grid, cta.seen = self, -1
                there.append(cta)
            ready = [cta for cta in there if cta not in waiting or cta.seen != self.flags.written]
            assert ready, f"deadlock: {len(there)} CTAs wait, {len(to_come)} have not been launched"
            cta = chance.choice(ready)
            waiting.discard(cta)
            said = cta.switch()
            if cta.dead:
                there.remove(cta)
            elif said == "waits":
                waiting.add(cta)
        self.look()

    def look(self) -> None:
        """All flags are 0 again, for the next launch, and each request's rows are written once."""
        assert not any(self.flags), "a flag is left raised"
        merge, partials = self.merge, self.merge.partials
        of_head = partials.tiles // merge.h_kv
        kv_head, first_row = self.tile // of_head, self.tile % of_head * partials.rows
        rows = range(first_row, min(first_row + partials.rows, merge.rows))
        vectors = range(0, merge.row_vectors, self.shape[1])
        # A combine runs behind all of them.
        for request, slots in (combine_reads(self.deal) or {}).items():
            self.find_all(request, slots)
            self.outputs[request] += 1
        by_shares = {request for request, _, _, _ in self.rows}
        for request in range(len(self.deal.batch.lengths)):
            assert self.outputs[request] == (request not in by_shares), f"request {request}"
        expected = {(r, kv_head, row, vector): 1 for r in by_shares for row in rows for vector in vectors}
        assert self.rows == expected, "rows of a shared merge that nobody writes, or two"
