"""Chunks of prompts that attend to a paged latent cache, in which their own rows are already.

A request has s new tokens, the newest of its t cached ones; what stands before them is its prefix. Its query token i
sees the cached tokens 0 .. t - s + i. Heads are decompressed: of a latent c of k columns, head j has the key columns
c · W_UKᵀ and the values c · W_UVᵀ, and all heads share the p rope columns of the row.

    q (n, h, d + p)   kv_cache (pages, page, k + p)   page_table (b, width) int32   seq_lens (b,) int32
    cu_seqlens_q (b + 1,) int32   kv_b (h · 2d, k): of each head d rows of W_UK, then d rows of W_UV
    →   out (n, h, d) in the inputs' dtype, lse (n, h) float32: the natural log-sum-exp of scale · q·k

Request i has the rows cu_seqlens_q[i] .. cu_seqlens_q[i + 1] - 1 of q. Lengths are read on the device; how many tokens
stand before the new ones in all, or more, is known on the host: b · t - b · s of a planned problem.

Distributions of inputs: normal: N(0, 1), with a kv_b that keeps keys and values at about 1; flashmla: a tenth of it.
Error bounds are those of decoding, with one more rounding on the way: of keys and values, or of absorbed queries and
what is attended.
"""

from __future__ import annotations

import dataclasses
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
)
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.gemm import GemmProblem
from mla_var3.workload.prefill import PrefillProblem

NAMES = ("q", "kv_cache", "page_table", "seq_lens", "cu_seqlens_q", "kv_b")
DISTRIBUTIONS = {"normal": 1.0, "flashmla": 0.1}  # with what N(0, 1) is multiplied


@dataclass(frozen=True)
class ChunkedClass:
    """What compiled kernels are specialised on: everything of a problem but requests and lengths."""

    h: int
    k: int
    p: int
    d: int
    page: int
    dtype: str

    def key(self) -> str:
        return f"chunked_h{self.h}_k{self.k}_p{self.p}_d{self.d}_{self.page}_{self.dtype}"


@dataclass(frozen=True)
class ChunkedProblem(Problem):
    """b requests. s: new tokens of each. t: its cached tokens, these among them. lengths: "uniform", or pairs [new,
    cached], one a request. h: heads. k, p: columns of latent and rope. d: columns of a head without rope, and of a
    value. page: tokens a cache page. dtype: of queries, cache and weight. Raises `UserError`, naming the field, when it
    makes no sense."""

    workload: ClassVar[str] = "chunked_prefill"

    b: int = 1
    s: int = 512
    t: int = 4608
    h: int = 128
    k: int = 512
    p: int = 64
    d: int = 128
    page: int = 64
    dtype: str = "bf16"
    lengths: Any = "uniform"

    def __post_init__(self) -> None:
        for name in ("k", "page"):
            check_integer(name, getattr(self, name), 1)
        if self.lengths != "uniform" and isinstance(self.lengths, str | Mapping):
            raise UserError(f"problem.lengths = {self.lengths!r}: give uniform, or a list of [new, cached] tokens.")
        whole = self.attention  # which judges the rest
        for name in ("lengths", "s", "t"):
            object.__setattr__(self, name, getattr(whole, name))
        if short := next((pair for pair in whole.pairs if pair[0] > pair[1]), None):
            raise UserError(
                f"problem has {short[0]} new tokens of {short[1]} cached ones: the new ones are in the cache already."
            )

    # ---------------------------------------------------------------- its parts
    @property
    def attention(self) -> PrefillProblem:
        """Attention over decompressed heads."""
        return PrefillProblem(
            b=self.b, s=self.s, t=self.t, h=self.h, p=self.p, d=self.d, causal=True, dtype=self.dtype,
            lengths=self.lengths,
        )  # fmt: skip

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(new tokens, cached tokens) of each request."""
        return self.attention.pairs

    @property
    def query_tokens(self) -> int:
        return sum(new for new, _ in self.pairs)

    @property
    def prefix_tokens(self) -> int:
        """Tokens of all requests before their new ones."""
        return sum(cached - new for new, cached in self.pairs)

    @property
    def cache(self) -> MlaProblem:
        """Decoding over the same cache, of one head and one token a request."""
        return MlaProblem(
            b=self.b, s=1, t=max(1, *(cached for _, cached in self.pairs)), h=1, k=self.k, p=self.p, page=self.page,
            dtype=self.dtype, lengths=[cached for _, cached in self.pairs],
        )  # fmt: skip

    @property
    def decoding(self) -> MlaProblem:
        """Attention of absorbed queries: packed, causal, over page tables of any lengths."""
        return MlaProblem(
            b=self.b, t=self.cache.max_pages * self.page, h=self.h, k=self.k, p=self.p, d=self.d, page=self.page,
            dtype=self.dtype, causal=True, queries={"total": self.query_tokens}, softmax_scale=self.scale,
        )  # fmt: skip

    def piece(self, keys: int, causal: bool) -> PrefillProblem:
        """Attention of all new tokens to a piece of so many keys, whoever's they are."""
        return PrefillProblem(
            b=self.b, h=self.h, p=self.p, d=self.d, causal=causal, dtype=self.dtype,
            lengths={"queries": self.query_tokens, "keys": keys},
        )  # fmt: skip

    def product(self, side: str) -> GemmProblem:
        """The product with W_UK (side "q") or W_UV ("out") of every head."""
        return GemmProblem(
            side=side, tokens=self.query_tokens, h=self.h, k=self.k, p=self.p, d=self.d, dtype=self.dtype
        )

    @property
    def scale(self) -> float:
        """Factor on q·k before the softmax."""
        return (self.d + self.p) ** -0.5

    # ---------------------------------------------------------------- what tables and records need
    @property
    def label(self) -> str:
        text = f"b{self.b}_s{self.s}_h{self.h}_t{self.t}" + ("" if self.lengths == "uniform" else "_list")
        return text if self.dtype == "bf16" else f"{text}_{self.dtype}"

    def problem_class(self) -> ChunkedClass:
        return ChunkedClass(**{f.name: getattr(self, f.name) for f in dataclasses.fields(ChunkedClass)})

    def to_record(self) -> dict[str, Any]:
        lengths = self.lengths if self.lengths == "uniform" else [list(pair) for pair in self.lengths]
        return {**super().to_record(), "lengths": lengths}

    def cost(self) -> Cost:
        """FLOPs and minimal bytes of the decompressed form: attention over decompressed heads, the products that make
        keys and values of every cached token, and q, cache, weight and out, each moved once."""
        attention = self.attention.cost()
        cached = sum(t for s, t in self.pairs if s)
        products = 2 * cached * self.k * 2 * self.d * self.h
        moved = self.query_tokens * self.h * (2 * self.d + self.p) + cached * (self.k + self.p)
        moved += self.h * 2 * self.d * self.k
        return Cost(attention.flops + products, moved * self.element_bytes, attention.pairs)

    def input_bytes(self) -> int:
        cached = self.cache.num_pages * self.page * (self.k + self.p)
        columns = self.query_tokens * self.h * (self.d + self.p) + cached + self.h * 2 * self.d * self.k
        return columns * self.element_bytes + 4 * self.b * (self.cache.max_pages + 2) + 4

    def output_bytes(self) -> int:
        return self.query_tokens * self.h * (self.d * self.element_bytes + 4)


