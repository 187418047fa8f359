"""rope_append in every language: what it compiles to, which problems it takes, and that it is right on a CPU."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_var3.check.judge import check
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.kernel import registry
from mla_var3.workload.rope import RopeProblem, make_inputs, new_outputs

H200 = Device.get("h200")
COMPILED = ("cute-dsl/rope_append", "cutile-dsl/rope_append", "triton/rope_append")
PROBLEMS = [
    RopeProblem(tokens=4096),
    RopeProblem(tokens=1, interleaved=False),
    RopeProblem(tokens=4096, h=16, interleaved=False, dtype="fp16"),
    RopeProblem(tokens=4096, h=12, columns=576, index="int32"),
]


def plan_type(label: str) -> Any:
    kernel = registry.KernelId.parse(label)
    if (reason := registry.missing(kernel)) is not None:
        pytest.skip(reason)
    return registry.get_plan(kernel)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("label", COMPILED)
def test_nothing_spills(label: str, problem: RopeProblem) -> None:
    made = plan_type(label)(problem, None, H200).plan_empty().compile(None, H200)
    assert made.resources.spill_bytes == 0 and made.warnings == ()


def test_cute_has_enough_in_flight_for_the_memory_s_rate() -> None:
    """4.8 TB/s times some 1.1 us of latency, over 132 SMs, is 40 KB each."""
    plan = plan_type("cute-dsl/rope_append")(PROBLEMS[0], None, H200)
    resources = plan.plan_empty().compile(None, H200).resources
    lane = 2 * 16 * plan.tiling.heads
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
        assert kinds.count("table") == 4 and kinds == sorted(kinds)


def test_refusals_say_why() -> None:
    from mla_var3.kernel.cute_python.rope.rope_append.rope_append.rope_append import RopeAppendPlan, RopeAppendTiling

    assert "p = 32" in RopeAppendPlan.requires.accepts(RopeProblem(p=32)).reason
    assert "multiple" in RopeAppendPlan.requires.accepts(RopeProblem(k=500)).reason
    assert "up to 1024" in RopeAppendPlan.requires.accepts(RopeProblem(k=2048)).reason
    assert (
        "'evict_lasts' is unknown: did you mean"
        in RopeAppendTiling(prefetch="evict_lasts").validate(RopeProblem()).reason
    )
    assert "heads = 5" in RopeAppendTiling(5).validate(RopeProblem(), H200).reason
    problem = RopeProblem(tokens=2, h=8, positions=16)
    inputs = list(make_inputs(problem))
    inputs[1] = torch.empty(2 * 513, dtype=torch.bfloat16).view(2, 513)[:, :512]
    with pytest.raises(UserError, match="latent starts at"):
        RopeAppendPlan(problem, None, H200).plan(*inputs)


def test_weights_to_prefetch_are_those_that_the_tiling_asks_for() -> None:
    from mla_var3.kernel.cute_python.rope.rope_append.rope_append.rope_append import RopeAppendPlan, RopeAppendTiling

    problem = RopeProblem(tokens=2, h=8, positions=16)
    inputs = make_inputs(problem)
    outputs = new_outputs(problem, inputs[0])
    weight = torch.zeros(64, 64, dtype=torch.bfloat16)
    plain = RopeAppendPlan(problem, None, H200)
    prefetching = plain.with_tiling(RopeAppendTiling(prefetch="evict_normal"))
    with pytest.raises(UserError, match="'nothing' takes 0 weights, and 2 are given"):
        plain.plan_into(inputs, outputs, (weight, weight))
    with pytest.raises(UserError, match="'evict_normal' takes 2 weights, and 0 are given"):
        prefetching.plan(*inputs)
    wrong = [weight[:, 4:], weight[:, :60], weight.t(), torch.zeros(64, 60, dtype=torch.bfloat16)[:, :8]]
    for other in wrong:
        with pytest.raises(UserError, match="rows that begin at multiples of 16 bytes"):
            prefetching.plan_into(inputs, outputs, (weight, other))


@pytest.mark.parametrize("priority", ["evict_normal", "evict_last"])
def test_a_prefetch_waits_for_nothing_and_is_one_request_a_box(priority: str, tmp_path: Any) -> None:
    """Two loops, one a weight, each with its request to the L2 behind the one lane that is elected; no wait for the
    launch is on their way, and what rotates is as it was."""
    from mla_var3.kernel.cute_python.rope.rope_append.rope_append.rope_append import RopeAppendPlan, RopeAppendTiling

    plain = RopeAppendPlan(PROBLEMS[0], None, H200)
    plan = plain.with_tiling(RopeAppendTiling(2, 4, prefetch=priority))
    made = plan.plan_empty().compile(tmp_path, H200, ("ptx", "sass"))
    requests = [line for line in made.artefacts["ptx"].read_text().splitlines() if "cp.async.bulk.prefetch.L2" in line]
    assert len({line.split(",")[-1] for line in requests}) == 1 and len(requests) == 2
    steps = [
        word for line in made.artefacts["sass"].read_text().splitlines()
        for word in ("ACQBULK", "ELECT", "UBLKPF", "PREEXIT") if word in line
    ]  # fmt: skip
    assert steps == ["PREEXIT", "ACQBULK", "ACQBULK", "ELECT", "UBLKPF", "ELECT", "UBLKPF"]
    without = plain.plan_empty().compile(None, H200)
    assert made.resources.spill_bytes == 0 and made.resources.ctas_per_sm == without.resources.ctas_per_sm
    assert made.code.differs_from(without.code)


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
    assert len(report.cases) == 13


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
    assert given[0] is inputs[0] and len(given) == 10 and given[8:] == [None, None]
    assert new_outputs(problem, inputs[0])[1].shape == (2, 64, 576)
