"""Made-up records for the report: any number of cells, contenders, devices, days and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import made_up
from mla_var3.record import Record
from mla_var3.workload.decode import MlaProblem

Make = Callable[..., Record]


@pytest.fixture
def make() -> Make:
    """A record of a kernel on a problem: `us` microseconds in burst, a tenth more in sustained; limit `limit`."""
    return make_record


_numbers: Iterator[int] = iter(range(10**9))


def make_record(
    label: str = "cute-dsl/flash_mla",
    us: float | None = 100.0,
    *,
    limit: float | None = 50.0,
    spread: float = 0.01,
    day: str = "2026-11-21",
    device: str = "h200",
    torch: str = "2.11.0",
    status: str = "passed",
    reason: str = "",
    problem: MlaProblem | None = None,
    **fields: Any,
) -> Record:
    problem = problem or MlaProblem(b=1, t=4096)
    own: dict[str, Any] = {
        "id": f"{next(_numbers):012x}", "at": f"{day}T10:00:00Z", "status": status, "reason": reason, "device": device,
        "source": {"commit": "c" * 12, "hash": "0" * 16}, "tiling": {"tile_m": 64},
        "environment": {"gpu": device, "driver": "580", "packages": {"torch": torch}},
        "flops": problem.cost().flops, "bytes": problem.cost().bytes,
    }  # fmt: skip
    if us is not None:
        own |= {"error": {"out": 2e-3, "lse": 1e-6}, "method": "made up", "host_us": 4.0}
        if not label.startswith("peer/"):
            counts = {"HGMMA": 100, "UTMALDG": 10, "FFMA": 300, "BAR": 20, "LDL": 0, "total": 1000}
            own["resources"] = {
                "registers": 168, "smem": 223232, "spill_bytes": 0, "stack_bytes": 0, "threads": 384, "ctas_per_sm": 1,
                "instructions": counts,
            }  # fmt: skip
    return made_up.record(label, us, problem, limit=limit, hot=1.1, spread=spread, **(own | fields))


KERNELS = (
    "cute-dsl/flash_mla", "cute-dsl/flash_mla_v1", "cute-dsl/flash_mla_v2", "cute-dsl/flash_mla_v3",
    "cutile-dsl/flash_mla", "cutile-dsl/flash_mla_v1", "triton/flash_mla", "torch/flash_mla", "peer/flash_mla_lib",
    "peer/fa3_qv", "peer/flashinfer_fa3", "peer/flashinfer_fa2", "peer/tilelang_mla", "peer/fa4", "peer/cudnn_sdpa",
)  # fmt: skip


@pytest.fixture(scope="session")
def many() -> list[Record]:
    """Three thousand records, as a long regime map would bring."""
    return grid_of(3000)


def grid_of(count: int) -> list[Record]:
    """Records of a grid of cells, every kernel in each, as a regime map would bring."""
    records: list[Record] = []
    for h in (8, 16, 32, 64, 128):
        for s in (1, 2, 4, 8):
            for b in (1, 4, 16, 64, 256):
                for t in (512, 2048, 8192, 32768, 131072):
                    problem = MlaProblem(b=b, s=s, h=h, t=t, causal=s > 1)
                    for i, label in enumerate(KERNELS):
                        if len(records) == count:
                            return records
                        us = 50.0 + (7 * i + 3 * h + 5 * b + t // 512) % 41
                        records.append(make_record(label, us, problem=problem))
    return records
