"""A prefix of cached latents as keys and values of every head, piece by piece: what both ways of it share.

    rows of the cache ─gather→ latents (m, k) ─· W_UK of every head→ keys[..., :d]      cu_seqlens_k of the piece
                           └─→ rope columns, into every head's keys[..., d:]
                              latents         ─· W_UV of every head→ values

Products write where attention reads: nothing is transposed, split or concatenated. The last piece holds what is left of
the prefixes and, behind each one, the request's new tokens, so that causal attention over it sees both at once; where
everything fits into one piece, nothing is merged.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Bytes of the keys and values of a piece. With 128 heads of 192 and 128 columns in 16 bits it has 13,107 tokens.
PIECE_BYTES = 1 << 30


@dataclass(frozen=True)
class Piece:
    """Tokens first .. end - 1 of the prefixes behind one another, or with end None all from `first` on and the new
    tokens too. rows: how many there are at most."""

    first: int
    end: int | None
    rows: int

    @property
    def own(self) -> bool:
        """Whether it holds the new tokens, so that attention over it is causal."""
        return self.end is None


def pieces(prefix_tokens: int, new_tokens: int, token_bytes: int) -> Iterator[Piece]:
    """The pieces of a call, that with the new tokens last. token_bytes: of the keys and values of a token."""
    most = max(1, PIECE_BYTES // token_bytes)
    # The new tokens stay together, however many they are.
    ahead = max(0, prefix_tokens - max(0, most - new_tokens))
    for first in range(0, ahead, most):
        end = min(first + most, ahead)
        yield Piece(first, end, end - first)
    yield Piece(ahead, None, prefix_tokens - ahead + new_tokens)


def gather(cache: Any, table: Any, lens: Any, of_q: Any, piece: Piece, latents: Any, keys: Any, of_k: Any) -> None:
    """Writes the piece's latents (rows, k), the rope columns of its keys (rows, h, d + p), and where each request's
    keys begin among them, of_k (b + 1,) int32. cache (pages, page, k + p), whose pages may lie apart; table (b, width),
    lens (b,), of_q (b + 1,) int32. Rows that no request has are left alone. Waits for nothing."""
    if cache.is_cuda and len(table) <= _most_requests():
        _gather_by_kernel(cache, table, lens, of_q, piece, latents, keys, of_k)
        return
    import torch

    page, k = cache.shape[1], latents.shape[1]
    new = of_q.diff()
    before = (lens - new).clamp(min=0)
    ends = before.cumsum(0)
    begins = ends - before
    start = (piece.first - begins).clamp(min=0).minimum(before)
    if piece.end is None:
        count = before - start + new
    else:
        count = ends.clamp(piece.first, piece.end) - begins.clamp(piece.first, piece.end)
    of_k[0] = 0
    of_k[1:] = ends = count.cumsum(0)
    at = torch.arange(len(latents), device=cache.device)
    request = torch.searchsorted(ends, at, right=True).clamp(max=len(table) - 1)
    token = (at + (start - ends + count)[request]).clamp(0, table.shape[1] * page - 1)
    rows = cache[table[request, token // page].long().clamp(0, len(cache) - 1), token % page]
    latents.copy_(rows[:, :k])
    if rows.shape[1] > k:
        keys[..., keys.shape[2] - rows.shape[1] + k :] = rows[:, None, k:]


def _most_requests() -> int:
    """Up to how many requests the kernel takes; 0 without Triton."""
    if importlib.util.find_spec("triton") is None:
        return 0
    from mla_var3.kernel.triton.prims.rows import MOST_REQUESTS

    return MOST_REQUESTS


def _gather_by_kernel(
    cache: Any, table: Any, lens: Any, of_q: Any, piece: Piece, latents: Any, keys: Any, of_k: Any, rows: int = 8
) -> None:
    """`gather` by one kernel, a program for so many rows."""
    from mla_var3.kernel.triton.prims.rows import gather_rows

    (count, h, columns), k = keys.shape, latents.shape[1]
    p = cache.shape[2] - k
    gather_rows[(-(-count // rows),)](
        cache, table, lens, of_q, latents, keys, of_k, len(table), piece.first, piece.end or 0, count, table.shape[1],
        len(cache), cache.stride(0), OWN=piece.own, PAGE=cache.shape[1], K=k, P=p, H=h, D=columns - p,
        LATENT_COLUMNS=_power(k), ROPE_COLUMNS=_power(p), REQUESTS=_power(len(table)), ROWS=rows,
    )  # fmt: skip


def _power(number: int) -> int:
    """The least power of two of at least a number, and of at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def up_project(weight: Any, latents: Any, keys: Any, values: Any) -> None:
    """Writes the first d columns of keys (m, h, d + p), and values (m, h, v), of latents (m, k). weight (h · (d + v),
    k): for each head d rows of W_UK and v of W_UV. Two batched products of cuBLAS, a head each, which write with the
    strides of keys and values."""
    import torch

    h, v = values.shape[1:]
    of_heads = weight.view(h, -1, weight.shape[1])
    d = of_heads.shape[1] - v
    rows = latents.expand(h, -1, -1)
    torch.bmm(rows, of_heads[:, :d].transpose(1, 2), out=keys[..., :d].transpose(0, 1))
    torch.bmm(rows, of_heads[:, d:].transpose(1, 2), out=values.transpose(0, 1))
