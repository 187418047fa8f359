"""One cell, one answer: every table, page and picture says the same of a cell that `catalogue.spoken` says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_var3 import cli, paths
from mla_var3.catalogue import ledger, spoken
from mla_var3.device import Device
from mla_var3.lab import naming
from mla_var3.lab.report import answers, rows
from mla_var3.lab.report.gather import Gathered, arrange
from mla_var3.lab.report.legend import kernels
from mla_var3.lab.report.page import asset, page_data
from mla_var3.lab.sweep import config as sweep_config
from mla_var3.lab.sweep import plan as sweep_plan
from mla_var3.record import Record, as_ratio, load
from mla_var3.workload import problem_from_record

DEVICE = "h200"
FOLDER = paths.shipped_results_dir() / DEVICE
#: It once stood as 0.993, 1.00, 0.998 and 0.985 of FlashMLA in four places.
CELL = "b128_s1_h64_t4096"


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return load([FOLDER]).records


@pytest.fixture(scope="module")
def right(records: list[Record]) -> dict[str, spoken.Answer]:
    """By cell, as the report names it: what it answers in burst."""
    gathered = arrange(records)
    found: dict[str, spoken.Answer] = {}
    for name, block in answers.by_cell(gathered.newest).items():
        if (answer := spoken.answer([p.record for p in block], "burst")) is not None:
            found[name] = answer
    return found


@pytest.fixture(scope="module")
def gathered(records: list[Record]) -> Gathered:
    return arrange(records)


def cells_of(experiment: str) -> dict[str, str]:
    """By label, as pages name a cell of an experiment: its name in the report."""
    cells = sweep_plan.expand_cells(sweep_config.compose([f"experiment={experiment}"]))
    found = {cell.label: naming.cell_name(cell) for cell in cells}
    assert len(found) == len(cells)
    return found


def decode_cells() -> list[str]:
    return list(cells_of("decode").values())


def said(answer: spoken.Answer) -> tuple[str, str, str, str]:
    """Kernel, microseconds, ratio and library, as tables write them."""
    assert answer.ours and answer.library
    us = f"{answer.ours.median('burst'):,.1f}"
    return spoken.name(answer.ours), us, as_ratio(answer.ratio), spoken.name(answer.library)


def answer_rows(text: str) -> dict[str, tuple[str, str, str, str]]:
    """The rows of an answer's table on a terminal; long names, of cells and of kernels, go on in the next lines."""
    rows: list[list[str]] = []  # of each: the cell, its kernel, what follows
    for line in text.splitlines():
        if begin := re.match(r" (\S+) +(\S.*?)(  .*)$", line):
            rows.append(list(begin.groups()))
        elif rows and line.startswith("   "):
            for more in re.finditer(r"\S+(?: \S+)*", line):
                rows[-1][more.start() > 3] += more[0] if more[0].startswith("_") else f" {more[0]}"
    text = "\n".join(f" {cell}  {kernel}{rest}" for cell, kernel, rest in rows)
    line = re.compile(r"^ (\S+) +(\S.*?)(?: \*)? +([\d,.]+) +\d+ % +(\S+) times as fast as (\S.*?)(?: ~)? *$", re.M)
    found = {cell: (kernel, us, ratio, library) for cell, kernel, us, ratio, library in line.findall(text)}
    return {cell: (kernel.removesuffix(" (retired)"), *more) for cell, (kernel, *more) in found.items()}


# ---------------------------------------------------------------- surfaces
def test_the_cell_that_had_four_answers_has_one(right: dict[str, spoken.Answer]) -> None:
    answer = right[CELL]
    assert answer.ours and answer.library and answer.of_one_run
    assert answer.library.kernel.label == "peer/flash_mla_lib" and answer.ours.picked_by in (None, "dispatch")
    assert answer.ratio and (answer.ratio < 1) == (float(as_ratio(answer.ratio)) < 1)
    assert as_ratio(0.998) == "0.998" and as_ratio(0.9996) == "0.9996"  # no rounding up to 1
    assert len({*decode_cells()} & right.keys()) == 17


