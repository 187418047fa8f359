"""Two versions on one problem: compiled for a device, with what was profiled and recorded of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue.registry import KernelId
from mla_var3.errors import UserError
from mla_var3.lab.diagnosis.evidence import Evidence, Record, load_records, of_kernel
from mla_var3.lab.diagnosis.profiles import Profile, known
from mla_var3.lab.knobs import same_knobs
from mla_var3.record import ASIDE
from mla_var3.record import Record as Stored
from mla_var3.toolchain import loops
from mla_var3.workload import Problem

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.toolchain.compiled import CompiledKernel


@dataclass(frozen=True)
class Version:
    """One side. compiled None: its language makes no binary here, and `why` says so.

    function: of the device function with the most products. loops: its inner loops, those with most products first.
    sass: file with all of its code. evidence: its best profile and newest record on this problem, if there are any.
    """

    kernel: KernelId
    tiling: Mapping[str, Any]
    evidence: Evidence
    compiled: CompiledKernel | None = None
    function: str = ""
    loops: tuple[loops.Loop, ...] = ()
    sass: Path | None = None
    why: str = ""

    @property
    def label(self) -> str:
        return self.kernel.label


def both(
    kernels: Sequence[KernelId],
    problem: Problem,
    device: Device,
    out: Path,
    asked: Mapping[str, Any] | None = None,
    records: Iterable[Record] | None = None,
) -> list[Version]:
    """The versions, compiled side by side into `out`. asked: knobs for those that have them.

    Raises `UserError` when one does not take the problem, or a knob exists in neither.
    """
    from mla_var3.catalogue import registry
    from mla_var3.catalogue.jobs import CompileJob, compile_all
    from mla_var3.catalogue.registry import is_compiled
    from mla_var3.lab.knobs import knobs, own_knobs

    records = load_records() if records is None else list(records)
    asked, used, jobs, tilings = dict(asked or {}), set(), {}, {}
    for kernel in kernels:
        reason = registry.missing(kernel)
        if not is_compiled(kernel.language) or reason:
            continue
        plan_type = registry.get_plan(kernel)
        own = own_knobs(plan_type, asked)
        used |= set(own)
        tiling = knobs(plan_type(problem, None, device).tiling, own)
        try:
            plan_type(problem, tiling, device).require()
        except UserError as error:
            raise type(error)(f"{kernel.label} cannot be compared: {error}") from error
        tilings[kernel] = tiling.to_record()
        folder = out / kernel.label.replace("/", "-")
        jobs[kernel] = CompileJob(
            **kernel.to_record(), problem=problem.to_record(), device=device.key, tiling=tilings[kernel],
            out_dir=str(folder), keep=("sass", "cubin"),
        )  # fmt: skip
    left = [name for name in asked if name not in used]
    if left:
        raise UserError(f"neither version has a knob {left[0]!r}: leave it out of --tiling.")
    compiled = dict(zip(jobs, compile_all(list(jobs.values()), workers=2), strict=True))
    together = _profiled_together(kernels, problem, device.key)
    return [
        _version(k, problem, device, compiled.get(k), tilings.get(k, {}), records, bool(asked), together.get(k))
        for k in kernels
    ]


def _profiled_together(kernels: Sequence[KernelId], problem: Problem, device: str) -> dict[KernelId, Profile]:
    """The newest counters of both out of one profile, made minutes apart; empty where there is none."""
    found = [{p.folder: p for p in known(k, problem, device) if p.has_counters} for k in kernels]
    shared = sorted(set(found[0]) & set(found[1]), key=lambda folder: found[0][folder].at)
    return {k: some[shared[-1]] for k, some in zip(kernels, found, strict=True)} if shared else {}


def _version(
    kernel: KernelId, problem: Problem, device: Device, result: Any, tiling: Mapping[str, Any],
    records: Iterable[Record], retiled: bool, profile: Profile | None,
) -> Version:  # fmt: skip
    evidence = of_kernel(kernel, problem, device.key, records, compile_it=False, profile=profile)
    if retiled and not same_knobs(evidence.tiling, tiling):
        evidence = Evidence(kernel, problem, device.key, tiling)
        evidence.notes.append(f"what is recorded of {kernel.label} is of other knobs, and left out")
    if result is None:
        from mla_var3.catalogue import registry

        why = registry.missing(kernel) or f"{kernel.label} has no binary to look into."
        return Version(kernel, tiling, evidence, why=why.rstrip("."))
    if result.compiled is None:
        raise UserError(f"{kernel.label} on {problem.label} does not compile: {result.error}")
    whole = result.compiled
    found = loops.main_code(whole)
    if found is None:
        return Version(kernel, tiling, evidence, whole, why="the compiler left no SASS")
    name, text, kept = found
    return Version(kernel, tiling, evidence, whole, name, tuple(loops.inner_loops(text)), kept["sass"])


def records_of(
    versions: Sequence[Version], records: Iterable[Record], problem: Problem, device: str
) -> tuple[Record | None, Record | None, bool]:
    """The newest timed record of each, of one run where there is one that timed both; the last says whether it is."""
    mine: list[list[Record]] = []
    for version in versions:
        wanted, tiling = problem.to_record(), version.tiling
        mine.append(
            sorted(
                (
                    r
                    for r in records
                    if r["device"] == device and r.get("time_us") and dict(r["problem"]) == wanted
                    and KernelId.from_record(r["kernel"]) == version.kernel
                    and (same_knobs(r.get("tiling"), tiling) if tiling else not r.get("picked_by"))
                    and r.get("experiment") not in ASIDE
                ),
                key=lambda r: str(r["at"]),
                reverse=True,
            )
        )  # fmt: skip
    firsts, seconds = ([(Stored.model_validate(r).run, r) for r in found] for found in mine)
    for run, first in firsts:
        for other, second in seconds:
            if run and run == other:
                return first, second, True
    return next(iter(mine[0]), None), next(iter(mine[1]), None), False
