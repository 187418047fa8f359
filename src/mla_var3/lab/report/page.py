"""The page: one HTML file with its records, charts and scripts inside, which opens from disk without a network."""

from __future__ import annotations

import base64
import gzip
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mla_var3 import __version__
from mla_var3.catalogue.spoken import PEER, RUNS_DIFFER
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.files import write_whole
from mla_var3.lab import naming
from mla_var3.lab.report import answers, charts, finder, legend, sources
from mla_var3.lab.report import rows as rows_of
from mla_var3.lab.report.gather import Gathered, Point, command
from mla_var3.lab.report.traces import Drawn
from mla_var3.record import STATES, code_bytes
from mla_var3.workload import Problem

SCRIPTS = ("core.js", "chart.js", "answers.js", "finder.js", "views.js", "main.js")

#: A point in the page, in this order.
COLUMNS = (
    "id", "at", "newest", "device", "set", "cell", "kernel", "name", "language", "design", "version",
    "today", "fixed", "run", "burst", "sustained", "step", "burst_limit", "sustained_limit", "bound", "rates",
    "flops", "bytes", "host", "plan", "cross", "beside", "timeline", "error", "lse", "tiling", "asked", "resources",
    "compile", "method", "environment", "clocks", "source", "hash", "experiment", "command",
)  # fmt: skip


class _Shared:
    """Values that many points share, each kept once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._known: dict[str, int] = {}

    def add(self, value: Any) -> int | None:
        if value is None:
            return None
        key = json.dumps(value, sort_keys=True, default=str)
        if key not in self._known:
            self._known[key] = len(self.values)
            self.values.append(value)
        return self._known[key]


def write_page(
    gathered: Gathered,
    out: Path,
    *,
    state: str = "burst",
    cell: str | None = None,
    compare: tuple[str, str] | None = None,
    drawn: Sequence[Drawn] = (),
) -> Path:
    """Writes the page to `out`. cell: opens with it. compare: names of two record sets. drawn: traces.

    Raises `UserError` when no record has a time, or the file cannot be written.
    """
    text = page(gathered, state=state, cell=cell, compare=compare, drawn=drawn)
    write_whole(out, text)
    return out


def page(
    gathered: Gathered,
    *,
    state: str = "burst",
    cell: str | None = None,
    compare: tuple[str, str] | None = None,
    drawn: Sequence[Drawn] = (),
) -> str:
    """The page as text; see `write_page`."""
    data = page_data(gathered, state=state, cell=cell, compare=compare)
    data["traces"] = [asdict(one) | {"title": one.title} for one in drawn]
    parts = {
        "CSS": asset("page.css"),
        "LICENCES": _escape(asset("licences.txt")),
        "DATA": packed(data),
        "VEGA": _vega(),
        "SCRIPT": _private("\n".join(asset(name) for name in SCRIPTS), "async "),
    }
    return re.sub(r"@@(\w+)@@", lambda match: parts[match[1]], asset("page.html"))


def asset(name: str) -> str:
    return importlib.resources.files("mla_var3.lab.report").joinpath("assets", name).read_text(encoding="utf-8")


def packed(data: Any) -> str:
    """JSON, gzipped, in base64: a tenth of its size, and no record can end the element that it stands in."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, for the version of Vega-Lite that the charts are written in."""
    import altair
    import vl_convert

    version = ".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    # The stub asks for a snippet; without one the bundle sets window.vegaEmbed.
    bundle = vl_convert.javascript_bundle(vl_version=version)  # type: ignore[call-arg]
    return _private(bundle.replace("</script", "<\\/script"))


def _private(script: str, kind: str = "") -> str:
    """A script whose names are its own; what it assigns to `window` is everybody's."""
    return f"({kind}function () {{\n{script}\n}})();"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


