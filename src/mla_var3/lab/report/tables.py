"""Tables of records, resources and limits, readable on a terminal and in a pipe."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

from mla_var3.catalogue import registry, spoken
from mla_var3.lab.naming import cell_name, words
from mla_var3.lab.profiling.roofline import roofline as roofline_of
from mla_var3.names import by_number
from mla_var3.record import STATES, as_ratio, code_bytes, geometric_mean
from mla_var3.workload import problem_from_record

if TYPE_CHECKING:
    from rich.table import Column, Table

    from mla_var3.device import Device
    from mla_var3.record import Record
    from mla_var3.workload import Problem

#: Instructions that tell a fast path from a slow one, in the order they are shown.
INSTRUCTIONS = ("HGMMA", "HMMA", "UTMALDG", "LDGSTS", "LDL", "STL", "BAR")

_FOLDED = 40  # the least width of a column of sentences
_NAME = 24  # the least width of a column of cells' names, where they are broken
_PHRASE = 60  # they are broken before a phrase of this length in one of the last columns is
_WORD = 8  # the least width to which a head is broken
_WIDE = 1000  # a pipe has no width: tables take what they need, and nothing is cut


def show(table: Table, stream: TextIO | None = None, most: int | None = None) -> None:
    """Prints a table and the notes in its caption, each on a line of its own.

    Nothing is cut: in a pipe a table takes the width it needs, and on a terminal that is too narrow only the texts of
    the last columns are folded. most: columns of text that it may take there and in a pipe; what is wider goes on in
    the next line (`_fit`).
    """
    from rich.console import Console

    stream = stream or sys.stdout
    notes, table.caption = table.caption, None
    terminal = Console(file=stream, highlight=False).width if stream.isatty() else 0
    if most:
        _fit(table, max(most, terminal))
    if stream.isatty():
        Console(file=stream, highlight=False, width=max(terminal, _least_width(table))).print(table)
    else:
        width = max(most, _least_width(table)) if most else _WIDE
        target = Console(file=stream, width=width, force_terminal=False, no_color=True, highlight=False)
        with target.capture() as capture:
            target.print(table)
        print("\n".join(line.rstrip() for line in capture.get().splitlines()), file=stream)
    if notes:
        print(notes, file=stream)


def _widths(column: Column) -> tuple[int, int]:
    """Of the widest text of a column, and of its head."""
    from rich.text import Text

    head, *cells = (
        max(map(len, Text.from_markup(str(text)).plain.splitlines()), default=0)
        for text in (column.header, *column.cells)
    )
    return max(cells, default=0), head


def _least_width(table: Table, folded: int = _FOLDED) -> int:
    """Columns a terminal needs to show every column but the folding ones whole, and of those so many columns."""
    widths = [(column.no_wrap, max(_widths(column))) for column in table.columns]
    return 2 + sum(3 + (width if whole else min(width, folded)) for whole, width in widths)


def _fit(table: Table, most: int) -> None:
    """Has a table take no more than `most` columns of text: heads are broken between words, then names, of cells and of
    kernels, between words and before underscores: those of the widest column first."""
    if _least_width(table, _PHRASE) <= most:
        return
    for column in table.columns:
        text, head = _widths(column)
        if column.no_wrap and head > text:
            column.header = "\n".join(textwrap.wrap(str(column.header), max(text, _WORD), break_long_words=False))
    for names in sorted((c for c in table.columns if c.justify == "left" and c.no_wrap), key=_widths, reverse=True):
        over = _least_width(table, _PHRASE) - most
        if over > 0:
            room = max(_NAME, max(_widths(names)) - over)
            names._cells = [_broken(str(name), room) for name in names.cells]


def _broken(name: str, room: int) -> str:
    """Names of cells on lines of at most `room` characters, where their words are no longer."""
    lines = [""]
    for word in re.split(r"(?=[_ ])", name):
        if lines[-1] and len(lines[-1]) + len(word) > room:
            lines.append("  " + word.lstrip())
        else:
            lines[-1] += word
    return "\n".join(lines)


def new_table(title: str, left: Sequence[str], right: Sequence[str], last: Sequence[str] = ()) -> Table:
    """left, last: columns of text; right: columns of numbers, between them. Only the last ones may be folded."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    for name in last:
        table.add_column(name, overflow="fold")
    return table


