"""Root-mean-square norm (RMSNorm) of rows: of one width, behind a residual add, or two of one projection's output.

    x (rows, width + second), weight (width,), [second weight (second,)], [residual (rows, width)]
    →   out (rows, width), second (rows, second), residual (rows, width)

    h = x[:, :width] + residual, rounded to the dtype, which is the new residual (without a residual h is x)
    out = h · rsqrt(mean(h²) + eps) · weight               second: the same of x[:, width:] with its own weight

Sums are in float32 at least, and an output is rounded once. What a problem does not have has no columns: `second` and
`residual` are then (rows, 0). x is a slice of wider rows, rest columns of which belong to nobody: the down-projection
of DeepSeek's attention has 1536 columns for queries, 512 of latent, both to be normalised, and 64 of rope. Those that
belong to nobody hold NaN.

Distributions of inputs (`dist`):

    normal     N(0, 1)
    huge       near the largest whose squares float32 sums: 1e15 in bf16; 8e3 in fp16
    tiny       1e-3: mean squares about as large as eps
    outliers   every 97th column is 1000 times as large as the others
    rows       each row of a magnitude of its own, 1e-4 to 1e3; every third row is zeros

Weights are 1 + N(0, 1) / 4. Squares are summed in float32, so |x| above 1e17 is nobody's: the sum overflows.
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

DISTRIBUTIONS = ("normal", "huge", "tiny", "outliers", "rows")
_HUGE = {"fp16": 8e3}


@dataclass(frozen=True)
class NormClass:
    """What a compiled kernel is specialised on: everything of a problem but its rows and the columns of nobody."""

    width: int
    second: int
    residual: bool
    dtype: str
    eps: float

    def key(self) -> str:
        residual = "_residual" if self.residual else ""
        return f"norm_w{self.width}_{self.second}{residual}_{self.dtype}_{self.eps:g}"


@dataclass(frozen=True)
class NormProblem(Problem):
    """rows: of x. width, second: columns of the norms; second 0: there is one norm. rest: columns of x's rows that
    belong to something else. residual: whether one is added. eps: added to the mean square. dtype: of all tensors.
    Raises `UserError`, naming the field, when it makes no sense."""

    workload: ClassVar[str] = "norm"
    layer: ClassVar[str] = "norm"

    rows: int = 32
    width: int = 7168
    second: int = 0
    rest: int = 0
    residual: bool = False
    dtype: str = "bf16"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_integer("rows", self.rows, 1)
        check_integer("width", self.width, 1)
        check_integer("second", self.second, 0)
        check_integer("rest", self.rest, 0)
        check_dtype(self.dtype)
        if not isinstance(self.residual, bool):
            raise UserError(f"problem.residual = {self.residual!r} is not a boolean: use true or false.")
        if self.residual and self.second:
            raise UserError("a problem with two norms has no residual: set second to 0, or residual to false.")
        if isinstance(self.eps, bool) or not isinstance(self.eps, int | float) or not 0 < self.eps < math.inf:
            raise UserError(f"problem.eps = {self.eps!r} is no positive number: use for example 1e-6.")

    @property
    def columns(self) -> int:
        """Columns that are normalised."""
        return self.width + self.second

    @property
    def stride(self) -> int:
        """From a row of x to the next, in elements."""
        return self.columns + self.rest

    @property
    def label(self) -> str:
        text = f"r{self.rows}_w{self.width}" + (f"_{self.second}" if self.second else "")
        text += "_residual" if self.residual else ""
        return text if self.dtype == "bf16" else f"{text}_{self.dtype}"

    def problem_class(self) -> NormClass:
        return NormClass(self.width, self.second, self.residual, self.dtype, self.eps)

    def cost(self) -> Cost:
        """FLOPs and minimal bytes. An element costs a square, a sum and two products, and the sum with its residual."""
        elements = self.rows * self.columns
        moved = elements * (2 if self.residual else 1)
        written = moved * self.element_bytes
        read = (moved + self.columns) * self.element_bytes
        return Cost(elements * (5 if self.residual else 4), read + written, written=written)

    def input_bytes(self) -> int:
        read = self.rows * (self.stride + (self.width if self.residual else 0)) + self.columns
        return read * self.element_bytes + self.output_bytes()

    def output_bytes(self) -> int:
        return self.cost().written


def make_inputs(
    problem: NormProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal", poison: bool = True, **_: Any
) -> tuple[Any, ...]:
    """Random (x, weight, [second weight], [residual]). x: a view of rows that are `stride` apart. poison: NaN in the
    columns that belong to nobody, else zeros."""
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"norm input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)

    def draw(*shape: int) -> Any:
        return torch.randn(shape, dtype=torch.float32, device=device, generator=generator)

    def rows_of(width: int) -> Any:
        x = draw(problem.rows, width)
        if dist == "huge":
            x *= _HUGE.get(problem.dtype, 1e15)
        elif dist == "tiny":
            x *= 1e-3
        elif dist == "outliers":
            x[:, ::97] *= 1000.0
        elif dist == "rows":
            exponent = torch.rand((problem.rows, 1), device=device, generator=generator)
            x *= 10.0 ** (7.0 * exponent - 4.0)
            x[::3] = 0.0
        return x.to(problem.torch_dtype)

    fill = math.nan if poison else 0.0
    x = torch.full((problem.rows, problem.stride), fill, dtype=problem.torch_dtype, device=device)
    x = x[:, : problem.columns]
    x.copy_(rows_of(problem.columns))
    weights = [(1.0 + 0.25 * draw(width)).to(problem.torch_dtype) for width in (problem.width, problem.second) if width]
    return (x, *weights, *([rows_of(problem.width)] if problem.residual else ()))


def named(problem: NormProblem, inputs: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
    """(x, weight, second weight, residual) of a problem's inputs; None for what it does not have."""
    x, weight, *more = inputs
    return x, weight, more[0] if problem.second else None, more[0] if problem.residual else None


