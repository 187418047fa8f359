"""Moving elements: shapes, axes, parts, ranges."""

from __future__ import annotations

from typing import Any

import torch

from mla_var3.cutile_cpu.dtypes import settle, tensor
from mla_var3.cutile_cpu.errors import KernelFault
from mla_var3.cutile_cpu.ops import Registers, Step, implements


@implements("tile_reshape")
def _reshape(op: Any, cx: Any) -> Step:
    x, result, dtype = cx.slot(op.x), cx.result(op), cx.dtype(op.x)
    shape = cx.shape(op.result_vars[0])

    def step(R: Registers) -> None:
        R[result] = settle(tensor(R[x], dtype).reshape(shape), dtype)

    return step


@implements("tile_broadcast")
def _broadcast(op: Any, cx: Any) -> Step:
    x, result, dtype = cx.slot(op.x), cx.result(op), cx.dtype(op.x)
    shape = cx.shape(op.result_vars[0])

    def step(R: Registers) -> None:
        R[result] = tensor(R[x], dtype).expand(shape)

    return step


@implements("tile_permute")
def _permute(op: Any, cx: Any) -> Step:
    x, result, axes = cx.slot(op.x), cx.result(op), tuple(op.axes)

    def step(R: Registers) -> None:
        R[result] = R[x].permute(axes) if axes else R[x]

    return step


@implements("tile_cat")
def _cat(op: Any, cx: Any) -> Step:
    x, y, result, axis = cx.slot(op.x), cx.slot(op.y), cx.result(op), op.axis

    def step(R: Registers) -> None:
        R[result] = torch.cat((R[x], R[y]), dim=axis)

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
        at = _part([R[i] for i in index], whole, part, where)
        R[result] = settle(tensor(R[x], dtype)[at], dtype)

    return step


@implements("tile_insert")
def _insert(op: Any, cx: Any) -> Step:
    x, value, result, index = cx.slot(op.x), cx.slot(op.value), cx.result(op), cx.slots_of(op.index)
    whole, part, where, dtype = cx.shape(op.x), cx.shape(op.value), cx.where(op), cx.dtype(op.x)

    def step(R: Registers) -> None:
        out = tensor(R[x], dtype).clone()
        out[_part([R[i] for i in index], whole, part, where)] = tensor(R[value], dtype)
        R[result] = settle(out, dtype)

    return step
