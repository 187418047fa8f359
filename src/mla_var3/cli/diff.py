"""`mla-var3 diff`: two versions side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from mla_var3.cli.arguments import add_problem, add_tiling, by_workload, doing, problem_for, tiling_fields
from mla_var3.errors import UserError
from mla_var3.files import check_folder, write_whole

HELP = "two versions side by side: resources, instructions, the inner loop's SASS, counters, times"
EPILOG = """\
examples:
  mla-var3 diff cute-dsl/flash_mla cute-dsl/flash_mla_v23 --b 128
  mla-var3 diff triton/flash_mla cutile-dsl/flash_mla --b 128 --lines 0
Both are compiled for the device, without a GPU; counters and times are those of kept profiles and of records. The inner
loop is the innermost one with the most tensor-core products; its whole SASS, side by side, is in DIR/.../diff.md."""
OUT = "out/diff"
LINES = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="language/design[_vN]")
    parser.add_argument("b_version", metavar="B", help="language/design[_vN], what A is compared with")
    parser.add_argument("--device", metavar="KEY", help="device to compile for, and of the records (default h200)")
    parser.add_argument("--out", default=OUT, metavar="DIR", help=f"where code and diff.md go (default {OUT})")
    parser.add_argument(
        "--lines", type=int, default=LINES, metavar="N", help=f"lines of SASS on the terminal (default {LINES})"
    )
    add_problem(parser)
    add_tiling(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the comparison and writes it to diff.md; 0. Raises `UserError`."""
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.device import Device
    from mla_var3.lab.diagnosis.compare import differing, folded, legend, render, side_by_side
    from mla_var3.lab.diagnosis.evidence import load_records
    from mla_var3.lab.diagnosis.versions import both

    kernels = [KernelId.parse(args.a), KernelId.parse(args.b_version)]
    if kernels[0] == kernels[1]:
        raise UserError(f"{args.a} twice: name two versions.")
    if args.lines < 0:
        raise UserError(f"--lines {args.lines} is below 0.")
    check_folder(args.out, "--out")
    device = Device.get(args.device or "h200")
    if len(computed := by_workload(kernels)) > 1:
        told = " and ".join(f"{some[0].label} computes {name}" for name, some in computed.items())
        raise UserError(f"{told}: name two versions that compute the same.")
    problem = problem_for(args, kernels)
    out = Path(args.out) / "--".join(k.label.replace("/", "-") for k in kernels) / problem.label
    with doing("reading records"):
        records = load_records()
    with doing(f"compiling both for {device.name}"):
        versions = both(kernels, problem, device, out, tiling_fields(args.tiling), records)
    text = render(versions, problem.label, device.name, records, problem, device.key)
    rows = side_by_side(versions)
    whole = ["", "## The inner loop, side by side", "", *legend(versions), "", "```text", *rows, "```"] if rows else []
    write_whole(out / "diff.md", "\n".join([*text, *whole]) + "\n")
    print("\n".join(differing(text)))
    shown = folded(rows)[: args.lines] if args.lines else []
    if shown:
        print("\n## The inner loop where it differs\n")
        print("\n".join([*legend(versions), "", *shown]))
        left = len(folded(rows)) - len(shown)
        if left > 0:
            print(f"... {left} more lines in diff.md, or --lines {len(folded(rows))}")
    print(f"\n{out / 'diff.md'}")
    return 0
