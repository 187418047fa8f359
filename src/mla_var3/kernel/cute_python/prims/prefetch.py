"""Prefetch of global memory into L2 (`cp.async.bulk.prefetch.L2`): asynchronous, and nothing waits for it to land."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

#: L2 eviction priorities as createpolicy encodes them.
PRIORITIES = {"evict_normal": 0x1000000000000000, "evict_last": 0x14F0000000000000}
BOX = 8192  # most bytes of a request: small enough for SMs to share any weight evenly


@cute.jit
def prefetch_rows(rows: cute.Tensor, worker: Int32, workers: Int32, priority: cutlass.Constexpr):
    """Every workers-th box from the worker's own on, of a (rows, columns) tensor of 16-bit elements in global memory;
    by a whole warp. Rows begin at multiples of 16 bytes and are a multiple of 16 bytes long."""
    most = cutlass.const_expr(BOX // 2)
    columns = rows.shape[1]
    boxes = (columns + most - 1) // most  # of a row
    for box in cutlass.range(worker, rows.shape[0] * boxes, workers, unroll=1):
        first = box % boxes * most
        count = columns - first
        if count > most:
            count = Int32(most)
        source = rows.iterator + (Int64(box // boxes) * rows.stride[0] + first)
        with cute.arch.elect_one():
            cute.arch.inline_ptx(
                "cp.async.bulk.prefetch.L2.global.L2::cache_hint [{$r0}], {$r1}, {$r2};",
                read_only_args=[source.toint(), 2 * count, Int64(PRIORITIES[priority])],
            )
