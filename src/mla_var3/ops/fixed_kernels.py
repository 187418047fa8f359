"""The two small kernels of the fixed-split mode, in Triton: spreading long requests over their runs, joining these."""

# mypy: ignore-errors
# Bodies are traced by Triton, not run: no type stub describes what they do.

from __future__ import annotations

import math

import triton
import triton.language as tl

from mla_var3.kernel.triton.prims.numerics import round_to

LN2 = tl.constexpr(math.log(2.0))


@triton.jit(do_not_specialize=["width", "requests", "run_pages"])
def spread(
    Q,  # (requests, tokens, h, width of a row) 16-bit, contiguous
    Table,  # (requests, width) int32, contiguous
    Lens,  # (requests,) int32
    RunQ,  # (runs · requests · TOKENS, row) 16-bit: the query rows of every run that has keys
    RunTable,  # (runs · requests · TOKENS, run_pages) int32
    RunLens,  # (runs · requests · TOKENS,) int32
    ShortLens,  # (requests,) int32: lengths of at most SHORT tokens; 0 for longer requests
    width,
    requests,
    run_pages,
    TOKENS: tl.constexpr,  # query tokens that become requests of their own (1: a request stays one)
    SHORT: tl.constexpr,  # requests of up to as many tokens have no runs
    ROW: tl.constexpr,  # elements of q of one run
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGES: tl.constexpr,  # pages copied at a time
):
    """Run c of request r, query token t of it: the keys c · run_pages · PAGE and following, as many as there are."""
    item = tl.program_id(0)
    source = item % (requests * TOKENS)
    run = item // (requests * TOKENS)
    request = source // TOKENS
    token = source % TOKENS
    length = tl.load(Lens + request)
    keys = tl.where(length > SHORT, length - (TOKENS - 1) + token - run * run_pages * PAGE, 0)
    own = tl.minimum(tl.maximum(keys, 0), run_pages * PAGE)
    if tl.program_id(1) == 0:
        tl.store(RunLens + item, own)
        if item < requests * TOKENS:
            tl.store(ShortLens + request, tl.where(length > SHORT, 0, length))
        for first in range(0, run_pages, PAGES):
            j = first + tl.arange(0, PAGES)
            used = j * PAGE < own
            row = Table + request.to(tl.int64) * width + run * run_pages
            page = tl.load(row + j, mask=used, other=0)
            tl.store(RunTable + item.to(tl.int64) * run_pages + j, page, mask=j < run_pages)
    if own > 0:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        rows = tl.load(Q + source.to(tl.int64) * ROW + at, mask=at < ROW)
        tl.store(RunQ + item.to(tl.int64) * ROW + at, rows, mask=at < ROW)


@triton.jit(do_not_specialize=["runs", "requests"])
def join(
    PartOut,  # (2, runs · requests · TOKENS, h_kv, rows, K) fp32: both halves of every run
    PartLse,  # (2, runs · requests · TOKENS, h_kv, rows) fp32, log2 domain; -inf: no keys
    Lens,  # (requests,) int32
    Out,  # (requests, S, H, K) 16-bit
    Lse,  # (requests, H, S) fp32, natural log
    runs,
    requests,
    S: tl.constexpr,
    H: tl.constexpr,
    GROUP: tl.constexpr,  # heads that share a cache
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # K up to a power of two
    TOKENS: tl.constexpr,  # as of `spread`
    SHORT: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Out = Σ wᵢ Oᵢ / Σ wᵢ with wᵢ = 2^(lseᵢ - max), over the runs in their order and the halves of each in theirs.

    A part without keys takes no part in any sum, so more of them change no bit. Short requests are left as they are.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    request = row // S
    token = row % S
    if tl.load(Lens + request) > SHORT:
        ROWS: tl.constexpr = GROUP * (1 if TOKENS > 1 else S)  # of a cache head in one item
        HEADS: tl.constexpr = H // GROUP
        items = tl.cast(requests, tl.int64) * TOKENS  # of one run
        item = row if TOKENS > 1 else request
        inside = head % GROUP if TOKENS > 1 else token * GROUP + head % GROUP
        source = (item.to(tl.int64) * HEADS + head // GROUP) * ROWS + inside
        run_stride = items * (HEADS * ROWS)
        half_stride = run_stride * runs
        best = -float("inf")
        for i in range(2 * runs):
            best = tl.maximum(best, tl.load(PartLse + source + i // 2 * run_stride + i % 2 * half_stride))
        shift = tl.where(best == -float("inf"), 0.0, best)
        columns = tl.arange(0, COLUMNS)
        total = 0.0
        acc = tl.zeros([COLUMNS], dtype=tl.float32)
        for i in range(2 * runs):
            at = source + i // 2 * run_stride + i % 2 * half_stride
            weight = tl.exp2(tl.load(PartLse + at) - shift)
            value = tl.load(PartOut + at * K + columns, mask=tl.where(weight > 0.0, columns, K) < K, other=0.0)
            acc = tl.where(weight > 0.0, acc + weight * value, acc)
            total = total + weight
        out = acc / tl.where(total > 0.0, total, 1.0)
        target = (row.to(tl.int64) * H + head) * K + columns
        tl.store(Out + target, round_to(out, DTYPE, INTERPRET), mask=columns < K)
        lse = (shift + tl.log2(tl.where(total > 0.0, total, 1.0))) * LN2
        tl.store(Lse + (request * H + head) * S + token, tl.where(total > 0.0, lse, float("inf")))