# ---------------------------------------------------------------- inputs
def make_inputs(
    problem: ChunkedProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal", poison: bool = True, **_: Any
) -> tuple[Any, ...]:
    """Random inputs of the problem, in the order of `NAMES`. poison: as of `workload.decode`, in rows of the cache that
    belong to no request."""
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"chunked_prefill input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    _, kv_cache, page_table, seq_lens = decode.make_inputs(problem.cache, device, seed=seed, dist=dist, poison=poison)
    generator = torch.Generator(device=device)
    generator.manual_seed(seed + 11)

    def draw(*shape: int, scale: float) -> Any:
        made = torch.randn(shape, dtype=torch.float32, device=device, generator=generator).mul_(scale)
        return made.to(problem.torch_dtype)

    q = torch.empty((problem.query_tokens, problem.h, problem.d + problem.p), dtype=problem.torch_dtype, device=device)
    q.normal_(generator=generator).mul_(DISTRIBUTIONS[dist])
    kv_b = draw(problem.h * 2 * problem.d, problem.k, scale=problem.k**-0.5)
    of_q = torch.tensor([0, *(new for new, _ in problem.pairs)]).cumsum(0).to(torch.int32).to(device)
    return q, kv_cache.squeeze(2), page_table, seq_lens, of_q, kv_b


def named(inputs: Any) -> dict[str, Any]:
    """Inputs by their names."""
    return dict(zip(NAMES, inputs, strict=True))


