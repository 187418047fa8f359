"""What is known of one kernel on one problem: a profile, a record, a compilation, or several of them together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3 import paths
from mla_var3.catalogue import registry, spoken
from mla_var3.catalogue.registry import KernelId
from mla_var3.errors import UserError
from mla_var3.lab.diagnosis import profiles
from mla_var3.lab.knobs import same_knobs
from mla_var3.lab.knowledge import find as knowledge
from mla_var3.lab.knowledge.triggers import Facts
from mla_var3.record import ASIDE
from mla_var3.record import Record as Model
from mla_var3.toolchain import spills
from mla_var3.workload import Problem, problem_from_record

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.lab.diagnosis.profiles import Profile
    from mla_var3.toolchain.compiled import CompiledKernel
    from mla_var3.toolchain.spills import Spill

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Time:
    """Microseconds of a call. state: burst, sustained, or profiled. limit_us: of the same run, where there is one."""

    state: str
    us: float
    limit_us: float | None
    how: str

    @property
    def share(self) -> float | None:
        """Per cent of the limit that this time reaches."""
        return None if not self.limit_us else 100 * self.limit_us / self.us


@dataclass
class Evidence:
    """profile, record, compiled: whichever there is; what stands in several is taken from the first of them.

    planned: FLOPs and bytes of the problem, where it was planned for this. spills: of its main kernel, with their
    source lines, where they were located (`spilled.locate`); short_of_registers: lines at which the compiler says that
    they run out.
    sources: one sentence for each, with what they were made of. notes: what does not fit together.
    """

    kernel: KernelId
    problem: Problem
    device_key: str
    tiling: Mapping[str, Any] = field(default_factory=dict)
    profile: Profile | None = None
    record: Record | None = None
    compiled: CompiledKernel | None = None
    planned: tuple[int, int] | None = None
    spills: tuple[Spill, ...] | None = None
    short_of_registers: tuple[str, ...] = ()
    sources: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        return self.kernel.label

    @property
    def device(self) -> Device | None:
        """None for a device that `devices.json` does not know."""
        from mla_var3.device import Device

        try:
            return Device.get(self.device_key)
        except UserError:
            return None

    # ------------------------------------------------------------ counters
    @property
    def main_launch(self) -> Mapping[str, Any]:
        launches = self.profile.facts.get("launches") if self.profile else None
        return max(launches, key=lambda one: one["figures"].get("duration_us", 0.0)) if launches else {}

    @property
    def figures(self) -> Mapping[str, float]:
        """Counters by the keys of `profiling.counters`; empty without a profile that has some."""
        return dict(self.main_launch.get("figures", {}))

    @property
    def stalls(self) -> Mapping[str, float]:
        """Share of a stall in the time of warps, per cent, by its name."""
        return dict(self.main_launch.get("stalls", {}))

    @property
    def moved_mb(self) -> float | None:
        """DRAM traffic of one call over all its kernels, in MB."""
        launches = (self.profile.facts.get("launches") if self.profile else None) or []
        parts = [
            one["figures"].get("dram_read", 0.0) + one["figures"].get("dram_write", 0.0)
            for one in launches
            if "dram_read" in one["figures"]
        ]
        return sum(parts) / max(1, self.profile.facts.get("calls", 1)) if parts and self.profile else None

    # ------------------------------------------------------------ the binary
    @property
    def resources(self) -> Mapping[str, Any]:
        """As a record has them; a compilation made now comes before what was recorded, which may be of older source."""
        if self.compiled is not None:
            return self.compiled.to_record()
        of_profile = self.profile.facts.get("resources") if self.profile else None
        known = of_profile or (self.record or {}).get("resources") or {}
        if not known or "spill_loop_bytes" in known:
            return known
        # Of what was recorded before that was counted: nothing of nothing, else what was located.
        where: Sequence[Spill] | None = () if not known.get("spill_bytes") else self.spills
        return known if where is None else {**known, "spill_loop_bytes": spills.bytes_in(where, spills.LOOP)}

    @property
    def uses(self) -> tuple[str, ...]:
        """Techniques that the version states to have: names of pages in docs/knowledge/optimizations."""
        return tuple(registry.uses(self.kernel))

    @property
    def instructions(self) -> Mapping[str, int]:
        return dict(self.resources.get("instructions") or {})

    @property
    def warnings(self) -> list[str]:
        """What the toolchain says of the binary."""
        of_profile = self.profile.facts.get("warnings") if self.profile else None
        compiled = list(self.compiled.warnings) if self.compiled else None
        return list(dict.fromkeys(compiled or of_profile or (self.record or {}).get("warnings") or []))

    # ------------------------------------------------------------ times
    @property
    def work(self) -> tuple[int, int]:
        """(FLOPs, minimal bytes) of a call."""
        if self.profile is not None:
            line = self.profile.facts["roofline"]
            return int(line["flops"]), int(line["bytes"])
        if self.record is not None:
            from mla_var3.lab.devlog import values

            try:
                return values.work(self.record)
            except values.Unknown:
                return 0, 0
        if self.planned is not None:
            return self.planned
        cost = self.problem.cost()
        return cost.flops, cost.bytes

    @property
    def times(self) -> list[Time]:
        found = []
        facts = self.profile.facts if self.profile else {}
        if facts.get("time_us"):
            found.append(Time("profiled", facts["time_us"], facts["roofline"]["limit_us"], str(facts["time_method"])))
        record = self.record or {}
        for state in ("burst", "sustained"):
            stats = (record.get("time_us") or {}).get(state)
            if stats:
                limit = ((record.get("limits") or {}).get(state) or {}).get("limit_us")
                found.append(Time(state, stats["median"], limit, f"record {record['id']}, limit of the same run"))
        return found

    @property
    def share(self) -> float | None:
        """Per cent of the limit that the first time reaches."""
        return next((time.share for time in self.times if time.share is not None), None)

    @property
    def bound(self) -> str | None:
        """Which limit is the higher one by the roofline, compute or memory: of the work, not of the kernel."""
        if self.profile is not None:
            return str(self.profile.facts["roofline"]["bound"])
        recorded = ((self.record or {}).get("limits") or {}).get("bound")
        if recorded:
            return str(recorded)
        from mla_var3.lab.profiling.roofline import roofline

        if self.device is None:
            return None
        bound = roofline(*self.work, self.problem.dtype, self.device).bound
        return bound if bound in ("compute", "memory") else None

    def useful(self, what: str) -> float | None:
        """Useful work over what the machine was measured to do, per cent: "tensor" FLOPs or "dram" bytes."""
        rate, (flops, moved) = None, self.work
        if self.profile is not None and self.profile.facts.get("time_us"):
            line = self.profile.facts["roofline"]
            us, peak = self.profile.facts["time_us"], line["tflops" if what == "tensor" else "gbps"]
            rate = (flops / us / 1e6 if what == "tensor" else moved / us / 1e3, peak)
        elif self.record is not None and (self.record.get("time_us") or {}).get("burst"):
            limits = ((self.record.get("limits") or {}).get("burst")) or {}
            us, peak = (
                self.record["time_us"]["burst"]["median"],
                limits.get("matmul_tflops" if what == "tensor" else "read_gbps"),
            )
            rate = (flops / us / 1e6 if what == "tensor" else moved / us / 1e3, peak)
        return 100 * rate[0] / rate[1] if rate and rate[1] else None

    def reading(self, group: str, state: str) -> float | None:
        """`environment.<group>.<state>` of the record: clocks (MHz of the SMs) or power (W)."""
        value = ((self.record or {}).get("environment") or {}).get(group, {}).get(state)
        if isinstance(value, Mapping):
            value = value.get("sm_mhz")
        return None if value is None else float(value)

    # ------------------------------------------------------------ for the knowledge base
    @property
    def facts(self) -> Facts:
        """Everything as triggers understand it; the profile's figures come before the record's."""
        found = []
        if self.profile is not None:
            found.append(knowledge.facts_of_profile(self.profile.facts, self.problem.to_record()))
        if self.record is not None:
            found.append(knowledge.facts_of_record(self.record))
        base = {"problem": self.problem.to_record(), "resources": dict(self.resources)}
        found.append(knowledge.facts_of_record(base))
        groups: dict[str, dict[str, float]] = {}
        for facts in reversed(found):
            for name, known in facts.groups.items():
                groups.setdefault(name, {}).update(known)
        return Facts(self.bound, groups)


# ---------------------------------------------------------------- finding it
def load_records(more: Iterable[Path] = ()) -> list[dict[str, Any]]:
    """Every record that is here: of results/, of the package, and of `more`."""
    from mla_var3.record import load

    folders = [Path("results"), paths.shipped_results_dir(), *more]
    found = load(dict.fromkeys(p.resolve() for p in folders if p.exists()))
    return [record.model_dump() for record in found.records]


def record_of(
    records: Iterable[Record], kernel: KernelId, problem: Problem, device: str, tiling: Mapping[str, Any] | None
) -> Record | None:
    """The record that speaks for that version there (`catalogue.spoken`); with a tiling, the newest of these knobs,
    where there is any. None of an experiment that times for something else than speed."""
    wanted = problem.to_record()
    cell = [
        record
        for record in records
        if record["device"] == device
        and record.get("time_us")
        and dict(record["problem"]) == wanted
        and record.get("experiment") not in ASIDE
    ]
    if tiling:
        mine = [r for r in cell if KernelId.from_record(r["kernel"]) == kernel and same_knobs(r.get("tiling"), tiling)]
        return max(mine, key=lambda r: str(r["at"]), default=None)
    told = {id(model := Model.model_validate(r)): (model, r) for r in cell}
    speaking = [told[id(m)] for m in spoken.speaking(model for model, _ in told.values())]
    own = [(model, r) for model, r in speaking if model.kernel.label == kernel.label]
    return next((r for model, r in own if spoken.name(model) == kernel.label), own[0][1] if own else None)


def of_profile(folder: Path, records: Iterable[Record] | None = None) -> Evidence:
    """A profile folder's kernel, with the newest record of the same version, knobs, problem and device beside it."""
    profile = profiles.read(profiles.find(folder))[0]
    records = load_records() if records is None else records
    record = record_of(records, profile.kernel, profile.problem, profile.device, profile.facts.get("tiling"))
    return _joined(profile.kernel, profile.problem, profile.device, profile, record)


