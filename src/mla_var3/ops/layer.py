"""The kernels around attention as functions: `rmsnorm`, `rope_append`, `latent_append`, `absorb_gemm`.

In a decode step of one layer, of n tokens and h heads with d columns and p of rope, over a latent of k:

    normed = rmsnorm(latent, weight)                                  the latent, before it is cached
    absorb_gemm(q[..., :d], kv_b, "q", out=queries[..., :k])          the query in latent space
    rope_append(q, normed, rope, positions, slots, table, queries, cache)     its rope behind it, and the cache's rows
    attended = mla_decode(queries, cache, page_table, seq_lens)
    out = absorb_gemm(attended, kv_b, "out")                          of every head

A model without rope columns has nothing to turn: `absorb_gemm` makes all columns of its queries, and `latent_append`
writes its cache.

Each picks a version as `mla_decode` does, is planned once for its shapes and strides, never waits for the device, and
can be captured in a CUDA graph once a call with the same shapes has been made. bf16 and fp16. To a program that torch
traces each is an operator (`mla_var3.ops.library`).
"""

from __future__ import annotations

import functools
import numbers
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.ops.request import (
    VECTOR,
    compact,
    dtype_name,
    judge,
    judge_places,
    named_as,
    packed_pages,
    plain_strides,
    require_contiguous,
    require_rows,
    result,
    rows_of,
)
from mla_var3.ops.tracing import traceable
from mla_var3.ops.ways import serve
from mla_var3.packed_cache import NO_ROPE, Layout, layout_of
from mla_var3.workload.gemm import SIDES, GemmProblem
from mla_var3.workload.norm import NormProblem
from mla_var3.workload.packed_append import PackedAppendProblem, views
from mla_var3.workload.rope import RopeProblem

if TYPE_CHECKING:
    import torch

    from mla_var3.ops.engine import Engine


