"""The lightning indexer's choice: one kernel for few short requests over a cache, else two, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

from mla_var3.dispatch.rule import HOPPER, Bound, Quantity, Rule
from mla_var3.workload.indexer_topk import IndexerTopkProblem


def _near_rows(problem: IndexerTopkProblem, value: float) -> Iterator[IndexerTopkProblem]:
    if problem.table and value % problem.s == 0:
        yield problem.replace(b=int(value) // problem.s)


def _near_tokens(problem: IndexerTopkProblem, value: float) -> Iterator[IndexerTopkProblem]:
    if problem.table:
        yield problem.replace(t=int(value))


ROWS = Quantity("query tokens in all", lambda pd: pd.rows, _near_rows)
TOKENS = Quantity("tokens of a request", lambda pd: pd.t, _near_tokens)

RULES = (
    Rule(
        "cute-dsl/indexer_topk_v1",
        "logits stay in the shared memory of a cluster, and a launch and a pass over them are saved",
        where=(Bound(TOKENS, 8192), Bound(ROWS, 16)),
        archs=HOPPER,
    ),
    Rule("cute-dsl/indexer_topk", "all multiprocessors read for a row, and then few choose", archs=HOPPER),
)
