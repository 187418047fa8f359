"""What a call should take, for a person who asks: nothing is picked by it.

    time(problem) = (limit(problem) + floor) · ratio

`limit` is the larger of FLOPs over the matrix peak and bytes over the read rate. `floor` is the least that a measured
call of the workload took on top (launches, the first tile, the last store). `ratio` is the version's own: interpolated,
in logarithms, between the problems nearest to this one that it was timed on, each divided by the limit of its own run.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue import spoken
from mla_var3.dispatch.evidence import STATES, Timed, timed
from mla_var3.dispatch.selection import choose
from mla_var3.errors import UserError

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload import Problem

NEIGHBOURS = 4  # measured problems that an expectation rests on
_SAME = 0.01  # squared distance under which two problems count as the same
_FLOOR_US = 5.0  # of a workload of which no short call was timed

#: Fields that change nothing of a call's time.
_IDLE = ("softmax_scale", "eps", "seed")


@functools.lru_cache(maxsize=8192)
def limit_us(problem: Problem, device: Device, states: Sequence[str] = STATES) -> float:
    """Least time of a problem in microseconds, the geometric mean over the states: by measured ceilings of the device
    where there are any, else by its data sheet. Raises `UserError` for a device that has neither."""
    cost, logs = problem.cost(), []
    for state in states:
        matmul, read = device.ceiling("matmul_tflops", state), device.ceiling("read_gbps", state)
        tflops = matmul.value if matmul is not None else device.tflops.get(problem.dtype) or device.tflops.get("bf16")
        gbps = read.value if read is not None else device.hbm_gbps
        if not tflops or not gbps:
            raise UserError(f"{device.key} has no peaks in devices.json, so times on it cannot be expected.")
        logs.append(math.log(max(cost.flops / tflops / 1e6, cost.bytes / gbps / 1e3, 1e-3)))
    return math.exp(math.fsum(logs) / len(logs))


@functools.lru_cache(maxsize=8192)
def _place(problem: Problem) -> tuple[tuple[float, ...], tuple[Any, ...]]:
    """Where a problem lies: numbers in octaves, and what it has or has not."""
    cost = problem.cost()
    numbers, kinds = [cost.flops, cost.bytes, getattr(problem, "rows", 1)], []
    for field in dataclasses.fields(problem):  # type: ignore[arg-type]
        value = getattr(problem, field.name)
        if isinstance(field.default, int) and not isinstance(field.default, bool):
            numbers.append(field.default if value is None else value)  # None: pages in order
        elif field.name not in _IDLE:
            # Of lengths drawn at random, the distribution.
            kinds.append(value[0] if isinstance(value, tuple) and len(value) == 2 else value)
    return tuple(math.log2(max(value, 1)) for value in numbers), tuple(kinds)


def _distance(one: tuple[Any, Any], other: tuple[Any, Any]) -> float:
    """Of two places of one workload: zero for the same; an octave of any size counts half, and so does what one has and
    the other has not."""
    return 0.5 * math.dist(one[0], other[0]) + 0.5 * sum(map(operator.ne, one[1], other[1]))


# ---------------------------------------------------------------- what was timed
def measured(label: str, problem: Problem, found: Sequence[Timed]) -> Timed | None:
    """The record that speaks for a version, or a library, on this very problem; None where none timed it."""
    here = {one.record.id: one for one in found if one.problem == problem}
    told = spoken.speaking((one.record for one in here.values()), aside=True)
    return next((here[record.id] for record in told if here[record.id].label == label), None)


def timed_near(workload: str, device: Device) -> tuple[Device, tuple[Timed, ...]]:
    """What was timed on the device, else on another one of its architecture, and on which: shares of the limit carry
    over, times do not. Empty where nothing was timed on any."""
    alike = [other for other in type(device).all() if other.arch == device.arch and other.key != device.key]
    for one in (device, *alike):
        if found := timed(workload, one.key):
            return one, found
    return device, ()


# ---------------------------------------------------------------- what was not
@dataclass(frozen=True)
class Expected:
    """us: between burst and sustained. distance: to the nearest problem that was timed. records: ids of those that the
    expectation rests on, nearest first."""

    us: float
    distance: float
    records: tuple[str, ...]


class Expectations:
    """What calls of one version, or library, should take, from what was timed of it on one device. device: where
    problems are asked for; peaks: whose limits count where it has none. at: of each record, the newest of a problem.
    """

    def __init__(self, label: str, device: Device, peaks: Device, found: Sequence[Timed]) -> None:
        self.device = device if _has_peaks(device) else peaks
        from mla_var3.record import ASIDE

        mine = (one for one in found if one.label == label and one.record.experiment not in ASIDE)
        self.at = list({one.problem: one for one in mine}.values())
        self.floor = _floor(self.at)
        self._ratios = {one.record.id: self._ratio(one) for one in self.at}
        self._places = [_place(one.problem) for one in self.at]

    def _ratio(self, one: Timed) -> float:
        """Of a record's times to the limits of its own run, so that one card's rates are no other's."""
        logs = [
            math.log(us / ((one.record.limit(state) or limit_us(one.problem, self.device, (state,))) + self.floor))
            for state, us in one.us.items()
        ]
        return math.exp(math.fsum(logs) / len(logs))

    def of(self, problem: Problem, *, without: Problem | None = None) -> Expected | None:
        """None where nothing was timed. without: a problem that is taken as not timed."""
        here = _place(problem)
        near = heapq.nsmallest(
            NEIGHBOURS,
            (
                (_distance(here, place), one.record.id)
                for one, place in zip(self.at, self._places, strict=True)
                if without is None or one.problem != without
            ),
        )
        if not near:
            return None
        weights = [1.0 / (far**2 + _SAME) ** 2 for far, _ in near]
        mean = math.fsum(
            w * math.log(self._ratios[record]) for w, (_, record) in zip(weights, near, strict=True)
        ) / math.fsum(weights)
        us = (limit_us(problem, self.device) + self.floor) * math.exp(mean)
        return Expected(us, near[0][0], tuple(record for _, record in near))

    def errors(self) -> list[float]:
        """How far expectations lay from the times of problems that were left out, as fractions of the time."""
        found = []
        for one in self.at:
            guess = self.of(one.problem, without=one.problem)
            if guess is not None:
                ratio = guess.us / (limit_us(one.problem, self.device) + self.floor) / self._ratios[one.record.id]
                found.append(math.exp(abs(math.log(ratio))) - 1)
        return found


