"""Loads and stores at the edges: padding, bounds, aliases, atomics on tiles, bytes."""

from __future__ import annotations

import math
import re
import warnings

import cuda.tile as ct
import pytest
import torch

from mla_var3 import cutile_cpu
from mla_var3.cutile_cpu import KernelFault, UndeterminedPadding

Const = ct.Constant[int]
FOREIGN_POINTERS = pytest.mark.skipif(
    not hasattr(ct.Array, "from_foreign"), reason=f"cuda-tile {ct.__version__} has no foreign pointers"
)


def copy_kernel(padding: ct.PaddingMode, check: bool = True):
    @ct.kernel
    def copy(x, out, i: int, n: Const):
        t = ct.load(x, (i,), (n,), padding_mode=padding, check_bounds=check)
        ct.store(out, (0,), t)

    return copy


MODES = {
    ct.PaddingMode.ZERO: 0.0,
    ct.PaddingMode.NEG_ZERO: -0.0,
    ct.PaddingMode.NAN: math.nan,
    ct.PaddingMode.POS_INF: math.inf,
    ct.PaddingMode.NEG_INF: -math.inf,
}


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_padding_modes(mode: ct.PaddingMode, dtype: torch.dtype) -> None:
    out = torch.ones(8).to(dtype)
    cutile_cpu.launch((1,), copy_kernel(mode), (torch.ones(5).to(dtype), out, 0, 8))
    got, want = out.float()[5:], torch.full((3,), MODES[mode])
    assert torch.equal(out.float()[:5], torch.ones(5))
    assert torch.equal(got.nan_to_num(7, 8, 9), want.nan_to_num(7, 8, 9))
    assert mode is ct.PaddingMode.NAN or torch.equal(torch.signbit(got), torch.signbit(want))


def test_undetermined_padding_is_poisoned_unless_asked_not_to() -> None:
    out, whole = torch.zeros(8), torch.zeros(8, dtype=torch.int32)
    kernel = copy_kernel(ct.PaddingMode.UNDETERMINED)
    with pytest.warns(UndeterminedPadding):
        cutile_cpu.launch((1,), kernel, (torch.ones(5), out, 0, 8))
    assert torch.isnan(out[5:]).all() and not torch.isnan(out[:5]).any()
    cutile_cpu.launch((1,), kernel, (torch.ones(5, dtype=torch.int32), whole, 0, 8))
    assert (whole[5:] > 1_000_000).all()
    cutile_cpu.launch((1,), kernel, (torch.ones(5), out, 0, 8), poison=False)
    assert out.tolist() == [1.0] * 5 + [0.0] * 3


@pytest.mark.parametrize("index", [1, -1, 2**31 - 1])
def test_a_tile_outside_its_array_is_a_fault(index: int) -> None:
    kernel = copy_kernel(ct.PaddingMode.ZERO)
    out = torch.ones(8)
    with pytest.raises(
        KernelFault, match=r"load of a tile outside its array: .* axis 0, which has 5 .*test_memory.py:\d+"
    ):
        cutile_cpu.launch((1,), kernel, (torch.ones(5), out, index, 8))
    cutile_cpu.launch((1,), kernel, (torch.ones(5), out, index, 8), strict=False)
    assert out.tolist() == [0.0] * 8


def test_a_store_outside_and_an_empty_array() -> None:
    @ct.kernel
    def write(x, i: int):
        ct.store(x, (i,), ct.ones((4,), dtype=ct.float32))

    x = torch.zeros(6)
    cutile_cpu.launch((1,), write, (x, 1))
    assert x.tolist() == [0, 0, 0, 0, 1, 1]
    with pytest.raises(KernelFault, match=r"store of a tile outside its array.*`ct.store\(x"):
        cutile_cpu.launch((1,), write, (x, 2))
    cutile_cpu.launch((1,), write, (torch.zeros(0), 0))  # nothing to store to, and nothing stored


