"""The report's answers as terminal tables: map, cell, ladder, two languages, two record sets, what is left out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mla_var3.lab.report import answers, sources
from mla_var3.lab.report.answers import Comparison, Ladder, Pick, Winner, instruction_mix
from mla_var3.lab.report.gather import LeftOut, Point, command
from mla_var3.lab.report.rows import way
from mla_var3.lab.report.tables import escaped, kib, new_table, plain
from mla_var3.record import STATES, as_ratio, code_bytes, geometric_mean

if TYPE_CHECKING:
    from rich.table import Table

    from mla_var3.lab.report.sources import Entry


def _percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %"


def regime_map(found: Sequence[Winner], device: str, state: str) -> Table:
    """A row a cell: our fastest version, how far from the limit and from the best library; then our second."""
    right = ["us", "% of limit", "library / ours"]
    table = new_table(
        f"Fastest on {device}, {state}", ["cell", "ours"], right, ["best library", "our next", "behind by"]
    )
    for w in found:
        numbers = [plain(w.ours.us(state)), _percent(w.ours.share(state), 0)] if w.ours else ["-", "-"]
        numbers += [as_ratio(w.vs_peer) + (" ~" if w.tie else "")]
        table.add_row(w.best.cell, _name(w.ours), *numbers, _name(w.peer), _name(w.next), _signed(w.margin))
    table.caption = (
        "library / ours: the best library's time over that of our fastest version, both as in a step and each by the "
        "limit of its own run; over 1, ours is faster. ~: the p10..p90 ranges of the two touch.\n"
        f"{answers.resting(found)}"
    )
    return table


def _name(point: Point | None) -> str:
    return "-" if point is None else escaped(point.shown)


def picks(found: Sequence[Pick], device: str, state: str) -> Table:
    """A row a cell: what the dispatcher picks today, and what that loses against our fastest version there."""
    table = new_table(
        f"What the dispatcher picks on {device}, {state}", ["cell", "picked"], ["us", "loses"], ["fastest"]
    )
    for p in found:
        us = plain(p.point.us(state)) if p.point else "not measured"
        table.add_row(p.cell, escaped(p.label), us, _signed(p.loss), escaped(p.best.name))
    table.caption = answers.losses(found)
    return table


def cell(points: Sequence[Point], device: str, state: str) -> Table:
    """Every contender of a cell, fastest first: times with p10 and p90, the limit of its run, error, resources."""
    ordered = sorted(points, key=lambda p: (p.us(state), p.name))
    right = [f"{s} {what}" for s in STATES for what in ("us", "p10", "p90", "limit us", "% of limit")]
    right += ["error", "regs", "smem KiB", "spill B", "CTAs/SM", "code KiB", "compile s"]
    table = new_table(f"{ordered[0].cell} on {device}: fastest in {state} first", ["contender"], right, ["tiling"])
    for p in ordered:
        numbers = []
        for s in STATES:
            stats = p.stats(s)
            numbers += [plain(x) for x in ((stats.median, stats.p10, stats.p90) if stats else (None, None, None))]
            numbers += [plain(p.limit(s)), _percent(p.share(s), 0)]
        used = p.record.resources or {}
        smem = used.get("smem")
        numbers += [f"{p.record.error.first:.1e}" if p.record.error else "-", plain(used.get("registers"))]
        numbers += [
            plain(smem / 1024 if smem is not None else None),
            plain(used.get("spill_bytes")),
            plain(used.get("ctas_per_sm")),
            kib(code_bytes(used)),
            plain(p.record.compile_seconds),
        ]
        table.add_row(_name(p), *numbers, escaped(" ".join(f"{k}={v}" for k, v in (p.record.tiling or {}).items())))
    lines = [f"{p.name} [{p.record.id}]: {command(p.record, p.problem)}" for p in ordered]
    # Calls and input sets differ from contender to contender; how they were timed mostly does not.
    counts = re.compile(r"(?<=of )\d+ (?=calls)|(?<=over )\d+ (?=input)| of [\d.]+ MB")
    methods = dict.fromkeys(counts.sub("", p.record.method) for p in ordered if p.record.method)
    table.caption = "\n".join(["Measure again:", *lines, *(f"Timed by {method}." for method in methods)])
    return table


def ladder(found: Sequence[Ladder], entries: Mapping[str, Entry]) -> Table:
    """Versions of a design on a cell, by language: what each brought, and its devlog's verdict."""
    first = found[0]
    title = f"{first.design} on {first.cell}, {first.state}"
    right = ["us", "% of limit", "speedup over the one before", "the same over all cells", "over the best library"]
    table = new_table(title, ["version"], right, ["verdict", "devlog"])
    for lad in found:
        for step in lad.steps:
            p, state = step.point, lad.state
            entry = entries.get(p.record.kernel.label)
            mean = f"{as_ratio(step.mean, 4)} ({step.cells})" if step.mean else "-"
            against = p.faster(lad.peer, state) if lad.peer else None
            numbers = [plain(p.us(state)), _percent(p.share(state)), as_ratio(step.gain, 4), mean, as_ratio(against)]
            said = entry.line if entry else "no devlog entry here"
            table.add_row(_name(p), *numbers, escaped(said), entry.path if entry else "-")
        table.add_section()
    peer = f"{first.peer.name} {first.peer.us(first.state):.1f} us" if first.peer else "no library was timed here"
    table.caption = (
        f"Best library: {peer}. Limit: {plain(first.limit)} us. Over all cells: geometric mean (cells that have both)."
    )
    return table


