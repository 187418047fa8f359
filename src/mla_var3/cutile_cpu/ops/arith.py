"""Arithmetic, comparisons, bits, selection and elementary functions, element by element.

Integers wrap around. Scalars of integers and booleans are Python values, everything else is a tensor. What cuTile
leaves open is chosen as the GPU does it: division by zero gives all ones (remainder: the dividend), a shift by the
width or more shifts everything out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from mla_var3.cutile_cpu import rounding
from mla_var3.cutile_cpu.dtypes import MASK64, Dtype, decode, tensor, wrap, wrap_scalar
from mla_var3.cutile_cpu.ops import Registers, Step, implements

_SIGN = -(1 << 63)
Binary = Callable[[Any, Any], Any]


def _binary_step(op: Any, cx: Any, scalar: Binary | None, tile: Binary, dtype: Dtype) -> Step:
    lhs, rhs, result = cx.slot(op.lhs), cx.slot(op.rhs), cx.result(op)

    def step(R: Registers) -> None:
        a, b = R[lhs], R[rhs]
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            R[result] = tile(tensor(a, dtype), tensor(b, dtype))
        else:
            assert scalar is not None
            R[result] = scalar(a, b)

    return step


def _ordered(tile: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    """Integers in an order that int64 comparisons see: uint64's upper half is negative otherwise."""
    return tile ^ _SIGN if dtype.bits == 64 and not dtype.signed else tile


# ---------------------------------------------------------------- integers
def _floor(a: int, b: int) -> int:
    return a // b


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _remainder(a: int, b: int) -> int:
    return a - b * (abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1))


