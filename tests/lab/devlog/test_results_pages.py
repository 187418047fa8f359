"""docs/results/ is what scripts/results_pages.py makes of the records, and records say what docs say of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from mla_var3.record import load


@pytest.fixture
def pages_module(repo_root: Path) -> Any:
    spec = importlib.util.spec_from_file_location("results_pages", repo_root / "scripts" / "results_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_those_of_the_records(pages_module: Any, repo_root: Path) -> None:
    made = pages_module.pages()
    folder = repo_root / "docs" / "results"
    assert {p.name for p in folder.iterdir()} == set(made)
    for name, text in made.items():
        assert (folder / name).read_text(encoding="utf-8") == text, f"run scripts/results_pages.py ({name})"
    assert made["decode.md"].count("cute-dsl/flash_mla_v23") >= 17


def test_several_gpus_are_faster_where_the_model_says_so_and_peer_stores_the_fastest(
    pages_module: Any, repo_root: Path
) -> None:
    one = "one GPU"
    numbers = {"h100": [16], "h200": [16, 4]}
    for device, names in pages_module.OVER_GPUS.items():
        for name, number in zip(names, numbers[device], strict=True):
            cells: dict[str, dict[str, tuple[float, float]]] = {}
            for record in load([repo_root / "results" / name]).records:
                data = record.model_dump()
                assert data["status"] == "passed"
                way = data["tiling"].get("exchange", one)
                cells.setdefault(str(data["problem"]), {})[way] = data["time_us"]["burst"]["median"], data["model_us"]
            assert len(cells) == number
            for cell, ways in cells.items():
                assert set(ways) == {one, "all_gather", "collective", "symmetric"}
                for way, (took, predicted) in ways.items():
                    assert (predicted < ways[one][1]) == (took < ways[one][0]), (cell, way)
                    assert way == one or took >= ways["symmetric"][0], (cell, way)
