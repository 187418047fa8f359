"""absorb_gemm on a GPU: right on the cases that break kernels and with every tiling, capturable, and behind a kernel
that it may start early."""

from __future__ import annotations

import pytest
from planning import each_waits_for_the_one_before, planned, right

from mla_var3.catalogue import registry
from mla_var3.lab.naming import cell_name
from mla_var3.workload.gemm import CASES, GemmProblem
from running import allocated_by, captured

pytestmark = pytest.mark.gpu

KERNELS = [k for k in registry.all_kernels() if k.layer == "gemm"]
OURS = [k for k in KERNELS if k.language not in ("peer", "torch")]
CUTE = "cute-dsl/absorb_gemm"
#: Both sides, every number of heads and tokens that chooses another tiling, both dtypes.
PROBLEMS = [
    GemmProblem(side=side, tokens=tokens, h=h, dtype=dtype)
    for side in ("q", "out")
    for tokens, h, dtype in ((1, 128, "bf16"), (7, 16, "fp16"), (33, 64, "bf16"), (130, 16, "bf16"), (512, 128, "fp16"))
]

OTHER_WIDTHS = [
    GemmProblem(side="q", tokens=70, h=5, k=256, d=64, p=0),
    GemmProblem(side="out", tokens=70, h=5, k=256, d=192),
    GemmProblem(side="q", tokens=9, h=20, d=192),
    GemmProblem(side="out", tokens=9, h=1, d=256),
]
CHAINED = (1, 40, 700)  # tokens


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.label)
def test_right_on_the_cases_that_break_kernels(kernel: registry.KernelId, problem: GemmProblem) -> None:
    # cuTile's offsets are 32 bits: it refuses the case.
    cases = [name for name in CASES if (name != "huge" or problem.dtype == "bf16")]
    if kernel.language == "cutile-dsl":
        cases.remove("far")
    assert set(right(planned(kernel, problem), cases)) == set(cases)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_every_cute_tiling_is_right(problem: GemmProblem) -> None:
    plan = planned(CUTE, problem)
    for tiling in plan.autotune_configs():
        right(plan.with_tiling(tiling), ["own", "one_token", "uneven", "tokens"])


@pytest.mark.parametrize("problem", OTHER_WIDTHS, ids=cell_name)
def test_other_widths_are_right(problem: GemmProblem) -> None:
    right(planned(CUTE, problem), ["own", "one_token", "uneven", "apart"])


@pytest.mark.parametrize("problem", PROBLEMS[:4] + PROBLEMS[5:9], ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", OURS, ids=lambda k: k.label)
def test_captured_call_follows_its_inputs_and_allocates_nothing(
    kernel: registry.KernelId, problem: GemmProblem
) -> None:
    import torch

    plan = planned(kernel, problem)
    inputs = plan.prepare_inputs("cuda", seed=1)
    bound = plan.plan(*inputs)
    assert allocated_by(bound) == 0
    graph, _ = captured(bound)
    for x in inputs:
        x.copy_(torch.randn_like(x) * x.float().std())
    graph.replay()
    torch.cuda.synchronize()
    columns = slice(problem.columns)
    (want,) = plan.reference_fn(*inputs)
    torch.testing.assert_close(bound.output_tensors[0][..., columns].double(), want[..., columns], atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("tokens", CHAINED)
def test_a_product_waits_for_the_kernel_that_writes_its_tokens(tokens: int) -> None:
    """And writes nothing behind the last token."""
    problems = [GemmProblem(side=side, tokens=tokens) for side in ("q", "out")]
    plans = [planned(CUTE, problem) for problem in problems]
    x, weight = plans[0].prepare_inputs("cuda", seed=1)
    chain, rooms = [], []
    for i in range(8):
        plan, problem = plans[i % 2], problems[i % 2]
        room = x.new_full((tokens + 3, problem.h, problem.columns + problem.beside), 3.0)
        chain.append(plan.plan_into((x, weight), room[:tokens]))
        rooms.append(room)
        # The latent is contiguous for the other side: the columns beside it are left out by a stride.
        x = room[:tokens, :, : problem.columns]
    written = [room[:tokens, :, : problem.columns] for room, problem in zip(rooms, problems * 4, strict=True)]
    each_waits_for_the_one_before(chain, written)
    assert bool(written[-1].isfinite().all()) and bool(written[-1].any())
    for room, problem in zip(rooms, problems * 4, strict=True):
        assert bool((room[tokens:] == 3.0).all()) and bool((room[..., problem.columns :] == 3.0).all())
