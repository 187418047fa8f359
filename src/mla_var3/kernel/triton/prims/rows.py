"""Two kernels for prefixes: one gathers the cached tokens of requests behind one another, latents as one tensor and
rope columns in every head's key; the other merges results of attention over two parts of the keys."""

from __future__ import annotations

import triton
import triton.language as tl

from mla_var3.kernel.triton.prims.numerics import round_to

MOST_REQUESTS = 1024  # that a call may have: one program holds all of their lengths


@triton.jit(do_not_specialize=["b", "first", "end", "rows", "width", "pages"])
def gather_rows(
    Cache,  # (pages, PAGE, K + P), 16-bit, global; pages may lie apart
    Table,  # (b, width) int32, global
    Lens,  # (b,) int32: cached tokens of a request, its new ones included
    OfQ,  # (b + 1,) int32: where the new tokens of each begin
    Latents,  # (rows, K), contiguous, global: written
    Keys,  # (rows, H, D + P), contiguous, global: the last P columns of all heads are written
    OfK,  # (b + 1,) int32, global: written
    b,
    first,  # of the prefixes behind one another: the piece's first token
    end,  # and the one behind its last; not read where OWN
    rows,
    width,
    pages,
    page_stride,
    OWN: tl.constexpr,  # the last piece: the rest of the prefixes, each followed by its request's new tokens
    PAGE: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    LATENT_COLUMNS: tl.constexpr,  # powers of two of at least K, P and b
    ROPE_COLUMNS: tl.constexpr,
    REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (blocks of ROWS rows,). Every program finds its rows' requests for itself; the first one writes OfK."""
    i = tl.arange(0, REQUESTS)
    there = i < b
    begin = tl.load(OfQ + i, mask=there, other=0)
    new = tl.where(there, tl.load(OfQ + i + 1, mask=there, other=0) - begin, 0)
    before = tl.where(there, tl.maximum(tl.load(Lens + i, mask=there, other=0) - new, 0), 0)
    ends = tl.cumsum(before, 0)
    begins = ends - before
    start = tl.minimum(tl.maximum(first - begins, 0), before)
    if OWN:
        count = before - start + new
    else:
        count = tl.minimum(tl.maximum(ends, first), end) - tl.minimum(tl.maximum(begins, first), end)
    ends = tl.cumsum(count, 0)
    if tl.program_id(0) == 0:
        tl.store(OfK + 1 + i, ends, mask=there)
        tl.store(OfK + i, 0, mask=i == 0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = tl.sum(tl.where((ends[None, :] <= row[:, None]) & there[None, :], 1, 0), 1)
    inside = (request < b) & (row < rows)
    mine = i[None, :] == request[:, None]
    token = row + tl.sum(tl.where(mine, (start - ends + count)[None, :], 0), 1)
    token = tl.minimum(tl.maximum(token, 0), width * PAGE - 1)
    page = tl.load(Table + tl.cast(request, tl.int64) * width + token // PAGE, mask=inside, other=0)
    page = tl.minimum(tl.maximum(page, 0), pages - 1)
    source = Cache + tl.cast(page, tl.int64) * page_stride + tl.cast(token % PAGE, tl.int64) * (K + P)
    row = tl.cast(row, tl.int64)
    column = tl.arange(0, LATENT_COLUMNS)
    taken = inside[:, None] & (column < K)[None, :]
    tl.store(
        Latents + row[:, None] * K + column[None, :], tl.load(source[:, None] + column[None, :], mask=taken), taken
    )
    column = tl.arange(0, ROPE_COLUMNS)
    taken = inside[:, None] & (column < P)[None, :]
    rope = tl.load(source[:, None] + (K + column)[None, :], mask=taken)
    for head in range(H):
        tl.store(Keys + (row * H + head)[:, None] * (D + P) + (D + column)[None, :], rope, taken)


@triton.jit(do_not_specialize=["n", "first_stride", "second_stride", "stride"])
def merge_rows(
    First,  # (n, H, D), contiguous, global
    FirstLse,  # (H, n) float32, global; heads may lie apart
    Second,  # (n, H, D), contiguous, global
    SecondLse,  # (H, n) float32, global; heads may lie apart
    Out,  # (n, H, D), contiguous, global: written
    Lse,  # (H, n) float32, global; heads may lie apart: written
    n,
    first_stride,  # between heads of FirstLse
    second_stride,
    stride,
    H: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two of at least D
    ROWS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (blocks of ROWS rows,): a row is a query token and a head. Out and Lse become those over the keys of both.
    An LSE of +inf or -inf is that of a row that saw no key, whose out is 0; one that is NaN makes the row NaN.

    What is written lies elsewhere than what is read. Every warp loads the LSEs of the rows whose columns it weighs, one
    warp stores those of all rows of the program, and Triton puts no barrier between the two. In place, that warp would
    overwrite LSEs that others have still to load.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    LN_2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < tl.cast(n, tl.int64) * H
    head, token = (row % H).to(tl.int64), row // H
    column = tl.arange(0, COLUMNS)
    at = tl.cast(row, tl.int64)[:, None] * D + column[None, :]
    taken = inside[:, None] & (column < D)[None, :]
    none: tl.constexpr = float("-inf")
    first = tl.load(FirstLse + head * first_stride + token, mask=inside, other=0.0)
    second = tl.load(SecondLse + head * second_stride + token, mask=inside, other=0.0)
    first = tl.where(tl.abs(first) == float("inf"), none, first)
    second = tl.where(tl.abs(second) == float("inf"), none, second)
    most = tl.maximum(first, second)
    most = tl.where(most > none, most, 0.0)  # where neither saw a key
    mine, other = tl.exp2((first - most) * LOG2_E), tl.exp2((second - most) * LOG2_E)
    total = mine + other
    whole = tl.where(total == 0.0, 1.0, total)
    left = tl.load(First + at, mask=taken, other=0.0).to(tl.float32)
    right = tl.load(Second + at, mask=taken, other=0.0).to(tl.float32)
    made = (left * mine[:, None] + right * other[:, None]) / whole[:, None]
    tl.store(Out + at, round_to(made, Out.dtype.element_ty, INTERPRET), taken)
    merged = tl.where(total == 0.0, none, most + tl.log2(whole) * LN_2)
    tl.store(Lse + head * stride + token, merged, mask=inside)