def plain(value: Any, digits: int = 1) -> str:
    """A number with thousands separators, or "-" for None."""
    if value is None:
        return "-"
    return (
        f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    )


def kib(size: int | None) -> str:
    """Bytes in KiB."""
    return plain(None if size is None else size / 1024)


def escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


# ---------------------------------------------------------------- measured
#: Columns of a comparison; those of _CONTEXT are left out where every row has the same in them.
_NUMBERS = ("burst us", "% of limit", "sustained us", "% of limit", "TFLOP/s", "TB/s", "error")
_CONTEXT = ("version", "error", "recorded", "note")


def standing(record: Record, known: Mapping[str, str]) -> str:
    """`newest`, `kept` or `retired`; "" for a library."""
    return "" if record.kernel.language == "peer" else known.get(record.kernel.label, "retired")


def comparison(records: Sequence[Record], title: str = "Measured", *, dated: bool = False) -> Table:
    """One block a cell: its contenders, fastest first, beside the cell's limit in the same run.

    dated: adds when each was recorded, and whether the version is still here. Records without a time stand at the end
    of their block, with the reason. What every contender has alike stands under the table, in place of a column.
    """
    known = registry.standings() if dated else {}
    names = ["version", *_NUMBERS, "recorded", "note"] if dated else [*_NUMBERS, "note"]
    told = [
        [*([standing(r, known)] if dated else []), *_measured_cells(r), *([r.at[:10]] if dated else []), _note(r)]
        for r in records
    ]
    alike = {i: {row[i] for row in told} for i, name in enumerate(names) if name in _CONTEXT}
    dropped = {i: next(iter(values)) for i, values in alike.items() if len(told) > 1 and len(values) == 1}

    def kept(row: Sequence[str]) -> list[str]:
        return [cell for i, cell in enumerate(row) if i not in dropped]

    left = ["cell", "kernel", *kept(names[:1])] if dated else ["cell", "kernel"]
    last = [name for name in kept(names) if name in ("recorded", "note")]
    right = [name for name in kept(names) if name not in (*last, "version")]
    table = new_table(title, left, right, last)
    shared = [f"{names[i]} {value}" for i, value in dropped.items() if value not in ("", "-")]
    table.caption = f"The same in every row: {', '.join(shared)}." if shared else None
    for label, block in _by_cell(records).items():
        block.sort(key=lambda r: (r.median("burst") or r.median("sustained") or float("inf"), r.kernel.label))
        limits = next((r for r in block if r.limits is not None), None)
        if limits is not None:
            cells = [plain(limits.limit("burst")), "", plain(limits.limit("sustained")), "", "", "", ""]
            bound = getattr(limits.limits, "bound", None)
            row = [*([""] if dated else []), *cells, *([""] if dated else []), ""]
            table.add_row(label, f"limit, {bound}-bound" if bound else "limit", *kept(row))
        for index, record in enumerate(block):
            first = label if index == 0 and limits is None else ""
            row = [
                *([standing(record, known)] if dated else []),
                *_measured_cells(record),
                *([record.at[:10]] if dated else []),
                escaped(_note(record)),
            ]
            table.add_row(first, escaped(spoken.name(record)), *kept(row))
        table.add_section()
    return table


def _measured_cells(record: Record) -> list[str]:
    cells = []
    for state in STATES:
        time, limit = record.median(state), record.limit(state)
        cells += [plain(time), plain(100 * limit / time, 0) if time and limit else "-"]
    time = record.median("burst") or record.median("sustained")
    flops, moved = record.work()
    cells.append(plain(flops / time / 1e6, 0) if time else "-")
    cells.append(plain(moved / time / 1e6, 2) if time else "-")
    cells.append(f"{record.error.first:.1e}" if record.error is not None else "-")
    return cells


def _note(record: Record) -> str:
    if record.status == "passed":
        return ""
    return f"{record.status}: {record.reason}" if record.reason else record.status


def cell_of(record: Record) -> str:
    """The name of a record's cell, as the report has it: other problems have other names."""
    return cell_name(problem_from_record(record.problem))


