"""`mla-var3 check`: is a kernel right?"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue import registry
from mla_var3.cli.arguments import (
    add_kernels,
    add_problem,
    add_tiling,
    doing,
    given_fields,
    problem_for,
    problem_of,
    tiling_fields,
    tiling_of,
    usable,
    workload_of,
)
from mla_var3.cutile_cpu.errors import KernelFault
from mla_var3.device import Device
from mla_var3.errors import EXIT_USER_ERROR, Unsupported, UserError
from mla_var3.toolchain import mistakes
from mla_var3.workload import DEFAULT, check_seed

if TYPE_CHECKING:
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.workload.decode import MlaProblem

HELP = "is a kernel right? on the GPU, or on the CPU where its language runs there"
EPILOG = """\
examples:
  mla-var3 check triton/flash_mla --b 2 --t 300 --h 16
  mla-var3 check 'cute-dsl/flash_mla*' --lengths 70,0,128 --s 4 --causal
  mla-var3 check '*/rmsnorm' triton/flash_mla        each on a problem of what it computes
  mla-var3 check cute-dsl/flash_mla_v23 --b 2 --t 300 --sanitize racecheck
Without a GPU a kernel whose language does not run on a CPU (CuTe DSL) is compiled for an H200, and not checked.
Ends with 0 when every kernel named was checked and is right, with 1 when one is wrong, with 2 for a mistake in the
request or in a kernel's code, and with 3 when none is wrong but one was not checked."""

#: None of the kernels is wrong, but one that was named was not checked: compiling it is not a pass.
EXIT_NOT_CHECKED = 3


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


@dataclass
class _Counts:
    """What came out of the kernels named: how many were checked, are wrong, broke off, and were not checked and why."""

    checked: int = 0
    wrong: int = 0
    broken: int = 0
    compiled: int = 0
    refused: list[str] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    """0 when every kernel was checked and is right, 1 when one is wrong, 2 when one's code broke off, else 3."""
    from mla_var3.lab.diagnosis import debugging
    from mla_var3.lab.sweep.cpu import use_interpreter
    from mla_var3.lab.sweep.plan import DISPATCH, select_kernels

    debugging.prepare(args)
    if args.seed is not None:
        check_seed("--seed", args.seed)
    named = [pattern for pattern in args.kernels if pattern != DISPATCH]
    kernels = usable(named) if named else []
    absent = len(set(select_kernels(named))) - len(kernels) if named else 0
    device = Device.detect() if args.device != "cpu" else None
    where = "cpu" if args.device == "cpu" or (args.device == "auto" and device is None) else "cuda"
    if where == "cuda" and device is None:
        raise UserError("there is no GPU here: check with --device cpu, or on a machine that has one.")
    here = [] if args.keep or args.sanitize else kernels
    if where == "cpu":
        here = [kernel for kernel in here if not registry.cannot_run_on_cpu(kernel.language)]
        for kernel in here:  # chooses interpreters, so before a kernel's module is imported
            use_interpreter(kernel.language, kernel.label)
    chosen: dict[KernelId, tuple[Any, dict[str, Any]]] = {}
    if len(named) < len(args.kernels):
        if device is None:
            raise UserError("dispatch picks a version for a GPU, and none is used here: name a kernel instead.")
        from mla_var3.dispatch import choose

        problem = problem_of(args)
        choice = choose(problem, device)
        print(f"dispatch picks {choice.label}: {choice.reason}")
        chosen[choice.kernel] = problem, choice.knobs
        kernels = list(dict.fromkeys([*kernels, choice.kernel]))
    counts = _Counts()
    for kernel in kernels:
        try:
            if where == "cuda" or kernel in here:
                _check(args, kernel, where, device, counts, *chosen.get(kernel, (None, {})))
            else:
                _compile(args, kernel, counts)
        except Exception as error:
            _tell(kernel, error, counts, alone=len(kernels) == 1)
    if not (counts.checked or counts.broken or counts.compiled):
        raise UserError("; ".join(dict.fromkeys(counts.refused)))
    if counts.wrong:
        return 1
    if counts.broken:
        return EXIT_USER_ERROR
    return EXIT_NOT_CHECKED if counts.compiled or counts.refused or absent else 0