def of_record(identity: str, records: Iterable[Record] | None = None, *, alone: bool = False) -> Evidence:
    """A record, with a profile of the same version, knobs, problem and device beside it. alone: without the profile."""
    from mla_var3.lab.devlog.citations import find_record
    from mla_var3.lab.devlog.values import Unknown

    records = load_records() if records is None else records
    try:
        record = find_record({str(r["id"]): r for r in records}, identity)
    except Unknown as error:
        raise UserError(f"{error}: give a kernel, a record's id, or the folder of a profile.") from error
    kernel = KernelId.from_record(record["kernel"])
    problem, device = problem_from_record(record["problem"]), str(record["device"])
    found = [] if alone else profiles.known(kernel, problem, device)
    profile = next((p for p in found if same_knobs(p.facts.get("tiling"), record.get("tiling"))), None)
    return _joined(kernel, problem, device, profile, record)


def of_kernel(
    kernel: KernelId,
    problem: Problem | None,
    device: str,
    records: Iterable[Record] | None = None,
    *,
    compile_it: bool = True,
    profile: Profile | None = None,
) -> Evidence:
    """A version: its best profile and newest record on that problem; with neither, what compiling says.

    problem None: that of its newest profile, else the default one. profile: this one instead of the best.
    """
    records = load_records() if records is None else list(records)
    found = profiles.known(kernel, problem, device)
    if problem is None:
        problem = found[0].problem if found else registry.get_plan(kernel).workload.problem()
    profile = profile or next((p for p in found if p.problem == problem), None)
    tiling = profile.facts.get("tiling") if profile else None
    evidence = _joined(kernel, problem, device, profile, record_of(records, kernel, problem, device, tiling))
    if not evidence.resources and not evidence.times and compile_it:
        _compile(evidence)
    if evidence.record is None and evidence.profile is None:
        timed = [r for r in records if r.get("time_us") and r["device"] == device]
        cells = sorted({_cell(r) for r in timed if KernelId.from_record(r["kernel"]) == kernel})
        if cells:
            some = ", ".join(cells[:6]) + (", ..." if len(cells) > 6 else "")
            evidence.notes.append(f"{kernel.label} was timed on {device} on other problems: {some}")
    return evidence


