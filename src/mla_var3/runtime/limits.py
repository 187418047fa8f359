"""What a grid and 32-bit numbers hold: the part of a tiling's `validate` that is the same in every language.

CUDA numbers the blocks of a grid with 31 bits along x and with 16 along y and z. Kernels count elements with 32 bits
where 64 would cost registers in their loops. A size beyond either would end in a launch error, in a refusal of the
compiled function, or in wrong results; so a version says first that it does not take such a problem. The sentences name
the arguments of `mla_var3.ops`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_var3.errors import Verdict

if TYPE_CHECKING:
    from mla_var3.workload.decode import MlaProblem
    from mla_var3.workload.sparse_decode import SparseProblem

#: Most blocks of a grid along y, and along z.
GRID_YZ = (1 << 16) - 1
#: Elements and blocks that a signed number of 32 bits counts.
MOST = (1 << 31) - 1
#: Cached tokens of a request: a kernel rounds lengths up to its tiles and splits, in 32 bits.
MOST_TOKENS = MOST - (1 << 16)


def grid(number: int, what: str) -> Verdict:
    """Whether a number of blocks fits on the y or z axis of a grid. what: the blocks, as "requests of q"."""
    if number <= GRID_YZ:
        return Verdict.yes()
    return Verdict.no(f"{number:,} {what}: this version has room for {GRID_YZ:,} on an axis of its grid")


def offsets(elements: int, what: str) -> Verdict:
    """Whether 32 bits count the elements of a tensor, or of what a kernel counts through at once."""
    if elements <= MOST:
        return Verdict.yes()
    return Verdict.no(f"{what}, {elements:,} elements: offsets are 32 bits, which count {MOST:,}")


def all_of(*verdicts: Verdict) -> Verdict:
    """The first verdict that is false, or a true one."""
    return next((verdict for verdict in verdicts if not verdict), Verdict.yes())


def decode_sizes(pd: MlaProblem) -> Verdict:
    """Whether the sizes of absorbed decode are within what every version's offsets count."""
    if pd.longest > MOST_TOKENS:
        return Verdict.no(too_long(pd.longest))
    rows, width = pd.query_tokens * pd.h, pd.k + pd.p
    table = f"page_table has {pd.b:,} rows of {pd.max_pages:,} pages"
    verdict = all_of(
        # The combine counts rows twice where a row is two warps'.
        offsets(2 * rows, f"q has {pd.query_tokens:,} query tokens of {pd.h:,} heads in all"),
        offsets(pd.b * pd.max_pages, table),
        offsets(pd.b * pd.s * pd.s if pd.tree else 0, f"mask is ({pd.b:,}, {pd.s:,}, {pd.s:,})"),
    )
    if not verdict or pd.packed or pd.s * pd.h * width <= MOST:
        return verdict
    return Verdict.no(
        f"q has {pd.s:,} query tokens of {pd.h:,} heads in a request, {pd.s * pd.h * width:,} elements: offsets in a "
        f"request are 32 bits, so give at most {MOST // (pd.h * width):,} query tokens in a call, or pass q packed, "
        "with cu_seqlens_q"
    )


def sparse_sizes(pd: SparseProblem) -> Verdict:
    """Whether the sizes of decode over packed caches are within what every version's offsets count."""
    if pd.paged and pd.t > MOST_TOKENS:
        return Verdict.no(too_long(pd.t))
    tokens = f"q has {pd.b * pd.s:,} query tokens"
    chosen = max(pd.topk, pd.extra)
    return all_of(
        offsets(2 * pd.b * pd.s * pd.h, f"{tokens} of {pd.h:,} heads"),
        offsets(pd.b * pd.s * chosen, f"{tokens} of {chosen:,} indices"),
        offsets(pd.b * -(-pd.t // pd.page) if pd.paged else 0, f"page_table has {pd.b:,} rows of pages"),
    )


def too_long(tokens: int) -> str:
    """What is said of a request with room for more than `MOST_TOKENS`."""
    return (
        f"page_table has room for {tokens:,} tokens of a request (its width times the tokens of a page), and a request "
        f"has at most {MOST_TOKENS:,}: pass fewer columns of it"
    )
