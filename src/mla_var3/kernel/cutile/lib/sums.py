"""Joining the partial results of split-KV attention that are sums not yet divided, rows innermost.

Each split leaves, for every query row, the maximum of its scores, the sum of its weights relative to that maximum, and
the weighted sum of its values, (512 columns, rows). Dividing it by the sum of the weights would make the attention
kernel's stores wait for a reduction over its warps, for nothing: the join divides once.

What takes time in so small a kernel are trips to memory and barriers, not bytes. So weights are relative to the maximum
of the *first* split, which needs no reduction. Where another split's is so much larger that float32 overflows, the
result is not finite; the block sees it and adds up again, split by split, relative to the running maximum.

One block takes some columns of all rows of a row tile, and all its splits at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.kernel.cutile.lib.handles import ct_dtype, handle, signature
from mla_var3.kernel.cutile.lib.latent import FLOOR, LATENT, LN2
from mla_var3.runtime.ct_kernel import CtKernel

if TYPE_CHECKING:
    import torch

ConstInt = ct.Constant[int]

#: Sums below it have not overflowed on the way.
LARGE = 1.0e38

#: (splits that a block takes, its columns): the first that holds all splits is used. Each is a compilation of its own:
#: one kernel for all of them has more code than an SM keeps beside the attention kernel's.
LAYOUTS = ((4, 32), (8, 32), (32, 16), (128, 4), (256, 2))


def one_by_one(values, scales, first, tiles, splits, inner, row, COLUMNS, TM):
    """Joins the splits from slot `first` on in their order: values (COLUMNS, TM), sums and maxima (1, TM)."""
    top = ct.full((1, TM), FLOOR, dtype=ct.float32)
    total = ct.zeros((1, TM), dtype=ct.float32)
    joined = ct.zeros((COLUMNS, TM), dtype=ct.float32)
    for i in range(splits):
        slot = first + i * tiles
        m = ct.reshape(scales.load_offset(slot * (2 * TM) + row), (1, TM))
        l = ct.reshape(scales.load_offset(slot * (2 * TM) + TM + row), (1, TM))
        higher = ct.maximum(top, m)
        keep = ct.exp2(top - higher)
        weight = ct.exp2(m - higher)
        total = total * keep + l * weight
        joined = joined * keep + values.load_offset(slot * (512 * TM) + inner) * weight
        top = higher
    return joined, total, top


@ct.kernel
def join_sums(
    VALUES,  # handle of (b, splits, tiles, 512, TS · TG) float32, global
    SCALES,  # handle of (b, splits, tiles, 2, TS · TG) float32, global: maxima, base 2, and sums of weights
    OUT,  # handle of (b, S, HKV · G, 512), global
    LSE,  # handle of (b, HKV · G, S) float32, global
    splits: int,
    S: ConstInt,
    HKV: ConstInt,
    G: ConstInt,
    TS: ConstInt,
    TG: ConstInt,
    SPLITS: ConstInt,
    COLUMNS: ConstInt,
):
    """Grid (512 / COLUMNS, row tiles, b); the first block of columns writes the log-sum-exps too."""
    TM = TS * TG
    H = HKV * G
    tiles = ct.num_blocks(1)
    part = ct.bid(0)
    x = ct.bid(1)
    req = ct.bid(2)
    values = VALUES.get_raw_memory()
    scales = SCALES.get_raw_memory()
    row = ct.arange(TM, dtype=ct.int32)
    column = ct.arange(COLUMNS, dtype=ct.int32)
    lane = ct.arange(SPLITS, dtype=ct.int32)
    here = (lane < splits)[:, None, None]
    # Offsets are 32 bits: the plan sees to it that they suffice.
    first = req * splits * tiles + x
    slot = first + lane * tiles
    inner = (part * COLUMNS + column)[:, None] * TM + row[None, :]
    o = values.load_offset(
        slot[:, None, None] * (512 * TM) + inner[None, :, :],
        mask=ct.broadcast_to(here, (SPLITS, COLUMNS, TM)),
        padding_value=0.0,
    )
    at = slot[:, None, None] * (2 * TM) + row[None, None, :]
    here = ct.broadcast_to(here, (SPLITS, 1, TM))
    m = scales.load_offset(at, mask=here, padding_value=FLOOR)
    l = scales.load_offset(at + TM, mask=here, padding_value=0.0)
    top = ct.reshape(scales.load_offset(first * (2 * TM) + row), (1, TM))
    weight = ct.exp2(m - top[None, :, :])
    joined = ct.sum(o * weight, 0)
    total = ct.sum(l * weight, 0)

    g_tiles = (G + TG - 1) // TG
    i_s = x // g_tiles // HKV * TS + row // TG
    head = x % g_tiles * TG + row % TG
    valid = (i_s < S) & (head < G)
    head = x // g_tiles % HKV * G + head
    to_out = ((req * S + i_s) * H + head)[None, :] * 512 + (part * COLUMNS + column)[:, None]
    to_lse = (req * H + head) * S + i_s
    in_out = ct.broadcast_to(valid[None, :], (COLUMNS, TM))
    none = total == 0.0
    safe = ct.where(none, 1.0, total)
    OUT.get_raw_memory().store_offset(to_out, ct.astype(joined * (1.0 / safe), OUT.dtype), mask=in_out)
    if part == 0:
        lse = ct.where(none, float("inf"), (top + ct.log2(safe)) * LN2)
        LSE.get_raw_memory().store_offset(to_lse, ct.reshape(lse, (TM,)), mask=valid)

    finite = (ct.abs(joined) < LARGE) & (total < LARGE)
    if ct.max(ct.where(finite, 0, 1)) > 0:
        joined, total, top = one_by_one(values, scales, first, tiles, splits, inner, row, COLUMNS, TM)
        none = total == 0.0
        safe = ct.where(none, 1.0, total)
        OUT.get_raw_memory().store_offset(to_out, ct.astype(joined / safe, OUT.dtype), mask=in_out)
        if part == 0:
            lse = ct.where(none, float("inf"), (top + ct.log2(safe)) * LN2)
            LSE.get_raw_memory().store_offset(to_lse, ct.reshape(lse, (TM,)), mask=valid)


def layout(splits: int) -> tuple[int, int]:
    """The first of `LAYOUTS` that holds all splits."""
    return next(one for one in LAYOUTS if splits <= one[0])


def join_sums_kernel(
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
    """A kernel that joins parts, values (b, splits, tiles, 512, rows) and scales (b, splits, tiles, 2, rows), both
    float32, into whole, (b, s, h_kv · group, 512) and (b, h_kv · group, s). With None it compiles only.

    row_shape: query tokens and heads of a row tile, both powers of two.
    """
    lanes, columns = layout(splits)
    constants = [s, h_kv, group, *row_shape, lanes, columns]

    def grid(_: Any) -> tuple[int, ...]:
        # Sizes that only tensors have are 0 where there are none.
        tiles, b = (parts[0].shape[2], whole[0].shape[0]) if parts and whole else (0, 0)
        return (LATENT // columns, tiles, b)

    def args(_: Any) -> tuple[Any, ...]:
        assert parts is not None and whole is not None
        return (*(handle(x) for x in (*parts, *whole)), splits, *constants)

    def describe(_: Any) -> Any:
        return signature([ct.float32, ct.float32, ct_dtype(dtype), ct.float32], [ct.int32], constants)

    return CtKernel(
        join_sums,
        grid,
        args,
        list(parts or ()),
        list(whole or ()),
        tiling,
        signature_fn=describe,
        name="join_sums",
        plan=plan,
    )
