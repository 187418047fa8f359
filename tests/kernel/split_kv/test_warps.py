"""What takes a warp in the scheduler, on 32 emulated lanes: each function against the same without a warp."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_on_cpu import WARP, Pointer, Room, make_layout, make_tensor, of_values, run_cta
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_walked import COSTS, Batch, Deal, are_as_long, batches, locate, next_with_keys

from mla_var3.kernel.cute_python.split_kv.combine import Merge
from mla_var3.kernel.cute_python.split_kv.partials import Partials

#: The reciprocal as it is, and one unit in the last place off either way, which is what the device promises.
ROOMS = {ulps: Room(ulps) for ulps in (0, -1, 1)}
OF_ROOMS = st.sampled_from(list(ROOMS.values()))


def some(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True)


def of_all_lanes(work: Any, threads: int = WARP) -> Any:
    """What the lanes of a warp return, which has to be the same in all."""
    first, *others = run_cta(work, threads)
    assert all(other == first for other in others)
    return first


@some(40)
@given(batches(), OF_ROOMS)
def test_a_warp_lays_out_the_line_from_all_lengths(batch: Batch, room: Room) -> None:
    deal, s = Deal(batch), room.scheduler
    lengths = of_values(batch.lengths)
    found = of_all_lanes(lambda: s.lay_out(lengths, s.cute.arch.lane_idx(), deal.pool, batch.costs))
    assert found == deal.line


@some(60)
@given(batches(), st.integers(0, 1 << 30), OF_ROOMS)
def test_a_warp_finds_the_request_at_a_point_and_past_the_last_one(batch: Batch, at: int, room: Room) -> None:
    deal, s = Deal(batch), room.scheduler
    if s.in_shares(deal.line, deal.pool.fixed):
        return  # nobody looks for requests there
    locate(0, deal.lengths, deal.line, 0, batch.costs)
    (begins,) = deal.lengths.points.values()
    point = at % (begins[-1] + 3)
    lengths = of_values(batch.lengths)
    found = of_all_lanes(lambda: s.locate(point, lengths, deal.line, s.cute.arch.lane_idx(), batch.costs))
    assert found == locate(point, deal.lengths, deal.line, 0, batch.costs)


@some(60)
@given(st.lists(st.sampled_from([0, 0, 0, 0, 0, 1, 70]), min_size=1, max_size=150), st.integers(0, 151))
def test_a_warp_finds_the_next_request_with_keys(lengths: list[int], after: int) -> None:
    s, tensor = ROOMS[0].scheduler, of_values(lengths)
    found, length = of_all_lanes(lambda: s.next_with_keys(after, tensor))
    at, expected = next_with_keys(after, Deal(Batch(tuple(lengths), 70, 1)).lengths)
    assert found == at and (length == expected or at == len(lengths))


@pytest.mark.parametrize("place", [0, 1, 31, 32, 33, 63, 64, 65, 96, 128])
def test_a_warp_finds_the_only_request_with_keys(place: int) -> None:
    s, tensor = ROOMS[0].scheduler, of_values([7 if i == place else 0 for i in range(129)])
    assert of_all_lanes(lambda: s.next_with_keys(0, tensor)) == (place, 7)


@some(60)
@given(st.integers(1, 300), st.integers(1, 400), st.integers(0, 299), st.sampled_from([0, 0, -1, 1, -64, 64, -400]))
def test_a_warp_sees_whether_all_requests_have_as_many_tiles(b: int, tokens: int, who: int, other: int) -> None:
    values = [tokens] * b
    values[who % b] = max(0, tokens + other)
    s, tensor, costs = ROOMS[0].scheduler, of_values(values), COSTS[0]
    found = of_all_lanes(lambda: s.are_as_long(tensor, tokens, s.cute.arch.lane_idx(), costs))
    assert found == are_as_long(Deal(Batch(tuple(values), tokens, 1)).lengths, tokens, 0, costs)


@some(25)
@given(batches(most_workers=24, hundreds=False), OF_ROOMS)
def test_a_warp_walks_the_same_splits(batch: Batch, room: Room) -> None:
    """All that a warp does from the lengths to a worker's last split, of the first, the last and a middle worker."""
    deal, s, costs = Deal(batch), room.scheduler, batch.costs
    lengths = of_values(batch.lengths)

    def splits_of(worker: int) -> tuple[tuple[int, int, int], ...]:
        lane, found = s.cute.arch.lane_idx(), []
        line = s.lay_out(lengths, lane, deal.pool, costs)
        split, line = s.first_split(worker, lengths, line, deal.pool, lane, costs)
        split = s.skip_empty(split, lengths, line, costs)
        while s.has_work(split):
            first, end, _, _ = s.tiles_range(split, line, costs)
            found.append((split.request, first, end))
            split = s.next_split(split, lengths, line, costs)
        return tuple(found)

    for worker in {0, batch.workers // 2, batch.workers - 1}:
        assert list(of_all_lanes(lambda worker=worker: splits_of(worker))) == deal.dealt[worker]


def splits_from(deal: Deal, split: Any, line: Any) -> list[tuple[int, int, int]]:
    """A worker's splits from its first one on."""
    s, costs, found = deal.room.scheduler, deal.batch.costs, []
    while s.has_work(split):
        first, end, _, _ = s.tiles_range(split, line, costs)
        found.append((split.request, first, end))
        split = deal.behind(split, line)
    return found


EQUAL = st.builds(
    lambda length, b, workers, fixed: Batch((length,) * b, length, workers, fixed),
    st.integers(1, 9_000), st.integers(1, 40), st.integers(1, 40), st.just(0) | st.integers(1, 20),
)  # fmt: skip


@some(25)
@given(batches(most_workers=24, hundreds=False) | EQUAL, st.booleans())
def test_a_worker_begins_alike_by_its_guess_its_own_search_and_a_schedule(batch: Batch, is_planned: bool) -> None:
    """`walk.begin` in a CTA of two warps, of which one searches; or from plans that `make_schedule` has written, with
    two warps for all workers. The first worker says which kind of splits there are."""
    deal, room = Deal(batch), ROOMS[0]
    s, workers, requests = room.scheduler, batch.workers, len(batch.lengths)
    pool, lengths = deal.pool._replace(scheduled=int(is_planned)), of_values(batch.lengths)
    words = of_values([-1] * s.schedule_words(requests, workers, False))
    schedule = s.schedule_in(words, workers, False)
    if is_planned:
        with room.replace("scheduler", WARPS=2):
            run_cta(lambda: s.make_schedule(schedule, lengths, None, pool, 1, False, batch.costs), 2 * WARP)
    merge = Merge(1, 1, 1, Partials(1, 64, 256), batch.costs)
    kinds = []
    for worker in {0, workers // 2, workers - 1}:
        memory = Pointer([-1] * s.FIRST_WORDS)

        def begin(worker: int = worker, memory: Pointer = memory) -> Any:
            thread, _, _ = s.cute.arch.thread_idx()
            cta = room.walk.Cta(worker, 0, thread, thread // WARP, thread % WARP)
            walk, split = room.walk.begin(schedule, None, lengths, None, pool, cta, memory, WARP, merge)
            return split, walk.line

        split, line = of_all_lanes(begin, 2 * WARP)
        assert splits_from(deal, split, line) == deal.dealt[worker]
        kinds.append(schedule.table[2 * requests])
    expected = of_values([-1] * (2 * (requests + 1)))
    as_long = are_as_long(deal.lengths, batch.tokens, 0, batch.costs)
    room.combine.write_split_kind(expected, deal.line, as_long, pool)
    assert set(kinds) <= {-1, expected[2 * requests]} and schedule.table[2 * requests] == expected[2 * requests]


@some(40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=300), st.integers(0, 2))
def test_the_combine_lists_each_request_of_several_splits_once(counts: list[int], batch: int) -> None:
    """`combine.list_splits`, of one batch of requests after the other."""
    c, requests = ROOMS[0].combine, len(counts)
    table = Pointer([word for i, count in enumerate(counts) for word in (count, 10 * i)])
    first = batch * c.BATCH
    listed = make_tensor(Pointer([-1] * (3 * c.BATCH)), make_layout((3, c.BATCH)))
    number, most = of_all_lanes(lambda: c.list_splits(table, first, requests, listed, c.cute.arch.lane_idx()))
    own = list(enumerate(counts))[first : first + c.BATCH]
    split = [(i, count, 10 * i) for i, count in own if count > 1]
    assert most == max((count for _, count in own), default=0)
    assert sorted(tuple(listed[j, i] for j in range(3)) for i in range(number)) == split


@some(200)
@given(st.integers(0, (1 << 23) - 1), st.integers(1, 1 << 23), OF_ROOMS)
def test_chunks_are_counted_exactly_under_two_to_the_23_tiles(units: int, step: int, room: Room) -> None:
    inverse = room.scheduler.cute.arch.rcp_approx(np.float32(step))
    assert room.scheduler.chunks_of(units, step, inverse) == max(1, -(-units // step))


def test_lanes_that_come_apart_are_an_error() -> None:
    s, lengths = ROOMS[0].scheduler, of_values([1] * 40)

    def work() -> Any:
        lane = s.cute.arch.lane_idx()
        return s.next_with_keys(0, lengths) if lane < 16 else s.are_as_long(lengths, 1, lane, COSTS[0])

    with pytest.raises(AssertionError, match="come apart"):
        run_cta(work)


def test_a_read_past_the_lengths_is_an_error() -> None:
    with pytest.raises(IndexError, match="index 3 of a mode of 3"):
        of_values([1, 2, 3])[3]
