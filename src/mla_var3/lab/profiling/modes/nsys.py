"""Nsight Systems: running it over the target, and what the device did in its trace."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from mla_var3.errors import UserError
from mla_var3.lab.profiling.modes import tools
from mla_var3.lab.profiling.modes.spans import Span, ordered

_UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}


def command(exe: Path, report: Path, job: Path) -> list[str]:
    """nsys over the target: CUDA alone, no sampling of the processor, between the profiler calls."""
    return [
        str(exe), "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true",
        "--output", str(report.with_suffix("")), *tools.target_command(job),
    ]  # fmt: skip


def profile(report: Path, job: Path, *, timeout_s: float) -> tuple[list[Span], tuple[str, ...]]:
    """Runs nsys and returns what the device did, and the command."""
    exe = tools.need("nsys")
    log = report.with_suffix(".log")
    ran = tools.run(command(exe, report, job), log, timeout_s, tools.target_env(line_info=False))
    failed = tools.target_error(ran.text)
    if failed and (ran.status or not report.is_file()):
        raise UserError(f"the profiled process failed: {failed} (all of it in {log})")
    if not report.is_file():
        raw = ", but only the unprocessed trace" if report.with_suffix(".qdstrm").is_file() else ""
        raise UserError(f"nsys wrote no report{raw} (its output: {log}): {tools.INSTEAD['nsys']}.")
    words = [
        str(exe), "stats", "--force-export=true", "--report", "cuda_gpu_trace", "--format", "csv", "--output", "-",
        str(report),
    ]  # fmt: skip
    spans = parse_trace(tools.run(words, report.with_suffix(".trace.csv"), timeout_s).text)
    if not spans:
        raise UserError(
            f"nsys saw nothing on the device: the call launched no kernel, or CUDA could not be traced (its output: "
            f"{log}); {tools.INSTEAD['nsys']}."
        )
    return spans, ran.command


def parse_trace(text: str) -> list[Span]:
    """Operations of `nsys stats --report cuda_gpu_trace --format csv`."""
    header: list[str] | None = None
    spans = []
    for line in text.splitlines():
        row = next(csv.reader(io.StringIO(line)), [])
        if header is None:
            if row and row[0].startswith("Start"):
                header = row
            continue
        if len(row) != len(header):
            continue
        cells = dict(zip(header, row, strict=True))
        start, duration = (_microseconds(cells, name) for name in ("Start", "Duration"))
        if start is not None and duration is not None:
            spans.append(Span(cells.get("Name", "?"), start, duration, cells.get("Strm", "")))
    return ordered(spans)


def _microseconds(cells: dict[str, str], name: str) -> float | None:
    for title, cell in cells.items():
        match = re.fullmatch(rf"{name}(?: \((\w+)\))?", title)
        if match:
            try:
                return float(cell.replace(",", "")) * _UNITS.get(match[1] or "ns", 1e-3)
            except ValueError:
                return None
    return None
