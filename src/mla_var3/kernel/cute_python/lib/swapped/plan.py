"""`PanelPlan`: what the plans of versions with swapped operands share that store parts as `lib.latent.fragments` does:
two consumers, a block a kv head, split and request, and a ring of 64 x 64 panels. `BoxPlan`: with TMA boxes of 32 or 64
tokens, and parts that may be a single tile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from mla_var3.device import Requirement
from mla_var3.kernel.cute_python.lib.latent.parts_plan import FragmentsPlan, ShortPartsPlan
from mla_var3.kernel.cute_python.lib.latent.shape import Shape
from mla_var3.kernel.cute_python.lib.paged import BOX
from mla_var3.kernel.cute_python.lib.split.splits import MAX_SPLITS
from mla_var3.kernel.cute_python.lib.swapped import limits
from mla_var3.kernel.cute_python.lib.swapped.consumer import fixed_bytes, most_slots
from mla_var3.kernel.cute_python.lib.swapped.limits import CONSUMERS, ROW_TILES
from mla_var3.kernel.cute_python.lib.swapped.swapped import PANEL, SwappedShape
from mla_var3.runtime import Tiling, Verdict

if TYPE_CHECKING:
    from typing import Self

    from mla_var3.device import Device
    from mla_var3.problem import MlaProblem

# Tokens of a TMA box. Side by side at b128 s1 t4096, in boxes of 32: 32 heads -0.2 to -0.7 % burst and -0.4 to -1.2 %
# hot, 16 heads +0.1 to +0.9 % (results/h200/traces/2026-11-22-flash_mla_v11.txt, parts 3 and 4).
BOX_OF_MOST_ROWS = 32


def spans_of(panels: int, tokens: int) -> tuple[int, ...]:
    """Panels of a tile that are loaded together: all in turn; or, where boxes are shorter, the first tokens of half of
    them ahead of the others."""
    return (panels,) if tokens == BOX else (panels - panels // 2, panels // 2)


def takes_rows(pd: MlaProblem) -> Verdict:
    """Whether all query rows of a cache fit one block, and its columns and pages the panels."""
    if not (taken := limits.takes_panels(pd, "a version with swapped operands")):
        return taken
    if pd.rows > ROW_TILES[-1]:
        return Verdict.no(
            f"s·h/h_kv = {pd.rows} query rows share a cache; a block has room for {ROW_TILES[-1]}: use flash_mla_v8"
        )
    return Verdict.yes()


@dataclass(frozen=True)
class PanelTiling(Tiling):
    """0 means: chosen for the problem.

    tile_n: query rows of a block (8, 16 or 32). num_pipeline_stages: 64 x 64 panels in the ring. num_splits: parts of
    each request's keys. longest_first: where more blocks than run at once, they take the longest requests first.
    """

    launch_fields: ClassVar[tuple[str, ...]] = ("num_splits",)

    tile_n: int = 0
    num_pipeline_stages: int = 0
    num_splits: int = 0
    longest_first: bool = True

    def resolved(self, pd: MlaProblem) -> Self:
        """With everything chosen that the code is made for."""
        tile_n = self.tile_n or limits.row_tile(pd.rows)
        slots = self.num_pipeline_stages or most_slots(tile_n, CONSUMERS, pd.k + pd.p, pd.element_bytes)
        return replace(self, tile_n=tile_n, num_pipeline_stages=slots)

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        if self.tile_n not in (0, *ROW_TILES):
            return Verdict.no(f"tile_n = {self.tile_n}, and this version is written for 8, 16 and 32")
        if not 0 <= self.num_splits <= MAX_SPLITS:
            return Verdict.no(f"num_splits = {self.num_splits} is outside 0 (chosen for the sizes) to {MAX_SPLITS}")
        if not (taken := takes_rows(pd)):
            return taken
        full = self.resolved(pd)
        if full.tile_n < pd.rows:
            return Verdict.no(f"tile_n = {full.tile_n} must hold the {pd.rows} query rows that share a cache")
        panels = (pd.k + pd.p) // PANEL
        if full.num_pipeline_stages < panels * CONSUMERS:
            return Verdict.no(
                f"num_pipeline_stages = {full.num_pipeline_stages} panels must hold the {panels} of a tile for each of "
                f"{CONSUMERS} consumers"
            )
        fixed = fixed_bytes(full.tile_n, CONSUMERS, pd.k + pd.p, pd.element_bytes)
        return limits.fits_block(full.num_pipeline_stages, fixed, device)


class PanelPlan(FragmentsPlan):
    """One compiled kernel a problem class, tile_n and slots; b, lengths, page table width and splits are arguments."""

    requires = Requirement(archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma"), problem=takes_rows)

    @property
    def resolved(self) -> Any:
        """The tiling with everything chosen."""
        return self.tiling.resolved(self.problem)

    @property
    def shape(self) -> SwappedShape:
        tiling = self.resolved
        return SwappedShape.of(self.problem, tiling.tile_n, CONSUMERS, tiling.num_pipeline_stages)

    def blocks(self, b: int) -> int:
        return b * self.shape.h_kv

    def constants(self) -> tuple[Any, ...]:
        return (self.shape, Shape.of(self.problem), self.tiling.longest_first)


@dataclass(frozen=True)
class BoxTiling(PanelTiling):
    """box_tokens: tokens of a TMA box (32 or 64); 0: 32 with 32 rows, else 64."""

    box_tokens: int = 0

    def resolved(self, pd: MlaProblem) -> Self:
        full = super().resolved(pd)
        return replace(full, box_tokens=self.box_tokens or (BOX_OF_MOST_ROWS if full.tile_n == ROW_TILES[-1] else BOX))

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        if self.box_tokens not in (0, BOX_OF_MOST_ROWS, BOX):
            return Verdict.no(f"box_tokens = {self.box_tokens} is not 0 (chosen), {BOX_OF_MOST_ROWS} or {BOX}")
        return super().validate(pd, device)


class BoxPlan(PanelPlan, ShortPartsPlan):
    """`PanelPlan` whose boxes may be shorter than a panel, and a part a single tile."""

    def constants(self) -> tuple[Any, ...]:
        return (*super().constants(), self.resolved.box_tokens)
