"""Accesses that the front end moves out of a loop are faults only where the source makes them."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct
import pytest
import torch

from mla_var3 import cutile_cpu
from mla_var3.cutile_cpu import KernelFault, frontend
from mla_var3.cutile_cpu.hoisting import is_hoisted


def helper(b, x, o, n):
    if b * 16 >= n:
        return
    ct.store(o, (b,), ct.load(x, (b,), (16,)))


@ct.kernel
def early_return(x, o, n: int):
    helper(ct.bid(0), x, o, n)


@ct.kernel
def tile(x, o, n: int):
    total = ct.zeros((16,), dtype=ct.float32)
    for _ in range(n):
        total = total + ct.load(x, (7,), (16,))
    ct.store(o, (0,), total)


@ct.kernel
def pointer(x, o, n: int):
    total = ct.zeros((16,), dtype=ct.float32)
    for _ in range(n):
        total = total + ct.gather(x, 100_000, check_bounds=False)
    ct.store(o, (0,), total)


@ct.kernel
def part(x, o, n: int):
    whole = ct.load(x, (0,), (32,))
    total = ct.zeros((16,), dtype=ct.float32)
    for _ in range(n):
        total = total + ct.extract(whole, (n + 5,), (16,))
    ct.store(o, (0,), total)


@ct.kernel
def item(xs, o, n: int):
    total = ct.zeros((16,), dtype=ct.float32)
    for _ in range(n):
        total = total + ct.load(xs[n + 5], (0,), (16,))
    ct.store(o, (0,), total)


@ct.kernel
def derived(x, o, n: int):
    """What is made of the load is moved too, a whole loop and a reduction among it."""
    total = ct.zeros((16,), dtype=ct.float32)
    for _ in range(n):
        t = ct.load(x, (9,), (16,)) * 2
        inner = ct.zeros((16,), dtype=ct.float32)
        for _ in range(3):
            inner = inner + t
        total = total + inner + ct.sum(t)
    ct.store(o, (0,), total)


@ct.kernel
def split(x, o, n: int):
    """A loop that the front end splits in two, so that operations are copies."""
    total = ct.zeros((16,), dtype=ct.float32)
    for i in range(4):
        if i < 2:
            total = total + 1
        else:
            for _ in range(n):
                total = total + ct.load(x, (8,), (16,))
    ct.store(o, (0,), total)


KERNELS = {k._annotated_function.pyfunc.__name__: k for k in (early_return, tile, pointer, part, item, derived, split)}
#: What each kernel is told about the access that its loop makes.
MESSAGES = {
    "early_return": "outside its array",
    "tile": "outside its array",
    "pointer": "outside memory",
    "part": "subtile 6",
    "item": "item 6 of a list",
    "derived": "outside its array",
    "split": "outside its array",
}


def arguments(name: str, n: int) -> tuple[Any, ...]:
    x = torch.arange(32.0)
    return ([x, x] if name == "item" else x), torch.full((48,), -1.0), n


def test_the_kernels_of_this_file_have_hoisted_accesses() -> None:
    def moved(block: Any) -> bool:
        return any(is_hoisted(op) or any(moved(b) for b in op.nested_blocks) for op in block)

    for name, kernel in KERNELS.items():
        described = frontend.describe_arguments(kernel, arguments(name, 0))
        assert moved(frontend.final_ir(kernel, described.constraints)), name


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_an_access_that_the_source_does_not_make_is_no_fault(name: str, strict: bool) -> None:
    grid, n = ((3,), 32) if name == "early_return" else ((1,), 0)
    args = arguments(name, n)
    cutile_cpu.launch(grid, KERNELS[name], args, strict=strict)
    want = torch.cat((torch.arange(32.0), torch.full((16,), -1.0)))
    if name != "early_return":
        want = torch.cat((torch.full((16,), 2.0 if name == "split" else 0.0), torch.full((32,), -1.0)))
    assert torch.equal(args[1], want)


@pytest.mark.parametrize("name", KERNELS)
def test_an_access_that_the_source_makes_is_one(name: str) -> None:
    grid, n = ((3,), 48) if name == "early_return" else ((1,), 1)
    with pytest.raises(KernelFault, match=rf"{MESSAGES[name]}.*test_hoisting.py:\d+ in .*block \(.*0, 0\)"):
        cutile_cpu.launch(grid, KERNELS[name], arguments(name, n))
