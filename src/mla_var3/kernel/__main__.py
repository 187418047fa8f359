"""`python -m mla_var3.kernel <design> [<version>]`: plans one version, runs it once, and checks or profiles it.

python -m mla_var3.kernel flash_mla --lang triton --b 2 --t 300 --check
python -m mla_var3.kernel flash_mla v1 --lang cute-dsl --b 128 --prof_type event
python -m mla_var3.kernel flash_mla v1 --lang cute-dsl --b 128 --prof_type annotation --baseline cute-dsl/flash_mla
python -m mla_var3.kernel flash_mla v1 --lang cute-dsl --keep ir,ptx,cubin,sass --lineinfo
python -m mla_var3.kernel flash_mla v1 --lang cute-dsl --b 2 --t 300 --sanitize memcheck
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3 import cli
from mla_var3.diagnosis import debugging
from mla_var3.errors import EXIT_USER_ERROR, UserError
from mla_var3.profiling import DISABLED, MODES, verb

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.kernel.registry import KernelId
    from mla_var3.problem import MlaProblem

PROG = "python -m mla_var3.kernel"

#: Which language is taken when none is named: the first that is installed and runs here.
PREFERENCE = ("cute-dsl", "cutile-dsl", "triton", "torch")


def main(argv: Sequence[str] | None = None) -> int:
    """0, 1 when the check fails, 2 for a mistake in what was asked."""
    try:
        return run(_parser().parse_args(argv))
    except UserError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return cli.EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog=PROG,
        description="Plan one kernel version, run it once, and check or profile it.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("design", help="a design, or a version of it: flash_mla, flash_mla_v2")
    parser.add_argument("version", nargs="?", help="2, v2 or flash_mla_v2; default: the base version, 0")
    parser.add_argument("--lang", metavar="L", help="language; default: the first that runs here, CuTe DSL first")
    cli.add_problem(parser)
    cli.add_tiling(parser)
    parser.add_argument("--check", action="store_true", help="run it through the cases of the checker")
    parser.add_argument(
        "--prof_type", "--prof-type", default=DISABLED, choices=[DISABLED, *MODES],
        help="how to profile the call; annotation is the first pass (mla-var3 profile --help describes each)",
    )  # fmt: skip
    verb.add_common(parser.add_argument_group("profile"))
    debugging.add_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    from mla_var3.device import Device
    from mla_var3.kernel.registry import get_plan
    from mla_var3.verbs import problem_of, tiling_fields, tiling_of

    debugging.prepare(args)
    device = Device.detect()
    profiles = args.prof_type != DISABLED
    if device is None and profiles and args.prof_type != "annotation":
        raise UserError(
            f"--prof_type {args.prof_type} needs a GPU and there is none here: leave it out, use --check, or use "
            "--prof_type annotation, which says what compiling and counting can."
        )
    problem = problem_of(args, **({"b": 2, "t": 300} if device is None and not profiles else {}))
    kernel_id = choose(args.design, args.version, args.lang, device)
    if device is None and profiles:
        _profile(args, kernel_id, problem, device)
        return 0
    # Without a GPU, what is kept comes from the compiler: Triton's interpreter has none.
    runs = not (device is None and (args.keep or args.sanitize)) and _ready(kernel_id, device)
    plan_type = get_plan(kernel_id)
    tiling = tiling_of(plan_type, problem, device, tiling_fields(args.tiling))
    plan = plan_type(problem, tiling, device or Device.get("h200") if not runs else device)
    plan.require()
    cost = problem.cost(plan.formulation)
    print(f"{kernel_id.label} {problem.label} on {device.name if device else 'no GPU'}")
    print(f"  tiling {', '.join(f'{k}={v}' for k, v in tiling.to_record().items()) or '-'}")
    print(f"  {cost.flops / 1e9:,.1f} GFLOP, {cost.bytes / 1e6:,.1f} MB, {cost.intensity:,.0f} FLOP/B")
    debugging.keep(args, kernel_id, plan)
    if not debugging.sanitize(args, kernel_id, problem, tiling, device):
        return 1
    if not runs:
        return 0 if args.keep else _compile_only(plan, kernel_id)
    where = "cpu" if device is None else "cuda"
    kernel = plan.plan(*plan.prepare_inputs(where))
    out, _ = kernel()
    mean, dtype = float(out.abs().float().mean()), str(out.dtype).removeprefix("torch.")
    print(f"  ran: out {tuple(out.shape)} {dtype}, mean |out| {mean:.4g}")
    if args.check:
        from mla_var3.runtime.correctness.checking import check
        from mla_var3.verbs import print_check

        report = check(plan_type, problem, tiling, where, hardware=device)
        print_check(kernel_id, problem, report)
        if not report.ok:
            return 1
    if profiles:
        del kernel, out, _  # the profiled process needs the room
        _profile(args, kernel_id, problem, device)
    return 0


def _profile(args: argparse.Namespace, kernel: KernelId, problem: MlaProblem, device: Device | None) -> None:
    from mla_var3.profiling.request import Request, baseline_of
    from mla_var3.verbs import tiling_fields

    request = Request(
        kernel, problem, args.prof_type, tiling_fields(args.tiling), baseline_of(kernel, args.baseline, args.prof_type),
        launches=args.launches, kernel_name=args.kernel_name, out=args.out, timeout_s=args.timeout,
    )  # fmt: skip
    verb.show(request, device)


def choose(design: str, version: str | None, language: str | None, device: Device | None) -> KernelId:
    """The version that is meant; without a language, the first of `PREFERENCE` that is installed and runs here."""
    from mla_var3.kernel.registry import all_kernels, find, missing
    from mla_var3.sweep.cpu import can_run

    named = next((k for k in all_kernels() if k.module_name == design), None)
    if version is None and named is not None:
        design, number = named.design, named.version
    else:
        match = re.fullmatch(rf"(?:{re.escape(design)}_)?v?(\d+)", version or "0")
        if match is None:
            raise UserError(f"{version!r} is no version of {design}: write 2, v2 or {design}_v2.")
        number = int(match[1])
    found = find(design, number, language)
    if language is not None:
        reason = missing(found[0])
        if reason:
            raise UserError(reason)
        return found[0]
    found.sort(key=lambda k: PREFERENCE.index(k.language) if k.language in PREFERENCE else len(PREFERENCE))
    for kernel in found:
        if missing(kernel) is None and (device is not None or not can_run(kernel.language)):
            return kernel
    raise UserError(f"no version of {design} runs here: name a --lang to compile it, or see mla-var3 doctor.")


def _ready(kernel: KernelId, device: Device | None) -> bool:
    """Whether the kernel can run in this process, which is made ready for it."""
    from mla_var3.sweep.cpu import can_run, use_interpreter

    if device is not None:
        return True
    reason = can_run(kernel.language)
    if reason:
        print(f"no GPU here, and {reason}", file=sys.stderr)
        return False
    use_interpreter(kernel.language, kernel.label)
    return True


def _compile_only(plan: Any, kernel: KernelId) -> int:
    from mla_var3.report import tables

    out: Path | None = None
    compiled = plan.plan_empty().compile(out, plan.device)
    row = tables.Compiled(
        kernel.label,
        plan.problem.label,
        plan.device.key,
        compiled.to_record(),
        compiled.seconds,
        list(compiled.warnings),
    )
    tables.show(tables.resources([row], plan.device, f"Compiled for {plan.device.name}"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
