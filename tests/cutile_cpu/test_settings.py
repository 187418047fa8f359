"""What the caller has set in torch changes no result, and is set afterwards."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import cuda.tile as ct
import pytest
import torch
from torch.overrides import TorchFunctionMode

from mla_var3 import cutile_cpu


@ct.kernel
def _work(x, y, out, small):
    a, b = ct.load(x, (0, 0), (32, 32)), ct.load(y, (0, 0), (32, 32))
    ct.store(out, (0, 0), ct.mma(a, b, ct.zeros((32, 32), dtype=ct.float32)) + ct.exp(a) / 3.0)
    ct.store(small, (0,), ct.load(small, (0,), (8,)) * 0.5)


def _run() -> list[torch.Tensor]:
    """Its tensors are made by hand: the caller's settings would change what torch makes."""
    seeds = (1, 2)
    draw = [torch.rand(32, 32, generator=torch.Generator().manual_seed(s), dtype=torch.float32, device="cpu")
            for s in seeds]  # fmt: skip
    out = torch.zeros(32, 32, dtype=torch.float32, device="cpu")
    bits = torch.full((8,), 0x00400000, dtype=torch.int32, device="cpu")  # subnormal float32 numbers
    cutile_cpu.launch((1,), _work, (*draw, out, bits.view(torch.float32)))
    return [out.view(torch.int32), bits]


class _Refuses(TorchFunctionMode):
    """A function mode that the interpreter must not meet."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.matmul:
            raise AssertionError("a product of the interpreter")
        return func(*args, **(kwargs or {}))


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _no_subnormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        yield
        assert sys.float_info.min / 2 == 0.0
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def _fast_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
        lambda: torch.inference_mode(),
        _default_dtype,
        _no_subnormals,
        _fast_products,
        _Refuses,
    ],
    ids=["autocast", "device", "inference", "dtype", "subnormals", "products", "mode"],
)
def test_a_setting_of_the_caller_changes_nothing(setting: Any) -> None:
    want = _run()
    assert (want[1] == 0x00200000).all()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with setting():
            got = _run()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_square_roots_are_the_nearest_numbers(dtype: torch.dtype) -> None:
    """Against integers: torch's own function is off by one unit for some values on some CPUs."""

    @ct.kernel
    def root(x, out):
        ct.store(out, (ct.bid(0),), ct.sqrt(ct.load(x, (ct.bid(0),), (1024,))))

    ints, largest = {torch.float32: (torch.int32, 0x7F7FFFFF), torch.float64: (torch.int64, 0x7FEFFFFFFFFFFFFF)}[dtype]
    codes = torch.randint(1, largest, (4096,), generator=torch.Generator().manual_seed(5), dtype=ints)
    codes[:4] = torch.tensor([1, 2, 3, largest])  # the smallest subnormals, the largest number
    x, out = codes.view(dtype), torch.zeros(4096, dtype=dtype)
    cutile_cpu.launch((4,), root, (x, out))
    neighbours = zip(*(torch.nextafter(out, torch.full_like(out, d)).tolist() for d in (0.0, math.inf)), strict=True)
    for value, got, (below, above) in zip(x.tolist(), out.tolist(), neighbours, strict=True):
        # It is the nearest when the exact root is between the middles to its neighbours; no root is a middle.
        low, high = (Fraction(got) + Fraction(n) for n in (below, above))
        assert low**2 < 4 * Fraction(value) < high**2, value
