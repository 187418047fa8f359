"""`mla-var3 diff` on versions of the lab, compiled here."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosis_fakes import WIDE, record

from mla_var3 import cli
from mla_var3.catalogue import jobs
from mla_var3.catalogue.registry import KernelId
from mla_var3.lab.diagnosis import compare
from mla_var3.lab.diagnosis.evidence import Evidence
from mla_var3.lab.diagnosis.versions import Version, records_of
from mla_var3.lab.knobs import same_knobs
from mla_var3.toolchain import loops

V0, V21 = KernelId("cute-dsl", "mla", "flash_mla", 0), KernelId("cute-dsl", "mla", "flash_mla", 23)


def diff(capsys: pytest.CaptureFixture[str], out: Path, *words: str) -> tuple[int, str, str]:
    status = cli.main(["diff", *words, "--out", str(out)])
    said = capsys.readouterr()
    return status, said.out, said.err


def row(text: str, name: str) -> list[str]:
    """The cells of the first table row of that name."""
    line = next(line for line in text.splitlines() if line.startswith("|") and line.split("|")[1].strip() == name)
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_two_versions_in_cute_dsl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = diff(
        capsys, tmp_path, "cute-dsl/flash_mla", "cute-dsl/flash_mla_v23", "--b", "128", "--lines", "9"
    )
    assert status == 0
    # Two consumer warpgroups, each with its loop of 44 products or a little more.
    assert row(out, "HGMMA")[0] == "176"
    sizes = [int(cell.replace(",", "")) for cell in row(out, "machine code (bytes)")[:2]]
    assert sizes[0] < sizes[1] == 16 * int(row(out, "total")[1].replace(",", ""))
    assert all(float(cell) > 0.5 for cell in row(out, "compiling all kernels (s)")[:2])
    assert "Other code: 1 and 6 kernels; launch" in out or "Other code: 2 and 6 kernels; launch" in out
    assert row(out, "code")[0] != row(out, "code")[1]
    folder = tmp_path / "cute-dsl-flash_mla--cute-dsl-flash_mla_v23" / "b128_s1_h128_t4096"
    whole = (folder / "diff.md").read_text()
    assert "rows that are the same in both are left out" in out and "rows that are the same" not in whole
    parts = whole.split("| loop ")
    assert len(parts) == 3
    for part in parts[1:]:
        left, right, _ = row(part, "products")
        assert int(left) == 44 <= int(right)
        left, right, _ = row(part, "instructions")
        assert 400 < int(left) < int(right) < 1000
        assert int(row(part, "out of line (retries of waits)")[0]) > 0
    # Version 0 stands in a kept profile, and each in a recorded run of its own.
    assert row(out, "tensor pipe active (%)")[:2] == ["67.8", "-"]
    assert "cute-dsl/flash_mla_v23 has no profile on this problem: `mla-var3 profile" in out
    assert row(out, "burst (us)")[0] == "241.5"
    assert re.search(
        r"burst: cute-dsl/flash_mla_v23 is 1\.\d+ times as fast as cute-dsl/flash_mla, each time over", out
    )
    assert (folder / "cute-dsl-flash_mla" / "flash_mla.sass").is_file()
    assert whole.count("HGMMA.64x64x16.F32.BF16") >= 44 and "FMNMX" in whole and "more lines in diff.md" in out


def test_what_was_compiled_is_not_compiled_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs.CompileJob(
        **KernelId("cute-dsl", "norm", "rmsnorm", 0).to_record(), problem={"workload": "norm", "rows": 3},
        device="h200", out_dir=str(tmp_path), keep=("sass", "cubin"),
    )  # fmt: skip
    first = jobs.run_job(job)
    assert first.resources.registers and first.artefacts["sass"].is_file()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("mla_var3.runtime.cute_kernel.CuteKernel.compile", refuse)
    assert replace(jobs.run_job(job), seconds=0.0) == replace(first, seconds=0.0)
    for other in (replace(job, device="h100"), replace(job, tiling={"vectors": 2}), replace(job, keep=("sass",))):
        with pytest.raises(AssertionError, match="compiled again"):
            jobs.run_job(other)
    first.artefacts["sass"].unlink()
    with pytest.raises(AssertionError, match="compiled again"):
        jobs.run_job(job)


def test_triton_and_cutile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("triton/flash_mla", "cutile-dsl/flash_mla", "--b", "128", "--lines", "0")
    status, out, _ = diff(capsys, tmp_path, *words)
    assert status == 0 and "The inner loop where it differs" not in out
    first, second = (int(cell) for cell in row(out, "products")[:2])
    # Triton: one tile of 64 x 64, 36 + 32 products of k16 for the warpgroup, some made in two parts. cuTile: two loops.
    assert first >= 68 and second >= 44 and "| loop 2" in out
    assert row(out, "UTMALDG")[0] == "0" and int(row(out, "UTMALDG")[1]) > 0
    assert row(out, "stall barrier (% of warp time)")[2].startswith("-")
    assert "loads its operands without TMA" in out
    # Both stand in one kept profile and in one recorded run.
    assert row(out, "tensor pipe active (%)")[:2] == ["44.2", "48.8"]
    assert "cutile-dsl/flash_mla is 1.689 times as fast as triton/flash_mla, in one run" in out


def test_a_version_without_a_binary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("torch/flash_mla", "triton/flash_mla", "--b", "2", "--h", "16", "--t", "256")
    status, out, _ = diff(capsys, tmp_path, *words)
    assert status == 0 and "torch/flash_mla has no binary to look into" in out
    assert row(out, "registers a thread")[0] == "-" and int(row(out, "registers a thread")[1]) > 0
    assert "mla-var3 profile triton/flash_mla --b 2 --t 256 --h 16" in out and "Neither was timed" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["triton/flash_mla", "triton/flash_mla"], "twice: name two versions"),
        (["cute-dsl/flash_mla", "cute-dsl/flash_mla_v1"], "cute-dsl/flash_mla_v1 is retired: commit "),
        (["triton/flash_mla", "triton/flash_mlb"], "did you mean 'triton/flash_mla'"),
        (["triton/flash_mla", "cutile-dsl/flash_mla", "--tiling", "nothing=1"], "neither version has a knob 'nothing'"),
        (["triton/flash_mla", "cutile-dsl/flash_mla", "--lines", "-1"], "--lines -1"),
        (
            ["cutile-dsl/flash_mla", "triton/flash_mla", "--device", "b200"],
            "cutile-dsl/flash_mla cannot be compared: wgmma needs sm_90a",
        ),
    ],
)
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    status, out, err = diff(capsys, tmp_path, *words)
    assert status == 2 and not out and said in err


# ---------------------------------------------------------------- parts
def version(kernel: KernelId, *loop: str, **tiling: int) -> Version:
    rows = "\n".join(f" /*{16 * i:04x}*/ {text} ; " for i, text in enumerate(loop))
    return Version(kernel, tiling, Evidence(kernel, WIDE, "h200", tiling), loops=tuple(loops.inner_loops(rows)))


def test_rows_that_are_the_same_in_both_are_left_out() -> None:
    table = ["| what | a | b | change |", "| ---- | --: | --: | -----: |", "| regs | 1 | 1 |      = |"]
    shown = compare.differing(["## One", *table, "| smem | 1 | 2 | +1 (+100 %) |", "", "## Two", *table, "", "end"])
    assert shown == [
        "## One", *table[:2], "| smem | 1 | 2 | +1 (+100 %) |", "", "## Two", "The same in both.", "", "end", "",
        "2 rows that are the same in both are left out: diff.md has them.",
    ]  # fmt: skip
    assert compare.differing(["a", "| x | = | y |"]) == ["a", "| x | = | y |"]


def test_lines_are_aligned_by_what_they_do_and_equal_ones_are_folded() -> None:
    same = ["FADD R1, R2, R3"] * 10
    a = version(V0, *same, "HGMMA R1, R2", "LDS R1, [R2]", "@P0 BRA 0x0")
    b = version(V21, *(x.replace("R1", "R9") for x in same), "STS [R2], R1", "HGMMA R7, R2", "@P1 BRA 0x0")
    rows = compare.side_by_side([a, b])
    marks = [row[compare._WIDTH + 1] for row in (row.ljust(80) for row in rows)]
    assert marks == [" "] * 10 + [">", " ", "<", " "]
    folded = compare.folded(rows)
    assert folded[0] == "  ... 7 equal" and len(folded) == 8
    assert compare.side_by_side([a, version(V21, "EXIT")]) == []


def test_records_of_one_run_come_before_newer_ones_of_two() -> None:
    versions = [version(V0), version(V21)]
    base = {"tiling": {}, "kernel": V0.to_record()}
    other_limits = {**record()["limits"], "burst": {"matmul_tflops": 1.0, "read_gbps": 1.0, "limit_us": 1.0}}
    old = [record(id="aaaaaa000001", **base), record(id="bbbbbb000001", tiling={})]
    newer = record(id="bbbbbb000002", tiling={}, at="2027-01-01T00:00:00Z", limits=other_limits)
    a, b, same = records_of(versions, [*old, newer], WIDE, "h200")
    assert (a and a["id"], b and b["id"], same) == ("aaaaaa000001", "bbbbbb000001", True)
    a, b, same = records_of(versions, [old[0], newer], WIDE, "h200")
    assert (a and a["id"], b and b["id"], same) == ("aaaaaa000001", "bbbbbb000002", False)
    assert records_of(versions, [newer], WIDE, "h100") == (None, None, False)


def test_knobs_that_both_have_decide() -> None:
    """Of records, profiles and plans alike: a version gets knobs and loses some."""
    assert same_knobs({"n": 8}, {"n": 8}) and not same_knobs({"n": 8}, {"n": 16})
    assert same_knobs({"n": 8}, {"n": 8, "newer": 1}) and same_knobs({"n": 8, "gone": 2}, {"n": 8})
    assert not same_knobs({"n": 8, "gone": 2}, {"n": 9, "newer": 1})
    assert same_knobs(None, {"n": 8}) and same_knobs({"n": 8}, None) and same_knobs({}, {})
