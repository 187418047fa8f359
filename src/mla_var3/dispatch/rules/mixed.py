"""Attention whose cache is decompressed for a part of its tokens."""

from __future__ import annotations

from mla_var3.dispatch.rule import Rule

RULES = (Rule("cutile-dsl/mla_var6_plus", "the only version there is"),)