@traceable
def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    second_weight: torch.Tensor | None = None,
    kernel: str | None = None,
    on: Engine | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x · rsqrt(mean(x²) + eps) · weight of every row, with sums in float32.

    x (n, width), whose rows may lie further apart, by a multiple of 16 bytes; columns that lie apart cost a copy, as do
    rows that begin elsewhere. weight (width,). residual (n, width): is
    added to x first, and their sum, rounded, is returned behind the result. second_weight (w,): x is (n, width + w),
    and its last w columns are normalised by themselves, as the latent behind the query of one projection; returned
    behind the result. Not both. kernel, on: as of `mla_decode`. Raises `UserError` in one sentence for what does not
    fit.
    """
    import torch

    judge("x", x, (None, None), None, x)
    if second_weight is not None:
        judge("second_weight", second_weight, (None,), x.dtype, x)
        if len(second_weight) >= x.shape[1]:
            raise UserError(
                f"second_weight has {len(second_weight)} elements and x {x.shape[1]} columns: x is (n, width + w), "
                "with columns for weight in front of those for second_weight."
            )
        if residual is not None:
            raise UserError("second_weight and residual are not taken together: leave one out.")
    given_eps: Any = eps
    if isinstance(given_eps, bool) or not isinstance(given_eps, numbers.Real):
        raise UserError(f"eps is a {type(eps).__name__}: pass a positive number, as 1e-6.")
    width = x.shape[1] - (0 if second_weight is None else len(second_weight))
    given = [x, judge("weight", weight, (width,), x.dtype, x)]
    for name, more, shape in (
        ("second_weight", second_weight, (x.shape[1] - width,)), ("residual", residual, (len(x), width))
    ):  # fmt: skip
        if more is not None:
            given.append(judge(name, more, shape, x.dtype, x))
    rows, *given = rows_of(x), *map(compact, given[1:])
    problem = _norm(
        max(len(x), 1), width, x.shape[1] - width, max(rows.stride(0) - x.shape[1], 0), residual is not None,
        dtype_name(x.dtype, "x"), float(eps),
    )  # fmt: skip
    out, second, summed = (
        torch.empty((len(x), columns), dtype=x.dtype, device=x.device)
        for columns in (width, x.shape[1] - width, 0 if residual is None else width)
    )
    serve("rmsnorm", problem, (rows, *given), (out, second, summed), kernel, on, first="x")
    return out if residual is None and second_weight is None else (out, second if residual is None else summed)


@traceable
def rope_append(
    q: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    interleaved: bool = True,
    layout: str | None = None,
    cache_scale: torch.Tensor | None = None,
    powers: bool = True,
    kernel: str | None = None,
    on: Engine | None = None,
) -> None:
    """Turns the rope columns of new tokens' queries and keys, and writes latent and key into the paged cache.

    q (n, h, any), contiguous, of which the last p columns are turned into the last p of out (n, h, k + p); the others
    of out stay as they are. latent (n, k), contiguous; rope (n, p), whose rows may lie apart: together the new rows of
    kv_cache (pages, tokens of a page, k + p), contiguous. positions (n,) and slots (n,), both int32 or both int64:
    token i is turned by table[positions[i]], and written to row slots[i] % page of page slots[i] // page. table
    (positions, p) float32: cosines, then sines (`mla_var3.workload.rope.rope_table` makes it, with YaRN's scaling).
    interleaved: columns 2i and 2i + 1 are a pair, else i and i + p/2. kernel, on: as of `mla_decode`.

    A token whose slot is negative, or past the last row of the cache, is not written. Where the table has no row of a
    position, all turned columns of the token are NaN. So nothing is read or written outside of a tensor.

    layout: of a packed cache, any of `mla_var3.packed_cache` but "bf16" and those without rope columns, which
    `latent_append` writes; those for extra caches too. kv_cache is (pages, tokens of a page, bytes of a token) of
    torch.uint8 or torch.float8_e4m3fn, whose pages may lie apart, by multiples of 16 bytes. Rows are quantised and
    packed on their way, as `packed_cache.pack` does it with the rope columns rounded to bf16: a column that is NaN or
    infinite becomes e4m3's NaN, and changes no other column (of e2m1, those that share its scale become NaN too).
    powers: whether scales of v32 are rounded up to powers of two.
    cache_scale: (1,) float32, the one scale of layout flat. bf16 alone.

    Raises `UserError` in one sentence for what does not fit.
    """

    judge("q", q, (None, None, None), None, q)
    judge("latent", latent, (len(q), None), q.dtype, q)
    judge("rope", rope, (len(q), None), q.dtype, q)
    (n, h, columns), k, p = q.shape, latent.shape[1], rope.shape[1]
    judge_places(positions, slots, table, n, p, q)
    if layout is None:
        judge("kv_cache", kv_cache, (None, None, k + p), q.dtype, q)
        if cache_scale is not None:
            raise UserError("cache_scale is of layout flat: pass layout as well, or leave it out.")
        parts: tuple[torch.Tensor, ...] = (require_contiguous("kv_cache", kv_cache),)
    else:
        made = layout_of(layout)
        if layout in NO_ROPE:
            raise UserError(f"layout {layout} has no rope columns: latent_append writes such a cache.")
        if made.columns != k + p:
            raise UserError(f"latent and rope have {k + p} columns: tokens of layout {layout} have {made.columns}.")
        parts = cache_parts(made, kv_cache, cache_scale, q)
    q, latent, table = (
        require_contiguous(name, x) for name, x in (("q", q), ("latent", latent), ("table", table))
    )  # fmt: skip
    rows = rows_of(rope)
    rest = max(rows.stride(0) - p, 0) if n > 1 else 0
    fields = (
        max(n, 1), h, k, p, columns, rest, bool(interleaved), kv_cache.shape[1], len(table),
        str(positions.dtype).removeprefix("torch."), dtype_name(q.dtype, "q"),
    )  # fmt: skip
    inputs: tuple[torch.Tensor, ...] = (q, latent, rows, positions.contiguous(), slots.contiguous(), table)
    problem: RopeProblem
    if layout is None:
        problem = _rope(*fields)
    else:
        inputs = inputs if cache_scale is None else (*inputs, compact(cache_scale))
        problem = _append(*fields, layout, bool(powers) or layout != "v32")
    target = plain_strides(result("out", out, (n, h, k + p), q.dtype, q.device))
    serve("rope_append", problem, inputs, (target, *parts), kernel, on)


@traceable
def latent_append(
    latent: torch.Tensor,
    slots: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    layout: str,
    cache_scale: torch.Tensor | None = None,
    powers: bool = True,
    kernel: str | None = None,
    on: Engine | None = None,
) -> None:
    """Quantises the latents of new tokens, and writes them into a paged cache without rope columns.

    latent (n, 512) bf16, normalised, whose rows may lie apart; rows that begin elsewhere than at multiples of 16 bytes
    are written by Triton, and columns that lie apart cost a copy. slots (n,) int32 or int64: token i is written to row
    slots[i] % page of page slots[i] // page. kv_cache (pages, tokens of a page, bytes of a token) of torch.uint8 or
    torch.float8_e4m3fn, whose pages may lie apart, by multiples of 16 bytes. layout: "v32_no_rope", 528 bytes a token,
    or "flat_no_rope", 512, whose one scale is cache_scale (1,) float32. Bytes are those of `packed_cache.pack`. powers:
    whether scales of v32_no_rope are rounded up to powers of two. kernel, on: as of `mla_decode`.

    A token whose slot is negative, or past the last row of the cache, is not written. Raises `UserError` in one
    sentence for what does not fit.
    """
    import torch

    judge("latent", latent, (None, None), None, latent)
    n, columns = latent.shape
    judge("slots", slots, (n,), None, latent)
    if slots.dtype not in (torch.int32, torch.int64):
        raise UserError(f"slots are {slots.dtype}: pass torch.int64 or torch.int32.")
    made = layout_of(layout)
    if layout not in NO_ROPE:
        raise UserError(f"layout {layout} has rope columns: rope_append turns them and writes such a cache.")
    if made.columns != columns:
        raise UserError(f"latent has {columns} columns: tokens of layout {layout} have {made.columns}.")
    parts = cache_parts(made, kv_cache, cache_scale, latent)
    rows = rows_of(latent)
    problem = _latents(
        max(n, 1), max(rows.stride(0) - columns, 0) if n > 1 else 0, kv_cache.shape[1],
        str(slots.dtype).removeprefix("torch."), dtype_name(latent.dtype, "latent"), layout,
        bool(powers) or made.scale_bytes != 4,
    )  # fmt: skip
    inputs = (rows, slots.contiguous()) if cache_scale is None else (rows, slots.contiguous(), compact(cache_scale))
    nobodys = rows.new_empty((n, 0, columns))
    serve("latent_append", problem, inputs, (nobodys, *parts), kernel, on, first="latent")


def cache_parts(
    layout: Layout, kv_cache: torch.Tensor, scale: torch.Tensor | None, like: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Codes, scales and plain columns of a packed cache, as views of it: `workload.packed_append` has their shapes.

    kv_cache (pages, tokens of a page, bytes of a token) of torch.uint8 or torch.float8_e4m3fn, on the device of `like`.
    scale (1,) float32: of a layout with one scale, and of no other. Raises `UserError` for what does not fit.
    """
    import torch

    if layout.name == "bf16":
        raise UserError("layout bf16 is that of a cache without scales: leave layout out.")
    if (scale is None) == layout.one_scale:
        flat = "flat_no_rope" if layout.name in NO_ROPE else "flat"
        raise UserError(
            f"layout {layout.name} {'needs' if scale is None else 'has no'} cache_scale, which is of {flat}."
        )
    if scale is not None:
        judge("cache_scale", scale, (1,), torch.float32, like)
    return views(layout, packed_pages("kv_cache", kv_cache, layout.name, like))


@traceable
def absorb_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    side: str,
    *,
    out: torch.Tensor | None = None,
    kernel: str | None = None,
    on: Engine | None = None,
) -> torch.Tensor:
    """Every head's product with its part of `kv_b_proj`'s weight, as DeepSeek stores it: nothing is transposed.

    weight (h · 2d, k), contiguous: d rows of W_UK, then d of W_UV, of each head. side "q": x (n, h, d) → x · W_UK
    (n, h, k). side "out": x (n, h, k) → x · W_UVᵀ (n, h, d). Tokens and heads of x and out may lie further apart, by
    multiples of 16 bytes, so that both may be slices. Of an x that lies otherwise, every other column for one, a copy
    is made; such an out is refused. kernel, on: as of `mla_decode`. Returns out. Raises `UserError` in one sentence for
    what does not fit.
    """
    import torch

    require_side(side)
    judge("x", x, (None, None, None), None, x)
    n, h, _ = x.shape
    if h < 1:
        raise UserError(f"x is {tuple(x.shape)}, (n, h, columns): give it at least one head.")
    judge("weight", weight, (None, None), x.dtype, x)
    weight = require_contiguous("weight", weight)
    if len(weight) % (2 * h):
        raise UserError(f"weight is {tuple(weight.shape)}: pass {h} heads' rows, (h · 2d, k).")
    d, k = len(weight) // (2 * h), weight.shape[1]
    judge("x", x, (n, h, d if side == "q" else k), None, x)
    columns = k if side == "q" else d
    made = torch.empty((n, h, columns), dtype=x.dtype, device=x.device) if out is None else out
    target = require_rows("out", judge("out", made, (n, h, columns), x.dtype, x), VECTOR)
    problem = _gemm(side, max(n, 1), h, k, d, dtype_name(x.dtype, "x"))
    serve("absorb_gemm", problem, (rows_of(x, VECTOR), weight), (target,), kernel, on, first="x")
    return made


