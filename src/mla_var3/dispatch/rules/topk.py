"""An exact top-k of rows."""

from __future__ import annotations

from mla_var3.dispatch.rule import Bound, Quantity, Rule

#: Logits of a row.
LOGITS = Quantity("logits of a row", lambda pd: pd.t, lambda pd, value: [pd.replace(t=max(1, round(value)))])

RULES = (
    Rule(
        "cute-dsl/topk_v4",
        "registers hold a short row, and one digit finds the bin of the k-th",
        where=(Bound(LOGITS, 32768),),
    ),
    Rule(
        "cute-dsl/topk_v3",
        "one select a row, behind a bound from a sample; few rows by clusters, whose CTAs choose by themselves",
    ),
)
