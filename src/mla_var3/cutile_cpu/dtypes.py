"""cuTile's data types as the interpreter holds them.

A tile is a torch tensor; a scalar (a tile of shape ()) of integers or booleans is a Python `int` or `bool`.

    bool        torch.bool
    integers    int64 with the value itself: sign-extended, or zero-extended for unsigned types. uint64 keeps its 64
                bits in an int64 tensor, and its value in a Python int.
    floats      torch's own type; tfloat32 is float32 with 10 bits of mantissa
    small ones  uint8 with the bits: float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float8_e5m3fnu, float4_e2m1fn
    pointers    byte addresses, int64
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class Format:
    """A binary floating-point format. mantissa: explicit bits. special: how the largest codes are used: "ieee",
    "nan" (one NaN, no infinity) or "none" (all codes are numbers)."""

    bits: int
    exponent: int
    mantissa: int
    emin: int
    largest: float
    special: str = "ieee"
    signed: bool = True
    subnormals: bool = True
    saturates: bool = False


FORMATS = {
    "float64": Format(64, 11, 52, -1022, 1.7976931348623157e308),
    "float32": Format(32, 8, 23, -126, (2 - 2.0**-23) * 2.0**127),
    "tfloat32": Format(32, 8, 10, -126, (2 - 2.0**-10) * 2.0**127),
    "bfloat16": Format(16, 8, 7, -126, (2 - 2.0**-7) * 2.0**127),
    "float16": Format(16, 5, 10, -14, 65504.0),
    "float8_e4m3fn": Format(8, 4, 3, -6, 448.0, "nan", saturates=True),
    "float8_e5m2": Format(8, 5, 2, -14, 57344.0, saturates=True),
    "float8_e8m0fnu": Format(8, 8, 0, -127, 2.0**127, "nan", signed=False, subnormals=False, saturates=True),
    "float8_e5m3fnu": Format(8, 5, 3, -14, 114688.0, "nan", signed=False, saturates=True),
    "float4_e2m1fn": Format(4, 2, 1, 0, 6.0, "none", saturates=True),
}

_FLOATS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "tfloat32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_STORED_INTEGERS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


@dataclass(frozen=True)
class Dtype:
    """One data type. kind: bool, int, float, small or pointer. held: the tile's torch type; stored: memory's."""

    name: str
    kind: str
    bits: int
    signed: bool
    held: torch.dtype
    stored: torch.dtype
    pointee: Dtype | None = None

    @property
    def bytes(self) -> int:
        return self.bits // 8

    @property
    def format(self) -> Format:
        return FORMATS[self.name]

    @property
    def floating(self) -> bool:
        return self.kind in ("float", "small")

    @property
    def discrete(self) -> bool:
        """Whether a scalar of it is a Python value."""
        return self.kind in ("int", "bool", "pointer")


@functools.cache
def dtype_of(native: Any) -> Dtype:
    """The `Dtype` of a `cuda.tile.DType`."""
    from cuda.tile import _datatype as datatype

    if datatype.is_pointer_dtype(native):
        info = datatype.PointerInfo(native)
        pointee = None if info.opaque else dtype_of(info.pointee_dtype)
        return Dtype(str(native), "pointer", 64, False, torch.int64, torch.int64, pointee)
    # cuda-tile 1.6 has no foreign pointers.
    if hasattr(datatype, "is_foreign_pointer_dtype") and datatype.is_foreign_pointer_dtype(native):
        pointee = dtype_of(datatype.foreign_pointer_pointee_dtype(native))
        return Dtype(str(native), "pointer", 64, False, torch.int64, torch.int64, pointee)
    name, bits = native.name, native.bitwidth
    if datatype.is_boolean(native):
        return Dtype(name, "bool", 8, False, torch.bool, torch.uint8)
    if datatype.is_integral(native):
        return Dtype(name, "int", bits, datatype.is_signed(native), torch.int64, _STORED_INTEGERS[bits])
    if name in _FLOATS:
        return Dtype(name, "float", bits, True, _FLOATS[name], _FLOATS[name])
    return Dtype(name, "small", bits, FORMATS[name].signed, torch.uint8, torch.uint8)


# ---------------------------------------------------------------- integers
def wrap_scalar(value: int, dtype: Dtype) -> int:
    """The value modulo 2^bits, in the type's range."""
    value &= (1 << dtype.bits) - 1
    return value - (1 << dtype.bits) if dtype.signed and value >> (dtype.bits - 1) else value