def require_side(side: str) -> None:
    """Raises `UserError` for a side that `absorb_gemm` does not have."""
    if side not in SIDES:
        raise UserError(f'side = {side!r} is unknown: "q" multiplies with W_UK, "out" with W_UV.')


# ---------------------------------------------------------------- in common


# One object for equal problems: making and judging one takes longer than all else that a call does on the host.
@functools.lru_cache(maxsize=4096)
@named_as(
    rows="x (n, width): n", width="weight (width,): width", second="second_weight (w,): w",
    rest="x (n, width): elements between its rows", eps="eps",
)  # fmt: skip
def _norm(rows: int, width: int, second: int, rest: int, residual: bool, dtype: str, eps: float) -> NormProblem:
    return NormProblem(rows=rows, width=width, second=second, rest=rest, residual=residual, dtype=dtype, eps=eps)


@functools.lru_cache(maxsize=4096)
@named_as(
    tokens="q (n, h, any): n", h="q (n, h, any): h", k="latent (n, k): k", p="rope (n, p): p",
    columns="q (n, h, any): columns", rest="rope (n, p): elements between its rows",
    page="kv_cache (pages, page, k + p): page", positions="table (positions, p): positions",
)  # fmt: skip
def _rope(*fields: Any) -> RopeProblem:
    return RopeProblem(*fields)


