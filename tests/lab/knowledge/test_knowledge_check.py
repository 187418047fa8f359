"""`knowledge check` on a page with one mistake at a time, and the index that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mla_var3 import cli
from mla_var3.cli.knowledge import main
from mla_var3.errors import UserError
from mla_var3.lab.knowledge.check import check


def test_good_project_passes_and_writes_the_index(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(project)[0] == []
    assert main(["check", "--frozen", "--root", str(project)]) == 1
    assert "index.json:1: is stale" in capsys.readouterr().out
    assert main(["check", "--root", str(project)]) == 0
    assert main(["check", "--frozen", "--root", str(project)]) == 0
    index = json.loads((project / "docs/knowledge/index.json").read_text())
    (entry,) = index["entries"]
    assert entry["path"] == "optimizations/flight.md"
    assert entry["records"] == ["022ea24da681"]
    assert entry["applies"][0]["bound"] == "memory"
    assert {"group": "problem", "name": "rows", "sign": "<=", "value": 32.0} in entry["applies"][0]["conditions"]
    assert entry["metrics"] == {"dram": "up", "sustained / burst": "down"}
    (page,) = index["references"]
    assert page["keywords"] == ["swizzle", "layout"]
    readme = (project / "docs/knowledge/README.md").read_text()
    assert "[Hold more in flight](optimizations/flight.md) | memory-bound, rows <= 32, b >= 8" in readme


def test_text_around_the_tables_stays(project: Path) -> None:
    readme = project / "docs/knowledge/README.md"
    readme.write_text("# Mine\n\nBefore.\n")
    assert main(["check", "--root", str(project)]) == 0
    readme.write_text(readme.read_text() + "After.\n")
    assert main(["check", "--root", str(project)]) == 0
    text = readme.read_text()
    assert text.startswith("# Mine\n\nBefore.\n") and text.endswith("After.\n")
    assert text.count("## Optimizations") == 1


def test_a_page_that_was_removed_leaves_the_index(project: Path) -> None:
    assert main(["check", "--root", str(project)]) == 0
    page = project / "docs/knowledge/optimizations/flight.md"
    other = page.with_name("soaring.md")
    other.write_text(page.read_text().replace("Hold more in flight", "Soar"))
    page.with_suffix(".records").rename(other.with_suffix(".records"))
    page.unlink()
    assert main(["check", "--root", str(project)]) == 0
    assert "flight.md" not in (project / "docs/knowledge/README.md").read_text()
    readme = project / "docs/knowledge/README.md"
    readme.write_text("See [it](optimizations/flight.md).\n\n" + readme.read_text())
    assert main(["check", "--root", str(project)]) == 1


# (what stands in the good entry, what stands there instead, part of the message)
MISTAKES = [
    ("kind: optimization", "kind: optimisation", "2: kind 'optimisation' is unknown: did you mean 'optimization'?"),
    ("kind: optimization", "kind: anti-pattern", "a page of kind anti-pattern belongs into anti-patterns/"),
    ("date: 2026-11-21", "date: lately", "date 'lately' is not of the form"),
    ("date: 2026-11-21\n", "", "1: front matter lacks date"),
    ("languages: [cute-dsl]", "languages: cute-dsl", "languages must be a list"),
    ("languages: [cute-dsl]", "languages: [cute]", "language 'cute' is unknown: did you mean 'cute-dsl'?"),
    ("archs: [sm_90a]", "arch: [sm_90a]", "front matter has no field 'arch': did you mean 'archs'?"),
    ("title: Hold more in flight", "title: Hold less", "title and the heading differ"),
    ("- bound: memory", "- bound: latency", "bound 'latency' is unknown: valid: compute, memory"),
    ('rows: "<= 32"', 'row: "<= 32"', "applies: problem has no 'row': did you mean 'rows'?"),
    ('rows: "<= 32"', 'rows: "up to 32"', "is no condition"),
    ('dram: "< 85"', 'drum: "< 85"', "applies: counters has no 'drum': did you mean 'dram'?"),
    ("counters:", "counter:", "applies has no group 'counter': did you mean 'counters'?"),
    ("metrics: {dram: up,", "metrics: {drum: up,", "metrics: 'drum' is unknown: did you mean 'dram'?"),
    ("metrics: {dram: up,", "metrics: {dram: better,", "metrics: dram goes"),
    ("applies:\n", "applies: [\n", "its front matter is not YAML"),
    ("More stages, and the memory is never idle.\n", "", "no sentence stands between the heading and the first"),
    ("## Pitfalls\nShared memory has an end somewhere.\n", "", "section 'Pitfalls' must stand once, it stands 0 times"),
    ("Shared memory has an end somewhere.", "-", "section 'Pitfalls' is empty"),
    ("## Pitfalls", "## Traps", "section 'Traps' is not one of"),
    ("## Mechanism", "## Pitfalls", "section 'Mechanism' must stand once"),
    ("It takes 235.4 us", "It took 235.4 us", "flight.records:2: no block under 'Evidence' begins with 'It takes'"),
    ("It takes 235.4 us", "It took 235.4 us", "evidence without a record in flight.records, a URL, or a link"),
    ("## Evidence", "## Proof", "flight.records:1: the page has no heading 'Evidence'"),
    ("235.4 us", "200.0 us", "200.0 us differs from its record: burst of 022ea24da681 is 235.37 us"),
    (
        "Shared memory has an end somewhere.",
        "It costs up to 12 % of the time.",
        "'12 %' has neither a record nor a URL",
    ),
    ("Shared memory has an end somewhere.", "It is 1.3x slower somewhere else.", "'1.3x' has neither a record"),
    ("`src/kernel.py`", "`src/kernels.py`", "src/kernels.py does not exist"),
    ("`src/kernel.py`", "`cute-dsl/flash_mla_v99`", "kernel cute-dsl/flash_mla_v99 does not exist"),
    ("other.md#what-it-says", "otter.md", "there is no such file"),
    ("other.md#what-it-says", "other.md#what-it-said", "the page has no heading with that anchor"),
    ("None with", "```text\n@cute.kernel\ndef f(): ...\n```\nNone with", "kernel code in a block that is not"),
    ("None with", "```python\nx = 1\n```\nNone with", "a python block names what it is compiled for"),
    ("None with", "```python sm_90a expct=HGMMA\nx = 1\n```\nNone with", "'expct=HGMMA' is unknown"),
    ("None with", "```python sm_90a absent=LDLL\nx = 1\n```\nNone with", "'LDLL' is an instruction that nobody counts"),
    ("None with", "```python host\n@cute.jit\ndef f(): pass\n```\nNone with", "a host block compiles nothing"),
    ("None with", "```python sm_90a\nx = = 1\n```\nNone with", "this is not Python"),
    ("None with", "```text\nNone with", "this fenced block is never closed"),
]


@pytest.mark.parametrize(("before", "after", "message"), MISTAKES, ids=[m[2][:50] for m in MISTAKES])
def test_each_mistake_is_found(project: Path, entry: Path, before: str, after: str, message: str) -> None:
    text = entry.read_text()
    assert before in text
    entry.write_text(text.replace(before, after, 1))
    failures, _ = check(project)
    assert any(message in line for line in failures), failures
    assert main(["check", "--root", str(project)]) == 1
    assert not (project / "docs/knowledge/index.json").exists()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("022ea24da681 burst", "ffffffffffff burst", "flight.records:3: record ffffffffffff does not exist"),
        ("022ea24da681 burst", "022ea24da681 sustained", "flight.md:30: 235.4 us differs from its record: sustained"),
        ("022ea24da681 burst", "", "evidence without a record in flight.records"),
        ("022ea24da681 burst", "", "flight.records:2: no record stands below > It takes"),
        (
            "022ea24da681 burst",
            "022ea24da681 burst sustained",
            "flight.records:3: its block has no figure for sustained",
        ),
    ],
)
def test_each_mistake_in_the_list_beside_a_page_is_found(
    project: Path, entry: Path, before: str, after: str, message: str
) -> None:
    listed = entry.with_suffix(".records")
    listed.write_text(listed.read_text().replace(before, after))
    failures, _ = check(project)
    assert any(message in line for line in failures), failures


REFERENCE_MISTAKES = [
    ("*Compiled*. The block below.", "The block below.", "section 'What it says' does not say what it rests on"),
    ("*Compiled*. The block below.", "*Measured*. The block below.", "says *Measured*, and names no record"),
    ("*Compiled*. The block below.", "*Source*. The block below.", "says *Source*, and names no URL"),
    ("language: cute-dsl", "language: cuda", "language 'cuda' is unknown"),
    ("keywords: [swizzle, layout]", "keywords: []", "keywords must be a list"),
]


@pytest.mark.parametrize(("before", "after", "message"), REFERENCE_MISTAKES, ids=[m[2] for m in REFERENCE_MISTAKES])
def test_reference_pages_say_what_they_rest_on(
    project: Path, reference: Path, before: str, after: str, message: str
) -> None:
    reference.write_text(reference.read_text().replace(before, after, 1))
    assert any(message in line for line in check(project)[0])


def test_figures_with_a_link_need_no_record(project: Path, entry: Path) -> None:
    said = "They report 660 TFLOP/s ([text](https://example.com/deep))."
    entry.write_text(entry.read_text().replace("Shared memory has an end somewhere.", said))
    assert check(project)[0] == []


def test_figures_may_stand_in_a_trace_of_their_paragraph(project: Path, entry: Path) -> None:
    trace = project / "results/h100/traces/rows.txt"
    trace.parent.mkdir(parents=True)
    trace.write_text("random 2417 GB/s | in order 2829 GB/s\n")
    before = entry.read_text()
    link = "([trace](../../../results/h100/traces/rows.txt))"
    for said, wrong in (
        (f"Random 2417 GB/s, in order 2829 GB/s {link}.", ""),
        (f"Random 2417 GB/s, in order 2830 GB/s {link}.", "'2830 GB/s' does not stand in the trace"),
        (f"In order 829 GB/s {link}.", "'829 GB/s' does not stand in the trace"),
    ):
        entry.write_text(before.replace("Shared memory has an end somewhere.", said))
        found = check(project)[0]
        assert len(found) == bool(wrong) and all(wrong in line for line in found), found


def test_two_pages_with_one_title(project: Path, entry: Path) -> None:
    (entry.parent / "again.md").write_text(entry.read_text())
    assert any("has the title 'Hold more in flight' too" in line for line in check(project)[0])


def test_no_pages_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no docs/knowledge"):
        check(tmp_path)


def test_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["knowledge", "chek"]) == 2
    assert "did you mean 'check'?" in capsys.readouterr().err
