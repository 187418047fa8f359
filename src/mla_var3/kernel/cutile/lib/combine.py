"""Combining the partial results of split-KV attention.

Each split of a request's tokens leaves, for every query row, a normalised partial output and the natural logarithm of
its softmax denominator (-inf where the split had no key for the row). With w_i = exp(lse_i - max lse), the whole is

    out = sum w_i out_i / sum w_i        lse = max lse + log(sum w_i)

and a row whose splits are all empty has out = 0 and lse = +inf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cuda.tile as ct

from mla_var3.kernel.cutile.lib.handles import ct_dtype, handle, signature
from mla_var3.kernel.cutile.lib.latent import LN2, LOG2E
from mla_var3.runtime.ct_kernel import CtKernel

if TYPE_CHECKING:
    import torch

ConstInt = ct.Constant[int]

#: A block reads (splits, columns) of one row at once: FEW by all columns, or MANY by a quarter of them. It reads
#: without TMA: with it a block took 98 KB of shared memory and an SM held one; without it, six.
FEW = 8
MANY = 32
COLUMN_BLOCKS = 4


def join(O_PART, LSE_PART, OUT, base, rows, out_row, splits, column, TILE, COLUMNS, WIDTH):
    """Writes `COLUMNS` columns of one row of OUT; returns the row's maximum (base 2) and denominator, of shape (1,)."""
    parts = O_PART.get_raw_memory()
    lses = LSE_PART.get_raw_memory()
    lane = ct.arange(TILE, dtype=ct.int32)
    columns = column + ct.arange(COLUMNS, dtype=ct.int32)
    nothing = float("-inf")
    # The maximum first: then reads of partial outputs do not wait for one another.
    m = ct.full((1,), -1.0e30, dtype=ct.float32)
    for i in range((splits + TILE - 1) // TILE):
        at = i * TILE + lane
        lse = lses.load_offset(base + at * rows, mask=at < splits, padding_value=nothing)
        m = ct.maximum(m, ct.max(lse, 0, keepdims=True) * LOG2E)
    l = ct.zeros((1,), dtype=ct.float32)
    acc = ct.zeros((1, COLUMNS), dtype=ct.float32)
    for i in range((splits + TILE - 1) // TILE):
        at = i * TILE + lane
        here = at < splits
        offset = ct.astype(base + at * rows, ct.int64)[:, None] * WIDTH + columns[None, :]
        part = parts.load_offset(offset, mask=ct.broadcast_to(here[:, None], (TILE, COLUMNS)), padding_value=0.0)
        w = ct.exp2(lses.load_offset(base + at * rows, mask=here, padding_value=nothing) * LOG2E - m)
        l = l + ct.sum(w, 0, keepdims=True)
        acc = acc + ct.sum(part * w[:, None], 0, keepdims=True)
    safe = ct.where(l == 0.0, 1.0, l)
    out = ct.reshape(acc / ct.reshape(safe, (1, 1)), (COLUMNS,))
    OUT.get_raw_memory().store_offset(out_row * WIDTH + columns, ct.astype(out, OUT.dtype))
    return m, l


@ct.kernel
def combine(
    O_PART,  # handle of (b, splits, S * H, WIDTH) float32, global
    LSE_PART,  # handle of (b, splits, S * H) float32, global
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
    """One block combines a query row, or with more than FEW splits a part of its columns; grid (S * H, parts, b)."""
    row = ct.bid(0)
    part = ct.bid(1)
    req = ct.bid(2)
    rows = S * H
    base = req * splits * rows + row
    out_row = req * rows + row
    if ct.num_blocks(1) == 1:
        m, l = join(O_PART, LSE_PART, OUT, base, rows, out_row, splits, 0, FEW, WIDTH, WIDTH)
    else:
        COLUMNS = WIDTH // COLUMN_BLOCKS
        m, l = join(O_PART, LSE_PART, OUT, base, rows, out_row, splits, part * COLUMNS, MANY, COLUMNS, WIDTH)
    if part == 0:
        empty = l == 0.0
        lse = ct.where(empty, float("inf"), (m + ct.log2(ct.where(empty, 1.0, l))) * LN2)
        at_out = (req * H + row % H) * S + row // H + ct.arange(1, dtype=ct.int32)
        LSE.get_raw_memory().store_offset(at_out, lse)


def join_rows(
    kernel: Any,
    name: str,
    blocks: Callable[[int], int],
    constants: list[int],
    tensors: tuple[torch.Tensor | None, ...],
    *,
    s: int,
    h: int,
    dtype: str,
    tiling: Any = None,
    plan: Any = None,
) -> CtKernel:
    """A kernel over (s · h, blocks(splits), b) that takes handles of o_part, lse_part, out and lse, the number of
    splits, s, h and `constants`. With None for the tensors it compiles only.
    """
    constants = [s, h, *constants]
    o_part, lse_part, out, lse = tensors
    bound = out is not None

    def grid(_: Any) -> tuple[int, ...]:
        # Sizes that only tensors have are 0 where there are none.
        return (s * h, blocks(o_part.shape[1]), out.shape[0]) if bound else (s * h, 0, 0)

    def args(_: Any) -> tuple[Any, ...]:
        return (*(handle(t) for t in (o_part, lse_part, out, lse)), o_part.shape[1], *constants)

    def describe(_: Any) -> Any:
        return signature([ct.float32, ct.float32, ct_dtype(dtype), ct.float32], [ct.int32], constants)

    return CtKernel(
        kernel,
        grid,
        args,
        [o_part, lse_part] if bound else [],
        [out, lse] if bound else [],
        tiling,
        signature_fn=describe,
        name=name,
        plan=plan,
    )


def combine_kernel(
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
    for the rest see `join_rows`.
    """
    constants = [width, FEW, MANY, COLUMN_BLOCKS]
    tensors = (o_part, lse_part, out, lse)
    return join_rows(
        combine, "combine", lambda splits: 1 if splits <= FEW else COLUMN_BLOCKS, constants, tensors, **rest
    )


def warm_up(make: Callable[..., CtKernel], like: torch.Tensor, *, s: int, h: int, width: int, dtype: str) -> None:
    """Compiles and loads the kernel of `make` (`combine_kernel`, say) by combining one row of one split, on the current
    stream.

    like: a CUDA tensor of the output's dtype. After it a launch compiles nothing, also in a graph capture. It takes
    0.75 s, less when cuTile's cache on disk has the code, and 0.1 ms when the process has it.
    """
    import torch

    part = torch.zeros((1, 1, width), dtype=torch.float32, device=like.device)
    lse_part = torch.zeros(1, dtype=torch.float32, device=like.device)
    kernel = make(
        part, lse_part, like.new_empty((1, width)), torch.empty_like(lse_part), s=s, h=h, width=width, dtype=dtype
    )
    kernel.grid_fn = lambda _: (1, 1, 1)
    kernel.launch()
