"""An exact top-k of rows."""

from __future__ import annotations

from mla_var3.dispatch.rule import Rule

RULES = (
    Rule(
        "cute-dsl/topk_v3",
        "one select a row, behind a bound from a sample; few rows by clusters, whose CTAs choose by themselves",
    ),
    Rule("cute-dsl/topk_v4", "it takes short rows alone, and has not run on a GPU"),
)
