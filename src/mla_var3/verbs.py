"""The verbs `check`, `bench`, `compile`, `compare` and `profile`; `mla_var3.cli` parses their arguments."""

from __future__ import annotations

import argparse
import ast
import fnmatch
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3 import paths
from mla_var3.device import Device
from mla_var3.errors import UserError, nearest
from mla_var3.kernel import registry
from mla_var3.problem import GEOMETRIES, MlaProblem
from mla_var3.sweep.plan import DISPATCH, knobs, select_kernels

if TYPE_CHECKING:
    from mla_var3.kernel.registry import KernelId
    from mla_var3.runtime.types import Tiling

_FIELDS = ("b", "s", "t", "h", "h_kv", "k", "p", "d", "n", "causal", "dtype")


# ---------------------------------------------------------------- arguments
def problem_of(args: argparse.Namespace, **defaults: Any) -> MlaProblem:
    """The problem that the options of `cli.add_problem` describe, over `defaults`."""
    fields = {**defaults, **{name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}}
    if args.page is not None:
        fields["page"] = None if args.page in ("contiguous", "none") else _integer("--page", args.page)
    if args.lengths is not None:
        fields |= _lengths(args.lengths, fields)
    if args.model is not None and args.model not in GEOMETRIES:
        raise UserError(f"--model {args.model!r} is unknown: {nearest(args.model, GEOMETRIES)}.")
    return MlaProblem.of(args.model or "deepseek-v3", **fields)


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name} {text!r} is not a whole number.") from None


def _lengths(text: str, fields: dict[str, Any]) -> dict[str, Any]:
    name, _, seed = text.partition(":")
    if name.replace(",", "").replace(" ", "").isdigit():
        lengths = [_integer("--lengths", part) for part in text.split(",")]
        return {"b": len(lengths), "t": max(lengths), "lengths": lengths}
    return {"lengths": {"name": name, "seed": _integer("--lengths seed", seed) if seed else 0}}


def tiling_fields(text: str) -> dict[str, Any]:
    """Fields of "tile_m=64,swapped=true"."""
    fields: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"--tiling {part!r} is not KNOB=VALUE: write for example --tiling tile_m=64,num_splits=4.")
        try:
            fields[name.strip()] = ast.literal_eval({"true": "True", "false": "False"}.get(value.lower(), value))
        except (ValueError, SyntaxError):
            fields[name.strip()] = value
    return fields


def tiling_of(plan_type: Any, problem: MlaProblem, device: Device | None, asked: dict[str, Any]) -> Tiling:
    """The version's default tiling with the fields that were asked for; an unknown field names the nearest."""
    tiling: Tiling = plan_type(problem, None, device).tiling
    names = list(tiling.to_record())
    for name in asked:
        if name not in names:
            raise UserError(f"{plan_type.__name__} has no knob {name!r}: {nearest(name, names)}.")
    return knobs(tiling, asked)


def _usable(patterns: list[str]) -> list[KernelId]:
    """The versions that patterns name and whose language is installed; the others are reported."""
    usable = []
    for kernel in select_kernels(patterns):
        reason = registry.missing(kernel)
        if reason:
            print(f"{kernel.label}: skipped: {reason}", file=sys.stderr)
        else:
            usable.append(kernel)
    if not usable:
        raise UserError("none of these kernels can be used here: install their languages (mla-var3 doctor says how).")
    return usable


def _sizes(kernels: list[KernelId], args: argparse.Namespace, where: str) -> dict[str, Any]:
    """What a check takes where the user says nothing: sizes for a CPU, or of a kind that all of the kernels compute."""
    from mla_var3.contract import sample_fields

    kinds = {registry.get_plan(kernel).formulation for kernel in kernels}
    kind = kinds.pop() if len(kinds) == 1 else "absorbed"
    if kind == "absorbed" and where != "cpu":
        return {}
    given = {name: value for name in _FIELDS if (value := getattr(args, name)) is not None}
    fields = sample_fields(kind, where == "cpu", given)
    return {name: value for name, value in fields.items() if name != "h" or kind != "absorbed"}


