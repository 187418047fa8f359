"""Rounding to a format with a chosen mode, and constants, which are rounded to their type.

Results are first made in float64 as "rounded to odd": the exact value where float64 has it, else the neighbour whose
last bit is 1. That bit keeps the knowledge that something was cut off, so rounding once more, to at most 51 bits, gives
what rounding the exact value would have given (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums").
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mla_var3.cutile_cpu.dtypes import Dtype, Format, as_held, settle, wrap_scalar

#: Names of cuTile's `RoundingMode`s that round: nearest even, to zero, down, up, nearest with ties away.
MODES = ("RN", "RZ", "RM", "RP", "RA")

TINY32 = 2.0**-126
_INF = float("inf")


def flush(x: torch.Tensor) -> torch.Tensor:
    """Subnormals of float32 as zeros of their sign."""
    return torch.where(x.abs() < TINY32, x * 0.0, x)


# ---------------------------------------------------------------- exact sums and products in float64
def two_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(a + b rounded, what the rounding cut off); the second is 0 where the sum is not finite."""
    s = a + b
    t = s - a
    error = (a - (s - t)) + (b - t)
    return s, torch.where(torch.isfinite(s), error, 0.0)


def _halves(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Rounded, not cut off: the lower half of a number that is cut has 27 bits, and their product 54.
    high = ((a.contiguous().view(torch.int64) + (1 << 26)) & -(1 << 27)).view(torch.float64)
    return high, a - high


def two_product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(a · b rounded, what the rounding cut off), where neither overflows nor underflows."""
    a, b = torch.broadcast_tensors(a, b)
    p = a * b
    ah, al = _halves(a)
    bh, bl = _halves(b)
    error = ((ah * bh - p) + ah * bl + al * bh) + al * bl
    return p, torch.where(torch.isfinite(p) & torch.isfinite(error), error, 0.0)


def to_odd(x: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """x, the float64 nearest to x + error, rounded to odd instead."""
    x, error = torch.broadcast_tensors(x, error)
    even = (x.contiguous().view(torch.int64) & 1) == 0
    toward = torch.where(error > 0, _INF, -_INF).to(torch.float64)
    return torch.where(even & (error != 0) & torch.isfinite(x), torch.nextafter(x, toward), x)


def on_a_middle(x: torch.Tensor) -> bool:
    """Whether a float64 of the tile may be halfway between two float32. Where none is, rounding to float32 gives what
    rounding the value that x is nearest to would: that value is on the same side of every middle as x is."""
    halfway = (x.view(torch.int64) & 0x1FFFFFFF) == 0x10000000
    return bool((halfway | ((x.abs() < TINY32) & (x != 0))).any())


# ---------------------------------------------------------------- rounding once
def power(e: torch.Tensor) -> torch.Tensor:
    """2^e in float64 for integers e of -1022..1023."""
    return ((e.to(torch.int64) + 1023) << 52).view(torch.float64)


def _round_integer(y: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "RN":
        return torch.round(y)
    if mode == "RZ":
        return torch.trunc(y)
    if mode == "RM":
        return torch.floor(y)
    if mode == "RP":
        return torch.ceil(y)
    return torch.copysign(torch.floor(y.abs() + 0.5), y)


def round_to_format(x: torch.Tensor, form: Format, mode: str = "RN") -> torch.Tensor:
    """x (float64, exact or rounded to odd) rounded to a format of at most 32 bits; the result is in float64.

    Too large a result becomes infinity, or the largest number where the mode points towards zero; in formats that
    saturate it is always the largest number, and negative numbers become the least one where there is no sign.
    """
    _, exponent = torch.frexp(x)
    lowest = form.emin if form.subnormals else -1022
    step = torch.clamp(exponent.to(torch.int64) - 1, min=lowest) - form.mantissa
    # Two factors, because 2^-step leaves float64's range where x is near its ends.
    half = torch.div(step, 2, rounding_mode="floor")
    y = _round_integer(x * power(-half) * power(half - step), mode)
    rounded = y * power(half) * power(step - half)
    rounded = torch.where(torch.isfinite(x) & (x != 0), rounded, x)
    over = rounded.abs() > form.largest
    if form.saturates:
        rounded = torch.where(over, torch.copysign(torch.full_like(x, form.largest), x), rounded)
    else:
        to_largest = {"RZ": over, "RM": over & (x > 0), "RP": over & (x < 0)}.get(mode)
        beyond = torch.full_like(x, _INF)
        if to_largest is not None:
            beyond = torch.where(to_largest & torch.isfinite(x), form.largest, beyond)
        rounded = torch.where(over, torch.copysign(beyond, x), rounded)
    if not form.subnormals:
        rounded = torch.where(rounded < 2.0**form.emin, 2.0**form.emin, rounded)
    elif not form.signed:
        rounded = torch.where(rounded < 0, 0.0, rounded)
    return rounded


def encode(x: torch.Tensor, form: Format) -> torch.Tensor:
    """The codes (uint8) of numbers that the small format has exactly."""
    _, exponent = torch.frexp(x)
    e = torch.clamp(exponent.to(torch.int64) - 1, min=form.emin)
    scaled = (x.abs() * power(-torch.clamp(e, min=-1022))).nan_to_num(0.0, 0.0)
    lead = (scaled >= 1).to(torch.int64)
    fraction = ((scaled - lead) * (1 << form.mantissa)).to(torch.int64)
    biased = torch.where(lead > 0, e - form.emin + 1, 0) if form.subnormals else e - form.emin
    code = (biased << form.mantissa) + fraction
    top = ((1 << form.exponent) - 1) << form.mantissa
    if form.special == "ieee":
        code = torch.where(torch.isinf(x), top, code)
        code = torch.where(torch.isnan(x), top + (1 << (form.mantissa - 1)) + ((1 << (form.mantissa - 1)) - 1), code)
    elif form.special == "nan":
        code = torch.where(torch.isnan(x), top + (1 << form.mantissa) - 1, code)
    else:
        code = torch.where(torch.isnan(x), top + (1 << form.mantissa) - 1, code)  # cuTile has no NaN here
    if form.signed:
        code = torch.where(torch.signbit(x) & ~torch.isnan(x), code | (1 << (form.bits - 1)), code)
    return code.to(torch.uint8)


def round_exact(x: torch.Tensor, error: torch.Tensor | None, dtype: Dtype, mode: str) -> torch.Tensor:
    """A tile of `dtype` from the exact value x + error, where x is that value's nearest float64."""
    if dtype.name == "float64":
        if mode == "RN" or error is None:
            return x
        up, down = error > 0, error < 0
        if mode == "RZ":
            up, down = up & (x < 0), down & (x > 0)
        elif mode == "RM":
            up = torch.zeros_like(up)
        else:
            down = torch.zeros_like(down)
        limit = torch.full_like(x, _INF)
        return torch.where(up, torch.nextafter(x, limit), torch.where(down, torch.nextafter(x, -limit), x))
    if error is not None:
        x = to_odd(x, error)
    return round_float64(x, dtype, mode)


def round_float64(x: torch.Tensor, dtype: Dtype, mode: str = "RN") -> torch.Tensor:
    """A tile of `dtype` from float64 (exact, or rounded to odd)."""
    if dtype.name == "float64":
        return x
    if dtype.name == "float32" and mode == "RN":
        return x.to(torch.float32)
    rounded = round_to_format(x, dtype.format, mode)
    return encode(rounded, dtype.format) if dtype.kind == "small" else rounded.to(dtype.held)


def round_nearby(x: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    """A tile of `dtype` from a float64 that is itself only accurate: rounding twice does no harm."""
    return x.to(torch.float32).to(dtype.held) if dtype.bits == 16 else x.to(dtype.held)


# ---------------------------------------------------------------- constants
def constant(value: Any, dtype: Dtype, shape: tuple[int, ...]) -> Any:
    """The tile of a constant: one number, or nested tuples of the tile's shape."""
    flat = _flatten(value)
    if dtype.kind == "int":
        held: list[Any] = [as_held(wrap_scalar(int(v), dtype), dtype) for v in flat]
    elif dtype.kind == "bool":
        held = [bool(v) for v in flat]
    elif dtype.kind == "pointer":
        held = [int(v) for v in flat]
    elif dtype.kind == "float":
        held = round_float64(torch.tensor([float(v) for v in flat], dtype=torch.float64), dtype).tolist()
    else:
        from cuda.tile import _bytecode as bc
        from cuda.tile import _datatype as datatype

        simple = datatype.dtype_simple_bytecode_type(getattr(datatype, dtype.name))
        held = [bc.float_to_bits(float(v), simple) for v in flat]
    tile = torch.tensor(held, dtype=dtype.held)
    tile = tile.reshape(shape) if len(flat) == math.prod(shape) else tile.reshape((1,) * len(shape)).expand(shape)
    return settle(tile, dtype)


def _flatten(value: Any) -> list[Any]:
    return [x for v in value for x in _flatten(v)] if isinstance(value, tuple) else [value]
