"""Dense decode over caches of bf16 or fp16."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mla_var3.dispatch.rule import HOPPER, Bound, Quantity, Rule
from mla_var3.workload.decode import MlaProblem


def _rows(problem: MlaProblem) -> float:
    return max(problem.query_tokens, 1) * problem.group / problem.b


def _near_rows(problem: MlaProblem, value: float) -> Iterator[MlaProblem]:
    if not problem.packed and value % problem.group == 0:
        yield problem.replace(s=int(value) // problem.group)
    yield problem.replace(s=1, queries={"total": math.ceil(value * problem.b / problem.group)}, tree=False)


#: Query rows that share a latent cache, of the mean request: heads of a cache times query tokens.
ROWS = Quantity("query rows of a request", _rows, _near_rows)


PAGE = Quantity("tokens of a page", lambda pd: pd.page_size, lambda pd, value: [pd.replace(page=round(value))])

RULES = (
    Rule(
        "cute-dsl/flash_mla_v23",
        "both gather rows of such pages with cp.async, and on an H200 it does so in less time",
        where=(Bound(PAGE, 8),),
        archs=HOPPER,
        records=(
            "0e45e87bf38d",
            "286a8043c1fb",
            "780aa18638ac",
            "4a30a63b5452",
            "4083c236ba6a",
            "8e5b8f4af3ff",
            "eb78232af6d1",
            "024a17220b17",
            "ca92d77fecd1",
            "b275eebb5d25",
            "2815d60cc908",
            "7c31dbc3564a",
        ),
    ),
    Rule(
        "cute-dsl/flash_mla_v24",
        "its operands are swapped, so that few query rows are not padded to the 64 of a wgmma",
        where=(Bound(ROWS, 32),),
        archs=HOPPER,
        records=(
            "ec8f5c1a8dc1",
            "b69fff11be12",
            "a24b44b2a7bd",
            "48884a984006",
            "334e9b950460",
            "46036cd80593",
        ),
    ),
    Rule(
        "cute-dsl/flash_mla_v23",
        "its query tile of 64 rows is full, and two CTAs share the loads of a KV tile",
        archs=HOPPER,
        records=("bc4613b4fdbe", "e8d28a66925f"),
    ),
    Rule("cute-dsl/flash_mla", "it takes widths that the later versions do not", archs=HOPPER),
    Rule("cutile-dsl/flash_mla_v2", "it takes what no version in CuTe DSL does, for few query rows"),
    Rule("cutile-dsl/flash_mla", "it takes what no version in CuTe DSL does"),
    Rule(
        "cute-dsl/flash_mla_mma_v1",
        "on an H200, limited to the 99 KB of shared memory of an RTX 4090, it took 0.66 to 1.02 of the time of "
        "Triton's version",
        where=(Bound(ROWS, 32),),
    ),
    Rule(
        "cute-dsl/flash_mla_mma_v3",
        "on an H200, limited to the 99 KB of shared memory of an RTX 4090, it took 0.81 to 0.89 of the time of "
        "Triton's version",
        where=(Bound(ROWS, 32, above=True),),
        archs=("sm_80", "sm_86", "sm_87", "sm_89"),
    ),
    Rule("triton/flash_mla", "it takes every GPU from sm_80 on, and needs no other compiler"),
    Rule(
        "cute-dsl/flash_mla_mma_v1",
        "it takes different query tokens, masks, gaps and widths that Triton's version does not",
    ),
)
