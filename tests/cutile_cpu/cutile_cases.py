"""Small kernels, one for each thing that cuTile can do, with inputs and what they must give.

The tests of the interpreter run them against torch; the GPU tests run the same kernels with the same inputs through
tileiras and through the interpreter and compare the two. `ulps` is what the comparison allows: 0 means the same bits,
otherwise units in the last place of the output's type (results of elementary functions, of sums whose bracketing is
open), on top of `absolute`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch

Const = ct.Constant[int]
N = 64


@dataclass(frozen=True)
class Case:
    """inputs(): the launch's arguments; outputs: which of them the kernel writes. expected(arguments as they were):
    what the outputs must be, or None where only the GPU can say. refused: tileiras refuses it, and so does the
    interpreter."""

    name: str
    kernel: Any
    grid: tuple[int, ...]
    inputs: Callable[[], list[Any]]
    outputs: tuple[int, ...]
    expected: Callable[..., Any] | None = None
    ulps: float = 0.0
    absolute: float = 0.0
    refused: bool = False


CASES: list[Case] = []


def _seeded(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, low: float = -3.0, high: float = 3.0
) -> Any:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=generator) * (high - low) + low).to(dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    return torch.randint(int(low), int(high) + 1, shape, generator=generator).to(dtype)


#: Floats at the ends of the range and between them.
EDGES = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    2.5,
    -2.5,
    1e-40,
    -1e-40,
    3.4e38,
    -3.4e38,
    math.inf,
    -math.inf,
    math.nan,
    1e-38,
]


def _edges(seed: int) -> torch.Tensor:
    values = torch.tensor(EDGES * (N // len(EDGES)), dtype=torch.float32)
    return values[torch.randperm(N, generator=torch.Generator().manual_seed(seed))]


INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
UNSIGNED = INTEGERS[4:]


def integers(dtype: torch.dtype, seed: int, n: int = N) -> torch.Tensor:
    """Numbers of all sizes of an integer type, with both ends of its range."""
    bits = torch.iinfo(dtype).bits
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(-(1 << 63), (1 << 63) - 1, (n,), generator=generator, dtype=torch.int64)
    raw = raw >> torch.randint(0, 60, (n,), generator=generator)
    raw[:4] = torch.tensor([0, -1, 1, -(1 << 63)])
    raw[4] = (1 << (bits - 1)) - 1
    return raw.view(torch.uint8).reshape(n, 8)[:, : bits // 8].contiguous().view(dtype).reshape(n)


def exact(dtype: torch.dtype, value: int) -> int:
    """An integer modulo the type's size."""
    info = torch.iinfo(dtype)
    value &= (1 << info.bits) - 1
    return value - (1 << info.bits) if info.min < 0 and value >> (info.bits - 1) else value


def _by_python(dtype: torch.dtype, fn: Callable[..., Any], *tensors: torch.Tensor) -> torch.Tensor:
    out = [exact(dtype, int(fn(*values))) for values in zip(*(t.tolist() for t in tensors), strict=True)]
    return torch.tensor(out, dtype=dtype)


# ---------------------------------------------------------------- one and two operands
def unary_kernel(fn: Callable[..., Any]) -> Any:
    @ct.kernel
    def unary(x, out, n: Const):
        ct.store(out, (ct.bid(0),), fn(ct.load(x, (ct.bid(0),), (n,))))

    return unary


def binary_kernel(fn: Callable[..., Any]) -> Any:
    @ct.kernel
    def binary(x, y, out, n: Const):
        i = ct.bid(0)
        ct.store(out, (i,), fn(ct.load(x, (i,), (n,)), ct.load(y, (i,), (n,))))

    return binary


def scalar_kernel(fn: Callable[..., Any]) -> Any:
    """The same with scalars, which the interpreter holds in another way."""

    @ct.kernel
    def scalar(x, y, out, n: Const):
        i = ct.bid(0)
        ct.scatter(out, i, fn(ct.gather(x, i), ct.gather(y, i)))

    return scalar


