"""Memory-, compute- or latency-bound, and what shows it; then what stands out, the weightiest first.

The three words are those of Nsight Compute's guide: a unit that is busy for 80 % of what it can is the bound; where no
unit reaches 60 %, warps wait for latencies. In between the kernel leans on the busiest unit without being held by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mla_var3.catalogue.retired import where_is
from mla_var3.lab import naming
from mla_var3.lab.diagnosis.evidence import Evidence, Record
from mla_var3.lab.diagnosis.experiments import Experiment, suggest
from mla_var3.lab.diagnosis.signs import SIGNS, Sign
from mla_var3.lab.knowledge.find import Found, find

SATURATED, IDLE = 80.0, 60.0
#: Units as busy as the busiest, within so many points: then the roofline says which one counts.
_LEVEL = 10.0
#: A sign of less weight is a remark, and no reason.
REASON = 40

#: Counter -> (kind, what it is called in a sentence). L1 and shared memory only count when they are saturated: products
#: whose operands lie in shared memory keep them busy without waiting for them.
_UNITS = {
    "tensor": ("compute", "the tensor pipe"),
    "dram": ("memory", "DRAM"),
    "l2": ("memory", "L2"),
    "l1": ("memory", "L1 and shared memory"),
}


@dataclass(frozen=True)
class Diagnosis:
    """kind: compute, memory, latency or unknown. because: the sentence that carries it. measured: by counters.

    signs: what stands out. optimizations, anti_patterns: entries of the knowledge base whose triggers fit; techniques
    that the version states to have (`KernelPlan.uses`) are not among them. experiments: what to try next. open: what is
    not known, and how to get it.
    """

    evidence: Evidence
    kind: str
    because: str
    measured: bool
    signs: tuple[Sign, ...]
    optimizations: tuple[Found, ...]
    anti_patterns: tuple[Found, ...]
    experiments: tuple[Experiment, ...]
    open: tuple[str, ...]

    @property
    def reason(self) -> str:
        """One sentence: what holds the kernel back."""
        share = self.evidence.share
        head = f"{self.kind}-bound" if self.kind != "unknown" else "not known"
        if share is not None and share >= 90 and self.kind != "latency":
            return f"{head}, and close to it: {share:.0f} % of the limit."
        titles = [sign.title for sign in self.signs if sign.weight >= REASON][:2]
        return f"{head}: {'; '.join(titles) or 'nothing in what is known stands out'}."


def diagnose(
    evidence: Evidence, index: dict[str, Any] | None = None, records: Iterable[Record] | None = None
) -> Diagnosis:
    """Judges; index: of the knowledge base, by default the repository's, else the package's. records: that predict what
    an experiment gains, by default none beside the index."""
    from mla_var3.lab.knowledge.find import load_index

    kind, because, measured = bottleneck(evidence)
    signs = sorted((s for make in SIGNS for s in make(evidence)), key=lambda s: -s.weight)
    known = load_index() if index is None else index
    device = evidence.device
    entries = find(
        known, evidence.facts, language=_language(evidence.kernel.language), arch=device.arch if device else None
    )
    techniques = [one for one in entries if one.entry["kind"] == "optimization" and technique(one) not in evidence.uses]
    return Diagnosis(
        evidence,
        kind,
        because,
        measured,
        tuple(signs),
        tuple(techniques),
        tuple(one for one in entries if one.entry["kind"] == "anti-pattern"),
        tuple(suggest(evidence, techniques, records or ())),
        tuple(_open(evidence)),
    )


def technique(found: Found) -> str:
    """What versions call an optimization in `uses`: `loading/page-wise-tma` of its page."""
    return str(found.entry["path"]).removeprefix("optimizations/").removesuffix(".md")


def _language(name: str) -> str | None:
    """Other people's libraries are written in no language of ours: every entry may speak of them."""
    return None if name in ("peer", "torch") else name


