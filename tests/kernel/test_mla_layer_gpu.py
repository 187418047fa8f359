"""Whole layers on a GPU: right on the cases that break kernels, in graphs whose lengths change, and divided in time."""

from __future__ import annotations

import pytest
from planning import planned, right

from mla_var3.workload import layer
from mla_var3.workload.layer import LayerProblem
from running import allocated_by, captured

pytestmark = pytest.mark.gpu

LABELS = ("cute-dsl/mla_layer", "peer/flash_mla_layer", "torch/mla_layer", "peer/torch_compile_mla_layer")
#: What tests/ops/make_gpu_bundle.py compiles ahead.
PROBLEMS = [
    LayerProblem(b=3, h=16, lengths=(700, 1, 130)),
    LayerProblem(b=8, h=128, t=1000),
    LayerProblem(b=33, h=64, t=300),
    LayerProblem(b=128, h=16, t=257),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("label", LABELS)
def test_right_on_the_cases_that_break_kernels(label: str, problem: LayerProblem) -> None:
    if label.startswith("peer/torch_compile") and problem != PROBLEMS[0]:
        pytest.skip("compiled for one shape, which takes its time")
    plan = planned(label, problem)
    left = getattr(plan, "leaves_out", ())
    assert right(plan) == [name for name in layer.CASES if name not in left]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_replays_follow_lengths_and_read_nothing_early(problem: LayerProblem) -> None:
    """Inputs of other lengths are copied over those of a captured call, in turn: every replay gives the bits that a
    call gives which waits for all before it, and the padding of the cache holds NaN throughout."""
    import torch

    plan = planned("cute-dsl/mla_layer", problem)
    lengths = problem.attention.seq_lens
    other = problem.replace(lengths=(*lengths[1:], lengths[0])) if len(set(lengths)) > 1 else problem
    given = plan.prepare_inputs("cuda", seed=1)
    sets = [[x.clone() for x in given], [x.clone() for x in plan.workload.make_inputs(other, "cuda", seed=2)]]
    kernel = plan.plan(*given)
    wanted = []
    for one in sets:
        for x, y in zip(given, one, strict=True):
            x.copy_(y)
        for stage in kernel.stages:
            stage.launch()
            torch.cuda.synchronize()
        wanted.append([x.clone() for x in kernel.output_tensors])
    assert all(bool(x.isfinite().all()) for pair in wanted for x in pair) and not torch.equal(
        wanted[0][0], wanted[1][0]
    )
    graph, _ = captured(kernel.launch)
    for turn in range(40):
        for x, y in zip(given, sets[turn % 2], strict=True):
            x.copy_(y)
        graph.replay()
        found = [x.clone() for x in kernel.output_tensors]
        assert all(torch.equal(x, y) for x, y in zip(found, wanted[turn % 2], strict=True)), f"replay {turn}"


def test_our_kernels_allocate_nothing_and_the_projections_are_part_of_a_call() -> None:
    import torch

    plan = planned("cute-dsl/mla_layer", PROBLEMS[0])
    kernel = plan.plan(*plan.prepare_inputs("cuda", seed=3))
    out, _ = kernel()
    wanted = out.clone()
    assert not any(allocated_by(stage.launch) for stage in kernel.stages if not stage.comes_compiled)
    out.fill_(float("nan"))
    kernel.beside["projections"]()
    assert torch.equal(out, wanted), "the last of them writes the output, from what the others left"


def test_the_time_of_a_call_is_divided_among_its_kernels() -> None:
    import torch

    from mla_var3.measure.cuda_backend import CudaBackend

    plan = planned("cute-dsl/mla_layer", LayerProblem(b=8, h=128, t=4096))
    calls = [plan.plan(*plan.prepare_inputs("cuda", seed=seed)).sharing() for seed in range(2)]
    for call in calls:
        call()
    backend = CudaBackend()
    found = backend.timeline(calls)
    names = [name for name, _ in found]
    for name in ("rmsnorm", "rope_append", "absorb_gemm", "flash_mla_v23"):
        assert any(name in kernel for kernel in names), names
    assert sum("absorb_gemm" in kernel for kernel in names) == 2
    replay = backend.capture(calls, 20)
    taken = min(backend.start(replay, 3).wait()) / (20 * len(calls))
    assert 0.6 < sum(us for _, us in found) / taken < 1.7, (found, taken)
    torch.cuda.synchronize()
