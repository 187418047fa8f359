"""How sparse_mla_v2 deals requests out anew by samples of their rows: its own functions on emulated threads."""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("greenlet")

from device_on_cpu import Pointer, Room, Tensor, make_layout, make_tensor, meet, run_cta
from greenlet import getcurrent

from mla_var3.catalogue import registry
from mla_var3.kernel.cute_python.split_kv.walk import Walk
from mla_var3.workload.sparse_decode import SparseProblem

PLAN = registry.get_plan(registry.KernelId.parse("cute-dsl/sparse_mla_v2"))
CONSUMER_THREADS, TILE = 256, 64


class Array(Pointer):
    """An array of shared memory as the kernel has it."""

    def __getitem__(self, place: int) -> Any:
        return (self + int(place)).load()

    def __setitem__(self, place: int, value: Any) -> None:
        (self + int(place)).store(value)

    def data_ptr(self) -> Array:
        return self

    def get_tensor(self, layout: Any) -> Tensor:
        return make_tensor(self, layout)


def array(words: int) -> Array:
    return Array([0] * words)


def on_cpu(room: Room) -> Any:
    """A copy of the version's module whose functions run on emulated threads, over the room's copies of split_kv."""
    module = sys.modules[PLAN.__module__]
    made = ModuleType("sparse_mla_v2 on a CPU")
    vars(made).update(vars(module))
    for name, value in vars(module).items():
        if callable(value) and not isinstance(value, type) and getattr(value, "__module__", "") == module.__name__:
            setattr(made, name, Room._function(value, made))
    names = vars(room.scheduler)
    vars(made).update({name: names[name] for name in ("cutlass", "cute", "Int32", "Boolean")})
    made.scheduler, made.combine = room.scheduler, room.combine
    said: list[bool] = []

    def named_any(_: Any, __: Any, holds: bool) -> bool:
        said.append(bool(holds))
        meet("cta")
        found = any(said)
        meet("cta")
        said.clear()
        meet("cta")
        return found

    made.named_any, made.named_sync = named_any, lambda *_: meet("cta")
    made.cute.arch.mbarrier_wait = lambda *_: None
    return made


ROOM = Room()
KERNEL = on_cpu(ROOM)


