"""One decode step of a whole attention layer (MLA), from the layer's hidden states to what goes into the residual.

    hidden (b, hidden) · down → [query, compressed (q_rank) | latent (k) | rope (p)]
    query, normalised · up    → q, h heads of d columns without rope and p with it
    latent, normalised; rope, rotated by the token's position       → the token's row of the paged cache
    [q · W_UK | rotated rope of q] over the request's rows, the new one among them   → attended (b, h, k)
    attended · W_UVᵀ → h heads of d columns · out   → out (b, hidden)

That is DeepSeek's attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1), of one new token for
each of b requests. Weights are stored as checkpoints have them, (columns out, columns in); those of the two
down-projections lie behind one another, so that one product computes both, and W_UK and W_UV are one weight, as in
`workload.gemm`.

    inputs    hidden, kv_cache (pages, page, 1, k + p), page_table (b, width), seq_lens (b,), positions (b,),
              slots (b,), table (positions, p), down, q_norm, kv_norm, up, kv_up, out: `NAMES`
    outputs   out (b, hidden), and row (b, k + p): what was written into the cache for each request

seq_lens count the new token. A request without tokens (a slot of a padded batch) has length 0, slot -1 and position 0:
nothing is written for it, and its output is 0. The cache is an input that a call writes into: the new rows hold NaN
before, whether inputs are poisoned or not, and nothing else may change.

Distributions of inputs (`dist`): normal: N(0, 1) for hidden states and the cache, and weights that keep values at
about 1. large: hidden states 256 times as large, which norms take out again; the weights of the cached rope columns,
which no norm follows, are as many times smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mla_var3.errors import UserError, nearest
from mla_var3.workload import (
    Bound,
    Case,
    Cost,
    Output,
    Problem,
    Workload,
    check_bound,
    check_integer,
    decode,
    norm,
    rope,
)
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.gemm import GemmProblem
from mla_var3.workload.norm import NormProblem
from mla_var3.workload.rope import RopeProblem

NAMES = (
    "hidden", "kv_cache", "page_table", "seq_lens", "positions", "slots", "table", "down", "q_norm", "kv_norm", "up",
    "kv_up", "out",
)  # fmt: skip
CACHE = NAMES.index("kv_cache")
DISTRIBUTIONS = {"normal": 1.0, "large": 256.0}  # with what hidden states are multiplied
EPS = 1e-6


@dataclass(frozen=True)
class LayerClass:
    """What compiled kernels are specialised on: everything of a problem but requests, lengths and the hidden size."""

    h: int
    q_rank: int
    k: int
    p: int
    d: int
    page: int
    dtype: str

    def key(self) -> str:
        return f"layer_h{self.h}_q{self.q_rank}_k{self.k}_p{self.p}_d{self.d}_{self.page}_{self.dtype}"


@dataclass(frozen=True)
class LayerProblem(Problem):
    """b: requests. t: cached tokens of each, the new one included. lengths: as of `MlaProblem`, where they differ.
    h: heads. hidden: columns of a hidden state. q_rank: of the compressed query. k, p: of latent and rope. d: columns
    of a head without rope, and of a value. page: tokens a cache page. dtype: of states, weights and cache. Raises
    `UserError`, naming the field, when it makes no sense."""

    workload: ClassVar[str] = "layer"

    b: int = 1
    t: int = 4096
    h: int = 128
    hidden: int = 7168
    q_rank: int = 1536
    k: int = 512
    p: int = 64
    d: int = 128
    page: int = 64
    dtype: str = "bf16"
    lengths: Any = "uniform"

    def __post_init__(self) -> None:
        for name in ("hidden", "q_rank", "k", "d"):
            check_integer(name, getattr(self, name), 1)
        check_integer("p", self.p, 2)
        if self.p % 2:
            raise UserError(f"problem.p = {self.p} is odd: rope turns pairs of columns.")
        attention = self.attention  # which judges the rest
        object.__setattr__(self, "lengths", attention.lengths)
        object.__setattr__(self, "t", attention.t)

    # ---------------------------------------------------------------- its parts
    @property
    def attention(self) -> MlaProblem:
        """Attention of the absorbed queries."""
        return MlaProblem(
            b=self.b, t=self.t, h=self.h, k=self.k, p=self.p, d=self.d, page=self.page, dtype=self.dtype,
            lengths=self.lengths,
        )  # fmt: skip

    @property
    def norms(self) -> NormProblem:
        """Both norms of the down-projection's rows, in one problem."""
        return NormProblem(
            rows=self.b, width=self.q_rank, second=self.k, rest=self.p, dtype=self.dtype, eps=EPS
        )  # fmt: skip

    @property
    def rotation(self) -> RopeProblem:
        """Rope of q and k, and the new rows' way into the cache."""
        return RopeProblem(
            tokens=self.b, h=self.h, k=self.k, p=self.p, columns=self.d + self.p, rest=self.q_rank + self.k,
            page=self.page, positions=self.positions, dtype=self.dtype,
        )  # fmt: skip

    def product(self, side: str) -> GemmProblem:
        """The product with W_UK (side "q") or W_UV ("out") of every head."""
        return GemmProblem(side=side, tokens=self.b, h=self.h, k=self.k, p=self.p, d=self.d, dtype=self.dtype)

    @property
    def positions(self) -> int:
        """Rows of the table of cosines and sines."""
        return max(1, *self.attention.seq_lens)

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights, by name."""
        return {
            "down": (self.q_rank + self.k + self.p, self.hidden),
            "q_norm": (self.q_rank,),
            "kv_norm": (self.k,),
            "up": (self.h * (self.d + self.p), self.q_rank),
            "kv_up": (self.h * 2 * self.d, self.k),
            "out": (self.hidden, self.h * self.d),
        }

    # ---------------------------------------------------------------- what tables and records need
    @property
    def label(self) -> str:
        return self.attention.label.replace("_s1_", "_")

    def problem_class(self) -> LayerClass:
        return LayerClass(self.h, self.q_rank, self.k, self.p, self.d, self.page, self.dtype)

    def to_record(self) -> dict[str, Any]:
        return {**super().to_record(), "lengths": self.attention.to_record()["lengths"]}

    def cost(self) -> Cost:
        """FLOPs and minimal bytes of all parts: weights and cached tokens move once, hidden states in and out, the new
        rows out. What one part hands to the next need not move: it may stay in the L2."""
        attention = self.attention.cost()
        plain = sum(math.prod(self.weights[name]) for name in ("down", "up", "out"))
        heads = sum(self.product(side).cost().flops for side in ("q", "out"))
        weights = sum(math.prod(shape) for shape in self.weights.values())
        cached = sum(self.attention.seq_lens) * (self.k + self.p)
        moved = weights + cached + self.b * (2 * self.hidden + self.k + self.p)
        return Cost(2 * self.b * plain + heads + attention.flops, moved * self.element_bytes, attention.pairs)

    def output_bytes(self) -> int:
        return self.b * (self.hidden + self.k + self.p) * self.element_bytes

    def input_bytes(self) -> int:
        weights = sum(math.prod(shape) for shape in self.weights.values())
        cache = self.attention.num_pages * self.page * (self.k + self.p)
        tables = 4 * (self.positions * self.p + self.b * (self.attention.max_pages + 5))
        return (weights + cache + self.b * self.hidden) * self.element_bytes + tables + self.output_bytes()


# ---------------------------------------------------------------- inputs
def make_inputs(
    problem: LayerProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal", poison: bool = True, **_: Any
) -> tuple[Any, ...]:
    """Random inputs of the problem, in the order of `NAMES`. poison: as of `workload.decode`, in what belongs to no
    request; the new rows hold NaN either way."""
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"layer input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    attention, dtype = problem.attention, problem.torch_dtype
    # One head of queries: they are thrown away.
    made = decode.make_inputs(attention.replace(h=1), device, seed=seed, dist="normal", poison=poison)
    _, kv_cache, page_table, seq_lens = made
    generator = torch.Generator(device=device)
    generator.manual_seed(seed + 7)

    def draw(*shape: int, scale: float = 1.0) -> Any:
        return torch.randn(shape, dtype=torch.float32, device=device, generator=generator).mul_(scale).to(dtype)

    last = (seq_lens.long() - 1).clamp(min=0)
    page = page_table.gather(1, (last // problem.page)[:, None])[:, 0].long()
    slots = torch.where(seq_lens > 0, page * problem.page + last % problem.page, -1)
    kv_cache.view(-1, problem.k + problem.p)[slots[seq_lens > 0]] = math.nan
    weights = []
    for name, shape in problem.weights.items():
        is_norm = name.endswith("_norm")
        weights.append(draw(*shape, scale=0.25).add_(1.0) if is_norm else draw(*shape, scale=shape[1] ** -0.5))
        if name == "down":
            weights[-1][-problem.p :] /= DISTRIBUTIONS[dist]
    hidden = draw(problem.b, problem.hidden, scale=DISTRIBUTIONS[dist])
    table = rope.rope_table(problem.positions, problem.p, device=device)
    return (hidden, kv_cache, page_table, seq_lens, last, slots, table, *weights)


def named(inputs: Any) -> dict[str, Any]:
    """Inputs by their names."""
    return dict(zip(NAMES, inputs, strict=True))


def written_rows(kv_cache: Any, slots: Any) -> Any:
    """(b, k + p): what the cache has in these slots; 0 where a slot is negative."""
    rows = kv_cache.flatten(0, -2)[slots.clamp(min=0)]
    return rows.masked_fill((slots < 0)[:, None], 0.0)


# ---------------------------------------------------------------- oracle
def reference(problem: LayerProblem, *inputs: Any) -> tuple[Any, Any]:
    """The oracle: (out, row) in float64, in which nothing is rounded between hidden states and outputs (attention in
    float32 where `decode` says so)."""
    import torch

    x = named(inputs)
    k, p, d, h = problem.k, problem.p, problem.d, problem.h
    query, latent, turning = (x["hidden"].double() @ x["down"].double().t()).split([problem.q_rank, k, p], 1)
    latent = norm.normalised(latent, x["kv_norm"], EPS)
    q = norm.normalised(query, x["q_norm"], EPS) @ x["up"].double().t()
    q_nope, q_rope = q.view(-1, h, d + p).split([d, p], -1)
    turns = x["table"][x["positions"]].double()
    cosines, sines = turns[:, : p // 2], turns[:, p // 2 :]
    q_rope = rope.rotated(q_rope, cosines[:, None], sines[:, None], interleaved=True)
    row = torch.cat([latent, rope.rotated(turning, cosines, sines, interleaved=True)], 1)
    there = x["slots"] >= 0
    # Its own copy of the cache: a call that is judged has written into that of the inputs.
    cache = x["kv_cache"].clone()
    cache.view(-1, k + p)[x["slots"][there]] = row[there].to(cache.dtype)
    w_uk, w_uv = x["kv_up"].view(h, 2, d, k).double().unbind(1)
    queries = torch.cat([torch.einsum("bhd,hdk->bhk", q_nope, w_uk), q_rope], -1)
    attended, _ = decode.reference(problem.attention, queries[:, None], cache, x["page_table"], x["seq_lens"])
    heads = torch.einsum("bhk,hdk->bhd", attended[:, 0].double(), w_uv)
    return heads.flatten(1) @ x["out"].double().t(), row.masked_fill(~there[:, None], 0.0)


def bounds(dist: str) -> dict[str, Bound]:
    """By output.

    A row is rounded to bf16 as a product, and again as normalised or rotated; out eight times on its way, each time by
    a relative error of 2^-9 · 3^-1/2 in the root mean square: 1e-5 of cosine difference in all, and 2.5e-5 of a row.
    Bounds are ten times that for the whole, and as much for a row. Of elements only far outliers fail, for where terms
    cancel, what is left has their errors.
    """
    return {
        "out": Bound(abs=2.0**-4, rel=2.0**-3, cos=1e-4, row_cos=2.5e-4),
        "row": Bound(abs=2.0**-4, rel=2.0**-6, cos=2e-5, row_cos=4e-5),
    }


# ---------------------------------------------------------------- cases
CASES = {
    "own": "the problem as it is (on a CPU: cut down to a few short requests), planned",
    "ragged": "requests of a few tokens, of whole pages and of one more beside the longest",
    "first_tokens": "requests of one to three tokens: most of what is attended was written by the call",
    "idle": "requests without a token between others: nothing is written for them, and they get 0",
    "large": "hidden states 256 times as large",
    "in_place": "lengths, pages, slots and values change under a bound kernel",
    "planned_one": "a single request, planned anew",
}
QUICK = ("own", "ragged")


def _of_lengths(problem: LayerProblem, lengths: list[int]) -> LayerProblem:
    return problem.replace(b=len(lengths), lengths=tuple(lengths))


def _cases(problem: LayerProblem, on_gpu: bool) -> Iterator[Case]:
    page = problem.page
    own = problem if on_gpu else small(problem)
    longest = min(max(problem.attention.seq_lens), 4096 if on_gpu else 2 * page + 3) or 1
    # As many requests as the problem has: a peer that compiles for a shape then compiles for one.
    edges = [longest, 1, page, page + 1, 2, max(longest - 1, 1)]
    ragged = [edges[i % len(edges)] for i in range(own.b)]
    yield Case("own", own, "normal", planned=True)
    yield Case("ragged", _of_lengths(own, ragged), "normal")
    yield Case("first_tokens", _of_lengths(own, [1, 2, 3]), "normal")
    yield Case("idle", _of_lengths(own, [0, longest, 0, 1]), "normal")
    yield Case("large", _of_lengths(own, ragged), "large")
    yield Case("in_place", _of_lengths(own, ragged), "normal", then=_of_lengths(own, [*ragged[1:], ragged[0]]))
    yield Case("planned_one", own.replace(b=1, lengths="uniform", t=longest), "normal", planned=True)


def rebound(problem: LayerProblem, *inputs: Any) -> LayerProblem:
    """The problem of other inputs of the same class: requests, lengths and the number of pages may differ. Raises
    `UserError` for a tensor that does not fit."""
    if len(inputs) != len(NAMES):
        raise UserError(f"cannot bind: this kernel takes {len(NAMES)} tensors, and {len(inputs)} are given.")
    x = named(inputs)
    b, (pages, page_table) = len(x["hidden"]), (len(x["kv_cache"]), x["page_table"])
    width = page_table.shape[-1]
    expected: dict[str, tuple[tuple[int, ...], str]] = {
        "hidden": ((b, problem.hidden), problem.dtype),
        "kv_cache": ((pages, problem.page, 1, problem.k + problem.p), problem.dtype),
        "page_table": ((b, width), "int32"),
        "seq_lens": ((b,), "int32"),
        "positions": ((b,), "int64"),
        "slots": ((b,), "int64"),
        "table": ((len(x["table"]), problem.p), "fp32"),
        **{name: (shape, problem.dtype) for name, shape in problem.weights.items()},
    }
    for name, (shape, dtype) in expected.items():
        check_bound(name, x[name], shape, dtype)
        if not x[name].is_contiguous():
            raise UserError(f"cannot bind: {name} has strides {tuple(x[name].stride())} and must be contiguous.")
    return problem.replace(b=b, t=width * problem.page, lengths="uniform")


def as_bound(problem: LayerProblem) -> LayerProblem:
    """What `rebound` makes of the problem's own inputs."""
    return problem.replace(t=problem.attention.max_pages * problem.page, lengths="uniform")


def small(problem: LayerProblem) -> LayerProblem:
    """Three short requests of a few heads, and hidden states of 256 columns: seconds on a CPU."""
    return problem.replace(
        b=3, h=min(problem.h, 4), hidden=min(problem.hidden, 256), lengths=(2 * problem.page + 3, 1, problem.page)
    )


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    return {"b": 2, "t": 130, "h": 4, "hidden": 256} if small else {"b": 32}


WORKLOAD = Workload(
    name="layer",
    problem=LayerProblem,
    outputs=(Output("out", ("request", "column")), Output("row", ("request", "column"))),
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
    updates=(CACHE,),
)