# ---------------------------------------------------------------- check
def check(args: argparse.Namespace) -> int:
    """0 when every kernel that could run is right, 1 when one is wrong."""
    from mla_var3.diagnosis import debugging

    debugging.prepare(args)
    named = [pattern for pattern in args.kernels if pattern != DISPATCH]
    chosen: dict[KernelId, dict[str, Any]] = {}
    kernels = _usable(named) if named else []
    device = Device.detect() if args.device != "cpu" else None
    where = "cpu" if args.device == "cpu" or (args.device == "auto" and device is None) else "cuda"
    if where == "cuda" and device is None:
        raise UserError("there is no GPU here: check with --device cpu, or on a machine that has one.")
    if where == "cpu" and (args.keep or args.sanitize):
        return _without_a_gpu(args, kernels)
    if where == "cpu" and kernels:
        kernels = _on_cpu(kernels)  # chooses interpreters, so before a kernel's module is imported
    problem = problem_of(args, **_sizes(kernels, args, where))
    if len(named) < len(args.kernels):
        if device is None:
            raise UserError("dispatch picks a version for a GPU, and none is used here: name a kernel instead.")
        from mla_var3.dispatch import choose

        choice = choose(problem, device)
        print(f"dispatch picks {choice.label}: {choice.reason}")
        chosen[choice.kernel] = choice.knobs
        kernels = list(dict.fromkeys([*kernels, choice.kernel]))
    if where == "cpu":
        print("no GPU here: checking on the CPU at small sizes" if args.device == "auto" else "checking on the CPU")
    from mla_var3.runtime.correctness.checking import check as run_check

    asked = tiling_fields(args.tiling)
    cases = [case.strip() for case in args.cases.split(",")] if args.cases else None
    wrong = 0
    for kernel in kernels:
        plan_type = registry.get_plan(kernel)
        plan_type.requires.accepts(problem).require(UserError)
        tiling = tiling_of(plan_type, problem, device, {**chosen.get(kernel, {}), **asked})
        plan = plan_type(problem, tiling, device)
        plan.require()
        if where == "cuda":
            debugging.keep(args, kernel, plan)
            if not debugging.sanitize(args, kernel, problem, tiling, device):
                wrong += 1
                continue
        report = run_check(
            plan_type, problem, tiling, where,
            quick=args.quick, seeds=None if args.seed is None else [args.seed], cases=cases, hardware=device,
        )  # fmt: skip
        print_check(kernel, problem, report)
        wrong += not report.ok
    return 1 if wrong else 0


def _without_a_gpu(args: argparse.Namespace, kernels: list[KernelId]) -> int:
    """What of the debugging options works without one: keeping what compilers make for an H200. Nothing is checked."""
    from mla_var3.diagnosis import debugging

    target, problem = Device.get("h200"), problem_of(args, **_sizes(kernels, args, "cpu"))
    for kernel in kernels:
        plan_type = registry.get_plan(kernel)
        tiling = tiling_of(plan_type, problem, target, tiling_fields(args.tiling))
        plan = plan_type(problem, tiling, target)
        plan.require()
        print(f"{kernel.label} {problem.label}: compiled for {target.key}, not checked")
        debugging.keep(args, kernel, plan)
        debugging.sanitize(args, kernel, problem, tiling, None)
    return 0


def _on_cpu(kernels: list[KernelId]) -> list[KernelId]:
    """The kernels that run on a CPU, in a process that is ready for them."""
    from mla_var3.sweep.cpu import can_run, use_interpreter

    chosen = []
    for kernel in kernels:
        reason = can_run(kernel.language)
        if reason:
            print(f"{kernel.label}: not run: {reason}", file=sys.stderr)
            continue
        chosen.append(kernel)
        use_interpreter(kernel.language, kernel.label)
    if not chosen:
        raise UserError("none of these kernels runs on a CPU: `mla-var3 compile` shows what they take of a device.")
    return chosen