def new_outputs(problem: NormProblem, x: Any) -> tuple[Any, Any, Any]:
    """(out, second, residual) for the rows of x, uninitialised; without columns where the problem has none."""
    rows = x.shape[0]
    residual = problem.width if problem.residual else 0
    return x.new_empty((rows, problem.width)), x.new_empty((rows, problem.second)), x.new_empty((rows, residual))


def reference(problem: NormProblem, *inputs: Any) -> tuple[Any, Any, Any]:
    """The oracle: (out, second, residual) in float64, the new residual rounded to the problem's dtype first."""
    x, weight, second_weight, residual = named(problem, inputs)
    h = x[:, : problem.width]
    h = (h.float() + residual.float()).to(x.dtype) if residual is not None else h
    out = normalised(h, weight, problem.eps)
    second = x.new_empty((x.shape[0], 0)).double()
    if second_weight is not None:
        second = normalised(x[:, problem.width :], second_weight, problem.eps)
    return out, second, h.double() if residual is not None else x.new_empty((x.shape[0], 0)).double()


def normalised(h: Any, weight: Any, eps: float) -> Any:
    """h · rsqrt(mean(h²) + eps) · weight in float64."""
    h = h.double()
    return h * (h.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


#: Rounding once to bf16 is an error of up to 2^-8 of an element just above a power of two, 2^-9 of one below, and so of
#: 2^-19 in the cosine difference, 2^-17 of a row that a few elements rule; a 16th more where float32 rounded to the
#: other side.
OUT = Bound(abs=1e-7, rel=2.0**-8 * (1 + 2.0**-4), cos=2.0**-18, row_cos=2.0**-17)
#: The new residual is a sum that is rounded once: the oracle's bits.
EXACT = Bound(abs=1e-30, rel=1e-12, cos=1e-12, row_cos=1e-12)


#: Names of the cases of the check, in order, with what each is for.
CASES = {
    "own": "the problem as it is (on a CPU: cut down to a few rows)",
    "one_row": "a single row, bound to the planned kernel",
    "uneven": "131 rows (on a CPU: 5), a multiple of nothing",
    "huge": "values whose squares only just fit in float32",
    "tiny": "values whose mean square is about eps",
    "outliers": "every 97th column 1000 times as large",
    "rows": "rows of different magnitudes, every third of zeros",
    "apart": "rows further apart, NaN between them",
    "in_place": "other values in the tensors of a bound kernel",
    "planned_few": "3 rows, planned anew",
    "planned_many": "more rows than a device holds at a time, planned anew (on a GPU)",
    "far": "rows beyond 2^31 elements from the start (on a GPU)",
}
QUICK = ("own", "one_row", "uneven", "rows")


def _cases(problem: NormProblem, on_gpu: bool) -> Iterator[Case]:
    own = problem if on_gpu else problem.replace(rows=min(problem.rows, 5))
    uneven = problem.replace(rows=131 if on_gpu else 5)
    yield Case("own", own, "normal", planned=True)
    yield Case("one_row", problem.replace(rows=1), "normal")
    yield Case("uneven", uneven, "normal")
    for dist in ("huge", "tiny", "outliers", "rows"):
        yield Case(dist, uneven, dist)
    yield Case("apart", uneven.replace(rest=problem.rest + 64), "normal")
    yield Case("in_place", uneven, "normal", then=uneven)
    yield Case("planned_few", problem.replace(rows=3), "normal", planned=True)
    yield Case("planned_many", problem.replace(rows=5003), "rows", planned=True, gpu=True)
    # 2100 rows 2^20 elements apart take 4.4 GB of 16-bit elements, and no output is large.
    yield Case("far", problem.replace(rows=2100, rest=(1 << 20) - problem.columns), "normal", gpu=True)


def bounds(dist: str) -> dict[str, Bound]:
    """By output; the same for every distribution."""
    return {"out": OUT, "second": OUT, "residual": EXACT}


def rebound(problem: NormProblem, *inputs: Any) -> NormProblem:
    """The problem of other inputs of the same class; rows and the distance between them may differ. Raises `UserError`
    for a tensor that does not fit."""
    want = 2 + bool(problem.second) + problem.residual
    if len(inputs) != want:
        raise UserError(f"cannot bind: this kernel takes {want} tensors, and {len(inputs)} are given.")
    x, weight, second_weight, residual = named(problem, inputs)
    rows = x.shape[0]
    expected = {
        "x": (x, (rows, problem.columns)),
        "weight": (weight, (problem.width,)),
        "the second weight": (second_weight, (problem.second,)),
        "residual": (residual, (rows, problem.width)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None:
            check_bound(name, tensor, shape, problem.dtype)
            if tensor is not x and not tensor.is_contiguous():
                raise UserError(f"cannot bind: {name} has strides {tuple(tensor.stride())}; it must be contiguous.")
    if x.stride(1) != 1:
        raise UserError(f"cannot bind: x has columns {x.stride(1)} elements apart; they must lie beside each other.")
    rest = x.stride(0) - problem.columns if rows > 1 else problem.rest
    if rest < 0:
        raise UserError(f"cannot bind: rows of x are {x.stride(0)} elements apart and overlap.")
    return problem.replace(rows=rows, rest=rest)


def small(problem: NormProblem) -> NormProblem:
    """Three rows: seconds on a CPU."""
    return problem.replace(rows=min(problem.rows, 3))


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    return {"rows": 3 if small else 4096}


WORKLOAD = Workload(
    name="norm",
    problem=NormProblem,
    outputs=(
        Output("out", ("row", "column")),
        Output("second", ("row", "column")),
        Output("residual", ("row", "column")),
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