def test_unchecked_accesses_are_checked() -> None:
    kernel = copy_kernel(ct.PaddingMode.ZERO, check=False)
    with pytest.raises(KernelFault, match="check_bounds=False of a tile that overhangs"):
        cutile_cpu.launch((1,), kernel, (torch.ones(5), torch.ones(8), 0, 8))

    @ct.kernel
    def unchecked(x, out, start: int):
        i = ct.arange(8, dtype=ct.int32) + start
        ct.store(out, (0,), ct.gather(x, i, check_bounds=False))

    with pytest.raises(
        KernelFault, match=r"load outside memory: byte 32 of x, which has 32 at test_memory.py:\d+ in unch"
    ):
        cutile_cpu.launch((1,), unchecked, (torch.ones(8), torch.ones(8), 1))
    with pytest.raises(KernelFault, match="load outside memory"):
        cutile_cpu.launch((1,), unchecked, (torch.ones(8), torch.ones(8), -(2**30)))


def test_a_fault_names_the_helper_its_caller_and_the_block() -> None:
    def helper(x, i):
        return ct.gather(x, i, check_bounds=False)  # the faulty line

    @ct.kernel
    def outer(x, out):
        i = ct.bid(0)
        ct.scatter(out, i, helper(x, i * 4))

    with pytest.raises(KernelFault) as fault:
        cutile_cpu.launch((3,), outer, (torch.ones(5), torch.ones(3)), seed=None)
    assert "in helper: `return ct.gather(x, i, check_bounds=False)  # the faulty line`, called from" in str(fault.value)
    assert fault.value.block == (2, 0, 0) and "in block (2, 0, 0)" in str(fault.value)


@FOREIGN_POINTERS
def test_an_array_from_a_pointer_is_checked_against_the_storage() -> None:
    @ct.kernel
    def reach(x, out, n: int):
        whole = ct.Array.from_foreign(x.foreign_pointer, (n,), (1,))
        ct.store(out, (0,), ct.load(whole, (1,), (8,)))

    x, out = torch.arange(16.0), torch.zeros(8)
    cutile_cpu.launch((1,), reach, (x[:1], out, 16))
    assert torch.equal(out, x[8:])
    with pytest.raises(KernelFault, match="load outside memory: byte 76 of x, which has 64"):
        cutile_cpu.launch((1,), reach, (x[4:5], out, 16))


