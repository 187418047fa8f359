"""Timing on a real GPU: it repeats, and a contender that breaks the device costs no other."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest

from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.device import Device
from mla_var3.dispatch import choose
from mla_var3.measure import timing
from mla_var3.measure.calibrate import measure_all
from mla_var3.measure.cell import BenchSettings, Contender, measure_cell
from mla_var3.measure.cuda_backend import CudaBackend
from mla_var3.record import Record
from mla_var3.workload.decode import MlaProblem

pytestmark = pytest.mark.gpu
PROBLEM = MlaProblem(b=64, t=2048, h=16)


@pytest.fixture(scope="module")
def device() -> Device:
    found = Device.detect()
    assert found is not None
    return found


def gather(name: str = "Gather") -> Contender:
    return Contender(KernelId("torch", "mla", name.lower()), plan=f"bench_gpu_fakes:{name}")


def contenders(device: Device) -> list[Contender]:
    """The fake that always runs, and what of flash_mla can run here."""
    found = [gather()]
    for kernel in registry.all_kernels():
        if kernel.design == "flash_mla" and kernel.language != "torch" and registry.missing(kernel.language) is None:
            plan = registry.get_plan(kernel)
            if device.can_run(plan.requires, PROBLEM):
                found.append(Contender(kernel))
    return found[:3]


def run(device: Device, *chosen: Contender, settings: BenchSettings | None = None) -> list[Record]:
    return list(measure_cell(PROBLEM, chosen, device, settings or BenchSettings(), experiment="test"))


def test_two_runs_agree_once_divided_by_their_limits(device: Device) -> None:
    chosen = contenders(device)
    first, second = (
        {r.kernel.label: r for r in run(device, *chosen)},
        {r.kernel.label: r for r in run(device, *chosen)},
    )
    for label, one in first.items():
        two = second[label]
        assert one.status == two.status == "passed", (one.reason, two.reason)
        for state in ("burst", "sustained"):
            ratios = []
            for record in (one, two):
                stats, limit = getattr(record.time_us, state), getattr(record.limits, state)
                ratios.append(stats.median / limit.limit_us)
            assert ratios[0] == pytest.approx(ratios[1], rel=0.03), (label, state, ratios)


def test_a_record_of_a_gpu_is_whole(device: Device) -> None:
    (record,) = run(device, gather())
    assert record.status == "passed", record.reason
    assert record.device == device.key and record.environment["gpu"]
    assert record.time_us is not None and record.limits is not None
    burst, hot = record.time_us.burst, record.time_us.sustained
    assert burst is not None and hot is not None and hot.n >= 5
    assert burst.p10 <= burst.median <= burst.p90
    assert record.environment["clocks"]["burst"]["sm_mhz"] > 0
    assert record.host_us and record.plan_us and record.launches
    assert record.cross_check_us == pytest.approx(burst.median, rel=0.25)


def test_an_illegal_access_costs_no_other(device: Device) -> None:
    bad, good = run(device, gather("BadPointer"), gather(), settings=BenchSettings.fast())
    status = {r.kernel.design: r.status for r in (bad, good)}
    assert status == {"badpointer": "failed", "gather": "passed"}


def test_the_limits_are_near_what_was_measured_before(device: Device) -> None:
    known = device.ceiling("read_gbps", "burst")
    if known is None:
        pytest.skip(f"no measured ceiling of {device.key} is on file")
    found = measure_all(settings=dataclasses.replace(BenchSettings(), sustained_s=0.2))
    assert found["burst"].read_gbps == pytest.approx(known.value, rel=0.06)
    assert found["sustained"].matmul_tflops <= found["burst"].matmul_tflops * 1.02


@pytest.mark.parametrize(
    ("problem", "launches"), [(MlaProblem(b=128, h=16), 1), (MlaProblem(b=1, h=128), 2)], ids=("one", "with a combine")
)
def test_a_launch_of_a_bound_cute_kernel_costs_the_host_less_than_5_us(
    device: Device, problem: MlaProblem, launches: int
) -> None:
    if reason := registry.missing("cute-dsl"):
        pytest.skip(reason)
    choice = choose(problem, device)
    if choice.kernel.language != "cute-dsl":
        pytest.skip(f"on {device.key} {choice.label} is picked")
    plan = choice.plan(problem, device)
    kernel, backend = plan.plan(*plan.prepare_inputs("cuda")), CudaBackend()
    kernel()
    assert backend.launches(kernel) == launches
    least = math.inf
    for _ in range(5):  # what slows the host for seconds is no part of a launch
        least = min(least, timing.host_us(backend, kernel, 32 * timing.HOST_QUEUE) / launches)
        if least < 5.0:
            return
        time.sleep(1.0)
    raise AssertionError(f"{least:.2f} us a launch, {launches} in a call")
