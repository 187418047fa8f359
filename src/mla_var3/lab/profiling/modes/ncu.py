"""Nsight Compute: running it over the target, and reading its report.

The report is read with NVIDIA's own interface where that is installed (`pip install ncu-report`, the extra `profile`),
else through `ncu --import --page raw --csv`.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter as Tally
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from mla_var3.errors import UserError
from mla_var3.lab.profiling import sources as files
from mla_var3.lab.profiling.modes import tools
from mla_var3.lab.profiling.modes.counters import METRICS, SECTIONS, Hot, Launch

#: Most kernels of one profile: an oracle made of torch operations has hundreds.
MAX_KERNELS = 64
HOT = 12
_SAMPLES = "smsp__pcsamp_warps_issue_stalled_"
_SAMPLES_COLUMNS = ("Warp Stall Sampling (All Samples)", "# Samples", "Samples")
_STALL = re.compile(r"stall_\w+")
#: Columns whose reason has another name in the report's metrics.
_CSV_STALLS = {
    "stall_long_sb": "long_scoreboard",
    "stall_short_sb": "short_scoreboard",
    "stall_no_inst": "no_instructions",
    "stall_lg": "lg_throttle",
    "stall_math": "math_pipe_throttle",
    "stall_mio": "mio_throttle",
    "stall_tex": "tex_throttle",
    "stall_imc": "imc_miss",
    "stall_sleep": "sleeping",
    "stall_dispatch": "dispatch_stall",
}
#: Bytes of an instruction, and how many instructions may lie between the test of an mbarrier and the branch on it.
_BYTES, _WAIT_REACH = 16, 16


# ---------------------------------------------------------------- running
def command(
    exe: Path, report: Path, job: Path, *, full: bool, kernel_name: str | None, metrics: bool = True
) -> list[str]:
    """ncu over the target. The card's clocks are left alone; caches are flushed before each pass."""
    words = [str(exe), "--clock-control", "none", "--profile-from-start", "off", "--launch-count", str(MAX_KERNELS)]
    if full:
        words += ["--set", "full", "--import-source", "yes"]
    else:
        for section in SECTIONS:
            words += ["--section", section]
        if metrics:
            words += ["--metrics", ",".join(METRICS)]
    if kernel_name:
        words += ["-k", f"regex:{kernel_name}"]
    return [*words, "-f", "-o", str(report.with_suffix("")), *tools.target_command(job)]


def profile(
    report: Path, job: Path, *, full: bool, kernel_name: str | None, timeout_s: float, named: bool = False
) -> tuple[list[Launch], list[str], tuple[str, ...]]:
    """Runs ncu and reads its report: the launches, sentences about how it went, and the command.

    kernel_name: names of the device functions; when none matches, everything the call launched is profiled, unless the
    user gave the names (`named`). Raises `Denied` when the counters may not be read, `UserError` for all the rest.
    """
    exe = tools.need("ncu")
    env = tools.target_env(line_info=full)
    log = report.with_suffix(".log")
    notes: list[str] = []
    metrics = True

    def attempt() -> tools.Ran:
        words = command(exe, report, job, full=full, kernel_name=kernel_name, metrics=metrics)
        return tools.run(words, log, timeout_s, env)

    ran = attempt()
    if not full and not report.is_file() and re.search(r"^==ERROR==.*\bmetric", ran.text, re.MULTILINE | re.IGNORECASE):
        metrics = False
        notes.append("this chip lacks one of the extra metrics; the sections alone were collected")
        ran = attempt()
    if kernel_name and not named and _profiled_nothing(ran.text) and tools.target_error(ran.text) is None:
        notes.append(f"no kernel was named like {kernel_name!r}; everything the call launched was profiled")
        kernel_name = None
        ran = attempt()
    _judge(ran, report, kernel_name)
    launches, how = read(report, exe, timeout_s)
    if not launches:
        raise UserError(f"the report {report} holds no kernel: see {log}, or {tools.INSTEAD['ncu']}.")
    if len(launches) >= MAX_KERNELS:
        notes.append(f"only the first {MAX_KERNELS} kernels of the call were profiled")
    return launches, [*notes, how], ran.command


def _profiled_nothing(text: str) -> bool:
    return "No kernels were profiled" in text


