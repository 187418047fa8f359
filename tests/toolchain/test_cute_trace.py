"""A traced copy of a CuTe kernel: what it stores, what that is called, and that nothing else is changed."""

# ruff: noqa: E402 - the imports below need what importorskip found
from __future__ import annotations

import contextlib
import re
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mla_var3.device import Device

cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.memory import SmemAllocator

from mla_var3.toolchain import aot, cute_trace
from mla_var3.toolchain.cute import compile_cute, fake_stream
from mla_var3.toolchain.cute_trace import END, HEADER, RANGE, WAIT, Event, Recorder, tracing

H200 = Device.get("h200")
BASE = 0x7F00_0000_0000


class Barrier(IntEnum):
    CTA = 0
    HALF = 3


@cute.jit
def sum_of_many(values: cute.Tensor, thread: Int32) -> Float32:
    """Long enough for a range."""
    total = Float32(0.0)
    for i in cutlass.range_constexpr(64):
        total = total + values[(thread + i) % 128]
    return total


@cute.jit
def one_more(value: Float32) -> Float32:
    """Too short for a range."""
    return value + 1.0


@cute.kernel
def small(values: cute.Tensor, rounds: Int32):
    thread, _, _ = cute.arch.thread_idx()
    full = SmemAllocator().allocate_array(cutlass.Int64, 1)
    if thread == 0:
        cute.arch.mbarrier_init(full, 128)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    for i in cutlass.range(rounds, unroll=1):
        cute.arch.mbarrier_arrive(full)
        cute.arch.mbarrier_wait(full, i % 2)
        values[thread] = one_more(sum_of_many(values, thread))
        cute.arch.barrier(barrier_id=int(Barrier.HALF), number_of_threads=128)


@cute.jit
def launch_small(values: cute.Tensor, rounds: Int32, stream: Any):
    small(values, rounds).launch(grid=(2, 1, 1), block=(128, 1, 1), stream=stream)


def compiled(out_dir: Path | None = None) -> Any:
    values = make_fake_compact_tensor(Float32, (128,))
    arguments = (values, Int32(1), fake_stream())
    return compile_cute(launch_small, arguments, device=H200, out_dir=out_dir, keep=("ptx",) if out_dir else ())


def test_a_traced_kernel_has_events_and_the_kernel_itself_stays_as_it_was(tmp_path: Path) -> None:
    before = compiled().code.digest
    recorder = Recorder(BASE, 1 << 20, capacity=64)
    with tracing(recorder):
        traced = compiled(tmp_path)
    assert compiled().code.digest == before != traced.code.digest
    assert [(event.kind, event.name) for event in recorder.events] == [
        (WAIT, "wait CTA"),
        (WAIT, "wait full"),
        (RANGE, "sum_of_many"),
        (RANGE, "one_more"),
        (WAIT, "wait HALF"),
    ]
    lines = Path(__file__).read_text().splitlines()
    for event, text in ((recorder.events[1], "mbarrier_wait"), (recorder.events[4], "Barrier.HALF")):
        name, _, line = event.where.partition(":")
        assert name == "test_cute_trace.py" and text in lines[int(line) - 1]
    assert recorder.regions == [cute_trace.Region("small", 0, 2, 4)]

    ptx = traced.artefacts["ptx"].read_text()
    stored = [int(word) for word in re.findall(r"mov\.u32 event, (\d+);", ptx)]
    # Each begins and ends once, but for the short function, of which nothing is left.
    assert sorted(stored) == [0, 1, 2, 4, *(i | END for i in (0, 1, 2, 4))]
    assert ptx.count(".reg .b32 trace_slot") == 1 and ptx.count("%globaltimer") == 2
    assert f"add.u64 at, at, {BASE};" in ptx and "trace_used, 64;" in ptx


def test_without_a_trace_the_functions_of_the_compiler_are_its_own() -> None:
    names = ("mbarrier_wait", "barrier", "sync_threads")
    before = [getattr(cute.arch, name) for name in names] + [aot.compiled_host]
    with contextlib.suppress(RuntimeError), tracing(Recorder(BASE, 1 << 20)):
        for mine, its_own in zip(
            [getattr(cute.arch, name) for name in names] + [aot.compiled_host], before, strict=True
        ):
            assert mine is not its_own
        raise RuntimeError
    assert [getattr(cute.arch, name) for name in names] + [aot.compiled_host] == before


