"""merge_partials: what it compiles to, which tilings it takes, and that Triton's is right in its interpreter."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from planning import plan_type

from mla_var3.catalogue import libraries, registry
from mla_var3.check.judge import check
from mla_var3.device import Device
from mla_var3.dispatch import choose
from mla_var3.errors import UserError
from mla_var3.workload.merge import MergeProblem
from running import in_tritons_interpreter

H200 = Device.get("h200")
PROBLEMS = [MergeProblem(parts=n, dtype=dtype) for n in (2, 8) for dtype in ("bf16", "fp16")]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_nothing_spills(problem: MergeProblem) -> None:
    made = plan_type("triton/merge_partials")(problem, None, H200).plan_empty().compile(None, H200)
    assert made.resources.spill_bytes == 0 and made.warnings == ()
    # Every part's 16 columns a lane are two vectors, in flight together.
    assert made.resources.instructions["LDG"] >= 2 * problem.parts


@pytest.mark.parametrize("rows", [64, 65_536])
@pytest.mark.parametrize("problem", PROBLEMS[::2], ids=lambda p: p.label)
def test_cute_has_every_part_of_a_row_in_flight(problem: MergeProblem, rows: int, tmp_path: Path) -> None:
    """Every load of a lane stands behind the wait for the kernel before and in front of the first product, and an SM
    has enough of them for the memory's rate: 4.8 TB/s times some 1.1 us, over 132 SMs, is 40 KB."""
    plan = plan_type("cute-dsl/merge_partials")(problem.replace(tokens=rows, h=1), None, H200)
    made = plan.plan_empty().compile(tmp_path, H200, ("sass",))
    assert made.resources.spill_bytes == 0 and made.warnings == ()
    text = made.artefacts["sass"].read_text()
    loads = [i for i in range(len(text)) if text.startswith("LDG.E.NA.128", i)]
    assert len(loads) == problem.parts * plan.tiling.vectors
    assert text.index("PREEXIT") < text.index("ACQBULK") < loads[0] and loads[-1] < text.index("FFMA")
    warps = made.resources.ctas_per_sm * plan.tiling.warps
    assert warps * len(loads) * 512 >= 40_000


def test_cute_takes_odd_widths_and_many_parts() -> None:
    cute = plan_type("cute-dsl/merge_partials")
    for vectors, problem in ((2, MergeProblem(parts=1, k=520)), (1, MergeProblem(parts=17, k=96))):
        plan = cute(problem, cute.tiling_type(vectors, 2), H200)
        assert plan.plan_empty().compile(None, H200).resources.spill_bytes == 0
    assert "multiple" in cute(MergeProblem(k=100), None, H200).supported().reason
    assert "33 parts" in cute(MergeProblem(parts=33), None, H200).supported().reason
    assert "warps" in cute.tiling_type(2, 9).validate(PROBLEMS[0]).reason
    with pytest.raises(UserError, match="multiple of 16"):
        cute(PROBLEMS[0], None, H200).plan(torch.empty(9, dtype=torch.bfloat16)[1:], torch.empty(2))


def test_hopper_gets_the_kernel_in_cute() -> None:
    plan_type("cute-dsl/merge_partials")
    assert choose(MergeProblem(), H200).kernel.label == "cute-dsl/merge_partials"


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
    words = ["check", "triton/merge_partials", "--device", "cpu", "--problem", "parts=3,k=96"]
    assert "passed, 10 cases" in in_tritons_interpreter("-m", "mla_var3.cli", *words)


def test_what_torch_compiles_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled on the CPU."""
    peer = "torch_compile_merge_partials"
    library = libraries.Library(peer, "torch", Path(), "1", "an imitation")
    monkeypatch.setitem(libraries._LOOK, peer, lambda: library)
    plan = registry.get_plan(registry.KernelId("peer", "merge", peer))
    monkeypatch.setattr(sys.modules[plan.__module__], "compiled", lambda fn: fn)
    report = check(plan, MergeProblem(parts=3, k=64), device="cpu", seeds=[3])
    assert report.ok, report.reason
    assert {"own", "empty", "high", "in_place"} <= {c.name for c in report.cases}
