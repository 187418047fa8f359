"""Paged MLA decode in the absorbed form: `MlaProblem`, its inputs, its oracle, and what breaks its kernels.

Words: b requests of s query tokens each attend to t cached tokens each (or a list of lengths). h query heads share
h_kv latent caches (1 in MLA). A cached token is a latent of k columns and a rope part of p columns; decompressed,
it is per head a key of d + p and a value of d columns.

    q (b, s, h, k + p)   kv_cache (pages, page, h_kv, k + p)   page_table (b, max_pages) int32   seq_lens (b,) int32
    →   out (b, s, h, k) in the inputs' dtype, lse (b, h, s) float32: the natural log-sum-exp of scale · q·k

Requests may differ in their query tokens, as where prefill chunks and speculative tokens stand beside decodes
(`queries`). Then q and out are packed, as is lse:

    q (tokens, h, k + p)   ...   cu_seqlens_q (b + 1,) int32   →   out (tokens, h, k), lse (tokens, h)

where request i has the tokens cu_seqlens_q[i] .. cu_seqlens_q[i + 1] - 1 of q. With `tree` a fifth input is a mask of
speculative tokens, (b, s, s) uint8: query token i sees the newest token j, j = 0 .. s - 1, where mask[·, i, j] is not
0, and all tokens before those.

columns 0..k-1 of a cached token are the latent (V, and the first part of K). Entry j of request i in the page table is
the page of its tokens j·page .. j·page + page-1. seq_lens may be 0: out is 0 and lse is +inf where a row sees no key. A
row with a score that is NaN has out and lse NaN, so that it is not taken for one without keys. The scale may be zero or
negative: `runtime.scaling` is for versions that look for the largest score before they multiply with it.
A contiguous cache (`problem.page is None`) is the same tensors with 64-token pages in order.

Distributions of inputs (`dist`):

    flashmla       N(0, 1) / 10 clamped to ±1: what FlashMLA's own test draws. Logits are small, attention is flat.
    normal         N(0, 1): logits have a spread of about 1.7, attention is uneven.
    first, last    one token (the first, the last) takes about 95 % of the attention of every query row.
    page_boundary  the last token of a page and the first of the next one share it.
    just_masked    the first token past each row's limit would take it: past the end of the request (where that lies on
                   the request's last page, in place of the poison) and past the causal limit.
    below_zero     every attended logit is far below zero, so a token whose key was filled with zeros, or a mask that
                   writes 0 in place of -inf, would take it.
    nan            flashmla, but NaN in one query row of each third request, and in one cached token, which all query
                   tokens see, of the next one.
    extremes       logits as large as results hold for, from rope columns alone: in each third request the first key is
                   `HIGHEST` and all others as far below zero; in the next one the first key is at half of the lowest;
                   in the next all keys are equally low, at `EXACT`, so that out is their mean.

The dominant ones lie on top of "flashmla" values: the last rope columns of q hold a common sign pattern, and the keys
of the chosen tokens a multiple of it, as large as their length asks for. So one dropped or extra token is an error of
order one. Without rope columns these are the last half of the latent's, so values too, and the multiples differ from
column to column: equal ones would be rounded alike in out, and the bounds below count on roundings that are not.

Bounds
------
On FlashMLA's inputs they are FlashMLA's own (`FLASHMLA`): every element of out within 8e-4
absolute or 2.01/128 relative, cosine difference below 5e-6, lse within 1e-6 absolute or 8.01/65536 relative (and a
cosine difference below 1e-7). Three things are stricter here: the reference is not rounded to the output's dtype, the
cosine difference must hold in the worst row too, and a row without keys must be exactly 0 with lse = +inf.

On N(0, 1) inputs (`NORMAL`) they follow from two facts. With u = 2^-8, bf16's unit roundoff:

    out: rounding P and out moves an element by at most u · Σ p|v| + u · |out|. With values of spread σ, Σ p|v| is about
         0.8 σ, so the error is at most 2u σ = 7.8e-3 σ where |out| <= σ: FlashMLA's 8e-4 at σ = 0.1. So the absolute
         bound scales with σ: 8e-3 at σ = 1. Relative: 2 units in the last place, 2.01/128, whatever σ is.
    cos: 1 - cos = |Δ|² / (|a|² + |b|²) = ε²/2 with ε the relative error. Rounding has a relative rms of u/√6 = 1.6e-3
         in out, and as much in P where many keys share a row: (2 · u²/6)/2 = 2.5e-6, whatever σ is, so 5e-6 stays for
         the whole. In a row that one key rules, P's error is that key's alone, at most u (0 when P is taken relative
         to the exact maximum, and not when a kernel rescales lazily): u²/2 = 7.6e-6 of cosine difference. The rounding
         of out has 1.4e-6 in the mean ("Rows of few columns"), so the mean is 9.0e-6 where that key's P is rounded
         worst. The product of the two errors has either sign in each of 512 columns and spreads rows around that mean.
         Both grow with the element, whose fourth moment is 3 times the square of its second, so the product has a
         standard deviation of u² √(3 · 0.18/512) = 0.50e-6. Four of these are above the mean at 1.1e-5, which is the
         bound of the worst row. About one row in 50,000 has a key that rules it and is rounded nearly so badly.
         By values drawn anew for such rows, of 300 keys in KV tiles of 32, a share of 6e-11 of all rows is above the
         bound, and one of 1e-8 above 1.02e-5, what it was before the product was counted: a kernel met a row of 1.04e-5
         on a GPU, which the same roundings on a CPU gave as well. (Nothing but these roundings gives 9.2e-6 in the
         worst of 200,000 rows of 128 keys; tests draw some of them.)
         On FlashMLA's inputs all keys of a row count alike: P lies between 0.93 and 1 of the exact maximum, where its
         rounding has a rms of u/√12 / 0.96 = 1.2e-3, and 5e-6 stays for the worst row too. It is 2.9e-6 to 3.2e-6 among
         50,000 rows. What the bound refuses is a maximum that is taken from a few keys: where most of P is just above
         1 its rounding has an rms of u/√3, a row 3.8e-6 in the mean, and the worst of 10,000 rows 5.9e-6.
    lse: a logit is a sum of products q·k, its float32 error scales with |q||k|: 1e-6 at spreads of 0.1, 1e-4 at 1.
         Relative: 8.01/65536.

Rows of few columns
-------------------
The worst row's bound of 5e-6 is taken from decode, whose rows have 512 columns, and holds with 128 columns too. With
fewer, as in prefill, errors average over fewer roundings, and the rows' errors spread more around the same mean. On
FlashMLA's inputs, with D columns and many keys; a cosine difference is half the square of the relative error:

    mean: P's error is a sum of values with random weights, so that its columns are as good as independent of those of
         out. Its rms is u/√12 / 0.96 of out's, which is 0.69e-6 of cosine difference. An element of out is off by up to
         half a unit in its last place; over N(0, σ²) the square of that unit is 0.54 (2u)² σ² in the mean, so its
         rounding has a square of 0.54 (2u)²/12 σ² = 0.18 u² σ², half of which is 1.38e-6. Together μ = 2.07e-6
         (`ROW_MEAN`).
    spread: both errors are sums of D squares over |out|², a third sum of D squares. P's share, a third of μ, is a ratio
         of two independent chi-squares of D degrees, with a relative variance of 4/D. Out's share has 3.2/D: 5.2/D of
         its own sum, since units in the last place differ, and 2/D of |out|², less 4/D because elements that are large
         have large units. The product of the two errors adds 4 · 1/3 · 2/3 / D. In all (1/3)² 4/D + (2/3)² 3.2/D +
         0.9/D = 2.8/D, which is a standard deviation of 21 % at 64 columns and of 15 % at 128.
    tail: the logarithm of such a ratio is about normal (Fisher's z), so that the row which only a given share of rows
         exceeds is μ exp(z √(2.8/D)), with one z for all D. 5e-6 at 128 columns is z = 6. The same z is
         μ (5e-6/μ)^√(128/D) with fewer columns, `Bound.of_row`: 5.7e-6 with 96 and 7.2e-6 with 64.

A saddle-point approximation of the same model without the normal logarithm gives the share of rows above the bound:
1.3e-11 with 128 columns, 7e-12 with 96, 4e-12 with 64. That is so few that the bound needs no term for the number of
rows: of checks of a hundred million rows, one in a thousand has a right row above it. Of a million rows of 64 columns
the worst is expected at 5.0e-6 by that model; FlashAttention-3 and -4 and this project's kernels were at 5.0e-6 to
5.4e-6 in 0.2 to 1.8 million.

From 128 columns on the bound stays 5e-6. The bound of 1.1e-5 for rows that one key rules stays as it is, whatever the
columns: the larger part of it is one key's error in P, which is the same in all columns, so that it does not spread
with fewer, and kernels that take P relative to the exact maximum do not have it. The worst of 200,000 of their rows, of
four keys of 64 columns and N(0, 1), is at 6.7e-6. A kernel that rescales lazily would need more with fewer columns if
one key ruled as many of its rows as in decode. Logits of decompressed heads have a spread of 1, not of 1.7, so that
few rows have such a key.

The dominant inputs have FlashMLA's values, and one key rules each row: their bounds are FlashMLA's with 1.1e-5 for the
worst row (`DOMINATED`).
A kernel that rounds a third time by its design says so in its plan (`cos_slack`, `ROUNDED_ONCE_MORE`).
The bounds are the same for fp16, whose rounding is 8 times finer, as in FlashMLA's test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mla_var3.errors import UserError, nearest
from mla_var3.workload import (
    MOST_LISTED,
    Bound,
    Case,
    Cost,
    Output,
    Problem,
    Workload,
    check_dtype,
    check_integer,
    check_scale,
)

if TYPE_CHECKING:
    import torch

    InputSet = tuple[torch.Tensor, ...]

#: What problems may have and most have not: records leave it out where it is false.
_FLAGS = ("strided_pages", "tree", "strided", "strided_out")
LENGTH_NAMES = ("uniform", "ragged", "normal", "lognormal", "bimodal", "one_long", "mostly_empty", "edges")


@dataclass(frozen=True)
class DecodeClass:
    """What a compiled kernel is specialised on: everything of a problem but b, t and the lengths."""

    s: int
    h: int
    h_kv: int
    k: int
    p: int
    d: int
    causal: bool
    page: int | None
    dtype: str
    strided_pages: bool
    packed: bool = False
    tree: bool = False
    strided: bool = False
    strided_out: bool = False

    def key(self) -> str:
        """A short file-name-safe string, equal exactly for equal classes."""
        page = "contig" if self.page is None else f"pg{self.page}"
        mask = "causal" if self.causal else "full"
        options = {
            "strided": self.strided_pages, "packed": self.packed, "tree": self.tree, "apart": self.strided,
            "outapart": self.strided_out,
        }  # fmt: skip
        more = "".join(f"_{name}" for name, is_so in options.items() if is_so)
        return f"s{self.s}_h{self.h}_kv{self.h_kv}_k{self.k}_p{self.p}_d{self.d}_{mask}_{page}_{self.dtype}{more}"


@dataclass(frozen=True)
class MlaProblem(Problem):
    """One attention problem. Raises `UserError`, naming the field, when it makes no sense.

    b: requests. s: query tokens of each request. t: cached tokens of each request, the s new ones included, or a
    sequence of b lengths. h: query heads. h_kv: latent caches, each shared by h / h_kv heads. k: latent columns.
    p: rope columns. d: head dim. causal: query token i attends to the first length - s + i + 1 tokens. page: tokens a
    cache page, or None for a contiguous cache. dtype: bf16, fp16 or fp32.
    lengths: "uniform" (all t), a mapping {"name": ..., "seed": int} of a name of `seq_lens`, or a list.
    softmax_scale: factor on q·k, None for that of the decompressed heads, (d + p)^-1/2; compiled code does not depend
    on it. strided_pages: pages lie further apart than they are long, as where other layers' pages lie between them.
    queries: query tokens of each request where they differ: a list of b counts; {"chunks": n, "tokens": m}: m for each
    of the first n requests, s for the others; or {"total": n}, spread evenly; s is then the most of a request. causal
    is at the end of each. tree: a mask says which of the newest s tokens a query token sees (not causal, not with
    queries). strided: q and the page table are views with gaps between their rows, whose columns lie side by side.
    strided_out: so are out and lse, the latter with gaps between its columns too.
    """

    workload: ClassVar[str] = "decode"

    b: int = 1
    s: int = 1
    t: int = 4096
    h: int = 128
    h_kv: int = 1
    k: int = 512
    p: int = 64
    d: int = 128
    causal: bool = False
    page: int | None = 64
    dtype: str = "bf16"
    lengths: Any = "uniform"
    softmax_scale: float | None = None
    strided_pages: bool = False
    queries: Any = None
    tree: bool = False
    strided: bool = False
    strided_out: bool = False

    def __post_init__(self) -> None:
        t: Any = self.t
        if isinstance(t, Sequence) and not isinstance(t, str):
            object.__setattr__(self, "lengths", tuple(t))
            object.__setattr__(self, "b", len(t))
            object.__setattr__(self, "t", max((x for x in t if isinstance(x, int)), default=0))
        self._freeze_lengths()
        for name in ("b", "s"):
            check_integer(name, getattr(self, name), 1, MOST_LISTED)
        for name in ("h", "h_kv", "k", "d"):
            check_integer(name, getattr(self, name), 1)
        for name in ("t", "p"):
            check_integer(name, getattr(self, name), 0)
        if self.h % self.h_kv:
            raise UserError(f"problem.h = {self.h} is not a multiple of h_kv = {self.h_kv}: choose one that is.")
        if self.page is not None:
            check_integer("page", self.page, 1)
        check_dtype(self.dtype)
        check_scale(self.softmax_scale)
        for name in ("causal", *_FLAGS):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"problem.{name} = {getattr(self, name)!r} is not a boolean: use true or false.")
        if self.strided_pages and self.page is None:
            raise UserError("problem.strided_pages is for a cache of pages, and page is None: give the page's tokens.")
        if self.tree and (self.causal or self.queries is not None):
            raise UserError("problem.tree has a mask of its own: leave causal and queries out.")
        self._freeze_queries()

    def _freeze_lengths(self) -> None:
        """Brings `lengths` into one of its hashable forms: a name, (("name", x), ("seed", y)), or a tuple of ints."""
        value = self.lengths
        if isinstance(value, str):
            value = {"name": value, "seed": 0} if value != "uniform" else value
        if isinstance(value, Mapping):
            unknown = set(value) - {"name", "seed"}
            if unknown or "name" not in value:
                raise UserError(f"problem.lengths = {dict(value)!r} needs the fields name and seed, and no others.")
            name, seed = str(value["name"]), value.get("seed", 0)
            check_integer("lengths.seed", seed, 0)
            if name not in LENGTH_NAMES:
                raise UserError(f"problem.lengths name {name!r} is unknown: {nearest(name, LENGTH_NAMES)}.")
            value = "uniform" if name == "uniform" else (("name", name), ("seed", seed))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            value = tuple(value)
            if not (len(value) == 2 and isinstance(value[0], tuple)):
                if any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in value):
                    raise UserError("problem.lengths holds something that is not a whole number of at least 0.")
                if len(value) != self.b:
                    raise UserError(f"problem.lengths has {len(value)} entries for b = {self.b}: give one a request.")
                object.__setattr__(self, "t", max(value, default=0))
        elif value != "uniform":
            raise UserError(f"problem.lengths = {value!r} is neither a name, a mapping with name and seed, nor a list.")
        object.__setattr__(self, "lengths", value)

    def _freeze_queries(self) -> None:
        """Brings `queries` into None, (("total", n),) or a tuple of counts, and `s` to the most of a request."""
        value = self.queries
        if value is None:
            return
        wanted = "problem.queries"
        if isinstance(value, Mapping):
            if set(value) == {"chunks", "tokens"}:
                for name in ("chunks", "tokens"):
                    check_integer(f"queries.{name}", value[name], 0)
                value = tuple(value["tokens"] if i < value["chunks"] else self.s for i in range(self.b))
            elif set(value) == {"total"}:
                check_integer("queries.total", value["total"], 0)
                value = (("total", value["total"]),)
            else:
                raise UserError(f"{wanted} = {dict(value)!r}: give the fields chunks and tokens, or total alone.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            value = tuple(value)
            if not (len(value) == 1 and isinstance(value[0], tuple)):
                if any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in value):
                    raise UserError(f"{wanted} holds something that is not a whole number of at least 0.")
                if len(value) != self.b:
                    raise UserError(f"{wanted} has {len(value)} entries for b = {self.b}: give one a request.")
        else:
            raise UserError(f"{wanted} = {value!r} is neither a list nor a mapping.")
        object.__setattr__(self, "queries", value)
        object.__setattr__(self, "s", max(1, *self.query_lens))

    # ---------------------------------------------------------------- derived
    @property
    def packed(self) -> bool:
        """Whether requests may differ in their query tokens, so that q is packed."""
        return self.queries is not None

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Query tokens of each request."""
        if self.queries is None:
            return (self.s,) * self.b
        if isinstance(self.queries[0], int):
            return self.queries
        each, more = divmod(dict(self.queries)["total"], self.b)
        return tuple(each + (i < more) for i in range(self.b))

    @property
    def query_tokens(self) -> int:
        """Query tokens of all requests."""
        if self.queries is None:
            return self.b * self.s
        return sum(self.queries) if isinstance(self.queries[0], int) else int(dict(self.queries)["total"])

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """The b lengths. Named distributions are drawn from `random.Random(seed)`, so they are the same everywhere.

        ragged: uniform in 0..t. normal: N(t, t/2), at least s and at most 2t (FlashMLA's own test draws so, with no
        upper end). lognormal: t · exp(N(0, 1)), from s to 16t, as prompts of a chat service spread. bimodal: every
        other request has t tokens, the others up to t/16. one_long: one of t tokens, the others up to t/64.
        mostly_empty: a quarter uniform in 1..t, the others 0, as slots of a padded batch. edges: 0, 1, page - 1, page,
        page + 1, t - 1, t in turn.
        """
        value = self.lengths
        if value == "uniform":
            return (self.t,) * self.b
        if isinstance(value[0], int):
            return value
        spec = dict(value)
        rng = random.Random(spec["seed"])
        if spec["name"] == "ragged":
            return tuple(rng.randint(0, self.t) for _ in range(self.b))
        if spec["name"] == "normal":
            draws = (int(rng.normalvariate(self.t, self.t / 2)) for _ in range(self.b))
            return tuple(min(max(x, self.s), 2 * self.t) for x in draws)
        if spec["name"] == "lognormal":
            draws = (int(self.t * rng.lognormvariate(0.0, 1.0)) for _ in range(self.b))
            return tuple(min(max(x, self.s), 16 * self.t) for x in draws)
        if spec["name"] in ("bimodal", "one_long", "mostly_empty"):
            if spec["name"] == "mostly_empty":
                lengths = [rng.randint(1, max(self.t, 1)) if i % 4 == 0 else 0 for i in range(self.b)]
            else:
                every, short = (2, self.t // 16) if spec["name"] == "bimodal" else (self.b, self.t // 64)
                lengths = [self.t if i % every == 0 else rng.randint(1, max(short, 1)) for i in range(self.b)]
            rng.shuffle(lengths)
            return tuple(lengths)
        page = self.page_size
        edges = [x for x in (0, 1, page - 1, page, page + 1, self.t - 1, self.t) if 0 <= x <= self.t]
        return tuple(edges[i % len(edges)] for i in range(self.b))

    @property
    def longest(self) -> int:
        """Cached tokens of the longest request."""
        return self.t if self.lengths == "uniform" else max(self.seq_lens, default=0)

    @property
    def fill(self) -> float:
        """Mean length over the longest one: 1 where all are equally long, and where none has a key."""
        if self.lengths == "uniform":
            return 1.0
        lengths = self.seq_lens
        return sum(lengths) / (len(lengths) * max(lengths)) if max(lengths) else 1.0

    @property
    def scale(self) -> float:
        """Factor on q·k before the softmax."""
        return (self.d + self.p) ** -0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def group(self) -> int:
        """Query heads that share one latent cache."""
        return self.h // self.h_kv

    @property
    def rows(self) -> int:
        """Query rows of one request and one latent cache: s · h / h_kv, token-major."""
        return self.s * self.group

    @property
    def page_size(self) -> int:
        """Tokens a page; a contiguous cache is read as 64-token pages in order."""
        return 64 if self.page is None else self.page

    @property
    def max_pages(self) -> int:
        """Width of the page table: pages of the longest request, at least 1."""
        return max(1, -(-self.longest // self.page_size))

    @property
    def num_pages(self) -> int:
        """Pages of an input set. Where requests differ in length, an eighth more than they use; a contiguous cache has
        room for the longest in every request."""
        if self.page is None or self.lengths == "uniform":
            return self.b * self.max_pages
        used = sum(-(-x // self.page_size) for x in self.seq_lens)
        return min(used + used // 8 + 1, self.b * self.max_pages)

    @property
    def label(self) -> str:
        """Short name for tables and folders: b128_s1_h128_t4096, with what differs from the default appended."""
        text = f"b{self.b}_s{self.s}_h{self.h}_t{self.t}"
        if self.h_kv != 1:
            text += f"_kv{self.h_kv}"
        if self.causal:
            text += "_causal"
        if self.lengths != "uniform":
            text += "_list" if isinstance(self.lengths[0], int) else f"_{dict(self.lengths)['name']}"
        text += f"_q{self.query_tokens}" if self.packed else "_tree" if self.tree else ""
        if self.dtype != "bf16":
            text += f"_{self.dtype}"
        default = MlaProblem
        if (self.k, self.p) != (default.k, default.p):
            text += f"_k{self.k}_p{self.p}"
        if self.page != default.page:
            text += "_contiguous" if self.page is None else f"_page{self.page}"
        return text

    def problem_class(self) -> DecodeClass:
        """What compiled code depends on; problems of one class share kernels. Of packed queries, how many tokens a
        request has is no part of it."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(DecodeClass)}
        return DecodeClass(**{**fields, "s": 1} if self.packed else fields)

    def to_record(self) -> dict[str, Any]:
        data = super().to_record()
        if self.lengths != "uniform":
            data["lengths"] = list(self.lengths) if isinstance(self.lengths[0], int) else dict(self.lengths)
        if self.softmax_scale is None:
            del data["softmax_scale"]
        if self.queries is None:
            del data["queries"]
        else:
            data["queries"] = list(self.queries) if isinstance(self.queries[0], int) else dict(self.queries)
        for name in _FLAGS:
            if not data[name]:
                del data[name]
        return data

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> Self:
        fields = dict(data)
        if "n" not in cls.fields() and fields.get("n") == 0:  # older records count decompressed tokens: here, none
            del fields["n"]
        return super().from_record(fields)

    # ---------------------------------------------------------------- cost
    def attending(self) -> Iterator[tuple[int, int]]:
        """For each request its length L and the (query token, cached token) pairs that attend, of one head.

        Without a mask every query token attends to all L tokens. With it, query token i attends to the first
        L - s + i + 1, none when that is not positive. Of a tree, whose mask no problem holds, as with a causal mask: no
        tree has more.
        """
        for length, s in zip(self.seq_lens, self.query_lens, strict=True):
            if self.causal or self.tree:
                yield length, sum(max(length - s + i + 1, 0) for i in range(s))
            else:
                yield length, s * length

    def cost(self) -> Cost:
        """FLOPs and minimal bytes; log-sum-exps and page tables (under 1 %) are not counted.

        Each head's query is in latent space, K = [latent | rope], V = latent. A pair costs 2(k + p) for q·k and 2k for
        p·v. Bytes: each cached token (k + p columns, per latent cache) once, q in (k + p) and out (k) once per query
        row. With k = 512, p = 64 that is 2176 FLOPs a pair and 1152 B a token in bf16.
        """
        tokens = pairs = 0
        for length, attended in self.attending():
            tokens += length
            pairs += attended
        columns = tokens * self.h_kv * (self.k + self.p) + self.query_tokens * self.h * (2 * self.k + self.p)
        return Cost(pairs * 2 * (2 * self.k + self.p) * self.h, columns * self.element_bytes, pairs)

    # ---------------------------------------------------------------- memory
    @property
    def _rows(self) -> tuple[int, ...]:
        """Sizes of q in front of its columns."""
        return (self.query_tokens, self.h) if self.packed else (self.b, self.s, self.h)

    def output_bytes(self) -> int:
        out, lse = room(self.strided_out, *self._rows, self.k), room(self.strided_out, *self._rows, 1, more=1)
        return out * self.element_bytes + 4 * lse

    def input_bytes(self) -> int:
        """Device memory of one input set with its outputs, pages that no request uses included."""
        cache = self.num_pages * self.page_size * self.h_kv * (self.k + self.p) * (1 + self.strided_pages)
        q = room(self.strided, *self._rows, self.k + self.p)
        tables = 4 * (room(self.strided, self.b, self.max_pages) + self.b)
        return (cache + q) * self.element_bytes + tables + self.output_bytes()


# ---------------------------------------------------------------- inputs
DOMINANT = ("first", "last", "page_boundary", "just_masked", "below_zero")
DISTRIBUTIONS = ("flashmla", "normal", *DOMINANT, "nan", "extremes")

#: Magnitude of scale · q·k up to which a key that leads is weighed rightly. A score times the scale is off its rounded
#: maximum by half a unit in the last place, here 2^-9 in log2. At 2^26 it is 2^2: versions whose consumers each keep a
#: running maximum of their own then give output columns that are wrong by powers of two, beside a right LSE (seen on an
#: H200), as a warpgroup rescales what another one weighed.
HIGHEST = 2.0**15
#: Magnitude up to which float32 scores tell keys apart as well as 16-bit probabilities do: they are off by 2^-10.
EXACT = 2.0**14

#: What unused page-table entries hold: a kernel that follows one of them leaves the cache, and faults.
GARBAGE_PAGE = 2147480000

#: How far (natural log) the chosen tokens stand above all others together: exp(3) = 20, or 95 % of the attention.
_LEAD = 3.0
#: Magnitude of the sign pattern in q.
_PATTERN = 2.0


def make_inputs(
    problem: MlaProblem,
    device: torch.device | str = "cpu",
    *,
    seed: int = 0,
    dist: str = "flashmla",
    shuffle_pages: bool = True,
    poison: bool = True,
    spare_pages: int = 0,
) -> InputSet:
    """Makes one input set of `problem` on `device`; the module's docstring has shapes and distributions.

    seed: the same seed gives the same bits on the same kind of device (CPU and CUDA draw differently).
    shuffle_pages: pages are handed out in random order; a contiguous cache never is.
    poison: NaN in the cache's unreferenced pages and after each request's last token, and `GARBAGE_PAGE` in unused
        page-table entries. Without it those hold finite random values, and 0.
    spare_pages: pages beside those of `problem.num_pages`; with shuffling they lie between the others.
    With `problem.strided_pages` as much room as a page takes lies behind each page, NaN with poison. With
        `problem.strided` q and the page table are as `apart` makes them, around NaN and `GARBAGE_PAGE` with poison.
    Raises `UserError` for an unknown distribution.
    """
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    page, max_pages = problem.page_size, problem.max_pages
    num_pages = problem.num_pages + spare_pages
    width = problem.k + problem.p
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, dtype=problem.torch_dtype, device=device, generator=generator)
        return x if dist == "normal" else x.div_(10).clamp_(-1.0, 1.0)

    q = draw(*((problem.query_tokens,) if problem.packed else (problem.b, problem.s)), problem.h, width)
    kv_cache = draw(num_pages, page, problem.h_kv, width)

    lens = torch.tensor(problem.seq_lens, dtype=torch.int64)
    if shuffle_pages and problem.page is not None:
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed + 1))
    else:
        order = torch.arange(num_pages)
    used = torch.arange(max_pages) < ((lens + page - 1) // page).unsqueeze(1)
    if num_pages < problem.b * max_pages:
        table = torch.zeros((problem.b, max_pages), dtype=torch.int64)
        table[used] = order[: int(used.sum())]
    else:
        table = order[: problem.b * max_pages].view(problem.b, max_pages).clone()

    if poison:
        referenced = torch.zeros(num_pages, dtype=torch.bool)
        referenced[table[used]] = True
        kv_cache[torch.nonzero(~referenced).flatten().to(device)] = math.nan
        _tail(kv_cache, table, lens, math.nan)
    table[~used] = GARBAGE_PAGE if poison else 0
    if dist in DOMINANT:
        _dominate(problem, q, kv_cache, table, dist)
    elif dist == "nan":
        _spoil(problem, q, kv_cache, table)
    elif dist == "extremes":
        _stretch(problem, q, kv_cache, table)

    if problem.strided_pages:
        wide = kv_cache.new_full((num_pages, 2, *kv_cache.shape[1:]), math.nan if poison else 0.0)
        wide[:, 0] = kv_cache
        kv_cache = wide[:, 0]

    page_table = table.to(torch.int32).to(device)
    if problem.strided:
        q = apart(q, math.nan if poison else 0.0)
        page_table = apart(page_table, GARBAGE_PAGE if poison else 0)
    seq_lens = lens.to(torch.int32).to(device)
    inputs: tuple[torch.Tensor, ...] = (q, kv_cache, page_table, seq_lens)
    if problem.packed:
        offsets = torch.tensor([0, *problem.query_lens]).cumsum(0)
        inputs = (*inputs, offsets.to(torch.int32).to(device))
    if problem.tree:
        inputs = (*inputs, _trees(problem.b, problem.s, seed).to(device))
    return inputs


#: Elements by which strided tensors are longer in their last dimension; they have one more in each of the others.
APART = 128


def apart(tensor: torch.Tensor, between: float, more: int = APART) -> torch.Tensor:
    """The same values, as a view of a larger tensor (`room`) that holds `between` everywhere else."""
    *others, last = tensor.shape
    memory = tensor.new_full((*(size + 1 for size in others), last + more), between)
    view = memory[tuple(slice(size) for size in tensor.shape)]
    view.copy_(tensor)
    return view


def room(strided: bool, *shape: int, more: int = APART) -> int:
    """Elements of the memory that a tensor of this shape lies in, strided or contiguous."""
    return math.prod((*(size + 1 for size in shape[:-1]), shape[-1] + more) if strided else shape)


def new_outputs(problem: MlaProblem, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) for the queries q, uninitialised."""
    import torch

    tokens, *more, h, _ = q.shape
    made = q.new_empty((tokens, *more, h, problem.k)), q.new_empty((tokens, h, *more), dtype=torch.float32)
    return between_others(*made) if problem.strided_out else made


def between_others(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of larger tensors with the shapes of these; of lse columns lie apart too."""
    return apart(out, math.nan), apart(lse.unsqueeze(-1), math.nan, 1)[..., 0]


def _trees(b: int, s: int, seed: int) -> torch.Tensor:
    """(b, s, s) uint8: s tokens of a tree drawn for each request; a token sees itself and its ancestors."""
    import torch

    mask, rng = torch.eye(s, dtype=torch.uint8).repeat(b, 1, 1), random.Random(seed)
    for i in range(b):
        for token in range(1, s):
            # Mostly one of the last few: trees that a draft model makes are deeper than they are wide.
            mask[i, token] |= mask[i, rng.randrange(max(0, token - 4), token)]
    return mask


def _tail(kv_cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, value: float) -> None:
    """Fills what lies after each request's last token on its last page."""
    import torch

    page = kv_cache.shape[1]
    fill = lens % page
    partial = fill > 0
    if not bool(partial.any()):
        return
    last = table[torch.arange(len(lens)), (lens - 1).clamp(min=0) // page]
    offset = torch.arange(page).expand(len(lens), page)
    dead = partial.unsqueeze(1) & (offset >= fill.unsqueeze(1))
    slots = (last.unsqueeze(1) * page + offset)[dead]
    kv_cache.view(-1, *kv_cache.shape[2:])[slots.to(kv_cache.device)] = value


def _chosen(problem: MlaProblem, dist: str, length: int, s: int) -> list[int]:
    """Positions that dominate; `length` itself is the slot after the last token. s: query tokens of the request."""
    page = problem.page_size
    if dist == "just_masked":
        masked = range(max(0, length - s + 1), length) if problem.causal or problem.tree else range(0)
        return [*masked, length]
    if length == 0:
        return []
    if dist == "first":
        return [0]
    if dist == "last":
        return [length - 1]
    if dist == "page_boundary":
        if length <= page:
            return [length - 1]
        edge = max(1, length // page // 2) * page
        return [edge - 1, edge]
    return list(range(length))


def _dominate(problem: MlaProblem, q: torch.Tensor, kv_cache: torch.Tensor, table: torch.Tensor, dist: str) -> None:
    """Writes the sign pattern into q and its multiple into the chosen keys."""
    import torch

    device, width = q.device, problem.k + problem.p
    w = min(64, problem.p) or max(1, problem.k // 2)
    multiples = torch.ones(w) if problem.p else torch.linspace(0.5, 1.5, w)
    signs = torch.where(torch.arange(w) % 3 == 0, -1.0, 1.0).to(device=device, dtype=q.dtype)
    q[..., width - w :] = _PATTERN * signs
    pattern, total = signs.float() * multiples.to(device), float(multiples.sum())
    page = problem.page_size
    flat = kv_cache.view(-1, problem.h_kv, width)
    slots: list[int] = []
    sizes: list[float] = []
    pages = table.tolist()
    for i, (length, s) in enumerate(zip(problem.seq_lens, problem.query_lens, strict=True)):
        lead = math.log(max(length, 1)) + _LEAD
        if dist == "below_zero":
            lead = -(lead + 5.0)
        for position in _chosen(problem, dist, length, s):
            entry = position // page
            if entry >= -(-length // page):  # the slot after the last token lies on no page of this request
                continue
            slots.append(pages[i][entry] * page + position % page)
            sizes.append(lead / (total * _PATTERN * (problem.scale or 1.0)))
    if not slots:
        return
    index = torch.tensor(slots, device=device)
    if dist == "just_masked":  # the slot after the end may hold poison: give it values that would be believed
        rows = torch.randn(
            (len(slots), problem.h_kv, width), dtype=torch.float32, device=device,
            generator=torch.Generator(device=device).manual_seed(len(slots)),
        )  # fmt: skip
        flat[index] = (rows / 10).clamp_(-1.0, 1.0).to(q.dtype)
    keys = torch.tensor(sizes, device=device, dtype=torch.float32).view(-1, 1, 1) * pattern
    flat[index, :, width - w :] = keys.expand(-1, problem.h_kv, -1).to(q.dtype)


def _spoil(problem: MlaProblem, q: torch.Tensor, kv_cache: torch.Tensor, table: torch.Tensor) -> None:
    """Makes a query row of each third request NaN, and a cached token of the next one. A token that only some query
    tokens see is left alone: a probability of 0 times NaN is NaN, so that it would be in all of their rows."""
    width, page = problem.k + problem.p, problem.page_size
    rows, flat, first = q.view(-1, problem.h, width), kv_cache.view(-1, problem.h_kv, width), 0
    for i, (length, s) in enumerate(zip(problem.seq_lens, problem.query_lens, strict=True)):
        column = 0 if i % 2 else width - 1
        if i % 3 == 0 and s:
            rows[first + s - 1, i % problem.h, column] = math.nan
        elif i % 3 == 1 and length > s:
            position = (length - s) // 2
            flat[int(table[i, position // page]) * page + position % page, 0, column] = math.nan
        first += s


def _stretch(problem: MlaProblem, q: torch.Tensor, kv_cache: torch.Tensor, table: torch.Tensor) -> None:
    """Makes logits as large as `extremes` says: zeros in q but for its last columns, a multiple of whose signs keys
    have."""
    import torch

    width, page = problem.k + problem.p, problem.page_size
    w = min(64, problem.p) or max(1, problem.k // 2)
    large = 2.0**14
    signs = torch.where(torch.arange(w) % 3 == 0, -1.0, 1.0).to(device=q.device, dtype=q.dtype)
    q[..., : width - w], q[..., width - w :] = 0.0, large * signs
    flat = kv_cache.view(-1, problem.h_kv, width)
    for i, length in enumerate(problem.seq_lens):
        lowest, first = ((-HIGHEST, HIGHEST), (-HIGHEST, -HIGHEST / 2), (-EXACT, -EXACT))[i % 3]
        logits = torch.full((length,), lowest)
        logits[:1] = first
        position = torch.arange(length)
        slots = table[i][position // page] * page + position % page
        sizes = (logits / (w * large * (problem.scale or 1.0))).to(q.device, q.dtype)
        flat[slots.to(q.device), :, width - w :] = (sizes[:, None] * signs)[:, None]


def same_class(problem: MlaProblem, lengths: Sequence[int]) -> MlaProblem:
    """A problem of the same class (so of the same compiled kernels) with other requests: one for each length. Packed
    queries: the problem's own counts in turn, then few and none."""
    queries = problem.queries
    if problem.packed:
        counts = (*dict.fromkeys(problem.query_lens), 1, 2, 0, 3)
        queries = tuple(counts[i % len(counts)] for i in range(len(lengths)))
    return problem.replace(b=len(lengths), t=max(lengths, default=0), lengths=tuple(lengths), queries=queries)


def of_class(kind: DecodeClass, *, query_tokens: int | None = None, **sizes: Any) -> MlaProblem:
    """A problem of a class. query_tokens: of all requests, where the class is packed. sizes: b, t and lengths."""
    fields = {field.name: getattr(kind, field.name) for field in dataclasses.fields(kind) if field.name != "packed"}
    queries = {"total": sizes.get("b", 1) if query_tokens is None else query_tokens} if kind.packed else None
    return MlaProblem(**fields, **sizes, queries=queries)


# ---------------------------------------------------------------- oracle
#: Above these many FLOPs of the problem the reference computes in float32: about a second of float64 on each device.
FLOAT64_FLOPS = {"cpu": 2e10, "cuda": 2e13}

#: Most elements of one block of attention probabilities (256 MiB in float64).
BLOCK_ELEMENTS = 1 << 25


def mla_decode_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k: int,
    scale: float,
    causal: bool,
    cu_seqlens_q: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed attention of every request, one at a time, so that memory is bounded whatever the length.

    The module's docstring has the inputs.

    k: latent columns (the values). scale: factor on q·k. causal: query token i sees keys 0 .. len - s + i.
    cu_seqlens_q: of packed q (tokens, h, k + p); out is (tokens, h, k) then, lse (tokens, h). mask: of a tree.
    compute_dtype: torch.float64, or torch.float32 above `FLOAT64_FLOPS`, unless given.
    Returns out (b, s, h, k), not rounded to the inputs' dtype, and lse (b, h, s), the natural log-sum-exp of
    scale · q·k, both in the compute dtype on the inputs' device. A row that sees no key has out 0 and lse +inf.
    Raises `UserError` when a page that a request needs is not in the cache.
    """
    import torch

    *_, h, width = q.shape
    h_kv = kv_cache.shape[2]
    group = h // h_kv
    lens = [int(x) for x in seq_lens.tolist()]
    flat = q.reshape(-1, h, width)
    if cu_seqlens_q is None:
        offsets = [i * q.shape[1] for i in range(len(lens) + 1)]
    else:
        offsets = cu_seqlens_q.tolist()
    if compute_dtype is None:
        pairs = sum(n * (end - begin) for n, begin, end in zip(lens, offsets[:-1], offsets[1:], strict=True))
        limit = FLOAT64_FLOPS["cuda" if q.is_cuda else "cpu"]
        compute_dtype = torch.float64 if 2.0 * h * (width + k) * pairs <= limit else torch.float32
    out = torch.zeros((len(flat), h, k), dtype=compute_dtype, device=q.device)
    lse = torch.full((len(flat), h), float("inf"), dtype=compute_dtype, device=q.device)
    with full_precision():
        for i, length in enumerate(lens):
            tokens = slice(offsets[i], offsets[i + 1])
            s = tokens.stop - tokens.start
            if length == 0 or s == 0:
                continue
            keys = gather_tokens(kv_cache, page_table[i], length).to(compute_dtype)
            seen = None if mask is None else mask[i] != 0
            for g in range(h_kv):
                heads = slice(g * group, (g + 1) * group)
                rows = flat[tokens, heads].reshape(s * group, width).to(compute_dtype)
                o, e = attend(rows, keys[:, g], keys[:, g, :k], group, s, scale, causal, seen)
                out[tokens, heads] = o.view(s, group, k)
                lse[tokens, heads] = e.view(s, group)
    if cu_seqlens_q is not None:
        return out, lse
    return out.view(*q.shape[:-1], k), lse.view(*q.shape[:-1]).transpose(1, 2).contiguous()


def gather_tokens(kv_cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """The (length, h_kv, width) tokens of one request, in order. pages: its row of the page table."""
    return kv_cache[pages_of(kv_cache, pages, length)].flatten(0, 1)[:length]


def pages_of(kv_cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """Numbers (int64) of the pages that hold the first `length` tokens of one request; `gather_tokens` for the
    arguments."""
    num_pages, page = kv_cache.shape[:2]
    count = -(-length // page)
    if count > len(pages):
        raise UserError(f"A request of {length} tokens needs {count} pages and its page table holds {len(pages)}.")
    ids = pages[:count].long()
    if bool(((ids < 0) | (ids >= num_pages)).any()):
        raise UserError(f"A page table names page {int(ids.max())} of a cache of {num_pages}: give it valid pages.")
    return ids


def attend(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: int,
    s: int,
    scale: float,
    causal: bool,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of token-major rows (r = token · group + head) over (length, width) keys, in blocks of rows.
    seen: (s, s) bool, which of the newest s keys a token sees."""
    import torch

    count, length = rows.shape[0], keys.shape[0]
    out = rows.new_zeros((count, values.shape[1]))
    lse = rows.new_full((count,), float("inf"))
    step = max(1, BLOCK_ELEMENTS // max(1, length))
    position = torch.arange(length, device=rows.device)
    for begin in range(0, count, step):
        part = slice(begin, min(count, begin + step))
        logits = rows[part] @ keys.t()
        logits *= scale
        token = torch.arange(part.start, part.stop, device=rows.device) // group
        if causal:
            logits.masked_fill_(position > (length - s + token).unsqueeze(1), float("-inf"))
        if seen is not None:
            newest = (position - (length - s)).clamp(min=0)  # the requests' own keys are 0 .. s - 1 from there on
            hidden = (position >= length - s) & ~seen[token][:, newest]
            logits.masked_fill_(hidden, float("-inf"))
        e = torch.logsumexp(logits, dim=-1)
        empty = e == float("-inf")
        weights = logits.sub_(e.masked_fill(empty, 0.0).unsqueeze(1)).exp_()
        out[part] = weights @ values
        lse[part] = e.masked_fill(empty, float("inf"))
    return out, lse


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """float32 products without TF32, whatever the process chose."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# ---------------------------------------------------------------- bounds
FLASHMLA = {
    "out": Bound(abs=8e-4, rel=2.01 / 128, cos=5e-6, row_cos=5e-6),
    "lse": Bound(abs=1e-6, rel=8.01 / 65536, cos=1e-7),
}
DOMINATED = {**FLASHMLA, "out": replace(FLASHMLA["out"], row_cos=1.1e-5)}
NORMAL = {"out": replace(DOMINATED["out"], abs=8e-3), "lse": replace(FLASHMLA["lse"], abs=1e-4)}

#: Cosine difference of a row in the mean on FlashMLA's inputs: `Bound.row_mean` where rows may have few columns.
ROW_MEAN = 2.07e-6

#: `cos_slack` of plans whose result is rounded to 16 bits once more on its way, beside P and out: a third
#: u²/12 = 1.3e-6 of cosine difference, and twice that in the bounds, as they have it for the other two.
ROUNDED_ONCE_MORE = 2.5e-6


def bounds_for(dist: str) -> dict[str, Bound]:
    """The bounds of out and lse on inputs of a distribution."""
    return {"flashmla": FLASHMLA, "normal": NORMAL}.get(dist, DOMINATED)


# ---------------------------------------------------------------- cases
#: Names of the cases of the check, in order, with what each is for.
CASES = {
    "own": "the problem as it is (on a CPU: cut down to a few short requests), planned",
    "edges": "lengths 0, 1, page - 1, page, page + 1, s - 1, s, t - 1, t in one batch",
    "edges_normal": "the same with N(0, 1) values",
    "first": "the first token of each request dominates",
    "last": "the last token dominates",
    "page_boundary": "the tokens on both sides of a page boundary dominate",
    "just_masked": "the first token that must not be seen would dominate",
    "below_zero": "a zero-filled key, or a masked logit of 0, would dominate",
    "nan": "query rows and cached tokens that are NaN, beside others that are not",
    "extremes": "logits as large as results hold for, of both signs",
    "scale_zero": "a scale of 0: every key counts as much, planned anew",
    "scale_negative": "a scale below 0, with logits far below zero, planned anew",
    "single": "one request of the full length",
    "many": "more requests than a device has multiprocessors, most of them short",
    "in_place": "lengths, pages, queries and cache change under a bound kernel",
    "planned": "lengths as in edges, planned anew",
    "far_pages": "pages beyond 2^31 elements from the start of the cache (on a GPU)",
}
QUICK = ("own", "edges", "just_masked", "below_zero", "in_place")
#: Cases of attention that hold this project's kernels to what it promises; other libraries promise other things.
PROMISED = ("nan", "extremes", "scale_zero", "scale_negative")


def _cases(problem: MlaProblem, on_gpu: bool) -> Iterator[Case]:
    page, s = problem.page_size, problem.s
    longest = max(problem.seq_lens, default=0)
    t = min(longest, 4096 if on_gpu else 4 * page + 9) or 1
    full = min(longest, 131072 if on_gpu else 8 * page + 1) or 1
    edges = [x for x in (t, 0, 1, page - 1, page, page + 1, s - 1, s, 2 * page, t - 1) if x >= 0]
    lengths = list(dict.fromkeys(edges))
    ruled = list(dict.fromkeys([t, page + 1, page, max(1, t - 3), max(1, page // 2), 2 * page + page // 2]))
    own = problem if on_gpu else same_class(problem, [min(x, 2 * page + 3) for x in problem.seq_lens[:2]])
    short = [(7 * i) % (2 * page) for i in range(199)] if on_gpu else [(29 * i) % (page + 9) for i in range(12)]

    yield Case("own", own, "flashmla", planned=True)
    yield Case("edges", same_class(problem, lengths), "flashmla")
    yield Case("edges_normal", same_class(problem, lengths), "normal")
    for dist in DOMINANT:
        yield Case(dist, same_class(problem, ruled), dist)
    few = same_class(problem, ruled if on_gpu else [page + 1, page, max(1, page // 2)])
    for dist in ("nan", "extremes"):
        yield Case(dist, few, dist)
    unscaled = few.replace(softmax_scale=0.0)
    yield Case("scale_zero", unscaled, "flashmla", planned=True)
    turned = unscaled.replace(softmax_scale=-abs(problem.scale) or -1.0)
    yield Case("scale_negative", turned, "below_zero", planned=True)
    yield Case("single", same_class(problem, [full]), "flashmla")
    yield Case("many", same_class(problem, [*short, t]), "normal")
    changed = same_class(problem, [*lengths[1:], lengths[0]])
    yield Case("in_place", same_class(problem, lengths), "flashmla", then=changed)
    yield Case("planned", same_class(problem, lengths), "normal", planned=True)
    if problem.page is not None:
        yield Case("far_pages", same_class(problem, ruled), "flashmla", alter=_far_pages, gpu=True)


def _far_pages(inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The same pages at the end of a cache of more than 2^31 elements; None where memory is short."""
    import torch

    q, cache, table, *others = inputs
    step = cache.stride(0)
    before = 2**31 // step + 1
    elements = (before + len(cache)) * step
    if q.is_cuda and torch.cuda.mem_get_info(q.device)[0] < 1.5 * elements * cache.element_size():
        return None
    large = torch.empty(elements, dtype=cache.dtype, device=cache.device)
    large = large.as_strided((before + len(cache), *cache.shape[1:]), cache.stride())
    large[before:] = cache
    return q, large, torch.where(table == GARBAGE_PAGE, table, table + before), *others


# ---------------------------------------------------------------- the workload
def reference(problem: MlaProblem, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle on inputs of the problem."""
    q, kv_cache, page_table, seq_lens = inputs[:4]
    fifth = fifth_input(*inputs)
    return mla_decode_reference(
        q, kv_cache, page_table, seq_lens, k=problem.k, scale=problem.scale, causal=problem.causal, **fifth
    )


def fifth_input(q: torch.Tensor, *others: torch.Tensor) -> dict[str, Any]:
    """The fifth input of packed queries or of a tree by its name in `mla_decode_reference`; empty where there are
    four."""
    *_, last = others
    if len(others) == 3:
        return {}
    return {"cu_seqlens_q": last} if q.dim() == 3 else {"mask": last}


def rebound(problem: MlaProblem, *inputs: Any) -> MlaProblem:
    """The problem of other tensors of the same class; raises `UserError` when the class differs.

    Lengths stay on the device, so it has t = page table width · page size and uniform lengths: an upper bound, never
    read by kernels. Nothing waits for the device.
    """
    q, kv_cache, page_table, seq_lens, *fifth = inputs
    b, s, h, width = (len(seq_lens), problem.s, *q.shape[1:]) if problem.packed else q.shape
    if len(fifth) != problem.packed + problem.tree:
        raise UserError(f"cannot bind: {4 + problem.packed + problem.tree} inputs are wanted, and {len(inputs)} given.")
    for name, found, want in (
        ("s", s, problem.s),
        ("h", h, problem.h),
        ("k + p", width, problem.k + problem.p),
        ("h_kv", kv_cache.shape[2], problem.h_kv),
        ("page", kv_cache.shape[1], problem.page_size),
        ("dtype", q.dtype, problem.torch_dtype),
    ):
        if found != want:
            raise UserError(
                f"cannot bind: {name} is {found}, and this kernel was planned for {want}; plan a new kernel."
            )
    for what, x, may_be_apart in (
        ("q", q, problem.strided), ("kv_cache", kv_cache, problem.strided_pages),
        ("page_table", page_table, problem.strided),
    ):  # fmt: skip
        if not may_be_apart and not x.is_contiguous():
            raise UserError(
                f"cannot bind: {what} is not contiguous, and this kernel was planned for one that is; plan a new "
                "kernel."
            )
    if kv_cache.dtype != q.dtype or kv_cache.shape[3] != width:
        raise UserError("cannot bind: q and kv_cache differ in dtype or width; give both as the problem says.")
    if page_table.shape[0] != b or tuple(seq_lens.shape) != (b,):
        raise UserError(f"cannot bind: page_table and seq_lens must have one row for each of the {b} requests.")
    if problem.packed and tuple(fifth[0].shape) != (b + 1,):
        raise UserError(f"cannot bind: cu_seqlens_q must have {b + 1} entries, one more than there are requests.")
    if problem.tree and tuple(fifth[0].shape) != (b, s, s):
        raise UserError(
            f"cannot bind: the mask must be ({b}, {s}, {s}): its request's newest keys for each query token."
        )
    queries = {"total": len(q)} if problem.packed else None
    return problem.replace(b=b, t=page_table.shape[1] * problem.page_size, lengths="uniform", queries=queries)


def as_bound(problem: MlaProblem) -> MlaProblem:
    """What `rebound` makes of the problem's own inputs."""
    queries = {"total": problem.query_tokens} if problem.packed else None
    return problem.replace(t=problem.max_pages * problem.page_size, lengths="uniform", queries=queries)


#: Requests of a small problem: one that fills whole pages and one that ends inside a page.
_SMALL = (128, 93)


def small(problem: MlaProblem) -> MlaProblem:
    """Two requests with the problem's mask, dtype and, up to 128 query rows, heads: seconds on a CPU."""
    s = min(problem.s, 4)
    h = problem.h_kv * min(problem.group, 128 // s)
    queries = (s, 1) if problem.packed else None
    return problem.replace(b=len(_SMALL), s=s, h=h, t=max(_SMALL), lengths=_SMALL, queries=queries)


#: Query heads of the published models, whole and after tensor parallelism over 2 to 16 GPUs.
SERVED_HEADS = (128, 64, 40, 32, 20, 16, 12, 8, 4)
MOST_DRAWN = 1 << 20  # tokens of a drawn problem


def draw(rng: random.Random) -> dict[str, Any]:
    """Fields of a problem as a server may have it, about 1M tokens in all at the most: b log-uniform in 1..256; one
    query token in every other problem, else up to 8 and causal; t log-uniform; lengths of any distribution."""
    b = round(2 ** rng.uniform(0, 8))
    s = rng.choice((1, 1, 1, 1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8))
    h = rng.choice(SERVED_HEADS)
    name = rng.choice([x for x in LENGTH_NAMES if x != "edges"])
    seed = rng.randrange(1 << 16)
    # The mean length over t, which bounds t by the tokens of the batch.
    mean = {"ragged": 0.5, "bimodal": 0.53, "lognormal": 1.65, "mostly_empty": 0.125}.get(name, 1.0)
    most = min(MOST_DRAWN / (b * mean), 1 << 17)
    t = round(2 ** rng.uniform(8, math.log2(max(most, 512))))
    lengths = "uniform" if name == "uniform" else {"name": name, "seed": seed}
    return {"b": b, "s": s, "h": h, "t": t, "causal": s > 1, "lengths": lengths}


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    return {"b": 2, "t": 300, "h": 16} if small else {"b": 32, "t": 4096}


WORKLOAD = Workload(
    name="decode",
    problem=MlaProblem,
    outputs=(
        Output("out", ("b", "s", "h", "k")),
        Output("lse", ("b", "h", "s"), dtype="float32", rows=False),
    ),
    make_inputs=make_inputs,
    reference=reference,
    cases=_cases,
    case_names=CASES,
    quick=QUICK,
    bounds=bounds_for,
    rebound=rebound,
    small=small,
    as_bound=as_bound,
    sample=sample,
    # Few query rows of a cache, for the versions that swap operands; fp16, for a library that knows nothing else.
    variants=({"h": 16}, {"dtype": "fp16"}),
    draw=draw,
)
