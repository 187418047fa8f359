"""The kernel that stores rows into the memory of other GPUs: one launch for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

BLOCK, WARPS = 1024, 4  # words of a program: two vectors of 16 bytes a thread

#: (tensor, words of a row, words between its rows, words between what is for one peer and for the next, word of the
#: target where the first row goes, words between its rows there)
Rows = tuple["torch.Tensor", int, int, int, int, int]


@triton.jit
def copy_row(target, source, words, block, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    tl.store(target + at, tl.load(source + at, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["rank", "x_programs"])
def store_to_peers(  # type: ignore[no-untyped-def]
    peers,  # (ranks,) int64: addresses, multiples of 16
    rank,
    x_programs,  # the first so many programs copy x, the others y
    x,  # int32 words
    x_words,
    x_row,
    x_peer,
    x_at,
    x_step,
    y,
    y_words,
    y_row,
    y_peer,
    y_at,
    y_step,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of rows of x, then of y; peers)."""
    # Each rank begins with itself, so that no two of them store to the same one first.
    peer = (tl.program_id(1) + rank) % tl.num_programs(1)
    base = tl.multiple_of(tl.load(peers + peer).to(tl.pointer_type(tl.int32)), 16)
    program = tl.program_id(0)
    if program < x_programs:
        blocks = tl.cdiv(x_words, BLOCK)
        row = (program // blocks).to(tl.int64)
        copy_row(base + x_at + row * x_step, x + row * x_row + peer * x_peer, x_words, program % blocks, BLOCK)
    else:
        program -= x_programs
        blocks = tl.cdiv(y_words, BLOCK)
        row = (program // blocks).to(tl.int64)
        copy_row(base + y_at + row * y_step, y + row * y_row + peer * y_peer, y_words, program % blocks, BLOCK)


def put(peers: torch.Tensor, rank: int, rows: int, first: Rows, second: Rows | None = None) -> Any:
    """Stores `rows` rows of one tensor or two to every peer, this rank among them; returns what Triton compiled."""
    x, x_words, *x_places = first
    y, y_words, *y_places = second or (x, 0, 0, 0, 0, 0)
    x_programs, y_programs = (rows * -(-words // BLOCK) for words in (x_words, y_words))
    if not x_programs:
        return None
    return store_to_peers[(x_programs + y_programs, peers.numel())](
        peers, rank, x_programs, as_words(x), x_words, *x_places, as_words(y), y_words, *y_places,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as int32 words."""
    import torch

    return tensor.view(-1).view(torch.int32)
