"""The lightning indexer on a GPU: right on the cases that break kernels, in every tiling, captured and bit for bit."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from planning import planned, right

from mla_var3.workload import indexer_logits, topk
from mla_var3.workload import indexer_topk as of_both
from mla_var3.workload.index_append import IndexAppendProblem
from mla_var3.workload.indexed_append import IndexedAppendProblem
from mla_var3.workload.indexer_logits import IndexerLogitsProblem
from mla_var3.workload.indexer_topk import IndexerTopkProblem
from mla_var3.workload.topk import TopkProblem
from running import allocated_by, captured

pytestmark = pytest.mark.gpu

CHOOSES, SHORT, LONG = "cute-dsl/topk_v3", "cute-dsl/topk_v5", "cute-dsl/topk_v6"
CHUNKS = "cute-dsl/topk_v7"
TWO = "cute-dsl/indexer_topk"
LOGITS = [
    IndexerLogitsProblem(b=1, s=513, t=3000, table=False),
    IndexerLogitsProblem(b=3, s=100, t=1000, heads=32, table=False, dtype="bf16"),
    IndexerLogitsProblem(b=1, s=77, t=1000, heads=16, table=False),
    *(IndexerLogitsProblem(b=17, s=s, t=3000) for s in (1, 2, 3, 5, 8)),
    IndexerLogitsProblem(b=200, s=1, t=3000, heads=32, dtype="bf16"),
    IndexerLogitsProblem(b=17, s=6, t=3000, heads=16),
]
TOPK = [
    TopkProblem(b=64, t=65536), TopkProblem(b=1, t=131072, topk=512), TopkProblem(b=1000, t=9000, topk=1024),
    TopkProblem(b=6, s=2, t=40000, table=True), TopkProblem(b=300, t=9000, dtype="bf16", table=True),
    TopkProblem(b=9, t=5000, topk=1),
]  # fmt: skip
SHORT_ROWS = [
    TopkProblem(b=1, t=8192), TopkProblem(b=600, t=8192), TopkProblem(b=64, t=16384, topk=512),
    TopkProblem(b=300, t=16384, topk=1024), TopkProblem(b=6, s=2, t=9000, table=True), TopkProblem(b=140, t=4096),
    TopkProblem(b=300, t=9000, dtype="bf16", table=True), TopkProblem(b=9, t=5000, topk=1), TopkProblem(b=64, t=32768),
]  # fmt: skip
LONG_ROWS = [
    TopkProblem(b=1, t=131072), TopkProblem(b=7, t=131072, topk=512), TopkProblem(b=6, s=2, t=40000, table=True),
    TopkProblem(b=3, t=300_000, dtype="bf16"), TopkProblem(b=40, t=65536), TopkProblem(b=2, t=500_000, topk=64),
]  # fmt: skip
MANY_LONG_ROWS = [
    TopkProblem(b=16, t=262144), TopkProblem(b=1, t=1 << 20), TopkProblem(b=128, t=65536),
    TopkProblem(b=100, t=70000, dtype="bf16"), TopkProblem(b=40, t=100_000, topk=64),
]  # fmt: skip
CHOICES = [
    IndexerTopkProblem(b=8, t=32768), IndexerTopkProblem(b=1), IndexerTopkProblem(b=9, s=2, t=3000, heads=32, topk=64),
    IndexerTopkProblem(b=40, t=9000, heads=16, topk=512), IndexerTopkProblem(b=8, t=65536, topk=100),
]  # fmt: skip
EVERY_TILING = [
    ("cute-dsl/mqa_logits_v4", LOGITS[0]), ("cute-dsl/mqa_logits_v4", LOGITS[4]), (CHOOSES, TOPK[1]),
    (CHOOSES, TOPK[3]), (LONG, LONG_ROWS[2]), (CHUNKS, LONG_ROWS[2]),
    (SHORT, SHORT_ROWS[0]), (SHORT, SHORT_ROWS[4]),
]  # fmt: skip
IN_ORDER = [(CHOOSES, 200_000), (SHORT, 16_000), (SHORT, 7_001), (LONG, 200_000), (CHUNKS, 200_000)]
APPENDED = [
    IndexedAppendProblem(**fields)
    for fields in ({}, {"interleaved_keys": True, "h": 16}, {"tokens": 9000, "h": 16}, {"powers_of_keys": False})
]
KEYS = [IndexAppendProblem(**fields) for fields in ({}, {"interleaved": True}, {"tokens": 9000}, {"powers": False})]
#: What calls of the public functions plan.
CALLED: list[Any] = [
    IndexerLogitsProblem(b=9, s=2, t=3008), TopkProblem(b=9, s=2, t=3008, topk=512, table=True),
    TopkProblem(b=9, s=2, t=3000, topk=512, table=True), IndexerLogitsProblem(b=1, s=600, t=4000, table=False),
    TopkProblem(b=600, t=4000, topk=512), *KEYS,
]  # fmt: skip


@pytest.mark.parametrize("problem", LOGITS, ids=lambda p: p.label)
@pytest.mark.parametrize("label", ["cute-dsl/mqa_logits_v4", "triton/mqa_logits"])
def test_logits_are_right(label: str, problem: Any) -> None:
    assert len(right(planned(label, problem))) >= 4


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        *((CHOOSES, problem) for problem in (*TOPK, TopkProblem(b=140, t=70000))),
        *((SHORT, problem) for problem in SHORT_ROWS),
        *((LONG, problem) for problem in LONG_ROWS),
        *((CHUNKS, problem) for problem in (*LONG_ROWS, *MANY_LONG_ROWS)),
    ],
    ids=lambda x: x if isinstance(x, str) else x.label,
)
def test_topk_is_right(label: str, problem: Any) -> None:
    assert len(right(planned(label, problem))) >= 4


@pytest.mark.parametrize(("label", "problem"), EVERY_TILING, ids=lambda x: x if isinstance(x, str) else x.label)
def test_every_tiling_is_right(label: str, problem: Any) -> None:
    plan = planned(label, problem)
    for tiling in plan.autotune_configs():
        if tiling.validate(problem, plan.device):
            right(plan.with_tiling(tiling), ["own", "ragged", "odd", "shifted"])


@pytest.mark.parametrize("problem", CHOICES, ids=lambda p: p.label)
def test_choices_are_right(problem: Any) -> None:
    plan = planned(TWO, problem)
    for tiling in plan.autotune_configs():
        right(plan.with_tiling(tiling))


def test_a_hundred_choices_of_pages_that_are_alike() -> None:
    """Scales decide: values in ascending order, all equal, or large in one place of the request; the same bits."""
    import torch

    rng = random.Random(3)
    for k in (64, 2048):
        for i in range(50):
            problem = IndexerTopkProblem(b=rng.choice((1, 3, 8)), t=rng.randint(1, 3 * k + 9000), topk=k)
            inputs = of_both.make_inputs(problem, "cuda", seed=i)
            codes, scales = indexer_logits.index_pages(inputs[1])
            if i % 4:
                codes[:] = codes[0, 0]
                token = torch.arange(problem.width * 64, device="cuda").view(-1, 64)
                place = token[:, 0] // 64
                for row in inputs[4].long():
                    pages = row[: problem.width]
                    scales[pages[place]] = [(token + 1) * 2.0**-10, token * 0.0 + 1, (token > problem.t // 3) * 0.5][
                        i % 4 - 1
                    ].float()
            call = planned(TWO, problem).plan(*inputs)
            (want,) = of_both.reference(problem, *inputs)
            found = [call()[0].clone() for _ in range(3)]
            assert torch.equal(found[0].long().sort(1).values, want.sort(1).values), (problem.label, i)
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_captured_choice_follows_its_lengths() -> None:
    import torch

    problem = CHOICES[2]
    plan = planned(TWO, problem)
    inputs = plan.prepare_inputs("cuda", seed=1)
    bound = plan.plan(*inputs)
    graph, _ = captured(bound)
    for lengths in (7, 64, 65, 1000, 0, problem.t):
        inputs[3].fill_(lengths)
        bound.output_tensors[0].fill_(-5)
        graph.replay()
        torch.cuda.synchronize()
        (want,) = plan.reference_fn(*inputs)
        assert torch.equal(bound.output_tensors[0].long().sort(1).values, want.sort(1).values)


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        ("cute-dsl/mqa_logits_v4", LOGITS[3]),
        (CHOOSES, TOPK[3]),
        (SHORT, SHORT_ROWS[4]),
        (LONG, LONG_ROWS[2]),
        (CHUNKS, LONG_ROWS[2]),
    ],
    ids=lambda x: x if isinstance(x, str) else x.label,
)
def test_captured_call_follows_its_lengths(label: str, problem: Any) -> None:
    import torch

    plan = planned(label, problem)
    inputs = plan.prepare_inputs("cuda", seed=1)
    bound = plan.plan(*inputs)
    assert allocated_by(bound) == 0
    graph, _ = captured(bound)
    ends = next(x for x in inputs if x.dtype == torch.int32 and x.shape == (problem.b, problem.s))
    for lengths in (7, 1000, 0, problem.t):
        ends.fill_(lengths)
        bound.output_tensors[0].fill_(-5)
        graph.replay()
        torch.cuda.synchronize()
        (want,) = plan.reference_fn(*inputs)
        (found,) = bound.output_tensors
        if problem.workload == "topk":
            assert torch.equal(found.long().sort(1).values, want.sort(1).values)
        else:
            there = ~want.isnan()
            assert bool((found[~there] == -5).all())
            torch.testing.assert_close(found[there].double(), want[there], atol=indexer_logits.FP8_SUMS, rtol=2.0**-10)


@pytest.mark.parametrize("label", [CHOOSES, SHORT, LONG, CHUNKS])
def test_a_thousand_problems_with_ties(label: str) -> None:
    import torch

    rng = random.Random(7)
    for k in (64, 512, 2048):
        plan: Any = None
        for i in range(334):
            problem = TopkProblem(b=rng.choice((1, 2, 5, 40)), t=rng.randint(1, 3 * k + 5000), topk=k, lengths="ragged")
            inputs = topk.make_inputs(problem, "cuda", seed=i, dist=rng.choice(topk.DISTRIBUTIONS))
            plan = planned(label, problem) if plan is None else plan.rebind(*inputs)
            (found,), (want,) = plan.plan(*inputs)(), topk.reference(problem, *inputs)
            assert torch.equal(found.long().sort(1).values, want.sort(1).values), problem.label


@pytest.mark.parametrize(
    ("label", "t", "tilings"),
    [
        (CHOOSES, 300_000, (None, 1, 16)),
        (SHORT, 15_000, (None,)),
        (LONG, 300_000, (None,)),
        (CHUNKS, 300_000, (None, 1, 4)),
    ],
)
def test_values_in_ascending_order_are_all_candidates(label: str, t: int, tilings: tuple[int | None, ...]) -> None:
    import torch

    problem = TopkProblem(b=3, t=t, topk=2048)
    logits = torch.arange(problem.t, device="cuda", dtype=torch.float32).repeat(3, 1)
    logits[1] = -logits[1]
    zeros = torch.zeros(3, dtype=torch.int32, device="cuda")
    for tiling in tilings:
        plan = planned(label, problem)
        plan = plan if tiling is None else plan.with_tiling(type(plan.tiling)(tiling))
        (found,) = plan.plan(logits, zeros, zeros + problem.t)()
        last = torch.arange(problem.t - problem.topk, problem.t, device="cuda", dtype=torch.int32)
        assert torch.equal(found[0].sort().values, last) and torch.equal(found[2], found[0])
        assert torch.equal(found[1].sort().values, torch.arange(problem.topk, device="cuda", dtype=torch.int32))


def test_what_is_chosen_is_what_sparse_decode_takes() -> None:
    """Indices of `indexer_topk` name the tokens of the request that its page table names, and no others."""
    import torch

    from mla_var3.ops import deep_gemm, indexer_logits, indexer_topk, topk_indices
    from mla_var3.workload import indexer_topk as workload

    planned("cute-dsl/mqa_logits_v4", LOGITS[3])
    problem = workload.IndexerTopkProblem(b=9, s=2, t=3000, heads=64, topk=512, lengths="ragged")
    inputs = workload.make_inputs(problem, "cuda", seed=3)
    q, cache, weights, ends, table = inputs
    found = indexer_topk(q, cache, weights, ends, 512, page_table=table)
    (want,) = workload.reference(problem, *inputs)
    assert torch.equal(found.long().sort(1).values, want.sort(1).values)
    again = topk_indices(indexer_logits(q, cache, weights, ends, page_table=table), ends, 512, page_table=table)
    assert torch.equal(found, again)
    meta = deep_gemm.get_paged_mqa_logits_metadata(ends, 64, 132)
    logits = deep_gemm.fp8_paged_mqa_logits(
        q.view(torch.float8_e4m3fn), cache.unsqueeze(2), weights, ends, table, meta, 3000, clean_logits=True
    )
    assert torch.equal(topk_indices(logits, ends, 512, page_table=table), found)


def test_prefill_in_parts_is_prefill_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from mla_var3.ops import indexer, indexer_topk
    from mla_var3.workload import indexer_topk as workload

    planned("cute-dsl/mqa_logits_v4", LOGITS[3])
    problem = workload.IndexerTopkProblem(b=2, s=300, t=2000, heads=64, topk=512, table=False)
    q, keys, scales, weights, starts, ends = inputs = workload.make_inputs(problem, "cuda", seed=3)
    (want,) = workload.reference(problem, *inputs)
    for most in (256 << 20, 1 << 20, 1):
        monkeypatch.setattr(indexer, "WORKSPACE", most)
        rows = slice(0, 600 if most > 1 else 5)
        found = indexer_topk(q[rows], keys, weights[rows], ends[rows], 512, starts=starts[rows], scales=scales)
        assert torch.equal(found.long().sort(1).values, want[rows].sort(1).values)


@pytest.mark.parametrize("problem", APPENDED, ids=lambda p: p.label)
def test_latents_and_keys_are_appended_at_once(problem: Any) -> None:
    """What the two functions write: codes and scales to the byte."""
    import torch

    from mla_var3.ops import index_append, indexed_append, rope_append
    from mla_var3.packed_cache import layout_of, new_cache
    from mla_var3.workload import indexed_append as workload

    assert len(right(planned("cute-dsl/indexed_append", problem))) >= 15
    inputs: Any = workload.make_inputs(problem, "cuda", seed=2)
    q, latent, rope, positions, slots, table, k, weight, bias = inputs
    found: list[Any] = []
    for at_once in (True, False):
        out = torch.zeros((problem.tokens, problem.h, 576), dtype=torch.bfloat16, device="cuda")
        cache = new_cache(layout_of("v32"), problem.pages, 64, "cuda").view(torch.uint8).zero_()
        index_cache = torch.zeros((problem.pages, 64, 132), dtype=torch.uint8, device="cuda")
        turned, powers = problem.interleaved_keys, problem.powers_of_keys
        if at_once:
            indexed_append(
                q, latent, rope, k, weight, bias, positions, slots, table, out, cache, index_cache,
                interleaved_keys=turned, powers_of_keys=powers,
            )  # fmt: skip
        else:
            rope_append(q, latent, rope, positions, slots, table, out, cache, layout="v32")
            index_append(k, weight, bias, positions, slots, table, index_cache, interleaved=turned, powers=powers)
        found.append((cache[..., :528], index_cache, cache[..., 528:].view(torch.int16), out.view(torch.int16)))
    one, other = found
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    # A turned column may lie so near to the middle between two bf16 numbers that either is right.
    for a, b in zip(one[2:], other[2:], strict=True):
        apart = (a.int() - b.int()).abs()
        assert int(apart.max()) <= 1 and int((apart > 0).sum()) <= 1e-4 * apart.numel()


@pytest.mark.parametrize("problem", KEYS, ids=lambda p: p.label)
def test_keys_are_appended_to_the_byte(problem: Any) -> None:
    plan = planned("cute-dsl/index_append", problem)
    for tiling in plan.autotune_configs():
        right(plan.with_tiling(tiling))


@pytest.mark.parametrize(("label", "t"), IN_ORDER)
def test_rows_in_the_order_of_their_values_are_read_again(label: str, t: int) -> None:
    """A sample of lines says nothing of rows whose lines differ from what is sampled: few candidates, or too many. Rows
    of a thread's groups that are alike have few above the floor, or all in a bin."""
    import torch

    column = torch.arange(t, device="cuda")
    sampled = (column // 32) * 256 // (t // 32)  # about which of 256 lines a sample takes is next
    rows = torch.stack([
        torch.where(column % 7 == 0, 1e30, column * 1e-3), torch.where(column < 3000, 5.0, 0.0),
        torch.where(column >= t - 30_000, 5.0, -1.0), -column * 1.0, torch.sin(column * 1e-4),
        torch.where((column // 32) % 3 == 0, 100.0, 0.0) + sampled * 1e-3,
        torch.where(column % 3 == 0, 3e38, -3e38) + torch.where(column % 100 == 1, math.inf, 0.0),
    ]).float()  # fmt: skip
    zeros = torch.zeros(len(rows), dtype=torch.int32, device="cuda")
    for k in (64, 2048):
        problem = TopkProblem(b=len(rows), t=t, topk=k)
        plan = planned(label, problem)
        (want,) = topk.reference(problem, rows, zeros, zeros + t)
        for tiling in plan.autotune_configs():
            (found,) = plan.with_tiling(tiling).plan(rows, zeros, zeros + t)()
            assert torch.equal(found.long().sort(1).values, want.sort(1).values), (k, tiling)


@pytest.mark.parametrize(("label", "t"), [(CHOOSES, 200_000), (SHORT, 16_000), (LONG, 40_000), (LONG, 131_072)])
def test_rows_whose_largest_logits_are_equal_in_one_cta(label: str, t: int) -> None:
    """CTAs of a cluster take lines of 32 logits in turn. Where all groups of one of them have the same largest logit,
    there is no range to make bins of, and all the same that CTA has the largest logits of the row."""
    import torch

    torch.manual_seed(1)
    column, below = torch.arange(t, device="cuda"), torch.rand(t, device="cuda") - 1.1
    rows = []
    for turns in (1, 2, 4, 8, 16):
        own = column // 32 % turns == turns - 1
        rows += [torch.where(own, x, below) for x in (1.0, 0.0, (column % 2).float())]
        rows.append(torch.where(own & (torch.rand(t, device="cuda") < 0.5), 1.0, below))
    logits = torch.stack(rows)
    zeros = torch.zeros(len(rows), dtype=torch.int32, device="cuda")
    for k in (64, 2048):
        plan = planned(label, TopkProblem(b=len(rows), t=t, topk=k))
        (want,) = topk.reference(plan.problem, logits, zeros, zeros + t)
        for tiling in plan.autotune_configs():
            (found,) = plan.with_tiling(tiling).plan(logits, zeros, zeros + t)()
            assert torch.equal(found.long().sort(1).values, want.sort(1).values), (k, tiling)


def test_rows_that_begin_anywhere_are_held() -> None:
    """Rows of the most logits, which do not begin at multiples of 16 bytes."""
    import torch

    for t, skew in ((32768, 1), (16384, 1), (8192, 3), (8190, 2)):
        problem = TopkProblem(b=5, t=t)
        rows = torch.randn((5, t + 1 + skew), device="cuda")[:, skew : skew + t]
        zeros = torch.zeros(5, dtype=torch.int32, device="cuda")
        (found,) = planned(SHORT, problem).plan(rows, zeros, zeros + t)()
        (want,) = topk.reference(problem, rows, zeros, zeros + t)
        assert torch.equal(found.long().sort(1).values, want.sort(1).values)
