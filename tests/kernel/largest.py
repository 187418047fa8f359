"""Inputs as large as docs/serving.md says that results hold for, and what a plan makes of them."""

from __future__ import annotations

from typing import Any

from mla_var3.check.judge import compare
from mla_var3.workload import gemm, merge, norm


def judged(plan_type: Any, problem: Any, inputs: Any, bounds: Any) -> Any:
    """The verdict on a plan's results."""
    plan = plan_type(problem)
    return compare(plan.workload, plan.plan(*inputs)(), plan.reference_fn(*inputs), bounds)


def rmsnorm(plan_type: Any, device: str) -> Any:
    """A sum of squares of 7e37, of values of both signs, beside a row of zeros."""
    problem = norm.NormProblem(rows=3)
    x, *others = norm.make_inputs(problem, device, seed=1)
    x[:2] = x[:2].sign() * 1e17
    x[2] = 0.0
    return judged(plan_type, problem, (x, *others), norm.WORKLOAD.bounds("huge"))


def merge_partials(plan_type: Any, device: str) -> Any:
    """LSE up to the largest float32: equal, far apart, and so large that only differences of a few tell them apart."""
    import torch

    problem = merge.MergeProblem(parts=3, tokens=5, h=1, k=96)
    partials, _ = merge.make_inputs(problem, device, seed=1)
    most = torch.finfo(torch.float32).max
    rows = [[most] * 3, [most, -most, 0.0], [-most] * 3, [2.0**20, 2.0**20 + 1, 2.0**20 - 0.5], [-9e5, -9e5 - 1, -1e6]]
    lse = torch.tensor(rows, device=device).t().contiguous()
    return judged(plan_type, problem, (partials, lse), merge.WORKLOAD.bounds("high"))


def absorb_gemm(plan_type: Any, device: str) -> tuple[float, float]:
    """Sums of products of 128 columns in fp16: one that is below its largest number, and one that is not."""
    problem = gemm.GemmProblem(tokens=3, h=2, dtype="fp16")
    found = []
    for value in (22.0, 23.0):
        inputs = [x.fill_(value) for x in gemm.make_inputs(problem, device, seed=1)]
        (out,) = plan_type(problem).plan(*inputs)()
        out = out[..., : problem.columns]  # those of rope are not this kernel's
        assert bool((out == out.flatten()[0]).all())
        found.append(float(out.flatten()[0]))
    return found[0], found[1]
