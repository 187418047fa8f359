"""Traces of profiles in the page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mla_var3 import cli
from mla_var3.catalogue.registry import KernelId
from mla_var3.cli import report as verb
from mla_var3.lab.profiling import picture
from mla_var3.lab.report import traces
from mla_var3.workload.decode import MlaProblem

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "profiling"))

import traced_call

from mla_var3.lab.profiling.modes.trace import decode

V23 = KernelId("cute-dsl", "mla", "flash_mla", 23)
NAMED = "cute-dsl/flash_mla_v23 on b1_s1_h128_t65536, h200"


def profile(root: Path, at: str = "20261127T190000Z", b: int = 1, svg: str | None = None, **facts: Any) -> Path:
    """The folder of a profile in mode trace."""
    problem = MlaProblem(b=b, h=128, t=65536)
    folder = root / "trace" / "cute-dsl-flash_mla_v23" / problem.label / at
    folder.mkdir(parents=True)
    trace = decode(traced_call.call(), traced_call.EVENTS, traced_call.CAPACITY)
    request = {"kernel": V23.to_record(), "problem": problem.to_record(), "mode": "trace"}
    (folder / "params.json").write_text(json.dumps({"at": at, "device": "h200", "request": request}))
    (folder / "facts.json").write_text(json.dumps({"kernels": [{"trace": trace.to_record(), **facts}]}))
    (folder / "trace.svg").write_text(picture.draw(trace) if svg is None else svg)
    return folder


def test_the_newest_trace_of_each_cell_is_found(tmp_path: Path) -> None:
    profile(tmp_path, "20261126T190000Z")
    profile(tmp_path, "20261127T190000Z")
    profile(tmp_path, "20261127T200000Z", b=2)
    found = traces.find([tmp_path, tmp_path / "nowhere"])
    assert [(one.title, one.at) for one in found] == [
        (NAMED.replace("b1_", "b2_"), "20261127T200000Z"),
        (NAMED, "20261127T190000Z"),
    ]
    assert "2 CTAs from 0.0 to 13.0 us" in found[0].said[0]
    assert {row["name"] for row in found[0].shares} >= {"wait empty", "wait full", "consume"}
    assert found[0].picture.startswith("<svg ")


def test_what_is_no_finished_trace_of_ours_is_passed_over(tmp_path: Path) -> None:
    own = "<svg xmlns='http://www.w3.org/2000/svg'>{}</svg>"
    assert traces.is_ours(own.format("<text>a</text>"))
    for number, inside in enumerate(
        (
            "<script>alert(1)</script>",
            "<rect onclick='alert(1)'/>",
            "<a href='https://example.org'><text>a</text></a>",
            "<text xlink:href='x' xmlns:xlink='http://www.w3.org/1999/xlink'>a</text>",
            "<unfinished",
        )
    ):
        assert not traces.is_ours(own.format(inside)), inside
        profile(tmp_path, f"2026112{number}T190000Z", svg=own.format(inside))
    profile(tmp_path, "20261126T190000Z", trace=None)
    broken = profile(tmp_path, "20261127T190000Z")
    (broken / "facts.json").write_text("{")
    assert traces.find([tmp_path]) == []


def test_the_verb_puts_traces_into_the_page(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mla_var3.record import RecordStore

    RecordStore(tmp_path / "records.jsonl").append(make())
    profile(tmp_path / "out" / "profiles")
    monkeypatch.chdir(tmp_path)
    seen: list[list[str]] = []
    from mla_var3.lab.report import page

    def keep(gathered: Any, out: Path, **options: Any) -> Path:
        seen.append([one.title for one in options["drawn"]])
        out.write_text("page")
        return out

    monkeypatch.setattr(page, "write_page", keep)
    words = ["records.jsonl", "--out", "page.html"]
    assert verb.run(cli.parser_of("report").parse_args(words)) == 0
    assert verb.run(cli.parser_of("report").parse_args([*words, "--profiles", str(tmp_path / "none")])) == 0
    assert NAMED in seen[0] and seen[1] == []
