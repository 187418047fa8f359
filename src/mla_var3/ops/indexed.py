"""`indexed_append`: what a layer with a lightning indexer caches of new tokens, in one launch.

    indexed_append(q, latent, rope, k, weight, bias, positions, slots, table, out, kv_cache, index_cache)

is `rope_append(q, latent, rope, positions, slots, table, out, kv_cache, layout="v32")` and
`index_append(k, weight, bias, positions, slots, table, index_cache)`. Codes and scales are made in the same steps, and
were theirs to the byte in every comparison that tells which bytes differ. Rope columns in bf16 may be the next number:
where a turned column lies as near to the middle between two numbers of bf16 as float32 can tell, it may be rounded to
the other one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from mla_var3.errors import UserError
from mla_var3.ops.indexer import aligned, index_cache_of, key_rows
from mla_var3.ops.layer import cache_parts
from mla_var3.ops.request import judge, judge_places, named_as, plain_strides, require_contiguous, result, rows_of
from mla_var3.ops.tracing import traceable
from mla_var3.ops.ways import serve
from mla_var3.packed_cache import layout_of
from mla_var3.workload.index_append import views
from mla_var3.workload.indexed_append import LAYOUT, IndexedAppendProblem
from mla_var3.workload.indexer_logits import PAGE, D

if TYPE_CHECKING:
    import torch

    from mla_var3.ops.engine import Engine


@traceable
def indexed_append(
    q: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    index_cache: torch.Tensor,
    *,
    interleaved: bool = True,
    interleaved_keys: bool = False,
    powers: bool = True,
    powers_of_keys: bool = True,
    kernel: str | None = None,
    on: Engine | None = None,
) -> None:
    """`rope_append` into a packed cache of layout v32 and `index_append` into an index cache, of the same tokens.

    q (n, h, any), latent (n, 512), rope (n, 64), all bf16, of n tokens of h query heads: the last 64 columns of q are
    turned into the last 64 of out (n, h, 576) bf16, and latent and rope become rows of kv_cache (pages, tokens of a
    page, 656) of torch.uint8 or torch.float8_e4m3fn, as of `rope_append` with layout v32. k (n, 128) bf16, weight and
    bias (128,) float32: the indexer's keys and their LayerNorm, which go into index_cache (pages, 64, 132) of
    torch.uint8, as of `index_append`. positions (n,) and slots (n,), both int32 or both int64, and table (positions,
    64) float32, cosines, then sines: for both.

    Both caches have the same slots: token i is written to row slots[i] % page of page slots[i] // page of kv_cache,
    whose pages are a multiple of 64 tokens, and to row slots[i] % 64 of page slots[i] // 64 of index_cache. A token
    whose slot is negative, or past the last row of a cache, is not written into that cache; its queries are turned all
    the same. interleaved, powers: of queries, rope and latents; interleaved_keys, powers_of_keys: of the indexer's
    keys. kernel, on: as of `mla_decode`.

    Rope columns in bf16, those of out and of kv_cache, may be the number next to what `rope_append` writes: the
    module's docstring says when. It computes no gradient. Raises `UserError` in one sentence for what does not fit.
    """
    import torch

    judge("q", q, (None, None, None), torch.bfloat16, q)
    (n, h, columns), made = q.shape, layout_of(LAYOUT)
    p = 64
    judge("latent", latent, (n, made.columns - p), q.dtype, q)
    judge("rope", rope, (n, p), q.dtype, q)
    judge("k", k, (n, D), q.dtype, q)
    factors = [aligned(judge(name, x, (D,), torch.float32, q)) for name, x in (("weight", weight), ("bias", bias))]
    judge_places(positions, slots, table, n, p, q)
    parts = cache_parts(made, kv_cache, None, q)
    if kv_cache.shape[1] % PAGE:
        raise UserError(
            f"kv_cache has pages of {kv_cache.shape[1]} tokens: beside an index cache pass a multiple of {PAGE}."
        )
    of_keys = views(index_cache_of("index_cache", index_cache, q))
    q, latent, table = (
        require_contiguous(name, x) for name, x in (("q", q), ("latent", latent), ("table", table))
    )  # fmt: skip
    rows, (keys, rest_of_keys) = rows_of(rope), key_rows(k)
    rest = max(rows.stride(0) - p, 0) if n > 1 else 0
    problem = _append(
        max(n, 1), h, columns, rest, bool(interleaved), kv_cache.shape[1], len(table),
        str(positions.dtype).removeprefix("torch."), bool(powers), rest_of_keys, bool(interleaved_keys),
        bool(powers_of_keys),
    )  # fmt: skip
    inputs = (q, latent, rows, positions.contiguous(), slots.contiguous(), aligned(table), keys, *factors)
    target = plain_strides(result("out", out, (n, h, made.columns), q.dtype, q.device))
    serve("indexed_append", problem, inputs, (target, *parts, *of_keys), kernel, on)


@functools.lru_cache(maxsize=4096)
@named_as(tokens="q: n", h="q: h", columns="q: columns", page="kv_cache: page", positions="table: positions")
def _append(
    n: int, h: int, columns: int, rest: int, interleaved: bool, page: int, positions: int, index: str, powers: bool,
    rest_of_keys: int, interleaved_keys: bool, powers_of_keys: bool,
) -> IndexedAppendProblem:  # fmt: skip
    return IndexedAppendProblem(
        tokens=n, h=h, columns=columns, rest=rest, interleaved=interleaved, page=page, positions=positions, index=index,
        layout=LAYOUT, powers=powers, rest_of_keys=rest_of_keys, interleaved_keys=interleaved_keys,
        powers_of_keys=powers_of_keys,
    )  # fmt: skip
