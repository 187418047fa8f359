"""RoPE of new tokens' queries and keys, and their way into the paged latent cache, in one step.

    q (tokens, h, columns), p rope columns last    latent (tokens, k), normalised    rope (tokens, p)
    positions (tokens,)    slots (tokens,)    table (positions, p) float32: cosines, then sines, p / 2 each
    →   out (tokens, h, k + p): the rotated columns of q behind k columns that nobody writes
        cache (pages, page, k + p): latent and rotated rope of token i in row slots[i] % page of page slots[i] // page

A token whose slot is negative, or past the last row of the cache, is not written (its q is rotated nonetheless), and no
other row of the cache is. Where a position is no row of the table, all rotated columns of its token are NaN. Pairs of
columns that turn together by position · frequency are (2i, 2i + 1), interleaved, as DeepSeek's models are trained, or
(i, i + p/2), halves, as weights are stored that were permuted for that. Results stay in the order of the inputs.

q's other columns, and what lies between rows of rope, belong to nobody and hold NaN. Rows of rope are `rest` columns
further apart than p: they are a slice of the projection that the latent comes from.

Distributions of inputs (`dist`):

    normal     N(0, 1), positions at random, slots at random in shuffled pages
    ends       positions 0 and the last one alone: no turn, and the largest
    huge       8e3 · N(0, 1), within fp16's range
    skipped    every third token has a negative slot
    none       no token has a slot
    beyond     every second token has a slot past the last row of the cache, some of them by far
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
    Rows,
    Workload,
    check_bound,
    check_dtype,
    check_integer,
)

DISTRIBUTIONS = ("normal", "ends", "huge", "skipped", "none", "beyond")
INDICES = {"int64": 8, "int32": 4}
HUGE = 8e3


# ---------------------------------------------------------------- the table
@dataclass(frozen=True)
class Yarn:
    """YaRN's stretching of a context, with the names and defaults of DeepSeek's `rope_scaling`.

    factor: of the context. original: positions that the model was trained on. beta_fast, beta_slow: turns within
    `original` above which a frequency stays as it is, and below which it is divided by the factor; a ramp lies between.
    mscale, mscale_all_dim: weights of the logarithm of the factor in the magnitude of the table, and of the softmax.
    """

    factor: float = 40.0
    original: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines; 1 where both weights are the same."""
        return _log_scale(self.factor, self.mscale) / _log_scale(self.factor, self.mscale_all_dim)

    @property
    def softmax(self) -> float:
        """Factor of the attention's softmax scale, which goes with the table."""
        return _log_scale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def _log_scale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def frequencies(columns: int, theta: float = 10000.0, yarn: Yarn | None = None) -> Any:
    """Radians that a position turns each of columns / 2 pairs, float64 on the CPU.

    Without YaRN theta^(-2i / columns). With it pair i keeps its frequency where it makes more than beta_fast turns in
    the original context, has it divided by the factor where it makes less than beta_slow, and a mixture between, linear
    in i (Peng et al. 2023, as DeepSeek-V3's model code has it, rounding of the ramp's ends included).
    """
    import torch

    pair = torch.arange(columns // 2, dtype=torch.float64)
    plain = theta ** (-2.0 * pair / columns)
    if yarn is None:
        return plain

    def pair_of(turns: float) -> float:
        return columns * math.log(yarn.original / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), columns - 1)
    stretched = ((pair - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return plain * (1.0 - stretched) + plain / yarn.factor * stretched


def rope_table(
    positions: int, columns: int = 64, *, theta: float = 10000.0, yarn: Yarn | None = None, device: Any = "cpu"
) -> Any:
    """(positions, columns) float32: cosines of columns / 2 pairs, then sines, times YaRN's magnitude.

    Angles are taken in float64: in float32 one of 160,000 radians is off by up to 0.008.
    """
    import torch

    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies(columns, theta, yarn)
    table = torch.cat([angles.cos(), angles.sin()], dim=1) * (1.0 if yarn is None else yarn.magnitude)
    return table.float().to(device)


# ---------------------------------------------------------------- the problem
@dataclass(frozen=True)
class RopeClass:
    """What a compiled kernel is specialised on: everything of a problem but tokens, positions, and distances."""

    h: int
    k: int
    p: int
    columns: int
    interleaved: bool
    page: int
    index: str
    dtype: str

    def key(self) -> str:
        order = "interleaved" if self.interleaved else "halves"
        return f"rope_h{self.h}_k{self.k}_p{self.p}_c{self.columns}_{order}_{self.page}_{self.index}_{self.dtype}"


@dataclass(frozen=True)
class RopeProblem(Problem):
    """tokens: new ones. h: query heads. k, p: latent and rope columns. columns: of a row of q: 192 as projected, or
    k + p where the other columns hold its latent form. rest: columns of nobody between rows of rope. interleaved: the
    convention. page: tokens of a cache page. positions: rows of the table. index: dtype of positions and slots.
    Raises `UserError`, naming the field, when it makes no sense."""

    workload: ClassVar[str] = "rope"
    layer: ClassVar[str] = "rope"

    tokens: int = 32
    h: int = 128
    k: int = 512
    p: int = 64
    columns: int = 192
    rest: int = 2048
    interleaved: bool = True
    page: int = 64
    positions: int = 163840
    index: str = "int64"
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("tokens", "h", "k", "page", "positions"):
            check_integer(name, getattr(self, name), 1)
        check_integer("p", self.p, 2)
        check_integer("columns", self.columns, self.p)
        check_integer("rest", self.rest, 0)
        check_dtype(self.dtype)
        if self.p % 2:
            raise UserError(f"problem.p = {self.p} is odd: columns turn in pairs.")
        if not isinstance(self.interleaved, bool):
            raise UserError(f"problem.interleaved = {self.interleaved!r} is not a boolean: use true or false.")
        if not isinstance(self.index, str) or self.index not in INDICES:
            raise UserError(f"problem.index = {self.index!r} is unknown: {nearest(str(self.index), INDICES)}.")

    @property
    def width(self) -> int:
        """Columns of a cached token."""
        return self.k + self.p

    @property
    def pages(self) -> int:
        """Pages of the cache: one more than the tokens fill."""
        return -(-self.tokens // self.page) + 1

    @property
    def label(self) -> str:
        text = f"n{self.tokens}_h{self.h}" + ("" if self.interleaved else "_halves")
        return text if self.dtype == "bf16" else f"{text}_{self.dtype}"

    def problem_class(self) -> RopeClass:
        return RopeClass(
            self.h, self.k, self.p, self.columns, self.interleaved, self.page, self.index, self.dtype
        )  # fmt: skip

    def cost(self) -> Cost:
        """FLOPs and minimal bytes: a pair costs 6; rows of the table are read once, by as many tokens as they have.
        Queries are rows with latent columns between them, which another kernel writes."""
        rotated, cached = self.tokens * (self.h + 1) * self.p, self.tokens * self.width
        written = (self.tokens * self.h * self.p + cached) * self.element_bytes
        tables = min(self.tokens, self.positions) * self.p * 4 + self.tokens * 2 * INDICES[self.index]
        of_query = self.p * self.element_bytes
        rows = Rows(self.tokens * self.h * of_query, of_query, self.width * self.element_bytes)
        return Cost(3 * rotated, 2 * written + tables, written=written, rows=rows)

    def input_bytes(self) -> int:
        row = self.h * self.columns + self.k + self.p + self.rest
        indices = self.tokens * 2 * INDICES[self.index] + self.positions * self.p * 4
        return self.tokens * row * self.element_bytes + indices + self.output_bytes()

    def output_bytes(self) -> int:
        return (self.tokens * self.h + self.pages * self.page) * self.width * self.element_bytes


def make_inputs(
    problem: RopeProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal", poison: bool = True, **_: Any
) -> tuple[Any, ...]:
    """Random (q, latent, rope, positions, slots, table). poison: NaN in columns that belong to nobody, else zeros."""
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"rope input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    n, p, fill, index = problem.tokens, problem.p, math.nan if poison else 0.0, getattr(torch, problem.index)

    def draw(*shape: int) -> Any:
        x = torch.randn(shape, dtype=torch.float32, device=device, generator=generator)
        return (x * HUGE if dist == "huge" else x).to(problem.torch_dtype)

    q = torch.full((n, problem.h, problem.columns), fill, dtype=problem.torch_dtype, device=device)
    q[..., -p:] = draw(n, problem.h, p)
    projected = torch.full((n, problem.rest + p), fill, dtype=problem.torch_dtype, device=device)
    rope = projected[:, problem.rest :]
    rope.copy_(draw(n, p))
    latent = draw(n, problem.k)
    positions = torch.randint(problem.positions, (n,), device=device, generator=generator)
    if dist == "ends":
        positions = torch.where(positions % 2 == 0, 0, problem.positions - 1)
    slots = torch.randperm(problem.pages * problem.page, device=device, generator=generator)[:n]
    if dist == "skipped":
        slots[::3] = -1
    elif dist == "none":
        slots[:] = -1
    elif dist == "beyond":
        slots[::2] += problem.pages * problem.page
        slots[::4] = torch.iinfo(index).max
    return q, latent, rope, positions.to(index), slots.to(index), _table(problem.positions, p, str(device))


_TABLES: dict[tuple[int, int, str], Any] = {}


def _table(positions: int, columns: int, device: str) -> Any:
    """DeepSeek-V3's table. One for all inputs, as a model has: it takes 42 MB, and seconds to make."""
    key = (positions, columns, device)
    if key not in _TABLES:
        _TABLES.clear()
        _TABLES[key] = rope_table(positions, columns, yarn=Yarn(), device=device)
    return _TABLES[key]


def new_outputs(problem: RopeProblem, q: Any, pages: int | None = None) -> tuple[Any, Any]:
    """(out, cache) for the tokens of q, uninitialised. pages: of the cache; default: those that `make_inputs` fills."""
    out = q.new_empty((q.shape[0], problem.h, problem.width))
    pages = problem.replace(tokens=q.shape[0]).pages if pages is None else pages
    return out, q.new_empty((pages, problem.page, problem.width))


def rotated(x: Any, cosines: Any, sines: Any, *, interleaved: bool) -> Any:
    """(..., p) with each pair turned. cosines, sines: (..., p / 2)."""
    import torch

    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)


def reference(problem: RopeProblem, *inputs: Any, pages: int | None = None) -> tuple[Any, Any]:
    """The oracle: (out, cache) in float64, NaN in what must not be written. pages: as of `new_outputs`."""
    return appended(problem, *inputs, held=[x.fill_(math.nan) for x in new_outputs(problem, inputs[0], pages)])


def written(slots: Any, rows: int) -> Any:
    """(tokens,) bool: which slots are rows of a cache of so many."""
    return (slots >= 0) & (slots < rows)


def appended(problem: RopeProblem, *inputs: Any, held: Any) -> tuple[Any, Any]:
    """What (out, cache), which hold `held`, are after a call, in float64."""
    import torch

    q, latent, rope, positions, slots, table = inputs
    half = problem.p // 2
    turn = table[positions.long().clamp(0, len(table) - 1)].double()
    turn[(positions < 0) | (positions >= len(table))] = math.nan
    cosines, sines = turn[:, :half], turn[:, half:]
    out, cache = (x.double() for x in held)
    rope_columns = q[..., -problem.p :].double()
    out[..., problem.k :] = rotated(rope_columns, cosines[:, None], sines[:, None], interleaved=problem.interleaved)
    key = rotated(rope.double(), cosines, sines, interleaved=problem.interleaved)
    there = written(slots, cache.shape[0] * cache.shape[1])
    cache.view(-1, problem.width)[slots[there].long()] = torch.cat([latent.double(), key], dim=1)[there]
    return out, cache


#: Rounding once to bf16 is an error of up to 2^-8 of an element just above a power of two, and a 16th more where
#: float32 rounded to the other side. What two products leave of one another is as exact as float32 is of the larger:
#: absolute, of values of about 1. A row whose elements are off by up to e has a cosine difference of up to e² / 2; of a
#: million rows of 64 elements one comes to half of that.
PLAIN = Bound(abs=2e-6, rel=2.0**-8 * (1 + 2.0**-4), cos=2.0**-18, row_cos=2.0**-17)


def bounds(dist: str) -> dict[str, Bound]:
    """By output."""
    bound = Bound(PLAIN.abs * HUGE, PLAIN.rel, PLAIN.cos, PLAIN.row_cos) if dist == "huge" else PLAIN
    return {"out": bound, "cache": bound}


#: Names of the cases of the check, in order, with what each is for.
CASES = {
    "own": "the problem as it is (on a CPU: cut down to a few tokens)",
    "one_token": "a single token, bound to the planned kernel",
    "uneven": "131 tokens (on a CPU: 5), a multiple of nothing",
    "ends": "the first position and the last one of the table",
    "huge": "values near the largest that do not overflow",
    "skipped": "every third token without a slot",
    "none": "no token with a slot",
    "beyond": "every second token's slot past the end of the cache",
    "apart": "rows of rope further apart, NaN between them",
    "in_place": "other values, positions and slots in the tensors of a bound kernel",
    "planned_few": "3 tokens, planned anew",
    "planned_many": "more tokens than a device holds at a time, planned anew (on a GPU)",
    "other": "the other convention, planned anew",
    "absorbed": "rows of q with latent columns in front, 32-bit indices, planned anew",
    "heads": "11 heads, a multiple of nothing, planned anew",
}
QUICK = ("own", "one_token", "uneven", "skipped")


def _cases(problem: RopeProblem, on_gpu: bool) -> Iterator[Case]:
    own = problem if on_gpu else small(problem)
    uneven = own.replace(tokens=131 if on_gpu else 5)
    yield Case("own", own, "normal", planned=True)
    yield Case("one_token", own.replace(tokens=1), "normal")
    yield Case("uneven", uneven, "normal")
    for dist in ("ends", "huge", "skipped", "none", "beyond"):
        yield Case(dist, uneven, dist)
    yield Case("apart", uneven.replace(rest=problem.rest + 64), "normal")
    yield Case("in_place", uneven, "normal", then=uneven)
    yield Case("planned_few", own.replace(tokens=3), "normal", planned=True)
    yield Case("planned_many", own.replace(tokens=5003, h=min(problem.h, 16)), "skipped", planned=True, gpu=True)
    yield Case("other", uneven.replace(interleaved=not problem.interleaved), "normal", planned=True)
    yield Case("absorbed", uneven.replace(columns=problem.width, index="int32"), "skipped", planned=True)
    yield Case("heads", uneven.replace(h=11), "normal", planned=True)


def rebound(problem: RopeProblem, *inputs: Any) -> RopeProblem:
    """The problem of other inputs of the same class; tokens, positions and the distance between rows of rope may
    differ. Raises `UserError` for a tensor that does not fit."""
    q, latent, rope, positions, slots, table = inputs
    n = q.shape[0]
    expected = {
        "q": (q, (n, problem.h, problem.columns), problem.dtype),
        "latent": (latent, (n, problem.k), problem.dtype),
        "rope": (rope, (n, problem.p), problem.dtype),
        "positions": (positions, (n,), problem.index),
        "slots": (slots, (n,), problem.index),
        "table": (table, (table.shape[0], problem.p), "fp32"),
    }
    for name, (tensor, shape, dtype) in expected.items():
        check_bound(name, tensor, shape, dtype)
        if not (tensor.is_contiguous() if name != "rope" else tensor.stride(1) == 1):
            how = "have its columns beside each other" if name == "rope" else "be contiguous"
            raise UserError(f"cannot bind: {name} has strides {tuple(tensor.stride())}; it must {how}.")
    rest = rope.stride(0) - problem.p if n > 1 else problem.rest
    return problem.replace(tokens=n, positions=table.shape[0], rest=rest)


def small(problem: RopeProblem) -> RopeProblem:
    """Three tokens, in at most 16 heads, and a short table: seconds on a CPU."""
    return problem.replace(
        tokens=min(problem.tokens, 3), h=min(problem.h, 16), positions=min(problem.positions, 4096)
    )  # fmt: skip


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    return {"tokens": 3, "h": 4, "positions": 4096} if small else {"tokens": 128}


WORKLOAD = Workload(
    name="rope",
    problem=RopeProblem,
    outputs=(
        Output("out", ("token", "head", "column"), partial=True),
        Output("cache", ("page", "row", "column"), partial=True),
    ),
    make_inputs=make_inputs,
    reference=reference,
    cases=_cases,
    case_names=CASES,
    quick=QUICK,
    bounds=bounds,
    rebound=rebound,
    small=small,
    sample=sample,
)
