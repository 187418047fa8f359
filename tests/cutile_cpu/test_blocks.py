"""The grid: ids, order, blocks that wait for others, arguments, the cache."""

from __future__ import annotations

import _thread
import signal
import threading
from typing import Annotated, Any

import cuda.tile as ct
import pytest
import torch

from mla_var3 import cutile_cpu
from mla_var3.cutile_cpu import KernelFault, frontend
from mla_var3.cutile_cpu.errors import Misuse

Const = ct.Constant[int]


def test_block_ids() -> None:
    @ct.kernel
    def ids(out):
        x, y, z = ct.bid(0), ct.bid(1), ct.bid(2)
        at = (z * ct.num_blocks(1) + y) * ct.num_blocks(0) + x
        ct.scatter(out, at, x + 10 * y + 100 * z)

    out = torch.zeros(2 * 3 * 4, dtype=torch.int32)
    cutile_cpu.launch((4, 3, 2), ids, (out,))
    assert out.tolist() == [x + 10 * y + 100 * z for z in range(2) for y in range(3) for x in range(4)]


def test_the_order_is_shuffled_by_a_seed() -> None:
    @ct.kernel
    def order(counter, out):
        ct.scatter(out, ct.bid(0), ct.atomic_add(counter, 0, 1))

    def run(seed: int | None) -> list[int]:
        out = torch.zeros(32, dtype=torch.int32)
        cutile_cpu.launch((32,), order, (torch.zeros(1, dtype=torch.int32), out), seed=seed)
        return out.tolist()

    assert run(None) == list(range(32))
    assert run(1) == run(1) != run(2) and sorted(run(1)) == list(range(32))


def test_a_dependency_between_blocks_shows() -> None:
    """Each block reads what the block before it wrote: right only in order."""

    @ct.kernel
    def chain(x):
        i = ct.bid(0)
        ct.scatter(x, i + 1, ct.gather(x, i) + 1)

    ordered, shuffled = torch.zeros(17, dtype=torch.int32), torch.zeros(17, dtype=torch.int32)
    cutile_cpu.launch((16,), chain, (ordered,), seed=None)
    cutile_cpu.launch((16,), chain, (shuffled,))
    assert ordered.tolist() == list(range(17)) != shuffled.tolist()


@ct.kernel
def _relay(flags, out):
    """Block i waits until block i - 1 has raised its flag."""
    i = ct.bid(0)
    if i > 0:
        while ct.atomic_add(flags, i - 1, 0) == 0:
            pass
        ct.scatter(out, i, ct.gather(out, i - 1) + i)
    ct.atomic_xchg(flags, i, 1)


