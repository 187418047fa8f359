"""`devlog render`: a design's page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mla_var3.cli.devlog import main
from mla_var3.errors import UserError
from mla_var3.lab.devlog.check import check
from mla_var3.lab.report.history import _cells, designs, page, render

FAST, SLOW = "aaaa11112222", "bbbb33334444"
VOID = {"meta", "br", "hr", "img"}


class Balance(HTMLParser):
    """Names of elements that are open; fails where one is closed that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag


def test_a_page_has_the_ladder_the_entry_and_its_records(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = project / "pages"
    assert main(["render", "flash_mla", "--root", str(project), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out / 'flash_mla.html'}: 1 entries, 1 pictures\n"
    text = (out / "flash_mla.html").read_text()
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    # The picture: two versions, their times, and the limit of the run.
    svg = text[text.index("<svg") : text.index("</svg>")]
    assert all(label in svg for label in (">250.0<", ">220.2<", ">limit 181.9<", ">v0<", ">v1<"))
    assert "<td class='n'>1.135×</td>" in text
    assert "Keys are loaded once for both products." in text and "measured on h200" in text
    # A citation leads to its record on the page, and no record is left out.
    assert f"<a href='#r-{FAST}' title='{FAST} burst resources.registers'>r:aaaa11</a>" in text
    assert set(re.findall(r"href='#r-(\w+)'", text)) <= set(re.findall(r"<tr id='r-(\w+)'", text)) == {FAST, SLOW}
    # Nothing is fetched: no script, no stylesheet, no picture from elsewhere.
    assert not re.search(r"<script|<link|\bsrc=|@import|url\(http", text)


def test_a_page_follows_light_and_dark(project: Path) -> None:
    text, _, _ = page(project, "flash_mla", {}, "burst")
    assert "prefers-color-scheme: dark" in text and "No version of it was timed yet" in text


def test_raw_html_and_odd_citations_stay_text(project: Path, entry: Path) -> None:
    text = entry.read_text()
    odd = "<script>alert(1)</script> `<!-- r:ID burst -->` <!-- r:eeee99990000 burst --> <!-- secret -->"
    odd += " [v0](triton-v0.md) [x](https://e.org)"
    entry.write_text(text.replace("The softmax: the tensor cores wait for it.", odd))
    made = (render(project, "flash_mla", project / "o")[0].path).read_text()
    assert "<script>" not in made and "&lt;script&gt;" in made and "secret" not in made
    assert "<code>&lt;!-- r:ID burst --&gt;</code>" in made and "[r:eeee99990000 burst]" in made and "<!--" not in made
    assert "triton-v0.md" not in made and '<a href="https://e.org">x</a>' in made


def test_experiments_and_lines_of_traces_are_shown(project: Path, entry: Path) -> None:
    trace = project / "results" / "h200" / "traces" / "a.txt"
    trace.parent.mkdir()
    trace.write_text("18.2 us\n")
    parts = ("What changed", "Hypothesis", "Measured", "Verdict", "Insights")
    said = "".join(f"### {part}\nRejected, 18.2 us.\n" for part in parts)
    text = entry.read_text()
    entry.write_text(text.replace("## Bottleneck", f"## Experiment: unrolled\n{said}\n## Bottleneck"))
    listed = entry.with_suffix(".records")
    listed.write_text(listed.read_text() + "[Measured]\n> Rejected\nresults/h200/traces/a.txt:1 18.2\n")
    assert check(project) == ([], [])
    made = render(project, "flash_mla", project / "o")[0].path.read_text()
    assert "<h3>Experiment: unrolled</h3>" in made and made.count("<h3>Hypothesis</h3>") == 2
    assert "18.2 us.<sup title='results/h200/traces/a.txt:1 18.2'>a.txt:1</sup>" in made


def test_all_designs_without_a_name(project: Path, entry: Path) -> None:
    other = project / "devlogs" / "other" / entry.name
    other.parent.mkdir()
    other.write_text(entry.read_text())
    assert designs(project) == ["flash_mla", "other"]
    assert [p.path.name for p in render(project, None, project / "o")] == ["flash_mla.html", "other.html"]


def test_mistakes(project: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no design 'flash_mle' has entries"):
        render(project, "flash_mle")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        render(project, "flash_mla", blocked / "below")
    empty = tmp_path / "empty"
    (empty / "devlogs").mkdir(parents=True)
    with pytest.raises(UserError, match="there are no entries"):
        render(empty)


def test_the_design_that_has_most_versions(repo_root: Path, tmp_path: Path) -> None:
    (made,) = render(repo_root, "flash_mla", tmp_path, "sustained")
    text = made.path.read_text()
    assert made.entries == len(list((repo_root / "devlogs" / "flash_mla").glob("*-v*.md"))) and made.pictures == 8
    assert "does not run on others (wgmma needs sm_90a)" in text and "b128_s1_h128_t4096" in text
    assert set(re.findall(r"href='#([\w.-]+)'", text)) <= set(re.findall(r"id='([\w.-]+)'", text))


def test_cells_are_of_different_rows_first(repo_root: Path) -> None:
    from mla_var3.lab.report.gather import gather

    points = gather([repo_root / "results"]).newest
    rows = {p.cell: p.problem.rows for p in points if p.problem.workload == "decode"}
    chosen = _cells(points, "flash_mla")
    assert len(chosen) == 4 and len({rows[cell] for cell in chosen}) == 4