@functools.lru_cache(maxsize=4096)
@named_as(
    tokens="q (n, h, any): n", h="q (n, h, any): h", k="latent (n, k): k", p="rope (n, p): p",
    columns="q (n, h, any): columns", rest="rope (n, p): elements between its rows",
    page="kv_cache (pages, page, bytes of a token): page", positions="table (positions, p): positions",
    layout="layout", dtype="q: dtype", powers="powers",
)  # fmt: skip
def _append(*fields: Any) -> PackedAppendProblem:
    return PackedAppendProblem(*fields)


@functools.lru_cache(maxsize=4096)
@named_as(
    tokens="latent (n, k): n", rest="latent (n, k): elements between its rows",
    page="kv_cache (pages, page, bytes of a token): page", dtype="latent: dtype", layout="layout", powers="powers",
)  # fmt: skip
def _latents(
    tokens: int, rest: int, page: int, index: str, dtype: str, layout: str, powers: bool
) -> PackedAppendProblem:
    return PackedAppendProblem(
        tokens=tokens, rest=rest, page=page, index=index, dtype=dtype, layout=layout, powers=powers
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
@named_as(tokens="x (n, h, columns): n", h="x (n, h, columns): h", k="weight (h · 2d, k): k", d="weight (h · 2d, k): d")
def _gemm(side: str, tokens: int, h: int, k: int, d: int, dtype: str) -> GemmProblem:
    return GemmProblem(side=side, tokens=tokens, h=h, k=k, p=0, d=d, dtype=dtype)
