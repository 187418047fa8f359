"""Logits of the lightning indexer, in FP8."""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Rule

RULES = (
    Rule(
        "cute-dsl/mqa_logits_v3",
        "lanes sum up heads of their own tokens while tensor cores work on another tile; all CTAs have equal shares",
        archs=HOPPER,
    ),
    Rule("triton/mqa_logits", "the last resort where CuTe DSL is not installed"),
)
