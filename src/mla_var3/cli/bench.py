"""`mla-var3 bench`: times kernels on one problem."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from mla_var3 import paths
from mla_var3.cli.arguments import (
    add_kernels,
    add_problem,
    add_tiling,
    by_workload,
    doing,
    problem_for,
    says_problem,
    tiling_fields,
    usable,
)
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.files import check_folder
from mla_var3.workload import DEFAULT

if TYPE_CHECKING:
    from mla_var3.record import Record

HELP = "time kernels on one problem, or one --against older code; --calibrate measures the limits of this GPU"
EPILOG = """\
examples:
  mla-var3 bench cute-dsl/flash_mla triton/flash_mla --b 128 --h 128 --t 4096
  mla-var3 bench '*' --b 1 --t 65536 --preset fast
  mla-var3 bench cute-dsl/flash_mla_v23 --b 128 --h 64 --against HEAD     is what I changed slower? 1 if it is
  mla-var3 bench --calibrate"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kernels(parser, "*")
    add_problem(parser)
    add_tiling(parser)
    parser.add_argument("--calibrate", action="store_true", help="measure this GPU's limits instead of kernels")
    parser.add_argument("--preset", default="standard", help="standard, or fast: about half a second a kernel")
    parser.add_argument("--tune", action="store_true", help="try the version's tilings first")
    parser.add_argument(
        "--against", metavar="WHAT",
        help="compare one kernel with the code of a commit, in turn on this GPU, or with a record, by its id or file: "
        "the exit status is 1 where it is slower beyond noise",
    )  # fmt: skip
    parser.add_argument(
        "--results-dir", default="results", metavar="DIR",
        help="records go to DIR/<device>/<date>-bench.jsonl, those of --against to <date>-against.jsonl",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Times kernels through the sweep, so that records are the same: on one problem, and where they compute different
    things on one of each."""
    from mla_var3.lab.sweep.plan import PICKERS, select_kernels

    kernels = select_kernels(args.kernels) if args.kernels else []  # a wrong name is told before a GPU is looked for
    detected = Device.detect()
    if args.against is not None:
        return _against(args, detected)
    if detected is None:
        raise UserError(
            "bench needs a GPU and there is none here: `mla-var3 compile` and `mla-var3 check` work without."
        )
    if args.calibrate:
        return _calibrate(detected, args.preset)
    if not args.kernels:
        raise UserError("bench needs a kernel: give language/design, '*' for all, or --calibrate.")
    check_folder(args.results_dir, "--results-dir")
    from mla_var3.lab.sweep.config import ExperimentConfig, KernelsConfig, SweepConfig
    from mla_var3.lab.sweep.launch import Local
    from mla_var3.lab.sweep.run import Sweep

    asked, groups = tiling_fields(args.tiling), by_workload(kernels)
    if len(groups) < 2:
        cells = [(problem_for(args, kernels), args.kernels)]
    else:
        cells, refused = [], []
        for name, some in groups.items():
            pickers = [pattern for pattern in args.kernels if pattern in PICKERS and name == DEFAULT]
            try:
                cells.append((problem_for(args, some), [*pickers, *(kernel.label for kernel in some)]))
            except UserError as error:
                refused.append(f"{', '.join(kernel.label for kernel in some)}: not timed: {error}")
        if not cells:
            raise UserError("; ".join(refused))
        print("".join(f"{line}\n" for line in refused), file=sys.stderr, end="")
    for problem, patterns in cells:
        config = SweepConfig(
            experiment=ExperimentConfig(name="bench", cells=[problem.to_record()], workload=problem.workload),
            kernels=KernelsConfig(patterns=patterns),
            bench={"preset": args.preset, "tune": args.tune},
            tiling=asked,
            results_dir=args.results_dir,
            verbose=True,
        )
        Sweep(config, Local(detected)).run()
    return 0


def _against(args: argparse.Namespace, detected: Device | None) -> int:
    """One sentence on standard output, progress on standard error; 1 where the kernel lost beyond noise."""
    from mla_var3.lab import against
    from mla_var3.measure.settings import BenchSettings
    from mla_var3.record import RecordStore, load
    from mla_var3.workload import problem_from_record

    if args.calibrate or args.tune:
        raise UserError("--against compares one kernel as it is: leave --calibrate and --tune out.")
    kernels = usable(args.kernels) if args.kernels else []
    if len(kernels) != 1:
        raise UserError(f"--against compares one kernel, and {len(kernels)} are named: name one.")
    (kernel,) = kernels
    check_folder(args.results_dir, "--results-dir")
    folders = dict.fromkeys(p.resolve() for p in (Path(args.results_dir), paths.shipped_results_dir()) if p.is_dir())
    with doing("reading records"):
        pool = load(folders).records
    problem = problem_for(args, kernels) if says_problem(args) else None
    other = against.find(args.against, kernel, problem, detected, pool)
    if problem is None:
        problem = problem_for(args, kernels) if other.record is None else problem_from_record(other.record.problem)
    tiling = tiling_fields(args.tiling) or against.asked(other.record)

    def keep(record: Record) -> None:
        name = f"{datetime.now(UTC):%Y-%m-%d}-{against.EXPERIMENT}.jsonl"
        RecordStore(Path(args.results_dir) / record.device / name).append(record)

    lost, sentence = against.answer(
        kernel, other, problem, tiling, detected, BenchSettings.of({"preset": args.preset}), pool, keep,
        lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    print(sentence)
    return 1 if lost else 0


def _calibrate(device: Device, preset: str) -> int:
    from mla_var3.measure.calibrate import measure_all
    from mla_var3.measure.settings import BenchSettings

    print(f"limits of {device.name}:")
    for state, limits in measure_all(settings=BenchSettings.of({"preset": preset})).items():
        known = [device.ceiling(q, state) for q in ("matmul_tflops", "read_gbps")]
        beside = ", ".join(f"{c.value:,.0f} {c.unit} on {c.date}" for c in known if c is not None)
        print(
            f"  {state:10} matrix product {limits.matmul_tflops:,.0f} TFLOP/s, reading {limits.read_gbps:,.0f} GB/s"
            + (f"   (recorded: {beside})" if beside else "")
        )
    return 0
