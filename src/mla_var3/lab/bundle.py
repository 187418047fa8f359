"""Makes bundles (`mla_var3.toolchain.bundle`): compiles versions for what another machine is to run."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3 import __version__
from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.files import write_whole
from mla_var3.runtime.types import Tiling
from mla_var3.toolchain import aot, loader, without_compiler
from mla_var3.toolchain.bundle import Bundle
from mla_var3.toolchain.pool import compile_many
from mla_var3.workload import Problem, problem_from_record

if TYPE_CHECKING:
    import argparse

    from mla_var3.runtime.base import BaseKernel
    from mla_var3.runtime.plan import KernelPlan

LANGUAGE = "cute-dsl"
TIMEOUT_S = 300.0

_NEEDS = {
    loader.RUNTIME: "package nvidia-cutlass-dsl-libs-cu13 (or -cu12), or the file beside the bundle",
    "tvm_ffi": "package apache-tvm-ffi, same major and minor version",
    "mla_var3": "the same source of the kernels and of their lib",
}


@dataclass(frozen=True)
class BundleJob:
    """Host functions that share code. kernel: a registered label, or `module:PlanClass`. folder: where entries go.

    points: (problem, tiling) records of one problem class and of tilings that the code does not tell apart. Sizes and
    launch knobs decide which stages a pipeline has, so all of them are planned. checked: points that nobody asked for,
    but that the check of the others plans: other batches and lengths, hence other splits and perhaps another combine.
    """

    kernel: str
    points: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = field(hash=False)
    device: str
    folder: str
    checked: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = field(default=(), hash=False)

    @property
    def label(self) -> str:
        problem, tiling = (*self.points, *self.checked)[0]
        knobs = ", ".join(f"{k}={v}" for k, v in tiling.items())
        return f"{self.kernel} {problem_from_record(problem).problem_class().key()} {knobs}".strip()


# ---------------------------------------------------------------- making
def make_bundle(
    folder: Path,
    kernels: Sequence[KernelId | str],
    problems: Sequence[Problem],
    tilings: str | Sequence[Any] = "default",
    device: Device | str = "h200",
    workers: int | None = None,
    *,
    progress: bool = True,
) -> Bundle:
    """Compiles every kernel for every problem and tiling into `folder` and returns what it holds now.

    kernels: versions, their labels, or `module:PlanClass` for a plan outside of this package. tilings: "default",
    "tuning" (the default and all that the tuner would try and the device allows), or a list, for every kernel, of
    tilings or of fields that differ from the default. workers: processes; 0 compiles in this one. What `folder` holds
    already is kept and not compiled again. Kernels of other languages, and tilings that a problem or the device does
    not allow, are refused with a reason; `UserError` when nothing is left.
    """
    device = Device.get(device) if isinstance(device, str) else device
    groups: dict[tuple[str, str, str], BundleJob] = {}
    refused: list[tuple[str, str]] = []
    workloads = {problem.workload for problem in problems}
    for kernel in kernels:
        name = kernel.label if isinstance(kernel, KernelId) else kernel
        language = _language(name)
        if language != LANGUAGE:
            refused.append((name, f"bundles hold kernels of {LANGUAGE}; this one is {language}"))
            continue
        for problem in problems:
            # Of an experiment of several workloads, each version has cells of its own.
            if len(workloads) > 1 and plan_of(name).workload.name != problem.workload:
                continue
            for tiling in _tilings(name, problem, device, tilings, refused):
                add(groups, name, problem, tiling, device, Path(folder) / "objects")
    return _make(Path(folder), list(groups.values()), refused, device, workers, progress)


def add(
    groups: dict[tuple[str, str, str], BundleJob],
    kernel: str,
    problem: Problem,
    tiling: Tiling,
    device: Device,
    folder: Path,
) -> set[tuple[str, str, str]]:
    """Adds a point, and what its check plans, to the jobs of `groups`; returns the keys of those that it needs."""
    touched = set()

    def group(of: Tiling) -> tuple[str, str, str]:
        return kernel, problem.problem_class().key(), json.dumps(aot.code_knobs(of), sort_keys=True, default=str)

    job = groups.get(group(tiling)) or BundleJob(kernel, (), device.key, str(folder))
    groups[group(tiling)] = replace(job, points=(*job.points, (problem.to_record(), tiling.to_record())))
    touched.add(group(tiling))
    workload = plan_of(kernel).workload
    cases = workload.case_problems(problem)[1:]
    bound = [workload.as_bound(case) for case in cases]  # the check plans some cases and binds the others
    for other in dict.fromkeys((*cases, *bound)):
        # As the check does where a case does not allow the tiling.
        taken = tiling if tiling.validate(other, device) else plan_of(kernel)(other, None, device).tiling
        job = groups.get(group(taken)) or BundleJob(kernel, (), device.key, str(folder))
        touched.add(group(taken))
        point = (other.to_record(), taken.to_record())
        if point not in job.checked:
            groups[group(taken)] = replace(job, checked=(*job.checked, point))
    return touched


def _tilings(
    kernel: str,
    problem: Problem,
    device: Device,
    wanted: str | Sequence[Any],
    refused: list[tuple[str, str]],
) -> list[Tiling]:
    """The tilings that the problem and the device allow, each once; others go to `refused`."""
    plan_type = plan_of(kernel)
    label = f"{kernel} {problem.label}"
    supported = device.can_run(plan_type.requires, problem)
    if not supported:
        refused.append((label, supported.reason))
        return []
    plan = plan_type(problem, None, device)
    if wanted == "default":
        candidates: list[Tiling] = [plan.tiling]
    elif wanted == "tuning":
        candidates = [plan.tiling, *plan.autotune_configs()]
    elif isinstance(wanted, str):
        raise UserError(f"tilings is {wanted!r}: use default, tuning, or a list of tilings.")
    else:
        candidates = [_as_tiling(plan, tiling) for tiling in wanted]
    found: list[Tiling] = []
    for tiling in dict.fromkeys(candidates):
        verdict = tiling.validate(problem, device)
        if verdict:
            found.append(tiling)
        elif wanted != "tuning":  # the tuner's list may hold infeasible ones: that is no news
            refused.append((f"{label} {tiling}", verdict.reason))
    return found


def _as_tiling(plan: KernelPlan, tiling: Any) -> Tiling:
    return tiling if isinstance(tiling, Tiling) else plan.tiling_type.from_record({**plan.tiling.to_record(), **tiling})


def _language(kernel: str) -> str:
    return LANGUAGE if ":" in kernel else KernelId.parse(kernel).language


def plan_of(kernel: str) -> type[KernelPlan]:
    """The plan class of a registered label, or of `module:PlanClass`."""
    if ":" not in kernel:
        return registry.get_plan(KernelId.parse(kernel))
    module, _, name = kernel.partition(":")
    try:
        loaded = without_compiler.import_version(module) if aot.usable(LANGUAGE) else import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{kernel} cannot be imported ({error}): give an importable module.") from error
    plan = getattr(loaded, name, None)
    if plan is None:
        raise UserError(f"{module} has no plan {name}: write module:PlanClass.")
    return plan


def run_bundle_job(job: BundleJob) -> list[dict[str, Any]]:
    """In a worker process: compiles a job's host functions into the folder; returns their entries."""
    plan_type, device = plan_of(job.kernel), Device.get(job.device)
    entries: dict[str, dict[str, Any]] = {}
    for record, knobs in (*job.points, *job.checked):
        problem = problem_from_record(record)
        plan = plan_type(problem, plan_type.tiling_type.from_record(knobs), device)
        plan.require()
        plan.compiled = aot.CompileCache(Path(job.folder), making=True)
        for stage in _host_functions(plan.plan_empty()):
            # A stage of another version is that version's code, whoever calls it.
            owner = plan if stage.plan is None else stage.plan
            of = (job.kernel, problem) if type(owner) is plan_type else (registry.label_of(owner), owner.problem)
            before = len(plan.compiled.entries)
            aot.compiled_host(owner, stage.name, stage.compile_fn, tiling=stage.tiling, device=device)
            for entry in plan.compiled.entries[before:]:
                named = {"kernel": of[0], "problem_class": _class_record(of[1]), "problems": []}
                noted = entries.setdefault(entry["key"], {**named, **entry})
                if (record, knobs) in job.points:
                    noted["problems"] = sorted({*noted["problems"], of[1].label})
    return list(entries.values())


