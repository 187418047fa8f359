"""An exact top-k of rows.

Version 1 is picked where its first times are far from those of version 0, which were taken the same way on another day;
for short rows the two lie within 7 % of each other.
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
REASON = "one select a row, behind a bound from a sample; few rows by clusters"

RULES = (
    Rule("cute-dsl/topk_v1", REASON, where=(Bound(BYTES, 2, above=True), Bound(LOGITS, 16384, above=True))),
    Rule("cute-dsl/topk_v1", REASON, where=(Bound(BYTES, 2, above=True), Bound(ROWS, 255, above=True))),
    Rule("cute-dsl/topk", "short rows, few of them, and bf16, in which version 1 was not timed beside it"),
)
