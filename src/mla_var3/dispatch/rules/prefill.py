"""Attention of prompts over decompressed heads."""

from __future__ import annotations

from collections.abc import Iterator

from mla_var3.dispatch.rule import HOPPER, Bound, Quantity, Rule
from mla_var3.workload.prefill import PrefillProblem

#: d and p of published models with values of 128 columns, and those of 96/64.
SERVED_COLUMNS = ((64, 32), (128, 0), (128, 64), (128, 128))


def _near_columns(problem: PrefillProblem, value: float) -> Iterator[PrefillProblem]:
    for d, p in sorted(SERVED_COLUMNS, key=lambda x: abs(sum(x) - value)):
        yield problem.replace(d=d, p=p)


def _near_values(problem: PrefillProblem, value: float) -> Iterator[PrefillProblem]:
    for columns in sorted((64, 128, 256), key=lambda x: abs(x - value)):
        yield problem.replace(d=columns)


def _near_tokens(problem: PrefillProblem, value: float) -> Iterator[PrefillProblem]:
    tokens = max(1, int(value))
    here = problem.replace(s=tokens, t=tokens + max(0, problem.t - problem.s))  # behind the same prefix
    yield here
    yield from (here.replace(d=d, p=p) for d, p in SERVED_COLUMNS)


def _seen(problem: PrefillProblem) -> float:
    return max(1.0, problem.t - (problem.s - 1) / 2 if problem.causal else problem.t)


def _near_seen(problem: PrefillProblem, value: float) -> Iterator[PrefillProblem]:
    keys = max(1, int(value))
    tokens = 2 * keys - 1 if problem.causal else keys
    here = problem.replace(s=tokens, t=tokens, lengths="uniform")
    yield here
    yield from (here.replace(d=d, p=p) for d, p in SERVED_COLUMNS)


def _near_keys(problem: PrefillProblem, value: float) -> Iterator[PrefillProblem]:
    tokens = max(1, int(value))
    for heads in (8, 4, 2, 1):
        yield problem.replace(b=1, s=tokens, t=tokens, h=heads, h_kv=heads, lengths="uniform")


def _query_tiles(problem: PrefillProblem) -> int:
    return problem.b * problem.h * -(-problem.s // 256)


def _near_query_tiles(problem: PrefillProblem, value: float) -> Iterator[PrefillProblem]:
    for tokens in (2048, 4096, 8192):
        heads = max(1, int(value) * 256 // tokens)
        yield problem.replace(b=1, s=tokens, t=tokens, h=heads, h_kv=heads, lengths="uniform")


#: Columns of a head of keys and of values; query tokens of a request, and keys that one of them sees, in the mean.
KEY_COLUMNS = Quantity("key columns", lambda pd: pd.d + pd.p, _near_columns, of_class=True)
VALUE_COLUMNS = Quantity("value columns", lambda pd: pd.d, _near_values, of_class=True)
TOKENS = Quantity("query tokens", lambda pd: pd.s, _near_tokens)
#: Where the tiles that other GPUs than Hopper have were right on an H200.
CHECKED_COLUMNS = (Bound(KEY_COLUMNS, 127, above=True), Bound(KEY_COLUMNS, 192), Bound(VALUE_COLUMNS, 128))
SEEN = Quantity("keys that a query sees", _seen, _near_seen)
#: Keys of a request, in the mean, and query tiles of 256 rows of all requests and heads, if all are alike.
KEYS = Quantity("keys", lambda pd: max(pd.t, 1), _near_keys)
QUERY_TILES = Quantity("query tiles", _query_tiles, _near_query_tiles)
RULES = (
    Rule(
        "cute-dsl/flash_attention_v22",
        "a query tile holds the heads that share keys, and a consumer without a row computes nothing",
        where=(Bound(KEY_COLUMNS, 96), Bound(TOKENS, 4095)),
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/flash_attention_v12",
        "its last query tiles end together, and narrow keys have three consumers for 192 query tokens",
        where=(Bound(KEY_COLUMNS, 96),),
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/flash_attention_v22",
        "it is version 12 with heads that share keys in one query tile, and a consumer without a row computes nothing",
        where=(Bound(KEY_COLUMNS, 192, above=True), Bound(TOKENS, 4095)),
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/flash_attention_v12",
        "its last query tiles end together, and wide results are rescaled where a maximum has grown",
        where=(Bound(KEY_COLUMNS, 192, above=True),),
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/flash_attention_v22",
        "few keys are one or two KV tiles, and its query tiles take one multiprocessor where version 18's take two",
        where=(Bound(KEY_COLUMNS, 128), Bound(SEEN, 255)),
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/flash_attention_v23",
        "it splits the keys of query tiles that are too few for all multiprocessors",
        where=(Bound(QUERY_TILES, 33), Bound(KEYS, 2047, above=True)),
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/flash_attention_v23",
        "two CTAs share K, V and a query tile of 256 rows, or have one of up to 128 rows each, of two heads",
        where=(
            Bound(KEY_COLUMNS, 96, above=True),
            Bound(KEY_COLUMNS, 192),
            Bound(TOKENS, 128, above=True),
            Bound(TOKENS, 4095),
        ),
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/flash_attention_v18",
        "two CTAs share K, V and a query tile of 256 rows, which is stored beside the next one's scores",
        where=(Bound(KEY_COLUMNS, 96, above=True), Bound(KEY_COLUMNS, 192), Bound(TOKENS, 128, above=True)),
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/flash_attention_v22",
        "up to 128 query tokens fill half of version 18's query tile; here a consumer without a row computes nothing",
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/flash_attention_mma_v1",
        "it shows what products of single warps take on Hopper; the versions before take half of that",
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/flash_attention_mma",
        "it takes different lengths on every GPU from sm_80 on; the tiles that these GPUs have for such columns were "
        "checked on an H200",
        where=CHECKED_COLUMNS,
        archs=("sm_80", "sm_86", "sm_87", "sm_89", "sm_100a", "sm_103a", "sm_120a", "sm_121a"),
    ),
    Rule("cutile-dsl/flash_attention", "the version in cuTile, for what is left"),
)
