"""`mla-var3 report`: the page, its tables on the terminal, its data and its pictures as files."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mla_var3 import paths
from mla_var3.cli.arguments import doing
from mla_var3.errors import UserError, install, nearest
from mla_var3.files import check_file, check_folder

if TYPE_CHECKING:
    from mla_var3.lab.report.export import Choice
    from mla_var3.lab.report.gather import Gathered, Point

SHOWS = ("map", "dispatch", "cell", "ladder", "languages", "compare", "sets", "left")
DEFAULT_OUT = "out/report/index.html"

HELP = "records as one page: which kernel is fastest where, by how much, how far from the limit"
EPILOG = """\
examples:
  mla-var3 report                                        results/ and the shipped records -> out/report/index.html
  mla-var3 report results/h200 --out page.html
  mla-var3 report --show dispatch                        what the dispatcher picks in each cell, and what that loses
  mla-var3 report --show cell --cell b128_s1_h128_t4096
  mla-var3 report --show ladder --design flash_mla --cell b128_s1_h128_t4096
  mla-var3 report --show compare --compare monday.jsonl tuesday.jsonl
  mla-var3 report --data out/records.parquet
  mla-var3 report --pictures out/pictures --picture map roofline --format svg png
With --show, --data or --pictures the page is written only where --out is given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="record files or folders (default: results/ and the shipped ones)"
    )
    parser.add_argument("--out", metavar="FILE", help=f"where the page goes (default {DEFAULT_OUT})")
    parser.add_argument(
        "--state",
        default="burst",
        choices=("burst", "sustained"),
        help="burst: a cool chip; sustained: at its power limit",
    )
    parser.add_argument("--device", metavar="KEY", help="device that is shown (default: the one with most records)")
    parser.add_argument(
        "--cell",
        metavar="CELL",
        help="cell that is shown, as b128_s1_h128_t4096 (default: the one with most contenders)",
    )
    parser.add_argument(
        "--design", metavar="NAME", help="design whose ladder is shown (default: the one with the most versions)"
    )
    parser.add_argument(
        "--languages", nargs=2, metavar="NAME", help="two languages to compare (default cutile-dsl cute-dsl)"
    )
    parser.add_argument(
        "--compare", nargs=2, metavar="SET", help="two record files, folders, or sets that --show sets lists"
    )
    parser.add_argument("--show", nargs="+", choices=SHOWS, default=[], help="print these tables on the terminal")
    parser.add_argument(
        "--profiles", nargs="+", metavar="DIR",
        help="where the page looks for traces of profile --mode trace (default out/profiles and the shipped ones)",
    )  # fmt: skip
    parser.add_argument("--data", metavar="FILE", help="write every timed record as a table, .csv or .parquet")
    parser.add_argument("--pictures", metavar="DIR", help="folder to write pictures into")
    parser.add_argument(
        "--picture", nargs="+", metavar="NAME", help="only these pictures: map, cell, roofline, ladder, languages, ..."
    )
    parser.add_argument(
        "--format", nargs="+", default=["svg"], choices=("svg", "png"), help="file format of the pictures (default svg)"
    )


def run(args: argparse.Namespace) -> int:
    """Writes and prints what was asked for; 0. Mistakes are raised as `UserError`."""
    page = bool(args.out or not (args.show or args.data or args.pictures))
    if args.picture and not args.pictures:
        raise UserError("--picture says which pictures, and not where: add --pictures DIR.")
    _writable(args, page)
    _installed(page or bool(args.pictures), bool(args.data and args.data.endswith(".parquet")))
    if not args.files and not args.compare and (note := paths.records_elsewhere()):
        print(f"note: {note}", file=sys.stderr)
    with doing("reading records"):
        gathered, sets = _gathered(args)
    if not gathered.points:
        raise UserError(
            "these records hold no times, so there is nothing to report: only a sweep or bench on a GPU measures them."
            + "".join(f" Left out: {line.count} {line.what}, {line.why}." for line in gathered.left_out[:3])
        )
    choice = _choice(args, gathered, sets)
    if args.show:
        show(args.show, gathered, choice)
    if args.data:
        from mla_var3.lab.report.export import write_table

        print(f"{args.data}: {write_table(gathered, Path(args.data))} records")
    if args.pictures:
        from mla_var3.lab.report.export import PICTURES, write_pictures

        with doing("drawing pictures"):
            written = write_pictures(gathered, Path(args.pictures), choice, args.picture or PICTURES, args.format)
        for path in written:
            print(path)
        if not written:
            raise UserError(f"none of these pictures has anything to show for {choice.device} in {choice.state}.")
    if page:
        from mla_var3.lab.report import traces
        from mla_var3.lab.report.page import write_page

        target = Path(args.out or DEFAULT_OUT)
        with doing("making the page"):
            drawn = traces.find(map(Path, args.profiles) if args.profiles else traces.default_folders())
            out = write_page(
                gathered, target, state=args.state, cell=args.cell and choice.cell, compare=sets, drawn=drawn
            )  # fmt: skip
        if left := gathered.left():
            print(f"{left}: the end of the page, or --show left", file=sys.stderr)
        print(f"report: {out.resolve()} ({len(gathered.points)} measurements, {out.stat().st_size / 1e6:.1f} MB)")
    return 0


def _writable(args: argparse.Namespace, page: bool) -> None:
    """Refuses before anything is read what could not be written."""
    if page:
        check_file(args.out or DEFAULT_OUT, "--out")
    if args.data:
        check_file(args.data, "--data")
    if args.pictures:
        check_folder(args.pictures, "--pictures")


