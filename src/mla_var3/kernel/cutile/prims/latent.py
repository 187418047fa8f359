"""Absorbed decode over a paged latent cache: its sizes, the problems that fit them, the numbers of its softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_var3.runtime import Verdict, limits

if TYPE_CHECKING:
    from mla_var3.workload.decode import MlaProblem

LATENT = 512
ROPE = 64
WIDTH = LATENT + ROPE
LN2 = 0.6931471805599453
LOG2E = 1.4426950408889634

#: Running maximum before any key: finite, so that "maximum minus maximum" is never infinity minus infinity.
FLOOR = -1.0e30


def ceil_pow2(x: int) -> int:
    """The smallest power of two that is not below x (x >= 1)."""
    return 1 << (x - 1).bit_length()


def takes_latents(pd: MlaProblem) -> Verdict:
    """Whether a problem is absorbed decode of the sizes that the kernels are written for, its page left aside."""
    if (pd.k, pd.p) != (LATENT, ROPE):
        return Verdict.no(f"written for latent 512 and rope 64; the problem has k = {pd.k}, p = {pd.p}.")
    return sizes(pd)


def sizes(pd: MlaProblem) -> Verdict:
    """Whether requests fit on the grid's z axis, and 32 bits count q and the outputs."""
    rows = pd.b * pd.s * pd.h
    return limits.all_of(
        limits.grid(pd.b, "requests of q"),
        limits.offsets(rows * WIDTH, f"q has {rows:,} query rows of {WIDTH} columns"),
        limits.decode_sizes(pd),
    )


def takes_pages_of_16(pd: MlaProblem) -> Verdict:
    """Whether a problem's pages are 16, 32, 64, … tokens, so that a page is KV tiles of a power of two."""
    page = pd.page_size
    if page & (page - 1) or page < 16:
        return Verdict.no(f"pages of {page} tokens: cuTile tiles are powers of two, use pages of 16, 32, 64, …")
    return Verdict.yes()
