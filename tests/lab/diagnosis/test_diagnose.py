"""`mla-var3 diagnose` on the profiles and records that are kept, and on folders."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from diagnosis_fakes import FEW, KERNEL, record, write_profile

from mla_var3 import cli
from mla_var3.errors import UserError
from mla_var3.lab.diagnosis import evidence as evidences
from mla_var3.lab.diagnosis import profiles
from mla_var3.lab.diagnosis.verdict import diagnose
from mla_var3.workload.decode import MlaProblem

RETIRED_ALONE = "a0c25ad39527"  # cute-dsl/flash_mla_v2 on b128 h8: no profile of it is kept, and its code is gone
RECORD_ALONE = "04d3a4d3d79b"  # cute-dsl/flash_mla_v24 there: no profile of it either


@pytest.fixture
def kept(repo_root: Path) -> Path:
    return repo_root / "results" / "h200" / "profiles"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder: nothing of it is found."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(["diagnose", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


# ---------------------------------------------------------------- recorded profiles
@pytest.mark.parametrize("mode", ["annotation", "ncu"])
@pytest.mark.parametrize(
    ("name", "kind", "signs"),
    [
        ("cute-dsl-flash_mla_v1", "compute", {"barriers", "clock"}),
        ("triton-flash_mla", "latency", {"barriers", "register ceiling", "binary"}),
        ("cutile-dsl-flash_mla", "latency", {"barriers", "clock"}),
    ],
)
def test_the_recorded_profiles(kept: Path, mode: str, name: str, kind: str, signs: set[str]) -> None:
    d = diagnose(evidences.of_profile(kept / mode / name, []))
    assert d.kind == kind and d.measured
    assert signs <= {s.key for s in d.signs}
    # None of them spills, is padded, lacks a wave or stages: what was measured of them says none of it.
    never = {
        "spills",
        "skinny product",
        "slow products",
        "no pipelining",
        "bank conflicts",
        "imbalance",
        "tail",
        "traffic",
    }
    assert not never & {s.key for s in d.signs}
    assert bool(d.evidence.profile and d.evidence.profile.hot()) is (mode == "ncu")


def test_a_profile_gets_the_times_and_power_of_its_record(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, str(kept / "ncu" / "cute-dsl-flash_mla_v1"))
    assert status == 0
    assert out.splitlines()[1].startswith("  compute-bound: warps wait for each other at barriers")
    assert "tensor pipe active" in out and "70.4 %" in out and "power, sustained" in out and "limit 700 W" in out
    assert "paged.py:105" in out
    assert "docs/knowledge/optimizations/seesaw-schedule.md" in out and "applies: compute-bound, rows >= 64" in out
    assert "devlogs/flash_mla/cute-dsl-v1.md" in out
    assert "Note: counters of cute-dsl/flash_mla_v1 are of source" in out


def test_a_kernel_finds_its_profile_and_its_record(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "triton/flash_mla", "--b", "128", "--json")
    found = json.loads(out)
    assert status == 0 and found["bottleneck"] == "latency" and found["bound_of_the_work"] == "compute"
    assert any("profile" in line for line in found["sources"]) and any("record" in line for line in found["sources"])
    assert {time["state"] for time in found["times"]} == {"profiled", "burst", "sustained"}


def test_a_baseline_inside_a_profile_is_found(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root)
    from mla_var3.catalogue.registry import KernelId

    (profile,) = profiles.known(KernelId("cute-dsl", "mla", "flash_mla", 0), MlaProblem(b=128), "h200")
    assert profile.label == "cute-dsl/flash_mla" and profile.has_counters and not profile.hot()


def test_a_record_alone_says_what_only_a_profile_could_tell(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, RECORD_ALONE)
    assert status == 0 and "memory-bound (by times alone)" in out and "of the memory limit" in out
    missing = out.partition("Not known here:")[2]
    assert "L2 hits, occupancy and eligible warps" in missing and "the source lines" in missing
    assert "mla-var3 profile cute-dsl/flash_mla_v24 --b 128 --h 8 --mode ncu" in missing
    assert "tensor pipe active" not in out


def test_what_is_kept_of_a_retired_version_is_judged_and_asks_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, RETIRED_ALONE)
    assert status == 0 and "memory-bound (by times alone)" in out and "94 % of the memory limit" in out
    missing = out.partition("Not known here:")[2]
    assert "  - the source lines at which warps wait\n" in missing and "mla-var3" not in missing
    assert "  - cute-dsl/flash_mla_v2 is retired: commit " in missing
    status, out, err = run(capsys, "cute-dsl/flash_mla_v1", "--b", "128")
    assert status == 2 and not out and err.startswith("mla-var3: cute-dsl/flash_mla_v1 is retired: commit ")
    assert err.count("\n") == 1


def test_a_record_with_a_profile_of_the_same_point_gets_its_counters() -> None:
    with_profile = evidences.of_record("022ea24da681")
    assert with_profile.figures and with_profile.record is not None
    alone = evidences.of_record("022ea24da681", alone=True)
    assert not alone.figures and diagnose(alone).measured is False


def test_a_slow_record_alone_is_latency_or_waste_and_says_so() -> None:
    slow = record(time_us={"burst": {"median": 520.0, "p10": 520.0, "p90": 520.0, "n": 5}})
    d = diagnose(evidences.of_record("abcdef012345", [slow], alone=True))
    assert d.kind == "latency" and "padded rows, data read twice" in d.because and not d.measured


def test_a_record_that_was_refused_says_why() -> None:
    refused = record(status="skipped", reason="256 query rows share a cache", time_us=None, limits=None, resources=None)
    d = diagnose(evidences.of_record("abcdef012345", [refused], alone=True))
    assert d.kind == "unknown" and d.evidence.notes == ["the record is skipped: 256 query rows share a cache"]
    assert d.open[-1].endswith("mla-var3 bench cute-dsl/flash_mla_v23 --b 128")


def test_a_kernel_that_nobody_ran_is_compiled(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "places", list)
    from mla_var3.catalogue.registry import KernelId

    d = diagnose(evidences.of_kernel(KernelId.parse("triton/flash_mla"), MlaProblem(b=3, h=16, t=256), "h200", []))
    assert d.kind == "unknown" and d.evidence.resources["registers"] > 0 and d.evidence.instructions["total"] > 0
    assert "nothing was timed" in d.because
    assert [line.rpartition(": ")[2].split()[1] for line in d.open] == ["profile", "profile", "bench"]


# ---------------------------------------------------------------- folders and mistakes
def test_a_fresh_profile_folder_works_without_records(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_profile(here / "out" / "profiles" / "ncu" / "k" / "p" / "20260101T000000Z", FEW, time_us=140.0)
    status, out, _ = run(capsys, str(folder))
    assert status == 0 and out.startswith(f"{KERNEL.label} b128_s1_h8_t4096 on NVIDIA H200")
    assert next(p.folder for p in profiles.known(KERNEL, FEW)) == folder.resolve()


def test_a_profile_without_counters_is_judged_by_its_time(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_profile(here / "p", FEW, time_us=150.0, counters=False)
    status, out, _ = run(capsys, str(folder))
    assert status == 0 and "by times alone" in out and "which has no counters" in out
    assert "mla-var3 profile cute-dsl/flash_mla_v23 --b 128 --h 8" in out.partition("Not known here:")[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing-of-that-name"], "no folder here, no kernel"),
        (["cute-dsl/flash_mlaa"], "did you mean 'cute-dsl/flash_mla'"),
        (["0123456789ab"], "record 0123456789ab"),
        (["022ea24da681", "--b", "4"], "a record has its own problem"),
        (["cute-dsl/flash_mla", "--device", "h2000"], "no device 'h2000'"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    status, out, err = run(capsys, *words)
    assert status == 2 and not out and said in err


def test_a_folder_of_several_profiles_names_them(kept: Path, capsys: pytest.CaptureFixture[str], here: Path) -> None:
    status, _, err = run(capsys, str(kept))
    assert status == 2 and re.search(r"holds \d\d profiles", err) and "annotation/cute-dsl-flash_mla_v1" in err
    status, _, err = run(capsys, str(here))
    assert status == 2 and "holds no profile" in err
    broken = here / "broken"
    shutil.copytree(kept / "ncu" / "triton-flash_mla" / "b128_s1_h128_t4096", broken)
    (broken / "facts.json").write_text("{")
    with pytest.raises(UserError, match="is no finished profile"):
        profiles.read(broken)
