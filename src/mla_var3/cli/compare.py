"""`mla-var3 compare`: tables from record files."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path

from mla_var3 import paths
from mla_var3.device import Device
from mla_var3.errors import UserError, nearest

HELP = "tables from record files"
EPILOG = """\
examples:
  mla-var3 compare
  mla-var3 compare results/h200 --kernels cute-dsl/flash_mla triton/flash_mla
  mla-var3 compare --cells 'b128_*' --device h200"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="record files or folders (default: results/ and the shipped ones)"
    )
    parser.add_argument("--kernels", nargs="+", metavar="KERNEL", help="only these; exactly two also get their ratios")
    parser.add_argument("--cells", nargs="+", metavar="CELL", help="only these: b128_s1_h128_t4096; wildcards allowed")
    parser.add_argument("--device", metavar="KEY", help="only records of this device")
    parser.add_argument("--all", action="store_true", help="every record, not only the newest of each kernel and cell")
    parser.add_argument("--resources", action="store_true", help="also what the kernels take of the device")


def run(args: argparse.Namespace) -> int:
    """Tables of measured records, newest of each kernel and cell."""
    from mla_var3.lab.report import tables
    from mla_var3.record import load

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


def _device(key: str) -> Device | None:
    try:
        return Device.get(key)
    except UserError:
        return None
