"""A small project: records, one good optimization, one good reference page."""

from __future__ import annotations

from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[3] / "results"
RECORD = "022ea24da681"

GOOD = """\
---
kind: optimization
title: Hold more in flight
date: 2026-11-21
languages: [cute-dsl]
archs: [sm_90a]
applies:
  - bound: memory
    problem: {rows: "<= 32", b: ">= 8"}
    counters: {dram: "< 85", stall.long_scoreboard: ">= 20"}
  - times: {sustained / burst: "> 1.05"}
metrics: {dram: up, sustained / burst: down}
---
# Hold more in flight
More stages, and the memory is never idle.

## When to apply
Where the throughput of memory is under its limit.

## Mechanism
Latency times bandwidth is what must be in flight.

## Metrics affected
The throughput of DRAM goes up.

## Implementation
See `src/kernel.py`, and [the other entry](other.md#what-it-says).

## Evidence
- It takes 235.4 us where it stands alone.

## Pitfalls
Shared memory has an end somewhere.

## Interactions
None with the others that are known.
"""

BESIDE = f"""\
[Evidence]
> It takes
{RECORD} burst
"""

OTHER = """\
---
kind: reference
title: Another page
language: cute-dsl
date: 2026-11-21
checked: [nvidia-cutlass-dsl 4.8.1]
keywords: [swizzle, layout]
---
# Another page
What is said of layouts.

## What it says
*Compiled*. The block below.

```python host
x = 1
assert x == 1
```
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with `devlogs`, the decode records, and two pages."""
    (tmp_path / "devlogs").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "kernel.py").write_text("")
    results = tmp_path / "results" / "h200"
    results.mkdir(parents=True)
    for path in sorted((RESULTS / "h200").glob("2026-11-21-decode-earlier.jsonl")):
        lines = [line for line in path.read_text().splitlines() if RECORD in line]
        (results / path.name).write_text("\n".join(lines) + "\n")
    pages = tmp_path / "docs" / "knowledge"
    (pages / "optimizations").mkdir(parents=True)
    (pages / "languages" / "cute-dsl").mkdir(parents=True)
    (pages / "optimizations" / "flight.md").write_text(GOOD.replace("(other.md", "(../languages/cute-dsl/other.md"))
    (pages / "optimizations" / "flight.records").write_text(BESIDE)
    (pages / "languages" / "cute-dsl" / "other.md").write_text(OTHER)
    return tmp_path


@pytest.fixture
def entry(project: Path) -> Path:
    return project / "docs/knowledge/optimizations/flight.md"


@pytest.fixture
def reference(project: Path) -> Path:
    return project / "docs/knowledge/languages/cute-dsl/other.md"
