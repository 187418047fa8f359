"""packed_append in every language: what it compiles to, which problems it takes, and that it is right on a CPU."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planning import plan_type, right_in_tritons_interpreter

from mla_var3.check.judge import check
from mla_var3.device import Device
from mla_var3.dispatch import choose
from mla_var3.errors import UserError
from mla_var3.packed_cache import NO_ROPE, V41
from mla_var3.workload.packed_append import PackedAppendProblem, make_inputs, new_outputs

H200 = Device.get("h200")
COMPILED = ("cute-dsl/packed_append", "triton/packed_append")
PROBLEMS = [
    PackedAppendProblem(tokens=4096),
    PackedAppendProblem(tokens=1, h=16, powers=False, interleaved=False),
    PackedAppendProblem(tokens=4096, h=64, layout="v4", columns=512, index="int32", page=256),
    PackedAppendProblem(tokens=4096, h=12, layout="flat", interleaved=False),
    PackedAppendProblem(tokens=4096, layout="v32_no_rope"),
    PackedAppendProblem(tokens=4096, layout="v32_no_rope", powers=False, index="int32", page=1),
    PackedAppendProblem(tokens=4096, layout="flat_no_rope"),
]
SMALL: list[dict[str, Any]] = [
    {"tokens": 2, "h": 2, "positions": 64, "page": 2, "layout": layout, "interleaved": layout != "v4"}
    for layout in ("v32", "v4", "flat", "v41", "v41_fp4", "v41_planar", "v41_fp4_planar")
]
SMALL[4]["interleaved"] = SMALL[5]["interleaved"] = False
SMALL += [
    {"tokens": 2, "page": 2, "layout": "v32_no_rope"},
    {"tokens": 2, "page": 2, "layout": "flat_no_rope", "rest": 3},
]
#: Of the check, on a CPU.
COUNTS = {"v32": 17, "v32_no_rope": 14, "flat_no_rope": 13}


@pytest.mark.parametrize("layout", V41)
@pytest.mark.parametrize("label", COMPILED)
def test_nothing_spills_in_v41(label: str, layout: str) -> None:
    problem, plan = PackedAppendProblem(tokens=4096, h=64, layout=layout, columns=512, page=256), plan_type(label)
    made = plan(problem, None, H200).plan_empty().compile(None, H200)
    assert made.resources.spill_bytes == 0 and made.warnings == ()


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("label", COMPILED)
def test_nothing_spills(label: str, problem: PackedAppendProblem) -> None:
    made = plan_type(label)(problem, None, H200).plan_empty().compile(None, H200)
    assert made.resources.spill_bytes == 0 and made.warnings == ()


def test_cute_has_enough_in_flight_for_the_memory_s_rate() -> None:
    """4.8 TB/s times some 1.1 us of latency, over 132 SMs, is 40 KB each."""
    plan = plan_type("cute-dsl/packed_append")(PROBLEMS[0], None, H200)
    resources = plan.plan_empty().compile(None, H200).resources
    assert resources.ctas_per_sm * plan.tiling.warps * 32 * 2 * 16 * plan.tiling.heads >= 40_000


def test_cute_writes_eight_codes_at_a_time(tmp_path: Path) -> None:
    """Codes of each 256 columns by one store of 8 bytes, and rope by two of 16."""
    made = plan_type("cute-dsl/packed_append")(PROBLEMS[0], None, H200).plan_empty().compile(tmp_path, H200, ("sass",))
    stores = [
        line.split("STG")[1].split()[0] for line in made.artefacts["sass"].read_text().splitlines() if "STG" in line
    ]
    assert sum(".64" in x for x in stores) == 2 and not any(".U8" in x for x in stores)


def test_torch_is_right_on_a_cpu() -> None:
    for fields in SMALL:
        report = check(plan_type("torch/packed_append"), PackedAppendProblem(**fields), device="cpu", seeds=[5])
        assert report.ok, report.reason
        assert len(report.cases) == COUNTS.get(fields["layout"], 16)


@pytest.mark.slow
def test_triton_is_right_in_its_interpreter() -> None:
    work = []
    for fields in SMALL:
        cases = ["own", "skipped", "beyond", "tiny", "odd", "narrow" if "no_rope" in fields["layout"] else "other"]
        cases += ["scales"] * fields["layout"].startswith("v32")
        work.append((PackedAppendProblem(**fields), None, cases))
    judged = right_in_tritons_interpreter("triton/packed_append", work)
    assert [len(names) for names in judged] == [7, 6, 6, 6, 6, 6, 6, 7, 6]


def test_refusals_say_why() -> None:
    from mla_var3.kernel.cute_python.rope.packed_append.packed_append.packed_append import PackedAppendPlan

    assert "multiple" in PackedAppendPlan.requires.accepts(PackedAppendProblem(rest=3)).reason
    problem = PackedAppendProblem(tokens=2, h=8, positions=16)
    inputs = list(make_inputs(problem))
    out, codes, scales, plain = new_outputs(problem, inputs[0])
    with pytest.raises(UserError, match="the cache starts at"):
        PackedAppendPlan(problem, None, H200).plan_into(inputs, (out, codes[:, :, 1:], scales, plain))


def test_latents_without_rope_columns_are_taken_where_vectors_fit() -> None:
    from mla_var3.kernel.cute_python.rope.packed_append.packed_append.packed_append import PackedAppendPlan

    problem = PackedAppendProblem(tokens=2, layout="v32_no_rope")
    assert "multiple" in PackedAppendPlan.requires.accepts(problem.replace(rest=3)).reason
    latent, slots = make_inputs(problem)
    outputs = new_outputs(problem, latent)
    for given, words in (((latent[:, 1:], slots), "latent starts at"), ((latent, slots), "the cache starts at")):
        out, codes, *others = outputs
        with pytest.raises(UserError, match=words):
            PackedAppendPlan(problem, None, H200).plan_into(given, (out, codes[:, :, 1:], *others))


@pytest.mark.parametrize("label", COMPILED)
def test_every_tiling_that_is_tuned_is_feasible(label: str) -> None:
    for problem in PROBLEMS:
        configs = plan_type(label)(problem, None, H200).autotune_configs()
        assert len(configs) >= 3 and all(t.validate(problem, H200) for t in configs)


def test_the_dispatcher_picks_by_what_runs_here() -> None:
    assert choose(PackedAppendProblem(), H200).kernel.label == "cute-dsl/packed_append"
    assert choose(PackedAppendProblem(rest=3), H200).kernel.label == "triton/packed_append"
    for layout in (*V41, *NO_ROPE):
        assert choose(PackedAppendProblem(layout=layout), H200).kernel.label == "cute-dsl/packed_append"
    assert choose(PackedAppendProblem(layout="flat_no_rope", rest=3), H200).kernel.label == "triton/packed_append"
    assert choose(PackedAppendProblem(), Device.get("a100")).kernel.label == "triton/packed_append"
