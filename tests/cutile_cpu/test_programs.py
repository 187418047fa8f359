"""Random integer programs: cuTile source and a plain-Python meaning of it, from one description.

Programs mix types, wrap-around, divisions, shifts, selections, reductions, scans, loops and branches. The meaning is
computed with Python's unbounded integers, element by element, and shares nothing with the interpreter.
"""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_var3 import cutile_cpu

LANES = 8
TYPES = ["int8", "int16", "int32", "int64", "uint8", "uint32", "uint64"]
SERIAL = itertools.count()

#: (name, source of the expression, meaning); a and b have one type, `one` is the type's 1.
BINARY: list[tuple[str, str, Any]] = [
    ("add", "{a} + {b}", lambda a, b, n: a + b),
    ("sub", "{a} - {b}", lambda a, b, n: a - b),
    ("mul", "{a} * {b}", lambda a, b, n: a * b),
    ("and", "{a} & {b}", lambda a, b, n: a & b),
    ("or", "{a} | {b}", lambda a, b, n: a | b),
    ("xor", "{a} ^ {b}", lambda a, b, n: a ^ b),
    ("min", "ct.minimum({a}, {b})", lambda a, b, n: min(a, b)),
    ("max", "ct.maximum({a}, {b})", lambda a, b, n: max(a, b)),
    ("floordiv", "{a} // ({b} | 1)", lambda a, b, n: a // (b | 1)),
    ("mod", "{a} % ({b} | 1)", lambda a, b, n: a % (b | 1)),
    ("cdiv", "ct.cdiv({a}, {b} | 1)", lambda a, b, n: -(-a // (b | 1))),
    ("shl", "{a} << ({b} & 7)", lambda a, b, n: a << (b & 7)),
    ("shr", "{a} >> ({b} & 7)", lambda a, b, n: a >> (b & 7)),
    ("select", "ct.where({a} < {b}, {a}, -{b})", lambda a, b, n: a if a < b else -b),
]
MEANINGS = {name: meaning for name, _, meaning in BINARY}
SOURCES = {name: source for name, source, _ in BINARY}


def wrap(value: int, kind: str) -> int:
    bits = int(kind.lstrip("uint"))
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "i" and value >> (bits - 1) else value


class Program:
    """Lines of cuTile and the values they have for given inputs."""

    def __init__(self, kinds: list[str], inputs: list[list[int]]) -> None:
        self.lines: list[str] = []
        self.values: list[tuple[str, str, list[int]]] = [
            (f"x{i}", kind, row) for i, (kind, row) in enumerate(zip(kinds, inputs, strict=True))
        ]

    def pick(self, number: int) -> tuple[str, str, list[int]]:
        return self.values[number % len(self.values)]

    def emit(self, kind: str, source: str, value: list[int]) -> str:
        name = f"v{len(self.values)}"
        self.lines.append(f"{name} = {source}")
        self.values.append((name, kind, [wrap(v, kind) for v in value]))
        return name

    def cast(self, value: tuple[str, str, list[int]], kind: str) -> tuple[str, str, list[int]]:
        if value[1] == kind:
            return value
        self.emit(kind, f"ct.astype({value[0]}, ct.{kind})", value[2])
        return self.values[-1]

    # ------------------------------------------------------------ steps
    def binary(self, name: str, first: int, second: int) -> None:
        a = self.pick(first)
        if name == "floordiv" and a[1].startswith("u"):
            name = "cdiv"  # `//` of unsigned integers does not compile
        b = self.cast(self.pick(second), a[1])
        bits = int(a[1].lstrip("uint"))
        value = [MEANINGS[name](x, y, bits) for x, y in zip(a[2], b[2], strict=True)]
        self.emit(a[1], SOURCES[name].format(a=a[0], b=b[0]), value)

    def reduce(self, first: int, largest: bool) -> None:
        name, kind, value = self.pick(first)
        if largest:
            self.emit(kind, f"ct.full(({LANES},), 0, dtype=ct.{kind}) + ct.max({name})", [max(value)] * LANES)
        else:
            self.emit(kind, f"{name} - ct.sum({name})", [v - sum(value) for v in value])

    def scan(self, first: int, reverse: bool) -> None:
        name, kind, value = self.pick(first)
        row = value[::-1] if reverse else value
        out = list(itertools.accumulate(row))
        self.emit(kind, f"ct.cumsum({name}, 0, reverse={reverse})", out[::-1] if reverse else out)

    def loop(self, first: int, second: int, turns: int) -> None:
        a = self.pick(first)
        b = self.cast(self.pick(second), a[1])
        name = f"v{len(self.values)}"
        value = list(a[2])
        for k in range(turns):
            if k % 3 == 1:
                continue
            value = [wrap(v * 3 + y + wrap(k, a[1]), a[1]) for v, y in zip(value, b[2], strict=True)]
        self.lines += [
            f"{name} = {a[0]}",
            f"for k in range({turns} + zero):",
            "    if k % 3 == 1:",
            "        continue",
            f"    {name} = {name} * 3 + {b[0]} + ct.astype(k, ct.{a[1]})",
        ]
        self.values.append((name, a[1], value))

    def branch(self, first: int, second: int) -> None:
        a = self.pick(first)
        b = self.cast(self.pick(second), a[1])
        name = f"v{len(self.values)}"
        even = wrap(sum(b[2]), a[1]) % 2 == 0
        value = [wrap(x + y if even else x ^ 1, a[1]) for x, y in zip(a[2], b[2], strict=True)]
        self.lines += [
            f"if ct.sum({b[0]}) % 2 == 0:",
            f"    {name} = {a[0]} + {b[0]}",
            "else:",
            f"    {name} = {a[0]} ^ 1",
        ]
        self.values.append((name, a[1], value))

    def source(self, inputs: int) -> str:
        xs = ", ".join(f"x{i}_" for i in range(inputs))
        outs = ", ".join(f"out{i}" for i in range(len(self.values)))
        body = [f"x{i} = ct.load(x{i}_, (0,), ({LANES},))" for i in range(inputs)]
        body += self.lines
        body += [f"ct.store(out{i}, (0,), {name})" for i, (name, _, _) in enumerate(self.values)]
        head = f"import cuda.tile as ct\n\n\n@ct.kernel\ndef program({xs}, zero: int, {outs}):\n"
        return head + "".join(f"    {line}\n" for line in body)


NUMBER = st.integers(0, 1000)
STEP = st.one_of(
    st.tuples(st.just("binary"), st.sampled_from(list(MEANINGS)), NUMBER, NUMBER),
    st.tuples(st.just("reduce"), NUMBER, st.booleans()),
    st.tuples(st.just("scan"), NUMBER, st.booleans()),
    st.tuples(st.just("loop"), NUMBER, NUMBER, st.integers(0, 7)),
    st.tuples(st.just("branch"), NUMBER, NUMBER),
)
BITS64 = st.integers(0, (1 << 64) - 1) | st.sampled_from([0, 1, (1 << 64) - 1, 1 << 63, 1 << 31, 127, 128, 255])


@given(
    st.lists(st.sampled_from(TYPES), min_size=2, max_size=3).flatmap(
        lambda kinds: st.tuples(
            st.just(kinds),
            st.lists(st.lists(BITS64, min_size=LANES, max_size=LANES), min_size=len(kinds), max_size=len(kinds)),
            st.lists(STEP, min_size=1, max_size=8),
        )
    )
)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_random_programs(tmp_path: Path, made: tuple[list[str], list[list[int]], list[tuple[Any, ...]]]) -> None:
    kinds, raw, steps = made
    inputs = [[wrap(v, kind) for v in row] for kind, row in zip(kinds, raw, strict=True)]
    program = Program(kinds, inputs)
    for step in steps:
        getattr(program, step[0])(*step[1:])
    file = tmp_path / f"program_{next(SERIAL)}.py"
    file.write_text(program.source(len(kinds)))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tensors = [torch.tensor(row, dtype=getattr(torch, kind)) for kind, row in zip(kinds, inputs, strict=True)]
    outs = [torch.zeros(LANES, dtype=getattr(torch, kind)) for _, kind, _ in program.values]
    cutile_cpu.launch((1,), module.program, (*tensors, 0, *outs))
    for (name, _, want), got in zip(program.values, outs, strict=True):
        assert got.tolist() == want, f"{name} in\n{file.read_text()}"


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=3, max_size=3))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_random_sums_and_products_round_once(values: list[float]) -> None:
    """The rounding of the interpreter against exact fractions, in every mode, at the ends of the range too."""
    from fractions import Fraction

    import cuda.tile as ct

    from mla_var3.cutile_cpu.dtypes import dtype_of
    from mla_var3.cutile_cpu.ops.arith import _float_arith, fma

    a, b, c = (torch.tensor([v]) for v in values)
    f32, largest = dtype_of(ct.float32), torch.finfo(torch.float32).max
    exact = {"add": Fraction(values[0]) + Fraction(values[1]), "mul": Fraction(values[0]) * Fraction(values[1])} if all(
        abs(v) <= largest for v in values
    ) else {}  # fmt: skip
    for name, value in exact.items():
        for mode in ("RN", "RZ", "RM", "RP"):
            got = _float_arith(name, mode, False, False, f32)(a, b).item()
            low, high = (
                torch.nextafter(torch.tensor(got), torch.tensor(d)).item() for d in (float("-inf"), float("inf"))
            )
            if abs(got) == float("inf"):
                assert abs(value) > Fraction(largest)
            elif mode == "RM" or (mode == "RZ" and value > 0):
                assert Fraction(got) <= value and (high == float("inf") or Fraction(high) > value)
            elif mode == "RP" or mode == "RZ":
                assert Fraction(got) >= value and (low == float("-inf") or Fraction(low) < value)
            else:
                near = [abs(Fraction(n) - value) for n in (low, high) if abs(n) != float("inf")]
                assert all(abs(Fraction(got) - value) <= n for n in near)
    if exact:
        whole = exact["mul"] + Fraction(values[2])
        got = fma(a, b, c, f32).item()
        if abs(got) != float("inf"):
            neighbours = (
                torch.nextafter(torch.tensor(got), torch.tensor(d)).item() for d in (float("-inf"), float("inf"))
            )
            near = [abs(Fraction(n) - whole) for n in neighbours if abs(n) != float("inf")]
            assert all(abs(Fraction(got) - whole) <= n for n in near)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e5m3fnu", "float4_e2m1fn"])
def test_small_formats_there_and_back(name: str) -> None:
    """Every code is decoded and encoded to itself; torch agrees on those that it has."""
    import cuda.tile._datatype as datatype

    from mla_var3.cutile_cpu.dtypes import decode, dtype_of
    from mla_var3.cutile_cpu.rounding import encode, round_float64

    dtype = dtype_of(getattr(datatype, name))
    codes = torch.arange(1 << dtype.bits, dtype=torch.int64).to(torch.uint8)
    numbers = decode(codes, dtype)
    finite = torch.isfinite(numbers)
    assert torch.equal(encode(numbers, dtype.format)[finite], codes[finite])
    assert torch.equal(round_float64(numbers, dtype)[finite], codes[finite])
    if hasattr(torch, name):
        theirs = codes.view(getattr(torch, name)).double()
        assert torch.equal(numbers.nan_to_num(-12345.0), theirs.nan_to_num(-12345.0))
