"""An exact top-k of rows.

Version 3 is picked where version 1 was, than which it is faster. Version 1's first times were far there from those of
version 0, which were taken the same way on another day; for short rows the two lay within 7 % of each other.
"""

from __future__ import annotations

from mla_var3.dispatch.rule import Bound, Quantity, Rule
from mla_var3.workload.topk import TopkProblem


def _of_length(problem: TopkProblem, value: float) -> list[TopkProblem]:
    return [problem.replace(t=max(problem.topk, round(value)))]


def _rows(problem: TopkProblem, value: float) -> list[TopkProblem]:
    return [problem.replace(b=max(1, round(value / problem.s)))]


def _wide(problem: TopkProblem, value: float) -> list[TopkProblem]:
    return [problem.replace(dtype="fp32" if value > 2 else "bf16")]


LOGITS = Quantity("logits of a row", lambda pd: pd.t, _of_length)
ROWS = Quantity("rows", lambda pd: pd.rows, _rows)
BYTES = Quantity("bytes of a logit", lambda pd: pd.element_bytes, _wide)
REASON = "one select a row, behind a bound from a sample; few rows by clusters, whose CTAs choose by themselves"

RULES = (
    Rule("cute-dsl/topk_v3", REASON, where=(Bound(BYTES, 2, above=True), Bound(LOGITS, 16384, above=True))),
    Rule("cute-dsl/topk_v3", REASON, where=(Bound(BYTES, 2, above=True), Bound(ROWS, 255, above=True))),
    Rule("cute-dsl/topk", "short rows, few of them, and bf16, in which the clusters' version was not timed beside it"),
)
