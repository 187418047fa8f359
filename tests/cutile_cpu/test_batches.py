"""Blocks that run together give what they give one by one, bit for bit: results, faults, memory after a fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import cutile_cases_more  # noqa: F401
import pytest
import torch
from cutile_cases import CASES, Case

from mla_var3 import cutile_cpu
from mla_var3.catalogue import registry
from mla_var3.cutile_cpu import KernelFault, batch, frontend
from mla_var3.cutile_cpu.batch import Batches
from mla_var3.cutile_cpu.dtypes import same_bits
from mla_var3.cutile_cpu.machine import BlockState
from mla_var3.cutile_cpu.memory import Memory
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.gemm import GemmProblem
from mla_var3.workload.mixed import MixedProblem
from mla_var3.workload.norm import NormProblem
from mla_var3.workload.prefill import PrefillProblem
from mla_var3.workload.rope import RopeProblem
from mla_var3.workload.sparse_decode import SparseProblem

Const = ct.Constant[int]


class Count:
    """How many blocks ran in batches, and how many ways they went."""

    def __init__(self) -> None:
        self.blocks = self.batches = 0


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    counted = Count()
    run, together = Batches.run, Batches._run_together

    def counting(self: Batches, blocks: list[Any]) -> list[Any]:
        left = run(self, blocks)
        counted.blocks += len(blocks) - len(left)
        return left

    def together_counting(self: Batches, *args: Any) -> Any:
        counted.batches += 1
        return together(self, *args)

    monkeypatch.setattr(Batches, "run", counting)
    monkeypatch.setattr(Batches, "_run_together", together_counting)
    return counted


def one_by_one(launch: Callable[[], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "run", lambda self, blocks: blocks)
        launch()


def flat(value: Any) -> list[torch.Tensor]:
    return [t for v in value for t in flat(v)] if isinstance(value, (list, tuple)) else (
        [value] if isinstance(value, torch.Tensor) else []
    )  # fmt: skip


def assert_same(grid: tuple[int, ...], kernel: Any, args: tuple[Any, ...], **options: Any) -> list[torch.Tensor]:
    """Runs the launch both ways; returns what the arguments are afterwards."""
    together, alone = copy.deepcopy(args), copy.deepcopy(args)
    errors = []
    for arguments, way in ((alone, one_by_one), (together, lambda launch: launch())):
        try:
            way(lambda: cutile_cpu.launch(grid, kernel, arguments, **options))  # noqa: B023
            errors.append("")
        except KernelFault as fault:
            errors.append(str(fault))
    assert errors[0] == errors[1]
    for a, b in zip(flat(alone), flat(together), strict=True):
        assert same_bits(a, b), (a, b)
    return flat(together)


# ---------------------------------------------------------------- every operation, for lanes with data of their own
LANES = 3


def of_lanes(value: Any, rolled: bool) -> list[Any]:
    """An argument for each lane, with the same numbers at other places; a tensor's lanes are in one storage."""
    if not isinstance(value, torch.Tensor):
        return [value] * LANES
    slot = -(-value.numel() // 64) * 64
    whole = torch.empty(LANES * slot, dtype=value.dtype)
    lanes = [whole[i * slot : i * slot + value.numel()].view(value.shape) for i in range(LANES)]
    for i, lane in enumerate(lanes):
        lane.copy_(value.reshape(-1).roll(i * rolled).reshape(value.shape))
    return lanes


def run_lanes(case: Case, rolled: bool) -> bool:
    """Compares a case's blocks for lanes that have memory of their own. False: it is one that does not run together."""
    given = case.inputs()
    if any(isinstance(v, list) or (isinstance(v, torch.Tensor) and not v.is_contiguous()) for v in given):
        return False
    args = [list(a) for a in zip(*(of_lanes(v, rolled) for v in given), strict=True)]
    alone = copy.deepcopy(args)
    described = [frontend.describe_arguments(case.kernel, a) for a in args]
    if len({d.key for d in described}) > 1:
        return False
    program = frontend.program(case.kernel, described[0])
    if not program.batchable:
        return False
    for arguments in alone:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Batches, "run", lambda self, blocks: blocks)
            cutile_cpu.launch(case.grid, case.kernel, arguments)
    memory = Memory(fill=True, strict=True)
    for d in described:
        for tensor, name in d.tensors:
            memory.add(tensor, name)
    grid: Any = (*case.grid, 1, 1, 1)[:3]
    values = []
    for of_value in zip(*(d.values for d in described), strict=True):
        alike = all(same_bits(v, of_value[0]) for v in of_value)
        values.append(of_value[0] if alike else torch.stack([torch.as_tensor(v) for v in of_value]))
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                view = batch.BatchMemory(memory, list(range(LANES)))
                program.execute(BlockState((x, y, z), grid, view, {}, None), values)
                for accesses in batch._by_region(view.log):
                    batch._write([a for a in accesses if a.data is not None])
    for lane in range(LANES):
        for i, (a, b) in enumerate(zip(flat(alone[lane]), flat(args[lane]), strict=True)):
            assert same_bits(a, b), (case.name, lane, i, a, b)
    return True


