"""merge_partials on a GPU: right on the cases that break kernels, in every tiling, and behind one that still runs."""

from __future__ import annotations

import pytest
from planning import each_waits_for_the_one_before, planned, right

from mla_var3.catalogue import registry
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


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.label)
def test_right_on_the_cases_that_break_kernels(kernel: registry.KernelId, problem: MergeProblem) -> None:
    assert {"uneven", "empty", "planned_many"} <= {*right(planned(kernel, problem))}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_every_cute_tiling_is_right(problem: MergeProblem) -> None:
    plan = planned("cute-dsl/merge_partials", problem)
    for tiling in plan.autotune_configs():
        right(plan.with_tiling(tiling), ["own", "one_row", "uneven", "empty"])


def test_a_merge_waits_for_the_kernel_that_writes_its_partials() -> None:
    plan = planned("cute-dsl/merge_partials", CHAINED)
    chain = [plan.plan(*plan.prepare_inputs("cuda", seed=1))]
    for _ in range(7):
        out, lse = chain[-1].output_tensors
        chain.append(plan.plan(out[None], lse[None]))
    each_waits_for_the_one_before(chain, [x for link in chain for x in link.output_tensors])
