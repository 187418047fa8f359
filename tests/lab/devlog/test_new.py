"""`devlog new` and `devlog cite`: what they write passes the check once the TODOs are filled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.cli.devlog import main
from mla_var3.errors import Unsupported, UserError
from mla_var3.lab.devlog.check import check
from mla_var3.lab.devlog.citations import check_text
from mla_var3.lab.devlog.evidence import apart, beside, joined, parse
from mla_var3.lab.devlog.segments import Finding

FAST, SLOW, COMPILED = "aaaa11112222", "bbbb33334444", "cccc55556666"
V0, V1 = KernelId("triton", "mla", "flash_mla", 0), KernelId("triton", "mla", "flash_mla", 1)


def _new(project: Path, *arguments: str) -> None:
    assert main(["new", "triton/flash_mla_v1", "--root", str(project), *arguments]) == 0


def listed(entry: Path) -> list[str]:
    """Ids in the list of records beside an entry."""
    return sorted(beside(entry).ids)


def cited(entry: Path) -> list[str]:
    """The lines of evidence beside an entry."""
    return [line.body for part in beside(entry).parts for block in part.blocks for line in block.cited]


def test_new_entry_agrees_with_its_records_and_is_refused_for_its_todos(
    project: Path, entry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "all_kernels", lambda: (V0, V1))
    entry.unlink()
    _new(project)
    text = entry.read_text()
    assert listed(entry) == [FAST, SLOW], "its own newest measured record, and the one of the version before"
    assert "records" not in text.partition("\n---\n")[0]
    assert "| h200 | b128_s1_h128_t4096 | 220.2 | 264.2 | 663.2 |" in text
    assert "| 1.14 | 1.14 |" in text and "<!--" not in text
    assert f"{FAST} vs {SLOW} burst.speedup sustained.speedup" in cited(entry)
    assert "`src/flash_mla_v1.py`. Measured at commit 0123456789ab, source hash feedfeedfeedfeed." in text
    failures, _ = check(project, [entry])
    assert failures
    assert all(
        "TODO" in line or "hypothesis predicts no" in line or "front matter's verdict" in line for line in failures
    )
    assert "fill what is marked TODO" in capsys.readouterr().out

    filled = text.replace("verdict: TODO", "verdict: kept").replace("TODO: kept, rejected", "Kept, not rejected")
    filled = filled.replace("TODO: what should get better", "From 250 us to 225 us").replace("TODO", "said")
    entry.write_text(filled)
    assert check(project, [entry]) == ([], [])


def test_new_does_not_overwrite(project: Path, entry: Path) -> None:
    before = entry.read_text()
    with pytest.raises(UserError, match=r"exists: edit it, or give --force"):
        _new(project)
    assert entry.read_text() == before
    _new(project, "--force")
    assert entry.read_text() != before


def test_named_records_and_files(project: Path, entry: Path) -> None:
    _new(project, "--force", "--records", COMPILED[:8])
    assert listed(entry) == [COMPILED]
    assert "- b128_s1_h128_t4096 on h200: compiled\n" in entry.read_text() and COMPILED in cited(entry)
    _new(project, "--force", "--records", str(project / "results" / "h200" / "2026-11-22-decode.jsonl"))
    assert listed(entry) == [FAST]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("dddd77778888", "record dddd77778888 does not exist in results/: give"),
        (SLOW, "is one of triton/flash_mla, not of triton/flash_mla_v1"),
        ("nowhere/x.jsonl", "there are no records at nowhere/x.jsonl"),
    ],
)
def test_wrong_records(project: Path, chosen: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _new(project, "--force", "--records", chosen)


def test_unknown_version(project: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'triton/flash_mla_v1'"):
        main(["new", "triton/flash_mla_v3", "--root", str(project)])


def test_unknown_verb() -> None:
    with pytest.raises(UserError, match="devlog has no verb 'chek': did you mean 'check'"):
        main(["chek"])


def test_without_records(project: Path, entry: Path) -> None:
    for file in (project / "results").rglob("*.jsonl"):
        file.unlink()
    _new(project, "--force")
    assert "TODO: no records yet" in entry.read_text()
    assert not entry.with_suffix(".records").exists(), "the list of the entry that stood there is gone with it"


def test_newest_record_of_a_cell(project: Path, entry: Path) -> None:
    file = project / "results" / "h200" / "2026-11-22-decode.jsonl"
    first = json.loads(file.read_text().splitlines()[1])
    later = {**first, "id": "eeee00001111", "at": "2026-11-23T00:00:00Z"}
    (file.parent / "2026-11-23-decode.jsonl").write_text(json.dumps(later) + "\n")
    _new(project, "--force")
    assert listed(entry) == ["eeee00001111"]


def test_records_that_time_for_something_else_are_left_out(
    project: Path, entry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "all_kernels", lambda: (V0, V1))
    records = next((project / "results").rglob("*.jsonl"))
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    aside = [
        {**r, "id": r["id"][::-1], "experiment": "host_cost", "at": "2099-01-01T00:00:00Z"}
        for r in lines
        if r.get("time_us")
    ]
    assert len(aside) >= 2
    records.write_text("".join(json.dumps(r) + "\n" for r in [*lines, *aside]))
    _new(project, "--force")
    assert f"{FAST} vs {SLOW} burst.speedup sustained.speedup" in cited(entry)
    assert not any(r["id"] in listed(entry) for r in aside)

    capsys.readouterr()
    assert main(["table", "--root", str(project)]) == 0
    text = capsys.readouterr().out
    assert FAST in text and not any(r["id"] in text for r in aside)
    assert main(["table", "--root", str(project), str(records)]) == 0
    assert aside[0]["id"] in capsys.readouterr().out, "a file that is named is read as it is"


def test_cite_prints_figures_that_check_accepts(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cite", FAST, "--root", str(project)]) == 0
    assert main(["cite", FAST, SLOW, "--root", str(project)]) == 0
    out = capsys.readouterr().out
    rows = [tuple(line.split("  ", 1)) for line in out.splitlines()]
    figures = {line.strip(): figure for figure, line in rows}
    assert figures[f"{FAST} burst.tflops"] == "663.2 TFLOP/s" and figures[f"{FAST} burst.of_limit"] == "82.61 %"
    assert figures[f"{FAST} vs {SLOW} burst.speedup"] == "1.135x"
    page = project / "README.md"
    page.write_text("| figure |\n| --- |\n" + "".join(f"| {figure} |\n" for figure in figures.values()))
    page.with_suffix(".records").write_text("".join(f"> {figure} |\n{line}\n" for line, figure in figures.items()))
    assert check(project, [page]) == ([], [])


def test_cite_of_nothing(project: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        main(["cite", "dddd77778888", "--root", str(project)])


def test_comparison_table_is_what_check_accepts(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "--root", str(project)]) == 0
    text = capsys.readouterr().out
    table, _, lines = text.partition("\n\n")
    rows = table.splitlines()
    assert len(rows) == 4, "header, rule, and the two timed records"
    assert rows[2].startswith("| b128_s1_h128_t4096 | triton/flash_mla_v1 | 220.2 | 264.2 | 663.2 |")
    assert rows[3].startswith("|  | triton/flash_mla | 250 | 300 |")
    (project / "README.md").write_text(table)
    (project / "README.records").write_text(lines)
    assert check(project) == ([], [])


def test_table_without_times(project: Path) -> None:
    file = project / "results" / "compiled.jsonl"
    file.write_text((project / "results/h200/2026-11-22-decode.jsonl").read_text().splitlines()[2] + "\n")
    with pytest.raises(UserError, match="no record there has a time"):
        main(["table", str(file), "--root", str(project)])
    with pytest.raises(UserError, match="no record with a time is of b7_nothing: mla-var3 compare names what there is"):
        main(["table", "--cells", "b7_nothing", "--root", str(project)])


def test_cells_that_compiled_alike_share_a_row(project: Path, entry: Path) -> None:
    file = project / "results" / "h200" / "2026-11-22-decode.jsonl"
    first = json.loads(file.read_text().splitlines()[1])
    other = {**first, "id": "eeee00001111", "problem": {**first["problem"], "b": 64}}
    (file.parent / "2026-11-23-decode.jsonl").write_text(json.dumps(other) + "\n")
    _new(project, "--force")
    assert sum("burst sustained burst.tflops" in line for line in cited(entry)) == 2
    assert sum("resources.registers" in line for line in cited(entry)) == 1


def differing(text: str, records: Iterable[dict[str, Any]]) -> list[Finding]:
    """What differs from its record in a table as it goes into a page, with its list beside it."""
    page, lines = apart(text)
    return check_text(page, {r["id"]: r for r in records}, evidence=parse(lines))


def test_a_shared_schedule_counts_once_a_step(record_of: Callable[..., dict[str, Any]]) -> None:
    from mla_var3.lab.devlog.tables import against_libraries, summary

    ours = record_of("aaaa00002222", kernel=V1, burst=200.0)
    library = record_of("aaaa00003333", kernel=KernelId("peer", "mla", "fa3_qv", 0), burst=221.0)
    stats = {"median": 282.0, "p10": 282.0, "p90": 282.0, "n": 3}
    library["with_schedule_us"] = {"burst": stats}
    text = against_libraries([ours, library])
    assert "speedup burst (x), scheduled in every call" in text.splitlines()[0]
    assert "| 1.11 |" in text and "| 1.41 |" in text  # (221 + 61 / 61) / 200 and 282 / 200
    assert differing(text, (ours, library)) == []
    assert summary([ours, library]).startswith("Geometric mean of the speedups over 1 cells: 1.110 in burst")
    assert summary([ours]) == ""


def test_a_mean_of_a_part_of_the_cells_says_so(record_of: Callable[..., dict[str, Any]]) -> None:
    """Of two cells one was timed at the power limit."""
    from mla_var3.lab.devlog.tables import summary

    records = []
    for b, sustained in ((32, {"median": 250.0, "p10": 250.0, "p90": 250.0, "n": 3}), (64, None)):
        for name, burst in ((V1, 200.0), (KernelId("peer", "mla", "fa3_qv", 0), 220.0)):
            record = record_of(f"aaaa{b:04d}{burst:.0f}0", kernel=name, burst=burst)
            record["problem"] = {**record["problem"], "b": b}
            record["time_us"] = {**record["time_us"], "sustained": sustained}
            records.append(record)
    said = summary(records)
    assert "over 2 cells: 1.100 in burst (slowest: 1.10, " in said and said.count("with such a time") == 1
    assert said.endswith("; over 1 cells with such a time).")


def test_table_against_libraries(record_of: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row a cell: the fastest of ours that is here, the fastest library, and ratios that check accepts."""
    monkeypatch.setattr(registry, "all_kernels", lambda: (V0, V1))
    from mla_var3.lab.devlog.tables import against_libraries

    library = KernelId("peer", "mla", "fa3_qv", 0)
    records = [
        record_of("aaaa00001111", burst=250.0),
        record_of("aaaa00002222", kernel=V1, burst=200.0),
        record_of("aaaa00003333", kernel=library, burst=220.2),
    ]
    text = against_libraries(records)
    assert len(text.splitlines()) == 3
    row = text.splitlines()[2]
    assert row.startswith("| b128_s1_h128_t4096 | triton/flash_mla_v1 | 200 | 240 |")
    assert "| peer/fa3_qv | 1.10 | 1.10 <!-- r:aaaa00002222 vs aaaa00003333 burst.limit_speedup" in row
    assert differing(text, records) == []
    wrong = [*records[:2], record_of("aaaa00003333", kernel=library, burst=300.0)]
    assert len(differing(text, wrong)) == 2
    assert against_libraries(records[:2]) == ""


