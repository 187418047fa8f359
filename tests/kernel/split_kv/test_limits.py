"""What 32 bits count: no number of the scheduler takes more for sizes that the host admits."""

from __future__ import annotations

from typing import Any

import pytest
from device_on_cpu import Room, Word, int32
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_walked import COSTS

from mla_var3.kernel.cute_python import decode_host
from mla_var3.kernel.cute_python.split_kv.partials import Partials
from mla_var3.kernel.cute_python.split_kv.scheduler import Costs, Line, Split
from mla_var3.runtime import limits

TILE = Partials(1, 64, 512)
#: The model adds a split's overhead and a merge to the busiest worker's tiles.
ROOM_OF_THE_MODEL = max(c.overhead + max(c.combine, c.listed, 2 * c.level) for c in COSTS)


def checked_room() -> Room:
    """The room with numbers that may not leave 32 bits."""
    room = Room()
    for module in room.copies.values():
        vars(module).update(Int32=lambda value=0: Word(int32(value)))
    return room


ROOM = checked_room()


def arithmetic_of(requests: int, tokens: int, workers: int, fixed: int, costs: Costs) -> None:
    """Everything that is computed of a full page table, of the first, a middle and the last worker; OverflowError where
    a number takes more than 32 bits."""
    s, units = ROOM.scheduler, -(-tokens // costs.tokens)
    pool = s.make_pool(Word(requests), Word(tokens), Word(workers), Word(fixed), Word(0), costs)
    width = max(1, -(-units // fixed)) if fixed else 0
    total, longest, chunks = Word(requests) * Word(units), Word(units), Word(requests) * Word(width)
    line = s.line_of(
        total, longest, chunks, Word(requests), Word(0), pool.workers, pool.fixed, pool.shares, pool.combined, costs
    )
    line = Line(*map(Word, line))
    width = line.lead + units if line.lead else max(1, -(-units // line.step))
    for worker in {0, workers // 2, workers - 1}:
        guess = s.filled_split(Word(worker), Word(requests), pool)
        s.tiles_range(guess, pool.filled, costs)
        if s.in_shares(line, fixed):
            s.split_evenly(Word(units), pool.shares)
            continue
        point = Word(worker) * line.span
        request = point // width
        if request < requests:
            split = Split(point, point + line.span, request, request * width, Word(tokens))
            _, _, units_there, behind = s.tiles_range(split, line, costs)
            assert (behind - split.start - line.lead) * line.step is not None  # of `next_place`
            if line.lead > 0:
                s.split_index_of(Word(worker), split, units_there, line)


@st.composite
def sizes(draw: Any) -> tuple[int, int, int, int, Costs]:
    """(requests, tokens, workers, fixed, costs), as large as 32 bits allow, or nearly."""
    costs = draw(st.sampled_from(COSTS))
    units = draw(st.integers(0, 25).flatmap(lambda log2: st.integers(1 << log2, (2 << log2) - 1)))
    tokens = min(units * costs.tokens - draw(st.sampled_from([0, 1, costs.tokens - 1])), limits.MOST_TOKENS)
    workers = draw(st.sampled_from([1, 2, 3, 66, 132, 264, ROOM.scheduler.MOST_WORKERS]))
    most = (limits.MOST - workers - ROOM_OF_THE_MODEL) // (-(-tokens // costs.tokens) + costs.overhead)
    requests = max(1, draw(st.just(most) | st.just(most - 1) | st.integers(1, max(1, most))))
    fixed = draw(st.sampled_from([0, 0, 0, 1, 16, 1 << 20, 1 << 24]))
    return requests, tokens, workers, fixed, costs


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sizes())
def test_numbers_of_what_the_host_admits_stay_within_32_bits(size: tuple[int, int, int, int, Costs]) -> None:
    requests, tokens, workers, fixed, costs = size
    assume(decode_host.schedule_sizes(requests, tokens, workers, fixed, TILE, costs))
    arithmetic_of(*size)


@pytest.mark.parametrize(
    "requests, units, workers, costs", [(66, 32_537_628, 3, COSTS[0]), (32_767, 65_536, 1, COSTS[1])]
)
def test_what_the_scheduler_adds_to_the_tiles_counts(requests: int, units: int, workers: int, costs: Costs) -> None:
    """Both are 2^31 - 2 points of an even line. Rounding them up to three workers adds 2; and the model adds the
    overhead and a merge to the points of one worker. Neither sum fits 32 bits, so the host refuses both."""
    tokens = units * costs.tokens
    assert not decode_host.schedule_sizes(requests, tokens, workers, 0, TILE, costs)
    with pytest.raises(OverflowError):
        arithmetic_of(requests, tokens, workers, 0, costs)


def test_what_takes_more_than_32_bits_is_an_error_here() -> None:
    with pytest.raises(OverflowError, match="2147483648 takes more"):
        Word(1 << 30) * Word(2)
