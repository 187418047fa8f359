"""Cells through the real worker: what a bad contender costs, and what it does not cost the others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bench_fakes
import pytest

from mla_var3 import paths
from mla_var3.catalogue.registry import KernelId
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.measure.cell import BenchSettings, Contender, contender_key, measure_cell, measure_cells
from mla_var3.record import Record, RecordStore, finished_keys, load
from mla_var3.workload.decode import MlaProblem

PROBLEM = MlaProblem(b=2, t=128, h=16)
QUICK: dict[str, Any] = {
    "backend": "bench_fakes:HostBackend",
    "burst_rounds": 2,
    "sustained_rounds": 1,
    "sustained_s": 0.002,
    "settle_s": 0.002,
    "graph_ms": 0.2,
    "overlap_probe": False,
    "check_limit_s": 1.0,
    "worker_env": ((bench_fakes.WITHOUT_TORCH, "1"),),
}


def fake(name: str, language: str = "triton", **options: Any) -> Contender:
    kernel = KernelId(language, "mla", name.lower(), 0)
    return Contender(kernel, plan=f"bench_fakes:{name}", **options)


def measure(*contenders: Contender, device: Device | None = None, **settings: Any) -> dict[str, Record]:
    chosen = BenchSettings(**{**QUICK, **settings})
    found = list(measure_cell(PROBLEM, contenders, device, chosen, experiment="test"))
    assert len(found) == len(contenders)
    return {r.kernel.design: r for r in found}


def test_each_failure_is_its_own_contenders_and_costs_no_other() -> None:
    names = ["Good", "Segfault", "Wrong", "Hang", "Raises", "Poison", "CrashesWhenTimed", "Slow"]
    found = measure(*(fake(name) for name in names))
    status = {design: record.status for design, record in found.items()}
    assert status == {
        "good": "passed",
        "slow": "passed",
        "wrong": "incorrect",
        "raises": "failed",
        "segfault": "failed",
        "hang": "failed",
        "poison": "failed",
        "crasheswhentimed": "failed",
    }
    reasons = {design: record.reason for design, record in found.items()}
    assert reasons["wrong"] == "the answer is wrong" and found["wrong"].error is not None
    place = r'\(bench_fakes.py:\d+: raise ValueError\("the launch was refused"\)\)'
    assert re.fullmatch(rf"check: ValueError: the launch was refused {place}", reasons["raises"])
    assert "check: the worker was ended by SIGSEGV" in reasons["segfault"]
    assert "Segmentation fault" in reasons["segfault"] and "bench_fakes.py" in reasons["segfault"]
    assert "check: no end after 1 s" in reasons["hang"] and "in work" in reasons["hang"]
    assert "illegal memory access" in reasons["poison"]
    assert reasons["crasheswhentimed"].startswith("prepare: the worker was ended by SIGSEGV")
    # The check of "good" took place in the first of the five workers, and was carried to the last.
    assert set(found["good"].seconds or {}) == {"plan", "check", "prepare", "time"}
    for record in found.values():
        assert (record.time_us is not None) == (record.status == "passed")
        assert record.tiling == {"tile": 64}


def test_a_passed_record_has_everything() -> None:
    record = measure(fake("Good"), fake("Slow"), worker_env=())["good"]
    assert record.time_us is not None and record.limits is not None and record.error is not None
    assert record.time_us.burst is not None and record.time_us.sustained is not None
    assert 20 <= record.time_us.burst.median < 2000 and record.time_us.burst.n == 2
    assert record.limits.bound in ("compute", "memory")
    assert record.limits.burst is not None and record.limits.burst.limit_us > 0
    assert record.host_us is not None and record.host_us >= 20
    assert record.cross_check_us == 21.0
    cost = PROBLEM.cost()
    assert (record.flops, record.bytes) == (cost.flops, cost.bytes)
    assert record.method is not None and "perf_counter of a test" in record.method
    assert record.environment["clocks"] == {"burst": {"sm_mhz": 1980.0}, "sustained": {"sm_mhz": 1980.0}}
    assert record.environment["power"]["burst"] == 100.0 and record.environment["temperature"]["sustained"] == 40.0
    assert set(record.seconds or {}) == {"plan", "check", "prepare", "time"}
    assert len(record.source.hash) == 16
    # Nothing here ran on a GPU, and the record does not say so.
    assert record.device == "cpu" and record.environment["gpu"] is None and record.resources is None


def test_what_calls_share_is_timed_beside_them() -> None:
    # Of two rounds on the host's clock, one that was interrupted would be half of the median.
    found = measure(fake("Good"), fake("SharedSchedule"), burst_rounds=7)
    assert found["good"].with_schedule_us is None
    record = found["sharedschedule"]
    assert record.with_schedule_us is not None and record.time_us is not None
    for state in ("burst", "sustained"):
        call, scheduled, in_a_step = record.median(state), record.scheduled(state), record.in_a_step(state)
        assert call is not None and scheduled is not None and in_a_step is not None
        assert 1.5 * call < scheduled < 4 * call
        assert in_a_step == pytest.approx(call + (scheduled - call) / 61)
        assert found["good"].in_a_step(state) == found["good"].median(state) == found["good"].scheduled(state)
        assert found["good"].speedup(record, state) == pytest.approx(in_a_step / found["good"].median(state))


def test_where_one_contender_overlaps_all_are_timed_apart() -> None:
    virtual: dict[str, Any] = {"backend": "bench_fakes:VirtualBackend", "overlap_probe": True}

    def times(*names: str) -> dict[str, tuple[float, float, float | None]]:
        found = measure(*(fake(name) for name in names), **virtual)
        kept = {}
        for design, record in found.items():
            burst, sustained = record.median("burst"), record.median("sustained")
            assert burst is not None and sustained is not None and record.method is not None
            assert ("a tiny kernel stands between them, its 1.50 us taken off" in record.method) == (burst % 5 == 0)
            kept[design] = (burst, sustained, record.overlap_us)
        return kept

    # A launch that hides is no overlap, but beside a call that has one it counts in full.
    assert times("HidesItsLaunch") == {"hidesitslaunch": (49.25, 49.25, None)}
    assert times("RunsBeside", "HidesItsLaunch") == {
        "runsbeside": (100.0, 100.0, pytest.approx(4.0)),
        "hidesitslaunch": (50.0, 50.0, None),
    }


def test_parts_of_a_call_are_timed_beside_it_and_kernels_on_request() -> None:
    found = measure(fake("Good"), fake("InParts"))
    assert found["good"].beside_us is None and found["good"].timeline is None
    record = found["inparts"]
    assert record.timeline is None
    for state in ("burst", "sustained"):
        call, half = record.median(state), record.beside("half", state)
        assert call is not None and half is not None and 1.4 * half < call < 4 * half
        assert record.beside("third", state) is None
    (record,) = measure(fake("Good"), timeline=True).values()
    assert record.timeline is not None
    assert [(span.name, span.us) for span in record.timeline] == [("first", 3.0), ("second", 1.0)]
    assert Record.model_validate_json(record.to_json()).timeline == record.timeline


def test_the_order_of_tests_on_the_way() -> None:
    h200 = Device.get("h200")
    found = measure(
        fake("Good"),
        fake("Slow", tiling={"tile": 512}),
        fake("OnlyFp16"),
        fake("TooMuchSmem"),
        fake("NoCompiler"),
        fake("BadImport"),
        fake("Wrong", language="cute-dsl"),
        fake("Raises", tiling={"tle": 1}),
        Contender(KernelId("triton", "mla", "absent"), plan="no_such_module:Plan"),
        device=h200,
        mode="compile",
    )
    assert {d: r.status for d, r in found.items()} == {
        "good": "compiled",
        "slow": "infeasible",
        "onlyfp16": "skipped",
        "toomuchsmem": "infeasible",
        "nocompiler": "failed",
        "badimport": "failed",
        "wrong": "compiled",
        "raises": "failed",
        "absent": "failed",
    }
    assert found["slow"].reason == "tile 512 is above 256" and found["slow"].tiling == {"tile": 512}
    assert "300000 bytes of shared memory" in found["toomuchsmem"].reason
    assert found["good"].resources is not None and found["good"].resources["instructions"] == {"HGMMA": 4}
    assert found["good"].device == "h200" and found["good"].mode == "compile"
    # What the compiler took is no part of what the cell took: a cache may have had the code.
    assert found["good"].compile_seconds == 12.346 and (found["good"].seconds or {})["compile"] < 10
    assert found["badimport"].compile_seconds is None
    assert "did you mean 'tile'" in found["raises"].reason
    assert "ModuleNotFoundError" in found["absent"].reason


def test_a_missing_compiler_does_not_fail_a_run() -> None:
    record = measure(fake("NoCompiler"), device=Device.get("h200"))["nocompiler"]
    assert record.status == "passed" and record.resources is None
    assert record.warnings == ["not compiled for its resources: the compiler is not installed."]


def test_a_gpu_kernel_on_a_cpu_is_skipped() -> None:
    found = measure(fake("Good", language="cute-dsl"), fake("Slow", language="peer"))
    assert [r.status for r in found.values()] == ["skipped", "skipped"]
    assert "do not run on a CPU" in found["good"].reason


def test_a_cell_that_does_not_fit_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("something was launched"))
    huge = MlaProblem(b=4096, t=131072)
    cells = [(huge, [fake("Good"), fake("Slow")])]
    found = list(measure_cells(cells, Device.get("h200"), BenchSettings(**QUICK, commit="0"), experiment="test"))
    assert [r.status for r in found] == ["skipped", "skipped"]
    assert "b4096_s1_h128_t131072 on h200 needs about" in found[0].reason and "141.0 GB" in found[0].reason


def test_cells_share_a_worker_and_a_crash_in_one_spares_the_rest() -> None:
    other = PROBLEM.replace(t=64)
    cells = [(PROBLEM, [fake("Good"), fake("Segfault")]), (other, [fake("Good"), fake("Segfault")])]
    found = list(measure_cells(cells, None, BenchSettings(**QUICK), experiment="test"))
    table = {(r.problem["t"], r.kernel.design): r.status for r in found}
    assert table == {
        (128, "good"): "passed",
        (128, "segfault"): "failed",
        (64, "good"): "passed",
        (64, "segfault"): "failed",
    }


def test_what_ends_the_worker_again_and_again_is_given_up() -> None:
    cells = [(PROBLEM.replace(t=t), [fake("Segfault"), fake("Good"), fake("Poison")]) for t in (16, 32, 48, 64, 80)]
    masked = PROBLEM.replace(s=2, causal=True)
    cells.append((masked, [fake("Segfault"), fake("Good")]))
    found = list(measure_cells(cells, None, BenchSettings(**QUICK, give_up=2), experiment="test"))
    table = {(r.problem["t"], r.problem["causal"], r.kernel.design): r for r in found}
    for bad in ("segfault", "poison"):
        status = [table[t, False, bad].status for t in (16, 32, 48, 64, 80)]
        assert status == ["failed"] * 2 + ["skipped"] * 3, bad
    assert "given up: it ended the worker in 2 cells like this one" in table[48, False, "segfault"].reason
    assert table[128, True, "segfault"].status == "failed", "a masked problem is another kind"
    assert all(table[t, False, "good"].status == "passed" for t in (16, 32, 48, 64, 80))
    assert len(found) == len(table) == 17


def test_limits_of_the_run_serve_several_cells() -> None:
    cells = [(PROBLEM.replace(t=t), [fake("Good")]) for t in (16, 32, 48)]
    each = list(measure_cells(cells, None, BenchSettings(**QUICK), experiment="test"))
    assert [r.to_json().count("age_s") for r in each] == [0, 0, 0], "each cell measured its own"
    assert all("limits (bf16 8192^3 product, a kernel that reads 2 GiB) in turn" in (r.method or "") for r in each)
    once = list(measure_cells(cells, None, BenchSettings(**QUICK, limits_every_s=60.0), experiment="test"))
    assert len({r.limits.burst.matmul_tflops for r in once if r.limits and r.limits.burst}) == 1
    ages = [(r.to_json().count("age_s"), "s before in the same process" in (r.method or "")) for r in once]
    assert ages == [(0, False), (1, True), (1, True)]
    assert len({r.limits.burst.limit_us for r in once if r.limits and r.limits.burst}) == 3, "the cell's own work"


def test_tuning_measures_the_tilings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not both"):
        fake("Good", tune=True, tiling={"tile": 1})
    record = measure(fake("Good", tune=True), tune_cache=str(tmp_path))["good"]
    assert record.status == "passed" and record.requested == "tuned"
    tuning = record.tuning or {}
    trials = tuning.pop("trials")
    assert tuning == {"from_cache": False, "tried": 2}
    assert [(t["tiling"], t["status"], t["time_us"] > 0) for t in trials] == [
        ({"tile": 64}, "measured", True),
        ({"tile": 128}, "measured", True),
    ]
    assert record.tiling == min(trials, key=lambda t: t["time_us"])["tiling"] and list(tmp_path.glob("*.json"))
    again = measure(fake("Good", tune=True), tune_cache=str(tmp_path))["good"].tuning
    assert again == {"from_cache": True, "tried": 2, "trials": trials}


def test_a_worker_that_cannot_start_is_a_sentence() -> None:
    with pytest.raises(UserError, match="there is no GPU here"):
        measure(fake("Good"), backend="bench_fakes:NoGpuBackend")
    found = measure(fake("Good"), fake("Slow"), backend="bench_fakes:BrokenStartBackend")
    assert [r.status for r in found.values()] == ["failed", "failed"]
    assert "startup: the worker ended early" in found["good"].reason
    assert "no memory for the limits" in found["good"].reason


def test_a_cpu_checks_and_never_times() -> None:
    small = MlaProblem(b=2, t=40, h=4, k=32, p=16, d=16, page=16)
    plans = [f"bench_torch_fakes:Torch{name}" for name in ("Right", "Wrong")]
    contenders = [Contender(KernelId("torch", "mla", p[-5:].lower()), plan=p) for p in plans]
    settings = BenchSettings(worker_env=(("OMP_NUM_THREADS", "1"),))
    found = {r.kernel.design: r for r in measure_cell(small, contenders, None, settings, experiment="test")}
    right, wrong = found["right"], found["wrong"]
    assert right.status == "passed" and right.error is not None and 0 < right.error.out < 0.01
    assert (
        right.time_us is None
        and right.host_us is None
        and right.limits is None
        and right.device == "cpu"
        and right.mode == "check"
    )
    assert wrong.status == "incorrect" and "beyond the bounds" in wrong.reason


def test_keys_are_known_before_measuring() -> None:
    contender = fake("Good", tiling={"tile": 128})
    key = contender_key(PROBLEM, contender, None)
    record = measure(contender)["good"]
    assert record.key == key and finished_keys([record]) == {key}
    assert record.requested == {"tile": 128} == record.tiling


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _workers_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(x) for x in path.read_text().split()] if path.exists() else []


def _wait(condition: Any, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_closing_the_iterator_ends_the_worker() -> None:
    others = _workers_of(os.getpid())  # what earlier tests left, such as multiprocessing's resource tracker
    running = measure_cell(PROBLEM, [fake("Wrong"), fake("Hang")], None, BenchSettings(**QUICK), experiment="test")
    assert next(running).status == "incorrect"
    workers = [pid for pid in _workers_of(os.getpid()) if pid not in others]
    assert len(workers) == 1
    running.close()
    assert not _alive(workers[0])


_SWEEP = """
import sys
from mla_var3.measure.cell import measure_cells, contender_key
from mla_var3.record import RecordStore, load, finished_keys
sys.path.insert(0, sys.argv[2])
import test_bench_cell as t
from pathlib import Path
path = Path(sys.argv[1])
done = finished_keys(load(path).records) if path.exists() else set()
hang = sys.argv[3]
cells = [(t.PROBLEM.replace(t=n), [t.fake("Wrong"), t.fake("Good"), t.fake(hang)]) for n in (64, 128)]
todo = [(p, [c for c in cs if contender_key(p, c, None) not in done]) for p, cs in cells]
settings = t.BenchSettings(**{**t.QUICK, "check_limit_s": 60.0})
store = RecordStore(path)
for record in measure_cells(todo, None, settings, experiment="sweep"):
    store.append(record)
    print(record.kernel.design, flush=True)
