"""What a sweep says: few lines of progress, a line a cell that answers, and everything else in a file."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mla_var3.catalogue import ledger, registry, spoken
from mla_var3.files import write_whole
from mla_var3.lab.profiling.roofline import roofline
from mla_var3.record import STATES, as_ratio, geometric_mean
from mla_var3.toolchain.pool import milestone

if TYPE_CHECKING:
    from rich.table import Table

    from mla_var3.device import Device
    from mla_var3.record import Record
    from mla_var3.workload import Problem

#: What a record's reader has to see at once.
BAD = ("incorrect", "failed")

#: Standings of a time that is shown with a mark: its version has other code now.
OLDER = (ledger.OTHER,)

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
def answer(
    cells: Sequence[Problem],
    records: Sequence[Record],
    device: Device | None,
    title: str,
    wrong: Collection[str] = (),
) -> tuple[Table | None, Record | None]:
    """A row a cell: what it answers (`catalogue.spoken`), the kernel's time, its share of the limit and how it compares
    with the fastest library; and the record that is furthest from its limit, for who wants to go on. (None, None) where
    nothing has a time.

    records: whoever calls has left out those of experiments that time for something else. device: whose limit stands
    beside a cell without a time. wrong: labels of kernels that are wrong now: their recorded times are no answer.
    """
    from mla_var3.lab.naming import cell_name
    from mla_var3.lab.report import tables
    from mla_var3.workload import problem_from_record

    told = spoken.speaking(records, aside=True)
    state = next((s for s in STATES if any(r.median(s) is not None for r in told)), None)
    if state is None:
        return None, None
    by_cell: dict[Problem, list[Record]] = {cell: [] for cell in cells}
    for record in told:
        by_cell.setdefault(problem_from_record(record.problem), []).append(record)
    columns = ["cell", "kernel"], ["us", "of limit"], ["against the fastest library"]
    table = tables.new_table(f"{title}, {state}", *columns)
    worst: Record | None = None
    notes: dict[str, None] = {}
    left_out: set[str] = set()
    for cell, block in by_cell.items():
        left_out |= {r.kernel.label for r in block if r.kernel.label in wrong}
        found = spoken.answer(block, state, wrong)
        ours = found.ours if found else None
        if found is None or ours is None:
            cost = cell.cost()
            line = device and roofline(cost.flops, cost.bytes, cell.dtype, device, state)
            limit = f"the limit is {line.limit_us:,.1f} us" if line and line.limit_us else ""
            table.add_row(cell_name(cell), "none was timed", "-", "-", limit)
            continue
        share = ours.of_limit(state)
        if share is not None and (worst is None or share < (worst.of_limit(state) or 0.0)):
            worst = ours
        if share is not None and share > 1.0:
            notes[OVER_LIMIT] = None
        against = "none was timed"
        if found.library is not None:
            against = f"{as_ratio(found.ratio)} times as fast as {spoken.name(found.library)}"
            if not found.of_one_run:
                against += " ~"
                notes["~: of two runs, each compared with the limit of its own"] = None
        kernel = _name(ours)
        if spoken.standing(ours) in OLDER:
            kernel += " *"
            notes["*: timed with other code than this version has now"] = None
        table.add_row(
            cell_name(cell), kernel, tables.plain(ours.median(state)),
            "-" if share is None else f"{100 * share:.0f} %", against,
        )  # fmt: skip
    if left_out:
        notes[f"left out, for what they are now is wrong or does not compile: {', '.join(sorted(left_out))}"] = None
    table.caption = "\n".join(notes) or None
    return table, worst


#: Why a share of a limit may be more than all of it.
OVER_LIMIT = "over 100 %: a limit is what cuBLAS, or a kernel that only reads, reached in the same run"


def side_by_side(
    cells: Sequence[Problem], records: Sequence[Record], languages: Sequence[str], how: str, wrong: Collection[str] = ()
) -> Table | None:
    """A row a cell: the fastest version of each of two languages, and how many times as fast the second is; None where
    no cell has a time of either."""
    from mla_var3.lab.naming import cell_name
    from mla_var3.lab.report import tables

    first, second = languages
    told = [r for r in spoken.speaking(records, aside=True) if r.kernel.label not in wrong]
    if not {r.kernel.language for r in told} & {*languages}:
        return None
    state = next((s for s in STATES if any(r.median(s) is not None for r in told)), None)
    if state is None:
        return None
    title = f"{second} beside {first}, the fastest of each, {how}, {state}"
    columns = [f"{first} us", f"{second} us", f"{second}, times as fast"]
    table = tables.new_table(title, ["cell"], columns, [f"{first} / {second}"])
    ratios: list[float] = []
    for cell in cells:
        block = [r for r in told if r.problem == cell.to_record()]
        runs = spoken.library_runs(block)
        one, two = (
            next(iter(spoken.ranked((r for r in block if r.kernel.language == name), state, runs)), None)
            for name in languages
        )
        ratio = two.limit_speedup(one, state) if one and two else None
        ratios += [] if ratio is None else [ratio]
        times = [tables.plain(r.median(state)) if r else "-" for r in (one, two)]
        names = " / ".join(_name(r) if r else "none was timed" for r in (one, two))
        table.add_row(cell_name(cell), *times, as_ratio(ratio), names)
    mean = as_ratio(geometric_mean(ratios), 4)
    table.caption = (
        f"Geometric mean over the {len(ratios)} cells that both were timed in: {second} is {mean} times as fast as "
        f"{first}.\nRegisters, shared memory and instructions of both: mla-var3 report --show languages"
    )
    return table


def _name(record: Record) -> str:
    """The contender, and whether it is retired."""
    from rich.markup import escape

    said = spoken.name(record)
    return escape(said if spoken.live(record) else f"{said} (retired)")


def then(worst: Record | None, failed: Sequence[Record] = ()) -> list[str]:
    """What to try next, one command a line. failed: points that are wrong, or do not compile."""
    lines = [(f"mla-var3 check {label}", "what is wrong") for label in dict.fromkeys(r.kernel.label for r in failed)]
    lines.append(("mla-var3 report", "every record as a page"))
    if worst is not None:
        from mla_var3.lab import naming
        from mla_var3.workload import problem_from_record

        label = worst.kernel.label
        words = shlex.join(naming.options(problem_from_record(worst.problem)))
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
    """The refused records that the terminal shows: versions that took none of the cells. A version that is not for some
    of them, or that lacks its language, is told apart, and so is what went wrong."""
    return [
        r
        for r in records
        if r.status == "infeasible" or (r.status == "skipped" and r.kernel.label not in ran and not _missing(r))
    ]


def _missing(record: Record) -> bool:
    from mla_var3.catalogue.registry import KernelId

    return bool(registry.missing(KernelId.from_record(record.kernel.model_dump())))
