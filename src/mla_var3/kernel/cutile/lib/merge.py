"""Joining the partial results of split-KV attention, by the last block to arrive or by a kernel of its own.

The mathematics is that of `combine.py`, which version 0 of flash_mla keeps. Two things differ:

- `merge_parts` runs inside the attention kernel. Every block writes its partial result, then adds one to the counter of
  its row tile; the one that finds all others counted reads the partial results back, from L2, and writes the output. No
  second kernel is launched, no block waits. Partial results are added in the order of the splits whoever comes last, so
  the bits do not depend on the order. The counter is back at zero afterwards: a CUDA graph may replay.
- `combine_splits`, for many splits, has one row and as many columns in a block as lets all its loads be in flight at
  once: splits lie beside each other in the block instead of behind each other in a loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.kernel.cutile.lib.combine import join_rows
from mla_var3.kernel.cutile.lib.latent import FLOOR, LN2, LOG2E

if TYPE_CHECKING:
    import torch

    from mla_var3.runtime.ct_kernel import CtKernel

ConstInt = ct.Constant[int]

#: (splits that a block takes at once, blocks that share the columns of a row): the first that holds them all is used.
LAYOUTS = ((8, 1), (32, 4), (128, 8), (256, 16))


def last_to_arrive(ARRIVED, tile, splits):
    """Counts this block in; true for the block that finds all `splits` of a row tile counted. Resets the counter then.

    The addition releases what the block has stored (without TMA, whose stores complete later) and acquires what the
    others have.
    """
    counters = ARRIVED.get_raw_memory()
    before = counters.atomic_add_offset(tile, 1)
    last = before == splits - 1
    if last:
        counters.store_offset(tile, 0)
    return last


def merge_parts(parts, lse_parts, out, lses, first, req, s_tile, head_kv, g_tile, splits, TS, TG, COLUMNS):
    """Joins the `splits` partial results from slot `first` on of one row tile and writes its output.

    parts (slots, S, HKV, G, 512), lse_parts (slots, S, HKV, G) float32; out (b, S, HKV, G, 512); lses (b, S, HKV, G).
    """
    TM = TS * TG
    top = ct.full((TM, 1), FLOOR, dtype=ct.float32)
    for i in range(splits):
        e = ct.load(lse_parts, (first + i, s_tile, head_kv, g_tile), (1, TS, 1, TG), allow_tma=False)
        top = ct.maximum(top, ct.reshape(e, (TM, 1)))
    total = ct.zeros((TM, 1), dtype=ct.float32)
    for i in range(splits):
        e = ct.load(lse_parts, (first + i, s_tile, head_kv, g_tile), (1, TS, 1, TG), allow_tma=False)
        total = total + ct.exp2((ct.reshape(e, (TM, 1)) - top) * LOG2E)
    none = total == 0.0
    safe = ct.where(none, 1.0, total)
    for c in ct.static_iter(range(512 // COLUMNS)):
        o = ct.zeros((TM, COLUMNS), dtype=ct.float32)
        for i in range(splits):
            e = ct.load(lse_parts, (first + i, s_tile, head_kv, g_tile), (1, TS, 1, TG), allow_tma=False)
            part = ct.load(parts, (first + i, s_tile, head_kv, g_tile, c), (1, TS, 1, TG, COLUMNS), allow_tma=False)
            weight = ct.exp2((ct.reshape(e, (TM, 1)) - top) * LOG2E)
            # Rows past the group's end hold what a load beyond the array gives: they are clipped on store.
            o = o + weight * ct.reshape(part, (TM, COLUMNS))
        o = ct.reshape(ct.astype(o / safe, out.dtype), (1, TS, 1, TG, COLUMNS))
        ct.store(out, (req, s_tile, head_kv, g_tile, c), o, allow_tma=False)
    lse = ct.where(none, float("inf"), top + ct.log2(safe) * LN2)
    ct.store(lses, (req, s_tile, head_kv, g_tile), ct.reshape(lse, (1, TS, 1, TG)), allow_tma=False)


def join_row(O_PART, LSE_PART, OUT, base, rows, out_row, splits, column, SPLITS, COLUMNS, WIDTH):
    """Writes `COLUMNS` columns of one row of OUT; returns the row's log-sum-exp, of shape (1,)."""
    lane = ct.arange(SPLITS, dtype=ct.int32)
    here = lane < splits
    columns = column + ct.arange(COLUMNS, dtype=ct.int32)
    at = base + lane * rows
    part = O_PART.get_raw_memory().load_offset(
        ct.astype(at, ct.int64)[:, None] * WIDTH + columns[None, :],
        mask=ct.broadcast_to(here[:, None], (SPLITS, COLUMNS)),
        padding_value=0.0,
    )
    lse = LSE_PART.get_raw_memory().load_offset(at, mask=here, padding_value=float("-inf"))
    top = ct.maximum(ct.max(lse, 0, keepdims=True), FLOOR)
    weight = ct.exp2((lse - top) * LOG2E)
    total = ct.sum(weight, 0, keepdims=True)
    none = total == 0.0
    safe = ct.where(none, 1.0, total)
    out = ct.sum(part * (weight / safe)[:, None], 0)
    OUT.get_raw_memory().store_offset(out_row * WIDTH + columns, ct.astype(out, OUT.dtype))
    return ct.where(none, float("inf"), top + ct.log2(safe) * LN2)


@ct.kernel
def combine_splits(
    O_PART,  # handle of (b, splits, S * H, WIDTH) float32, global
    LSE_PART,  # handle of (b, splits, S * H) float32, global
    OUT,  # handle of (b, S, H, WIDTH), global
    LSE,  # handle of (b, H, S) float32, global
    splits: int,
    S: ConstInt,
    H: ConstInt,
    WIDTH: ConstInt,
):
    """Grid (S * H, blocks of columns, b): the number of blocks says which of `LAYOUTS` is used."""
    row = ct.bid(0)
    part = ct.bid(1)
    req = ct.bid(2)
    rows = S * H
    base = req * splits * rows + row
    out_row = req * rows + row
    blocks = ct.num_blocks(1)
    lse = ct.zeros((1,), dtype=ct.float32)
    for layout in ct.static_iter(LAYOUTS):
        COLUMNS = WIDTH // layout[1]
        if blocks == layout[1]:
            lse = join_row(
                O_PART, LSE_PART, OUT, base, rows, out_row, splits, part * COLUMNS, layout[0], COLUMNS, WIDTH
            )
    if part == 0:
        at = (req * H + row % H) * S + row // H + ct.arange(1, dtype=ct.int32)
        LSE.get_raw_memory().store_offset(at, lse)


def column_blocks(splits: int) -> int:
    """Blocks that share a row's columns."""
    return next(blocks for most, blocks in LAYOUTS if splits <= most)


def combine_splits_kernel(
    o_part: torch.Tensor | None,
    lse_part: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    *,
    width: int,
    **rest: Any,
) -> CtKernel:
    """A kernel that combines o_part (b, splits, s, h, width) and lse_part (b, splits, s, h), both float32, into
    out (b, s, h, width) and lse (b, h, s). With None for the tensors it compiles only. `width` is a power of two;
    for the rest see `combine.join_rows`.
    """
    tensors = (o_part, lse_part, out, lse)
    return join_rows(combine_splits, "combine_splits", column_blocks, [width], tensors, **rest)
