"""rmsnorm on a GPU: right on the cases that break kernels, capturable, and behind a kernel that it may start early."""

from __future__ import annotations

import pytest
from planning import each_waits_for_the_one_before, planned, right

from mla_var3.catalogue import registry
from mla_var3.workload.norm import NormProblem
from running import allocated_by, captured

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


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.label)
def test_right_on_the_cases_that_break_kernels(kernel: registry.KernelId, problem: NormProblem) -> None:
    assert len(right(planned(kernel, problem))) == 12


@pytest.mark.parametrize("problem", [*PROBLEMS, NormProblem(rows=300, width=520, second=264)], ids=lambda p: p.label)
def test_every_cute_tiling_is_right(problem: NormProblem) -> None:
    plan = planned("cute-dsl/rmsnorm", problem)
    for tiling in plan.autotune_configs():
        right(plan.with_tiling(tiling), ["own", "one_row", "uneven", "rows"])


@pytest.mark.parametrize("problem", PROBLEMS[:4], ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", OURS, ids=lambda k: k.label)
def test_captured_call_follows_its_inputs_and_allocates_nothing(
    kernel: registry.KernelId, problem: NormProblem
) -> None:
    import torch

    plan = planned(kernel, problem)
    inputs = plan.prepare_inputs("cuda", seed=1)
    bound = plan.plan(*inputs)
    assert allocated_by(bound) == 0
    graph, _ = captured(bound)
    inputs[0].copy_(torch.randn_like(inputs[0]))
    graph.replay()
    torch.cuda.synchronize()
    for answer, want in zip(bound.output_tensors, plan.reference_fn(*inputs), strict=True):
        torch.testing.assert_close(answer.double(), want.double(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("knobs", [{}, {"vectors": 4, "rows": 1, "ctas_per_sm": 1}], ids=str)
def test_a_row_waits_for_the_kernel_that_writes_it(knobs: dict[str, int]) -> None:
    plan = planned("cute-dsl/rmsnorm", NormProblem(rows=2000), **knobs)
    x, weight = plan.prepare_inputs("cuda", seed=1)
    chain = [plan.plan(x.contiguous(), weight)]
    for _ in range(7):
        chain.append(plan.plan(chain[-1].output_tensors[0], weight))
    each_waits_for_the_one_before(chain, [link.output_tensors[0] for link in chain])


def test_the_residual_may_be_added_in_place() -> None:
    import torch

    problem = NormProblem(rows=700, residual=True)
    plan = planned("cute-dsl/rmsnorm", problem)
    inputs = plan.prepare_inputs("cuda", seed=1)
    want = plan.reference_fn(*inputs)
    apart = plan.plan(*inputs)
    out, second, _ = apart.output_tensors
    plan.plan_into(inputs, (out, second, inputs[2]))()
    torch.cuda.synchronize()
    torch.testing.assert_close(out.double(), want[0], atol=1e-2, rtol=1e-2)
    assert torch.equal(inputs[2].double(), want[2])
