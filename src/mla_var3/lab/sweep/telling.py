"""What a sweep says: few lines of progress, a line a cell that answers, and everything else in a file."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mla_var3.files import write_whole
from mla_var3.kernel import registry
from mla_var3.toolchain.pool import milestone

if TYPE_CHECKING:
    from rich.table import Table

    from mla_var3.device import Device
    from mla_var3.record import Record
    from mla_var3.workload import Problem

#: What a record's reader has to see at once.
BAD = ("incorrect", "failed")

_live = False
_written: set[Path] = set()


def say(text: str = "", *, live: bool = False) -> None:
    """Progress: on standard error, so that tables can be piped. live: the next line takes its place, on a terminal."""
    global _live
    begin = "\r\x1b[2K" if _live else ""
    _live = live
    if live:
        text = text[: shutil.get_terminal_size().columns - 1]
    print(f"{begin}{text}", file=sys.stderr, end="" if live else "\n", flush=True)


class Telling:
    """Where a sweep's words go. verbose: everything to the terminal as well."""

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.details = io.StringIO()

    def step(self, number: int, total: int, text: str, *, at_once: bool = False) -> None:
        """One of `total` steps of progress. at_once: it is said whatever came before; of others a few stand for all,
        and on a terminal each is seen until the next."""
        if self.verbose or at_once or milestone(number, total):
            say(text)
        elif sys.stderr.isatty():
            say(text, live=True)

    def detail(self, table: Table | str) -> None:
        """A table for the file, and for the terminal where everything goes there."""
        from mla_var3.lab.report import tables

        caption = None if isinstance(table, str) else table.caption
        streams = [self.details, *([sys.stdout] if self.verbose else [])]
        for stream in streams:
            print(file=stream)
            if isinstance(table, str):
                print(table, file=stream)
            else:
                table.caption = caption  # `show` takes it off
                tables.show(table, stream)

    def write(self, path: Path) -> None:
        """Writes what `detail` was given, if that was anything, and says where it lies."""
        text = self.details.getvalue()
        if text:
            # Jobs of a multirun may share an experiment: each adds to the file that the first began.
            before = path.read_text(encoding="utf-8") if path.absolute() in _written and path.is_file() else ""
            write_whole(path, before + text)
            _written.add(path.absolute())
            say(f"details: {path}{'' if self.verbose else ' (or on the terminal, with -v)'}")


# ---------------------------------------------------------------- the answer
def last_run(records: Iterable[Record], here: set[str]) -> list[Record]:
    """Of a cell's records those of one run: the last one in which a version that is here and a library took turns, else
    a version that is here, else any other. Cards differ by more than versions do."""
    runs: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda r: r.at):
        runs.setdefault(record.run, []).append(record)

    def rank(run: list[Record]) -> tuple[bool, bool, str]:
        of_here = any(r.kernel.label in here and r.kernel.language != "peer" for r in run)
        return of_here, of_here and any(r.kernel.language == "peer" for r in run), run[-1].at

    return max(runs.values(), key=rank, default=[])


def fastest(records: Iterable[Record], state: str) -> Record | None:
    """The record with the least time in a state."""
    timed = [r for r in records if r.median(state) is not None]
    return min(timed, key=lambda r: r.median(state) or 0.0, default=None)


