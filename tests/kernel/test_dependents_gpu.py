"""Versions that are programmatic dependents read what the kernels right before them wrote, and no earlier than that."""

from __future__ import annotations

import pytest
from planning import planned

from mla_var3.workload.decode import MlaProblem

pytestmark = pytest.mark.gpu

CASES = [
    ("cute-dsl/flash_mla_v24", MlaProblem(b=3, s=1, t=700, h=16, lengths=[700, 1, 130])),
    ("cute-dsl/flash_mla_v24", MlaProblem(b=140, s=1, t=512, h=16)),
    ("cute-dsl/flash_mla_v24", MlaProblem(b=2, s=2, t=1024, h=16)),
    ("cute-dsl/flash_mla_v23", MlaProblem(b=1, s=1, t=4096, h=128)),
    ("cute-dsl/flash_mla_v23", MlaProblem(b=1, s=1, t=1024, h=64)),
    ("cute-dsl/flash_mla_v23", MlaProblem(b=3, s=1, t=2048, h=64, lengths=[2048, 1, 130])),
]
ROUNDS = 20


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(("label", "problem"), CASES, ids=lambda x: getattr(x, "label", x))
def test_calls_behind_copies_of_all_their_inputs(label: str, problem: MlaProblem, captured: bool) -> None:
    """Inputs of two sets are copied in turn over those of one call, each copy and call right behind the other."""
    import torch

    plan = planned(label, problem)
    given = plan.prepare_inputs("cuda", seed=1)
    sets = [[x.clone() for x in given], [x.clone() for x in plan.prepare_inputs("cuda", seed=2)]]
    bound = plan.plan(*given)
    wanted = []
    for one in sets:
        for x, y in zip(given, one, strict=True):
            x.copy_(y)
        torch.cuda.synchronize()
        bound()
        torch.cuda.synchronize()
        wanted.append([t.clone() for t in bound.output_tensors])
    assert not torch.equal(wanted[0][0], wanted[1][0])
    kept = [[torch.empty_like(t) for t in wanted[0]] for _ in range(ROUNDS)]

    def work() -> None:
        for i in range(ROUNDS):
            # Lengths and pages last, so that they are written right before the call that reads them first.
            for x, y in zip(given, sets[i % 2], strict=True):
                x.copy_(y)
            bound()
            for t, copy in zip(bound.output_tensors, kept[i], strict=True):
                copy.copy_(t)

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
    else:
        work()
    torch.cuda.synchronize()
    for i in range(ROUNDS):
        for found, want in zip(kept[i], wanted[i % 2], strict=True):
            assert torch.equal(found, want), f"call {i} is not that of its inputs"
