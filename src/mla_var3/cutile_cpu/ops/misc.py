"""Where a block is, what it assumes and asserts, what it prints."""

from __future__ import annotations

import re
from typing import Any

import torch

from mla_var3.cutile_cpu.dtypes import MASK64, Dtype, decode, tensor
from mla_var3.cutile_cpu.errors import KernelFault
from mla_var3.cutile_cpu.ops import Registers, Step, implements


@implements("tile_bid")
def _bid(op: Any, cx: Any) -> Step:
    result, axis = cx.result(op), op.axis

    def step(R: Registers) -> None:
        R[result] = R[0].bid[axis]

    return step


@implements("tile_num_blocks")
def _num_blocks(op: Any, cx: Any) -> Step:
    result, axis = cx.result(op), op.axis

    def step(R: Registers) -> None:
        R[result] = R[0].grid[axis]

    return step


@implements("assume_div_by")
def _assume_div_by(op: Any, cx: Any) -> Step:
    x, result, divisor, where = cx.slot(op.x), cx.result(op), op.divisor, cx.where(op)
    power = divisor & (divisor - 1) == 0

    def step(R: Registers) -> None:
        value = R[x]
        wrong = (value & (divisor - 1) if power else value % divisor) != 0
        if bool(wrong.any()) if isinstance(wrong, torch.Tensor) else wrong:
            if isinstance(value, torch.Tensor):
                value = int(value[wrong].reshape(-1)[0])
            raise KernelFault(f"{value} is assumed to be a multiple of {divisor}, and is not,", where)
        R[result] = R[x]

    return step


@implements("assume_bounded")
def _assume_bounded(op: Any, cx: Any) -> Step:
    x, result, low, high, where = cx.slot(op.x), cx.result(op), op.lower_bound, op.upper_bound, cx.where(op)

    def step(R: Registers) -> None:
        value = R[x]
        if isinstance(value, torch.Tensor):
            inside = (low is None or bool((value >= low).all())) and (high is None or bool((value <= high).all()))
        else:
            inside = (low is None or value >= low) and (high is None or value <= high)
        if not inside:
            raise KernelFault(f"{value} is assumed to be between {low} and {high}, and is not,", where)
        R[result] = value

    return step


@implements("assert")
def _assert(op: Any, cx: Any) -> Step:
    cond, message, where = cx.slot(op.cond), op.message, cx.where(op)

    def step(R: Registers) -> None:
        value = R[cond]
        if not (bool(value.all()) if isinstance(value, torch.Tensor) else value):
            raise KernelFault(f"assertion failed{': ' + message if message else ''}", where)

    return step


# ---------------------------------------------------------------- printing
_SPEC = re.compile(r"%(?:%|(?P<flags>[0 #+-]?)(?P<width>[0-9]*)(?P<precision>(?:\.[0-9]+)?)(?:hh|h|ll|l)?(?P<type>.))")


def _one(spec: re.Match[str], value: Any) -> str:
    kind = spec["type"]
    form = f"%{spec['flags']}{spec['width']}{spec['precision']}"
    if kind in "aA":
        return float(value).hex() if kind == "a" else float(value).hex().upper()
    if kind in "uoxX" and value < 0:
        value &= MASK64 if value < -(1 << 31) else 0xFFFFFFFF
    return (form + {"u": "d", "i": "d"}.get(kind, kind)) % value


def _nested(spec: re.Match[str], values: Any) -> str:
    if isinstance(values, list):
        return "[" + ", ".join(_nested(spec, v) for v in values) + "]"
    return _one(spec, values)


def format_tiles(template: str, values: list[Any], types: list[Dtype]) -> str:
    """C's printf for tiles: a tile's elements in nested brackets."""
    left = list(zip(values, types, strict=True))

    def fill(spec: re.Match[str]) -> str:
        if spec[0] == "%%":
            return "%"
        value, dtype = left.pop(0)
        if dtype.floating:
            return _nested(spec, decode(tensor(value, dtype), dtype).tolist())
        numbers = value.to(torch.int64).tolist() if isinstance(value, torch.Tensor) else int(value)
        if dtype.bits == 64 and not dtype.signed and isinstance(value, torch.Tensor):
            numbers = _unsigned(numbers)
        return _nested(spec, numbers)

    return _SPEC.sub(fill, template)


def _unsigned(values: Any) -> Any:
    return [_unsigned(v) for v in values] if isinstance(values, list) else values & MASK64


@implements("tile_printf")
def _printf(op: Any, cx: Any) -> Step:
    slots, types, template = cx.slots_of(op.args), [cx.dtype(a) for a in op.args], op.format

    def step(R: Registers) -> None:
        print(format_tiles(template, [R[s] for s in slots], types), end="")

    return step
