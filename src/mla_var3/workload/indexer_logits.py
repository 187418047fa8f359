"""Logits of DeepSeek's lightning indexer: how much a query token wants each cached token, in FP8.

    logits[i, j] = scale[j] · Σ over heads of weights[i, h] · relu(q[i, h] · key[j])         starts[i] <= j < ends[i]

Codes of q and key are e4m3, 128 columns, in tensors of uint8; scale (one a key), weights and sums are float32. The
scale of a query is in its weights. Logits are rounded once, to the problem's dtype. Where j is outside of a query
token's range, nothing is written. Two forms:

    prefill   q (n, h, 128)    keys (t, 128)    scales (t,)    weights (n, h)    starts, ends (n,) int32
              → logits (n, t)
    paged     q (b, s, h, 128)    cache (pages, 64, 132) uint8    weights (b · s, h)    ends (b, s) int32
              page_table (b, width) int32    → logits (b · s, 64 · width)

The bytes of a page of the index cache are those of serving engines (`index_pages`): 64 rows of 128 e4m3 codes, then
their 64 float32 scales; the shape counts 132 bytes a token and says nothing of where they are. A range that begins
before 0, or ends behind the last column, is cut; one that ends where it begins or before is empty. Page table entries
behind a request's last token are not read, and neither are slots behind it.

NaN. No logit is ever NaN. A product q · key that is NaN, of a code that is, counts as 0: relu is the larger of 0 and a
number. A logit that would be NaN, because a scale or a weight is, is -inf: such a token is not chosen before another.

Words: b requests of s query tokens each see t cached tokens each, up to their own (causal: token i of s sees t - s + 1
+ i). In prefill the keys of request r begin at r · t, and all requests' tokens are one call's. lengths: "uniform" (all
t), or "ragged": drawn from 0 to t, with 0, 1 and the sizes around a page among them.

Distributions of inputs (`dist`):

    normal     q and keys N(0, 1), keys with a scale of their own, weights N(0, 1)
    exact      small whole numbers: every sum is exact, so are logits in float32; many are equal
    denormal   scales of 1e-40, and weights of 1e30
    odd        NaN among scales, weights and codes of valid tokens
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mla_var3.errors import UserError, nearest
from mla_var3.workload import Bound, Case, Cost, Output, Problem, Workload, check_bound, check_dtype, check_integer

DISTRIBUTIONS = ("normal", "exact", "denormal", "odd")
LENGTHS = ("uniform", "ragged")
#: Columns of a query head and of a key; tokens of a page; bytes of a token; e4m3's NaN.
D, PAGE, TOKEN_BYTES, NAN_CODE = 128, 64, 132, 0x7F
#: What a page table holds where no page is: far outside of any cache.
NO_PAGE = 1 << 28
#: Scores that the oracle holds at a time.
_CHUNK = 1 << 26


class RangedProblem(Problem):
    """What the indexer's problems share: b requests of s query tokens each, which see up to t cached tokens, with or
    without a page table. A subclass has these as fields; `check` is for its `__post_init__`."""

    b: int
    s: int
    t: int
    table: bool
    lengths: str
    dtype: str

    def check(self, size: str) -> None:
        """Raises `UserError`, naming the field, when one of these or the size of that name makes no sense."""
        for name in ("b", "s", "t", size):
            check_integer(name, getattr(self, name), 1)
        check_dtype(self.dtype)
        if not isinstance(self.table, bool):
            raise UserError(f"problem.table = {self.table!r} is not a boolean: use true or false.")
        if self.lengths not in LENGTHS:
            raise UserError(f"problem.lengths = {self.lengths!r} is unknown: {nearest(str(self.lengths), LENGTHS)}.")

    @property
    def rows(self) -> int:
        """Query tokens."""
        return self.b * self.s

    @property
    def width(self) -> int:
        """Columns of the page table."""
        return -(-self.t // PAGE)

    def labelled(self, text: str) -> str:
        """A label, with what is not the default behind it."""
        text += "_ragged" if self.lengths == "ragged" else ""
        return text if self.dtype == "fp32" else f"{text}_{self.dtype}"

    def drawn(self, edges: Sequence[int]) -> list[int]:
        """Cached tokens of each request; of ragged ones the first have those of `edges`, before all are shuffled."""
        if self.lengths == "uniform":
            return [self.t] * self.b
        rng = random.Random(0)
        found = [min(edge, self.t) for edge in edges[: self.b]]
        found += [rng.randint(0, self.t) for _ in range(self.b - len(found))]
        rng.shuffle(found)
        return found


@dataclass(frozen=True)
class IndexerLogitsClass:
    """What a compiled kernel is specialised on. s: query tokens of a request, 0 in prefill, where it is an argument."""

    h: int
    s: int
    dtype: str

    def key(self) -> str:
        return f"indexer_{f's{self.s}' if self.s else 'prefill'}_h{self.h}_{self.dtype}"


@dataclass(frozen=True)
class IndexerLogitsProblem(RangedProblem):
    """b, s, t: requests, their query tokens and cached tokens. heads: of the indexer. table: whether keys lie in pages
    of a cache, the form of decode; without a page table they lie in order, the form of prompts. lengths: "uniform" or
    "ragged". dtype: of the logits. Raises `UserError`, naming the field, when it makes no sense."""

    workload: ClassVar[str] = "indexer_logits"
    layer: ClassVar[str] = "indexer"

    b: int = 64
    s: int = 1
    t: int = 8192
    heads: int = 64
    table: bool = True
    lengths: str = "uniform"
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        self.check("heads")

    @property
    def columns(self) -> int:
        """Of the logits."""
        return self.width * PAGE if self.table else self.b * self.t

    @property
    def label(self) -> str:
        form = "paged" if self.table else "prefill"
        return self.labelled(f"{form}_b{self.b}_s{self.s}_h{self.heads}_t{self.t}")

    def problem_class(self) -> IndexerLogitsClass:
        return IndexerLogitsClass(self.heads, self.s if self.table else 0, self.dtype)

    def seq_lens(self) -> list[int]:
        """Cached tokens of each request."""
        return self.drawn((0, 1, self.t, PAGE - 1, PAGE, PAGE + 1, self.s))

    def ranges(self) -> list[tuple[int, int]]:
        """(start, end) of each query token, of all requests behind each other; the end is not cut."""
        return [
            (start, start + length - self.s + 1 + i)
            for r, length in enumerate(self.seq_lens())
            for start in [0 if self.table else r * self.t]
            for i in range(self.s)
        ]

    def pairs(self) -> int:
        """(query token, cached token) pairs in range."""
        return sum(max(0, end - start) for start, end in self.ranges())

    def cost(self) -> Cost:
        """FLOPs of the products, and every byte once: queries, weights, keys with scales, ranges and logits."""
        pairs, tokens = self.pairs(), sum(self.seq_lens())
        written = pairs * self.element_bytes
        read = (
            self.rows * (self.heads * (D + 4) + 8)
            + tokens * TOKEN_BYTES
            + (self.b * self.width * 4 if self.table else 0)
        )
        return Cost(pairs * self.heads * 2 * D, read + written, pairs=pairs, written=written)

    def input_bytes(self) -> int:
        tokens = self.b * (self.width + 1) * PAGE if self.table else self.b * self.t
        read = self.rows * (self.heads * (D + 4) + 8) + tokens * TOKEN_BYTES
        return read + self.output_bytes()

    def output_bytes(self) -> int:
        return self.rows * self.columns * self.element_bytes


# ---------------------------------------------------------------- the index cache
def index_pages(cache: Any) -> tuple[Any, Any]:
    """(codes, scales) of an index cache (pages, 64, 132) uint8, as views: (pages, 64, 128) uint8 and (pages, 64)
    float32. Pages may lie apart, by multiples of 4 bytes."""
    import torch

    pages, stride = cache.shape[0], cache.stride(0)
    codes = cache.as_strided((pages, PAGE, D), (stride, D, 1))
    flat = cache.as_strided((pages, PAGE * 4), (stride, 1), cache.storage_offset() + PAGE * D)
    return codes, flat.view(torch.float32)


def new_logits(problem: IndexerLogitsProblem, q: Any, rows: int, columns: int) -> Any:
    """Uninitialised logits (rows, columns) of the problem's dtype, on the device of q."""
    return rows_apart(q, rows, columns, problem.torch_dtype)