# ---------------------------------------------------------------- the verdict
def bottleneck(evidence: Evidence) -> tuple[str, str, bool]:
    """(kind, sentence, whether counters carry it)."""
    figures = evidence.figures
    busy = {key: figures[key] for key in _UNITS if key in figures}
    if "tensor" in busy or "dram" in busy:
        return *_of_counters(evidence, busy), True
    return *_of_times(evidence), False


def _of_counters(evidence: Evidence, busy: dict[str, float]) -> tuple[str, str]:
    counted = {k: v for k, v in busy.items() if k != "l1" or v >= SATURATED}
    top = max(counted, key=lambda key: counted[key])
    if counted[top] < IDLE:
        said = ", ".join(f"{_UNITS[key][1]} {value:.0f} %" for key, value in busy.items())
        return "latency", f"no unit is near what it can do ({said}): warps wait for each other or for data"
    level = [key for key, value in counted.items() if value >= counted[top] - _LEVEL]
    chosen = next((key for key in ("tensor", "dram") if key in level and _UNITS[key][0] == evidence.bound), top)
    kind, name = _UNITS[chosen]
    others = [f"{_UNITS[key][1]} at {counted[key]:.0f} %" for key in level if key != chosen]
    beside = f"; as busy: {', '.join(others)}" if others else ""
    if counted[chosen] >= SATURATED:
        return kind, f"{name} is busy {counted[chosen]:.0f} % of the time{beside}"
    return kind, (
        f"{name} is the unit that counts, and for {100 - counted[chosen]:.0f} % of the time it waits "
        f"(busy {counted[chosen]:.0f} %{beside})"
    )


def _of_times(evidence: Evidence) -> tuple[str, str]:
    share, bound = evidence.share, evidence.bound
    if share is None:
        if bound is None:
            return "unknown", "nothing was timed, and the device's peaks are not known"
        return "unknown", f"nothing was timed; the work itself is limited by {_WORK[bound]}"
    useful = [(evidence.useful(key), name) for key, name in (("tensor", "the tensor cores"), ("dram", "DRAM"))]
    rates = " and ".join(f"{value:.0f} % of what {name} can" for value, name in useful if value is not None)
    if share >= SATURATED and bound:
        return bound, f"it reaches {share:.0f} % of the {bound} limit of its own run ({rates})"
    if share >= IDLE and bound:
        return bound, f"it reaches {share:.0f} % of the {bound} limit ({rates}); only counters say what fills the rest"
    return "latency", (
        f"it does {rates or f'{share:.0f} % of its limit'} in useful work, which no limit explains: latencies, or work "
        "that is no use (padded rows, data read twice), which only counters tell apart"
    )


_WORK = {"compute": "the tensor cores", "memory": "DRAM"}


# ---------------------------------------------------------------- what is not known
def _open(evidence: Evidence) -> Iterator[str]:
    """Each with the command that would tell it; of a retired version none would, and the last line says why."""
    gone = where_is(evidence.label)
    for what, asked in _asked(evidence):
        yield f"{what}: {asked}" if gone is None else what
    if gone is not None:
        yield gone.rstrip(".")


