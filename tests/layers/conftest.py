"""What the tests of this folder share is importable by them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "ops")]

#: Of each workload the design whose torch version computes on a CPU.
VERSIONS = {"norm": "rmsnorm", "rope": "rope_append", "gemm": "absorb_gemm", "decode": "flash_mla"}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Functions of `mla_var3.ops` compute on the CPU, each by its torch version; the engine that they use."""
    from ops_fakes import serve_on_cpu

    from mla_var3.catalogue.registry import KernelId
    from mla_var3.dispatch import Choice
    from mla_var3.ops import ways

    found = serve_on_cpu(monkeypatch)

    def choice(problem: Any, *_: Any) -> Choice:
        return Choice(KernelId.parse(f"torch/{VERSIONS[problem.workload]}"), (), "a test's")

    monkeypatch.setattr("mla_var3.dispatch.choose", choice)
    ways.way_for.cache_clear()
    yield found
    ways.way_for.cache_clear()
