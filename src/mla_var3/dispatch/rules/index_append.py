"""Norm, rotary embedding and the append of the indexer's keys to its cache."""

from __future__ import annotations

from mla_var3.dispatch.rule import Rule

RULES = (Rule("cute-dsl/index_append", "the only version that does not wait for the device"),)
