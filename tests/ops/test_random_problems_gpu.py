"""Problems drawn at random, each against the oracle, and the same bits a hundred times in every regime: a thousand with
pages of whole KV tiles and 512 + 64 columns, and four hundred of what engines hand over besides."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_gpu import compile_ahead, decode, judge, same_bits  # noqa: E402

from mla_var3.ops import mla_decode  # noqa: E402
from mla_var3.workload.decode import (  # noqa: E402
    DISTRIBUTIONS,
    MlaProblem,
    bounds_for,
    make_inputs,
)

pytestmark = pytest.mark.gpu

SEED = 20261121
CLASSES, BATCHES = 40, 25
OTHERS = 16  # further classes: other pages, widths and strides, packed queries, trees
MOST_FLOPS = 2e11  # of a problem: the oracle computes in float64
MOST_BYTES = 600_000_000  # of a cache


@dataclass(frozen=True)
class Drawn:
    """A problem and how its inputs are made."""

    problem: MlaProblem
    dist: str
    seed: int
    own_scale: bool


@functools.cache
def drawn() -> tuple[tuple[Drawn, ...], ...]:
    """CLASSES + OTHERS problem classes with BATCHES problems each."""
    rng, others = random.Random(SEED), random.Random(SEED + 1)
    return (
        *(tuple(_batch(rng, fields) for _ in range(BATCHES)) for fields in (_class(rng) for _ in range(CLASSES))),
        *(
            tuple(_batch(others, fields) for _ in range(BATCHES))
            for fields in (_other(others, i) for i in range(OTHERS))
        ),
    )


def _class(rng: random.Random) -> dict[str, Any]:
    h_kv = rng.choice((1, 1, 1, 1, 1, 2, 3, 8))
    h = rng.choice((128, 64, 16, 8, *(rng.randint(1, 128) for _ in range(4))))
    s = rng.choice((1, 1, 1, 2, 3, 4, 16, rng.randint(5, 64), rng.randint(17, 64)))
    return {
        "s": s,
        "h": max(1, h // h_kv) * h_kv,
        "h_kv": h_kv,
        "causal": rng.random() < 0.5,
        "page": rng.choice((64, 64, 64, 128, 192)),
        "dtype": rng.choice(("bf16", "bf16", "fp16")),
    }


def _other(rng: random.Random, number: int) -> dict[str, Any]:
    """Every fourth class is packed, every fourth has a tree; the others have several query tokens, or one."""
    h_kv = rng.choice((1, 1, 1, 2))
    fields = {
        "h": rng.choice((128, 64, 40, 16, 8, rng.randint(1, 128))) * h_kv,
        "h_kv": h_kv,
        "page": rng.choice((1, 16, 32, 24, 64, 64)),
        "dtype": rng.choice(("bf16", "bf16", "fp16")),
        "s": 1,
        **dict(zip(("k", "p"), rng.choice(((512, 64), (512, 0), (256, 64), (256, 32))), strict=True)),
        "strided_pages": rng.random() < 0.4,
    }
    if number % 4 == 0:
        return {**fields, "packed": True, "causal": rng.random() < 0.7}
    if number % 4 == 1:
        return {**fields, "tree": True, "s": rng.randint(2, 40), "causal": False}
    return {**fields, "s": rng.choice((1, 1, 2, 5)), "causal": True}


def _batch(rng: random.Random, fields: dict[str, Any]) -> Drawn:
    fields = dict(fields)
    packed = fields.pop("packed", False)
    page, s = fields["page"], 12 if packed else fields["s"]
    most = int(MOST_FLOPS / (2 * 1088 * s * fields["h"]))  # tokens, over all requests
    longest = rng.choice((page, 300, 2000, 9000, 40000))
    edges = (0, 1, s - 1, s, page - 1, page, page + 1, 2 * page, 2 * page + 1)
    lengths: list[int] = []
    b = rng.choice((1, 1, 2, 3, 5, 8, 24, 140))
    longest = min(longest, MOST_BYTES // (1152 * fields["h_kv"] * b))
    for _ in range(b):
        length = rng.choice((rng.choice(edges), rng.randint(0, longest), longest))
        if sum(lengths) + length > most:
            length = rng.choice(edges)
        lengths.append(length)
    queries = [rng.choice((0, 1, 1, 1, 2, rng.randint(1, s))) for _ in lengths] if packed else None
    if queries and rng.random() < 0.3:
        queries[0] = rng.randint(20, 200)  # a chunk of a prompt
    problem = MlaProblem(b=len(lengths), t=max(lengths), lengths=lengths, queries=queries, **fields)
    return Drawn(problem, rng.choice(DISTRIBUTIONS), rng.randrange(1 << 30), rng.random() < 0.3)


def test_the_draw_is_wide() -> None:
    problems = [d.problem for group in drawn() for d in group]
    others = problems[1000:]
    assert len(problems) == 1400 and len({p.problem_class() for p in problems}) >= 52
    assert {p.page for p in others} >= {1, 16, 32, 64} and {(p.k, p.p) for p in others} >= {(512, 0), (256, 64)}
    assert sum(p.packed for p in others) == sum(p.tree for p in others) == 100 and any(p.strided_pages for p in others)
    problems = problems[:1000]
    assert {p.h_kv for p in problems} == {1, 2, 3, 8} and {p.dtype for p in problems} == {"bf16", "fp16"}
    assert any(0 in p.seq_lens for p in problems) and max(p.t for p in problems) == 40000
    assert min(p.h for p in problems) < 8 and max(p.s for p in problems) > 16


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_ahead([*(d.problem for group in drawn() for d in group), *REGIMES])


@pytest.mark.parametrize("number", range(CLASSES + OTHERS))
def test_random_problems(number: int) -> None:
    wrong = []
    for each in drawn()[number]:
        pd = each.problem
        given = make_inputs(pd, "cuda", seed=each.seed, dist=each.dist)
        # The dominant distributions are made for the default scale; smaller ones stay within the bounds.
        scale = 0.7 * pd.scale if each.own_scale and each.dist in ("flashmla", "normal") else pd.scale
        found = decode(pd, given, scale=scale, head_dim_v=pd.k)
        verdict = judge(found, given, scale, pd.causal, bounds_for(each.dist))
        if not verdict.ok:
            wrong.append(f"{pd.label} {pd.seq_lens} {each.dist} seed {each.seed}: {verdict.reason}")
    assert not wrong, f"{len(wrong)} of {BATCHES}: {wrong[:3]}"


REGIMES = [
    MlaProblem(b=128, h=128, t=2048),
    MlaProblem(b=32, h=128, t=4096),
    MlaProblem(b=1, h=128, t=65536),
    MlaProblem(b=1, h=128, t=4096),
    MlaProblem(b=128, h=16, t=2048),
    MlaProblem(b=1, h=16, t=131072),
    MlaProblem(b=8, s=2, h=16, t=8192, causal=True),
    MlaProblem(b=16, s=4, h=128, t=2048, causal=True),
    MlaProblem(b=100, h=64, t=3000, lengths={"name": "ragged", "seed": 5}),
    MlaProblem(b=40, h=16, t=9000, lengths={"name": "normal", "seed": 6}),
]


@pytest.mark.parametrize("problem", REGIMES, ids=lambda p: p.label)
def test_a_hundred_calls_give_the_same_bits(problem: MlaProblem) -> None:
    """Other work of changing size runs in between, so that blocks are placed in another order."""
    given = make_inputs(problem, "cuda", seed=7, dist="normal")
    first = mla_decode(*given, causal=problem.causal, return_lse=True)
    noise = torch.randn(1 << 20, device="cuda")
    others = []
    for i in range(100):
        noise[: 1 << (10 + i % 11)].mul_(1.0001)
        found = mla_decode(*given, causal=problem.causal, return_lse=True)
        kinds = (torch.int16, torch.int32)
        others.append(sum((a.view(k) != b.view(k)).sum() for a, b, k in zip(found, first, kinds, strict=True)))
    assert int(torch.stack(others).sum()) == 0
    assert same_bits(first[0], mla_decode(*given, causal=problem.causal))