def test_compare_answers_so(right: dict[str, spoken.Answer], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", str(FOLDER)]) == 0
    found = answer_rows(capsys.readouterr().out)
    both = {name for name, answer in right.items() if answer.ours and answer.library}
    assert found.keys() == both and len(both) > 300
    for name in both:
        assert found[name] == said(right[name]), name


def test_compare_of_two_kernels_answers_so(right: dict[str, spoken.Answer], capsys: pytest.CaptureFixture[str]) -> None:
    kernel, us, ratio, library = said(right[CELL])
    for pair in ([kernel, library], [library, kernel]):
        assert cli.main(["compare", str(FOLDER), "--cells", CELL, "--kernels", *pair]) == 0
        out = capsys.readouterr().out
        (row,) = [line.split() for line in out[out.index(" against ") :].splitlines() if line.startswith(f" {CELL} ")]
        inverse = as_ratio(1 / (right[CELL].ratio or 0.0))
        assert row[5] == (ratio if pair[0] == kernel else inverse) and us in row


def test_a_sweep_without_a_gpu_answers_so(
    right: dict[str, spoken.Answer],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from mla_var3.lab.sweep import compile as sweep_compile

    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    monkeypatch.setattr(sweep_compile, "compile_points", lambda *arguments, **options: iter(()))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", "experiment=decode", "kernels=cute", "experiment.cpu=false"]) == 0
    found = answer_rows(capsys.readouterr().out)
    assert found == {name: said(right[name]) for name in decode_cells()}


def test_the_reports_map_and_table_answer_so(
    right: dict[str, spoken.Answer], gathered: Gathered, capsys: pytest.CaptureFixture[str]
) -> None:
    winners = answers.winners(gathered.newest, "burst")
    for w in winners:
        answer = right[w.best.cell]
        assert (w.ours and w.ours.record, w.peer and w.peer.record) == (answer.ours, answer.library)
        assert w.vs_peer == answer.ratio and w.mixed == bool(answer.ours and answer.library and not answer.of_one_run)
    tiles = {tile["tip"]: tile for tile in rows.regime_map(winners, kernels(gathered))}
    assert f"ours {as_ratio(right[CELL].ratio)}× the best library" in tiles[CELL]["said"]
    assert cli.main(["report", str(FOLDER), "--show", "map"]) == 0
    out = capsys.readouterr().out
    table = re.compile(r"^ (\S+) +(\S.*?) +([\d,.]+) +\d+ % +([\d.]+)(?: ~)? +(\S+)", re.M)
    found = {cell: (kernel, us, ratio, library) for cell, kernel, us, ratio, library in table.findall(out)}
    for name in decode_cells():
        assert found[name] == said(right[name]), name
    assert answers.resting(winners) in out


def test_the_report_says_how_many_cells_rest_on_what_is_here(gathered: Gathered) -> None:
    winners = [w for w in answers.winners(gathered.newest, "burst") if naming.phase(w.best.problem) == "decode"]
    here = [w for w in winners if w.ours and w.ours.live]
    today = sum(spoken.standing(w.ours.record) == ledger.SAME for w in here if w.ours)
    assert 0 < len(here) < len(winners)
    said = answers.resting(winners)
    assert said.startswith(f"{len(here)} of {len(winners)} cells rest on versions that are in this checkout")
    assert f", {today} of them on the code that these have today" in said


def test_pages_of_results_answer_so(
    right: dict[str, spoken.Answer], repo_root: Path, module_at: Callable[[Path], Any]
) -> None:
    module = module_at(repo_root / "scripts" / "results_pages.py")
    for name in ("decode", "tensor_parallel", "ragged"):
        seen, names = 0, cells_of(name)
        for line in module.page(name).splitlines():
            cells = [re.sub(r"\s*<!--.*?-->", "", text).strip() for text in line.strip("| ").split("|")]
            if len(cells) > 8 and cells[0] in names and cells[6].startswith("peer/"):
                kernel, us, ratio, library = said(right[names[cells[0]]])
                assert (cells[1], cells[6], cells[7]) == (kernel, library, ratio), line
                assert float(cells[2]) == pytest.approx(float(us.replace(",", "")), abs=0.06)
                seen += 1
        assert seen >= 16, name
    assert f"{as_ratio(right[CELL].ratio)}, {CELL})" in module.page("decode")


def test_rows_of_the_readme_answer_so(right: dict[str, spoken.Answer], repo_root: Path) -> None:
    seen, names = 0, {label: cell for name in ("decode", "ragged") for label, cell in cells_of(name).items()}
    for line in (repo_root / "README.md").read_text(encoding="utf-8").splitlines():
        found = re.match(r"\| `?(\w+_t\d+\w*)`? \|", line)
        if found and found[1] in names:
            numbers = re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", re.sub(r"<!--.*?-->", "", line))
            answer = right[names[found[1]]]
            assert answer.ours
            assert as_ratio(answer.ratio) in numbers, line
            us = answer.ours.median("burst") or 0.0
            assert any(float(text) == pytest.approx(us, rel=1e-3) for text in numbers), line
            seen += 1
    assert seen >= 6


def test_diagnose_takes_the_record_that_speaks(right: dict[str, spoken.Answer], records: list[Record]) -> None:
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.lab.diagnosis import evidence

    ours = right[CELL].ours
    assert ours is not None
    dumped = [r.model_dump() for r in records if r.problem == ours.problem]
    kernel = KernelId.from_record(ours.kernel.model_dump())
    found = evidence.record_of(dumped, kernel, problem_from_record(ours.problem), DEVICE, None)
    assert found is not None and found["id"] == ours.id


# ---------------------------------------------------------------- the page's script
HARNESS = """
const fs = require("fs"), text = fs.readFileSync(0, "utf8").split("\\n@@\\n");
globalThis.document = { getElementById: () => ({ textContent: text[0] }) };
const run = Object.getPrototypeOf(async function () {}).constructor(text[1] + `
  SELECTED.phase = "";
  const told = {};
  for (const d of ["burst", "sustained"]) {
    SELECTED.state = d;
    told[d] = Object.fromEntries(winners(shown()).map((w) => [DATA.cells[w.cell].name, { ours: w.ours && w.ours.id,
      peer: w.peer && w.peer.id, best: w.best.id, ratio: w.vs_peer, margin: w.margin, tie: w.tie, mixed: w.mixed }]));
    told[d + "_resting"] = resting(winners(shown()));
    told[d + "_pairs"] = pairsOf(shown(), "cutile-dsl", "cute-dsl").map((pair) => pair.map((p) => p.id));
    const { steps } = ladderOf(shown(), "flash_mla", CELL_INDEX.get("${process.argv[1]}"));
    told[d + "_ladder"] = steps.map((s) => [s.point.id, s.gain]);
  }
  SELECTED.state = "burst";
  const { point, library } = answerFor({ h: 64, s: 1, b: 128, t: 4096, causal: false });
  told.find = { point: point && point.id, library: library.point && library.point.id, ratio: library.ratio };
  told.ratios = [0.998, 0.9996, 0.99996, 1, 1 - 1e-9, 1.0004, 1.05, 12.34, 123.4, 0.0501].map((x) => ratio(x));
  return told;
`);
run().then((told) => console.log(JSON.stringify(told)));
"""


@pytest.fixture(scope="module")
def told(gathered: Gathered) -> dict[str, Any]:
    """What the script inside the page answers, without a browser."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed; the tests in a browser ask the same")
    from mla_var3.lab.report.page import packed

    script = "\n".join(asset(name) for name in ("core.js", "answers.js", "finder.js"))
    text = packed(page_data(gathered)) + "\n@@\n" + script
    done = subprocess.run(
        [node, "-e", HARNESS, CELL], input=text, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def near(value: float | None) -> Any:
    """The page holds seven digits of each figure."""
    return None if value is None else pytest.approx(value, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("state", ["burst", "sustained"])
def test_the_pages_script_answers_so(told: dict[str, Any], gathered: Gathered, state: str) -> None:
    winners = answers.winners(gathered.newest, state)
    assert told[state].keys() == {w.best.cell for w in winners}
    for w in winners:
        have = told[state][w.best.cell]
        ids = [p.record.id if p else None for p in (w.ours, w.peer, w.best)]
        assert [have["ours"], have["peer"], have["best"]] == ids, w.best.cell
        assert (have["ratio"], have["margin"]) == (near(w.vs_peer), near(w.margin)), w.best.cell
        assert (have["tie"], have["mixed"]) == (w.tie, w.mixed), w.best.cell
    assert told[f"{state}_resting"] == answers.resting(winners)
    pairs = answers.pairs(gathered.newest, "cutile-dsl", "cute-dsl", state)
    assert told[f"{state}_pairs"] == [[a.record.id, b.record.id] for a, b in pairs]
    steps = [step for ladder in answers.ladders(gathered.newest, "flash_mla", CELL, state) for step in ladder.steps]
    assert [identity for identity, _ in told[f"{state}_ladder"]] == [step.point.record.id for step in steps]
    for (_, gain), step in zip(told[f"{state}_ladder"], steps, strict=True):
        assert gain == near(step.gain)


def test_the_finder_answers_so(told: dict[str, Any], right: dict[str, spoken.Answer]) -> None:
    answer = right[CELL]
    assert answer.ours and answer.library
    assert told["find"] == {"point": answer.ours.id, "library": answer.library.id, "ratio": near(answer.ratio)}


def test_the_page_writes_ratios_as_the_tables_do(told: dict[str, Any]) -> None:
    values = [0.998, 0.9996, 0.99996, 1.0, 1 - 1e-9, 1.0004, 1.05, 12.34, 123.4, 0.0501]
    assert told["ratios"] == [as_ratio(value) for value in values]
