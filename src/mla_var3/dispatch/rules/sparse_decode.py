"""Decode over packed caches, sparse or dense, and sparse decode over bf16 caches."""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Rule

RULES = (
    Rule("cute-dsl/sparse_mla_v2", "it widens the codes of packed caches on the way into registers", archs=HOPPER),
    Rule(
        "cute-dsl/sparse_mla_v1",
        "it takes nothing that version 2 does not take; it stays while the cells of sparse_decode are its records",
        archs=HOPPER,
    ),
    Rule("cute-dsl/sparse_mla", "it takes bf16 caches, which have no codes", archs=HOPPER),
    Rule(
        "cute-dsl/sparse_mla_mma", "it has run on no GPU, and takes nothing on Hopper that others do not", archs=HOPPER
    ),
    Rule("triton/sparse_mla", "it takes GPUs that no version in CuTe DSL is written for"),
    Rule("cutile-dsl/sparse_mla", "the last resort"),
)
