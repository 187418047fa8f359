"""`PartsPlan`: what the plans of the versions share that store parts as `lib.latent.ending` does and join them with
`lib.split.combine_rows`, and take the longest requests first. `FragmentsPlan`: the same with `lib.latent.fragments`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cutlass import Float32, Int32

from mla_var3.device import Requirement
from mla_var3.kernel.cute_python.lib import host
from mla_var3.kernel.cute_python.lib.latent import ending, fragments
from mla_var3.kernel.cute_python.lib.latent.fragments import Fragments
from mla_var3.kernel.cute_python.lib.latent.plan import LatentPlan, LatentTiling, takes_latent
from mla_var3.kernel.cute_python.lib.latent.shape import TILE_N, Shape
from mla_var3.kernel.cute_python.lib.split import combine_fragments, combine_rows
from mla_var3.kernel.cute_python.lib.split.cut import Room
from mla_var3.kernel.cute_python.lib.split.splits import (
    BLOCK_US,
    COMBINE_BYTES_PER_US,
    COMBINE_US,
    MAX_SPLITS,
    PAIR_US,
    choose_short_splits,
)
from mla_var3.runtime import CuteKernel, Verdict

if TYPE_CHECKING:
    from mla_var3.problem import MlaProblem

RAGGED = 0.95  # mean length over the longest under which requests count as unequal
FILLER = 0.15  # of a part: what SMs wait for the last ones, longest first, when short ones fill the gaps


def choose_ragged_splits(row_tiles: int, pairs: int, fill: float, query_rows: int, columns: int, num_sms: int) -> int:
    """`choose_splits` for requests of unequal length, the longest first: no longer whole waves, but what the longest
    part takes, or the mean load of an SM and a little more. fill: mean length over the longest.

    FILLER was fitted to b32, b64 and b128 with lengths uniform in 0..t on an H200, cut in 1, 2, 3 and 4.
    """
    load = row_tiles * pairs * fill / num_sms

    def cost(parts: int) -> float:
        each = -(-pairs // parts)
        time = max(each, load + FILLER * each) * PAIR_US + max(1.0, row_tiles * parts / num_sms) * BLOCK_US
        if parts > 1:
            time += COMBINE_US + 8.0 * query_rows * columns * parts / COMBINE_BYTES_PER_US
        return time

    return min(range(1, max(1, min(pairs, MAX_SPLITS)) + 1), key=cost)


@dataclass(frozen=True)
class PartsTiling(LatentTiling):
    """The number of splits is free, and whether blocks take the longest requests first (`lib.latent.order`)."""

    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {"longest_first": (True, False)}

    longest_first: bool = True


def takes_parts(pd: MlaProblem) -> Verdict:
    """Whether parts of a problem can be joined by `combine_rows`."""
    if pd.k < 32 * combine_rows.VECTOR:
        return Verdict.no(
            f"k = {pd.k} is under the {32 * combine_rows.VECTOR} columns that a warp of the combine reads"
        )
    return takes_latent(pd)


class PartsPlan(LatentPlan):
    """One compiled kernel a problem class; requests of unequal length are cut as `choose_ragged_splits` says."""

    requires = Requirement(
        archs=("sm_90a",), dtypes=("bf16", "fp16"), features=("wgmma", "tma", "setmaxnreg"), problem=takes_parts
    )

    def num_splits(self, b: int, max_pages: int) -> int:
        if self.tiling.num_splits:
            return self.tiling.num_splits
        if not self.tiling.longest_first or self.fill >= RAGGED:
            return self.equal_splits(b, max_pages)
        pd = self.problem
        return choose_ragged_splits(
            self.blocks(b), self._pairs(max_pages), self.fill, b * pd.s * pd.h, pd.k, host.target(self).num_sms
        )  # fmt: skip

    def equal_splits(self, b: int, max_pages: int) -> int:
        """`num_splits` for requests that are all as long as the page table is wide, or taken to be."""
        return super().num_splits(b, max_pages)

    def partials(self, q: Any, parts: int) -> tuple[Any, ...]:
        import torch

        pd, b = self.problem, q.shape[0]
        return (
            q.new_empty((parts, b, pd.s, pd.h, pd.k), dtype=torch.float16),
            q.new_empty((parts, b, pd.h, pd.s, ending.MARKS), dtype=torch.float32),
        )

    def results(self, outputs: Sequence[Any], partials: Sequence[Any], splits: int) -> Sequence[Any]:
        if splits == 1 or not outputs:
            return outputs
        # The host function is compiled for the output's type, and only copies 16-bit words of parts.
        parts, marks = partials
        return parts.view(outputs[0].dtype).flatten(0, 1), marks.flatten(0, 1).flatten(2)

    def constants(self) -> tuple[Any, ...]:
        return (*super().constants(), self.tiling.longest_first)

    def result_arguments(self, b: Any) -> tuple[Any, ...]:
        pd = self.problem
        parts, width = host.symbols(2)
        return (
            host.fake(host.element_type(pd.dtype), parts, pd.s, pd.h, pd.k),
            host.fake(Float32, parts, pd.h, width, align=4),
        )

    def combine(self, partials: Sequence[Any], outputs: Sequence[Any], splits: int) -> CuteKernel:
        return combine_rows.combine_kernel(self, partials, outputs, splits)


class OrderedPlan(PartsPlan):
    """`PartsPlan` of the versions whose blocks look for the longest request only where some wait for others to end."""

    scalar_types = (*PartsPlan.scalar_types, Int32)

    def scalars(self, b: int, splits: int) -> tuple[float | int, ...]:
        waits = self.blocks(b) * splits > host.target(self).num_sms
        return (*super().scalars(b, splits), int(waits))


class FragmentsPlan(OrderedPlan):
    """`OrderedPlan` of the versions that store parts as `lib.latent.fragments` describes.

    Whole results and parts are written through the same two arguments, so a kernel is compiled once for both.
    """

    # The combine takes every width that the kernel does.
    requires = LatentPlan.requires

    def partials(self, q: Any, parts: int) -> tuple[Any, ...]:
        """Memory for parts and marks, a multiple of what the output's and the log-sum-exp's shapes take."""
        import torch

        pd = self.problem
        sizes = Fragments.of(Shape.of(pd))
        count = parts * q.shape[0] * sizes.blocks
        elements, floats = pd.s * pd.h * pd.k, pd.s * pd.h * fragments.MARKS
        return (
            q.new_empty((-(-count * sizes.elements // elements) * elements,), dtype=torch.float16),
            q.new_empty((-(-count * sizes.marks // floats) * floats,), dtype=torch.float32),
        )

    def result_arguments(self, b: Any) -> tuple[Any, ...]:
        pd = self.problem
        parts, rows, width = host.symbols(3)
        return (
            host.fake(host.element_type(pd.dtype), parts, pd.s, pd.h, pd.k),
            host.fake(Float32, rows, pd.h, width, align=4),
        )

    def results(self, outputs: Sequence[Any], partials: Sequence[Any], splits: int) -> Sequence[Any]:
        if splits == 1 or not outputs:
            return outputs
        pd, (parts, marks) = self.problem, partials
        shaped = parts.view(outputs[0].dtype).view(-1, pd.s, pd.h, pd.k)
        return shaped, marks.view(-1, pd.h, pd.s * fragments.MARKS)

    def room(self, requests: int, splits: int) -> Room | None:
        """Where the combine's blocks go so that the next call's blocks may come before they end; None: nowhere."""
        return None

    @property
    def turned(self) -> bool:
        """Whether parts lie as accumulators whose columns are query rows."""
        return False

    def combine(self, partials: Sequence[Any], outputs: Sequence[Any], splits: int) -> CuteKernel:
        requests = outputs[0].shape[0] if outputs else self.problem.b
        return combine_fragments.combine_kernel(
            self, partials, outputs, splits, self.room(requests, splits), self.turned
        )


class ShortPartsPlan(FragmentsPlan):
    """`FragmentsPlan` of the versions whose shortest part is one tile."""

    def equal_splits(self, b: int, max_pages: int) -> int:
        pd = self.problem
        tiles = -(-max_pages * pd.page_size // TILE_N)
        return choose_short_splits(self.blocks(b), tiles, b * pd.s * pd.h, pd.k, host.target(self).num_sms)
