"""Merging of partial attention: what `n` parts of a sequence gave each row, weighted by their log-sum-exp (LSE).

    partials (n, rows, k)    lse (n, rows) float32, natural logarithm
    →   out (rows, k), lse (rows) float32

    m = max_i lse_i    w_i = exp(lse_i - m)    out = Σ w_i · partial_i / Σ w_i    lse = m + log Σ w_i

A part in which a row saw no key has an LSE of +inf (as `mla_decode` returns it) or -inf (as other libraries do), and
its partial may hold anything. A row that saw no key in any part has out 0 and LSE +inf. An LSE that is NaN comes from a
score that is, and makes out and LSE of the row NaN, whatever the other parts hold. Sums are in float32 at least, and an
output is rounded once.

Distributions of inputs (`dist`); partials are N(0, 1):

    normal     LSE N(8, 1): every part counts
    far        LSE N(0, 40): one part rules a row, weights of others are below what float32 holds
    high       LSE 3000 + N(0, 1): far beyond what exp takes
    equal      the LSE of a row is the same in all parts
    empty      a third of the parts of each row saw no key: LSE +inf or -inf, and NaN in their partials. Every fifth
               row saw none in any part
    nan        empty, and every third row has a part whose LSE is NaN: NaN in its partial in every other one of them, a
               number in the others
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

DISTRIBUTIONS = ("normal", "far", "high", "equal", "empty", "nan")
_HIGH = 3000.0


@dataclass(frozen=True)
class MergeClass:
    """What a compiled kernel is specialised on: everything of a problem but its rows."""

    parts: int
    k: int
    dtype: str

    def key(self) -> str:
        return f"merge_n{self.parts}_k{self.k}_{self.dtype}"


@dataclass(frozen=True)
class MergeProblem(Problem):
    """parts: of a sequence. tokens, h: query tokens of all requests, and heads; a row is one of each. k: columns.
    dtype: of partials and result. Raises `UserError`, naming the field, when it makes no sense."""

    workload: ClassVar[str] = "merge"
    layer: ClassVar[str] = "merge"

    parts: int = 4
    tokens: int = 8
    h: int = 128
    k: int = 512
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("parts", "tokens", "h", "k"):
            check_integer(name, getattr(self, name), 1)
        check_dtype(self.dtype)

    @property
    def rows(self) -> int:
        return self.tokens * self.h

    @property
    def label(self) -> str:
        text = f"n{self.parts}_r{self.rows}"
        return text if self.dtype == "bf16" else f"{text}_{self.dtype}"

    def problem_class(self) -> MergeClass:
        return MergeClass(self.parts, self.k, self.dtype)

    def cost(self) -> Cost:
        """FLOPs and minimal bytes: a multiply-add for every element of a partial."""
        elements = self.rows * self.k
        written = self.output_bytes()
        read = self.parts * (elements * self.element_bytes + self.rows * 4)
        return Cost(2 * self.parts * elements, read + written, written=written)

    def input_bytes(self) -> int:
        return self.cost().bytes

    def output_bytes(self) -> int:
        return self.rows * (self.k * self.element_bytes + 4)


def make_inputs(
    problem: MergeProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal", poison: bool = True, **_: Any
) -> tuple[Any, Any]:
    """Random (partials, lse). poison: NaN in partials without keys, else zeros."""
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"merge input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)

    def draw(*shape: int) -> Any:
        return torch.randn(shape, dtype=torch.float32, device=device, generator=generator)

    partials = draw(problem.parts, problem.rows, problem.k).to(problem.torch_dtype)
    lse = draw(problem.parts, problem.rows)
    if dist == "far":
        lse *= 40.0
    elif dist == "equal":
        lse[1:] = lse[0]
    else:
        lse += _HIGH if dist == "high" else 8.0
    if dist in ("empty", "nan"):
        empty = torch.rand(lse.shape, device=device, generator=generator) < 1.0 / 3.0
        empty[:, ::5] = True
        marks = torch.tensor((math.inf, -math.inf), device=device)
        lse = torch.where(empty, marks[torch.randint(2, lse.shape, device=device, generator=generator)], lse)
        partials[empty] = math.nan if poison else 0.0
    if dist == "nan":
        part = problem.parts // 2
        lse[part, ::3] = math.nan
        partials[part, ::6], partials[part, 3::6] = math.nan, 1.0
    return partials, lse


def new_outputs(problem: MergeProblem, partials: Any) -> tuple[Any, Any]:
    """(out, lse) for the rows of partials, uninitialised."""
    import torch

    rows = partials.shape[1]
    return partials.new_empty((rows, problem.k)), partials.new_empty((rows,), dtype=torch.float32)


def reference(problem: MergeProblem, partials: Any, lse: Any) -> tuple[Any, Any]:
    """The oracle: (out, lse) in float64."""
    import torch

    lse = lse.double()
    seen = ~lse.isinf()
    lse = torch.where(seen, lse, -math.inf)
    most = lse.amax(0)  # NaN where any part is
    weights = torch.where(seen, (lse - most).exp(), 0.0)
    total = weights.sum(0)
    out = torch.where(seen[..., None], weights[..., None] * partials.double(), 0.0).sum(0)
    any_key = seen.any(0)
    out = torch.where(any_key[:, None], out / total[:, None], 0.0)
    return out, torch.where(any_key, most + total.log(), math.inf)


#: Rounding once to bf16 is an error of up to 2^-8 of an element just above a power of two, and a 16th more where
#: float32 rounded to the other side. What products leave of one another is as exact as float32 is of the largest: a few
#: units of 2^-22, of values below 6.
OUT = Bound(abs=1e-5, rel=2.0**-8 * (1 + 2.0**-4), cos=2.0**-18, row_cos=2.0**-16)


def bounds(dist: str) -> dict[str, Bound]:
    """By output. LSE: float32 of its magnitude, and exponentials and a logarithm of 2^-22."""
    return {"out": OUT, "lse": Bound(abs=2.0**-11 if dist == "high" else 2.0**-16, rel=2.0**-21, cos=1e-7)}


#: Names of the cases of the check, in order, with what each is for.
CASES = {
    "own": "the problem as it is (on a CPU: cut down to a few rows)",
    "one_row": "a single row, bound to the planned kernel",
    "uneven": "131 rows (on a CPU: 5), a multiple of nothing",
    "far": "one part rules each row",
    "high": "LSE far beyond what exp takes",
    "equal": "parts of the same weight",
    "empty": "parts without keys, NaN in their partials, and rows without any key",
    "nan": "the same, and rows of which a part's LSE is NaN",
    "in_place": "other values in the tensors of a bound kernel",
    "planned_few": "3 rows, planned anew",
    "planned_many": "more rows than a device holds at a time, planned anew (on a GPU)",
}
QUICK = ("own", "one_row", "uneven", "empty")


def _cases(problem: MergeProblem, on_gpu: bool) -> Iterator[Case]:
    own = problem if on_gpu else small(problem)
    uneven = problem.replace(tokens=131 if on_gpu else 5, h=1)
    yield Case("own", own, "normal", planned=True)
    yield Case("one_row", problem.replace(tokens=1, h=1), "normal")
    yield Case("uneven", uneven, "normal")
    for dist in ("far", "high", "equal", "empty", "nan"):
        yield Case(dist, uneven, dist)
    yield Case("in_place", uneven, "empty", then=uneven)
    yield Case("planned_few", problem.replace(tokens=3, h=1), "normal", planned=True)
    yield Case("planned_many", problem.replace(tokens=5003, h=3), "empty", planned=True, gpu=True)


def rebound(problem: MergeProblem, *inputs: Any) -> MergeProblem:
    """The problem of other inputs of the same class; rows may differ, and count as tokens of one head then. Raises
    `UserError` for a tensor that does not fit."""
    if len(inputs) != 2:
        raise UserError(f"cannot bind: this kernel takes (partials, lse), and {len(inputs)} tensors are given.")
    partials, lse = inputs
    rows = partials.shape[1] if partials.dim() == 3 else 0
    expected = {
        "partials": (partials, (problem.parts, rows, problem.k), problem.dtype),
        "lse": (lse, (problem.parts, rows), "fp32"),
    }
    for name, (tensor, shape, dtype) in expected.items():
        check_bound(name, tensor, shape, dtype)
        if not tensor.is_contiguous():
            raise UserError(f"cannot bind: {name} has strides {tuple(tensor.stride())}; it must be contiguous.")
    return problem if rows == problem.rows else problem.replace(tokens=rows, h=1)


def small(problem: MergeProblem) -> MergeProblem:
    """Three rows: seconds on a CPU."""
    return problem.replace(tokens=min(problem.tokens, 3), h=1)


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    return {"tokens": 3, "h": 1} if small else {"tokens": 64}


WORKLOAD = Workload(
    name="merge",
    problem=MergeProblem,
    outputs=(Output("out", ("row", "column")), Output("lse", ("row",), dtype="float32", rows=False)),
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
