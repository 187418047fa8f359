"""`mla-var3 profile`: why is a kernel as fast as it is?"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from mla_var3.cli.arguments import (
    add_kernels,
    add_problem,
    add_tiling,
    doing,
    problem_for,
    tiling_fields,
    tiling_of,
    usable,
)
from mla_var3.files import check_folder
from mla_var3.lab.profiling import MODES
from mla_var3.lab.profiling.request import OUT, TIMEOUT_S, Request, baseline_of

if TYPE_CHECKING:
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.workload import Problem

HELP = "why is a kernel as fast as it is? roofline, counters, source lines, time axis"
EPILOG = """\
modes:
  event       a short timing between CUDA events, beside the roofline
  annotation  roofline position, decisive counters (where ncu and its permission are here), resources, a baseline
  ncu         every section of Nsight Compute, with source lines
  nsys        Nsight Systems' trace
  timeline    torch's profiler: kernels, overlap and gaps; needs no tool
  trace       the timeline inside a kernel in CuTe DSL: what each warp does and waits for; a picture, a Chrome trace

examples:
  mla-var3 profile cute-dsl/flash_mla --b 128
  mla-var3 profile cute-dsl/flash_mla_v23 --mode ncu --baseline cute-dsl/flash_mla
  mla-var3 profile triton/flash_mla --device h200       without a GPU: resources and the roofline's limit
Each profile has a folder of its own: OUT/<mode>/<kernel>/<params>/<time>/report.md"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kernels(parser, "+")
    add_problem(parser)
    add_tiling(parser)
    parser.add_argument(
        "--mode", default="annotation", choices=list(MODES), help="what to look with (default annotation)"
    )
    add_common(parser)
    parser.add_argument("--tune", action="store_true", help="try the version's tilings first, and profile the best")
    parser.add_argument("--device", metavar="KEY", help="device to compile for (default: what is here, else h200)")


def add_common(parser: argparse._ActionsContainer) -> None:
    """The options of a profile beside its mode."""
    parser.add_argument(
        "--baseline", metavar="KERNEL", help="language/design[_vN] to compare with; default: the version before, "
        "in mode annotation; none: nothing",
    )  # fmt: skip
    parser.add_argument("--launches", type=int, default=1, metavar="N", help="calls that are profiled (default 1)")
    parser.add_argument("--kernel-name", metavar="REGEX", help="device functions that ncu profiles (default: its own)")
    parser.add_argument("--out", default=OUT, metavar="DIR", help=f"where profiles go (default {OUT})")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="S", help=f"longest run of a profiler ({TIMEOUT_S:g} s)"
    )


def run(args: argparse.Namespace) -> int:
    """Profiles each kernel in turn; 0, or 2 with one sentence for what stands in the way."""
    from mla_var3.device import Device
    from mla_var3.lab.profiling.run import available

    detected = Device.detect()
    target = detected if args.device is None or (detected and detected.key == args.device) else None
    if args.device is not None:
        Device.get(args.device)
    available(args.mode, target)
    check_folder(args.out, "--out")
    kernels, asked = usable(args.kernels), tiling_fields(args.tiling)
    for kernel in kernels:
        baseline = baseline_of(kernel, args.baseline, args.mode)
        problem = problem_for(args, [kernel] if baseline is None else [kernel, baseline])
        if baseline is not None and args.baseline is None and not _takes(baseline, problem):
            baseline, problem = None, problem_for(args, [kernel])  # nobody asked for it
        if asked:
            from mla_var3.catalogue.registry import get_plan

            tiling_of(get_plan(kernel), problem, target, asked)
        request = Request(
            kernel, problem, args.mode, asked, baseline, args.device, args.tune, args.launches, args.kernel_name,
            args.out, args.timeout,
        )  # fmt: skip
        show(request, detected)
    return 0


def _takes(kernel: KernelId, problem: Problem) -> bool:
    from mla_var3.catalogue import registry

    return not registry.missing(kernel) and bool(registry.get_plan(kernel).requires.accepts(problem))


def show(request: Request, detected: object) -> None:
    """Makes a profile, prints its report, and where it lies."""
    from mla_var3.lab.profiling.run import profile as make

    with doing(f"profiling {request.kernel.label} {request.problem.label}, mode {request.mode}"):
        outcome = make(request, detected)  # type: ignore[arg-type]
    text, _, _ = outcome.report.partition("\n## Files\n")
    print(text.rstrip())
    print(f"\n{outcome.folder / 'report.md'}")
    sys.stdout.flush()
