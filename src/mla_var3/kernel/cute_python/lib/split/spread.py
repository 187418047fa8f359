"""For how many splits a combine is made, and its blocks spread evenly over the SMs. Needs no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_var3.kernel.cute_python.lib.split.splits import MAX_SPLITS

if TYPE_CHECKING:
    from mla_var3.device import Device


def most_splits(splits: int) -> int:
    """The number of splits up to which the code is made that serves `splits`: less of it for fewer."""
    return next(most for most in (2, 4, 8, 16, 32, 64, 128, MAX_SPLITS) if most >= splits)


def spread(blocks: int, device: Device) -> tuple[int, int]:
    """(blocks an SM may hold, bytes of shared memory that keep others out); (0, 0) where there are too many to care.

    A combine is placed while the attention's blocks end, and would crowd onto those SMs that are free first.
    """
    per_sm = next((n for n in (1, 2, 4, 8) if blocks <= n * device.num_sms), 0)
    if not per_sm:
        return 0, 0
    # One byte more than lets another block in, in whole kilobytes.
    least = device.smem_per_sm // (per_sm + 1) - device.smem_reserved_per_block + 1
    return per_sm, min(-(-least // 1024) * 1024, device.smem_per_block)
