"""The dispatcher's table: what was measured of each version, with the ids of the records.

`table.json` beside this file is made by `build` from record files and shipped with the package; no one edits it. It
names versions because records do; nothing in the code does.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.device import Device
from mla_var3.dispatch import model
from mla_var3.errors import UserError
from mla_var3.workload import DEFAULT, problem_from_record
from mla_var3.workload.decode import MlaProblem

if TYPE_CHECKING:
    from mla_var3.record import Record

SCHEMA = 3
PATH = Path(__file__).with_name("table.json")

#: Never picked: torch is the oracle and reads lengths on the host, peers are other people's libraries.
NOT_SERVED = ("torch", "peer")
#: Experiments that time one version alone where others would be faster: beside nothing it would look like the choice.
NOT_COMPARED = ("mla_var6_plus", "tuning")

Timed = tuple[Any, str, Any, float]  # what, run, when, us

_COLUMNS = ("record", "us", "run", "code")  # of a version's points, beside the problem

_ASSUMED_FLOOR_US = 10.0  # of a device without a record: the least that any recorded call took above its limit


@dataclass(frozen=True)
class Point:
    """One measurement. us: geometric mean of the burst and the sustained median, for the limits of devices.json, as it
    would be on the chip of the newest run that can be told of (`levelled`). run: what it shares with the measurements
    that it took turns with; empty where it is not known. code: digest of what ran; empty where the record has none."""

    record: str
    problem: MlaProblem
    us: float
    run: str
    code: str = ""


@dataclass(frozen=True)
class Recipe:
    """A version with knobs. tiling: fields that were asked for ({}: the version's default for the problem).

    Knobs that were asked for belong to the sizes they were measured at (a number of splits, say), so such a recipe
    counts only there.
    """

    kernel: KernelId
    tiling: tuple[tuple[str, Any], ...] = ()
    points: tuple[Point, ...] = ()

    @property
    def label(self) -> str:
        knobs = ", ".join(f"{name}={value}" for name, value in self.tiling)
        return f"{self.kernel.label} ({knobs})" if knobs else self.kernel.label

    def speaks_of(self, problem: MlaProblem) -> bool:
        """Whether this recipe may be used for a problem: with asked-for knobs only close to where it was measured."""
        if not self.tiling:
            return True
        return any(_close(point.problem, problem) for point in self.points)


def _close(a: MlaProblem, b: MlaProblem) -> bool:
    same = a.problem_class() == b.problem_class()
    return same and all(abs(math.log(max(x, 1) / max(y, 1))) < 0.1 for x, y in ((a.b, b.b), (a.t, b.t)))


@dataclass(frozen=True)
class DeviceTable:
    """What was measured on one device. floor_us: least that a call took above the limit, of those that took twice as
    long as that: what a long call takes above it says how good a chip it ran on."""

    device: str
    floor_us: float = _ASSUMED_FLOOR_US
    recipes: tuple[Recipe, ...] = ()

    @functools.cached_property
    def hardware(self) -> Device:
        return Device.get(self.device)

    def points(self, recipe: Recipe) -> list[tuple[model.Place, float, str]]:
        """(place, ratio, record id) of a recipe, as `model.predict` takes them."""
        if recipe not in self._places:
            self._places[recipe] = [self._point(point) for point in recipe.points]
        return self._places[recipe]

    def _point(self, point: Point) -> tuple[model.Place, float, str]:
        limit = model.limit_us(point.problem, self.hardware)
        return model.place_of(point.problem, self.hardware), point.us / (limit + self.floor_us), point.record

    @functools.cached_property
    def _places(self) -> dict[Recipe, list[tuple[model.Place, float, str]]]:
        return {}

    def without(self, problem: MlaProblem) -> DeviceTable:
        """The same table as if nothing had been measured of this problem."""
        kept = []
        for recipe in self.recipes:
            points = tuple(p for p in recipe.points if p.problem != problem)
            if points:
                kept.append(Recipe(recipe.kernel, recipe.tiling, points))
        return DeviceTable(self.device, self.floor_us, tuple(kept))


@dataclass(frozen=True)
class Table:
    """All devices. held_out: what `hold_out` found when the table was made, by device."""

    devices: Mapping[str, DeviceTable] = field(default_factory=dict)
    held_out: Mapping[str, Any] = field(default_factory=dict)

    def nearest(self, device: Device) -> DeviceTable:
        """The device's own measurements, else those of one of its architecture, else of any; empty when there are none.

        Ratios to the limit carry over; absolute times do not.
        """
        own = self.devices.get(device.key)
        if own is not None:
            return own

        def same_arch(table: DeviceTable) -> bool:
            return table.hardware.arch == device.arch

        others = sorted(self.devices.values(), key=lambda t: (not same_arch(t), t.device))
        return others[0] if others else DeviceTable(device.key)

    def to_json(self) -> str:
        """Problems once, in rows, and each version's points in columns, a line each."""
        problems: dict[MlaProblem, int] = {}
        devices: dict[str, Any] = {}
        for key, table in sorted(self.devices.items()):
            recipes = []
            for recipe in table.recipes:
                columns = {name: [getattr(point, name) for point in recipe.points] for name in _COLUMNS}
                columns["problem"] = [problems.setdefault(point.problem, len(problems)) for point in recipe.points]
                recipes.append({"kernel": recipe.kernel.to_record(), "tiling": dict(recipe.tiling), **columns})
            devices[key] = {"floor_us": round(table.floor_us, 2), "recipes": recipes}
        rows = [problem.to_record() for problem in problems]
        names = list(dict.fromkeys(name for row in rows for name in row))
        data = {
            "schema": SCHEMA,
            "held_out": self.held_out,
            "problems": {"fields": names, "rows": [[row.get(name) for name in names] for row in rows]},
            "devices": devices,
        }
        # Innermost lists and objects on one line.
        text = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda m: re.sub(r"\s*\n\s*", " ", m[0]), json.dumps(data, indent=1))
        return text + "\n"

    @classmethod
    def from_json(cls, text: str) -> Table:
        """Inverse of `to_json`; a `UserError` when it is of another form."""
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise UserError(f"the table has the form {data['schema']} and this version reads {SCHEMA}: build it.")
            names = data["problems"]["fields"]
            problems = [problem_from_record(dict(zip(names, row, strict=True))) for row in data["problems"]["rows"]]
            devices = {}
            for key, entry in data["devices"].items():
                recipes = [_recipe(item, problems) for item in entry["recipes"]]
                devices[key] = DeviceTable(key, float(entry["floor_us"]), tuple(recipes))
            return cls(devices, data["held_out"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UserError(f"the dispatcher's table is damaged ({error}): run `mla-var3 dispatch build`.") from error


def _recipe(item: Mapping[str, Any], problems: Sequence[MlaProblem]) -> Recipe:
    columns = [item[name] for name in _COLUMNS]
    points = [
        Point(record, problems[index], float(us), run, code)
        for record, us, run, code, index in zip(*columns, item["problem"], strict=True)
    ]
    return Recipe(KernelId.from_record(item["kernel"]), tuple(item["tiling"].items()), tuple(points))


@functools.lru_cache(maxsize=4)
def load(path: Path | None = None) -> Table:
    """The shipped table, or one at another place."""
    target = path or PATH
    try:
        return Table.from_json(target.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{target} cannot be read ({error.strerror}): run `mla-var3 dispatch build`.") from error


# ---------------------------------------------------------------- making
def build(records: Iterable[Record], rejected: Collection[KernelId] = ()) -> Table:
    """A table from records: the newest passed one of each version, way of tuning, problem and device. One that took
    turns with other versions counts before one that was timed alone, which was seen 3 % slower at the power limit. A
    record of one state alone does not count: beside means of both, a cool chip's time would win.

    Times are brought to the limits of devices.json by the limits of their own run, so that runs on different days and
    chips can stand beside each other, and runs of the same problem that have versions in common by those (`levelled`).
    A version that the dispatcher had picked counts as any other where its knobs were the version's own; what it was
    measured with otherwise is left out. rejected: versions that are not to be picked, or are no longer here; their
    times still tell how much faster one chip was than another.
    """
    counted = [(record, record.run) for record in records if _counts(record)]
    own = {named(r): r.tiling for r, _ in counted if r.requested in (None, "default")}
    turns: dict[str, set[KernelId]] = {}
    for record, run in counted:
        turns.setdefault(run, set()).add(named(record))
    newest: dict[Any, tuple[bool, Any, Record, str, float]] = {}  # beside others, when
    timed: dict[Any, list[Timed]] = {}  # of a device and problem
    for record, run in counted:
        picked = getattr(record, "picked_by", None)
        if picked and (record.requested != "dispatch" or not _has(record, own.get(named(record)) or _default(record))):
            continue
        asked = () if picked else _asked(record)
        problem = _problem(record)
        key = (record.device, named(record), asked, problem)
        us = time_us(record, problem)
        timed.setdefault((record.device, problem), []).append((key, run, record.at, us))
        worth = (bool(run) and len(turns[run]) > 1, record.at)
        if key not in newest or worth >= newest[key][:2]:
            newest[key] = (*worth, record, run, us)
    grouped: dict[str, dict[tuple[KernelId, Any], list[Point]]] = {}
    above: dict[str, list[float]] = {}  # what short calls took above the limit
    level = {key: us for found in timed.values() for key, us in levelled(found).items()}
    for key, (_, _, record, run, own_us) in newest.items():
        device, kernel, asked, problem = key
        if kernel in rejected:
            continue
        us = level.get(key, own_us)
        limit = model.limit_us(problem, Device.get(device))
        grouped.setdefault(device, {}).setdefault((kernel, asked), []).append(
            Point(record.id, problem, round(us, 3), run, record.code["digest"] if record.code else "")
        )
        if us >= 2 * limit:
            above.setdefault(device, []).append(us - limit)
    tables = {}
    for device, groups in grouped.items():
        recipes = tuple(
            Recipe(kernel, asked, tuple(sorted(points, key=lambda p: (p.problem.label, p.record))))
            for (kernel, asked), points in sorted(groups.items(), key=lambda item: (item[0][0], str(item[0][1])))
        )
        floor = min(above.get(device, [_ASSUMED_FLOOR_US]))
        tables[device] = DeviceTable(device, round(max(1.0, floor), 2), recipes)
    return Table(tables)


def levelled(timed: Sequence[Timed]) -> dict[Any, float]:
    """Times of one problem as they would be in one run: the newest of those that are linked.

    A chip at its power limit is up to 6 % slower than another one, and the limits of memory do not show it: a version
    that was last measured on a good chip would stand before those that were faster beside it. So log us is taken as
    a[what] + b[run], fitted to all that was timed; runs are linked by what they have in common. What took no turn with
    anything (a run of its own, or none that is known) is not in the result.
    """
    by_run: dict[str, list[Timed]] = {}
    for entry in timed:
        by_run.setdefault(entry[1], []).append(entry)
    # What was timed, and its entries, of runs that have some of it in common.
    linked: list[tuple[set[Any], list[Timed]]] = []
    for run, entries in by_run.items():
        names = {what for what, *_ in entries}
        if not run or len(names) == 1:
            continue
        joined = [other for other in linked if not names.isdisjoint(other[0])]
        linked = [other for other in linked if names.isdisjoint(other[0])]
        linked.append((names.union(*(theirs for theirs, _ in joined)), sum((rows for _, rows in joined), entries)))
    return {what: us for _, entries in linked for what, us in _at_newest(entries).items()}


def _at_newest(timed: Sequence[Timed]) -> dict[Any, float]:
    """The fit of `levelled` to runs that are linked, at the newest one's level."""
    import numpy as np

    names = list(dict.fromkeys(what for what, *_ in timed))
    runs = list(dict.fromkeys(run for _, run, _, _ in timed))
    matrix = np.zeros((len(timed), len(names) + len(runs)))
    for i, (what, run, _, _) in enumerate(timed):
        matrix[i, names.index(what)] = matrix[i, len(names) + runs.index(run)] = 1.0
    fitted = np.linalg.lstsq(matrix, np.log([us for *_, us in timed]), rcond=None)[0]
    newest = max(timed, key=lambda entry: entry[2])[1]
    level = fitted[len(names) + runs.index(newest)]
    return {what: math.exp(fitted[i] + level) for i, what in enumerate(names)}


def _counts(record: Record) -> bool:
    from mla_var3.record import ASIDE

    known = any(device.key == record.device for device in Device.all())
    served = record.kernel.language not in NOT_SERVED and record.kernel.layer == "mla"
    plain = record.problem.get("workload", DEFAULT) == DEFAULT
    compared = record.experiment not in (*NOT_COMPARED, *ASIDE)
    times = record.time_us if record.status == "passed" else None
    both = times is not None and times.burst is not None and times.sustained is not None
    return bool(known and served and plain and compared and both)


def named(record: Record) -> KernelId:
    """The version that a record is of."""
    return KernelId.from_record(record.kernel.model_dump())


def _asked(record: Record) -> tuple[tuple[str, Any], ...]:
    if record.requested in (None, "default"):
        return ()
    fields = record.tiling if isinstance(record.requested, str) else record.requested
    return tuple(sorted((fields or {}).items()))


def _has(record: Record, knobs: Mapping[str, Any] | None) -> bool:
    """Whether a record was measured with these knobs; one that its version did not have then says nothing."""
    if knobs is None or record.tiling is None:
        return False
    return all(knobs.get(name, value) == value for name, value in record.tiling.items())


def _default(record: Record) -> dict[str, Any] | None:
    """A version's own knobs for a record's problem; None where the version is no longer here, or not installed."""
    kernel = named(record)
    if kernel not in registry.all_kernels() or registry.missing(kernel) is not None:
        return None
    plan = registry.get_plan(kernel)(_problem(record), None, Device.get(record.device))
    knobs: dict[str, Any] = plan.tiling.to_record()
    return knobs


def _problem(record: Record) -> MlaProblem:
    return problem_from_record(record.problem)


def time_us(record: Record, problem: MlaProblem) -> float:
    """Geometric mean of the states' medians; the part of it that the limit explains is taken at devices.json's."""
    logs = []
    for state in ("burst", "sustained"):
        stats, limits = getattr(record.time_us, state), getattr(record.limits, state, None)
        us = float(stats.median)
        if limits is not None:
            here = model.limit_us(problem, Device.get(record.device), (state,))
            us = max(us - limits.limit_us, 0.0) + here
        logs.append(math.log(us))
    return math.exp(sum(logs) / len(logs))
