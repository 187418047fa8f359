"""Faults that are planted in the scheduler, each of which a property finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from device_on_cpu import Word
from schedule_properties import check_even, check_promise, check_tiles, check_waits, check_workspaces
from schedule_run import GRID, Grid
from schedule_walked import COSTS, KNOWN, ROOM, BeginShares, Deal, MergeShare, Raise

from mla_var3.kernel.cute_python.split_kv.combine import Merge
from mla_var3.kernel.cute_python.split_kv.partials import Partials
from mla_var3.kernel.cute_python.split_kv.scheduler import Line, SplitIndex

REAL = ROOM.scheduler


def place_without_the_lead(point: Any, start: Any, units: Any, line: Line) -> Any:
    return min(max((point - start) * line.step, 0), units)


def line_that_charges_too_little(*arguments: Any, line_of: Any = REAL.line_of) -> Line:
    """The tiles of a request begin at once on the line, and all workers have some points more."""
    line: Line = line_of(*arguments)
    total, workers = arguments[0], arguments[5]
    return line._replace(lead=1, span=-(-total // workers) + 2 * line.lead) if line.lead else line


def takes_one_too_far(split_index: Any, step: Any) -> Any:
    return bool(step) and split_index.index % (2 * step) == 0 and split_index.index + step <= split_index.count


def takes_in_every_step(split_index: Any, step: Any) -> Any:
    return bool(step) and split_index.index + step < split_index.count


def pieces_but_the_last(worker: int, split: Any, units: int, line: Line) -> Any:
    first = (split.start + line.lead) // line.span
    return REAL.SplitIndex(worker - first, (split.start + line.lead + units - 1) // line.span - first)


#: Fault: (what replaces which functions, the batch, the property that finds it, and with which words).
FAULTS: dict[str, tuple[dict[str, Any], str, Callable[[Deal], None], str]] = {
    "ceil_div rounds down": (
        {"ceil_div": lambda number, divisor: number // divisor},
        "splits of 128 tokens",
        check_tiles,
        "request 1 of 1 tiles: ",
    ),
    "a tile's place is without the lead": (
        {"place_of": place_without_the_lead},
        "workers merge two or three splits",
        check_promise,
        "and is promised",
    ),
    "the lead is less than the overhead": (
        {"line_of": line_that_charges_too_little},
        "workers merge shares of rows",
        check_even,
        "of a worker, over",
    ),
    "shares are rounded down": (
        {"split_evenly": lambda units, width: (max(units // width, 1), max(min(width, units), 1))},
        "one long request alone",
        check_tiles,
        "request 0 of 3125 tiles",
    ),
    "a gap is not left out": (
        {"next_with_keys": lambda request, lengths: (request, lengths[min(request, lengths.shape[0] - 1)])},
        "gaps without keys",
        check_promise,
        "and is promised",
    ),
    "takes looks one split too far": (
        {"takes": takes_one_too_far},
        "workers merge two or three splits",
        check_waits,
        "nobody raises",
    ),
    "takes in every step": (
        {"takes": takes_in_every_step},
        "workers merge a tree of many splits",
        check_waits,
        "more than once",
    ),
    "the last split is not counted": (
        {"split_index_of": pieces_but_the_last},
        "workers merge shares of rows",
        check_workspaces,
        "are written, .* are read",
    ),
    "a slot is its worker's": (
        {"slot_of": lambda worker, request: worker},
        "two long ones behind each other",
        check_workspaces,
        "a slot is written twice",
    ),
    "there are slots for the workers alone": (
        {"most_slots": lambda requests, workers, units, fixed: workers},
        "workers merge shares of rows",
        check_workspaces,
        "slots? 2[34]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_planted_fault_is_found(fault: tuple[dict[str, Any], str, Callable[[Deal], None], str]) -> None:
    others, batch, check, message = fault
    check(Deal(KNOWN[batch]))
    with ROOM.replace("scheduler", **others), pytest.raises(AssertionError, match=message) as found:
        check(Deal(KNOWN[batch]))
    print(f"{check.__name__}: {str(found.value)[:200]}")


# ------------------------------------------------------------------------------------------------ as the CTAs run
MERGE, TILE = Merge(128, 1, 1, Partials(2, 64, 512), COSTS[0]), 1


def run(batch: str, resident: int, seed: int) -> None:
    Grid(Deal(KNOWN[batch], GRID), MERGE, TILE, resident, seed).run()


def waits_for_all(flag: Any, shares: Any, split_index: Any) -> None:
    """`take_rows` that also waits for a first split which has not begun."""
    combine = GRID.combine
    own = combine.THERE if split_index.index == 0 else 1
    seen = combine.cute.arch.atomic_add(flag, own, sem="acq_rel", scope="gpu")
    first, end = (0, shares[0] + 1) if split_index.index == 0 else (seen % combine.GONE, seen % combine.GONE + 1)
    all_there = combine.BEGUN + 2 * combine.THERE + split_index.count - 1
    while seen & ~(combine.BEGUN - combine.GONE) != all_there:
        seen = combine.cute.arch.load(flag)
    shares[0], shares[1] = first, end


def flag_of_its_own(split_index: Any, slot: Any) -> tuple[Any, Any]:
    """`flag_of` that knows no merge in shares."""
    return slot, int(split_index.index > 0)


def nobody_waits(flag: Any, shares: Any, split_index: Any) -> None:
    """`take_rows` that does not wait for the others' partial results."""
    combine = GRID.combine
    own = combine.THERE if split_index.index == 0 else 1
    seen = combine.cute.arch.atomic_add(flag, own, sem="acq_rel", scope="gpu")
    first = seen % combine.GONE
    shares[0], shares[1] = (0, shares[0] + 1) if split_index.index == 0 else (first, first + 1)


RUN_FAULTS = {
    "a worker waits for one that has not begun": ({"take_rows": waits_for_all}, 1, "deadlock"),
    "a worker does not wait for the others": ({"take_rows": nobody_waits}, 24, "read before it is written"),
    "the last split raises its own flag": ({"flag_of": flag_of_its_own}, 24, "deadlock"),
}


@pytest.mark.parametrize("fault", RUN_FAULTS.values(), ids=list(RUN_FAULTS))
def test_a_fault_planted_in_the_shared_merge_is_found(fault: tuple[dict[str, Any], int, str]) -> None:
    others, resident, message = fault
    run("workers merge shares of rows", resident, seed=3)
    with GRID.replace("combine", **others), pytest.raises(AssertionError, match=message) as found:
        run("workers merge shares of rows", resident, seed=3)
    print(f"Grid: {str(found.value)[:200]}")


def test_waits_in_a_circle_are_found() -> None:
    """Two shared merges, of which each waits for the last split of the other's worker."""
    deal = Deal(KNOWN["workers merge shares of rows"])
    deal.all_steps = [  # in place of the cached ones
        [BeginShares(0), MergeShare(SplitIndex(0, 2), 0, 0), Raise(10, 1)],
        [BeginShares(10), MergeShare(SplitIndex(0, 2), 1, 10), Raise(0, 1)],
    ]
    with pytest.raises(AssertionError, match="wait in a circle"):
        check_waits(deal)


def test_planted_faults_are_gone_behind_their_test() -> None:
    assert REAL.ceil_div(Word(7), 2) == 4
    for batch in ("workers merge shares of rows", "workers merge two or three splits"):
        check_waits(Deal(KNOWN[batch]))
