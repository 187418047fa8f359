"""Cases for conversions, shapes, memory, products, reductions, atomics and control flow; see `cases`."""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct
import torch
from cutile_cases import CASES, Case, Const, N, _edges, _seeded, integers, unary_kernel

F8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
TYPES = {
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
    "i8": torch.int8, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8, "u32": torch.uint32,
    "bool": torch.bool,
}  # fmt: skip


# ---------------------------------------------------------------- conversions
def _cast_kernel(to: Any) -> Any:
    @ct.kernel
    def cast(x, out, n: Const):
        i = ct.bid(0)
        ct.store(out, (i,), ct.astype(ct.load(x, (i,), (n,)), to))

    return cast


def _sources(source: torch.dtype) -> torch.Tensor:
    if source.is_floating_point:
        return _seeded(N, dtype=torch.float32, seed=31, low=-100, high=100).to(source)
    return _seeded(N, dtype=torch.bool, seed=32) if source == torch.bool else integers(source, 33)


def _convert(x: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """What a conversion must give: torch's, except that integers come from the truncated number."""
    if to == torch.bool:
        return (
            x.double() != 0
            if x.dtype.is_floating_point
            else x.view(torch.int8 if x.dtype == torch.bool else x.dtype) != 0
        )
    if x.dtype.is_floating_point and not to.is_floating_point:
        return torch.tensor([int(v) & ((1 << 64) - 1) for v in x.double().tolist()], dtype=torch.uint64).view(
            torch.uint8
        ).reshape(N, 8)[:, : to.itemsize].contiguous().view(to).reshape(N)  # fmt: skip
    if not to.is_floating_point:
        bits = torch.iinfo(to).bits
        values = [int(v) & ((1 << bits) - 1) for v in x.tolist()]
        signed = torch.iinfo(to).min < 0
        return torch.tensor([v - (1 << bits) if signed and v >> (bits - 1) else v for v in values], dtype=to)
    return x.double().to(to) if to != torch.float64 else x.double()


for _from, _source in TYPES.items():
    for _to, _target in TYPES.items():
        if _from == _to or (_source.is_floating_point and _to in ("u8", "u32", "bool")):
            continue  # negative floats have no unsigned integer; a float to a bool is not documented

        def _inputs(source: torch.dtype = _source, target: torch.dtype = _target) -> list[Any]:
            return [_sources(source), torch.zeros(N, dtype=target), N // 2]

        def _expected(x: Any, *_: Any, target: torch.dtype = _target) -> torch.Tensor:
            return _convert(x, target)

        # torch rounds float64 and large integers to 16 bits by way of float32.
        _twice = _target in (torch.float16, torch.bfloat16) and _from in ("f64", "i32", "i64", "u32")
        CASES.append(
            Case(
                f"cast-{_from}-{_to}",
                _cast_kernel(_target),
                (2,),
                _inputs,
                (1,),
                _expected,
                ulps=1.0 if _twice else 0.0,
            )
        )

for _short, _dtype in F8.items():

    def _inputs(dtype: torch.dtype = _dtype) -> list[Any]:
        return [_seeded(N, seed=35, low=-300, high=300), torch.zeros(N, dtype=dtype), N // 2]

    def _expected(x: Any, *_: Any, dtype: torch.dtype = _dtype) -> torch.Tensor:
        return x.to(dtype)

    CASES.append(Case(f"cast-f32-{_short}", _cast_kernel(_dtype), (2,), _inputs, (1,), _expected))

    def _back(dtype: torch.dtype = _dtype) -> list[Any]:
        return [torch.arange(N, dtype=torch.uint8).mul(3).view(dtype), torch.zeros(N), N // 2]

    CASES.append(
        Case(f"cast-{_short}-f32", _cast_kernel(torch.float32), (2,), _back, (1,), lambda x, *_: x.to(torch.float32))
    )


@ct.kernel
def _tf32_kernel(x, out, n: Const):
    i = ct.bid(0)
    ct.store(out, (i,), ct.astype(ct.astype(ct.load(x, (i,), (n,)), ct.tfloat32), ct.float32))


def _to_tf32(x: torch.Tensor) -> torch.Tensor:
    bits = x.view(torch.int32)
    odd = (bits >> 13) & 1
    return ((bits + 0xFFF + odd) & ~0x1FFF).view(torch.float32)


CASES.append(
    Case(
        "cast-tf32",
        _tf32_kernel,
        (2,),
        lambda: [_seeded(N, seed=36), torch.zeros(N), N // 2],
        (1,),
        lambda x, *_: _to_tf32(x),
    )
)


def _as_int32(t: Any) -> Any:
    return ct.bitcast(t, ct.int32)


CASES.append(
    Case(
        "bitcast",
        unary_kernel(_as_int32),
        (2,),
        lambda: [_edges(37), torch.zeros(N, dtype=torch.int32), N // 2],
        (1,),
        lambda x, *_: x.view(torch.int32),
    )
)


# ---------------------------------------------------------------- shapes
@ct.kernel
def _shapes_kernel(x, out):
    t = ct.load(x, (0, 0), (8, 4))
    t = ct.transpose(t)  # (4, 8)
    t = ct.reshape(t, (2, 2, 8))
    t = ct.permute(t, (2, 0, 1))  # (8, 2, 2)
    u = ct.cat((t, t + 100), axis=1)  # (8, 4, 2)
    u = ct.extract(u, (1, 0, 0), (4, 4, 2))
    u = ct.insert(u, (3, 0, 0), ct.full((1, 4, 2), -1, dtype=ct.int32))
    ct.store(out, (0, 0, 0), u + ct.arange(2, dtype=ct.int32)[None, None, :] * 1000)


def _shapes(x: torch.Tensor, *_: Any) -> torch.Tensor:
    t = x.T.reshape(2, 2, 8).permute(2, 0, 1)
    u = torch.cat((t, t + 100), dim=1)[4:8].clone()
    u[3] = -1
    return u + torch.arange(2, dtype=torch.int32) * 1000


CASES.append(
    Case("shapes", _shapes_kernel, (1,), lambda: [torch.arange(32, dtype=torch.int32).reshape(8, 4),
         torch.zeros((4, 4, 2), dtype=torch.int32)], (1,), _shapes)
)  # fmt: skip


# ---------------------------------------------------------------- memory
@ct.kernel
def _ragged_kernel(x, out, tm: Const, tn: Const):
    t = ct.load(x, (ct.bid(0), ct.bid(1)), (tm, tn), padding_mode=ct.PaddingMode.ZERO)
    ct.store(out, (ct.bid(1), ct.bid(0)), t + 1, order=(1, 0))


# out is written transposed: tile axis d of the store runs along out's axis order[d].
CASES.append(
    Case("ragged-tiles", _ragged_kernel, (3, 2), lambda: [_seeded(20, 13, seed=40), torch.zeros(20, 13), 8, 8], (1,))
)


@ct.kernel
def _order_kernel(x, out, tm: Const, tn: Const):
    t = ct.load(x, (ct.bid(1), ct.bid(0)), (tn, tm), order=(1, 0), padding_mode=ct.PaddingMode.NEG_INF)
    ct.store(out, (ct.bid(1), ct.bid(0)), t)


CASES.append(
    Case("transposed-load", _order_kernel, (3, 2), lambda: [_seeded(20, 13, seed=41), torch.zeros(13, 20), 8, 8], (1,),
         lambda x, *_: x.T.contiguous())
)  # fmt: skip


@ct.kernel
def _strided_kernel(x, out):
    view = x.tiled_view((8,), traversal_steps=(3,), padding_mode=ct.PaddingMode.ZERO)
    total = ct.zeros((8,), dtype=ct.float32)
    for i in range(view.num_tiles(0)):
        total += view.load((i,)) * (i + 1)
    ct.store(out, (0,), total)


def _strided(x: torch.Tensor, *_: Any) -> torch.Tensor:
    padded = torch.cat((x, torch.zeros(16)))
    total = torch.zeros(8)
    for i in range(math.ceil(len(x) / 3)):
        total = torch.addcmul(
            total.double(), padded[3 * i : 3 * i + 8].double(), torch.tensor(i + 1.0).double()
        ).float()
    return total


CASES.append(
    Case("overlapping-tiles", _strided_kernel, (1,), lambda: [_seeded(20, seed=42), torch.zeros(8)], (1,), _strided)
)


@ct.kernel
def _gather_kernel(x, index, out, picked):
    rows = ct.load(index, (0,), (8,))
    columns = ct.arange(16, dtype=ct.int32)
    t = ct.gather(x, (rows[:, None], columns[None, :]), padding_value=-5.0)
    ct.store(out, (0, 0), t)
    ct.scatter(picked, (rows[:, None], columns[None, :]), t, mask=(columns < 10)[None, :])


def _gather_inputs() -> list[Any]:
    index = torch.tensor([3, 0, 9, 11, -1, 5, 12, 7], dtype=torch.int32)  # -1, 12 are outside
    return [_seeded(12, 13, seed=43), index, torch.zeros(8, 16), torch.zeros(12, 13)]


def _gather(x: torch.Tensor, index: torch.Tensor, out: torch.Tensor, picked: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out, picked = torch.full((8, 16), -5.0), picked.clone()
    for i, row in enumerate(index.tolist()):
        if 0 <= row < 12:
            out[i, :13] = x[row]
            picked[row, :10] = x[row, :10]
    return out, picked


CASES.append(Case("gather-scatter", _gather_kernel, (1,), _gather_inputs, (2, 3), _gather))


@ct.kernel
def _advanced_kernel(x, index, out):
    rows = ct.load(index, (0,), (8,))
    t = ct.load_advanced_indexing(x, (rows, ct.Slice(4, 8)), padding_mode=ct.PaddingMode.ZERO)
    ct.store_advanced_indexing(out, (rows, ct.Slice(4, 8)), t * 2)


def _advanced(x: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    rows = index[(index >= 0) & (index < 16)].long()
    out[rows, 4:12] = x[rows, 4:12] * 2
    return out


CASES.append(
    Case("advanced-indexing", _advanced_kernel, (1,), lambda: [_seeded(16, 16, seed=44),
         torch.tensor([3, 0, 9, 11, 14, 5, 100, 7], dtype=torch.int32), torch.zeros(16, 16)], (2,), _advanced)
)  # fmt: skip


@ct.kernel
def _raw_kernel(x, out, n: int):
    memory = x.get_raw_memory()
    lane = ct.arange(32, dtype=ct.int32)
    t = memory.load_offset(lane * 2, mask=lane * 2 < n, padding_value=-1)
    ct.store(out, (0, 0), ct.reshape(t, (4, 8)))


def _raw(x: torch.Tensor, out: torch.Tensor, n: int) -> torch.Tensor:
    result = torch.full((32,), -1, dtype=torch.int32)
    result[: (n + 1) // 2] = x[:n:2]
    return result.reshape(4, 8)


CASES.append(
    Case("raw-memory", _raw_kernel, (1,), lambda: [torch.arange(41, dtype=torch.int32) * 7,
         torch.zeros(4, 8, dtype=torch.int32), 41], (1,), _raw)
)  # fmt: skip


@ct.kernel
def _foreign_kernel(x, out):
    ct.store(ct.Array.from_foreign(out.foreign_pointer, (4, 8), (8, 1)), (0, 0), ct.load(x, (0, 0), (4, 8)))


if hasattr(ct.Array, "from_foreign"):  # since cuda-tile 1.7
    CASES.append(
        Case("foreign-pointer", _foreign_kernel, (1,), lambda: [_seeded(4, 8, seed=51), torch.zeros(32)], (1,),
             lambda x, out: x.reshape(32))
    )  # fmt: skip


@ct.kernel
def _list_kernel(arrays, out, n: Const):
    total = ct.zeros((n,), dtype=ct.float32)
    for i in range(len(arrays)):
        total += ct.load(arrays[i], (ct.bid(0),), (n,))
    ct.store(out, (ct.bid(0),), total)


CASES.append(
    Case("list-of-arrays", _list_kernel, (2,),
         lambda: [[_seeded(N, seed=s) for s in (45, 46, 47)], torch.zeros(N), N // 2], (1,),
         lambda xs, *_: xs[0] + xs[1] + xs[2])
)  # fmt: skip


# ---------------------------------------------------------------- products
@ct.kernel
def _matmul_kernel(a, b, out, tm: Const, tn: Const, tk: Const, ACC: ct.Constant[int]):
    kind = ct.float32
    if ACC == 1:
        kind = ct.int32
    if ACC == 2:
        kind = ct.float64
    if ACC == 3:
        kind = ct.float16
    acc = ct.zeros((tm, tn), dtype=kind)
    for k in range(ct.num_tiles(a, 1, (tm, tk))):
        x = ct.load(a, (ct.bid(0), k), (tm, tk), padding_mode=ct.PaddingMode.ZERO)
        y = ct.load(b, (k, ct.bid(1)), (tk, tn), padding_mode=ct.PaddingMode.ZERO)
        acc = ct.mma(x, y, acc)
    ct.store(out, (ct.bid(0), ct.bid(1)), acc)


_PRODUCTS = {
    "f16": (torch.float16, torch.float32, 0), "bf16": (torch.bfloat16, torch.float32, 0),
    "f32": (torch.float32, torch.float32, 0), "f64": (torch.float64, torch.float64, 2),
    "f16-f16": (torch.float16, torch.float16, 3), "i8": (torch.int8, torch.int32, 1),
    "u8": (torch.uint8, torch.int32, 1),
    "e4m3": (torch.float8_e4m3fn, torch.float32, 0), "e5m2": (torch.float8_e5m2, torch.float32, 0),
}  # fmt: skip
for _name, (_in, _out, _acc) in _PRODUCTS.items():

    def _inputs(dtype: torch.dtype = _in, out: torch.dtype = _out, acc: int = _acc) -> list[Any]:
        if dtype in (torch.int8, torch.uint8):
            a, b = integers(dtype, 50, 40 * 70).reshape(40, 70), integers(dtype, 51, 70 * 24).reshape(70, 24)
        else:
            a, b = _seeded(40, 70, seed=50).to(dtype), _seeded(70, 24, seed=51).to(dtype)
        return [a, b, torch.zeros((40, 24), dtype=out), 32, 16, 32, acc]

    def _expected(a: Any, b: Any, out: Any, *_: Any) -> torch.Tensor:
        return (a.double() @ b.double()).to(out.dtype)

    # 70 products of at most 9, summed in float32 (or rounded to float16 three times).
    _absolute = {torch.float32: 3e-4, torch.float64: 1e-11, torch.float16: 0.6, torch.int32: 0.0}[_out]
    CASES.append(Case(f"mma-{_name}", _matmul_kernel, (2, 2), _inputs, (2,), _expected, absolute=_absolute))


@ct.kernel
def _batched_kernel(a, b, out):
    x, y = ct.load(a, (0, 0, 0), (2, 16, 8)), ct.load(b, (0, 0), (8, 16))
    ct.store(out, (0, 0, 0), ct.matmul(x, y))


CASES.append(
    Case("matmul-batched", _batched_kernel, (1,), lambda: [_seeded(2, 16, 8, seed=52), _seeded(8, 16, seed=53),
         torch.zeros(2, 16, 16)], (2,), lambda a, b, *_: a @ b, absolute=1e-4)
)  # fmt: skip


# ---------------------------------------------------------------- reductions and scans
def _reduce_kernel(fn: Any, axis: int) -> Any:
    @ct.kernel
    def reduce(x, out):
        t = fn(ct.load(x, (0, 0), (16, 32)), axis)
        ct.store(out, (0,), t)

    return reduce


def _scan_kernel(fn: Any, axis: int, reverse: bool) -> Any:
    @ct.kernel
    def scan(x, out):
        ct.store(out, (0, 0), fn(ct.load(x, (0, 0), (16, 32)), axis, reverse=reverse))

    return scan


_REDUCTIONS: dict[str, tuple[Any, Any]] = {
    "sum": (ct.sum, lambda x, d: x.sum(d)), "max": (ct.max, lambda x, d: x.amax(d)),
    "min": (ct.min, lambda x, d: x.amin(d)), "argmax": (ct.argmax, lambda x, d: x.argmax(d)),
    "argmin": (ct.argmin, lambda x, d: x.argmin(d)), "prod": (ct.prod, lambda x, d: x.prod(d)),
}  # fmt: skip
for _name, (_fn, _of) in _REDUCTIONS.items():
    for _axis, _length in ((0, 32), (1, 16)):
        for _short in ("f32", "i32"):
            _result = torch.int32 if _name.startswith("arg") or _short == "i32" else torch.float32

            def _inputs(length: int = _length, short: str = _short, result: torch.dtype = _result) -> list[Any]:
                x = _seeded(16, 32, seed=60, dtype=TYPES[short], low=-2, high=2) if short == "f32" else (
                    torch.randperm(512, generator=torch.Generator().manual_seed(61)).int().reshape(16, 32) - 200
                )  # fmt: skip
                return [x, torch.zeros(length, dtype=result)]

            def _expected(x: Any, out: Any, of: Any = _of, axis: int = _axis) -> torch.Tensor:
                return of(x.double() if x.is_floating_point() else x.long(), axis).to(out.dtype)

            _open = _short == "f32" and _name in ("sum", "prod")
            CASES.append(
                Case(f"{_name}-axis{_axis}-{_short}", _reduce_kernel(_fn, _axis), (1,), _inputs, (1,), _expected,
                     ulps=16 if _open else 0, absolute=1e-5 if _open else 0)
            )  # fmt: skip

for _name, _fn, _of in (("cumsum", ct.cumsum, torch.cumsum), ("cumprod", ct.cumprod, torch.cumprod)):
    for _axis in (0, 1):
        for _reverse in (False, True):

            def _expected(x: Any, *_: Any, of: Any = _of, axis: int = _axis, reverse: bool = _reverse) -> torch.Tensor:
                x = x.flip(axis) if reverse else x
                out = of(x.long(), axis).to(torch.int32)
                return out.flip(axis) if reverse else out

            CASES.append(
                Case(f"{_name}-axis{_axis}-{'down' if _reverse else 'up'}", _scan_kernel(_fn, _axis, _reverse), (1,),
                     lambda: [_seeded(16, 32, dtype=torch.int32, seed=62), torch.zeros((16, 32), dtype=torch.int32)],
                     (1,), _expected)
            )  # fmt: skip


def _softmax_pair(m1: Any, s1: Any, m2: Any, s2: Any) -> Any:
    m = max(m1, m2)
    return m, s1 * ct.exp2(m1 - m) + s2 * ct.exp2(m2 - m)


@ct.kernel
def _pair_kernel(x, top, total):
    t = ct.load(x, (0, 0), (16, 32))
    m, s = ct.reduce((t, ct.ones((16, 32), dtype=ct.float32)), 1, _softmax_pair, (float("-inf"), 0.0))
    ct.store(top, (0,), m)
    ct.store(total, (0,), s)


def _pair(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    m = x.amax(1)
    return m, torch.exp2(x.double() - m[:, None]).sum(1).float()


CASES.append(
    Case("reduce-pairs", _pair_kernel, (1,),
         lambda: [_seeded(16, 32, seed=63), torch.zeros(16), torch.zeros(16)], (1, 2), _pair, ulps=16)
)  # fmt: skip


def _linear(a1: Any, b1: Any, a2: Any, b2: Any) -> Any:
    return a1 * a2, b1 * a2 + b2  # composition of x -> a·x + b: associative, not commutative


@ct.kernel
def _recurrence_kernel(a, b, out):
    _scales, states = ct.scan((ct.load(a, (0,), (N,)), ct.load(b, (0,), (N,))), 0, _linear, (1, 0))
    ct.store(out, (0,), states)


def _recurrence(a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
    state, out = 0, []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        state = (state * x + y + (1 << 31)) % (1 << 32) - (1 << 31)
        out.append(state)
    return torch.tensor(out, dtype=torch.int32)


CASES.append(
    Case("scan-recurrence", _recurrence_kernel, (1,), lambda: [_seeded(N, dtype=torch.int32, seed=64),
         _seeded(N, dtype=torch.int32, seed=65), torch.zeros(N, dtype=torch.int32)], (2,), _recurrence)
)  # fmt: skip


# ---------------------------------------------------------------- atomics
def _atomic_kernel(fn: Any) -> Any:
    @ct.kernel
    def atomic(x, index, update, n: Const):
        i = ct.load(index, (ct.bid(0),), (n,))
        fn(x, i, ct.load(update, (ct.bid(0),), (n,)))

    return atomic


_ATOMICS: dict[str, tuple[Any, Any]] = {
    "add": (ct.atomic_add, lambda a, b: a + b), "max": (ct.atomic_max, max), "min": (ct.atomic_min, min),
    "and": (ct.atomic_and, lambda a, b: a & b), "or": (ct.atomic_or, lambda a, b: a | b),
    "xor": (ct.atomic_xor, lambda a, b: a ^ b),
}  # fmt: skip
for _name, (_fn, _of) in _ATOMICS.items():
    for _dtype in (torch.int32, torch.uint32, torch.int64, torch.uint64):

        def _inputs(dtype: torch.dtype = _dtype) -> list[Any]:
            index = _seeded(N, dtype=torch.int32, seed=70, low=0, high=9)  # many on few; 8 and 9 are outside
            return [integers(dtype, 71, 8), index, integers(dtype, 72), N // 2]

        def _expected(x: Any, index: Any, update: Any, *_: Any, of: Any = _of) -> torch.Tensor:
            from cutile_cases import exact

            values = x.tolist()
            for i, u in zip(index.tolist(), update.tolist(), strict=True):
                if i < 8:
                    values[i] = exact(x.dtype, of(values[i], u))
            return torch.tensor(values, dtype=x.dtype)

        _short = str(_dtype).removeprefix("torch.")
        CASES.append(Case(f"atomic-{_name}-{_short}", _atomic_kernel(_fn), (2,), _inputs, (0,), _expected))


@ct.kernel
def _ticket_kernel(counter, seen, total):
    ticket = ct.atomic_add(counter, 0, 1)
    ct.scatter(seen, ticket, ct.bid(0) * 0 + 1)
    old = ct.atomic_cas(total, 0, 0, 77)
    ct.atomic_add(total, 1, ct.where(old == 0, 1, 0))


CASES.append(
    Case("atomic-tickets", _ticket_kernel, (16,), lambda: [torch.zeros(1, dtype=torch.int32),
         torch.zeros(16, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)], (0, 1, 2),
         lambda *_: (torch.tensor([16], dtype=torch.int32), torch.ones(16, dtype=torch.int32),
                     torch.tensor([77, 1], dtype=torch.int32)))
)  # fmt: skip


# ---------------------------------------------------------------- control flow
@ct.kernel
def _collatz_kernel(x, out):
    n = ct.gather(x, ct.bid(0))
    steps = 0
    while n != 1:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    ct.scatter(out, ct.bid(0), steps)


def _collatz(x: torch.Tensor, *_: Any) -> torch.Tensor:
    out = []
    for n in x.tolist():
        steps = 0
        while n != 1:
            n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
        out.append(steps)
    return torch.tensor(out, dtype=torch.int32)


CASES.append(
    Case("while-loop", _collatz_kernel, (20,), lambda: [torch.arange(1, 21, dtype=torch.int32),
         torch.zeros(20, dtype=torch.int32)], (1,), _collatz)
)  # fmt: skip


@ct.kernel
def _early_kernel(x, out, limit: int):
    i = ct.bid(0)
    if i % 3 == 2:
        return
    total = 0
    for k in range(i, 40, 2):
        if k == 5:
            continue
        if total > limit:
            break
        total += k
    best = (total, i)
    for k in range(3):
        best = (max(best[0], k), best[1] + 1)
    ct.scatter(out, i, best[0] * 100 + best[1])


def _early(x: torch.Tensor, out: torch.Tensor, limit: int) -> torch.Tensor:
    out = out.clone()
    for i in range(12):
        if i % 3 == 2:
            continue
        total = 0
        for k in range(i, 40, 2):
            if k == 5:
                continue
            if total > limit:
                break
            total += k
        out[i] = max(total, 2) * 100 + i + 3
    return out


CASES.append(
    Case(
        "early-exits",
        _early_kernel,
        (12,),
        lambda: [torch.zeros(1), torch.zeros(12, dtype=torch.int32), 60],
        (1,),
        _early,
    )
)