def wrap(tile: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    if dtype.bits == 64:
        return tile
    if dtype.signed:
        shift = 64 - dtype.bits
        return (tile << shift) >> shift
    return tile & ((1 << dtype.bits) - 1)


def as_held(value: int, dtype: Dtype) -> int:
    """A scalar's value as an int64 tile holds it (a large uint64 is negative there)."""
    return value - (1 << 64) if value >= 1 << 63 else value


def tensor(value: Any, dtype: Dtype) -> torch.Tensor:
    """A scalar or tile as a tensor."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(as_held(value, dtype) if dtype.kind != "bool" else value, dtype=dtype.held)


def leading(tile: torch.Tensor, rank: int) -> tuple[int, ...]:
    """The dimensions in front of a tile's own: of blocks that run together, or of a reduction's scalars."""
    return tuple(tile.shape[: tile.dim() - rank])


def together(tiles: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """Tiles of one rank with the same leading dimensions: those that have none get them."""
    lead = max((leading(t, rank) for t in tiles), key=len)
    return [t.expand(lead + t.shape[t.dim() - rank :]) for t in tiles]


def settle(tile: torch.Tensor, dtype: Dtype) -> Any:
    """A tile; of shape () and of integers or booleans, as a Python value."""
    if tile.dim() or not dtype.discrete:
        return tile
    value = tile.item()
    return value & MASK64 if dtype.bits == 64 and not dtype.signed and dtype.kind == "int" else value


def same_bits(a: Any, b: Any) -> bool:
    """Whether two values (tensors of one type, or anything else) are the same: a NaN is itself, -0 is not 0."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b or (type(a) is type(b) and bool(a == b))
    if a is b or a.shape != b.shape:
        return a is b
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


# ---------------------------------------------------------------- floating point
@functools.cache
def _small_codes(name: str) -> torch.Tensor:
    """Value (float64) of each code of a small format."""
    form = FORMATS[name]
    codes = range(1 << form.bits)
    return torch.tensor([_value_of(code, form) for code in codes], dtype=torch.float64)


def _value_of(code: int, form: Format) -> float:
    mantissa = code & ((1 << form.mantissa) - 1)
    exponent = (code >> form.mantissa) & ((1 << form.exponent) - 1)
    sign = -1.0 if form.signed and code >> (form.bits - 1) else 1.0
    top = exponent == (1 << form.exponent) - 1
    if top and form.special == "nan" and mantissa == (1 << form.mantissa) - 1:
        return math.nan
    if top and form.special == "ieee":
        return math.nan if mantissa else sign * math.inf
    if exponent == 0 and form.subnormals:
        return sign * math.ldexp(mantissa, form.emin - form.mantissa)
    exponent -= 1 if form.subnormals else 0
    return sign * math.ldexp(1 + mantissa / (1 << form.mantissa), exponent + form.emin)


def decode(tile: torch.Tensor, dtype: Dtype, to: torch.dtype = torch.float64) -> torch.Tensor:
    """The numbers of a floating-point tile, exactly, as float64 (or float32, for types that fit it)."""
    if dtype.kind == "small":
        return _small_codes(dtype.name).to(to)[tile.to(torch.int64)]
    return tile.to(to)


# ---------------------------------------------------------------- memory
def from_memory(raw: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    """A tile with a copy of `raw`, which has the stored type."""
    if dtype.kind == "int":
        tile = raw.to(torch.int64, copy=True)
        return tile if dtype.signed or dtype.bits == 64 else tile & ((1 << dtype.bits) - 1)
    return raw != 0 if dtype.kind == "bool" else raw.clone()


def to_memory(value: Any, dtype: Dtype) -> torch.Tensor:
    """The stored form of a tile or scalar."""
    return tensor(value, dtype).to(dtype.stored)


def poison(dtype: Dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """What stands where cuTile gives no value: NaN, and for integers a large odd number."""
    if dtype.kind == "float":
        return torch.full(shape, math.nan, dtype=dtype.held)
    if dtype.kind == "small":
        return torch.full(shape, (1 << dtype.bits) - 1, dtype=torch.uint8)
    if dtype.kind == "bool":
        return torch.ones(shape, dtype=torch.bool)
    return torch.full(shape, 0x5A5A5A5A5A5A5A5B & ((1 << (dtype.bits - 1)) - 1), dtype=torch.int64)
