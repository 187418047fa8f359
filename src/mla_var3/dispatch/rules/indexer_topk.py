"""The lightning indexer's choice: one kernel for few short requests, else the two kernels that stand for themselves."""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Bound, Quantity, Rule
from mla_var3.workload.indexer_topk import IndexerTopkProblem


def _near_rows(problem: IndexerTopkProblem, value: float) -> list[IndexerTopkProblem]:
    return [problem.replace(b=max(1, round(value / problem.s)))]


#: Query tokens of all requests, and cached tokens of one.
ROWS = Quantity("query tokens", lambda pd: pd.rows, _near_rows)
TOKENS = Quantity("cached tokens", lambda pd: pd.t, lambda pd, value: [pd.replace(t=max(1, round(value)))])

ONE = "cute-dsl/indexer_topk_v1"
SAVED = "a cluster reads a row slower than all multiprocessors, by less than a second launch costs"

RULES = (
    Rule(ONE, SAVED, where=(Bound(ROWS, 16), Bound(TOKENS, 8192)), archs=HOPPER),
    Rule(ONE, SAVED, where=(Bound(ROWS, 8), Bound(TOKENS, 16384)), archs=HOPPER),
    Rule(ONE, SAVED, where=(Bound(ROWS, 1, above=True), Bound(ROWS, 8), Bound(TOKENS, 32768)), archs=HOPPER),
    Rule("cute-dsl/indexer_topk", "all multiprocessors read for a row, and then few choose", archs=HOPPER),
)
