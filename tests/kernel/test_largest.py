"""Results hold for inputs as large as docs/serving.md says: on a CPU what runs there, and every version on a GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import largest
import pytest

pytest.importorskip("torch")

from mla_var3.catalogue import registry

ON_CPU = [f"{language}/{design}" for design in ("rmsnorm", "absorb_gemm") for language in ("torch", "cutile-dsl")]
ON_CPU.append("torch/merge_partials")
ON_GPU = [k.label for k in registry.all_kernels() if k.design in ("rmsnorm", "absorb_gemm", "merge_partials")]
ON_GPU = [label for label in ON_GPU if not label.startswith("peer/")]

# The interpreter is chosen when a kernel is decorated, so a process has it or not.
INTERPRETED = """
import sys
sys.path.insert(0, sys.argv[1])
import largest
from mla_var3.catalogue import registry
for name in ("rmsnorm", "merge_partials"):
    verdict = getattr(largest, name)(registry.get_plan(registry.KernelId.parse(f"triton/{name}")), "cpu")
    assert verdict.ok, (name, verdict.reason)
print(largest.absorb_gemm(registry.get_plan(registry.KernelId.parse("triton/absorb_gemm")), "cpu"))
"""


def holds(label: str, device: str) -> None:
    kernel = registry.KernelId.parse(label)
    if (reason := registry.missing(kernel)) is not None:
        pytest.skip(reason)
    found = getattr(largest, kernel.design)(registry.get_plan(kernel), device)
    if kernel.design == "absorb_gemm":
        assert found == (128 * 22.0**2, math.inf)
    else:
        assert found.ok, found.reason


@pytest.mark.parametrize("label", ON_CPU)
def test_on_a_cpu(label: str) -> None:
    holds(label, "cpu")


def test_triton_in_its_interpreter(repo_root: Path) -> None:
    if (reason := registry.missing("triton")) is not None:
        pytest.skip(reason)
    source = os.pathsep.join([str(repo_root / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(Path(__file__).parent)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": source}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "(61952.0, inf)"


@pytest.mark.gpu
@pytest.mark.parametrize("label", ON_GPU)
def test_on_a_gpu(label: str) -> None:
    holds(label, "cuda")
