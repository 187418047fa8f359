"""`devlog check` on what an entry says of devices that its version does not run on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.device import Requirement
from mla_var3.lab.devlog import skips
from mla_var3.lab.devlog.check import check
from mla_var3.lab.devlog.new import new

V1 = KernelId("triton", "mla", "flash_mla", 1)
WGMMA = Requirement(archs=("sm_90a",), features=("wgmma",))


def say(entry: Path, line: str) -> None:
    text = entry.read_text()
    entry.write_text(text.replace("devices: [h200]\n", f"devices: [h200]\n{line}\n", 1))


def requires(monkeypatch: pytest.MonkeyPatch, requirement: Requirement | None, why: str = "") -> None:
    monkeypatch.setattr(skips, "requirement_of", lambda kernel: (requirement, why))


def test_a_version_of_one_architecture_owes_a_reason(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requires(monkeypatch, WGMMA)
    (failure,) = check(project)[0]
    assert failure.startswith("devlogs/flash_mla/triton-v1.md:1: it does not say that the version cannot run on ")
    assert "b200 (sm_100a)" in failure and "a100 (sm_80)" in failure and "h100" not in failure
    assert failure.endswith("add skips: {others: wgmma needs sm_90a}")


@pytest.mark.parametrize(
    "line",
    [
        "skips: {others: wgmma needs sm_90a}",
        (
            "skips: {sm_80: no wgmma, sm_86: no wgmma, sm_89: no wgmma, sm_100a: no wgmma, sm_103a: no wgmma, "
            "sm_120a: no wgmma}"
        ),
        "skips: {a100: x, a40: x, sm_89: x, b200: x, b300: x, sm_120a: x}",
    ],
)
def test_a_reason_for_every_device_is_enough(
    project: Path, entry: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    requires(monkeypatch, WGMMA)
    say(entry, line)
    assert check(project) == ([], [])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("skips: {sm_80: x, sm_86: x, sm_89: x, sm_100a: x, sm_103a: x}", "cannot run on rtx5090 (sm_120a)"),
        ("skips: {others: x, h200: x}", "skips names h200, and the version runs on h200"),
        ("skips: {others: x, sm_90a: x}", "skips names sm_90a, and the version runs on h100, h800, h200, h20"),
        ("skips: {others: x, h210: x}", "skips names 'h210', which is no device or architecture"),
        ("skips: {others: ''}", "skips gives no reason for others"),
        ("skips: [b200]", "skips must name where the version does not run, and why"),
        ("skip: {others: x}", "front matter has no field 'skip': did you mean 'skips'?"),
    ],
)
def test_each_mistake(project: Path, entry: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str) -> None:
    requires(monkeypatch, WGMMA)
    say(entry, line)
    found = [failure for failure in check(project)[0] if message in failure]
    assert len(found) == 1
    assert (
        found[0].split(":")[1] == ("1" if line.startswith("skip:") and "skips" not in line else "8") or "skip:" in line
    )


def test_a_version_that_runs_everywhere_may_not_say_others(
    project: Path, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requires(monkeypatch, Requirement(archs=()))
    assert check(project) == ([], [])
    say(entry, "skips: {others: x}")
    assert "runs on every known device" in check(project)[0][0]


def test_a_record_that_was_skipped_is_owed_too(
    project: Path, entry: Path, record_of: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    requires(monkeypatch, None)
    reason = "the kernel is written for sm_90a; this is sm_75"
    skipped = record_of("dddd55556666", V1, None, status="skipped", reason=reason, device="t4")
    path = project / "results" / "t4" / "2026-11-22-decode.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(skipped) + "\n")
    (failure,) = check(project)[0]
    assert "records say that it was skipped on t4 (the kernel is written for sm_90a)" in failure
    # A record that was skipped for its problem is no device's fault.
    path.write_text(json.dumps({**skipped, "reason": "256 query rows share a cache"}) + "\n")
    assert check(project)[0] == []
    path.write_text(json.dumps(skipped) + "\n")
    say(entry, "skips: {others: written for Hopper}")
    assert check(project)[0] == []


def test_a_requirement_that_cannot_be_read_is_a_note(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requires(monkeypatch, None, "triton needs the package triton, which is not installed: pip install triton")
    failures, notes = check(project)
    assert failures == [] and "was not compared: triton needs the package" in notes[0]


def test_the_requirement_of_versions_that_exist() -> None:
    assert skips.words(KernelId.parse("cute-dsl/flash_mla_v23")) == "\nskips: {others: wgmma needs sm_90a}"
    assert [skips.words(KernelId.parse(f"{name}/flash_mla")) for name in ("triton", "torch")] == ["", ""]
    assert skips.requirement_of(KernelId("triton", "mla", "flash_mla", 99)) == (None, "")


def test_a_new_entry_says_it(project: Path, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requires(monkeypatch, WGMMA)
    new(V1, project, force=True)
    assert "\nskips: {others: wgmma needs sm_90a}\n---\n" in entry.read_text()
    assert not [failure for failure in check(project)[0] if "skips" in failure]


def test_every_entry_of_the_repository_says_where_its_version_does_not_run(repo_root: Path) -> None:
    failures, _ = check(repo_root)
    assert failures == []
    made = [k for k in registry.all_kernels() if k.language in ("cute-dsl", "cutile-dsl")]
    owing = [k for k in made if (needs := skips.requirement_of(k)[0]) is None or skips.cannot(needs)]
    from mla_var3.lab.devlog.entry import entry_path, parse

    assert owing and all(skips.stated(parse(entry_path(repo_root, k))[0]) for k in owing)
