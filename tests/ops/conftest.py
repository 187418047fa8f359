"""What the tests of this folder share is importable by them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine by which functions and operators compute on the CPU, a `CpuEngine`."""
    from ops_fakes import serve_on_cpu

    return serve_on_cpu(monkeypatch)
