"""The lightning indexer as functions: which tokens a query token attends to.

    logits  = indexer_logits(q, cache, weights, ends, page_table=page_table)       how much each token is wanted
    indices = topk_indices(logits, ends, 2048, page_table=page_table)              the 2,048 that are wanted most
    indices = indexer_topk(q, cache, weights, ends, 2048, page_table=page_table)   both, logits in parts
    out     = sparse_mla_decode(queries, kv_cache, indices.view(b, s, 2048), ...)

`index_append` writes new tokens' keys into the index cache.

Each picks a version as `mla_decode` does, is planned once for its shapes and strides, never waits for the device, and
can be captured in a CUDA graph once a call with the same shapes has been made; lengths are read on the device.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.ops.request import (
    LEAST,
    MOST,
    dtype_name,
    integers,
    judge,
    judge_places,
    named_as,
    plain_strides,
    rows_of,
)
from mla_var3.ops.tracing import traceable
from mla_var3.ops.ways import compute, engine_of, serve, way_for
from mla_var3.workload.index_append import ROPE, IndexAppendProblem, views
from mla_var3.workload.indexer_logits import PAGE, TOKEN_BYTES, D, IndexerLogitsProblem, new_logits
from mla_var3.workload.indexer_topk import IndexerTopkProblem
from mla_var3.workload.topk import TopkProblem

if TYPE_CHECKING:
    import torch

    from mla_var3.device import Device
    from mla_var3.ops.engine import Engine, Way
    from mla_var3.workload import Problem

#: Most bytes of logits of a part of `indexer_topk`, unless one request has more.
WORKSPACE = 256 << 20
#: Columns of a page table for each token that is chosen, up to which `indexer_topk` leaves out logits of query tokens
#: that choose all of theirs (`beyond` of mqa_logits_v4). What is known without the device is how long rows can be, not
#: how long they are. On an H200 128 requests of up to twice as many tokens as are chosen take 0.85 of the time, and
#: requests that are all longer 1.00 to 1.01; two in 64 that are not pay for it (devlogs/indexer_topk). The
#: longer rows can be, the less of all tokens is in such as choose all of theirs.
LEFT_OUT = 2


@traceable
def indexer_logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    ends: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    clean: bool = False,
    kernel: str | None = None,
    on: Engine | None = None,
) -> torch.Tensor:
    """logits[i, j] = scale[j] · Σ over heads of weights[i, h] · relu(q[i, h] · key[j]), starts[i] <= j < ends[i].

    Codes are e4m3, in torch.float8_e4m3fn or torch.uint8; products and sums are float32. Two forms:

    With page_table: q (b, s, h, 128). keys: the index cache, (pages, 64, 132) of torch.uint8, or with a dimension of 1
    in front of the last: the bytes of a page are 64 rows of 128 codes, then 64 float32 scales. Pages may lie further
    apart, by a multiple of 16 bytes. weights (b · s, h) float32. ends (b, s), and for s = 1 also (b,): how many cached
    tokens each query token sees. page_table (b, width). Returns (b · s, 64 · width).

    Without: q (n, h, 128), keys (t, 128), scales (t,) float32, weights (n, h), ends (n,), starts (n,), by default 0.
    Returns (n, t).

    Integers are int32 or int64. Ranges are cut to the columns. What is out of a token's range is not written and may
    hold anything; with clean it is -inf, which costs a pass over the logits. No logit is NaN: a product that is NaN
    counts as 0, and a sum that is NaN becomes -inf. dtype: torch.float32 (default) or torch.bfloat16. Rows of the
    result begin at multiples of 256 bytes. h is 16, 32 or 64. kernel, on: as of `mla_decode`. Raises `UserError` in one
    sentence for what does not fit.
    """
    problem, inputs = _judged(q, keys, weights, ends, starts, scales, page_table, dtype)
    rows = problem.rows if len(q) else 0
    made = new_logits(problem, inputs[0], rows, problem.columns)
    if clean:
        made.fill_(float("-inf"))
    serve("indexer_logits", problem, inputs, (made,), kernel, on)
    return made


@traceable
def topk_indices(
    logits: torch.Tensor,
    ends: torch.Tensor,
    k: int,
    *,
    starts: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    kernel: str | None = None,
    on: Engine | None = None,
) -> torch.Tensor:
    """The columns of the k largest logits of each row among starts[i] <= j < ends[i]: (rows, k) int32.

    Exact: of equal logits at the k-th place those of the lowest columns are chosen. -0 equals +0, and NaN counts as
    -inf. The order of the k is not specified, but is the same from call to call. Rows with fewer logits than k give all
    of them, and -1 behind.

    logits (rows, t) of torch.float32 or torch.bfloat16, whose rows may lie further apart. ends and starts (rows,),
    int32 or int64; starts is 0 by default. page_table (b, width): of pages of 64 tokens, at least t / 64; row i is of
    request i // (rows / b), and gives slots of the cache, page · 64 + place in the page, as `sparse_mla_decode` takes
    them. ends may then be (b, s). k is at most 2,048. kernel, on: as of `mla_decode`. Raises `UserError` in one
    sentence for what does not fit.
    """
    import torch

    judge("logits", logits, (None, None), None, logits)
    names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    if logits.dtype not in names:
        raise UserError(f"logits are {logits.dtype}: pass torch.float32 or torch.bfloat16.")
    n, t = logits.shape
    _require_count(k)
    if not t:
        return logits.new_full((n, k), -1, dtype=torch.int32)
    rows = rows_of(logits)
    out = torch.empty((n, k), dtype=torch.int32, device=logits.device)
    if page_table is None:
        high = integers("ends", ends, (n,), logits, 0, t)
        low = (
            logits.new_zeros(n, dtype=torch.int32) if starts is None else integers("starts", starts, (n,), logits, 0, t)
        )
        problem = _topk(max(n, 1), 1, t, k, False, names[logits.dtype])
        serve("topk_indices", problem, (rows, low, high), (out,), kernel, on, first="logits")
        return out
    if starts is not None:
        raise UserError("starts and page_table are not taken together: rows of a cache begin at its first token.")
    table = integers("page_table", page_table, (None, None), logits, LEAST, MOST, strided=True)
    b, width = table.shape
    if not b or n % b:
        raise UserError(f"page_table has {b} rows for the {n} rows of logits: give one for each request.")
    if width * PAGE < t:
        raise UserError(f"page_table has {width} columns, pages of {PAGE} tokens, and logits {t}: give as many pages.")
    high = integers("ends", _of_requests(ends, b, n // b), (b, n // b), logits, 0, t)
    problem = _topk(b, max(n // b, 1), t, k, True, names[logits.dtype])
    serve("topk_indices", problem, (rows, high, table), (out,), kernel, on, first="logits")
    return out


@traceable
def indexer_topk(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    ends: torch.Tensor,
    k: int,
    *,
    starts: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    kernel: str | None = None,
    on: Engine | None = None,
) -> torch.Tensor:
    """The k cached tokens that each query token wants most, (query tokens, k) int32, with -1 behind those of a query
    token that sees fewer: what `topk_indices` returns for the scores that `indexer_logits` computes.

    The arguments are those of the two functions. With page_table the indices are slots of the cache, else keys. Logits
    are float32. Where they are more than 256 MiB, query tokens (with page_table, requests) are taken in parts of up to
    256 MiB, one after the other; the logits of up to three parts were seen to be allocated at once. A single request
    with page_table has 256 · s bytes of logits for each column of the table, which may be more than a part.

    Where there are at most k keys, or the page table has room for at most k tokens, no logits are computed. Those of
    query tokens that see at most k, which get all of their tokens, are left out where the page table has room for up to
    2 k, and of n query tokens over t keys where t - n < k.

    kernel names a version of workload indexer_topk, which computes everything in one call; it takes no parts, and
    refuses more than 256 MiB of logits.
    """
    import torch

    problem, inputs = _judged(q, keys, weights, ends, starts, scales, page_table, None)
    _require_count(k)
    if kernel is not None:
        of = _both(*(getattr(problem, name) for name in ("b", "s", "t", "heads", "table")), k)
        out = torch.empty((problem.rows if len(q) else 0, k), dtype=torch.int32, device=q.device)
        serve("indexer_topk", of, inputs, (out,), kernel, on)
        return out
    each = problem.s if problem.table else 1  # rows of logits of an entry of q
    step = max(1, WORKSPACE // (4 * problem.columns * each))
    served = engine_of(on, inputs[0], "q", "indexer_topk")
    found = []
    for first in range(0, max(len(q), 1), step):
        last = min(first + step, len(q))
        part, rows = slice(first, last), slice(first * each, last * each)
        count = max(last - first, 1)
        if problem.table:
            some = _logits(count, problem.s, problem.t, problem.heads, True, problem.dtype)
            codes, cache, factors, high, table = inputs
            of_part: tuple[torch.Tensor, ...] = (codes[part], cache, factors[rows], high[part], table[part])
            ranges = {"page_table": table[part]}
        else:
            some = _logits(1, count, problem.t, problem.heads, False, problem.dtype)
            codes, cached, of_keys, factors, low, high = inputs
            of_part = (codes[part], cached, of_keys, factors[rows], low[part], high[part])
            ranges = {"starts": low[part]}
        logits = new_logits(some, codes, (last - first) * each, problem.columns)
        if len(logits):
            # Heads that none takes are told of, always.
            way = _scored(some, problem.rows, k, served.hardware(q.device))
            if problem.columns > k:
                compute(served, way, some, of_part, (logits,))
        found.append(topk_indices(logits, high[part], k, on=on, **ranges))
    return found[0] if len(found) == 1 else torch.cat(found)


def launched(problem: IndexerTopkProblem, device: Device) -> list[tuple[Problem, Way]]:
    """What `indexer_topk` launches for a problem whose logits are one part, each with how it is computed: the logits'
    kernel, unless no query token can see more than k tokens, and the top-k's."""
    k, table = problem.topk, problem.table
    b, s = (problem.b, problem.s) if table else (problem.rows, 1)
    scores = _logits(problem.b, problem.s, problem.t, problem.heads, table, problem.dtype)
    choice = _topk(b, s, scores.columns, k, table, problem.dtype)
    logits = [(scores, _scored(scores, scores.rows, k, device))] if scores.columns > k else []
    return [*logits, (choice, way_for(choice, device))]


