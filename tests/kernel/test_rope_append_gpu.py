"""rope_append on a GPU: right on the cases that break kernels, capturable, in place, and far into a cache."""

from __future__ import annotations

import pytest
from planning import planned, right

from mla_var3.catalogue import registry
from mla_var3.workload.rope import RopeProblem, new_outputs
from running import allocated_by, captured

pytestmark = pytest.mark.gpu

KERNELS = [k for k in registry.all_kernels() if k.layer == "rope"]
OURS = [k for k in KERNELS if k.language not in ("peer", "torch")]
PROBLEMS = [
    RopeProblem(tokens=300, h=128),
    RopeProblem(tokens=3, h=128, interleaved=False),
    RopeProblem(tokens=300, h=16, dtype="fp16", columns=576),
    RopeProblem(tokens=300, h=20, interleaved=False, index="int32", page=48),
]
IN_PLACE = [RopeProblem(tokens=700, columns=columns) for columns in (192, 576)]
FAR = RopeProblem(tokens=100)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.label)
def test_right_on_the_cases_that_break_kernels(kernel: registry.KernelId, problem: RopeProblem) -> None:
    known = {"peer/torch_compile_rope_append": 10, "peer/flashinfer_rope_append": 9}
    assert len(right(planned(kernel, problem))) == known.get(kernel.label, 15)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_every_cute_tiling_is_right(problem: RopeProblem) -> None:
    plan = planned("cute-dsl/rope_append", problem)
    for tiling in plan.autotune_configs():
        right(plan.with_tiling(tiling), ["own", "one_token", "uneven", "skipped"])


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", OURS, ids=lambda k: k.label)
def test_captured_call_follows_its_inputs_and_allocates_nothing(
    kernel: registry.KernelId, problem: RopeProblem
) -> None:
    import torch

    plan = planned(kernel, problem)
    inputs = plan.prepare_inputs("cuda", seed=1)
    bound = plan.plan(*inputs)
    assert allocated_by(bound) == 0
    graph, _ = captured(bound)
    for old, new in zip(inputs, plan.prepare_inputs("cuda", seed=2, dist="skipped"), strict=True):
        old.copy_(new)
    for x in bound.output_tensors:
        x.fill_(7.0)
    graph.replay()
    torch.cuda.synchronize()
    for answer, want in zip(bound.output_tensors, plan.reference_fn(*inputs), strict=True):
        held = want.isnan()
        assert bool((answer[held] == 7.0).all())
        torch.testing.assert_close(answer[~held].double(), want[~held], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("problem", IN_PLACE, ids=lambda p: f"columns{p.columns}")
def test_q_may_be_turned_in_place(problem: RopeProblem) -> None:
    import torch

    plan = planned("cute-dsl/rope_append", problem)
    inputs = plan.prepare_inputs("cuda", seed=1, poison=False)
    want, want_cache = plan.reference_fn(*inputs)
    _, cache = new_outputs(problem, inputs[0])
    cache.fill_(7.0)
    plan.plan_into(inputs, (inputs[0], cache))()
    torch.cuda.synchronize()
    assert not inputs[0][..., : problem.columns - 64].any()
    torch.testing.assert_close(inputs[0][..., -64:].double(), want[..., 512:], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(cache.double(), want_cache.nan_to_num(7.0), atol=1e-2, rtol=1e-2)


def test_pages_beyond_2_31_elements() -> None:
    """The last page begins 2.1e9 elements behind the first one; only what belongs to it is touched."""
    import torch

    plan = planned("cute-dsl/rope_append", FAR)
    inputs = list(plan.prepare_inputs("cuda", seed=1))
    out, _ = new_outputs(FAR, inputs[0])
    apart = (1 << 30) + 64 * 576
    try:
        memory = torch.empty(2 * apart + 64 * 576, dtype=out.dtype, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip("4.3 GB of device memory are not free")
    cache = memory.as_strided((3, 64, 576), (apart, 576, 1))
    cache.fill_(7.0)
    inputs[4] = torch.randperm(3 * 64, device="cuda")[:100]
    plan.plan_into(inputs, (out, cache))()
    torch.cuda.synchronize()
    want = torch.full((3 * 64, 576), 7.0, dtype=torch.float64, device="cuda")
    want[inputs[4], :512] = inputs[1].double()
    turned = plan.reference_fn(*inputs[:4], torch.arange(100, device="cuda"), inputs[5])[1].view(-1, 576)[:100]
    want[inputs[4], 512:] = turned[:, 512:]
    torch.testing.assert_close(cache.reshape(-1, 576).double(), want, atol=1e-2, rtol=1e-2)
