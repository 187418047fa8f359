"""`mla-var3 dispatch`: make the dispatcher's table from records, and see what it picks and why."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mla_var3 import paths
from mla_var3.catalogue import ledger, registry
from mla_var3.cli.arguments import Parser, add_problem, doing, problem_of
from mla_var3.device import Device
from mla_var3.dispatch import selection
from mla_var3.dispatch import table as tables
from mla_var3.errors import UserError, nearest
from mla_var3.files import check_file, write_whole

if TYPE_CHECKING:
    from mla_var3.dispatch.table import Table

HELP = "which version and knobs for a problem, from records; make its table"

ACTIONS = {
    "show": "which version and knobs for a problem, and why",
    "build": "make the table from record files, and hold every cell out once",
}

EPILOG = """\
examples:
  mla-var3 dispatch show --b 96 --h 16 --t 6000 --device h200
  mla-var3 dispatch build                   from the results/ of this checkout
  mla-var3 dispatch build my/records --out my_table.json
  mla-var3 sweep experiment=decode 'kernels=dispatch,cute'    what it picks, as a contender"""


def main(words: Sequence[str]) -> int:
    """Runs `mla-var3 dispatch WORDS`."""
    if not words or words[0] in ("-h", "--help"):
        print("usage: mla-var3 dispatch ACTION ...\n\nactions:")
        print("\n".join(f"  {name:7}{text}" for name, text in ACTIONS.items()) + f"\n\n{EPILOG}")
        return 0
    action, rest = words[0], words[1:]
    if action not in ACTIONS:
        raise UserError(f"dispatch has no action {action!r}: {nearest(action, ACTIONS)}.")
    parser = Parser(prog=f"mla-var3 dispatch {action}", description=f"{ACTIONS[action]}.", allow_abbrev=False)
    return _show(parser, rest) if action == "show" else _build(parser, rest)


def _show(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    add_problem(parser)
    parser.add_argument("--device", default="auto", metavar="KEY", help="default: the GPU here, else h200")
    parser.add_argument("--table", type=Path, metavar="FILE", help="another table than the shipped one")
    args = parser.parse_args(list(words))
    device = (Device.detect() or Device.get("h200")) if args.device == "auto" else Device.get(args.device)
    table = tables.load(args.table)
    problem = problem_of(args)
    with doing("judging every version"):
        chosen, refused = selection.survey(problem, device, table=table)
    print(f"{problem.label} on {device.name}")
    if chosen:
        print(f"picked: {chosen[0].label}: {chosen[0].reason}")
    for choice in chosen[:1]:
        if choice.records:
            print(f"        rests on records {', '.join(_with_code(choice, table))}")
    for choice in chosen[1:]:
        print(f"  then  {choice.label}: {choice.reason}")
    for other in refused:
        print(f"  not   {other.label}: {other.reason}")
    if not chosen:
        print("no version takes this problem here")
        return 1
    return 0


def _with_code(choice: selection.Choice, table: Table) -> list[str]:
    """Ids of a choice's records, each with the digest of the code it timed and how that stands to the code here."""
    points = {point.record: point for device in table.devices.values() for r in device.recipes for point in r.points}
    found = []
    for record in choice.records:
        point = points[record]
        standing = ledger.standing(choice.kernel.label, point.problem, point.code)
        found.append(f"{record} ({standing} {point.code})" if point.code else f"{record} ({standing})")
    return found


def _build(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    from mla_var3.record import as_ratio

    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="record files or folders (default: results/)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: the table of this checkout")
    args = parser.parse_args(list(words))
    if args.out is None and paths.repo_root() is None:
        raise UserError("this is an installed package, whose table is not to be changed: give --out FILE.")
    target = args.out or tables.PATH
    check_file(target, "--out")
    with doing("reading records, and holding each cell out once"):
        table = from_files(args.files or [paths.shipped_results_dir()])
    write_whole(target, table.to_json())
    selection.forget()
    for key, device in table.devices.items():
        points = sum(len(recipe.points) for recipe in device.recipes)
        print(f"{key}: {len(device.recipes)} versions and tunings, {points} points")
        for held in sorted(selection.hold_out(device), key=lambda r: -r.ratio):
            mark = "best" if held.ratio == 1.0 else f"{as_ratio(held.ratio, 4)} of {held.best}"
            print(f"  held out {held.problem.label}: {held.picked}, {mark}")
        found = table.held_out[key]
        if found["cells"]:
            print(f"  geometric mean {found['mean_ratio']:.4f} over {found['cells']} cells")
    print(f"written to {target}")
    return 0


def from_files(files: Sequence[Path]) -> Table:
    """The table of record files or folders, with what holding out found; unreadable lines are reported. Retired
    versions are left out, and those that this checkout's devlog rejects: such a one may have been the faster in a cell
    or two, by what turns differ."""
    from mla_var3.lab.devlog.entry import entry_path, parse
    from mla_var3.record import load

    found = load(files)
    for problem in found.problems:
        print(f"warning: {problem}", file=sys.stderr)
    root = paths.repo_root()
    measured = {tables.named(record) for record in found.records}
    entries = {} if root is None else {kernel: entry_path(root, kernel) for kernel in measured}
    rejected = {kernel for kernel, path in entries.items() if path.exists() and parse(path)[0].verdict == "rejected"}
    rejected |= measured - set(registry.all_kernels())
    table = tables.build(found.records, rejected)
    if not table.devices:
        raise UserError(
            "these records hold no times, burst and sustained, of versions that could be picked: measure some first."
        )
    held = {key: selection.summary(selection.hold_out(device)) for key, device in table.devices.items()}
    return dataclasses.replace(table, held_out=held)