def _judge(ran: tools.Ran, report: Path, kernel_name: str | None) -> None:
    """Raises what went wrong; a report that exists without an error passes."""
    if "ERR_NVGPUCTRPERM" in ran.text:
        raise tools.Denied(
            "ncu may not read the GPU's counters here (ERR_NVGPUCTRPERM): ask for the permission (root, CAP_SYS_ADMIN "
            f"or the driver option NVreg_RestrictProfilingToAdminUsers=0), or {tools.INSTEAD['ncu']}."
        )
    failed = tools.target_error(ran.text)
    if failed and (ran.status or not report.is_file()):
        raise UserError(f"the profiled process failed: {failed} (all of it in {ran.log})")
    if _profiled_nothing(ran.text):
        available = re.findall(r"^\s*\d+\.\s+(.+)$", ran.text.partition("Available Kernels")[2], re.MULTILINE)
        if kernel_name and available:
            raise UserError(
                f"no kernel matches {kernel_name!r}: the call launched {', '.join(available[:5])}; give --kernel-name."
            )
        raise UserError("the call launched no kernel that ncu could see: try --mode timeline, which sees every stream.")
    wrong = re.findall(r"^==ERROR== (.+)$", ran.text, re.MULTILINE)
    if not report.is_file():
        said = wrong[0].rstrip(". ") if wrong else f"it ended with status {ran.status} and wrote no report"
        kind = tools.Denied if re.search(r"LibraryNotLoaded|Failed to initialize the profiler", ran.text) else UserError
        raise kind(f"ncu failed: {said} (all of it in {ran.log}); {tools.INSTEAD['ncu']}.")


# ---------------------------------------------------------------- reading
def read(report: Path, exe: Path, timeout_s: float = 120.0) -> tuple[list[Launch], str]:
    """The launches of a report, and a sentence about how it was read."""
    interface = load_interface()
    if interface is not None:
        try:
            launches = from_interface(interface, report)
        except Exception as error:  # a newer report than the interface knows
            why = f"ncu-report could not read the report ({type(error).__name__})"
        else:
            if launches:
                return launches, f"read with NVIDIA's ncu_report ({getattr(interface, '__file__', '?')})"
            why = "ncu-report found no kernel in the report"
    else:
        why = "ncu-report is not installed (pip install ncu-report)"
    raw = tools.run(_import(exe, report, "raw"), report.with_suffix(".raw.csv"), timeout_s)
    launches = parse_raw(raw.text)
    hot: list[Hot] = []
    for view in ("cuda,sass", "sass"):  # the first is empty for code without line information
        words = [*_import(exe, report, "source"), "--print-source", view]
        hot = hot or parse_source(tools.run(words, report.with_suffix(".source.csv"), timeout_s).text)
    if hot and launches:
        from mla_var3.lab.profiling.modes.counters import main_launch

        first = main_launch(launches)
        launches = [
            Launch(one.name, one.metrics, one.units, one.texts, hot) if one is first else one for one in launches
        ]
    return launches, f"read through ncu's CSV: {why}"


def _import(exe: Path, report: Path, page: str) -> list[str]:
    return [str(exe), "--import", str(report), "--page", page, "--csv", "--print-units", "base"]


def load_interface() -> Any | None:
    """NVIDIA's report interface, the package ncu-report; None without it.

    The copy that lies beside ncu is left alone: with that of 2025.3.1 four of four profiles ended in a segmentation
    fault; the package (2026.3.1) read the reports of the same ncu.
    """
    try:
        return import_module("ncu_report")
    except ImportError:
        return None


def from_interface(interface: Any, report: Path) -> list[Launch]:
    """Every kernel of a report through NVIDIA's interface."""
    context = interface.load_report(str(report))
    launches = []
    for index in range(context.num_ranges()):
        part = context.range_by_idx(index)
        launches += [_launch(part.action_by_idx(number)) for number in range(part.num_actions())]
    return launches


def _launch(action: Any) -> Launch:
    metrics: dict[str, float] = {}
    units: dict[str, str] = {}
    texts: dict[str, str] = {}
    for name in action.metric_names():
        metric = action.metric_by_name(name)
        try:
            value = metric.value()
        except Exception:  # a metric that the chip could not measure
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            metrics[name], units[name] = float(value), str(metric.unit() or "")
        elif isinstance(value, str):
            texts[name] = value
    return Launch(str(action.name()), metrics, units, texts, _hot(action, metrics))


def _hot(action: Any, names: Iterable[str]) -> list[Hot]:
    """Source lines with the most stall samples; instructions where the code has no lines."""
    by_place: dict[str, Tally[str]] = {}
    texts: dict[str, str] = {}
    known: dict[int, tuple[str, str]] = {}
    sources: dict[str, list[str]] = {}
    try:
        sources = {name: text.splitlines() for name, text in dict(action.source_files()).items() if text}
    except Exception:
        pass
    for name in names:
        if not name.startswith(_SAMPLES) or name.endswith("_not_issued"):
            continue
        metric = action.metric_by_name(name)
        count = metric.num_instances()
        if not count or not metric.has_correlation_ids():
            continue
        places = metric.correlation_ids()
        for index in range(count):
            samples = int(metric.value(index))
            if samples:
                address = int(places.value(index))
                if address not in known:
                    known[address] = _place(action, address, sources)
                where, text = known[address]
                by_place.setdefault(where, Tally())[name.removeprefix(_SAMPLES)] += samples
                texts.setdefault(where, text)
    return hottest({place: dict(stalls) for place, stalls in by_place.items()}, texts)


