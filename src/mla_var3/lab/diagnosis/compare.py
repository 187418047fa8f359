"""Two versions side by side."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mla_var3.record import as_ratio

if TYPE_CHECKING:
    from mla_var3.lab.diagnosis.evidence import Record
    from mla_var3.lab.diagnosis.versions import Version
    from mla_var3.toolchain.loops import Instruction, Loop

_CONTEXT = 3
#: Instructions of a loop that get a row: so many of a kind, or fewer where the versions differ.
_MANY, _FEW = 8, 3
_WIDTH = 52


# ---------------------------------------------------------------- tables
def render(
    versions: Sequence[Version], problem_label: str, device_name: str, records: Sequence[Record], problem: Any, key: str
) -> list[str]:
    """Everything but the SASS, as Markdown that lines up as text."""
    a, b = versions
    lines = [f"# {a.label} and {b.label}: {problem_label} on {device_name}"]
    for title, body in (
        ("Resources", _resources(versions)),
        ("Instructions", _instructions(versions)),
        ("Inner loops", _loops(versions)),
        ("Counters", _counters(versions)),
        ("Times", _times(versions, records, problem, key)),
    ):
        lines += ["", f"## {title}", "", *body]
    notes = [f"{v.label}: {v.why}" for v in versions if v.why] + [n for v in versions for n in v.evidence.notes]
    if notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in dict.fromkeys(notes))]
    return lines


def _table(versions: Sequence[Version], rows: Sequence[Sequence[Any]], what: str = "") -> list[str]:
    from mla_var3.lab.profiling.report import markdown

    return markdown((what or "what", *(v.label for v in versions), "change"), rows)


def differing(lines: Sequence[str]) -> list[str]:
    """Lines of `render` without the rows of tables that are the same in both, and without tables that have no other; a
    last line says how many there are."""
    equal = re.compile(r"\|\s*=\s*\|$")
    found: list[str] = []
    count = 0
    for number, line in enumerate(lines):
        if equal.search(line):
            count += 1
            continue
        if re.match(r"\| -+ \|", line) and found and found[-1].startswith("|"):
            rest = itertools.takewhile(lambda row: row.startswith("|"), lines[number + 1 :])
            if all(map(equal.search, rest)):
                found[-1] = "The same in both."
                continue
        found.append(line)
    return [*found, "", f"{count} rows that are the same in both are left out: diff.md has them."] if count else found


def _change(a: float | None, b: float | None) -> str:
    """From the first to the second."""
    if a is None or b is None:
        return ""
    if a == b:
        return "="
    return f"{b - a:+,.4g}" + (f" ({100 * (b / a - 1):+.0f} %)" if a else "")


def _resources(versions: Sequence[Version]) -> list[str]:
    rows: list[tuple[Any, ...]] = []
    knobs = dict.fromkeys(name for v in versions for name in v.tiling)
    for name in knobs:
        pair = [v.tiling.get(name, "-") for v in versions]
        rows.append((f"tiling {name}", *pair, "=" if pair[0] == pair[1] else ""))
    taken = [v.compiled.resources.to_record() if v.compiled else {} for v in versions]
    for key, title in (
        ("registers", "registers a thread"), ("threads", "threads a block"), ("smem", "shared memory (bytes)"),
        ("spill_bytes", "spills (bytes)"), ("stack_bytes", "stack (bytes)"), ("ctas_per_sm", "blocks an SM"),
        ("code_bytes", "machine code (bytes)"),
    ):  # fmt: skip
        values = [one.get(key) for one in taken]
        rows.append((title, *("-" if x is None else f"{x:,}" for x in values), _change(*values)))
    took = [None if v.compiled is None else v.compiled.seconds for v in versions]
    rows.append(("compiling all kernels (s)", *("-" if x is None else f"{x:.1f}" for x in took), _change(*took)))
    stages = [
        ", ".join(s.name for s in v.compiled.stages) if v.compiled and v.compiled.stages else "1" for v in versions
    ]
    rows.append(("kernels of a call", *stages, "=" if stages[0] == stages[1] else ""))
    rows.append(("code", *(v.compiled.code.digest if v.compiled and v.compiled.code else "-" for v in versions), ""))
    lines = [*_table(versions, rows, "of the main kernel"), "", _code(versions)]
    for v in versions:
        warnings = list(dict.fromkeys(v.compiled.warnings)) if v.compiled else []
        lines += ["", *(f"- {v.label}: {warning}" for warning in warnings)] if warnings else []
    return lines


def _code(versions: Sequence[Version]) -> str:
    """Whether both compile to the same code, and what differs otherwise; see `mla_var3.toolchain.digest`."""
    mine, other = (v.compiled.code if v.compiled else None for v in versions)
    if mine is None or other is None:
        return "Code: not compared, as one of them has no binary here."
    found = mine.differs_from(other)
    return f"Other code: {'; '.join(found)}." if found else "Same code: records of one are records of the other."


def _instructions(versions: Sequence[Version]) -> list[str]:
    counts = [v.compiled.resources.instructions if v.compiled else {} for v in versions]
    names = [n for n in dict.fromkeys(n for c in counts for n in c) if any(c.get(n) for c in counts)]
    names.sort(key=lambda n: (n == "total",))
    rows = []
    for name in names:
        pair = [c.get(name, 0) if c else None for c in counts]
        rows.append((name, *("-" if x is None else f"{x:,}" for x in pair), _change(*pair)))
    return [
        *_table(versions, rows, "in the code"),
        "",
        "Counted in the machine code of the main kernel, not as executed.",
    ]


def _loops(versions: Sequence[Version]) -> list[str]:
    count = max((len(v.loops) for v in versions), default=0)
    pairs = [tuple(v.loops[i] if i < len(v.loops) else None for v in versions) for i in range(count)]
    pairs = [p for p in pairs if any(loop and loop.tensor for loop in p)] or pairs[:1]
    lines: list[str] = []
    for number, (a, b) in enumerate(pairs, start=1):
        some = (a, b)
        rows: list[tuple[Any, ...]] = [
            ("from", *("-" if x is None else f"{x.start:#x}" for x in some), ""),
            ("to", *("-" if x is None else f"{x.end:#x}" for x in some), ""),
        ]
        for title, value in (
            ("instructions", lambda x: len(x.near)),
            ("products", lambda x: x.tensor),
            ("instructions a product", lambda x: round(len(x.near) / x.tensor, 1) if x.tensor else None),
            ("out of line (retries of waits)", lambda x: x.far),
        ):
            values = [None if x is None else value(x) for x in some]
            rows.append((title, *("-" if v is None else f"{v:,}" for v in values), _change(*values)))
        counts = [x.counts() if x else None for x in some]
        names = sorted({n for c in counts if c for n in c}, key=lambda n: -max(c[n] for c in counts if c))
        for name in names:
            pair = [None if c is None else c[name] for c in counts]
            most = max(v or 0 for v in pair)
            if most >= _MANY or (pair[0] != pair[1] and most >= _FEW):
                rows.append((f"  {name}", *("-" if v is None else f"{v:,}" for v in pair), _change(*pair)))
        lines += ["", *_table(versions, rows, f"loop {number}")] if lines else _table(versions, rows, f"loop {number}")
    said = "One pass may hold several tiles of keys; a kernel with roles has a loop for each role that multiplies."
    return [*lines, "", said] if lines else ["No loop was found in either."]


def _counters(versions: Sequence[Version]) -> list[str]:
    from mla_var3.lab.diagnosis.verdict import command
    from mla_var3.lab.profiling.modes.counters import COUNTERS

    with_counters = [v for v in versions if v.evidence.figures]
    if not with_counters:
        asks = " ".join(f"`mla-var3 profile {command(v.evidence)}`" for v in versions)
        return [f"Neither has a profile on this problem: {asks}"]
    rows = []
    for counter in COUNTERS:
        pair = [v.evidence.figures.get(counter.key) for v in versions]
        if any(x is not None for x in pair):
            unit = f" ({counter.unit})" if counter.unit else ""
            texts = ["-" if x is None else f"{x:,.{counter.digits}f}" for x in pair]
            rows.append((counter.title + unit, *texts, _change(*pair)))
    names = {n for v in versions for n, share in v.evidence.stalls.items() if share >= 2}
    for name in sorted(names, key=lambda n: -max(v.evidence.stalls.get(n, 0) for v in versions)):
        pair = [v.evidence.stalls.get(name) for v in versions]
        change = "" if None in pair else f"{pair[1] - pair[0]:+.1f} points"  # type: ignore[operator]
        rows.append((f"stall {name} (% of warp time)", *("-" if x is None else f"{x:.1f}" for x in pair), change))
    lines = _table(versions, rows, "of the longest kernel of a call")
    lines.append("")
    for v in versions:
        profile = v.evidence.profile
        if profile is None or not profile.has_counters:
            lines.append(f"- {v.label} has no profile on this problem: `mla-var3 profile {command(v.evidence)}`")
        else:
            lines.append(f"- {v.label}: {v.evidence.sources[0]}, source {profile.source_hash}{_older(v)}")
    return lines


def _older(version: Version) -> str:
    """Where the profiled binary is not the one that was compiled now: other files, or another compiler."""
    from mla_var3.catalogue import registry

    profile = version.evidence.profile
    if profile is None:
        return ""
    now = registry.source_hash(version.kernel)
    before = (profile.facts.get("resources") or {}).get("instructions")
    same = version.compiled is not None and before == version.compiled.resources.instructions
    if profile.source_hash == now:
        return (
            "" if same or version.compiled is None else ", compiled by others: its instruction counts differ from above"
        )
    what = "the instruction counts are the same" if same else "its instruction counts differ from those above"
    return f"; the version's files are now {now}, and {what}"


def _times(versions: Sequence[Version], records: Sequence[Record], problem: Any, key: str) -> list[str]:
    from mla_var3.lab.devlog import values
    from mla_var3.lab.diagnosis.versions import records_of

    first, second, same = records_of(versions, records, problem, key)
    pair = (first, second)
    if first is None and second is None:
        return ["Neither was timed on this problem and device: `mla-var3 bench` does, on a GPU."]
    rows = []
    for title, expression, scale, digits in (
        ("burst (us)", "burst", 1, 1), ("sustained (us)", "sustained", 1, 1),
        ("burst, of the run's limit (%)", "burst.of_limit", 100, 1),
        ("sustained, of the run's limit (%)", "sustained.of_limit", 100, 1), ("host (us)", "host", 1, 1),
    ):  # fmt: skip
        found: list[float | None] = []
        for record in pair:
            try:
                found.append(None if record is None else values.evaluate(expression, record, None).number * scale)
            except values.Unknown:
                found.append(None)
        if any(x is not None for x in found):
            texts = ["-" if x is None else f"{x:,.{digits}f}" for x in found]
            rows.append((title, *texts, _change(*found)))
    lines = [*_table(versions, rows, "recorded"), ""]
    for v, record in zip(versions, pair, strict=True):
        said = "no record" if record is None else f"record {record['id']} ({record['experiment']}, {record['at']})"
        lines.append(f"- {v.label}: {said}")
    if first is not None and second is not None:
        name = "speedup" if same else "limit_speedup"
        for state in values.STATES:
            try:
                # Of the second over the first: how much faster B is.
                ratio = values.evaluate(f"{state}.{name}", second, first).number
            except values.Unknown:
                continue
            how = "in one run" if same else "each time over the limit of its own run"
            lines.append(
                f"- {state}: {versions[1].label} is {as_ratio(ratio, 4)} times as fast as {versions[0].label}, {how}"
            )
    return lines


# ---------------------------------------------------------------- SASS
def legend(versions: Sequence[Version]) -> list[str]:
    a, b = versions
    return [
        f"Left {a.label} ({a.function[:40]}), right {b.label} ({b.function[:40]}).",
        "Marks: | differs, < only left, > only right. Registers, predicates and addresses are not compared.",
    ]


def side_by_side(versions: Sequence[Version]) -> list[str]:
    """Every line of the first inner loops, aligned by what the instructions do; empty when one has no loop."""
    pair = [v.loops[0] if v.loops else None for v in versions]
    if pair[0] is None or pair[1] is None:
        return []
    return [_row(a, mark, b) for a, mark, b in aligned(pair[0], pair[1])]


def aligned(a: Loop, b: Loop) -> Iterator[tuple[Instruction | None, str, Instruction | None]]:
    """(left, mark, right) of each row."""
    left, right = a.near, b.near
    match = difflib.SequenceMatcher(None, [x.normal() for x in left], [x.normal() for x in right], autojunk=False)
    for kind, i, j, k, m in match.get_opcodes():
        if kind == "equal":
            yield from ((x, " ", y) for x, y in zip(left[i:j], right[k:m], strict=True))
            continue
        for n in range(max(j - i, m - k)):
            x = left[i + n] if i + n < j else None
            y = right[k + n] if k + n < m else None
            yield x, "|" if x and y else "<" if x else ">", y


def _row(a: Instruction | None, mark: str, b: Instruction | None) -> str:
    def cell(one: Instruction | None) -> str:
        text = "" if one is None else f"{one.address:05x} {one.text}"
        return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"

    return f"{cell(a):{_WIDTH}} {mark} {cell(b)}".rstrip()


def folded(rows: Sequence[str]) -> list[str]:
    """Rows that differ, with some before and after; what is left out is counted."""
    differs = [row[_WIDTH + 1 : _WIDTH + 2] in ("|", "<", ">") for row in rows]
    keep = [any(differs[max(0, i - _CONTEXT) : i + _CONTEXT + 1]) for i in range(len(rows))]
    found: list[str] = []
    skipped = 0
    for row, wanted in zip(rows, keep, strict=True):
        if not wanted:
            skipped += 1
            continue
        if skipped:
            found.append(f"  ... {skipped} equal")
            skipped = 0
        found.append(row)
    return [*found, f"  ... {skipped} equal"] if skipped and found else found
