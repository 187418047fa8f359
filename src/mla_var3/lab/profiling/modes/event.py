"""A short timing between CUDA events: cold L2, a cool chip, no graph. `mla-var3 bench` is the one to quote."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mla_var3.measure import timing
from mla_var3.measure.cuda_backend import CudaBackend

CALLS = 20
WARM = 5
#: Read before every call: more than any L2 holds.
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
    backend = CudaBackend()
    for _ in range(WARM):
        kernel.launch()
    backend.synchronize()
    device, host, reading = backend.singles(kernel.launch, calls, FLUSH_BYTES)
    found = timing.stats(device)
    return Timing(
        found["median"], found["p10"], found["p90"], calls, timing.percentile(host, 0.5), reading.get("sm_mhz")
    )
