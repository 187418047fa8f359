"""Norm, rotary embedding and the append of the indexer's keys to its cache."""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Rule

RULES = (
    Rule("cute-dsl/index_append", "a token is half a warp's, and a short call starts early", archs=HOPPER),
    Rule("triton/index_append", "it takes GPUs that the version in CuTe DSL is not written for"),
)
