"""What a record says about where it was measured."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mla_var3.bench import environment
from mla_var3.bench.environment import Sensors, by_quantity, describe, git_state, source_hash
from mla_var3.kernel.registry import KernelId


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