def _add(case: Case) -> None:
    CASES.append(case)


def _unary(name: str, fn: Any, of: Any, make: Any, dtype: torch.dtype, ulps: float = 0.0, **more: Any) -> None:
    def inputs() -> list[Any]:
        x = make()
        return [x, torch.zeros(N, dtype=dtype), N // 2]

    _add(Case(name, unary_kernel(fn), (2,), inputs, (1,), lambda x, *_: of(x), ulps, **more))


_FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
_FUNCTIONS: dict[str, tuple[Any, Any, float, float]] = {
    "exp": (ct.exp, torch.exp, -8, 8),
    "exp2": (ct.exp2, torch.exp2, -8, 8),
    "log": (ct.log, torch.log, 0.01, 9),
    "log2": (ct.log2, torch.log2, 0.01, 9),
    "sin": (ct.sin, torch.sin, -3, 3),
    "cos": (ct.cos, torch.cos, -3, 3),
    "tan": (ct.tan, torch.tan, -1, 1),
    "sinh": (ct.sinh, torch.sinh, -3, 3),
    "cosh": (ct.cosh, torch.cosh, -3, 3),
    "tanh": (ct.tanh, torch.tanh, -3, 3),
    "sqrt": (ct.sqrt, torch.sqrt, 0.01, 9),
    "rsqrt": (ct.rsqrt, torch.rsqrt, 0.01, 9),
}
for _name, (_fn, _of, _low, _high) in _FUNCTIONS.items():
    for _short, _dtype in _FLOATS.items():
        if _short == "f64" and _name not in ("exp", "sqrt", "log2"):
            continue

        def _make(low: float = _low, high: float = _high, dtype: torch.dtype = _dtype) -> torch.Tensor:
            return _seeded(N, dtype=dtype, seed=1, low=low, high=high)

        def _reference(x: torch.Tensor, of: Any = _of) -> torch.Tensor:
            return of(x.double()).to(x.dtype)

        # sin, cos and the like of the GPU: a few ulps, and 1e-6 near their zeros.
        _unary(f"{_name}-{_short}", _fn, _reference, _make, _dtype, 0 if _name == "sqrt" else 6, absolute=1e-6)

for _name, _fn, _of in (
    ("floor", ct.floor, torch.floor),
    ("ceil", ct.ceil, torch.ceil),
    ("neg", operator.neg, torch.neg),
):
    _unary(f"{_name}-edges", _fn, _of, lambda: _edges(2), torch.float32)
_unary("abs-edges", abs, torch.abs, lambda: _edges(2), torch.float32)
_unary("isnan-edges", ct.isnan, torch.isnan, lambda: _edges(2), torch.bool)

for _dtype in INTEGERS:
    _short = str(_dtype).removeprefix("torch.")

    def _abs(x: int, dtype: torch.dtype = _dtype) -> int:
        """Of the bits as a signed number, also for unsigned types: what tileiras makes of it."""
        return 2 ** torch.iinfo(dtype).bits - x if x > torch.iinfo(_signed(dtype)).max else abs(x)

    for _name, _fn, _of in (
        ("abs", abs, _abs),
        ("neg", operator.neg, operator.neg),
        ("not", operator.invert, operator.invert),
    ):

        def _expected(x: torch.Tensor, of: Any = _of) -> torch.Tensor:
            return _by_python(x.dtype, of, x)

        _unary(f"{_name}-{_short}", _fn, _expected, lambda dtype=_dtype: integers(dtype, 3), _dtype)


def _floor_div(a: int, b: int) -> int:
    return a // b


def _c_shift(a: int, b: int) -> int:
    return a << (b & 7)


_INT_BINARY: dict[str, tuple[Any, Any]] = {
    "add": (operator.add, operator.add),
    "sub": (operator.sub, operator.sub),
    "mul": (operator.mul, operator.mul),
    "floordiv": (operator.floordiv, _floor_div),
    "mod": (operator.mod, operator.mod),
    "cdiv": (ct.cdiv, lambda a, b: -(-a // b)),
    "min": (ct.minimum, min),
    "max": (ct.maximum, max),
    "and": (operator.and_, operator.and_),
    "or": (operator.or_, operator.or_),
    "xor": (operator.xor, operator.xor),
    "lt": (operator.lt, operator.lt),
    "ge": (operator.ge, operator.ge),
    "eq": (operator.eq, operator.eq),
}
for _dtype in INTEGERS:
    _short = str(_dtype).removeprefix("torch.")
    for _name, (_fn, _of) in _INT_BINARY.items():
        _result = torch.bool if _name in ("lt", "ge", "eq") else _dtype

        def _inputs(dtype: torch.dtype = _dtype, name: str = _name, result: torch.dtype = _result) -> list[Any]:
            y = integers(dtype, 5)
            if name in ("floordiv", "mod", "cdiv"):
                y = torch.where(y.view(_signed(dtype)) == 0, torch.tensor(3).to(_signed(dtype)), y.view(_signed(dtype)))
                y = y.view(dtype)
            return [integers(dtype, 4), y, torch.zeros(N, dtype=result), N // 2]

        def _expected(x: Any, y: Any, *_: Any, of: Any = _of, result: torch.dtype = _result) -> torch.Tensor:
            if result == torch.bool:
                return torch.tensor([of(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)])
            return _by_python(x.dtype, of, x, y)

        _refused = _name == "floordiv" and _dtype in UNSIGNED
        _add(Case(f"{_name}-{_short}", binary_kernel(_fn), (2,), _inputs, (2,), _expected, refused=_refused))
        _add(Case(f"{_name}-scalar-{_short}", scalar_kernel(_fn), (N,), _inputs, (2,), _expected, refused=_refused))


def _signed(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


for _dtype in INTEGERS:
    _short = str(_dtype).removeprefix("torch.")
    _bits = torch.iinfo(_dtype).bits
    for _name, _fn, _of in (("shl", operator.lshift, operator.lshift), ("shr", operator.rshift, operator.rshift)):

        def _inputs(dtype: torch.dtype = _dtype, bits: int = _bits) -> list[Any]:
            return [integers(dtype, 6), (torch.arange(N) % bits).to(dtype), torch.zeros(N, dtype=dtype), N // 2]

        def _expected(x: Any, y: Any, *_: Any, of: Any = _of) -> torch.Tensor:
            return _by_python(x.dtype, of, x, y)

        _add(Case(f"{_name}-{_short}", binary_kernel(_fn), (2,), _inputs, (2,), _expected))
        _add(Case(f"{_name}-scalar-{_short}", scalar_kernel(_fn), (N,), _inputs, (2,), _expected))


def _least(a: Any, b: Any) -> Any:
    return ct.minimum(a, b, propagate_nan=True)


_FLOAT_BINARY: dict[str, tuple[Any, Any]] = {
    "add": (operator.add, torch.add),
    "sub": (operator.sub, torch.sub),
    "mul": (operator.mul, torch.mul),
    "truediv": (operator.truediv, torch.div),
    "lt": (operator.lt, torch.lt),
    "ne": (operator.ne, torch.ne),
    "min": (ct.minimum, torch.fmin),
    "max": (ct.maximum, torch.fmax),
    "min-nan": (_least, torch.minimum),
}
for _name, (_fn, _of) in _FLOAT_BINARY.items():
    for _short, _dtype in _FLOATS.items():
        _result = torch.bool if _name in ("lt", "ne") else _dtype

        def _inputs(dtype: torch.dtype = _dtype, result: torch.dtype = _result) -> list[Any]:
            # -0 against +0 is for its own test: torch takes either as the smaller one.
            x, y = (torch.where(t == 0, torch.zeros_like(t), t) for t in (_edges(7).to(dtype), _edges(8).to(dtype)))
            return [x, y, torch.zeros(N, dtype=result), N // 2]

        def _expected(x: Any, y: Any, *_: Any, of: Any = _of) -> torch.Tensor:
            return of(x, y)

        _add(Case(f"{_name}-{_short}", binary_kernel(_fn), (2,), _inputs, (2,), _expected))

for _name, _fn, _of in (("pow", ct.pow, torch.pow), ("atan2", ct.atan2, torch.atan2)):

    def _inputs() -> list[Any]:
        return [_seeded(N, seed=9, low=0.1, high=4), _seeded(N, seed=10), torch.zeros(N), N // 2]

    def _expected(x: Any, y: Any, *_: Any, of: Any = _of) -> torch.Tensor:
        return of(x.double(), y.double()).float()

    _add(Case(f"{_name}-f32", binary_kernel(_fn), (2,), _inputs, (2,), _expected, ulps=16))


# ---------------------------------------------------------------- rounding modes and flushing
def rounding_kernel(fn: Any, mode: Any) -> Any:
    @ct.kernel
    def rounded(x, y, out, n: Const):
        i = ct.bid(0)
        ct.store(out, (i,), fn(ct.load(x, (i,), (n,)), ct.load(y, (i,), (n,)), rounding_mode=mode))

    return rounded


def _spread(seed: int, dtype: torch.dtype) -> torch.Tensor:
    reach = 4 if dtype == torch.float16 else 9
    x = _seeded(N, seed=seed, low=0.5, high=2.0) * 2.0 ** _seeded(N, seed=seed + 1, low=-reach, high=reach).round()
    return (x * torch.sign(_seeded(N, seed=seed + 2))).to(dtype)


for _mode in (ct.RoundingMode.RN, ct.RoundingMode.RZ, ct.RoundingMode.RM, ct.RoundingMode.RP):
    for _name, _fn in (("add", ct.add), ("sub", ct.sub), ("mul", ct.mul), ("truediv", ct.truediv)):
        for _short, _dtype in _FLOATS.items():

            def _inputs(dtype: torch.dtype = _dtype) -> list[Any]:
                return [_spread(11, dtype), _spread(14, dtype), torch.zeros(N, dtype=dtype), N // 2]

            _add(Case(f"{_name}-{_mode.name}-{_short}", rounding_kernel(_fn, _mode), (2,), _inputs, (2,)))


def flushing_kernel(fn: Any) -> Any:
    @ct.kernel
    def flushed(x, y, out, n: Const):
        i = ct.bid(0)
        ct.store(out, (i,), fn(ct.load(x, (i,), (n,)), ct.load(y, (i,), (n,)), flush_to_zero=True))

    return flushed


for _name, _fn in (("add", ct.add), ("mul", ct.mul), ("truediv", ct.truediv), ("max", ct.maximum)):

    def _inputs() -> list[Any]:
        tiny = torch.tensor([1e-39, -1e-39, 1e-38, -1.2e-38, 3e-38, 1.0, 1e-20, -1e-20] * 8)
        return [tiny, tiny.roll(3), torch.zeros(N), N // 2]

    _add(Case(f"{_name}-flush", flushing_kernel(_fn), (2,), _inputs, (2,)))


@ct.kernel
def _fma_kernel(x, y, z, out, n: Const):
    i = ct.bid(0)
    a, b, c = ct.load(x, (i,), (n,)), ct.load(y, (i,), (n,)), ct.load(z, (i,), (n,))
    ct.store(out, (i,), a * b + c)


def _fma_inputs(dtype: torch.dtype) -> list[Any]:
    x, y = _spread(21, dtype), _spread(24, dtype)
    # The sum nearly cancels: rounding the product first would show.
    return [x, y, -(x * y) * (1 + 2.0**-7), torch.zeros(N, dtype=dtype), N // 2]


for _short, _dtype in _FLOATS.items():
    _add(Case(f"fma-{_short}", _fma_kernel, (2,), lambda dtype=_dtype: _fma_inputs(dtype), (3,)))
