"""Joining the partial results of split-KV attention that lie with the rows of a tile innermost.

An attention kernel with query rows on the N side of the tensor cores holds its output as (512 columns, rows). Stored
so, it needs no transposition, which costs shared memory that the kernel's loads can use; the transposition happens
here, on the way out. One block takes some columns of all rows of a row tile, and all its splits at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.kernel.cutile.lib.handles import ct_dtype, handle, signature
from mla_var3.runtime.ct_kernel import CtKernel

if TYPE_CHECKING:
    import torch

ConstInt = ct.Constant[int]

LATENT = 512
LN2 = 0.6931471805599453
LOG2E = 1.4426950408889634

#: Below every log-sum-exp: the maximum of splits that are all empty.
FLOOR = -1.0e30

#: (splits that a block takes, its columns): the first that holds all splits is used. With 16 rows 8192 elements.
LAYOUTS = ((8, 64), (32, 16), (128, 4), (256, 2))


def join_columns(O_PART, LSE_PART, OUT, LSE, tiles, splits, SPLITS, COLUMNS, S, HKV, G, TS, TG):
    """Writes `COLUMNS` columns of the rows of one row tile; the first block of columns writes the log-sum-exps too."""
    TM = TS * TG
    H = HKV * G
    part = ct.bid(0)
    x = ct.bid(1)
    req = ct.bid(2)
    g_tiles = (G + TG - 1) // TG
    row = ct.arange(TM, dtype=ct.int32)
    lane = ct.arange(SPLITS, dtype=ct.int32)
    here = lane < splits
    slot = ct.astype((req * splits + lane) * tiles + x, ct.int64)
    lse = LSE_PART.get_raw_memory().load_offset(
        slot[:, None] * TM + row[None, :],
        mask=ct.broadcast_to(here[:, None], (SPLITS, TM)),
        padding_value=float("-inf"),
    )
    column = part * COLUMNS + ct.arange(COLUMNS, dtype=ct.int32)
    inner = column[:, None] * TM + row[None, :]
    o = O_PART.get_raw_memory().load_offset(
        slot[:, None, None] * (512 * TM) + inner[None, :, :],
        mask=ct.broadcast_to(here[:, None, None], (SPLITS, COLUMNS, TM)),
        padding_value=0.0,
    )
    top = ct.maximum(ct.max(lse, 0, keepdims=True), FLOOR)
    weight = ct.exp2((lse - top) * LOG2E)
    total = ct.sum(weight, 0, keepdims=True)
    none = total == 0.0
    safe = ct.where(none, 1.0, total)
    joined = ct.sum(o * (weight / safe)[:, None, :], 0)
    i_s = x // g_tiles // HKV * TS + row // TG
    head = x % g_tiles * TG + row % TG
    valid = (i_s < S) & (head < G)
    head = x // g_tiles % HKV * G + head
    at = ((req * S + i_s) * H + head) * 512
    OUT.get_raw_memory().store_offset(
        at[None, :] + column[:, None],
        ct.astype(joined, OUT.dtype),
        mask=ct.broadcast_to(valid[None, :], (COLUMNS, TM)),
    )
    if part == 0:
        whole = ct.reshape(ct.where(none, float("inf"), top + ct.log2(safe) * LN2), (TM,))
        LSE.get_raw_memory().store_offset((req * H + head) * S + i_s, whole, mask=valid)


@ct.kernel
def combine_columns(
    O_PART,  # handle of (b, splits, tiles, 512, TS · TG) float32, global
    LSE_PART,  # handle of (b, splits, tiles, TS · TG) float32, global
    OUT,  # handle of (b, S, HKV · G, 512), global
    LSE,  # handle of (b, HKV · G, S) float32, global
    splits: int,
    S: ConstInt,
    HKV: ConstInt,
    G: ConstInt,
    TS: ConstInt,
    TG: ConstInt,
):
    """Grid (blocks of columns, row tiles, b): the number of blocks says which of `LAYOUTS` is used."""
    for one in ct.static_iter(LAYOUTS):
        if ct.num_blocks(0) * one[1] == 512:
            join_columns(O_PART, LSE_PART, OUT, LSE, ct.num_blocks(1), splits, one[0], one[1], S, HKV, G, TS, TG)


def column_blocks(splits: int) -> int:
    """Blocks that share the columns of a row tile."""
    return next(LATENT // columns for most, columns in LAYOUTS if splits <= most)


def combine_columns_kernel(
    parts: tuple[torch.Tensor, torch.Tensor] | None,
    whole: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    s: int,
    h_kv: int,
    group: int,
    row_shape: tuple[int, int],
    splits: int,
    dtype: str,
    tiling: Any = None,
    plan: Any = None,
) -> CtKernel:
    """A kernel that joins parts (b, splits, tiles, 512, rows) and (b, splits, tiles, rows), both float32, into whole,
    (b, s, h_kv · group, 512) and (b, h_kv · group, s). With None for the tensors it compiles only.

    row_shape: query tokens and heads of a row tile, both powers of two.
    """
    constants = [s, h_kv, group, *row_shape]

    def grid(_: Any) -> tuple[int, ...]:
        assert parts is not None and whole is not None
        return (column_blocks(splits), parts[0].shape[2], whole[0].shape[0])

    def args(_: Any) -> tuple[Any, ...]:
        assert parts is not None and whole is not None
        return (*(handle(x) for x in (*parts, *whole)), splits, *constants)

    def describe(_: Any) -> Any:
        return signature([ct.float32, ct.float32, ct_dtype(dtype), ct.float32], [ct.int32], constants)

    return CtKernel(
        combine_columns,
        grid,
        args,
        list(parts or ()),
        list(whole or ()),
        tiling,
        signature_fn=describe,
        name="combine_columns",
        plan=plan,
    )