# ---------------------------------------------------------------- data
def page_data(
    gathered: Gathered, *, state: str = "burst", cell: str | None = None, compare: tuple[str, str] | None = None
) -> dict[str, Any]:
    """What the page's script reads."""
    kernels = legend.kernels(gathered)
    cells, sets = _cells(gathered.points), gathered.sets
    numbers = {name: i for i, name in enumerate(cells)}
    order = {name: i for i, name in enumerate(kernels)}
    methods, environments, resources, runs = _Shared(), _Shared(), _Shared(), _Shared()
    rows = []
    for p in gathered.points:
        fields = _point(p) | {
            "cell": numbers[p.cell],
            "set": sets.index(p.set),
            "kernel": order[p.kernel],
            "resources": resources.add(_resources(p)),
            "method": methods.add(p.record.method),
            "environment": environments.add(_environment(p.record.environment)),
            "run": runs.add(p.record.run),
        }
        rows.append([fields[name] for name in COLUMNS])
    languages = sorted({p.language for p in gathered.points}, key=lambda name: (name == PEER, name))
    titles = {k.title: k.colour for k in kernels.values()}
    ours = [name for name in languages if name != PEER]
    versions = sorted({p.record.kernel.label for p in gathered.points if not p.is_peer})
    return {
        "about": _about(gathered),
        "made": _made(gathered),
        "state": state,
        "cell": cell,
        "compare": [sets.index(name) for name in compare] if compare else None,
        "devices": [{"key": key, "name": _device_name(key)} for key in gathered.devices],
        "languages": languages,
        "designs": answers.designs(gathered.points),
        "kernels": [asdict(k) | {"title": k.title} for k in kernels.values()],
        "finder": finder.data(gathered),
        "picks": {d: {s: _picks(gathered, d, s) for s in STATES} for d in gathered.devices},
        "sets": sets,
        "cells": list(cells.values()),
        "cols": COLUMNS,
        "rows": rows,
        "methods": methods.values,
        "environments": environments.values,
        "resources": resources.values,
        "map_legend": rows_of.map_legend(),
        "drawn": sorted(answers.drawn()),
        "runs_differ": RUNS_DIFFER,
        "kinds": [*answers.INSTRUCTION_KINDS, "other"],
        "roofs": {
            d: {s: [asdict(r) for r in answers.roofs(gathered.newest, d, s)] for s in STATES} for d in gathered.devices
        },
        "entries": _entries(versions),
        "sources": {v: asdict(s) for v in versions if (s := sources.source_of(v))},
        "left_out": [asdict(line) for line in gathered.left_out],
        "specs": {
            "map": charts.spec(charts.map_panel()),
            "map_legend": charts.map_legend().to_dict(),
            "cell": charts.spec(charts.cell(titles)),
            "roofline": charts.spec(charts.roofline(titles)),
            "ladder": charts.spec(charts.ladder(ours)),
            "languages": charts.spec(charts.languages(ours)),
            "instructions": charts.spec(charts.instructions([*answers.INSTRUCTION_KINDS, "other"])),
            "moves": charts.spec(charts.moves()),
        },
    }


def _made(gathered: Gathered) -> str:
    files = ", ".join(gathered.files) or "records"
    return f"Made by mla-var3 {__version__} report on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC from {files}."


def _about(gathered: Gathered) -> str:
    if not gathered.points:
        return "No record with a time was found: what was read is listed under “Left out”."
    days = sorted({p.record.at[:10] for p in gathered.points})
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    devices = ", ".join(_device_name(key) for key in gathered.devices)
    left = gathered.left()
    return (
        f"{len(gathered.points):,} measurements of {len({p.cell for p in gathered.points})} problems on {devices}, "
        f"{span}. Each kernel passed its check before it was timed, beside the limits of the same run."
        + (f" {left}: see the end of the page." if left else "")
    )


def _picks(gathered: Gathered, device: str, state: str) -> dict[str, Any]:
    """said: what the dispatcher's picks lose. of: by cell, the pick and its loss (None where it was not measured)."""
    found = answers.picks([p for p in gathered.newest if p.record.device == device], state)
    return {"said": answers.losses(found), "of": {p.cell: [p.label, _round(p.loss)] for p in found}}


def _device_name(key: str) -> str:
    try:
        return Device.get(key).name
    except UserError:
        return f"{key} (not in devices.json)"


def _cells(points: Sequence[Point]) -> dict[str, dict[str, Any]]:
    problems = {p.cell: p.problem for p in points}
    ranked = sorted(problems.items(), key=lambda item: (naming.listed(item[1]), item[0]))
    return {name: _cell(name, problem, rank) for rank, (name, problem) in enumerate(ranked)}


def _cell(name: str, problem: Problem, rank: int) -> dict[str, Any]:
    sizes = {field: getattr(problem, field, None) for field in ("b", "s", "t", "h")}
    return {
        "name": name, "rank": rank, "panel": naming.panel(problem), "phase": naming.phase(problem),
        "geometry": naming.geometry(problem),
        "dtype": problem.dtype, "plain": finder.is_plain(problem), "causal": getattr(problem, "causal", False), **sizes,
        "text": f"{naming.words(problem)}, {naming.geometry(problem)}, {problem.dtype}",
    }  # fmt: skip


def _point(p: Point) -> dict[str, Any]:
    r = p.record
    flops, moved = p.work()
    return {
        "id": r.id, "at": r.at, "newest": p.newest, "device": r.device, "name": p.name, "language": p.language,
        "design": p.design, "version": r.kernel.version, "today": p.today, "fixed": p.kernel == "fixed_split",
        "burst": _stats(p, "burst"), "sustained": _stats(p, "sustained"), "burst_limit": _round(p.limit("burst")),
        "step": _step(p), "sustained_limit": _round(p.limit("sustained")),
        "bound": r.limits.bound if r.limits else None,
        "rates": _rates(p), "flops": flops, "bytes": moved, "host": _round(r.host_us), "plan": _round(r.plan_us),
        "cross": _round(r.cross_check_us), "beside": _beside(p),
        "timeline": [[span.name, _round(span.us)] for span in r.timeline] if r.timeline else None,
        "error": _finite(r.error.first) if r.error else None,
        "lse": _finite(r.error.lse) if r.error and r.error.lse is not None else None,
        "tiling": " ".join(f"{k}={v}" for k, v in (r.tiling or {}).items()), "asked": _asked(r.requested),
        "compile": r.compile_seconds,
        "clocks": _clocks(r.environment), "source": _source(p), "hash": r.source.hash, "experiment": r.experiment,
        "command": command(r, p.problem),
    }  # fmt: skip


