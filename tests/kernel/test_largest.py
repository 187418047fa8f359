"""Results hold for inputs as large as docs/serving.md says: on a CPU what runs there, and every version on a GPU."""

from __future__ import annotations

import math

import largest
import pytest

pytest.importorskip("torch")

from planning import plan_type

from mla_var3.catalogue import registry
from running import in_tritons_interpreter

ON_CPU = [f"{language}/{design}" for design in ("rmsnorm", "absorb_gemm") for language in ("torch", "cutile-dsl")]
ON_CPU.append("torch/merge_partials")
ON_GPU = [k.label for k in registry.all_kernels() if k.design in ("rmsnorm", "absorb_gemm", "merge_partials")]
ON_GPU = [label for label in ON_GPU if not label.startswith("peer/")]

INTERPRETED = """
import largest
from mla_var3.catalogue import registry
for name in ("rmsnorm", "merge_partials"):
    verdict = getattr(largest, name)(registry.get_plan(registry.KernelId.parse(f"triton/{name}")), "cpu")
    assert verdict.ok, (name, verdict.reason)
print(largest.absorb_gemm(registry.get_plan(registry.KernelId.parse("triton/absorb_gemm")), "cpu"))
"""


def holds(label: str, device: str) -> None:
    design = label.partition("/")[2]
    found = getattr(largest, design)(plan_type(label), device)
    if design == "absorb_gemm":
        assert found == (128 * 22.0**2, math.inf)
    else:
        assert found.ok, found.reason


@pytest.mark.parametrize("label", ON_CPU)
def test_on_a_cpu(label: str) -> None:
    holds(label, "cpu")


def test_triton_in_its_interpreter() -> None:
    plan_type("triton/absorb_gemm")
    assert in_tritons_interpreter("-c", INTERPRETED).splitlines()[-1] == "(61952.0, inf)"


@pytest.mark.gpu
@pytest.mark.parametrize("label", ON_GPU)
def test_on_a_gpu(label: str) -> None:
    holds(label, "cuda")
