"""The attention layer of a model in a decode step."""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Rule

RULES = (Rule("cute-dsl/mla_layer", "the only version there is", archs=HOPPER),)
