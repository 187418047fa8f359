"""Contenders that behave in every bad way, and backends without a GPU. With `WITHOUT_TORCH` in its environment a worker
of these starts at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from mla_var3.device import Device, Requirement
from mla_var3.errors import UserError, Verdict
from mla_var3.runtime.base import BaseKernel
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.types import Tiling
from mla_var3.toolchain.compiled import CompiledKernel, Resources
from mla_var3.workload import Rows, decode
from mla_var3.workload.decode import MlaProblem

POISONED = False
WITHOUT_TORCH = "MLA_VAR3_TEST_WITHOUT_TORCH"


class Shared:
    """`measure.buffers.Shared` of kernels that make no tensors."""

    def __init__(self, plan: Callable[[], BaseKernel]) -> None:
        self.first = self._without_results(plan())

    def bind(self, *inputs: Any) -> BaseKernel:
        return self._without_results(self.first.bind(*inputs))

    def _without_results(self, kernel: BaseKernel) -> BaseKernel:
        kernel.keep_results(False)
        return kernel


if os.environ.get(WITHOUT_TORCH):
    sys.modules["mla_var3.measure.buffers"] = ModuleType("mla_var3.measure.buffers")
    sys.modules["mla_var3.measure.buffers"].Shared = Shared  # type: ignore[attr-defined]


@dataclass(frozen=True)
class FakeTiling(Tiling):
    tile: int = 64

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes() if self.tile <= 256 else Verdict.no(f"tile {self.tile} is above 256")


class FakeKernel(BaseKernel):
    """Calls the plan's `work`; its one output holds the plan's answer."""

    def launch(self) -> None:
        self.plan.work()

    def bind(self, *inputs: Any) -> FakeKernel:
        return self.plan.plan(*inputs)

    def compile(self, out_dir: Path | None, device: Device, keep: Any = ()) -> CompiledKernel:
        return self.plan.compiled_kernel(device)


class FakePlan(KernelPlan):
    workload = decode.WORKLOAD
    tiling_type = FakeTiling
    requires = Requirement(archs=("sm_90a",))
    answer = 1.0
    seconds = 20e-6

    def default_tiling(self) -> FakeTiling:
        return FakeTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [FakeTiling(64), FakeTiling(128)]

    def prepare_inputs(self, device: str = "cpu", **options: Any) -> tuple[Any, ...]:
        return (options["seed"],)

    def plan(self, *inputs: Any) -> FakeKernel:
        return FakeKernel("fake", input_tensors=inputs, output_tensors=(self.answer,), tiling=self.tiling, plan=self)

    def plan_empty(self) -> FakeKernel:
        return FakeKernel("fake", tiling=self.tiling, plan=self)

    def work(self) -> None:
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass

    def compiled_kernel(self, device: Device) -> CompiledKernel:
        return CompiledKernel(
            "fake",
            device.arch,
            Resources(registers=100, smem_dynamic=1000, instructions={"HGMMA": 4}),
            seconds=12.3456,
        )


class Good(FakePlan): ...


class Slow(FakePlan):
    seconds = 100e-6


class SharedSchedule(FakePlan):
    """A library's: calls share a schedule, and making it takes as long again."""

    def plan(self, *inputs: Any) -> FakeKernel:
        kernel: FakeKernel = super().plan(*inputs)
        kernel.__class__ = Scheduling
        return kernel


class Scheduling(FakeKernel):
    @property
    def with_schedule(self) -> Any:
        return lambda: (self.launch(), self.launch())


class InParts(FakePlan):
    """Half of each call is a part that is timed by itself."""

    def plan(self, *inputs: Any) -> FakeKernel:
        kernel: FakeKernel = super().plan(*inputs)
        kernel.__class__ = Divided
        return kernel


class Divided(FakeKernel):
    def launch(self) -> None:
        self.plan.work()
        self.plan.work()

    @property
    def beside(self) -> Any:
        return {"half": self.plan.work}


class VirtualClock:
    """Microseconds of `VirtualBackend`. apart: a tiny kernel stands between calls."""

    us = 0.0
    apart = False


class RunsBeside(FakePlan):
    """For 4 of its 100 us it runs beside the call before it."""

    def work(self) -> None:
        VirtualClock.us += 100.0 if VirtualClock.apart else 96.0


class HidesItsLaunch(FakePlan):
    """Behind a long kernel 0.75 of its 50 us do not show."""

    def work(self) -> None:
        VirtualClock.us += 50.0 if VirtualClock.apart else 49.25


class Wrong(FakePlan):
    answer = 2.0


