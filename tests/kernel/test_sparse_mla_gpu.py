"""Sparse decode on a GPU, by our kernels and libraries: every case in every layout, and that calls are captured."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mla_var3.catalogue import registry
from mla_var3.check.judge import check
from mla_var3.workload.sparse_decode import SparseProblem, make_inputs

pytestmark = pytest.mark.gpu

DESIGNS = ("sparse_mla", "flash_mla_sparse", "fa3_sparse", "flashinfer_sparse")
KERNELS = [k for k in registry.all_kernels() if k.design in DESIGNS]
V4 = {"layout": "v4", "topk": 128, "page": 256, "extra": 512, "extra_page": 64, "lengths": True, "sink": True}
PROBLEMS = [
    SparseProblem(b=4, s=2, h=128, t=8192),
    SparseProblem(b=40, h=16, t=8192, topk=512, page=1),
    SparseProblem(b=4, s=2, h=64, t=8192, extra_lengths=True, **V4),
    SparseProblem(b=4, h=20, t=4096, layout="flat", page=61, sink=True),
    SparseProblem(b=4, h=8, t=4096, layout="bf16", lengths=True),
    SparseProblem(b=2, s=3, h=16, t=4096, page=61, lengths=True, sink=True),
    SparseProblem(b=2, s=2, h=128, t=4096, **V4),
    SparseProblem(b=40, h=64, t=8192, contexts="half_short", strided=True),
    SparseProblem(b=4, s=3, h=12, t=8192, contexts="lognormal:2", missing="scattered:0.2", strided=True, page=16),
    SparseProblem(b=4, s=2, h=64, t=4096, contexts="short", extra_t=1024, strided=True, **V4),
    SparseProblem(b=4, s=2, h=64, t=4096, layout="v41", topk=128, extra=512, extra_layout="v41_fp4", sink=True),
    SparseProblem(b=4, h=16, t=4096, layout="v41_planar", page=61, lengths=True),
    # Query tiles of 48, 40 and 24 heads, and such with rows without a head between query tokens.
    SparseProblem(b=70, s=2, h=96, t=4096, topk=512, sink=True),
    SparseProblem(b=5, s=2, h=40, t=4096, extra_lengths=True, **V4),
    SparseProblem(b=4, s=3, h=22, t=4096, topk=512, page=16, sink=True, lengths=True),
    # Many tiles of each worker, so that rows without a token meet every stage.
    SparseProblem(b=140, h=64, t=4096, topk=512),
    SparseProblem(b=130, s=2, h=16, t=4096, topk=500, page=16, strided=True),
    SparseProblem(b=70, s=2, h=64, t=4096, layout="v4", topk=128, page=256, extra=512, extra_page=64, sink=True),
]
DENSE = [
    SparseProblem(b=8, s=2, h=128, t=8192, lengths=True, paged=True),
    SparseProblem(b=128, h=16, t=4096, paged=True),
    SparseProblem(b=3, s=4, h=8, t=5000, page=61, lengths=True, paged=True),
    SparseProblem(b=40, h=64, t=3000, layout="v4", page=256, lengths=True, sink=True, paged=True),
    SparseProblem(b=5, s=3, h=20, t=3000, layout="flat", page=1, lengths=True, paged=True),
]


def plan_of(kernel: Any) -> Any:
    if (reason := registry.missing(kernel)) is not None:
        pytest.skip(reason)
    return registry.get_plan(kernel)


def plan_for(kernel: Any, problem: SparseProblem) -> Any:
    if not (verdict := plan_of(kernel).requires.accepts(problem)):
        pytest.skip(verdict.reason)
    return plan_of(kernel)


@pytest.mark.parametrize("problem", [*PROBLEMS, *DENSE], ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.label)
def test_right_in_every_case(kernel: Any, problem: SparseProblem) -> None:
    report = check(plan_for(kernel, problem), problem)
    assert report.ok, report.reason


@pytest.mark.parametrize("problem", [*PROBLEMS, *DENSE], ids=lambda p: p.label)
@pytest.mark.parametrize("heads", [0, 16, 24, 32])
def test_right_however_many_heads_a_query_tile_has(heads: int, problem: SparseProblem) -> None:
    plan = plan_for(registry.KernelId.parse("cute-dsl/sparse_mla_v2"), problem)(problem)
    if heads not in {tiling.heads for tiling in plan.autotune_configs()}:
        pytest.skip("as many are not tried for so few heads")
    report = check(plan.with_tiling(type(plan.tiling)(heads=heads)))
    assert report.ok, report.reason


@pytest.mark.parametrize(("problem", "dist"), [(PROBLEMS[2], "holes"), (DENSE[0], "empty")], ids=["sparse", "dense"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.label)
def test_a_graph_replays_with_other_inputs(kernel: Any, problem: SparseProblem, dist: str) -> None:
    if kernel.language == "peer":
        pytest.skip("it may have copied its inputs when it was planned")
    plan_type = plan_for(kernel, problem)
    if not plan_type.graph_capturable:
        pytest.skip("it waits for the device")
    inputs = make_inputs(problem, "cuda", seed=1)
    call = plan_type(problem).plan(*inputs)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for old, new in zip(inputs, make_inputs(problem, "cuda", seed=2, dist=dist), strict=True):
        old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    replayed = [x.clone() for x in call.output_tensors]
    assert all(torch.equal(x, y) for x, y in zip(replayed, call(), strict=True))


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.language == "peer"], ids=lambda k: k.label)
def test_a_library_is_captured_with_its_schedule_or_without(kernel: Any, problem: SparseProblem) -> None:
    call = plan_for(kernel, problem)(problem).plan(*make_inputs(problem, "cuda", seed=1))
    wanted = [x.clone() for x in call()]
    for launch in filter(None, (call, call.with_schedule)):
        launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        for x in (*call.written_tensors(), *(call.attached.made or ())):
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(call.output_tensors, wanted, strict=True))
