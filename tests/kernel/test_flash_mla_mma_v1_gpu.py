"""flash_mla_mma_v1 on a GPU: right in every case of the check with the tilings of every device, whose shared memory the
one that is here has at least, and the same bits in every call."""

from __future__ import annotations

from typing import Any

import pytest
from planning import gives_the_same_bits, planned, right

from mla_var3.workload.decode import MlaProblem

pytestmark = pytest.mark.gpu

KERNEL = "cute-dsl/flash_mla_mma_v1"
LENGTHS = [9000, 1, 700, 4133]
PACKED = {"b": 6, "causal": True, "t": [9000, 1, 0, 700, 4133, 900], "queries": [1, 1, 3, 0, 40, 2]}
#: Fields of a problem, and knobs. Rows of the query tile, tokens of a KV tile and stages are those that the devices of
#: `devices.json` choose, and others.
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({"h": h}, {}) for h in (8, 16, 20, 32, 64, 128)),
    ({"h": 128}, {"tile_m": 64, "tile_n": 16, "num_pipeline_stages": 6}),
    ({"h": 128}, {"tile_m": 64, "tile_n": 16}),
    ({"h": 128}, {"tile_m": 32, "tile_n": 16, "num_pipeline_stages": 4}),
    ({"h": 16}, {"tile_m": 32, "tile_n": 16, "num_pipeline_stages": 4}),
    ({"h": 16}, {"tile_m": 16, "tile_n": 16, "num_pipeline_stages": 5}),
    ({"h": 5, "s": 3, "causal": True, "page": 5, "dtype": "fp16"}, {"tile_m": 16, "tile_n": 16}),
    ({"h": 128}, {"tile_m": 32, "tile_n": 32}),
    ({"h": 128}, {"split_tokens": 256}),
    ({"h": 16, "s": 2, "causal": True}, {}),
    ({"h": 20, "page": 5, "dtype": "fp16"}, {}),
    ({"h": 16, "k": 128}, {}),
    ({"h": 128, "k": 128, "p": 0}, {}),
    ({"h": 8, "s": 3, "causal": True, "k": 256, "p": 32, "page": 48}, {}),
    ({"h": 64, "s": 4, "h_kv": 2, "causal": True, "p": 0}, {}),
    ({"h": 16, "p": 48}, {}),
    ({"h": 8, "s": 5, "tree": True, "page": 1}, {}),
    ({"h": 16, "strided": True, "strided_out": True, "strided_pages": True}, {}),
    ({"h": 16, "page": 48, **PACKED}, {}),
    ({"h": 128, **PACKED}, {}),
]


@pytest.mark.parametrize(("fields", "knobs"), CASES, ids=str)
def test_right_on_the_cases_that_break_kernels(fields: dict[str, Any], knobs: dict[str, Any]) -> None:
    assert len(right(planned(KERNEL, MlaProblem(**{"t": LENGTHS, **fields}), **knobs))) >= 10


@pytest.mark.parametrize(("fields", "knobs"), CASES[:16], ids=str)
def test_the_same_bits_in_every_call(fields: dict[str, Any], knobs: dict[str, Any]) -> None:
    """Many short requests: splits follow each other in every CTA, and a stage that is filled too early would show."""
    problem = MlaProblem(**{**fields, "t": [(97 * i) % 900 for i in range(600)]})
    plan = planned(KERNEL, problem, **knobs)
    gives_the_same_bits(plan.plan(*plan.prepare_inputs("cuda", seed=1, dist="normal")))
