"""Prefill over decompressed heads: whole prompts, and chunks of prompts behind a prefix.

A request has s query tokens and t keys. Each of the h heads has its own queries of d + p columns; h / h_kv heads share
keys of d + p columns and values of d columns (192 and 128 in DeepSeek's models, with h_kv = h). Requests are packed:

    q (n, h, d + p)   k (m, h_kv, d + p)   v (m, h_kv, d)   cu_seqlens_q, cu_seqlens_k (b + 1,) int32
    →   out (n, h, d) in the inputs' dtype, lse (h, n) float32: the natural log-sum-exp of scale · q·k

Request i has the rows cu_seqlens_q[i] .. cu_seqlens_q[i + 1] - 1 of q, and those of cu_seqlens_k of k and v. causal:
its query token i sees the keys 0 .. t - s + i, so that a chunk of s < t tokens sees the prefix and itself. Where a
query sees no key, out is 0 and lse is -inf. Rows behind the last request, from cu_seqlens_q[b] on, are not written;
rows of k and v from cu_seqlens_k[b] on are nobody's, and may hold anything.

`lengths` says how unequal requests are: s and t are then their means, and b · s and b · t the tokens of all, exactly.
Where t = s keys are the prompt's own; where t > s, the lengths of prefixes are drawn like those of chunks.

Distributions of inputs: normal; flashmla (N(0, 1) / 10, clamped); nan, which is flashmla with a query row of the first
request and the first key of the last one NaN, in one head each; extremes, with logits of ±`decode.EXACT`; neighbours,
which is flashmla with every other request NaN in all of its queries, keys and values. Error bounds are those of
decoding on the same values, wider for the worst row where values have fewer than 128 columns, by the derivation there.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

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
    decode,
)

DISTRIBUTIONS = ("flashmla", "normal", "nan", "extremes", "neighbours")
#: How lengths may be drawn: those of decode that need no page.
LENGTH_NAMES = tuple(name for name in decode.LENGTH_NAMES if name != "edges")
#: Rows of NaN in memory behind q, k and v: more than any kernel's tile has.
BEHIND = 256


@dataclass(frozen=True)
class PrefillClass:
    """What a compiled kernel is specialised on: everything of a problem but requests, lengths and strides."""

    h: int
    h_kv: int
    p: int
    d: int
    causal: bool
    dtype: str

    def key(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"prefill_h{self.h}_kv{self.h_kv}_p{self.p}_d{self.d}_{mask}_{self.dtype}"


@dataclass(frozen=True)
class PrefillProblem(Problem):
    """b requests. Raises `UserError`, naming the field, when it makes no sense.

    s: query tokens of a request. t: its keys, None for as many. Both are means where requests differ. h: query heads.
    h_kv: heads of keys and values, each shared by h / h_kv query heads, None for h. d: columns of a value. p: columns
    that a key has beyond these (rope). causal: the mask is aligned at the end. dtype: bf16, fp16 or fp32.
    softmax_scale: factor on q·k, None for (d + p)^-1/2; compiled code does not depend on it.
    lengths: "uniform" (all s and t), a mapping {"name": ..., "seed": int} of a name of `LENGTH_NAMES`, or a list with a
    pair [queries, keys] for each request, a number alone being a whole prompt; {"queries": n, "keys": m} are lengths
    that nobody knows, of n and m tokens in all, which are then taken to be spread evenly.
    strided_kv: k and v are views of one tensor (m, h_kv, d + p + d), as an up-projection writes it.
    """

    workload: ClassVar[str] = "prefill"

    b: int = 1
    s: int = 4096
    t: int = None  # type: ignore[assignment]  # a number from __post_init__ on, as h_kv
    h: int = 128
    h_kv: int = None  # type: ignore[assignment]
    p: int = 64
    d: int = 128
    causal: bool = False
    dtype: str = "bf16"
    softmax_scale: float | None = None
    lengths: Any = "uniform"
    strided_kv: bool = False

    def __post_init__(self) -> None:
        check_integer("b", self.b, 1, MOST_LISTED)
        if self.t is not None:  # ahead of s, which is as large where t alone was given
            check_integer("t", self.t, 0)
        check_integer("p", self.p, 0)
        for name in ("s", "h", "d"):
            check_integer(name, getattr(self, name), 1)
        for name, like in (("t", "s"), ("h_kv", "h")):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self, like))
        check_integer("h_kv", self.h_kv, 1)
        if self.h % self.h_kv:
            raise UserError(f"problem.h = {self.h} is not a multiple of h_kv = {self.h_kv}: choose one that is.")
        check_dtype(self.dtype)
        check_scale(self.softmax_scale)
        for name in ("causal", "strided_kv"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"problem.{name} = {getattr(self, name)!r} is not a boolean: use true or false.")
        self._freeze_lengths()

    def _freeze_lengths(self) -> None:
        """Brings `lengths` into one of its hashable forms: "uniform", (("name", x), ("seed", y)), (("queries", n),
        ("keys", m)), or a tuple of pairs; of the last two s and t become the means, rounded up."""
        value = self.lengths
        if isinstance(value, str) and value != "uniform":
            value = {"name": value, "seed": 0}
        elif isinstance(value, Sequence) and value and isinstance(value[0], tuple) and isinstance(value[0][0], str):
            value = dict(value)  # frozen before
        if isinstance(value, Mapping):
            object.__setattr__(self, "lengths", self._frozen_mapping(value))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            object.__setattr__(self, "lengths", self._frozen_list(value))
        elif value != "uniform":
            raise UserError(f"problem.lengths = {value!r} is neither a name, a mapping with name and seed, nor a list.")
        if self.lengths != "uniform" and not self._drawn:
            object.__setattr__(self, "s", max(1, -(-self.query_tokens // self.b)))
            object.__setattr__(self, "t", -(-self.keys // self.b))

    def _frozen_mapping(self, value: Mapping[str, Any]) -> Any:
        if set(value) == {"queries", "keys"}:
            for name in ("queries", "keys"):
                check_integer(f"lengths.{name}", value[name], 0)
            return (("queries", value["queries"]), ("keys", value["keys"]))
        if set(value) - {"name", "seed"} or "name" not in value:
            raise UserError(
                f"problem.lengths = {dict(value)!r} needs the fields name and seed, or queries and keys, and no others."
            )
        name, seed = str(value["name"]), value.get("seed", 0)
        check_integer("lengths.seed", seed, 0)
        if name not in LENGTH_NAMES:
            raise UserError(f"problem.lengths name {name!r} is unknown: {nearest(name, LENGTH_NAMES)}.")
        return "uniform" if name == "uniform" else (("name", name), ("seed", seed))

    def _frozen_list(self, value: Sequence[Any]) -> tuple[tuple[int, int], ...]:
        pairs = [tuple(x) if isinstance(x, Sequence) and not isinstance(x, str) else (x, x) for x in value]
        for pair in pairs:
            if len(pair) != 2 or any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in pair):
                raise UserError(
                    "problem.lengths holds something that is neither a whole number of at least 0 nor a pair of them, "
                    "[queries, keys]."
                )
        if len(pairs) != self.b:
            raise UserError(f"problem.lengths has {len(pairs)} entries for b = {self.b}: give one a request.")
        return tuple((int(q), int(k)) for q, k in pairs)

    # ---------------------------------------------------------------- derived
    @property
    def _drawn(self) -> bool:
        return self.lengths[0][0] == "name"

    @property
    def uniform(self) -> bool:
        """Whether all requests are alike, so that a tensor of n rows is one of (b, s) rows."""
        return bool(self.lengths == "uniform")

    @property
    def grouped(self) -> bool:
        """Whether heads share keys and values."""
        return self.h != self.h_kv

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(query tokens, keys) of each request. Names are drawn from `random.Random(seed)`, the same everywhere.

        Each request gets a share of b · s tokens by its weight. ragged: uniform in 0..1. normal: N(1, 1/2), at least 0.
        lognormal: exp(N(0, 1)), as prompts of a chat service spread. bimodal: 1 for every other request, up to 1/16 for
        the others. one_long: 1 for one, up to 1/64 for the others. mostly_empty: uniform for a quarter, 0 for the
        others. A request without query tokens has no prefix either.
        """
        if self.uniform:
            return ((self.s, self.t),) * self.b
        if isinstance(self.lengths[0][0], int):
            return self.lengths  # type: ignore[no-any-return]
        said = dict(self.lengths)
        if "queries" in said:
            return tuple(zip(_shares(said["queries"], [1] * self.b), _shares(said["keys"], [1] * self.b), strict=True))
        rng = random.Random(said["seed"])
        weights = _weights(said["name"], self.b, rng)
        queries = _shares(self.b * self.s, weights)
        if self.t <= self.s:
            return tuple(zip(queries, _shares(self.b * self.t, weights), strict=True))
        drawn = _weights(said["name"], self.b, rng)
        drawn = [w if q else 0.0 for w, q in zip(drawn, queries, strict=True)]
        if not any(drawn):
            drawn = [float(q > 0) for q in queries]
        prefixes = _shares(self.b * (self.t - self.s), drawn)
        return tuple((q, q + prefix) for q, prefix in zip(queries, prefixes, strict=True))

    @property
    def query_tokens(self) -> int:
        """Query tokens of all requests: rows of q."""
        if self.uniform or self._drawn:
            return self.b * self.s
        return sum(q for q, _ in self.pairs)

    @property
    def keys(self) -> int:
        """Keys of all requests: rows of k and v."""
        if self.uniform or self._drawn:
            return self.b * self.t
        return sum(k for _, k in self.pairs)

    @property
    def longest(self) -> tuple[int, int]:
        """The most query tokens and the most keys of a request."""
        pairs = ((self.s, self.t),) if self.uniform else self.pairs
        return max(q for q, _ in pairs), max(k for _, k in pairs)

    @property
    def scale(self) -> float:
        """Factor on q·k before the softmax."""
        return (self.d + self.p) ** -0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def rows(self) -> int:
        """Query rows of one request and head."""
        return self.s

    @property
    def label(self) -> str:
        text = f"b{self.b}_s{self.s}_h{self.h}_t{self.t}"
        text += f"_kv{self.h_kv}" if self.grouped else ""
        text += "_causal" if self.causal else ""
        if not self.uniform:
            text += f"_{self.lengths[0][1]}" if self._drawn else "_list"
        text += "_strided" if self.strided_kv else ""
        default = PrefillProblem
        text += f"_d{self.d}_p{self.p}" if (self.d, self.p) != (default.d, default.p) else ""
        return text if self.dtype == "bf16" else f"{text}_{self.dtype}"

    def problem_class(self) -> PrefillClass:
        return PrefillClass(**{f.name: getattr(self, f.name) for f in dataclasses.fields(PrefillClass)})

    def replace(self, **changes: Any) -> Self:
        """A copy with other fields; keys and their heads stay as many as queries and theirs where they were so. With
        other b, s or t, lengths that are not given are uniform, unless they are drawn by name."""
        for name, like in (("t", "s"), ("h_kv", "h")):
            if getattr(self, name) == getattr(self, like) and like in changes:
                changes.setdefault(name, changes[like])
        if not self.uniform and not self._drawn and changes.keys() & {"b", "s", "t"}:
            changes.setdefault("lengths", "uniform")
        return super().replace(**changes)

    # ---------------------------------------------------------------- cost
    def cost(self) -> Cost:
        """FLOPs and minimal bytes: in each head a pair costs 2(d + p) for q·k and 2d for p·v; all tensors move once,
        but keys that no query sees for want of query tokens.

        A causal problem counts the pairs that attend only.
        """
        if self.uniform:
            attending, read = self.b * _attending(self.s, self.t, self.causal), self.b * self.t
        else:
            attending = sum(_attending(s, t, self.causal) for s, t in self.pairs)
            read = sum(t for s, t in self.pairs if s)
        columns = (self.query_tokens * self.h + read * self.h_kv) * (2 * self.d + self.p)
        return Cost(attending * 2 * (2 * self.d + self.p) * self.h, columns * self.element_bytes, attending)

    def input_bytes(self) -> int:
        columns = (self.query_tokens * self.h + self.keys * self.h_kv) * (2 * self.d + self.p)
        return columns * self.element_bytes + 4 * self.query_tokens * self.h + 8 * (self.b + 1)

    def output_bytes(self) -> int:
        return self.query_tokens * self.h * (self.d * self.element_bytes + 4)

    # ---------------------------------------------------------------- records
    def to_record(self) -> dict[str, Any]:
        """The fields in the order in which records of whole prompts had them; what is as it was there is left out."""
        data = super().to_record()
        if self.t == self.s:
            del data["t"]
        if not self.grouped:
            del data["h_kv"]
        if self.softmax_scale is None:
            del data["softmax_scale"]
        if self.uniform:
            del data["lengths"]
        elif isinstance(self.lengths[0][0], int):
            data["lengths"] = [list(pair) for pair in self.lengths]
        else:
            data["lengths"] = dict(self.lengths)
        if not self.strided_kv:
            del data["strided_kv"]
        return data

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_record`. Old records have fields of decode, which are allowed where they say what holds for
        every prefill: no decompressed tokens beside latents, and dims and pages of a cache that is not read. In these
        h_kv counts latent caches: of heads, all have their own keys."""
        fields = dict(data)
        if fields.get("t") is not None and "s" not in fields:
            fields["s"] = fields["t"]
        if fields.pop("n", 0) != 0:
            raise UserError(f"problem.n = {data['n']!r} is no prefill's: it has no latents.")
        of_decode = fields.keys() & {"k", "page"}
        for name in of_decode:
            del fields[name]
        if of_decode and fields.get("h_kv") == 1:
            del fields["h_kv"]
        return super().from_record(fields)


def _attending(s: int, t: int, causal: bool) -> int:
    """Pairs of a query token and a key that attend, of one request and head."""
    if not causal:
        return s * t
    return s * t - s * (s - 1) // 2 if t >= s else t * (t + 1) // 2


def _weights(name: str, b: int, rng: random.Random) -> list[float]:
    """How much of all tokens each request has, as `PrefillProblem.pairs` says of a name."""
    if name == "ragged":
        return [rng.random() for _ in range(b)]
    if name == "normal":
        return [max(rng.normalvariate(1.0, 0.5), 0.0) for _ in range(b)]
    if name == "lognormal":
        return [rng.lognormvariate(0.0, 1.0) for _ in range(b)]
    if name == "mostly_empty":
        weights = [0.1 + rng.random() if i % 4 == 0 else 0.0 for i in range(b)]
    else:
        every, most = (2, 1 / 16) if name == "bimodal" else (b, 1 / 64)
        weights = [1.0 if i % every == 0 else rng.uniform(0.0, most) for i in range(b)]
    rng.shuffle(weights)
    return weights


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that are `total` together and go with the weights; equal where all of these are 0."""
    if not any(weights):
        weights = [1.0] * len(weights)
    whole, ends = math.fsum(weights), [0]
    for sum_ in itertools.accumulate(weights):
        ends.append(min(round(total * (sum_ / whole)), total))
    ends[-1] = total
    return [end - begin for begin, end in itertools.pairwise(ends)]


# ---------------------------------------------------------------- inputs
def make_inputs(
    problem: PrefillProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal", poison: bool = True, **_: Any
) -> tuple[Any, ...]:
    """Random (q, k, v, cu_seqlens_q, cu_seqlens_k). poison: `BEHIND` rows of NaN lie in memory behind each of q, k and
    v, which are views without them. Options of paged inputs have no meaning here and are passed over."""
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"prefill input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)

    def draw(rows: int, heads: int, columns: int) -> Any:
        held = torch.empty((rows + BEHIND * poison, heads, columns), dtype=problem.torch_dtype, device=device)
        held[rows:] = math.nan
        held[:rows].normal_(generator=generator)
        if dist != "normal":
            held[:rows].div_(10).clamp_(-1.0, 1.0)
        return held[:rows]

    width = problem.d + problem.p
    q = draw(problem.query_tokens, problem.h, width)
    if problem.strided_kv:
        k, v = draw(problem.keys, problem.h_kv, width + problem.d).split((width, problem.d), dim=-1)
    else:
        k, v = draw(problem.keys, problem.h_kv, width), draw(problem.keys, problem.h_kv, problem.d)
    offsets = [torch.tensor([0, *lens]).cumsum(0) for lens in zip(*problem.pairs, strict=True)]
    if dist in ("nan", "extremes", "neighbours"):
        _disturb(problem, dist, q, k, v, *(x.tolist() for x in offsets))
    return q, k, v, *(x.to(torch.int32).to(device) for x in offsets)


def _disturb(problem: PrefillProblem, dist: str, q: Any, k: Any, v: Any, of_q: list[int], of_k: list[int]) -> None:
    """Makes the inputs what these distributions say, in place. of_q, of_k: where each request's rows begin, and the
    end."""
    if dist == "nan":
        if of_q[-1]:
            end = next(end for end in of_q if end)
            q[end - 1, 0, 0] = math.nan
        if of_k[-1]:
            begin = next(begin for begin in reversed(of_k) if begin < of_k[-1])
            k[begin, -1, -1] = math.nan
    elif dist == "extremes":
        stretch(q, k, [begin for begin, end in itertools.pairwise(of_k) if end > begin], problem.scale)
    else:
        for i in range(0, problem.b, 2):
            q[of_q[i] : of_q[i + 1]] = math.nan
            k[of_k[i] : of_k[i + 1]] = math.nan
            v[of_k[i] : of_k[i + 1]] = math.nan


def stretch(q: Any, k: Any, firsts: Sequence[int], scale: float) -> None:
    """Makes logits as large as `decode.EXACT`: that of the first key of each request, which are rows `firsts` of k, and
    those of all others as far below zero, from up to 64 last columns of q and k, (tokens, heads, columns)."""
    import torch

    w = min(64, q.shape[-1])
    signs = torch.where(torch.arange(w) % 3 == 0, -1.0, 1.0).to(q)
    q[..., :-w], q[..., -w:] = 0.0, 64.0 * signs
    size = decode.EXACT / (64.0 * w * (scale or 1.0))
    k[..., -w:] = -size * signs
    k[list(firsts), :, -w:] = size * signs


# ---------------------------------------------------------------- oracle
def prefill_reference(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    scale: float,
    causal: bool,
    compute_dtype: Any = None,
) -> tuple[Any, Any]:
    """The oracle: out (n, h, d) and lse (h, n) in float64, or in float32 above `decode.FLOAT64_FLOPS`; NaN in rows
    behind the last request. Waits for the device.

    A head of keys at a time, with blocks of rows, so that memory is bounded whatever the length.
    """
    import torch

    n, h, width = q.shape
    m, h_kv, d = v.shape
    if tuple(k.shape) != (m, h_kv, width) or h % h_kv:
        raise UserError(
            f"prefill wants k (m, h_kv, d + p) and v (m, h_kv, d) for q {tuple(q.shape)}; "
            f"they are {tuple(k.shape)} and {tuple(v.shape)}."
        )
    of_q, of_k, group = cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), h // h_kv
    if compute_dtype is None:
        limit = decode.FLOAT64_FLOPS["cuda" if q.is_cuda else "cpu"]
        lens = ([end - begin for begin, end in itertools.pairwise(x)] for x in (of_q, of_k))
        pairs = sum(tokens * keys for tokens, keys in zip(*lens, strict=True))
        compute_dtype = torch.float64 if 2.0 * h * pairs * (width + d) <= limit else torch.float32
    out = torch.full((n, h, d), math.nan, dtype=compute_dtype, device=q.device)
    lse = torch.full((h, n), math.nan, dtype=compute_dtype, device=q.device)
    out[: of_q[-1]], lse[:, : of_q[-1]] = 0.0, -math.inf
    with decode.full_precision():
        for tokens, seen in zip(*(itertools.starmap(slice, itertools.pairwise(x)) for x in (of_q, of_k)), strict=True):
            s = tokens.stop - tokens.start
            if s == 0 or seen.stop == seen.start:
                continue
            for j in range(h_kv):
                heads = slice(j * group, (j + 1) * group)
                rows = q[tokens, heads].reshape(s * group, width).to(compute_dtype)
                o, e = decode.attend(
                    rows, k[seen, j].to(compute_dtype), v[seen, j].to(compute_dtype), group, s, scale, causal
                )
                out[tokens, heads] = o.view(s, group, d)
                lse[heads, tokens] = e.masked_fill(e == math.inf, -math.inf).view(s, group).t()
    return out, lse


# ---------------------------------------------------------------- bounds
def bounds(dist: str) -> dict[str, Bound]:
    """The bounds of out and lse on inputs of a distribution."""
    found = decode.bounds_for(dist)
    if found is not decode.FLASHMLA:
        return found
    return {**found, "out": dataclasses.replace(found["out"], row_mean=decode.ROW_MEAN)}


# ---------------------------------------------------------------- cases
#: Names of the cases of the check, in order, with what each is for.
CASES = {
    "own": "the problem as it is (on a CPU: cut down to short prompts and a head or two)",
    "short": "prompts just longer than a tile, 65 tokens, with N(0, 1) values",
    "edges": "prompts shorter than, equal to and just longer than a tile: 1, 63, 64, 127, 129 tokens",
    "normal": "N(0, 1) values, with the mask as in the problem",
    "bound": "other tensors bound to the planned kernel",
    "ragged": "prompts of all these lengths in one batch, some of them empty",
    "chunks": "chunks behind prefixes of any length, requests without queries or keys, queries that see no key",
    "shared": "heads that share keys and values, two and all of them",
    "strided": "k and v as views of one tensor",
    "in_place": "lengths change under a planned kernel, in the same tensors",
    "behind": "tensors that are longer than all requests together, NaN behind these, which nothing is written to",
    "neighbours": "requests that are NaN as a whole, between others that are not",
    "nan": "a query row and a key that are NaN, beside others that are not, planned anew",
    "extremes": "logits as large as float32 scores tell keys apart, of both signs, planned anew",
    "scale_zero": "a scale of 0: every key counts as much, planned anew",
    "scale_negative": "a scale below 0, planned anew",
}
QUICK = ("own", "short", "normal", "bound", "ragged", "chunks")
#: Cases that hold this project's kernels to what it promises; other libraries promise other things.
PROMISED = (*decode.PROMISED, "behind", "neighbours")

#: Lengths around tiles of 64 and 128, out of order, and empty requests first, last and in a row; few for a CPU.
_RAGGED = (0, 129, 1, 64, 0, 0, 63, 200, 128, 127, 65, 0)
_RAGGED_CPU = (0, 67, 1, 0, 0, 16, 0)
#: (query tokens, keys) of chunks: of one token and of tiles, behind prefixes; more queries than keys; one side empty.
_CHUNKS = ((1, 129), (64, 64), (65, 300), (0, 77), (33, 0), (128, 257), (10, 4), (0, 0), (70, 6), (5, 5))
_CHUNKS_CPU = ((1, 33), (16, 67), (0, 7), (5, 0), (9, 4), (5, 5))


def _cases(problem: PrefillProblem, on_gpu: bool) -> Iterator[Case]:
    heads = _with_heads(problem, 8 if on_gpu else 2).replace(lengths="uniform")
    own = problem if on_gpu else _cut_down(problem)
    yield Case("own", own, "flashmla", planned=True)
    yield Case("short", heads.replace(b=2, s=65, t=65), "normal", planned=True)
    for edge in (1, 63, 64, 127, 129):
        yield Case("edges", heads.replace(b=2, s=edge, t=edge), "normal", planned=True)
    s = min(problem.s, 1000 if on_gpu else 97)
    yield Case("normal", heads.replace(b=1, s=s, t=s), "normal", planned=True)
    yield Case("bound", own.replace(b=1) if own.uniform else own, "normal")
    prompts, chunks = (_RAGGED, _CHUNKS) if on_gpu else (_RAGGED_CPU, _CHUNKS_CPU)
    ragged = _of_lengths(heads, prompts)
    yield Case("ragged", ragged, "normal", planned=True)
    yield Case("chunks", _of_lengths(heads, chunks), "normal", planned=True)
    for shared in (2, 4):
        grouped = heads.replace(h=4, h_kv=4 // shared)
        yield Case("shared", _of_lengths(grouped, chunks[:3]), "normal", planned=True)
    yield Case("strided", ragged.replace(strided_kv=True), "normal", planned=True)
    turned = _of_lengths(heads, prompts[::-1])
    yield Case("in_place", ragged, "normal", planned=True, then=turned)
    yield Case("behind", _of_lengths(heads, chunks), "normal", planned=True, alter=_longer)
    yield Case("neighbours", _of_lengths(heads, prompts[1:]), "neighbours", planned=True)
    few = heads.replace(b=2, s=129 if on_gpu else 97)
    few = few.replace(t=few.s)
    for dist in ("nan", "extremes"):
        yield Case(dist, few, dist, planned=True)
    yield Case("scale_zero", few.replace(softmax_scale=0.0), "flashmla", planned=True)
    yield Case("scale_negative", few.replace(softmax_scale=-abs(problem.scale) or -1.0), "normal", planned=True)


def _with_heads(problem: PrefillProblem, most: int) -> PrefillProblem:
    """The problem with at most so many heads of queries, or with one of keys."""
    group = problem.h // problem.h_kv
    h_kv = min(problem.h_kv, max(1, most // group))
    return problem.replace(h=h_kv * group, h_kv=h_kv)


def _of_lengths(problem: PrefillProblem, lengths: Sequence[Any]) -> PrefillProblem:
    return problem.replace(b=len(lengths), lengths=lengths)


def _cut_down(problem: PrefillProblem) -> PrefillProblem:
    """The problem with two requests at most, of at most 97 query tokens each and as many keys before these."""
    cut = _with_heads(problem, 2)
    pairs = [(min(s, 97), min(t, min(s, 97) + min(abs(t - s), 97))) for s, t in problem.pairs[:2]]
    if problem.uniform:
        return cut.replace(b=len(pairs), s=pairs[0][0], t=pairs[0][1])
    return _of_lengths(cut, pairs)


def _longer(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """q, k and v with rows of NaN behind the last request."""
    q, k, v, *offsets = inputs
    longer = (x.new_full((len(x) + 77, *x.shape[1:]), math.nan) for x in (q, k, v))
    return *(y.index_copy_(0, _rows(x), x) for x, y in zip((q, k, v), longer, strict=True)), *offsets


def _rows(x: Any) -> Any:
    import torch

    return torch.arange(len(x), device=x.device)


# ---------------------------------------------------------------- the workload
def reference(problem: PrefillProblem, *inputs: Any) -> tuple[Any, Any]:
    """The oracle on inputs of the problem."""
    return prefill_reference(*inputs, scale=problem.scale, causal=problem.causal)


def write(problem: PrefillProblem, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Writes the oracle's results into (out, lse), but in rows behind the last request. Waits for the device."""
    (out, lse), end = outputs, int(inputs[3][-1])
    found, own = reference(problem, *inputs)
    out[:end].copy_(found[:end])
    lse[:, :end].copy_(own[:, :end])


def rebound(problem: PrefillProblem, *inputs: Any) -> PrefillProblem:
    """The problem of other inputs of the same class; requests and lengths may differ, which stay on the device.

    A kernel that was planned for requests which are all alike is bound to such: lengths are then what the rows of q and
    k leave for each. Else nobody knows them. Raises `UserError` when the class differs.
    """
    if len(inputs) != 5:
        raise UserError(f"cannot bind: 5 inputs are wanted, q, k, v and both cu_seqlens, and {len(inputs)} given.")
    q, k, v, of_q, of_k = inputs
    want = {"q": (problem.h, problem.d + problem.p), "k": (problem.h_kv, problem.d + problem.p),
            "v": (problem.h_kv, problem.d)}  # fmt: skip
    for name, x in zip(want, (q, k, v), strict=True):
        if x.dim() != 3 or tuple(x.shape[1:]) != want[name]:
            raise UserError(
                f"cannot bind: {name} is {tuple(x.shape)}, and this kernel was planned for (tokens, {want[name][0]}, "
                f"{want[name][1]}); plan a new kernel."
            )
        if x.dtype != problem.torch_dtype:
            raise UserError(
                f"cannot bind: the kernel was planned for {problem.dtype}, and {name} is {x.dtype}; plan a new kernel."
            )
    if len(k) != len(v):
        raise UserError(f"cannot bind: k has {len(k)} rows and v {len(v)}; give both as many.")
    b = len(of_q) - 1
    if of_q.dim() != 1 or b < 1 or of_k.shape != of_q.shape:
        raise UserError("cannot bind: cu_seqlens_q and cu_seqlens_k must have one entry more than there are requests.")
    if not problem.uniform:
        return problem.replace(b=b, lengths={"queries": len(q), "keys": len(k)})
    if len(q) % b or len(k) % b or not len(q):
        raise UserError(
            f"cannot bind: the kernel was planned for requests that are all alike, and {len(q)} query tokens with "
            f"{len(k)} keys are not {b} of these; plan a new kernel."
        )
    return problem.replace(b=b, s=len(q) // b, t=len(k) // b)


def as_bound(problem: PrefillProblem) -> PrefillProblem:
    """What `rebound` makes of the problem's own inputs."""
    if problem.uniform:
        return problem
    return problem.replace(lengths={"queries": problem.query_tokens, "keys": problem.keys})


def small(problem: PrefillProblem) -> PrefillProblem:
    """One prompt of 160 tokens (two unequal ones where requests are), in at most 4 heads: seconds on a CPU."""
    few = _with_heads(problem, 4)
    before = 64 if problem.t > problem.s else 0
    if problem.uniform:
        return few.replace(b=1, s=160, t=160 + before)
    return _of_lengths(few, ((131, 131 + before), (29, 29 + 2 * before)))


#: Query heads and heads of keys of published models, whole and after tensor parallelism: DeepSeek, Kimi K2 and K3.
SERVED_HEADS = ((128, 128), (64, 64), (32, 32), (16, 16), (12, 12), (8, 8), (32, 8), (16, 2))
#: (d, p) of published models: DeepSeek, Mistral Small 4, GLM-5, dots3, MiniCPM3.
SERVED_WIDTHS = ((128, 64), (128, 64), (128, 64), (128, 0), (256, 0), (128, 128), (64, 32))
MOST_DRAWN = 1 << 14  # query tokens of a drawn problem
MOST_KEYS = 1 << 17  # of one of its requests


def draw(rng: random.Random) -> dict[str, Any]:
    """Fields of a problem as a server may have it, causal: b log-uniform in 1..64, tokens of all requests log-uniform
    up to 16k; a chunk behind a prefix in one of three; lengths of any distribution."""
    b = round(2 ** rng.uniform(0, 6))
    h, h_kv = rng.choice(SERVED_HEADS)
    d, p = rng.choice(SERVED_WIDTHS)
    s = max(1, round(2 ** rng.uniform(10, math.log2(MOST_DRAWN))) // b)
    # Keys of all requests are bounded too, so that k and v of 128 heads fit beside a second set of inputs.
    most = min(MOST_KEYS // b, 16 * MOST_DRAWN // max(b, h_kv // 8))
    t = max(s, round(2 ** rng.uniform(math.log2(s), math.log2(max(s, most))))) if rng.randrange(3) == 0 else s
    name, seed = rng.choice(LENGTH_NAMES), rng.randrange(1 << 16)
    lengths = "uniform" if name == "uniform" else {"name": name, "seed": seed}
    return {"b": b, "s": s, "t": t, "h": h, "h_kv": h_kv, "d": d, "p": p, "causal": True, "lengths": lengths}


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    s = given.get("s", given.get("t", 160 if small else 4096))
    return {"b": 1, "s": s, **({"h": 4} if small else {"causal": True})}


WORKLOAD = Workload(
    name="prefill",
    problem=PrefillProblem,
    outputs=(
        Output("out", ("n", "h", "d")),
        Output("lse", ("h", "n"), dtype="float32", rows=False),
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
    draw=draw,
)
