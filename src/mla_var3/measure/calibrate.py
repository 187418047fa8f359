"""The limits of a run: what a large matrix product and a kernel that only reads reach here, now, in the same state;
where a problem writes much of what it moves, a kernel that copies, too, and where it writes rows with gaps between
them, one that copies such rows."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mla_var3.measure import timing
from mla_var3.measure.settings import BenchSettings

if TYPE_CHECKING:
    from mla_var3.measure.timing import Backend, Item
    from mla_var3.workload import Cost, Rows

MATMUL, READ, COPY, ROWS = "limit:matmul", "limit:read", "limit:copy", "limit:rows"


@dataclass(frozen=True)
class Limits:
    """matmul_tflops: dense bf16. read_gbps: 1e9 bytes a second, reads alone. copy_gbps: reads and writes together,
    half of them each, in order. rows_gbps: the same of rows that are written with gaps between them. None where it was
    not measured."""

    matmul_tflops: float
    read_gbps: float
    copy_gbps: float | None = None
    rows_gbps: float | None = None

    def limit_us(self, cost: Cost) -> float:
        """The least time of work, in microseconds."""
        return max(self._compute_us(cost), self._memory_us(cost))

    def bound(self, cost: Cost) -> str:
        """Which of the two sets it: "compute" or "memory"."""
        return "compute" if self._compute_us(cost) > self._memory_us(cost) else "memory"

    def _compute_us(self, cost: Cost) -> float:
        return cost.flops / self.matmul_tflops / 1e6

    def _memory_us(self, cost: Cost) -> float:
        """Writes with as many reads at the rate of a copy, of rows where they are such; the rest at that of reads."""
        copied = 2 * min(cost.written, cost.bytes - cost.written) if self.copy_gbps else 0
        of_rows = min(2 * cost.rows.bytes, copied) if self.rows_gbps and cost.rows else 0
        us = of_rows / (self.rows_gbps or 1.0) + (copied - of_rows) / (self.copy_gbps or 1.0)
        return us / 1e3 + (cost.bytes - copied) / self.read_gbps / 1e3


class LimitItems:
    """The limits as items that take turns beside the contenders of a cell: with that of a copy where some of them write
    much, and with one for each kind of rows that are written with gaps between them."""

    def __init__(self, backend: Backend, settings: BenchSettings, costs: Iterable[Cost] = ()) -> None:
        self._work: dict[str, float] = {}
        self._at: float | None = None
        self.items: list[Item] = []
        costs = [cost for cost in costs if cost.written]
        self._rows = {cost.rows[1:]: cost.rows for cost in costs if cost.rows}  # by width and pitch
        calls = backend.limit_calls()
        limits = {MATMUL: calls["matmul"], READ: calls["read"]}
        if costs:
            limits[COPY] = calls["copy"]
        limits |= {_name(rows): backend.rows_call(rows) for rows in self._rows.values()}
        for name, (call, work) in limits.items():
            self._work[name] = work
            item = timing.prepare(backend, name, [call], settings)
            item.is_limit = True
            self.items.append(item)

    @property
    def words(self) -> str:
        """What they are, for a record."""
        parts = ["bf16 8192^3 product", "a kernel that reads 2 GiB"]
        if COPY in self._work:
            parts.append("one that copies 1 GiB")
        parts += [f"one that copies rows of {width} bytes to every {pitch} bytes" for width, pitch in self._rows]
        return f"limits ({', '.join(parts)})"

    def age_s(self) -> float | None:
        """Seconds since they were last measured; None: not yet."""
        return None if self._at is None else time.monotonic() - self._at

    def measured(self) -> None:
        """Notes that all turns are over."""
        self._at = time.monotonic()

    def reset(self) -> None:
        """Forgets the samples, before they are measured anew."""
        self._at = None
        for item in self.items:
            item.samples.clear()
            item.readings.clear()

    def limits(self, state: str, rows: Rows | None = None) -> Limits | None:
        """What was reached in a state, in copies of such rows too; None when it was not measured."""
        us = {item.name: median for item in self.items if (median := item.median(state)) is not None}
        if len(us) < len(self.items):
            return None
        rate = {name: self._work[name] / us[name] for name in us}
        copied = [rate[name] / 1e3 if name in rate else None for name in (COPY, _name(rows) if rows else "")]
        return Limits(rate[MATMUL] / 1e6, rate[READ] / 1e3, *copied)

    def to_record(self, cost: Cost, age_s: float = 0.0) -> dict[str, Any]:
        """The record's `limits` for work. `bound` is the first measured state's; `age_s` says how long before the cell
        they were measured, where they are not its own."""
        record: dict[str, Any] = {"age_s": round(age_s, 1)} if age_s else {}
        for state in timing.STATES:
            found = self.limits(state, cost.rows)
            if found is not None:
                rates = {name: rate for name, rate in asdict(found).items() if rate is not None}
                record[state] = {**rates, "limit_us": found.limit_us(cost)}
                record.setdefault("bound", found.bound(cost))
        return record


def _name(rows: Rows) -> str:
    return f"{ROWS} {rows.width}/{rows.pitch}"


def measure_all(settings: BenchSettings | None = None, backend: Backend | None = None) -> dict[str, Limits]:
    """Both limits in each state of which the settings have rounds, measured in one process."""
    if backend is None:
        from mla_var3.measure.cuda_backend import CudaBackend

        backend = CudaBackend()
    settings = settings or BenchSettings()
    both = LimitItems(backend, settings)

    def failed(item: Item, error: Exception) -> None:
        raise error

    timing.take_turns(backend, both.items, settings, lambda item, state, number: None, failed)
    return {state: found for state in timing.STATES if (found := both.limits(state)) is not None}
