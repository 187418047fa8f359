"""What the versions with swapped operands refuse, and the row tile that they choose. Needs no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_var3.kernel.cute_python.lib.swapped import ring
from mla_var3.kernel.cute_python.lib.swapped.swapped import PANEL, TOKENS
from mla_var3.runtime import Verdict

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.problem import MlaProblem

ROW_TILES = (8, 16, 32)
CONSUMERS = 2  # of versions 9 and later; version 2's tiling has them as a knob
SMEM_BYTES = 232_448  # of a Hopper block


def takes_panels(pd: MlaProblem, name: str) -> Verdict:
    """Whether the columns and pages of a problem lie in 64-token x 64-column panels. name: of the version."""
    if pd.k % 128 or not 128 <= pd.k <= 512:
        return Verdict.no(f"k = {pd.k} must be 128, 256, 384 or 512: consumers share out 64-column panels")
    if pd.p != PANEL:
        return Verdict.no(f"the rope part of p = {pd.p} columns must be {PANEL}: one panel")
    if pd.n:
        return Verdict.no(f"{name} reads latent tokens only; the problem has n = {pd.n} decompressed ones")
    if pd.page_size % TOKENS:
        return Verdict.no(f"a page of {pd.page_size} tokens is not a multiple of the tile of {TOKENS}")
    return Verdict.yes()


def row_tile(rows: int) -> int:
    """Query rows of a block: the smallest tile that holds them, or the largest there is."""
    return next((n for n in ROW_TILES if n >= rows), ROW_TILES[-1])


def fits_block(slots: int, fixed_bytes: int, device: Device | None) -> Verdict:
    """Whether a ring of `slots` panels and the rest of a block's shared memory fit it."""
    smem = slots * ring.SLOT_BYTES + fixed_bytes
    limit = SMEM_BYTES if device is None else device.smem_per_block
    if smem > limit:
        return Verdict.no(
            f"{smem:,} bytes of shared memory for q and {slots} panels are over the {limit:,} that a block may have"
        )
    return Verdict.yes()