"""


def test_kill_9_in_mid_sweep_and_resume(tmp_path: Path) -> None:
    path, here = tmp_path / "x.jsonl", str(Path(__file__).parent)
    source = str(paths.import_root())
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((source, here))}
    words = [sys.executable, "-c", _SWEEP, str(path), here]
    first = subprocess.Popen([*words, "Hang"], stdout=subprocess.PIPE, env=env)
    assert first.stdout is not None
    assert first.stdout.readline() == b"wrong\n"  # now it hangs in the check of the third contender
    (worker,) = _workers_of(first.pid)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert _wait(lambda: not _alive(worker)), "the worker outlived its parent"
    assert [r.kernel.design for r in load(path).records] == ["wrong"]
    with path.open("ab") as file:
        file.write(b'{"id": "torn')
    again = subprocess.run([*words, "Slow"], stdout=subprocess.PIPE, env=env, check=True)
    assert sorted(again.stdout.split()) == [b"good", b"good", b"slow", b"slow", b"wrong"]
    loaded = load(path)
    assert len(loaded.records) == 6 and len(loaded.problems) == 1
    assert len({r.key for r in loaded.records}) == 6


def test_a_store_takes_what_a_cell_yields(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "x.jsonl")
    for record in measure(fake("Good"), fake("Raises")).values():
        store.append(record)
    assert [r.status for r in load(store.path).records] == ["failed", "passed"]
