"""Logits of the lightning indexer, in FP8."""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Rule

RULES = (
    Rule(
        "cute-dsl/mqa_logits_v1",
        "tensor cores work on one tile while another is summed over heads, and all CTAs have equal shares",
        archs=HOPPER,
    ),
    Rule(
        "triton/mqa_logits",
        "it makes logits in bf16 over pages, and is the last resort where CuTe DSL is not installed",
    ),
)