def _by_python(fn: Callable[[int, int], int], dtype: Dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """uint64 has no division in torch: element by element."""

    def apply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = torch.broadcast_tensors(a, b)
        pairs = zip(a.reshape(-1).tolist(), b.reshape(-1).tolist(), strict=True)
        values = [fn(x & MASK64, y & MASK64) & MASK64 for x, y in pairs]
        held = [v - (1 << 64) if v >> 63 else v for v in values]
        return torch.tensor(held, dtype=torch.int64).reshape(a.shape)

    return apply


def _int_division(fn: str, dtype: Dtype) -> tuple[Binary, Binary]:
    exact = {"floordiv": _floor, "cdiv": _ceil, "c_mod": _remainder}[fn]
    ones = -1 if dtype.signed else (1 << dtype.bits) - 1

    def scalar(a: int, b: int) -> int:
        if b == 0:
            return a if fn == "c_mod" else ones
        return wrap_scalar(exact(a, b), dtype)

    if dtype.bits == 64 and not dtype.signed:
        return scalar, _by_python(scalar, dtype)

    def tile(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        zero = b == 0
        # -2^63 / -1 traps on the CPU; it wraps to itself, as the negation does.
        minus = b == -1
        safe = torch.where(zero | minus, 1, b)
        if fn == "c_mod":
            return torch.where(zero, a, torch.where(minus, 0, torch.fmod(a, safe)))
        if fn == "floordiv":
            q = torch.div(a, safe, rounding_mode="floor")
        else:
            q = torch.div(a, safe, rounding_mode="floor") + (torch.remainder(a, safe) != 0)
        return wrap(torch.where(zero, ones, torch.where(minus, -a, q)), dtype)

    return scalar, tile


def int_arith(fn: str, dtype: Dtype) -> tuple[Binary, Binary]:
    """(for Python values, for tensors) of an operation on integers: add, sub, mul, min, max or a division."""
    if fn in ("floordiv", "cdiv", "c_mod"):
        return _int_division(fn, dtype)
    if fn in ("min", "max"):
        choose = torch.minimum if fn == "min" else torch.maximum
        scalar: Binary = min if fn == "min" else max
        if dtype.bits == 64 and not dtype.signed:
            return scalar, lambda a, b: choose(a ^ _SIGN, b ^ _SIGN) ^ _SIGN
        return scalar, choose
    plain = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}[fn]
    if dtype.bits == 64:
        return lambda a, b: wrap_scalar(plain(a, b), dtype), plain
    return lambda a, b: wrap_scalar(plain(a, b), dtype), lambda a, b: wrap(plain(a, b), dtype)


# ---------------------------------------------------------------- floats
def _quotient(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = a / b
    p, e = rounding.two_product(q, b)
    rest = (a - p) - e
    error = torch.where(torch.isfinite(q) & torch.isfinite(rest), rest * torch.sign(b), 0.0)
    return q, error


def exact_binary(fn: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(nearest float64, what it cut off) of a sum, difference, product or quotient of float64 tiles."""
    if fn == "add":
        return rounding.two_sum(a, b)
    if fn == "sub":
        return rounding.two_sum(a, -b)
    return rounding.two_product(a, b) if fn == "mul" else _quotient(a, b)


def _minmax(fn: str, propagate: bool) -> Binary:
    low = fn == "min"
    plain = torch.minimum if low else torch.maximum
    skip = torch.fmin if low else torch.fmax

    def apply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = plain(a, b) if propagate else skip(a, b)
        # -0 is below +0 on the GPU; torch takes either.
        if not bool((out == 0).any()):
            return out
        return torch.where((a == 0) & (b == 0), torch.where(torch.signbit(a) == low, a, b), out)

    return apply


def _float_arith(fn: str, mode: str, ftz: bool, propagate: bool, dtype: Dtype) -> Binary:
    base: Binary
    if fn in ("min", "max"):
        base = _minmax(fn, propagate)
    elif fn == "c_mod":
        base = torch.fmod
    elif fn in ("pow", "atan2"):
        of = torch.pow if fn == "pow" else torch.atan2

        def base(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return rounding.round_nearby(of(a.to(torch.float64), b.to(torch.float64)), dtype)

    elif fn == "floordiv":

        def base(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.floor(a / b)

    elif mode == "RN":
        base = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div}[fn]
    else:

        def base(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            value, error = exact_binary(fn, a.to(torch.float64), b.to(torch.float64))
            plain = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div}[fn](a, b)
            rounded = rounding.round_exact(value, error, dtype, mode)
            # An exact zero sum is -0 when rounding down.
            if fn in ("add", "sub") and mode == "RM":
                zero = (value == 0) & ~(torch.signbit(a) == torch.signbit(b if fn == "add" else -b))
                rounded = torch.where(zero, -0.0, rounded).to(dtype.held)
            return torch.where(torch.isnan(plain), plain, rounded)

    if not ftz:
        return base
    return lambda a, b: rounding.flush(base(rounding.flush(a), rounding.flush(b)))


def _mode(rounding_mode: Any) -> str:
    """The rounding of an attribute; FULL and APPROX promise less than the nearest number, which is what they get."""
    name = "RN" if rounding_mode is None else rounding_mode.name
    return name if name in rounding.MODES else "RN"


@implements("raw_binary_arith")
def _raw_binary_arith(op: Any, cx: Any) -> Step:
    dtype = cx.dtype(op.lhs)
    if dtype.kind == "int":
        scalar, tile = int_arith(op.fn, dtype)
        return _binary_step(op, cx, scalar, tile, dtype)
    tile = _float_arith(op.fn, _mode(op.rounding_mode), op.flush_to_zero, op.propagate_nan, dtype)
    return _binary_step(op, cx, None, tile, dtype)


@implements("raw_fpowi")
def _raw_fpowi(op: Any, cx: Any) -> Step:
    base, exponent, result = cx.slot(op.base), cx.slot(op.exponent), cx.result(op)
    dtype, int_dtype = cx.dtype(op.base), cx.dtype(op.exponent)

    def step(R: Registers) -> None:
        power = tensor(R[exponent], int_dtype).to(torch.float64)
        R[result] = rounding.round_nearby(torch.pow(R[base].to(torch.float64), power), dtype)

    return step


@implements("fma")
def _fma(op: Any, cx: Any) -> Step:
    lhs, rhs, acc, result = cx.slot(op.lhs), cx.slot(op.rhs), cx.slot(op.acc), cx.result(op)
    dtype, mode = cx.dtype(op.result_vars[0]), _mode(op.rounding_mode)

    def step(R: Registers) -> None:
        a, b, c = R[lhs], R[rhs], R[acc]
        if op.flush_to_zero:
            a, b, c = rounding.flush(a), rounding.flush(b), rounding.flush(c)
        out = fma(a, b, c, dtype, mode)
        R[result] = rounding.flush(out) if op.flush_to_zero else out

    return step


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, dtype: Dtype, mode: str = "RN") -> torch.Tensor:
    """a · b + c, rounded once."""
    a64, b64, c64 = a.to(torch.float64), b.to(torch.float64), c.to(torch.float64)
    if dtype.bits < 64:
        product = a64 * b64  # exact: two 24-bit numbers, and float64 has the range
        if dtype.name == "float32" and mode == "RN":
            near = product + c64
            if not rounding.on_a_middle(near):
                return near.to(torch.float32)
        total, error = rounding.two_sum(product, c64)
        out = rounding.round_exact(total, error, dtype, mode)
        if mode == "RM":
            zero = (total == 0) & (torch.signbit(product) != torch.signbit(c64))
            out = torch.where(zero, -0.0, out).to(dtype.held)
        return out
    # Boldo and Melquiond: the three-term sum through one addition that is rounded to odd.
    high, low = rounding.two_product(a64, b64)
    t, t_low = rounding.two_sum(c64, low)
    total, v_low = rounding.two_sum(high, t)
    rest, rest_low = rounding.two_sum(t_low, v_low)
    out, error = rounding.two_sum(total, rounding.to_odd(rest, rest_low))
    plain = a64 * b64 + c64
    return torch.where(torch.isfinite(out), rounding.round_exact(out, error, dtype, mode), plain)


# ---------------------------------------------------------------- comparisons, bits, selection
_COMPARE = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


@implements("raw_cmp")
def _raw_cmp(op: Any, cx: Any) -> Step:
    dtype, compare = cx.dtype(op.lhs), _COMPARE[op.fn]
    if dtype.kind == "small":
        return _binary_step(op, cx, None, lambda a, b: compare(decode(a, dtype), decode(b, dtype)), dtype)
    if dtype.kind == "int" and dtype.bits == 64 and not dtype.signed:
        return _binary_step(op, cx, compare, lambda a, b: compare(_ordered(a, dtype), _ordered(b, dtype)), dtype)
    return _binary_step(op, cx, compare, compare, dtype)


@implements("raw_binary_bitwise")
def _raw_binary_bitwise(op: Any, cx: Any) -> Step:
    apply = getattr(operator, op.fn)
    return _binary_step(op, cx, apply, apply, cx.dtype(op.lhs))


@implements("raw_bitwise_shift")
def _raw_bitwise_shift(op: Any, cx: Any) -> Step:
    dtype = cx.dtype(op.lhs)
    bits, left = dtype.bits, op.fn == "lshift"

    def scalar(a: int, b: int) -> int:
        n = b & ((1 << bits) - 1)
        if left:
            return wrap_scalar(a << n, dtype) if n < bits else 0
        return a >> min(n, bits)

    def tile(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        n = torch.where((b < 0) | (b > 63), 64, b)
        near = n.clamp(max=63)
        if left:
            return torch.where(n < bits, wrap(a << near, dtype), 0)
        if bits == 64 and not dtype.signed:
            kept = torch.where(near > 0, (a >> near) & ~(torch.full_like(a, -1) << (64 - near.clamp(min=1))), a)
            return torch.where(n < 64, kept, 0)
        return a >> near

    return _binary_step(op, cx, scalar, tile, dtype)


@implements("raw_where")
def _raw_where(op: Any, cx: Any) -> Step:
    cond, x, y, result = cx.slot(op.cond), cx.slot(op.x), cx.slot(op.y), cx.result(op)
    dtype = cx.dtype(op.x)

    def step(R: Registers) -> None:
        c = R[cond]
        if isinstance(c, torch.Tensor):
            R[result] = torch.where(c, tensor(R[x], dtype), tensor(R[y], dtype))
        else:
            R[result] = R[x] if c else R[y]

    return step


# ---------------------------------------------------------------- functions of one tile
def _sqrt_exact(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(nearest float64, what it cut off) of square roots. torch's may be the neighbour of the nearest on some CPUs."""
    fraction, exponent = torch.frexp(x)
    odd = (exponent & 1).to(torch.float64)
    scaled = fraction * (1.0 + odd)  # in [1/2, 2): its root's square neither overflows nor underflows
    root = torch.sqrt(scaled)
    for _ in range(2):
        p, e = rounding.two_product(root, root)
        rest = (scaled - p) - e
        # The neighbour is nearer where its middle to `root`, squared, is beyond `scaled`. All are multiples of step^2,
        # so the term step^2 / 4 of that square decides equality only.
        up, down = torch.nextafter(root, root + 1) - root, torch.nextafter(root, root - 1) - root
        root = torch.where(rest > up * root, root + up, torch.where(rest <= down * root, root + down, root))
    good = torch.isfinite(x) & (x > 0)
    half = torch.div(exponent - odd.to(exponent.dtype), 2, rounding_mode="floor")
    return torch.where(good, root * rounding.power(half), torch.sqrt(x)), torch.where(good, rest, 0.0)


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name: getattr(torch, name)
    for name in ("exp", "exp2", "log", "log2", "sin", "cos", "tan", "sinh", "cosh", "tanh", "rsqrt")
}


def _unary_float(fn: str, mode: str, ftz: bool, dtype: Dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    base: Callable[[torch.Tensor], torch.Tensor]
    if fn in ("floor", "ceil", "abs", "neg"):
        base = getattr(torch, fn)
    elif fn == "sqrt":

        def base(x: torch.Tensor) -> torch.Tensor:
            root, error = _sqrt_exact(x.to(torch.float64))
            return rounding.round_exact(root, error, dtype, mode)

    else:
        function = _FUNCTIONS[fn]

        def base(x: torch.Tensor) -> torch.Tensor:
            return rounding.round_nearby(function(x.to(torch.float64)), dtype)

    return (lambda x: rounding.flush(base(rounding.flush(x)))) if ftz else base


def _abs_of_bits(dtype: Dtype) -> tuple[Callable[[int], int], Callable[[torch.Tensor], torch.Tensor]]:
    """(for Python values, for tensors) `abs` as tileiras makes it: it takes the bits of an unsigned integer as signed.

    So abs of a uint8 of 200, the bits of -56, is 56. Documentation says nothing of it; on an H200 it is so.
    """
    half = 1 << (dtype.bits - 1)

    def scalar(v: int) -> int:
        return -v if v < 0 or v >= half else v

    def tile(v: torch.Tensor) -> torch.Tensor:
        # Held in 64 bits: of 64-bit integers the upper half is negative already.
        return torch.where((v < 0) if dtype.bits == 64 else (v < 0) | (v >= half), -v, v)

    return scalar, tile


@implements("unaryop")
def _unary(op: Any, cx: Any) -> Step:
    operand, result, dtype = cx.slot(op.operand), cx.result(op), cx.dtype(op.operand)
    scalar: Callable[[Any], Any]
    tile: Callable[[torch.Tensor], torch.Tensor]
    if dtype.kind == "bool":
        scalar, tile = (operator.not_, torch.logical_not) if op.fn != "abs" else (bool, torch.clone)
    elif dtype.kind == "int":
        named: dict[str, Callable[[Any], Any]] = {
            "neg": operator.neg,
            "invert": operator.invert,
            "bitwise_not": operator.invert,
        }
        of, of_tile = _abs_of_bits(dtype) if op.fn == "abs" else (named[op.fn], named[op.fn])
        scalar, tile = (lambda v: wrap_scalar(of(v), dtype)), (lambda v: wrap(of_tile(v), dtype))
    else:
        tile = _unary_float(op.fn, _mode(op.rounding_mode), op.flush_to_zero, dtype)
        scalar = tile

    def step(R: Registers) -> None:
        x = R[operand]
        R[result] = tile(x) if isinstance(x, torch.Tensor) else scalar(x)

    return step
