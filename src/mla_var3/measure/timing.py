"""The order in which things are timed, and what is made of the samples; what touches a GPU is behind `Backend`.

How a time is taken
-------------------
A contender is bound to several input sets, together larger than `cold_mb`, and one graph holds calls over all of them
in turn, so that no call finds its inputs in the L2. All of them write to the same outputs (`mla_var3.measure.buffers`).
Events around a replay give its duration; divided by its calls, a
sample. A spinning kernel in front lets the host queue everything before the device reaches the first event.

burst       After a gap of `idle_ms` a few replays; the best is the round's sample. The chip is cool, at its top clock.
sustained   Replays back to back for `sustained_s`; those of the second half are samples. The chip is at its power
            limit. The first contender is at work `settle_s` before its turn, so that it finds the chip as the others
            do.

In every round each item has its turn, the cell's limits (a large matrix product, a kernel that only reads) among them,
and every other round runs in reverse. So whatever drifts, drifts for all. In burst the limits are first, in sustained
last: their two very different loads upset the power limiter for most of a second, and even behind a turn that was
thrown away a kernel was seen 7 to 11 % slower than the same one behind another contender. With `limits_every_s` a cell
may stand beside limits that many seconds old: from cell to cell of one run on an H200 they moved by 0.1 % in burst, and
sustained the product by 3 % either way.

The limiter swings (results/h200/traces/2026-11-21-power_limiter.txt): a chip that goes from rest to 700 W keeps a high
clock for 0.6 to 0.8 s, loses a fifth to a quarter of it for 0.2 s, again a little 0.8 s later, and then wanders by 2 to
3 % about its mean. A turn of 0.4 s behind one of 0.4 s lies in the dip: its kernel looks up to 15 % slow. Hence
`settle_s`. What is measured then is a chip that stays at work, as a server's does, and a turn is still uncertain by the
wandering; more `sustained_rounds` lessen that. With `rest_s` every turn ends before the dip instead, 1 to 5 % faster
than at work, as a kernel does that is measured alone for 0.4 s.

A call must not run beside the one before it: kernels launched with programmatic dependent launch can. `prepare`
compares the graph with one that has a tiny kernel between calls, less what those cost alone. When calls of a contender
turn out to overlap, the second graph is the one that is timed, for all contenders of the cell: behind a tiny kernel a
launch no longer hides, which costs up to a microsecond, and it has to cost everyone the same (`take_apart`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mla_var3.measure.settings import BenchSettings
    from mla_var3.workload import Problem, Rows

Call = Callable[[], Any]
STATES = ("burst", "sustained")

#: Most calls in one graph, so that capturing stays a matter of milliseconds.
MAX_GRAPH_CALLS = 4096
#: Least separators in the graph that says what one costs.
GAPS = 128
#: Calls between two waits for the device, where it is the host that is timed: fewer than a queue holds.
HOST_QUEUE = 100
#: Buffers of the two limits (`mla_var3.measure.calibrate`), and what a process with its libraries takes.
LIMIT_BYTES = (2 << 30) + 3 * 8192 * 8192 * 2
CONTEXT_BYTES = 1 << 30


class Pending(Protocol):
    """Replays under way."""

    def wait(self) -> list[float]:
        """Waits for the device and returns the microseconds of each replay."""


class Backend(Protocol):
    """What timing needs of a machine. `CudaBackend` is the real one."""

    torch_device: str
    #: Whether there are times to be had here.
    times: bool
    #: How a replay's time is read, for the method text.
    clock: str

    def check(self, plan: Any, device: Any, quick: bool) -> Any:
        """The verdict of `mla_var3.check.judge.check`."""

    def capture(self, calls: Sequence[Call], rotations: int, *, graph: bool = True, separated: bool = False) -> Any:
        """Something `start` can replay: `rotations` times all `calls` in order, warm. `separated`: with a tiny kernel
        after each call. graph=False: a loop of launches, for kernels that cannot be captured."""

    def start(self, replay: Any, count: int) -> Pending:
        """Queues `count` replays back to back."""

    def launches(self, call: Call) -> int | None:
        """How many kernels (and copies) a call puts on the device; None where that cannot be counted."""

    def timeline(self, calls: Sequence[Call]) -> list[tuple[str, float]]:
        """The kernels of a call in the order of their ends, by name, each with the microseconds from the end of the one
        before to its own: medians over calls, one for each input set, in a graph. Empty where nobody can look."""

    def sensors(self) -> dict[str, float]:
        """sm_mhz, mem_mhz, power_w, temperature_c, as far as they can be read."""

    def idle(self, seconds: float) -> None:
        """Lets the device rest."""

    def synchronize(self) -> None:
        """Waits for the device and raises what went wrong on it."""

    def broken(self) -> bool:
        """Whether nothing more can run in this process."""

    def release(self) -> None:
        """Frees what nothing refers to any more."""

    def limit_calls(self) -> dict[str, tuple[Call, float]]:
        """Under "matmul" a call and its FLOPs, under "read" and "copy" a call and its bytes, of both directions."""

    def rows_call(self, rows: Rows) -> tuple[Call, float]:
        """A call that copies such rows, as many as there is room for, and its bytes, of both directions."""

    def cross_check_us(self, calls: Sequence[Call], graph_ms: float) -> float | None:
        """A second opinion on the time of a call, in microseconds."""


# ---------------------------------------------------------------- statistics
def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the values lie, interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def stats(values: Sequence[float]) -> dict[str, float]:
    """median, p10, p90 and n."""
    return {
        "median": percentile(values, 0.5),
        "p10": percentile(values, 0.1),
        "p90": percentile(values, 0.9),
        "n": len(values),
    }


# ---------------------------------------------------------------- input sets
@dataclass(frozen=True)
class SetPlan:
    """count: input sets to rotate over; 0 when the cell does not fit. reason: why not, with the numbers."""

    count: int
    set_bytes: int
    need_bytes: int
    reason: str = ""


def plan_sets(problem: Problem, contenders: int, memory_bytes: float, settings: BenchSettings) -> SetPlan:
    """How many input sets a cell rotates over, and whether they fit in the device's memory.

    As many as calls read `cold_mb` of, at least 2, or as many as fit; a single one where two do not, which is then
    larger than any L2 many times over. Of requests that differ in length a set takes more than a call reads.
    Outputs and workspaces of every contender are counted as three times the outputs of each set; a check keeps a second
    copy of inputs below 2^31 elements, and compares outputs in float64.
    """
    outputs = problem.output_bytes()
    inputs = max(1, problem.input_bytes() - outputs)
    room = memory_bytes * settings.memory_headroom

    def need(sets: int) -> int:
        timing = sets * (inputs + 3 * contenders * outputs) + LIMIT_BYTES
        checking = inputs + min(inputs, problem.element_bytes << 31) + 24 * outputs + LIMIT_BYTES
        return max(timing, checking) + CONTEXT_BYTES

    read = max(1, min(inputs, problem.cost().bytes))
    wanted = min(settings.max_sets, max(2, math.ceil(settings.cold_mb * 1e6 / read)))
    for count in range(wanted, 0, -1):
        if need(count) <= room:
            return SetPlan(count, inputs, need(count))
    reason = (
        f"needs about {need(1) / 1e9:.1f} GB ({inputs / 1e9:.1f} GB of inputs, {outputs / 1e9:.1f} GB of outputs, "
        f"{contenders} contenders); {room / 1e9:.1f} GB of the device's {memory_bytes / 1e9:.1f} GB may be used"
    )
    return SetPlan(0, inputs, need(1), reason)


# ---------------------------------------------------------------- where the time of a call goes
def divided(kernels: Sequence[tuple[str, float]], calls: int) -> list[tuple[str, float]]:
    """kernels: (name, end in microseconds) of `calls` calls in a row, each of the same kernels. (name, median time from
    the end of the one before) of a call's; of the first call none are taken. Empty where they do not divide evenly."""
    ordered = sorted(kernels, key=lambda kernel: kernel[1])
    count = len(ordered) // max(1, calls)
    if calls < 2 or not count or len(ordered) != count * calls:
        return []
    found = []
    for i in range(count):
        places = range(count + i, len(ordered), count)
        if len({ordered[at][0] for at in places}) != 1:
            return []
        found.append((ordered[i][0], percentile([ordered[at][1] - ordered[at - 1][1] for at in places], 0.5)))
    return found


