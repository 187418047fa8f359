"""The k largest logits of rows, exactly: which tokens the lightning indexer chose.

    rows       logits (n, t)    starts, ends (n,) int32    → indices (n, k) int32, columns of the row
    paged      logits (b · s, 64 · width)    ends (b, s) int32    page_table (b, width) int32
               → indices (b · s, k) int32, slots of the cache: page · 64 + place in the page

A row chooses among its columns starts[i] <= j < ends[i] (paged: from 0 on), cut to the row's columns. Where these are
fewer than k, all of them are chosen, and -1 stands in the places behind them. The order of the chosen is not specified,
but two calls give the same bits. Rows may lie further apart than they are long. What lies outside of a row's range is
never read into the choice, and entries of the page table behind it are not read.

Exact. All that is larger than the k-th largest value is chosen, and of equal values at the k-th place those of the
lowest columns. -0 equals +0. NaN, of either sign, counts as -inf: it is chosen only where numbers are fewer than k, and
ties with -inf there. -inf is a value like others: a row of -inf gives its first k columns.

Words: b requests of s query tokens each, rows of t logits. lengths: "uniform" (all of a row; causal where s > 1: token
i of s sees t - s + 1 + i), or "ragged": drawn from 0 to t, with 0, 1 and the sizes around k among them. Rows that are
not paged begin at column 3 where lengths are ragged.

Distributions of inputs (`dist`):

    normal     N(0, 1)
    ties       whole numbers of -3 to 3
    equal      all the same
    odd        NaN of either sign, infinities, -0 and +0 among whole numbers of -1 to 1
    close      1 + i · 2^-20: values that differ in their last bits alone (of bf16: 1 + i · 2^-7)
    denormal   whole multiples of 1e-40

Outside of its range a row holds NaN and +inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mla_var3.errors import UserError, nearest
from mla_var3.workload import Bound, Case, Cost, Output, Workload, check_bound
from mla_var3.workload.indexer_logits import NO_PAGE, PAGE, RangedProblem

DISTRIBUTIONS = ("normal", "ties", "equal", "odd", "close", "denormal")
#: Elements of which the oracle sorts copies at a time.
_CHUNK = 1 << 25


@dataclass(frozen=True)
class TopkClass:
    """What a compiled kernel is specialised on. s: query tokens that share a row of the page table, 0 without one."""

    k: int
    s: int
    dtype: str

    def key(self) -> str:
        return f"topk{self.k}_{f's{self.s}' if self.s else 'rows'}_{self.dtype}"


@dataclass(frozen=True)
class TopkProblem(RangedProblem):
    """b, s: requests and their query tokens, b · s rows. t: logits of a row. topk: how many are chosen. table: whether
    there is a page table, through which indices are slots of the cache. lengths: "uniform" or "ragged". dtype: of the
    logits. Raises `UserError`, naming the field, when it makes no sense."""

    workload: ClassVar[str] = "topk"
    layer: ClassVar[str] = "indexer"

    b: int = 64
    s: int = 1
    t: int = 65536
    topk: int = 2048
    table: bool = False
    lengths: str = "uniform"
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        self.check("topk")

    @property
    def label(self) -> str:
        return self.labelled(f"b{self.b}_s{self.s}_t{self.t}_k{self.topk}" + ("_paged" if self.table else ""))

    def problem_class(self) -> TopkClass:
        return TopkClass(self.topk, self.s if self.table else 0, self.dtype)

    def ranges(self) -> list[tuple[int, int]]:
        """(start, end) of each row; the end is not cut."""
        lengths = self.drawn((0, 1, self.t, self.topk, self.topk - 1, self.topk + 1, self.topk + 4))
        start = 3 if self.lengths == "ragged" and not self.table else 0
        return [(start, length - self.s + 1 + i) for length in lengths for i in range(self.s)]

    def cost(self) -> Cost:
        """No products: a comparison a logit. Logits in range are read once, indices written once."""
        logits = sum(max(0, min(end, self.t) - start) for start, end in self.ranges())
        written = self.rows * self.topk * 4
        read = logits * self.element_bytes + self.rows * 8 + (self.b * self.width * 4 if self.table else 0)
        return Cost(logits, read + written, written=0)

    def input_bytes(self) -> int:
        return self.rows * (self.t * self.element_bytes + 8) + self.output_bytes()

    def output_bytes(self) -> int:
        return self.rows * self.topk * 4


def make_inputs(
    problem: TopkProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "normal", **_: Any
) -> tuple[Any, ...]:
    """Random (logits, starts, ends), or (logits, ends, page table) where it is paged."""
    import torch

    if dist not in DISTRIBUTIONS:
        raise UserError(f"topk input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    n, columns, kind = problem.rows, problem.t, problem.torch_dtype
    stride = -(-columns // 128) * 128

    def integers(low: int, high: int) -> Any:
        return torch.randint(low, high + 1, (n, stride), device=device, generator=generator, dtype=torch.int32)

    if dist == "normal":
        values = torch.randn((n, stride), device=device, generator=generator)
    elif dist == "equal":
        values = torch.full((n, stride), -1.5, device=device)
    elif dist == "close":
        step = 2.0**-7 if problem.dtype == "bf16" else 2.0**-20
        values = 1.0 + integers(0, 63) * step
    elif dist == "denormal":
        values = integers(-100, 100) * 1e-40
    elif dist == "odd":
        values = integers(-1, 1).float()
        which = integers(0, 99)
        values[(which < 30) & (values == 0)] = -0.0
        for place, value in ((30, math.nan), (31, -math.nan), (32, math.inf), (33, -math.inf)):
            values[which == place] = value
    else:
        values = integers(-3, 3).float()
    values = values.to(kind)
    starts, ends = torch.tensor(problem.ranges(), dtype=torch.int32).T.to(device)
    column = torch.arange(stride, device=device)
    outside = (column < starts[:, None]) | (column >= ends[:, None])
    values.masked_fill_(outside & (column % 2 == 0), math.nan).masked_fill_(outside & (column % 2 == 1), math.inf)
    values = values[:, :columns]
    if not problem.table:
        return values, starts.contiguous(), ends.contiguous()
    ends = ends.view(problem.b, problem.s).contiguous()
    used = torch.arange(problem.width, device=device) * PAGE < ends.amax(1)[:, None]
    table = torch.randperm(problem.b * problem.width, generator=torch.Generator().manual_seed(seed)).int().to(device)
    return values, ends, table.view(problem.b, problem.width).masked_fill(~used, NO_PAGE)


def chosen(logits: Any, starts: Any, ends: Any, k: int) -> Any:
    """(n, k) int64: columns in the order of their rank, -1 behind. logits (n, t), of any floating dtype."""
    import torch

    n, t = logits.shape
    out = torch.full((n, k), -1, dtype=torch.int64, device=logits.device)
    column = torch.arange(t, device=logits.device)
    place = torch.arange(min(k, t), device=logits.device)
    step = max(1, _CHUNK // max(1, t))
    for first in range(0, n, step):
        rows = slice(first, first + step)
        low, high = starts[rows, None].clamp(0, t), ends[rows, None].clamp(0, t)
        values = logits[rows].double().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        inside = (column >= low) & (column < high)
        # What is outside goes behind -inf: two sorts, of which the second keeps the order of the first.
        order = values.sort(dim=1, descending=True, stable=True).indices
        order = order.gather(1, (~inside).gather(1, order).sort(dim=1, stable=True).indices)[:, : len(place)]
        out[rows, : len(place)] = order.masked_fill(place >= (high - low).clamp(min=0), -1)
    return out


def slots_of(columns: Any, table: Any, s: int) -> Any:
    """Slots of the cache for columns (b · s, k) of rows, by the page table (b, width); -1 stays."""
    pages = columns.clamp(min=0) // PAGE
    own = table.repeat_interleave(s, 0).to(columns.dtype).gather(1, pages)
    return (own * PAGE + columns % PAGE).masked_fill(columns < 0, -1)


def reference(problem: TopkProblem, *inputs: Any) -> tuple[Any]:
    """The oracle: (indices,) as int64."""
    if not problem.table:
        logits, starts, ends = inputs
        return (chosen(logits, starts, ends, problem.topk),)
    logits, ends, table = inputs
    flat = ends.flatten()
    return (slots_of(chosen(logits, flat.new_zeros(len(flat)), flat, problem.topk), table, ends.shape[1]),)


CASES = {
    "own": "the problem as it is (on a CPU: cut down to few logits)",
    "ragged": "lengths of 0, 1, around k and at random, bound to the planned kernel",
    "ties": "seven values, so that the k-th is one of many",
    "equal": "rows of one value",
    "odd": "NaN, infinities, -0 beside +0",
    "close": "values that differ in their last bits alone",
    "denormal": "values below the smallest normal number",
    "short": "rows of fewer than k logits",
    "shifted": "ranges out of bounds, and some that end before they begin",
    "in_place": "other values in the tensors of a bound kernel",
    "planned": "few rows, planned anew",
    "long": "three rows of a million logits, planned anew (on a GPU)",
    "many": "5003 rows, planned anew (on a GPU)",
}
QUICK = ("own", "ragged", "ties", "odd")


def _shift(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Moves ranges out of bounds: those of every third row each in another way."""
    if inputs[1].dim() == 2:  # paged
        logits, ends, table = inputs
        ends = ends.clone()
        ends.view(-1)[1::3] = -5
        return logits, ends, table
    logits, starts, ends = (x.clone() for x in inputs)
    starts[0::3] -= 100
    ends[1::3] += 1 << 20
    ends[2::3] = starts[2::3] - 1
    return logits, starts, ends


