"""What FlashMLA's own dense decode test asks, asked of the same functions here: heads 1 to 128, caches 1 to 8, query
tokens 1 to 64, ragged lengths with zeros, shuffled pages, NaN past the end, garbage page numbers, both dtypes, graphs.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_gpu import FLASH_MLA_SCALE, compile_ahead, judge, same_bits  # noqa: E402

from mla_var3.ops import flash_mla  # noqa: E402
from mla_var3.workload.decode import FLASHMLA, MlaProblem, make_inputs  # noqa: E402
from running import captured  # noqa: E402

pytestmark = pytest.mark.gpu

# (s, h, h_kv, causal, dtype): 27 classes. Every number of heads that the rows of a tile divide, and that they do not.
CLASSES: list[tuple[int, int, int, bool, str]] = [
    *((1, h, 1, False, "bf16") for h in (1, 3, 7, 8, 16, 20, 64, 96, 100, 127, 128)),
    *((1, h, h_kv, False, "bf16") for h, h_kv in ((3, 3), (8, 2), (9, 3), (126, 2), (128, 8))),
    *((s, h, 1, True, "bf16") for s, h in ((2, 128), (4, 16), (7, 20), (16, 8), (64, 1), (64, 128))),
    (3, 64, 1, False, "bf16"),
    (2, 9, 3, True, "bf16"),
    (1, 128, 1, False, "fp16"),
    (2, 16, 1, True, "fp16"),
    (1, 3, 1, False, "fp16"),
]


def batches(s: int, h: int, h_kv: int, causal: bool, dtype: str) -> list[MlaProblem]:
    """Lengths as FlashMLA's test draws them: N(t, t/2), some of them 0; and one request of four thousand tokens."""
    rng = random.Random(1000 * s + 10 * h + h_kv)

    def drawn(b: int, t: int, zeros: float) -> list[int]:
        return [0 if rng.random() < zeros else max(int(rng.normalvariate(t, t / 2)), s) for _ in range(b)]

    lists = [drawn(2, 20, 0.0), drawn(17, 140, 0.5), drawn(6, 1500 if s * h > 2048 else 4096, 0.2), [4096], [0, 0]]
    fields: dict[str, Any] = {"s": s, "h": h, "h_kv": h_kv, "causal": causal, "dtype": dtype}
    return [MlaProblem(b=len(lengths), t=max(lengths), lengths=lengths, **fields) for lengths in lists]


CAPTURED = [
    MlaProblem(s=s, h=h, causal=causal, b=9, t=3000, lengths=[3000, 0, 64, 65, 1, 2999, 129, 700, 1024])
    for s, h, causal in ((1, 128, False), (1, 16, False), (2, 128, True), (4, 16, True))
]
SCALED = MlaProblem(b=3, h=16, t=500)
PROBLEMS = [*(problem for each in CLASSES for problem in batches(*each)), *CAPTURED, SCALED]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_ahead(PROBLEMS)


def attend(given: tuple[Any, ...], causal: bool, meta: Any = None) -> tuple[Any, Any]:
    q, cache, table, lens = given
    meta = meta or flash_mla.get_mla_metadata(lens, q.shape[1] * q.shape[2], 1)[0]
    return flash_mla.flash_mla_with_kvcache(q, cache, table, lens, 512, meta, None, causal=causal)


@pytest.mark.parametrize(
    "each", CLASSES, ids=lambda c: f"s{c[0]}_h{c[1]}_kv{c[2]}_{'causal' if c[3] else 'full'}_{c[4]}"
)
def test_as_flash_mla_asks(each: tuple[int, int, int, bool, str]) -> None:
    for seed, problem in enumerate(batches(*each)):
        given = make_inputs(problem, "cuda", seed=seed, spare_pages=3)
        out, lse = attend(given, problem.causal)
        verdict = judge((out, lse), given, FLASH_MLA_SCALE, problem.causal, FLASHMLA)
        assert verdict.ok, f"{problem.label} {problem.seq_lens}: {verdict.reason}"
        empty = torch.tensor([length == 0 for length in problem.seq_lens], device="cuda")
        assert not out[empty].any() and torch.isposinf(lse[empty]).all()


@pytest.mark.parametrize("problem", CAPTURED, ids=lambda p: p.label)
def test_a_captured_call_follows_lengths_pages_and_queries(problem: MlaProblem) -> None:
    """One graph, replayed on what was written into its tensors since: the same bits as a call, under one metadata."""
    causal = problem.causal
    given = make_inputs(problem, "cuda", seed=1)
    meta, _ = flash_mla.get_mla_metadata()
    graph, made = captured(lambda: attend(given, causal, meta))
    for seed in (2, 3):
        lengths = problem.seq_lens[seed:] + problem.seq_lens[:seed]
        changed = problem.replace(lengths=lengths)
        for old, new in zip(given, make_inputs(changed, "cuda", seed=seed), strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        verdict = judge(made, given, FLASH_MLA_SCALE, causal, FLASHMLA)
        assert verdict.ok, verdict.reason
        assert all(same_bits(a, b) for a, b in zip(made, attend(given, causal, meta), strict=True))


def test_a_scale_of_the_callers() -> None:
    given = make_inputs(SCALED, "cuda")
    q, cache, table, lens = given
    both = flash_mla.flash_mla_with_kvcache(
        q, cache, table, lens, 512, flash_mla.get_mla_metadata()[0], softmax_scale=0.3
    )
    assert judge(both, given, 0.3, False, FLASHMLA).ok
