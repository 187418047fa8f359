"""SYNTHETIC evidence: kernels whose bottleneck is known because the figures were made up for it.

Nothing here was measured. The figures are plausible for an H200 (132 SMs, top clock 1980 MHz) and agree with each
other: a stall that is large goes with a unit that is idle, shares of stalls sum up to at most 100 %.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mla_var3.catalogue.registry import KernelId
from mla_var3.lab.diagnosis.evidence import Evidence
from mla_var3.lab.diagnosis.profiles import Profile
from mla_var3.workload.decode import MlaProblem

KERNEL = KernelId("cute-dsl", "mla", "flash_mla", 23)
#: A version that states no technique that it has.
PLAIN = KernelId("cute-dsl", "mla", "flash_mla", 0)
WIDE = MlaProblem(b=128, h=128, t=4096)
FEW = MlaProblem(b=128, h=8, t=4096)
#: A pipelined kernel with warpgroup products, of which each case changes what it is about.
INSTRUCTIONS = {
    "HGMMA": 176, "HMMA": 0, "UTMALDG": 18, "UBLKCP": 0, "LDGSTS": 0, "LDL": 0, "STL": 0, "WARPGROUP": 55,
    "USETMAXREG": 2, "total": 5300,
}  # fmt: skip
RESOURCES = {
    "registers": 168, "smem": 223232, "smem_static": 0, "smem_dynamic": 223232, "spill_bytes": 0, "stack_bytes": 0,
    "threads": 384, "ctas_per_sm": 1,
}  # fmt: skip
FIGURES = {
    "duration_us": 300.0, "tensor": 55.0, "dram": 43.0, "dram_read": 623.0, "dram_write": 2.6, "l2_hit": 14.0,
    "l2": 55.0, "l1": 52.0, "occupancy": 18.5, "eligible": 0.3, "issue": 0.22, "clock": 1905.0, "waves": 1.94,
}  # fmt: skip
STALLS = {"long_scoreboard": 22.0, "barrier": 12.0, "wait": 10.0, "gmma": 8.0, "short_scoreboard": 3.0}


def facts(
    problem: MlaProblem = WIDE,
    *,
    time_us: float = 300.0,
    figures: Mapping[str, float] | None = None,
    stalls: Mapping[str, float] | None = None,
    resources: Mapping[str, Any] | None = None,
    instructions: Mapping[str, int] | None = None,
    tiling: Mapping[str, Any] | None = None,
    counters: bool = True,
) -> dict[str, Any]:
    """What `mla-var3 profile` would have left of such a kernel; SYNTHETIC."""
    cost = problem.cost()
    compute, memory = cost.flops / 803 / 1e6, cost.bytes / 4640 / 1e3
    limit = max(compute, memory)
    waits = {**STALLS, **(stalls or {})}
    assert sum(waits.values()) <= 100, "shares of warp time"
    launch = {
        "name": "synthetic",
        "figures": {**FIGURES, "duration_us": time_us, **(figures or {})},
        "stalls": waits,
        "metrics": {},
    }
    return {
        "kernel": KERNEL.label,
        "tiling": {"tile_m": 64, "tile_n": 64, "num_pipeline_stages": 2, **(tiling or {})},
        "roofline": {
            "flops": cost.flops, "bytes": cost.bytes, "limit_us": limit,
            "bound": "compute" if compute >= memory else "memory", "source": "SYNTHETIC",
            "tflops": 803.0, "gbps": 4640.0,
        },
        "time_us": time_us,
        "time_method": "SYNTHETIC",
        "percent_of_limit": 100 * limit / time_us,
        "timing": None,
        "resources": {**RESOURCES, **(resources or {}), "instructions": {**INSTRUCTIONS, **(instructions or {})}},
        "warnings": [],
        "launches": [launch] if counters else [],
        "spans": [],
        "calls": 1,
        "notes": ["SYNTHETIC: made up for a test"],
    }  # fmt: skip


def params(problem: MlaProblem = WIDE) -> dict[str, Any]:
    return {
        "at": "20260101T000000Z",
        "request": {"kernel": KERNEL.to_record(), "problem": problem.to_record(), "mode": "ncu", "baseline": None},
        "device": "h200",
        "source": {"hash": {KERNEL.label: "5e47e71c5e47e71c"}},
    }


def evidence(
    problem: MlaProblem = WIDE,
    record: Mapping[str, Any] | None = None,
    *,
    kernel: KernelId = PLAIN,
    **changes: Any,
) -> Evidence:
    """Evidence of one synthetic profile. changes: of `facts`."""
    one = facts(problem, **changes)
    profile = Profile(Path("synthetic"), kernel, problem, one, params(problem))
    return Evidence(kernel, problem, "h200", one["tiling"], profile, record, sources=["SYNTHETIC"])


def write_profile(folder: Path, problem: MlaProblem = WIDE, **changes: Any) -> Path:
    """The same as a folder on disk."""
    folder.mkdir(parents=True)
    (folder / "facts.json").write_text(json.dumps({"kernels": [facts(problem, **changes)]}))
    (folder / "params.json").write_text(json.dumps(params(problem)))
    (folder / "report.md").write_text("# SYNTHETIC\n")
    return folder


def record(**changes: Any) -> dict[str, Any]:
    """A SYNTHETIC timed record of `WIDE`."""
    cost = WIDE.cost()
    made: dict[str, Any] = {
        "id": "abcdef012345",
        "at": "2026-01-01T00:00:00Z",
        "experiment": "synthetic",
        "status": "passed",
        "kernel": KERNEL.to_record(),
        "problem": WIDE.to_record(),
        "tiling": {"tile_m": 64, "tile_n": 64, "num_pipeline_stages": 2},
        "device": "h200",
        "time_us": {
            s: {"median": us, "p10": us, "p90": us, "n": 5} for s, us in (("burst", 300.0), ("sustained", 350.0))
        },
        "host_us": 5.0,
        "limits": {
            "burst": {"matmul_tflops": 800.0, "read_gbps": 4600.0, "limit_us": 182.5},
            "sustained": {"matmul_tflops": 680.0, "read_gbps": 4600.0, "limit_us": 214.7},
            "bound": "compute",
        },
        "error": {"out": 1e-3, "lse": 1e-6},
        "resources": {**RESOURCES, "instructions": INSTRUCTIONS},
        "environment": {},
        "source": {"commit": None, "hash": "5e47e71c5e47e71c"},
        "flops": cost.flops,
        "bytes": cost.bytes,
    }  # fmt: skip
    return {**made, **changes}