# ---------------------------------------------------------------- one thing that is timed
@dataclass
class Item:
    """A captured replay that takes turns.

    calls: in one replay. replay_us: about how long one takes. bound: the calls that a replay repeats; empty where
    they cannot be taken apart. apart: a tiny kernel stands between calls. gap_us: what that costs, to be taken off.
    overlap_us: how much a call runs beside the one before it where nothing prevents it; 0 where no more than noise.
    is_limit: one of the two limits, not a contender.
    """

    name: str
    replay: Any
    calls: int
    replay_us: float
    bound: Sequence[Call] = ()
    apart: bool = False
    gap_us: float = 0.0
    overlap_us: float = 0.0
    is_limit: bool = False
    samples: dict[str, list[float]] = field(default_factory=dict)
    readings: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def per_call(self, replay_us: float) -> float:
        return replay_us / self.calls - (self.gap_us if self.apart else 0.0)

    def median(self, state: str) -> float | None:
        values = self.samples.get(state)
        return percentile(values, 0.5) if values else None

    def stats(self) -> dict[str, dict[str, float]]:
        """The statistics of each state that was measured."""
        return {state: stats(values) for state, values in self.samples.items() if values}

    def sensors(self) -> dict[str, dict[str, float]]:
        """The median reading of each sensor in each state."""
        found: dict[str, dict[str, float]] = {}
        for state, readings in self.readings.items():
            names = sorted({name for reading in readings for name in reading})
            found[state] = {n: percentile([r[n] for r in readings if n in r], 0.5) for n in names}
        return found


