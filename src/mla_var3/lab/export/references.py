"""What a workload computes, in torch's operations alone: the references that exported definitions carry as text.

Each function stands by itself, with its own imports, because its source goes into a file that is run elsewhere
(`lab.export.flashinfer_bench`). They are written for reading and for any size, not for speed, and are checked against
the oracles of `mla_var3.workload`.
"""

from __future__ import annotations

from typing import Any


def decode(q: Any, kv_cache: Any, page_table: Any, seq_lens: Any, scale: Any, k: int, causal: bool) -> Any:
    """Attention of q (b, s, h, k + p) over the first seq_lens[i] tokens of request i, which are on the pages that
    page_table (b, width) names, of kv_cache (pages, tokens, k + p); the first k columns are the values. causal: query
    token i sees keys 0 .. length - s + i. Returns out (b, s, h, k) and the natural log-sum-exp (b, h, s); a row
    without a key has 0 and +inf."""
    import torch

    b, s, h, _ = q.shape
    page = kv_cache.shape[1]
    out = torch.zeros((b, s, h, k), dtype=q.dtype, device=q.device)
    lse = torch.full((b, h, s), float("inf"), dtype=torch.float32, device=q.device)
    for i in range(b):
        length = int(seq_lens[i])
        if length == 0:
            continue
        pages = page_table[i, : (length + page - 1) // page].long()
        keys = kv_cache[pages].flatten(0, 1)[:length].float()
        logits = torch.einsum("shc,tc->hst", q[i].float(), keys) * scale
        if causal:
            last = length - s + torch.arange(s, device=q.device)
            hidden = torch.arange(length, device=q.device) > last[:, None]
            logits = logits.masked_fill(hidden, -float("inf"))
        total = torch.logsumexp(logits, dim=-1)
        empty = total == -float("inf")
        weights = torch.exp(logits - total.masked_fill(empty, 0.0)[..., None])
        out[i] = torch.einsum("hst,tc->shc", weights, keys[:, :k]).to(q.dtype)
        lse[i] = total.masked_fill(empty, float("inf"))
    return out, lse


def rmsnorm(x: Any, weight: Any, eps: Any) -> Any:
    """x · rsqrt(mean(x²) + eps) · weight of every row."""
    import torch

    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rmsnorm_residual(x: Any, weight: Any, residual: Any, eps: Any) -> Any:
    """The norm of x + residual, and that sum, rounded first."""
    import torch

    added = (x.float() + residual.float()).to(x.dtype)
    h = added.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype), added


def rmsnorm_second(x: Any, weight: Any, second_weight: Any, eps: Any) -> Any:
    """Two norms of a row: of its first columns, and of the columns behind them."""
    import torch

    results = []
    for part, scale in ((x[:, : len(weight)], weight), (x[:, len(weight) :], second_weight)):
        h = part.float()
        results.append((h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * scale.float()).to(x.dtype))
    return tuple(results)


def absorb_gemm(x: Any, weight: Any, side: str) -> Any:
    """Every head's product with its part of kv_b_proj's weight (h · 2d, k), d rows of W_UK and then d of W_UV of each
    head. side "q": x (n, h, d) → x · W_UK; "out": x (n, h, k) → x · W_UVᵀ."""
    import torch

    both = weight.view(x.shape[1], 2, -1, weight.shape[1]).float()
    if side == "q":
        return torch.einsum("nhd,hdk->nhk", x.float(), both[:, 0]).to(x.dtype)
    return torch.einsum("nhk,hdk->nhd", x.float(), both[:, 1]).to(x.dtype)


def merge_partials(partials: Any, lse: Any) -> Any:
    """Attention over n parts of a sequence, from what each part gave: partials (n, rows, k) and their natural
    log-sum-exp (n, rows), where +inf and -inf stand for a part without keys. Returns (rows, k) and (rows,), 0 and +inf
    of a row without keys."""
    import torch

    seen = ~lse.isinf()
    most = torch.where(seen, lse, -float("inf")).amax(0)
    empty = ~seen.any(0)
    weights = torch.where(seen, torch.exp(lse - most.masked_fill(empty, 0.0)), 0.0)
    total = weights.sum(0)
    values = torch.where(seen[..., None], weights[..., None] * partials.float(), 0.0).sum(0)
    out = torch.where(empty[:, None], 0.0, values / total.masked_fill(empty, 1.0)[:, None])
    return out.to(partials.dtype), torch.where(empty, float("inf"), most + total.log())
