"""Moving elements: shapes, axes, parts, ranges."""

from __future__ import annotations

from typing import Any

import torch

from mla_var3.cutile_cpu.dtypes import leading, settle, tensor, together
from mla_var3.cutile_cpu.errors import KernelFault
from mla_var3.cutile_cpu.ops import Registers, Step, implements


@implements("tile_reshape")
def _reshape(op: Any, cx: Any) -> Step:
    x, result, dtype, rank = cx.slot(op.x), cx.result(op), cx.dtype(op.x), cx.rank(op.x)
    shape = cx.shape(op.result_vars[0])

    def step(R: Registers) -> None:
        tile = tensor(R[x], dtype)
        R[result] = settle(tile.reshape(leading(tile, rank) + shape), dtype)

    return step


@implements("tile_broadcast")
def _broadcast(op: Any, cx: Any) -> Step:
    x, result, dtype, rank = cx.slot(op.x), cx.result(op), cx.dtype(op.x), cx.rank(op.x)
    shape = cx.shape(op.result_vars[0])

    def step(R: Registers) -> None:
        tile = tensor(R[x], dtype)
        lead = leading(tile, rank)
        R[result] = tile.reshape(lead + (1,) * (len(shape) - rank) + tile.shape[len(lead) :]).expand(lead + shape)

    return step


@implements("tile_permute")
def _permute(op: Any, cx: Any) -> Step:
    x, result, axes = cx.slot(op.x), cx.result(op), tuple(a - len(op.axes) for a in op.axes)

    def step(R: Registers) -> None:
        tile = R[x]
        R[result] = tile.permute(*range(len(leading(tile, len(axes)))), *axes) if axes else tile

    return step


@implements("tile_cat")
def _cat(op: Any, cx: Any) -> Step:
    x, y, result, rank = cx.slot(op.x), cx.slot(op.y), cx.result(op), cx.rank(op.x)
    axis = op.axis - rank

    def step(R: Registers) -> None:
        R[result] = torch.cat(together((R[x], R[y]), rank), dim=axis)

    return step


@implements("tile_arange")
def _arange(op: Any, cx: Any) -> Step | None:
    (size,) = cx.shape(op.result_vars[0])
    dtype = cx.dtype(op.result_vars[0])
    from mla_var3.cutile_cpu.dtypes import wrap

    cx.template[cx.result(op)] = wrap(torch.arange(size, dtype=torch.int64), dtype)
    return None


def _part(index: list[int], whole: tuple[int, ...], part: tuple[int, ...], where: str) -> tuple[slice, ...]:
    """Slices of a subtile; an index outside the grid of subtiles is undefined in cuTile."""
    for axis, (i, n, size) in enumerate(zip(index, whole, part, strict=True)):
        if not 0 <= i < n // size:
            raise KernelFault(f"subtile {i} of axis {axis}, which has {n // size} of them,", where)
    return tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, part, strict=True))


@implements("tile_extract")
def _extract(op: Any, cx: Any) -> Step:
    x, result, index = cx.slot(op.x), cx.result(op), cx.slots_of(op.index)
    whole, part, where, dtype = cx.shape(op.x), cx.shape(op.result_vars[0]), cx.where(op), cx.dtype(op.x)

    def step(R: Registers) -> None:
        at = _part([R[0].decide(R[i]) for i in index], whole, part, where)
        R[result] = settle(tensor(R[x], dtype)[(..., *at)], dtype)

    return step


@implements("tile_insert")
def _insert(op: Any, cx: Any) -> Step:
    x, value, result, index = cx.slot(op.x), cx.slot(op.value), cx.result(op), cx.slots_of(op.index)
    whole, part, where, dtype = cx.shape(op.x), cx.shape(op.value), cx.where(op), cx.dtype(op.x)

    def step(R: Registers) -> None:
        at = _part([R[0].decide(R[i]) for i in index], whole, part, where)
        tile, new = tensor(R[x], dtype), tensor(R[value], dtype)
        out = tile.expand((leading(new, len(part)) or leading(tile, len(whole))) + whole).clone()
        out[(..., *at)] = new
        R[result] = settle(out, dtype)

    return step
