"""What the consumers of a block do, from the query's arrival to its results: the pairs of `steps`, then `ending`."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from mla_var3.kernel.cute_python.lib import softmax
from mla_var3.kernel.cute_python.lib.barriers import named_sync
from mla_var3.kernel.cute_python.lib.latent import ending, fragments
from mla_var3.kernel.cute_python.lib.latent.consumer import CONSUMERS, CONSUMERS_JOIN, EVEN, ODD
from mla_var3.kernel.cute_python.lib.latent.shape import TILE_M
from mla_var3.kernel.cute_python.lib.phased import short, steps
from mla_var3.kernel.cute_python.lib.wgmma import WARPGROUP


@cute.jit
def consume(
    storage: cutlass.Constexpr,  # of `lib.latent.consumer.shared_storage`
    q_tile: cute.Tensor,  # shared memory, swizzled, (64, k + p), asked for with cp.async by these threads
    target: cute.Tensor,  # as for `ending.finish`
    marks: cute.Tensor,
    scale_log2: Float32,
    seq_len: Int32,
    first: Int32,
    end: Int32,
    least: Int32,
    index: Int32,
    kv_head: Int32,
    first_row: Int32,
    whole: cutlass.Boolean,
    warp: Int32,
    thread: Int32,  # 0..255
    shape: cutlass.Constexpr,
    shares: cutlass.Constexpr,
    zero_padding: cutlass.Constexpr,  # as for `steps.PhasedConsumer`
    frees_first: cutlass.Constexpr = False,
    as_fragments: cutlass.Constexpr = False,  # parts as in `lib.latent.fragments`, and a last pair without keys to
    # mask takes the other pairs' path
    alone: cutlass.Boolean | None = None,  # `short.consume`, where not None
    apart: cutlass.Constexpr = False,  # as for `short.consume`
    wait: cutlass.Constexpr = cute.arch.mbarrier_wait,
    tile: cutlass.Constexpr = None,  # how stages lie, where not as panels: `lib.latent.tokens.TokenTile`
):
    """Pairs first..end-1, or a single tile, and the block's results or its part of them; blocks of the next kernel may
    start before."""
    dtype = q_tile.element_type
    if first < end:
        one_a_row = cute.make_layout(TILE_M)
        row_max = storage.row_max.get_tensor(one_a_row)
        if thread < TILE_M:
            if cutlass.const_expr(zero_padding):
                row_max[thread] = steps.first_maximum(first_row + thread, shape.rows)
            else:
                row_max[thread] = softmax.NO_KEY
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        named_sync(CONSUMERS_JOIN, CONSUMERS)
        kv_base, full, empty = storage.stages.data_ptr(), storage.full.data_ptr(), storage.empty.data_ptr()
        common = (q_tile, kv_base, full, empty, scale_log2, seq_len, first_row)
        registers = ending.result_registers(shape)
        shared = {
            "row_max": row_max, "shares": shares, "registers": registers, "zero_padding": zero_padding,
            "frees_first": frees_first, "wait": wait, "tile": tile,
        }  # fmt: skip
        if warp < WARPGROUP // 32:
            w = steps.PhasedConsumer(EVEN, shape, dtype, thread, *common, **shared)
            if cutlass.const_expr(alone is None):
                steps.consume(w, steps.even_step, first, end, least, as_fragments)
            else:
                short.consume(w, first, end, least, alone, apart)
        else:
            w = steps.PhasedConsumer(ODD, shape, dtype, thread - WARPGROUP, *common, **shared)
            if cutlass.const_expr(alone is None):
                steps.consume(w, steps.odd_step, first, end, least, as_fragments)
            else:
                short.consume(w, first, end, least, alone, apart)
        cute.arch.griddepcontrol_launch_dependents()  # the combine may start
        sums = cute.make_tensor(storage.sums0.data_ptr(), cute.make_layout((TILE_M, 2)))  # and sums1 behind it
        if cutlass.const_expr(not as_fragments):
            ending.finish(registers, sums, kv_base, target, marks, index, kv_head, first_row, whole, shape, thread)
        elif whole:
            ending.finish(registers, sums, kv_base, target, marks, index, kv_head, first_row, True, shape, thread)
        else:
            parts = cute.recast_ptr(target.iterator, dtype=Float16)
            fragments.store_part(registers, parts, marks.iterator, index, kv_head, first_row // TILE_M, shape, thread)
    elif cutlass.const_expr(not as_fragments):
        ending.store_empty(target, marks, index, kv_head, first_row, whole, shape, thread)
    elif whole:
        ending.store_empty(target, marks, index, kv_head, first_row, True, shape, thread)
    else:
        fragments.store_no_keys(marks.iterator, index, kv_head, first_row // TILE_M, shape, thread)