def prepare(backend: Backend, name: str, calls: Sequence[Call], settings: BenchSettings, *, graph: bool = True) -> Item:
    """Warms the calls, one for each input set, and captures the replay that is timed."""
    for call in calls:
        call()
    backend.synchronize()
    once = backend.capture(calls, 1, graph=graph)
    once_us = min(backend.start(once, 4).wait())
    count = len(calls)
    rotations = max(1, min(round(settings.graph_ms * 1e3 / once_us), MAX_GRAPH_CALLS // count))
    probed = graph and settings.overlap_probe
    gap_us, overlap_us = _overlap(backend, once, calls, settings.idle_ms / 1e3) if probed else (0.0, 0.0)
    replay, replay_us = once, once_us
    if rotations > 1:
        replay = backend.capture(calls, rotations, graph=graph)
        replay_us = min(backend.start(replay, 2).wait())
    bound = calls if probed else ()
    return Item(name, replay, count * rotations, replay_us, bound=bound, gap_us=gap_us, overlap_us=overlap_us)


def take_apart(backend: Backend, items: Sequence[Item], gap_us: float) -> None:
    """Puts a tiny kernel, which costs `gap_us`, between the calls of items that can be taken apart and are not yet."""
    for item in items:
        if item.bound and not item.apart:
            item.replay = backend.capture(item.bound, item.calls // len(item.bound), separated=True)
            item.replay_us = min(backend.start(item.replay, 2).wait())
            item.apart, item.gap_us = True, gap_us


def median_us(backend: Backend, calls: Sequence[Call], *, graph: bool = True) -> float:
    """Median microseconds of a call, one for each input set: quick, for the comparison of tilings."""
    for call in calls:
        call()
    replay = backend.capture(calls, 1, graph=graph)
    return percentile(backend.start(replay, 6).wait(), 0.5) / len(calls)


def _overlap(backend: Backend, once: Any, calls: Sequence[Call], idle_s: float) -> tuple[float, float]:
    """(cost of a separator, how much shorter a call is without them), the second 0 when that is no more than noise."""

    def nothing() -> None:
        return None

    # Enough of them that what a graph costs by itself, over a microsecond, is not taken for a part of each.
    gap_count = max(len(calls), GAPS)
    gaps = backend.capture([nothing] * gap_count, 1, separated=True)
    apart = backend.capture(calls, 1, separated=True)
    gap_us = overlap_us = 0.0
    # Doubt is settled on a cool chip: a clock that falls between two measurements looks like an overlap too.
    for rest_s in (0.0, idle_s):
        found = []
        for replay, count in ((once, len(calls)), (apart, len(calls)), (gaps, gap_count)):
            if rest_s:
                backend.synchronize()
                backend.idle(rest_s)
            found.append(min(backend.start(replay, 4).wait()) / count)
        plain_us, apart_us, gap_us = found
        overlap_us = apart_us - gap_us - plain_us
        # A launch that hides behind a long kernel does not hide behind a tiny one: up to a microsecond is no overlap.
        if overlap_us <= max(1.0, 0.005 * plain_us):
            return gap_us, 0.0
    return gap_us, overlap_us


def host_us(backend: Backend, call: Call, count: int) -> float:
    """Time the host spends in one call with all its kernels, in microseconds, on a queue that has room.

    More than one batch of `HOST_QUEUE`: each on another core, and the least of their medians. On the H200's machine
    everything that a thread does, plain Python too, takes 1.5 times as long for seconds at a time, whatever it is.
    """
    cores = sorted(os.sched_getaffinity(0)) if count > HOST_QUEUE and hasattr(os, "sched_getaffinity") else []
    medians = []
    try:
        for number, first in enumerate(range(0, count, HOST_QUEUE)):
            if cores:
                os.sched_setaffinity(0, {cores[number % len(cores)]})
            backend.synchronize()
            taken = []
            for _ in range(min(HOST_QUEUE, count - first)):
                start = time.perf_counter_ns()
                call()
                taken.append((time.perf_counter_ns() - start) / 1e3)
            medians.append(percentile(taken, 0.5))
        backend.synchronize()
    finally:
        if cores:
            os.sched_setaffinity(0, cores)
    return min(medians)


# ---------------------------------------------------------------- turns
def burst_turn(backend: Backend, item: Item, settings: BenchSettings) -> None:
    """One round's sample of an item on a cool chip."""
    backend.synchronize()
    backend.idle(settings.idle_ms / 1e3)
    pending = backend.start(item.replay, settings.burst_replays)
    reading = backend.sensors()
    best = min(pending.wait())
    item.samples.setdefault("burst", []).append(item.per_call(best))
    item.readings.setdefault("burst", []).append(reading)


def start_sustained(backend: Backend, item: Item, seconds: float) -> Pending:
    """Queues replays back to back for that long."""
    return backend.start(item.replay, max(4, math.ceil(seconds * 1e6 / item.replay_us)))


def sustained_turn(backend: Backend, item: Item, settings: BenchSettings) -> None:
    """One turn of an item back to back; the second half of the time gives the samples."""
    pending = start_sustained(backend, item, settings.sustained_s)
    backend.idle(settings.sustained_s * 0.75)  # the host waits; the device works on what is queued
    reading = backend.sensors()
    taken = pending.wait()
    half, passed = sum(taken) / 2, 0.0
    for replay in taken:
        if passed >= half:
            item.samples.setdefault("sustained", []).append(item.per_call(replay))
        passed += replay
    item.readings.setdefault("sustained", []).append(reading)


Announce = Callable[[Item, str, int], None]
Failed = Callable[[Item, Exception], None]


def take_turns(
    backend: Backend, items: Sequence[Item], settings: BenchSettings, announce: Announce, failed: Failed
) -> list[Item]:
    """Runs all rounds of both states, in sustained with the limits behind the contenders; returns the items that came
    through.

    announce(item, state, round) is called before every turn. An item whose turn raises is given to `failed`, has no
    further turn, and its samples are dropped.
    """
    live = list(items)
    turns = {"burst": (settings.burst_rounds, burst_turn), "sustained": (settings.sustained_rounds, sustained_turn)}
    for state, (rounds, turn) in turns.items():
        for number in range(rounds):
            settled = False
            order = list(reversed(live) if number % 2 else live)
            if state == "sustained":
                order.sort(key=lambda item: item.is_limit)
            for item in order:
                announce(item, state, number)
                try:
                    if state == "sustained" and settings.rest_s:
                        backend.synchronize()
                        backend.idle(settings.rest_s)
                    elif state == "sustained" and not (settled or item.is_limit):
                        start_sustained(backend, item, settings.settle_s).wait()
                        settled = True
                    turn(backend, item, settings)
                except Exception as error:
                    live.remove(item)
                    item.samples.clear()
                    failed(item, error)
    return live


# ---------------------------------------------------------------- words
def method_text(
    item: Item,
    sets: int,
    set_bytes: int,
    settings: BenchSettings,
    *,
    graph: bool,
    clock: str,
    limits_age_s: float = 0.0,
    limits: str = "limits",
) -> str:
    """How an item was timed, for its record. limits_age_s: how long before, where the cell did not have its own.
    limits: what they were."""
    what = "CUDA-graph replays" if graph else "loops of launches (the kernel cannot be captured)"
    inputs = f"{sets} input sets of {set_bytes / 1e6:.1f} MB ({settings.dist}, random pages, cold L2)"
    parts = [f"{what} of {item.calls} calls rotating over {inputs} and writing the same outputs, {clock}"]
    if settings.burst_rounds:
        parts.append(
            f"burst: best of {settings.burst_replays} replays after {settings.idle_ms:g} ms idle, a sample in each of "
            f"{settings.burst_rounds} rounds"
        )
    if settings.sustained_rounds:
        parts.append(
            f"sustained: second half of {settings.sustained_s:g} s of back-to-back replays, "
            f"{settings.sustained_rounds} turns, "
            + (
                f"each behind {settings.rest_s:g} s of rest"
                if settings.rest_s
                else f"the first contender's behind {settings.settle_s:g} s of its replays that are not kept"
            )
        )
    if limits_age_s:
        before = f"{limits_age_s:.0f} s before in the same process"
        parts.append(f"contenders in turn, every other round reversed; {limits} {before}")
    else:
        parts.append(f"contenders and {limits} in turn, sustained ones last, every other round reversed")
    if item.apart:
        whose = f"calls overlapped by {item.overlap_us:.1f} us" if item.overlap_us else "calls of another overlapped"
        parts.append(f"{whose}, so a tiny kernel stands between them, its {item.gap_us:.2f} us taken off")
    return "; ".join(parts)