def us(problem: Problem, device: Device) -> float | None:
    """What the version that is picked should take, in microseconds, between burst and sustained: measured where this
    problem was. None where nothing was timed of it, or no version takes the problem."""
    try:
        label = choose(problem, device).label
    except UserError:
        return None
    whose, found = timed_near(problem.workload, device)
    here = measured(label, problem, found) if whose == device else None
    if here is not None:
        return here.mean_us
    guess = Expectations(label, device, whose, found).of(problem)
    return None if guess is None else guess.us


def spread(errors: Sequence[float]) -> tuple[float, float] | None:
    """The median of errors, and what nine of ten stay under; None of too few to tell."""
    return (statistics.median(errors), statistics.quantiles(errors, n=10)[-1]) if len(errors) >= 10 else None


def _has_peaks(device: Device) -> bool:
    rated = device.ceiling("matmul_tflops", STATES[0]) or device.tflops.get("bf16")
    return bool(rated and (device.ceiling("read_gbps", STATES[0]) or device.hbm_gbps))


def _floor(found: Sequence[Timed]) -> float:
    """The least that a call took above the limit of its run, of those that took twice as long as that."""
    above = [
        us - limit for one in found for state, us in one.us.items()
        if (limit := one.record.limit(state)) is not None and us >= 2 * limit
    ]  # fmt: skip
    return max(1.0, min(above, default=_FLOOR_US))
