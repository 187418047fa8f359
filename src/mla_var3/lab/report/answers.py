"""What the report answers, as plain values: winners, contenders of a cell, ladders, language pairs, what moved.

The terminal tables and the pictures are made from these. The page computes the map and the comparison again in the
browser, because filters change them; a test holds both to the same figures.
"""

from __future__ import annotations

import functools
import math
import statistics
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_var3 import paths
from mla_var3.catalogue import spoken
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.files import read_yaml
from mla_var3.lab.naming import listed
from mla_var3.lab.report.gather import Point
from mla_var3.record import geometric_mean
from mla_var3.workload import DEFAULT, Problem
from mla_var3.workload.decode import MlaProblem

if TYPE_CHECKING:
    from mla_var3.dispatch import Choice


@dataclass(frozen=True)
class Winner:
    """A cell of the regime map: what it answers (`catalogue.spoken.answer`). ours: our fastest version that is still
    here; where none of them was measured, the fastest retired one. peer: the fastest library. best: the faster of the
    two. vs_peer: the library's time over ours. tie: the p10..p90 ranges of the two overlap. mixed: they are of two
    runs. drawn: only experiments that draw their problems at random measured the cell.

    next: our second version there, among those that count as ours does. margin: its time over ours, less 1.
    """

    best: Point
    ours: Point | None
    next: Point | None
    margin: float | None
    peer: Point | None
    vs_peer: float | None
    tie: bool
    mixed: bool
    drawn: bool
    contenders: int


def by_cell(points: Iterable[Point]) -> dict[str, list[Point]]:
    blocks: dict[str, list[Point]] = {}
    for point in points:
        blocks.setdefault(point.cell, []).append(point)
    return blocks


@functools.cache
def drawn() -> frozenset[str]:
    """Names of the experiments whose problems are drawn at random (`draw` of conf/experiment)."""
    files = ((name, paths.option_file("experiment", name)) for name in paths.options("experiment"))
    return frozenset(name for name, file in files if read_yaml(file).get("draw"))


def winners(points: Iterable[Point], state: str) -> list[Winner]:
    """One for each cell in which something was timed in that state. points: that speak, of one device. The fixed-split
    mode is no contender: it runs the same versions, and where it cuts nothing it is one of them."""
    found = []
    for block in by_cell(p for p in points if p.kernel != "fixed_split").values():
        of = {id(p.record): p for p in block}
        answer = spoken.answer([p.record for p in block], state)
        if answer is None:
            continue
        ours, second, peer, best = (
            None if r is None else of[id(r)] for r in (answer.ours, answer.next, answer.library, answer.best)
        )
        assert best is not None
        found.append(
            Winner(
                best=best,
                ours=ours,
                next=second,
                margin=ours.faster(second, state) - 1 if ours and second else None,
                peer=peer,
                vs_peer=answer.ratio,
                tie=bool(ours and peer and overlap(ours, peer, state)),
                mixed=bool(ours and peer and not answer.of_one_run),
                drawn=all(p.record.experiment in drawn() for p in block),
                contenders=sum(p.us(state) < math.inf for p in block),
            )
        )
    return sorted(found, key=lambda w: listed(w.best.problem))


def resting(found: Sequence[Winner]) -> str:
    """On what the cells of a map rest, in a sentence."""
    here = [w.ours for w in found if w.ours and w.ours.live]
    today = sum(p.today for p in here)
    said = f"{len(here)} of {len(found)} cells rest on versions that are in this checkout"
    return f"{said}, {today} of them on the code that these have today; the others' times are of retired versions."


# ---------------------------------------------------------------- the dispatcher
@dataclass(frozen=True)
class Pick:
    """What the dispatcher picks today for a cell. point: its newest measurement there, None where there is none. best:
    our fastest version there. loss: time of the pick over that of the best, less 1."""

    cell: str
    label: str
    point: Point | None
    best: Point
    loss: float | None


def picks(points: Iterable[Point], state: str) -> list[Pick]:
    """Today's table and today's versions, asked for each decode cell; times are those of the records. What a record
    says that the dispatcher took when it was measured plays no part. points: of one device."""
    found = []
    for cell, everything in by_cell(p for p in points if p.kernel != "fixed_split").items():
        runs, block = _runs(everything), [p for p in everything if not p.is_peer]
        of = {id(p.record): p for p in block if p.live}
        timed = [of[id(r)] for r in spoken.ranked([p.record for p in of.values()], state, runs)]
        choice = _choice(timed[0].problem, timed[0].record.device) if timed else None
        if choice is None:
            continue
        point = next((p for p in timed if p.name == choice.label), None)
        loss = timed[0].faster(point, state) - 1 if point else None
        found.append(Pick(cell, choice.label, point, timed[0], loss))
    return sorted(found, key=lambda pick: listed(pick.best.problem))


