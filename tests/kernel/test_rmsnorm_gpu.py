"""rmsnorm on a GPU: right on the cases that break kernels, capturable, and behind a kernel that it may start early."""

from __future__ import annotations

from typing import Any

import pytest

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.workload.norm import NormProblem

pytestmark = pytest.mark.gpu

KERNELS = [k for k in registry.all_kernels() if k.layer == "norm"]
OURS = [k for k in KERNELS if k.language not in ("peer", "torch")]
PROBLEMS = [
    NormProblem(rows=300),
    NormProblem(rows=5, residual=True),
    NormProblem(rows=1000, residual=True, dtype="fp16"),
    NormProblem(rows=300, width=1536, second=512, rest=64),
    NormProblem(rows=2, width=1536, second=512, rest=64, dtype="fp16"),
    NormProblem(rows=300, width=512),
]


def planned(kernel: registry.KernelId, problem: NormProblem, tiling: Any = None) -> Any:
    if (reason := registry.missing(kernel)) is not None:
        pytest.skip(reason)
    plan = registry.get_plan(kernel)(problem, tiling, Device.detect())
    verdict = plan.supported()
    verdict = plan.feasible() if verdict else verdict
    if not verdict:
        pytest.skip(verdict.reason)
    return plan


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.label)
def test_right_on_the_cases_that_break_kernels(kernel: registry.KernelId, problem: NormProblem) -> None:
    from mla_var3.check.judge import check

    report = check(planned(kernel, problem), device="cuda")
    assert report.ok, report.reason
    assert len(report.cases) == 12


@pytest.mark.parametrize("problem", [*PROBLEMS, NormProblem(rows=300, width=520, second=264)], ids=lambda p: p.label)
def test_every_cute_tiling_is_right(problem: NormProblem) -> None:
    from mla_var3.check.judge import check

    plan = planned(registry.KernelId.parse("cute-dsl/rmsnorm"), problem)
    for tiling in plan.autotune_configs():
        report = check(plan.with_tiling(tiling), device="cuda", cases=["own", "one_row", "uneven", "rows"])
        assert report.ok, f"{tiling}: {report.reason}"


@pytest.mark.parametrize("problem", PROBLEMS[:4], ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", OURS, ids=lambda k: k.label)
def test_captured_call_follows_its_inputs_and_allocates_nothing(
    kernel: registry.KernelId, problem: NormProblem
) -> None:
    import torch

    plan = planned(kernel, problem)
    inputs = plan.prepare_inputs("cuda", seed=1)
    bound = plan.plan(*inputs)
    bound()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    bound()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound()
    inputs[0].copy_(torch.randn_like(inputs[0]))
    graph.replay()
    torch.cuda.synchronize()
    for answer, want in zip(bound.output_tensors, plan.reference_fn(*inputs), strict=True):
        torch.testing.assert_close(answer.double(), want.double(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("tiling", [None, (4, 1, 1)])
def test_a_row_waits_for_the_kernel_that_writes_it(tiling: Any) -> None:
    """A chain of norms, each of which may start before the one in front of it has ended, gives what they give apart."""
    import torch

    from mla_var3.kernel.cute_python.norm.rmsnorm.rmsnorm.rmsnorm import RmsNormTiling

    problem = NormProblem(rows=2000)
    kernel = registry.KernelId.parse("cute-dsl/rmsnorm")
    plan = planned(kernel, problem, None if tiling is None else RmsNormTiling(*tiling))
    x, weight = plan.prepare_inputs("cuda", seed=1)
    chain = [plan.plan(x.contiguous(), weight)]
    for _ in range(7):
        chain.append(plan.plan(chain[-1].output_tensors[0], weight))
    for link in chain:  # each waits for its own end
        link()
        torch.cuda.synchronize()
    apart = chain[-1].output_tensors[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for link in chain:
            link()
    for _ in range(20):
        for link in chain:
            link.output_tensors[0].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(chain[-1].output_tensors[0], apart)


def test_the_residual_may_be_added_in_place() -> None:
    import torch

    problem = NormProblem(rows=700, residual=True)
    plan = planned(registry.KernelId.parse("cute-dsl/rmsnorm"), problem)
    inputs = plan.prepare_inputs("cuda", seed=1)
    want = plan.reference_fn(*inputs)
    apart = plan.plan(*inputs)
    out, second, _ = apart.output_tensors
    plan.plan_into(inputs, (out, second, inputs[2]))()
    torch.cuda.synchronize()
    torch.testing.assert_close(out.double(), want[0], atol=1e-2, rtol=1e-2)
    assert torch.equal(inputs[2].double(), want[2])
