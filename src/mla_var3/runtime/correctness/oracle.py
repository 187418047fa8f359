"""The reference: absorbed MLA decode in float64, one request at a time, with memory bounded whatever the length.

It is written for being right: keys are gathered by page, only the tokens that exist are touched, and every softmax is a
plain one over whole rows. `mla_decompressed_reference` computes the same attention from decompressed heads, which
shows that the two formulations agree.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from mla_var3.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

#: Above these many FLOPs of the problem the reference computes in float32: about a second of float64 on each device.
FLOAT64_FLOPS = {"cpu": 2e10, "cuda": 2e13}

#: Most elements of one block of attention probabilities (256 MiB in float64).
_BLOCK_ELEMENTS = 1 << 25


def mla_decode_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k: int,
    scale: float,
    causal: bool,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed attention of every request; see `mla_var3.runtime.correctness.inputs` for the inputs.

    k: latent columns (the values). scale: factor on q·k. causal: query token i sees keys 0 .. len - s + i.
    compute_dtype: torch.float64, or torch.float32 above `FLOAT64_FLOPS`, unless given.
    Returns out (b, s, h, k), not rounded to the inputs' dtype, and lse (b, h, s), the natural log-sum-exp of
    scale · q·k, both in the compute dtype on the inputs' device. A row that sees no key has out 0 and lse +inf.
    Raises `UserError` when a page that a request needs is not in the cache.
    """
    import torch

    b, s, h, width = q.shape
    h_kv = kv_cache.shape[2]
    group = h // h_kv
    lens = [int(x) for x in seq_lens.tolist()]
    if compute_dtype is None:
        flops = 2.0 * s * h * (width + k) * sum(lens)
        limit = FLOAT64_FLOPS["cuda" if q.is_cuda else "cpu"]
        compute_dtype = torch.float64 if flops <= limit else torch.float32
    out = torch.zeros((b, s, h, k), dtype=compute_dtype, device=q.device)
    lse = torch.full((b, h, s), float("inf"), dtype=compute_dtype, device=q.device)
    with _full_precision():
        for i, length in enumerate(lens):
            if length == 0:
                continue
            keys = gather_tokens(kv_cache, page_table[i], length).to(compute_dtype)
            for g in range(h_kv):
                heads = slice(g * group, (g + 1) * group)
                rows = q[i, :, heads].reshape(s * group, width).to(compute_dtype)
                o, e = _attend(rows, keys[:, g], keys[:, g, :k], group, s, scale, causal)
                out[i, :, heads] = o.view(s, group, k)
                lse[i, heads] = e.view(s, group).t()
    return out, lse


def gather_tokens(kv_cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """The (length, h_kv, width) tokens of one request, in order. pages: its row of the page table."""
    num_pages, page = kv_cache.shape[:2]
    count = -(-length // page)
    if count > len(pages):
        raise UserError(f"A request of {length} tokens needs {count} pages and its page table holds {len(pages)}.")
    ids = pages[:count].long()
    if bool(((ids < 0) | (ids >= num_pages)).any()):
        raise UserError(f"A page table names page {int(ids.max())} of a cache of {num_pages}: give it valid pages.")
    return kv_cache[ids].flatten(0, 1)[:length]


def _attend(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: int, s: int, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of token-major rows (r = token · group + head) over (length, width) keys, in blocks of rows."""
    import torch

    count, length = rows.shape[0], keys.shape[0]
    out = rows.new_zeros((count, values.shape[1]))
    lse = rows.new_full((count,), float("inf"))
    step = max(1, _BLOCK_ELEMENTS // max(1, length))
    position = torch.arange(length, device=rows.device)
    for begin in range(0, count, step):
        part = slice(begin, min(count, begin + step))
        logits = rows[part] @ keys.t()
        logits *= scale
        if causal:
            token = torch.arange(part.start, part.stop, device=rows.device) // group
            logits.masked_fill_(position > (length - s + token).unsqueeze(1), float("-inf"))
        e = torch.logsumexp(logits, dim=-1)
        empty = e == float("-inf")
        weights = logits.sub_(e.masked_fill(empty, 0.0).unsqueeze(1)).exp_()
        out[part] = weights @ values
        lse[part] = e.masked_fill(empty, float("inf"))
    return out, lse


def mla_decompressed_reference(
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
    import torch

    b, s, h, d = q_nope.shape
    latent_width = w_uk.shape[2]
    out = torch.zeros((b, s, h, d), dtype=torch.float64, device=q_nope.device)
    lse = torch.full((b, h, s), float("inf"), dtype=torch.float64, device=q_nope.device)
    for i, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        tokens = gather_tokens(kv_cache, page_table[i], length)[:, 0].double()
        latent, rope = tokens[:, :latent_width], tokens[:, latent_width:]
        for j in range(h):
            keys = torch.cat([latent @ w_uk[j].double().t(), rope], dim=1)
            values = latent @ w_uv[j].double().t()
            rows = torch.cat([q_nope[i, :, j], q_rope[i, :, j]], dim=1).double()
            out[i, :, j], lse[i, j] = _attend(rows, keys, values, 1, s, scale, causal)
    return out, lse


def absorb_query(q_nope: torch.Tensor, q_rope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """q in latent space, (b, s, h, k + p), from q_nope (b, s, h, d), q_rope (b, s, h, p) and w_uk (h, d, k)."""
    import torch

    return torch.cat([torch.einsum("bshd,hdk->bshk", q_nope.to(w_uk.dtype), w_uk), q_rope.to(w_uk.dtype)], dim=-1)


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """float32 products without TF32, whatever the process chose."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
