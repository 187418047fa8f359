"""The oracle as a kernel version: it passes its own check, binds, and is found by the registry."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mla_var3.catalogue.registry import KernelId, get_plan  # noqa: E402
from mla_var3.check.judge import check  # noqa: E402
from mla_var3.errors import UserError  # noqa: E402
from mla_var3.workload.decode import MlaProblem  # noqa: E402
from mla_var3.workload.mixed import MixedProblem  # noqa: E402


@pytest.fixture(scope="module")
def plan_cls():
    return get_plan(KernelId.parse("torch/flash_mla"))


@pytest.mark.parametrize(
    "problem",
    [
        MlaProblem(b=2, t=200, h=4),
        MlaProblem(b=2, s=2, t=200, h=4, h_kv=2, k=128, page=16, causal=True, dtype="fp16"),
        MlaProblem(b=2, t=200, h=4, k=128, page=None),
    ],
    ids=["plain", "groups", "contiguous"],
)
def test_it_passes_the_check(plan_cls, problem):
    report = check(plan_cls, problem, device="cpu", quick=True)
    assert report.ok, report.reason


def test_it_says_what_it_cannot_do(plan_cls):
    problem = MixedProblem(t=64, h=2, n=4)
    assert "the problem is one of mixed" in plan_cls(problem).supported().reason
    kernel = plan_cls(MlaProblem(t=64, h=2)).plan_empty()
    with pytest.raises(UserError, match="plan"):
        kernel()