def _round(value: float | None) -> float | None:
    return None if value is None else _finite(answers.rounded(value))


def _finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


def _stats(p: Point, state: str) -> list[float | int | None] | None:
    stats = p.stats(state)
    return None if stats is None else [_round(stats.median), _round(stats.p10), _round(stats.p90), stats.n]


def _step(p: Point) -> dict[str, float | None] | None:
    """Medians as in a step, of a kernel that makes something once for many calls; None where they are the medians."""
    if p.record.with_schedule_us is None:
        return None
    return {state: _finite(answers.rounded(p.step_us(state))) for state in STATES}


def _beside(p: Point) -> str:
    """Times of parts of the call by themselves."""
    return "; ".join(
        f"{name} " + ", ".join(f"{us:,.1f} µs {state}" for state in STATES if (us := p.record.beside(name, state)))
        for name in p.record.beside_us or {}
    )


def _rates(p: Point) -> str:
    found = []
    for state in STATES:
        limits = getattr(p.record.limits, state, None) if p.record.limits else None
        if limits is not None:
            found.append(f"{state} {limits.matmul_tflops:,.0f} TFLOP/s, {limits.read_gbps:,.0f} GB/s")
    return "; ".join(found)


def _asked(requested: Any) -> str:
    if isinstance(requested, Mapping):
        return " ".join(f"{k}={v}" for k, v in requested.items())
    return {"default": "its default tiling", "tuned": "its tilings, the fastest taken"}.get(
        requested, str(requested or "")
    )


def _clocks(environment: Mapping[str, Any]) -> str:
    parts = []
    for state in STATES:
        clock = ((environment.get("clocks") or {}).get(state) or {}).get("sm_mhz")
        power, heat = ((environment.get(name) or {}).get(state) for name in ("power", "temperature"))
        words = [
            f"{value:.0f} {unit}" for value, unit in ((clock, "MHz"), (power, "W"), (heat, "°C")) if value is not None
        ]
        parts += [f"{state} {', '.join(words)}"] if words else []
    return "; ".join(parts)


def _environment(environment: Mapping[str, Any]) -> str:
    packages = {**(environment.get("packages") or {}), **(environment.get("bundle_packages") or {})}
    parts = [f"{k} {environment[k]}" for k in ("gpu", "driver", "cuda", "python", "platform") if environment.get(k)]
    parts += [f"power limit {environment['power_limit_w']:.0f} W"] if environment.get("power_limit_w") else []
    return "; ".join([*parts, ", ".join(f"{k} {v}" for k, v in packages.items())])


def _source(p: Point) -> str:
    source = p.record.source
    commit = f"commit {source.commit[:12]}" if source.commit else "no commit"
    return f"{commit}{', with changes' if source.dirty else ''}, hash {source.hash}"


def _resources(p: Point) -> dict[str, Any] | None:
    used = p.record.resources
    if not used:
        return None
    counts = used.get("instructions") or {}
    mix = answers.instruction_mix(p)
    stages = used.get("stages") or [used]

    def line(stage: Mapping[str, Any]) -> str:
        name = f"{stage['name']}: " if stage.get("name") else ""
        return (
            f"{name}{stage.get('registers')} registers × {stage.get('threads')} threads, "
            f"{stage.get('smem')} bytes shared, {stage.get('spill_bytes')} spilled, "
            f"{stage.get('ctas_per_sm')} blocks/SM, {code_bytes(stage)} bytes of code"
        )

    return {
        **{name: used.get(name) for name in ("registers", "smem", "spill_bytes", "ctas_per_sm")},
        "total": counts.get("total"),
        "code": code_bytes(used),
        "mix": list(mix.values()) or None,
        "instructions": ", ".join(f"{name} {n}" for name, n in counts.items() if n),
        "text": "; ".join(line(stage) for stage in stages),
    }


def _entries(versions: Sequence[str]) -> dict[str, dict[str, str]]:
    """Devlog entries as HTML. Raw HTML in an entry is shown as text: only Markdown becomes elements."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    found = {}
    for label, entry in sources.entries().items():
        if label in versions:
            text = "\n\n".join(f"### {title}\n\n{body}" for title, body in entry.sections)
            text = re.sub(r"\s*<!--\s*r:([0-9a-f]{6,})[^<>]*-->", r" ([record](#record=\1))", text)
            found[label] = {
                "path": entry.path,
                "verdict": entry.verdict,
                "line": entry.line,
                "html": re.sub(r"<th(?=[ >])", '<th scope="col"', markdown.render(text)),
            }
    return found
