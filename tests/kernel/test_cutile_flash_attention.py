"""cuTile's flash_attention: Hopper code for every tiling it tunes over, one specialisation for all sizes, and right."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from mla_var3.check.judge import check
from mla_var3.device import Device
from mla_var3.kernel.cutile.mla.flash_attention.flash_attention.flash_attention import (
    FlashAttentionPlan,
    FlashAttentionTiling,
)
from mla_var3.workload.prefill import PrefillProblem, make_inputs, prefill_reference

H200 = Device.get("h200")
CAUSAL = PrefillProblem(b=1, s=8192, causal=True)
CONFIGS = [x for x in FlashAttentionPlan(CAUSAL, device=H200).autotune_configs() if x.num_ctas == 1]
WIDE_K = FlashAttentionTiling(128, 64, 128, 128)
ONE_GROUP = FlashAttentionTiling(64, 64, 64, 128, num_warpgroups=1, occupancy=2)


def compiled(problem: PrefillProblem, tiling: FlashAttentionTiling) -> Any:
    return FlashAttentionPlan(problem, tiling, H200).plan_empty().compile(None, H200)


# ---------------------------------------------------------------- what the compiler makes of it
@pytest.mark.parametrize("tiling", CONFIGS, ids=str)
def test_every_tiling_that_is_tuned_compiles_to_hopper_code(tiling: FlashAttentionTiling) -> None:
    made = compiled(CAUSAL, tiling)
    count, taken = made.resources.instructions, made.resources
    assert made.warnings == ()
    assert count["HMMA"] == 0 and count["STL"] == 0 and taken.spill_bytes == 0
    # Two loops of 8 to 32 products, of which cuTile may peel one copy; a wait for every product would be twice as many.
    assert 40 <= count["HGMMA"] <= 64 and count["WARPGROUP"] < count["HGMMA"]
    assert count["UTMALDG"] > 0 and count["UTMASTG"] > 0 and count["USETMAXREG"] > 0
    assert taken.smem <= H200.smem_per_block and taken.ctas_per_sm == tiling.occupancy
    if tiling == FlashAttentionTiling():
        # 64 weights a thread and tile: without flushed subnormals each of the two loops has 128 products more.
        assert count["FMUL"] < 300


# ---------------------------------------------------------------- which code a launch asks for
def test_sizes_do_not_change_the_signature() -> None:
    def mangled(problem: PrefillProblem) -> str:
        kernel = FlashAttentionPlan(problem, device=H200).plan_empty()
        return kernel.signature_fn(kernel.tiling).with_mangled_symbol("x").symbol

    sizes = [CAUSAL.replace(b=b, s=t) for b, t in ((1, 8192), (3, 77), (16, 16))]
    assert len({mangled(problem) for problem in sizes}) == 1
    assert mangled(CAUSAL.replace(causal=False)) != mangled(CAUSAL)


# ---------------------------------------------------------------- choices
def test_refusals_say_why() -> None:
    for tiling, words in (
        (FlashAttentionTiling(tile_m=96), "(96, 128, 2, 1) is not one of"),
        (FlashAttentionTiling(num_warpgroups=1), "(128, 128, 1, 1) is not one of"),
        (FlashAttentionTiling(k_columns=32), "k_columns = 32 is neither 64 nor 128."),
        (FlashAttentionTiling(v_columns=256), "v_columns = 256 is neither 64 nor 128."),
    ):
        verdict = tiling.validate(CAUSAL, H200)
        assert not verdict and words in verdict.reason


def test_problems_that_it_does_not_take_say_why() -> None:
    for options, words in (
        ({"s": 64, "d": 64}, "the problem has d = 64, p = 64"),
        ({"s": 1 << 20}, "offsets are 32 bits"),
        ({"s": 64, "t": 90}, "written for whole prompts of one length; the problem is b1_s64_h128_t90"),
        ({"b": 2, "s": 64, "lengths": "normal"}, "whole prompts of one length; the problem is b2_s64_h128_t64_normal"),
        ({"s": 64, "h_kv": 16}, "as many heads of keys as of queries"),
        ({"s": 64, "strided_kv": True}, "reads contiguous k and v"),
    ):
        verdict = FlashAttentionPlan(PrefillProblem(**options)).supported()
        assert not verdict and words in verdict.reason


# ---------------------------------------------------------------- in the interpreter
@pytest.mark.parametrize("causal", [True, False])
def test_it_passes_the_check_in_the_interpreter(interpreted: Any, causal: bool) -> None:
    report = check(FlashAttentionPlan, PrefillProblem(b=2, s=97, h=2, causal=causal), None, "cpu", seeds=(5,))
    assert report.ok, report.reason
    assert {"own", "short", "normal", "bound"} <= {case.name for case in report.cases}


@pytest.mark.parametrize("tiling", [FlashAttentionTiling(), WIDE_K, ONE_GROUP], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_both_loops_are_right_in_the_interpreter(interpreted: Any, tiling: FlashAttentionTiling, causal: bool) -> None:
    from mla_var3.check.judge import compare
    from mla_var3.workload.decode import bounds_for

    problem = PrefillProblem(b=1, s=300, h=2, causal=causal, dtype="fp16")
    plan = FlashAttentionPlan(problem, tiling, H200)
    q, k, v, *offsets = make_inputs(problem, seed=3)
    kernel = plan.plan(q, k, v, *offsets)
    for x in kernel.output_tensors:
        x.fill_(float("nan"))
    report = compare(plan.workload, kernel(), plan.reference_fn(q, k, v, *offsets), bounds_for("normal"))
    assert report.ok, report.reason
    # With a last key that weighs more, the other mask would give something else.
    k[:, -1] *= 8.0
    wrong, _ = prefill_reference(q, k, v, *offsets, scale=problem.scale, causal=not causal)
    assert not torch.allclose(kernel()[0].double(), wrong.double(), atol=0.05)


# ---------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("tiling", CONFIGS, ids=str)
def test_it_is_right_on_a_gpu(tiling: FlashAttentionTiling) -> None:
    report = check(FlashAttentionPlan, PrefillProblem(b=2, s=700, h=16, causal=True), tiling)
    assert report.ok, report.reason
