"""docs/results/ is what scripts/results_pages.py makes of the records, and records say what docs say of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.lab.devlog import tables
from mla_var3.record import ASIDE, load
from mla_var3.workload.decode import MlaProblem


@pytest.fixture
def pages_module(repo_root: Path, module_at: Callable[[Path], Any]) -> Any:
    return module_at(repo_root / "scripts" / "results_pages.py")


def test_the_pages_are_those_of_the_records(pages_module: Any, repo_root: Path) -> None:
    made = pages_module.pages()
    folder = repo_root / "docs" / "results"
    assert {p.name for p in folder.iterdir()} == set(made)
    for name, text in made.items():
        assert (folder / name).read_text(encoding="utf-8") == text, f"run scripts/results_pages.py ({name})"
        assert not re.search(r"<!--\s*r:", text), f"{name} is made of its records, and cites none"
    assert made["decode.md"].count("cute-dsl/flash_mla_v23") >= 17


def test_the_readmes_means_are_those_of_the_pages(pages_module: Any, repo_root: Path) -> None:
    """The list below the README's table: each mean and its number of cells, beside the link to their page."""
    readme = (repo_root / "README.md").read_text(encoding="utf-8")
    said = re.findall(r"^- ([\d.]+) over (?:the )?(\d+) .*?docs/results/(\w+)\.md", readme, re.M)
    assert [name for *_, name in said] == [
        "decode",
        "ragged",
        "unseen",
        "sparse_decode",
        "sparse_served",
        "unseen_sparse",
    ]
    for mean, cells, name in said:
        start = f"Geometric mean of the speedups over {cells} cells: {mean} in burst "
        assert any(row.startswith(start) for row in pages_module.page(name).splitlines()), (name, mean, cells)


