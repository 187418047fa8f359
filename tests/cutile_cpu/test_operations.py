"""Every case of `cutile_cases` through the interpreter, against torch or exact arithmetic."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import cuda.tile as ct
import cutile_cases_more  # noqa: F401 (adds its cases)
import pytest
import torch
from cutile_cases import CASES, Case
from cutile_compare import difference, to_list

from mla_var3 import cutile_cpu

NAMED = {case.name: case for case in CASES}


def interpret(case: Case, seed: int | None = 0) -> tuple[list[Any], list[torch.Tensor]]:
    """(arguments as they were, what the kernel wrote)."""
    arguments = case.inputs()
    before = copy.deepcopy(arguments)
    cutile_cpu.launch(case.grid, case.kernel, arguments, seed=seed)
    return before, [arguments[i] for i in case.outputs]


def test_names_are_unique() -> None:
    assert len(NAMED) == len(CASES) > 400


@pytest.mark.parametrize("name", [case.name for case in CASES if case.expected is not None and not case.refused])
def test_against_torch(name: str) -> None:
    case = NAMED[name]
    before, got = interpret(case)
    assert case.expected is not None
    for one, want in zip(got, to_list(case.expected(*before)), strict=True):
        assert difference(case, one, want) == ""


@pytest.mark.parametrize("name", [case.name for case in CASES if case.refused])
def test_what_tileiras_refuses_is_refused(name: str) -> None:
    with pytest.raises(
        cutile_cpu.UnsupportedOperation, match=r"`//` of uint\d+, which cuTile's compiler refuses.*signed type"
    ):
        interpret(NAMED[name])


@pytest.mark.parametrize("name", ["mma-f16", "atomic-add-int32", "gather-scatter", "atomic-tickets", "early-exits"])
def test_the_order_of_blocks_does_not_matter(name: str) -> None:
    first = interpret(NAMED[name], None)[1]
    for seed in (1, 2):
        for a, b in zip(first, interpret(NAMED[name], seed)[1], strict=True):
            assert torch.equal(a, b)


# ---------------------------------------------------------------- rounding, against exact fractions
def _directed(exact: Fraction, mode: str, dtype: torch.dtype) -> float:
    """The number of a type that an exact value rounds to."""
    near = torch.tensor(float(exact), dtype=torch.float64).to(dtype)
    step = [near, *(torch.nextafter(near, torch.tensor(d, dtype=dtype)) for d in (float("inf"), float("-inf")))]
    step += [torch.nextafter(s, torch.tensor(d, dtype=dtype)) for s in step for d in (float("inf"), float("-inf"))]
    numbers = sorted({float(s) for s in step})
    below = max(n for n in numbers if Fraction(n) <= exact)
    above = min(n for n in numbers if Fraction(n) >= exact)
    if mode == "RM":
        return below
    if mode == "RP":
        return above
    if mode == "RZ":
        return below if exact > 0 else above
    if exact - Fraction(below) != Fraction(above) - exact:
        return below if exact - Fraction(below) < Fraction(above) - exact else above
    even = torch.tensor(below, dtype=dtype).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    return below if int(even) % 2 == 0 else above


_OPERATIONS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "truediv": lambda a, b: a / b,
}


@pytest.mark.parametrize(
    "name", [n for n in NAMED if n.split("-")[1:2] and n.split("-")[1] in ("RN", "RZ", "RM", "RP")]
)
def test_rounding_modes_are_exact(name: str) -> None:
    operation, mode, _ = name.split("-")
    (x, y, *_), (got,) = interpret(NAMED[name])
    for a, b, c in zip(x.tolist(), y.tolist(), got.tolist(), strict=True):
        exact = _OPERATIONS[operation](Fraction(a), Fraction(b))
        assert c == _directed(exact, mode, got.dtype), (a, b)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_fma_rounds_once(kind: str) -> None:
    (x, y, z, *_), (got,) = interpret(NAMED[f"fma-{kind}"])
    for a, b, c, d in zip(x.tolist(), y.tolist(), z.tolist(), got.tolist(), strict=True):
        assert d == _directed(Fraction(a) * Fraction(b) + Fraction(c), "RN", got.dtype)


def test_what_float64_cuts_off_still_counts() -> None:
    """Ties in float32 that only digits beyond float64 decide."""

    @ct.kernel
    def decide(x, y, z, out, low, high):
        a, b, c = ct.load(x, (0,), (4,)), ct.load(y, (0,), (4,)), ct.load(z, (0,), (4,))
        ct.store(out, (0,), a * b + c)
        ct.store(low, (0,), ct.add(b, c, rounding_mode=ct.RoundingMode.RM))
        ct.store(high, (0,), ct.add(b, c, rounding_mode=ct.RoundingMode.RP))

    x = torch.tensor([4097.0, 4097.0, 4097.0, -4097.0])
    y, z = x.abs(), torch.tensor([2.0**-30, -(2.0**-30), 0.0, -(2.0**-30)])
    out, low, high = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    cutile_cpu.launch((1,), decide, (x, y, z, out, low, high))
    # 4097² = 16785409 lies between two float32 numbers.
    assert out.tolist() == [16785410.0, 16785408.0, 16785408.0, -16785410.0]
    step = 2.0**-11
    assert low.tolist() == [4097.0, 4097.0 - step, 4097.0, 4097.0 - step]
    assert high.tolist() == [4097.0 + step, 4097.0, 4097.0, 4097.0]
    far = torch.tensor([2.0**-100, -(2.0**-100), 2.0**-149, 0.0])
    cutile_cpu.launch((1,), decide, (x, y, far, out, low, high))
    assert out.tolist() == [16785410.0, 16785408.0, 16785410.0, -16785408.0]
    assert low.tolist() == [4097.0, 4097.0 - step, 4097.0, 4097.0]
    assert high.tolist() == [4097.0 + step, 4097.0, 4097.0 + step, 4097.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_too_large_a_result_follows_the_mode(dtype: torch.dtype) -> None:
    @ct.kernel
    def double(x, zero, down, up):
        t = ct.load(x, (0,), (2,))
        ct.store(zero, (0,), ct.add(t, t, rounding_mode=ct.RoundingMode.RZ))
        ct.store(down, (0,), ct.add(t, t, rounding_mode=ct.RoundingMode.RM))
        ct.store(up, (0,), ct.add(t, t, rounding_mode=ct.RoundingMode.RP))

    largest, infinity = torch.finfo(dtype).max, float("inf")
    results = [torch.zeros(2, dtype=dtype) for _ in range(3)]
    cutile_cpu.launch((1,), double, (torch.tensor([largest, -largest], dtype=dtype), *results))
    assert [r.tolist() for r in results] == [[largest, -largest], [largest, -infinity], [infinity, -largest]]


@pytest.mark.parametrize("name", ["add-flush", "mul-flush", "truediv-flush", "max-flush"])
def test_flush_to_zero(name: str) -> None:
    (x, y, *_), (got,) = interpret(NAMED[name])

    def flush(t: torch.Tensor) -> torch.Tensor:
        return torch.where(t.abs() < 2.0**-126, torch.copysign(torch.zeros_like(t), t), t)

    of = {"add": torch.add, "mul": torch.mul, "truediv": torch.div, "max": torch.maximum}[name.split("-")[0]]
    want = flush(of(flush(x), flush(y)))
    assert difference(NAMED[name], got, torch.where((name == "max-flush") & (want == 0), got, want)) == ""
    assert bool((got.abs() >= 2.0**-126)[got != 0].all())


@pytest.mark.parametrize(
    ("mode", "want"),
    [("RN", [2.0, -2.0, 4.0]), ("RZ", [2.0, -2.0, 2.0]), ("RA", [2.0, -2.0, 4.0])],
)  # fmt: skip
def test_conversion_to_tf32_rounds_as_asked(mode: str, want: list[float]) -> None:
    rounding = getattr(ct.RoundingMode, mode)

    @ct.kernel
    def cast(x, out):
        t = ct.astype(ct.load(x, (0,), (4,)), ct.tfloat32, rounding_mode=rounding)
        ct.store(out, (0,), ct.astype(t, ct.float32))

    unit = 2.0**-10
    x = torch.tensor([2.0, -2.0, 2 * (2 - unit / 2), 2 + unit])  # the third is a tie that ends in a carry
    out = torch.zeros(4)
    cutile_cpu.launch((1,), cast, (x, out))
    assert out[:3].tolist() == ([2.0, -2.0, 2 * (2 - unit)] if mode == "RZ" else want)
    # 2 + 2^-10 is a tie between 2 and 2 + 2^-9.
    assert out[3].item() == (2 + 2 * unit if mode == "RA" else 2.0)


@pytest.mark.parametrize(("mode", "shift"), [("RZ", 0), ("RP", 1)])
def test_scales_of_eight_exponent_bits(mode: str, shift: int) -> None:
    rounding = getattr(ct.RoundingMode, mode)

    @ct.kernel
    def cast(x, out):
        t = ct.astype(ct.load(x, (0,), (4,)), ct.float8_e8m0fnu, rounding_mode=rounding)
        ct.store(out, (0,), ct.bitcast(t, ct.uint8))

    out = torch.zeros(4, dtype=torch.uint8)
    cutile_cpu.launch((1,), cast, (torch.tensor([1.0, 1.5, 3.0, 2.0**-100]), out))
    assert out.tolist() == [127, 127 + shift, 128 + shift, 27]


def test_zeros_have_an_order() -> None:
    @ct.kernel
    def both(x, y, low, high):
        a, b = ct.load(x, (0,), (4,)), ct.load(y, (0,), (4,))
        ct.store(low, (0,), ct.minimum(a, b))
        ct.store(high, (0,), ct.maximum(a, b))

    x, y = torch.tensor([0.0, -0.0, 0.0, -0.0]), torch.tensor([-0.0, 0.0, 0.0, -0.0])
    low, high = torch.ones(4), torch.ones(4)
    cutile_cpu.launch((1,), both, (x, y, low, high))
    assert torch.signbit(low).tolist() == [True, True, False, True]
    assert torch.signbit(high).tolist() == [False, False, False, True]


@pytest.mark.parametrize("block", [16, 32])
def test_block_scaled_product(block: int) -> None:
    """4-bit numbers from packed bytes, scaled by powers of two along K."""
    k_scales = 64 // block

    @ct.kernel
    def scaled(x, sx, y, sy, out):
        a = ct.reshape(ct.unpack_from_bytes(ct.load(x, (0,), (16 * 32,)), ct.float4_e2m1fn), (16, 64))
        b = ct.reshape(ct.unpack_from_bytes(ct.load(y, (0,), (64 * 8,)), ct.float4_e2m1fn), (64, 16))
        ta, tb = ct.load(sx, (0, 0), (16, k_scales)), ct.load(sy, (0, 0), (k_scales, 16))
        ct.store(out, (0, 0), ct.mma_scaled(a, ta, b, tb, ct.ones((16, 16), ct.float32)))

    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (512,), generator=generator).to(torch.uint8)
    y = torch.randint(0, 256, (512,), generator=generator).to(torch.uint8)
    sx = torch.randint(120, 134, (16, k_scales), generator=generator).to(torch.uint8)
    sy = torch.randint(120, 134, (k_scales, 16), generator=generator).to(torch.uint8)
    out = torch.zeros(16, 16)
    cutile_cpu.launch((1,), scaled, (x, sx.view(torch.float8_e8m0fnu), y, sy.view(torch.float8_e8m0fnu), out))

    def numbers(packed: torch.Tensor) -> torch.Tensor:
        return table[torch.stack((packed & 15, packed >> 4), 1).reshape(-1).long()]

    a = numbers(x).reshape(16, 64) * (2.0 ** (sx.double() - 127)).repeat_interleave(block, 1)
    b = numbers(y).reshape(64, 16) * (2.0 ** (sy.double() - 127)).repeat_interleave(block, 0)
    assert torch.equal(out, (a @ b + 1).float())


def test_printing(capsys: pytest.CaptureFixture[str]) -> None:
    @ct.kernel
    def show():
        t = ct.reshape(ct.arange(4, dtype=ct.int32) - 1, (2, 2))
        print("tile:", t, f"{ct.astype(t, ct.float32):.1f}")
        ct.printf("100%% of %u and %5.2f\n", ct.uint8(200), 1.5)

    cutile_cpu.launch((1,), show, ())
    assert capsys.readouterr().out == "tile: [[-1, 0], [1, 2]] [[-1.0, 0.0], [1.0, 2.0]]\n100% of 200 and  1.50\n"
