"""How the work of `combine_fragments` is cut, and where its blocks find room. Needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mla_var3.device import SUBPARTITIONS
from mla_var3.kernel.cute_python.lib.latent.fragments import GROUP, TURNED_ROWS, VECTOR
from mla_var3.kernel.cute_python.lib.split.splits import MAX_SPLITS
from mla_var3.kernel.cute_python.lib.split.spread import most_splits, spread

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.kernel.cute_python.lib.latent.fragments import Fragments

WARP = 32
SHARE = 4  # parts of a lane, where 16 warps are enough for that
AHEAD = 8  # parts of a lane in flight together
MOST_WARPS = 16  # that share a unit
WIDE = 2  # vectors of a lane, where there are enough of them
WARPS = 8  # of a block, where there is that much to do


@dataclass(frozen=True)
class Cut:
    """How the work is cut; the code is made for it.

    most: splits. warps: that share the parts of a unit. fine: parts beside each other in a warp. wide: vectors of a
    lane. units: of 8 / fine rows by 32 · wide columns, a block. per_sm: blocks an SM may hold, or 0 for as many as fit.
    smem: bytes of shared memory of a block, None for what it needs. lets_go: the next kernel's blocks may come as soon
    as all of these are there.
    """

    most: int
    warps: int
    fine: int
    wide: int
    units: int
    per_sm: int
    smem: int | None
    lets_go: bool = False

    @property
    def threads(self) -> int:
        """Of a block."""
        return WARP * self.units * self.warps

    @property
    def registers(self) -> int:
        """Of a thread, at most. Compiled: 32 to 62 with up to 4 vectors in flight, 84 where 32 shares are added up, 52
        to 89 with 8 vectors, 126 to 166 with more of them or in turns."""
        vectors = self.share * self.wide
        if vectors <= SHARE:
            return 64 if self.shares < WARP else 88
        return 96 if vectors <= AHEAD else 168

    @property
    def shares(self) -> int:
        return self.warps * self.fine

    @property
    def share(self) -> int:
        """Parts of a lane."""
        return -(-self.most // self.shares)

    @property
    def lanes(self) -> int:
        """Of a part."""
        return WARP // self.fine

    @property
    def smem_bytes(self) -> int:
        """What the sums and the marks of all shares take in shared memory."""
        return (
            4 * self.units * self.shares * (self.lanes * VECTOR + 2 * max(GROUP // self.fine, TURNED_ROWS))
            if self.shares > 1
            else 0
        )

    def units_of(self, sizes: Fragments) -> int:
        """Units of a block of the attention kernel."""
        return 2 * sizes.groups * (sizes.vectors // self.wide) * self.fine

    def blocks_of(self, sizes: Fragments) -> int:
        """Blocks of the combine for a block of the attention kernel."""
        return -(-self.units_of(sizes) // self.units)

    @property
    def name(self) -> str:
        sizes = (self.most, self.warps, self.fine, self.wide, self.units, self.per_sm)
        return f"combine_fragments{'x'.join(map(str, sizes))}{'g' if self.lets_go else ''}"


def cut_work(blocks: int, sizes: Fragments, splits: int, device: Device, of_lane: int = SHARE) -> Cut:
    """The cut for `blocks` blocks of the attention kernel, each in `splits` parts. of_lane: parts of a lane, where 16
    warps are enough for that.

    Measured on an H200, all else equal: two vectors a lane 56.5 us and one 57.0 at b16 s1 h128 t8192; 2, 4 and 8 parts
    a lane 10.37, 10.32 and 10.57 at b1 s1 h128 t4096; units of 8, 4 and 2 rows 42.8, 42.6 and 42.4 at b1 s1 h16
    t131072.
    """
    most = most_splits(splits)
    pieces = 2 * sizes.groups * sizes.vectors
    fine = next((f for f in (1, 2) if blocks * pieces * f >= device.num_sms), 4)
    while fine > 1 and (of_lane * fine > most or most == MAX_SPLITS):
        fine //= 2
    warps = min(-(-most // (of_lane * fine)), MOST_WARPS)
    wide = WIDE if warps * fine == 1 and blocks * pieces >= WIDE * WARPS * device.num_sms else 1
    pieces = pieces * fine // wide
    units = max(1, WARPS // warps)
    if warps >= WARPS and warps * fine * SHARE >= most:  # with more parts a lane, 1024 threads would spill them
        units = min(max(1, -(-blocks * pieces // device.num_sms)), WARP // warps)
    units = min(units, pieces)
    per_sm, smem = spread(blocks * -(-pieces // units), device)
    cut = Cut(most, warps, fine, wide, units, per_sm, None)
    return replace(cut, smem=max(cut.smem_bytes, smem)) if per_sm else cut


@dataclass(frozen=True)
class Room:
    """Where the combine's blocks find room while blocks of the attention kernel are on the chip.

    sms: how many SMs have it. registers: that are left for them in each register file of such an SM, smem: bytes of its
    shared memory.
    """

    sms: int
    registers: int
    smem: int

    def holds(self, cut: Cut, blocks: int, device: Device) -> bool:
        """Whether all `blocks` blocks of the combine fit at once, spread evenly."""
        if self.sms < 1:
            return False
        each = -(-blocks // self.sms)
        warps = each * -(-cut.units * cut.warps // SUBPARTITIONS)
        smem = each * (cut.smem_bytes + device.smem_reserved_per_block)
        return smem <= self.smem and warps * WARP * cut.registers <= self.registers


def cut_beside(blocks: int, sizes: Fragments, splits: int, device: Device, room: Room) -> Cut:
    """`cut_work` so that all blocks fit `room`: the SMs of the attention kernel's blocks are left to those of the next
    call, which may come while the combine runs. Where no number of parts a lane does that, `cut_work`."""
    for of_lane in (SHARE, 2 * SHARE, 4 * SHARE):
        cut = cut_work(blocks, sizes, splits, device, of_lane)
        if room.holds(cut, blocks * cut.blocks_of(sizes), device):
            return replace(cut, per_sm=0, smem=None, lets_go=True)
    return cut_work(blocks, sizes, splits, device)