def _by_cell(records: Iterable[Record]) -> dict[str, list[Record]]:
    blocks: dict[str, list[Record]] = {}
    for record in records:
        blocks.setdefault(cell_of(record), []).append(record)
    return blocks


def versus(records: Sequence[Record], first: str, second: str) -> Table:
    """Two contenders, cell by cell: their times, how many times as fast the first is, and the geometric means of that.

    records: that speak, one a contender and cell.
    """
    ratios = [f"{state}, times as fast" for state in STATES]
    columns = [f"{side} {state} us" for state in STATES for side in (first, second)]
    table = new_table(f"{first} against {second}: above 1 means that {first} is faster", ["cell"], [*columns, *ratios])
    found: dict[str, list[float]] = {state: [] for state in STATES}
    for label, block in _by_cell(records).items():
        by_name = {spoken.name(r): r for r in block}
        if first not in by_name or second not in by_name:
            continue
        one, two = by_name[first], by_name[second]
        times = [plain(r.median(state)) for state in STATES for r in (one, two)]
        faster = {state: one.limit_speedup(two, state) for state in STATES}
        table.add_row(label, *times, *(as_ratio(faster[state]) for state in STATES))
        for state, ratio in faster.items():
            found[state] += [ratio] if ratio is not None else []
    if any(found.values()):
        table.add_section()
        table.add_row("geometric mean", "", "", "", "", *(as_ratio(geometric_mean(found[s]), 4) for s in STATES))
    return table


# ---------------------------------------------------------------- compiled
@dataclass(frozen=True)
class Compiled:
    """A row of the resources table. resources: as in a record. seconds: of compiling, None where not known."""

    kernel: str
    cell: str
    device: str
    resources: Mapping[str, Any]
    seconds: float | None = None
    warnings: Sequence[str] = ()


def resources(records: Sequence[Record | Compiled], device: Device | None = None, title: str = "") -> Table:
    """Registers, shared memory, spills, occupancy and telling instructions of compiled records, against the limits.

    device: whose limits stand beside; None for records of several devices, which are then named in a column. What the
    compiler warned of stands under the table, by number.
    """
    notes: dict[str, int] = {}
    rows = _merged(records)
    mark = f" ({device.mark})" if device is not None and device.mark else ""
    table = new_table(
        (title or "Compiled") + mark,
        ["kernel", "cell", *([] if device is not None else ["device"])],
        ["regs", "smem KiB", "spill B", "stack B", "CTAs/SM", *INSTRUCTIONS, "code KiB", "compile s"],
        ["notes"],
    )
    for row in rows:
        used = row.resources
        counts = used.get("instructions") or {}
        smem = used.get("smem", 0)
        share = f" ({100 * smem / device.smem_per_block:.0f} %)" if device is not None else ""
        numbers = [notes.setdefault(text, len(notes) + 1) for text in row.warnings]
        table.add_row(
            escaped(row.kernel),
            escaped(row.cell),
            *([] if device is not None else [row.device]),
            _registers(used, device),
            f"{smem / 1024:.1f}{share}",
            plain(used.get("spill_bytes")),
            plain(used.get("stack_bytes")),
            plain(used.get("ctas_per_sm")),
            *[plain(counts.get(name, 0)) for name in INSTRUCTIONS],
            kib(code_bytes(used)),
            plain(row.seconds),
            " ".join(map(str, numbers)),
        )
    lines = [_limits_text(device)] if device is not None else []
    lines += [f"{number}: {text}" for text, number in notes.items()]
    table.caption = "\n".join(lines) or None
    return table


def _registers(used: Mapping[str, Any], device: Device | None) -> str:
    count, threads = used.get("registers", 0), used.get("threads") or 0
    if device is None or not threads:
        return str(count)
    return f"{count}/{device.max_registers(threads)}"


def _limits_text(device: Device) -> str:
    return (
        f"Limits of {device.key}: {device.max_regs_per_thread} registers a thread (after the slash: at most for its "
        f"threads), {device.smem_per_block / 1024:.0f} KiB of shared memory a block. A call of several kernels "
        "has a row for each, and in the row of its first one the time in which all of them compile."
    )


