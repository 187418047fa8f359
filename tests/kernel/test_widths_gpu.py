"""Versions that take other widths than 512 + 64, on a GPU: right in every case of the check."""

from __future__ import annotations

import pytest
from planning import gives_the_same_bits, planned, right

from mla_var3.workload.decode import MlaProblem

pytestmark = pytest.mark.gpu

#: Columns of latent and rope. Without rope, P has a panel of its own; of 32 columns, the last panel is half empty.
WIDTHS = ((512, 0), (256, 64), (256, 32))
#: (version, heads, query tokens); several query tokens are masked.
CLASSES = (
    *(("cute-dsl/flash_mla_v23", h, s) for h, s in ((128, 1), (64, 2), (40, 1), (20, 1), (16, 1), (8, 1))),
    *(("cute-dsl/flash_mla_v24", h, s) for h, s in ((20, 1), (16, 1), (8, 1), (8, 2))),
)
#: Tokens of a split: as the scheduler chooses, in one or several for a request, or the same for all requests.
SPLITS = (0, 256)


@pytest.mark.parametrize("split_tokens", SPLITS)
@pytest.mark.parametrize(("label", "h", "s"), CLASSES)
@pytest.mark.parametrize(("k", "p"), WIDTHS)
def test_right_on_the_cases_that_break_kernels(k: int, p: int, label: str, h: int, s: int, split_tokens: int) -> None:
    problem = MlaProblem(h=h, s=s, k=k, p=p, causal=s > 1, t=[9000, 1, 700, 4133])
    assert len(right(planned(label, problem, split_tokens=split_tokens))) >= 10


@pytest.mark.parametrize(("label", "h", "s"), CLASSES)
@pytest.mark.parametrize(("k", "p"), WIDTHS)
def test_the_same_bits_in_every_call(k: int, p: int, label: str, h: int, s: int) -> None:
    """Many short requests: splits follow each other in every CTA, and a P that is overwritten too early would show."""
    lengths = [(97 * i) % 900 for i in range(600)]
    problem = MlaProblem(h=h, s=s, k=k, p=p, causal=s > 1, t=lengths)
    plan = planned(label, problem, split_tokens=0)
    gives_the_same_bits(plan.plan(*plan.prepare_inputs("cuda", seed=1, dist="normal")))
