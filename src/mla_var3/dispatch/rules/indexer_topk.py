"""The lightning indexer's choice: one kernel for logits and top-k, or the two that stand for themselves.

Both were timed in turn on an H200, 18 problems of one to 32 query tokens. The one kernel is picked where it was the
faster one: how long requests may be depends on how many there are, for a cluster reads its row by itself, where the two
kernels share all multiprocessors among rows. Its 16 heads were right in no check on a GPU that ran to its end.
"""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Bound, Quantity, Rule
from mla_var3.workload.indexer_topk import IndexerTopkProblem


def _of_length(problem: IndexerTopkProblem, value: float) -> list[IndexerTopkProblem]:
    return [problem.replace(t=max(problem.topk, round(value)))]


def _rows(problem: IndexerTopkProblem, value: float) -> list[IndexerTopkProblem]:
    return [problem.replace(b=max(1, round(value / problem.s)))]


def _heads(problem: IndexerTopkProblem, value: float) -> list[IndexerTopkProblem]:
    return [problem.replace(heads=32 if value > 16 else 16)]


TOKENS = Quantity("tokens of a request", lambda pd: pd.t, _of_length)
ROWS = Quantity("query tokens", lambda pd: pd.rows, _rows)
HEADS = Quantity("heads", lambda pd: pd.heads, _heads, of_class=True)


def _one(reason: str, tokens: int, most: int, above: int = 0) -> Rule:
    """One kernel for up to so many tokens, of `most` query tokens and more than `above`."""
    fewer = (Bound(ROWS, above, above=True),) if above else ()
    where = (Bound(TOKENS, tokens), Bound(ROWS, most), *fewer, Bound(HEADS, 16, above=True))
    return Rule("cute-dsl/indexer_topk_v1", reason, archs=HOPPER, where=where)


RULES = (
    _one("short requests: no logit leaves a cluster, and there is one launch", 8192, 16),
    _one("few requests: their clusters run at once", 16384, 8),
    _one("two to eight requests: the two kernels take as long for the lengths and ends of rows", 32768, 8, above=1),
    _one("four to eight requests: their clusters read by half of the multiprocessors and more", 65536, 8, above=3),
    Rule("cute-dsl/indexer_topk", "all multiprocessors read for a row, and then few choose", archs=HOPPER),
    Rule("cute-dsl/indexer_topk_v2", "not timed yet; it takes nothing that the two kernels do not take", archs=HOPPER),
)