def _scored(problem: IndexerLogitsProblem, rows: int, k: int, device: Device | None) -> Way:
    """How the logits are computed of which each query token's k largest are chosen. rows: query tokens of the call."""
    # The first of n query tokens that are a prompt's last sees t - n keys before it.
    short = problem.columns <= LEFT_OUT * k if problem.table else problem.columns - rows < k
    return way_for(problem, device, knobs=(("beyond", k),) if short else ())


@traceable
def index_append(
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    cache: torch.Tensor,
    *,
    interleaved: bool = False,
    powers: bool = True,
    kernel: str | None = None,
    on: Engine | None = None,
) -> None:
    """Norms the indexer's keys of new tokens, turns them (RoPE), quantises them, and writes them into the index cache.

    k (n, 128) bf16, projected, whose rows may lie apart. weight, bias (128,) float32: of the LayerNorm over its
    columns, with eps 1e-6. positions (n,) and slots (n,), both int32 or both int64: the first 64 columns of token i are
    turned by table[positions[i]], and the token is written to row slots[i] % 64 of page slots[i] // 64. table
    (positions, 64) float32: cosines, then sines, as of `rope_append`. cache (pages, 64, 132) of torch.uint8, as of
    `indexer_logits`. interleaved: columns 2i and 2i + 1 are a pair, as in GLM-5, else i and i + 32, as in DeepSeek
    V3.2's indexer. powers: whether scales are rounded up to powers of two. kernel, on: as of `mla_decode`.

    Normed and turned keys are rounded to bf16, as the models do; the scale of a token is its largest magnitude, at
    least 1e-4, over 448. No Hadamard matrix is applied: leave it out of the queries too. A token whose slot is
    negative, or past the last row of the cache, is not written. Raises `UserError` in one sentence for what does not
    fit.
    """
    import torch

    judge("k", k, (None, D), torch.bfloat16, k)
    n = len(k)
    factors = [aligned(judge(name, x, (D,), torch.float32, k)) for name, x in (("weight", weight), ("bias", bias))]
    judge_places(positions, slots, table, n, ROPE, k)
    rows, rest = key_rows(k)
    problem = _append(
        max(n, 1), rest, bool(interleaved), bool(powers), len(table), str(positions.dtype).removeprefix("torch.")
    )
    inputs = (rows, *factors, positions.contiguous(), slots.contiguous(), aligned(table))
    serve("index_append", problem, inputs, views(index_cache_of("cache", cache, k)), kernel, on, first="k")


