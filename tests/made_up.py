"""Records of measurements that nobody made."""

from __future__ import annotations

import re
from typing import Any

from mla_var3.catalogue.registry import KernelId
from mla_var3.record import Record, new_id
from mla_var3.workload import Problem
from mla_var3.workload.decode import MlaProblem


def kernel_of(label: str) -> dict[str, Any]:
    """The kernel of a record, from its label: of attention, whether it is here or not."""
    match = re.fullmatch(r"(.+)/(.+?)(?:_v(\d+))?", label)
    assert match
    return KernelId(match[1], "mla", match[2], int(match[3] or 0)).to_record()


def record(
    kernel: str | KernelId,
    us: float | None = 100.0,
    problem: Problem | None = None,
    /,
    *,
    limit: float | None = 50.0,
    hot: float = 1.0,
    spread: float = 0.0,
    **fields: Any,
) -> Record:
    """us: in burst, `hot` times that sustained, as of the limit; without it nothing was timed. spread: of p10 and p90,
    as a part of the time. fields: over what the others make."""
    data: dict[str, Any] = {
        "id": new_id(), "at": "2026-11-21T10:00:00Z", "experiment": "made-up", "status": "passed",
        "kernel": kernel_of(kernel) if isinstance(kernel, str) else kernel.to_record(),
        "problem": (problem or MlaProblem(b=1, t=4096)).to_record(), "device": "h200",
        "source": {"commit": None, "hash": "0"}, "requested": "default", "mode": "time",
    }  # fmt: skip
    states = (("burst", 1.0), ("sustained", hot))
    if us is not None:
        data["error"] = {"out": 1e-3, "lse": 1e-6}
        data["time_us"] = {
            state: {"median": us * f, "p10": us * f * (1 - spread), "p90": us * f * (1 + spread), "n": 5}
            for state, f in states
        }
    if us is not None and limit is not None:
        limits = {s: {"matmul_tflops": 800.0, "read_gbps": 4600.0, "limit_us": limit * f} for s, f in states}
        data["limits"] = {**limits, "bound": "compute"}
    return Record.model_validate(data | fields)
