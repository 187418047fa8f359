"""A small project in a temporary folder: records of two versions, and the entry of one of them, without a mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_var3.catalogue import ledger, registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.lab.devlog import named
from mla_var3.workload.decode import MlaProblem

RecordOf = Callable[..., dict[str, Any]]
V0, V1 = KernelId("triton", "mla", "flash_mla", 0), KernelId("triton", "mla", "flash_mla", 1)
CELL = MlaProblem(b=128, s=1, h=128, t=4096)
FAST, SLOW, COMPILED = "aaaa11112222", "bbbb33334444", "cccc55556666"


def record_of(identity: str, kernel: KernelId = V0, burst: float | None = 220.2, **changes: Any) -> dict[str, Any]:
    """A record as the bench writes it; burst None makes a compile-only one."""
    cost = CELL.cost()
    record: dict[str, Any] = {
        "id": identity,
        "at": "2026-11-22T10:00:00Z",
        "experiment": "decode",
        "status": "compiled" if burst is None else "passed",
        "kernel": kernel.to_record(),
        "problem": CELL.to_record(),
        "tiling": {"tile_n": 64},
        "device": "h200",
        "resources": {
            "registers": 168,
            "smem": 232448,
            "spill_bytes": 0,
            "ctas_per_sm": 1,
            "instructions": {"HGMMA": 12},
        },
        "environment": {},
        "source": {"commit": "0123456789abcdef", "hash": "feedfeedfeedfeed"},
        "flops": cost.flops,
        "bytes": cost.bytes,
    }
    if burst is not None:
        record |= {
            "time_us": {
                state: {"median": factor * burst, "p10": factor * burst - 1.0, "p90": factor * burst + 1.0, "n": 20}
                for state, factor in (("burst", 1.0), ("sustained", 1.2))
            },
            "host_us": 9.25,
            "limits": {
                "burst": {"matmul_tflops": 803.0, "read_gbps": 4640.0, "limit_us": 181.9},
                "sustained": {"matmul_tflops": 683.0, "read_gbps": 4640.0, "limit_us": 213.8},
                "bound": "compute",
            },
            "error": {"out": 3.14e-4, "lse": 2e-7},
            "tuning": {"tried": 2, "trials": [{"time_us": None}, {"time_us": 231.0}]},
        }
    return {**record, **changes}


@pytest.fixture(autouse=True)
def same_code(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What records of made-up versions timed is what those compile to."""
    if "project" in request.fixturenames:
        monkeypatch.setattr(ledger, "standing", lambda *arguments: ledger.SAME)


@pytest.fixture
def records() -> dict[str, dict[str, Any]]:
    """By id: a fast and a slow version of one cell, and a compile-only record."""
    found = [record_of(SLOW, V0, 250.0), record_of(FAST, V1, 220.2), record_of(COMPILED, V1, None)]
    return {record["id"]: record for record in found}


GOOD = """---
design: flash_mla
language: triton
version: 1
date: 2026-11-22
verdict: kept
devices: [h200]
---
# triton/flash_mla_v1

## Location
`{source}`

## What changed
Keys are loaded once for both products.

## Hypothesis
Burst falls from 250 us to 225 us, because half of the shared memory traffic goes.

## Measured
It takes 220.2 us with 168 registers.

## Bottleneck
The softmax: the tensor cores wait for it.

## Verdict
**Kept**: faster in both states.

## Insights
Fewer loads matter more than more stages.
"""

BESIDE = f"""# of one chip
{SLOW}

[Measured]
> It takes
{FAST} burst resources.registers
"""


@pytest.fixture(name="record_of")
def record_maker() -> RecordOf:
    """`record_of` for tests that make records of their own."""
    return record_of


@pytest.fixture
def project(tmp_path: Path, records: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with results/ and one good entry, of a registered version whose source lies under it."""
    source = tmp_path / "src" / "flash_mla_v1.py"
    source.parent.mkdir()
    source.write_text("# kernel\n")
    monkeypatch.setattr(KernelId, "path", property(lambda self: source))
    monkeypatch.setattr(registry, "all_kernels", lambda: (V1,))
    known = named.labels_of
    monkeypatch.setattr(named, "labels_of", lambda root: known(root) | {V0.label})
    monkeypatch.setattr(registry, "source_hash", lambda kernel: "feedfeedfeedfeed")
    # Uncached, so that no other test meets what is said of these kernels.
    monkeypatch.setattr(ledger, "source_of", ledger.source_of.__wrapped__)
    results = tmp_path / "results" / "h200"
    results.mkdir(parents=True)
    lines = [json.dumps(record) + "\n" for record in records.values()]
    (results / "2026-11-22-decode.jsonl").write_text("".join(lines))
    entry = tmp_path / "devlogs" / "flash_mla" / "triton-v1.md"
    entry.parent.mkdir(parents=True)
    entry.write_text(GOOD.format(source="src/flash_mla_v1.py"))
    entry.with_suffix(".records").write_text(BESIDE)
    (tmp_path / "devlogs" / "README.md").write_text("# Entries\n")
    return tmp_path


@pytest.fixture
def entry(project: Path) -> Path:
    return project / "devlogs" / "flash_mla" / "triton-v1.md"
