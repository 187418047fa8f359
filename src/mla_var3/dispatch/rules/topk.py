"""An exact top-k of rows.

Version 1 and version 3 were timed in turn. Version 3 was faster for 4k rows of 64k, and for few rows of 64k and 1M;
version 1 for 1k rows of 128k. Where between these the two are level is not known. In bf16 neither was timed beside the
other.
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

RULES = (
    Rule(
        "cute-dsl/topk_v1",
        "many rows above 64k: its slots have a candidate's room more, and by a model fewer rows are read again",
        where=(Bound(BYTES, 2, above=True), Bound(LOGITS, 65536, above=True), Bound(ROWS, 132, above=True)),
    ),
    Rule(
        "cute-dsl/topk_v3",
        "one select a row, behind a bound from a sample; few rows by clusters, whose CTAs choose by themselves",
    ),
)
