"""An exact top-k of rows."""

from __future__ import annotations

from mla_var3.dispatch.rule import Rule

RULES = (Rule("cute-dsl/topk", "the only version that does not wait for the device"),)