def _merged(records: Iterable[Record | Compiled]) -> list[Compiled]:
    """What has resources, as rows; cells that came out alike share one."""
    rows: dict[Any, tuple[Compiled, dict[str, None]]] = {}
    for record in records:
        for row in _stages(record if isinstance(record, Compiled) else _compiled(record)):
            key = (row.kernel, row.device, str(row.resources), str(row.warnings))
            rows.setdefault(key, (row, {}))[1][row.cell] = None
    merged = [replace(row, cell=", ".join(cells)) for row, cells in rows.values()]
    return sorted(merged, key=lambda row: by_number(row.kernel))


def _stages(row: Compiled | None) -> list[Compiled]:
    """A pipeline's kernels as rows of their own; those of one name, of which a call launches one, are numbered."""
    if row is None:
        return []
    stages = row.resources.get("stages") or []
    names = [stage["name"] for stage in stages]
    return [
        replace(
            row,
            kernel=f"{row.kernel}: {name}" + (f" {names[:i].count(name) + 1}" if names.count(name) > 1 else ""),
            resources=stage,
            seconds=None if i else row.seconds,
            warnings=stage.get("warnings") or [],
        )
        for i, (name, stage) in enumerate(zip(names, stages, strict=True))
    ] or [row]


def _compiled(record: Record) -> Compiled | None:
    if record.resources is None:
        return None
    took, said = record.compile_seconds, record.warnings or []
    return Compiled(spoken.name(record), record.problem_label, record.device, record.resources, took, said)


# ---------------------------------------------------------------- limits
def roofline(problems: Sequence[Problem], device: Device) -> Table:
    """The least time of each cell on a device: measured ceilings where there are any, and marked so."""
    table = new_table(
        f"Roofline on {device.name}: no kernel can be faster",
        ["cell"],
        ["GFLOP", "MB", "FLOP/B", "burst us", "sustained us"],
        ["bound"],
    )
    sources: dict[str, None] = {}
    for problem in problems:
        cost = problem.cost()
        lines = {state: roofline_of(cost.flops, cost.bytes, problem.dtype, device, state) for state in STATES}
        texts = [plain(line.limit_us) for line in lines.values()]
        kind = lines["burst"].bound if lines["burst"].limit_us else "-"
        for state, line in lines.items():
            sources[f"{state}: {line.source}" if line.limit_us else line.source] = None
        work = [plain(cost.flops / 1e9), plain(cost.bytes / 1e6), plain(cost.intensity, 0)]
        table.add_row(problem.label, *work, *texts, kind)
    table.caption = "\n".join(sources)
    return table


# ---------------------------------------------------------------- the rest
def checked(records: Sequence[Record], title: str = "Checked on the CPU") -> Table:
    """Results of runs that were judged and not timed."""
    table = new_table(title, ["kernel", "problem", "result"], ["error of out", "error of lse", "s"], ["note"])
    for record in records:
        table.add_row(
            escaped(record.kernel.label),
            _problem_text(record.problem),
            record.status,
            f"{record.error.first:.2e}" if record.error is not None else "-",
            f"{record.error.lse:.2e}" if record.error is not None and record.error.lse is not None else "-",
            plain((record.seconds or {}).get("check")),
            escaped(record.reason if record.status != "passed" else ""),
        )
    return table


def _problem_text(problem: Mapping[str, Any]) -> str:
    return escaped(words(problem_from_record(problem)))


def refused(records: Sequence[Record], title: str = "Not run") -> Table:
    """Points that gave no result, one row for each kernel and status, with the first reason."""
    table = new_table(title, ["kernel", "status", "cells"], [], ["reason"])
    rows: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        rows.setdefault((record.kernel.label, record.status), []).append(record)
    for (kernel, status), group in rows.items():
        names = list(dict.fromkeys(record.problem_label for record in group))
        others = len({record.reason for record in group}) - 1
        reason = group[0].reason + (f" (and {others} more reasons: see the records)" if others else "")
        table.add_row(
            escaped(kernel), status, ", ".join(names) if len(names) <= 2 else f"{len(names)} cells", escaped(reason)
        )
    return table
