"""`mla-var3 check`: is a kernel right?"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from mla_var3.cli.arguments import (
    add_kernels,
    add_problem,
    add_tiling,
    doing,
    given_fields,
    problem_of,
    tiling_fields,
    tiling_of,
    usable,
    workload_of,
)
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.kernel import registry
from mla_var3.workload import DEFAULT

if TYPE_CHECKING:
    from mla_var3.kernel.registry import KernelId
    from mla_var3.workload.decode import MlaProblem

HELP = "is a kernel right? on the GPU, or on the CPU where its language runs there"
EPILOG = """\
examples:
  mla-var3 check triton/flash_mla --b 2 --t 300 --h 16
  mla-var3 check 'cute-dsl/*' --lengths 70,0,128 --s 4 --causal
  mla-var3 check cute-dsl/flash_mla_v23 --b 2 --t 300 --sanitize racecheck
Ends with 1 when a kernel is wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kernels(parser, "+")
    add_problem(parser)
    add_tiling(parser)
    parser.add_argument(
        "--device", default="auto", choices=["auto", "cuda", "cpu"], help="where to run (default: a GPU)"
    )
    parser.add_argument("--quick", action="store_true", help="the short list of cases")
    parser.add_argument("--cases", metavar="A,B", help="these cases only; a wrong name lists them")
    parser.add_argument("--seed", type=int, help="of the inputs; a fresh one by default, and printed")
    from mla_var3.lab.diagnosis import debugging

    debugging.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 when every kernel that could run is right, 1 when one is wrong."""
    from mla_var3.lab.diagnosis import debugging
    from mla_var3.lab.sweep.plan import DISPATCH

    debugging.prepare(args)
    named = [pattern for pattern in args.kernels if pattern != DISPATCH]
    chosen: dict[KernelId, dict[str, Any]] = {}
    kernels = usable(named) if named else []
    device = Device.detect() if args.device != "cpu" else None
    where = "cpu" if args.device == "cpu" or (args.device == "auto" and device is None) else "cuda"
    if where == "cuda" and device is None:
        raise UserError("there is no GPU here: check with --device cpu, or on a machine that has one.")
    if where == "cpu" and (args.keep or args.sanitize):
        return _without_a_gpu(args, kernels)
    if where == "cpu" and kernels:
        kernels = _on_cpu(kernels)  # chooses interpreters, so before a kernel's module is imported
    problem = problem_of(args, workload_of(kernels), **_sizes(kernels, args, where))
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
    from mla_var3.check.judge import check as run_check

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
        with doing(f"checking {kernel.label} {problem.label}"):
            report = run_check(
                plan_type, problem, tiling, where,
                quick=args.quick, seeds=None if args.seed is None else [args.seed], cases=cases, hardware=device,
            )  # fmt: skip
        print_check(kernel, problem, report)
        wrong += not report.ok
    return 1 if wrong else 0


def _without_a_gpu(args: argparse.Namespace, kernels: list[KernelId]) -> int:
    """What of the debugging options works without one: keeping what compilers make for an H200. Nothing is checked."""
    from mla_var3.lab.diagnosis import debugging

    target, problem = Device.get("h200"), problem_of(args, workload_of(kernels), **_sizes(kernels, args, "cpu"))
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
    from mla_var3.lab.sweep.cpu import use_interpreter

    chosen = []
    for kernel in kernels:
        reason = registry.cannot_run_on_cpu(kernel.language)
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
    errors = ", ".join(f"of {name} {error:.2e}" for name, error in report.error.items())
    print(f"{kernel.label} {problem.label}: {word}, {len(report.cases)} cases, error {errors}, seed {seeds}")
    for case in report.cases:
        if not case.ok:
            print(f"  {case.name} (seed {case.seed}): {case.reason}")


def _sizes(kernels: list[KernelId], args: argparse.Namespace, where: str) -> dict[str, Any]:
    """What a check takes where the user says nothing: sizes for a CPU, or those of a workload other than decode."""
    workload = workload_of(kernels)
    if workload.name == DEFAULT and where != "cpu":
        return {}
    fields = workload.sample(where == "cpu", given_fields(args))
    return {name: value for name, value in fields.items() if name != "h" or workload.name != DEFAULT}