def answer(
    cells: Sequence[Problem], records: Sequence[Record], device: Device | None, title: str
) -> tuple[Table | None, Record | None]:
    """A row a cell: the fastest kernel that is here, its time, its share of the limit, and the fastest library, of one
    run; and the record that is furthest from its limit, for who wants to go on. (None, None) where nothing has a time.

    A retired version stands there only where none that is here has a time. device: whose limit stands beside a cell
    without a time.
    """
    from mla_var3.lab.report import tables
    from mla_var3.lab.report.gather import cell_name
    from mla_var3.workload import problem_from_record

    here = {kernel.label for kernel in registry.all_kernels()}
    mine = [r for r in records if r.status == "passed"]
    state = next((s for s in tables.STATES if any(r.median(s) is not None for r in mine)), None)
    if state is None:
        return None, None
    by_cell: dict[Problem, list[Record]] = {cell: [] for cell in cells}
    for record in mine:
        by_cell.setdefault(problem_from_record(record.problem), []).append(record)
    columns = ["cell", "kernel"], ["us", "of limit"], ["against the fastest library"]
    table = tables.new_table(f"{title}, {state}", *columns)
    worst: Record | None = None
    for cell, block in by_cell.items():
        run = last_run((r for r in block if r.median(state) is not None), here)
        own = [r for r in run if r.kernel.language != "peer"]
        ours = fastest((r for r in own if r.kernel.label in here), state) or fastest(own, state)
        library = fastest((r for r in run if r.kernel.language == "peer"), state)
        if ours is None:
            bound = device and tables.bound_us(cell, device, state)
            limit = f"the limit is {bound[0]:,.1f} us" if bound else ""
            table.add_row(cell_name(cell), "none was timed", "-", "-", limit)
            continue
        share = ours.of_limit(state)
        if share is not None and (worst is None or share < (worst.of_limit(state) or 0.0)):
            worst = ours
        against = "none was timed"
        if library is not None:
            against = f"{ours.speedup(library, state):.2f} times as fast as {library.kernel.label}"
        table.add_row(
            cell_name(cell), _name(ours, here), tables.plain(ours.median(state)),
            "-" if share is None else f"{100 * share:.0f} %", against,
        )  # fmt: skip
    return table, worst


def _name(record: Record, here: set[str]) -> str:
    """The version, with the knobs that were asked for; whether the dispatcher picked it makes it no other kernel."""
    from rich.markup import escape

    asked = record.requested
    knobs = " ".join(f"{k}={v}" for k, v in asked.items()) if isinstance(asked, Mapping) else ""
    notes = ["tuned" if asked == "tuned" else knobs, "" if record.kernel.label in here else "retired"]
    said = ", ".join(filter(None, notes))
    return escape(f"{record.kernel.label} ({said})" if said else record.kernel.label)


def then(worst: Record | None) -> list[str]:
    """What to try next, one command a line."""
    lines = [("mla-var3 report", "every record as a page")]
    if worst is not None:
        from mla_var3.workload import problem_from_record

        label = worst.kernel.label
        words = shlex.join(problem_from_record(worst.problem).options())
        lines += [
            (f"mla-var3 diagnose {label} {words}".rstrip(), "why it is no faster"),
            (f"mla-var3 clone {label}", "a copy of it, to be changed"),
        ]
    width = max(len(command) for command, _ in lines)
    return ["next:", *(f"  {command:{width}}  {what}" for command, what in lines)]


# ---------------------------------------------------------------- notes
def folded(notes: Iterable[tuple[str, str]]) -> list[str]:
    """(who, note) pairs, a line for each kind of note: notes that differ in figures alone are of one kind."""
    kinds: dict[str, dict[str, None]] = {}
    for who, note in notes:
        kinds.setdefault(re.split(r"[:(;]|\s\d", note)[0].strip(), {})[who] = None
    return [f"{kind}: {', '.join(names)}" for kind, names in kinds.items()]


def telling_refusals(records: Sequence[Record], ran: set[str]) -> list[Record]:
    """The refused records that the terminal shows: what went wrong, and versions that took none of the cells. A version
    that is not for some of them, or that lacks its language, is told apart."""
    return [
        r
        for r in records
        if r.status in (*BAD, "infeasible") or (r.status == "skipped" and r.kernel.label not in ran and not _missing(r))
    ]


def _missing(record: Record) -> bool:
    from mla_var3.kernel.registry import KernelId

    return bool(registry.missing(KernelId.from_record(record.kernel.model_dump())))
