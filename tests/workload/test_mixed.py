"""The mixed cache: its reference against the other oracles."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.workload.decode import mla_decode_reference  # noqa: E402
from mla_var3.workload.mixed import MixedProblem, make_inputs, mixed_reference  # noqa: E402
from mla_var3.workload.prefill import prefill_reference  # noqa: E402

SMALL = MixedProblem(b=2, s=3, t=90, h=2, n=20, causal=True)


def reference(problem: MixedProblem, inputs: tuple) -> tuple:
    return mixed_reference(*inputs, scale=problem.scale, causal=problem.causal)


# ---------------------------------------------------------------- what is computed
@pytest.mark.parametrize("causal", [False, True])
def test_without_new_tokens_it_is_the_absorbed_form_projected(causal: bool) -> None:
    problem = SMALL.replace(n=0, causal=causal, lengths=(90, 1))
    inputs = make_inputs(problem, seed=1)
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
    inputs = make_inputs(problem, seed=2)
    _, q, *_, k, v, _ = inputs
    of_q, of_k = (torch.arange(len(x) + 1, dtype=torch.int32) * x.shape[1] for x in (q, k))
    packed = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = prefill_reference(*packed, of_q, of_k, scale=problem.scale, causal=causal)
    want = out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    for x, y in zip(reference(problem, inputs), want, strict=True):
        torch.testing.assert_close(x, y.double(), rtol=1e-6, atol=1e-6)


def test_it_does_not_matter_which_form_a_token_is_in() -> None:
    """The same 30 tokens, 30 latent, or 20 latent and 10 decompressed, give the same up to the rounding of bf16."""
    whole = MixedProblem(b=1, s=2, t=30, h=2, n=10)
    _, q_heads, *_, w_uv = make_inputs(whole, seed=3)
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
        with pytest.raises(UserError, match=words):
            SMALL.replace(**options)
    assert SMALL.replace(n=0).old().causal
    assert SMALL.old().seq_lens == (70, 70) and not SMALL.old().causal
