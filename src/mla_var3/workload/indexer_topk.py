"""The tokens that the lightning indexer chooses: `topk` of `indexer_logits`, whose logits nobody keeps.

    prefill   q, keys, scales, weights, starts, ends    → indices (n, k) int32: keys
    paged     q, cache, weights, ends, page_table       → indices (b · s, k) int32: slots, page · 64 + place in it

Inputs, ranges and what NaN does are those of `indexer_logits`; what is chosen, ties and -1 are those of `topk`. The
logits that are compared are float32.

A choice between two logits that lie close together depends on how they were summed, so inputs here are whole numbers
(`exact` of indexer_logits), whose logits are exact in float32 whatever the order of the sums. Many of them are equal.
In `odd` some scales, weights and codes are NaN. `normal` is that of indexer_logits: calls are timed on it, because ties
cost time that logits of a model do not, and no choice is judged on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mla_var3.errors import UserError, nearest
from mla_var3.workload import Bound, Case, Cost, Output, Workload, check_integer, indexer_logits, topk
from mla_var3.workload.indexer_logits import NAN_CODE, IndexerLogitsProblem, index_pages

DISTRIBUTIONS = ("exact", "odd", "normal")


@dataclass(frozen=True)
class IndexerTopkClass:
    """What a compiled kernel is specialised on."""

    h: int
    s: int
    k: int

    def key(self) -> str:
        return f"indexer_topk{self.k}_{f's{self.s}' if self.s else 'prefill'}_h{self.h}"


@dataclass(frozen=True)
class IndexerTopkProblem(IndexerLogitsProblem):
    """As `IndexerLogitsProblem`, whose dtype is fp32. topk: how many tokens each query token chooses."""

    workload: ClassVar[str] = "indexer_topk"

    topk: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("topk", self.topk, 1)
        if self.dtype != "fp32":
            raise UserError(f"problem.dtype = {self.dtype!r} is not taken: logits are compared in fp32.")

    @property
    def label(self) -> str:
        return f"{super().label}_k{self.topk}"

    def problem_class(self) -> IndexerTopkClass:  # type: ignore[override]
        return IndexerTopkClass(self.heads, self.s if self.table else 0, self.topk)

    def cost(self) -> Cost:
        """As of the logits, which are not written; indices are."""
        logits = super().cost()
        written = self.output_bytes()
        return Cost(logits.flops, logits.bytes - logits.written + written, pairs=logits.pairs)

    def output_bytes(self) -> int:
        return self.rows * self.topk * 4


def make_inputs(
    problem: IndexerTopkProblem, device: Any = "cpu", *, seed: int = 0, dist: str = "exact", **_: Any
) -> tuple[Any, ...]:
    """Inputs of `indexer_logits`, in whole numbers but for `normal`."""
    if dist not in DISTRIBUTIONS:
        raise UserError(f"indexer_topk input distribution {dist!r} is unknown: {nearest(dist, DISTRIBUTIONS)}.")
    made = indexer_logits.make_inputs(problem, device, seed=seed, dist="normal" if dist == "normal" else "exact")
    if dist == "odd":
        weights = made[2 if problem.table else 3]
        weights[2::5, 0] = math.nan
        codes, scales = index_pages(made[1]) if problem.table else made[1:3]
        scales[..., 3::7] = math.nan
        codes[..., 4::9, 17] = NAN_CODE
    return made


def reference(problem: IndexerTopkProblem, *inputs: Any) -> tuple[Any]:
    """The oracle: (indices,) as int64."""
    (logits,) = indexer_logits.reference(problem, *inputs)
    if not problem.table:
        return (topk.chosen(logits, inputs[4], inputs[5], problem.topk),)
    ends, table = inputs[3:]
    flat = ends.flatten()
    return (topk.slots_of(topk.chosen(logits, flat.new_zeros(len(flat)), flat, problem.topk), table, ends.shape[1]),)


CASES = {
    name: what
    for name, what in indexer_logits.CASES.items()
    if name in ("own", "ragged", "one", "odd", "shifted", "in_place", "planned")
} | {"long": "a request of a million tokens, planned anew (on a GPU)"}


def _cases(problem: IndexerTopkProblem, on_gpu: bool) -> Iterator[Case]:
    for case in indexer_logits.WORKLOAD.cases(problem, on_gpu):
        if case.name in CASES:
            yield Case(
                case.name, case.problem, "odd" if case.name == "odd" else "exact",
                planned=case.planned or case.name == "long", then=case.then, alter=case.alter, gpu=case.gpu,
            )  # fmt: skip


def bounds(dist: str) -> dict[str, Bound]:
    """By output."""
    return {"indices": topk.EXACT}


def sample(small: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields where nothing else is asked for. small: that a CPU runs in seconds."""
    return {**indexer_logits.sample(small, given), **({"topk": 64} if small else {})}


WORKLOAD = Workload(
    name="indexer_topk",
    problem=IndexerTopkProblem,
    outputs=(Output("indices", ("row", "place"), dtype="int32", rows=False, unordered=True),),
    make_inputs=make_inputs,
    reference=reference,
    cases=_cases,
    case_names=CASES,
    quick=indexer_logits.QUICK,
    bounds=bounds,
    rebound=indexer_logits.rebound,
    small=indexer_logits.small,
    as_bound=indexer_logits.as_bound,
    sample=sample,
)
