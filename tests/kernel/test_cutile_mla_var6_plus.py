"""cuTile's mla_var6_plus: which stages an n needs, Hopper code for the merge, right results in both forms."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from mla_var3.check.judge import check
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.kernel.cutile.mla.mla_var6_plus.mla_var6_plus.mla_var6_plus import MlaVar6PlusPlan, MlaVar6PlusTiling
from mla_var3.runtime.concurrent import ConcurrentKernels
from mla_var3.workload import mixed
from mla_var3.workload.mixed import MixedProblem, make_inputs

H200 = Device.get("h200")
BIG = MixedProblem(b=16, s=64, t=4096, n=2048)
SMALL = MixedProblem(b=2, s=3, t=150, h=2, n=40)


def names(problem: MixedProblem) -> list[Any]:
    def of(stage: Any) -> Any:
        return [of(x) for x in stage.stages] if hasattr(stage, "stages") else stage.name

    return of(MlaVar6PlusPlan(problem, device=H200).plan_empty())


def test_both_paths_run_at_once_and_the_ends_are_one_path() -> None:
    assert names(BIG) == [["flash_mla", "flash_attention"], "mla_var6_plus"]
    assert names(BIG.replace(n=0)) == ["flash_mla", "mla_var6_plus"]
    assert names(BIG.replace(n=4096)) == ["flash_attention"]
    paths = MlaVar6PlusPlan(BIG, device=H200).plan_empty().stages[0]
    assert isinstance(paths, ConcurrentKernels) and paths.validate(H200)


@pytest.mark.parametrize("n", [0, 2048])
def test_the_merge_compiles_to_hopper_code(n: int) -> None:
    plan = MlaVar6PlusPlan(BIG.replace(n=n), device=H200)
    made = plan.plan_empty().stages[-1].compile(None, H200)
    count = made.resources.instructions
    assert made.name == "mla_var6_plus" and made.warnings == ()
    assert count["HGMMA"] > 0 and count["HMMA"] == 0 and count["UTMALDG"] > 0 and made.resources.spill_bytes == 0


def test_refusals_say_why() -> None:
    for tiling, words in (
        (MlaVar6PlusTiling(tile_m=32), "tile_m = 32 is neither 64 nor 128."),
        (MlaVar6PlusTiling(tile_k=512), "tile_k = 512 is not one of 64, 128, 256."),
        (MlaVar6PlusTiling(old_splits=300), "old_splits = 300 is outside 0..128."),
        (MlaVar6PlusTiling(new_tile_m=32), "new_tile_m = 32 is neither 64 nor 128."),
        (MlaVar6PlusTiling(new_tile_n=32), "new_tile_n = 32 is neither 64 nor 128."),
    ):
        verdict = tiling.validate(BIG, H200)
        assert not verdict and words in verdict.reason
    for options, words in (
        ({"d": 64}, "d = 64"),
        ({"n": 0}, "which is flash_mla"),
        ({"page": 48}, "pages of 48 tokens"),
    ):
        verdict = MlaVar6PlusPlan(BIG.replace(**options)).supported()
        assert not verdict and words in verdict.reason


def test_every_configuration_is_feasible() -> None:
    for s in (1, 16, 64, 100):
        plan = MlaVar6PlusPlan(BIG.replace(s=s), device=H200)
        assert plan.feasible() and all(x.validate(plan.problem, H200) for x in plan.autotune_configs())


@pytest.mark.parametrize("causal", [False, True])
def test_it_passes_its_check_in_the_interpreter(interpreted: None, causal: bool) -> None:
    report = check(MlaVar6PlusPlan, SMALL.replace(causal=causal), None, "cpu", seeds=(3,))
    assert report.ok, report.reason
    ran = {case.name for case in report.cases}
    assert ran == set(mixed.CASES)


def test_the_check_finds_a_path_that_is_left_out(interpreted: None) -> None:
    class OldOnly(MlaVar6PlusPlan):
        def _merge(self, tensors: tuple[Any, ...], outputs: tuple[Any, ...]) -> Any:
            o_latent, lse_old, o_heads, _, w_uv = tensors
            return super()._merge((o_latent, lse_old, o_heads, lse_old, w_uv), outputs)

    report = check(OldOnly, SMALL, None, "cpu", quick=True, seeds=(3,))
    assert not report.ok and "own" in report.reason


def test_other_classes_are_not_bound(interpreted: None) -> None:
    inputs = make_inputs(SMALL, seed=1)
    kernel = MlaVar6PlusPlan(SMALL, device=H200).plan(*inputs)
    with pytest.raises(UserError, match="cannot bind: k_new is"):
        kernel.bind(*make_inputs(SMALL.replace(n=30), seed=1))


@pytest.mark.gpu
@pytest.mark.parametrize("s", [1, 64])
def test_it_is_right_on_a_gpu(s: int) -> None:
    report = check(MlaVar6PlusPlan, MixedProblem(b=4, s=s, t=1000, h=16, n=256))
    assert report.ok, report.reason
