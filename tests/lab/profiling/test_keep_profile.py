"""scripts/keep_profile.py: what is kept of a profile."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "keep_profile.py"))


def profile(root: Path) -> Path:
    folder = root / "ncu" / "cute-dsl-flash_mla" / "b1_s1_h16_t64" / "20260101T000000Z"
    folder.mkdir(parents=True)
    launch = {
        "name": "flash_mla",
        "figures": {"tensor": 70.5},
        "stalls": {"barrier": 21.0},
        "metrics": {"raw.sum": 1.0},
    }
    facts: dict[str, Any] = {"kernels": [{"kernel": "cute-dsl/flash_mla", "launches": [launch], "notes": []}]}
    (folder / "facts.json").write_text(json.dumps(facts))
    (folder / "params.json").write_text(
        json.dumps({"out": "/home/me/out", "command": ["/usr/bin/ncu", "-o", "/tmp/a/b"]})
    )
    (folder / "report.md").write_text("# ncu\nread with /home/me/site/ncu_report/__init__.py; 3 TFLOP/s, FLOP/B\n")
    (folder / "ncu.ncu-rep").write_bytes(b"large")
    return folder


def test_the_figures_stay_and_raw_metrics_binaries_and_folders_go(tmp_path: Path, capsys: Any) -> None:
    assert SCRIPT["main"]([str(profile(tmp_path / "out")), "--to", str(tmp_path / "kept")]) == 0
    below = tmp_path / "kept" / "ncu" / "cute-dsl-flash_mla" / "b1_s1_h16_t64"
    assert capsys.readouterr().out.strip() == str(below)
    assert sorted(p.name for p in below.iterdir()) == ["facts.json", "params.json", "report.md"]
    (launch,) = json.loads((below / "facts.json").read_text())["kernels"][0]["launches"]
    assert launch == {"name": "flash_mla", "figures": {"tensor": 70.5}, "stalls": {"barrier": 21.0}}
    assert json.loads((below / "params.json").read_text()) == {"out": "out", "command": ["ncu", "-o", "b"]}
    assert (below / "report.md").read_text() == "# ncu\nread with __init__.py; 3 TFLOP/s, FLOP/B\n"


def test_a_trace_keeps_its_picture(tmp_path: Path) -> None:
    folder = profile(tmp_path / "out")
    (folder / "trace.svg").write_text("<svg/>")
    (folder / "trace.json").write_text("{}")
    kept = SCRIPT["keep"](folder, tmp_path / "kept")
    assert sorted(p.name for p in kept.iterdir()) == ["facts.json", "params.json", "report.md", "trace.svg"]
    assert (kept / "trace.svg").read_text() == "<svg/>"


def test_a_folder_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no report\.md: give the folder of a finished profile"):
        SCRIPT["main"]([str(tmp_path), "--to", str(tmp_path / "kept")])