@functools.lru_cache(maxsize=4096)
def _choice(problem: Problem, key: str) -> Choice | None:
    """None for a workload, a device or a problem that the dispatcher has nothing for."""
    from mla_var3.dispatch import choose

    if problem.workload != DEFAULT or not isinstance(problem, MlaProblem):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a language that is not installed here
        try:
            return choose(problem, Device.get(key))
        except UserError:
            return None


def losses(found: Sequence[Pick]) -> str:
    """The dispatcher's picks in one sentence."""
    known = [p.loss for p in found if p.loss is not None]
    if not known:
        return "Of no cell is the time of what the dispatcher picks today known."
    text = f"In {len(known)} of {len(found)} cells the pick was measured: it is the fastest in "
    text += f"{sum(x <= 0 for x in known)}, and loses {100 * statistics.median(known):.1f} % in the median, "
    return text + f"{100 * max(known):.1f} % at most."


def overlap(a: Point, b: Point, state: str) -> bool:
    """Whether the p10..p90 ranges of two points touch, each as a share of its own limit where they are of two runs, to
    the digits that the page has of them."""
    one, two = a.stats(state), b.stats(state)
    if one is None or two is None:
        return False
    apart = a.record.run != b.record.run and a.limit(state) and b.limit(state)
    x, y = (rounded(a.limit(state) or 1.0), rounded(b.limit(state) or 1.0)) if apart else (1.0, 1.0)
    return rounded(one.p10) / x <= rounded(two.p90) / y and rounded(two.p10) / y <= rounded(one.p90) / x


def rounded(value: float) -> float:
    """Seven significant digits: more than any measurement carries, so that a difference of two ratios is right to five
    decimals, in half the bytes."""
    return float(f"{value:.7g}")


# ---------------------------------------------------------------- roofline
@dataclass(frozen=True)
class Roof:
    """tflops: the flat part. gbps: the slope. source: where the two are from."""

    kind: str
    tflops: float
    gbps: float
    source: str

    def at(self, intensity: float) -> float:
        """TFLOP/s at so many FLOPs a byte."""
        return min(self.tflops, intensity * self.gbps / 1e3)


def roofs(points: Sequence[Point], device: str, state: str) -> list[Roof]:
    """Measured: the median of the limits of the runs. Data sheet: of `devices.json`, where the device is known."""
    limits = [
        x for p in points if p.record.device == device and p.record.limits and (x := getattr(p.record.limits, state))
    ]
    found = []
    if limits:
        tflops = statistics.median(x.matmul_tflops for x in limits)
        gbps = statistics.median(x.read_gbps for x in limits)
        found.append(Roof("measured", tflops, gbps, f"median of {len(limits)} records' own limits, {state}"))
    try:
        known = Device.get(device)
    except UserError:
        return found
    if known.tflops.get("bf16") and known.hbm_gbps:
        source = known.sources.get("tflops.bf16", "devices.json")
        found.append(Roof("data sheet", float(known.tflops["bf16"] or 0), float(known.hbm_gbps), source))
    return found


# ---------------------------------------------------------------- ladder
@dataclass(frozen=True)
class Step:
    """A version on one cell. gain: how many times as fast it is as the one before. mean, cells: the geometric mean of
    that over all cells that both were timed in, and their number."""

    point: Point
    gain: float | None
    mean: float | None
    cells: int


@dataclass(frozen=True)
class Ladder:
    """Versions of a design in one language on one cell, the fastest library there, and the limit (microseconds)."""

    design: str
    language: str
    cell: str
    state: str
    steps: list[Step]
    peer: Point | None
    limit: float | None


def _fastest(points: Iterable[Point], state: str) -> dict[tuple[int, str], Point]:
    """(version, cell) -> its fastest point."""
    groups: dict[tuple[int, str], list[Point]] = {}
    for p in points:
        if p.us(state) < math.inf:
            groups.setdefault((p.record.kernel.version, p.cell), []).append(p)
    return {key: first for key, some in groups.items() if (first := _first(some, state))}


def _first(points: Sequence[Point], state: str, runs: Collection[str] = ()) -> Point | None:
    """The fastest version of points of one cell; a retired one only where no other was timed. runs: as of `ranked`."""
    of = {id(p.record): p for p in points}
    return next((of[id(r)] for r in spoken.ranked([p.record for p in points], state, runs)), None)


def _runs(points: Iterable[Point]) -> set[str]:
    return spoken.library_runs(p.record for p in points)


def designs(points: Iterable[Point]) -> list[str]:
    """Designs that are not a library's, those with the most versions first."""
    versions: dict[str, set[tuple[str, int]]] = {}
    for p in points:
        if not p.is_peer:
            versions.setdefault(p.design, set()).add((p.language, p.record.kernel.version))
    return sorted(versions, key=lambda name: (-len(versions[name]), name))


