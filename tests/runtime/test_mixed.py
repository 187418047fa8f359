"""The mixed cache: its reference against the other oracles, and the cost model that chooses n."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from mla_var3.device import Device  # noqa: E402
from mla_var3.errors import UserError  # noqa: E402
from mla_var3.problem import MlaProblem  # noqa: E402
from mla_var3.runtime.correctness.mixed import make_mixed_inputs, mixed_reference, old_problem, takes_mixed  # noqa: E402
from mla_var3.runtime.correctness.oracle import mla_decode_reference  # noqa: E402
from mla_var3.runtime.correctness.prefill import prefill_reference  # noqa: E402
from mla_var3.runtime.mixed_cost import Rates, best_n, predict  # noqa: E402

H200 = Device.get("h200")
SMALL = MlaProblem(b=2, s=3, t=90, h=2, n=20, causal=True)


def reference(problem: MlaProblem, inputs: tuple) -> tuple:
    return mixed_reference(*inputs, scale=problem.scale, causal=problem.causal)


# ---------------------------------------------------------------- what is computed
@pytest.mark.parametrize("causal", [False, True])
def test_without_new_tokens_it_is_the_absorbed_form_projected(causal: bool) -> None:
    problem = SMALL.replace(n=0, causal=causal, lengths=(90, 1))
    inputs = make_mixed_inputs(problem, seed=1)
    q_latent, _, kv_cache, page_table, old_lens, *_, w_uv = inputs
    latent, lse = mla_decode_reference(
        q_latent, kv_cache, page_table, old_lens, k=problem.k, scale=problem.scale, causal=causal
    )
    out, own = reference(problem, inputs)
    torch.testing.assert_close(
        out, torch.einsum("bshk,hdk->bshd", latent.double(), w_uv.double()), rtol=1e-6, atol=1e-9
    )
    torch.testing.assert_close(own, lse.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_without_old_tokens_it_is_attention_over_heads(causal: bool) -> None:
    problem = SMALL.replace(n=90, causal=causal)
    inputs = make_mixed_inputs(problem, seed=2)
    _, q, *_, k, v, _ = inputs
    want = prefill_reference(q, k, v, scale=problem.scale, causal=causal)
    for x, y in zip(reference(problem, inputs), want, strict=True):
        torch.testing.assert_close(x, y.double(), rtol=1e-6, atol=1e-6)


def test_it_does_not_matter_which_form_a_token_is_in() -> None:
    """The same 30 tokens, 30 latent, or 20 latent and 10 decompressed, give the same up to the rounding of bf16."""
    whole = MlaProblem(b=1, s=2, t=30, h=2, n=10)
    _, q_heads, *_, w_uv = make_mixed_inputs(whole, seed=3)
    g = torch.Generator().manual_seed(4)
    w_uk = torch.randn(w_uv.shape, generator=g, dtype=torch.float64) / 22.6
    latents = torch.randn((30, 512), generator=g, dtype=torch.float64)
    rope = torch.randn((30, 64), generator=g, dtype=torch.float64)
    q_heads = q_heads.double()
    q_latent = torch.cat([torch.einsum("bshd,hdk->bshk", q_heads[..., :128], w_uk), q_heads[..., 128:]], -1)
    cache = torch.zeros((1, 64, 1, 576), dtype=torch.float64)
    cache[0, :30, 0] = torch.cat([latents, rope], 1)
    table, w = torch.zeros((1, 1), dtype=torch.int32), w_uv.double()
    keys = torch.cat([torch.einsum("nk,hdk->nhd", latents, w_uk), rope[:, None].expand(-1, 2, -1)], -1)[None]
    values = torch.einsum("nk,hdk->nhd", latents, w)[None]
    results = [
        mixed_reference(
            q_latent, q_heads, cache, table, torch.tensor([30 - n]), keys[:, 30 - n :], values[:, 30 - n :], w,
            scale=whole.scale, causal=False,
        )
        for n in (0, 10, 30)
    ]  # fmt: skip
    for out, lse in results[1:]:
        torch.testing.assert_close(out, results[0][0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(lse, results[0][1], rtol=1e-9, atol=1e-9)


def test_what_it_refuses_says_why() -> None:
    for options, words in (
        ({"h": 4, "h_kv": 2}, "h_kv = 2"),
        ({"lengths": (90, 10)}, "a request has only 10"),
        ({"n": 2}, "the mask would reach into the latent tokens"),
    ):
        verdict = takes_mixed(SMALL.replace(**options))
        assert not verdict and words in verdict.reason
    assert takes_mixed(SMALL.replace(n=0)) and takes_mixed(SMALL)
    assert old_problem(SMALL).seq_lens == (70, 70) and not old_problem(SMALL).causal


# ---------------------------------------------------------------- the model
def test_one_query_token_keeps_everything_latent() -> None:
    for b, t in ((1, 65536), (32, 4096), (128, 4096)):
        assert best_n(MlaProblem(b=b, t=t), H200).n == 0


#: Measured on an H200, burst, microseconds: b16 h128 t4096, s -> {n: time} (devlog of cutile-dsl/mla_var6_plus).
MEASURED = {
    1: {0: 63, 1024: 358, 2048: 642, 3072: 925, 4096: 1181},
    4: {0: 162, 1024: 429, 2048: 686, 3072: 942, 4096: 1184},
    16: {0: 627, 1024: 787, 2048: 935, 3072: 1090, 4096: 1195},
    64: {0: 2443, 1024: 2170, 2048: 1916, 3072: 1662, 4096: 1217},
}


@pytest.mark.parametrize("s", MEASURED)
def test_it_says_what_was_measured(s: int) -> None:
    problem = MlaProblem(b=16, s=s, t=4096)
    for n, time_us in MEASURED[s].items():
        assert predict(problem, H200, n).time_us == pytest.approx(time_us, rel=0.22 if (s, n) == (1, 0) else 0.1)
    assert best_n(problem, H200, candidates=MEASURED[s]).n == min(MEASURED[s], key=lambda n: MEASURED[s][n])


def test_paths_one_after_the_other_leave_the_ends() -> None:
    for s in (1, 2, 4, 8, 16, 24, 32, 48, 64):
        assert best_n(MlaProblem(b=16, s=s, t=4096), H200).n in (0, 4096)


SHARED = Rates(overlap=1.0)


def test_shared_paths_decompress_until_reading_is_as_long_as_arithmetic() -> None:
    problem = MlaProblem(b=16, s=64, t=4096)
    best = best_n(problem, H200, SHARED)
    assert 1024 < best.n < 4096 and best.compute_us == pytest.approx(best.memory_us, rel=0.15)
    ends = (predict(problem, H200, 0, SHARED), predict(problem, H200, 4096, SHARED))
    assert ends[0].bound == "compute" and ends[1].bound == "memory"
    assert best.time_us < 0.9 * min(end.time_us for end in ends)


@pytest.mark.parametrize("rates", [Rates(), SHARED], ids=["apart", "shared"])
def test_the_best_n_grows_with_query_tokens(rates: Rates) -> None:
    chosen = [best_n(MlaProblem(b=16, s=s, t=4096), H200, rates).n for s in (1, 4, 16, 32, 64)]
    assert chosen == sorted(chosen) and chosen[0] == 0 and chosen[-1] > 1024


def test_the_best_n_grows_with_bandwidth() -> None:
    problem = MlaProblem(b=16, s=64, t=4096)
    wide = replace(H200, hbm_gbps=2 * H200.hbm_gbps)
    assert best_n(problem, wide, SHARED).n > best_n(problem, H200, SHARED).n
    assert best_n(problem, H200, replace(SHARED, latent=0.9)).n < best_n(problem, H200, SHARED).n


def test_candidates_and_mistakes() -> None:
    problem = MlaProblem(b=16, s=64, t=4096)
    assert best_n(problem, H200, candidates=(0, 4096)).n == 4096
    assert best_n(problem.replace(causal=True), H200, candidates=(0, 32)).n == 0  # n = 32 < s is not possible
    with pytest.raises(UserError, match=r"outside 0\.\.4096"):
        predict(problem, H200, 5000)
    with pytest.raises(UserError, match=r"overlap = 2.* is outside"):
        predict(problem, H200, 0, Rates(overlap=2.0))
    with pytest.raises(UserError, match="none of the candidates"):
        best_n(problem.replace(causal=True), H200, candidates=(32,))
