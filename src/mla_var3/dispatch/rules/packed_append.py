"""Rotary embedding of queries and keys, and the append of keys to a packed cache."""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Rule

RULES = (
    Rule(
        "cute-dsl/packed_append",
        "a key is one warp's, which finds its scales by shuffles, and a short call starts early",
        archs=HOPPER,
        records=("594d09133180", "ce3885e8ec03"),
    ),
    Rule("triton/packed_append", "it takes GPUs and strides that the version in CuTe DSL does not"),
)
