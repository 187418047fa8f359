"""merge_partials on a GPU: right on the cases that break kernels, in every tiling, and behind one that still runs."""

from __future__ import annotations

from typing import Any

import pytest

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.workload.merge import MergeProblem

pytestmark = pytest.mark.gpu

KERNELS = [k for k in registry.all_kernels() if k.layer == "merge"]
PROBLEMS = [
    MergeProblem(parts=2, tokens=3, h=64),
    MergeProblem(parts=8, tokens=300, h=16, dtype="fp16"),
    MergeProblem(parts=3, tokens=700, h=4, k=520),
    MergeProblem(parts=17, tokens=9, h=8, k=96),
]
CHAINED = MergeProblem(parts=1, tokens=3000, h=16)


def planned(kernel: registry.KernelId, problem: MergeProblem) -> Any:
    if (reason := registry.missing(kernel)) is not None:
        pytest.skip(reason)
    plan = registry.get_plan(kernel)(problem, None, Device.detect())
    if not (verdict := plan.supported()):
        pytest.skip(verdict.reason)
    return plan


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.label)
def test_right_on_the_cases_that_break_kernels(kernel: registry.KernelId, problem: MergeProblem) -> None:
    from mla_var3.check.judge import check

    report = check(planned(kernel, problem), device="cuda")
    assert report.ok, report.reason
    assert {"uneven", "empty", "planned_many"} <= {case.name for case in report.cases}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_every_cute_tiling_is_right(problem: MergeProblem) -> None:
    from mla_var3.check.judge import check

    plan = planned(registry.KernelId.parse("cute-dsl/merge_partials"), problem)
    for tiling in plan.autotune_configs():
        report = check(plan.with_tiling(tiling), device="cuda", cases=["own", "one_row", "uneven", "empty"])
        assert report.ok, f"{tiling}: {report.reason}"


def test_a_merge_waits_for_the_kernel_that_writes_its_partials() -> None:
    """A chain of merges, each of which may start before the one in front of it ends, gives what they give apart."""
    import torch

    plan = planned(registry.KernelId.parse("cute-dsl/merge_partials"), CHAINED)
    chain = [plan.plan(*plan.prepare_inputs("cuda", seed=1))]
    for _ in range(7):
        out, lse = chain[-1].output_tensors
        chain.append(plan.plan(out[None], lse[None]))
    for link in chain:
        link()
        torch.cuda.synchronize()
    apart = [x.clone() for x in chain[-1].output_tensors]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for link in chain:
            link()
    for _ in range(20):
        for link in chain:
            for tensor in link.output_tensors:
                tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(chain[-1].output_tensors, apart, strict=True))
