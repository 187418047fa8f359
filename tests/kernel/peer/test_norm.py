"""Peers that normalise rows, over imitations of their libraries that compute with torch on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_var3.catalogue import libraries, registry
from mla_var3.check.judge import check
from mla_var3.kernel import library as wrapping
from mla_var3.workload.norm import NormProblem, normalised

PROBLEMS = [
    NormProblem(rows=5, width=96),
    NormProblem(rows=5, width=96, residual=True),
    NormProblem(rows=5, width=96, second=32, rest=16),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def quack(x: Any, weight: Any, *, eps: float) -> tuple[Any, None, None]:
        made.append("quack")
        return normalised(x, weight, eps).to(x.dtype), None, None

    def flashinfer(x: Any, weight: Any, *, eps: float) -> Any:
        made.append("flashinfer")
        return normalised(x, weight, eps).to(x.dtype)

    def compiled(fn: Any) -> Any:
        made.append("torch")
        return fn

    monkeypatch.setitem(sys.modules, "quack.rmsnorm", SimpleNamespace(rmsnorm_fwd=quack))
    monkeypatch.setitem(sys.modules, "flashinfer.norm", SimpleNamespace(rmsnorm=flashinfer))
    for peer in ("quack_rmsnorm", "flashinfer_rmsnorm", "torch_compile_rmsnorm"):
        library = libraries.Library(peer, "package", Path(), "1", "an imitation")
        monkeypatch.setitem(libraries._LOOK, peer, lambda library=library: library)
        module = registry.get_plan(registry.KernelId("peer", "norm", peer)).__module__
        if hasattr(sys.modules[module], "compiled"):
            monkeypatch.setattr(sys.modules[module], "compiled", compiled)
    return made


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("peer", ["quack", "flashinfer", "torch_compile"])
def test_what_a_library_returns_is_judged(peer: str, problem: NormProblem, calls: list[str]) -> None:
    plan_type = registry.get_plan(registry.KernelId("peer", "norm", f"{peer}_rmsnorm"))
    if problem.residual and peer != "torch_compile":
        says = {"flashinfer": "in place of its inputs", "quack": "before it is rounded"}[peer]
        assert says in plan_type.requires.accepts(problem).reason
        return
    report = check(plan_type, problem, device="cpu", cases=["own", "rows", "in_place"], seeds=[3])
    assert report.ok, report.reason
    assert set(calls) == {peer.split("_")[0]}
    calls.clear()
    plan = plan_type(problem)
    plan.plan(*plan.prepare_inputs("cpu"))()
    assert len(calls) == (1 if peer == "torch_compile" else 1 + bool(problem.second))


def test_torch_compiles_a_function_once_and_many_shapes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda fn, **options: asked.append(options) or fn)
    config = torch._dynamo.config

    def fn(x: Any) -> Any:
        return x

    # Not by monkeypatch, which puts settings back that dynamo then does not find.
    with config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        assert wrapping.compiled(fn) is wrapping.compiled(fn) is fn
        assert len(asked) == 1 and asked[0]["fullgraph"] and not asked[0]["dynamic"]
        assert config.recompile_limit == config.accumulated_recompile_limit == wrapping.MOST_SHAPES