@pytest.mark.parametrize("seed", [0, 1, None])
def test_blocks_that_wait_for_others(seed: int | None) -> None:
    out = torch.zeros(12, dtype=torch.int32)
    cutile_cpu.launch((12,), _relay, (torch.zeros(12, dtype=torch.int32), out), seed=seed)
    assert out.tolist() == [i * (i + 1) // 2 for i in range(12)]


def test_a_lock() -> None:
    @ct.kernel
    def locked(lock, total):
        while ct.atomic_cas(lock, 0, 0, 1) == 1:
            pass
        ct.scatter(total, 0, ct.gather(total, 0) + ct.bid(0))
        ct.atomic_xchg(lock, 0, 0)

    total = torch.zeros(1, dtype=torch.int32)
    cutile_cpu.launch((20,), locked, (torch.zeros(1, dtype=torch.int32), total))
    assert total.item() == 190


def test_waiting_for_ever_is_a_fault_and_leaves_no_threads() -> None:
    @ct.kernel
    def stuck(flag):
        while ct.atomic_add(flag, 0, 0) == 0:
            pass

    before = threading.active_count()
    with pytest.raises(
        KernelFault, match=r"never ends: nothing that it reads changes \(3 blocks wait\).*test_blocks.py"
    ):
        cutile_cpu.launch((3,), stuck, (torch.zeros(1, dtype=torch.int32),))
    assert threading.active_count() == before


@pytest.mark.parametrize("seed", [0, 1, None])
def test_blocks_that_count_while_they_wait(seed: int | None) -> None:
    """What is counted is stored, compared with a limit, or takes part in the next address that is polled."""

    @ct.kernel
    def relay(flags, counts, out):
        i, n = ct.bid(0), 0
        while i > 0 and ct.atomic_add(flags, i - 1, 0) == 0:
            n += 1
        ct.scatter(counts, i, n)
        n = 0
        while n < 1_000_000 and ct.atomic_add(flags, (i + n) % 2 * 12 + 12, 0) == 0:
            n += 1
            ct.atomic_xchg(flags, 12 + 12 * (i % 2), 1)
        ct.scatter(out, i, 0 if i == 0 else ct.gather(out, i - 1) + i)
        ct.atomic_xchg(flags, i, 1)

    flags, counts, out = (torch.zeros(n, dtype=torch.int32) for n in (36, 12, 12))
    cutile_cpu.launch((12,), relay, (flags, counts, out), seed=seed)
    assert out.tolist() == [i * (i + 1) // 2 for i in range(12)]
    assert (counts.count_nonzero() > 0) == (seed is not None)


def test_a_bounded_wait_ends() -> None:
    @ct.kernel
    def patient(flag, out):
        n = 0
        while ct.atomic_add(flag, 0, 0) == 0 and n < 500:
            n += 1
        ct.scatter(out, ct.bid(0), n)

    out = torch.zeros(3, dtype=torch.int32)
    cutile_cpu.launch((3,), patient, (torch.zeros(1, dtype=torch.int32), out))
    assert out.tolist() == [500] * 3


def test_a_plain_load_in_a_loop_is_polled_too() -> None:
    """One block counts in memory, the other waits until it is done; both keep counts of their own."""

    @ct.kernel
    def pair(x, out):
        n = 0
        if ct.bid(0) == 0:
            while ct.gather(x, 0) < 40:
                ct.scatter(x, 0, ct.gather(x, 0) + 1)
        else:
            while ct.atomic_add(x, 0, 0) < 40:
                n += 1
        ct.scatter(out, ct.bid(0), n)

    for seed in (None, 1, 2):
        x, out = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        cutile_cpu.launch((2,), pair, (x, out), seed=seed)
        assert x.item() == 40


def _counting(flag, out):
    n = 0
    while ct.atomic_add(flag, 0, 0) == 0:
        n += 1
    ct.scatter(out, 0, n)


def _storing_the_same(flag, out):
    while ct.atomic_add(flag, 0, 0) == 0:
        ct.scatter(out, 0, 7)


def _going_round(flag, out):
    n = 0
    while ct.atomic_add(flag, n, 0) == 0:
        n = (n + 1) % 3
    ct.scatter(out, 0, n)


def _reading_nothing(flag, out):
    n = ct.gather(flag, 0)
    while n < 5:
        n = 3 - n
    ct.scatter(out, 0, n)


def _not_a_number(flag, out):
    x = ct.astype(ct.gather(flag, 0), ct.float32) / 0.0
    while x != 1.0:
        x = x + 1.0
    ct.scatter(out, 0, ct.astype(x, ct.int32))


def _inside_another(flag, out):
    done = 0
    while done == 0:
        n = 0
        while n < 3:
            n += 1
            done += ct.atomic_add(flag, n, 0)
    ct.scatter(out, 0, done)


@pytest.mark.parametrize(
    "function",
    [_counting, _storing_the_same, _going_round, _reading_nothing, _not_a_number, _inside_another],
    ids=lambda f: f.__name__[1:],
)
def test_a_loop_that_can_never_end_is_named(function: object) -> None:
    before = threading.active_count()
    args = (torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    with pytest.raises(KernelFault, match=rf"never ends.*\(2 blocks wait\).*test_blocks.py:\d+ in {function.__name__}"):
        cutile_cpu.launch((2,), ct.kernel(function), args)
    assert threading.active_count() == before


def test_a_long_loop_is_no_wait_and_is_named_by_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_var3.cutile_cpu import waiting

    @ct.kernel
    def long(out):
        n = 0
        while n < 300:
            n += 1
        ct.scatter(out, ct.bid(0), n)

    monkeypatch.setattr(waiting, "_MANY", 200)
    out = torch.zeros(2, dtype=torch.int32)
    with pytest.warns(UserWarning, match=r"test_blocks.py:\d+ in long: `while n < 300:` has not ended after 200 turns"):
        cutile_cpu.launch((2,), long, (out,))
    assert out.tolist() == [300, 300]


@pytest.mark.parametrize("where", ["while", "for"])
def test_an_interrupt_leaves_no_thread(where: str) -> None:
    """Two blocks, of which one waits and the other is busy in a loop without end in sight."""

    @ct.kernel
    def busy(flag, out, turns: int):
        n = 0
        if ct.bid(0) == 0:
            while ct.atomic_add(flag, 0, 0) == 0:
                pass
        else:
            while n >= 0:
                for i in range(turns):
                    n = n * 3 + i
                n = abs(n) % 1_000_003 + 1
        ct.scatter(out, 0, n)

    before = threading.active_count()
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    alarm = threading.Timer(0.5, _thread.interrupt_main)
    # A shell that starts this in the background has SIGINT ignored.
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    alarm.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            cutile_cpu.launch((2,), busy, (flag, out, 2**31 - 1 if where == "for" else 1), seed=None)
    finally:
        alarm.join()
        signal.signal(signal.SIGINT, found)
    assert threading.active_count() == before


def test_a_fault_in_a_kernel_that_can_wait_reaches_the_caller() -> None:
    @ct.kernel
    def faulty(x):
        n = 0
        while n < 5:
            n += 1
        ct.assert_(ct.gather(x, ct.bid(0)) == n, "no")  # noqa: PT009 (cuTile's own)

    with pytest.raises(KernelFault, match="assertion failed: no"):
        cutile_cpu.launch((2,), faulty, (torch.tensor([5, 4], dtype=torch.int32),))


def test_variables_that_are_not_always_set() -> None:
    """`last` has no value before the first turn: the loop carries a placeholder."""

    @ct.kernel
    def late(x, out, limit: int):
        i = 0
        while True:
            last = ct.gather(x, i)
            if last > limit:
                break
            i += 1
        ct.scatter(out, 0, last)

    x, out = torch.arange(4, dtype=torch.int32) + 5, torch.zeros(1, dtype=torch.int32)
    described = frontend.describe_arguments(late, (x, out, 6))
    assert "make_dummy" in frontend.program(late, described).opcodes
    cutile_cpu.launch((1,), late, (x, out, 6))
    assert out.item() == 7


def test_programmatic_launch_does_nothing() -> None:
    @ct.kernel
    def dependent(x):
        ct.grid_dependency_control_wait()
        ct.scatter(x, 0, ct.gather(x, 0) + 1)
        ct.grid_dependency_control_launch_dependents()

    x = torch.zeros(1)
    cutile_cpu.launch((1,), dependent, (x,))
    assert x.item() == 1


def test_steps_that_are_not_positive() -> None:
    @ct.kernel
    def steps(out, by: int):
        total = 0
        for i in range(0, 10, by):
            total += i
        ct.scatter(out, 0, total)

    out = torch.zeros(1, dtype=torch.int32)
    cutile_cpu.launch((1,), steps, (out, 3))
    assert out.item() == 18
    with pytest.raises(KernelFault, match="a range with the step 0"):
        cutile_cpu.launch((1,), steps, (out, 0))


# ---------------------------------------------------------------- arguments
def test_scalar_tuple_and_wide_arguments() -> None:
    @ct.kernel
    def takes(pair, flag: bool, scale: float, big: ct.ScalarInt64, wide: ct.IndexedWithInt64, n: Const):
        x, shift = pair
        t = ct.load(wide, (ct.bid(0),), (n,)) * scale + shift
        if flag:
            t = t + ct.astype(big // 1_000_000_000_000, ct.float32)
        ct.store(x, (ct.bid(0),), t)

    out, wide = torch.zeros(8), torch.arange(8.0)
    cutile_cpu.launch((2,), takes, ((out, 3), True, 0.5, 5_000_000_000_000, wide, 4))
    assert torch.equal(out, wide * 0.5 + 3 + 5)
    cutile_cpu.launch((2,), takes, ((out, 3), False, 0.5, 5_000_000_000_000, wide, 4))
    assert torch.equal(out, wide * 0.5 + 3)


def test_static_shapes_and_strides_are_constants() -> None:
    @ct.kernel
    def whole(x: Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,), static_stride_dims=(0,))], out):
        ct.static_assert(x.shape[0] == 8 and x.strides[0] == 2)
        ct.store(out, (0,), ct.load(x, (0,), (x.shape[0],)))

    x, out = torch.arange(16.0), torch.zeros(8)
    cutile_cpu.launch((1,), whole, (x[::2], out))
    assert torch.equal(out, x[::2])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(4),), TypeError, "takes 2 arguments"),
        ((torch.zeros(4), object()), TypeError, "n cannot be a constant"),
        ((3.5j, 4), TypeError, "x is a complex, which is no argument"),
        (("text", 4), TypeError, "x is a str, which is no argument"),
        ((torch.zeros(4, dtype=torch.complex64), 4), TypeError, "which cuTile has no data type for"),
        (([], 4), TypeError, "empty list"),
        (([1], 4), TypeError, "items that are not arrays"),
        (([torch.zeros(4), torch.zeros(4, 4)], 4), TypeError, "one data type and one rank"),
        ((2**40, 4), OverflowError, "does not fit int32"),
        ((torch.zeros(1).expand(2**31), 4), OverflowError, "beyond 32 bits"),
        ((torch.zeros(4, device="meta"), 4), ValueError, "x is on meta and has no memory"),
        ((torch.zeros(4, 4).to_sparse(), 4), TypeError, "to_dense"),
        ((torch.zeros(4, dtype=torch.complex64).conj().imag, 4), TypeError, "resolve_neg"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    @ct.kernel
    def plain(x, n: Const):
        pass

    with pytest.raises(error, match=message) as raised:
        cutile_cpu.launch((1,), plain, arguments)
    assert isinstance(raised.value, Misuse) and "\n" not in str(raised.value)


def test_wrong_static_dimensions_are_value_errors() -> None:
    @ct.kernel
    def first(xs: Annotated[list[ct.Array], ct.ListAnnotation(element=ct.ArrayAnnotation(static_shape_dims=(0,)))]):
        pass

    @ct.kernel
    def third(x: Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(2,))]):
        pass

    with pytest.raises(ValueError, match="differ in a static dimension"):
        cutile_cpu.launch((1,), first, ([torch.zeros(4), torch.zeros(5)],))
    with pytest.raises(ValueError, match="static dimension 2, but 1 dimensions"):
        cutile_cpu.launch((1,), third, (torch.zeros(4),))


