"""Triton's flash_mla: right in the CPU interpreter (another process), compiled for Hopper here, right on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from mla_var3.catalogue.registry import KernelId, get_plan
from mla_var3.device import Device
from mla_var3.workload.decode import MlaProblem

# The interpreter is chosen when a kernel is decorated, so a process has it or not.
INTERPRETED = """
import json, sys
from mla_var3.catalogue.registry import KernelId, get_plan
from mla_var3.workload.decode import MlaProblem
from mla_var3.check.judge import check
plan = get_plan(KernelId.parse("triton/flash_mla"))
for problem, tiling, cases in json.loads(sys.argv[1]):
    report = check(plan, MlaProblem(**problem), plan.tiling_type(**tiling), device="cpu", cases=cases)
    print(json.dumps(report.to_record()))
"""
SMALL = {"b": 2, "t": 150, "h": 3, "k": 128, "p": 16}
ALL = ["own", "edges", "edges_normal", "last", "page_boundary", "just_masked", "below_zero", "single", "in_place"]
SOME = ["own", "edges", "just_masked", "in_place"]
INTERPRETER_CASES = {
    "one-split": ({**SMALL}, {"tile_m": 16, "num_splits": 1}, ALL),
    "more-splits-than-tiles": ({**SMALL, "page": 16}, {"tile_m": 16, "tile_n": 16, "num_splits": 5}, SOME),
    "causal-groups": ({**SMALL, "s": 3, "h": 8, "h_kv": 2, "causal": True}, {"tile_m": 16, "num_splits": 2}, SOME),
    "odd-page": ({**SMALL, "page": 48, "dtype": "fp16"}, {"tile_m": 16, "tile_n": 32}, SOME),
    "contiguous": ({**SMALL, "page": None}, {"tile_m": 16, "tile_n": 64, "num_splits": 2}, SOME),
    "full-width": ({"b": 1, "t": 100, "h": 20}, {}, ["own", "edges"]),
    "far-pages": ({**SMALL, "t": 70}, {"tile_m": 16}, ["far_pages"]),
}


@pytest.mark.slow
def test_it_is_right_in_the_interpreter(repo_root):
    src = os.pathsep.join([str(repo_root / "src"), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", INTERPRETED, json.dumps(list(INTERPRETER_CASES.values()))],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": src},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    reports = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    for (name, (_, _, cases)), report in zip(INTERPRETER_CASES.items(), reports, strict=True):
        assert report["ok"], (name, report["reason"])
        assert [c["name"] for c in report["cases"]] == cases, name


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


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [
        MlaProblem(b=16, t=1000, h=128),
        MlaProblem(b=2, t=9000, h=16),
        MlaProblem(b=4, s=3, t=700, h=20, h_kv=2, causal=True, page=16, dtype="fp16"),
        MlaProblem(b=4, s=2, t=700, h=128, causal=True),
    ],
    ids=["h128", "split", "groups", "causal"],
)
def test_it_is_right_on_a_gpu(plan_cls, problem):
    from mla_var3.check.judge import check

    report = check(plan_cls, problem)
    assert report.ok, report.reason
