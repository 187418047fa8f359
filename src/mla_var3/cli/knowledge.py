"""`mla-var3 knowledge check | find | compile`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from mla_var3.cli.arguments import Parser, add_verb, doing
from mla_var3.errors import UserError, nearest
from mla_var3.files import read_text

HELP = "what was learned: entries that fit a kernel; check and compile the pages"

VERBS = ("check", "find", "compile")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; 0 when it went well, 1 when something is to mend or nothing was found. Raises `UserError`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        raise UserError(f"knowledge has no verb {words[0]!r}: {nearest(words[0], VERBS)}.")
    arguments = _parser().parse_args(words)
    return int(arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mla-var3 knowledge",
        description="docs/knowledge: its form, its index, and what of it fits a kernel.",
        epilog="example: mla-var3 knowledge find --bound memory rows=16 tensor=35",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    check = add_verb(verbs, "check", "check form, links and quoted records of every page, and write the index")
    check.add_argument("--frozen", action="store_true", help="write nothing: a stale index is something to mend")
    check.set_defaults(run=_check)
    find = add_verb(
        verbs,
        "find",
        "list the entries that fit a kernel or have some words, the best first",
        epilog="example: mla-var3 knowledge find --bound memory rows=16 b=128 tensor=35 --language cute-dsl",
    )
    find.add_argument("facts", nargs="*", metavar="NAME=VALUE|WORD", help="known facts, or words to search for")
    find.add_argument("--bound", choices=["compute", "memory"], help="what the limit of the problem is")
    find.add_argument("--record", metavar="ID", help="take the facts of a record")
    find.add_argument("--kind", choices=["optimization", "anti-pattern"], help="only entries of this kind")
    find.add_argument(
        "--language", choices=["cute-dsl", "cutile-dsl", "triton"], help="only entries and pages that speak of it"
    )
    find.add_argument("--arch", metavar="ARCH", help="only entries for it, as sm_90a")
    find.set_defaults(run=_find)
    compile_ = add_verb(verbs, "compile", "compile the code blocks of pages, without a GPU")
    compile_.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="pages (default: all that have blocks)")
    compile_.set_defaults(run=_compile)
    for verb in (check, find, compile_):
        verb.add_argument("--root", type=Path, help="folder with docs/knowledge and results/; default: found from here")
    return parser


def _root(arguments: argparse.Namespace) -> Path:
    from mla_var3.lab.devlog.check import find_root

    return find_root(arguments.root)


def _check(arguments: argparse.Namespace) -> int:
    from mla_var3.lab.knowledge import index
    from mla_var3.lab.knowledge.check import check

    root = _root(arguments)
    with doing("comparing pages with the records they quote"):
        failures, pages = check(root)
    if not failures:
        built = index.build(pages, root)
        if arguments.frozen:
            failures = [
                f"{p.relative_to(root)}:1: is stale: mla-var3 knowledge check" for p in index.stale(built, root)
            ]
        else:
            for path in index.write(built, root):
                print(f"wrote {path.relative_to(root)}")
    for line in failures:
        print(line)
    if failures:
        print(f"knowledge check: {len(failures)} to mend", file=sys.stderr)
        return 1
    print(f"knowledge check: {len(pages)} pages, nothing to mend")
    return 0


def _find(arguments: argparse.Namespace) -> int:
    from mla_var3.lab.knowledge import find
    from mla_var3.lab.knowledge.triggers import Facts

    if arguments.arch is not None and not re.fullmatch(r"sm_\d+[af]?", arguments.arch):
        raise UserError(f"--arch {arguments.arch!r} is no architecture: write it as in --arch sm_90a.")
    index = find.load_index(arguments.root and arguments.root / "docs" / "knowledge")
    words = [text for text in arguments.facts if "=" not in text]
    facts = find.facts_of_words(arguments.bound, [text for text in arguments.facts if "=" in text])
    if arguments.record:
        from mla_var3.lab.devlog.check import load_records
        from mla_var3.lab.devlog.citations import find_record
        from mla_var3.lab.devlog.values import Unknown

        try:
            with doing("reading records"):
                record = find_record(load_records(_root(arguments))[0], arguments.record)
        except Unknown as error:
            raise UserError(f"{error}: give the id of a record that is there, or how it begins.") from error
        known = find.facts_of_record(record)
        groups = {name: {**known.groups.get(name, {}), **facts.groups.get(name, {})} for name in known.groups}
        facts = Facts(facts.bound or known.bound, groups)
    options = {"kind": arguments.kind, "language": arguments.language, "arch": arguments.arch}
    chosen = find.find(index, facts, words=words, **options)
    if not chosen and len(words) > 1 and (chosen := find.loosened(index, facts, words=words, **options)):
        print(f"no page has all of {', '.join(words)}; these have the most of them:", file=sys.stderr)
    for one in chosen:
        entry = one.entry
        print(f"{entry['kind']:13} {entry['title']}  docs/knowledge/{entry['path']}")
        if one.match:
            still = f"; to be looked at: {', '.join(one.match.open)}" if one.match.open else ""
            print(f"{'':13} {', '.join(one.match.held)}{still}")
    if not chosen:
        print("no entry fits these facts and words", file=sys.stderr)
    return 0 if chosen else 1


def _compile(arguments: argparse.Namespace) -> int:
    import subprocess

    from mla_var3.lab.knowledge.blocks import blocks
    from mla_var3.lab.knowledge.check import pages_of
    from mla_var3.lab.knowledge.page import read

    for path in arguments.pages:
        read_text(path)  # a page that is not there is told before the others are compiled
    paths = arguments.pages or [p for p in pages_of(_root(arguments)) if blocks(read(p)[0])[0]]
    # One process a page: it replaces the compilers' entry points, and an error of one page is no other page's.
    codes = []
    for path in paths:
        with doing(f"compiling the blocks of {path}"):
            words = [sys.executable, "-m", "mla_var3.lab.knowledge.compile_blocks", str(path)]
            codes.append(subprocess.run(words, check=False).returncode)
    return 1 if any(codes) else 0
