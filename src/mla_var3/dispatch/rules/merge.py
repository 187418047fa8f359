"""Merging of partial attention results by their log-sum-exp."""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Bound, Quantity, Rule
from mla_var3.workload.merge import MergeProblem


def _near(problem: MergeProblem, value: float) -> list[MergeProblem]:
    return [problem.replace(tokens=max(1, round(value / problem.h)))]


ROWS = Quantity("rows", lambda pd: pd.rows, _near)

RULES = (
    Rule(
        "triton/merge_partials",
        "of hundreds of megabytes only the rate of memory counts, and it comes nearer to it",
        where=(Bound(ROWS, 32768, above=True),),
        archs=HOPPER,
        records=("299f8c6d98ab", "4c68a0494039", "a6c77149c221", "f87875e134da"),
    ),
    Rule(
        "cute-dsl/merge_partials",
        "a short call gains by starting before the one in front of it has ended",
        archs=HOPPER,
        records=(
            "1e13767a167f",
            "f8fb470996c2",
            "2bb8179f1351",
            "ae40cb3081d3",
            "18f1f43c82ef",
            "380cea641200",
            "af8b8692f208",
            "c6bf14146415",
        ),
    ),
    Rule("triton/merge_partials", "it takes GPUs that no version in CuTe DSL is written for"),
)
