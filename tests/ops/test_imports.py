"""Importing the functions of a serving engine costs nothing that is not used yet."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "cutlass", "cuda.tile", "pandas", "pydantic", "hydra", "numpy")


@pytest.mark.parametrize("module", ["mla_var3.ops", "mla_var3.ops.flash_mla", "mla_var3.dispatch"])
def test_nothing_heavy_is_loaded(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
