"""`PairsPlan`: what the plans of the versions share whose shortest part is a pair of tiles, and whose blocks of such
parts are programmatic dependents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mla_var3.kernel.cute_python.lib.latent.parts_plan import PartsTiling, ShortPartsPlan
from mla_var3.runtime import Tiling


@dataclass(frozen=True)
class PairsTiling(PartsTiling):
    """The tiling of `PairsPlan`. dependent: blocks may be there before the kernel before has ended, take requests in
    the order of the batch, and with a single pair ask for the odd tile when the even one has come."""

    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {**PartsTiling.choices, "dependent": (False, True)}

    dependent: bool = False


class PairsPlan(ShortPartsPlan):
    """`ShortPartsPlan` with never more parts than pairs of tiles."""

    tiling_type: ClassVar[type[PairsTiling]] = PairsTiling
    tiling: PairsTiling

    def default_tiling(self) -> Tiling:
        """Dependents where the model of splits takes as many parts as there are pairs."""
        pd = self.problem
        splits = self.equal_splits(pd.b, pd.max_pages)
        return self.tiling_type(dependent=1 < splits == self._pairs(pd.max_pages))

    def equal_splits(self, b: int, max_pages: int) -> int:
        return min(super().equal_splits(b, max_pages), self._pairs(max_pages))

    def constants(self) -> tuple[Any, ...]:
        return (*super().constants(), self.tiling.dependent)
