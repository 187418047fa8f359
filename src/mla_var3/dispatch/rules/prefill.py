"""Attention of prompts over decompressed heads."""

from __future__ import annotations

from collections.abc import Iterator

from mla_var3.dispatch.rule import HOPPER, Bound, Quantity, Rule
from mla_var3.workload.prefill import PrefillProblem

#: Columns of keys of published models, with values of 128.
SERVED_COLUMNS = (128, 192, 256)


def _near_masks(problem: PrefillProblem, value: float) -> Iterator[PrefillProblem]:
    masked = problem.replace(causal=value > 1)
    yield masked
    for columns in SERVED_COLUMNS:
        yield masked.replace(d=128, p=columns - 128)


#: Masks of a problem: the ends of requests, and the causal one.
MASKS = Quantity("masks", lambda pd: 1 + pd.causal, _near_masks, of_class=True)


def _near_columns(problem: PrefillProblem, value: float) -> Iterator[PrefillProblem]:
    for columns in sorted(SERVED_COLUMNS, key=lambda x: abs(x - value)):
        yield problem.replace(d=128, p=columns - 128)


def _near_values(problem: PrefillProblem, value: float) -> Iterator[PrefillProblem]:
    for columns in sorted((64, 128, 256), key=lambda x: abs(x - value)):
        yield problem.replace(d=columns)


def _near_tokens(problem: PrefillProblem, value: float) -> Iterator[PrefillProblem]:
    tokens = max(1, int(value))
    yield problem.replace(s=tokens, t=tokens + max(0, problem.t - problem.s))  # behind the same prefix


#: Columns of a head of keys and of values, and query tokens of a request, in the mean.
KEY_COLUMNS = Quantity("key columns", lambda pd: pd.d + pd.p, _near_columns, of_class=True)
VALUE_COLUMNS = Quantity("value columns", lambda pd: pd.d, _near_values, of_class=True)
TOKENS = Quantity("query tokens", lambda pd: pd.s, _near_tokens)

RULES = (
    Rule(
        "cute-dsl/flash_attention_v12",
        "its last query tiles end together, and narrow keys have three consumers",
        where=(Bound(KEY_COLUMNS, 128), Bound(TOKENS, 4095, above=True)),
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/flash_attention_v12",
        "its last query tiles end together, and wide results are rescaled where a maximum has grown",
        where=(Bound(KEY_COLUMNS, 192, above=True), Bound(TOKENS, 4095, above=True)),
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/flash_attention_v18",
        "two CTAs share K and V, and a query tile is stored beside the next one's scores",
        where=(
            Bound(MASKS, 1, above=True),
            Bound(KEY_COLUMNS, 128, above=True),
            Bound(KEY_COLUMNS, 192),
            Bound(TOKENS, 255, above=True),
        ),
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/flash_attention_v17",
        "two CTAs share K and V, and a product ends inside the softmax",
        where=(Bound(KEY_COLUMNS, 128, above=True), Bound(KEY_COLUMNS, 192), Bound(TOKENS, 255, above=True)),
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/flash_attention_v1",
        "it computes half a KV tile where no more is seen, and has a query tile's rows in L2 before it loads them",
        archs=HOPPER,
    ),
    Rule("cute-dsl/flash_attention", "it takes fp16, which the later versions do not", archs=HOPPER),
    Rule("cute-dsl/flash_attention_mma_v1", "an experiment: the version before takes all that it does", archs=HOPPER),
    Rule(
        "cute-dsl/flash_attention_mma",
        "it takes different lengths on every GPU from sm_80 on; the tiles that these GPUs have for such columns were "
        "checked on an H200",
        where=(Bound(KEY_COLUMNS, 127, above=True), Bound(KEY_COLUMNS, 192), Bound(VALUE_COLUMNS, 128)),
        archs=("sm_80", "sm_86", "sm_89", "sm_120a"),
    ),
    Rule("cutile-dsl/flash_attention", "the version in cuTile, for what is left"),
)
