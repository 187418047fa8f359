"""Markdown tables of records, with the citations that `devlog check` reads behind the figures of a row."""

from __future__ import annotations

import contextlib
import fnmatch
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mla_var3.catalogue import spoken
from mla_var3.errors import Unsupported
from mla_var3.lab.devlog import values
from mla_var3.lab.devlog.citations import cite
from mla_var3.lab.devlog.values import Record, Unknown
from mla_var3.lab.naming import cell_name
from mla_var3.names import by_number, kernel_label
from mla_var3.record import Record as Model
from mla_var3.record import as_ratio, geometric_mean
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


def cell_names(records: Iterable[Record]) -> dict[tuple[str, str], str]:
    """The name of each cell in a table of these records, sorted by `names.by_number`, so that b8 is in front of b16.

    A name is the label of the cell's problem. Where two problems of the table have one label, it is `naming.cell_name`:
    `v32_b2_s2_h16_top2048_sink` beside `v32_b2_s2_h16_top2048`, which has no sink.
    """
    cells = {cell(r): r for r in records}
    labels = Counter(problem_label(r) for r in cells.values())
    found = {}
    for record in sorted(cells.values(), key=_rank):
        problem = problem_from_record(record["problem"])
        found[cell(record)] = cell_name(problem) if labels[problem.label] > 1 else problem.label
    return found


def _rank(record: Record) -> tuple[Any, ...]:
    return by_number(problem_label(record)), cell(record)


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
    """The record that speaks for each contender in each cell (`catalogue.spoken`), cells in the order of `cell_names`
    and the fastest of a cell first; cells and kernels are patterns of their labels. records: whoever calls has left out
    what is not to be compared."""

    def matches(text: str, patterns: Sequence[str]) -> bool:
        return not patterns or any(fnmatch.fnmatch(text, pattern) for pattern in patterns)

    timed = [r for r in records if r["time_us"] and matches(problem_label(r), cells)]
    found = [r for r, _ in _speaking(timed) if matches(label(r), kernels)]
    return sorted(found, key=lambda r: (*_rank(r), _fastest(r)))


def _speaking(records: Iterable[Record]) -> list[tuple[Record, Model]]:
    """The records that speak, each with its model."""
    models = {id(model := Model.model_validate(r)): (r, model) for r in sorted(records, key=lambda r: str(r["at"]))}
    return [models[id(r)] for r in spoken.speaking((m for _, m in models.values()), aside=True)]


def against_libraries(records: Iterable[Record], picks: bool = False) -> str:
    """One row a cell: the fastest kernel of this project in burst, and how it compares with the fastest library. picks:
    the one that the dispatcher picks in its place; a cell that it takes nothing for, or without a record of the pick,
    is left out.

    The two may be of different runs, so each time counts as a share of its own run's limit.
    """
    pairs = _with_libraries(records, picks)
    ratio_columns = (*_ACROSS_RUNS, *(_SCHEDULED if any(r.get("with_schedule_us") for *_, r in pairs) else ()))
    rows = []
    for name, ours, library in pairs:
        own = [TIMES[i] for i in (0, 1, 4, 5)]
        times = [_text(ours, None, c) for c in own]
        ratios = [_text(ours, library, c) for c in ratio_columns]
        shown = [c[2] for c, text in zip(own, times, strict=True) if text]
        row = [name, label(ours), *_cited([x or "-" for x in times], cite(ours["id"], shown))]
        shown = [c[2] for c, text in zip(ratio_columns, ratios, strict=True) if text]
        against = cite(f"{ours['id']} vs {library['id']}", shown)
        rows.append([*row, label(library), *_cited([x or "-" for x in ratios], against)])
    whose = "picked" if picks else "fastest here"
    header = ["cell", whose, *(TIMES[i][0] for i in (0, 1, 4, 5)), "fastest library"]
    return grid([*header, *(c[0] for c in ratio_columns)], rows) if rows else ""