class Call:
    """A call whose rows name `named` tokens each, and where -1 stands behind them. holes: of rows that miss some."""

    def __init__(self, named: list[int], topk: int, workers: int, holes: set[int] | None = None) -> None:
        b, rng = len(named), random.Random(7)
        self.problem = SparseProblem(b=b, h=64, topk=topk, t=topk)
        self.geometry = PLAN.tiling_type(shortens=True, deals=True).geometry(self.problem)
        self.named, self.workers, self.tiles = named, workers, -(-topk // TILE)
        words = []
        for i, n in enumerate(named):
            row = [1] * n + [-1] * (topk - n)
            words += [-1 if i in (holes or ()) and rng.random() < 0.5 and j != n - 1 else x for j, x in enumerate(row)]
        indices = make_tensor(Pointer(words), make_layout((b, 1, topk), (topk, topk, 1)))
        self.caches = (KERNEL.Cache(SimpleNamespace(shape=(10, 10)), indices, None),)
        tokens, costs = self.tiles * TILE, self.geometry.costs
        self.pool = ROOM.scheduler.make_pool(b, tokens, workers, 0, ROOM.scheduler.OWN, costs)
        self.table = make_tensor(Pointer([-5] * (2 * b + 2)), make_layout(2 * b + 2))

    def worker(self, worker: int) -> dict[str, Any]:
        """What a worker does: its consumers' splits, and the tiles that its producers load."""
        geometry, b = self.geometry, len(self.named)
        storage = SimpleNamespace(
            spans=array(2 * KERNEL.SPANS), dealt=array(KERNEL.DEALT_WORDS), lengths=array(KERNEL.MOST_DEALT),
            is_short=array(1), query_full=array(1),
        )  # fmt: skip
        lengths = make_tensor(Pointer([self.tiles * TILE] * b), make_layout(b))
        walk = ROOM.walk.Walk(
            lengths, None, self.pool, self.pool.filled, worker, 0, self.table, None, geometry.merge, True
        )
        assert isinstance(walk, Walk)
        filled = ROOM.scheduler.filled_split(worker, b, self.pool)
        goes_on = filled.end > filled.start + self.pool.filled.lead
        filled = filled._replace(end=filled.end if goes_on else filled.point)

        def consumers() -> bool:
            thread = getcurrent().thread
            return bool(KERNEL.look_and_deal(filled, self.caches, storage, walk, 0, thread, thread // 32, geometry))

        early = any(run_cta(consumers, CONSUMER_THREADS))
        storage.is_short[0] = int(early)
        return {"walk": walk, "storage": storage, "filled": filled, "early": early, "dealt": storage.dealt[6] > 0} | {
            "splits": self.consumed(walk, storage, filled, early), "loaded": self.loaded(walk, storage, filled, early),
        }  # fmt: skip

    def consumed(self, walk: Any, storage: Any, filled: Any, early: bool) -> list[tuple[int, int, int, int, int, int]]:
        """(request, first tile, end tile, which split of its request, of how many, slot), as `consume` goes."""
        found, split = [], KERNEL.dealt_split(storage) if storage.dealt[6] else filled
        while walk.has_work(split):
            now, of_now = KERNEL.current(split, walk, storage, self.geometry)
            tiles = now.tiles_of(of_now)
            begin, stop = KERNEL.span_of(split, storage) if early else (tiles.first, tiles.end)
            index, count = 0, 1
            if now.line.lead > 0:
                index, count = ROOM.scheduler.split_index_of(walk.worker, of_now, tiles.of_request, now.line)
            assert tiles.first < tiles.end and begin < stop
            assert (tiles.first == 0) == (index == 0) or now.line.lead == 0
            found.append((split.request, begin, stop, int(index), int(count), walk.worker + split.request))
            split = now.next_split(of_now)
        return found

    def loaded(self, walk: Any, storage: Any, filled: Any, early: bool) -> list[tuple[int, int]]:
        """(request, tile) of the tiles that are loaded and not passed over, as `load` goes."""
        there = lambda place: walk.has_work(place.split) and place.tile < place.end  # noqa: E731
        tile, end, _ = walk.tiles_of(filled)
        place = KERNEL.Progress(filled, tile, end, -1)
        found = []
        if there(place):
            found.append((filled.request, tile))
        elif early:  # it has nothing to do where all rows are full
            place, asks = KERNEL.begin_again(storage, walk, self.geometry)
            assert bool(asks) == (storage.dealt[6] > 0 and walk.has_work(KERNEL.dealt_split(storage)))
        if not found:
            pass
        elif early:
            place, asks = KERNEL.begin_again(storage, walk, self.geometry)
            first = KERNEL.dealt_split(storage) if storage.dealt[6] else filled
            differs = first.request != filled.request
            assert bool(asks) == (differs and walk.has_work(first))
            if differs or not walk.has_work(first) or KERNEL.span_of(first, storage)[0] != tile:
                found = []
        else:
            place = KERNEL.next_place(place, storage, walk, self.geometry)
        while there(place):
            found.append((int(place.split.request), int(place.tile)))
            place = KERNEL.next_place(place, storage, walk, self.geometry)
        return found

    def check(self) -> bool:
        """Whether requests were dealt out anew; all that holds in any case is asked for."""
        done = [self.worker(w) for w in range(self.workers)]
        dealt = {x["dealt"] for x in done}
        assert len(dealt) == 1, "workers disagree"
        slots, by_request = set(), dict[int, list[tuple[int, int, int, int]]]()
        for worker in done:
            tiles = [(r, t) for r, begin, stop, *_ in worker["splits"] for t in range(begin, stop)]
            assert tiles == worker["loaded"]
            for request, begin, stop, index, count, slot in worker["splits"]:
                by_request.setdefault(request, []).append((index, count, begin, stop))
                assert slot not in slots and slot < len(self.named) + self.workers
                slots.add(slot)
        for request, n in enumerate(self.named):
            parts = sorted(by_request[request])
            if dealt == {True}:
                assert [x[0] for x in parts] == list(range(parts[0][1])) and len({x[1] for x in parts}) == 1
            covered = sorted(t for *_, begin, stop in parts for t in range(begin, stop))
            assert set(range(-(-n // TILE))) <= set(covered)
            named = [t for t in covered if t * TILE < n]
            assert len(named) == len(set(named)), "a tile is counted twice"
        return dealt == {True}

    def slowest(self) -> int:
        """Tiles of the worker that has the most."""
        return max(sum(stop - begin for _, begin, stop, *_ in self.worker(w)["splits"]) for w in range(self.workers))


def short(b: int, topk: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(1, topk - 1) for _ in range(b)]


@pytest.mark.parametrize(
    ("named", "topk", "workers"),
    [
        (short(20, 2048, 0), 2048, 10),  # whole requests
        (short(9, 2048, 1), 2048, 9),
        (short(6, 2048, 2), 2048, 13),  # requests in shares, and a combine
        (short(7, 1152, 3), 1152, 6),
        (short(11, 640, 4), 640, 7),
        ([0, 0, 2048, 0, 2048, 0, 1, 64, 65, 0, 2047], 2048, 6),
        ([2048] * 3 + [0] * 30, 2048, 12),
        (short(5, 2000, 5), 2000, 3),
    ],
)
def test_each_tile_with_tokens_belongs_to_one_split(named: list[int], topk: int, workers: int) -> None:
    Call(named, topk, workers).check()


def test_unequal_rows_are_dealt_out_and_the_slowest_worker_has_less() -> None:
    named = short(20, 2048, 0)
    call = Call(named, 2048, 10)
    assert call.check()
    tiles = sum(-(-n // TILE) for n in named)
    overhead = call.geometry.costs.overhead
    assert call.slowest() <= -(-(tiles + overhead * len(named)) // 10) + 1
    of_rows = [sum(-(-n // TILE) for n in named[2 * w : 2 * w + 2]) for w in range(10)]
    assert call.slowest() < max(of_rows)


@pytest.mark.parametrize(("b", "workers"), [(20, 10), (6, 13)])
def test_full_rows_and_rows_that_end_at_one_place_stay(b: int, workers: int) -> None:
    assert not Call([2048] * b, 2048, workers).check()
    assert not Call([1024] * b, 2048, workers).check()


def test_rows_with_holes_count_as_full() -> None:
    named = short(20, 2048, 0)
    assert not Call(named, 2048, 10, holes=set(range(20))).check()
    assert not Call([2048] * 20, 2048, 10, holes=set(range(20))).check()


def test_a_row_is_estimated_to_end_with_its_last_tile() -> None:
    """By eight samples, and eight more behind the last one that names a token. It is not too short, and too long by at
    most as far as these lie apart."""
    for tiles in range(8, 80):
        for n in range(0, tiles * TILE + 1, 7):
            is_token = lambda position, n=n: position < n  # noqa: E731
            eighths = sum(is_token(i * tiles // 8 * TILE) for i in range(8))
            last = max(eighths - 1, 0)
            first, end = last * tiles // 8, (last + 1) * tiles // 8
            parts = sum(is_token(first * TILE + i * (end - first) * TILE // 8) for i in range(8))
            found = int(KERNEL.estimated(eighths, parts, 1, tiles))
            assert found % TILE == 0 and 1 <= found // TILE <= tiles
            longer = found // TILE - max(-(-n // TILE), 1)
            assert 0 <= longer <= -(-(end - first) // 8) and (longer == 0 or tiles not in (8, 16, 32, 64)), (tiles, n)