def _cell(record: Record) -> str:
    return problem_from_record(record["problem"]).label


def _joined(
    kernel: KernelId, problem: Problem, device: str, profile: Profile | None, record: Record | None
) -> Evidence:
    tiling = (profile.facts.get("tiling") if profile else None) or (record or {}).get("tiling") or {}
    evidence = Evidence(kernel, problem, device, tiling, profile, record)
    if profile is not None:
        mode = profile.params["request"]["mode"]
        counted = "" if profile.has_counters else ", which has no counters"
        evidence.sources.append(f"profile {_shown(profile.folder)} ({mode}, {profile.at}{counted})")
    if record is not None:
        evidence.sources.append(f"record {record['id']} ({record['experiment']}, {record['at']}, {record['status']})")
        if record["status"] not in ("passed", "compiled"):
            evidence.notes.append(f"the record is {record['status']}: {str(record.get('reason') or '').rstrip('.')}")
    if profile is not None and record is not None:
        mine, other = profile.source_hash, str(record["source"]["hash"])
        if mine is not None and mine != other:
            evidence.notes.append(
                f"counters of {kernel.label} are of source {mine} and the record's times of source {other}: the "
                "version's sources changed between them"
            )
    return evidence


def _shown(folder: Path) -> str:
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)


def _compile(evidence: Evidence) -> None:
    """Adds what a compilation for the device says; a language that is not here is a note."""
    if not registry.is_compiled(evidence.kernel.language) or evidence.device is None:
        evidence.notes.append(f"{evidence.label} has no binary to look into")
        return
    reason = registry.missing(evidence.kernel)
    if reason:
        evidence.notes.append(reason.rstrip("."))
        return
    plan = registry.get_plan(evidence.kernel)(evidence.problem, None, evidence.device)
    plan.require()
    evidence.planned = plan.algorithmic_flops_bytes()
    evidence.compiled = plan.plan_empty().compile(None, evidence.device)
    evidence.tiling = evidence.tiling or plan.tiling.to_record()
    evidence.sources.append(f"compiled for {evidence.device_key} now: resources and instructions, no time")
