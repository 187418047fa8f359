"""What a profile found out about one kernel, and the sentences that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.lab.profiling.modes.counters import STALLS, Launch, main_launch
from mla_var3.lab.profiling.modes.spans import Span, totals
from mla_var3.record import as_ratio

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.lab.profiling.modes.event import Timing
    from mla_var3.lab.profiling.modes.trace import Trace
    from mla_var3.lab.profiling.roofline import Roofline
    from mla_var3.toolchain.compiled import CompiledKernel

#: Traffic over the minimum, idle tensor cores, a clock below its top: from here on they are worth a sentence.
_TRAFFIC = 1.15
_TENSOR = 80.0
_CLOCK = 0.93
_GAP_SHARE = 0.02


@dataclass
class Facts:
    """One kernel's. launches: of `calls` profiled calls, under ncu. spans: on the time axis. trace: inside
    its kernels."""

    label: str
    tiling: Mapping[str, Any]
    limit: Roofline
    compiled: CompiledKernel | None = None
    timing: Timing | None = None
    launches: Sequence[Launch] = ()
    spans: Sequence[Span] = ()
    trace: Trace | None = None
    calls: int = 1
    notes: list[str] = field(default_factory=list)
    commands: list[Sequence[str]] = field(default_factory=list)
    files: dict[str, Path] = field(default_factory=dict)

    def time_us(self) -> tuple[float, str] | None:
        """The time of a call and how it was taken; None when nothing ran."""
        if self.timing is not None:
            return self.timing.median, self.timing.method
        durations = [launch.figures().get("duration_us") for launch in self.launches]
        known = [us for us in durations if us is not None]
        if known:
            return sum(known) / self.calls, "sum of the kernels' durations under ncu, each alone, cold caches"
        if self.spans:
            return totals(self.spans).busy_us / self.calls, "time the device was busy, a call, under the tracer"
        return None

    def to_record(self) -> dict[str, Any]:
        time = self.time_us()
        return {
            "kernel": self.label,
            "tiling": dict(self.tiling),
            "roofline": asdict(self.limit),
            "time_us": None if time is None else time[0],
            "time_method": None if time is None else time[1],
            "percent_of_limit": None if time is None else self.limit.share(time[0]),
            "timing": None if self.timing is None else self.timing.to_record(),
            "resources": None if self.compiled is None else self.compiled.to_record(),
            "warnings": [] if self.compiled is None else list(self.compiled.warnings),
            "launches": [
                {
                    "name": one.name,
                    "figures": one.figures(),
                    "stalls": dict(one.stalls()),
                    "hot": [asdict(row) for row in one.hot],
                    "metrics": dict(one.metrics),
                }
                for one in self.launches
            ],
            "spans": [asdict(span) for span in self.spans],
            "trace": None if self.trace is None else self.trace.to_record(),
            "calls": self.calls,
            "notes": self.notes,
        }


def findings(facts: Facts, device: Device) -> list[str]:
    """What stands out, the weightiest first: sentences with their numbers, no advice that the numbers do not carry."""
    found: list[str] = []
    limit, time = facts.limit, facts.time_us()
    if time is not None and limit.limit_us is not None:
        share = limit.share(time[0]) or 0.0
        found.append(f"{limit.bound}-bound, at {share:.0f} % of the limit of {limit.limit_us:,.1f} us.")
        if share > 103:
            found.append(
                "Over 100 % of a limit means that the limit is not this machine's, or that data came from a cache: "
                "measure the limits here with `mla-var3 bench --calibrate`."
            )
    elif limit.limit_us is not None:
        found.append(f"{limit.bound}-bound: no kernel can take less than {limit.limit_us:,.1f} us.")
    if facts.launches:
        found += _from_counters(facts, device)
    if facts.spans:
        found += _from_spans(facts)
    if facts.trace is not None:
        found += facts.trace.sentences()
    if facts.compiled is not None:
        found += [f"The binary: {warning}." for warning in dict.fromkeys(facts.compiled.warnings)]
    return found


def _from_counters(facts: Facts, device: Device) -> list[str]:
    main, found = main_launch(facts.launches), []
    figures = main.figures()
    tensor, bound = figures.get("tensor"), facts.limit.bound
    if bound == "compute" and tensor is not None and tensor < _TENSOR:
        found.append(f"The tensor pipe is active in {tensor:.0f} % of the cycles; the rest of the time it waits.")
    if bound == "memory" and "dram" in figures:
        found.append(f"DRAM runs at {figures['dram']:.0f} % of its peak.")
    stalls = main.stalls()
    if stalls:
        name, share = stalls[0]
        found.append(f"Warps wait most for {STALLS.get(name, name)} ({name}, {share:.0f} % of their time).")
    moved = sum(one.figures().get("dram_read", 0.0) + one.figures().get("dram_write", 0.0) for one in facts.launches)
    moved /= facts.calls
    if facts.limit.bytes and moved * 1e6 > _TRAFFIC * facts.limit.bytes:
        ratio = moved * 1e6 / facts.limit.bytes
        found.append(
            f"DRAM moved {moved:,.0f} MB, {ratio:.2f} times the {facts.limit.bytes / 1e6:,.0f} MB that must be."
        )
    waves = figures.get("waves")
    if waves is not None and 0 < waves < 1:
        found.append(f"The grid is {waves:.2f} of a wave: some of the device has nothing to do.")
    elif waves is not None and waves > 1 and 0 < waves % 1 < 0.5 and waves < 5:
        found.append(f"The grid is {waves:.2f} waves: the last one fills {100 * (waves % 1):.0f} % of the device.")
    clock = figures.get("clock")
    if clock is not None and device.boost_mhz and clock < _CLOCK * device.boost_mhz:
        found.append(f"The SM clock was {clock:,.0f} MHz of {device.boost_mhz:,}: a warm or power-limited chip.")
    return found


def _from_spans(facts: Facts) -> list[str]:
    sums, found = totals(facts.spans), []
    if sums.total_us and sums.idle_us > _GAP_SHARE * sums.total_us:
        share = 100 * sums.idle_us / sums.total_us
        found.append(
            f"The device is idle between kernels for {sums.idle_us:,.1f} of {sums.total_us:,.1f} us ({share:.0f} %)."
        )
    if sums.overlap_us:
        found.append(f"Kernels overlap for {sums.overlap_us:,.1f} us.")
    return found


def against(facts: Facts, base: Facts) -> list[str]:
    """The kernel beside its baseline: ratios of what both have."""
    found = []
    ours, theirs = facts.time_us(), base.time_us()
    if ours is not None and theirs is not None and theirs[0] > 0:
        ratio = ours[0] / theirs[0]
        word = "faster than" if ratio < 1 else "slower than"
        found.append(
            f"{facts.label} takes {ours[0]:,.1f} us and {base.label} {theirs[0]:,.1f} us: {100 * abs(1 - ratio):.1f} % "
            f"{word} the baseline (ratio {as_ratio(ratio, 4)})."
        )
    if facts.compiled is not None and base.compiled is not None:
        one, two = facts.compiled.resources, base.compiled.resources
        pairs = [
            (name, getattr(one, key), getattr(two, key))
            for name, key in (("registers", "registers"), ("shared memory", "smem"), ("spill bytes", "spill_bytes"))
        ] + [
            (name, one.instructions.get(name, 0), two.instructions.get(name, 0))
            for name in ("HGMMA", "HMMA", "UTMALDG", "LDGSTS", "total")
        ]
        changed = [f"{name} {b:,} → {a:,}" for name, a, b in pairs if a != b]
        found.append(f"Resources, baseline → this: {', '.join(changed) or 'the same'}.")
    return found