def _host_functions(kernel: BaseKernel) -> list[Any]:
    """The CuTe kernels of a kernel, stages of pipelines and concurrent groups taken apart, without libraries' calls."""
    stages = getattr(kernel, "stages", None)
    if stages:
        return [leaf for stage in stages if not stage.comes_compiled for leaf in _host_functions(stage)]
    if getattr(kernel, "compile_fn", None) is None:
        raise UserError(f"{kernel.name} has no compile_fn: a bundle holds CuteKernels that compile from fake tensors.")
    return [kernel]


def _class_record(problem: Problem) -> dict[str, Any]:
    return dict(vars(problem.problem_class()))


def _make(
    folder: Path,
    jobs: Sequence[BundleJob],
    refused: list[tuple[str, str]],
    device: Device,
    workers: int | None,
    progress: bool,
) -> Bundle:
    if not jobs:
        reason = "; ".join(f"{label}: {why}" for label, why in refused[:3]) or "no kernel, problem or tiling was given"
        raise UserError(f"nothing to bundle ({reason}).")
    made: list[dict[str, Any]] = []
    failed = 0
    if workers == 0:
        made = [entry for job in jobs for entry in run_bundle_job(job)]
    else:
        for result in compile_many(jobs, workers, progress, timeout_s=TIMEOUT_S, run=run_bundle_job):
            if result.ok:
                some: Any = result.compiled
                made += some
            else:
                failed += 1
                refused.append((result.job.label, result.error))
    entries = _joined(folder, made)
    if not entries:
        raise UserError(f"nothing was compiled; the first reason: {refused[0][1]}.")
    manifest = {
        "schema": aot.SCHEMA,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "mla_var3": __version__,
        "device": device.key,
        "made_on": {"machine": platform.machine(), "python": platform.python_version()},
        "needs": _NEEDS,
        "entries": sorted(entries, key=lambda e: (e["kernel"], e["name"], e["problem"], e["key"])),
    }
    write_whole(folder / "manifest.json", json.dumps(manifest, indent=1))
    return Bundle(folder, manifest, tuple(refused), failed)


