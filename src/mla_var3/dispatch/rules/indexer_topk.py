"""The lightning indexer's choice: the two kernels that stand for themselves, one after the other.

One kernel for both (version 1) was faster on an H200 for few short requests, and its choices were right there in a
hundred random problems; but its check was cut before it said anything of NaN and of poisoned inputs. Until a check has
run to its end on a GPU, it is called by name only.
"""

from __future__ import annotations

from mla_var3.dispatch.rule import HOPPER, Rule

RULES = (
    Rule("cute-dsl/indexer_topk", "all multiprocessors read for a row, and then few choose", archs=HOPPER),
    Rule("cute-dsl/indexer_topk_v1", "its check has not run to its end on a GPU", archs=HOPPER),
    Rule("cute-dsl/indexer_topk_v2", "it has not run on a GPU", archs=HOPPER),
)
