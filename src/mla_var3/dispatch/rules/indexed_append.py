"""The append of new tokens to a packed cache and to the indexer's, in one launch."""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Rule

RULES = (
    Rule(
        "cute-dsl/indexed_append",
        "both appends run beside each other in one launch",
        archs=HOPPER,
    ),
)
