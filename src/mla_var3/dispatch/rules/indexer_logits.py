"""Logits of the lightning indexer, in FP8."""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Rule

RULES = (
    Rule(
        "cute-dsl/mqa_logits_v4",
        "products run beside sums: in turns of two consumers, or in two parts of a query tile",
        archs=HOPPER,
    ),
    Rule("triton/mqa_logits", "the last resort where CuTe DSL is not installed"),
)
