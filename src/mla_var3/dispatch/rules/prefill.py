"""Attention of prompts over decompressed heads."""

from __future__ import annotations

from mla_var3.dispatch.rule import Rule

RULES = (Rule("cutile-dsl/flash_attention", "the only version there is"),)
