"""The oracle agrees with a loop over tokens, and with the decompressed form; inputs are what they say."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.workload import decode as oracle  # noqa: E402
from mla_var3.workload.decode import (  # noqa: E402
    DISTRIBUTIONS,
    DOMINANT,
    GARBAGE_PAGE,
    MlaProblem,
    make_inputs,
    same_class,
)

WIDTHS = [(512, 64), (512, 0), (256, 64), (256, 32)]
SMALL = MlaProblem(s=3, h=4, h_kv=2, k=32, p=16, d=8, page=8, causal=True, t=[0, 1, 2, 7, 8, 9, 21])


def run(problem, inputs, **options):
    options = {"k": problem.k, "scale": problem.scale, "causal": problem.causal, **options}
    return oracle.mla_decode_reference(*inputs, **options)


def by_hand(problem, inputs):
    """One query row and one key at a time, in Python floats."""
    q, cache, table, lens = inputs
    group = problem.h // problem.h_kv
    out = torch.zeros(problem.b, problem.s, problem.h, problem.k, dtype=torch.float64)
    lse = torch.full((problem.b, problem.h, problem.s), math.inf, dtype=torch.float64)
    for i, length in enumerate(lens.tolist()):
        for token in range(problem.s):
            for head in range(problem.h):
                seen = length - problem.s + token + 1 if problem.causal else length
                if seen <= 0:
                    continue
                keys = [
                    cache[table[i, t // problem.page_size], t % problem.page_size, head // group] for t in range(seen)
                ]
                logits = [
                    problem.scale * math.fsum((q[i, token, head].double() * key.double()).tolist()) for key in keys
                ]
                e = max(logits) + math.log(math.fsum(math.exp(x - max(logits)) for x in logits))
                lse[i, head, token] = e
                for x, key in zip(logits, keys, strict=True):
                    out[i, token, head] += math.exp(x - e) * key[: problem.k].double()
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dist", DISTRIBUTIONS)
def test_the_oracle_is_a_loop_over_tokens(dist, causal):
    problem = SMALL.replace(causal=causal)
    inputs = make_inputs(problem, seed=1, dist=dist)
    for mine, expected in zip(run(problem, inputs), by_hand(problem, inputs), strict=True):
        assert mine.dtype == torch.float64
        # Of a logit of 2^26 float64 has no digits behind 1e-8.
        tolerance = 1e-7 if dist == "extremes" else 1e-12
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_a_score_that_is_nan_stays_visible_in_both_outputs():
    problem = SMALL.replace(t=[9, 9, 9, 9], lengths=[9, 9, 9, 9])
    q, cache, table, lens = make_inputs(problem, seed=1, dist="nan")
    out, lse = run(problem, (q, cache, table, lens))
    rows = torch.isnan(lse).sum((1, 2)).tolist()
    assert rows == [1, 2 * problem.s, 0, 1]  # one head of one query token; the two heads of one cache; none; one head
    assert torch.equal(torch.isnan(out).any(-1), torch.isnan(lse).transpose(1, 2))
    assert torch.equal(torch.isnan(out).all(-1), torch.isnan(lse).transpose(1, 2))


@pytest.mark.parametrize("scale", [0.0, -0.1])
def test_a_scale_of_zero_and_below_is_a_factor_as_any_other(scale):
    problem = SMALL.replace(softmax_scale=scale)
    inputs = make_inputs(problem, seed=2, dist="normal")
    for mine, expected in zip(run(problem, inputs), by_hand(problem, inputs), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
    if not scale:
        _, lse = run(problem, inputs)
        torch.testing.assert_close(lse[-1, 0], torch.tensor([19.0, 20.0, 21.0], dtype=torch.float64).log())


def test_rows_without_keys_are_zero_and_plus_infinity():
    out, lse = run(SMALL, make_inputs(SMALL))
    assert torch.equal(out[0], torch.zeros_like(out[0])) and bool((lse[0] == math.inf).all())
    assert torch.equal(out[1, :2], torch.zeros_like(out[1, :2]))  # length 1, s = 3: only the last token sees the key
    assert bool((lse[1, :, :2] == math.inf).all()) and bool(torch.isfinite(lse[1, :, 2]).all())
    assert bool(torch.isfinite(out).all())


def test_float32_agrees_and_is_chosen_for_large_problems(monkeypatch):
    inputs = make_inputs(SMALL, seed=2, dist="normal")
    exact = run(SMALL, inputs)
    monkeypatch.setitem(oracle.FLOAT64_FLOPS, "cpu", 0)
    monkeypatch.setattr(oracle, "BLOCK_ELEMENTS", 32)  # rows in many blocks
    for mine, expected in zip(run(SMALL, inputs), exact, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), expected, rtol=1e-5, atol=1e-6)
    for mine, expected in zip(run(SMALL, inputs, compute_dtype=torch.float64), exact, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_a_page_outside_the_cache_is_refused():
    q, cache, table, lens = make_inputs(SMALL)
    lens = lens.clone()
    lens[1] = 17  # its second page is garbage
    with pytest.raises(UserError, match="page"):
        run(SMALL, (q, cache, table, lens))
    lens[1] = 1000
    with pytest.raises(UserError, match="page table"):
        run(SMALL, (q, cache, table, lens))


def decompressed_reference(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same attention from decompressed heads: keys [latent · w_uk[j]ᵀ | rope], values latent · w_uv[j]ᵀ of head j.

    q_nope (b, s, h, d), q_rope (b, s, h, p), w_uk and w_uv (h, d, k); the cache has one latent (h_kv = 1).
    Returns out (b, s, h, d) and lse (b, h, s) in float64. It equals the absorbed form with q = `absorb_query(...)` and
    the output brought back by w_uv. For small sizes: it holds every head's keys of one request.
    """
    b, s, h, d = q_nope.shape
    latent_width = w_uk.shape[2]
    out = torch.zeros((b, s, h, d), dtype=torch.float64, device=q_nope.device)
    lse = torch.full((b, h, s), float("inf"), dtype=torch.float64, device=q_nope.device)
    for i, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        tokens = oracle.gather_tokens(kv_cache, page_table[i], length)[:, 0].double()
        latent, rope = tokens[:, :latent_width], tokens[:, latent_width:]
        for j in range(h):
            keys = torch.cat([latent @ w_uk[j].double().t(), rope], dim=1)
            values = latent @ w_uv[j].double().t()
            rows = torch.cat([q_nope[i, :, j], q_rope[i, :, j]], dim=1).double()
            out[i, :, j], lse[i, j] = oracle.attend(rows, keys, values, 1, s, scale, causal)
    return out, lse


