"""The combine of split-KV: merges the partial outputs of a request's splits by their log-sum-exps.

Layout of the partials, both float32 and contiguous, as `new_partials` makes them:

    o_partial    (b, splits, s, h, width)   a split's softmax-weighted values, divided by its own denominator
    lse_partial  (b, splits, s, h)          natural LSE of the split; -inf where it has no key for the row

With w_i = exp(lse_i - max lse), added up in the order of the splits:

    out = sum w_i o_i / sum w_i        lse = max lse + log(sum w_i)

A row for which every split is empty has out = 0 and lse = +inf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.kernel.cutile.prims.handles import ct_dtype, handle, signature
from mla_var3.kernel.cutile.prims.latent import FLOOR, LN2, LOG2E
from mla_var3.runtime import CtKernel

if TYPE_CHECKING:
    import torch

ConstInt = ct.Constant[int]

#: A CTA reads (splits, columns) of one row at once: FEW by all columns, or MANY by a quarter of them. It reads
#: without TMA: with it a CTA took 98 KB of shared memory and an SM held one; without it, six.
FEW = 8
MANY = 32
COLUMN_BLOCKS = 4


def combine_columns(O_PARTIAL, LSE_PARTIAL, OUT, base, rows, out_row, splits, column, TILE, COLUMNS, WIDTH):
    """Writes `COLUMNS` columns of one row of OUT; returns the row's maximum (base 2) and denominator, of shape (1,)."""
    partials = O_PARTIAL.get_raw_memory()
    lses = LSE_PARTIAL.get_raw_memory()
    lane = ct.arange(TILE, dtype=ct.int32)
    columns = column + ct.arange(COLUMNS, dtype=ct.int32)
    nothing = float("-inf")
    # The maximum first: then reads of partial outputs do not wait for one another.
    m = ct.full((1,), FLOOR, dtype=ct.float32)
    for i in range((splits + TILE - 1) // TILE):
        at = i * TILE + lane
        lse = lses.load_offset(base + at * rows, mask=at < splits, padding_value=nothing)
        m = ct.maximum(m, ct.max(lse, 0, keepdims=True) * LOG2E)
    total = ct.zeros((1,), dtype=ct.float32)
    acc = ct.zeros((1, COLUMNS), dtype=ct.float32)
    for i in range((splits + TILE - 1) // TILE):
        at = i * TILE + lane
        inside = at < splits
        offset = ct.astype(base + at * rows, ct.int64)[:, None] * WIDTH + columns[None, :]
        o = partials.load_offset(offset, mask=ct.broadcast_to(inside[:, None], (TILE, COLUMNS)), padding_value=0.0)
        w = ct.exp2(lses.load_offset(base + at * rows, mask=inside, padding_value=nothing) * LOG2E - m)
        total = total + ct.sum(w, 0, keepdims=True)
        acc = acc + ct.sum(o * w[:, None], 0, keepdims=True)
    safe = ct.where(total == 0.0, 1.0, total)
    out = ct.reshape(acc / ct.reshape(safe, (1, 1)), (COLUMNS,))
    OUT.get_raw_memory().store_offset(out_row * WIDTH + columns, ct.astype(out, OUT.dtype))
    return m, total


@ct.kernel
def combine(
    O_PARTIAL,  # handle of (b, splits, S, H, WIDTH) float32, global
    LSE_PARTIAL,  # handle of (b, splits, S, H) float32, global
    OUT,  # handle of (b, S, H, WIDTH), global
    LSE,  # handle of (b, H, S) float32, global
    splits: int,
    S: ConstInt,
    H: ConstInt,
    WIDTH: ConstInt,
    FEW: ConstInt,
    MANY: ConstInt,
    COLUMN_BLOCKS: ConstInt,
):
    """One CTA a query row, or with more than FEW splits one a block of its columns; grid (S * H, column blocks, b)."""
    row = ct.bid(0)
    block = ct.bid(1)
    req = ct.bid(2)
    rows = S * H
    base = req * splits * rows + row
    out_row = req * rows + row
    if ct.num_blocks(1) == 1:
        m, total = combine_columns(O_PARTIAL, LSE_PARTIAL, OUT, base, rows, out_row, splits, 0, FEW, WIDTH, WIDTH)
    else:
        COLUMNS = WIDTH // COLUMN_BLOCKS
        m, total = combine_columns(
            O_PARTIAL, LSE_PARTIAL, OUT, base, rows, out_row, splits, block * COLUMNS, MANY, COLUMNS, WIDTH
        )
    if block == 0:
        empty = total == 0.0
        lse = ct.where(empty, float("inf"), (m + ct.log2(ct.where(empty, 1.0, total))) * LN2)
        at_out = (req * H + row % H) * S + row // H + ct.arange(1, dtype=ct.int32)
        LSE.get_raw_memory().store_offset(at_out, lse)


def combine_kernel(
    partials: tuple[torch.Tensor, torch.Tensor] | None,
    outputs: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    s: int,
    h: int,
    width: int,
    dtype: str,
    tiling: Any = None,
    plan: Any = None,
) -> CtKernel:
    """A kernel that combines partials (o_partial, lse_partial) into outputs (out (b, s, h, width), lse (b, h, s)).

    With None for both it compiles only. `width` is a power of two.
    """
    constants = [s, h, width, FEW, MANY, COLUMN_BLOCKS]

    def grid(_: Any) -> tuple[int, ...]:
        if partials is None or outputs is None:
            return (s * h, 0, 0)  # 0 for sizes that only tensors have
        return (s * h, 1 if partials[0].shape[1] <= FEW else COLUMN_BLOCKS, outputs[0].shape[0])

    def args(_: Any) -> tuple[Any, ...]:
        assert partials is not None and outputs is not None
        return (*(handle(x) for x in (*partials, *outputs)), partials[0].shape[1], *constants)

    def describe(_: Any) -> Any:
        return signature([ct.float32, ct.float32, ct_dtype(dtype), ct.float32], [ct.int32], constants)

    return CtKernel(
        combine,
        grid,
        args,
        partials or (),
        outputs or (),
        tiling,
        signature_fn=describe,
        name="combine",
        plan=plan,
    )


def new_partials(
    b: int, splits: int, s: int, h: int, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """o_partial and lse_partial, uninitialised."""
    import torch

    shape = (b, splits, s, h)
    o_partial = torch.empty((*shape, width), dtype=torch.float32, device=device)
    return o_partial, torch.empty(shape, dtype=torch.float32, device=device)


def warm_up(like: torch.Tensor, *, s: int, h: int, width: int, dtype: str) -> None:
    """Compiles and loads the kernel by combining one row of one split, on the current stream.

    like: a CUDA tensor of the output's dtype. After it a launch compiles nothing, also in a graph capture. It takes
    0.75 s, less when cuTile's cache on disk has the code, and 0.1 ms when the process has it.
    """
    import torch

    o_partial = torch.zeros((1, 1, width), dtype=torch.float32, device=like.device)
    lse_partial = torch.zeros(1, dtype=torch.float32, device=like.device)
    outputs = (like.new_empty((1, width)), torch.empty_like(lse_partial))
    kernel = combine_kernel((o_partial, lse_partial), outputs, s=s, h=h, width=width, dtype=dtype)
    kernel.grid_fn = lambda _: (1, 1, 1)
    kernel.launch()