def summary(records: Iterable[Record]) -> str:
    """What `against_libraries` comes to: in each state the geometric mean of the speedups and the slowest cell."""
    pairs, said = _with_libraries(records, False), []
    for state in values.STATES:
        found = []
        for name, ours, library in pairs:
            with contextlib.suppress(Unknown):
                ratio = values.evaluate(f"{state}.limit_speedup", ours, library).number
                found.append((ratio, name))
        if found:
            mean, (worst, where) = as_ratio(geometric_mean([ratio for ratio, _ in found]), 4), min(found)
            few = "" if len(found) == len(pairs) else f"; over {len(found)} cells with such a time"
            said.append(f"{mean} in {state} (slowest: {as_ratio(worst)}, {where}{few})")
    if not said:
        return ""
    return f"Geometric mean of the speedups over {len(pairs)} cells: {'; '.join(said)}."


def _with_libraries(records: Iterable[Record], picks: bool) -> list[tuple[str, Record, Record]]:
    """(name of the cell, a record of this project, the fastest library's) of each cell that has both, as the cell
    answers in burst, or in sustained where nothing was timed in burst; in the order of `cell_names`. picks: of versions
    only what the dispatcher picks."""
    blocks: dict[Any, list[tuple[Record, Model]]] = {}
    for record, model in _speaking(r for r in records if r["time_us"]):
        blocks.setdefault(cell(record), []).append((record, model))
    pairs = {}
    for of_cell, block in blocks.items():
        if picks:
            picked = _picked(block[0][0])
            block = [(r, m) for r, m in block if spoken.is_peer(m) or m.kernel.label == picked]
        models = [model for _, model in block]
        answer = next((a for state in values.STATES if (a := spoken.answer(models, state))), None)
        if answer is not None and answer.ours is not None and answer.library is not None:
            of = {id(model): record for record, model in block}
            pairs[of_cell] = of[id(answer.ours)], of[id(answer.library)]
    return [(name, *pairs[of_cell]) for of_cell, name in cell_names(ours for ours, _ in pairs.values()).items()]


def comparison(records: Iterable[Record], cells: Sequence[str] = (), kernels: Sequence[str] = ()) -> str:
    """The record that speaks for each contender in each cell, fastest first; the cell is named once."""
    timed = select(records, cells, kernels)
    names = cell_names(timed)

    def first(record: Record) -> tuple[str, str]:
        shown = names.pop(cell(record), "")
        return shown, spoken.name(Model.model_validate(record))

    return _table(timed, TIMES, ("cell", "kernel"), first)


def of_pairs(pairs: Sequence[tuple[Record, Record]]) -> str:
    """One row for each (record, the record it is compared with): how many times faster the first is."""
    rows = []
    for record, before in pairs:
        cells = [_text(record, before, column) for column in SPEEDUPS]
        shown = [column[2] for column, text in zip(SPEEDUPS, cells, strict=True) if text]
        citation = cite(f"{record['id']} vs {before['id']}", shown)
        rows.append([str(record["device"]), problem_label(record), *_cited([text or "-" for text in cells], citation)])
    return grid(["device", "cell", *(column[0] for column in SPEEDUPS)], rows)


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
        shared, single = record.get("model_us"), one.get("model_us")
        pays = "-" if shared is None or single is None else "yes" if shared < single else "no"
        rows.append(
            [
                problem_label(record), str(record["tiling"]["ranks"]), str(record["tiling"]["exchange"]),
                *_cited([text or "-" for text in own], cite(record["id"], shown)),
                f"{ratio} {against}", pays,
            ]
        )  # fmt: skip
    header = ["cell", "GPUs", "exchange", *(column[0] for column in columns), "over one GPU (x)", "model: pays"]
    return grid(header, rows) if rows else ""


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
    return grid([*names, *(columns[i][0] for i in used)], rows) if rows else ""


def _cited(cells: Sequence[str], citation: str) -> list[str]:
    """The cells, the last of them with the citation of all."""
    return [*cells[:-1], f"{cells[-1]} {citation}"]


def _text(record: Record, other: Record | None, column: Column) -> str:
    _, unit, expression, digits = column
    try:
        return values.write(values.evaluate(expression, record, other), unit, digits)
    except Unknown:
        return ""


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))
