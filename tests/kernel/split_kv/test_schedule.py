"""The schedule of split-KV, on a CPU: the functions that the kernels trace, walked for every worker of a batch."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
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
from schedule_walked import KNOWN, Batch, BeginShares, Deal, Listed, MergeShare, NoKeys, Partial, Take, batches

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
@given(batches())
def test_workers_do_not_wait_in_a_circle(batch: Batch) -> None:
    check_waits(Deal(batch))


@MANY
@given(batches())
def test_workspaces_hold_what_is_written_and_mergers_read_that(batch: Batch) -> None:
    check_workspaces(Deal(batch))