def _joined(folder: Path, made: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the bundle held with what was made now. What came from another source of the same kernels is removed."""
    source = {entry["kernel"]: entry["source"] for entry in made}
    entries: dict[str, dict[str, Any]] = {}
    for entry in aot.entries_of(folder) if (folder / "manifest.json").exists() else []:
        if source.get(entry["kernel"], entry["source"]) == entry["source"]:
            entries[entry["key"]] = entry
        else:
            for ending in (".so", ".json"):
                (folder / "objects" / entry["object"]).with_suffix(ending).unlink(missing_ok=True)
    for entry in made:
        before = entries.get(entry["key"], entry)
        entries[entry["key"]] = {**entry, "problems": sorted({*before["problems"], *entry["problems"]})}
    return list(entries.values())


# ---------------------------------------------------------------- command line
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mla-var3 compile` that make a bundle."""
    parser.add_argument(
        "--bundle", metavar="DIR", help="make a bundle of compiled CuTe kernels, to run without a compiler"
    )
    parser.add_argument(
        "--tilings", choices=("default", "tuning"), default="default", help="of the bundle: one, or the tuner's"
    )
    parser.add_argument(
        "--experiment", metavar="NAME", help="of the bundle: the cells of an experiment, not one problem"
    )


def bundle_main(
    args: argparse.Namespace,
    kernels: Sequence[KernelId],
    problems: Sequence[Problem],
    device: Device,
    fields: dict[str, Any] | None = None,
) -> int:
    """`mla-var3 compile --bundle DIR`: prints what was made and what was refused; 1 when something did not compile.

    fields: knobs over the default tiling (`--tiling`); they replace `--tilings`.
    """
    tilings = [fields] if fields else args.tilings
    bundle = make_bundle(Path(args.bundle), kernels, problems, tilings, device, args.jobs or None)
    for label, reason in bundle.refused:
        print(f"refused: {label}: {reason}", file=sys.stderr)
    print(bundle.summary())
    return 1 if bundle.failed else 0
