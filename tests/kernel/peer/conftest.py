"""A fetched folder with empty objects, so that peers are found, and imitations of the libraries behind them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Makes a file of the fetched package that is on Python's path: fetched("vllm/x.so", version="1")."""
    package = tmp_path / "site" / "mla_var3_peers"
    files: dict[str, dict[str, str]] = {}
    monkeypatch.syspath_prepend(str(package.parent))

    def make(relative: str, version: str = "1.2", origin: str = "an imitation", text: str = "") -> Path:
        path = package / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        files[relative] = {"version": version, "origin": origin}
        (package / "manifest.json").write_text(json.dumps({"files": files}))
        importlib.invalidate_caches()
        return path

    yield make
    importlib.invalidate_caches()
