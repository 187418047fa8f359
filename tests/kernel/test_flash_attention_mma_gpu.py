"""flash_attention_mma on a GPU: right in every case of the check with the tilings of every device, whose shared memory
the one that is here has at least, and the same bits in every call."""

from __future__ import annotations

from typing import Any

import pytest
from planning import planned, right, writes_the_same_bits

from mla_var3.workload.prefill import PrefillProblem

pytestmark = pytest.mark.gpu

V0, V1 = "cute-dsl/flash_attention_mma", "cute-dsl/flash_attention_mma_v1"
#: What devices with 163 and with 99 KB of shared memory choose for 192 and 128 columns.
A100, RTX = {"tile_m": 128, "warps": 4, "tile_n": 32}, {"tile_m": 128, "warps": 8, "tile_n": 64}
#: A version, fields of a problem, and knobs.
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((V0, {"h": 8, "causal": causal}, knobs) for causal in (True, False) for knobs in ({}, A100, RTX)),
    *((V0, {"h": 16, "p": 0, "causal": True}, knobs) for knobs in ({}, A100)),
    (V0, {"h": 8, "h_kv": 2, "causal": True, "dtype": "fp16"}, {}),
    (V0, {"h": 8, "p": 0, "causal": True, "dtype": "fp16"}, RTX),
    (V0, {"h": 8, "causal": True}, {"tile_m": 256, "num_pipeline_stages": 2}),
    (V0, {"h": 8, "causal": True}, {"tile_m": 64, "tile_n": 32, "num_pipeline_stages": 2}),
    *(
        (V0, {"h": 8, "d": d, "p": p, "causal": True}, {})
        for d, p in ((256, 0), (128, 128), (64, 32), (192, 0), (64, 16))
    ),
    *((V1, {"h": 8, "causal": causal}, {}) for causal in (True, False)),
    *((V1, {"h": 8, "d": d, "p": p, "causal": True}, {}) for d, p in ((128, 0), (64, 32), (64, 16))),
    (V1, {"h": 8, "h_kv": 2, "causal": True, "dtype": "fp16"}, {}),
]


@pytest.mark.parametrize(("label", "fields", "knobs"), CASES, ids=str)
def test_right_on_the_cases_that_break_kernels(label: str, fields: dict[str, Any], knobs: dict[str, Any]) -> None:
    problem = PrefillProblem(**{"b": 2, "s": 1000, "t": 1300, **fields})
    assert len(right(planned(label, problem, **knobs))) >= 10


@pytest.mark.parametrize(("label", "fields", "knobs"), CASES, ids=str)
def test_the_same_bits_in_every_call(label: str, fields: dict[str, Any], knobs: dict[str, Any]) -> None:
    """Hundreds of requests of no and few tokens: a KV tile that is overwritten too early would show."""
    pairs = [((7 * i) % 150, (11 * i) % 260) for i in range(300)]
    problem = PrefillProblem(**{"s": 1000, "t": 1300, **fields, "b": len(pairs), "lengths": pairs})
    plan = planned(label, problem, **knobs)
    writes_the_same_bits(plan.plan(*plan.prepare_inputs("cuda", seed=1, dist="normal")))