def ladders(points: Sequence[Point], design: str, cell: str, state: str) -> list[Ladder]:
    """One for each language that has the design on that cell. points: of one device, newest."""
    found = []
    mine = [p for p in points if p.design == design and not p.is_peer and p.kernel != "fixed_split"]
    block = [p for p in points if p.cell == cell and p.us(state) < math.inf]
    answer = spoken.answer([p.record for p in block], state)
    peer = next((p for p in block if answer and p.record is answer.library), None)
    for language in sorted({p.language for p in mine if p.cell == cell}):
        best = _fastest((p for p in mine if p.language == language), state)
        versions = sorted({version for version, _ in best})
        steps = []
        for version in versions:
            if (version, cell) not in best:
                continue
            before = [v for v in versions if v < version]
            earlier = best.get((max(before), cell)) if before else None
            point = best[version, cell]
            shared = [c for v, c in best if v == version and before and (max(before), c) in best]
            mean = geometric_mean([best[version, c].faster(best[max(before), c], state) for c in shared])
            steps.append(Step(point, point.faster(earlier, state) if earlier else None, mean, len(shared)))
        limit = next((x for s in steps if (x := s.point.limit(state))), None)
        if steps:
            found.append(Ladder(design, language, cell, state, steps, peer, limit))
    return found


# ---------------------------------------------------------------- languages
def pairs(points: Sequence[Point], first: str, second: str, state: str) -> list[tuple[Point, Point]]:
    """The fastest point of each of two languages, in every cell and design that both were timed in; a retired version
    only where no other of its language was timed."""
    found = []
    for block in by_cell(points).values():
        runs = _runs(block)
        for design in sorted({p.design for p in block}):
            some = [p for p in block if p.design == design]
            one, two = (_first([p for p in some if p.language == name], state, runs) for name in (first, second))
            if one and two:
                found.append((one, two))
    return sorted(found, key=lambda pair: listed(pair[0].problem))


#: Kinds of instructions, by the names that resources count. What is in none of them is "other".
INSTRUCTION_KINDS: dict[str, tuple[str, ...]] = {
    "tensor cores": ("HGMMA", "QGMMA", "HMMA", "UTCMMA"),
    "bulk copies": ("UTMALDG", "UTMASTG", "UBLKCP"),
    "global memory": ("LDG", "STG", "LDGSTS"),
    "shared memory": ("LDS", "STS", "LDSM", "STSM"),
    "spills": ("LDL", "STL"),
    "exponentials": ("MUFU.EX2",),
    "arithmetic": ("FMUL", "FADD", "FFMA", "HFMA2", "F2FP", "SHFL"),
    "waiting": ("BAR", "SYNCS", "WARPGROUP", "FENCE", "DEPBAR", "MEMBAR", "USETMAXREG"),
}


def instruction_mix(point: Point) -> dict[str, int]:
    """Instructions in the machine code by kind; empty where they were not counted."""
    counts = (point.record.resources or {}).get("instructions") or {}
    total = int(counts.get("total", 0))
    if not total:
        return {}
    mix = {kind: sum(int(counts.get(name, 0)) for name in names) for kind, names in INSTRUCTION_KINDS.items()}
    return {**mix, "other": max(0, total - sum(mix.values()))}


# ---------------------------------------------------------------- two sets of records
@dataclass(frozen=True)
class Move:
    """A contender in a cell, before and after. change: of time over limit, -0.1 is a tenth less. low, high: the least
    and the most change that the p10..p90 ranges allow. moved: zero is not between them."""

    before: Point
    after: Point
    change: float
    low: float
    high: float

    @property
    def moved(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Comparison:
    moves: list[Move]
    only_before: list[Point]
    only_after: list[Point]
    unlimited: int


def compare(before: Sequence[Point], after: Sequence[Point], state: str) -> Comparison:
    """Contenders that stand in both sets, each time divided by the limit of its own run; most changed first.

    So two days of one GPU compare as well as two GPUs: what changed is the kernel's distance from what the hardware
    did in that run. The newest of each contender and cell of a set counts.
    """
    one, two = ({(p.cell, p.name): p for p in some if p.us(state) < math.inf} for some in (before, after))
    moves, unlimited = [], 0
    for key in one.keys() & two.keys():
        a, b = one[key], two[key]
        la, lb, sa, sb = a.limit(state), b.limit(state), a.stats(state), b.stats(state)
        if la is None or lb is None or sa is None or sb is None:
            unlimited += 1
            continue
        change = (sb.median / lb) / (sa.median / la) - 1
        low, high = (sb.p10 / lb) / (sa.p90 / la) - 1, (sb.p90 / lb) / (sa.p10 / la) - 1
        moves.append(Move(a, b, change, low, high))
    moves.sort(key=lambda m: (not m.moved, -abs(m.change), m.before.cell, m.before.name))
    gone, come = ([p for k, p in x.items() if k not in y] for x, y in ((one, two), (two, one)))
    return Comparison(moves, gone, come, unlimited)