class Segfault(FakePlan):
    def work(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Hang(FakePlan):
    def work(self) -> None:
        while True:
            time.sleep(1.0)


class CrashesWhenTimed(FakePlan):
    """Passes its check, and dies on a later call."""

    calls = 0

    def work(self) -> None:
        CrashesWhenTimed.calls += 1
        if CrashesWhenTimed.calls > 3:
            os.kill(os.getpid(), signal.SIGSEGV)


class Raises(FakePlan):
    def work(self) -> None:
        raise ValueError("the launch was refused")


class Poison(FakePlan):
    """What a CUDA error does: this call raises, and so does everything after it."""

    def work(self) -> None:
        global POISONED
        POISONED = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class BadImport(FakePlan):
    def __init__(self, *args: Any) -> None:
        raise UserError("this version cannot be planned.")


class TooMuchSmem(FakePlan):
    def compiled_kernel(self, device: Device) -> CompiledKernel:
        return CompiledKernel("fake", device.arch, Resources(smem_dynamic=300_000))


class NoCompiler(FakePlan):
    def compiled_kernel(self, device: Device) -> CompiledKernel:
        raise UserError("the compiler is not installed.")


class OnlyFp16(FakePlan):
    requires = Requirement(dtypes=("fp16",))


class _Now:
    def __init__(self, taken: list[float]) -> None:
        self.taken = taken

    def wait(self) -> list[float]:
        return self.taken


class HostBackend:
    """Times Python calls with the host's clock."""

    torch_device = "cpu"
    times = True
    clock = "perf_counter of a test"

    def check(self, plan: Any, device: Any, quick: bool) -> Any:
        self.synchronize()
        (answer,) = plan.plan(0)()
        return SimpleNamespace(ok=answer == 1.0, reason="the answer is wrong", error={"out": answer - 1.0, "lse": 0.0})

    def capture(self, calls: Any, rotations: int, *, graph: bool = True, separated: bool = False) -> Any:
        return lambda: [call() for _ in range(rotations) for call in calls]

    def start(self, replay: Any, count: int) -> _Now:
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            replay()
            taken.append((time.perf_counter() - start) * 1e6)
        return _Now(taken)

    def launches(self, call: Any) -> int | None:
        return 1

    def timeline(self, calls: Any) -> list[tuple[str, float]]:
        return [("first", 3.0), ("second", 1.0)]

    def sensors(self) -> dict[str, float]:
        return {"sm_mhz": 1980.0, "power_w": 100.0, "temperature_c": 40.0}

    def idle(self, seconds: float) -> None:
        time.sleep(0.0)

    def synchronize(self) -> None:
        if POISONED:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def broken(self) -> bool:
        return POISONED

    def release(self) -> None: ...

    def limit_calls(self) -> Any:
        return {key: (lambda: time.sleep(1e-4), 1e6) for key in ("matmul", "read", "copy")}

    def cross_check_us(self, calls: Any, graph_ms: float) -> float:
        return 21.0


class VirtualBackend(HostBackend):
    """Times calls by `VirtualClock`, which they and the tiny kernels between them advance."""

    def capture(self, calls: Any, rotations: int, *, graph: bool = True, separated: bool = False) -> Any:
        def replay() -> None:
            VirtualClock.us, VirtualClock.apart = 0.0, separated
            for call in list(calls) * rotations:
                call()
                VirtualClock.us += 1.5 if separated else 0.0

        return replay

    def start(self, replay: Any, count: int) -> _Now:
        taken = []
        for _ in range(count):
            replay()
            taken.append(VirtualClock.us or 100.0)  # the limits' calls advance nothing
        return _Now(taken)


class NoGpuBackend(HostBackend):
    def __init__(self) -> None:
        raise UserError("there is no GPU here.")


class BrokenStartBackend(HostBackend):
    def limit_calls(self) -> Any:
        raise RuntimeError("no memory for the limits")


class SimulatedBackend:
    """A chip on a virtual clock: work heats it, idling cools it, and a hot chip is slower.

    A call is a pair (cold microseconds, overlap microseconds) in `self.work`, looked up by the function itself.
    """

    torch_device = "cpu"
    times = True
    clock = "simulated"
    gap_us = 1.5
    graph_us = 0.0  # of every replay, whatever it holds
    slow_down = 0.25
    soak_us = 50e3

    def __init__(self) -> None:
        self.now_us = 0.0  # the host's clock
        self.busy_us = 0.0  # when the device is through with its queue
        self.heat = 0.0
        self.work: dict[Any, tuple[float, float]] = {}
        self.log: list[tuple[Any, ...]] = []

    def call(self, us: float, overlap: float = 0.0) -> Any:
        def run() -> None: ...

        self.work[run] = (us, overlap)
        return run

    def capture(self, calls: Any, rotations: int, *, graph: bool = True, separated: bool = False) -> Any:
        cold = 0.0
        for call in calls:
            us, overlap = self.work.get(call, (0.0, 0.0))
            cold += us + self.gap_us if separated else us - overlap
        self.log.append(("capture", len(calls), rotations, separated))
        return (cold * rotations + self.graph_us, tuple(calls))

    def start(self, replay: Any, count: int) -> _Now:
        self.log.append(("start", replay, count, self.heat))
        taken = []
        for _ in range(count):
            us = replay[0] * (1.0 + self.slow_down * self.heat)
            self.heat = min(1.0, self.heat + us / self.soak_us)
            taken.append(us)
        self.busy_us = max(self.now_us, self.busy_us) + sum(taken)
        return _Now(taken)

    def launches(self, call: Any) -> int | None:
        return 2

    def idle(self, seconds: float) -> None:
        self.log.append(("idle", seconds))
        self.now_us += seconds * 1e6
        if self.now_us > self.busy_us:
            self.heat = 0.0

    def sensors(self) -> dict[str, float]:
        return {"sm_mhz": 1980.0 - 480.0 * self.heat}

    def synchronize(self) -> None:
        self.now_us = max(self.now_us, self.busy_us)

    def broken(self) -> bool:
        return False

    def release(self) -> None: ...

    def limit_calls(self) -> Any:
        return {
            "matmul": (self.call(1400.0), 2.0 * 8192**3),
            "read": (self.call(463.0), float(2 << 30)),
            "copy": (self.call(504.0), float(2 << 30)),
        }

    def rows_call(self, rows: Rows) -> Any:
        return self.call(580.0 + (rows.pitch > 1152) * 20.0), float(2 << 30)
