"""The two products per head around absorbed attention, with the weight as DeepSeek stores it (`kv_b_proj`).

Each of the h heads has a key part W_UK (d, k) and a value part W_UV (d, k) of one weight, d head columns and k of
latent (128 and 512 in DeepSeek's models):

    weight (h · 2d, k)    W_UK = weight[2d·head : 2d·head + d]    W_UV = weight[2d·head + d : 2d·(head + 1)]

    side "q"     x (n, h, d) of the query without rope    →   out[n, h, 0 : k] = x[n, h] · W_UK      out (n, h, k + p)
    side "out"   x (n, h, k) of attention                 →   out[n, h, 0 : d] = x[n, h] · W_UVᵀ     out (n, h, d)

Nothing is transposed or copied. On side "q" x is a slice of heads of d + p columns, the last p of which are rope; out
has room for the rotated ones behind its k columns, and they must stay as they are. Sums are in float32 at least, and an
output is rounded once. What belongs to nobody holds NaN.

Distributions of inputs (`dist`), each times a weight of N(0, 1) / sqrt(columns that are summed):

    normal     N(0, 1)
    large      N(0, 1) · 2^12: outputs near the largest of fp16
    huge       N(0, 1) · 2^100, which only bf16 has
    small      N(0, 1) · 2^-12: among outputs are fp16's subnormals
    outliers   every 37th column is 1000 times as large as the others
    tokens     each token of a magnitude of its own, 1e-3 to 1; every third is zeros
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
    check_dtype,
    check_integer,
)

SIDES = ("q", "out")
DISTRIBUTIONS = ("normal", "large", "huge", "small", "outliers", "tokens")
#: What values are multiplied with: powers of two, which change no rounding.
MAGNITUDES = {"large": 2.0**12, "huge": 2.0**100, "small": 2.0**-12}
OUTLIER = 1000.0


@dataclass(frozen=True)
class GemmClass:
    """What a compiled kernel is specialised on: everything of a problem but tokens and distances."""

    side: str
    h: int
    k: int
    d: int
    dtype: str

    def key(self) -> str:
        return f"gemm_{self.side}_h{self.h}_k{self.k}_d{self.d}_{self.dtype}"


@dataclass(frozen=True)
class GemmProblem(Problem):
    """side: which of the two products. tokens: of all requests together. h: heads. k, p: columns of latent and rope.
    d: columns of a head without rope. rest: elements between tokens of x that belong to something else. dtype: of all
    tensors. Raises `UserError`, naming the field, when it makes no sense."""

    workload: ClassVar[str] = "gemm"
    layer: ClassVar[str] = "gemm"

    side: str = "q"
    tokens: int = 32
    h: int = 128
    k: int = 512
    p: int = 64
    d: int = 128
    rest: int = 0
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.side not in SIDES:
            raise UserError(f"problem.side = {self.side!r} is unknown: {nearest(str(self.side), SIDES)}.")
        for name in ("tokens", "h", "k", "d"):
            check_integer(name, getattr(self, name), 1)
        for name in ("p", "rest"):
            check_integer(name, getattr(self, name), 0)
        check_dtype(self.dtype)

    @property
    def summed(self) -> int:
        """Columns of x: what a product sums over."""
        return self.d if self.side == "q" else self.k

    @property
    def columns(self) -> int:
        """Columns of a head's product."""
        return self.k if self.side == "q" else self.d

    @property
    def beside(self) -> int:
        """Columns behind those of a head, in x and in out: rope."""
        return self.p if self.side == "q" else 0

    @property
    def label(self) -> str:
        text = f"{self.side}_n{self.tokens}_h{self.h}"
        return text if self.dtype == "bf16" else f"{text}_{self.dtype}"

    def problem_class(self) -> GemmClass:
        return GemmClass(self.side, self.h, self.k, self.d, self.dtype)

    def cost(self) -> Cost:
        """FLOPs and minimal bytes: that half of the weight which the side needs moves once."""
        written = self.tokens * self.h * self.columns * self.element_bytes
        read = self.h * self.summed * (self.tokens + self.columns) * self.element_bytes
        return Cost(2 * self.tokens * self.h * self.k * self.d, read + written, written=written)

    def input_bytes(self) -> int:
        x = self.tokens * (self.h * (self.summed + self.beside) + self.rest)
        return (x + self.h * 2 * self.d * self.k) * self.element_bytes + self.output_bytes()

    def output_bytes(self) -> int:
        return self.tokens * self.h * (self.columns + self.beside) * self.element_bytes


