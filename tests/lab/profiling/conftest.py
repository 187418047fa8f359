from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mla_var3.lab.profiling.modes import ncu, tools

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def bin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for fake profilers that alone is searched; reports are read through CSV."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(tools, "_PLACES", {})
    monkeypatch.setattr(ncu, "load_interface", lambda: None)
    return folder
