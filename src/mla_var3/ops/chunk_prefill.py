"""`mla_chunk_prefill`: new tokens of prompts attend to themselves and to what a paged latent cache holds before them.

    decompress    rows of the cache → · kv_b → keys and values of every head → mla_prefill ┐
                  the same of the next piece of the prefix                                 ├→ merge by LSE
                  the last piece, with the new tokens: causal                              ┘
    absorb        q · W_UK → mla_decode over the cached rows, causal → · W_UV

`mla_var3.kernel.chunks` cuts the pieces, gathers rows, multiplies and merges. With few tokens or heads there is one
piece, and nothing is merged.

Of one head, a query and a key of a prefix cost 2(d + p + v) FLOPs over decompressed heads; absorbed they cost
2(2k + p). However many queries there are, decompressing costs the key once more: 2k(d + v) FLOPs of the product with
kv_b, and 2(d + p + v) bytes of keys and values, written and read. With the operations that a byte counts as, `way_of`
asks from how many query tokens a request that is made up for: 240 in DeepSeek's models, 170 if no byte counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from mla_var3.errors import UserError
from mla_var3.kernel import chunks
from mla_var3.ops.decode import mla_decode
from mla_var3.ops.layer import absorb_gemm
from mla_var3.ops.prefill import mla_prefill, require_no_gradient
from mla_var3.ops.request import integers, judge, number
from mla_var3.ops.tracing import traceable
from mla_var3.workload import MOST_LISTED

if TYPE_CHECKING:
    import torch

WAYS = ("decompress", "absorb")
#: Dense operations in 16 bits that a byte of keys and values counts as. An H200 does 150 in the time of a byte alone,
#: but products write while they compute. With 83 both ways are equal where they were on an H200, of 128 and 16 heads.
FLOPS_A_BYTE = 83


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
    values take `chunks.PIECE_BYTES` at a time. Each piece is rounded to q's dtype before it is merged. A query token
    sees itself at least. On a CPU torch computes. Returns out (n, h, v), or (out, lse). Raises `UserError` in one
    sentence for what does not fit. To `torch.compile` it is the operator `torch.ops.mla_var3.mla_chunk_prefill`.
    """
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

    if way == "absorb" and prefix_tokens:
        out, sums = absorbed(q.detach(), cache, table, lens, of_q, weight, factor)
    else:
        project = functools.partial(chunks.up_project, weight)
        out, sums = decompressed(q.detach(), cache, table, lens, of_q, project, k, v, prefix_tokens, factor)
    return (out, sums) if return_lse else out


def way_of(queries: float, k: int, d: int, p: int, v: int) -> str:
    """How a prefix is attended to by so many query tokens of a request: the way that takes less work, as the module's
    docstring calculates it."""
    once = 2 * k * (d + v) + FLOPS_A_BYTE * 4 * (d + p + v)
    saved = 2 * (2 * k + p) - 2 * (d + p + v)
    return "decompress" if saved <= 0 or queries * saved > once else "absorb"


Part = tuple["torch.Tensor", "torch.Tensor"]  # out (n, h, v), lse (n, h)
#: Writes the first columns of keys (m, h, d + p), and values (m, h, v), of latents (m, k).
Project = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], None]


def decompressed(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    of_q: torch.Tensor,
    project: Project,
    k: int,
    v: int,
    prefix_tokens: int,
    scale: float,
) -> Part:
    """(out (n, h, v), lse (n, h)) over decompressed heads, piece by piece. project: with kv_b. The others: as of
    `mla_chunk_prefill`."""
    import torch

    n, h, columns = q.shape
    cut = list(chunks.pieces(prefix_tokens, n, (columns + v) * h * q.element_size()))
    room = max(piece.rows for piece in cut)
    made = [q.new_empty((room, *rest)) for rest in ((k,), (h, columns), (h, v))]
    of_k = of_q.new_empty(len(table) + 1)
    total: Part | None = None
    free: Part | None = None  # where the next merge writes
    for piece in cut:
        latents, keys, values = made if piece.rows == room else [x[: piece.rows] for x in made]
        chunks.gather(cache, table, lens, of_q, piece, latents, keys, of_k)
        project(latents, keys, values)
        found = mla_prefill(q, keys, values, of_q, of_k, scale=scale, causal=piece.own, return_lse=True)
        assert isinstance(found, tuple)
        if total is None:
            total = found
            continue
        free = free or (torch.empty_like(total[0]), torch.empty_like(total[1]))
        chunks.merge(total, found, free)
        total, free = free, total
    assert total is not None
    return total[0], total[1].t()


def by_product(project: Callable[[torch.Tensor], torch.Tensor]) -> Project:
    """`project` of `decompressed`, from what gives all columns of all heads, (m, h · (d + v)), of latents."""

    def write(latents: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        h, v = values.shape[1:]
        both = project(latents).view(len(latents), h, -1)
        keys[..., : both.shape[2] - v] = both[..., : both.shape[2] - v]
        values.copy_(both[..., both.shape[2] - v :])

    return write


def absorbed(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    of_q: torch.Tensor,
    kv_b: torch.Tensor,
    scale: float,
) -> Part:
    """(out (n, h, d), lse (n, h)) of q over the cached tokens of each request, in latent space. On a GPU."""
    import torch

    (n, h, columns), k = q.shape, kv_b.shape[1]
    p = cache.shape[2] - k
    queries = q.new_empty((n, h, k + p))
    absorb_gemm(q[..., : columns - p], kv_b, "q", out=queries[..., :k])
    queries[..., k:] = q[..., columns - p :]
    found = mla_decode(
        queries, cache, table, lens, scale=scale, causal=True, cu_seqlens_q=of_q, head_dim_v=k, return_lse=True
    )
    assert isinstance(found, tuple)
    out, lse = found
    assert isinstance(out, torch.Tensor)
    return absorb_gemm(out, kv_b, "out"), lse
