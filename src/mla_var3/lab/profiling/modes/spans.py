"""Kernels on a time axis, from whichever tool saw them: starts, durations, gaps, overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One operation of the device. Microseconds; start from the first one of its list."""

    name: str
    start_us: float
    duration_us: float
    stream: str = ""

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class Placed:
    """A span and what stands before it. gap_us: since the device was last busy; negative when it began earlier."""

    span: Span
    gap_us: float | None


def ordered(spans: Iterable[Span]) -> list[Span]:
    """By start, the first one at 0."""
    rows = sorted(spans, key=lambda s: (s.start_us, s.end_us))
    if not rows:
        return []
    zero = rows[0].start_us
    return [Span(s.name, s.start_us - zero, s.duration_us, s.stream) for s in rows]


def place(spans: Sequence[Span]) -> list[Placed]:
    """Every span of an ordered list with the gap before it."""
    placed, busy_until = [], None
    for span in spans:
        placed.append(Placed(span, None if busy_until is None else span.start_us - busy_until))
        busy_until = span.end_us if busy_until is None else max(busy_until, span.end_us)
    return placed


@dataclass(frozen=True)
class Totals:
    """total_us: from the first start to the last end. busy_us: with at least one operation; overlap_us: with more."""

    count: int
    total_us: float
    busy_us: float
    overlap_us: float

    @property
    def idle_us(self) -> float:
        return self.total_us - self.busy_us


def totals(spans: Sequence[Span]) -> Totals:
    edges = sorted([(s.start_us, 1) for s in spans] + [(s.end_us, -1) for s in spans])
    busy = overlap = 0.0
    running, last = 0, 0.0
    for at, change in edges:
        if running >= 1:
            busy += at - last
        if running >= 2:
            overlap += at - last
        running, last = running + change, at
    total = max((s.end_us for s in spans), default=0.0) - min((s.start_us for s in spans), default=0.0)
    return Totals(len(spans), total, busy, overlap)
