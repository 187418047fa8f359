"""Matrix products. float16, bfloat16, float8 and tfloat32 are multiplied exactly and summed in float32; float64 in
float64; 8-bit integers exactly, wrapped to 32 bits. An accumulator of float16 is rounded once, at the end."""

from __future__ import annotations

from typing import Any

import torch

from mla_var3.cutile_cpu.dtypes import Dtype, decode, wrap
from mla_var3.cutile_cpu.ops import Registers, Step, implements


def multiply(x: torch.Tensor, y: torch.Tensor, acc: torch.Tensor, types: tuple[Dtype, Dtype, Dtype]) -> torch.Tensor:
    """x @ y + acc for tiles of these types."""
    tx, ty, ta = types
    if tx.kind == "int":
        # Sums of products of bytes are exact in float64 up to K = 2^37.
        return wrap(_matmul(x.to(torch.float64), y.to(torch.float64)).to(torch.int64) + acc, ta)
    work = torch.float64 if tx.name == "float64" else torch.float32
    return (_matmul(decode(x, tx, work), decode(y, ty, work)) + acc.to(work)).to(ta.held)


def _matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x @ y, matrix by matrix: the order of additions may depend on the layout of a product's operands and on how many
    products are made at once, and is to be the same for a block alone and for many together."""
    x, y = x.contiguous(), y.contiguous()
    # torch.broadcast_shapes would import sympy.
    lead = torch.broadcast_tensors(x[..., 0, 0], y[..., 0, 0])[0].shape
    if not lead:
        return torch.mm(x, y)
    out = torch.empty((*lead, x.shape[-2], y.shape[-1]), dtype=x.dtype)
    xs, ys = (t.expand(lead + t.shape[-2:]).flatten(0, -3) for t in (x, y))
    for a, b, c in zip(xs, ys, out.flatten(0, -3), strict=True):
        torch.mm(a, b, out=c)
    return out


@implements("tile_mma")
def _mma(op: Any, cx: Any) -> Step:
    x, y, acc, result = cx.slot(op.x), cx.slot(op.y), cx.slot(op.acc), cx.result(op)
    types = (cx.dtype(op.x), cx.dtype(op.y), cx.dtype(op.acc))

    def step(R: Registers) -> None:
        R[result] = multiply(R[x], R[y], R[acc], types)

    return step


@implements("tile_mma_scaled")
def _mma_scaled(op: Any, cx: Any) -> Step:
    slots = cx.slots_of((op.x, op.x_scale, op.y, op.y_scale, op.acc))
    types = [cx.dtype(v) for v in (op.x, op.x_scale, op.y, op.y_scale)]
    result = cx.result(op)

    def step(R: Registers) -> None:
        x, x_scale, y, y_scale = (decode(R[s], t) for s, t in zip(slots[:4], types, strict=True))
        x = x * x_scale.repeat_interleave(x.shape[-1] // x_scale.shape[-1], dim=-1)
        y = y * y_scale.repeat_interleave(y.shape[-2] // y_scale.shape[-2], dim=-2)
        R[result] = (_matmul(x, y) + R[slots[4]]).to(torch.float32)

    return step
