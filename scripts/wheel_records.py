"""What a wheel holds of results/: the records that the dispatcher's sources name as their evidence, and those of
quickstart's cells, by which `mla-var3 sweep experiment=quickstart` answers on a machine without a GPU. Hatchling runs
this when it builds a wheel; all other records stay in a checkout.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

EXPERIMENT = "conf/experiment/quickstart.yaml"
DISPATCH = "src/mla_var3/dispatch"
_ID = re.compile(r'"([0-9a-f]{12})"')


def kept(root: Path) -> Iterator[tuple[str, str]]:
    """(device, line of a record file) of each record that a wheel of this checkout holds."""
    sys.path.insert(0, str(root / "src"))
    try:
        from mla_var3.workload import problem_from_record
        from mla_var3.workload.decode import MlaProblem
    finally:
        sys.path.pop(0)
    asked = yaml.safe_load((root / EXPERIMENT).read_text(encoding="utf-8"))["cells"]
    cells = {MlaProblem(**cell) for cell in asked}
    heads = {cell.h for cell in cells}
    evidence = {found for file in (root / DISPATCH).rglob("*.py") for found in _ID.findall(file.read_text("utf-8"))}
    for file in sorted((root / "results").rglob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            problem = record["problem"]
            # Reading a problem takes many times as long as looking at one field of it.
            of_cells = record.get("time_us") and problem.get("h") in heads and problem_from_record(problem) in cells
            if of_cells or record["id"] in evidence:
                yield record["device"], line


class RecordsOfTheWheel(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # that one reads the checkout
            return
        self.folder = Path(tempfile.mkdtemp(prefix="mla_var3-wheel-"))
        for device, line in kept(Path(self.root)):
            with (self.folder / f"{device}.jsonl").open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        for path in sorted(self.folder.iterdir()):
            build_data["force_include"][str(path)] = f"mla_var3/data/results/{path.stem}/shipped.jsonl"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            shutil.rmtree(self.folder)
