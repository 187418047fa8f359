"""Requests of many splits, whose workers merge a share of the rows each, on a GPU: also where not all workers find room
at once, so that some leave their shares to others."""

from __future__ import annotations

import pytest
from planning import planned

from mla_var3.workload.decode import MlaProblem

pytestmark = pytest.mark.gpu

#: (version, heads)
CLASSES = (
    ("cute-dsl/flash_mla_v23", 128),
    ("cute-dsl/flash_mla_v23", 64),
    ("cute-dsl/flash_mla_v24", 16),
    ("cute-dsl/flash_mla_v24", 8),
)
#: As many as fill the device, and more than find room at once.
WORKERS = (0, 300, 590)
#: Two long requests among requests of a KV tile or two: one is dealt to many workers, one to a few.
LENGTHS = [30000, 2500, *((37 * i) % 100 + 1 for i in range(398))]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("label", "h"), CLASSES)
def test_right_wherever_the_long_requests_are(label: str, h: int, workers: int) -> None:
    """One kernel, whose inputs change between its calls, as a replayed graph's do."""
    import torch

    from mla_var3.check.judge import bounds_of, compare

    plan = planned(label, MlaProblem(h=h, t=LENGTHS), workers=workers)
    given = plan.prepare_inputs("cuda", seed=h, dist="normal")
    references = plan.reference_fn(*given)
    kernel = plan.plan(*given)
    flags, per_request = kernel.workspace_tensors[1], [given[i] for i in (0, 2, 3)]
    original = [x.clone() for x in per_request]
    orders = [torch.arange(400).roll(n) for n in (0, 3, 200, 398)] + [torch.randperm(400) for _ in range(8)]
    for order in orders:
        order = order.cuda()
        for x, before in zip(per_request, original, strict=True):
            x.copy_(before[order])
        found = []
        for _ in range(3):
            for x in kernel.output_tensors:
                x.fill_(float("nan"))
            found.append([x.clone() for x in kernel()])
            assert not flags.any()
        verdict = compare(plan.workload, found[0], [x[order] for x in references], bounds_of(type(plan), "normal"))
        assert verdict.ok, verdict.reason
        for again in found[1:]:
            assert all(torch.equal(x, y) for x, y in zip(found[0], again, strict=True))
