"""Triggers against facts, and `knowledge find`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mla_var3.cli.knowledge import main
from mla_var3.errors import UserError
from mla_var3.lab.knowledge import find, index, triggers
from mla_var3.lab.knowledge.check import check
from mla_var3.lab.knowledge.triggers import Facts
from mla_var3.workload import problem_from_record

RESULTS = Path(__file__).resolve().parents[3] / "results" / "h200" / "2026-11-21-decode-earlier.jsonl"


def trigger(**entry: Any) -> triggers.Trigger:
    (parsed,) = triggers.parse([entry])
    return parsed


def facts(bound: str | None = None, **groups: dict[str, float]) -> Facts:
    return Facts(bound, groups)


@pytest.mark.parametrize(
    ("entry", "known", "held", "still_open"),
    [
        ({"bound": "memory"}, facts("memory"), 1, 0),
        ({"bound": "memory"}, facts("compute"), None, 0),
        ({"problem": {"rows": "<= 32"}}, facts(problem={"rows": 32}), 1, 0),
        ({"problem": {"rows": "<= 32"}}, facts(problem={"rows": 33}), None, 0),
        ({"problem": {"rows": ">= 8, <= 32"}}, facts(problem={"rows": 7}), None, 0),
        ({"problem": {"rows": ">= 8, <= 32"}}, facts(problem={"rows": 16}), 2, 0),
        ({"bound": "memory", "counters": {"dram": "< 85"}}, facts("memory"), 1, 1),
        ({"counters": {"dram": "< 85"}}, facts("memory"), None, 0),  # nothing speaks for it
        ({"times": {"sustained / burst": "> 1.05"}}, facts(times={"sustained": 110, "burst": 100}), 1, 0),
        ({"times": {"sustained / burst": "> 1.05"}}, facts(times={"sustained": 104, "burst": 100}), None, 0),
        ({"resources": {"WARPGROUP / HGMMA": ">= 2"}}, facts(resources={"WARPGROUP": 8, "HGMMA": 0}), None, 0),
        ({"resources": {"HGMMA": "== 0", "HMMA": "> 0"}}, facts(resources={"HGMMA": 0, "HMMA": 4}), 2, 0),
        ({"problem": {"causal": "== 1"}}, facts(problem={"causal": 0}), None, 0),
    ],
)
def test_a_trigger_holds_or_not(entry: dict[str, Any], known: Facts, held: int | None, still_open: int) -> None:
    found = triggers.match(trigger(**entry), known)
    if held is None:
        assert found is None
    else:
        assert found is not None
        assert (len(found.held), len(found.open)) == (held, still_open)


def test_json_and_back() -> None:
    one = trigger(bound="compute", counters={"tensor": "< 80", "stall.gmma": ">= 20.5"})
    assert triggers.Trigger.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert str(one) == "compute-bound, tensor < 80, stall.gmma >= 20.5"


def test_facts_of_words() -> None:
    known = find.facts_of_words("memory", ["rows=16", "dram=70", "HGMMA=0", "counters.registers=168", "causal=true"])
    assert known.bound == "memory"
    assert known.groups["problem"] == {"rows": 16, "causal": 1}
    assert known.groups["counters"] == {"dram": 70, "registers": 168}
    assert known.groups["resources"] == {"HGMMA": 0}
    with pytest.raises(UserError, match="did you mean 'dram'"):
        find.facts_of_words(None, ["drum=3"])
    with pytest.raises(UserError, match="'much' is not a number"):
        find.facts_of_words(None, ["dram=much"])


def test_facts_of_a_record() -> None:
    record = next(r for r in map(json.loads, RESULTS.read_text().splitlines()) if r["id"] == "e4c96b56a553")
    known = find.facts_of_record(record)
    assert known.bound == "memory"
    assert known.groups["problem"]["rows"] == 16
    assert known.groups["resources"]["HGMMA"] > 0
    assert known.groups["times"]["of_limit"] == pytest.approx(91.2, abs=0.05)
    assert known.groups["times"]["sustained"] / known.groups["times"]["burst"] == pytest.approx(153.0 / 146.0, abs=1e-3)


def test_facts_of_a_profile() -> None:
    record = {
        "roofline": {"bound": "compute"},
        "percent_of_limit": 70.0,
        "resources": {"registers": 168, "instructions": {"HGMMA": 12}},
        "launches": [
            {"figures": {"duration_us": 5.0, "tensor": 1.0}, "stalls": {"gmma": 1.0}},
            {"figures": {"duration_us": 200.0, "tensor": 62.0}, "stalls": {"gmma": 31.0}},
        ],
    }
    known = find.facts_of_profile(record, {"b": 4, "s": 2, "h": 128, "h_kv": 1, "causal": True, "lengths": "uniform"})
    assert known.groups["counters"] == {"duration_us": 200.0, "tensor": 62.0, "stall.gmma": 31.0}
    assert known.groups["problem"]["rows"] == 256
    assert (known.groups["problem"]["causal"], known.groups["problem"]["ragged"]) == (1.0, 0.0)
    assert known.groups["times"] == {"of_limit": 70.0}
    assert known.groups["resources"]["HGMMA"] == 12


def test_the_best_comes_first(project: Path, entry: Path) -> None:
    weaker = entry.read_text().replace("Hold more in flight", "Something else")
    weaker = weaker.replace('    problem: {rows: "<= 32", b: ">= 8"}\n', "")
    (entry.parent / "else.md").write_text(weaker)
    (entry.parent / "else.records").write_text(entry.with_suffix(".records").read_text())
    failures, pages = check(project)
    assert failures == []
    built = index.build(pages, project)
    found = find.find(built, find.facts_of_words("memory", ["rows=16", "b=128"]))
    assert [one.entry["title"] for one in found] == ["Hold more in flight", "Something else"]
    assert found[0].match is not None
    assert found[0].match.open == ("dram < 85", "stall.long_scoreboard >= 20")
    assert find.find(built, find.facts_of_words("compute", ["rows=16"])) == []
    assert find.find(built, find.facts_of_words("memory", []), language="triton") == []
    assert find.find(built, find.facts_of_words("memory", []), arch="sm_80") == []
    assert len(find.find(built, find.facts_of_words("memory", []), kind="optimization")) == 2
    assert [one.entry["title"] for one in find.find(built, words=["SWIZZLE"])] == ["Another page"]


def test_the_index_has_what_evidence_measured(project: Path, entry: Path) -> None:
    """Pairs of the evidence, one with the optimization and one without; not of libraries, nor of other sections."""
    (file,) = (project / "results" / "h200").iterdir()
    first = json.loads(file.read_text())
    slow = {**first, "id": "0123456789ab", "time_us": {"burst": {**first["time_us"]["burst"], "median": 470.9}}}
    library = {**slow, "id": "0123456789ac", "kernel": {**first["kernel"], "language": "peer", "version": 0}}
    file.write_text("".join(json.dumps(one) + "\n" for one in (first, slow, library)))
    entry.write_text(entry.read_text().replace("stands alone.", "stands alone, 2.00x and 2.00x."))
    rows = "".join(f"022ea24da681 vs {other} burst.speedup\n" for other in ("0123456789ab", "0123456789ac"))
    entry.with_suffix(".records").write_text(f"[Evidence]\n> It takes\n022ea24da681 burst\n{rows}")
    failures, pages = check(project)
    assert failures == []
    (built,) = index.build(pages, project)["entries"]
    (gain,) = built["gains"]
    assert (gain["record"], gain["over"], gain["state"]) == ("022ea24da681", "0123456789ab", "burst")
    assert gain["speedup"] == pytest.approx(2.0, abs=0.01) and gain["bound"] == "compute" and gain["device"] == "h200"
    assert problem_from_record(gain["problem"]).to_record() == problem_from_record(first["problem"]).to_record()


def test_the_verb(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="write it with mla-var3 knowledge check"):
        main(["find", "swizzle", "--root", str(project)])
    assert main(["check", "--root", str(project)]) == 0
    capsys.readouterr()
    assert main(["find", "--bound", "memory", "rows=16", "--root", str(project)]) == 0
    out = capsys.readouterr().out
    assert "Hold more in flight" in out
    assert "memory-bound, rows <= 32; to be looked at: b >= 8, dram < 85, stall.long_scoreboard >= 20" in out
    assert main(["find", "--record", "022ea24da681", "--root", str(project)]) == 0
    assert "sustained / burst > 1.05" in capsys.readouterr().out
    assert main(["find", "--bound", "compute", "rows=512", "--root", str(project)]) == 1


def test_the_pages_answer_the_plain_question() -> None:
    built = find.load_index()
    few_heads = find.find(built, find.facts_of_words("memory", ["rows=16", "b=128", "sustained=153", "burst=146"]))
    assert "optimizations/swapped-operands.md" in [one.entry["path"] for one in few_heads[:3]]
    ceiling = find.find(built, find.facts_of_words("compute", ["resources.registers=255", "k=512", "rows=128"]))
    assert "optimizations/two-warpgroup-output.md" in [one.entry["path"] for one in ceiling[:3]]


def test_words_are_looked_for_in_titles_triggers_and_bodies(capsys: pytest.CaptureFixture[str]) -> None:
    known = find.load_index()
    by_title = find.find(known, words=["seesaw"])
    assert "seesaw" in by_title[0].entry["title"].lower() and by_title[0].headed == 1
    # A counter that only a trigger names, and words that stand in a page's text alone.
    assert any(
        "HGMMA" in json.dumps(one.entry["applies"])
        for one in find.find(known, words=["hgmma"])
        if one.entry.get("applies")
    )
    (body,) = [
        one
        for one in find.find(known, words=["R2UR", "uniform"])
        if one.entry["path"].endswith("branch-in-the-loop-body.md")
    ]
    assert body.headed == 0
    assert not find.find(known, words=["seesaw", "nosuchword"])
    assert main(["find", "seesaw", "nosuchword"]) == 0
    out, err = capsys.readouterr()
    assert "no page has all of seesaw, nosuchword; these have the most of them:" in err and "seesaw" in out.lower()
    assert main(["find", "nosuchword"]) == 1
