"""What `make quickstart` prints fits a screen, and answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import made_up
from mla_var3 import cli, paths
from mla_var3.catalogue import registry
from mla_var3.device import Device
from mla_var3.lab.sweep import compile as sweep_compile
from mla_var3.lab.sweep import config as sweep_config
from mla_var3.lab.sweep import cpu as sweep_cpu
from mla_var3.lab.sweep import plan as sweep_plan
from mla_var3.measure import cell as cell_
from mla_var3.record import ASIDE, Record, load, now
from mla_var3.toolchain import pool
from mla_var3.toolchain.compiled import CompiledKernel, Resources

MOST_LINES = 45
COMMANDS = (["sweep", "experiment=quickstart"], ["report"])

pytestmark = pytest.mark.skipif(bool(registry.missing("triton")), reason="no triton here")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Everything as it is but compilers, kernels and the page's charts, which take minutes; in an empty folder."""

    def compile_many(jobs: Any, **options: Any) -> list[pool.CompileResult]:
        with pool.progress_of(len(jobs), True) as tell:
            found = [pool.CompileResult(job, options["run"](job)) for job in jobs]
            for result in found:
                tell(result)
        return found

    def run_job(job: Any) -> CompiledKernel:
        notes = (f"spills registers: {len(job.label)} bytes (4 STL)", "loads its operands without TMA (36 LDGSTS)")
        return CompiledKernel("k", "sm_90a", Resources(registers=168, threads=384), warnings=notes)

    def run_many(work: Any, *_: Any, tell: Any, **__: Any) -> Iterator[sweep_cpu.CpuResult]:
        for language in dict.fromkeys(kernel.language for kernel, _ in work):
            tell(f"running small problems of {language}")
        for kernel, problem in work:
            yield sweep_cpu.CpuResult(kernel, problem, "passed", "", {"out": 1e-3, "lse": 1e-6}, None, 1.0)

    monkeypatch.setattr(sweep_compile, "compile_many", compile_many)
    monkeypatch.setattr(sweep_compile, "run_job", run_job)
    monkeypatch.setattr(sweep_cpu, "run_many", run_many)
    monkeypatch.setattr("mla_var3.lab.report.page.page", lambda *_, **__: "the page")
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def quickstart(capsys: pytest.CaptureFixture[str], swept: int = 0) -> tuple[list[str], list[str]]:
    """Lines on standard output and on standard error of the two commands. swept: the sweep's exit code."""
    for words in COMMANDS:
        assert cli.main(words) == (swept if words[0] == "sweep" else 0)
    out, err = capsys.readouterr()
    return out.splitlines(), err.splitlines()


def rows(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(" b")]


def test_make_quickstart_is_what_is_tested_here(repo_root: Path) -> None:
    makefile = (repo_root / "Makefile").read_text()
    recipe = makefile.split("\nquickstart:")[1].split("\n\n")[0].splitlines()[1:]
    assert recipe == ["\t$(BIN)/mla-var3 sweep experiment=quickstart $(ARGS)", "\t$(BIN)/mla-var3 report"]


def test_without_a_gpu_it_fits_a_screen_and_answers_from_records_as_the_readme_does(
    quick: Path, repo_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = quickstart(capsys)
    assert len(out) + len(err) <= MOST_LINES
    cells = sweep_plan.expand_cells(sweep_config.compose(["experiment=quickstart"]))
    here = {k.label for k in registry.all_kernels()}
    found = [r for r in load(paths.shipped_results_dir() / "h200").records if r.experiment not in ASIDE]
    readme, in_readme = (repo_root / "README.md").read_text().splitlines(), 0
    assert len(rows(out)) == len(cells) == 4
    for line, cell in zip(rows(out), cells, strict=True):
        words = line.split()
        ours = {r.kernel.label for r in found if r.problem == cell.to_record() and r.kernel.language != "peer"}
        assert words[0] == cell.label and words[1] in ours & here
        assert " times as fast as peer/" in line and " % " in line
        timed = [r for r in found if r.problem == cell.to_record() and r.kernel.label == words[1] and r.median("burst")]
        newest = max((r for r in timed if isinstance(r.requested, str)), key=lambda r: r.at)
        assert f" {newest.median('burst'):.1f} " in line, "the time that was recorded of it last, picked or by its name"
        shown = [row.split(" | ") for row in readme if row.startswith(f"| {cell.label} | ")]
        assert all(float(row[1]) == pytest.approx(newest.median("burst"), rel=1e-3) for row in shown)
        in_readme += len(shown)
    assert in_readme == 3
    text = "\n".join(err)
    assert "No GPU here" in text and "next:" in err and "  mla-var3 clone " in text
    assert sum(line.startswith("compiled, spills registers: ") for line in err) == 1, "notes of a kind are one line"
    assert any(line.startswith(f"report: {quick / 'out' / 'report' / 'index.html'}") for line in out)
    (details,) = (quick / "out" / "results" / "h200").glob("*.txt")
    assert f"details: {details.relative_to(quick)}" in text
    for title in ("Compiled for", "Roofline on", "Checked on the CPU", "Recorded on", "Not run"):
        assert title in details.read_text() and title not in "\n".join(out)


def test_verbose_prints_the_details_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*COMMANDS[0], "-v"]) == 0
    out = capsys.readouterr().out.splitlines()
    text = "\n".join(out)
    for title in ("Compiled for", "Roofline on", "Checked on the CPU", "Recorded on", "Not run"):
        assert title in text
    assert len(rows(out)) > 4


