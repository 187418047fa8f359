"""Workers that merge their splits: whoever waits for whom, in whatever order they run, all come to their end."""

from __future__ import annotations

from typing import Any

import pytest
from device_on_cpu import Word
from hypothesis import example, given, settings
from hypothesis import strategies as st
from schedule_run import GRID, Grid
from schedule_walked import COSTS, ROOM, Batch, Deal, MergeShare, batches

from mla_var3.kernel.cute_python.split_kv.combine import Merge
from mla_var3.kernel.cute_python.split_kv.partials import Partials
from mla_var3.kernel.cute_python.split_kv.scheduler import SplitIndex


@st.composite
def merged_by_workers(draw: Any) -> Batch:
    """Batches with too many requests for a combine, of which a few are long: these are cut into many splits."""
    workers = draw(st.integers(2, 40))
    lengths = draw(st.lists(st.sampled_from([0, 1, 60, 130]), min_size=2 * workers // 3 + 1, max_size=2 * workers + 2))
    for place, length in draw(
        st.lists(st.tuples(st.integers(0, 200), st.integers(300, 30_000)), min_size=1, max_size=3)
    ):
        lengths[place % len(lengths)] = length
    combines, joined = draw(st.sampled_from([(True, False), (True, False), (False, True)]))
    return Batch(tuple(lengths), max(lengths), workers, 0, draw(st.sampled_from(COSTS)), combines, joined)


@st.composite
def merges(draw: Any) -> tuple[Merge, int]:
    """(what a merge of 1 to 512 query rows is made for, a query tile): query tiles of 64 rows, as version 23 has them,
    or one of up to 64, as version 24."""
    rows, h_kv, columns = draw(st.integers(1, 512)), draw(st.sampled_from([1, 2])), draw(st.sampled_from([256, 512]))
    group = max(g for g in (1, 2, 4, 8, 16) if rows % g == 0)
    height = 64 if rows > 64 else draw(st.sampled_from([64, -(-rows // 8) * 8]))
    partials = Partials(-(-rows // height) * h_kv, height, columns)
    return Merge(group * h_kv, h_kv, rows // group, partials, COSTS[0]), draw(st.integers(0, partials.tiles - 1))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    merged_by_workers() | batches(most_workers=66, hundreds=False),
    merges(),
    st.integers(1, 80),
    st.integers(0, 1 << 30),
)
@example(Batch((*(60,) * 20, 30_000), 30_000, 24), (Merge(128, 1, 1, Partials(2, 64, 512), COSTS[0]), 1), 1, 0)
@example(Batch((*(60,) * 20, 30_000), 30_000, 24), (Merge(128, 1, 4, Partials(8, 64, 512), COSTS[0]), 7), 24, 1)
def test_all_ctas_end_and_each_row_is_written_once(
    batch: Batch, merge: tuple[Merge, int], resident: int, seed: int
) -> None:
    """Also where only one CTA is on the device at a time."""
    Grid(Deal(batch, GRID), *merge, resident, seed).run()


def test_workers_share_the_merge_of_many_splits() -> None:
    """What the test above is for is there in its first example: some merge shares of rows."""
    deal = Deal(Batch((*(60,) * 20, 30_000), 30_000, 24))
    assert sum(isinstance(step, MergeShare) for steps in deal.all_steps for step in steps) > 3


@pytest.mark.parametrize("count", [*range(2, 70), 127, 128, 129, 132, 264, 1000])
def test_a_tree_of_so_many_splits_takes_each_once_and_in_no_circle(count: int) -> None:
    """Of any number: the sparse versions merge all of them in a tree. A split sends what it has after it has taken what
    others have, so that an order without circles is one in which each is taken after it has taken its own."""
    taken: dict[int, int] = {}
    for index in range(count):
        split_index, steps = SplitIndex(Word(index), Word(count)), list[int]()
        step = ROOM.scheduler.first_stride(split_index)
        while ROOM.scheduler.takes(split_index, step):
            steps.append(step)
            assert index + step not in taken, f"split {index + step} is taken twice"
            taken[index + step] = index
            step = ROOM.scheduler.next_stride(split_index, step)
        assert all(step > 0 for step in steps)  # who is taken is a later worker
        assert count - 1 not in (index + step for step in steps[1:]), "the last split is taken first"
        assert len(steps) <= count.bit_length()
    assert sorted(taken) == list(range(1, count))


@pytest.mark.parametrize("by_zero", [-1, 0, 1, 7])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_remainder_by_zero_does_not_decide_what_the_last_split_takes(
    monkeypatch: pytest.MonkeyPatch, by_zero: int, count: int
) -> None:
    """`takes_last` asks `takes` for a step of 0 there, which divides by zero; whatever that gives, nothing is taken."""
    monkeypatch.setattr(Word, "by_zero", by_zero)
    split_index = SplitIndex(Word(count - 1), Word(count))
    assert not ROOM.scheduler.takes_last(split_index)
    assert not ROOM.scheduler.takes(split_index, ROOM.scheduler.first_stride(split_index))