def test_table_of_picks(record_of: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the dispatcher picks stands in the row, the fastest or not; a cell without a record of it is left out."""
    from mla_var3 import dispatch
    from mla_var3.dispatch.selection import Choice
    from mla_var3.lab.devlog.tables import against_libraries

    records = [
        record_of("aaaa00001111", burst=250.0),
        record_of("aaaa00002222", kernel=V1, burst=200.0),
        record_of("aaaa00003333", kernel=KernelId("peer", "mla", "fa3_qv", 0), burst=225.0),
    ]
    asked = []

    def choose(picked: KernelId) -> Callable[..., Any]:
        choice = Choice(picked, (), "")
        return lambda problem, device: asked.append((problem.label, device.key)) or choice

    monkeypatch.setattr(dispatch, "choose", choose(KernelId("triton", "mla", "flash_mla", 0)))
    row = against_libraries(records, picks=True).splitlines()[2]
    assert row.startswith("| b128_s1_h128_t4096 | triton/flash_mla | 250 |") and "| 0.900 |" in row
    assert asked == [("b128_s1_h128_t4096", "h200")]
    monkeypatch.setattr(dispatch, "choose", choose(KernelId("triton", "mla", "flash_mla", 2)))
    assert against_libraries(records, picks=True) == ""

    def refuse(problem: Any, device: Any) -> Any:
        raise Unsupported(f"no version takes {problem.label}.")

    monkeypatch.setattr(dispatch, "choose", refuse)
    assert against_libraries(records, picks=True) == ""


def test_table_against_libraries_of_another_run(record_of: Callable[..., dict[str, Any]]) -> None:
    """A library that was measured on a slower chip is compared by its distance to that run's limit."""
    from mla_var3.lab.devlog.tables import against_libraries

    ours, library = record_of("aaaa00001111", burst=200.0), record_of("aaaa00002222", burst=220.0)
    library["kernel"] = {"language": "peer", "layer": "mla", "design": "fa3_qv", "version": 0}
    for state in ("burst", "sustained"):
        library["limits"][state]["limit_us"] *= 1.1
    text = against_libraries([ours, library])
    assert "| peer/fa3_qv | 1.00 |" in text.splitlines()[2]
    assert "burst.limit_speedup" in text and differing(text, (ours, library)) == []


def test_what_is_taken_apart_goes_together_again() -> None:
    text = (
        "Before 5 us <!-- r:a1 burst -->.\n\n## One\n\n| x | us |\n| --- | --- |\n| a | 1 <!-- r:a1 burst --> |\n"
        "| a | 2 <!-- r:b2 burst --> |\n|  | 3 <!-- r:c3 vs r:d4 burst.speedup --> |\n\n"
        "- **said** `so`, 3 us<!-- r:e5\nburst -->.\n"
        "\n```python\n# <!-- r:f6 burst -->\n```\n<!-- kept -->\n"
    )
    page, lines = apart(text)
    assert page == (
        "Before 5 us.\n\n## One\n\n| x | us |\n| --- | --- |\n| a | 1 |\n| a | 2 |\n|  | 3 |\n\n"
        "- **said** `so`, 3 us.\n"
        "\n```python\n# <!-- r:f6 burst -->\n```\n<!-- kept -->\n"
    )
    assert lines.splitlines() == [
        "> Before 5 us.", "a1 burst", "", "[One]", "> a |", "a1 burst", "> a |", "b2 burst", "> 3 |",
        "c3 vs d4 burst.speedup", "> said so, 3 us.", "e5 burst",
    ]  # fmt: skip
    again = joined(page, parse(lines))
    assert "| a | 2 <!-- r:b2 burst --> |" in again and again.count("<!-- r:") == 6
    assert apart(again) == (page, lines), "and apart again"
    assert apart(page) == (page, ""), "nothing stands in it"
