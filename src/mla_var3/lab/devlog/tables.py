"""Markdown tables of records, with the citations that `devlog check` reads behind the figures of a row."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mla_var3.errors import Unsupported
from mla_var3.lab.devlog import values
from mla_var3.lab.devlog.citations import cite
from mla_var3.lab.devlog.values import Record, Unknown
from mla_var3.names import kernel_label
from mla_var3.workload import problem_from_record

#: (header, unit, expression, significant digits): one column each.
Column = tuple[str, str, str, int]

TIMES: tuple[Column, ...] = (
    ("burst (us)", "us", "burst", 4),
    ("sustained (us)", "us", "sustained", 4),
    ("burst (TFLOP/s)", "TFLOP/s", "burst.tflops", 4),
    ("burst (GB/s)", "GB/s", "burst.gbps", 4),
    ("burst, of limit (%)", "%", "burst.of_limit", 3),
    ("sustained, of limit (%)", "%", "sustained.of_limit", 3),
)
RESOURCES: tuple[Column, ...] = (
    ("registers", "registers", "resources.registers", 4),
    ("shared memory (bytes)", "bytes", "resources.smem", 4),
    ("spills (bytes)", "bytes", "resources.spill_bytes", 4),
    ("CTAs per SM", "", "resources.ctas_per_sm", 4),
)
SPEEDUPS: tuple[Column, ...] = (
    ("speedup burst (x)", "x", "burst.speedup", 3),
    ("speedup sustained (x)", "x", "sustained.speedup", 3),
)
_ACROSS_RUNS: tuple[Column, ...] = tuple((h, u, e.replace("speedup", "limit_speedup"), d) for h, u, e, d in SPEEDUPS)
_SCHEDULED: tuple[Column, ...] = tuple(
    (f"{h}, scheduled in every call", u, e.replace("speedup", "scheduled_speedup"), d) for h, u, e, d in SPEEDUPS
)


def problem_label(record: Record) -> str:
    """`b128_s1_h128_t4096`."""
    return problem_from_record(record["problem"]).label


def label(record: Record) -> str:
    """`cute-dsl/flash_mla_v1`."""
    of = record["kernel"]
    return kernel_label(of["language"], of["design"], of["version"])


def cell(record: Record) -> tuple[str, str]:
    """What two records share whose times compare: device and problem."""
    return str(record["device"]), json.dumps(record["problem"], sort_keys=True)


def newest(records: Iterable[Record]) -> list[Record]:
    """The last record of each version, cell and way of tuning, timed or compiled; in the order of their dates."""
    last: dict[Any, Record] = {}
    for record in sorted(records, key=lambda r: str(r["at"])):
        ran = record["status"] in ("passed", "incorrect")
        key = (label(record), cell(record), str(record.get("requested") or "default"))
        last.pop((key, ran), None)
        last[key, ran] = record
    timed = {key for key, ran in last if ran}
    # A compile-only record beside a measured one of the same cell says nothing more.
    return [record for (key, ran), record in last.items() if ran or key not in timed]


def of_records(records: Sequence[Record], columns: Sequence[Column], *, distinct: bool = False) -> str:
    """One row a record: device, cell, and the columns; what no record has is left out. "" when nothing is left.

    distinct: only the first of the records of a device that agree in every column.
    """
    if distinct:
        first = {(r["device"], *(_text(r, None, column) for column in columns)): r for r in reversed(records)}
        records = list(reversed(first.values()))
    return _table(records, columns, ("device", "cell"), lambda r: (str(r["device"]), problem_label(r)))


def select(records: Iterable[Record], cells: Sequence[str] = (), kernels: Sequence[str] = ()) -> list[Record]:
    """The newest timed record of each version in each cell; cells and kernels are patterns of their labels."""

    def matches(text: str, patterns: Sequence[str]) -> bool:
        return not patterns or any(fnmatch.fnmatch(text, pattern) for pattern in patterns)

    timed = [record for record in newest(records) if record["time_us"]]
    timed = [r for r in timed if matches(problem_label(r), cells) and matches(label(r), kernels)]
    order = list(dict.fromkeys(cell(r) for r in timed))
    return sorted(timed, key=lambda r: (order.index(cell(r)), _fastest(r)))


def against_libraries(records: Iterable[Record], picks: bool = False) -> str:
    """One row a cell: the fastest kernel of this project in burst, and how it compares with the fastest library. picks:
    the one that the dispatcher picks in its place; a cell that it takes nothing for, or without a record of the pick,
    is left out.

    Newest records may be of different runs, so each time counts as a share of its own run's limit.
    """
    pairs = _with_libraries(records, picks)
    ratio_columns = (*_ACROSS_RUNS, *(_SCHEDULED if any(r.get("with_schedule_us") for _, r in pairs) else ()))
    rows = []
    for ours, library in pairs:
        own = [TIMES[i] for i in (0, 1, 4, 5)]
        times = [_text(ours, None, c) for c in own]
        ratios = [_text(ours, library, c) for c in ratio_columns]
        shown = [c[2] for c, text in zip(own, times, strict=True) if text]
        row = [problem_label(ours), label(ours), *_cited([x or "-" for x in times], cite(ours["id"], shown))]
        shown = [c[2] for c, text in zip(ratio_columns, ratios, strict=True) if text]
        against = cite(f"{ours['id']} vs {library['id']}", shown)
        rows.append([*row, label(library), *_cited([x or "-" for x in ratios], against)])
    whose = "picked" if picks else "fastest here"
    header = ["cell", whose, *(TIMES[i][0] for i in (0, 1, 4, 5)), "fastest library"]
    return _grid([*header, *(c[0] for c in ratio_columns)], rows) if rows else ""


def summary(records: Iterable[Record]) -> str:
    """What `against_libraries` comes to: in each state the geometric mean of the speedups and the slowest cell."""
    pairs, said = _with_libraries(records, False), []
    for state in values.STATES:
        found = []
        for ours, library in pairs:
            with contextlib.suppress(Unknown):
                ratio = values.evaluate(f"{state}.limit_speedup", ours, library).number
                found.append((ratio, problem_label(ours)))
        if found:
            mean = math.exp(math.fsum(math.log(ratio) for ratio, _ in found) / len(found))
            worst, where = min(found)
            said.append(f"{mean:.3f} in {state} (slowest: {worst:.3f}, {where})")
    if not said:
        return ""
    return f"Geometric mean of the speedups over {len(pairs)} cells: {'; '.join(said)}."


def _with_libraries(records: Iterable[Record], picks: bool) -> list[tuple[Record, Record]]:
    """(a record of this project, the fastest library's) of each cell that has both."""
    blocks: dict[Any, list[Record]] = {}
    for record in select(records):
        blocks.setdefault(cell(record), []).append(record)
    pairs = []
    for block in blocks.values():
        block.sort(key=_nearest)
        mine = [r for r in block if r["kernel"]["language"] != "peer"]
        if picks:
            picked = _picked(block[0])
            mine = [r for r in mine if label(r) == picked]
        libraries = [r for r in block if r["kernel"]["language"] == "peer"]
        if mine and libraries:
            pairs.append((mine[0], libraries[0]))
    return pairs


def comparison(records: Iterable[Record], cells: Sequence[str] = (), kernels: Sequence[str] = ()) -> str:
    """The newest timed record of each version in each cell, fastest first; the cell is named once."""
    timed = select(records, cells, kernels)
    seen: set[Any] = set()

    def first(record: Record) -> tuple[str, str]:
        shown = "" if cell(record) in seen else problem_label(record)
        seen.add(cell(record))
        tuned = " (tuned)" if record.get("requested") == "tuned" else ""
        return shown, label(record) + tuned

    return _table(timed, TIMES, ("cell", "kernel"), first)


def of_pairs(pairs: Sequence[tuple[Record, Record]]) -> str:
    """One row for each (record, the record it is compared with): how many times faster the first is."""
    rows = []
    for record, before in pairs:
        cells = [_text(record, before, column) for column in SPEEDUPS]
        shown = [column[2] for column, text in zip(SPEEDUPS, cells, strict=True) if text]
        citation = cite(f"{record['id']} vs {before['id']}", shown)
        rows.append([str(record["device"]), problem_label(record), *_cited([text or "-" for text in cells], citation)])
    return _grid(["device", "cell", *(column[0] for column in SPEEDUPS)], rows)


def over_gpus(records: Iterable[Record]) -> str:
    """One row for each way that several GPUs share a cell: what it took, what the model had said, and how many times
    faster than the one GPU of the same run that was. Behind it, whether the model had put it ahead of one GPU."""
    timed = select(records)
    alone = {cell(record): record for record in timed if "ranks" not in (record["tiling"] or {})}
    columns: tuple[Column, ...] = (TIMES[0], ("model (us)", "us", "model_us", 4))
    rows = []
    for record in timed:
        one = alone.get(cell(record))
        if record is one or one is None:
            continue
        own, ratio = [_text(record, None, column) for column in columns], _text(record, one, SPEEDUPS[0])
        shown = [column[2] for column, text in zip(columns, own, strict=True) if text]
        against = cite(f"{record['id']} vs {one['id']}", [SPEEDUPS[0][2]])
        exchange = str(record["tiling"]["exchange"]) + (", overlapped" if record["tiling"].get("overlap") else "")
        shared, single = record.get("model_us"), one.get("model_us")
        pays = "-" if shared is None or single is None else "yes" if shared < single else "no"
        rows.append(
            [
                problem_label(record), str(record["tiling"]["ranks"]), exchange,
                *_cited([text or "-" for text in own], cite(record["id"], shown)),
                f"{ratio} {against}", pays,
            ]
        )  # fmt: skip
    header = ["cell", "GPUs", "exchange", *(column[0] for column in columns), "over one GPU (x)", "model: pays"]
    return _grid(header, rows) if rows else ""


def _fastest(record: Record) -> float:
    times = record["time_us"]
    return next((float(times[s]["median"]) for s in values.STATES if times.get(s)), float("inf"))


def _picked(record: Record) -> str | None:
    """What the dispatcher picks for a record's problem and device; None where no version takes them."""
    from mla_var3.device import Device
    from mla_var3.dispatch import choose

    try:
        return choose(problem_from_record(record["problem"]), Device.get(record["device"])).kernel.label
    except Unsupported:
        return None


def _nearest(record: Record) -> float:
    """Time over the limit of its run, in burst where that was measured."""
    for state in values.STATES:
        if record["time_us"].get(state) and record.get("limits") and record["limits"].get(state):
            return float(record["time_us"][state]["median"]) / float(record["limits"][state]["limit_us"])
    return float("inf")


def _table(
    records: Sequence[Record],
    columns: Sequence[Column],
    names: Sequence[str],
    first: Callable[[Record], Sequence[str]],
) -> str:
    filled = [[_text(record, None, column) for column in columns] for record in records]
    used = [i for i in range(len(columns)) if any(cells[i] for cells in filled)]
    rows = []
    for record, cells in zip(records, filled, strict=True):
        expressions = [columns[i][2] for i in used if cells[i]]
        if expressions:
            citation = cite(record["id"], expressions)
            rows.append([*first(record), *_cited([cells[i] or "-" for i in used], citation)])
    return _grid([*names, *(columns[i][0] for i in used)], rows) if rows else ""


def _cited(cells: Sequence[str], citation: str) -> list[str]:
    """The cells, the last of them with the citation of all."""
    return [*cells[:-1], f"{cells[-1]} {citation}"]


def _text(record: Record, other: Record | None, column: Column) -> str:
    _, unit, expression, digits = column
    try:
        return values.write(values.evaluate(expression, record, other), unit, digits)
    except Unknown:
        return ""


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))
