"""Nsight Compute's metrics: which ones decide, in units of the house, and what a stall means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: Sections of the short pass. Sections and not metric names: every chip has them, with its own metrics behind.
SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "SchedulerStats",
    "WarpStateStats",
    "Occupancy",
    "LaunchStats",
)
#: And the few that no section holds. A chip that lacks one is profiled without them.
METRICS = (
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
)

_MICROSECONDS = {
    "s": 1e6,
    "second": 1e6,
    "ms": 1e3,
    "msecond": 1e3,
    "us": 1.0,
    "usecond": 1.0,
    "ns": 1e-3,
    "nsecond": 1e-3,
}
_MEGAHERTZ = {
    "hz": 1e-6, "khz": 1e-3, "mhz": 1.0, "ghz": 1e3,
    "cycle/s": 1e-6, "cycle/second": 1e-6, "cycle/us": 1.0, "cycle/usecond": 1.0, "cycle/ns": 1e3, "cycle/nsecond": 1e3,
}  # fmt: skip
_BYTES = {"b": 1.0, "byte": 1.0, "kbyte": 1e3, "kb": 1e3, "mbyte": 1e6, "mb": 1e6, "gbyte": 1e9, "gb": 1e9}
_PLAIN: Mapping[str, float] = {}


@dataclass(frozen=True)
class Counter:
    """One decisive figure. names: metrics that hold it, the best first, as regular expressions of the whole name.

    of: the metric that the figure is a share of, in per cent; both by their names.
    """

    key: str
    title: str
    unit: str
    names: tuple[str, ...]
    units: Mapping[str, float] = field(default_factory=dict)
    digits: int = 1
    of: str = ""


def _percent(key: str, title: str, *names: str) -> Counter:
    return Counter(key, title, "%", names)


COUNTERS = (
    Counter("duration_us", "duration under ncu", "us", (
        r"gpu__time_duration\.sum", r"gpu__time_duration\..*",
    ), _MICROSECONDS),
    _percent(
        "tensor",
        "tensor pipe active",
        r"sm__pipe_tensor_cycles_active\.avg\.pct_of_peak_sustained_elapsed",
        r"sm__pipe_tensor_cycles_active\w*\.avg\.pct_of_peak_sustained_(elapsed|active)",
        r"sm__pipe_tensor\w*_cycles_active\w*\.avg\.pct_of_peak_sustained_(elapsed|active)",
        r"sm__inst_executed_pipe_tensor\w*\.avg\.pct_of_peak_sustained_(elapsed|active)",
    ),
    _percent(
        "dram",
        "DRAM throughput",
        r"gpu__dram_throughput\.avg\.pct_of_peak_sustained_elapsed",
        r"dram__throughput\.avg\.pct_of_peak_sustained_elapsed",
    ),
    Counter("dram_read", "DRAM read", "MB", (r"dram__bytes_read\.sum",), _BYTES),
    Counter("dram_write", "DRAM written", "MB", (r"dram__bytes_write\.sum",), _BYTES),
    _percent("l2_hit", "L2 hit rate", r"lts__t_sector_hit_rate\.pct", r"lts__average_t_sector_hit_rate\w*\.pct"),
    _percent("l2", "L2 throughput", r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed"),
    _percent("l1", "L1, shared memory throughput", r"l1tex__throughput\.avg\.pct_of_peak_sustained_(active|elapsed)"),
    Counter("conflicts", "bank conflicts, of the wavefronts of shared memory", "%", (
        r"l1tex__data_bank_conflicts_pipe_lsu_mem_shared\.sum",
    ), of="l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"),
    Counter("balance", "the mean SM's time with work, of the busiest one's", "%", (
        r"sm__cycles_active\.avg",
    ), of="sm__cycles_active.max"),
    _percent("occupancy", "achieved occupancy", r"sm__warps_active\.avg\.pct_of_peak_sustained_active"),
    Counter("eligible", "eligible warps a cycle and scheduler", "", (
        r"smsp__warps_eligible\.avg\.per_cycle_active",
    ), _PLAIN, 2),
    Counter("issue", "issued instructions a cycle and scheduler", "", (
        r"smsp__issue_active\.avg\.per_cycle_active", r"smsp__inst_issued\.avg\.per_cycle_active",
    ), _PLAIN, 2),
    Counter("clock", "SM clock under ncu", "MHz", (
        r"smsp?__cycles_elapsed\.avg\.per_second", r"gpc__cycles_elapsed\.avg\.per_second",
        r"gpc__cycles_elapsed\.max\.per_second",
    ), _MEGAHERTZ, 0),
    Counter("registers", "registers a thread", "", (r"launch__registers_per_thread",), _PLAIN, 0),
    Counter("waves", "waves a multiprocessor", "", (r"launch__waves_per_multiprocessor",), _PLAIN, 2),
)  # fmt: skip

_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
#: What is counted a second time, by the pipe it waits for.
_DETAIL = re.compile(r"_pipe_|_not_issued")

#: What warps wait for, by Nsight Compute's name of the stall.
STALLS: Mapping[str, str] = {
    "long_scoreboard": "global or local memory (L1 miss or L2, DRAM)",
    "short_scoreboard": "shared memory or special functions",
    "gmma": "warpgroup products",
    "warpgroup_arrive": "warpgroup products",
    "barrier": "other warps at a barrier",
    "membar": "a memory barrier",
    "math_pipe_throttle": "a busy arithmetic pipe",
    "mio_throttle": "the queue to shared memory and special functions",
    "lg_throttle": "the queue to global and local memory",
    "tex_throttle": "the texture queue",
    "wait": "a fixed latency",
    "sleeping": "a sleep, as mbarrier waits have",
    "no_instruction": "instructions to be fetched",
    "imc_miss": "constants to be fetched",
    "branch_resolving": "a branch",
    "dispatch_stall": "the dispatcher",
    "drain": "stores at the end of the kernel",
    "not_selected": "nothing: another warp was issued",
    "misc": "other reasons",
}


@dataclass(frozen=True)
class Hot:
    """A place in the code and its share of the stall samples. where: file:line, or the instruction."""

    where: str
    samples: int
    share: float
    stall: str = ""
    text: str = ""


@dataclass(frozen=True)
class Launch:
    """One kernel of a report. metrics: name -> value; units: name -> unit as the report has it."""

    name: str
    metrics: Mapping[str, float]
    units: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    hot: Sequence[Hot] = ()

    def value(self, counter: Counter) -> float | None:
        """The counter's value in its unit, None where the report does not hold it."""
        for pattern in counter.names:
            found = [name for name in self.metrics if re.fullmatch(pattern, name)]
            if found:
                name = max(found, key=lambda n: self.metrics[n])
                if counter.of:
                    whole = self.metrics.get(counter.of)
                    return 100 * self.metrics[name] / whole if whole else None
                scale = counter.units.get(self.units.get(name, "").lower(), 1.0)
                return self.metrics[name] * scale / (1e6 if counter.unit == "MB" else 1.0)
        return None

    def figures(self) -> dict[str, float]:
        """Every counter that the report holds, by key."""
        found = {counter.key: self.value(counter) for counter in COUNTERS}
        return {key: value for key, value in found.items() if value is not None}

    def stalls(self) -> list[tuple[str, float]]:
        """Reasons why warps did not issue and their share of all warp time in per cent, the largest first."""
        cycles: dict[str, float] = {}
        for name, value in self.metrics.items():
            match = _STALL.fullmatch(name)
            if match and not _DETAIL.search(match[1]):
                cycles[match[1]] = value
        total = sum(cycles.values())
        if total <= 0:
            return []
        shares = [(name, 100 * value / total) for name, value in cycles.items() if name != "selected"]
        return sorted(shares, key=lambda row: -row[1])


def main_launch(launches: Sequence[Launch]) -> Launch:
    """The longest one: what a pipeline's counters are about."""
    return max(launches, key=lambda launch: launch.figures().get("duration_us", 0.0))
