"""What every decode kernel of the lab promises on a GPU, in every language: right, capturable, allocates and waits
never."""

from __future__ import annotations

import pytest
from planning import planned, right

from mla_var3.catalogue import registry
from mla_var3.workload.decode import MlaProblem
from running import captured

pytestmark = pytest.mark.gpu

OURS = [k for k in registry.all_kernels() if k.language != "peer" and k.layer == "mla"]
PROBLEMS = [
    MlaProblem(b=3, s=1, t=700, h=16, lengths=[700, 1, 130]),
    MlaProblem(b=2, s=2, t=300, h=128, causal=True, lengths=[300, 65]),
    MlaProblem(b=1, s=1, t=9000, h=64),
    MlaProblem(b=4, s=3, t=700, h=20, h_kv=2, causal=True, page=16, dtype="fp16"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", OURS, ids=lambda k: k.label)
def test_right_on_the_cases_that_break_kernels(kernel: registry.KernelId, problem: MlaProblem) -> None:
    assert len(right(planned(kernel, problem))) >= 10


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", OURS, ids=lambda k: k.label)
def test_captured_call_follows_its_inputs(kernel: registry.KernelId, problem: MlaProblem) -> None:
    """A replay after new queries and lengths were written gives what a call gives: nothing was decided on the host."""
    import torch

    plan = planned(kernel, problem)
    if not plan.graph_capturable:
        pytest.skip("this version reads the lengths on the host, and says so")
    inputs = plan.prepare_inputs("cuda", seed=1)
    bound = plan.plan(*inputs)
    graph, _ = captured(bound)
    inputs[0].copy_(torch.randn_like(inputs[0]))
    inputs[3].copy_(inputs[3].flip(0) if problem.b > 1 else inputs[3] // 2)
    # Flipped lengths ask for pages that a request's row of the table does not name: give every row valid ones.
    pages = inputs[1].shape[0]
    inputs[2].copy_(torch.randint(0, pages, inputs[2].shape, device="cuda", dtype=torch.int32))
    inputs[1].nan_to_num_(0.25)
    graph.replay()
    torch.cuda.synchronize()
    replayed = [t.clone() for t in bound.output_tensors]
    want_out, want_lse = plan.reference_fn(*inputs)
    torch.testing.assert_close(replayed[0].double(), want_out.double(), atol=1.6e-2, rtol=1.6e-2)
    torch.testing.assert_close(replayed[1].double(), want_lse.double(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kernel", OURS, ids=lambda k: k.label)
def test_a_call_allocates_nothing_and_never_waits(kernel: registry.KernelId) -> None:
    import torch

    plan = planned(kernel, PROBLEMS[0])
    if not plan.graph_capturable:
        pytest.skip("this version is made of torch operations, which allocate, and says so")
    bound = plan.plan(*plan.prepare_inputs("cuda", seed=2))
    bound()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        bound()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
