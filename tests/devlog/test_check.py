"""`devlog check` on an entry with one mistake at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mla_var3.devlog.check import check, find_root
from mla_var3.devlog.cli import main
from mla_var3.errors import UserError
from mla_var3.kernel import registry
from mla_var3.kernel.registry import KernelId

FAST = "aaaa11112222"


def test_good_entry_passes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(project) == ([], [])
    assert main(["check", "--root", str(project)]) == 0
    assert "nothing to mend" in capsys.readouterr().out


# (what stands in the good entry, what stands there instead, the line and message that check gives)
MISTAKES = [
    ("220.2 us [r", "219.0 us [r", "22: 219.0 us differs from its record: burst is 220.20 us"),
    (f" [r:{FAST} burst]", "", "22: 220.2 us has no record beside it"),
    ("burst] with", "sustained] with", "22: 220.2 us differs from its record: sustained is 264.24 us"),
    (f"[r:{FAST} burst]", "[r:dddd burst]", "22: record dddd does not exist in results/"),
    (f"[{FAST}, ", "[dddd77778888, ", "8: record dddd77778888 does not exist in results/"),
    (f"[{FAST}, ", "[", f"8: record {FAST} is cited and not in the front matter's records"),
    (f"[{FAST}, ", "[", "8: records names no record of this version"),
    ("The softmax: the tensor cores wait for it.", "", "24: section 'Bottleneck' is empty"),
    ("The softmax: the tensor cores wait for it.", "<!-- later -->", "24: section 'Bottleneck' is empty"),
    ("The softmax: the tensor cores wait for it.", "-", "24: section 'Bottleneck' is empty"),
    ("The softmax: the", "TODO: the", "25: a TODO is left: TODO: the tensor cores wait for it."),
    ("## Insights\nFewer loads matter more than more stages.\n", "", "28: section 'Insights' is missing"),
    ("## Bottleneck", "## Botleneck", "24: section 'Botleneck' is not one of: Location,"),
    ("## Insights", "## Verdict", "30: section 'Verdict' stands twice"),
    ("## What changed", "## Insights", "section 'Insights' is out of order"),
    ("from 250 us to 225 us", "a lot", "18: the hypothesis predicts no figure with a unit"),
    ("src/flash_mla_v1.py", "src/other.py", "12: Location does not name the version's file, src/flash_mla_v1.py"),
    ("verdict: kept", "verdict: keep", "6: verdict 'keep' is unknown: did you mean 'kept'?"),
    ("verdict: kept", "verdict: rejected", "27: the section must begin with the front matter's verdict, 'rejected'"),
    ("verdict: kept\n", "", "1: front matter lacks verdict"),
    ("devices: [h200]", "devices: [h100]", "7: devices lacks h200, the one of record aaaa11112222"),
    ("devices: [h200]", "devices: h200", "7: devices must be a list"),
    ("devices: [h200]", "device: [h200]", "7: front matter has no field 'device': did you mean 'devices'?"),
    ("version: 1", "version: 2", "4: version is 2, and the file is that of 1"),
    ("language: triton", "language: cutile", "3: language is cutile, and the file is that of triton"),
    ("date: 2026-11-22", "date: yesterday", "5: date 'yesterday' is not of the form"),
    ("records: [", "records: {", "its front matter is not YAML"),
    ("---\ndesign", "design", "1: it has no front matter"),
]


@pytest.mark.parametrize(("before", "after", "message"), MISTAKES, ids=[m[2][:60] for m in MISTAKES])
def test_each_mistake_is_one_line(project: Path, entry: Path, before: str, after: str, message: str) -> None:
    text = entry.read_text()
    assert before in text
    entry.write_text(text.replace(before, after, 1))
    failures, _ = check(project)
    mine = [line for line in failures if message in line]
    assert len(mine) == 1, failures
    assert mine[0].startswith("devlogs/flash_mla/triton-v1.md:")
    assert "\n" not in mine[0]


def test_version_without_entry(project: Path, entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry.unlink()
    assert main(["check", "--root", str(project)]) == 1
    out = capsys.readouterr()
    assert "triton-v1.md:1: triton/flash_mla_v1 has no entry: mla-var3 devlog new triton/flash_mla_v1\n" in out.out
    assert out.err == "devlog check: 1 to mend\n"


def test_wrapped_library_needs_no_entry(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = registry.all_kernels()
    monkeypatch.setattr(registry, "all_kernels", lambda: (*mine, KernelId("peer", "mla", "flashmla")))
    assert check(project) == ([], [])


@pytest.mark.parametrize(("verdict", "fails"), [("kept", True), ("not run here", True), ("rejected", False)])
def test_entry_of_a_removed_version_is_a_tombstone(
    project: Path, entry: Path, verdict: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "all_kernels", tuple)
    text = entry.read_text().replace("verdict: kept", f"verdict: {verdict}").replace("**Kept**", f"**{verdict}**")
    entry.write_text(text)
    failures, _ = check(project)
    assert [("tombstone" in line) for line in failures] == ([True] if fails else [])


def test_version_that_was_not_run_needs_no_record(project: Path, entry: Path) -> None:
    text = entry.read_text().replace("verdict: kept", "verdict: not run here").replace("**Kept**", "Not run here")
    text = text.replace("[aaaa11112222, bbbb33334444]", "[]").replace("devices: [h200]", "devices: []")
    start, end = text.index("It takes"), text.index("\n\n## Bottleneck")
    entry.write_text(text[:start] + "Nothing: it needs another architecture." + text[end:])
    assert check(project) == ([], [])


def test_corrupt_record_line_is_named_and_the_others_count(project: Path) -> None:
    file = project / "results" / "h200" / "2026-11-22-decode.jsonl"
    file.write_text(file.read_text() + '{"id": "torn\n')
    failures, _ = check(project)
    assert len(failures) == 1
    assert failures[0].startswith("results/h200/2026-11-22-decode.jsonl:4: ")


def test_one_id_for_two_records(project: Path) -> None:
    file = project / "results" / "h200" / "2026-11-22-decode.jsonl"
    again = json.loads(file.read_text().splitlines()[0])
    (file.parent / "2026-11-23-decode.jsonl").write_text(json.dumps({**again, "host_us": 1.0}) + "\n")
    failures, _ = check(project)
    assert failures == ["results: two different records have the id bbbb33334444"]


def test_edited_kernel_is_a_note(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "source_hash", lambda kernel: "0" * 16)
    assert main(["check", "--root", str(project)]) == 0
    note = "note: devlogs/flash_mla/triton-v1.md:1: measured with source feedfeedfeedfeed; the version's files are now"
    assert note in capsys.readouterr().out


def test_tables_of_the_readme_and_of_docs(project: Path) -> None:
    row = f"| a | {{}} | [r:{FAST} burst] |\n"
    (project / "docs" / "knowledge").mkdir(parents=True)
    (project / "README.md").write_text("Answers in 0.5 s.\n\n| x | us | r |\n|---|---|---|\n" + row.format("220.2"))
    assert check(project) == ([], [])
    (project / "docs" / "knowledge" / "a.md").write_text("| x | us | r |\n|---|---|---|\n" + row.format("300"))
    failures, _ = check(project)
    assert failures == [
        "docs/knowledge/a.md:3: 300 us differs from its record: burst is 220.20 us in [r:aaaa11112222 burst]"
    ]
    assert check(project, [project / "README.md"]) == ([], [])


def test_a_row_names_the_kernel_of_its_record(project: Path) -> None:
    head = "| cell | kernel | us | r |\n|---|---|---|---|\n"
    page = project / "README.md"
    page.write_text(head + f"| a | triton/flash_mla_v1 | 220.2 | [r:{FAST} burst] |\n")
    assert check(project) == ([], [])
    page.write_text(head + f"| a | triton/flash_mla_v16 | 220.2 | [r:{FAST} burst] |\n")
    failures, _ = check(project)
    assert failures == [
        f"README.md:3: [r:{FAST} burst] is a record of triton/flash_mla_v1, and its row names triton/flash_mla_v16"
    ]


def test_root(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project / "devlogs" / "flash_mla")
    assert find_root() == project
    with pytest.raises(UserError, match="is not a folder"):
        find_root(tmp_path / "nothing")
    with pytest.raises(UserError, match="is not a file"):
        check(project, [tmp_path / "nothing.md"])


def test_name_that_is_no_entry(project: Path, entry: Path) -> None:
    entry.rename(entry.with_name("notes.md"))
    failures, _ = check(project)
    assert any("notes.md:3: language is triton, and the file is that of notes" in line for line in failures)


def test_source_of_a_version_is_its_registered_path() -> None:
    """Of the real registry: what Location must name exists."""
    for kernel in registry.all_kernels():
        assert isinstance(kernel, KernelId)
        assert kernel.path.is_file()