# ---------------------------------------------------------------- in common
def _judged(
    q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, starts: torch.Tensor | None,
    scales: torch.Tensor | None, page_table: torch.Tensor | None, dtype: torch.dtype | None,
) -> tuple[IndexerLogitsProblem, tuple[torch.Tensor, ...]]:  # fmt: skip
    """The problem of a call, and its inputs as the workload has them."""
    import torch

    word = dtype_name(dtype or torch.float32, "dtype", ("fp32", "bf16"), "logits are torch.float32 or torch.bfloat16")
    if not isinstance(weights, torch.Tensor) or weights.dim() < 2:
        raise UserError(
            "weights is no tensor of a weight for each query token and head: pass (query tokens, h) float32."
        )
    if page_table is None:
        codes = _codes("q", q, (None, None, D), q)
        n, h, _ = codes.shape
        cached = _codes("keys", keys, (None, D), q)
        t = len(cached)
        if not t:
            raise UserError("keys has no rows: give at least one key.")
        if scales is None:
            raise UserError("scales is missing: pass (t,) float32, the scale of each key, or page_table with a cache.")
        of_keys = judge("scales", scales, (t,), torch.float32, q).contiguous()
        factors = aligned(judge("weights", weights, (n, h), torch.float32, q))
        high = integers("ends", ends, (n,), q, 0, t)
        low = q.new_zeros(n, dtype=torch.int32) if starts is None else integers("starts", starts, (n,), q, 0, t)
        return _logits(1, max(n, 1), t, h, False, word), (codes, cached, of_keys, factors, low, high)
    for name, other in (("scales", scales), ("starts", starts)):
        if other is not None:
            raise UserError(f"{name} and page_table are not taken together: pages hold scales and begin at token 0.")
    codes = _codes("q", q, (None, None, None, D), q)
    b, s, h, _ = codes.shape
    table = integers("page_table", page_table, (b, None), q, LEAST, MOST, strided=True)
    if not table.shape[1]:
        raise UserError("page_table has no columns: give at least one page for a request.")
    factors = aligned(judge("weights", weights.flatten(0, -2), (b * s, h), torch.float32, q))
    high = integers("ends", _of_requests(ends, b, s), (b, s), q, 0, table.shape[1] * PAGE)
    problem = _logits(max(b, 1), s, table.shape[1] * PAGE, h, True, word)
    return problem, (codes, index_cache_of("keys", keys, q), factors, high, table)


