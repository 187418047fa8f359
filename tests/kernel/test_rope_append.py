"""rope_append in every language: what it compiles to, which problems it takes, and that it is right on a CPU."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planning import plan_type

from mla_var3.check.judge import check
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.workload.rope import RopeProblem, make_inputs, new_outputs

H200 = Device.get("h200")
COMPILED = ("cute-dsl/rope_append", "cutile-dsl/rope_append", "triton/rope_append")
PROBLEMS = [
    RopeProblem(tokens=4096),
    RopeProblem(tokens=1, interleaved=False),
    RopeProblem(tokens=4096, h=16, interleaved=False, dtype="fp16"),
    RopeProblem(tokens=4096, h=12, columns=576, index="int32"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("label", COMPILED)
def test_nothing_spills(label: str, problem: RopeProblem) -> None:
    made = plan_type(label)(problem, None, H200).plan_empty().compile(None, H200)
    assert made.resources.spill_bytes == 0 and made.warnings == ()


def test_cute_has_enough_in_flight_for_the_memory_s_rate() -> None:
    """4.8 TB/s times some 1.1 us of latency, over 132 SMs, is 40 KB each."""
    plan = plan_type("cute-dsl/rope_append")(PROBLEMS[0], None, H200)
    resources = plan.plan_empty().compile(None, H200).resources
    lane = 16 * plan.tiling.heads
    assert resources.ctas_per_sm * plan.tiling.warps * 32 * lane >= 40_000


@pytest.mark.parametrize("problem", PROBLEMS[:3], ids=lambda p: p.label)
def test_cute_waits_for_the_position_behind_all_other_loads(problem: RopeProblem, tmp_path: Any) -> None:
    """Behind each wait for the launch: vectors past L1, then the table, whose rows the position says."""
    made = plan_type("cute-dsl/rope_append")(problem, None, H200).plan_empty().compile(tmp_path, H200, ("sass",))
    lines = made.artefacts["sass"].read_text().splitlines()
    loads = [line for line in lines if "LDG.E" in line or "ACQBULK" in line]
    parts = "\n".join(loads).split("ACQBULK")[1:]
    assert len(parts) == 2  # a key, and query heads
    for part in parts:
        kinds = [
            "once" if ".NA." in line else "table" for line in part.splitlines() if "LDG.E" in line and "128" in line
        ]
        assert kinds.count("table") == (2 if problem.interleaved else 4) and kinds == sorted(kinds)


def test_refusals_say_why() -> None:
    from mla_var3.kernel.cute_python.rope.rope_append.rope_append.rope_append import RopeAppendPlan, RopeAppendTiling

    assert "p = 32" in RopeAppendPlan.requires.accepts(RopeProblem(p=32)).reason
    assert "multiple" in RopeAppendPlan.requires.accepts(RopeProblem(k=500)).reason
    assert "up to 1024" in RopeAppendPlan.requires.accepts(RopeProblem(k=2048)).reason
    assert "heads = 9" in RopeAppendTiling(9).validate(RopeProblem(), H200).reason
    problem = RopeProblem(tokens=2, h=8, positions=16)
    inputs = list(make_inputs(problem))
    inputs[1] = torch.empty(2 * 513, dtype=torch.bfloat16).view(2, 513)[:, :512]
    with pytest.raises(UserError, match="latent starts at"):
        RopeAppendPlan(problem, None, H200).plan(*inputs)


@pytest.mark.parametrize("label", COMPILED)
def test_every_tiling_that_is_tuned_is_feasible(label: str) -> None:
    for problem in PROBLEMS:
        configs = plan_type(label)(problem, None, H200).autotune_configs()
        assert len(configs) >= 3 and all(t.validate(problem, H200) for t in configs)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("label", ["torch/rope_append", "cutile-dsl/rope_append"])
def test_right_on_a_cpu(label: str, interleaved: bool) -> None:
    problem = RopeProblem(tokens=3, h=6, positions=1024, interleaved=interleaved)
    report = check(plan_type(label), problem, device="cpu", seeds=[5])
    assert report.ok, report.reason
    assert len(report.cases) == 14


def test_outputs_of_the_caller_s_are_launched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """q itself, and pages that lie apart."""
    from types import SimpleNamespace

    from mla_var3.toolchain import aot

    problem = RopeProblem(tokens=3, h=8, positions=64)
    inputs = make_inputs(problem)
    cache = torch.empty((4, 2 * 64, 576), dtype=torch.bfloat16)[:, :64]
    given: list[Any] = []
    monkeypatch.setattr(
        aot, "compiled_host", lambda *_, **__: SimpleNamespace(handle=lambda *given_: given.extend(given_))
    )
    plan = plan_type("cute-dsl/rope_append")(problem, None, H200)
    plan.plan_into(inputs, (inputs[0], cache))()
    assert given[0] is inputs[0] and len(given) == 8
    assert new_outputs(problem, inputs[0])[1].shape == (2, 64, 576)