@pytest.mark.parametrize("part", range(2))
def test_every_operation(part: int) -> None:
    """A third of the cases: with other data types of the same functions the rest is much the same."""
    ran: set[str] = set()
    for case in CASES[part::6]:
        if case.refused:
            continue
        try:
            done = run_lanes(case, rolled=True)
        except (KernelFault, batch.Diverged):  # the places mattered
            done = run_lanes(case, rolled=False)
        if done:
            ran |= frontend.program(case.kernel, frontend.describe_arguments(case.kernel, case.inputs())).opcodes
    assert len(ran) > 30


# ---------------------------------------------------------------- kernels that should and should not run together
def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10).to(dtype)


def ints(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)


@ct.kernel
def _ragged(x, out, n: Const):
    t = ct.load(x, (ct.bid(0), ct.bid(1)), (n, n), padding_mode=ct.PaddingMode.ZERO)
    ct.store(out, (ct.bid(1), ct.bid(0)), ct.transpose(t) * 2)


@ct.kernel
def _branches(x, out, n: Const):
    i = ct.bid(0)
    t = ct.load(x, (i, 0), (1, n))
    if i % 3 == 0:
        t = ct.exp(t * 0.01)
    else:
        if ct.sum(t) > 0:
            t = -t
        for k in range(i % 4):
            t = t + k
    ct.store(out, (i, 0), t)


@ct.kernel
def _leaves_early(x, out, n: Const):
    i = ct.bid(0)
    if i % 2 == 1 or i > 20:
        return
    total = ct.zeros((n,), dtype=ct.float32)
    for k in range(4):
        if k > i:
            break
        total += ct.load(x, (i, 0), (1, n)).reshape((n,))
    ct.store(out, (i, 0), total.reshape((1, n)))


@ct.kernel
def _counts_its_rows(x, out, n: Const):
    for row in range(ct.bid(0), x.shape[0], ct.num_blocks(0)):
        t = ct.load(x, (row, 0), (1, n))
        ct.store(out, (row, 0), t / ct.sum(ct.abs(t)) + ct.astype(row, ct.float32))


@ct.kernel
def _gathers(x, index, out, n: Const):
    i = ct.bid(0)
    at = ct.gather(index, i * n + ct.arange(n, dtype=ct.int32))
    ct.scatter(out, (i, ct.arange(n, dtype=ct.int32)), ct.gather(x, (at % 30 - 2, at % 20), padding_value=-1.0))


@ct.kernel
def _best(x, out, n: Const):
    i = ct.bid(0)
    t = ct.load(x, (i, 0), (1, n))
    ct.scatter(out, (i, 0), ct.astype(ct.argmax(t, 1).item(), ct.float32))
    ct.scatter(out, (i, 1), ct.max(ct.cumsum(t, 1)))


