"""Where a version spills, by source line: from its binary, and compiled by a worker process."""

from __future__ import annotations

from pathlib import Path

import pytest
from diagnosis_fakes import KERNEL, WIDE, record

from mla_var3.catalogue.registry import KernelId
from mla_var3.cli.diagnose import where_it_spills
from mla_var3.lab.diagnosis import spilled
from mla_var3.lab.diagnosis.evidence import Evidence
from mla_var3.lab.profiling import sources
from mla_var3.toolchain import pool, sass
from mla_var3.toolchain.compiled import CompiledKernel, Resources
from mla_var3.toolchain.digest import Code
from mla_var3.workload.norm import NormProblem

PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24"
CODE = (
    "MOV R1, R2",
    "STL [R1], R2",  # outside: line 7
    "LDL R4, [R1]",  # the loop around: the decorator's line, behind line 9
    PRODUCT,
    "STL.64 [R1+0x8], R4",  # the loop of products: line 8
    "@P0 BRA 0x30",
    "@P1 BRA 0x20",
    "EXIT",
)
SOURCE = "#\n" * 5 + "@cute.jit\nrows = first(line)\nhold(rows)\nwalk = begin()\n"


def resources(bytes_: int, **more: int) -> dict[str, object]:
    return {"registers": 168, "spill_bytes": bytes_, "instructions": {"STL": 2, "LDL": 1}, **more}


@pytest.fixture
def binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompiledKernel:
    """What a worker leaves: a listing, a cubin with lines of a source file, and the compiler's remarks."""
    file = tmp_path / "kernel.py"
    file.write_text(SOURCE)
    rows = [f"        /*{16 * i:04x}*/    {text} ;" for i, text in enumerate(CODE)]
    kept = {kind: tmp_path / f"kernel.{kind}" for kind in ("sass", "cubin", "remarks")}
    kept["sass"].write_text("\t\tFunction : kernel\n" + "\n".join(rows))
    kept["cubin"].write_text("")
    kept["remarks"].write_text(f"remark[ptxas]: ptxas detected register spills\n  --> {file}:9:15\n")
    numbers = (9, 7, 6, 6, 8, 6, 6, 6)
    lines = {16 * i: (str(file), number) for i, number in enumerate(numbers)}
    monkeypatch.setattr(sass, "source_lines", lambda _: {"kernel": lines})
    sources.lines.cache_clear()
    sources.find.cache_clear()
    return CompiledKernel("kernel", "sm_90a", Resources(), kept, code=Code("sm_90a", launch=("now",)))


def located(monkeypatch: pytest.MonkeyPatch, binary: CompiledKernel, **changes: object) -> Evidence:
    monkeypatch.setattr(pool, "compile_many", lambda jobs, *_, **__: [pool.CompileResult(jobs[0], binary)])
    e = Evidence(KERNEL, WIDE, "h200", record=record(**changes))
    spilled.locate(e)
    return e


def test_spills_are_told_by_loop_and_by_line(monkeypatch: pytest.MonkeyPatch, binary: CompiledKernel) -> None:
    code = {"digest": Code("sm_90a", launch=("now",)).digest}
    e = located(monkeypatch, binary, resources=resources(16), code=code)
    assert where_it_spills(e) == [
        "",
        "Where it spills:",
        "  8 B in the loop of products, for every KV tile",
        "       8 B  kernel.py:8  hold(rows)",
        "  4 B in the loop around that of products, for every split or request",
        "       4 B  near kernel.py:7  rows = first(line)",
        "  4 B elsewhere, once a CTA or in loops without products",
        "       4 B  kernel.py:7  rows = first(line)",
        "  The compiler runs short of registers at kernel.py:9.",
    ]
    assert e.resources["spill_loop_bytes"] == 8 and not e.notes


def test_other_code_than_was_recorded_is_said(monkeypatch: pytest.MonkeyPatch, binary: CompiledKernel) -> None:
    assert "16 bytes, is told of the code of today" in located(monkeypatch, binary, resources=resources(140)).notes[0]
    other = located(monkeypatch, binary, resources=resources(16), code={"digest": "0" * 16})
    assert other.notes[0].startswith("the version has other code today")
    # What the record says of itself is not replaced by what the code of today does.
    assert located(monkeypatch, binary, resources=resources(16, spill_loop_bytes=4)).resources["spill_loop_bytes"] == 4


def test_what_does_not_spill_or_cannot_be_compiled_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(pool, "compile_many", refuse)
    retired, library = KernelId("cute-dsl", "mla", "flash_mla", 1), KernelId("peer", "mla", "flash_mla", 0)
    for kernel, taken in ((KERNEL, resources(0)), (retired, resources(4)), (library, resources(4))):
        e = Evidence(kernel, WIDE, "h200", record=record(resources=taken))
        spilled.locate(e)
        assert e.spills is None and not e.notes and where_it_spills(e) == []


def test_a_worker_compiles_with_source_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, with a kernel that compiles fast: its record says that it spills, and it does not today."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    problem = NormProblem(rows=4)
    e = Evidence(KernelId("cute-dsl", "norm", "rmsnorm", 0), problem, "h200", record=record(resources=resources(8)))
    spilled.locate(e)
    assert e.spills == () and e.resources["spill_loop_bytes"] == 0 and "0 bytes, is told" in e.notes[0]
    (cubin,) = tmp_path.rglob("*.cubin")
    (lines,) = sass.source_lines(cubin).values()
    assert {Path(file).name for file, _ in lines.values()} >= {"rmsnorm.py"}