def _installed(charts: bool, parquet: bool) -> None:
    """Refuses before anything is printed what a package is missing for."""
    needed = [("altair", "altair"), ("vl_convert", "vl-convert-python")] if charts else []
    for module, package in [*needed, *([("pyarrow", "pyarrow")] if parquet else [])]:
        if importlib.util.find_spec(module) is None:
            raise UserError(f"the report needs the package {package}, which is not installed: {install('lab')}.")


# ---------------------------------------------------------------- what was asked for
def _gathered(args: argparse.Namespace) -> tuple[Gathered, tuple[str, str] | None]:
    """Everything that was read, and the names of the two sets of --compare."""
    from mla_var3.lab.report.gather import arrange, gather

    if not args.compare:
        return gather(args.files), None
    given = [Path(text) for text in args.compare]
    if not any(path.exists() for path in given):
        found = gather(args.files)
        first, second = (_set(text, found) for text in args.compare)
        return found, (first, second)
    for path in given:
        if not path.exists():
            raise UserError(f"there are no records at {path}: give two files or folders, or two sets of --show sets.")
    from mla_var3.record import load

    # Two files may hold records of one day and one machine: here the files are the sets.
    names = [path.stem for path in given] if given[0].stem != given[1].stem else [str(path) for path in given]
    if names[0] == names[1]:
        raise UserError("--compare has the same records twice: give two different files or folders.")
    by_file: list[list[Point]] = []
    problems: list[str] = []
    for path, name in zip(given, names, strict=True):
        loaded = load(path)
        problems += loaded.problems
        by_file.append([dataclasses.replace(p, set=name) for p in arrange(loaded.records).points])
    both = [load(path).records for path in given]
    result = arrange([record for records in both for record in records], problems)
    newest = {p.record.id for p in result.newest}
    result.points = [dataclasses.replace(p, newest=p.record.id in newest) for points in by_file for p in points]
    result.files = [str(path) for path in given]
    return result, (names[0], names[1])


def _set(text: str, gathered: Gathered) -> str:
    """The one record set whose name holds `text`."""
    found = [name for name in gathered.sets if text in name]
    if len(found) == 1:
        return found[0]
    problem = "names no record set" if not found else f"names {len(found)} record sets"
    raise UserError(
        f"--compare {text!r} {problem}; there are: {'; '.join(gathered.sets)}. A file or folder does as well."
    )


def _choice(args: argparse.Namespace, gathered: Gathered, sets: tuple[str, str] | None) -> Choice:
    from mla_var3.lab.naming import listed
    from mla_var3.lab.report.answers import by_cell, designs
    from mla_var3.lab.report.export import Choice

    device = args.device or gathered.devices[0]
    if device not in gathered.devices:
        raise UserError(f"no record of device {device!r}: {nearest(device, gathered.devices)}.")
    mine = [p for p in gathered.newest if p.record.device == device]
    blocks = by_cell(mine)
    if args.cell and args.cell not in blocks:
        raise UserError(f"no record of cell {args.cell!r} on {device}: {nearest(args.cell, blocks)}.")
    most = max(blocks, key=lambda name: (len(blocks[name]), listed(blocks[name][0].problem)))
    known = designs(mine)
    design = args.design or (known[0] if known else "flash_mla")
    if args.design and design not in known:
        raise UserError(f"no record of design {design!r}: {nearest(design, known)}.")
    languages = sorted({p.language for p in mine})
    for name in args.languages or ():
        if name not in languages:
            raise UserError(f"no record of language {name!r}: {nearest(name, languages)}.")
    first, second = args.languages or ("cutile-dsl", "cute-dsl")
    return Choice(device, args.state, args.cell or most, design, (first, second), sets)


# ---------------------------------------------------------------- on the terminal
def show(names: list[str], gathered: Gathered, choice: Choice) -> None:
    """Prints the tables of `SHOWS` that were asked for."""
    from mla_var3.lab.report import answers, sources, terminal
    from mla_var3.lab.report.tables import show as put

    state, device = choice.state, choice.device
    mine = [p for p in gathered.newest if p.record.device == device]
    for name in dict.fromkeys(names):
        if name == "map":
            put(terminal.regime_map(answers.winners(mine, state), device, state))
        elif name == "dispatch":
            put(terminal.picks(answers.picks(mine, state), device, state))
        elif name == "cell":
            put(terminal.cell([p for p in mine if p.cell == choice.cell], device, state))
        elif name == "ladder":
            found = answers.ladders(mine, choice.design, choice.cell, state)
            if not found:
                raise UserError(
                    f"no version of {choice.design} was timed on {choice.cell} in {state}: give another --cell."
                )
            put(terminal.ladder(found, sources.entries()))
        elif name == "languages":
            pairs = answers.pairs(mine, *choice.pair, state)
            if not pairs:
                raise UserError(
                    f"no cell was timed in both {choice.pair[0]} and {choice.pair[1]} on {device} in {state}."
                )
            for table in terminal.languages(pairs, *choice.pair, state):
                put(table)
        elif name == "compare":
            if choice.compare is None:
                raise UserError(
                    "--show compare needs two record sets: add --compare BEFORE AFTER (--show sets lists them)."
                )
            before, after = ([p for p in gathered.points if p.set == s] for s in choice.compare)
            put(terminal.comparison(answers.compare(before, after, state), *choice.compare, state))
        elif name == "sets":
            for s in gathered.sets:
                print(f"{s}: {sum(p.set == s for p in gathered.points)} timed records")
        else:
            put(terminal.left_out(gathered.left_out))
