"""Decoding over a mixed cache: inputs, reference, plan and check of design `mla_var6_plus`.

A request of L tokens keeps its o = L - n oldest as latents, in pages, and its n newest decompressed, as keys and values
of every head. Both forms hold the same attention, so a softmax over all L logits is well defined:

    q_latent[j] = [q_nope[j] · W_UK[j] | q_rope[j]]               k_new[t, j] = [W_UK[j] · latent_t | rope_t]
    logits   old token t, head j:  scale · q_latent[j] · [latent_t | rope_t]     new:  scale · q_heads[j] · k_new[t, j]
    values   old token t, head j:  W_UV[j] · latent_t                            new:  v_new[t, j] = W_UV[j] · latent_t
    out[j] = sum over all tokens of softmax(logits)[t] · value[t, j]             lse = log-sum-exp of all logits

What an absorbed kernel leaves for the old tokens is their softmax-weighted latent, 512 columns. The projection W_UV
brings it to the value's d columns; it is linear, so it may come after the sum. Only then can the two be joined, by
their log-sum-exps. The output has d columns whatever n is: with n = 0 it is flash_mla followed by the projection, with
o = 0 it is flash_attention.

inputs = (q_latent, q_heads, kv_cache, page_table, old_lens, k_new, v_new, w_uv)
    q_latent (b, s, h, k + p)   q_heads (b, s, h, d + p)   k_new (b, n, h, d + p)   v_new (b, n, h, d)   w_uv (h, d, k)
    kv_cache, page_table as in decoding; old_lens (b,) int32: o of each request, 0 allowed
outputs = (out (b, s, h, d) in the inputs' dtype, lse (b, h, s) float32)

`problem.seq_lens` are the L; every request has at least n tokens. causal: query i of s sees keys 0 .. L - s + i; so
with 0 < n < s the mask would reach into the old tokens, which is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from mla_var3.errors import UserError
from mla_var3.runtime.correctness.checking import ROUNDED_ONCE_MORE
from mla_var3.runtime.correctness.planned import PlannedPlan
from mla_var3.runtime.types import Verdict

if TYPE_CHECKING:
    from mla_var3.problem import MlaProblem


def takes_mixed(problem: MlaProblem) -> Verdict:
    """Whether a problem can keep its n newest tokens decompressed."""
    if problem.h_kv != 1:
        return Verdict.no(f"decompressed heads have one latent cache; the problem has h_kv = {problem.h_kv}.")
    if min(problem.seq_lens) < problem.n:
        return Verdict.no(f"n = {problem.n} tokens are decompressed, and a request has only {min(problem.seq_lens)}.")
    if problem.causal and 0 < problem.n < problem.s:
        return Verdict.no(
            f"causal with n = {problem.n} < s = {problem.s}: the mask would reach into the latent tokens; use n = 0 or "
            "n >= s."
        )
    return Verdict.yes()


def old_problem(problem: MlaProblem) -> MlaProblem:
    """The absorbed problem of the old tokens. With new tokens behind them every query sees all of them."""
    lens = tuple(x - problem.n for x in problem.seq_lens)
    lengths: Any = "uniform" if len(set(lens)) == 1 else lens
    return problem.replace(n=0, t=max(lens), lengths=lengths, causal=problem.causal and problem.n == 0)


def make_mixed_inputs(
    problem: MlaProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal"
) -> tuple[Any, ...]:
    """Random inputs of a mixed problem whose two forms agree: keys and values of new tokens are those of their latents.

    dist: normal, or flashmla (tokens and queries N(0, 1) / 10, clamped). Weights have variance 1 / fan-in.
    """
    import torch

    from mla_var3.runtime.correctness.inputs import make_inputs

    takes_mixed(problem).require(UserError)
    pd, old = problem, old_problem(problem)
    plain = "normal" if dist == "normal" else "flashmla"
    _, kv_cache, page_table, old_lens = make_inputs(old, device, seed=seed, dist=plain)
    generator = torch.Generator(device=device)
    generator.manual_seed(seed + 7919)

    def draw(*shape: int, factor: float = 1.0) -> Any:
        x = torch.randn(shape, dtype=torch.float32, device=device, generator=generator)
        return (x if plain == "normal" else x.div_(10).clamp_(-1.0, 1.0)).mul_(factor).to(pd.torch_dtype)

    def weight(fan_in: int) -> Any:
        x = torch.randn((pd.h, pd.d, pd.k), dtype=torch.float32, device=device, generator=generator)
        return x.mul_(fan_in**-0.5).to(pd.torch_dtype)

    w_uk, w_uv = weight(pd.k), weight(pd.k)
    q_heads = draw(pd.b, pd.s, pd.h, pd.d + pd.p)
    q_nope, q_rope = q_heads[..., : pd.d], q_heads[..., pd.d :]
    latent, rope = draw(pd.b, pd.n, pd.k), draw(pd.b, pd.n, 1, pd.p).expand(-1, -1, pd.h, -1)

    def project(x: Any, w: Any, how: str) -> Any:
        return torch.einsum(how, x.float(), w.float()).to(pd.torch_dtype)

    q_latent = torch.cat([project(q_nope, w_uk, "bshd,hdk->bshk"), q_rope], dim=-1).contiguous()
    k_new = torch.cat([project(latent, w_uk, "bnk,hdk->bnhd"), rope], dim=-1).contiguous()
    v_new = project(latent, w_uv, "bnk,hdk->bnhd").contiguous()
    return q_latent, q_heads, kv_cache, page_table, old_lens, k_new, v_new, w_uv


def mixed_reference(
    q_latent: Any,
    q_heads: Any,
    kv_cache: Any,
    page_table: Any,
    old_lens: Any,
    k_new: Any,
    v_new: Any,
    w_uv: Any,
    *,
    scale: float,
    causal: bool,
) -> tuple[Any, Any]:
    """The oracle in float64: one softmax over old and new logits of a head; out (b, s, h, d), lse (b, h, s)."""
    import torch

    from mla_var3.runtime.correctness.oracle import gather_tokens

    b, s, h, _ = q_heads.shape
    d, k = w_uv.shape[1:]
    n = k_new.shape[1]
    out = torch.zeros((b, s, h, d), dtype=torch.float64, device=q_heads.device)
    lse = torch.full((b, h, s), float("inf"), dtype=torch.float64, device=q_heads.device)
    for i, o in enumerate(old_lens.tolist()):
        if o + n == 0:
            continue
        tokens = gather_tokens(kv_cache, page_table[i], o)[:, 0].double()
        limit = o + n - s + torch.arange(s, device=q_heads.device)  # last key that each query sees
        hidden = torch.arange(o + n, device=q_heads.device) > limit[:, None]
        for j in range(h):
            logits = torch.cat(
                [q_latent[i, :, j].double() @ tokens.t(), q_heads[i, :, j].double() @ k_new[i, :, j].double().t()],
                dim=1,
            )
            logits *= scale
            if causal:
                logits.masked_fill_(hidden, float("-inf"))
            values = torch.cat([tokens[:, :k] @ w_uv[j].double().t(), v_new[i, :, j].double()])
            e = torch.logsumexp(logits, dim=1)
            none = e == float("-inf")
            out[i, :, j] = torch.exp(logits - e.masked_fill(none, 0.0)[:, None]) @ values
            lse[i, j] = e.masked_fill(none, float("inf"))
    return out, lse


def _cases(problem: MlaProblem, on_gpu: bool, quick: bool) -> list[tuple[str, MlaProblem, str]]:
    """(name, problem, distribution): the problem cut to what the oracle does in seconds, then its borders."""
    b, h = (min(problem.b, 4), min(problem.h, 16)) if on_gpu else (min(problem.b, 2), min(problem.h, 2))
    cut = 1000 if on_gpu else 150
    t, s = min(problem.t, cut), min(problem.s, 64 if on_gpu else 4)
    n = min(problem.n, t)
    if problem.causal and 0 < n < s:
        n = s
    own = problem.replace(b=b, s=s, h=h, t=t, n=n, lengths="uniform")
    cases = [("own", own, "flashmla"), ("normal", own, "normal")]
    if not quick:
        few = max(s, 65)
        lengths = tuple([few, few + 1, few + 63, few + 64, few + 65][: max(b, 2)])
        cases += [
            ("ragged", own.replace(b=len(lengths), t=max(lengths), n=few, lengths=lengths), "normal"),
            ("all latent", own.replace(n=0), "flashmla"),
            ("all decompressed", own.replace(n=t), "flashmla"),
        ]
    return cases


class MixedPlan(PlannedPlan):
    """Base of the plans of design `mla_var6_plus`; the module's docstring has inputs and outputs."""

    formulation = "mixed"
    make_inputs = staticmethod(make_mixed_inputs)
    takes = staticmethod(takes_mixed)
    cases = staticmethod(_cases)
    cos_slack = ROUNDED_ONCE_MORE  # the latent output, before it meets W_UV

    def reference_fn(self, *inputs: Any) -> tuple[Any, ...]:
        return mixed_reference(*inputs, scale=self.problem.scale, causal=self.problem.causal)

    def rebind(self, *inputs: Any) -> Self:
        """The plan for other tensors of the same problem class; b and the pages of a request may differ."""
        q_latent, q_heads, kv_cache, page_table, old_lens, k_new, v_new, w_uv = inputs
        pd, b = self.problem, q_heads.shape[0]
        for name, x, want in (
            ("q_latent", q_latent, (b, pd.s, pd.h, pd.k + pd.p)),
            ("q_heads", q_heads, (b, pd.s, pd.h, pd.d + pd.p)),
            ("k_new", k_new, (b, pd.n, pd.h, pd.d + pd.p)),
            ("v_new", v_new, (b, pd.n, pd.h, pd.d)),
            ("w_uv", w_uv, (pd.h, pd.d, pd.k)),
            ("kv_cache", kv_cache, (kv_cache.shape[0], pd.page_size, 1, pd.k + pd.p)),
            ("page_table", page_table, (b, page_table.shape[1])),
            ("old_lens", old_lens, (b,)),
        ):
            if tuple(x.shape) != want:
                raise UserError(f"cannot bind: {name} is {tuple(x.shape)}, and this kernel was planned for {want}.")
        t = page_table.shape[1] * pd.page_size + pd.n
        return self._derive(pd.replace(b=b, t=t, lengths="uniform"), self.tiling)