def test_data_types_that_an_architecture_lacks_are_refused() -> None:
    @ct.kernel
    def copy(x, out):
        ct.store(out, (0,), ct.load(x, (0,), (8,)))

    x, out = torch.ones(8).to(torch.float8_e4m3fn), torch.zeros(8, dtype=torch.float8_e4m3fn)
    with pytest.raises(ct.TileError, match="not supported on sm_80"):
        cutile_cpu.launch((1,), copy, (x, out), arch="sm_80")
    cutile_cpu.launch((1,), copy, (x, out), arch="sm_90")
    assert torch.equal(out.float(), torch.ones(8))


def test_wrong_grids_options_and_functions() -> None:
    @ct.kernel
    def nothing():
        pass

    cutile_cpu.launch((), nothing, ())
    cutile_cpu.launch((0, 4), nothing, ())
    wrong: list[tuple[Any, type[Exception]]] = [
        ((1, 1, 1, 1), ValueError), ((-1,), OverflowError), ((1.5,), TypeError), (3, TypeError),
    ]  # fmt: skip
    for grid, error in wrong:
        with pytest.raises(error, match="up to 3 numbers of blocks") as raised:
            cutile_cpu.launch(grid, nothing, ())
        assert isinstance(raised.value, Misuse)
    with pytest.raises(ValueError, match="at most 16777215 blocks"):
        cutile_cpu.launch((1, 1 << 24), nothing, ())
    with pytest.raises(TypeError, match="is not a cuTile kernel"):
        cutile_cpu.launch((1,), len, ())
    with pytest.raises(TypeError, match="args is a Tensor: give a tuple"):
        cutile_cpu.launch((1,), nothing, torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="leave the stream out"):
        cutile_cpu.launch(None, (1,), nothing, ())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="speed"):
        cutile_cpu.launch((1,), nothing, (), speed=3)  # type: ignore[call-arg]


