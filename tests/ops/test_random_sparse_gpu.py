"""Problems over packed caches drawn at random, through the public functions, each against the oracle: five hundred, in
twenty classes, of which five have a page table in place of indices."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from public_calls import attend  # noqa: E402

from mla_var3.check.judge import compare  # noqa: E402
from mla_var3.lab.naming import cell_name  # noqa: E402
from mla_var3.workload.sparse_decode import (  # noqa: E402
    DISTRIBUTIONS,
    OF_INDICES,
    WORKLOAD,
    SparseProblem,
    bounds,
    make_inputs,
    reference,
)

pytestmark = pytest.mark.gpu

SEED = 20261126
CLASSES, DENSE, BATCHES = 20, 5, 25
MOST_PAIRS = 12_000_000  # of query rows and tokens, in a problem: the oracle computes in higher precision
MOST_TOKENS = 400_000  # of a cache


@dataclass(frozen=True)
class Drawn:
    """A problem and how its inputs are made."""

    problem: SparseProblem
    dist: str
    seed: int


@functools.cache
def drawn() -> tuple[tuple[Drawn, ...], ...]:
    """CLASSES problem classes with BATCHES problems each; the last DENSE of them have page tables."""
    rng = random.Random(SEED)
    fields = [_class(rng, number >= CLASSES - DENSE) for number in range(CLASSES)]
    return tuple(tuple(_problem(rng, of) for _ in range(BATCHES)) for of in fields)


def _class(rng: random.Random, paged: bool) -> dict[str, Any]:
    layout = rng.choice(("v32", "v32", "v4", "flat"))
    fields = {
        "layout": layout,
        "paged": paged,
        "s": rng.choice((1, 1, 2, 3, 5)),
        "h": rng.choice((128, 64, 32, 16, 8, rng.randint(1, 128))),
        "page": rng.choice((1, 2, 16, 61, 64, 64, 576)),
        "lengths": rng.random() < 0.5,
        "sink": rng.random() < 0.5,
    }
    if layout == "v4" and not paged and rng.random() < 0.7:
        fields |= {"extra_page": rng.choice((2, 53, 64)), "extra_lengths": rng.random() < 0.5}
    return fields


def _problem(rng: random.Random, of: dict[str, Any]) -> Drawn:
    fields = dict(of)
    b, rows = rng.choice((1, 2, 3, 7, 24, 70, 150, 300)), of["s"] * of["h"]
    most = max(1, MOST_PAIRS // (b * rows))
    t = max(1, min(rng.choice((1, 5, 64, 300, 2000, 9000, 30000)), MOST_TOKENS // b))
    if of["paged"]:
        fields |= {"t": min(t, most)}
    else:
        fields |= {"t": t, "topk": min(rng.choice((1, 3, 63, 64, 65, 128, 500, 1000, 2048)), most)}
    if "extra_page" in fields:
        fields |= {"extra": min(rng.choice((1, 64, 100, 512)), most), "extra_t": rng.choice((2, 100, 1000))}
    if rng.random() < 0.3:
        fields["softmax_scale"] = 0.05
    problem = SparseProblem(b=b, **fields)
    dists = [dist for dist in DISTRIBUTIONS if not (problem.paged and dist in OF_INDICES)]
    return Drawn(problem, rng.choice(dists), rng.randrange(1 << 30))


def problems() -> list[SparseProblem]:
    """All that this file asks for."""
    return [each.problem for group in drawn() for each in group]


def test_the_draw_is_wide() -> None:
    found = problems()
    assert len(found) == 500 and len({p.problem_class() for p in found}) == CLASSES
    assert {p.layout for p in found} == {"v32", "v4", "flat"} and sum(p.paged for p in found) == 125
    assert {True, False} == {p.sink for p in found} == {p.lengths for p in found} == {bool(p.extra) for p in found}
    assert min(p.h for p in found) <= 8 and max(p.h for p in found) == 128 and max(p.b for p in found) == 300
    assert {each.dist for group in drawn() for each in group} == set(DISTRIBUTIONS)


@pytest.mark.parametrize("number", range(CLASSES))
def test_random_problems(number: int) -> None:
    wrong = []
    for each in drawn()[number]:
        problem = each.problem
        inputs = make_inputs(problem, "cuda", seed=each.seed, dist=each.dist)
        found = attend(problem, inputs, scale=problem.scale)
        verdict = compare(WORKLOAD, found, reference(problem, *inputs), bounds(each.dist))
        if not verdict.ok:
            wrong.append(f"{cell_name(problem)} {each.dist} seed {each.seed}: {verdict.reason}")
    assert not wrong, f"{len(wrong)} of {BATCHES}: {wrong[:3]}"
