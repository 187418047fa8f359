"""The table of docs/cluster.md is what scripts/sweep_cost.py wrote, and within what a sweep may cost."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_table_of_costs_is_the_record() -> None:
    runs = json.loads((ROOT / "results" / "sweep_cost.json").read_text())["cells"]["runs"]
    rows = re.findall(r"^\| ([\d,]+) \| ([\d. |]+) \|$", (ROOT / "docs" / "cluster.md").read_text(), re.M)
    shown = {int(cells.replace(",", "")): [float(s) for s in seconds.split(" | ")] for cells, seconds in rows}
    measured: dict[int, list[float]] = {}
    for run in sorted(runs, key=lambda run: run["nodes"]):
        measured.setdefault(run["cells"], []).append(run["seconds"])
    assert shown and shown == measured
    assert max(run["driver_cpu_ms_per_cell"] for run in runs) < 5 and max(run["driver_mb"] for run in runs) < 500
