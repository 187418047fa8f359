"""Attention of prompts over decompressed heads."""

from __future__ import annotations

from collections.abc import Iterator

from mla_var3.dispatch.rule import HOPPER, Bound, Quantity, Rule
from mla_var3.workload.prefill import PrefillProblem


def _near_masks(problem: PrefillProblem, value: float) -> Iterator[PrefillProblem]:
    yield problem.replace(causal=value > 1)


#: Masks of a problem: the ends of requests, and the causal one.
MASKS = Quantity("masks", lambda pd: 1 + pd.causal, _near_masks, of_class=True)


def _near_heads(problem: PrefillProblem, value: float) -> Iterator[PrefillProblem]:
    heads = round(value)
    if heads % (problem.h // problem.h_kv) == 0:
        yield problem.replace(h=heads, h_kv=heads // (problem.h // problem.h_kv))


#: Query heads.
HEADS = Quantity("heads", lambda pd: pd.h, _near_heads)

RULES = (
    Rule(
        "cute-dsl/flash_attention_v4",
        "two CTAs share keys of 192 and values of 128 columns, and no query tile waits for the one before; with few "
        "heads its sections are wider than L2",
        where=(Bound(MASKS, 1, above=True), Bound(HEADS, 127, above=True)),
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/flash_attention_v1",
        "it computes only half of the KV tile on the diagonal where no more is seen",
        where=(Bound(MASKS, 1, above=True),),
        archs=HOPPER,
    ),
    Rule("cute-dsl/flash_attention", "it takes fp16, and without a diagonal there is nothing to save", archs=HOPPER),
    Rule("cutile-dsl/flash_attention", "the version in cuTile, for what is left"),
)
