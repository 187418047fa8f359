"""The limits of a run: what a large matrix product and a kernel that only reads reach here, now, in the same state.

`python -m mla_var3.measure.calibrate` prints both states as JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError, nearest
from mla_var3.measure import timing
from mla_var3.measure.settings import BenchSettings

if TYPE_CHECKING:
    from mla_var3.measure.timing import Backend, Item

MATMUL, READ = "limit:matmul", "limit:read"


@dataclass(frozen=True)
class Limits:
    """matmul_tflops: dense bf16. read_gbps: 1e9 bytes a second, reads alone."""

    matmul_tflops: float
    read_gbps: float

    def limit_us(self, flops: float, bytes_: float) -> float:
        """The least time of work with these FLOPs and bytes, in microseconds."""
        return max(self._compute_us(flops), self._memory_us(bytes_))

    def bound(self, flops: float, bytes_: float) -> str:
        """Which of the two sets it: "compute" or "memory"."""
        return "compute" if self._compute_us(flops) > self._memory_us(bytes_) else "memory"

    def _compute_us(self, flops: float) -> float:
        return flops / self.matmul_tflops / 1e6

    def _memory_us(self, bytes_: float) -> float:
        return bytes_ / self.read_gbps / 1e3


class LimitItems:
    """The two limits as items that take turns beside the contenders of a cell."""

    def __init__(self, backend: Backend, settings: BenchSettings) -> None:
        self._work: dict[str, float] = {}
        self._at: float | None = None
        self.items: list[Item] = []
        calls = backend.limit_calls()
        for name, key in ((MATMUL, "matmul"), (READ, "read")):
            call, work = calls[key]
            self._work[name] = work
            item = timing.prepare(backend, name, [call], settings)
            item.is_limit = True
            self.items.append(item)

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

    def limits(self, state: str) -> Limits | None:
        """What was reached in a state; None when it was not measured."""
        matmul, read = (item.median(state) for item in self.items)
        if matmul is None or read is None:
            return None
        return Limits(self._work[MATMUL] / matmul / 1e6, self._work[READ] / read / 1e3)

    def to_record(self, flops: int, bytes_: int, age_s: float = 0.0) -> dict[str, Any]:
        """The record's `limits` for work with these FLOPs and bytes. `bound` is the first measured state's; `age_s`
        says how long before the cell they were measured, where they are not its own."""
        record: dict[str, Any] = {"age_s": round(age_s, 1)} if age_s else {}
        for state in timing.STATES:
            found = self.limits(state)
            if found is not None:
                record[state] = {**asdict(found), "limit_us": found.limit_us(flops, bytes_)}
                record.setdefault("bound", found.bound(flops, bytes_))
        return record


def measure_limits(state: str, settings: BenchSettings | None = None, backend: Backend | None = None) -> Limits:
    """Measures both limits in one state ("burst" or "sustained") on the GPU that is here.

    Raises `UserError` for another state, or where there is no GPU.
    """
    if state not in timing.STATES:
        raise UserError(f"state {state!r} is unknown: {nearest(state, timing.STATES)}.")
    return measure_all((state,), settings, backend)[state]


def measure_all(
    states: Sequence[str] = timing.STATES, settings: BenchSettings | None = None, backend: Backend | None = None
) -> dict[str, Limits]:
    """Both limits in each of the states, measured in one process."""
    import dataclasses

    if backend is None:
        from mla_var3.measure.cuda_backend import CudaBackend

        backend = CudaBackend()
    settings = settings or BenchSettings()
    if "burst" not in states:
        settings = dataclasses.replace(settings, burst_rounds=0)
    if "sustained" not in states:
        settings = dataclasses.replace(settings, sustained_rounds=0)
    both = LimitItems(backend, settings)

    def failed(item: Item, error: Exception) -> None:
        raise error

    timing.take_turns(backend, both.items, settings, lambda item, state, number: None, failed)
    return {state: found for state in states if (found := both.limits(state)) is not None}


if __name__ == "__main__":
    try:
        print(json.dumps({state: asdict(limits) for state, limits in measure_all().items()}))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
