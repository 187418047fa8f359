"""The latent problem as tiles of 64 query rows and 64 tokens: sizes, and which tokens a block works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Int32

if TYPE_CHECKING:
    from mla_var3.problem import MlaProblem

TILE_M = 64  # query rows of a block: one warpgroup MMA
TILE_N = 64  # tokens of a tile
STAGES = 2  # tiles in shared memory
PANEL = 64  # columns of a panel: 128 bytes, one row of the shared memory swizzle


@dataclass(frozen=True)
class Shape:
    """What the code is specialised on."""

    h: int
    h_kv: int
    s: int
    k: int
    p: int
    page: int
    causal: bool

    @classmethod
    def of(cls, pd: MlaProblem) -> Shape:
        return cls(pd.h, pd.h_kv, pd.s, pd.k, pd.p, pd.page_size, pd.causal and pd.s > 1)

    @property
    def group(self) -> int:
        return self.h // self.h_kv

    @property
    def rows(self) -> int:
        return self.s * self.group

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // TILE_M)

    @property
    def panels(self) -> int:
        """64-column panels of a cached token."""
        return (self.k + self.p) // PANEL

    @property
    def half(self) -> int:
        """Output columns of one consumer."""
        return self.k // 2

    @property
    def left(self) -> tuple[int, ...]:
        """Panels of V's left half."""
        return tuple(range(self.half // PANEL))

    @property
    def right(self) -> tuple[int, ...]:
        """Panels of V's right half."""
        return tuple(range(self.half // PANEL, self.k // PANEL))

    @property
    def rope(self) -> int:
        """The panel of rope columns; P lies in it once the scores of the stage are made."""
        return self.k // PANEL

    def part(self, stage: int, consumer: int) -> tuple[int, ...]:
        """Panels of a stage that a consumer frees: its half of V, and the rope panel if it reads P there."""
        own = self.right if consumer else self.left
        return own if stage == consumer else (*own, self.rope)

    @property
    def stage_elements(self) -> int:
        return TILE_N * (self.k + self.p)


@cute.jit
def visible(seq_len: Int32, row_tile: Int32, shape: cutlass.Constexpr):
    """(keys that some row of a tile may see, keys that every row may see)."""
    most = cutlass.max(seq_len, 0)
    least = most
    if cutlass.const_expr(shape.causal):
        last_token = cutlass.min((row_tile * TILE_M + TILE_M - 1) // shape.group, shape.s - 1)
        first_token = (row_tile * TILE_M) // shape.group
        least = cutlass.max(most - shape.s + 1 + first_token, 0)
        most = cutlass.max(most - shape.s + 1 + last_token, 0)
    return most, least


@cute.jit
def work_range(seq_len: Int32, row_tile: Int32, split: Int32, num_splits: Int32, shape: cutlass.Constexpr):
    """(first pair, end pair, number of tiles, keys that every row of the tile may see) of a block."""
    most, least = visible(seq_len, row_tile, shape)
    num_tiles = (most + TILE_N - 1) // TILE_N
    num_pairs = (num_tiles + 1) // 2
    per_split = (num_pairs + num_splits - 1) // num_splits
    first = cutlass.min(split * per_split, num_pairs)
    end = cutlass.min(first + per_split, num_pairs)
    return first, end, num_tiles, least
