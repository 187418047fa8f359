"""The page as a file, its tables on the terminal, and its data and pictures as files."""

from __future__ import annotations

import base64
import gzip
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mla_var3 import cli, paths
from mla_var3.cli import report as verb
from mla_var3.errors import UserError
from mla_var3.lab.report import export, page
from mla_var3.lab.report.gather import Gathered, arrange, gather
from mla_var3.record import RecordStore

H200 = paths.shipped_results_dir() / "h200"


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/octet-stream" id="data">([A-Za-z0-9+/=]*)</script>', text)
    assert found
    return dict(json.loads(gzip.decompress(base64.b64decode(found[1]))))


def report(*words: str) -> int:
    return verb.run(cli.parser_of("report").parse_args(list(words)))


@pytest.fixture(scope="module")
def shipped() -> Gathered:
    return gather([H200])


@pytest.fixture(scope="module")
def shipped_page(shipped: Gathered) -> str:
    return page.page(shipped)


# ---------------------------------------------------------------- the file
def test_the_page_of_the_shipped_records_holds_them_all(shipped: Gathered, shipped_page: str) -> None:
    gathered, data = shipped, data_of(shipped_page)
    ids = {row[data["cols"].index("id")] for row in data["rows"]}
    assert ids == {p.record.id for p in gathered.points}
    assert {c["name"] for c in data["cells"]} == {p.cell for p in gathered.points}
    assert data["entries"]["cute-dsl/flash_mla_v1"]["verdict"] == "superseded"
    assert data["sources"]["cute-dsl/flash_mla"]["lines"] > 1000
    assert [roof["kind"] for roof in data["roofs"]["h200"]["burst"]] == ["measured", "data sheet"]


def test_the_page_names_no_address_that_a_browser_would_fetch(shipped_page: str) -> None:
    markup = re.sub(r"<script.*?</script>", "", shipped_page, flags=re.DOTALL)
    assert re.findall(r"""\s(?:src|href|action|srcset)=["']?(?!["']|data:|#)[^"'>]+|url\(|@import""", markup) == []
    assert "default-src 'none'" in markup
    assert "connect-src" not in markup, "default-src 'none' is what keeps scripts from the network"


def test_three_thousand_records_are_under_five_megabytes(many: Any) -> None:
    gathered = arrange(many)
    began = time.monotonic()
    size = len(page.page(gathered).encode())
    assert len(gathered.points) == 3000
    assert size < 5_000_000
    assert time.monotonic() - began < 20


def test_what_a_record_says_cannot_leave_its_place(make: Any) -> None:
    evil = "</script><script>alert(1)</script><!--"
    text = page.page(
        arrange([make(method=evil, experiment=evil), make("peer/fa4", None, status="failed", reason=evil)])
    )
    assert "<script>alert(1)" not in text
    data = data_of(text)
    assert data["methods"] == [evil]
    assert evil in data["left_out"][0]["why"]


def test_an_entry_becomes_markdown_and_never_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_var3.lab.report import sources

    entry = sources.Entry(
        "devlogs/x.md",
        "kept",
        "",
        [("Verdict", "fast <img src=x onerror=alert(1)><!-- r:abcdef123456 burst -->, so\n\n| a |\n|---|\n| 1 |")],
    )
    monkeypatch.setattr(sources, "entries", lambda: {"cute-dsl/flash_mla": entry})
    html = page._entries(["cute-dsl/flash_mla"])["cute-dsl/flash_mla"]["html"]
    assert "<img" not in html
    assert '<th scope="col">a</th>' in html and "<td>1</td>" in html
    assert '(<a href="#record=abcdef123456">record</a>), so' in html
    assert "!--" not in html


def test_figures_that_are_no_numbers_stay_valid_json(make: Any) -> None:
    record = make(error={"out": 1e-3, "lse": float("inf")})
    data = data_of(page.page(arrange([record])))
    assert data["rows"][0][data["cols"].index("lse")] is None


