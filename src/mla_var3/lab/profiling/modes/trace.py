"""The timeline inside a kernel: what each warp did when, from time stamps that a traced copy of the kernel stores.

The copy is compiled for the profile (`toolchain.cute_trace`) and called beside the kernel itself: what tracing costs is
the ratio of the two times, taken in turn. The time stamps of one call, with a cold L2, become `Trace`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.toolchain import cute_trace
from mla_var3.toolchain.cute_trace import HEADER, ISSUE, MARK, NUMBER, RANGE, WAIT, Event

if TYPE_CHECKING:
    import numpy as np

    from mla_var3.runtime.plan import KernelPlan

LANGUAGE = "cute-dsl"
BUFFER = 1 << 30  # bytes
WARPGROUP = 4  # warps
#: Rounds in which the kernel and its traced copy take turns, and calls of each in a round.
ROUNDS, CALLS = 6, 5
#: CTAs of a kernel whose warps are read in full, evenly spread.
READ = 24
#: Steps of the global timer from which on they are worth a sentence.
COARSE_NS = 100
_SHARED = "mla_var3.kernel.cute_python"
#: Code that versions share and that takes long enough to have a range; the leaf primitives do not.
FUNCTIONS = tuple(f"{_SHARED}.{name}" for name in ("split_kv.walk", "split_kv.combine", "split_kv.rows"))
#: Primitives that wait in a loop or in assembly of their own.
WAITING = {"take_flag": "wait flag", "wait_for_launch": "wait launch before"}


# ---------------------------------------------------------------- what was seen
@dataclass(frozen=True)
class Step:
    """A range or a wait of a warp. Microseconds. depth: ranges around it. own_us: without what is inside it."""

    event: Event
    begin: float
    end: float
    depth: int
    own_us: float


@dataclass(frozen=True)
class Warp:
    """What one warp did. flying: (begin, end) of the times with WGMMAs of it in flight, as far as it knows: from where
    it has issued some until it has waited for all."""

    number: int
    begin: float
    end: float
    steps: tuple[Step, ...]
    flying: tuple[tuple[float, float], ...] = ()
    lost: int = 0

    @property
    def role(self) -> str:
        """The function in which it spent most of its time, of those that the kernel itself calls."""
        return role_of([self])


@dataclass(frozen=True)
class Cta:
    """One CTA. number: in its grid. warps: empty where only its begin and end were read."""

    kernel: str
    number: int
    sm: int
    begin: float
    end: float
    warps: tuple[Warp, ...] = ()


@dataclass(frozen=True)
class Trace:
    """One call: the CTAs of its kernels, in microseconds from the first one's begin. lost: events without room.

    plain_us, traced_us: medians of the kernel and its traced copy, in turn. cycles: of the SM's clock, in a
    microsecond. step_ns: in which the global timer moves, to which clocks of different SMs agree.
    """

    ctas: tuple[Cta, ...]
    cycles: float
    step_ns: int = 1
    lost: int = 0
    capacity: int = 0
    plain_us: float | None = None
    traced_us: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def kernels(self) -> list[str]:
        """In the order in which they began."""
        return list(dict.fromkeys(cta.kernel for cta in sorted(self.ctas, key=lambda cta: cta.begin)))

    @property
    def main(self) -> str:
        """The kernel whose CTAs took the most time."""
        return max(self.kernels, key=lambda name: sum(cta.end - cta.begin for cta in self.of(name)))

    def of(self, kernel: str) -> list[Cta]:
        return [cta for cta in self.ctas if cta.kernel == kernel]

    def read(self, kernel: str) -> list[Cta]:
        """Those whose warps were read."""
        return [cta for cta in self.of(kernel) if cta.warps]

    def drawn(self) -> list[Cta]:
        """CTAs of the main kernel to look at, of those that were read: the one that ends first, and the one that ends
        last."""
        ordered = sorted(self.read(self.main), key=lambda cta: cta.end)
        return [ordered[0], *ordered[1:][-1:]]

    def sentences(self) -> list[str]:
        return sentences(self)

    def to_record(self) -> dict[str, Any]:
        return to_record(self)

    def cost(self) -> float | None:
        """Time of the traced copy over that of the kernel."""
        return None if not self.plain_us or self.traced_us is None else self.traced_us / self.plain_us


# ---------------------------------------------------------------- reading a buffer
@dataclass(frozen=True)
class Slots:
    """A kernel's part of the buffer: (CTAs, warps, places, 2) uint32, as many places as were used."""

    kernel: str
    words: np.ndarray[Any, Any]


