"""`report.md` of a profile; the same text is what a terminal gets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.lab.profiling.facts import Facts, against, findings
from mla_var3.lab.profiling.modes.counters import COUNTERS, STALLS, Launch, main_launch
from mla_var3.lab.profiling.modes.spans import Span, place, totals

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.lab.profiling.request import Request
    from mla_var3.toolchain.compiled import CompiledKernel

TOP_STALLS = 4
MAX_ROWS = 60
LEAST_SHARE = 0.5
_NAME = 60
_INSTRUCTIONS = ("HGMMA", "HMMA", "UTMALDG", "UBLKCP", "LDGSTS", "LDL", "STL", "BAR", "total")


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1) -> list[str]:
    """A table whose columns line up as plain text too; the first `left` columns are text."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * w) if i < left else ("-" * (w - 1) + ":") for i, w in enumerate(widths)]
    return [line(cells[0]), f"| {' | '.join(rule)} |", *[line(row) for row in cells[1:]]]


def render(request: Request, device: Device, facts: Sequence[Facts], folder: Path, *, ran: bool, at: str) -> str:
    """The whole report. facts: the kernel's, then its baseline's, if there is one."""
    main, base = facts[0], facts[1] if len(facts) > 1 else None
    knobs = ", ".join(f"{k}={v}" for k, v in main.tiling.items()) or "-"
    lines = [
        f"# {request.mode}: {main.label} {request.problem.label}",
        "",
        f"- device: {device.name} ({device.key}, {device.arch})",
        f"- tiling: {knobs}",
        *([f"- baseline: {base.label}"] if base is not None else []),
        f"- at: {at}",
    ]
    if not ran:
        lines += ["", f"**Nothing ran:** there is no {device.name} here. What follows is from compiling and counting."]
    sections: list[tuple[str, list[str]]] = [
        ("Roofline", _roofline(facts)),
        ("What stands out", [f"- {text}" for text in findings(main, device)]),
        ("Against the baseline", [f"- {text}" for text in against(main, base)] if base is not None else []),
        ("Counters", _counters(facts)),
        ("Kernels of the call", _launches(facts)),
        ("Where the warps wait", _hot(main)),
        ("Time axis", _spans(main.spans)),
        ("Inside the kernel", _inside(main)),
        ("Resources", _resources(facts)),
        ("Notes", [f"- {one.label}: {text}" for one in facts for text in dict.fromkeys(one.notes)]),
        ("Files", _files(facts, folder)),
    ]
    for title, body in sections:
        if body:
            lines += ["", f"## {title}", "", *body]
    return "\n".join(lines) + "\n"


def _roofline(facts: Sequence[Facts]) -> list[str]:
    rows: list[tuple[str, ...]] = []
    methods: dict[str, None] = {}
    for one in facts:
        limit, time = one.limit, one.time_us()
        us = None if time is None else time[0]
        share = None if us is None else limit.share(us)
        rows.append(
            (
                one.label,
                f"{limit.flops / 1e9:,.1f}",
                f"{limit.bytes / 1e6:,.1f}",
                f"{limit.intensity:,.0f}",
                limit.bound,
                "-" if limit.limit_us is None else f"{limit.limit_us:,.1f}",
                "-" if us is None else f"{us:,.1f}",
                "-" if share is None else f"{share:.1f}",
                "-" if not us else f"{limit.flops / us / 1e6:,.0f}",
                "-" if not us else f"{limit.bytes / us / 1e6:,.2f}",
            )
        )
        methods[f"Ceilings: {limit.source}."] = None
        if time is not None:
            clock = "" if one.timing is None or one.timing.sm_mhz is None else f", at {one.timing.sm_mhz:,.0f} MHz"
            spread = "" if one.timing is None else f", p10 {one.timing.p10:,.1f}, p90 {one.timing.p90:,.1f}"
            methods[f"Time of {one.label}: {time[1]}{spread}{clock}."] = None
    header = ("kernel", "GFLOP", "MB", "FLOP/B", "bound", "limit us", "time us", "% of limit", "TFLOP/s", "TB/s")
    return [*markdown(header, rows), "", *[f"{text}  " for text in methods]]


def _short(name: str) -> str:
    return name if len(name) <= _NAME else name[: _NAME - 1] + "…"


def _counters(facts: Sequence[Facts]) -> list[str]:
    counted = [(one.label, main_launch(one.launches)) for one in facts if one.launches]
    if not counted:
        return []
    rows = []
    for counter in COUNTERS:
        values = [launch.value(counter) for _, launch in counted]
        if any(value is not None for value in values):
            unit = f" ({counter.unit})" if counter.unit else ""
            texts = ["-" if v is None else f"{v:,.{counter.digits}f}" for v in values]
            rows.append((counter.title + unit, *texts))
    for number in range(TOP_STALLS):
        texts = []
        for _, launch in counted:
            stalls = launch.stalls()
            texts.append(f"{stalls[number][0]} {stalls[number][1]:.0f} %" if number < len(stalls) else "-")
        if any(text != "-" for text in texts):
            rows.append((f"stall {number + 1} (of warp time)", *texts))
    names = [f"{label}: {_short(launch.name)}" for label, launch in counted]
    seen = dict.fromkeys(name for _, launch in counted for name, _ in launch.stalls()[:TOP_STALLS])
    meaning = "; ".join(f"{name}: waits for {STALLS[name]}" for name in seen if name in STALLS)
    return [
        *markdown(("counter", *names), rows),
        "",
        "Of the longest kernel of a call, alone on the device, caches flushed before each pass, clocks left alone.",
        *([f"Stalls: {meaning}."] if meaning else []),
    ]


