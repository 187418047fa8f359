"""Records for the report: what can be shown, and one sentence for everything that cannot.

Nothing is dropped in silence. A line that is no record, a record without a time, one that a newer one replaces, a
device that `devices.json` does not know, a cell whose contenders were measured in different runs: each becomes a
`LeftOut`, which the page and the terminal show.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mla_var3 import paths
from mla_var3.catalogue import ledger, spoken
from mla_var3.catalogue.spoken import DISPATCH, FIXED_SPLIT, PEER
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.lab import naming
from mla_var3.record import ASIDE, STATES
from mla_var3.workload import Problem, problem_from_record

if TYPE_CHECKING:
    from mla_var3.record import Record, Stats

_EXAMPLES = 3
_REASON_CHARS = 240


@dataclass(frozen=True)
class Point:
    """A timed record and what the report calls its parts.

    cell: a name that no other problem has. name: of the contender: the version, and how it was asked for. kernel: the
    version alone (`fixed_split` is a plan of its own). set: of records that belong together (`set_name`). newest: this
    record speaks for its contender in this cell (`catalogue.spoken`). live: it can still be run from here: a library,
    or a version that is not retired. today: it timed the code that is here.
    """

    record: Record
    problem: Problem
    cell: str
    name: str
    kernel: str
    set: str
    newest: bool = True
    live: bool = True
    today: bool = False

    @property
    def language(self) -> str:
        return self.record.kernel.language

    @property
    def design(self) -> str:
        return self.record.kernel.design

    @property
    def is_peer(self) -> bool:
        return self.language == PEER

    @property
    def shown(self) -> str:
        """`name`, and whether it is retired."""
        return self.name if self.live else f"{self.name} (retired)"

    def stats(self, state: str) -> Stats | None:
        return getattr(self.record.time_us, state, None)

    def us(self, state: str) -> float:
        """Median microseconds; infinite where the state was not measured, so that it loses every comparison."""
        stats = self.stats(state)
        return float(stats.median) if stats is not None else math.inf

    def step_us(self, state: str) -> float:
        """`us` with its share of what the calls of a step make once: by this, libraries and versions are compared."""
        us = self.record.in_a_step(state)
        return math.inf if us is None else us

    def faster(self, other: Point, state: str) -> float:
        """How many times as fast this one is as another, by the share of the limit of its own run each took."""
        ratio = self.record.limit_speedup(other.record, state)
        return math.nan if ratio is None else ratio

    def limit(self, state: str) -> float | None:
        """Microseconds that the hardware needs at least, from the same run."""
        return self.record.limit(state)

    def share(self, state: str) -> float | None:
        """Limit over time: 1 is as fast as the hardware allows."""
        return self.record.of_limit(state)

    def work(self) -> tuple[int, int]:
        """FLOPs and bytes of one call."""
        return self.record.work()


@dataclass(frozen=True)
class LeftOut:
    """What is not shown, or shown with a reservation. count: records (or cells). examples: where to look."""

    what: str
    count: int
    why: str
    examples: tuple[str, ...] = ()


@dataclass
class Gathered:
    """points: every timed record, oldest first. left_out: everything else, in words. files: that were read."""

    points: list[Point] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def newest(self) -> list[Point]:
        return [p for p in self.points if p.newest]

    def left(self) -> str:
        """How much is left out, in a sentence; empty where nothing is."""
        count, older = sum(line.count for line in self.left_out), len(self.points) - len(self.newest)
        if not count:
            return ""
        said = f"{count:,} records or cells are left out or shown with a reservation"
        return said + (f", {older:,} of them older records of what is shown" if older else "")

    @property
    def devices(self) -> list[str]:
        """Keys by number of points, most first."""
        return [key for key, _ in Counter(p.record.device for p in self.points).most_common()]

    @property
    def sets(self) -> list[str]:
        return list(dict.fromkeys(p.set for p in self.points))


# ---------------------------------------------------------------- names
def packages(record: Record) -> dict[str, str]:
    """Packages and driver that a record was measured with."""
    env = record.environment
    some: dict[str, str] = {}
    for group in ("packages", "bundle_packages"):
        some |= {str(k): str(v) for k, v in (env.get(group) or {}).items()}
    for name in ("driver", "cuda", "gpu"):
        if env.get(name):
            some[name] = str(env[name])
    return some


def set_name(record: Record) -> str:
    """Records that share device, GPU, driver, packages and day: `h200 2026-11-21 torch-2.11.0 3f2a`."""
    used = packages(record)
    digest = hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()[:4]
    torch = f" torch-{used['torch']}" if "torch" in used else ""
    return f"{record.device} {record.at[:10]}{torch} {digest}"


def command(record: Record, problem: Problem) -> str:
    """What measures this contender on this problem again, on the same kind of GPU."""
    word = DISPATCH if record.requested == DISPATCH else str(record.kernel.label)
    word = FIXED_SPLIT if record.picked_by == FIXED_SPLIT else word
    asked = record.requested if isinstance(record.requested, Mapping) else {}
    knobs = ",".join(f"{k}={v}" for k, v in asked.items())
    words = ["mla-var3", "bench", word, *naming.options(problem)]
    words += ["--tiling", knobs] if knobs else []
    words += ["--tune"] if record.requested == "tuned" else []
    return shlex.join(words)


# ---------------------------------------------------------------- reading
def default_files() -> list[Path]:
    """`results/` here and the shipped records, each once."""
    folders = [p.resolve() for p in (Path("results"), paths.shipped_results_dir()) if p.is_dir()]
    return list(dict.fromkeys(folders))


def gather(files: Iterable[Path | str] = ()) -> Gathered:
    """Reads record files or folders; by default those of `default_files`.

    Raises `UserError` when a path does not exist, and when there is nothing to read at all.
    """
    from mla_var3.record import load

    chosen = [Path(f) for f in files] or default_files()
    if not chosen:
        raise UserError("there is no results/ folder here: give record files, or run mla-var3 sweep first.")
    found = load(chosen)
    gathered = arrange(found.records, found.problems)
    gathered.files = [str(path) for path in chosen]
    return gathered


def arrange(records: Sequence[Record], problems: Sequence[str] = ()) -> Gathered:
    """Points of the records that have a time, and what is to be said about the others.

    problems: sentences about lines that are no records, as `load` gives them.
    """
    result = Gathered()
    if problems:
        result.left_out.append(_left("lines of record files", problems, "they are no records", problems))
    unreadable: list[str] = []
    untimed: dict[tuple[str, str], list[str]] = {}
    points: list[Point] = []
    seen: dict[str, Record] = {}
    twice: list[str] = []
    aside: dict[str, list[str]] = {}
    for record in sorted(records, key=lambda r: r.at):
        try:
            problem = problem_from_record(record.problem)
            cell = naming.cell_name(problem)
        except (UserError, TypeError, ValueError) as error:
            unreadable.append(f"{record.id}: {error}")
            continue
        if record.time_us is None or not any(getattr(record.time_us, s) for s in STATES):
            untimed.setdefault((record.status, record.kernel.label), []).append(_why(record))
            continue
        if record.experiment in ASIDE:
            aside.setdefault(record.experiment, []).append(f"{record.kernel.label} on {cell}")
            continue
        if record.id in seen and seen[record.id] == record:
            twice.append(record.id)
            continue
        seen[record.id] = record
        kernel = FIXED_SPLIT if record.picked_by == FIXED_SPLIT else str(record.kernel.label)
        today, live = spoken.standing(record) == ledger.SAME, spoken.live(record)
        points.append(
            Point(record, problem, cell, spoken.name(record), kernel, set_name(record), live=live, today=today)
        )
    if unreadable:
        result.left_out.append(_left("records", unreadable, "their problem makes no sense here", unreadable))
    result.points = _mark_newest(points)
    older = [f"{p.name} on {p.cell} of {p.record.at[:10]}" for p in result.points if not p.newest]
    if older:
        why = (
            "another one speaks for the contender in that cell: the newest of the code that is here, beside a library "
            "where there is one; comparisons of record sets still use them"
        )
        result.left_out.append(_left("timed records", older, why, older))
    if twice:
        result.left_out.append(_left("records", twice, "the same record stands in two files; it counts once", twice))
    for experiment, found in aside.items():
        why = f"they are of {experiment}, which {ASIDE[experiment]}"
        result.left_out.append(_left("timed records", found, why, found))
    result.left_out += _untimed(untimed)
    result.left_out += _reservations(result)
    return result


def _mark_newest(points: Sequence[Point]) -> list[Point]:
    keep = {id(record) for record in spoken.speaking(p.record for p in points)}
    return [replace(p, newest=id(p.record) in keep) for p in points]


def _why(record: Record) -> str:
    """Its reason, cut to a sentence, without what differs from one try to the next."""
    text = record.reason or ("no time was measured" if record.status == "passed" else "")
    text = re.sub(r" \(while checking case [^)]*\)|seed \d+", "", text)
    return text if len(text) <= _REASON_CHARS else text[: _REASON_CHARS - 1] + "…"


def _untimed(untimed: Mapping[tuple[str, str], list[str]]) -> list[LeftOut]:
    """One line for each status, kernel and reason; alike reasons are counted."""
    lines = []
    for (status, kernel), reasons in sorted(untimed.items()):
        counts = Counter(reasons)
        (first, _), others = counts.most_common(1)[0], len(counts) - 1
        why = f"{status}: {first}" if first else f"{status}, and not meant to be timed"
        more = tuple(reason for reason, _ in counts.most_common(_EXAMPLES + 1)[1:])
        lines.append(
            LeftOut(
                f"records of {kernel}", len(reasons), why + (f" (and {others} more reasons)" if others else ""), more
            )
        )
    return lines


def _reservations(result: Gathered) -> list[LeftOut]:
    """What is shown, but does not compare as well as it looks."""
    lines = []
    known = {device.key for device in Device.all()}
    for key in result.devices:
        if key not in known:
            mine = [p for p in result.points if p.record.device == key]
            why = f"device {key!r} is not in devices.json: shown without data-sheet figures"
            lines.append(LeftOut("records", len(mine), why, tuple(sorted({p.cell for p in mine}))[:_EXAMPLES]))
    runs: dict[tuple[str, str], set[str]] = {}
    for p in result.newest:
        runs.setdefault((p.record.device, p.cell), set()).add(p.set)
    mixed = [cell for (_, cell), sets in runs.items() if len(sets) > 1]
    if mixed:
        why = (
            "their contenders were measured in different runs; times are compared as they are, shares of the limit "
            "each with its own run's"
        )
        lines.append(_left("cells", mixed, why, mixed))
    unlimited = [f"{p.name} on {p.cell}" for p in result.newest if not any(p.limit(s) for s in STATES)]
    if unlimited:
        lines.append(
            _left("timed records", unlimited, "they carry no limit of their run: no share of it is shown", unlimited)
        )
    modified = [f"{p.name} on {p.cell}" for p in result.newest if p.record.source.dirty]
    if modified:
        why = "measured with files that differed from their commit"
        lines.append(_left("timed records", modified, why, modified))
    return lines


def _left(what: str, items: Sequence[str], why: str, examples: Sequence[str]) -> LeftOut:
    return LeftOut(what, len(items), why, tuple(dict.fromkeys(examples))[:_EXAMPLES])