def _place(action: Any, address: int, sources: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    info = action.source_info(address)
    if info is not None and info.line():
        name, line = str(info.file_name()), int(info.line())
        # The report holds the files that ncu found where the binary says they are: none of one compiled elsewhere.
        line, text = files.place(name, line, _instruction(action, address), sources.get(name, ()))
        return f"{files.short(name)}:{line}", text
    return f"0x{address & 0xFFFFF:05x}", str(action.sass_by_pc(address) or "").strip()


def _instruction(action: Any, address: int) -> str:
    """The instruction at an address; for a branch back on an mbarrier's predicate, the wait that it belongs to."""
    text = str(action.sass_by_pc(address) or "").strip()
    branch = re.match(r"@!(U?P\d+) +BRA\b", text)
    if branch:
        for back in range(1, _WAIT_REACH + 1):
            before = str(action.sass_by_pc(address - _BYTES * back) or "").strip()
            if re.search(rf"\bSYNCS\.PHASECHK\S* {branch[1]}\b", before):
                return before
    return text


def hottest(by_place: dict[str, dict[str, int]], texts: dict[str, str], count: int = HOT) -> list[Hot]:
    """The places with the most samples and each one's first reason."""
    total = sum(sum(stalls.values()) for stalls in by_place.values())
    if not total:
        return []
    rows = []
    for where, stalls in by_place.items():
        samples = sum(stalls.values())
        first = max(stalls, key=lambda name: stalls[name])
        rows.append(Hot(where, samples, 100 * samples / total, first, texts.get(where, "")))
    return sorted(rows, key=lambda row: -row.samples)[:count]


# ---------------------------------------------------------------- CSV
def _tables(text: str, first: str) -> list[list[list[str]]]:
    """The CSV tables in what ncu printed: each begins with a header whose first field is `first`."""
    tables: list[list[list[str]]] = []
    for line in text.splitlines():
        if not line.startswith('"'):
            continue
        row = next(csv.reader(io.StringIO(line)))
        if row and row[0] == first:
            tables.append([row])
        elif tables and len(row) == len(tables[-1][0]):
            tables[-1].append(row)
    return tables


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def parse_raw(text: str) -> list[Launch]:
    """Launches of `--page raw --csv`: a header, a row of units, a row a kernel."""
    launches = []
    for header, *rows in _tables(text, "ID"):
        if not rows:
            continue
        units = dict(zip(header, rows[0], strict=True)) if not rows[0][0].strip() else {}
        for row in rows[1:] if units else rows:
            cells = dict(zip(header, row, strict=True))
            numbers = {name: value for name, cell in cells.items() if (value := _number(cell)) is not None}
            metrics = {name: value for name, value in numbers.items() if "__" in name}
            texts = {name: cell for name, cell in cells.items() if name not in metrics}
            launches.append(Launch(cells.get("Kernel Name", "?"), metrics, units, texts))
    return launches


def parse_source(text: str) -> list[Hot]:
    """The hottest places of `--page source --csv`, by its samples column; empty when there is none.

    With `--print-source cuda,sass` a file's lines stand above their instructions; without, there are instructions only.
    """
    by_place: dict[str, Tally[str]] = {}
    texts: dict[str, str] = {}
    name, line, header = "", 0, list[str]()
    for raw in text.splitlines():
        row = next(csv.reader(io.StringIO(raw))) if raw.startswith('"') else []
        if row and row[0] == "File Path":
            name, header = row[1], []
        elif row and _column(row, _SAMPLES_COLUMNS) is not None:
            header = row
        elif header and len(row) >= len(header):
            # A text that holds quotation marks comes unescaped, as too many fields: from the right they are in place.
            ahead = len(row) - len(header)
            cells = [row[0], ",".join(row[1 : ahead + 2]), *row[ahead + 2 :]]
            if header[0] == "Line No" and cells[0]:
                line = int(_number(cells[0]) or 0)
                continue
            samples = int(_number(cells[_column(header, _SAMPLES_COLUMNS) or 0]) or 0)
            if not samples:
                continue
            last = len(header) - 1 - header[::-1].index("Source")
            instruction = cells[last].strip()
            if header[0] == "Line No":
                line_at, said = files.place(name, line, instruction)
                where = f"{files.short(name)}:{line_at}"
            else:
                where, said = f"{instruction[:60]} ({cells[0]})", ""
            tally = by_place.setdefault(where, Tally())
            for n, column in enumerate(header):
                if _STALL.fullmatch(column) and (number := int(_number(cells[n]) or 0)):
                    tally[_CSV_STALLS.get(column, column.removeprefix("stall_"))] += number
                    samples -= number
            tally[""] += max(samples, 0)  # some reasons have no column (2025.3: gmma)
            texts[where] = said
    return hottest({place: dict(stalls) for place, stalls in by_place.items()}, texts)


def _column(header: Sequence[str], names: Sequence[str]) -> int | None:
    return next((header.index(name) for name in names if name in header), None)