def make_inputs(
    problem: GemmProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal", poison: bool = True, **_: Any
) -> tuple[Any, Any]:
    """Random (x, weight). x: a view of tokens that may lie apart. poison: NaN in what belongs to nobody, else zeros."""
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"gemm input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    n, h, summed = problem.tokens, problem.h, problem.summed

    def draw(*shape: int) -> Any:
        return torch.randn(shape, dtype=torch.float32, device=device, generator=generator)

    values = draw(n, h, summed) * MAGNITUDES.get(dist, 1.0)
    if dist == "outliers":
        values[..., ::37] *= OUTLIER
    elif dist == "tokens":
        values *= 10.0 ** (-3.0 * torch.rand((n, 1, 1), device=device, generator=generator))
        values[::3] = 0.0
    width = h * (summed + problem.beside)
    fill = math.nan if poison else 0.0
    x = torch.full((n, width + problem.rest), fill, dtype=problem.torch_dtype, device=device)
    x = x[:, :width].view(n, h, summed + problem.beside)[..., :summed]
    x.copy_(values)
    return x, (draw(h * 2 * problem.d, problem.k) * summed**-0.5).to(problem.torch_dtype)


def parts(problem: GemmProblem, weight: Any) -> tuple[Any, Any]:
    """Views (W_UK, W_UV) of the weight, (h, d, k) each."""
    both = weight.view(problem.h, 2, problem.d, problem.k)
    return both[:, 0], both[:, 1]


def new_output(problem: GemmProblem, x: Any) -> Any:
    """The output for the tokens of x, with the columns that are not written; uninitialised."""
    return x.new_empty((x.shape[0], problem.h, problem.columns + problem.beside))


def product(problem: GemmProblem, x: Any, weight: Any) -> Any:
    """(n, h, columns) in float64."""
    import torch

    keys, values = parts(problem, weight)
    factor = keys if problem.side == "q" else values.transpose(1, 2)
    return torch.bmm(x.double().transpose(0, 1), factor.double()).transpose(0, 1)


def reference(problem: GemmProblem, *inputs: Any) -> tuple[Any]:
    """The oracle: (out,) in float64, NaN in columns that must not be written."""
    import torch

    x, weight = inputs
    shape = (x.shape[0], problem.h, problem.columns + problem.beside)
    out = torch.full(shape, math.nan, dtype=torch.float64, device=x.device)
    out[..., : problem.columns] = product(problem, x, weight)
    return (out,)


#: Rounding once to bf16 is an error of up to 2^-8 of an element just above a power of two, 2^-9 of one below, and so of
#: 2^-19 in the cosine difference; a 16th more for a float32 sum that is rounded to the other side. Where terms cancel,
#: what is left is as exact as float32 sums of hundreds of terms are, of values of about 1.
PLAIN = Bound(abs=2.0**-15, rel=2.0**-8 * (1 + 2.0**-4), cos=2.0**-18, row_cos=2.0**-18)


def bounds(dist: str) -> dict[str, Bound]:
    """By output. Absolute errors go with the magnitude of the terms; fp16 is off by 2^-25 below its normal numbers."""
    terms = OUTLIER if dist == "outliers" else MAGNITUDES.get(dist, 1.0)
    return {"out": Bound(max(PLAIN.abs * terms, 2.0**-25 * (1 + 2.0**-4)), PLAIN.rel, PLAIN.cos, PLAIN.row_cos)}


