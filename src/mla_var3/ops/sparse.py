"""Decode attention over packed caches: `sparse_mla_decode` to the tokens that indices name, `packed_mla_decode` to all
tokens of a request.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from mla_var3.errors import Unsupported, UserError
from mla_var3.ops.request import (
    LEAST,
    MOST,
    VECTOR,
    compact,
    integers,
    judge,
    named_as,
    number,
    packed_pages,
    result,
    rows_of,
)
from mla_var3.ops.tracing import traceable
from mla_var3.ops.ways import engine_of, serve, way_for
from mla_var3.packed_cache import NO_ROPE, VALUES, beside, layout_of
from mla_var3.runtime import limits
from mla_var3.workload.sparse_decode import STRIDED, SparseProblem, input_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from mla_var3.device import Device
    from mla_var3.ops.engine import Engine

#: Query tokens of a request that versions take together, whatever their heads.
TOGETHER = 8
#: Inputs that query tokens, and those that requests have of their own.
ROWS, COUNTS = ("q", "indices", "extra_indices"), ("lengths", "extra_lengths")


@traceable
def sparse_mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    layout: str = "v32",
    scale: float | None = None,
    cache_scale: torch.Tensor | None = None,
    topk_lens: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    extra_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_lens: torch.Tensor | None = None,
    extra_layout: str | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    fixed_split: int | None = None,
    kernel: str | None = None,
    on: Engine | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query token to the cached tokens that its indices name, in latent space.

    q (b, s, h, columns) bf16, with 576 columns, and 512 in v4, v41 and without rope columns. kv_cache (pages, tokens of
    a page, bytes of a token) of torch.uint8 or torch.float8_e4m3fn, in a layout of `mla_var3.packed_cache`: "v32",
    "v4", "v41", "v41_planar", "flat", "v32_no_rope" or "flat_no_rope"; or (pages, tokens of a page, 576) of bf16,
    layout "bf16". Those of V4.1 are taken on Hopper, and elsewhere by kernel="torch/sparse_mla" alone, as those without
    rope columns are everywhere. Another 8-bit dtype is refused, as codes are e4m3fn; int8 is taken for bytes in all but
    the flat ones. A dimension of size 1 in front of the last one is taken too. Pages may lie further apart than they
    are long, by a multiple of 16 bytes. cache_scale: (1,) float32, of the flat layouts.

    q and indices may have any strides of request, token and head, with columns beside each other and rows of q
    multiples of 16 bytes apart; so may out, and lse may have any, none of its elements over another. Copies are made of
    a q whose rows lie otherwise or over each other, and for versions that read or write no strides.

    indices (b, s, topk) int32: page · tokens of a page + row, in the whole cache. One that is negative, or outside the
    cache, names no token. topk_lens (b,) int32: only so many of a request's indices, from the left, are looked at. sink
    (h,) float32: a logit more in each head's softmax, without a value; lse is without it. extra_cache, extra_indices,
    extra_topk_lens: another cache, with pages of any size, that is attended to as well. extra_layout: of that one; the
    same as layout by default, else "v41_fp4" beside v41, or "v41_fp4_planar" beside v41_planar. Indices and lengths may
    be int64: two small kernels bring each into int32, so that an index that names no token names none then either, and
    lengths are at most topk.

    scale: factor on q·k; default 192^-1/2, that of decompressed heads with 128 + 64 columns, and 512^-1/2 where keys
    have 512 columns. In layouts without rope columns it has to be given, as their models have heads of various widths.
    out, lse: where to write, (b, s, h, 512) bf16 and (b, h, s) float32. return_lse: also returns the natural
    log-sum-exp of scale · q·k, with which results over parts of the indices can be merged. A query token without tokens
    has out 0 and lse +inf; one with a score that is NaN has out and lse NaN. kernel, on: as of `mla_decode`.

    fixed_split: indices of a split, a multiple of 64, for results that do not depend on the rest of the batch, as of
    `mla_decode`. A request has the same bits alone, in any batch and at any place in it, whenever its query, its
    indices and how many of them count are the same. As many count as topk_lens says, and all that a row has room for
    where that is left out, so that with topk_lens rows may be of any width. With an extra cache the indices of both,
    each filled up to a multiple of 64, lie behind each other.

    A request may have thousands of query tokens. More than a version takes together are computed as requests of their
    own, and lse is copied then.

    Never waits for the device and can be captured in a CUDA graph once a call with the same shapes has been made.
    Returns out, or (out, lse). Raises `UserError` in one sentence for what does not fit. To `torch.compile` it is the
    operator `torch.ops.mla_var3.sparse_mla_decode`, or `sparse_mla_decode_into` where out or lse is given.
    """
    if extra_layout is not None and extra_cache is None:
        raise UserError("extra_layout was given without extra_cache: leave it out.")
    of_extra = beside_in("layout", layout, "extra_layout", extra_layout)
    inputs = _judged(q, layout, cache_scale, sink)
    b, s, h, _ = q.shape
    if (extra_cache is None) != (extra_indices is None):
        given, missing = ("extra_cache", "extra_indices") if extra_indices is None else ("extra_indices", "extra_cache")
        raise UserError(f"{given} was given without {missing}: give both, or neither.")
    if extra_topk_lens is not None and extra_indices is None:
        raise UserError("extra_topk_lens was given without extra_cache: leave it out.")
    if extra_cache is not None and layout_of(layout).one_scale:
        raise UserError(f"extra_cache is for caches that hold their scales: layout {layout} has one beside its cache.")
    sizes: list[int] = []
    cache: Any
    chosen: Any
    for prefix, cache, chosen, lens in (
        ("", kv_cache, indices, topk_lens), ("extra_", extra_cache, extra_indices, extra_topk_lens)
    ):  # fmt: skip
        if prefix and chosen is None:
            sizes += [0, 0, 0]
            continue
        name = f"{prefix}cache" if prefix else "kv_cache"
        pages = inputs[f"{prefix}cache"] = packed_pages(name, cache, of_extra if prefix else layout, q)
        inputs[f"{prefix}indices"] = integers(f"{prefix}indices", chosen, (b, s, None), q, LEAST, MOST, strided=True)
        if chosen.shape[2] < 1:
            raise UserError(f"{prefix}indices is {tuple(chosen.shape)}: give at least one index, -1 where none is.")
        if lens is not None:
            lens = integers(f"{prefix}topk_lens", lens, (b,), q, 0, chosen.shape[2])
            # Partial results have room for as many splits as a row of indices has.
            inputs[f"{prefix}lengths"] = lens if fixed_split is None else lens.clamp(max=chosen.shape[2])
        sizes += [max(1, len(pages) * pages.shape[1] // max(b, 1)), chosen.shape[2], pages.shape[1]]
    problem = _sparse(
        max(b, 1), s, h, *sizes, layout, topk_lens is not None, sink is not None, extra_topk_lens is not None,
        _scale(scale, layout), of_extra if extra_cache is not None else "",
    )  # fmt: skip
    both = _computed("sparse_mla_decode", problem, inputs, out, lse, fixed_split, kernel, on)
    return both if return_lse else both[0]


@traceable
def packed_mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    layout: str = "v32",
    scale: float | None = None,
    cache_scale: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    fixed_split: int | None = None,
    kernel: str | None = None,
    on: Engine | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q over each request's cached tokens, as of `mla_decode`, where the cache is packed.

    q (b, s, h, columns), kv_cache, layout (all but "bf16"), cache_scale, sink, scale, out, lse, return_lse,
    kernel and on: as of `sparse_mla_decode`. fixed_split: as of `mla_decode`. page_table (b, width) int32: entry j of a
    request is the page of its tokens j·page ..; entries past the last token are not read. seq_lens (b,) int32, read on
    the device, at most width · page; 0 is allowed. Both may be int64, as of `mla_decode`. Query token i sees keys
    0 .. length - s + i: several query tokens are causal, at the end of each request.

    Never waits for the device and can be captured in a CUDA graph once a call with the same shapes has been made.
    Returns out (b, s, h, 512), or (out, lse). Raises `UserError` in one sentence for what does not fit. To
    `torch.compile` it is the operator `torch.ops.mla_var3.packed_mla_decode`, or `packed_mla_decode_into` where out or
    lse is given.
    """
    if layout == "bf16":
        raise UserError("layout bf16 is not packed: mla_decode takes such a cache.")
    beside_in("layout", layout)
    inputs = _judged(q, layout, cache_scale, sink)
    b, s, h, _ = q.shape
    page = (pages := packed_pages("kv_cache", kv_cache, layout, q)).shape[1]
    table = integers("page_table", page_table, (b, None), q, LEAST, MOST, strided=True)
    if table.shape[1] < 1:
        raise UserError(f"page_table is {tuple(table.shape)}: give it at least one column.")
    tokens = table.shape[1] * page
    if tokens > limits.MOST_TOKENS:
        raise UserError(f"{limits.too_long(tokens)}.")
    lengths = integers("seq_lens", seq_lens, (b,), q, 0, tokens)
    inputs |= {"cache": pages, "page_table": table, "seq_lens": lengths}
    problem = _dense(max(b, 1), s, h, tokens, page, layout, sink is not None, _scale(scale, layout))
    both = _computed("packed_mla_decode", problem, inputs, out, lse, fixed_split, kernel, on)
    return both if return_lse else both[0]


def _judged(
    q: torch.Tensor, layout: str, cache_scale: torch.Tensor | None, sink: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Those of a problem's inputs that need no cache."""
    import torch

    judge("q", q, (None, None, None, layout_of(layout).columns), torch.bfloat16, q)
    if (cache_scale is None) == (one := layout_of(layout).one_scale):
        raise UserError(f"layout {layout} {'needs' if one else 'has no'} cache_scale, which is of flat.")
    inputs = {"q": rows_of(q, VECTOR)}
    if cache_scale is not None:
        inputs["scale"] = compact(judge("cache_scale", cache_scale, (1,), torch.float32, q))
    if sink is not None:
        inputs["sink"] = compact(judge("sink", sink, (q.shape[2],), torch.float32, q))
    return inputs


def beside_in(name: str, layout: str, extra_name: str = "", extra: str | None = None) -> str:
    """The layout of an extra cache, None for that of the cache. Raises `UserError`, with the name of the caller's
    argument, where the two do not go together or the cache has a layout of extra caches alone."""
    try:
        return _beside_in(name, layout, extra_name, extra)
    except TypeError:  # a list, say, which has no hash
        wrong, value = (name, layout) if not isinstance(layout, str) else (extra_name, extra)
        raise UserError(f"{wrong} is a {type(value).__name__}: pass the name of a layout, as v32.") from None


@functools.lru_cache(maxsize=256)
def _beside_in(name: str, layout: str, extra_name: str, extra: str | None) -> str:
    for part, other in ((name, ""), (extra_name, extra or "")):
        try:
            found = beside(layout, other).name
        except UserError as error:
            raise UserError(f"{part}: {error}") from None
    return found


def _scale(given: float | None, layout: str) -> float:
    if given is None:
        if layout in NO_ROPE:
            raise UserError(f"scale has no default in layout {layout}: pass that of the model's decompressed heads.")
        return VALUES**-0.5 if layout_of(layout).columns == VALUES else 192.0**-0.5
    return number("scale", given)


def _computed(
    function: str,
    problem: SparseProblem,
    inputs: Mapping[str, torch.Tensor],
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    fixed_split: int | None,
    kernel: str | None,
    on: Engine | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), the caller's or new ones."""
    import torch

    q, names = inputs["q"], input_names(problem)
    b, s, h, _ = q.shape
    target = result("out", out, (b, s, h, VALUES), q.dtype, q.device, strided=True)
    sums = result("lse", lse, (b, h, s), torch.float32, q.device, strided=True)
    if b and s > TOGETHER and not problem.paged and kernel is None:
        hardware = engine_of(on, q, "q", function).hardware(q.device)
        if not _fits(problem, hardware, fixed_split):
            _by_token(function, problem, inputs, (target, sums), fixed_split, on)
            return target, sums
    apart = [i for i, name in enumerate(names) if name in STRIDED and not inputs[name].is_contiguous()]
    serve(
        function, problem, [inputs[name] for name in names], (target, sums), kernel, on, fixed_split=fixed_split,
        apart=apart, apart_out=not (target.is_contiguous() and sums.is_contiguous()),
    )  # fmt: skip
    return target, sums


@functools.lru_cache(maxsize=1024)
def _fits(problem: SparseProblem, device: Device | None, fixed_split: int | None) -> bool:
    """Whether the version that is picked for as many requests of one query token takes those of a request together. If
    none is, whatever is picked for the problem computes it."""
    try:
        way = way_for(_apart(problem), device, fixed_split=fixed_split)
    except Unsupported:
        return True
    plan = way.make(problem, device)
    return bool(plan.supported()) and bool(plan.feasible())


def _apart(problem: SparseProblem) -> SparseProblem:
    """The problem with a request for each query token, all of which attend to the same caches."""
    tokens = {name: max(1, getattr(problem, name) // problem.s) for name in ("t", "extra_t") if getattr(problem, name)}
    return problem.replace(b=problem.b * problem.s, s=1, **tokens)


def _by_token(
    function: str,
    problem: SparseProblem,
    inputs: Mapping[str, torch.Tensor],
    outputs: tuple[torch.Tensor, torch.Tensor],
    fixed_split: int | None,
    on: Engine | None,
) -> None:
    """Computes (out, lse) of `_apart`."""
    (out, lse), (b, s, h, _) = outputs, inputs["q"].shape
    each = {
        name: x.flatten(0, 1).unsqueeze(1) if name in ROWS else x.repeat_interleave(s) if name in COUNTS else x
        for name, x in inputs.items()
    }
    of_rows = out.flatten(0, 1).unsqueeze(1)  # a copy where the strides of requests and tokens do not allow a view
    sums = lse.new_empty((b * s, h, 1))
    _computed(function, _apart(problem), each, of_rows, sums, fixed_split, None, on)
    if of_rows.data_ptr() != out.data_ptr():
        out.copy_(of_rows.view(out.shape))
    lse.copy_(sums.view(b, s, h).transpose(1, 2))


# One object for equal problems: making and judging one takes longer than all else that a call does on the host.
@functools.lru_cache(maxsize=4096)
@named_as(
    b="q (b, s, h, columns): b", s="q (b, s, h, columns): s", h="q (b, s, h, columns): h",
    t="kv_cache (pages, page, ...): pages · page", topk="indices (b, s, topk): topk",
    page="kv_cache (pages, page, ...): page", extra="extra_indices (b, s, topk): topk",
    extra_t="extra_cache (pages, page, ...): pages · page", extra_page="extra_cache (pages, page, ...): page",
)  # fmt: skip
def _sparse(
    b: int,
    s: int,
    h: int,
    t: int,
    topk: int,
    page: int,
    extra_t: int,
    extra: int,
    extra_page: int,
    layout: str,
    lengths: bool,
    sink: bool,
    extra_lengths: bool,
    scale: float,
    extra_layout: str,
) -> SparseProblem:
    problem = SparseProblem(
        b=b, s=s, h=h, t=t, topk=topk, layout=layout, page=page, lengths=lengths, sink=sink, extra=extra,
        extra_t=extra_t, extra_page=extra_page, extra_lengths=extra_lengths, softmax_scale=scale,
        extra_layout=extra_layout,
    )  # fmt: skip
    return _counted(problem)


@functools.lru_cache(maxsize=4096)
@named_as(
    b="q (b, s, h, columns): b", s="q (b, s, h, columns): s", h="q (b, s, h, columns): h",
    t="page_table and kv_cache: width · page", page="kv_cache (pages, page, ...): page",
)  # fmt: skip
def _dense(b: int, s: int, h: int, t: int, page: int, layout: str, sink: bool, scale: float) -> SparseProblem:
    problem = SparseProblem(b=b, s=s, h=h, t=t, layout=layout, page=page, sink=sink, softmax_scale=scale, paged=True)
    return _counted(problem)


def _counted(problem: SparseProblem) -> SparseProblem:
    """The problem; raises `UserError` for sizes that no version takes."""
    if not (counted := limits.sparse_sizes(problem)):
        raise UserError(f"{counted.reason}.")
    return problem