def _asked(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """(what is not known, the command that tells it)."""
    ask = command(evidence)
    if not evidence.figures:
        what = (
            "how busy the tensor pipe, DRAM and L2 are, L2 hits, occupancy and eligible warps, what warps wait for, "
            "waves, the SM clock in the kernel"
        )
        yield what, f"mla-var3 profile {ask}"
    if evidence.profile is None or not evidence.profile.hot():
        yield "the source lines at which warps wait", f"mla-var3 profile {ask} --mode ncu"
    elif not {"conflicts", "balance"} & evidence.figures.keys():
        what = "bank conflicts and the balance of the SMs, which older profiles lack"
        yield what, f"mla-var3 profile {ask} --mode ncu"
    if evidence.resources.get("spill_bytes") and "spill_loop_bytes" not in evidence.resources:
        yield "where it spills, in the loop of products or not", f"mla-var3 diagnose {ask}"
    if not (evidence.record or {}).get("time_us"):
        yield "the time on a cool and a hot chip beside the limits of the same run, and power", f"mla-var3 bench {ask}"


def command(evidence: Evidence) -> str:
    """The kernel and the options of its problem, as the verbs take them."""
    return " ".join([evidence.label, *naming.options(evidence.problem)])


# ---------------------------------------------------------------- the readings
@dataclass(frozen=True)
class Reading:
    """A row of the table: what was counted, its value, and what to hold it against."""

    name: str
    value: str
    beside: str = ""


_SHOWN = (
    "tensor", "dram", "l2", "l2_hit", "l1", "conflicts", "occupancy", "eligible", "issue", "waves", "balance", "clock",
)  # fmt: skip


def readings(evidence: Evidence) -> list[Reading]:
    """The counters that decide, then the resources, the clock and the power: what of them is known."""
    from mla_var3.lab.profiling.modes.counters import COUNTERS, STALLS

    titles = {c.key: (c.title, c.unit, c.digits) for c in COUNTERS}
    figures, device, rows = evidence.figures, evidence.device, []
    for key in _SHOWN:
        if key in figures:
            title, unit, digits = titles[key]
            value = f"{figures[key]:,.{digits}f}{' ' + unit if unit else ''}"
            rows.append(Reading(title, value, _beside(key, evidence)))
    for name, share in sorted(evidence.stalls.items(), key=lambda row: -row[1])[:4]:
        if share >= 1:
            rows.append(Reading(f"stall {name}", f"{share:.0f} %", f"of warp time: waits for {STALLS.get(name, name)}"))
    taken = evidence.resources
    if taken:
        threads, most = taken.get("threads") or 0, ""
        if device is not None and threads:
            most = f"of {device.max_registers(threads)} that {threads} threads can have"
        rows.append(Reading("registers a thread", f"{taken['registers']}", most))
        rows.append(Reading("spills", f"{taken['spill_bytes']:,} B", _of_spills(taken)))
        rows.append(Reading("blocks an SM", f"{taken['ctas_per_sm']}", f"{taken.get('smem', 0) / 1024:.0f} KiB each"))
    for state in ("burst", "sustained"):
        clock, watts = evidence.reading("clocks", state), evidence.reading("power", state)
        top = f"top {device.boost_mhz:,} MHz" if device is not None and device.boost_mhz else ""
        if clock is not None:
            rows.append(Reading(f"SM clock, {state}", f"{clock:,.0f} MHz", top))
        if watts is not None:
            limit = ((evidence.record or {}).get("environment") or {}).get("power_limit_w")
            rows.append(Reading(f"power, {state}", f"{watts:,.0f} W", f"limit {limit:,.0f} W" if limit else ""))
    return rows


def _of_spills(taken: Mapping[str, Any]) -> str:
    inside = taken.get("spill_loop_bytes")
    if not taken["spill_bytes"] or inside is None:
        return "local-memory loads and stores in the code"
    return f"local-memory loads and stores in the code, {inside:,} B in the loop of products"


def _beside(key: str, evidence: Evidence) -> str:
    device, taken = evidence.device, evidence.resources
    useful = evidence.useful(key) if key in ("tensor", "dram") else None
    making: dict[str, Callable[[], str]] = {
        "tensor": lambda: "" if useful is None else f"useful work is {useful:.0f} % of a measured product's rate",
        "dram": lambda: "" if useful is None else f"the least traffic is {useful:.0f} % of a measured read's rate",
        "occupancy": lambda: _theoretical(evidence),
        "eligible": lambda: "1 or more keeps a scheduler busy",
        "waves": lambda: f"{taken.get('ctas_per_sm', '?')} blocks an SM at once",
        "clock": lambda: f"top {device.boost_mhz:,} MHz" if device and device.boost_mhz else "",
    }
    return making[key]() if key in making else ""


def _theoretical(evidence: Evidence) -> str:
    taken, device = evidence.resources, evidence.device
    if device is None or not taken.get("threads") or not taken.get("ctas_per_sm"):
        return ""
    most = 100 * taken["ctas_per_sm"] * taken["threads"] / device.max_threads_per_sm
    return f"{most:.1f} % fit"
