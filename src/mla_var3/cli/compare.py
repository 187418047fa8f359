"""`mla-var3 compare`: tables from record files."""

from __future__ import annotations

import argparse
import fnmatch
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3 import paths
from mla_var3.catalogue import registry
from mla_var3.cli.arguments import doing
from mla_var3.device import Device
from mla_var3.errors import UserError, nearest
from mla_var3.names import in_order

if TYPE_CHECKING:
    from mla_var3.record import Record

HELP = "tables from record files: who is fastest where, or every contender of some cells"
EPILOG = """\
examples:
  mla-var3 compare                                          a row a cell: the fastest kernel, and the fastest library
  mla-var3 compare results/h200 --kernels cute-dsl/flash_mla triton/flash_mla
  mla-var3 compare --cells 'b128_*' --device h200"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="record files or folders (default: results/ and the shipped ones)"
    )
    parser.add_argument("--kernels", nargs="+", metavar="KERNEL", help="only these; exactly two also get their ratios")
    parser.add_argument(
        "--cells", nargs="+", metavar="CELL", help="only these, with all contenders: b128_s1_h128_t4096, 'b128_*'"
    )
    parser.add_argument("--device", metavar="KEY", help="only records of this device")
    parser.add_argument("--all", action="store_true", help="every record: older ones too, and retired versions")
    parser.add_argument("--resources", action="store_true", help="also what the kernels take of the device")


def run(args: argparse.Namespace) -> int:
    """Tables of measured records, the one that speaks for each kernel and cell (`catalogue.spoken`)."""
    with doing("reading records"):
        records, labels = _records(args)
    from mla_var3.lab.report import tables

    # The device of the newest record first.
    devices = list(dict.fromkeys(r.device for r in sorted(records, key=lambda r: r.at, reverse=True)))
    brief = not (args.files or args.device or args.cells or args.kernels or args.all)
    for device in devices[:1] if brief else devices:
        mine = [r for r in records if r.device == device]
        if not (args.cells or args.kernels or args.all):
            _fastest(mine, device, SCREEN if brief else None)
            continue
        live, retired = _apart(mine, args)
        table = tables.comparison(live, f"Recorded on {device}", dated=True)
        if retired:
            hidden = f"Not shown: {retired} records of retired versions (--all, or name them with --kernels)."
            table.caption = "\n".join(filter(None, [str(table.caption or ""), hidden]))
        tables.show(table, most=WIDTH)
        if args.resources:
            tables.show(tables.resources(live, _device(device), f"Compiled for {device}"), most=WIDTH)
        if args.kernels and len(args.kernels) == 2 and set(args.kernels) <= set(labels):
            tables.show(tables.versus(mine, *args.kernels), most=WIDTH)
    if brief and len(devices) > 1:
        print(f"Other devices have records too: mla-var3 compare --device {' or '.join(devices[1:])}")
    return 0


#: Cells that are shown where nobody asked for any: as many as fit on a screen where each name takes two lines.
SCREEN = 14

#: Lines that they may take: a name with knobs takes more than two, and then fewer cells are shown.
LINES = 38

#: Columns of text that a table may take.
WIDTH = 150


def _fastest(records: list[Record], device: str, most: int | None = None) -> None:
    """A row a cell. most: of these, those that were measured last, and fewer where they take more than `LINES`."""
    from mla_var3.lab.report import tables
    from mla_var3.lab.sweep.telling import answer
    from mla_var3.workload import problem_from_record

    timed = [(problem_from_record(r.problem), r) for r in records]
    cells = list(dict.fromkeys(cell for cell, _ in timed))
    newest = list(dict.fromkeys(cell for cell, _ in sorted(timed, key=lambda one: one[1].at, reverse=True)))

    def table_of(count: int) -> Any:
        shown = set(newest[:count])
        of = [r for cell, r in timed if cell in shown]
        table, _ = answer([c for c in cells if c in shown], of, _device(device), f"Fastest recorded on {device}")
        if table is not None:
            said = [str(table.caption or ""), "Every contender of a cell: mla-var3 compare --cells CELL"]
            if left := len(cells) - len(shown):
                said.append(f"{left} more cells, measured before these: mla-var3 compare --device {device}")
            table.caption = "\n".join(filter(None, said))
        return table

    count = len(cells) if most is None else min(most, len(cells))
    if table_of(count) is None:
        return
    while most is not None and count > 1:
        text = io.StringIO()
        tables.show(table_of(count), text, most=WIDTH)
        if len(text.getvalue().splitlines()) <= LINES:
            break
        count -= 1
    tables.show(table_of(count), most=WIDTH)


def _apart(records: list[Record], args: argparse.Namespace) -> tuple[list[Record], int]:
    """Records that are shown, and how many of retired versions are not: they are where somebody asks for them, or where
    nothing else is there."""
    from mla_var3.lab.report import tables

    known = registry.standings()
    live = [r for r in records if tables.standing(r, known) != "retired"]
    if args.all or args.kernels or not live:
        return records, 0
    return live, len(records) - len(live)


def _records(args: argparse.Namespace) -> tuple[list[Record], list[str]]:
    """The timed records that were asked for, cells in order, and the names of all contenders there are."""
    from mla_var3.catalogue import spoken
    from mla_var3.lab.report import tables
    from mla_var3.record import ASIDE, load

    files = args.files or [p for p in dict.fromkeys((Path("results"), paths.shipped_results_dir())) if p.is_dir()]
    if not files:
        raise UserError("there is no results/ folder here: give record files, or run mla-var3 sweep first.")
    if not args.files and (note := paths.records_elsewhere()):
        print(f"note: {note}", file=sys.stderr)
    found = load(dict.fromkeys(Path(f).resolve() if Path(f).exists() else Path(f) for f in files))
    for problem in found.problems:
        print(f"warning: {problem}", file=sys.stderr)
    # Of a cell's records one a contender speaks, before anything is left out: which one depends on the others.
    timed = [r for r in found.records if r.time_us is not None]
    timed = [r for r in timed if r.experiment not in ASIDE] or timed
    records = timed if args.all else spoken.speaking(timed, aside=True)
    if not records:
        raise UserError("these records hold no times: only a sweep or bench on a GPU measures them.")
    labels = in_order(r.kernel.label for r in found.records)
    for pattern in args.kernels or []:
        if pattern == spoken.DISPATCH:
            raise UserError("what the dispatcher picks stands under the version that it picked: name that one.")
        if not any(fnmatch.fnmatchcase(label, pattern) for label in labels):
            raise UserError(f"no record of kernel {pattern!r}: {nearest(pattern, labels)}.")
    if args.kernels:
        records = [r for r in records if any(fnmatch.fnmatchcase(r.kernel.label, p) for p in args.kernels)]
    if args.device:
        devices = {r.device for r in timed}
        if args.device not in devices:
            raise UserError(f"no record of device {args.device!r}: {nearest(args.device, devices)}.")
        records = [r for r in records if r.device == args.device]
    if args.cells:
        cells = {id(r): (tables.cell_of(r), r.problem_label) for r in records}
        names = {name for both in cells.values() for name in both}
        for pattern in args.cells:
            if not fnmatch.filter(names, pattern):
                raise UserError(f"no record of cell {pattern!r}: {nearest(pattern, names)}.")
        records = [r for r in records if any(fnmatch.filter(cells[id(r)], p) for p in args.cells)]
    if not records:
        raise UserError("no record of these kernels, cells and device holds a time: ask for fewer at once.")
    order = {name: i for i, name in enumerate(in_order(map(tables.cell_of, records)))}
    return sorted(records, key=lambda r: (str(r.problem.get("workload", "")), order[tables.cell_of(r)])), labels


def _device(key: str) -> Device | None:
    try:
        return Device.get(key)
    except UserError:
        return None
