"""Requests with different numbers of query tokens, and trees of speculative tokens, on a GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planning import planned, right  # noqa: E402

from mla_var3.check.judge import bounds_of, compare  # noqa: E402
from mla_var3.toolchain.aot import CompileCache  # noqa: E402
from mla_var3.workload.decode import WORKLOAD, MlaProblem, make_inputs, reference  # noqa: E402

pytestmark = pytest.mark.gpu

V23, V24 = "cute-dsl/flash_mla_v23", "cute-dsl/flash_mla_v24"
#: (version, tokens of a block, fields): one query tile and two, blocks of one token and of many, several kv heads,
#: pages that are gathered, and heads that do not fill a tile.
PACKED = [
    (V23, 1, {"h": 128, "causal": True}),
    (V23, 2, {"h": 64, "causal": True}),
    (V23, 1, {"h": 64, "causal": False}),
    (V23, 8, {"h": 16, "causal": True}),
    (V23, 3, {"h": 20, "causal": True}),
    (V23, 2, {"h": 128, "h_kv": 2, "causal": True, "page": 1}),
    (V24, 2, {"h": 16, "causal": True}),
    (V24, 1, {"h": 16, "causal": True}),
    (V24, 4, {"h": 8, "causal": True}),
    (V24, 3, {"h": 5, "causal": False}),
    (V24, 4, {"h": 8, "h_kv": 2, "causal": True, "page": 16}),
]
TREES = [
    (V23, 0, {"h": 128, "s": 3}),
    (V23, 0, {"h": 16, "s": 60}),
    (V23, 0, {"h": 20, "s": 5, "page": 1}),
    (V24, 0, {"h": 16, "s": 2}),
    (V24, 0, {"h": 4, "s": 7}),
]
LENGTHS = [2500, 1, 64, 700, 0, 129, 40, 65]
COUNTS = [4, 1, 0, 70, 3, 7, 65, 1]  # one request has more tokens than keys


def packed(fields: dict[str, Any]) -> MlaProblem:
    return MlaProblem(b=len(LENGTHS), lengths=LENGTHS, queries=COUNTS, **fields)


def tree(fields: dict[str, Any]) -> MlaProblem:
    return MlaProblem(b=len(LENGTHS), lengths=LENGTHS, tree=True, **fields)


CASES = [*((*case[:2], packed(case[2])) for case in PACKED), *((*case[:2], tree(case[2])) for case in TREES)]


def name(value: Any) -> str:
    return f"{value.label}_page{value.page}" if isinstance(value, MlaProblem) else str(value).rpartition("/")[2]


@pytest.mark.parametrize(("label", "tokens", "problem"), CASES, ids=name)
def test_right_on_the_cases_that_break_kernels(label: str, tokens: int, problem: MlaProblem) -> None:
    assert len(right(planned(label, problem, query_tokens=tokens), seeds=(3,))) >= 10


@pytest.mark.parametrize(("label", "tokens", "problem"), CASES, ids=name)
def test_drawn_batches(label: str, tokens: int, problem: MlaProblem) -> None:
    """Few long requests and more than there are workers, each count of query tokens by chance; the same bits again."""
    rng, compiled = random.Random(11), CompileCache()
    for b, longest in ((1, 9000), (3, 5000), (40, 900), (300, 200)):
        lengths = [rng.randint(0, longest) for _ in range(b)]
        counts = [rng.choice((0, 1, 1, 2, rng.randint(1, 12))) for _ in range(b)] if problem.packed else None
        if counts is not None:
            counts[0] = max(counts[0], 40)
        drawn = problem.replace(b=b, lengths=lengths, queries=counts)
        given = make_inputs(drawn, "cuda", seed=b, dist="normal")
        kernel = planned(label, drawn, compiled, query_tokens=tokens).plan(*given)
        for x in (*kernel.output_tensors, *kernel.workspace_tensors):
            if x.is_floating_point():
                x.fill_(float("nan"))
        found = [x.clone() for x in kernel()]
        verdict = compare(WORKLOAD, found, reference(drawn, *given), bounds_of(type(kernel.plan), "normal"))
        assert verdict.ok, (b, lengths[:8], counts and counts[:8], verdict.reason)
        assert all(torch.equal(x, y) for _ in range(5) for x, y in zip(kernel(), found, strict=True))


@pytest.mark.parametrize(("label", "tokens", "fields"), PACKED[:1] + PACKED[6:7], ids=name)
def test_a_chunk_beside_hundreds_of_decodes(label: str, tokens: int, fields: dict[str, Any]) -> None:
    """More requests than a CTA cuts at once, one of them with nearly all query tokens."""
    b = 700
    counts = [1] * b
    counts[555] = 1500
    problem = MlaProblem(b=b, lengths=[100 + i % 90 if i != 555 else 2000 for i in range(b)], queries=counts, **fields)
    given = make_inputs(problem, "cuda", seed=1)
    plan = planned(label, problem, query_tokens=tokens)
    verdict = compare(WORKLOAD, plan.plan(*given)(), reference(problem, *given), bounds_of(type(plan), "flashmla"))
    assert verdict.ok, verdict.reason