@ct.kernel
def _parts(x, out, n: Const):
    i = ct.bid(0)
    t = ct.load(x, (i, 0), (1, n))
    ct.store(out, (i, i % 2), ct.extract(t, (0, i % 4), (1, n // 4)))


@ct.kernel
def _items(xs, out, n: Const):
    i = ct.bid(0)
    ct.store(out, (i, 0), ct.load(xs[i % 3], (i, 0), (1, n)))


@ct.kernel
def _slices(x, out, n: Const):
    i = ct.bid(0)
    part = x.slice(0, i, i + 5)
    ct.store(out, (i, 0), ct.sum(ct.load(part, (0, 0), (8, n), padding_mode=ct.PaddingMode.ZERO), 0, keepdims=True))


@ct.kernel
def _products(x, out, n: Const):
    i = ct.bid(0)
    a, b = ct.load(x, (i % 2, 0), (16, n)), ct.load(x, (0, 0), (16, n))
    ct.store(out, (i, 0), ct.mma(a, ct.transpose(b), ct.zeros((16, 16), dtype=ct.float32)) + i)


@ct.kernel
def _same_place(x, out, n: Const):
    """The last block in the order wins, all of it or a part."""
    i = ct.bid(0)
    ct.store(out, (0, 0), ct.load(x, (i, 0), (1, n)))
    ct.scatter(
        out, (0, ct.arange(n, dtype=ct.int32) // (i + 1)), ct.astype(ct.arange(n, dtype=ct.int32) + i, ct.float32)
    )
    ct.store(out, (i // 4, 0), ct.load(x, (i + 1, 0), (1, n)))


@ct.kernel
def _in_place(x, out, n: Const):
    i = ct.bid(0)
    ct.store(x, (i, 0), ct.load(x, (i, 0), (1, n)) * 2)


@ct.kernel
def _of_its_neighbour(x, out, n: Const):
    i = ct.bid(0)
    ct.store(x, (i + 1, 0), ct.load(x, (i, 0), (1, n)) + 1)


@ct.kernel
def _its_own(x, out, n: Const):
    i = ct.bid(0)
    ct.store(out, (i, 0), ct.load(x, (i, 0), (1, n)))
    ct.store(out, (i, 0), ct.load(out, (i, 0), (1, n)) + 1)


@ct.kernel
def _scattered_neighbour(x, out, n: Const):
    i, at = ct.bid(0), ct.arange(n, dtype=ct.int32)
    ct.scatter(x, (i, at), ct.gather(x, (i + at % 2, at)))


@ct.kernel
def _adds(x, out, n: Const):
    ct.atomic_add(out, (0, ct.arange(n, dtype=ct.int32)), ct.load(x, (ct.bid(0), 0), (1, n)).reshape((n,)))
    ct.scatter(out, (1, ct.bid(0)), ct.atomic_add(out, (2, 0), 1.0))


@ct.kernel
def _outside(x, out, n: Const):
    """Block 17 reads outside its array, after it has written."""
    i = ct.bid(0)
    ct.store(out, (i, 0), ct.load(x, (i, 0), (1, n)))
    ct.store(out, (i, 0), ct.load(x, (i if i != 17 else 900, 0), (1, n)) + 1)


@ct.kernel
def _asserts(x, out, n: Const):
    i = ct.bid(0)
    ct.store(out, (i, 0), ct.load(x, (i, 0), (1, n)))
    ct.assert_(i != 9, "no ninth")  # noqa: PT009 (cuTile's own)


GRID = (24,)
#: Kernel, its first arguments, whether its blocks run together.
HOSTILE: dict[str, tuple[Any, tuple[int, ...], Callable[[], tuple[Any, ...]], bool]] = {
    "ragged": (_ragged, (7, 5), lambda: (numbers(50, 37), numbers(37, 50), 8), True),
    "branches": (_branches, GRID, lambda: (numbers(24, 16), numbers(24, 16), 16), True),
    "leaves-early": (_leaves_early, GRID, lambda: (numbers(24, 16), numbers(24, 16), 16), True),
    "counts-its-rows": (_counts_its_rows, GRID, lambda: (numbers(101, 16), numbers(101, 16), 16), True),
    "gathers": (_gathers, GRID, lambda: (numbers(30, 20), ints(24 * 16), numbers(24, 16), 16), True),
    "gathers-bf16": (
        _gathers,
        GRID,
        lambda: (numbers(30, 20, dtype=torch.bfloat16), ints(24 * 16), numbers(24, 16, dtype=torch.bfloat16), 16),
        True,
    ),
    "best": (_best, GRID, lambda: (numbers(24, 64), numbers(24, 2), 64), True),
    "parts": (_parts, GRID, lambda: (numbers(24, 16), numbers(24, 8), 16), True),
    "items": (_items, GRID, lambda: ([numbers(24, 16, seed=s) for s in range(3)], numbers(24, 16), 16), True),
    "slices": (_slices, GRID, lambda: (numbers(40, 16), numbers(24, 16), 16), True),
    "products": (_products, GRID, lambda: (numbers(32, 32), numbers(24 * 16, 16), 32), True),
    "products-fp16": (
        _products,
        GRID,
        lambda: (numbers(32, 32, dtype=torch.float16), numbers(24 * 16, 16), 32),
        True,
    ),
    "same-place": (_same_place, GRID, lambda: (numbers(25, 32), numbers(24, 32), 32), True),
    "in-place": (_in_place, GRID, lambda: (numbers(24, 16), numbers(1), 16), True),
    "in-place-strided": (_in_place, GRID, lambda: (numbers(16, 48).T[::2], numbers(1), 16), True),
    "of-its-neighbour": (_of_its_neighbour, GRID, lambda: (numbers(25, 16), numbers(1), 16), False),
    "scattered-neighbour": (_scattered_neighbour, GRID, lambda: (numbers(25, 16), numbers(1), 16), False),
    "its-own": (_its_own, GRID, lambda: (numbers(24, 16), numbers(24, 16), 16), False),
    "adds": (_adds, GRID, lambda: (numbers(24, 32), numbers(3, 32), 32), False),
    "outside": (_outside, GRID, lambda: (numbers(24, 16), numbers(24, 16), 16), False),
    "asserts": (_asserts, GRID, lambda: (numbers(24, 16), numbers(24, 16), 16), False),
}


@pytest.mark.parametrize("seed", [None, 0, 5])
@pytest.mark.parametrize("name", HOSTILE)
def test_blocks_together_are_blocks_one_by_one(name: str, seed: int | None, count: Count) -> None:
    kernel, grid, args, together = HOSTILE[name]
    described = frontend.describe_arguments(kernel, args())
    frontend.program(kernel, described).batchable = name != "adds"  # as if no launch had run before
    assert_same(grid, kernel, args(), seed=seed, strict=name != "slices")
    # In order, a block reads the row of its neighbour before that one writes it.
    together |= name == "scattered-neighbour" and seed is None
    assert count.blocks == (torch.Size(grid).numel() if together else 0)


@pytest.mark.parametrize("bytes_", [1, 10_000])
def test_windows_of_few_blocks(bytes_: int, monkeypatch: pytest.MonkeyPatch, count: Count) -> None:
    monkeypatch.setattr(batch, "_WINDOW_BYTES", bytes_)
    monkeypatch.setattr(batch, "_MOST_LANES", 5)
    monkeypatch.setattr(batch, "_FEWEST_LANES", 1)
    assert_same((7, 5), _ragged, (numbers(50, 37), numbers(37, 50), 8))
    assert count.blocks == 35 and count.batches >= 7
    assert_same(GRID, _same_place, (numbers(25, 32), numbers(24, 32), 32))


def test_a_grid_that_goes_too_many_ways_runs_one_by_one(monkeypatch: pytest.MonkeyPatch, count: Count) -> None:
    @ct.kernel
    def scattered(x, out, n: Const):
        i = ct.bid(0)
        total = 0
        for k in range(10):
            if i // (k + 1) % 2 == 0:
                total += i + k
        ct.store(out, (i, 0), ct.load(x, (i, 0), (1, n)) + total)

    monkeypatch.setattr(batch, "_RESTARTS", 1)
    assert_same(GRID, scattered, (numbers(24, 16), numbers(24, 16), 16))
    assert count.blocks == 0 and count.batches < 24


# ---------------------------------------------------------------- the lab's kernels
LAB = [k for k in registry.all_kernels() if k.language == "cutile-dsl"]
PROBLEMS = {
    "decode": MlaProblem(b=5, h=16, t=128, lengths=(128, 93, 1, 60, 128)),
    "heads": MlaProblem(b=2, h=64, t=128, lengths=(128, 65)),
    "causal": MlaProblem(b=2, s=4, h=16, t=128, lengths=(128, 70), causal=True),
    "mixed": MixedProblem(b=2, h=16, t=192, n=64),
    "prompt": PrefillProblem(b=1, s=65, h=2, causal=True),
    "gemm": GemmProblem(tokens=5, h=2),
    "norm": NormProblem(rows=9, width=1536, second=512, rest=64),
    "rope": RopeProblem(tokens=5, h=6, positions=4096),
    "sparse": SparseProblem(b=3, s=1, h=16, topk=64, t=128),
}


@pytest.mark.parametrize("kernel", LAB, ids=lambda k: f"{k.design}-v{k.version}")
def test_the_labs_kernels(kernel: Any, monkeypatch: pytest.MonkeyPatch, count: Count) -> None:
    monkeypatch.setattr(batch, "_ELEMENTS", 1 << 20)  # large tiles too
    monkeypatch.setattr(batch, "_FEWEST_LANES", 2)
    monkeypatch.setattr(torch, "empty", torch.zeros)  # some write a part of their outputs
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    plan_type = registry.get_plan(kernel)
    problem = next(p for p in PROBLEMS.values() if plan_type.requires.accepts(p))
    plan = plan_type(problem)
    inputs = plan.prepare_inputs("cpu")
    results: list[list[torch.Tensor]] = []

    def run() -> None:
        results.append([t.clone() for t in flat(plan.plan(*copy.deepcopy(inputs))())])

    one_by_one(run)
    assert count.blocks == 0
    run()
    assert results[0] and all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert count.blocks > 0