def test_with_a_gpu_it_fits_a_screen_and_what_went_wrong_is_seen(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: Device.get("h200")))
    wrong = "triton/flash_mla"

    def measure_cells(cells: Any, device: Device, settings: Any, *, experiment: str) -> Iterator[Record]:
        for problem, contenders in cells:
            for number, contender in enumerate(contenders):
                us: float | None = 100.0 + number
                own: dict[str, Any] = {"at": now(), "requested": contender.requested}
                if contender.kernel.label == wrong:
                    us, own = None, {**own, "status": "incorrect", "reason": "out differs by 0.3"}
                key = cell_.contender_key(problem, contender, device)
                yield made_up.record(
                    contender.kernel, us, problem, experiment=experiment, device=device.key, key=key, **own
                )  # fmt: skip

    monkeypatch.setattr(cell_, "measure_cells", measure_cells)
    out, err = quickstart(capsys, swept=1)
    assert len(out) + len(err) <= MOST_LINES
    assert "Fastest here on NVIDIA H200 SXM5 141 GB, measured, burst" in out
    assert len([line for line in rows(out) if " 100.0 " in line and " 50 % " in line]) == 4
    assert sum(f"{wrong}: incorrect: out differs by 0.3" in line for line in err) == 4, "each is seen at once"
    assert any(line.split()[:2] == [wrong, "incorrect"] for line in out), "and in one row"
    assert "\n".join(out).index("Failed: wrong results") < "\n".join(out).index("Fastest here"), "before any answer"


def test_a_running_command_says_what_it_does(
    repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mla_var3.cli import arguments

    # Some of the records, since these are about the words.
    few = tmp_path / "shipped" / "h200" / "2026-11-27-decode.jsonl"
    few.parent.mkdir(parents=True)
    few.symlink_to(repo_root / "results" / "h200" / few.name)
    monkeypatch.setattr(paths, "shipped_results_dir", lambda: few.parents[1])

    class AtOnce:
        """A timer whose time is over."""

        def __init__(self, after: float, say: Any) -> None:
            assert after == arguments.QUIET_S == 2.0
            self.start = say

        def cancel(self) -> None: ...

    monkeypatch.setattr(arguments.threading, "Timer", AtOnce)
    for words, said in (
        (["compare", "--cells", "b128_s1_h16_t4096"], "reading records ..."),
        (["report", "--show", "sets"], "reading records ..."),
        (["dispatch", "show", "--b", "2"], "reading records, and judging every rule ..."),
        (["diagnose", "cute-dsl/flash_mla_v24", "--b", "128", "--h", "16"], "reading records and profiles ..."),
        (["devlog", "check", str(repo_root / "devlogs" / "flash_mla" / "torch-v0.md")], "comparing entries and pages"),
        (["check", "torch/flash_mla", "--t", "70", "--h", "4", "--quick"], "checking torch/flash_mla b2_s1_h4_t70 ..."),
        (["doctor", "--no-compile"], "trying what is installed ..."),
    ):
        assert cli.main(words) == 0, words
        assert said in capsys.readouterr().err


def test_no_timer_no_word(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from mla_var3.cli.arguments import doing

    with doing("something quick"):
        pass
    assert capsys.readouterr().err == ""