def languages(found: Sequence[tuple[Point, Point]], first: str, second: str, state: str) -> list[Table]:
    """Two languages on the same cells: times and resources; then instructions and lines of code of the versions."""
    pairs = ["registers", "smem KiB", "spill B", "CTAs/SM", "instructions", "code KiB", "compile s"]
    table = new_table(
        f"{first} against {second}, {state}: the fastest of each",
        ["cell"],
        ["us", "us", "first / second", *pairs],
        ["versions"],
    )
    versions: dict[str, Point] = {}
    for a, b in found:
        values = []
        for p in (a, b):
            used = p.record.resources or {}
            smem = used.get("smem")
            total = (used.get("instructions") or {}).get("total")
            shown = (
                used.get("registers"),
                None if smem is None else round(smem / 1024),
                used.get("spill_bytes"),
                used.get("ctas_per_sm"),
                total,
            )
            more = [kib(code_bytes(used)), plain(p.record.compile_seconds)]
            values.append([*(plain(v) for v in shown), *more])
            versions.setdefault(p.record.kernel.label, p)
        both = [f"{x} / {y}" for x, y in zip(*values, strict=True)]
        times = [plain(a.us(state)), plain(b.us(state)), as_ratio(b.faster(a, state))]
        table.add_row(a.cell, *times, *both, escaped(f"{a.shown} / {b.shown}"))
    mean = geometric_mean([b.faster(a, state) for a, b in found])
    table.caption = f"Geometric mean of first / second over {len(found)} cells: {as_ratio(mean, 4)}."
    kinds = list(dict.fromkeys(kind for p in versions.values() for kind in instruction_mix(p)))
    mixes = new_table(
        "Instructions in the machine code, % by kind", ["version"], [*kinds, "lines of code"], ["counted on"]
    )
    changed = []
    for name, p in sorted(versions.items()):
        mix, source = instruction_mix(p), sources.source_of(name)
        total = sum(mix.values())
        share = [f"{100 * mix[kind] / total:.1f}" if total else "-" for kind in kinds]
        changed += [name] if source and source.hash != p.record.source.hash else []
        mixes.add_row(escaped(name), *share, plain(source.lines if source else None), p.cell)
    note = "Lines of what a version is made of in its language, without blank lines, comments and docstrings."
    mixes.caption = note + (f" Files changed since the record: {', '.join(changed)}." if changed else "")
    return [table, mixes]


def comparison(found: Comparison, before: str, after: str, state: str, most: int = 60) -> Table:
    """What moved beyond its own spread between two record sets, each time divided by the limit of its own run."""
    right = ["before us", "% of limit", "after us", "% of limit", "change", "low", "high"]
    moved = [m for m in found.moves if m.moved]
    table = new_table(f"{before} -> {after}, {state}", ["cell", "contender"], right, ["moved"])
    for m in found.moves[: max(most, len(moved))]:
        numbers = [
            plain(m.before.us(state)),
            _percent(m.before.share(state)),
            plain(m.after.us(state)),
            _percent(m.after.share(state)),
        ]
        table.add_row(
            m.after.cell, escaped(m.after.name), *numbers, _signed(m.change), _signed(m.low), _signed(m.high), way(m)
        )
    lines = [f"{len(moved)} of {len(found.moves)} moved beyond what their p10..p90 ranges allow."]
    lines += ["Change is of time over limit."]
    lines += [f"Only before: {len(found.only_before)}. Only after: {len(found.only_after)}."]
    lines += [f"Without a limit of their run, and so not compared: {found.unlimited}."] if found.unlimited else []
    table.caption = "\n".join(lines)
    return table


def left_out(lines: Sequence[LeftOut]) -> Table:
    """What the report does not show, or shows with a reservation."""
    table = new_table("Left out, or shown with a reservation", [], ["how many"], ["of what", "why", "for example"])
    for line in lines:
        table.add_row(str(line.count), escaped(line.what), escaped(line.why), escaped("; ".join(line.examples) or "-"))
    return table