# ---------------------------------------------------------------- oracle
def reference(problem: ChunkedProblem, *inputs: Any) -> tuple[Any, Any]:
    """The oracle: out (n, h, d) and lse (n, h) in float64, or in float32 above `decode.FLOAT64_FLOPS`. A head of one
    request at a time. Waits for the device."""
    import torch

    x = named(inputs)
    q, k, d, h = x["q"], problem.k, problem.d, problem.h
    of_q, lens = x["cu_seqlens_q"].tolist(), x["seq_lens"].tolist()
    limit = decode.FLOAT64_FLOPS["cuda" if q.is_cuda else "cpu"]
    dtype = torch.float64 if problem.cost().flops <= limit else torch.float32
    out = torch.zeros((len(q), h, d), dtype=dtype, device=q.device)
    lse = torch.full((len(q), h), -math.inf, dtype=dtype, device=q.device)
    w_uk, w_uv = x["kv_b"].view(h, 2, d, k).to(dtype).unbind(1)
    with decode.full_precision():
        for i, length in enumerate(lens):
            tokens = slice(of_q[i], of_q[i + 1])
            s = tokens.stop - tokens.start
            if not s:
                continue
            pages = x["page_table"][i, : -(-length // problem.page)].long()
            rows = x["kv_cache"][pages].flatten(0, 1)[:length].to(dtype)
            for j in range(h):
                keys = torch.cat([rows[:, :k] @ w_uk[j].t(), rows[:, k:]], 1)
                queries = q[tokens, j].to(dtype)
                made, sums = decode.attend(queries, keys, rows[:, :k] @ w_uv[j].t(), 1, s, problem.scale, True)
                out[tokens, j], lse[tokens, j] = made.view(s, d), sums.view(s)
    return out, lse


def bounds(dist: str) -> Mapping[str, Bound]:
    """By output: four times those of decoding for out, eight times in cosine differences, which are squares: inner
    values are rounded once more, and each piece of a prefix once more when it is merged. That has room for a dozen
    merges, as the squares of their errors add up to half a rounding each: the worst row has 2.5e-5 of 4e-5 with 10
    merges, and 4.2e-5 with 24. lse by the errors of rounded keys."""
    of_decode = decode.bounds_for("normal" if dist == "normal" else "flashmla")
    out = of_decode["out"]
    return {
        "out": Bound(abs=4 * out.abs, rel=4 * out.rel, cos=8 * out.cos, row_cos=8 * out.row_cos),
        "lse": Bound(abs=2.0**-5, rel=2.0**-6, cos=1e-5),
    }


# ---------------------------------------------------------------- cases
CASES = {
    "own": "the problem as it is (on a CPU: cut down to a few short requests), planned",
    "chunks": "first chunks, chunks of few and of many tokens, requests without new tokens, one of one token",
    "normal": "N(0, 1) values, one request",
    "in_place": "lengths, pages and values change under a bound kernel",
}
QUICK = ("own", "chunks")
_CHUNKS = ((130, 130), (64, 700), (0, 65), (1, 1000), (300, 515), (3, 64))
_CHUNKS_CPU = ((5, 5), (9, 30), (0, 12), (1, 17))


def _cases(problem: ChunkedProblem, on_gpu: bool) -> Iterator[Case]:
    own = problem if on_gpu else small(problem)
    pairs = _CHUNKS if on_gpu else _CHUNKS_CPU
    mixed = own.replace(b=len(pairs), lengths=pairs)
    yield Case("own", own, "flashmla", planned=True)
    yield Case("chunks", mixed, "normal", planned=True)
    s = min(own.s, 200)
    yield Case("normal", own.replace(b=1, s=s, t=s + 131, lengths="uniform"), "normal", planned=True)
    swapped = mixed.replace(lengths=tuple(reversed(pairs)))
    yield Case("in_place", mixed, "normal", planned=True, then=swapped)


def rebound(problem: ChunkedProblem, *inputs: Any) -> ChunkedProblem:
    """The problem of other inputs of the same class, taken to be of as many tokens as its page table can name. Raises
    `UserError` for a tensor that does not fit."""
    if len(inputs) != len(NAMES):
        raise UserError(f"cannot bind: this kernel takes {len(NAMES)} tensors, and {len(inputs)} are given.")
    x = named(inputs)
    b, n, width = len(x["seq_lens"]), len(x["q"]), x["page_table"].shape[-1]
    expected: dict[str, tuple[tuple[int, ...], str]] = {
        "q": ((n, problem.h, problem.d + problem.p), problem.dtype),
        "kv_cache": ((len(x["kv_cache"]), problem.page, problem.k + problem.p), problem.dtype),
        "page_table": ((b, width), "int32"),
        "seq_lens": ((b,), "int32"),
        "cu_seqlens_q": ((b + 1,), "int32"),
        "kv_b": ((problem.h * 2 * problem.d, problem.k), problem.dtype),
    }
    for name, (shape, dtype) in expected.items():
        check_bound(name, x[name], shape, dtype)
        if not x[name].is_contiguous():
            raise UserError(f"cannot bind: {name} has strides {tuple(x[name].stride())} and must be contiguous.")
    return _of_tables(problem, b, n, width)


def _of_tables(problem: ChunkedProblem, b: int, n: int, width: int) -> ChunkedProblem:
    """n new tokens spread evenly, over requests that fill their rows of the page table."""
    cached = width * problem.page
    new = [(i + 1) * n // b - i * n // b for i in range(b)]
    return problem.replace(b=b, lengths=tuple((s, max(cached, s)) for s in new))


def as_bound(problem: ChunkedProblem) -> ChunkedProblem:
    """What `rebound` makes of the problem's own inputs."""
    return _of_tables(problem, problem.b, problem.query_tokens, problem.cache.max_pages)


def small(problem: ChunkedProblem) -> ChunkedProblem:
    """Three short requests of a few heads: seconds on a CPU."""
    return problem.replace(b=3, h=min(problem.h, 2), lengths=((9, 40), (1, 17), (12, 12)))


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    return {"b": 2, "s": 9, "t": 40, "h": 2} if small else {}


WORKLOAD = Workload(
    name="chunked_prefill",
    problem=ChunkedProblem,
    outputs=(Output("out", ("n", "h", "d")), Output("lse", ("n", "h"), dtype="float32", rows=False)),
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
)
