"""An exact top-k of rows."""

from __future__ import annotations

from mla_var3.dispatch.rule import Bound, Quantity, Rule
from mla_var3.workload.topk import TopkProblem

HELD = 32768  # logits of a row, at most, in the registers of a CTA


def _ctas(problem: TopkProblem) -> int:
    """How many CTAs hold all rows in registers: of each row a power of two."""
    return problem.rows * (1 << (-(-problem.t // HELD) - 1).bit_length())


def _near_ctas(problem: TopkProblem, value: float) -> list[TopkProblem]:
    each = _ctas(problem) // problem.b
    return [problem.replace(b=max(1, round(value / each)))]


#: Logits of a row.
LOGITS = Quantity("logits of a row", lambda pd: pd.t, lambda pd, value: [pd.replace(t=max(1, round(value)))])
CTAS = Quantity("CTAs that hold all rows", _ctas, _near_ctas)
#: Up to a row a multiprocessor, clusters of all rows run at once.
ROWS = Quantity("rows", lambda pd: pd.rows, lambda pd, value: [pd.replace(b=max(1, round(value / pd.s)))])
CHOSEN = Quantity("k", lambda pd: pd.topk, lambda pd, value: [pd.replace(topk=max(1, round(value)))])

RULES = (
    Rule(
        "cute-dsl/topk_v5",
        "a CTA holds a short row in registers, and one digit of linear bins finds the bin of the k-th",
        where=(Bound(LOGITS, HELD),),
    ),
    Rule(
        "cute-dsl/topk_v6",
        "clusters hold few long rows, and each CTA finds its candidates by a digit of linear bins",
        where=(Bound(CTAS, 64),),
    ),
    Rule(
        "cute-dsl/topk_v6",
        "lists of many candidates in clusters of two cost more than a digit over all logits",
        where=(Bound(LOGITS, 2 * HELD), Bound(CTAS, 128), Bound(CHOSEN, 512, above=True)),
    ),
    Rule(
        "cute-dsl/topk_v7",
        "clusters of all rows run at once and read them in chunks, and few logits are looked at twice",
        where=(Bound(ROWS, 132),),
    ),
    Rule(
        "cute-dsl/topk_v7",
        "a row's chunks are divided among more CTAs where it is very long, so that no list is full",
        where=(Bound(LOGITS, 8 * HELD, above=True),),
    ),
    Rule("cute-dsl/topk_v3", "many rows, each read once against a bound from a sample, two CTAs on a multiprocessor"),
)