def decode(slots: Sequence[Slots], events: Sequence[Event], capacity: int, read: int = READ) -> Trace:
    """What the time stamps of one call say. capacity: places of a warp. read: CTAs of each kernel to read in full.

    Raises `UserError` where no kernel stored anything.
    """
    import numpy as np

    launched = [(one, found) for one in slots if len((found := _headers(one.words))["slot"])]
    if not launched:
        raise UserError("the traced copy stored no time stamp: its call launched no kernel in CuTe DSL.")
    clocks = _Clocks({key: np.concatenate([found[key] for _, found in launched]) for key in launched[0][1]})
    ctas: list[Cta] = []
    lost = 0
    for (one, found), kernel in zip(launched, _names([one.kernel for one, _ in launched]), strict=True):
        of_cta = found["slot"][:, 0]
        numbers = np.unique(of_cta)
        wanted = {int(numbers[i]) for i in np.linspace(0, len(numbers) - 1, min(read, len(numbers))).astype(int)}
        for number in map(int, numbers):
            warps = []
            for row in np.flatnonzero(of_cta == number):
                us = functools.partial(clocks.us, int(found["sm"][row]))
                warp, used = int(found["slot"][row, 1]), int(found["used"][row])
                begin, end = float(us(found["clock"][row])), float(us(found["end_clock"][row]))
                # Without its events where only begin and end are asked for.
                words = one.words[number, warp, HEADER : min(used, capacity) if number in wanted else HEADER]
                warps.append(_warp(warp, begin, end, words, us, events, max(used - capacity, 0)))
            lost += sum(warp.lost for warp in warps)
            begin, end = min(warp.begin for warp in warps), max(warp.end for warp in warps)
            ctas.append(
                Cta(kernel, number, int(found["sm"][row]), begin, end, tuple(warps) if number in wanted else ())
            )
    return Trace(tuple(ctas), clocks.rate * 1e3, clocks.step, lost, capacity)


def _names(kernels: Sequence[str]) -> list[str]:
    """Each name once: a second `absorb_gemm` is `absorb_gemm 2`."""
    seen: dict[str, int] = {}
    found = []
    for kernel in kernels:
        seen[kernel] = seen.get(kernel, 0) + 1
        found.append(kernel if seen[kernel] == 1 else f"{kernel} {seen[kernel]}")
    return found


