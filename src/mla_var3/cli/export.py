"""`mla-var3 export`: problems, versions and records in the files of other benchmarks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mla_var3.cli.arguments import (
    add_problem,
    by_workload,
    doing,
    experiment_cells,
    problem_for,
    problem_of,
    says_problem,
    usable,
)
from mla_var3.errors import UserError
from mla_var3.files import check_file, check_folder, write_whole

FORMATS = ("flashinfer-bench", "cudnn-frontend")

HELP = "problems and versions for flashinfer-bench, records as a table in cudnn-frontend's columns"
EPILOG = """\
examples:
  mla-var3 export --format flashinfer-bench --experiment nightly --out out/trace
  mla-var3 export 'cute-dsl/flash_mla*' --format flashinfer-bench --batch 128q1s4k --h 64 --out out/trace
  mla-var3 export results/h200 --format cudnn-frontend --out out/h200.csv"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="*", metavar="WHAT",
        help="flashinfer-bench: versions that are solutions beside the dispatcher; cudnn-frontend: record files or "
        "folders (default: results/ and the shipped ones)",
    )  # fmt: skip
    parser.add_argument("--format", required=True, choices=FORMATS, help="the program that reads the files")
    parser.add_argument("--out", required=True, metavar="PATH", help="a folder, or the CSV file of cudnn-frontend")
    parser.add_argument("--experiment", metavar="NAME", help="the cells of this experiment, in place of one problem")
    parser.add_argument("--device", metavar="KEY", help="with cudnn-frontend: only records of this device")
    add_problem(parser)


def run(args: argparse.Namespace) -> int:
    """Writes what was asked for and says how much that was; 0. Mistakes are raised as `UserError`."""
    return _table(args) if args.format == "cudnn-frontend" else _trace(args)


def _trace(args: argparse.Namespace) -> int:
    from mla_var3.lab.export import flashinfer_bench

    if args.device is not None:
        raise UserError("--device says which records, and flashinfer-bench is given none: leave it out.")
    if args.experiment is not None and says_problem(args):
        raise UserError(f"--experiment {args.experiment} has its own problems: leave the options of a problem out.")
    check_folder(args.out, "--out")
    kernels = usable(args.what) if args.what else []
    if args.experiment is not None:
        problems = experiment_cells(args.experiment)
    elif kernels:
        problems = [problem_for(args, some) for some in by_workload(kernels).values()]
    else:
        problems = [problem_of(args)]
    with doing("writing definitions"):
        written = flashinfer_bench.write(problems, kernels, Path(args.out))
    for reason, labels in written.left_out.items():
        print(f"left out: {', '.join(labels)}: {reason}", file=sys.stderr)
    print(
        f"{args.out}: {written.definitions} definitions, {written.workloads} workloads, {written.solutions} solutions"
    )
    return 0


def _table(args: argparse.Namespace) -> int:
    from mla_var3.lab.export import cudnn_frontend
    from mla_var3.lab.report.gather import default_files
    from mla_var3.record import load

    if args.experiment is not None or says_problem(args):
        raise UserError("cudnn-frontend's table is of records: leave --experiment and the options of a problem out.")
    check_file(args.out, "--out")
    with doing("reading records"):
        records = load(args.what or default_files()).records
    if args.device is not None:
        records = [r for r in records if r.device == args.device]
    text, rows, left = cudnn_frontend.table(records)
    if not rows:
        raise UserError("none of these records is a time of dense decode or prefill: give others, or another --device.")
    write_whole(args.out, text)
    note = f"; {left} records have problems that these columns cannot say" if left else ""
    print(f"{args.out}: {rows} rows{note}")
    return 0