def _codes(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], like: torch.Tensor) -> torch.Tensor:
    """Codes as uint8, contiguous from a multiple of 16 bytes on: a view, or a copy."""
    import torch

    judge(name, tensor, shape, None, like)
    if tensor.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise UserError(f"{name} is {tensor.dtype}: codes are torch.float8_e4m3fn, or the same bits in torch.uint8.")
    return aligned(tensor.detach().view(torch.uint8))


def key_rows(k: torch.Tensor) -> tuple[torch.Tensor, int]:
    """New keys (n, D) bf16 as kernels read them, and the elements between the end of a row and the next one: a copy
    where rows do not begin at multiples of 16 bytes."""
    import torch

    rows = rows_of(k)
    rest = max(rows.stride(0) - D, 0) if len(k) > 1 else 0
    if rest % 8 or rows.data_ptr() % 16:
        return rows.clone(memory_format=torch.contiguous_format), 0
    return rows, rest


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that begins at a multiple of 16 bytes: itself, or a copy."""
    import torch

    if tensor.is_contiguous() and not tensor.data_ptr() % 16:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _require_count(k: Any) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise UserError(f"k is {k!r}: pass how many are to be chosen, a whole number of at least 1.")


def _of_requests(ends: Any, b: int, s: int) -> Any:
    """ends (b · s,) as (b, s); others as they are, to be judged."""
    import torch

    return ends.view(b, s) if isinstance(ends, torch.Tensor) and ends.shape == (b * s,) else ends


def index_cache_of(name: str, cache: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """An index cache as kernels take it: a view (pages, 64, 132) of one that is so, or (pages, 64, 1, 132), of
    torch.uint8 and on the device of `like`. Raises `UserError` for another one, and where a page's bytes do not lie
    behind each other or pages do not begin at multiples of 16 bytes; `name` is what the error calls it."""
    import torch

    flat = cache.squeeze(2) if isinstance(cache, torch.Tensor) and cache.dim() == 4 and cache.shape[2] == 1 else cache
    flat = plain_strides(judge(name, flat, (None, PAGE, TOKEN_BYTES), torch.uint8, like))
    step = flat.stride(0)
    inner = flat.stride()[1:] == (TOKEN_BYTES, 1)
    if not inner or step < PAGE * TOKEN_BYTES or step % 16 or flat.data_ptr() % 16:
        raise UserError(
            f"{name} has strides {tuple(flat.stride())} and starts at {flat.data_ptr():#x}: the {PAGE * TOKEN_BYTES} "
            "bytes of a page must lie behind each other, and pages begin at multiples of 16 bytes."
        )
    return flat


@functools.lru_cache(maxsize=4096)
@named_as(tokens="k: n", positions="table: positions")
def _append(n: int, rest: int, interleaved: bool, powers: bool, positions: int, index: str) -> IndexAppendProblem:
    return IndexAppendProblem(
        tokens=n, rest=rest, interleaved=interleaved, powers=powers, positions=positions, index=index
    )


@functools.lru_cache(maxsize=4096)
@named_as(b="q: b", s="q: s", t="keys: t", heads="q: h")
def _logits(b: int, s: int, t: int, h: int, table: bool, dtype: str) -> IndexerLogitsProblem:
    return IndexerLogitsProblem(b=b, s=s, t=t, heads=h, table=table, dtype=dtype)


@functools.lru_cache(maxsize=4096)
@named_as(b="logits: rows", s="logits: rows of a request", t="logits: t", topk="k")
def _topk(b: int, s: int, t: int, k: int, table: bool, dtype: str) -> TopkProblem:
    return TopkProblem(b=b, s=s, t=t, topk=k, table=table, dtype=dtype)


@functools.lru_cache(maxsize=4096)
@named_as(b="q: b", s="q: s", t="keys: t", heads="q: h", topk="k")
def _both(b: int, s: int, t: int, h: int, table: bool, k: int) -> IndexerTopkProblem:
    return IndexerTopkProblem(b=b, s=s, t=t, heads=h, table=table, topk=k)