def print_check(kernel: KernelId, problem: MlaProblem, report: Any) -> None:
    """The verdict, and one line a case that failed."""
    word = "passed" if report.ok else "WRONG"
    seeds = ", ".join(map(str, report.seeds))
    print(
        f"{kernel.label} {problem.label}: {word}, {len(report.cases)} cases, error of out {report.error['out']:.2e}, "
        f"of lse {report.error['lse']:.2e}, seed {seeds}"
    )
    for case in report.cases:
        if not case.ok:
            print(f"  {case.name} (seed {case.seed}): {case.reason}")


# ---------------------------------------------------------------- bench
def bench(args: argparse.Namespace) -> int:
    """Times kernels on one problem through the sweep, so that records are the same."""
    detected = Device.detect()
    if detected is None:
        raise UserError(
            "bench needs a GPU and there is none here: `mla-var3 compile` and `mla-var3 check` work without."
        )
    if args.calibrate:
        return _calibrate(detected, args.preset)
    if not args.kernels:
        raise UserError("bench needs a kernel: give language/design, '*' for all, or --calibrate.")
    from mla_var3.sweep.config import ExperimentConfig, KernelsConfig, SweepConfig
    from mla_var3.sweep.run import Sweep

    asked = tiling_fields(args.tiling)
    config = SweepConfig(
        experiment=ExperimentConfig(name="bench", cells=[problem_of(args).to_record()]),
        kernels=KernelsConfig(patterns=args.kernels),
        bench={"preset": args.preset, "tune": args.tune},
        tiling=asked,
        results_dir=args.results_dir,
    )
    Sweep(config, detected).run()
    return 0


def _calibrate(device: Device, preset: str) -> int:
    from mla_var3.bench.calibrate import measure_all
    from mla_var3.bench.settings import BenchSettings

    print(f"limits of {device.name}:")
    for state, limits in measure_all(settings=BenchSettings.of({"preset": preset})).items():
        known = [device.ceiling(q, state) for q in ("matmul_tflops", "read_gbps")]
        beside = ", ".join(f"{c.value:,.0f} {c.unit} on {c.date}" for c in known if c is not None)
        print(
            f"  {state:10} matrix product {limits.matmul_tflops:,.0f} TFLOP/s, reading {limits.read_gbps:,.0f} GB/s"
            + (f"   (recorded: {beside})" if beside else "")
        )
    return 0


# ---------------------------------------------------------------- compile
def compile(args: argparse.Namespace) -> int:
    """Resources of kernels for a device; 1 when one does not compile."""
    from mla_var3.report import tables
    from mla_var3.sweep.compile import NOT_COMPILED
    from mla_var3.toolchain.artefacts import KINDS
    from mla_var3.toolchain.pool import CompileJob, compile_many

    device = (Device.detect() or Device.get("h200")) if args.device == "auto" else Device.get(args.device)
    keep = tuple(kind.strip() for kind in args.keep.split(",") if kind.strip())
    for kind in keep:
        if kind not in KINDS:
            raise UserError(f"--keep {kind!r} is unknown: {nearest(kind, KINDS)}.")
    problem, asked = problem_of(args), tiling_fields(args.tiling)
    if args.bundle:
        from mla_var3.toolchain.bundle import bundle_main

        problems = [problem] if args.experiment is None else experiment_cells(args.experiment)
        return bundle_main(args, _usable(args.kernels), problems, device, asked)
    jobs, refused = [], []
    for kernel in _usable(args.kernels):
        if kernel.language in NOT_COMPILED:
            why = "it is made of torch operations" if kernel.language == "torch" else "it comes compiled"
            print(f"{kernel.label}: not compiled: {why}", file=sys.stderr)
            continue
        plan = registry.get_plan(kernel)
        tiling = tiling_of(plan, problem, device, asked) if asked else None
        try:
            plan(problem, tiling, device).require()
        except UserError as error:
            refused.append(f"{kernel.label} on {problem.label}: {error}")
            continue
        out = Path(args.out) / device.key / kernel.language / kernel.module_name / problem.label if keep else None
        jobs.append(
            CompileJob(
                **kernel.to_record(),
                problem=problem.to_record(),
                device=device.key,
                tiling=None if tiling is None else tiling.to_record(),
                out_dir=None if out is None else str(out),
                keep=keep,
            )
        )
    if not jobs:
        raise UserError("; ".join(refused) or "nothing to compile: name a kernel in Triton, cuTile or CuTe DSL.")
    for reason in refused:
        print(reason, file=sys.stderr)
    results = compile_many(jobs, workers=args.jobs or None)
    rows = [
        tables.Compiled(
            f"{r.job.language}/{r.job.design}" + (f"_v{r.job.version}" if r.job.version else ""),
            problem.label,
            device.key,
            r.compiled.to_record(),
            r.compiled.seconds,
            list(r.compiled.warnings),
        )
        for r in results
        if r.compiled is not None
    ]
    if rows:
        tables.show(tables.resources(rows, device, f"Compiled for {device.name}"))
    for result in results:
        if result.compiled is None:
            print(f"{result.job.label}: {result.error_type}: {result.error}", file=sys.stderr)
            continue
        for compiled in (result.compiled, *result.compiled.stages):
            for kind, path in compiled.artefacts.items():
                print(f"{kind:8}{path}")
    return 0 if all(r.ok for r in results) and not refused else 1


