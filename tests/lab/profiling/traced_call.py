"""Time stamps of a call that nobody ran: two CTAs of a kernel with a producer and a consumer, and a combine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mla_var3.lab.profiling.modes.trace import Slots
from mla_var3.toolchain.cute_trace import END, HEADER, ISSUE, MARK, RANGE, WAIT, Event

LOAD, CONSUME, STEP = (Event(RANGE, name, "flash.py:1") for name in ("load", "consume", "step"))
EMPTY, FULL = Event(WAIT, "wait empty", "flash.py:2"), Event(WAIT, "wait full", "flash.py:3")
DONE, PARTLY = Event(WAIT, "wait products", "flash.py:4", 0), Event(WAIT, "wait products", "flash.py:5", 1)
ISSUED = Event(ISSUE, "products issued", "flash.py:6")
EVENTS = [LOAD, CONSUME, STEP, EMPTY, FULL, DONE, PARTLY, ISSUED]
CAPACITY = 64
#: Cycles in a microsecond, and a time of the global timer, in ns.
CYCLES, NOON = 2000, 1_700_000_000_000_000_000
#: Clocks of SMs have zeros of their own; that of SM 1 turns over during the call.
ZEROS = {0: 1_000_000, 1: (1 << 32) - 10_000}

Stamp = tuple[float, Event, int]

PRODUCER: list[Stamp] = [(1, LOAD, 0), (2, EMPTY, 0), (8, EMPTY, END), (9, LOAD, END)]
CONSUMER: list[Stamp] = [
    (1, CONSUME, 0), (2, STEP, 0), (2, FULL, 0), (4, FULL, END), (4.5, ISSUED, MARK), (5, ISSUED, MARK),
    (5, PARTLY, 0), (6, PARTLY, END), (6, DONE, 0), (7, DONE, END), (8, STEP, END), (9, CONSUME, END),
]  # fmt: skip


def slot(sm: int, begin: float, end: float, stamps: Sequence[Stamp], capacity: int = CAPACITY) -> Any:
    """(places, 2) uint32 of a warp. Microseconds, from `NOON` on."""
    found = np.zeros((capacity, 2), np.uint32)

    def clock(us: float) -> int:
        return (ZEROS[sm] + round(us * CYCLES)) % (1 << 32)

    def header(row: int, us: float, last: int) -> None:
        time = NOON + round(us * 1e3) // 32 * 32  # the timer moves in steps
        found[row] = time & 0xFFFFFFFF, time >> 32
        found[row + 1] = clock(us), last

    header(0, begin, sm)
    header(2, end, HEADER + len(stamps))
    for row, (us, event, flags) in enumerate(stamps, start=HEADER):
        if row < capacity:
            found[row] = clock(us), EVENTS.index(event) | flags
    return found


def shifted(stamps: Sequence[Stamp], us: float) -> list[Stamp]:
    return [(at + us, event, flags) for at, event, flags in stamps]


def call(capacity: int = CAPACITY) -> list[Slots]:
    """What the kernels stored. CTA 1 begins 3 us later than CTA 0, on another SM; CTA 2 was not launched."""
    ctas: Mapping[int, float] = {0: 0.0, 1: 3.0}
    words = np.zeros((3, 8, capacity, 2), np.uint32)
    for number, late in ctas.items():
        for warp in range(8):
            stamps = shifted(PRODUCER if warp < 4 else CONSUMER, late)
            words[number, warp] = slot(number, late, late + 10, stamps, capacity)
    combine = np.zeros((1, 1, capacity, 2), np.uint32)
    combine[0, 0] = slot(0, 15, 16, [], capacity)
    unused = np.zeros((4, 2, HEADER, 2), np.uint32)
    return [Slots("flash", words), Slots("combine", combine), Slots("never", unused)]
