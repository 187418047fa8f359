"""Decode over packed latent caches: each query token attends to the cached tokens that its indices name, or (`paged`)
to those of its request.

b requests of s query tokens each; h query heads share one cache of a layout of `mla_var3.packed_cache`. A key is all
c columns of a cached token (576; 512 in v4 and v41), its value the first 512. A problem's inputs, in this order; those
in brackets where the problem has them:

    q (b, s, h, c) bf16       cache (pages, page, ...)     indices (b, s, topk) int32   [scale (1,) float32: of flat]
    [lengths (b,) int32]      [sink (h,) float32]
    [extra_cache (...)        extra_indices (b, s, extra) int32      [extra_lengths (b,) int32]]
    →   out (b, s, h, 512) bf16, lse (b, h, s) float32

An index is page · tokens of a page + row, within the whole cache. One that is negative, or at least the tokens of the
cache, names none; one that is there several times counts as often. Of the topk indices of a request's query tokens
those from lengths[i] on are not looked at, and may hold anything. The extra cache, of the same layout or of one that
goes beside it (`packed_cache.beside`), is attended to as well.

With `paged` attention is dense, and a page table stands in place of indices:

    q   cache   page_table (b, width) int32   seq_lens (b,) int32   [scale]   [sink]   →   out, lse

Entry j of a request is the page of its tokens j·page .. j·page + page-1. Query token i attends to the first
seq_lens - s + i + 1 of them, to none where that is not positive. Entries behind a request's last page are not followed,
and may hold anything.

lse is the natural log-sum-exp of scale · q·k over the tokens that are attended to, +inf where there is none. The sink
of a head is a logit more in the softmax, without a value: out is multiplied by 1 / (1 + exp(sink - lse)), so that +inf
makes it 0, and -inf changes nothing; lse is without it. out is 0 where no token is attended to. Where one that is
attended to is NaN, or the query is, out and lse are NaN.

Keys and values are exactly what the bytes say, not rounded to bf16.

Requests may have fewer cached tokens than t (`contexts`). Where one has fewer than its query tokens have indices, each
of these names every token of it, and the indices behind those are -1, as an indexer of a server gives them; `missing`
makes more of them -1. Where q and indices are `strided`, they are views of larger tensors, in the form that FlashMLA's
own tests give them: one more than it needs of every dimension but the last, and 128 elements more of that.

Tokens that no query token attends to hold NaN in every column and scale, as do the bytes between pages, and so do the
elements that a strided q leaves out; those that strided indices leave out are 0, which names a token.

Distributions of inputs (`dist`). Unless something else is said, keys are N(0, 1) / 10 clamped to ±1 before they are
packed, with scales that are powers of two, and q is N(0, 1) clamped to ±1, as in FlashMLA's own test. Holes, none and
duplicates are of indices alone:

    flashmla    as above
    normal      N(0, 1): attention is uneven
    holes       a third of the indices name none
    none        no index names a token
    duplicates  three tokens, each many times
    empty       every other request has no token: its length is 0, or its indices name none
    first,last  the token of the first index (the last) takes about 95 % of the attention of its query token
    unseen      every token that is not attended to would take it; a third of the indices, if any, name none
    below_zero  every attended logit is far below zero, so that a token of zeros, or a masked logit of 0, would take
                it; a third of the indices, if any, name none
    scales      v32 and flat: scales a little below the middle between two bf16 numbers. Others: of many magnitudes
    codes       every finite e4m3 (or e2m1), all of them equally often
    subnormal   subnormal e4m3 (or e2m1) and zeros of both signs alone
    nan         one head of the last query token of each third request is NaN, and a token that the next one attends to
    extremes    logits of ±`decode.EXACT`, from the last columns alone: the first token of each query token, and others

Bounds
------
They are those of dense decode (`decode.FLASHMLA`), whose derivation holds for out: keys have a spread of 0.1, and a
row may have one key alone, so rows have `decode.DOMINATED`'s bound. Two things differ.

    lse: q is ten times as large as there, so logits have a spread of 0.07 where they have 0.017 (and 1 for N(0, 1)). A
         float32 sum of 576 products whose partial sums are cut off at 2^-23 of about 4 spreads, at each of 36 steps of
         a matrix instruction, is off by up to 2e-5 spreads; 1e-4 spreads are allowed, as there.
    scales: no 16-bit key holds the product of e4m3 and such a scale. With u = 2^-8 and scales of (1 + u) · 2^i, an e4m3
         of mantissa m = 1, 1.125, ..., 1.875 is off by -1, 0.78, 0.6, 0.45, 0.33, 0.23, 0.14, 0.07 times u after
         rounding once: a mean of 0.2 u, an rms of 0.54 u. Where the scale is rounded first, all are off by u.
         out: beside P and out, with u/√6 each, so (1/6 + 1/6 + 0.3) u²/2 = 4.8e-6 of cosine difference when rounded
         once, and (1/6 + 1/6 + 1) u²/2 = 1.0e-5 when the scale is; the bound of the whole is 7.2e-6. A row of one key
         has at most (1 + 1/3 + 0.5) u²/2 = 1.4e-5, and an element 0.8 u σ more than elsewhere for V, and for K what
         lse is off by.
         lse: logits of spread 0.07 are off by an rms of 0.54 u, so 1.5e-4, and 6 times that in the worst of 10^8, and
         by the mean, 0.2 u · 4 · 0.07: 1.2e-3 in all. Relative to a row's only logit it is 0.54 u: a cosine difference
         of 0.15 u² = 2.2e-6, where no longer rows stand beside it.
         flat folds its one scale into a float32 factor, and v4 has powers of two: bounds as elsewhere are kept too. So
         do layouts of V4.1: the product of an e2m1 and an e4m3 scale, of two and four significant bits, is a bf16.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from mla_var3.errors import UserError, nearest
from mla_var3.packed_cache import (
    LAYOUTS,
    NO_ROPE,
    V41,
    VALUES,
    Layout,
    beside,
    encoded,
    fields,
    gather,
    layout_of,
    new_cache,
    pack,
    quantised,
)
from mla_var3.workload import MOST, Bound, Case, Cost, Output, Problem, Workload, check_integer, check_scale, decode

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SparseClass:
    """What a compiled kernel is specialised on: everything of a problem but b, t, and how many indices there are. A
    version whose code serves pages of any size has a negative number in place of theirs (`KernelPlan.code_class`)."""

    s: int
    h: int
    layout: str
    page: int
    lengths: bool
    sink: bool
    extra_page: int
    extra_lengths: bool
    paged: bool = False
    strided: bool = False
    extra_layout: str = ""
    strided_out: bool = False

    def key(self) -> str:
        options = {"lengths": self.lengths, "sink": self.sink, "xlengths": self.extra_lengths, "strided": self.strided}
        more = "".join(f"_{name}" for name, is_so in options.items() if is_so)
        more += f"_{self.extra_layout}" if self.extra_layout else ""
        more += "_outapart" if self.strided_out else ""
        kind = "dense" if self.paged else "sparse"
        page, extra_page = ("any" if page < 0 else page for page in (self.page, self.extra_page))
        return f"{kind}_{self.layout}_s{self.s}_h{self.h}_pg{page}_x{extra_page}{more}"


#: How many cached tokens requests have, by the name that `SparseProblem.contexts` begins with.
CONTEXTS = ("full", "uniform", "lognormal", "half_short", "short")
#: Median of the contexts of "lognormal".
MEDIAN = 1024
#: Which indices name no token, by the name that `SparseProblem.missing` begins with.
MISSING = ("end", "scattered", "tiles", "rows")
#: Indices of a tile, of which "tiles" leaves out whole ones.
TILE = 64


@dataclass(frozen=True)
class SparseProblem(Problem):
    """Raises `UserError`, naming the field, when it makes no sense.

    b: requests. s: query tokens of each. h: query heads. t: cached tokens of each request. topk: indices of a query
    token. layout: of the caches, a name of `packed_cache.LAYOUTS`. page: tokens a page. lengths: whether only the
    leftmost so many indices of each request count. sink: whether heads have an attention sink. extra: indices into an
    extra cache, 0 for none (layout flat has none: its one scale is one cache's). extra_t, extra_page, extra_lengths,
    extra_layout: of that cache, t, page and layout where they are 0 or "". softmax_scale: factor on q·k, None for the
    key's columns^-1/2, as FlashMLA has it; compiled code does not depend on it. dtype: of q and out, bf16. paged:
    whether attention is dense, by a page table: there are no indices then (topk is 0) and no extra cache, and lengths
    says whether requests differ in their cached tokens, uniform in 0..t.

    contexts: cached tokens of each request, a name of `CONTEXTS` and, behind a colon, the seed that they are drawn with
    (0 where there is none), as in "uniform:7". full: t of each. uniform: in 1..t. lognormal: 1024 · exp(N(0, 1)), from
    1 to t. short: fewer than there are indices of a query token (with an extra cache: than fill the indices into that
    one). half_short: so for every other request, and uniform from there to t for the rest. The extra cache holds
    extra_t / t as many tokens of a request, rounded up.
    missing: indices that are -1 in place of naming a token, a name of `MISSING` and their share of a row, as in
    "end:0.25"; "" for none. end: the last ones of every row. scattered: any of those that would name a token and count.
    tiles: whole tiles of 64 of these. rows: all of a row, in that share of the rows.
    strided: whether q, indices and the page table are views with gaps between their rows; columns lie side by side.
    strided_out: whether out and lse are, the latter with gaps between its columns too.
    """

    workload: ClassVar[str] = "sparse_decode"

    b: int = 1
    s: int = 1
    h: int = 128
    t: int = 32768
    topk: int = 2048
    layout: str = "v32"
    page: int = 64
    lengths: bool = False
    sink: bool = False
    extra: int = 0
    extra_t: int = 0
    extra_page: int = 0
    extra_lengths: bool = False
    softmax_scale: float | None = None
    dtype: str = "bf16"
    paged: bool = False
    contexts: str = "full"
    missing: str = ""
    strided: bool = False
    extra_layout: str = ""
    strided_out: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.layout, str) or self.layout not in LAYOUTS:
            raise UserError(f"problem.layout = {self.layout!r} is unknown: {nearest(str(self.layout), LAYOUTS)}.")
        for field, extra in (("layout", ""), ("extra_layout", self.extra_layout)):
            try:
                extra_layout = beside(self.layout, extra).name
            except UserError as error:
                raise UserError(f"problem.{field}: {error}") from None
        for name in ("lengths", "sink", "extra_lengths", "paged", "strided", "strided_out"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"problem.{name} = {getattr(self, name)!r} is not a boolean: use true or false.")
        if self.paged:
            if self.topk not in (0, SparseProblem.topk) or self.extra:
                name = "extra" if self.extra else "topk"
                raise UserError(f"problem.{name} is a number of indices, and paged has none: leave it out.")
            object.__setattr__(self, "topk", 0)
        for name in ("b", "s", "h", "t", "page", *([] if self.paged else ["topk"])):
            check_integer(name, getattr(self, name), 1)
        for name in ("extra", "extra_t", "extra_page"):
            check_integer(name, getattr(self, name), 0)
        check_scale(self.softmax_scale)
        if self.dtype != "bf16":
            raise UserError(f"problem.dtype = {self.dtype!r} is not taken: q and the caches' plain columns are bf16.")
        if self.extra and self.cache.one_scale:
            raise UserError(
                f"problem.extra is for caches that hold their scales; layout {self.layout} has one beside its cache."
            )
        for name in ("extra_lengths", "extra_layout"):
            if getattr(self, name) and not self.extra:
                raise UserError(f"problem.{name} is for an extra cache: give extra, the indices into it.")
        object.__setattr__(self, "extra_layout", extra_layout if extra_layout != self.layout else "")
        object.__setattr__(self, "extra_t", (self.extra_t or self.t) if self.extra else 0)
        object.__setattr__(self, "extra_page", (self.extra_page or self.page) if self.extra else 0)
        name, seed = _spec("contexts", self.contexts, CONTEXTS, "uniform:7, a seed of at least 0", int, 0, MOST)
        object.__setattr__(self, "contexts", f"{name}:{seed}" if seed and name != "full" else name)
        if self.missing:
            name, share = _spec("missing", self.missing, MISSING, "end:0.25, a share from 0 to 1", float, 0.0, 1.0)
            object.__setattr__(self, "missing", f"{name}:{share:g}" if share else "")
        for name, unlike in (("contexts", "full"), ("missing", "")):
            if self.paged and getattr(self, name) != unlike:
                raise UserError(f"problem.{name} is of indices, and paged has none: lengths has requests that differ.")

    # ---------------------------------------------------------------- derived
    @property
    def cache(self) -> Layout:
        return layout_of(self.layout)

    @property
    def v41(self) -> bool:
        """Whether a cache has a layout of DeepSeek V4.1."""
        return self.layout in V41

    @property
    def no_rope(self) -> bool:
        """Whether the cache has a latent alone."""
        return self.layout in NO_ROPE

    @property
    def columns(self) -> int:
        """Of q and of a key."""
        return self.cache.columns

    @property
    def scale(self) -> float:
        """Factor on q·k before the softmax."""
        return self.columns**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is attended to: the cache, and the extra one where there is one."""
        topk = self.t if self.paged else self.topk
        main = Part("", self.cache, self.b, self.t, self.page, topk, self.lengths, self.context_lens)
        if not self.extra:
            return (main,)
        held = tuple(-(-tokens * self.extra_t // self.t) for tokens in main.contexts)
        layout = layout_of(self.extra_layout or self.layout)
        sizes = (self.b, self.extra_t, self.extra_page, self.extra)
        return main, Part("extra_", layout, *sizes, self.extra_lengths, held)

    @property
    def context_lens(self) -> tuple[int, ...]:
        """Cached tokens of each request, the same everywhere; () where each has t of them."""
        name, _, seed = self.contexts.partition(":")
        if name == "full":
            return ()
        rng = random.Random(int(seed or 0))
        if name == "uniform":
            return tuple(rng.randint(1, self.t) for _ in range(self.b))
        if name == "lognormal":
            return tuple(min(max(int(MEDIAN * rng.lognormvariate(0.0, 1.0)), 1), self.t) for _ in range(self.b))
        most = (self.extra - 1) * self.t // self.extra_t if self.extra else self.topk - 1
        most = min(max(most, 1), self.t)
        is_short = [name == "short" or i % 2 == 0 for i in range(self.b)]
        rng.shuffle(is_short)
        return tuple(rng.randint(1, most) if x else rng.randint(min(most + 1, self.t), self.t) for x in is_short)

    @property
    def omission(self) -> tuple[str, float]:
        """(kind, share) of the indices that `missing` leaves out; ("", 0.0) where it leaves out none."""
        kind, _, share = self.missing.partition(":")
        return kind, float(share or 0)

    def empty_rows(self) -> frozenset[tuple[int, int]]:
        """(request, query token) of those whose indices all name none, where `missing` is of rows."""
        kind, share = self.omission
        if kind != "rows":
            return frozenset()
        rows = self.b * self.s
        chosen = random.Random(self.missing).sample(range(rows), round(share * rows))
        return frozenset(divmod(row, self.s) for row in chosen)

    def filled(self, part: Part) -> tuple[int, ...]:
        """How many indices of each query token of a request name a token of one cache and count, rows that are empty
        apart."""
        kind, share = self.omission
        if kind == "end":
            return tuple(min(n, part.topk - round(share * part.topk)) for n in part.there)
        if kind == "scattered":
            return tuple(n - round(share * n) for n in part.there)
        if kind == "tiles":
            return tuple(n - TILE * round(share * (n // TILE)) for n in part.there)
        return part.there

    @property
    def label(self) -> str:
        layouts = "+".join(filter(None, (self.layout, self.extra_layout)))
        text = f"{layouts}_b{self.b}_s{self.s}_h{self.h}"
        if self.paged:
            return f"{text}_t{self.t}"
        text += f"_top{self.topk}" + (f"+{self.extra}" if self.extra else "")
        return text if self.contexts == "full" else f"{text}_{self.contexts.partition(':')[0]}"

    def problem_class(self) -> SparseClass:
        lengths = self.lengths and not self.paged  # a page table always comes with lengths
        return SparseClass(
            self.s, self.h, self.layout, self.page, lengths, self.sink, self.extra_page, self.extra_lengths,
            self.paged, self.strided, self.extra_layout, self.strided_out,
        )  # fmt: skip

    def to_record(self) -> dict[str, Any]:
        data = super().to_record()
        # Records from before these fields stay as they are.
        for name in ("paged", "contexts", "missing", "strided", "extra_layout", "strided_out"):
            if data[name] == getattr(SparseProblem, name):
                del data[name]
        return data

    # ---------------------------------------------------------------- cost
    def cost(self) -> Cost:
        """FLOPs and minimal bytes; indices, lengths and log-sum-exps (under 1 %) are not counted.

        A pair costs 2 · (columns + 512) for q·k and p·v. Bytes: q and out once, and each cached token that a request
        attends to once. Its query tokens choose independently, each n of its t tokens: t · (1 - (1 - n/t)^s) different
        ones on average. Of a page table they are all. An index that names no token costs nothing.
        """
        pairs, moved, empty = 0, 0, self.empty_rows()
        for part in self.parts:
            tokens = 0.0
            if self.paged:
                for length in part.lens:
                    pairs += sum(max(0, length - i) for i in range(self.s))
                    tokens += length
                moved += round(tokens) * part.layout.token_bytes
                continue
            contexts = part.contexts or (part.t,) * self.b
            for i, (chosen, t) in enumerate(zip(self.filled(part), contexts, strict=True)):
                rows = self.s - sum((i, j) in empty for j in range(self.s)) if empty else self.s
                pairs += rows * chosen
                tokens += t * (1.0 - (1.0 - chosen / t) ** rows)
            moved += round(tokens) * part.layout.token_bytes
        rows = self.b * self.s * self.h * (self.columns + VALUES) * self.element_bytes
        return Cost(2 * pairs * self.h * (self.columns + VALUES), moved + rows, pairs)

    def output_bytes(self) -> int:
        rows = self.b, self.s, self.h
        out, lse = decode.room(self.strided_out, *rows, VALUES), decode.room(self.strided_out, *rows, 1, more=1)
        return out * self.element_bytes + 4 * lse

    def input_bytes(self) -> int:
        """Device memory of one input set with its outputs, tokens that nobody attends to included."""
        caches = sum(part.pages * part.layout.page_bytes(part.page) for part in self.parts)
        room = functools.partial(decode.room, self.strided)
        rows = [room(self.b, self.s, part.topk) + self.b * part.has_lengths for part in self.parts]
        if self.paged:
            rows = [room(self.b, self.parts[0].pages // self.b) + self.b]
        indices = 4 * sum(rows)
        q = room(self.b, self.s, self.h, self.columns) * self.element_bytes
        return caches + indices + q + 4 * self.h * self.sink + self.output_bytes()


def _spec(
    field: str, value: Any, names: tuple[str, ...], example: str, kind: type[Any], low: float, most: float
) -> tuple[str, Any]:
    """(name, number) of a field such as "uniform:7". Raises `UserError`, naming the field."""
    name, colon, text = str(value).partition(":")
    if not isinstance(value, str) or name not in names:
        raise UserError(f"problem.{field} = {value!r} is unknown: {nearest(name, names)}.")
    try:
        number = kind(text) if colon else kind(0)
    except ValueError:
        number = math.nan
    if not low <= number <= most or (kind is float and not colon):
        raise UserError(f"problem.{field} = {value!r} is not understood: write it as {example}.")
    return name, number


@dataclass(frozen=True)
class Part:
    """One of the caches that a problem attends to. prefix: of its inputs' names. layout: of its tokens. topk: indices
    of a query token; of a page table, the cached tokens that it has room for. contexts: cached tokens of each request;
    () where all have t."""

    prefix: str
    layout: Layout
    b: int
    t: int
    page: int
    topk: int
    has_lengths: bool
    contexts: tuple[int, ...] = ()

    @property
    def pages(self) -> int:
        """Of all requests."""
        return self.b * -(-self.t // self.page)

    @property
    def tokens(self) -> int:
        """Of all pages, those behind a request's last token too."""
        return self.pages * self.page

    @property
    def lens(self) -> tuple[int, ...]:
        """Indices of each request that count (of a page table, cached tokens): all, or with lengths as many as are
        drawn, uniform in 0..topk; the same everywhere."""
        if not self.has_lengths:
            return (self.topk,) * self.b
        rng = random.Random(f"{self.prefix}{self.topk}")
        return tuple(rng.randint(0, self.topk) for _ in range(self.b))

    @property
    def there(self) -> tuple[int, ...]:
        """Indices of a query token of each request that count and name a token where none is left out; they stand in
        front of the others."""
        contexts = self.contexts or (self.t,) * self.b
        return tuple(min(length, tokens) for length, tokens in zip(self.lens, contexts, strict=True))


#: Fields of a problem whose indices may be any.
_ANY: dict[str, Any] = {"contexts": "full", "missing": ""}
#: Inputs that are views with gaps between their rows where a problem is strided.
STRIDED = ("q", "indices", "extra_indices", "page_table")


def input_names(problem: SparseProblem) -> tuple[str, ...]:
    """Names of the inputs, in order."""
    here = {
        "indices": not problem.paged,
        "page_table": problem.paged,
        "seq_lens": problem.paged,
        "scale": problem.cache.one_scale,
        "lengths": problem.lengths and not problem.paged,
        "sink": problem.sink,
    }
    names = ["q", "cache", *(name for name, is_there in here.items() if is_there)]
    if problem.extra:
        names += ["extra_cache", "extra_indices"] + ["extra_lengths"] * problem.extra_lengths
    return tuple(names)


def named(problem: SparseProblem, *inputs: Any) -> dict[str, Any]:
    """The inputs by their names; a `UserError` where there are too many or too few."""
    names = input_names(problem)
    if len(inputs) != len(names):
        raise UserError(f"{len(names)} inputs are wanted ({', '.join(names)}), and {len(inputs)} given.")
    return dict(zip(names, inputs, strict=True))


# ---------------------------------------------------------------- inputs
OF_INDICES = ("holes", "none", "duplicates")
HOLES = ("holes", "unseen", "below_zero")
DOMINANT = ("first", "last", "unseen", "below_zero")
QUANTISED = ("scales", "codes", "subnormal")
DISTRIBUTIONS = ("flashmla", "normal", "none", "duplicates", "empty", "holes", *DOMINANT, "extremes", "nan", *QUANTISED)

#: Just below the middle between the bf16 numbers 1 and 1 + 2^-7: rounded to bf16 it is 1.
BETWEEN = 1.0 + 2.0**-8 - 2.0**-20
#: Columns of the sign pattern that chosen tokens share with q, the last ones; its magnitude in q; and how far (natural
#: log) they stand above all others together: exp(3) = 20, or 95 % of the attention.
_PATTERN_COLUMNS, _PATTERN, _LEAD = 64, 2.0, 3.0
#: The pattern's magnitude in q where logits are to be as large as `decode.EXACT`.
_LARGE = 64.0


def make_inputs(
    problem: SparseProblem,
    device: Any = "cpu",
    *,
    seed: int = 0,
    dist: str = "flashmla",
    poison: bool = True,
    garbage: bool = True,
    **_: Any,
) -> tuple[Any, ...]:
    """Random inputs of the problem; the module's docstring has shapes and distributions.

    poison: NaN in tokens that nobody attends to and between pages, else finite values and zeros. garbage: indices that
    name none, and entries of a page table behind a request's last page, are numbers outside the cache, of both signs
    and all sizes, else -1.
    """
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"sparse_decode input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    if dist in OF_INDICES and problem.paged:
        raise UserError(f"input distribution {dist!r} is of indices, and a page table has none.")
    if dist in QUANTISED and problem.layout == "bf16":
        raise UserError(f"input distribution {dist!r} is of e4m3 codes and scales: layout bf16 has none.")
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    q = torch.randn((problem.b, problem.s, problem.h, problem.columns), device=device, generator=generator)
    q = (q if dist == "normal" else q.clamp_(-1.0, 1.0)).bfloat16()
    pattern = torch.where(torch.arange(_PATTERN_COLUMNS, device=device) % 3 == 0, -1.0, 1.0)
    if dist in DOMINANT:
        q[..., -_PATTERN_COLUMNS:] = _PATTERN * pattern.bfloat16()
    elif dist == "extremes":
        q[..., :-_PATTERN_COLUMNS], q[..., -_PATTERN_COLUMNS:] = 0.0, _LARGE * pattern.bfloat16()
    elif dist == "nan":
        q[::3, -1, problem.h // 2, 1] = math.nan
    made: dict[str, Any] = {"q": q}
    for number, part in enumerate(problem.parts):
        drawn = _Drawn(problem, part, dist, device, generator)
        if problem.paged:
            made["page_table"] = drawn.page_table(garbage)
        else:
            made[f"{part.prefix}indices"] = drawn.indices(garbage)
        made["seq_lens" if problem.paged else f"{part.prefix}lengths"] = drawn.lengths.to(torch.int32)
        made[f"{part.prefix}cache"], scale = drawn.cache(poison)
        if number == 0 and scale is not None:
            made["scale"] = scale
        if dist in DOMINANT and (dist != "first" or number == 0) and (dist != "last" or part is problem.parts[-1]):
            drawn.dominate(made[f"{part.prefix}cache"], pattern, scale)
        if dist == "extremes":
            drawn.stretch(made[f"{part.prefix}cache"], pattern, scale)
        elif dist == "nan" and number == 0:
            drawn.spoil(made[f"{part.prefix}cache"])
    if problem.sink:
        attended = sum(part.topk for part in problem.parts)
        sink = math.log(attended) + torch.randn((problem.h,), device=device, generator=generator)
        odd = torch.randint(4, (problem.h,), device=device, generator=generator)
        made["sink"] = torch.where(odd == 0, math.inf, torch.where(odd == 1, -math.inf, sink))
    if problem.strided:
        between = math.nan if poison else 0.0
        made |= {name: decode.apart(made[name], between if name == "q" else 0) for name in STRIDED if name in made}
    return tuple(made[name] for name in input_names(problem))


class _Drawn:
    """The random choice of tokens of one cache, and the cache."""

    def __init__(self, problem: SparseProblem, part: Part, dist: str, device: Any, generator: torch.Generator) -> None:
        import torch

        self.problem, self.part, self.dist, self.device, self.generator = problem, part, dist, device, generator
        b, s, topk, t = part.b, problem.s, part.topk, part.t
        self.lengths = torch.tensor(part.lens, device=device)
        order = torch.randperm(part.pages, device=device, generator=generator).view(b, -1)
        self.order = order
        if problem.paged:
            chosen = torch.arange(t, device=device).repeat(b, s, 1)
        else:
            # Distinct tokens of the request for each query token, in random order; none where there are not enough.
            rank = torch.rand((b * s, t), device=device, generator=generator)
            if part.contexts:
                ends = torch.tensor(part.contexts, device=device).repeat_interleave(s).unsqueeze(1)
                rank[torch.arange(t, device=device) >= ends] = -1.0
            best = rank.topk(min(topk, t))
            chosen = best.indices.where(best.values >= 0.0, -1) if part.contexts else best.indices
            chosen = torch.nn.functional.pad(chosen.view(b, s, -1), (0, topk - chosen.shape[1]), value=-1)
        if dist == "duplicates":
            chosen = chosen[..., torch.arange(topk, device=device) % min(3, topk, t)]
        pages = order.gather(1, (chosen.clamp(min=0) // part.page).view(b, -1)).view(chosen.shape)
        slots = pages * part.page + chosen.clamp(min=0) % part.page
        is_none = chosen < 0
        #: Indices that are -1 whatever else stands where one names no token.
        self.left_out = is_none.clone()
        if problem.missing:
            self.left_out |= self._missing()
            is_none |= self.left_out
        if dist in HOLES and not problem.paged:
            is_none |= torch.rand(slots.shape, device=device, generator=generator) < 1 / 3
        elif dist == "none":
            is_none[:] = True
        elif dist == "empty":
            if part.has_lengths or problem.paged:
                self.lengths[::2] = 0
            else:
                is_none[::2] = True
        self.slots, self.is_none = slots, is_none
        counts = self.lengths.view(b, 1, 1)
        if problem.paged:
            counts = counts - torch.arange(s - 1, -1, -1, device=device).view(1, s, 1)
        #: (b, s, topk): whether an index, or a token of a request, is attended to.
        self.attended = (torch.arange(topk, device=device) < counts) & ~is_none
        self.seen = torch.zeros(part.tokens, dtype=torch.bool, device=device)
        self.seen[slots[self.attended]] = True

    def indices(self, garbage: bool) -> torch.Tensor:
        """(b, s, topk) int32."""
        return self._numbers(self.slots, self.is_none, garbage).masked_fill_(self.left_out, -1)

    def _missing(self) -> torch.Tensor:
        """(b, s, topk) bool: those that the problem's `missing` leaves out."""
        import torch

        kind, share = self.problem.omission
        b, s, topk = self.part.b, self.problem.s, self.part.topk
        if kind == "rows":
            rows = torch.zeros((b, s, 1), dtype=torch.bool, device=self.device)
            for i, j in self.problem.empty_rows():
                rows[i, j] = True
            return rows.expand(b, s, topk)
        if kind == "end":
            return torch.arange(topk, device=self.device).expand(b, s, topk) >= topk - round(share * topk)
        size = TILE if kind == "tiles" else 1
        whole = torch.tensor([n // size for n in self.part.there], device=self.device).view(b, 1, 1)
        kept = self.problem.filled(self.part)
        omitted = [(n - left) // size for n, left in zip(self.part.there, kept, strict=True)]
        fewer = torch.tensor(omitted, device=self.device)
        units = torch.rand((b, s, -(-topk // size)), device=self.device, generator=self.generator)
        units[torch.arange(units.shape[-1], device=self.device).expand_as(units) >= whole] = 2.0
        chosen = units.argsort(-1).argsort(-1) < fewer.view(b, 1, 1)
        return chosen.repeat_interleave(size, dim=-1)[..., :topk]

    def page_table(self, garbage: bool) -> torch.Tensor:
        """(b, pages of a request) int32."""
        import torch

        position = torch.arange(self.order.shape[1], device=self.device) * self.part.page
        return self._numbers(self.order, position >= self.lengths.unsqueeze(1), garbage)

    def _numbers(self, there: torch.Tensor, is_none: torch.Tensor, garbage: bool) -> torch.Tensor:
        """int32, outside of the cache where there is none."""
        import torch

        tokens = self.part.tokens
        outside = [-1, -(2**31), 2**31 - 1, tokens, -7, tokens + self.part.page] if garbage else [-1]
        kinds = torch.tensor(outside, device=self.device)
        nothing = kinds[torch.arange(there.numel(), device=self.device) % len(outside)].view(there.shape)
        return torch.where(is_none, nothing, there).to(torch.int32)

    def cache(self, poison: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The packed cache, and the scale of layout flat."""
        import torch

        layout, part, dist = self.part.layout, self.part, self.dist
        cache = new_cache(layout, part.pages, part.page, self.device)
        whole = torch.as_strided(cache, (part.pages * cache.stride(0),), (1,))
        whole.fill_((math.nan if layout.name == "bf16" else 255) if poison else 0)
        normal = dist == "normal"
        scale = None
        if layout.one_scale:
            largest = 6.0 if normal else 1.0 if dist not in DOMINANT else 4.0
            if dist == "extremes":
                largest = decode.EXACT / (_PATTERN_COLUMNS * _LARGE * (abs(self.problem.scale) or 1.0))
            scale = torch.full((1,), largest / 448.0 if dist != "scales" else 2.0**-9 * BETWEEN, device=self.device)
        step = max(1, (1 << 27) // (part.page * layout.columns))
        for begin in range(0, part.pages, step):
            there = cache[begin : begin + step]
            x = torch.randn((*there.shape[:2], layout.columns), device=self.device, generator=self.generator)
            pack(layout, x if normal else x.div_(10).clamp_(-1.0, 1.0), scale=scale, out=there)
        if dist in QUANTISED:
            scale = self._odd(cache, scale)
        if poison and dist != "unseen":
            views = fields(layout, cache)
            unseen = ~self.seen.view(part.pages, part.page)
            for view, value in ((views.codes, 255), (views.scales, math.nan), (views.plain, math.nan)):
                if view is not None:
                    view[unseen] = 255 if view.dtype == torch.uint8 else value
        return cache, scale

    def _odd(self, cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor | None:
        """Rewrites codes or scales of a packed cache; returns the scale of layout flat."""
        import torch

        layout = self.part.layout
        views = fields(layout, cache)
        assert views.codes is not None
        if self.dist == "scales":
            if views.scales is None:
                return scale
            if views.scales.dtype == torch.uint8:
                down = torch.randint(12, views.scales.shape, device=self.device, generator=self.generator)
                views.scales.copy_((views.scales.int() - down).clamp(min=1).to(torch.uint8))
            else:
                views.scales.mul_(BETWEEN)
            return scale
        if layout.bits == 4:
            # Of the eight magnitudes 0 and 1 are 0 and the subnormal one. Scales as below, of 2^-5 and 2^-2 in e4m3.
            magnitudes, scale_bits = (2, 40) if self.dist == "subnormal" else (8, 16)
            sizes = (*views.codes.shape, 2)
            halves = torch.randint(magnitudes, sizes, device=self.device, generator=self.generator)
            halves += 8 * torch.randint(2, sizes, device=self.device, generator=self.generator)
            views.codes.copy_((halves[..., 0] + 16 * halves[..., 1]).to(torch.uint8))
            assert views.scales is not None
            views.scales.fill_(scale_bits)
            return scale
        # Magnitudes 0 .. 7 are subnormal, 127 is NaN. Scales bring the root mean square to about 0.1.
        magnitudes, power = (8, 3) if self.dist == "subnormal" else (127, -10)
        codes = torch.randint(magnitudes, views.codes.shape, device=self.device, generator=self.generator)
        signs = torch.randint(2, views.codes.shape, device=self.device, generator=self.generator)
        views.codes.copy_((codes + 128 * signs).to(torch.uint8))
        if views.scales is None:
            return torch.full((1,), 2.0**power, device=self.device)
        views.scales.fill_(power + 127 if views.scales.dtype == torch.uint8 else 2.0**power)
        return scale

    def dominate(self, cache: torch.Tensor, pattern: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Writes multiples of the sign pattern into the last columns of the chosen tokens."""
        import torch

        layout, part = self.part.layout, self.part
        # In v4 these columns are values too, and equal ones would be rounded alike in out.
        multiples = torch.ones(_PATTERN_COLUMNS) if layout.columns > VALUES else torch.linspace(0.5, 1.5, 64)
        lead = math.log(sum(p.topk for p in self.problem.parts)) + _LEAD
        lead = -(lead + 5.0) if self.dist == "below_zero" else lead
        size = lead / (float(multiples.sum()) * _PATTERN * (self.problem.scale or 1.0))
        columns = size * multiples.to(self.device) * pattern
        if self.dist == "below_zero":
            chosen = self.seen
        elif self.dist == "unseen":
            chosen = ~self.seen
        else:
            position = torch.arange(part.topk, device=self.device)
            edge = torch.where(self.attended, position, part.topk if self.dist == "first" else -1)
            edge = edge.amin(-1) if self.dist == "first" else edge.amax(-1)
            chosen = self.picked(edge)
        self.write(cache, chosen, columns, scale)

    def picked(self, place: torch.Tensor) -> torch.Tensor:
        """(tokens,) bool: those that the index at place (b, s) of a query token names, where it attends to any."""
        import torch

        some = self.attended.any(-1)
        slots = self.slots.gather(2, place.clamp(0, self.part.topk - 1).unsqueeze(-1)).squeeze(-1)[some]
        chosen = torch.zeros_like(self.seen)
        chosen[slots] = True
        return chosen

    def write(
        self, cache: torch.Tensor, chosen: torch.Tensor, columns: torch.Tensor, scale: torch.Tensor | None
    ) -> None:
        """Gives the last columns of chosen tokens these values."""
        import torch

        layout, width = self.part.layout, _PATTERN_COLUMNS
        views = fields(layout, cache)
        where = chosen.view(self.part.pages, self.part.page)
        if views.plain is not None:
            views.plain[..., -width:][where] = columns.bfloat16()
            return
        assert views.codes is not None
        if views.scales is None:
            assert scale is not None
            views.codes[..., -width:][where] = quantised(columns, scale)
            return
        # Columns in front of these that share their scale become 0.
        columns = torch.nn.functional.pad(columns, (-width % layout.tile, 0))
        codes, scales = encoded(layout, columns)
        views.codes[..., -len(codes) :][where] = codes
        views.scales[..., -len(scales) :][where] = scales

    def stretch(self, cache: torch.Tensor, pattern: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Makes the logit of the first token of each query token `decode.EXACT`, and that of all others as far below
        zero."""
        size = decode.EXACT / (_PATTERN_COLUMNS * _LARGE * (self.problem.scale or 1.0))
        if not self.part.layout.plain and self.part.layout.tile:  # with its scale it is to be no more than that
            size = math.copysign(0.75 * 2.0 ** math.floor(math.log2(abs(size) / 0.75)), size)
        self.write(cache, self.seen, -size * pattern, scale)
        self.write(cache, self.picked(self.attended.int().argmax(-1)), size * pattern, scale)

    def spoil(self, cache: torch.Tensor) -> None:
        """Makes a token NaN that the first query token of each third request, from the second one on, attends to, and
        of a page table all of them."""
        import torch

        views = fields(self.part.layout, cache)
        attended = self.attended.all(1) if self.problem.paged else self.attended[:, 0]
        for i in range(1, self.part.b, 3):
            if not bool(attended[i].any()):
                continue
            page, row = divmod(int(self.slots[i, 0, int(attended[i].int().argmax())]), self.part.page)
            if views.codes is not None and i % 2:
                views.codes.view(torch.uint8)[page, row, 3] = 127
            else:
                values = views.plain if views.plain is not None else views.codes
                assert values is not None
                values[page, row, -1] = math.nan if values.is_floating_point() else 255


# ---------------------------------------------------------------- oracle
def new_outputs(problem: SparseProblem, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) for the queries q, uninitialised."""
    import torch

    b, s, h, _ = q.shape
    made = q.new_empty((b, s, h, VALUES)), q.new_empty((b, h, s), dtype=torch.float32)
    return decode.between_others(*made) if problem.strided_out else made


def reference(problem: SparseProblem, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: out and lse in float64, or in float32 above `decode.FLOAT64_FLOPS`."""
    import torch

    given = named(problem, *inputs)
    q, sink = given["q"], given.get("sink")
    b, s, h, _ = q.shape
    if problem.paged:
        pairs = s * int(given["seq_lens"].sum())
    else:
        pairs = b * s * sum(given[f"{part.prefix}indices"].shape[2] for part in problem.parts)
    exact = 2.0 * h * (problem.columns + VALUES) * pairs <= decode.FLOAT64_FLOPS["cuda" if q.is_cuda else "cpu"]
    dtype = torch.float64 if exact else torch.float32
    out = torch.zeros((b, s, h, VALUES), dtype=dtype, device=q.device)
    lse = torch.full((b, h, s), math.inf, dtype=dtype, device=q.device)
    with decode.full_precision():
        for i in range(b):
            for token in range(s):
                keys = torch.cat([_attended(problem, given, part, i, token) for part in problem.parts]).to(dtype)
                if not len(keys):
                    continue
                logits = q[i, token].to(dtype) @ keys.t() * problem.scale
                e = torch.logsumexp(logits, dim=-1)
                o = torch.exp(logits - e.unsqueeze(1)) @ keys[:, :VALUES]
                out[i, token] = o if sink is None else o * torch.sigmoid(e - sink.to(dtype)).unsqueeze(1)
                lse[i, :, token] = e
    return out, lse


def _attended(problem: SparseProblem, given: Mapping[str, Any], part: Part, i: int, token: int) -> torch.Tensor:
    """(n, columns) float64: the tokens of one cache that a query token attends to."""
    import torch

    prefix = part.prefix
    cache = given[f"{prefix}cache"]
    if problem.paged:
        position = torch.arange(max(0, int(given["seq_lens"][i]) - problem.s + token + 1), device=cache.device)
        pages = decode.pages_of(cache, given["page_table"][i], len(position))
        there = pages[position // problem.page] * problem.page + position % problem.page
        return gather(part.layout, cache, there, given.get("scale"))
    indices = given[f"{prefix}indices"][i, token]
    if (lengths := given.get(f"{prefix}lengths")) is not None:
        indices = indices[: max(0, int(lengths[i]))]
    there = indices[(indices >= 0) & (indices < cache.shape[0] * cache.shape[1])]
    return gather(part.layout, cache, there, given.get("scale"))


# ---------------------------------------------------------------- bounds
PLAIN = {
    "out": decode.DOMINATED["out"],
    "lse": replace(decode.FLASHMLA["lse"], abs=1e-5),
}
NORMAL = decode.NORMAL
SCALES = {
    "out": replace(PLAIN["out"], abs=1.1e-3, cos=7.2e-6, row_cos=1.5e-5),
    "lse": replace(PLAIN["lse"], abs=1.2e-3, cos=5e-6),
}


def bounds(dist: str) -> dict[str, Bound]:
    """Of out and lse on inputs of a distribution."""
    return {"normal": NORMAL, "scales": SCALES}.get(dist, PLAIN)


# ---------------------------------------------------------------- cases
#: Names of the cases of the check, in order, with what each is for.
CASES = {
    "own": "the problem as it is (on a CPU: cut down to two requests and a few indices)",
    "normal": "N(0, 1) values",
    "uneven": "numbers of indices that are multiples of nothing",
    "one_key": "a single index",
    "holes": "a third of the indices name none: negative, or outside the cache (not of a page table)",
    "none": "no index names a token (not of a page table)",
    "duplicates": "the same tokens many times (not of a page table)",
    "tail": "the last two fifths of every row name none (not of a page table)",
    "tiles": "every other whole tile of indices names none (not of a page table)",
    "rows": "half of the query tokens have no index that names a token (not of a page table)",
    "contexts": "half of the requests have fewer tokens than indices (not of a page table)",
    "empty": "every other request without a token",
    "first": "the token of the first index dominates",
    "last": "that of the last one that counts does, of the extra cache where there is one",
    "unseen": "all tokens that must not be seen would dominate",
    "below_zero": "a zero-filled key, or a masked logit of 0, would dominate",
    "scales": "scales that are no powers of two, or of many magnitudes (not of bf16)",
    "codes": "every finite e4m3 (not of bf16)",
    "subnormal": "subnormal e4m3 alone (not of bf16)",
    "nan": "a head of a query token, and cached tokens, that are NaN, beside others that are not",
    "extremes": "logits as large as float32 scores tell keys apart, of both signs",
    "scale_zero": "a scale of 0: every token counts as much, planned anew",
    "scale_negative": "a scale below 0, with logits far below zero, planned anew",
    "apart": "pages further apart than they are long",
    "in_place": "other values, indices and lengths in the tensors of a bound kernel",
    "few_planned": "one request, so that its indices are split, planned anew",
    "lengths": "lengths and sinks, planned anew",
    "extra": "an extra cache with other pages and lengths, planned anew (not of flat, nor of a page table)",
    "many": "more requests than a device has multiprocessors (on a GPU)",
    "far": "pages beyond 2^31 bytes from the start of the cache (on a GPU)",
}
QUICK = ("own", "uneven", "holes", "unseen", "below_zero", "in_place")


def _cases(problem: SparseProblem, on_gpu: bool) -> Iterator[Case]:
    own = problem if on_gpu else small(problem)
    some = own.replace(b=min(own.b, 5), t=min(own.t, 4096), extra_t=min(own.extra_t, 2048))
    if own.paged:  # as many requests as it takes to end at, before and behind the ends of pages
        uneven = some.replace(b=24 if on_gpu else 6, t=min(own.t, 1111 if on_gpu else 61), lengths=True)
    else:
        uneven = some.replace(topk=min(own.topk, 333 if on_gpu else 37), extra=min(own.extra, 77 if on_gpu else 13))
    yield Case("own", own, "flashmla", planned=True)
    yield Case("normal", some, "normal")
    yield Case("uneven", uneven, "flashmla")
    one = {"t": 1, "lengths": False} if own.paged else {"topk": 1}
    yield Case("one_key", uneven.replace(**one, extra=min(own.extra, 1)), "flashmla")
    for dist in ("empty", *DOMINANT) if own.paged else (*OF_INDICES, "empty", *DOMINANT):
        yield Case(dist, uneven, dist)
    if not own.paged:
        yield Case("tail", uneven.replace(missing="end:0.4"), "below_zero")
        wide = uneven.replace(t=max(uneven.t, 3 * TILE), topk=max(uneven.topk, 2 * TILE + 22))
        yield Case("tiles", wide.replace(missing="tiles:0.5"), "normal")
        yield Case("rows", uneven.replace(missing="rows:0.5"), "normal")
        yield Case("contexts", uneven.replace(contexts="half_short", missing=""), "flashmla")
    if problem.layout != "bf16":
        for dist in QUANTISED:
            yield Case(dist, uneven, dist)
    for dist in ("nan", "extremes"):
        yield Case(dist, uneven, dist)
    unscaled = uneven.replace(softmax_scale=0.0)
    yield Case("scale_zero", unscaled, "flashmla", planned=True)
    turned = unscaled.replace(softmax_scale=-abs(problem.scale) or -1.0)
    yield Case("scale_negative", turned, "below_zero", planned=True)
    unlike = "unseen" if own.paged else "holes"
    yield Case("apart", uneven, unlike, alter=_apart)
    yield Case("in_place", uneven, "flashmla", then=uneven.replace(lengths=False) if own.paged else uneven)
    yield Case("few_planned", own.replace(b=1), "normal", planned=True)
    yield Case("lengths", uneven.replace(lengths=True, sink=True), "last", planned=True)
    if not problem.cache.one_scale and not problem.paged:
        sizes = {"extra": 77 if on_gpu else 13, "extra_t": 300 if on_gpu else 40}
        given = uneven.replace(
            **sizes,
            extra_layout=next(iter(problem.cache.beside), ""),
            extra_page=3,
            lengths=True,
            extra_lengths=True,
            sink=True,
        )
        yield Case("extra", given, "unseen", planned=True)
    short = {"t": min(own.t, 100), "lengths": True} if own.paged else {"topk": min(own.topk, 100)}
    yield Case("many", some.replace(b=301, **short), unlike, gpu=True)
    yield Case("far", uneven, "flashmla", alter=_far, gpu=True)


def _moved(inputs: tuple[Any, ...], moved: Any) -> tuple[Any, ...]:
    """The inputs with each cache (the only ones of three dimensions that are not int32) at another place."""
    import torch

    return tuple(moved(x) if x.dim() == 3 and x.dtype != torch.int32 else x for x in inputs)


def _apart(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same pages, as much as a page and 1152 bytes more from one to the next."""

    def moved(cache: Any) -> Any:
        step = 2 * cache.stride(0) + 1152 // cache.element_size()
        memory = cache.new_full((len(cache), step), math.nan if cache.is_floating_point() else 255)
        memory[:, : cache.stride(0)] = cache.as_strided((len(cache), cache.stride(0)), (cache.stride(0), 1))
        return memory.as_strided(cache.shape, (step, *cache.stride()[1:]))

    return _moved(inputs, moved)


def _far(inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The same pages, so far from one another that the last ones begin beyond 2^31 elements; None where memory is
    short. Indices stay as they are."""
    import torch

    q = inputs[0]

    def room(cache: Any) -> int:
        return -(-(2**31) // (len(cache) // 2) // 1152 + 1) * 1152 if len(cache) > 1 else cache.stride(0)

    caches = [x for x in inputs if x.dim() == 3 and x.dtype != torch.int32]
    needed = sum(len(x) * max(room(x), x.stride(0)) * x.element_size() for x in caches)
    if q.is_cuda and torch.cuda.mem_get_info(q.device)[0] < 1.5 * needed:
        return None

    def moved(cache: Any) -> Any:
        step = max(room(cache), cache.stride(0))
        memory = torch.empty(len(cache) * step, dtype=cache.dtype, device=cache.device).view(len(cache), step)
        memory[:, : cache.stride(0)] = cache.as_strided((len(cache), cache.stride(0)), (cache.stride(0), 1))
        return memory.as_strided(cache.shape, (step, *cache.stride()[1:]))

    return _moved(inputs, moved)


# ---------------------------------------------------------------- the workload
def rebound(problem: SparseProblem, *inputs: Any) -> SparseProblem:
    """The problem of other inputs of the same class; requests, cached tokens and numbers of indices may differ. Raises
    `UserError` for a tensor that does not fit."""
    import torch

    given = named(problem, *inputs)
    q = given["q"]
    b = q.shape[0]
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "q": ((b, problem.s, problem.h, problem.columns), torch.bfloat16),
        "scale": ((1,), torch.float32),
        "sink": ((problem.h,), torch.float32),
    }
    if problem.paged:
        wanted["page_table"] = ((b, given["page_table"].shape[-1]), torch.int32)
        wanted["seq_lens"] = ((b,), torch.int32)
    for part in problem.parts:
        fields(part.layout, given[f"{part.prefix}cache"])
        if (page := given[f"{part.prefix}cache"].shape[1]) != part.page:
            raise UserError(f"cannot bind: {part.prefix}cache has pages of {page}, and this kernel wants {part.page}.")
        if problem.paged:
            continue
        wanted[f"{part.prefix}indices"] = ((b, problem.s, given[f"{part.prefix}indices"].shape[-1]), torch.int32)
        wanted[f"{part.prefix}lengths"] = ((b,), torch.int32)
    for name, tensor in given.items():
        if name not in wanted:
            continue
        shape, dtype = wanted[name]
        if tuple(tensor.shape) != shape:
            raise UserError(f"cannot bind: {name} is {tuple(tensor.shape)}, and this kernel wants {shape}.")
        if tensor.dtype != dtype:
            raise UserError(f"cannot bind: {name} is {tensor.dtype}, and this kernel wants {dtype}.")
        if problem.strided and name in STRIDED:
            _check_strides(name, tensor)
        elif not tensor.is_contiguous():
            raise UserError(f"cannot bind: {name} has strides {tuple(tensor.stride())} and must be contiguous.")

    def tokens(name: str) -> int:
        return max(1, given[name].shape[0] * given[name].shape[1] // b)

    if problem.paged:
        return problem.replace(b=b, t=given["page_table"].shape[1] * problem.page, lengths=False)
    sizes = {"t": tokens("cache"), "topk": given["indices"].shape[2], **_ANY}
    if problem.extra:
        sizes |= {"extra_t": tokens("extra_cache"), "extra": given["extra_indices"].shape[2]}
    return problem.replace(b=b, **sizes)


def _check_strides(name: str, tensor: torch.Tensor) -> None:
    """Raises `UserError` where a kernel that reads strides cannot read these. Memory in front of q's rows may be of any
    length that keeps them on 16 bytes."""
    strides, places = tuple(tensor.stride()), 16 // tensor.element_size() if name == "q" else 1
    if tensor.shape[-1] > 1 and strides[-1] != 1:
        raise UserError(f"cannot bind: {name} has strides {strides}, and its last dimension must lie side by side.")
    if any(step % places for step in strides[:-1]) or tensor.data_ptr() % (places * tensor.element_size()):
        raise UserError(f"cannot bind: {name} has strides {strides}, and its rows must begin at multiples of 16 bytes.")


def as_bound(problem: SparseProblem) -> SparseProblem:
    """What `rebound` makes of the problem's own inputs: cached tokens fill their pages, and any index may name one."""
    sizes: dict[str, Any] = {"t": -(-problem.t // problem.page) * problem.page, **_ANY}
    if problem.paged:
        sizes["lengths"] = False
    if problem.extra:
        sizes["extra_t"] = -(-problem.extra_t // problem.extra_page) * problem.extra_page
    return problem.replace(**sizes)


def small(problem: SparseProblem) -> SparseProblem:
    """Two requests of at most two query tokens, 16 heads and a few indices: seconds on a CPU."""
    sizes = {"b": 2, "s": 2, "h": 16, "t": 96, "topk": 40, "extra": 24, "extra_t": 64}
    return problem.replace(**{name: min(getattr(problem, name), most) for name, most in sizes.items()})


#: Query heads of published models with sparse attention, or that may have it, whole and after tensor parallelism.
HEADS = (*decode.SERVED_HEADS, 96, 48, 24, 6)


def draw(rng: random.Random) -> dict[str, Any]:
    """Fields of a problem as a server may have it.

    b log-uniform in 1..256, one query token in every other problem, else up to 8, heads and numbers of indices of
    published models, layout v32, or v4 with an extra cache that holds a quarter of the tokens. Contexts are of every
    kind; some indices are missing in a quarter of the problems, another quarter has lengths, and q and indices are
    strided in every other one.
    """
    layout = rng.choice(("v32", "v4"))
    b, s = round(2 ** rng.uniform(0, 8)), rng.choice((1, 1, 1, 1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8))
    topk, extra = (128, rng.choice((512, 1024))) if layout == "v4" else (rng.choice((512, 1024, 2048)), 0)
    t = round(2 ** rng.uniform(8, math.log2(min(65536, max(512, (1 << 22) // b)))))
    made: dict[str, Any] = {"b": b, "s": s, "h": rng.choice(HEADS), "t": t, "topk": topk, "layout": layout}
    made |= {"page": rng.choice((1, 16, 64, 128)), "sink": layout == "v4", "strided": rng.random() < 0.5}
    made |= {"extra": extra, "extra_t": -(-t // 4)} if extra else {}
    made["contexts"] = f"{rng.choice(CONTEXTS)}:{rng.randrange(1 << 16)}"
    odd = rng.randrange(4)
    if odd == 0:
        made["missing"] = f"{rng.choice(MISSING)}:{rng.choice((0.1, 0.25, 0.5))}"
    return {**made, "lengths": odd == 1, "extra_lengths": odd == 1 and bool(extra)}


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    if given.get("paged"):
        return {"b": 2, "h": 16, "t": 96} if small else {"b": 32, "t": 4096}
    return {"b": 2, "h": 16, "t": 96, "topk": 40} if small else {"b": 32}


WORKLOAD = Workload(
    name="sparse_decode",
    problem=SparseProblem,
    outputs=(
        Output("out", ("b", "s", "h", "column")),
        Output("lse", ("b", "h", "s"), dtype="float32", rows=False),
    ),
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
    variants=({"layout": "bf16"},),  # for the versions that read no packed cache
    draw=draw,
)
