"""What a record says about where it was measured."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mla_var3.catalogue.registry import KernelId
from mla_var3.measure import environment
from mla_var3.measure.environment import Sensors, by_quantity, describe, git_state, source_hash


def test_without_a_gpu_none_is_claimed() -> None:
    found = describe()
    assert found["gpu"] is None and found["driver"] is None
    assert found["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}")
    assert {"torch", "triton", "nvidia-cutlass-dsl", "cuda-tile"} <= found["packages"].keys()


def test_readings_are_filed_by_quantity() -> None:
    found = by_quantity({"burst": {"sm_mhz": 1980.0, "mem_mhz": 3201.0, "power_w": 300.0}, "sustained": {}})
    assert found == {
        "clocks": {"burst": {"sm_mhz": 1980.0, "mem_mhz": 3201.0}},
        "power": {"burst": 300.0},
        "temperature": {},
    }


def _smi(monkeypatch: pytest.MonkeyPatch, answer: str) -> list[list[str]]:
    asked: list[list[str]] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(words)
        return subprocess.CompletedProcess(words, 0, answer, "")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(environment.subprocess, "run", run)
    monkeypatch.setattr(environment, "_torch_uuid", lambda: "GPU-1")
    return asked


def test_without_nvml_nvidia_smi_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _smi(monkeypatch, "1980, 3201, 123.45, 41\n")
    assert Sensors().read() == {"sm_mhz": 1980.0, "mem_mhz": 3201.0, "power_w": 123.45, "temperature_c": 41.0}
    assert "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu" in asked[0] and asked[0][-2:] == [
        "-i",
        "GPU-1",
    ]
    _smi(monkeypatch, "1980, [N/A], [Not Supported], 41\n")
    assert Sensors().read() == {"sm_mhz": 1980.0, "temperature_c": 41.0}


def test_without_any_tool_readings_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    sensors = Sensors()
    assert sensors.read() == {} and sensors.driver() is None and sensors.power_limit_w() is None


class FourGpus:
    """NVML on a machine with four GPUs."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 0, 1, 0

    def __init__(self, *, by_uuid: bool, count: int = 4) -> None:
        self.by_uuid = by_uuid
        self.count = count

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if not self.by_uuid:
            raise RuntimeError("not supported")
        return f"uuid {uuid}"

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> str:
        return f"bus {bus}"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"index {index}"

    def nvmlDeviceGetPowerUsage(self, handle: str) -> float:
        return 100e3


@pytest.mark.parametrize(
    ("by_uuid", "uuid", "bus", "handle"),
    [
        (True, "GPU-c", "00000000:1b:00.0", "uuid GPU-c"),
        (False, "GPU-c", "00000000:1b:00.0", "bus 00000000:1b:00.0"),
        (True, None, "00000000:1b:00.0", "bus 00000000:1b:00.0"),
        (True, None, None, None),
    ],
)
def test_of_several_gpus_the_one_that_torch_uses_is_read(
    monkeypatch: pytest.MonkeyPatch, by_uuid: bool, uuid: str | None, bus: str | None, handle: str | None
) -> None:
    nvml = FourGpus(by_uuid=by_uuid)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    monkeypatch.setattr(environment, "_torch_uuid", lambda: uuid)
    monkeypatch.setattr(environment, "_torch_bus_id", lambda: bus)
    sensors = Sensors()
    assert sensors._handle == handle
    assert sensors.read() == ({"power_w": 100.0} if handle else {})
    nvml.count = 1
    assert (Sensors()._handle == "index 0") == (handle is None)


def test_lines_of_several_gpus_are_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _smi(monkeypatch, "1980, 3201, 123.45, 41\n345, 3201, 80.0, 30\n")
    monkeypatch.setattr(environment, "_torch_uuid", lambda: None)
    assert Sensors().read() == {} and "-i" not in asked[0]
    _smi(monkeypatch, "580.1\n580.1\n")
    assert Sensors().driver() == "580.1"


def test_a_chip_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for uuid in ("GPU-a", "GPU-b", "GPU-a", None):
        monkeypatch.setattr(environment, "_torch_uuid", lambda uuid=uuid: uuid)
        names.append(environment.chip())
    assert names[0] == names[2] != names[1] and names[3] is None and len(names[0] or "") == 8


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_and_whether_the_package_differs(tmp_path: Path) -> None:
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "a.py").write_text("1")

    def git(*words: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert git_state(package) == (None, None)
    git("init", "-q")
    assert git_state(package) == (None, None)
    git("add", ".")
    git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "results.jsonl").write_text("a record, appended during a sweep")
    assert git_state(package) == (commit, False)
    (package / "b.py").write_text("a new version")
    assert git_state(package) == (commit, True)
    # Somebody else's repository, with this package installed in it and not part of it.
    elsewhere = tmp_path / ".venv" / "package"
    elsewhere.mkdir(parents=True)
    assert git_state(elsewhere) == (None, None)


def test_a_plan_outside_the_package_has_the_hash_of_its_file() -> None:
    kernel = KernelId("triton", "mla", "good")
    assert len(source_hash(kernel, "bench_fakes:Good")) == 16
    assert source_hash(kernel, "bench_fakes:Good") != source_hash(kernel, "bench_torch_fakes:TorchRight")
    assert source_hash(kernel, "no_such_module:Plan") == "unknown"
