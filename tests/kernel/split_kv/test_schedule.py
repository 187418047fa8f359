"""The schedule of split-KV, on a CPU: the functions that the kernels trace, walked for every worker of a batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from schedule_properties import (
    CHECKS,
    check_even,
    check_order,
    check_promise,
    check_tiles,
    check_waits,
    check_workspaces,
    how_of,
)
from schedule_walked import (
    KNOWN,
    Batch,
    BeginShares,
    Deal,
    Listed,
    MergeShare,
    NoKeys,
    Output,
    Partial,
    Take,
    Tiles,
    batches,
)

MANY = settings(max_examples=150, deadline=None, derandomize=True)


@pytest.fixture(params=list(KNOWN.values()), ids=list(KNOWN))
def known(request: pytest.FixtureRequest) -> Deal:
    return Deal(request.param)


def test_known_batches_hold_all_properties(known: Deal) -> None:
    for check in CHECKS:
        check(known)


def test_known_batches_have_every_way_of_dealing_and_every_step() -> None:
    walks = [Deal(batch) for batch in KNOWN.values()]
    assert {how_of(deal) for deal in walks} == {"whole", "even", "shares", "chunks"}
    steps = Counter(type(step) for deal in walks for of_worker in deal.all_steps for step in of_worker)
    assert all(steps[kind] for kind in (BeginShares, Listed, MergeShare, NoKeys, Partial, Take))


@MANY
@given(batches())
def test_every_tile_of_every_request_is_computed_once(batch: Batch) -> None:
    check_tiles(Deal(batch))


@MANY
@given(batches())
def test_shares_are_even_to_the_promised_bound(batch: Batch) -> None:
    check_even(Deal(batch))


@MANY
@given(batches())
def test_workers_have_the_splits_that_the_reference_deals(batch: Batch) -> None:
    deal = Deal(batch)
    check_promise(deal)
    check_order(deal)


@MANY
@example((2048,), 132, 0, False)
@given(
    st.builds(lambda length, b: (length,) * b, st.integers(1, 9_000), st.integers(1, 40) | st.integers(1, 600)),
    st.integers(1, 24) | st.sampled_from([66, 132, 264]),
    st.just(0) | st.just(0) | st.integers(1, 40),
    st.booleans(),
)
def test_workers_of_full_requests_go_the_same_way_without_reading_lengths(
    lengths: tuple[int, ...], workers: int, fixed: int, combines: bool
) -> None:
    """`walk.begin_filled`, as sparse versions call it, and the splits behind. A worker that has the lead of a request
    and none of its tiles must have no work: for such a split, the loop over splits writes zeros to the output of the
    request."""
    deal = Deal(Batch(lengths, lengths[0], workers, fixed, combines=combines or fixed > 0, joined=True))
    room, costs = deal.room, deal.batch.costs
    schedule, merge = SimpleNamespace(table=None), SimpleNamespace(costs=costs)
    for worker, dealt in enumerate(deal.dealt):
        cta = room.walk.Cta(worker, 0, 0, 0, 0)
        walk, split = room.walk.begin_filled(schedule, None, deal.lengths, None, deal.pool, cta, -1, merge)
        found = []
        while walk.has_work(split):
            first, end, _ = walk.tiles_of(split)
            assert split.length == deal.batch.tokens
            found.append((split.request, first, end))
            point, split = split.point, walk.next_split(split)
            assert split.point > point, f"{split} is not behind point {point}"
        assert found == dealt, f"worker {worker} has {found}, and by the lengths {dealt}"


@MANY
@given(batches())
def test_workers_do_not_wait_in_a_circle(batch: Batch) -> None:
    check_waits(Deal(batch))


@MANY
@given(batches())
def test_workspaces_hold_what_is_written_and_mergers_read_that(batch: Batch) -> None:
    check_workspaces(Deal(batch))


# ------------------------------------------------------------------------------------------------ fixed splits
def sums_of(deal: Deal) -> list[Any]:
    """What decides the order of each request's sums: tiles of its splits, in which of its slots each partial lies or
    that it is the output, and how many of them the combine adds up."""
    found: dict[int, list[Any]] = defaultdict(list)
    bases = {step.request: step.base for steps in deal.all_steps for step in steps if isinstance(step, Listed)}
    for steps in deal.all_steps:
        tiles = None
        for step in steps:
            if isinstance(step, Tiles):
                tiles = step
            elif isinstance(step, Output | Partial):
                assert tiles is not None and tiles.request == step.request
                slot = step.slot - bases[step.request] if isinstance(step, Partial) else None
                found[step.request].append((tiles.first, tiles.end, slot))
            elif isinstance(step, NoKeys):
                found[step.request].append("no keys")
            elif isinstance(step, Listed):
                found[step.request].append(step.count)
            else:
                pytest.fail(f"{step}: workers of fixed splits wait for nobody")
    return [sorted(found[request], key=str) for request in range(len(deal.batch.lengths))]


@MANY
@given(batches(hundreds=False), st.data())
def test_fixed_splits_of_a_request_are_the_same_in_any_batch(batch: Batch, data: Any) -> None:
    """Others in another order, fewer and more of them, room for more tokens, and any number of workers."""
    batch = replace(batch, fixed=batch.fixed or data.draw(st.integers(1, 9)), combines=True)
    wanted, requests = sums_of(Deal(batch)), range(len(batch.lengths))
    kept = data.draw(st.lists(st.sampled_from(requests), min_size=1, max_size=12))
    padding = data.draw(st.lists(st.integers(0, 3_000), max_size=5))
    lengths = (*(batch.lengths[i] for i in kept), *padding)
    tokens = max(*lengths, 1) + data.draw(st.sampled_from([0, 64, 5_000]))
    other = replace(batch, lengths=lengths, tokens=tokens, workers=data.draw(st.integers(1, 140)))
    assert sums_of(Deal(other))[: len(kept)] == [wanted[i] for i in kept]


def test_free_splits_of_a_request_depend_on_the_batch() -> None:
    """Or the test above would hold of anything."""
    alone, beside = (Deal(Batch(lengths, 5_000, 13, joined=True)) for lengths in ((5_000,), (5_000,) * 3))
    splits = [
        {step for steps in deal.all_steps for step in steps if isinstance(step, Tiles) and step.request == 0}
        for deal in (alone, beside)
    ]
    assert splits[0] != splits[1]