def test_what_the_front_end_refuses_is_refused() -> None:
    @ct.kernel
    def odd(x):
        ct.store(x, (0,), ct.zeros((3,), dtype=ct.float32))

    with pytest.raises(ct.TileError, match="power of"):
        cutile_cpu.launch((1,), odd, (torch.zeros(3),))


# ---------------------------------------------------------------- the cache
def test_one_program_serves_arguments_that_are_specialised_alike() -> None:
    calls = []

    @ct.kernel
    def copy(x, out, n: Const):
        ct.store(out, (0,), ct.load(x, (0,), (n,)))

    def key(*arguments: object) -> object:
        described = frontend.describe_arguments(copy, arguments)
        made = frontend.program(copy, described)
        calls.append(made)
        return made

    x = torch.zeros(64)
    first = key(x, x, 8)
    assert key(torch.zeros(32), torch.zeros(48), 8) is first  # multiples of 16
    assert key(x, x, 16) is not first  # a constant
    assert key(torch.zeros(33), x, 8) is not first  # no multiple of 16
    assert key(x.to(torch.float64), x.to(torch.float64), 8) is not first
    assert key(torch.zeros(128)[::2], x, 8) is not first  # a stride
    assert key(torch.zeros(65)[1:], x, 8) is not first  # an address
    assert len({id(c) for c in calls}) == 6