def _launches(facts: Sequence[Facts]) -> list[str]:
    if not any(one.launches for one in facts):
        return []
    rows = []
    for one in facts:
        for launch in one.launches:
            figures = launch.figures()
            shares = [_cell(figures, key) for key in ("duration_us", "tensor", "dram")]
            cells = (*shares, _grid(launch), _cell(figures, "registers", 0))
            rows.append((one.label, _short(launch.name), *cells))
    return markdown(("kernel", "device function", "us", "tensor %", "DRAM %", "blocks × threads", "registers"), rows, 2)


def _cell(figures: dict[str, float], key: str, digits: int = 1) -> str:
    return f"{figures[key]:,.{digits}f}" if key in figures else "-"


def _grid(launch: Launch) -> str:
    blocks, threads = launch.metrics.get("launch__grid_size"), launch.metrics.get("launch__block_size")
    return "-" if blocks is None or threads is None else f"{blocks:,.0f} × {threads:,.0f}"


def _hot(facts: Facts) -> list[str]:
    if not facts.launches:
        return []
    hot = main_launch(facts.launches).hot
    rows = [(row.where, row.text[:80] or "-", f"{row.share:.1f}", row.samples, row.stall or "-") for row in hot]
    return markdown(("line", "source", "% of samples", "samples", "first stall"), rows, 2) if rows else []


def _spans(spans: Sequence[Span]) -> list[str]:
    if not spans:
        return []
    sums = totals(spans)
    rows = [
        (
            _short(placed.span.name),
            placed.span.stream or "-",
            f"{placed.span.start_us:,.1f}",
            f"{placed.span.duration_us:,.1f}",
            "-" if placed.gap_us is None else f"{placed.gap_us:,.1f}",
        )
        for placed in place(spans)
    ]
    left = len(rows) - MAX_ROWS
    line = f"{sums.count} operations in {sums.total_us:,.1f} us: busy {sums.busy_us:,.1f}, idle {sums.idle_us:,.1f}"
    return [
        f"{line}, two at once {sums.overlap_us:,.1f}. A negative gap is an overlap.",
        "",
        *markdown(("operation", "stream", "start us", "us", "gap before us"), rows[:MAX_ROWS], 2),
        *(["", f"and {left} more: see facts.json"] if left > 0 else []),
    ]


def _inside(facts: Facts) -> list[str]:
    if facts.trace is None:
        return []
    from mla_var3.lab.profiling.modes.trace import READ, shares

    rows = [
        (f"{one.warpgroup} ({one.role})", one.name, f"{one.percent:.1f}", f"{one.count:,.0f}", f"{one.mean_us:.2f}")
        for one in shares(facts.trace)
        if one.percent >= LEAST_SHARE
    ]
    said = (
        f"Of {facts.trace.main}: a mean over the warps of {len(facts.trace.read(facts.trace.main))} of its CTAs (at "
        f"most {READ}, evenly spread), in one call with a cold L2. Time inside of a function that another row has "
        f"counts there. Left out: below {LEAST_SHARE:g} %."
    )
    header = ("warpgroup", "function or wait", "% of its time", "times a warp", "us each")
    return [*markdown(header, rows, 2), "", said]


def _resources(facts: Sequence[Facts]) -> list[str]:
    rows = []
    for one in facts:
        for name, compiled in _stages(one):
            r = compiled.resources
            counts = [f"{r.instructions.get(i, 0):,}" for i in _INSTRUCTIONS]
            numbers = (r.registers, r.threads, f"{r.smem / 1024:.1f}", r.spill_bytes, r.stack_bytes, r.ctas_per_sm)
            rows.append((name, *numbers, *counts))
    header = ("kernel", "registers", "threads", "smem KiB", "spill B", "stack B", "CTAs/SM", *_INSTRUCTIONS)
    if not rows:
        return []
    return [*markdown(header, rows), "", "From the binary; instructions are counted in the code, not as executed."]


def _stages(facts: Facts) -> list[tuple[str, CompiledKernel]]:
    if facts.compiled is None:
        return []
    stages = facts.compiled.stages
    return [(f"{facts.label}: {s.name}", s) for s in stages] or [(facts.label, facts.compiled)]


def _files(facts: Sequence[Facts], folder: Path) -> list[str]:
    lines = ["- `params.json`: what was asked, where it ran, the commands", "- `facts.json`: every figure"]
    for one in facts:
        for title, path in one.files.items():
            shown = path.relative_to(folder) if path.is_relative_to(folder) else path
            lines.append(f"- `{shown}`: {title} ({one.label})")
    return lines
