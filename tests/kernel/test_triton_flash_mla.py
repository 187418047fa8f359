"""Triton's flash_mla: right in the CPU interpreter (another process), compiled for Hopper here."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from planning import right_in_tritons_interpreter

from mla_var3.catalogue.registry import KernelId, get_plan
from mla_var3.device import Device
from mla_var3.workload.decode import MlaProblem

SMALL = {"b": 2, "t": 150, "h": 3, "k": 128, "p": 16}
ALL = ["own", "edges", "edges_normal", "last", "page_boundary", "just_masked", "below_zero", "single", "in_place"]
SOME = ["own", "edges", "just_masked", "in_place"]
#: One split; more splits than tiles; causal groups; an odd page; contiguous; at full width; pages far apart.
INTERPRETER_CASES: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({**SMALL}, {"tile_m": 16, "num_splits": 1}, ALL),
    ({**SMALL, "page": 16}, {"tile_m": 16, "tile_n": 16, "num_splits": 5}, SOME),
    ({**SMALL, "s": 3, "h": 8, "h_kv": 2, "causal": True}, {"tile_m": 16, "num_splits": 2}, SOME),
    ({**SMALL, "page": 48, "dtype": "fp16"}, {"tile_m": 16, "tile_n": 32}, SOME),
    ({**SMALL, "page": None}, {"tile_m": 16, "tile_n": 64, "num_splits": 2}, SOME),
    ({"b": 1, "t": 100, "h": 20}, {}, ["own", "edges"]),
    ({**SMALL, "t": 70}, {"tile_m": 16}, ["far_pages"]),
]


@pytest.mark.slow
def test_it_is_right_in_the_interpreter() -> None:
    work = [(MlaProblem(**fields), knobs, cases) for fields, knobs, cases in INTERPRETER_CASES]
    assert right_in_tritons_interpreter("triton/flash_mla", work) == [cases for *_, cases in INTERPRETER_CASES]


@pytest.fixture(scope="module")
def plan_cls():
    return get_plan(KernelId.parse("triton/flash_mla"))


@pytest.fixture(scope="module")
def h200():
    return Device.get("h200")


def test_it_compiles_for_hopper_without_a_gpu(plan_cls, h200, tmp_path):
    plan = plan_cls(MlaProblem(b=128, h=128, t=4096), device=h200)
    compiled = plan.plan_empty().compile(tmp_path, h200, keep=("ptx",))
    assert compiled.resources.instructions["HGMMA"] > 0
    assert 0 < compiled.resources.smem <= h200.smem_per_block
    assert not compiled.stages and compiled.artefacts["ptx"].is_file()


def test_few_requests_are_split_and_combined(plan_cls, h200):
    plan = plan_cls(MlaProblem(b=1, h=16, t=65536), device=h200)
    assert plan.num_splits(1) > 32
    compiled = plan.plan_empty().compile(None, h200)
    assert [c.name for c in compiled.stages] == ["flash_mla", "combine"]
    assert all(c.resources.spill_bytes == 0 for c in compiled.stages)


def test_default_tilings_are_feasible_and_others_say_why_not(plan_cls, h200):
    for h in (1, 8, 16, 17, 32, 64, 128):
        for s in (1, 2, 16):
            assert plan_cls(MlaProblem(h=h, s=s), device=h200).feasible()
    problem, tiling = MlaProblem(), plan_cls.tiling_type
    assert "tile_m = 48" in tiling(tile_m=48).validate(problem).reason
    assert "shared memory" in tiling(num_pipeline_stages=3).validate(problem, h200).reason
    assert "registers" in tiling(tile_m=128, tile_n=16).validate(problem, h200).reason
    assert "num_splits" in tiling(num_splits=129).validate(problem).reason
    assert any(t.validate(problem, h200) for t in plan_cls(problem).autotune_configs())
    assert "k and p" in plan_cls(MlaProblem(k=96)).supported().reason