_SCALE = 2.0


def test_a_kernel_made_anew_sees_what_its_function_sees_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    shift = 1.0

    def scaled(x, out):
        ct.store(out, (0,), ct.load(x, (0,), (8,)) * _SCALE + shift)

    def run(kernel: object) -> float:
        out = torch.zeros(8)
        cutile_cpu.launch((1,), kernel, (torch.ones(8), out))
        return out[0].item()

    first = ct.kernel(scaled)
    assert run(first) == 3.0
    monkeypatch.setitem(globals(), "_SCALE", 3.0)
    shift = 10.0
    assert run(ct.kernel(scaled)) == run(first.replace_hints(num_ctas=1)) == 13.0
    assert run(first) == 3.0  # compiled once, as in cuTile


def test_signatures_are_those_of_a_launch() -> None:
    """The facts that cuTile's launch takes from a tensor (its C extension is not callable without a driver)."""

    @ct.kernel
    def takes(x):
        pass

    def constraint(x: torch.Tensor) -> object:
        return frontend.describe_arguments(takes, (x,)).constraints[0]

    c = constraint(torch.zeros(32, 1, 24, dtype=torch.bfloat16))
    assert c.shape_constant == (None, 1, None) and c.stride_constant == (None, None, 1)
    assert c.shape_divisible_by == (16, 1, 1) and c.stride_divisible_by == (8, 8, 1)
    assert c.base_addr_divisible_by == 16 and not c.may_alias_internally and c.index_dtype == ct.int32
    assert constraint(torch.zeros(4, 1).expand(4, 4)).may_alias_internally
    six = constraint(torch.zeros(1, 16, 1, 16, 1, 16))
    assert six.shape_constant == (None,) * 6 and six.stride_constant == (None,) * 6
    assert constraint(torch.zeros(17)[1:]).base_addr_divisible_by == 1


def test_in_place_of_launch() -> None:
    @ct.kernel
    def double(x):
        ct.store(x, (0,), ct.load(x, (0,), (8,)) * 2)

    real, x = ct.launch, torch.ones(8)
    with cutile_cpu.in_place_of_launch():
        ct.launch(None, (1,), double, (x,))
    assert ct.launch is real and x.tolist() == [2.0] * 8
