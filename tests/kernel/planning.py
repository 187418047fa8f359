"""Plans of versions by name: a test is skipped where a version cannot run, and told why a plan is not right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from mla_var3.catalogue.registry import KernelId, get_plan, missing
from mla_var3.device import Device
from mla_var3.toolchain.aot import CompileCache
from running import captured, in_tritons_interpreter


def plan_type(kernel: str | KernelId) -> Any:
    """The plan class of a version, or a skip where its language or library is missing."""
    kernel = KernelId.parse(kernel) if isinstance(kernel, str) else kernel
    if (reason := missing(kernel)) is not None:
        pytest.skip(reason)
    return get_plan(kernel)


def planned(kernel: str | KernelId, problem: Any, compiled: CompileCache | None = None, **knobs: Any) -> Any:
    """The plan for the GPU here, or a skip where it does not take the problem. knobs: of the tiling, over its class's
    defaults; without any the plan chooses. compiled: where it finds what other plans compiled."""
    of = plan_type(kernel)
    plan = of(problem, of.tiling_type(**knobs) if knobs else None, Device.detect())
    verdict = plan.supported()
    if not verdict or not (verdict := plan.feasible()):
        pytest.skip(verdict.reason)
    if compiled is not None:
        plan.compiled = compiled
    return plan


def right(plan: Any, cases: Sequence[str] | None = None, seeds: Sequence[int] | None = None) -> list[str]:
    """The names of the cases in which a plan is right on the GPU, which are all that were tried."""
    from mla_var3.check.judge import check

    report = check(plan, device="cuda", cases=cases, seeds=seeds)
    assert report.ok, f"{plan.problem.label} {plan.tiling}: {report.reason}"
    return [case.name for case in report.cases]


def gives_the_same_bits(kernel: Any) -> None:
    """A hundred calls give what the first gives."""
    import torch

    first = [x.clone() for x in kernel()]
    wrong = [(x != y).sum() for _ in range(100) for x, y in zip(kernel(), first, strict=True)]
    assert int(torch.stack(wrong).sum()) == 0


def writes_the_same_bits(kernel: Any) -> None:
    """Twenty calls write over NaN what the first gives."""
    import torch

    first = [x.clone() for x in kernel()]
    for _ in range(20):
        for x in kernel.output_tensors:
            x.fill_(float("nan"))
        kernel()
        assert all(torch.equal(x, y) for x, y in zip(first, kernel.output_tensors, strict=True))


def each_waits_for_the_one_before(chain: Sequence[Any], written: Sequence[Any]) -> None:
    """Kernels of which each reads what the one before writes, and may start before that one has ended, write in a graph
    what they write apart. written: their outputs."""
    import torch

    for link in chain:  # each waits for its own end
        link()
        torch.cuda.synchronize()
    apart = [x.clone() for x in written]
    graph, _ = captured(lambda: [link() for link in chain])
    for _ in range(20):
        for x in written:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, want) for x, want in zip(written, apart, strict=True))


_INTERPRETED = """
import json, sys
from mla_var3.catalogue import registry
from mla_var3.check.judge import check
from mla_var3.workload import problem_from_record
label, work = json.loads(sys.argv[1])
plan_type = registry.get_plan(registry.KernelId.parse(label))
for record, knobs, cases in work:
    tiling = None if knobs is None else plan_type.tiling_type(**knobs)
    report = check(plan_type, problem_from_record(record), tiling, device="cpu", cases=cases, seeds=[5])
    print(json.dumps(report.to_record()))
"""


def right_in_tritons_interpreter(label: str, work: Sequence[tuple[Any, Any, Any]]) -> list[list[str]]:
    """Of each problem the names of the cases in which a version of Triton is right. work: problems, the knobs of their
    tilings, and the cases to try; either may be None, for what the plan chooses and for all."""
    plan_type(label)
    given = [(problem.to_record(), knobs, cases and list(cases)) for problem, knobs, cases in work]
    lines = in_tritons_interpreter("-c", _INTERPRETED, json.dumps([label, given])).splitlines()
    reports = [json.loads(line) for line in lines if line.startswith("{")]
    for (problem, *_), report in zip(work, reports, strict=True):
        assert report["ok"], (problem.label, report["reason"])
    return [[case["name"] for case in report["cases"]] for report in reports]
