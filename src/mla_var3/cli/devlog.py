"""`mla-var3 devlog new | check | cite | table | render`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mla_var3.cli.arguments import Parser, add_verb, doing
from mla_var3.errors import UserError, nearest

HELP = "start, check, cite and render entries of the development log"

VERBS = ("new", "check", "cite", "table", "render")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; 0 when it went well, 1 when `check` found something. Raises `UserError` for a mistake in what was
    asked for."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        raise UserError(f"devlog has no verb {words[0]!r}: {nearest(words[0], VERBS)}.")
    arguments = _parser().parse_args(words)
    from mla_var3.lab.devlog.check import find_root

    root = find_root(arguments.root)
    return int(arguments.run(arguments, root))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="mla-var3 devlog", description="One entry a version, checked against records.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    new = add_verb(verbs, "new", "start the entry of a version from its records")
    new.add_argument("kernel", help="language/design[_vN], as `mla-var3 list` shows it")
    new.add_argument(
        "--records",
        nargs="+",
        default=[],
        metavar="FILE|ID",
        help="the records that it quotes (default: the newest of each cell)",
    )
    new.add_argument("--force", action="store_true", help="replace an entry that exists by a new start")
    new.set_defaults(run=_new)
    says = "compare entries, README.md and docs/ with the records they cite, and see that what they name exists"
    check = add_verb(verbs, "check", says)
    check.add_argument(
        "paths", nargs="*", metavar="FILE|KERNEL", help="these pages or versions' entries alone; default: all of them"
    )
    check.set_defaults(run=_check)
    cite = add_verb(verbs, "cite", "print every figure of a record, with its line for a .records file")
    cite.add_argument("ids", nargs="+", metavar="ID", help="one record, or two to compare the first with the second")
    cite.set_defaults(run=_cite)
    table = add_verb(verbs, "table", "print a Markdown comparison of timed records, and its .records file")
    table.add_argument("files", nargs="*", type=Path, metavar="FILE", help="record files or folders; default: results/")
    table.add_argument("--cells", nargs="+", default=[], metavar="CELL", help="only these; wildcards allowed")
    table.add_argument("--kernels", nargs="+", default=[], metavar="KERNEL", help="only these; wildcards allowed")
    against = table.add_mutually_exclusive_group()
    against.add_argument(
        "--libraries", action="store_true", help="a row a cell: the fastest here against the fastest library"
    )
    against.add_argument(
        "--picks", action="store_true", help="a row a cell: what the dispatcher picks against the fastest library"
    )
    table.set_defaults(run=_table)
    render = add_verb(verbs, "render", "draw a design's history as one HTML page, with its ladder as a picture")
    render.add_argument("design", nargs="?", help="default: a page for each design that has entries")
    render.add_argument("--out", type=Path, metavar="DIR", help="where pages go (default out/devlog)")
    render.add_argument("--state", choices=["burst", "sustained"], default="burst", help="of the times (default burst)")
    render.set_defaults(run=_render)
    for verb in (new, check, cite, table, render):
        verb.add_argument("--root", type=Path, help="folder with devlogs/ and results/; default: found from here")
    return parser


def _new(arguments: argparse.Namespace, root: Path) -> int:
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.lab.devlog.new import new

    with doing("reading records"):
        path = new(KernelId.parse(arguments.kernel), root, arguments.records, force=arguments.force)
    print(f"{path}: fill what is marked TODO, then run: mla-var3 devlog check")
    return 0


def _check(arguments: argparse.Namespace, root: Path) -> int:
    from mla_var3.lab.devlog.check import check
    from mla_var3.lab.devlog.entry import path_of_label

    paths = [path_of_label(root, word) or Path(word) for word in arguments.paths]
    with doing("comparing entries and pages with the records they cite"):
        failures, notes = check(root, paths)
    for line in notes:
        print(f"note: {line}")
    for line in failures:
        print(line)
    if failures:
        print(f"devlog check: {len(failures)} to mend", file=sys.stderr)
        return 1
    print("devlog check: nothing to mend")
    return 0


def _cite(arguments: argparse.Namespace, root: Path) -> int:
    from mla_var3.lab.devlog import values
    from mla_var3.lab.devlog.check import load_records
    from mla_var3.lab.devlog.citations import find_record

    if len(arguments.ids) > 2:
        raise UserError("cite takes one record, or two to compare.")
    with doing("reading records"):
        records, _ = load_records(root)
    try:
        found = [find_record(records, name) for name in arguments.ids]
    except values.Unknown as error:
        raise UserError(f"{error}: give the id of a record that is there, or how it begins.") from error
    other = found[1] if len(found) == 2 else None
    name = found[0]["id"] + (f" vs {other['id']}" if other else "")
    expressions = values.names(two=other is not None)
    if other is None:
        expressions += [f"resources.{key}" for key in found[0]["resources"] or {}] + [
            f"error.{key}" for key in found[0]["error"] or {}
        ]
    for expression in expressions:
        try:
            value = values.evaluate(expression, found[0], other)
        except values.Unknown:
            continue
        unit = values.BASE_UNIT.get(value.dimension, "")
        if expression.partition(".")[2].startswith("of_"):
            unit = "%"
        space = "" if unit in ("", "x") else " "
        print(f"{f'{values.write(value, unit)}{space}{unit}':<20}{name} {expression}")
    return 0


def _table(arguments: argparse.Namespace, root: Path) -> int:
    from mla_var3.lab.devlog.evidence import apart
    from mla_var3.lab.devlog.tables import against_libraries, comparison
    from mla_var3.record import ASIDE, load

    with doing("reading records"):
        loaded = load(arguments.files or [root / "results"])
    for problem in loaded.problems:
        print(problem, file=sys.stderr)
    records = [r.model_dump() for r in loaded.records if arguments.files or r.experiment not in ASIDE]
    if arguments.libraries or arguments.picks:
        text = against_libraries(records, arguments.picks)
    else:
        text = comparison(records, arguments.cells, arguments.kernels)
    if not text and (asked := " and ".join([*arguments.cells, *arguments.kernels])) and not arguments.picks:
        raise UserError(f"no record with a time is of {asked}: mla-var3 compare names what there is.")
    if not text and arguments.picks:
        raise UserError("no record of what the dispatcher picks is there, beside a library: give others.")
    if not text:
        raise UserError("no record there has a time: give others, or measure with mla-var3 sweep on a GPU machine.")
    table, lines = apart(text)
    print(f"{table}\n\n{lines}", end="")
    return 0


def _render(arguments: argparse.Namespace, root: Path) -> int:
    from mla_var3.lab.report.history import render

    with doing("drawing pages from entries and records"):
        pages = render(root, arguments.design, arguments.out, arguments.state)
    for page in pages:
        print(f"{page.path}: {page.entries} entries, {page.pictures} pictures")
    return 0
