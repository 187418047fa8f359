"""Puts this folder on the path, for the tests and for the workers they start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(autouse=True)
def _fakes_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", HERE if not inherited else os.pathsep.join((HERE, inherited)))
