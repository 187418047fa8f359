"""Rows of the charts, from answers: what the page makes in the browser, for picture files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mla_var3.lab import naming
from mla_var3.lab.report.answers import Ladder, Move, Roof, Winner, instruction_mix
from mla_var3.lab.report.gather import Point
from mla_var3.record import as_ratio

if TYPE_CHECKING:
    from mla_var3.lab.report.legend import Kernel

Rows = list[dict[str, Any]]
PANEL = 4  # cells that a panel of a map has at least
FAR = 5.0  # contenders that take this many times the fastest's time are left out of a picture with a linear axis


def regime_map(found: Sequence[Winner], kernels: Mapping[str, Kernel]) -> Rows:
    """Tiles of the cells that a map shows (`on_map`)."""
    rows = []
    for w in on_map(found):
        problem = w.best.problem
        b, t = naming.place(problem)
        ahead = None if w.vs_peer is None else math.log2(w.vs_peer)
        against = "no library was measured" if w.vs_peer is None else f"ours {as_ratio(w.vs_peer)}× the best library"
        said = f"{w.best.cell}: {w.best.shown}, {against}"
        place = {"panel": naming.panel(problem), "b": b, "t": t, "tip": w.best.cell}
        rows.append({**place, "code": kernels[w.best.kernel].code, "ahead": ahead, "said": said})
    return rows


def map_legend() -> Rows:
    """Tiles as they are on a map, each with what it says."""
    from mla_var3.lab.report import charts

    steps = [charts.FAR_AHEAD**x for x in (-1, -0.5, 0, 0.5, 1)]
    return [*({"label": f"{as_ratio(x)}×", "ahead": math.log2(x)} for x in steps), {"label": "no lib", "ahead": None}]


def on_map(found: Sequence[Winner]) -> list[Winner]:
    """Cells in which a version that is still here was measured, or none of ours, and that were chosen: one that was
    drawn at random makes a row and a column of its own. Of these, cells whose panel has at least `PANEL` of them, or
    all where no panel has: a panel for each list of lengths or odd number of heads would hide the others. The rest
    stand in the table below."""
    chosen = [w for w in found if (w.ours is None or w.ours.live) and not w.drawn]
    sizes = Counter(naming.panel(w.best.problem) for w in chosen)
    return [w for w in chosen if sizes[naming.panel(w.best.problem)] >= min(PANEL, max(sizes.values()))]


def cell(points: Sequence[Point], kernels: Mapping[str, Kernel], state: str) -> tuple[Rows, list[Point]]:
    """(rows, contenders that are too slow for the picture). points: of one cell and device; of them those that are not
    retired, where there are any."""
    timed = sorted((p for p in points if p.stats(state)), key=lambda p: (p.us(state), p.name))
    timed = [p for p in timed if p.live] or timed
    near = [p for p in timed if p.us(state) <= FAR * timed[0].us(state)]
    rows: Rows = []
    for p in near:
        stats = p.stats(state)
        assert stats is not None
        times = {"us": stats.median, "p10": stats.p10, "p90": stats.p90, "limit": p.limit(state)}
        rows.append({"name": p.shown, "kernel": kernels[p.kernel].title, **times, **_said(p, state)})
    return rows, timed[len(near) :]


def _said(p: Point, state: str) -> dict[str, str]:
    return {"tip": p.record.id, "said": f"{p.shown} on {p.cell}: {p.us(state):.1f} microseconds"}


def roofline(
    points: Sequence[Point], roofs: Sequence[Roof], kernels: Mapping[str, Kernel], state: str
) -> tuple[Rows, Rows]:
    """(points, lines of the roofs)."""
    rows: Rows = []
    for p in points:
        flops, moved = p.work()
        if p.stats(state) and flops > 0 and moved > 0:
            place = {"x": flops / moved, "y": flops / p.us(state) / 1e6}
            rows.append({**place, "kernel": kernels[p.kernel].title, "language": p.language, **_said(p, state)})
    lines: Rows = []
    if rows:
        low, high = min(r["x"] for r in rows) / 8, max(r["x"] for r in rows) * 8
        for roof in roofs:
            knee = roof.tflops * 1e3 / roof.gbps
            lines += [
                {"x": x, "y": roof.at(x), "kind": roof.kind} for x in sorted({low, min(max(knee, low), high), high})
            ]
    return rows, lines


def ladder(found: Sequence[Ladder], state: str) -> tuple[Rows, Rows, list[Point]]:
    """(steps, marks for the library and the limit, versions that are too slow for the picture)."""
    steps = [(lad.language, step) for lad in found for step in lad.steps]
    fastest = min((s.point.us(state) for _, s in steps), default=0.0)
    rows: Rows = []
    far: list[Point] = []
    for language, step in sorted(steps, key=lambda pair: (pair[1].point.record.kernel.version, pair[0])):
        p, stats = step.point, step.point.stats(state)
        if stats is None or stats.median > FAR * fastest:
            far.append(p)
            continue
        times = {"us": stats.median, "p10": stats.p10, "p90": stats.p90, "label": f"{stats.median:,.1f}"}
        rows.append({"version": f"v{p.record.kernel.version}", "language": language, **times, **_said(p, state)})
    marks: Rows = []
    peer, limit = (
        next((lad.peer for lad in found if lad.peer), None),
        next((lad.limit for lad in found if lad.limit), None),
    )
    if peer:
        marks.append({"us": peer.us(state), "what": "library", "label": f"best library {peer.us(state):,.1f}"})
    if limit:
        marks.append({"us": limit, "what": "limit", "label": f"limit {limit:,.1f}"})
    return rows, marks, far


def languages(found: Sequence[tuple[Point, Point]], state: str) -> Rows:
    rows: Rows = []
    for rank, pair in enumerate(found):
        for p in pair:
            share = p.share(state)
            if share is not None:
                rows.append(
                    {"cell": p.cell, "rank": rank, "language": p.language, "share": 100 * share, **_said(p, state)}
                )
    return rows


def instructions(points: Sequence[Point]) -> Rows:
    rows: Rows = []
    for p in points:
        mix = instruction_mix(p)
        total = sum(mix.values())
        for rank, (kind, count) in enumerate(mix.items()):
            if count:
                said = {"tip": f"{p.record.id} {kind}", "said": f"{p.name}: {count} instructions of kind {kind}"}
                name = f"{p.shown}, {p.cell}"
                rows.append(
                    {"name": name, "kind": kind, "rank": rank, "count": count, "share": 100 * count / total, **said}
                )
    return rows


def way(move: Move) -> str:
    return "within its spread" if not move.moved else "faster" if move.change < 0 else "slower"


def moves(found: Sequence[Move], most: int = 40) -> Rows:
    rows: Rows = []
    for rank, m in enumerate(found[:most]):
        figures = {"change": 100 * m.change, "low": 100 * m.low, "high": 100 * m.high}
        name = f"{m.after.name}, {m.after.cell}"
        said = {"tip": m.after.record.id, "said": f"{name}: {100 * m.change:+.1f} %, {way(m)}"}
        rows.append({"name": name, "rank": rank, **figures, "way": way(m), **said})
    return rows
