"""`--keep`, `--lineinfo` and `--sanitize` of `mla-var3 check`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError, nearest
from mla_var3.files import check_folder
from mla_var3.lab.diagnosis.sanitizer import TIMEOUT_S, TOOLS

if TYPE_CHECKING:
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.device import Device
    from mla_var3.runtime.types import Tiling
    from mla_var3.workload import Problem

OUT = "out/debug"
#: What the compilers call their own form: MLIR of CuTe DSL, Triton's two, cuTile's bytecode.
IR = ("mlir", "ttir", "ttgir", "tileir")
_LINEINFO = "CUTE_DSL_LINEINFO"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options, as a group of their own."""
    group = parser.add_argument_group("debugging")
    group.add_argument(
        "--keep", default="", metavar="KIND,...", help="keep what the compiler makes: ir, ptx, cubin, sass"
    )
    group.add_argument(
        "--lineinfo", action="store_true", help="CuTe: source lines in the binary (Triton and cuTile always have them)"
    )
    group.add_argument(
        "--sanitize", metavar="TOOL", help=f"one call under compute-sanitizer: {', '.join(TOOLS)}; needs a GPU"
    )
    group.add_argument(
        "--sanitize-kernel", metavar="NAME", help="watch only the device functions whose names hold NAME"
    )
    group.add_argument("--debug-out", default=OUT, metavar="DIR", help=f"where all of it goes (default {OUT})")
    group.add_argument(
        "--sanitize-timeout", type=float, default=TIMEOUT_S, metavar="S", help=f"longest run ({TIMEOUT_S:g} s)"
    )


def kinds(text: str) -> tuple[str, ...]:
    """The kinds that `--keep` names; `ir` stands for those of all languages. Raises `UserError`."""
    from mla_var3.toolchain.artefacts import KINDS

    found: list[str] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name != "ir" and name not in KINDS:
            raise UserError(f"--keep {name!r} is unknown: {nearest(name, ['ir', *KINDS])}.")
        found += IR if name == "ir" else (name,)
    return tuple(dict.fromkeys(found))


def prepare(args: argparse.Namespace) -> None:
    """Checks the options and sets what compilers read when they are loaded. Before any language is imported."""
    kinds(args.keep)
    if args.sanitize and args.sanitize not in TOOLS:
        raise UserError(f"--sanitize {args.sanitize!r} is unknown: {nearest(args.sanitize, TOOLS)}.")
    if args.sanitize_kernel and not args.sanitize:
        raise UserError("--sanitize-kernel says what --sanitize TOOL watches: give that as well.")
    if args.keep or args.sanitize:
        check_folder(args.debug_out, "--debug-out")
    if args.sanitize_timeout <= 0:
        raise UserError(f"--sanitize-timeout {args.sanitize_timeout:g} must be above 0.")
    if args.lineinfo and os.environ.get(_LINEINFO) != "1":
        if "cutlass" in sys.modules:
            raise UserError(
                f"CuTe DSL is loaded without source lines here: start with {_LINEINFO}=1 in the environment."
            )
        os.environ[_LINEINFO] = "1"


def keep(args: argparse.Namespace, kernel: KernelId, plan: Any) -> list[Path]:
    """Compiles into `DIR/<kernel>/<problem>/` and prints each file; nothing without --keep."""
    wanted = kinds(args.keep)
    if not wanted:
        return []
    from mla_var3.catalogue.registry import is_compiled
    from mla_var3.device import Device

    if not is_compiled(kernel.language):
        raise UserError(f"{kernel.label} has nothing to keep: it is not compiled here; leave out --keep.")
    folder = _folder(args, kernel, plan.problem)
    compiled = plan.plan_empty().compile(folder, plan.device or Device.get("h200"), keep=wanted)
    found: dict[Path, str] = {}
    for one in (compiled, *compiled.stages):
        found |= {path: kind for kind, path in one.artefacts.items()}
    for path, kind in found.items():
        print(f"  {kind:8}{path}")
    made = set(found.values())
    named = [part.strip() for part in args.keep.split(",") if part.strip()]
    missing = [name for name in named if not made & set(IR if name == "ir" else (name,))]
    if missing:
        print(f"  {kernel.language} makes no {', '.join(missing)}", file=sys.stderr)
    return list(found)


def sanitize(
    args: argparse.Namespace, kernel: KernelId, problem: Problem, tiling: Tiling | None, device: Device | None
) -> bool:
    """One call under the tool; True when it found nothing and the result is right (or nothing was asked for).

    Without a GPU a `UserError` says what to run on a machine that has one.
    """
    if not args.sanitize:
        return True
    from mla_var3.lab.diagnosis import sanitizer

    record = None if tiling is None else tiling.to_record()
    job = sanitizer.write_job(_folder(args, kernel, problem), kernel, problem, record)
    if device is None:
        env = {k: v for k, v in sanitizer.environment().items() if k != "PYTHONPATH"}
        command = sanitizer.command("compute-sanitizer", args.sanitize, job, args.sanitize_kernel)
        words = [*(f"{k}={v}" for k, v in env.items()), *command]
        words[words.index(sys.executable)] = "python"
        raise UserError(f"--sanitize needs a GPU and there is none here; where there is one, run: {shlex.join(words)}")
    found = sanitizer.run(args.sanitize, job, args.sanitize_timeout, args.sanitize_kernel)
    print("\n".join(sanitizer.lines(found, f"{kernel.label} {problem.label}")))
    return found.ok


def _folder(args: argparse.Namespace, kernel: KernelId, problem: Problem) -> Path:
    return Path(args.debug_out) / kernel.label.replace("/", "-") / problem.label
