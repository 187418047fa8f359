"""Decoding over a mixed cache: the newest tokens of each request are decompressed, the others are latents.

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

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mla_var3.errors import UserError
from mla_var3.workload import Case, Cost, Workload, check_integer, decode
from mla_var3.workload.decode import MlaProblem


@dataclass(frozen=True)
class MixedClass(decode.DecodeClass):
    """What a compiled kernel is specialised on: everything of a problem but b, t and the lengths."""

    n: int = 0

    def key(self) -> str:
        return f"mixed_n{self.n}_{super().key()}"


@dataclass(frozen=True)
class MixedProblem(MlaProblem):
    """A decode problem whose newest n tokens of each request are cached decompressed.

    Raises `UserError`, naming the field, when it makes no sense: every request has at least n tokens.
    """

    workload: ClassVar[str] = "mixed"

    n: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("n", self.n, 0)
        if self.n > self.t:
            raise UserError(f"problem.n = {self.n} decompressed tokens do not fit in t = {self.t}: use n <= t.")
        if self.h_kv != 1:
            raise UserError(f"decompressed heads have one latent cache; the problem has h_kv = {self.h_kv}.")
        if min(self.seq_lens) < self.n:
            raise UserError(f"n = {self.n} tokens are decompressed, and a request has only {min(self.seq_lens)}.")
        if self.causal and 0 < self.n < self.s:
            raise UserError(
                f"causal with n = {self.n} < s = {self.s}: the mask would reach into the latent tokens; use n = 0 or "
                "n >= s."
            )

    @property
    def label(self) -> str:
        front = f"b{self.b}_s{self.s}_h{self.h}_t{self.t}"
        return front + (f"_n{self.n}" if self.n else "") + super().label.removeprefix(front)

    def problem_class(self) -> MixedClass:
        return MixedClass(**vars(super().problem_class()), n=self.n)

    def old(self) -> MlaProblem:
        """The decode problem of the old tokens. With new tokens behind them every query sees all of them."""
        lens = tuple(x - self.n for x in self.seq_lens)
        fields = {name: getattr(self, name) for name in MlaProblem.fields()}
        fields |= {"t": max(lens), "lengths": "uniform" if len(set(lens)) == 1 else lens}
        return MlaProblem(**{**fields, "causal": self.causal and self.n == 0})

    def cost(self) -> Cost:
        """FLOPs and minimal bytes: the first L - n tokens of each request as in decode, the newest n as in prefill.

        A pair of an old token costs 2(2k + p) FLOPs in each head, one of a new token 2(2d + p). Bytes: k + p columns
        of an old token, h(2d + p) of a new one; q is read in both forms where there are tokens of both (their rope
        columns once), and both partial outputs are written. The projections that join the two belong to the layer's
        GEMMs. n = 0 costs what decode does.
        """
        latent_pair, head_pair = 2 * (2 * self.k + self.p) * self.h, 2 * (2 * self.d + self.p) * self.h
        flops = columns = pairs = 0
        any_old = any_new = False
        for length, attended in self.attending():
            new_tokens = min(self.n, length)
            old_tokens = length - new_tokens
            seen = [length - self.s + i + 1 if self.causal else length for i in range(self.s)]
            old = sum(min(max(x, 0), old_tokens) for x in seen)
            flops += old * latent_pair + (attended - old) * head_pair
            columns += old_tokens * (self.k + self.p) + new_tokens * self.h * (2 * self.d + self.p)
            pairs += attended
            any_old, any_new = any_old or old_tokens > 0, any_new or new_tokens > 0
        row = (2 * self.k if any_old or not any_new else 0) + (2 * self.d if any_new else 0) + self.p
        columns += self.b * self.s * self.h * row
        return Cost(flops, columns * self.element_bytes, pairs)

    def output_bytes(self) -> int:
        return self.b * self.s * self.h * (self.d * self.element_bytes + 4)

    def input_bytes(self) -> int:
        heads = self.b * self.h * (self.n * (2 * self.d + self.p) + self.s * (2 * self.d + self.p))
        return self.old().input_bytes() + (heads + self.h * self.d * self.k) * self.element_bytes


def make_inputs(
    problem: MixedProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal", **_: Any
) -> tuple[Any, ...]:
    """Random inputs of a mixed problem whose two forms agree: keys and values of new tokens are those of their latents.

    dist: normal, or flashmla (tokens and queries N(0, 1) / 10, clamped), or nan: of these, a query row of the first
    request is NaN, and of the last one the oldest latent, or the first new key where there is none. extremes: logits of
    ±`decode.EXACT`, from rope columns alone: the oldest token of each request, and all others as far below zero.
    Weights have variance 1 / fan-in.
    """
    import torch

    pd = problem
    plain = "normal" if dist == "normal" else "flashmla"
    _, kv_cache, page_table, old_lens = decode.make_inputs(pd.old(), device, seed=seed, dist=plain)
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
    if dist == "nan":
        q_latent[0, -1, 0, -1] = q_heads[0, -1, 0, -1] = math.nan
        if int(old_lens[-1]):
            kv_cache[page_table[-1, 0].long(), 0, 0, -1] = math.nan
        else:
            k_new[-1, 0, -1, -1] = math.nan
    elif dist == "extremes" and pd.p:
        _stretch(pd, q_latent, q_heads, kv_cache, page_table, old_lens, k_new)
    return q_latent, q_heads, kv_cache, page_table, old_lens, k_new, v_new, w_uv


def _stretch(pd: MixedProblem, q_latent: Any, q_heads: Any, cache: Any, table: Any, old_lens: Any, k_new: Any) -> None:
    """Makes logits as large as `extremes` says: zeros in q but for its rope columns, a multiple of whose signs keys
    have."""
    import torch

    size = decode.EXACT / (64.0 * pd.p * (pd.scale or 1.0))
    signs = torch.where(torch.arange(pd.p) % 3 == 0, -1.0, 1.0).to(q_heads)
    for q in (q_latent, q_heads):
        q[..., : -pd.p], q[..., -pd.p :] = 0.0, 64.0 * signs
    k_new[..., -pd.p :] = -size * signs
    cache[..., -pd.p :] = -size * signs
    for i, old in enumerate(old_lens.tolist()):
        if old:
            cache[table[i, 0].long(), 0, :, -pd.p :] = size * signs
        elif pd.n:
            k_new[i, 0, :, -pd.p :] = size * signs


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

    b, s, h, _ = q_heads.shape
    d, k = w_uv.shape[1:]
    n = k_new.shape[1]
    out = torch.zeros((b, s, h, d), dtype=torch.float64, device=q_heads.device)
    lse = torch.full((b, h, s), float("inf"), dtype=torch.float64, device=q_heads.device)
    for i, o in enumerate(old_lens.tolist()):
        if o + n == 0:
            continue
        tokens = decode.gather_tokens(kv_cache, page_table[i], o)[:, 0].double()
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


#: Names of the cases of the check, in order, with what each is for.
CASES = {
    "own": "the problem, cut down to what the oracle does in seconds",
    "normal": "the same with N(0, 1) values",
    "bound": "other tensors bound to the planned kernel",
    "ragged": "lengths around a multiple of a tile behind the decompressed tokens",
    "all_latent": "no decompressed token",
    "all_decompressed": "no latent",
    "nan": "a query row and an old token that are NaN, beside others that are not",
    "extremes": "logits as large as float32 scores tell keys apart, of both signs",
    "scale_zero": "a scale of 0: every key counts as much",
    "scale_negative": "a scale below 0",
}
QUICK = ("own", "normal", "bound")


def _cases(problem: MixedProblem, on_gpu: bool) -> Iterator[Case]:
    b, h = (min(problem.b, 4), min(problem.h, 16)) if on_gpu else (min(problem.b, 2), min(problem.h, 2))
    cut = 1000 if on_gpu else 150
    t, s = min(problem.t, cut), min(problem.s, 64 if on_gpu else 4)
    n = min(problem.n, t)
    if problem.causal and 0 < n < s:
        n = s
    own = problem.replace(b=b, s=s, h=h, t=t, n=n, lengths="uniform")
    yield Case("own", own, "flashmla", planned=True)
    yield Case("normal", own, "normal", planned=True)
    yield Case("bound", own, "normal")
    new = max(s, 65)
    lengths = tuple([new, new + 1, new + 63, new + 64, new + 65][: max(b, 2)])
    ragged = own.replace(b=len(lengths), t=max(lengths), n=new, lengths=lengths)
    yield Case("ragged", ragged, "normal", planned=True)
    yield Case("all_latent", own.replace(n=0), "flashmla", planned=True)
    yield Case("all_decompressed", own.replace(n=t), "flashmla", planned=True)
    for dist in ("nan", "extremes"):
        yield Case(dist, ragged, dist, planned=True)
    yield Case("scale_zero", ragged.replace(softmax_scale=0.0), "flashmla", planned=True)
    yield Case("scale_negative", ragged.replace(softmax_scale=-abs(problem.scale) or -1.0), "normal", planned=True)


def reference(problem: MixedProblem, *inputs: Any) -> tuple[Any, Any]:
    """The oracle on inputs of the problem."""
    return mixed_reference(*inputs, scale=problem.scale, causal=problem.causal)


def rebound(problem: MixedProblem, *inputs: Any) -> MixedProblem:
    """The problem of other tensors of the same class; b and the pages of a request may differ. Raises `UserError` when
    the class does."""
    q_latent, q_heads, kv_cache, page_table, old_lens, k_new, v_new, w_uv = inputs
    pd, b = problem, q_heads.shape[0]
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
    return pd.replace(b=b, t=t, lengths="uniform")


def as_bound(problem: MixedProblem) -> MixedProblem:
    """What `rebound` makes of the problem's own inputs."""
    old = problem.old()
    return problem.replace(t=old.max_pages * old.page_size + problem.n, lengths="uniform")


def small(problem: MixedProblem) -> MixedProblem:
    """Two requests of 128 tokens, up to 64 of them decompressed, in at most 16 heads: seconds on a CPU."""
    return problem.replace(
        b=2, s=min(problem.s, 4), h=min(problem.h, 16), t=128, lengths="uniform", n=min(problem.n, 64)
    )


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    fields = decode.sample(small, given)
    return {**fields, "n": min(64 if small else 1024, given.get("t", fields["t"]))}


WORKLOAD = Workload(
    name="mixed",
    problem=MixedProblem,
    outputs=decode.WORKLOAD.outputs,
    make_inputs=make_inputs,
    reference=reference,
    cases=_cases,
    case_names=CASES,
    quick=QUICK,
    bounds=decode.bounds_for,
    rebound=rebound,
    small=small,
    as_bound=as_bound,
    sample=sample,
)
