"""Checking plans whose problems are not paged decode: every case is planned, and one is bound once more.

For designs with inputs and an oracle of their own (`prefill`, `mixed`); `checking` has the bounds and judges results.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mla_var3.runtime.correctness.checking import Bounds, CaseResult, CheckReport, ErrorReport, bounds_for, compare

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.problem import MlaProblem
    from mla_var3.runtime.types import Tiling

BOUND_FROM = "normal"  # the case whose kernel is bound to a second set of inputs


def check_cases(
    plan_cls: Any,
    cases: Iterable[tuple[str, MlaProblem, str]],  # name, problem, distribution
    make_inputs: Callable[..., Sequence[Any]],  # (problem, device, seed=, dist=)
    tiling: Tiling | None,
    device: str,
    *,
    seeds: Sequence[int] | None,
    hardware: Device | None,
    cos_slack: float = 0.0,
) -> CheckReport:
    """Plans each case and judges it, once for each seed (a fresh one by default).

    cos_slack: what the bounds on cosine differences are widened by. Raises what the plan or the kernel raises.
    """
    cases, results = list(cases), list[CaseResult]()
    seeds = tuple(seeds) if seeds is not None else (random.SystemRandom().randrange(1 << 30),)
    for base in seeds:
        for index, (name, problem, dist) in enumerate(cases):
            seed, bounds = base + 101 * index, bounds_for(dist)
            bounds = replace(bounds, out_cos=bounds.out_cos + cos_slack, row_cos=bounds.row_cos + cos_slack)
            plan = plan_cls(problem, tiling, hardware)
            inputs = make_inputs(problem, device, seed=seed, dist=dist)
            kernel = plan.plan(*inputs)
            error = judge(plan, kernel, inputs, bounds)
            results.append(CaseResult(name, error.ok, error.reason, seed, "plan", problem.label, error))
            if name == BOUND_FROM:
                other = make_inputs(problem, device, seed=seed + 1, dist=dist)
                error = judge(plan, kernel.bind(*other), other, bounds)
                results.append(CaseResult("bound", error.ok, error.reason, seed + 1, "bind", problem.label, error))
    failed = [c for c in results if not c.ok]
    reason = "; ".join(f"{c.name} {c.label} (seed {c.seed}): {c.reason}" for c in failed[:3])
    worst = {key: max((getattr(c.error, key) for c in results), default=math.inf) for key in ("out", "lse")}
    return CheckReport(not failed, reason, worst, results, seeds)


def judge(plan: Any, kernel: Any, inputs: Sequence[Any], bounds: Bounds) -> ErrorReport:
    """Calls the kernel twice, on outputs and workspaces full of NaN, and compares with the plan's reference.

    The inputs must not change, and both calls must give the same bits unless the plan says that it is not
    deterministic.
    """
    import torch

    def wrong(reason: str) -> ErrorReport:
        return ErrorReport(False, reason, math.inf, math.inf)

    def same(one: Sequence[Any], two: Sequence[Any]) -> bool:
        return all(torch.equal(_bits(x), _bits(y)) for x, y in zip(one, two, strict=True))

    before = [x.clone() for x in inputs]
    runs = []
    for _ in range(2):
        for x in kernel.written_tensors():
            if x.is_floating_point():
                x.fill_(math.nan)
        runs.append([x.clone() for x in kernel()])
    if not same(inputs, before):
        return wrong("the call changed its inputs")
    out, lse = runs[0]
    if out.dtype != plan.problem.torch_dtype:
        return wrong(f"out is {out.dtype}, expected {plan.problem.torch_dtype}")
    ref_out, ref_lse = plan.reference_fn(*inputs)
    report = compare(out, lse, ref_out, ref_lse, bounds)
    if report.ok and plan.deterministic and not same(*runs):
        return replace(report, ok=False, reason="two calls with the same inputs gave different bits")
    return report


def _bits(x: Any) -> Any:
    """The tensor as integers: a cache may hold NaN behind a request's last token, which equals nothing."""
    import torch

    kinds = {2: torch.int16, 4: torch.int32}
    return x.contiguous().view(kinds[x.element_size()]) if x.is_floating_point() else x
