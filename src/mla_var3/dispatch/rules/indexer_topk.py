"""The lightning indexer's choice: two kernels, one after the other."""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Rule

RULES = (Rule("cute-dsl/indexer_topk", "all multiprocessors read for a row, and then few choose", archs=HOPPER),)