def rows_apart(like: Any, rows: Any, columns: Any, dtype: Any) -> Any:
    """An uninitialised tensor (rows, columns), whose rows begin at multiples of 256 bytes."""
    return like.new_empty((rows, (columns + 127) // 128 * 128), dtype=dtype)[:, :columns]


# ---------------------------------------------------------------- inputs
def make_inputs(
    problem: IndexerLogitsProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal", **_: Any
) -> tuple[Any, ...]:
    """Random inputs of the problem's form. What must not be read is NaN, and names pages that do not exist."""
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"indexer_logits input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    n, h, e4m3 = problem.rows, problem.heads, torch.float8_e4m3fn

    def draw(*shape: int) -> Any:
        if dist == "exact":
            return torch.randint(-2, 3, shape, device=device, generator=generator).float()
        return torch.randn(shape, device=device, generator=generator)

    q, weights = draw(n, h, D).to(e4m3), draw(n, h)
    tokens = problem.b * problem.t
    keys, scales = torch.empty((tokens, D), dtype=e4m3, device=device), torch.empty(tokens, device=device)
    for first in range(0, tokens, _CHUNK // D):
        some = draw(min(_CHUNK // D, tokens - first), D)
        if dist == "exact":
            scale = 2.0 ** torch.randint(-1, 2, (len(some),), device=device, generator=generator)
        else:
            scale = some.abs().amax(1) / 448.0
            some /= scale[:, None]
        keys[first : first + len(some)], scales[first : first + len(some)] = some.to(e4m3), scale
    if dist == "denormal":
        scales.fill_(1e-40)
        weights *= 1e30
    elif dist == "odd":
        scales[3::7], weights[2::5, 0] = math.nan, math.nan
        keys.view(torch.uint8)[4::9, 17] = NAN_CODE
        q.view(torch.uint8)[1::4, 0, 5] = NAN_CODE
    q, keys = q.view(torch.uint8), keys.view(torch.uint8)
    starts, ends = torch.tensor(problem.ranges(), dtype=torch.int32).T.to(device)
    if not problem.table:
        return q, keys, scales, weights, starts.contiguous(), ends.contiguous()
    lengths = problem.seq_lens()
    used = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(used) + problem.b, generator=torch.Generator().manual_seed(seed)).tolist()
    cache = torch.full((len(order), PAGE, TOKEN_BYTES), NAN_CODE, dtype=torch.uint8, device=device)
    codes, page_scales = index_pages(cache)
    page_scales.fill_(math.nan)
    table = torch.full((problem.b, problem.width), NO_PAGE, dtype=torch.int32)
    for r, (length, count) in enumerate(zip(lengths, used, strict=True)):
        if not count:
            continue
        own, order = order[:count], order[count:]
        table[r, :count] = torch.tensor(own, dtype=torch.int32)
        at = torch.tensor(own, device=device)
        rows = torch.full((count * PAGE, D), NAN_CODE, dtype=torch.uint8, device=device)
        some = torch.full((count * PAGE,), math.nan, device=device)
        rows[:length] = keys[r * problem.t : r * problem.t + length]
        some[:length] = scales[r * problem.t : r * problem.t + length]
        codes[at] = rows.view(count, PAGE, D)
        page_scales[at] = some.view(count, PAGE)
    q = q.view(problem.b, problem.s, h, D)
    return q, cache, weights, ends.view(problem.b, problem.s).contiguous(), table.to(device)


# ---------------------------------------------------------------- oracle
def scores(q: Any, keys: Any, scales: Any, weights: Any) -> Any:
    """Logits (n, t) in float64 of queries (n, h, 128) and keys (t, 128), uint8, scales (t,) and weights (n, h), without
    ranges; never NaN."""
    import torch

    (n, h, _), t = q.shape, len(keys)
    out = torch.empty((n, t), dtype=torch.float64, device=q.device)
    columns, wanted = keys.view(torch.float8_e4m3fn).float().double().T, weights.double()
    step = max(1, _CHUNK // max(1, h * t))
    for first in range(0, n, step):
        some = q[first : first + step].view(torch.float8_e4m3fn).float().double()
        products = (some.flatten(0, 1) @ columns).nan_to_num_(nan=0.0).relu_().view(len(some), h, t)
        out[first : first + step] = torch.einsum("nht,nh->nt", products, wanted[first : first + step])
    out *= scales.double()
    return out.nan_to_num_(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def reference(problem: IndexerLogitsProblem, *inputs: Any) -> tuple[Any]:
    """The oracle: (logits,) in float64, NaN where nothing is to be written."""
    import torch

    q = inputs[0]
    if problem.table:
        _, cache, weights, ends, table = inputs
        (b, s, _, _), columns = q.shape, table.shape[1] * PAGE
        codes, page_scales = index_pages(cache)
        out = torch.full((b * s, columns), math.nan, dtype=torch.float64, device=q.device)
        for r, last in enumerate(ends.clamp(0, columns).tolist()):
            pages = table[r, : -(-max(last) // PAGE)].long()
            if not len(pages):
                continue
            found = scores(q[r], codes[pages].flatten(0, 1), page_scales[pages].flatten(), weights[r * s : (r + 1) * s])
            for i, end in enumerate(last):
                out[r * s + i, :end] = found[i, :end]
        return (out,)
    q, keys, scales, weights, starts, ends = inputs
    out = scores(q, keys, scales, weights)
    column = torch.arange(len(keys), device=q.device)
    out.masked_fill_((column < starts[:, None]) | (column >= ends[:, None]), math.nan)
    return (out,)


# ---------------------------------------------------------------- cases
CASES = {
    "own": "the problem as it is (on a CPU: cut down to few tokens)",
    "ragged": "lengths of 0, 1, around a page and at random, bound to the planned kernel",
    "one": "one request with one cached token",
    "exact": "whole numbers, whose logits are exact",
    "denormal": "scales of 1e-40",
    "odd": "NaN among scales, weights and codes",
    "shifted": "ranges that begin before 0, end behind the last column, and end before they begin",
    "in_place": "other values in the tensors of a bound kernel",
    "planned": "another number of requests, planned anew",
    "long": "a request of a million tokens (on a GPU)",
}
QUICK = ("own", "ragged", "one", "odd")


def _shift(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Moves ranges out of bounds: those of every third query token each in another way."""
    *front, ends = inputs[:4] if inputs[0].dim() == 4 else inputs
    ends = ends.clone()
    flat = ends.view(-1)
    if inputs[0].dim() == 4:
        flat[1::3] = -5
        return *front, ends, *inputs[4:]
    starts = front[-1].clone()
    starts[0::3] -= 100
    flat[1::3] += 1 << 20
    flat[2::3] = starts[2::3] - 1
    return *front[:-1], starts, ends


def _cases(problem: IndexerLogitsProblem, on_gpu: bool) -> Iterator[Case]:
    own = problem if on_gpu else small(problem)
    few = own.replace(b=9 if on_gpu else 3, t=min(own.t, 1000 if on_gpu else 130), lengths="ragged")
    if not problem.table:
        few = few.replace(s=min(own.s, 37 if on_gpu else 5))
    yield Case("own", own, "normal", planned=True)
    yield Case("ragged", few, "normal")
    # Exact: one logit is held to more than what sums of FP8 products may be off by.
    yield Case("one", few.replace(b=1, t=1, lengths="uniform"), "exact")
    for dist in ("exact", "denormal", "odd"):
        yield Case(dist, few, dist)
    yield Case("shifted", few, "exact", alter=_shift)
    yield Case("in_place", few, "normal", then=few)
    yield Case("planned", few.replace(b=2, lengths="uniform"), "exact", planned=True)
    yield Case("long", few.replace(b=1, t=1 << 20, lengths="uniform"), "normal", gpu=True)


#: What sums of FP8 products may be off by, of the distribution "normal" with 64 heads; of fewer heads it is less.
#: Hopper's tensor cores take 32 products a step, which are exact. In each step they and the sum so far are cut, towards
#: zero, to 13 bits behind the leading one of the largest of them, and added (tests/workload/test_indexer.py does so).
#: Summed up over heads with weights N(0, 1), and times the scale of a key, the error has a standard deviation of 0.008;
#: one in 10^3 is above 0.035, one in 10^4 above 0.047, and each further decade takes 0.012 more. The largest error seen
#: on a GPU is 0.098, of some 10^7 logits; beyond this bound lies less than one in 10^12. Logits have a root mean square
#: of 64, and a head more or less is off by 8.
FP8_SUMS = 0.15
#: A logit above 150 may be off by 2^-10 of itself, as large logits are sums of large products. Rounding to the dtype
#: comes on top: half a unit in the last place.
#: Elements alone are judged, and no cosine difference of a row or of the whole. The error of a logit does not shrink
#: with the logit, and a weighted sum over heads may be as near 0 as it likes: of problems with one logit, 3 in 100 have
#: one whose error alone gives a cosine difference above 3e-6. Of many logits of 64 heads, these bounds hold the cosine
#: difference to (0.15 / 64)² / 2 = 3e-6 by themselves.
NORMAL = Bound(abs=FP8_SUMS, rel=2.0**-10, ulps=0.5)
_BOUNDS = {
    # Sums are exact: what is left is the rounding to the dtype.
    "exact": Bound(abs=1e-30, rel=0.0, ulps=0.5),
    # Scales are 1e-40 in place of some 1/160, and weights 1e30 times as large.
    "denormal": Bound(abs=160 * 1e-10 * FP8_SUMS, rel=2.0**-10, ulps=0.5),
}


def bounds(dist: str) -> dict[str, Bound]:
    """By output."""
    return {"logits": _BOUNDS.get(dist, NORMAL)}


def rebound(problem: IndexerLogitsProblem, *inputs: Any) -> IndexerLogitsProblem:
    """The problem of other inputs of the same class. Raises `UserError` for a tensor that does not fit."""
    want = 5 if problem.table else 6
    if len(inputs) != want:
        raise UserError(f"cannot bind: this kernel takes {want} tensors, and {len(inputs)} are given.")
    q = inputs[0]
    if problem.table:
        _, cache, weights, ends, table = inputs
        b, s, width = q.shape[0], problem.s, table.shape[1]
        check_bound("q", q, (b, s, problem.heads, D), "uint8")
        check_bound("cache", cache, (cache.shape[0], PAGE, TOKEN_BYTES), "uint8")
        check_bound("weights", weights, (b * s, problem.heads), "fp32")
        check_bound("ends", ends, (b, s), "int32")
        check_bound("page_table", table, (b, width), "int32")
        return problem.replace(b=b, t=width * PAGE, lengths="uniform")
    _, keys, scales, weights, starts, ends = inputs
    n, t = len(q), len(keys)
    check_bound("q", q, (n, problem.heads, D), "uint8")
    check_bound("keys", keys, (t, D), "uint8")
    check_bound("scales", scales, (t,), "fp32")
    check_bound("weights", weights, (n, problem.heads), "fp32")
    check_bound("starts", starts, (n,), "int32")
    check_bound("ends", ends, (n,), "int32")
    return problem.replace(b=1, s=n, t=t, lengths="uniform")


def as_bound(problem: IndexerLogitsProblem) -> IndexerLogitsProblem:
    """What `rebound` makes of the problem's own inputs."""
    if problem.table:
        return problem.replace(t=problem.width * PAGE, lengths="uniform")
    return problem.replace(b=1, s=problem.rows, t=problem.b * problem.t, lengths="uniform")


def small(problem: IndexerLogitsProblem) -> IndexerLogitsProblem:
    """Few tokens: seconds on a CPU."""
    s = problem.s if problem.table else min(problem.s, 5)
    return problem.replace(b=min(problem.b, 2), s=s, t=min(problem.t, 200))


#: Heads of published indexers: DeepSeek V3.2 (twice as often), GLM-5, Hy V4.
SERVED_HEADS = (64, 64, 32, 16)
MOST_CACHED, MOST_LOGITS = 1 << 22, 1 << 28  # tokens of a drawn problem's cache, and its logits


def draw(rng: random.Random) -> dict[str, Any]:
    """Fields of a problem as a server may have it: a cache in two of three, with b log-uniform in 1..256 and one query
    token in every other problem, else up to 8; otherwise prompts of 256 to 8k query tokens in all, in one of four cases
    of several requests. Contexts are log-uniform up to 128k tokens, and unequal in every other problem."""
    table = rng.randrange(3) > 0
    heads = rng.choice(SERVED_HEADS)
    lengths = rng.choice(LENGTHS)
    if table:
        b, s = round(2 ** rng.uniform(0, 8)), rng.choice((1, 1, 1, 1, 1, 2, 2, 3, 4, 6, 8))
        most = min(1 << 17, MOST_CACHED // b, MOST_LOGITS // (b * s))
        t = round(2 ** rng.uniform(9, math.log2(max(1024, most))))
    else:
        b = rng.choice((1, 1, 1, rng.randint(2, 8)))
        s = max(64, round(2 ** rng.uniform(8, 13)) // b)
        t = round(2 ** rng.uniform(math.log2(s), math.log2(max(2 * s, min(1 << 17, MOST_LOGITS // (b * b * s))))))
    return {"b": b, "s": s, "t": t, "heads": heads, "table": table, "lengths": lengths}


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    if given.get("table", True):
        return {"b": 2 if small else 64, "t": 200 if small else 8192}
    return {"b": 1, "s": 5 if small else 2048, "t": 200 if small else 8192}


WORKLOAD = Workload(
    name="indexer_logits",
    problem=IndexerLogitsProblem,
    outputs=(Output("logits", ("token", "column"), partial=True),),
    make_inputs=make_inputs,
    reference=reference,
    cases=_cases,
    case_names=CASES,
    quick=QUICK,
    bounds=bounds,
    rebound=rebound,
    small=small,
    as_bound=as_bound,
    sample=sample,
    draw=draw,
)