def _check(
    args: argparse.Namespace,
    kernel: KernelId,
    where: str,
    device: Device | None,
    counts: _Counts,
    problem: Any,
    knobs: dict[str, Any],
) -> None:
    """Checks one kernel on a problem, by default its workload's own, and prints the verdict."""
    from mla_var3.check.judge import check as run_check
    from mla_var3.check.judge import wanted_cases
    from mla_var3.lab.diagnosis import debugging

    plan_type = registry.get_plan(kernel)
    problem = problem or _problem(args, kernel, where)
    plan_type.requires.accepts(problem).require(Unsupported)
    tiling = tiling_of(plan_type, problem, device, {**knobs, **tiling_fields(args.tiling)})
    plan = plan_type(problem, tiling, device)
    plan.require()
    if where == "cuda":
        debugging.keep(args, kernel, plan)
        if not debugging.sanitize(args, kernel, problem, tiling, device):
            counts.checked += 1
            counts.wrong += 1
            return
    cases = [case.strip() for case in args.cases.split(",")] if args.cases else None
    wanted_cases(plan_type, args.quick, cases)  # a wrong name is told first
    if where == "cpu" and not counts.checked:
        print("no GPU here: checking on the CPU at small sizes" if args.device == "auto" else "checking on the CPU")
    with doing(f"checking {kernel.label} {problem.label}"):
        report = run_check(
            plan_type, problem, tiling, where,
            quick=args.quick, seeds=None if args.seed is None else [args.seed], cases=cases, hardware=device,
        )  # fmt: skip
    print_check(kernel, problem, report)
    counts.checked += 1
    counts.wrong += not report.ok


def _compile(args: argparse.Namespace, kernel: KernelId, counts: _Counts) -> None:
    """Compiles for an H200 what nothing runs here, and says that it was not checked; keeps what `--keep` names."""
    from mla_var3.lab.diagnosis import debugging

    target = Device.get("h200")
    if not (registry.is_compiled(kernel.language) or args.keep or args.sanitize):
        raise Unsupported(f"{registry.cannot_run_on_cpu(kernel.language)}.")
    plan_type = registry.get_plan(kernel)
    problem = _problem(args, kernel, "cuda")
    tiling = tiling_of(plan_type, problem, target, tiling_fields(args.tiling))
    plan = plan_type(problem, tiling, target)
    plan.require()
    head = f"{kernel.label} {problem.label}: compiled for {target.key}, not checked"
    if args.keep or args.sanitize:
        print(head)
        debugging.keep(args, kernel, plan)
        debugging.sanitize(args, kernel, problem, tiling, None)
    else:
        with doing(f"compiling {kernel.label} {problem.label} for {target.name}"):
            plan.plan_empty().compile(None, target)
        print(f"{head}: {registry.cannot_run_on_cpu(kernel.language)}; check it on a machine with a GPU")
    counts.compiled += 1


def _tell(kernel: KernelId, error: Exception, counts: _Counts, *, alone: bool) -> None:
    """Says why a kernel was not checked, or where its code broke off, so that the others go on. Raises it where there
    are no others, and what is no mistake of a user's."""
    from mla_var3.cli._main import sentence

    said = sentence(["check"], error)
    if said is None or (alone and (not isinstance(error, UserError) or kernel.label in said)):
        raise error
    if alone:
        raise type(error)(f"{kernel.label}: {said}") from error
    mistakes.show_if_wanted(error)
    if isinstance(error, UserError) and not isinstance(error.__cause__, KernelFault):
        counts.refused.append(f"{kernel.label}: {said}")
        print(f"{kernel.label}: not checked: {said}", file=sys.stderr)
    else:
        counts.broken += 1
        print(f"{kernel.label}: {said}", file=sys.stderr)


def _problem(args: argparse.Namespace, kernel: KernelId, where: str) -> Any:
    """What a kernel is checked on where the user says nothing: sizes for a CPU, or those of a workload other than
    decode."""
    workload = workload_of([kernel])
    fields: dict[str, Any] = {}
    if workload.name != DEFAULT or where == "cpu":
        fields = workload.sample(where == "cpu", given_fields(args, workload))
    if workload.name == DEFAULT:
        fields.pop("h", None)  # all heads, also on a CPU: a version may go wrong in its second tile of them
    return problem_for(args, [kernel], **fields)


def print_check(kernel: KernelId, problem: MlaProblem, report: Any) -> None:
    """The verdict, and one line a case that failed or was left out."""
    word = "passed" if report.ok else "WRONG"
    seeds = ", ".join(map(str, report.seeds))
    errors = ", ".join(f"of {name} {error:.2e}" for name, error in report.error.items())
    print(f"{kernel.label} {problem.label}: {word}, {len(report.cases)} cases, error {errors}, seed {seeds}")
    for case in report.cases:
        if not case.ok:
            print(f"  {case.name} (seed {case.seed}): {case.reason}")
    for name, reason in report.left_out.items():
        print(f"  {name} left out: {reason}")
