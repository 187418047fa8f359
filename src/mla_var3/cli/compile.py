"""`mla-var3 compile`: what kernels take of a device, without a GPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mla_var3.catalogue import registry
from mla_var3.cli.arguments import (
    add_kernels,
    add_problem,
    add_tiling,
    by_workload,
    doing,
    experiment_cells,
    job_count,
    model_of,
    page_of,
    problem_for,
    tiling_fields,
    tiling_of,
    usable,
)
from mla_var3.device import Device
from mla_var3.errors import UserError, nearest
from mla_var3.files import check_folder
from mla_var3.names import kernel_label

HELP = "registers, shared memory, spills and instructions for a device, without a GPU"
EPILOG = """\
examples:
  mla-var3 compile '*/flash_mla' --device h200
  mla-var3 compile cute-dsl/flash_mla --h 16 --keep ptx,sass --out out/sass --tiling num_splits=4
  mla-var3 compile --bundle bundle --model deepseek-v3 --tp 8 --device h200    what a server calls, of any engine"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kernels(parser, "*")
    add_problem(parser)
    add_tiling(parser)
    parser.add_argument(
        "--device",
        default="auto",
        metavar="KEY",
        help="a key of `mla-var3 list devices` (default: what is here, else h200)",
    )
    parser.add_argument(
        "--keep", default="", metavar="KIND,...", help="keep artefacts: ptx, cubin, sass, tileir, mlir, remarks"
    )
    parser.add_argument(
        "--out", default="out/compile", metavar="DIR", help="where kept artefacts go (default out/compile)"
    )
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="compiler processes; 0 is one a core")
    from mla_var3.lab import bundle

    bundle.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Resources of kernels for a device; 1 when one does not compile."""
    from mla_var3.catalogue.jobs import CompileJob, compile_all
    from mla_var3.lab.report import tables
    from mla_var3.toolchain.artefacts import KINDS

    device = (Device.detect() or Device.get("h200")) if args.device == "auto" else Device.get(args.device)
    keep = tuple(kind.strip() for kind in args.keep.split(",") if kind.strip())
    for kind in keep:
        if kind not in KINDS:
            raise UserError(f"--keep {kind!r} is unknown: {nearest(kind, KINDS)}.")
    workers = job_count(args)
    if args.experiment is not None and not args.bundle:
        raise UserError("--experiment says what a bundle holds: give --bundle DIR too, or a problem (--b, --h, --t).")
    if keep or args.bundle:
        check_folder(args.bundle or args.out, "--bundle" if args.bundle else "--out")
    if not args.kernels:
        if not (args.bundle and args.model):
            raise UserError("no KERNEL is named: name one, or give --bundle DIR --model NAME for what a server calls.")
        from mla_var3.lab.bundle import PAGE, served, served_main

        page = PAGE if args.page is None else page_of(args)
        return served_main(args, served(model_of(args), 1 if args.tp is None else args.tp, page), device)
    if args.tp is not None:
        raise UserError(
            "--tp is of --bundle with --model and no KERNEL: of a KERNEL give its share of the heads, --h N."
        )
    kernels, asked = usable(args.kernels), tiling_fields(args.tiling)
    if args.bundle:
        from mla_var3.lab.bundle import bundle_main

        if args.experiment is None:
            problems = [problem_for(args, some) for some in by_workload(kernels).values()]
        else:
            problems = experiment_cells(args.experiment)
        return bundle_main(args, kernels, problems, device, asked)
    jobs: list[CompileJob] = []
    problems, refused = [], []
    for kernel in kernels:
        if not registry.is_compiled(kernel.language):
            why = "it is made of torch operations" if kernel.language == "torch" else "it comes compiled"
            print(f"{kernel.label}: not compiled: {why}", file=sys.stderr)
            continue
        on = ""
        try:
            plan, problem = registry.get_plan(kernel), problem_for(args, [kernel])
            on = f" on {problem.label}"
            tiling = tiling_of(plan, problem, device, asked) if asked else None
            plan(problem, tiling, device).require()
        except UserError as error:
            refused.append(f"{kernel.label}{on}: {error}")
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
        problems.append(problem)
    if not jobs:
        raise UserError("; ".join(refused) or "nothing to compile: name a kernel in Triton, cuTile or CuTe DSL.")
    for reason in refused:
        print(reason, file=sys.stderr)
    with doing(f"compiling {len(jobs)} kernels for {device.name}"):
        results = compile_all(jobs, workers=workers)
    rows = [
        tables.Compiled(
            kernel_label(r.job.language, r.job.design, r.job.version),
            problem.label,
            device.key,
            r.compiled.to_record(),
            r.compiled.seconds,
            list(r.compiled.warnings),
        )
        for r, problem in zip(results, problems, strict=True)
        if r.compiled is not None
    ]
    if rows:
        tables.show(tables.resources(rows, device, f"Compiled for {device.name}"))
    for result in results:
        if result.compiled is None:
            print(f"{result.job.label}: {result.error}", file=sys.stderr)
            continue
        if result.compiled.code is not None:
            print(f"code    {result.job.label}: {result.compiled.code.digest}")
        for compiled in (result.compiled, *result.compiled.stages):
            for kind, path in compiled.artefacts.items():
                print(f"{kind:8}{path}")
    return 0 if all(r.ok for r in results) and not refused else 1
