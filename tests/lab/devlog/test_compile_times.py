"""The slowest compile of each design stands in the entry of the version that takes it, with its record."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_var3.lab.devlog.evidence import beside
from mla_var3.record import Record, load


@pytest.fixture
def slowest(repo_root: Path) -> dict[str, Record]:
    """Design -> the compiled record that took the compiler longest, of those kept."""
    files = sorted((repo_root / "results").glob("*/*-compile_matrix.jsonl"))
    found: dict[str, Record] = {}
    for record in load(files).records:
        before = found.get(record.kernel.design)
        if before is None or (record.compile_seconds or 0.0) > (before.compile_seconds or 0.0):
            found[record.kernel.design] = record
    return found


def test_every_design_says_what_its_slowest_compile_takes(repo_root: Path, slowest: dict[str, Record]) -> None:
    # Those of designs in torch alone tell of nothing that is compiled.
    entries = {path.parent.name for path in repo_root.glob("devlogs/*/*.md") if not path.name.startswith("torch")}
    assert set(slowest) == entries
    for design, record in slowest.items():
        assert record.compile_seconds and record.resources and record.resources["code_bytes"] > 0
        page = repo_root / "devlogs" / design / f"{record.kernel.language}-v{record.kernel.version}.md"
        cited = [line for part in beside(page).parts for block in part.blocks for line in block.cited]
        told = [line.body.split()[1:] for line in cited if line.ids == [record.id]]
        assert told == [["compile_seconds", "resources.code_bytes"]], f"{page.name} of {design}: {record.id}"
