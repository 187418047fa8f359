"""Rotary embedding of queries and keys, and the append of keys to a cache of bf16 or fp16."""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Rule

RULES = (
    Rule(
        "cute-dsl/rope_append",
        "it was the faster one in every cell that was timed, most where a call is short",
        archs=HOPPER,
        records=("01e5e9e05b35", "c07e1e2acac2"),
    ),
    Rule("triton/rope_append", "it takes GPUs that no version in CuTe DSL is written for"),
    Rule("cutile-dsl/rope_append", "the last resort"),
)
