"""Logits of the lightning indexer, in FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_var3.dispatch.rule import HOPPER, Bound, Quantity, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_var3.workload.indexer_logits import IndexerLogitsProblem


def _near_bytes(problem: IndexerLogitsProblem, value: float) -> Iterator[IndexerLogitsProblem]:
    yield problem.replace(dtype="bf16" if value <= 2 else "fp32")


LOGIT_BYTES = Quantity("bytes of a logit", lambda pd: pd.element_bytes, _near_bytes, of_class=True)

RULES = (
    Rule(
        "cute-dsl/mqa_logits_v3",
        "in bf16, of 64 heads over contiguous keys, it was 1 % faster than version 4 beside it",
        where=(Bound(LOGIT_BYTES, 2),),
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/mqa_logits_v4",
        "products run beside sums: in turns of two consumers, or in two parts of a query tile",
        archs=HOPPER,
    ),
    Rule("triton/mqa_logits", "the last resort where CuTe DSL is not installed"),
)
