"""`LatentPlan`: what the plans of the versions share that take two 64-token tiles at a time (`lib.latent.Shape`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutlass import Float32, Int32

from mla_var3.kernel.cute_python.lib import host
from mla_var3.kernel.cute_python.lib.decode import DecodePlan
from mla_var3.kernel.cute_python.lib.latent import TILE_N, Shape
from mla_var3.kernel.cute_python.lib.split import combine
from mla_var3.kernel.cute_python.lib.split.splits import choose_splits

if TYPE_CHECKING:
    from mla_var3.runtime.types import Tiling


class LatentPlan(DecodePlan):
    """A tiling whose free knob is the number of splits, and a host function of the tensors, scale, splits and Shape."""

    def default_tiling(self) -> Tiling:
        return self.tiling_type()

    def autotune_configs(self) -> list[Tiling]:
        pairs = self._pairs(self.problem.max_pages)
        splits = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if n <= pairs]
        return [self.tiling_type(), *(self.tiling_type(num_splits=n) for n in splits)]

    def num_splits(self, b: int, max_pages: int) -> int:
        """Parts of each request's keys: the tiling's, or the model's for requests as long as the page table is wide."""
        if self.tiling.num_splits:
            return self.tiling.num_splits
        shape = Shape.of(self.problem)
        blocks, query_rows = b * shape.h_kv * shape.row_tiles, b * shape.s * shape.h
        return choose_splits(blocks, self._pairs(max_pages), query_rows, shape.k, host.target(self).num_sms)

    def _pairs(self, max_pages: int) -> int:
        return -(-max_pages * self.problem.page_size // (2 * TILE_N))

    def arguments(self) -> tuple[Any, ...]:
        """Fake arguments of the host function, without the stream."""
        pd, kind = self.problem, host.element_type(self.problem.dtype)
        b, pages, width = host.symbols(3)
        *partials, out, lse = combine.fake_partials(kind, b, pd.s, pd.h, pd.h_kv, pd.k)
        return (
            host.fake(kind, b, pd.s, pd.h, pd.k + pd.p),
            host.fake(kind, pages, pd.page_size, pd.h_kv, pd.k + pd.p, align=128),
            host.fake(Int32, b, width, align=4),
            host.fake(Int32, b, align=4),
            out, lse, *partials, Float32(1.0), Int32(1), Shape.of(pd),
        )  # fmt: skip
