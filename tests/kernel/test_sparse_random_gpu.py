"""A thousand random problems of sparse decode on a GPU, a hundred of each of ten classes: any number of requests and
indices, of which any may be missing, outside of the cache, behind the lengths or many times the same.
"""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planning import plan_type

from mla_var3.check.judge import compare
from mla_var3.lab.naming import cell_name
from mla_var3.workload.sparse_decode import (
    CONTEXTS,
    DISTRIBUTIONS,
    MISSING,
    WORKLOAD,
    SparseProblem,
    bounds,
    make_inputs,
    reference,
)

pytestmark = pytest.mark.gpu

NUMBER = 100  # of each class
V41 = {"layout": "v41", "extra": 1, "extra_layout": "v41_fp4", "extra_page": 5}
CLASSES: dict[str, dict[str, Any]] = {
    "v32 h64": {"h": 64, "sink": True},
    "v32 h128 s2 strided": {"h": 128, "s": 2, "strided": True},
    "v32 h48": {"h": 48, "page": 7},
    "v32 h16 s3 lengths": {"h": 16, "s": 3, "lengths": True, "sink": True},
    "v32 h8": {"h": 8, "page": 1},
    "v4 h64 extra": {"h": 64, "layout": "v4", "extra": 1, "extra_page": 3, "sink": True},
    "v4 h20 s2 extra lengths": {
        "h": 20, "s": 2, "layout": "v4", "extra": 1, "extra_page": 16, "lengths": True, "extra_lengths": True,
    },
    "flat h40": {"h": 40, "layout": "flat", "sink": True},
    "v41 h64 fp4": {"h": 64, "sink": True, **V41},
    "v41 h24 s2 fp4 lengths": {"h": 24, "s": 2, "extra_lengths": True, **V41},
}  # fmt: skip


def drawn(rng: random.Random, fields: dict[str, Any]) -> tuple[SparseProblem, str]:
    """A problem of a class, and what its inputs are like."""
    b = round(2 ** rng.uniform(0, 7)) if rng.random() < 0.8 else rng.randint(128, 200)
    t = round(2 ** rng.uniform(0, 11))
    topk = rng.choice((1, 63, 64, 65, 128, 2048, 2176, rng.randint(1, 300), rng.randint(300, 2200)))
    if b > 40:
        topk = min(topk, rng.randint(1, 700))
    made = {**fields, "b": b, "t": t, "topk": topk}
    if fields.get("extra"):
        made |= {"extra": rng.choice((1, 64, 512, rng.randint(1, 900))), "extra_t": round(2 ** rng.uniform(0, 10))}
    if rng.random() < 0.5:
        made["contexts"] = f"{rng.choice(CONTEXTS)}:{rng.randrange(1 << 16)}"
    if rng.random() < 0.6:
        made["missing"] = f"{rng.choice(MISSING)}:{rng.choice((0.02, 0.1, 0.25, 0.5, 0.75, 0.95))}"
    return SparseProblem(**made), rng.choice((*DISTRIBUTIONS, "flashmla", "normal", "holes", "holes"))


@pytest.mark.parametrize("name", CLASSES)
def test_a_hundred_random_problems_are_right(name: str) -> None:
    plan, rng, wrong = plan_type("cute-dsl/sparse_mla_v2"), random.Random(name), []
    for number in range(NUMBER):
        problem, dist = drawn(rng, CLASSES[name])
        inputs = make_inputs(problem, "cuda", seed=number, dist=dist)
        made = plan(problem)
        geometry = made.tiling_type().geometry(problem)
        # Every other one with the look for rows' last tokens, however few requests there are.
        tiling = made.tiling_type(heads=geometry.n, shortens=geometry.as_long and number % 2 == 1)
        call = made.with_tiling(tiling).plan(*inputs)
        for x in call.output_tensors:
            x.fill_(777.0)
        call()
        found = [x.clone() for x in call.output_tensors]
        call()
        verdict = compare(WORKLOAD, found, reference(problem, *inputs), bounds(dist))
        again = all(
            torch.equal(a.nan_to_num(5.0), b.nan_to_num(5.0)) for a, b in zip(found, call.output_tensors, strict=True)
        )
        if not (verdict.ok and again):
            wrong.append(f"{number} {cell_name(problem)} {dist}: {verdict.reason if again else 'other bits'}")
    print(f"{name}: {len(wrong)} wrong of {NUMBER}")
    assert not wrong, "\n".join(wrong)
