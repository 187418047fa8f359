"""Conversions between types, reinterpreted bits, packing into bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mla_var3.cutile_cpu import rounding
from mla_var3.cutile_cpu.dtypes import Dtype, decode, leading, settle, tensor, to_memory, wrap, wrap_scalar
from mla_var3.cutile_cpu.ops import Registers, Step, implements

Convert = Callable[[torch.Tensor], torch.Tensor]


def int_to_float64(tile: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    """Integers in float64, rounded to odd where it has not enough bits."""
    if dtype.bits < 64:
        return tile.to(torch.float64)
    high, low = tile >> 32, tile & 0xFFFFFFFF
    if not dtype.signed:
        high = high & 0xFFFFFFFF
    total, error = rounding.two_sum(high.to(torch.float64) * 2.0**32, low.to(torch.float64))
    return rounding.to_odd(total, error)


def _int_to_float(tile: torch.Tensor, source: Dtype, target: Dtype) -> torch.Tensor:
    if source.bits == 64 and target.name == "float64":
        if source.signed:
            return tile.to(torch.float64)
        high, low = (tile >> 32) & 0xFFFFFFFF, tile & 0xFFFFFFFF
        return high.to(torch.float64) * 2.0**32 + low.to(torch.float64)
    return rounding.round_float64(int_to_float64(tile, source), target)


def _float_to_int(tile: torch.Tensor, source: Dtype, target: Dtype) -> torch.Tensor:
    """Towards zero. What does not fit is undefined in cuTile; here, as in PTX, it is the nearest that fits 32 or 64
    bits (and the low bits of that for narrower types), and NaN is 0."""
    x = torch.trunc(decode(tile, source)).nan_to_num(0.0, float("inf"), float("-inf"))
    if target.bits == 64 and not target.signed:
        x = x.clamp(0.0, 2.0**64)
        upper = x >= 2.0**63
        out = torch.where(upper, x - 2.0**63, x).clamp(max=2.0**63 - 1024).to(torch.int64)
        out = torch.where(upper, out ^ -(1 << 63), out)
        return torch.where(x >= 2.0**64, -1, out)
    if target.bits == 64:
        out = x.clamp(-(2.0**63), 2.0**63 - 1024).to(torch.int64)
        return torch.where(x >= 2.0**63, (1 << 63) - 1, out)
    low, high = (-(2.0**31), 2.0**31 - 1) if target.signed else (0.0, 2.0**32 - 1)
    return wrap(x.clamp(low, high).to(torch.int64), target)


def _float_to_float(tile: torch.Tensor, source: Dtype, target: Dtype, mode: str) -> torch.Tensor:
    if mode == "RN" and source.bits <= 32 and "small" not in (source.kind, target.kind) and target.name != "tfloat32":
        return tile.to(torch.float32).to(target.held)
    return rounding.round_float64(decode(tile, source), target, mode)


def converter(source: Dtype, target: Dtype, mode: str = "RN") -> tuple[Callable[[Any], Any] | None, Convert]:
    """(for Python values, for tensors) of a conversion."""
    if target.kind == "bool":
        if source.floating:
            return None, lambda t: decode(t, source) != 0
        return bool, lambda t: t != 0
    if source.kind == "bool":
        if target.kind == "int":
            return int, lambda t: t.to(torch.int64)
        return None, lambda t: rounding.round_float64(t.to(torch.float64), target)
    if source.kind == "int" and target.kind == "int":
        return lambda v: wrap_scalar(v, target), lambda t: wrap(t, target)
    if source.kind == "int":
        return None, lambda t: _int_to_float(t, source, target)
    if target.kind == "int":
        return None, lambda t: _float_to_int(t, source, target)
    return None, lambda t: _float_to_float(t, source, target, mode)


@implements("tile_astype")
def _astype(op: Any, cx: Any) -> Step:
    x, result = cx.slot(op.x), cx.result(op)
    source, target = cx.dtype(op.x), cx.dtype(op.result_vars[0])
    mode = "RN" if op.rounding_mode is None else op.rounding_mode.name
    scalar, tile = converter(source, target, mode)
    lanes = cx.lanes

    def step(R: Registers) -> None:
        value = R[x]
        if scalar is not None and not isinstance(value, torch.Tensor):
            R[result] = scalar(value)
        else:
            out = tile(tensor(value, source))
            R[result] = out if lanes else settle(out, target)

    return step


# ---------------------------------------------------------------- bits
def to_bytes(value: Any, dtype: Dtype) -> torch.Tensor:
    """The bytes of a tile's elements, flat; of 4-bit elements the first is in the low half."""
    flat = to_memory(value, dtype).reshape(-1).contiguous()
    if dtype.bits == 4:
        return flat[0::2] | (flat[1::2] << 4)
    return flat.view(torch.uint8)


def from_bytes(raw: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    from mla_var3.cutile_cpu.dtypes import from_memory

    if dtype.bits == 4:
        return torch.stack((raw & 15, raw >> 4), dim=1).reshape(-1)
    return from_memory(raw.contiguous().view(dtype.stored), dtype)


@implements("tile_bitcast", "tile_pack", "tile_unpack")
def _bitcast(op: Any, cx: Any) -> Step:
    x, result = cx.slot(op.x), cx.result(op)
    source, target, shape = cx.dtype(op.x), cx.dtype(op.result_vars[0]), cx.shape(op.result_vars[0])
    rank = cx.rank(op.x)

    def step(R: Registers) -> None:
        value = tensor(R[x], source)
        raw = to_bytes(value, source)
        # A uint8 tile holds bytes in int64.
        out = from_bytes(raw, target) if target.kind != "small" or target.bits == 4 else raw
        R[result] = settle(out.reshape(leading(value, rank) + shape), target)

    return step