def experiment_cells(name: str) -> list[MlaProblem]:
    """The problems of an experiment of `conf/experiment`."""
    from mla_var3.sweep.config import compose
    from mla_var3.sweep.plan import expand_cells

    return expand_cells(compose([f"experiment={name}"]))


# ---------------------------------------------------------------- compare
def compare(args: argparse.Namespace) -> int:
    """Tables of measured records, newest of each kernel and cell."""
    from mla_var3.bench.records import load
    from mla_var3.report import tables

    files = args.files or [p for p in dict.fromkeys((Path("results"), paths.shipped_results_dir())) if p.is_dir()]
    if not files:
        raise UserError("there is no results/ folder here: give record files, or run mla-var3 sweep first.")
    found = load(dict.fromkeys(Path(f).resolve() if Path(f).exists() else Path(f) for f in files))
    for problem in found.problems:
        print(f"warning: {problem}", file=sys.stderr)
    records = found.records
    if not any(r.time_us is not None for r in records):
        raise UserError("these records hold no times: only a sweep or bench on a GPU measures them.")
    labels = sorted({tables.called(r) for r in records})
    for pattern in args.kernels or []:
        if not any(fnmatch.fnmatchcase(label, pattern) for label in labels):
            raise UserError(f"no record of kernel {pattern!r}: {nearest(pattern, labels)}.")
    if args.kernels:
        records = [r for r in records if any(fnmatch.fnmatchcase(tables.called(r), p) for p in args.kernels)]
    if args.device:
        devices = {r.device for r in found.records}
        if args.device not in devices:
            raise UserError(f"no record of device {args.device!r}: {nearest(args.device, devices)}.")
        records = [r for r in records if r.device == args.device]
    if args.cells:
        cells = {r.problem_label for r in records}
        for pattern in args.cells:
            if not fnmatch.filter(cells, pattern):
                raise UserError(f"no record of cell {pattern!r}: {nearest(pattern, cells)}.")
        records = [r for r in records if any(fnmatch.fnmatchcase(r.problem_label, p) for p in args.cells)]
    timed = [r for r in records if r.time_us is not None]
    if not timed:
        raise UserError("no record of these kernels, cells and device holds a time: ask for fewer at once.")
    if not args.all:
        timed = tables.latest(timed)
    for device in sorted({r.device for r in timed}):
        mine = [r for r in timed if r.device == device]
        tables.show(tables.comparison(mine, f"Recorded on {device}", dated=True))
        if args.resources:
            tables.show(tables.resources(mine, _device(device), f"Compiled for {device}"))
        if args.kernels and len(args.kernels) == 2 and set(args.kernels) <= set(labels):
            tables.show(tables.versus(mine, *args.kernels)[0])
    return 0


# ---------------------------------------------------------------- profile
def profile(args: argparse.Namespace) -> int:
    """See `mla_var3.profiling.verb`."""
    from mla_var3.profiling.verb import profile as run

    return run(args)


def _device(key: str) -> Device | None:
    try:
        return Device.get(key)
    except UserError:
        return None
