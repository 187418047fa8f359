"""Decode over packed caches, sparse or dense, and sparse decode over bf16 caches."""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Rule

RULES = (
    Rule("cute-dsl/sparse_mla_v2", "it widens the codes of packed caches on the way into registers", archs=HOPPER),
    Rule(
        "cute-dsl/sparse_mla_v1",
        "it takes nothing that version 2 does not take; it stays while version 2 has hardly a record on an H100",
        archs=HOPPER,
    ),
    Rule("cute-dsl/sparse_mla", "it takes bf16 caches, which have no codes", archs=HOPPER),
    Rule("cute-dsl/sparse_mla_mma", "it takes every GPU from sm_80 on, and keeps codes as they are in shared memory"),
    Rule("triton/sparse_mla", "it takes layouts of V4, extra caches, and GPUs without CuTe DSL"),
    Rule("cutile-dsl/sparse_mla", "the last resort"),
)