def _cases(problem: TopkProblem, on_gpu: bool) -> Iterator[Case]:
    own = problem if on_gpu else small(problem)
    few = own.replace(b=19 if on_gpu else 8, s=min(own.s, 4), t=own.topk + 3001 if on_gpu else own.t, lengths="ragged")
    yield Case("own", own, "normal", planned=True)
    yield Case("ragged", few, "normal")
    for dist in ("ties", "equal", "odd", "close", "denormal"):
        yield Case(dist, few, dist)
    yield Case("short", few.replace(t=max(1, own.topk // 2)), "ties")
    yield Case("shifted", few, "odd", alter=_shift)
    yield Case("in_place", few, "ties", then=few)
    yield Case("planned", few.replace(b=2), "odd", planned=True)
    long = few.replace(b=3, s=1, t=1 << 20, lengths="uniform")
    yield Case("long", long, "close", planned=True, gpu=True)
    yield Case("many", few.replace(b=5003, s=1), "ties", planned=True, gpu=True)


#: Indices are right or wrong: a set that lacks one is off by a whole number.
EXACT = Bound(abs=0.5, rel=0.0, cos=1.0)


def bounds(dist: str) -> dict[str, Bound]:
    """By output."""
    return {"indices": EXACT}


def rebound(problem: TopkProblem, *inputs: Any) -> TopkProblem:
    """The problem of other inputs of the same class. Raises `UserError` for a tensor that does not fit."""
    if len(inputs) != 3:
        raise UserError(f"cannot bind: this kernel takes 3 tensors, and {len(inputs)} are given.")
    if problem.table:
        logits, ends, table = inputs
        b, s, (width, t) = len(table), problem.s, (table.shape[1], logits.shape[1])
        check_bound("logits", logits, (b * s, t), problem.dtype)
        check_bound("ends", ends, (b, s), "int32")
        check_bound("page_table", table, (b, width), "int32")
        if t > width * PAGE:
            raise UserError(f"cannot bind: logits have {t} columns, and {width} pages have {width * PAGE} tokens.")
        return problem.replace(b=b, t=t, lengths="uniform")
    logits, starts, ends = inputs
    n, t = logits.shape
    check_bound("logits", logits, (n, t), problem.dtype)
    check_bound("starts", starts, (n,), "int32")
    check_bound("ends", ends, (n,), "int32")
    return problem.replace(b=n, s=1, t=t, lengths="uniform")


def as_bound(problem: TopkProblem) -> TopkProblem:
    """What `rebound` makes of the problem's own inputs."""
    if problem.table:
        return problem.replace(lengths="uniform")
    return problem.replace(b=problem.rows, s=1, lengths="uniform")


def small(problem: TopkProblem) -> TopkProblem:
    """Few logits: seconds on a CPU."""
    return problem.replace(b=min(problem.b, 2), s=min(problem.s, 2), t=min(problem.t, problem.topk + 700))


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    return {"b": 2, "t": 3000} if small else {"b": 64, "t": 65536}


WORKLOAD = Workload(
    name="topk",
    problem=TopkProblem,
    outputs=(Output("indices", ("row", "place"), dtype="int32", rows=False, unordered=True),),
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
    variants=({"t": 8192},),  # rows that versions in CuTe DSL hold in registers
)
