"""`mla-var3 diagnose`: the reason why a kernel is as fast as it is, and what has helped before."""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.cli.arguments import add_problem, doing, problem_for, says_problem
from mla_var3.errors import UserError

if TYPE_CHECKING:
    from mla_var3.lab.diagnosis.evidence import Evidence, Record
    from mla_var3.lab.diagnosis.verdict import Diagnosis
    from mla_var3.lab.knowledge.find import Found

HELP = "the reason why a kernel is slow, from profiles and records, and what has helped before"
EPILOG = """\
examples:
  mla-var3 diagnose cute-dsl/flash_mla_v23 --b 128                its best profile and newest record
  mla-var3 diagnose results/h200/profiles/ncu/triton-flash_mla    a profile
  mla-var3 diagnose 022ea24da681                                  a record
Counters come from profiles, times from records; what only a profile could tell is said, with the command that makes
one. Where registers are spilled is told by loop and source line: the version is compiled once more for that, and kept.
The next experiment has the gain that records predict. Entries of docs/knowledge are listed by their own trigger
conditions, those that most facts speak for first; what a version states that it has is not among them."""

#: Experiments that are named.
EXPERIMENTS = 3
#: Entries of each kind that are shown without --all.
SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", help="the folder of a profile, the id of a record, or a kernel")
    parser.add_argument("--device", metavar="KEY", help="with a kernel: whose profiles and records (default h200)")
    parser.add_argument(
        "--alone", action="store_true", help="with a record: leave out the profile of the same version and problem"
    )
    parser.add_argument("--all", action="store_true", help=f"every entry that fits, not {SHOWN} of each kind")
    parser.add_argument("--json", action="store_true", help="the same for programs")
    add_problem(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the diagnosis; 0. Raises `UserError` where nothing is known by that name."""
    from mla_var3.lab.diagnosis import spilled
    from mla_var3.lab.diagnosis.evidence import load_records
    from mla_var3.lab.diagnosis.verdict import diagnose

    with doing("reading records and profiles"):
        records = functools.cache(load_records)
        evidence = evidence_of(args, records)
    if evidence.resources.get("spill_bytes"):
        with doing("looking for the source lines that spill"):
            spilled.locate(evidence)
    diagnosis = diagnose(evidence, records=records())
    if args.json:
        print(json.dumps(to_record(diagnosis), indent=2))
        return 0
    print("\n".join(lines(diagnosis, None if args.all else SHOWN)))
    sys.stdout.flush()
    return 0


def evidence_of(args: argparse.Namespace, records: Callable[[], Sequence[Record]]) -> Evidence:
    """What the first argument means: an existing path, a kernel's label, else a record's id. records: reads them, which
    takes seconds; a mistake is told before."""
    from mla_var3.lab.diagnosis import evidence as found

    what, path = str(args.what), Path(args.what)
    if path.exists():
        _no_problem(args, "the folder of a profile")
        return found.of_profile(path, records())
    if "/" in what and not re.match(r"\.{0,2}/|.*/.*/", what):
        from mla_var3.catalogue.registry import KernelId

        device = args.device or _here()
        from mla_var3.device import Device

        kernel = KernelId.parse(what)
        problem = problem_for(args, [kernel]) if says_problem(args) else None
        return found.of_kernel(kernel, problem, Device.get(device).key, records())
    if re.fullmatch(r"[0-9a-f]{6,}", what):
        _no_problem(args, "a record")
        return found.of_record(what, records(), alone=args.alone)
    raise UserError(
        f"{what!r} is no folder here, no kernel (language/design[_vN]) and no record's id (6 or more hex digits)."
    )


def _here() -> str:
    from mla_var3.device import Device

    detected = Device.detect()
    return detected.key if detected is not None and detected.known else "h200"


def _no_problem(args: argparse.Namespace, what: str) -> None:
    if says_problem(args):
        raise UserError(f"{what} has its own problem: leave out --b and the others, or name a kernel.")


# ---------------------------------------------------------------- text
def lines(d: Diagnosis, most: int | None = SHOWN) -> list[str]:
    """The diagnosis as text; most: entries of each kind that are named, None for all."""
    from mla_var3.lab.diagnosis.verdict import readings

    e = d.evidence
    device = e.device.name if e.device else e.device_key
    found = [f"{e.label} {e.problem.label} on {device}", f"  {d.reason}", ""]
    found += [f"{d.kind}-bound" if d.kind != "unknown" else "bound: unknown"]
    found[-1] += (
        f" ({'by counters' if d.measured else 'by times alone' if e.times else 'by the work alone'}): {d.because}."
    )
    if e.bound is not None:
        found.append(f"The higher limit of the work itself: {e.bound}.")
    for time in e.times:
        share = "" if time.share is None else f", {time.share:.1f} % of the limit of {time.limit_us:,.1f} us"
        found.append(f"  {time.state:10}{time.us:,.1f} us{share} ({time.how})")
    rows = readings(e)
    if rows:
        found += ["", "What shows it:"]
        name = max(len(row.name) for row in rows)
        value = max(len(row.value) for row in rows)
        found += [f"  {r.name:{name}}  {r.value:>{value}}  {r.beside}".rstrip() for r in rows]
    if d.signs:
        found += ["", "What stands out, the weightiest first:"]
        for sign in d.signs:
            found.append(f"  - {sign.title}{'' if sign.settled else ' (suspected)'}: {sign.text}.")
    hot = e.profile.hot() if e.profile else []
    if hot:
        found += ["", "Where warps wait most:"]
        found += [f"  {h.share:4.1f} %  {h.where}  {h.source}  ({h.stall})" for h in hot[:5]]
    found += next_experiments(d)
    found += where_it_spills(e)
    if e.uses:
        found += ["", f"It states that it has: {', '.join(e.uses)}. These are not suggested."]
    found += _entries("What has helped before", d.optimizations, most)
    found += _entries("What to look out for", d.anti_patterns, most)
    said = devlog_says(e)
    if said:
        found += ["", *said]
    if d.open:
        found += ["", "Not known here:"]
        found += [f"  - {line}" for line in d.open]
    found += ["", f"From: {'; '.join(e.sources) or 'nothing recorded'}."]
    found += [f"Note: {note}." for note in e.notes]
    return found


def next_experiments(d: Diagnosis) -> list[str]:
    """What to try, the first line first: the gain that is predicted, and the records that it rests on."""
    from mla_var3.lab.diagnosis.experiments import can_change
    from mla_var3.record import as_ratio

    found = []
    for one in d.experiments[:EXPERIMENTS]:
        bound, left = "at most " if one.at_most else "", "" if one.us is None else f", to {one.us:,.1f} us"
        first, *others = one.records
        found.append(f"  - {one.what}")
        found.append(f"      predicted: {bound}{as_ratio(one.gain)}x in {one.state}{left}")
        found.append(f"      rests on record {first} (beside {', '.join(others)}): {one.why}")
    if not found and d.evidence.share is not None and can_change(d.evidence):
        found = ["  - no record predicts a gain of 1 % or more for this problem"]
    return ["", "Next experiment:", *found] if found else []


#: Source lines of spills that are named for each place.
_SPILLING = 5


def where_it_spills(e: Evidence) -> list[str]:
    """Bytes of spills by place and source line, where they were located."""
    from mla_var3.lab.diagnosis import spilled

    if not e.spills:
        return []
    found = ["", "Where it spills:"]
    for place, size, rows in spilled.by_place(e.spills):
        found.append(f"  {size:,} B {spilled.WORDS[place]}")
        for width, where, text in rows[:_SPILLING]:
            found.append(f"    {width:4,} B  {where or 'no source line in the binary'}  {text}".rstrip())
        if len(rows) > _SPILLING:
            rest = rows[_SPILLING:]
            found.append(f"    {sum(row[0] for row in rest):4,} B  on {len(rest)} more lines")
    if e.short_of_registers:
        found.append(f"  The compiler runs short of registers at {', '.join(e.short_of_registers)}.")
    return found


def _entries(title: str, entries: Sequence[Found], most: int | None) -> list[str]:
    if not entries:
        return []
    shown = entries if most is None else entries[:most]
    found = ["", f"{title}:"]
    for one in shown:
        found.append(f"  - {one.entry['title']} (docs/knowledge/{one.entry['path']})")
        if one.match is not None:
            still = f"; to be looked at: {', '.join(one.match.open)}" if one.match.open else ""
            found.append(f"      applies: {', '.join(one.match.held)}{still}")
        found.append(f"      {one.entry['summary']}")
        proof = evidence_line(str(one.entry["path"]))
        if proof:
            found.append(f"      {proof}")
    if len(shown) < len(entries):
        found.append(f"  and {len(entries) - len(shown)} more: --all")
    return found


def evidence_line(path: str) -> str | None:
    """The first item under "Evidence" of a page that has a record: what it did, in figures. None without one."""
    from mla_var3 import paths
    from mla_var3.lab.devlog.segments import without_comments
    from mla_var3.lab.knowledge.page import read

    root = paths.repo_root()
    page = None if root is None else root / "docs" / "knowledge" / path
    if page is None or not page.is_file():
        return None
    found, _ = read(page)
    section = next((s for s in found.sections if s.title == "Evidence"), None)
    rows = section.text.split("\n") if section else []
    numbered = enumerate(rows, start=section.line + 1 if section else 1)
    line = next((row[2:] for number, row in numbered if row.startswith("- ") and number in found.cited), None)
    return None if line is None else re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", without_comments(line))


def devlog_says(e: Evidence) -> list[str]:
    """The section "Bottleneck" of the version's entry: what its author found, with where it stands."""
    from mla_var3 import paths
    from mla_var3.lab.devlog.entry import entry_path, parse
    from mla_var3.lab.devlog.segments import without_comments

    root = paths.repo_root()
    path = None if root is None else entry_path(root, e.kernel)
    if root is None or path is None or not path.is_file():
        return []
    entry, _ = parse(path)
    text = " ".join(without_comments(entry.sections.get("Bottleneck", (0, ""))[1]).split())
    return [f"Its devlog ({path.relative_to(root)}) says of the bottleneck:", f"  {text}"] if text else []


# ---------------------------------------------------------------- for programs
def to_record(d: Diagnosis) -> dict[str, Any]:
    """The diagnosis as plain data."""
    from dataclasses import asdict

    from mla_var3.lab.diagnosis.verdict import readings

    e = d.evidence

    def entry(one: Found) -> dict[str, Any]:
        match = {"held": list(one.match.held), "open": list(one.match.open)} if one.match else None
        return {"path": one.entry["path"], "title": one.entry["title"], "match": match}

    return {
        "kernel": e.label,
        "problem": e.problem.to_record(),
        "device": e.device_key,
        "reason": d.reason,
        "bottleneck": d.kind,
        "because": d.because,
        "measured": d.measured,
        "bound_of_the_work": e.bound,
        "times": [{**asdict(time), "percent_of_limit": time.share} for time in e.times],
        "readings": [asdict(row) for row in readings(e)],
        "signs": [asdict(sign) for sign in d.signs],
        "spills": None if e.spills is None else [asdict(one) for one in e.spills],
        "uses": list(e.uses),
        "experiments": [asdict(one) for one in d.experiments],
        "optimizations": [entry(one) for one in d.optimizations],
        "anti_patterns": [entry(one) for one in d.anti_patterns],
        "open": list(d.open),
        "sources": e.sources,
        "notes": e.notes,
    }