#: Names of the cases of the check, in order, with what each is for.
CASES = {
    "own": "the problem as it is (on a CPU: cut down to a few tokens and heads)",
    "one_token": "a single token, bound to the planned kernel",
    "uneven": "131 tokens (on a CPU: 5), a multiple of nothing",
    "large": "outputs near the largest of fp16",
    "huge": "values that fp16 does not have (bf16 only)",
    "small": "among outputs are fp16's subnormals",
    "outliers": "every 37th column 1000 times as large",
    "tokens": "tokens of different magnitudes, every third of zeros",
    "apart": "tokens further apart, NaN between them",
    "in_place": "other values and weights in the tensors of a bound kernel",
    "planned_few": "3 tokens, planned anew",
    "planned_many": "1027 tokens, planned anew (on a GPU)",
    "far": "tokens beyond 2^31 elements from the start (on a GPU)",
}
QUICK = ("own", "one_token", "uneven", "tokens")


def _cases(problem: GemmProblem, on_gpu: bool) -> Iterator[Case]:
    own = problem if on_gpu else small(problem)
    uneven = own.replace(tokens=131 if on_gpu else 5)
    yield Case("own", own, "normal", planned=True)
    yield Case("one_token", own.replace(tokens=1), "normal")
    yield Case("uneven", uneven, "normal")
    for dist in ("large", "huge", "small", "outliers", "tokens"):
        if dist != "huge" or problem.dtype != "fp16":
            yield Case(dist, uneven, dist)
    yield Case("apart", uneven.replace(rest=problem.rest + 64), "normal")
    yield Case("in_place", uneven, "normal", then=uneven)
    yield Case("planned_few", own.replace(tokens=3), "normal", planned=True)
    yield Case("planned_many", own.replace(tokens=1027), "tokens", planned=True, gpu=True)
    # 1100 tokens 2^21 elements apart take 4.6 GB of 16-bit elements, and no output is large.
    yield Case("far", own.replace(tokens=1100, rest=(1 << 21) - own.h * (own.summed + own.beside)), "normal", gpu=True)


def check_columns(x: Any, weight: Any) -> None:
    """Raises `UserError` for inputs whose columns lie apart: kernels are told the strides of tokens and heads alone."""
    if not weight.is_contiguous():
        raise UserError(f"cannot bind: weight has strides {tuple(weight.stride())} and must be contiguous.")
    if x.stride(2) != 1:
        raise UserError(f"cannot bind: x has columns {x.stride(2)} elements apart; they must lie beside each other.")


def rebound(problem: GemmProblem, *inputs: Any) -> GemmProblem:
    """The problem of other inputs of the same class; tokens, and the distance between them, may differ. Raises
    `UserError` for a tensor that does not fit."""
    x, weight = inputs
    n = x.shape[0]
    expected = {"x": (x, (n, problem.h, problem.summed)), "weight": (weight, (problem.h * 2 * problem.d, problem.k))}
    for name, (tensor, shape) in expected.items():
        check_bound(name, tensor, shape, problem.dtype)
    check_columns(x, weight)
    beside = x.stride(1) - problem.summed if problem.h > 1 else problem.beside
    rest = x.stride(0) - problem.h * (problem.summed + beside) if n > 1 else problem.rest
    if beside < 0 or rest < 0:
        raise UserError(f"cannot bind: x has strides {tuple(x.stride())}, and its heads or tokens overlap.")
    return problem.replace(tokens=n, rest=rest, **({"p": beside} if problem.side == "q" else {}))


def small(problem: GemmProblem) -> GemmProblem:
    """Three tokens, in at most 4 heads: seconds on a CPU."""
    return problem.replace(tokens=min(problem.tokens, 3), h=min(problem.h, 4))


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    return {"tokens": 3, "h": 4} if small else {"tokens": 128}


WORKLOAD = Workload(
    name="gemm",
    problem=GemmProblem,
    outputs=(Output("out", ("token", "head", "column"), partial=True),),
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