def _headers(words: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Begin and end of each warp that stored both; slot: (warps, 2), the CTA and the warp in it."""
    import numpy as np

    head = words[:, :, :HEADER].reshape(*words.shape[:2], 2 * HEADER).astype(np.uint64)
    slot = np.argwhere((head[..., 0] + head[..., 1] > 0) & (head[..., 7] >= HEADER))
    rows = head[slot[:, 0], slot[:, 1]]
    return {
        "slot": slot, "time": rows[:, 0] | rows[:, 1] << np.uint64(32), "clock": rows[:, 2], "sm": rows[:, 3],
        "end_time": rows[:, 4] | rows[:, 5] << np.uint64(32), "end_clock": rows[:, 6], "used": rows[:, 7],
    }  # fmt: skip


class _Clocks:
    """Clocks of SMs on one axis. rate: cycles in a nanosecond. step: of the global timer, in nanoseconds.

    The global timer is the same everywhere and moves in coarse steps. An SM's clock is fine and has its own zero. So
    the rate is that of all warps together, and an SM's zero is the median of what its warps' begins and ends say.
    """

    def __init__(self, found: Mapping[str, np.ndarray[Any, Any]]) -> None:
        import numpy as np

        elapsed = (found["end_time"] - found["time"]).astype(np.float64)
        cycles = ((found["end_clock"] - found["clock"]) & np.uint64(0xFFFFFFFF)).astype(np.float64)
        if elapsed.sum() <= 0:
            raise UserError("the device's global timer did not move during the call: trace a larger problem.")
        self.rate = float(cycles.sum() / elapsed.sum())
        first = found["time"].min()
        self.step = int(np.gcd.reduce(np.concatenate([found["time"], found["end_time"]]) - first))
        self._base: dict[int, tuple[int, float]] = {}
        for sm in np.unique(found["sm"]):
            rows = found["sm"] == sm
            base = int(found["clock"][rows][0])
            zeros = []
            for time, clock in (("time", "clock"), ("end_time", "end_clock")):
                at = (found[time][rows] - first).astype(np.float64)
                zeros.append(at - _signed(found[clock][rows], base) / self.rate)
            self._base[int(sm)] = base, float(np.median(np.concatenate(zeros)))
        begins = [self.us(int(sm), clock) for sm, clock in zip(found["sm"], found["clock"], strict=True)]
        self._zero = min(begins)

    _zero = 0.0

    def us(self, sm: int, clock: Any) -> Any:
        """Microseconds from the first warp's begin."""
        base, zero = self._base[sm]
        return (zero + _signed(clock, base) / self.rate) / 1e3 - self._zero


def _signed(clock: Any, base: int) -> Any:
    """Cycles from `base` on; clocks are low words."""
    import numpy as np

    return ((np.asarray(clock).astype(np.int64) - base + (1 << 31)) % (1 << 32) - (1 << 31)).astype(np.float64)


def _warp(
    number: int, begin: float, end: float, words: np.ndarray[Any, Any], us: Any, events: Sequence[Event], lost: int
) -> Warp:
    """A warp from its events. What has not ended when it has no more room ends with its last time stamp."""
    times = us(words[:, 0]).tolist()
    steps: list[Step] = []
    stack: list[list[Any]] = []  # event, begin, time of what is inside
    flying: list[tuple[float, float]] = []
    since, groups = 0.0, 0

    def close(at: float) -> None:
        event, first, inside = stack.pop()
        steps.append(Step(event, first, at, len(stack), at - first - inside))
        if stack:
            stack[-1][2] += at - first

    for at, word in zip(times, words[:, 1].tolist(), strict=True):
        event = events[word & NUMBER]
        if word & MARK:
            since = since if groups else at
            groups += 1
        elif not word & cute_trace.END:
            stack.append([event, at, 0.0])
        elif any(open_[0] == event for open_ in stack):
            while stack[-1][0] != event:
                close(at)
            close(at)
            if event.left >= 0 and groups > event.left:
                groups = event.left
                if not groups:
                    flying.append((since, at))
    last = times[-1] if lost and times else end
    while stack:
        close(last)
    steps.sort(key=lambda step: (step.begin, step.depth))
    return Warp(number, begin, end, tuple(steps), tuple(flying), lost)


def role_of(warps: Iterable[Warp]) -> str:
    """The function in which these warps together spent most of their time, of those that the kernel itself calls."""
    times: dict[str, float] = {}
    for step in (step for warp in warps for step in warp.steps):
        if step.depth == 0 and step.event.kind == RANGE:
            times[step.event.name] = times.get(step.event.name, 0.0) + step.end - step.begin
    return max(times, key=lambda name: times[name], default="kernel")


# ---------------------------------------------------------------- what fills the time
@dataclass(frozen=True)
class Share:
    """What the warps of a warpgroup did, of the time of their CTAs, in per cent; count: how often, in a warp."""

    warpgroup: int
    role: str
    name: str
    kind: str
    percent: float
    count: float
    mean_us: float


def shares(trace: Trace, kernel: str | None = None) -> list[Share]:
    """By warpgroup, the largest first: time in each function and wait without what is inside it, over all CTAs that
    were read. "elsewhere": between the functions."""
    ctas = trace.read(kernel or trace.main)
    sums: dict[tuple[int, str, str], list[float]] = {}
    total: dict[int, float] = {}
    members: dict[int, list[Warp]] = {}
    for warp in (warp for cta in ctas for warp in cta.warps):
        group = warp.number // WARPGROUP
        members.setdefault(group, []).append(warp)
        total[group] = total.get(group, 0.0) + warp.end - warp.begin
        left = warp.end - warp.begin
        for step in warp.steps:
            row = sums.setdefault((group, step.event.name, step.event.kind), [0.0, 0])
            row[0] += step.own_us
            row[1] += 1
            left -= step.own_us
        sums.setdefault((group, "elsewhere", RANGE), [0.0, 0])[0] += left
    # Of all its warps: the first one of a producer warpgroup may have nothing to load.
    roles = {group: role_of(them) for group, them in members.items()}
    found = [
        Share(
            group,
            roles[group],
            name,
            kind,
            100 * us / total[group],
            count / len(members[group]),
            us / count if count else 0.0,
        )
        for (group, name, kind), (us, count) in sums.items()
        if total[group]
    ]
    return sorted(found, key=lambda one: (one.warpgroup, -one.percent))


def union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times that at least one of the spans covers, in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def flying(cta: Cta) -> list[tuple[float, float]]:
    """When WGMMAs of any warpgroup of a CTA were in flight, as the first warp of each knows."""
    return union([span for warp in cta.warps if warp.number % WARPGROUP == 0 for span in warp.flying])


def thirds(ctas: Sequence[Cta]) -> tuple[float, float, float]:
    """Means over CTAs with products, in microseconds: from a CTA's begin to its first products, from these to the end
    of its last ones, and from there to its end."""
    rows = [(cta.begin, spans[0][0], spans[-1][1], cta.end) for cta in ctas if (spans := flying(cta))]
    begin, first, last, end = (sum(row[i] for row in rows) / len(rows) for i in range(4))
    return first - begin, last - first, end - last


def sentences(trace: Trace) -> list[str]:
    """What fills the call: its kernels one behind the other, the main kernel's CTAs, and their warpgroups."""
    found: list[str] = []
    for name in trace.kernels:
        ctas = trace.of(name)
        begins, ends = [cta.begin for cta in ctas], [cta.end for cta in ctas]
        found.append(
            f"{name}: {len(ctas)} CTAs from {min(begins):,.1f} to {max(ends):,.1f} us; the last one began at "
            f"{max(begins):,.1f} us, and the first one ended at {min(ends):,.1f} us."
        )
    main = trace.main
    read = trace.read(main)
    whole = sum(cta.end - cta.begin for cta in read)
    busy = sum(end - begin for cta in read for begin, end in flying(cta))
    if busy:
        first, between, behind = thirds(read)
        found.append(
            f"A CTA of {main} takes {first + between + behind:,.1f} us in the mean: {first:,.1f} until its first "
            f"products are issued, {between:,.1f} until it has waited for its last ones, and {behind:,.1f} behind. "
            f"Products are in flight, or done and not yet waited for, in {100 * busy / whole:.0f} % of its time."
        )
    for _, some in itertools.groupby(shares(trace), key=lambda one: one.warpgroup):
        rows = list(some)
        waits = sum(row.percent for row in rows if row.kind == WAIT)
        most = ", ".join(f"{row.name} {row.percent:.0f} %" for row in rows[:4])
        found.append(
            f"Warpgroup {rows[0].warpgroup} ({rows[0].role}) waits in {waits:.0f} % of its time. Most: {most}."
        )
    if (cost := trace.cost()) is not None:
        found.append(
            f"Tracing costs: the traced copy takes {trace.traced_us:,.1f} us and the kernel {trace.plain_us:,.1f} us, "
            f"{cost:.2f} times as long, so that short steps are shown longer than they are."
        )
    if trace.step_ns > COARSE_NS:
        found.append(
            f"The global timer moves in steps of {trace.step_ns:,} ns: times of different SMs agree to about that, and "
            "times of one SM to a cycle of its clock."
        )
    if trace.lost:
        found.append(
            f"{trace.lost:,} events found no room, which is {trace.capacity - HEADER:,} events a warp: the ends of "
            "those warps are not shown. Trace a smaller problem."
        )
    return found


def to_record(trace: Trace) -> dict[str, Any]:
    """What facts.json has of a trace."""
    return {
        "kernels": [
            {
                "name": name,
                "ctas": len(trace.of(name)),
                "begin_us": min(cta.begin for cta in trace.of(name)),
                "last_begin_us": max(cta.begin for cta in trace.of(name)),
                "first_end_us": min(cta.end for cta in trace.of(name)),
                "end_us": max(cta.end for cta in trace.of(name)),
            }
            for name in trace.kernels
        ],
        "shares": [vars(one) for one in shares(trace)],
        "said": sentences(trace),
        "plain_us": trace.plain_us,
        "traced_us": trace.traced_us,
        "lost": trace.lost,
        "capacity": trace.capacity,
        "mhz": trace.cycles,
        "timer_step_ns": trace.step_ns,
    }


# ---------------------------------------------------------------- for Perfetto
def chrome(trace: Trace) -> dict[str, Any]:
    """The trace as Chrome's JSON: a process for each CTA that is drawn, a thread for each warp, one for the products in
    flight of each warpgroup; and a process for each kernel with all its CTAs."""
    events: list[dict[str, Any]] = []

    def name(kind: str, text: str, pid: int, tid: int = 0) -> None:
        events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": text}})

    def span(text: str, kind: str, begin: float, end: float, pid: int, tid: int, **args: Any) -> None:
        events.append(
            {"ph": "X", "name": text, "cat": kind, "ts": round(begin, 4), "dur": round(max(end - begin, 0.0), 4),
             "pid": pid, "tid": tid, "args": args}
        )  # fmt: skip

    pids = itertools.count(1)
    for kernel in trace.kernels:
        pid = next(pids)
        name("process_name", f"{kernel}: all CTAs, by SM", pid)
        for cta in trace.of(kernel):
            span(f"CTA {cta.number}", "cta", cta.begin, cta.end, pid, cta.sm, sm=cta.sm)
        for sm in sorted({cta.sm for cta in trace.of(kernel)}):
            name("thread_name", f"SM {sm}", pid, sm)
    others = [trace.read(kernel)[0] for kernel in trace.kernels if kernel != trace.main]
    for cta in (*trace.drawn(), *others):
        pid = next(pids)
        name("process_name", f"{cta.kernel}: CTA {cta.number} on SM {cta.sm}", pid)
        for warp in cta.warps:
            name("thread_name", f"warp {warp.number}: {warp.role}", pid, warp.number)
            for step in warp.steps:
                span(step.event.name, step.event.kind, step.begin, step.end, pid, warp.number, where=step.event.where)
            if warp.flying and warp.number % WARPGROUP == 0:
                tid = 1000 + warp.number // WARPGROUP
                name("thread_name", f"warpgroup {warp.number // WARPGROUP}: products in flight", pid, tid)
                for begin, end in warp.flying:
                    span("products in flight", ISSUE, begin, end, pid, tid)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


# ---------------------------------------------------------------- on the GPU
@dataclass
class Buffer:
    """A trace buffer on the GPU and the recorder of the kernels that store into it."""

    words: Any  # torch, int32
    recorder: cute_trace.Recorder = field(init=False)

    def __post_init__(self) -> None:
        size = self.words.numel() * self.words.element_size()
        self.recorder = recorder_at(self.words.data_ptr(), size)

    def clear(self) -> None:
        self.words.zero_()

    def slots(self) -> Iterator[Slots]:
        """What the kernels stored, on the CPU."""
        import numpy as np

        capacity = self.recorder.capacity
        for region in self.recorder.regions:
            first, count = region.offset // 4, region.ctas * region.warps * capacity * 2
            words = self.words[first : first + count].view(region.ctas, region.warps, capacity, 2)
            used = int(words[:, :, HEADER - 1, 1].max().item())
            kept = words[:, :, : max(HEADER, min(used, capacity))].cpu().numpy().view(np.uint32)
            yield Slots(region.kernel, kept)


def recorder_at(base: int, size: int = BUFFER) -> cute_trace.Recorder:
    return cute_trace.Recorder(base, size, functions=(*FUNCTIONS, f"{_SHARED}.prims.sync"), waits=WAITING)


def traced_kernel(plan: KernelPlan, recorder: cute_trace.Recorder, *inputs: Any) -> Any:
    """The plan's kernel, traced; without inputs it only compiles."""
    with cute_trace.tracing(recorder):
        fresh = type(plan)(plan.problem, plan.tiling, plan.device)
        return fresh.plan(*inputs) if inputs else fresh.plan_empty()


def record(plan: KernelPlan, kernel: Any, inputs: Sequence[Any]) -> Trace:
    """Traces a call of the plan's kernel on the GPU that is here. kernel: the one without a trace, over `inputs`.

    Raises `UserError` where the kernels have nothing to trace.
    """
    import dataclasses

    import torch

    from mla_var3.lab.profiling.modes.event import FLUSH_BYTES, WARM
    from mla_var3.measure.cuda_backend import CudaBackend
    from mla_var3.measure.timing import percentile

    buffer = Buffer(torch.zeros(BUFFER // 4, dtype=torch.int32, device="cuda"))
    traced = traced_kernel(plan, buffer.recorder, *inputs)
    backend = CudaBackend()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARM):
        kernel.launch()
        traced.launch()
    for _ in range(ROUNDS):
        for one, taken in zip((kernel, traced), times, strict=True):
            taken += backend.singles(one.launch, CALLS, FLUSH_BYTES)[0]
    buffer.clear()
    backend.singles(traced.launch, 1, FLUSH_BYTES)
    found = decode(list(buffer.slots()), buffer.recorder.events, buffer.recorder.capacity)
    notes = []
    same = all(torch.equal(a, b) for a, b in zip(kernel.output_tensors, traced.output_tensors, strict=True))
    if not same:
        notes.append("the traced copy's results differ from the kernel's in some bits")
    spilled = sum(one.resources.spill_bytes for one in buffer.recorder.compiled)
    if spilled:
        notes.append(f"the traced copy spills {spilled:,} bytes of registers a thread (Resources are the kernel's own)")
    notes += [f"{name} was not traced: the buffer had no room" for name in dict.fromkeys(buffer.recorder.left_out)]
    plain, with_trace = (percentile(sorted(taken), 0.5) for taken in times)
    return dataclasses.replace(found, plain_us=plain, traced_us=with_trace, notes=tuple(notes))