def test_assumptions_are_checked() -> None:
    @ct.kernel
    def assume(x, out, n: int):
        ct.scatter(out, 0, ct.assume_divisible_by(n, 16) // 16)

    out = torch.zeros(1, dtype=torch.int32)
    cutile_cpu.launch((1,), assume, (out, out, 48))
    assert out.item() == 3
    with pytest.raises(KernelFault, match="40 is assumed to be a multiple of 16"):
        cutile_cpu.launch((1,), assume, (out, out, 40))


def test_assertions_name_the_line() -> None:
    @ct.kernel
    def check(x, limit: int):
        ct.assert_(ct.load(x, (ct.bid(0),), (4,)) < limit, "too large")  # noqa: PT009 (cuTile's own)

    cutile_cpu.launch((2,), check, (torch.arange(8, dtype=torch.int32), 8))
    with pytest.raises(KernelFault, match=r"assertion failed: too large at test_memory.py:\d+ .* in block \(1, 0, 0\)"):
        cutile_cpu.launch((2,), check, (torch.arange(8, dtype=torch.int32), 7))


@FOREIGN_POINTERS
def test_pointers_into_two_tensors() -> None:
    @ct.kernel
    def choose(x, y, out):
        n = ct.arange(8, dtype=ct.int32)
        pointer = ct.where(n % 2 == 0, x.foreign_pointer, y.foreign_pointer)
        ct.store(out, (0,), ct.Array.from_foreign(pointer, (8,), (1,)).get_raw_memory().load_offset(n))

    # A tile of foreign pointers is no array: cuTile takes scalars only. The choice is made by a scalar instead.
    @ct.kernel
    def choose_one(x, y, out):
        pointer = ct.where(ct.bid(0) == 0, x.foreign_pointer, y.foreign_pointer)
        ct.store(out, (ct.bid(0),), ct.load(ct.Array.from_foreign(pointer, (8,), (1,)), (0,), (8,)))

    x, y, out = torch.arange(8.0), torch.arange(8.0) + 100, torch.zeros(16)
    with pytest.raises(Exception, match=r"scalar|foreign"):
        cutile_cpu.launch((1,), choose, (x, y, out))
    cutile_cpu.launch((2,), choose_one, (x, y, out))
    assert torch.equal(out, torch.cat((x, y)))


def test_addresses_in_several_tensors_at_once() -> None:
    from mla_var3.cutile_cpu.dtypes import dtype_of
    from mla_var3.cutile_cpu.memory import Memory

    x, y = torch.arange(8.0), torch.arange(8.0) + 100
    memory = Memory(fill=True, strict=True)
    memory.add(x, "x")
    memory.add(y, "y")
    lanes = torch.arange(8)
    address = torch.where(lanes % 2 == 0, x.data_ptr(), y.data_ptr()) + 4 * lanes
    got = memory.load(address, None, None, dtype_of(ct.float32), "here", (8,))
    assert torch.equal(got, torch.where(lanes % 2 == 0, x, y))
    memory.store(address, got + 1, lanes < 6, dtype_of(ct.float32), "here", (8,))
    assert x.tolist() == [1, 1, 3, 3, 5, 5, 6, 7] and y.tolist() == [100, 102, 102, 104, 104, 106, 106, 107]
    with pytest.raises(KernelFault, match="no multiple of 4 bytes in x"):
        memory.load(torch.tensor([x.data_ptr() + 2]), None, None, dtype_of(ct.float32), "here", (1,))


def test_views_and_strides_of_tensors() -> None:
    @ct.kernel
    def add(x, y, out, n: Const):
        i = ct.bid(0)
        ct.store(out, (i, 0), ct.load(x, (i, 0), (n, n)) + ct.load(y, (i, 0), (n, n)))

    base = torch.randn(20, 30)
    out = torch.zeros(20, 40)
    cutile_cpu.launch((2,), add, (base[2:18, 3:11], base.T[4:20, 2:18:2], out[:16, 16:24], 8))
    assert torch.equal(out[:16, 16:24], base[2:18, 3:11] + base.T[4:20, 2:18:2])
    assert out[:, :16].abs().sum() == 0 and out[:, 24:].abs().sum() == 0 and out[16:].abs().sum() == 0
    expanded = torch.randn(8, 1).expand(8, 8)
    square = torch.zeros(8, 8)
    cutile_cpu.launch((1,), add, (expanded, expanded, square, 8))
    assert torch.equal(square, expanded * 2)


def test_atomic_store_of_a_tile() -> None:
    @ct.kernel
    def accumulate(x, out):
        out.tiled_view((8,)).atomic_store_add((0,), ct.load(x, (ct.bid(0),), (8,)))

    x, out = torch.arange(32, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    cutile_cpu.launch((4,), accumulate, (x, out))
    assert torch.equal(out, x.reshape(4, 8).sum(0)[:6].to(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_atomic_sums_of_floats_round_at_every_step(dtype: torch.dtype) -> None:
    @ct.kernel
    def accumulate(x, out):
        ct.atomic_add(out, ct.zeros((64,), dtype=ct.int32), ct.load(x, (0,), (64,)))

    out = torch.tensor([1 / torch.finfo(dtype).eps * 2], dtype=dtype)
    before = out.clone()
    cutile_cpu.launch((1,), accumulate, (torch.ones(64, dtype=dtype), out))
    assert torch.equal(out, before)  # each 1 is half a unit in the last place, and the tie goes to the even number


def test_exchange_returns_what_was_there() -> None:
    @ct.kernel
    def swap(x, old):
        i = ct.arange(8, dtype=ct.int32)
        ct.store(old, (0,), ct.atomic_xchg(x, i, i * 10))

    x, old = torch.arange(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    cutile_cpu.launch((1,), swap, (x, old))
    assert old.tolist() == list(range(8)) and x.tolist() == [10 * i for i in range(8)]


def test_compare_and_swap_outside_returns_expected() -> None:
    @ct.kernel
    def swap(x, old):
        i = ct.arange(8, dtype=ct.int32)
        ct.store(old, (0,), ct.atomic_cas(x, i, ct.where(i < 2, i, 9), 70 + i))

    x, old = torch.arange(5, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    cutile_cpu.launch((1,), swap, (x, old))
    assert x.tolist() == [70, 71, 2, 3, 4] and old.tolist() == [0, 1, 2, 3, 4, 9, 9, 9]


def test_bytes_there_and_back() -> None:
    @ct.kernel
    def through(x, raw, out):
        data = ct.pack_to_bytes(ct.load(x, (0,), (8,)))
        ct.store(raw, (0,), data)
        ct.store(out, (0,), ct.unpack_from_bytes(data, ct.float32))

    x, raw, out = torch.randn(8), torch.zeros(32, dtype=torch.uint8), torch.zeros(8)
    cutile_cpu.launch((1,), through, (x, raw, out))
    assert torch.equal(out, x) and torch.equal(raw, x.view(torch.uint8))


def test_integer_powers() -> None:
    @ct.kernel
    def power(x, n, out):
        ct.store(out, (0,), ct.pow(ct.load(x, (0,), (8,)), ct.load(n, (0,), (8,))))

    x, n = torch.tensor([2.0, -2, 3, 0.5, -1, 10, 1, 7]), torch.tensor([3, 3, 0, -2, 7, 2, 100, 1], dtype=torch.int32)
    out = torch.zeros(8)
    cutile_cpu.launch((1,), power, (x, n, out))
    assert out.tolist() == [8, -8, 1, 4, -1, 100, 1, 7]


def test_float_to_int_out_of_range() -> None:
    """Undefined in cuTile; the interpreter takes what PTX gives."""

    @ct.kernel
    def cast(x, small, large):
        t = ct.load(x, (0,), (4,))
        ct.store(small, (0,), ct.astype(t, ct.int32))
        ct.store(large, (0,), ct.astype(t, ct.int64))

    small, large = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    cutile_cpu.launch((1,), cast, (torch.tensor([1e30, -1e30, math.nan, -2.9]), small, large))
    assert small.tolist() == [2**31 - 1, -(2**31), 0, -2]
    assert large.tolist() == [2**63 - 1, -(2**63), 0, -2]


def test_indices_into_lists_and_tiles_are_checked() -> None:
    @ct.kernel
    def item(arrays, out, i: int):
        ct.store(out, (0,), ct.load(arrays[i], (0,), (4,)))

    @ct.kernel
    def part(x, out, i: int):
        ct.store(out, (0,), ct.extract(ct.load(x, (0,), (8,)), (i,), (4,)))

    arrays, out = [torch.zeros(4), torch.ones(4)], torch.zeros(4)
    cutile_cpu.launch((1,), item, (arrays, out, 1))
    assert out.tolist() == [1.0] * 4
    for i in (2, -1):
        with pytest.raises(KernelFault, match=rf"item {i} of a list of 2 arrays"):
            cutile_cpu.launch((1,), item, (arrays, out, i))
    x = torch.arange(8.0)
    cutile_cpu.launch((1,), part, (x, out, 1))
    assert torch.equal(out, x[4:])
    for i in (2, -1):
        with pytest.raises(KernelFault, match=rf"subtile {i} of axis 0, which has 2"):
            cutile_cpu.launch((1,), part, (x, out, i))


@ct.kernel
def _ragged(x, out):
    t = ct.load(x, (ct.bid(0),), (8,))  # the ragged load
    ct.store(out, (ct.bid(0),), t + 1)


@ct.kernel
def _ragged_sum(x, out):
    ct.store(out, (ct.bid(0),), ct.sum(ct.load(x, (ct.bid(0),), (8,))))


def _warnings(kernel: object, x: torch.Tensor, out: torch.Tensor, times: int = 1, **options: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(times):
            cutile_cpu.launch((2,), kernel, (x, out), **options)  # type: ignore[arg-type]
    return [str(w.message) for w in caught if w.category is UndeterminedPadding]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_result_poisoned_by_padding_says_so_once(dtype: torch.dtype) -> None:
    (said,) = _warnings(_ragged_sum, torch.ones(12, dtype=dtype), torch.zeros(2, dtype=dtype), times=3)
    assert said.startswith("out holds NaN after _ragged_sum") and "poison=False" in said
    assert re.search(r"at test_memory\.py:\d+ in _ragged_sum: `ct\.store", said)


def test_padding_that_reaches_no_result_says_nothing() -> None:
    assert not _warnings(_ragged, torch.ones(12), torch.zeros(12))  # it is cut off again
    assert not _warnings(_ragged_sum, torch.ones(16), torch.zeros(2))  # there is none
    assert not _warnings(_ragged_sum, torch.ones(12), torch.zeros(2), poison=False)
    given = torch.ones(16)
    given[3] = math.nan
    assert not _warnings(_ragged_sum, given, torch.zeros(2))  # NaN of the caller
