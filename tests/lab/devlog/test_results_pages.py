"""docs/results/ is what scripts/results_pages.py makes of the records."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_the_pages_are_those_of_the_records(repo_root: Path) -> None:
    path = repo_root / "scripts" / "results_pages.py"
    spec = importlib.util.spec_from_file_location("results_pages", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.pages()
    folder = repo_root / "docs" / "results"
    assert {p.name for p in folder.iterdir()} == set(made)
    for name, text in made.items():
        assert (folder / name).read_text(encoding="utf-8") == text, f"run scripts/results_pages.py ({name})"
    assert made["decode.md"].count("cute-dsl/flash_mla_v23") >= 17
