"""What the tests of this folder share is importable by them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def interpreted() -> Iterator[None]:
    """cuTile's kernels run on the CPU."""
    cutile_cpu = pytest.importorskip("mla_var3.cutile_cpu")
    with cutile_cpu.in_place_of_launch():
        yield
