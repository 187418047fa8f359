"""absorb_gemm in every language: what it compiles to, which tilings it takes, and that it is right on a CPU."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from planning import plan_type, right_in_tritons_interpreter

from mla_var3.check.judge import check
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.gemm import CASES, GemmProblem, make_inputs

H200 = Device.get("h200")
PROBLEMS = [
    GemmProblem(side=side, tokens=tokens, h=h)
    for side in ("q", "out")
    for tokens, h in ((1, 128), (32, 16), (512, 128))
]
EVERYWHERE = {name for name in CASES if name not in ("planned_many", "far")}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("label", ["cute-dsl/absorb_gemm", "cutile-dsl/absorb_gemm", "triton/absorb_gemm"])
def test_nothing_spills(label: str, problem: GemmProblem) -> None:
    made = plan_type(label)(problem, None, H200).plan_empty().compile(None, H200)
    taken = made.resources
    assert taken.spill_bytes == 0
    if label != "triton/absorb_gemm":  # whose tiles of few tokens lie on the M side
        assert made.warnings == ()
        assert taken.instructions["HGMMA"] > 0 and taken.instructions["HMMA"] == 0


@pytest.mark.parametrize("side", ["q", "out"])
def test_cute_loads_the_weight_before_it_waits_for_the_kernel_before(side: str, tmp_path: Path) -> None:
    """And everything else behind the wait."""
    plan = plan_type("cute-dsl/absorb_gemm")(GemmProblem(side=side, tokens=8, dtype="fp16"), None, H200)
    made = plan.plan_empty().compile(tmp_path, H200, ("sass",))
    text = made.artefacts["sass"].read_text()
    (wait,) = (found.start() for found in re.finditer("ACQBULK", text))
    loads = [found.start() for found in re.finditer("UTMALDG", text)]
    # Half of the weight; x; and in its first tile the other half.
    assert len(loads) == 3 and loads[0] < wait < loads[1] and text.index("STG.E.128") > loads[2]
    assert "PREEXIT" in text and "HGMMA.64x8x16.F32" in text and ("tnspA" in text) == (side == "q")


@pytest.mark.parametrize(("side", "tokens"), [("q", 8), ("q", 32), ("q", 128), ("q", 512), ("out", 8), ("out", 512)])
def test_an_sm_has_all_of_its_cute_ctas_at_a_time(side: str, tokens: int) -> None:
    """Neither shared memory nor registers keep them apart."""
    problem = GemmProblem(side=side, tokens=tokens)
    plan = plan_type("cute-dsl/absorb_gemm")(problem, None, H200)
    taken = plan.plan_empty().compile(None, H200).resources
    assert taken.smem == plan.tiling.geometry(problem).smem
    assert taken.ctas_per_sm * H200.num_sms >= plan.tiling.ctas(problem)


@pytest.mark.parametrize("tokens", [1, 4, 8, 32, 64, 128, 512, 5000])
@pytest.mark.parametrize("h", [1, 16, 64, 128])
@pytest.mark.parametrize("side", ["q", "out"])
def test_cute_fills_a_device(side: str, h: int, tokens: int) -> None:
    """With DeepSeek's widths: most SMs have a CTA where there are columns and tokens for it, and all CTAs of an SM
    fit at a time. 158 tiles of which an SM has room for one are two to a CTA, on 80 SMs."""
    problem = GemmProblem(side=side, h=h, tokens=tokens)
    plan = plan_type("cute-dsl/absorb_gemm")(problem, None, H200)
    tiling = plan.tiling
    geometry = tiling.geometry(problem)
    assert plan.feasible() and tiling.splits <= tiling.tiles(problem)
    assert tiling.ctas(problem) >= min(80, problem.columns // 64 * h * -(-tokens // 64))
    waves = -(-tiling.ctas(problem) // H200.num_sms)
    assert waves * (geometry.smem + 1024) <= H200.smem_per_sm
    configs = plan.autotune_configs()
    assert tiling in configs and all(t.validate(problem, H200) for t in configs)


def test_cute_compiles_once_for_all_token_counts_of_a_tile() -> None:
    from mla_var3.toolchain.aot import code_knobs

    plan = plan_type("cute-dsl/absorb_gemm")
    assert "splits" not in code_knobs(plan(PROBLEMS[0], None, H200).tiling)
    few, more = (plan(GemmProblem(tokens=n), None, H200) for n in (2, 5))
    assert few.tiling.tile_n == more.tiling.tile_n == 8
    assert few.problem.problem_class() == more.problem.problem_class()


def test_refusals_say_why() -> None:
    from mla_var3.kernel.cute_python.gemm.absorb_gemm.absorb_gemm.absorb_gemm import AbsorbGemmPlan, AbsorbGemmTiling

    for problem, words in (
        (GemmProblem(k=80), "k = 80"),
        (GemmProblem(p=20), "p = 20"),
        (GemmProblem(rest=4), "rest = 4"),
        (GemmProblem(side="out", k=2048), "more than a CTA's shared memory"),
    ):
        assert words in AbsorbGemmPlan.requires.accepts(problem).reason
    out = GemmProblem(side="out")
    for tiling, words in (
        (AbsorbGemmTiling(tile_m=96), "tile_m = 96"),
        (AbsorbGemmTiling(tile_m=256), "divide the 128 columns"),
        (AbsorbGemmTiling(tile_n=24), "tile_n = 24"),
        (AbsorbGemmTiling(splits=0), "splits = 0"),
    ):
        assert words in tiling.validate(out, H200).reason
    wide = GemmProblem(side="out", k=768)
    assert "bytes of shared memory" in AbsorbGemmTiling(128, 64).validate(wide, H200).reason
    problem = GemmProblem(tokens=2, h=2, p=64)
    plan = AbsorbGemmPlan(problem, None, H200)
    x, weight = make_inputs(problem)
    flat = torch.empty(2 * 2 * 192 + 1, dtype=torch.bfloat16)
    for spoiled, words in (
        ((flat[1:].view(2, 2, 192)[..., :128], weight), "x starts at"),
        ((torch.empty(2, 2, 132, dtype=torch.bfloat16)[..., :128], weight), "multiples of 16 bytes"),
        ((x, torch.empty(512, 520, dtype=torch.bfloat16)[:, :512]), "contiguous"),
    ):
        with pytest.raises(UserError, match=words):
            plan.plan(*spoiled)


@pytest.mark.parametrize("label", ["cute-dsl/absorb_gemm", "cutile-dsl/absorb_gemm", "triton/absorb_gemm"])
def test_problems_that_are_not_taken_plan_and_are_refused(label: str) -> None:
    for problem, words in (
        (MlaProblem(), "computes gemm"),
        (GemmProblem(k=24), "k = 24"),
        (GemmProblem(dtype="fp32"), "fp32"),
    ):
        assert words in plan_type(label)(problem, None, H200).supported().reason


@pytest.mark.parametrize("side", ["q", "out"])
@pytest.mark.parametrize("device", [d for d in Device.all() if d.sm_version >= (8, 0)], ids=lambda d: d.key)
def test_tritons_default_tiling_fits_every_device(device: Device, side: str) -> None:
    """However many tokens there are: a block of a consumer card has less than half of an H200's shared memory."""
    for tokens in (1, 16, 32, 33, 64, 65, 128, 4096):
        problem = GemmProblem(side=side, tokens=tokens)
        plan = plan_type("triton/absorb_gemm")(problem, None, device)
        assert plan.feasible(), (tokens, plan.feasible().reason)
        assert plan.tiling.num_pipeline_stages >= 2