def test_a_figure_that_is_not_the_records_is_noticed(
    pages_module: Any, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record with another time makes another page: in its row, its ratios and the mean above them."""
    before = pages_module.page("decode")
    records = [json.loads(json.dumps(r)) for r in pages_module.records_of(pages_module.MAIN, "decode")]
    for r in records:
        r["run"] = "one"
    (mine,) = [
        r for r in records if tables.problem_label(r) == "b128_s1_h128_t4096" and tables.label(r).startswith("cute-dsl")
    ]
    mine["time_us"]["burst"]["median"] *= 1.04
    monkeypatch.setattr(pages_module, "records_of", lambda device, name: records)
    changed = [line for line in pages_module.page("decode").splitlines() if line not in before.splitlines()]
    assert sum("b128_s1_h128_t4096 | cute-dsl" in line for line in changed) == 2
    assert any(line.startswith("Geometric mean") for line in changed)


def test_a_page_names_the_cells_that_nobody_measured(pages_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their names while they are few, else by their number; none where every cell has a time."""
    told = pages_module.records_of(pages_module.MAIN, "decode")
    assert pages_module.lacking(pages_module.MAIN, "decode") == ""
    names = ("b128_s1_h128_t4096", "b1_s1_h16_t131072")
    some = [r for r in told if tables.problem_label(r) not in names]
    monkeypatch.setattr(pages_module, "records_of", lambda device, name: some)
    said = pages_module.lacking(pages_module.MAIN, "decode")
    assert said == " Of the 17 cells 15 were measured, all but `b128_s1_h128_t4096` and `b1_s1_h16_t131072`."
    monkeypatch.setattr(pages_module, "records_of", lambda device, name: [])
    assert pages_module.lacking(pages_module.MAIN, "decode") == " Of the 17 cells 0 were measured."


def test_a_run_that_a_newer_one_replaced_is_shown_with_all_that_took_turns(pages_module: Any) -> None:
    rows = [line.split(" | ")[0:2] for line in pages_module.earlier("unseen_prefill").splitlines() if "cute-" in line]
    assert Counter(row[1] for row in rows) == {"cute-dsl/flash_attention_v18": 12, "cute-dsl/flash_attention_v23": 20}
    assert pages_module.earlier("unseen_prefill").count("| peer/fa3 |") == 31
    assert pages_module.earlier("decode") == ""


def test_a_range_of_fewer_cells_than_its_row_says_so(pages_module: Any) -> None:
    assert pages_module.span((2.0, 1.5), 2) == "1.50 to 2.00"
    assert pages_module.span((2.0, 1.5), 3) == "1.50 to 2.00 (2 cells)"
    assert pages_module.span((), 3) == "-"


def test_a_second_mean_leaves_out_calls_that_compute_next_to_nothing(pages_module: Any) -> None:
    told = pages_module.live(pages_module.records_of(pages_module.MAIN, "unseen_indexer"))
    kept = pages_module.not_empty(told)
    assert 0 < len(kept) < len(told)
    gone = {tables.problem_label(r) for r in told if r["time_us"]} - {tables.problem_label(r) for r in kept}
    assert len(gone) == 7 and all(name.endswith("ragged") for name in gone)


def test_tilings_of_the_page_of_every_gpu_are_those_that_its_devices_choose(pages_module: Any) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    heads = {16: 16, 32: 32}
    for (label, most), memories in pages_module.TILINGS.items():
        plan_type: Any = registry.get_plan(registry.KernelId.parse(label))
        problem = MlaProblem(b=8, h=heads.get(most, 128), t=4096)
        for memory, knobs in memories.items():
            chosen = plan_type(problem, None, Device.get(pages_module.MEMORIES[memory])).geometry()
            assert chosen == plan_type.tiling_type(**knobs).geometry(problem, Device.get("h200")), (label, memory)


def test_a_version_that_nothing_picks_is_left_out(pages_module: Any, repo_root: Path) -> None:
    for device, labels in pages_module.LEFT_OUT.items():
        assert labels and device == pages_module.MAIN
        for label in labels:
            for name in pages_module.WHAT:
                text = (repo_root / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8")
                assert f"| {label} |" not in text, (name, label)
    assert "cute-dsl/sparse_mla_v1" in (repo_root / "docs" / "results" / "h100.md").read_text(encoding="utf-8")


def test_problems_of_one_name_are_not_taken_for_contenders_of_different_runs(
    pages_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether q and indices are strided is no part of a problem's name."""
    told = pages_module.records_of(pages_module.MAIN, "sparse_served")
    name = "v32_b64_s1_h64_top2048_lognormal"
    records = [dict(r) for r in told if tables.problem_label(r) == name and r["time_us"]]
    for r in records:
        r["run"] = f"strided {r['problem'].get('strided', False)}"
    assert len({r["run"] for r in records}) == 2
    monkeypatch.setattr(pages_module, "records_of", lambda device, name: records)
    main = pages_module.MAIN
    for said in (pages_module.where(main, "sparse_served"), pages_module.sources(main, "sparse_served")):
        assert "different runs" not in said
    records[0]["run"] = "another"
    assert "compared by their shares of each run's limit" in pages_module.where(main, "sparse_served")
    said = pages_module.sources(main, "sparse_served")
    assert re.search(rf"^The newest records are of different runs in `{name}[^`]*`\.$", said, re.M)


def test_the_board_has_a_row_a_nightly_run_and_a_mean_a_workload(
    pages_module: Any, repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of measured records of three workloads: one with libraries, one without, and one whose kernel failed."""
    told = load([repo_root / "results" / "h200" / "2026-11-27-decode.jsonl"]).records
    one = next(r for r in told if r.problem_label == "b128_s1_h64_t4096" and r.kernel.design == "flash_mla_lib")
    block = [r for r in told if r.run == one.run]
    alone = load([repo_root / "results" / "h200" / "2026-11-26-packed_append.jsonl"]).records
    made = [r for r in alone if r.problem == alone[0].problem]
    lost = load([repo_root / "results" / "h200" / "2026-11-26-merge.jsonl"]).records[0]
    gone = {"status": "failed", "reason": "the device context is gone", "time_us": None, "host_us": None}
    lost = lost.model_copy(update=gone)
    monkeypatch.setattr(pages_module, "ROOT", tmp_path)
    assert pages_module.board().rstrip().endswith(pages_module.NO_RUN)

    def write(date: str, scale: float) -> None:
        path = tmp_path / "results" / "h200" / f"{date}-nightly.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        records = [json.loads(r.to_json()) for r in [*block, *made, lost]]
        for record in records:
            if record["kernel"]["language"] == "peer":
                record["time_us"]["burst"]["median"] *= scale
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    write("2026-01-01", 1.0)
    write("2026-01-02", 1.5)
    (tmp_path / "results" / "h200" / "2026-01-02-nightly-first.jsonl").write_text("not a record\n")  # no row
    table = [line for line in pages_module.board().splitlines() if line.startswith("|")]
    header, _, second, first = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    rows = [dict(zip(header, cells, strict=True)) for cells in (first, second)]
    assert [row["date"] for row in rows] == ["2026-01-01", "2026-01-02"]
    ours = min(r.in_a_step("burst") for r in block if r.kernel.language != "peer")
    library = min(r.in_a_step("burst") for r in block if r.kernel.language == "peer")
    for row, scale in zip(rows, (1.0, 1.5), strict=True):
        mean = float(row["decode"].removesuffix(" (1)"))
        assert mean == pytest.approx(scale * library / ours, rel=0.01) and row["all"] == row["decode"]
        share = max(r.of_limit("burst") for r in made)
        assert row["packed_append"] == f"{100 * share:.0f} %"
        assert row["merge"] == "-" and row["cells"] == "2 of 3" and row["card"] == "h200"


def test_a_nightly_run_says_nothing_of_who_is_fastest() -> None:
    """It takes few samples every night: pages and the README are of the experiments that they name."""
    assert "nightly" in ASIDE


def test_several_gpus_are_faster_where_the_model_says_so_and_peer_stores_the_fastest(
    pages_module: Any, repo_root: Path
) -> None:
    one = "one GPU"
    numbers = {"h100": [16], "h200": [16, 4]}
    for device, names in pages_module.OVER_GPUS.items():
        for name, number in zip(names, numbers[device], strict=True):
            cells: dict[str, dict[str, tuple[float, float]]] = {}
            for record in load([repo_root / "results" / name]).records:
                data = record.model_dump()
                assert data["status"] == "passed"
                way = data["tiling"].get("exchange", one)
                cells.setdefault(str(data["problem"]), {})[way] = data["time_us"]["burst"]["median"], data["model_us"]
            assert len(cells) == number
            for cell, ways in cells.items():
                assert set(ways) == {one, "all_gather", "collective", "symmetric"}
                for way, (took, predicted) in ways.items():
                    assert (predicted < ways[one][1]) == (took < ways[one][0]), (cell, way)
                    assert way == one or took >= ways["symmetric"][0], (cell, way)


def test_cells_are_in_order_and_told_apart(pages_module: Any) -> None:
    """Numbers in names count by their size, and one name of two problems says by what they differ."""
    records = pages_module.records_of("h200", "sparse_decode")
    names = tables.cell_names(records)
    assert set(names) == {tables.cell(r) for r in records} and len(set(names.values())) == len(names)
    order = list(names.values())
    assert (
        order.index("v32_b2_s1_h8_top512") < order.index("v32_b2_s1_h16_top512") < order.index("v32_b32_s1_h8_top2048")
    )
    twins = [of for of, name in names.items() if name.startswith("v32_b128_s2_h8_top2048")]
    sinks = {names[of]: json.loads(of[1])["sink"] for of in twins}
    assert sinks == {"v32_b128_s2_h8_top2048": False, "v32_b128_s2_h8_top2048_sink": True}
