"""cuBLAS's batched product, with torch's on the CPU in its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_var3.catalogue import libraries, registry
from mla_var3.check.judge import check
from mla_var3.workload.gemm import GemmProblem


@pytest.mark.parametrize("side", ["q", "out"])
def test_the_result_goes_into_place(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = libraries.Library("cublas_bmm", "torch", Path(), "1", "an imitation")
    monkeypatch.setitem(libraries._LOOK, "cublas_bmm", lambda: library)
    plan_type = registry.get_plan(registry.KernelId("peer", "gemm", "cublas_bmm"))
    problem = GemmProblem(side=side, tokens=3, h=2)
    report = check(plan_type, problem, device="cpu", cases=["own", "uneven", "apart", "in_place"], seeds=[3])
    assert report.ok, report.reason
    plan = plan_type(problem)
    x, weight = plan.prepare_inputs("cpu")
    kernel = plan.plan(x, weight)
    places: list[tuple[int, int, int]] = []
    bmm = torch.bmm

    def watched(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        places.append((a.data_ptr(), b.data_ptr(), out.data_ptr()))
        return bmm(a, b, out=out)

    monkeypatch.setattr(torch, "bmm", watched)
    kernel()
    half = weight.data_ptr() + (0 if side == "q" else 2 * problem.d * problem.k)
    assert places == [(x.data_ptr(), half, kernel.output_tensors[0].data_ptr())]
