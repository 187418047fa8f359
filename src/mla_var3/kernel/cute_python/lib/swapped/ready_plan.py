"""`ReadyPlan`: what the plans of the versions share whose blocks stand ready while the call before ends
(`lib.swapped.ready`), and whose combine fits beside them. Needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mla_var3.device import SUBPARTITIONS
from mla_var3.kernel.cute_python.lib import host
from mla_var3.kernel.cute_python.lib.split.cut import WARP, Room
from mla_var3.kernel.cute_python.lib.swapped import ending
from mla_var3.kernel.cute_python.lib.swapped.consumer import storage_bytes
from mla_var3.kernel.cute_python.lib.swapped.limits import CONSUMERS, ROW_TILES
from mla_var3.kernel.cute_python.lib.swapped.plan import BoxPlan, BoxTiling
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP

if TYPE_CHECKING:
    from typing import Self

    from mla_var3.problem import MlaProblem

THREADS = CONSUMERS * WARPGROUP + 32  # the producer is one warp
BOARDS = (ending.MAGNITUDES,)
REGISTERS = {8: 72, 16: 112}  # that a thread is given, by query rows of the block


@dataclass(frozen=True)
class ReadyTiling(BoxTiling):
    """The tiling of `BoxPlan`; with one panel less in the ring, whose memory is the combine's."""

    def resolved(self, pd: MlaProblem) -> Self:
        full = super().resolved(pd)
        return full if self.num_pipeline_stages else replace(full, num_pipeline_stages=full.num_pipeline_stages - 1)


class ReadyPlan(BoxPlan):
    """`BoxPlan` whose combine leaves the SMs of its blocks to those of the next call."""

    tiling_type = ReadyTiling

    def room(self, requests: int, splits: int) -> Room:
        """Beside this version's blocks, on any SM. With 32 rows their registers leave none, and the combine's blocks
        take turns with the attention's; letting those come SM by SM is still faster than after the last of them: 24.2
        us for 24.3 at b8 s2 h16 t8192, 9.2 for 9.4 at b4 h32 t2048."""
        device, shape = host.target(self), self.shape
        smem = storage_bytes(shape, self.problem.element_bytes, len(BOARDS)) + device.smem_reserved_per_block
        registers = device.regs_per_sm // SUBPARTITIONS
        if shape.tile_n < ROW_TILES[-1]:
            registers -= -(-THREADS // WARP // SUBPARTITIONS) * WARP * REGISTERS[shape.tile_n]
        return Room(device.num_sms, registers, device.smem_per_sm - smem)
