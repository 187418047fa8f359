"""`mla_chunk_prefill`: new tokens of prompts attend to themselves and to what a paged latent cache holds before them.

    own tokens     rows of the cache → kv_b → keys and values of every head → mla_prefill, causal      ┐
    prefix         decompress: the same, piece by piece, without a mask: no query stands in a prefix    ├→ merge by LSE
                   absorb:     q · W_UK → mla_decode over the cached rows → · W_UV                       ┘

Of one head, a query and a key of a prefix cost 2(d + p + v) FLOPs over decompressed heads; absorbed they cost
2(2k + p). However many queries there are, decompressing costs the key once more: 2k(d + v) FLOPs of the product with
kv_b, and the bytes of what is written and read again on the way, 2(d + v) of the product, 2d and 2(d + p) of the keys,
2(d + p + v) of attention. With the operations that a GPU does in the time of a byte, `way_of` asks from how many query
tokens a request that is made up for: 345 in DeepSeek's models, 170 if no byte counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_var3.errors import UserError
from mla_var3.ops.context_parallel import merge_partials
from mla_var3.ops.decode import mla_decode
from mla_var3.ops.layer import absorb_gemm
from mla_var3.ops.prefill import DTYPES, mla_prefill, require_no_gradient
from mla_var3.ops.request import dtype_name, integers, judge, number
from mla_var3.ops.tracing import traceable
from mla_var3.workload import MOST_LISTED, merge

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

WAYS = ("decompress", "absorb")
#: Dense operations in 16 bits that a Hopper GPU does in the time in which it reads or writes a byte.
FLOPS_A_BYTE = 150
#: Bytes of the keys and values of one piece of a prefix. A piece of 128 heads in bf16 then has 8,192 tokens, of
#: 192 columns of keys, 128 of values, and 192 more while keys are built.
PIECE_BYTES = 1 << 30


@traceable
def mla_chunk_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_b: torch.Tensor,
    *,
    prefix_tokens: int,
    scale: float | None = None,
    way: str | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of new tokens, whose rows are in the cache already, to all tokens of their request up to themselves.

    q (n, h, d + p): query heads, of which the last p columns are turned. kv_cache (pages, tokens of a page, k + p), or
    with a dimension of 1 in front of the last: latents and turned rope columns, in q's dtype; pages may lie apart.
    page_table (b, width) and seq_lens (b,), int32 or int64: as of `mla_decode`, the new tokens counted. cu_seqlens_q
    (b + 1,): request i has the query tokens cu_seqlens_q[i] .. cu_seqlens_q[i + 1] - 1 of q, the newest of its tokens.
    kv_b (h · (d + v), k): the weight of kv_b_proj, for each head d rows of W_UK and v of W_UV.

    prefix_tokens: how many tokens of all requests together stand before their new ones, or more: what an engine knows
    on the host. Of more than that, the last ones would not be attended to. scale: factor on q·k, default (d + p)^-1/2.
    way: "decompress" or "absorb", how the prefix is attended to; None picks by `way_of`. "absorb" needs a GPU and v
    equal to d. return_lse: also returns the natural log-sum-exp (n, h) float32.

    Never waits for the device, and can be captured in a CUDA graph as the functions can that it is made of. Keys and
    values of a prefix take `PIECE_BYTES` at a time. Each part is rounded to q's dtype before parts are merged. A query
    token sees itself at least. On a CPU torch computes. Returns out (n, h, v), or (out, lse). Raises `UserError` in one
    sentence for what does not fit. To `torch.compile` it is the operator `torch.ops.mla_var3.mla_chunk_prefill`.
    """
    import torch

    judge("q", q, (None, None, None), None, q)
    judge("kv_b", kv_b, (None, None), q.dtype, q)
    require_no_gradient(q=q, kv_cache=kv_cache, kv_b=kv_b)
    (n, h, columns), k = q.shape, kv_b.shape[1]
    if kv_cache.dim() == 4 and kv_cache.shape[2] == 1:
        kv_cache = kv_cache.squeeze(2)
    judge("kv_cache", kv_cache, (None, None, None), q.dtype, q)
    p = kv_cache.shape[2] - k
    d = columns - p
    if p < 0 or d < 1:
        raise UserError(
            f"kv_cache has {kv_cache.shape[2]} columns, kv_b {k} and q {columns}: a cached token is a latent, as wide "
            "as kv_b, and p rope columns, and q has columns in front of as many."
        )
    v = len(kv_b) // max(h, 1) - d
    if not h or len(kv_b) % h or v < 1:
        raise UserError(f"kv_b is {tuple(kv_b.shape)} and q has {h} heads of {d} + {p} columns: pass (h · (d + v), k).")
    if isinstance(prefix_tokens, bool) or not isinstance(prefix_tokens, int) or prefix_tokens < 0:
        raise UserError(f"prefix_tokens is {prefix_tokens!r}: pass how many tokens stand before the new ones, or 0.")
    if way is not None and way not in WAYS:
        raise UserError(f'way = {way!r} is unknown: "decompress" or "absorb", or None.')
    if way == "absorb" and (q.device.type == "cpu" or d != v):
        why = "needs a GPU" if q.device.type == "cpu" else f"needs values as wide as keys, and they are {v} and {d}"
        raise UserError(f'way = "absorb" {why}: leave it out.')
    table = integers("page_table", page_table, (None, None), q, 0, MOST_LISTED << 10)
    lens = integers("seq_lens", seq_lens, (len(table),), q, 0, table.shape[1] * kv_cache.shape[1])
    of_q = integers("cu_seqlens_q", cu_seqlens_q, (len(table) + 1,), q, 0, n)
    factor = (d + p) ** -0.5 if scale is None else number("scale", scale)
    if way is None:
        absorbs = q.device.type != "cpu" and d == v
        way = way_of(n / max(len(table), 1), k, d, p, v) if absorbs else "decompress"
    cache, weight = kv_cache.detach(), kv_b.detach()

    def project(latents: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(latents, weight)

    if way == "decompress" or not prefix_tokens:
        out, sums = decompressed(q.detach(), cache, table, lens, of_q, project, k, prefix_tokens, factor)
    else:
        own = decompressed(q.detach(), cache, table, lens, of_q, project, k, 0, factor)
        before = (lens - of_q.diff()).clamp(min=0)
        out, sums = merged([own, absorbed(q.detach(), cache, table, before, of_q, weight, factor)])
    return (out, sums) if return_lse else out


def way_of(queries: float, k: int, d: int, p: int, v: int) -> str:
    """How a prefix is attended to by so many query tokens of a request: the way that takes less work, as the module's
    docstring calculates it."""
    once = 2 * k * (d + v) + FLOPS_A_BYTE * 2 * (4 * d + 2 * v + 2 * p)
    saved = 2 * (2 * k + p) - 2 * (d + p + v)
    return "decompress" if saved <= 0 or queries * saved > once else "absorb"


Part = tuple["torch.Tensor", "torch.Tensor"]  # out (n, h, v), lse (n, h)


def decompressed(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    of_q: torch.Tensor,
    project: Callable[[torch.Tensor], torch.Tensor],
    k: int,
    prefix_tokens: int,
    scale: float,
) -> Part:
    """(out (n, h, v), lse (n, h)) over decompressed heads: own tokens, and the prefix piece by piece. project: kv_b,
    of latents (m, k) the keys and values (m, h · (d + v)) of all heads. The others: as of `mla_chunk_prefill`."""
    counts = of_q.diff()
    before = (lens - counts).clamp(min=0)
    kv = _keys_and_values(_rows(cache, table, before, of_q, 0, len(q)), project, k, q)
    parts = [_attended(q, *kv, of_q, of_q, scale, causal=True)]
    if prefix_tokens:
        of_k = _offsets(before)
        token = (q.shape[2] + kv[1].shape[2] + q.shape[2]) * q.shape[1] * q.element_size()
        step = max(1, min(prefix_tokens, PIECE_BYTES // token))
        for first in range(0, prefix_tokens, step):
            rows = min(step, prefix_tokens - first)
            latents = _rows(cache, table, before.new_zeros(len(before)), of_k, first, rows)
            piece = (of_k - first).clamp(0, rows)
            kv = _keys_and_values(latents, project, k, q)
            parts.append(_attended(q, *kv, of_q, piece, scale, causal=False))
    return merged(parts)


def absorbed(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    of_q: torch.Tensor,
    kv_b: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
) -> Part:
    """(out (n, h, d), lse (n, h)) of q over the first `lens` cached tokens of each request, in latent space. causal:
    the new tokens are among them. On a GPU."""
    import torch

    (n, h, columns), k = q.shape, kv_b.shape[1]
    p = cache.shape[2] - k
    queries = q.new_empty((n, h, k + p))
    absorb_gemm(q[..., : columns - p], kv_b, "q", out=queries[..., :k])
    queries[..., k:] = q[..., columns - p :]
    found = mla_decode(
        queries, cache, table, lens, scale=scale, causal=causal, cu_seqlens_q=of_q, head_dim_v=k, return_lse=True
    )
    assert isinstance(found, tuple)
    out, lse = found
    assert isinstance(out, torch.Tensor)
    return absorb_gemm(out, kv_b, "out"), lse


def merged(parts: list[Part]) -> Part:
    """Attention over all parts of the keys, from what each part gave. A row that no part has a key for is 0."""
    import torch

    if len(parts) == 1:
        return parts[0]
    outs, sums = (torch.stack(x) for x in zip(*parts, strict=True))
    if not outs.is_cuda:
        count, *rows, columns = outs.shape
        dtype = dtype_name(outs.dtype, "q", DTYPES)
        problem = merge.MergeProblem(parts=count, tokens=outs[0, ..., 0].numel(), h=1, k=columns, dtype=dtype)
        out, lse = merge.reference(problem, outs.view(count, -1, columns), sums.view(count, -1))
        return out.to(outs.dtype).view(*rows, columns), lse.float().view(rows)
    return merge_partials(outs, sums)


# ---------------------------------------------------------------- rows of a cache
def _offsets(counts: torch.Tensor) -> torch.Tensor:
    """(b + 1,) int32: where each request begins, and the end."""
    import torch

    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def _rows(
    cache: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, offsets: torch.Tensor, first: int, count: int
) -> torch.Tensor:
    """(count, columns): cached tokens of the requests behind each other, from the first-th on. starts (b,): each
    request's first token of them. offsets (b + 1,): where its tokens begin among all. Rows behind the last request are
    those of some token."""
    import torch

    page = cache.shape[1]
    at = torch.arange(first, first + count, dtype=torch.int32, device=cache.device)
    request = torch.searchsorted(offsets[1:].contiguous(), at, right=True).clamp(max=len(table) - 1)
    token = (starts[request] + at - offsets[request]).clamp(0, table.shape[1] * page - 1).long()
    pages = table[request, token // page].clamp(0, len(cache) - 1)
    return cache[pages, token % page]


def _keys_and_values(
    rows: torch.Tensor, project: Callable[[torch.Tensor], torch.Tensor], k: int, q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, h, d + p) and (m, h, v), a view, of cached tokens (m, k + p)."""
    h, p = q.shape[1], rows.shape[1] - k
    both = project(rows[:, :k]).view(len(rows), h, -1)
    nope, values = both.split([q.shape[2] - p, both.shape[2] - q.shape[2] + p], -1)
    keys = q.new_empty((len(rows), h, q.shape[2]))
    keys[..., : q.shape[2] - p] = nope
    keys[..., q.shape[2] - p :] = rows[:, None, k:]
    return keys, values


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_q: torch.Tensor, of_k: torch.Tensor, scale: float,
    *, causal: bool,
) -> Part:  # fmt: skip
    found = mla_prefill(q, k, v, of_q, of_k, scale=scale, causal=causal, return_lse=True)
    assert isinstance(found, tuple)
    return found[0], found[1].t()
