"""merge_partials: what it compiles to, which tilings it takes, and that Triton's is right in its interpreter."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_var3.check.judge import check
from mla_var3.device import Device
from mla_var3.kernel import registry
from mla_var3.kernel.peer.prims import find
from mla_var3.workload.merge import MergeProblem

H200 = Device.get("h200")
PROBLEMS = [MergeProblem(parts=n, dtype=dtype) for n in (2, 8) for dtype in ("bf16", "fp16")]


def plan_type(label: str) -> Any:
    kernel = registry.KernelId.parse(label)
    if (reason := registry.missing(kernel)) is not None:
        pytest.skip(reason)
    return registry.get_plan(kernel)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_nothing_spills(problem: MergeProblem) -> None:
    made = plan_type("triton/merge_partials")(problem, None, H200).plan_empty().compile(None, H200)
    assert made.resources.spill_bytes == 0 and made.warnings == ()
    # Every part's 16 columns a lane are two vectors, in flight together.
    assert made.resources.instructions["LDG"] >= 2 * problem.parts


def test_tilings_and_problems_that_are_refused() -> None:
    plan = plan_type("triton/merge_partials")
    assert len(plan(PROBLEMS[0], None, H200).autotune_configs()) >= 8
    assert "33 parts" in plan(MergeProblem(parts=33), None, H200).supported().reason
    assert "8192 columns" in plan(MergeProblem(k=8192), None, H200).supported().reason
    tiling = plan.tiling_type(rows=3)
    assert "power of two" in tiling.validate(PROBLEMS[0]).reason
    assert "64 columns" not in str(plan(MergeProblem(k=4096), None, H200).feasible().reason)


def test_right_in_the_interpreter() -> None:
    plan_type("triton/merge_partials")
    words = [sys.executable, "-m", "mla_var3.cli", "check", "triton/merge_partials", "--device", "cpu"]
    done = subprocess.run(
        [*words, "--problem", "parts=3,k=96"], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "passed, 9 cases" in done.stdout, done.stdout + done.stderr


def test_what_torch_compiles_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled on the CPU."""
    peer = "torch_compile_merge_partials"
    library = find.Library(peer, "torch", Path(), "1", "an imitation")
    monkeypatch.setitem(find._LOOK, peer, lambda: library)
    plan = registry.get_plan(registry.KernelId("peer", "merge", peer))
    monkeypatch.setattr(sys.modules[plan.__module__], "compiled", lambda fn: fn)
    report = check(plan, MergeProblem(parts=3, k=64), device="cpu", seeds=[3])
    assert report.ok, report.reason
    assert {"own", "empty", "high", "in_place"} <= {c.name for c in report.cases}