def test_what_is_planned_meanwhile_comes_from_no_cache_and_goes_to_none(tmp_path: Path) -> None:
    from mla_var3.catalogue.registry import KernelId, get_plan
    from mla_var3.workload.norm import NormProblem

    made: list[str] = []
    traced: Any = SimpleNamespace(handle=None)
    plan = get_plan(KernelId.parse("cute-dsl/rmsnorm"))(NormProblem(rows=64), None, H200)
    plan.compiled.folder = tmp_path

    def compile_fn(tiling: Any, device: Device) -> Any:
        made.append(device.key)
        return traced

    recorder = Recorder(BASE, 1 << 20)
    with tracing(recorder):
        for _ in range(2):
            assert aot.compiled_host(plan, "rmsnorm", compile_fn, device=H200) is traced
    assert recorder.compiled == [traced, traced]
    assert made == ["h200", "h200"] and not list(tmp_path.iterdir()) and not plan.compiled


def test_a_traced_kernel_is_loaded_as_every_other_one_is() -> None:
    plan: Any = SimpleNamespace(tiling=None, device=H200)
    with tracing(Recorder(BASE, 1 << 20)) as recorder:
        found = aot.compiled_host(plan, "small", lambda tiling, device: compiled())
    assert callable(found.handle) and not hasattr(found.handle, "export_to_c")
    assert found.code == recorder.compiled[0].code and "sum_of_many" in {event.name for event in recorder.events}


def test_a_buffer_is_dealt_out_kernel_by_kernel() -> None:
    recorder = Recorder(BASE, 10 * 4 * 512, capacity=64, most_ctas=6)
    assert recorder.stride == 512
    assert recorder.region("first", (2, 2, 1), (128, 1, 1)) == cute_trace.Region("first", 0, 4, 4)
    # A grid that is known at a launch only gets the most, as far as there is room.
    assert recorder.region("second", (object(), 1, 1), [100, 1, 1]) == cute_trace.Region("second", 4 * 4 * 512, 6, 4)
    assert recorder.region("third", (1, 1, 1), (32, 1, 1)) is None
    assert recorder.left_out == ["third"]
    for fields in ({"capacity": HEADER}, {"size": 1 << 33}, {"base": BASE + 8}):
        with pytest.raises(ValueError, match="is no buffer"):
            Recorder(**{"base": BASE, "size": 1 << 20, **fields})


def test_an_event_has_one_number() -> None:
    recorder = Recorder(BASE, 1 << 20)
    one, two = Event(WAIT, "wait full", "a.py:1"), Event(WAIT, "wait full", "a.py:2")
    assert [recorder.number(event) for event in (one, two, one)] == [0, 1, 0]
    assert recorder.events == [one, two]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("cute.arch.mbarrier_wait(full, parity)", "full"),
        ("cute.arch.mbarrier_wait(storage.full.data_ptr() + last_read, 0)", "full"),
        ("cute.arch.mbarrier_wait(self.empty + (2 * stage + half), parities[stage])", "empty"),
        ("wait(", "mbarrier"),
    ],
)
def test_an_mbarrier_is_called_after_what_points_to_it(text: str, name: str) -> None:
    assert cute_trace._mbarrier_name(text) == name


@pytest.mark.parametrize(
    ("number", "text", "name"),
    [
        (3, "", "HALF"),
        (7, "", "barrier 7"),
        (None, "cute.arch.barrier()", "CTA"),
        (object(), "cute.arch.barrier(barrier_id=Barrier.HALF + self.me, number_of_threads=128)", "HALF + me"),
        (object(), "named_sync(Barrier.HALF + other, THREADS)", "HALF + other"),
        (object(), "anything(", "barrier"),
    ],
)
def test_a_named_barrier_is_called_as_the_version_calls_it(number: Any, text: str, name: str) -> None:
    assert cute_trace._barrier_name(__name__, number, text) == name
