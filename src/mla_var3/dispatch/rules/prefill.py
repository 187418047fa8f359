"""Attention of prompts over decompressed heads."""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Rule

RULES = (
    Rule("cute-dsl/flash_attention_v1", "half of the KV tile on the diagonal is not computed", archs=HOPPER),
    Rule("cute-dsl/flash_attention", "the readable baseline takes the same problems", archs=HOPPER),
    Rule("cutile-dsl/flash_attention", "the version in cuTile, for what is left"),
)
