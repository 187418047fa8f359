"""flash_mla_mma_v3 on a GPU: right in every case of the check with the tilings of every device, whose shared memory the
one that is here has at least, and the same bits in every call."""

from __future__ import annotations

from typing import Any

import pytest
from planning import gives_the_same_bits, planned, right

from mla_var3.workload.decode import MlaProblem

pytestmark = pytest.mark.gpu

KERNEL = "cute-dsl/flash_mla_mma_v3"
LENGTHS = [9000, 1, 700, 4133]
PACKED = {"b": 6, "causal": True, "t": [9000, 1, 0, 700, 4133, 900], "queries": [1, 1, 3, 0, 40, 2]}
#: Fields of a problem, and knobs. Tokens of a KV tile and stages are those that the devices of `devices.json` choose.
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({"h": h}, {}) for h in (33, 64, 128)),
    *(({"h": 128}, {"num_pipeline_stages": 3, **knobs}) for knobs in ({}, {"tile_n": 16})),
    ({"h": 128}, {"num_pipeline_stages": 6, "tile_n": 16}),
    ({"h": 128}, {"split_tokens": 256}),
    ({"h": 128, "s": 2, "causal": True}, {}),
    ({"h": 96, "page": 5, "dtype": "fp16"}, {}),
    ({"h": 128, "k": 256, "p": 32, "page": 48}, {}),
    ({"h": 64, "s": 4, "h_kv": 2, "causal": True, "p": 0}, {}),
    ({"h": 64, "p": 48}, {}),
    ({"h": 64, "k": 256, "p": 0}, {}),
    ({"h": 16, "s": 8, "tree": True, "page": 1}, {}),
    ({"h": 64, "strided": True, "strided_out": True, "strided_pages": True}, {}),
    ({"h": 128, **PACKED}, {}),
]


@pytest.mark.parametrize(("fields", "knobs"), CASES, ids=str)
def test_right_on_the_cases_that_break_kernels(fields: dict[str, Any], knobs: dict[str, Any]) -> None:
    assert len(right(planned(KERNEL, MlaProblem(**{"t": LENGTHS, **fields}), **knobs))) >= 10


@pytest.mark.parametrize(("fields", "knobs"), CASES[:12], ids=str)
def test_the_same_bits_in_every_call(fields: dict[str, Any], knobs: dict[str, Any]) -> None:
    """Many short requests: splits follow each other in every CTA, and a stage that is filled too early would show."""
    problem = MlaProblem(**{**fields, "t": [(97 * i) % 900 for i in range(600)]})
    plan = planned(KERNEL, problem, **knobs)
    gives_the_same_bits(plan.plan(*plan.prepare_inputs("cuda", seed=1, dist="normal")))