# ---------------------------------------------------------------- the verb
def test_the_verb_makes_a_page_and_a_map_of_all_records_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every device and workload at once, as `mla-var3 report` takes them."""
    out = tmp_path / "deep" / "page.html"
    assert report("--show", "map", "--out", str(out)) == 0
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>") and out.stat().st_size < 5_000_000
    data = data_of(out.read_text(encoding="utf-8"))
    cells = [c["name"] for c in data["cells"]]
    assert {"h200", "h100"} <= {row[data["cols"].index("device")] for row in data["rows"]}
    assert cells.index("b1_s1_h128_t4096") < cells.index(next(name for name in cells if name.startswith("q_n")))
    said = capsys.readouterr()
    assert "Fastest on" in said.out and f"report: {out} (" in said.out
    assert re.search(r"left out or shown with a reservation, [\d,]+ of them older records of what is shown", said.err)


def test_tables_on_the_terminal_have_the_figures_of_the_records(
    shipped: Gathered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--cell", "b128_s1_h128_t4096", "--show", "map", "dispatch", "cell", "ladder", "languages", "left", "sets"]
    assert report(str(H200), *words) == 0
    out = capsys.readouterr().out
    best = min((p for p in shipped.newest if p.cell == "b128_s1_h128_t4096"), key=lambda p: p.us("burst"))
    for text in (
        f"{best.us('burst'):.1f}",
        best.shown,
        "in the median",
        "mla-var3 bench",
        "Geometric mean",
        "lines of code",
        "Left out",
    ):
        assert text in out
    assert list(tmp_path.iterdir()) == [], "tables alone write no page"


def test_tables_load_no_charts_and_no_frames() -> None:
    code = (
        "import sys; from mla_var3.cli import main; status = main(['report', sys.argv[1], '--show', 'map']); "
        "print(status, [m for m in ('altair', 'vl_convert', 'pandas', 'pyarrow', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(H200)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_two_files_are_two_sets(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, us in (("monday", 100), ("tuesday", 120)):
        RecordStore(tmp_path / f"{name}.jsonl").append(make(us=us))
        RecordStore(tmp_path / f"{name}.jsonl").append(make("peer/fa4", us=90))
    files = [str(tmp_path / f"{name}.jsonl") for name in ("monday", "tuesday")]
    assert report("--show", "compare", "--compare", *files) == 0
    out = capsys.readouterr().out
    assert "monday -> tuesday, burst" in out
    assert re.search(r"cute-dsl/flash_mla .*\+20\.0 %.*slower", out)
    assert "1 of 2 moved beyond" in out
    assert report("--compare", *files, "--out", str(tmp_path / "page.html")) == 0
    data = data_of((tmp_path / "page.html").read_text())
    assert [data["sets"][i] for i in data["compare"]] == ["monday", "tuesday"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--device", "h20"], "no record of device 'h20': did you mean 'h200'"),
        (["--cell", "b128_s1_h128_t4095"], "no record of cell .* did you mean 'b128_s1_h128_t4096'"),
        (["--design", "flash_mlo"], "no record of design 'flash_mlo': did you mean 'flash_mla'"),
        (["--languages", "cutile", "cute-dsl"], "no record of language 'cutile': did you mean 'cutile-dsl'"),
        (["--compare", "monday", "tuesday"], "--compare 'monday' names no record set; there are: h200"),
        (["--show", "compare"], "needs two record sets: add --compare"),
        (["--picture", "map"], "add --pictures DIR"),
        (["--pictures", "x", "--picture", "mapp"], "there is no picture 'mapp': did you mean 'map'"),
        (["--data", "x.xlsx"], "x.xlsx ends in '.xlsx'"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        report(str(H200 / "2026-11-21-decode-earlier.jsonl"), *words)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- files
def test_csv_and_parquet_hold_every_timed_record(shipped: Gathered, tmp_path: Path) -> None:
    import pandas as pd

    gathered = shipped
    frames = []
    for name in ("records.csv", "records.parquet"):
        assert export.write_table(gathered, tmp_path / name) == len(gathered.points)
        frames.append(pd.read_csv(tmp_path / name) if name.endswith("csv") else pd.read_parquet(tmp_path / name))
    for frame in frames:
        assert list(frame["id"]) == [p.record.id for p in gathered.points]
        assert list(frame["time_us_burst_median"]) == pytest.approx([p.us("burst") for p in gathered.points])
        assert set(frame["cell"]) == {p.cell for p in gathered.points}


def test_every_picture_is_drawn_without_a_browser(shipped: Gathered, tmp_path: Path, make: Any) -> None:
    records = [make(p.record.kernel.label, p.us("burst"), problem=p.problem, day="2030-01-01") for p in shipped.points]
    gathered = arrange([*records, *(p.record for p in shipped.points)])
    before = next(name for name in gathered.sets if "2026-11-21" in name)
    after = next(name for name in gathered.sets if "2030-01-01" in name)
    choice = export.Choice(
        "h200", "burst", "b128_s1_h128_t4096", "flash_mla", ("cutile-dsl", "cute-dsl"), (before, after)
    )
    written = export.write_pictures(gathered, tmp_path, choice, kinds=("svg",))
    assert [path.name.split("-")[0].split(".")[0] for path in written] == list(export.PICTURES)
    for path in written:
        text = path.read_text(encoding="utf-8")
        assert text.startswith("<svg")
        assert "currentColor" not in text, "a picture file has no page whose colour it could take"
        assert not re.search(r'(?:href|src)="(?!#)', text)
        assert path.stat().st_size < 800_000
    map_text = written[0].read_text(encoding="utf-8")
    assert "128 heads × 1" in map_text and "no lib" in map_text
    shortest = (p for p in gathered.newest if p.cell == "b1_s1_h128_t4096" and p.live)
    assert min(shortest, key=lambda p: p.us("burst")).record.kernel.label in map_text
    (png,) = export.write_pictures(gathered, tmp_path, choice, ["cell"], ("png",))
    assert png.read_bytes().startswith(b"\x89PNG")


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2, 0 (black) to 1."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_on_the_colours_of_tiles_can_be_read() -> None:
    from mla_var3.lab.report import charts

    for colour in (charts.AHEAD, charts.LEVEL, charts.BEHIND, charts.NO_LIBRARY):
        assert (luminance(colour) + 0.05) / 0.05 >= 4.5, f"black text on {colour} is hard to read"