def absorb_query(q_nope: torch.Tensor, q_rope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """q in latent space, (b, s, h, k + p), from q_nope (b, s, h, d), q_rope (b, s, h, p) and w_uk (h, d, k)."""
    return torch.cat([torch.einsum("bshd,hdk->bshk", q_nope.to(w_uk.dtype), w_uk), q_rope.to(w_uk.dtype)], dim=-1)


@pytest.mark.parametrize("causal", [False, True])
def test_absorbed_equals_decompressed(causal):
    problem = MlaProblem(s=2, h=3, k=32, p=8, d=16, page=4, causal=causal, t=[5, 11, 1, 0])
    _, cache, table, lens = make_inputs(problem, seed=3, dist="normal")
    gen = torch.Generator().manual_seed(4)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=gen)

    q_nope, q_rope = draw(problem.b, 2, 3, 16), draw(problem.b, 2, 3, 8)
    w_uk, w_uv = draw(3, 16, 32) / 6, draw(3, 16, 32) / 6
    options = {"scale": problem.scale, "causal": causal}
    q = absorb_query(q_nope, q_rope, w_uk)
    latent, lse = oracle.mla_decode_reference(q, cache, table, lens, k=32, **options)
    out = torch.einsum("bshk,hdk->bshd", latent, w_uv)
    expected = decompressed_reference(q_nope, q_rope, cache, table, lens, w_uk, w_uv, **options)
    torch.testing.assert_close(out, expected[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, expected[1], rtol=1e-10, atol=1e-10)


# ---------------------------------------------------------------- inputs
def test_inputs_have_the_stated_shapes_and_values():
    problem = MlaProblem(s=2, h=16, t=[300, 0, 64, 65], dtype="fp16")
    q, cache, table, lens = make_inputs(problem, seed=5)
    assert q.shape == (4, 2, 16, 576) and cache.shape == (problem.num_pages, 64, 1, 576)
    assert problem.num_pages == 5 + 0 + 1 + 2 + 8 // 8 + 1 and table.shape == (4, 5)
    assert q.dtype == cache.dtype == torch.float16 and table.dtype == lens.dtype == torch.int32
    assert lens.tolist() == [300, 0, 64, 65] and q.is_contiguous() and cache.is_contiguous()
    assert float(q.abs().max()) <= 1 and abs(float(q.float().std()) - 0.1) < 0.002
    normal = make_inputs(problem, seed=5, dist="normal")[0]
    assert abs(float(normal.float().std()) - 1) < 0.02


def test_poison_covers_exactly_what_is_not_a_token():
    problem = MlaProblem(h=2, t=[300, 0, 64, 65, 1])
    _, cache, table, lens = make_inputs(problem, seed=5, spare_pages=3)
    used = torch.zeros(cache.shape[:2], dtype=torch.bool)
    ids = []
    for i, length in enumerate(lens.tolist()):
        count = -(-length // 64)
        assert bool((table[i, count:] == GARBAGE_PAGE).all())
        ids += table[i, :count].tolist()
        for t in range(length):
            used[table[i, t // 64], t % 64] = True
    assert len(set(ids)) == len(ids) and ids != sorted(ids)
    assert torch.equal(torch.isnan(cache).all(-1).all(-1), ~used)
    assert torch.equal(torch.isnan(cache).any(-1).any(-1), ~used)
    _, cache, table, _ = make_inputs(problem, seed=5, poison=False)
    assert bool(torch.isfinite(cache).all()) and int(table.max()) < len(cache)


def test_a_contiguous_cache_has_its_pages_in_order():
    problem = MlaProblem(h=2, page=None, t=[100, 30])
    _, cache, table, _ = make_inputs(problem)
    assert cache.shape[1] == 64 and table.tolist() == [[0, 1], [2, GARBAGE_PAGE]]


@pytest.mark.parametrize("dist", oracle.DISTRIBUTIONS)
def test_pages_apart_hold_what_contiguous_ones_do(dist):
    problem = MlaProblem(h=4, h_kv=2, s=2, causal=True, t=[100, 0, 64], page=16)
    plain, apart = (make_inputs(p, dist=dist) for p in (problem, problem.replace(strided_pages=True)))
    assert apart[1].stride() == (2 * plain[1].stride(0), *plain[1].stride()[1:])
    for a, b in zip(plain, apart, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    assert bool(torch.isnan(apart[1].as_strided(plain[1].shape, apart[1].stride(), plain[1][0].numel())).all())
    for a, b in zip(run(problem, plain), run(problem, apart), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def test_a_kernel_for_pages_apart_may_be_bound_to_any_and_another_only_to_contiguous_ones():
    problem = MlaProblem(h=4, t=[100, 64], page=16)
    strided = problem.replace(strided_pages=True)
    plain, apart = make_inputs(problem), make_inputs(strided)
    assert oracle.rebound(strided, *apart) == oracle.as_bound(strided) == oracle.rebound(strided, *plain)
    assert oracle.rebound(problem, *plain) == oracle.as_bound(problem)
    with pytest.raises(UserError, match="kv_cache is not contiguous, and this kernel was planned for one that is"):
        oracle.rebound(problem, *apart)
    strided = problem.replace(strided=True)
    q, cache, table, lens = make_inputs(strided)
    assert oracle.rebound(strided, q, cache, table, lens) == oracle.as_bound(strided) == oracle.rebound(strided, *plain)
    for name, given in (("q", (q, *plain[1:])), ("page_table", (*plain[:2], table, lens))):
        with pytest.raises(UserError, match=f"{name} is not contiguous, and this kernel was planned"):
            oracle.rebound(problem, *given)


def test_seeds_repeat_and_differ():
    problem = MlaProblem(h=2, t=[100, 30])
    first, again, other = (make_inputs(problem, seed=seed) for seed in (8, 8, 7))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize(("k", "p"), WIDTHS)
@pytest.mark.parametrize("dist", ["first", "last", "page_boundary"])
def test_dominant_tokens_take_almost_all(dist, k, p):
    problem = MlaProblem(h=4, k=k, p=p, t=[1000, 65, 64, 3, 1])
    q, cache, table, lens = make_inputs(problem, dist=dist)
    edge = {1000: (447, 448), 65: (63, 64), 64: (63,), 3: (2,), 1: (0,)}
    out, _ = run(problem, (q, cache, table, lens))
    for i, length in enumerate(lens.tolist()):
        chosen = {"first": (0,), "last": (length - 1,), "page_boundary": edge[length]}[dist]
        tokens = oracle.gather_tokens(cache, table[i], length)[:, 0]
        expected = tokens[list(chosen), :k].double().mean(0)
        assert float((out[i, 0] - expected).norm(dim=-1).max() / expected.norm()) < 0.12


@pytest.mark.parametrize(("k", "p"), WIDTHS)
def test_just_masked_tokens_would_dominate(k, p):
    problem = MlaProblem(h=4, s=3, k=k, p=p, causal=True, t=[1000, 65, 130, 3, 2])
    q, cache, table, lens = make_inputs(problem, dist="just_masked")
    honest = run(problem, (q, cache, table, lens))[0]
    for changed in (
        run(problem, (q, cache, table, lens + 1))[0],
        run(problem, (q, cache, table, lens), causal=False)[0],
    ):
        change = (changed - honest).norm(dim=-1) / changed.norm(dim=-1)
        assert float(change.min(dim=2).values.max(dim=1).values.min()) > 0.5  # in some token of every request


@pytest.mark.parametrize(("k", "p"), WIDTHS)
def test_below_zero_logits_lose_against_a_zero(k, p):
    problem = MlaProblem(h=4, k=k, p=p, t=[1000, 1])
    _, lse = run(problem, make_inputs(problem, dist="below_zero"))
    assert float(lse.max()) < -6


@pytest.mark.parametrize(("k", "p"), WIDTHS)
@pytest.mark.parametrize("dist", DISTRIBUTIONS)
def test_the_bounds_hold_for_roundings_of_p_and_out(dist, k, p):
    """Also where the keys that a pattern makes dominant are values."""
    from mla_var3.check.judge import compare

    problem = MlaProblem(h=8, k=k, p=p, t=[1000, 65, 64, 3, 1])
    q, cache, table, lens = make_inputs(problem, seed=6, dist=dist)
    expected = run(problem, (q, cache, table, lens))
    out = torch.zeros(problem.b, 1, problem.h, k, dtype=torch.bfloat16)
    for i, length in enumerate(lens.tolist()):
        keys = oracle.gather_tokens(cache, table[i], length)[:, 0].double()
        logits = q[i, 0].double() @ keys.t() * problem.scale
        weights = (logits - logits.max(dim=1, keepdim=True).values).exp()
        rounded = weights.to(torch.bfloat16).double() @ keys[:, :k]
        out[i, 0] = (rounded / weights.sum(dim=1, keepdim=True)).to(torch.bfloat16)
    verdict = compare(oracle.WORKLOAD, (out, expected[1].float()), expected, oracle.bounds_for(dist))
    assert verdict.ok, verdict.reason


def test_dominant_inputs_work_without_rope_columns():
    problem = MlaProblem(h=2, k=32, p=0, d=16, t=[40], page=8)
    for dist in DOMINANT:
        assert bool(torch.isfinite(run(problem, make_inputs(problem, dist=dist))[0]).all())


def test_mistakes_are_named():
    with pytest.raises(UserError, match="flashmla"):
        make_inputs(SMALL, dist="flashmIa")


def test_other_lengths_are_of_the_same_class():
    large = MlaProblem(b=128, t=4096)
    assert same_class(large, [3, 4]).problem_class() == large.problem_class()


def test_a_cells_name_says_what_is_not_the_default():
    assert MlaProblem().label == "b1_s1_h128_t4096"
    assert MlaProblem(k=256, p=64, page=16).label == "b1_s1_h128_t4096_k256_p64_page16"
    assert MlaProblem(page=None, p=0).label == "b1_s1_h128_t4096_k512_p0_contiguous"
