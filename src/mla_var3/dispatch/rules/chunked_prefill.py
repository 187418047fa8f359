"""How new tokens attend to a cached prefix: as keys and values of every head, or in latent space."""

from __future__ import annotations

from collections.abc import Iterator

from mla_var3.dispatch.rule import HOPPER, Bound, Quantity, Rule
from mla_var3.workload.chunked_prefill import ChunkedProblem, break_even

#: What `break_even` says of DeepSeek's models, whose widths were measured.
MEASURED = break_even(512, 64, 128)


def _tokens(problem: ChunkedProblem) -> float:
    """New tokens of a request, in the mean; of other widths as many as go with the same share of what breaks even."""
    least = break_even(problem.k, problem.p, problem.d)
    return problem.s * MEASURED / least if least else float("inf")


def _near_tokens(problem: ChunkedProblem, value: float) -> Iterator[ChunkedProblem]:
    s = max(1, round(value * break_even(problem.k, problem.p, problem.d) / MEASURED))
    yield problem.replace(s=s, t=problem.t - problem.s + s, lengths="uniform")


TOKENS = Quantity("new tokens of a request", _tokens, _near_tokens)

RULES = (
    Rule(
        "cute-dsl/chunk_absorb",
        "the cache is read as it lies, which with few new tokens is less work than making keys and values of it",
        where=(Bound(TOKENS, 295),),
        archs=HOPPER,
    ),
    Rule(
        "cute-dsl/chunk_decompress",
        "a pair of a query and a key takes fewer operations over decompressed heads",
        archs=HOPPER,
    ),
)
