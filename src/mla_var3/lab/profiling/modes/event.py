"""A short timing between CUDA events: cold L2, a cool chip, no graph. `mla-var3 bench` is the one to quote."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mla_var3.measure import timing
from mla_var3.measure.cuda_backend import LEAD_IN_CYCLES
from mla_var3.measure.environment import Sensors

CALLS = 20
WARM = 5
#: Read before every call: more than any L2 holds. Read and not written, so that no dirty lines are left to write back.
FLUSH_BYTES = 256 << 20

METHOD = (
    "{n} single calls between CUDA events, each after {mb} MB were read (cold L2), queued behind a spinning "
    "kernel; cool chip"
)


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call. sm_mhz: the clock while it ran, where it can be read. host_us: of one launch."""

    median: float
    p10: float
    p90: float
    n: int
    host_us: float
    sm_mhz: float | None = None

    @property
    def method(self) -> str:
        return METHOD.format(n=self.n, mb=FLUSH_BYTES >> 20)

    def to_record(self) -> dict[str, Any]:
        return {**asdict(self), "method": self.method}


def time_call(kernel: Any, calls: int = CALLS) -> Timing:
    """Times `kernel.launch` on the current CUDA device."""
    import time

    import torch

    for _ in range(WARM):
        kernel.launch()
    torch.cuda.synchronize()
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    largest = torch.zeros((), device="cuda")
    torch.amax(flush, 0, out=largest)
    sensors = Sensors()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    host = []
    torch.cuda._sleep(LEAD_IN_CYCLES)
    for start, end in pairs:
        torch.amax(flush, 0, out=largest)
        start.record()
        before = time.perf_counter_ns()
        kernel.launch()
        host.append((time.perf_counter_ns() - before) / 1e3)
        end.record()
    reading = sensors.read()
    torch.cuda.synchronize()
    found = timing.stats([1e3 * start.elapsed_time(end) for start, end in pairs])
    del flush
    return Timing(
        found["median"], found["p10"], found["p90"], calls, timing.percentile(host, 0.5), reading.get("sm_mhz")
    )