@pytest.mark.parametrize("side", ["q", "out"])
def test_tritons_largest_tile_compiles_for_a_consumer_card(side: str) -> None:
    """With the shared memory that the compiler really takes."""
    device = Device.get("rtx4090")
    made = plan_type("triton/absorb_gemm")(GemmProblem(side=side, tokens=4096), None, device).plan_empty()
    taken = made.compile(None, device).resources
    assert 0 < taken.smem <= device.smem_per_block and taken.spill_bytes == 0


@pytest.mark.parametrize("side", ["q", "out"])
@pytest.mark.parametrize("label", ["torch/absorb_gemm", "cutile-dsl/absorb_gemm"])
def test_right_on_a_cpu(label: str, side: str) -> None:
    report = check(plan_type(label), GemmProblem(side=side, tokens=3, h=3), device="cpu", seeds=[5])
    assert report.ok, report.reason
    assert {case.name for case in report.cases} == EVERYWHERE


def test_triton_is_right_in_its_interpreter() -> None:
    sides = [(side, dtype) for side in ("q", "out") for dtype in ("bf16", "fp16")]
    problems = [GemmProblem(side=side, tokens=3, h=2, dtype=dtype) for side, dtype in sides]
    cases = ["own", "uneven", "tokens", "apart"]
    assert right_in_tritons_interpreter("triton/absorb_gemm", [(p, None, cases) for p in problems]) == [cases] * 4
