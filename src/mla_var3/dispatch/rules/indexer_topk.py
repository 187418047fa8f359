"""The lightning indexer's choice: one kernel for logits and top-k, or the two that stand for themselves.

By the calculation in the devlog of `cute-dsl/indexer_topk_v1`: a cluster reads its row at 58 GB/s a multiprocessor, and
saves about 5 us of writing and reading logits, of lengths, and of a second launch.
"""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Bound, Quantity, Rule
from mla_var3.workload.indexer_topk import IndexerTopkProblem


def _of_length(problem: IndexerTopkProblem, value: float) -> list[IndexerTopkProblem]:
    return [problem.replace(t=max(problem.topk, round(value)))]


def _rows(problem: IndexerTopkProblem, value: float) -> list[IndexerTopkProblem]:
    return [problem.replace(b=max(1, round(value / problem.s)))]


TOKENS = Quantity("tokens of a request", lambda pd: pd.t, _of_length)
ROWS = Quantity("query tokens", lambda pd: pd.rows, _rows)

RULES = (
    Rule(
        "cute-dsl/indexer_topk_v1",
        "few requests of up to 32k tokens: a cluster reads its row at once, and no logit leaves its shared memory",
        archs=HOPPER,
        where=(Bound(ROWS, 8), Bound(TOKENS, 32768)),
    ),
    Rule(
        "cute-dsl/indexer_topk_v2",
        "one or two long requests: up to 112 multiprocessors read a row, and the last cluster chooses among all",
        archs=HOPPER,
        where=(Bound(ROWS, 2), Bound(TOKENS, 32768, above=True)),
    ),
    Rule("cute-dsl/indexer_topk", "all multiprocessors read for a row, and then few choose", archs=HOPPER),
)
