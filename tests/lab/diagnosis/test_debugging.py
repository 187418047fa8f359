"""`--keep`, `--lineinfo` and `--sanitize`, with a program that stands in for compute-sanitizer.

What it prints is written after the form that NVIDIA's manual shows; no GPU ran anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mla_var3 import cli, paths
from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.lab.diagnosis import debugging, reports, sanitizer, watched
from mla_var3.lab.profiling.modes import tools
from mla_var3.workload.decode import MlaProblem

KERNEL, SMALL = KernelId("triton", "mla", "flash_mla", 0), MlaProblem(b=2, h=16, t=100)
MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at combine_0+0x2a0 in flash_mla.py:56
=========     by thread (5,0,0) in block (0,0,0)
=========     Address 0x7f1c00001400 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: [0x33a2c9] in libcuda.so.1
========= Invalid __global__ read of size 4 bytes
=========     at combine_0+0x2a0 in flash_mla.py:56
=========     by thread (6,0,0) in block (0,0,0)
=========     Address 0x7f1c00001404 is out of bounds
watched: WRONG: out differs
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at combine_0+0x8f0 in flash_mla.py:65
=========     and Read access at combine_0+0xb10 in flash_mla.py:106 [2048 hazards]
=========
watched: right: error of out 1.00e-03, of lse 1.00e-07
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
BARRIER = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block.
=========     at flash_mla_0+0x10e60 in sync.py:13
=========     by thread (192,0,0) in block (0,1,1)
=========
========= Barrier error detected. Divergent thread(s) in block.
=========     at flash_mla_0+0x10e60 in sync.py:13
=========     by thread (193,0,0) in block (0,1,1)
=========
========= Error: process didn't terminate successfully
========= Target application returned an error
"""
CLEAN = """\
========= COMPUTE-SANITIZER
watched: right: error of out 1.00e-03, of lse 1.00e-07
========= ERROR SUMMARY: 0 errors
"""


def fake(folder: Path, text: str, status: int = 0, sleep: float = 0) -> Path:
    """A compute-sanitizer that prints `text` and notes how it was called."""
    folder.mkdir(exist_ok=True)
    path = folder / "compute-sanitizer"
    path.write_text(
        f"#!{sys.executable}\nimport json, os, sys, time\n"
        f"names = ('CUTE_DSL_LINEINFO', 'PYTORCH_NO_CUDA_MEMORY_CACHING', 'PYTHONPATH')\n"
        f"called = dict(words=sys.argv[1:], env={{n: os.environ.get(n) for n in names}})\n"
        f"open({str(folder / 'called.json')!r}, 'w').write(json.dumps(called))\n"
        f"time.sleep({sleep})\nsys.stdout.write({text!r})\nsys.exit({status})\n"
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that alone is searched."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(tools, "_PLACES", {})
    return tmp_path / "bin"


def sanitized(tmp_path: Path, name: str = "memcheck", **options: Any) -> sanitizer.Sanitized:
    job = sanitizer.write_job(tmp_path / "job", KERNEL, SMALL, {"tile_m": 16})
    return sanitizer.run(name, job, **options)


# ---------------------------------------------------------------- sanitize
def test_faults_are_told_once_with_their_place(tmp_path: Path, tool: Path) -> None:
    fake(tool, MEMCHECK, 86)
    found = sanitized(tmp_path)
    assert not found.ok and found.errors == 2 and found.result == "WRONG: out differs"
    (fault,) = found.faults
    assert (fault.what, fault.count) == ("Invalid __global__ read of size 4 bytes", 2)
    assert fault.where == "combine_0+0x2a0 in flash_mla.py:56"
    assert fault.first == "by thread (5,0,0) in block (0,0,0)"
    text = "\n".join(sanitizer.lines(found, "k"))
    assert text.startswith("k under memcheck: 2 errors; the result is WRONG") and "2 × Invalid" in text
    assert found.log.read_text() == MEMCHECK
    called = json.loads((tool / "called.json").read_text())
    assert called["words"][:4] == ["--tool", "memcheck", "--error-exitcode", "86"]
    assert called["words"][-3:] == ["-m", "mla_var3.lab.diagnosis.watched", str(tmp_path / "job" / "job.json")]
    assert called["env"]["CUTE_DSL_LINEINFO"] == called["env"]["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    assert str(paths.import_root()) in called["env"]["PYTHONPATH"]
    assert json.loads((tmp_path / "job" / "job.json").read_text())["tiling"] == {"tile_m": 16}


def test_one_kernel_of_a_call_is_watched_alone(tmp_path: Path, tool: Path) -> None:
    fake(tool, CLEAN)
    assert sanitized(tmp_path, "synccheck", only="combine").ok
    words = json.loads((tool / "called.json").read_text())["words"]
    assert words[words.index("--kernel-name") + 1] == "kernel_substring=combine"
    # Of a tool of which some reports are known all must be printed: none may hide among those that are not.
    assert int(words[words.index("--print-limit") + 1]) >= 100_000


def test_a_known_report_that_ends_the_process_is_told_apart(
    tmp_path: Path, tool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = BARRIER + "========= ERROR SUMMARY: 2 errors\n"
    fake(tool, ended, 86)
    monkeypatch.setattr(reports, "why_known", lambda name, report: "a copy each")
    found = sanitized(tmp_path, "synccheck")
    assert found.ok and found.errors == 0 and dict(found.known) == {"a copy each": 2} and not found.faults
    text = "\n".join(sanitizer.lines(found, "k"))
    assert text.startswith("k under synccheck: nothing new; the process ended before its result")
    assert "2 known to be no fault: a copy each" in text and "--sanitize-kernel NAME" in text
    fake(tool, BARRIER + "========= ERROR SUMMARY: 3 errors\n", 86)  # one of them was not printed
    assert sanitized(tmp_path, "synccheck").errors == 1
    monkeypatch.setattr(reports, "why_known", lambda name, report: None)
    fake(tool, ended, 86)
    found = sanitized(tmp_path, "synccheck")
    assert not found.ok and found.errors == 2 and found.faults[0].count == 2
    monkeypatch.setattr(reports, "why_known", lambda name, report: "a copy each")
    fake(tool, ended + "watched: WRONG: out differs\n", 86)
    assert not sanitized(tmp_path, "synccheck").ok


def test_reports_that_were_not_printed_are_counted_once(tmp_path: Path, tool: Path) -> None:
    more = "========= ERROR SUMMARY: 7 errors were not printed. Use --print-limit option to adjust\n"
    fake(tool, MEMCHECK.replace("SUMMARY: 2 errors", "SUMMARY: 9 errors") + more, 86)
    assert sanitized(tmp_path).errors == 9


def test_a_race_with_a_right_result_is_a_fault(tmp_path: Path, tool: Path) -> None:
    fake(tool, RACECHECK)
    found = sanitized(tmp_path, "racecheck")
    assert not found.ok and found.errors == 1 and found.result.startswith("right")
    assert "Race reported between Write access" in found.faults[0].what and "line" not in found.faults[0].where
    assert found.faults[0].where.startswith("and Read access at combine_0+0xb10")


def test_clean_is_clean_and_a_wrong_result_is_not(tmp_path: Path, tool: Path) -> None:
    fake(tool, CLEAN)
    assert sanitized(tmp_path).ok
    fake(tool, CLEAN.replace("right: error", "WRONG: error"))
    assert not sanitized(tmp_path).ok
    fake(tool, CLEAN.replace("watched: right: error of out 1.00e-03, of lse 1.00e-07\n", ""))
    assert not sanitized(tmp_path).ok


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "========= COMPUTE-SANITIZER\n========= Internal Sanitizer Error\n",
            "no summary .*: Internal Sanitizer Error",
        ),
        ("", "no summary .*: it printed nothing"),
        (
            CLEAN.replace("right: error", "the watched process sees no GPU: "),
            "refused: the watched process sees no GPU",
        ),
    ],
)
def test_a_tool_that_watched_nothing_passes_nothing(tmp_path: Path, tool: Path, text: str, said: str) -> None:
    fake(tool, text)
    with pytest.raises(UserError, match=said):
        sanitized(tmp_path)


def test_a_hang_and_a_missing_tool(tmp_path: Path, tool: Path) -> None:
    with pytest.raises(UserError, match="compute-sanitizer is not here"):
        sanitized(tmp_path)
    fake(tool, CLEAN, sleep=30)
    with pytest.raises(UserError, match=r"was not done after 1 s and was ended .* --b and --t\.$"):
        sanitized(tmp_path, timeout_s=1.0)


def test_the_end_of_a_hang_takes_the_watched_process_along_and_tells_what_was_seen(tmp_path: Path, tool: Path) -> None:
    """What hangs is not the tool, but the process that it started."""
    fake(tool, CLEAN)
    # A shell is there at once, also on a machine that has a lot to do.
    (tool / "compute-sanitizer").write_text(
        f"#!/bin/sh\nsleep 60 &\necho $! > {tool / 'pid'}\ncat << 'END'\n{MEMCHECK}END\nwait\n"
    )
    with pytest.raises(UserError, match=r"until then: Invalid __global__ read of size 4 bytes combine_0"):
        sanitized(tmp_path, timeout_s=2.0)
    stat = Path("/proc") / (tool / "pid").read_text().strip() / "stat"
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_check_ends_with_1_before_it_runs_a_kernel_that_has_faults(
    tmp_path: Path, tool: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: Device.get("h200")))
    fake(tool, MEMCHECK, 86)
    words = ["check", "triton/flash_mla", "--b", "2", "--h", "16", "--t", "100", "--sanitize", "memcheck"]
    assert cli.main([*words, "--debug-out", str(tmp_path / "out")]) == 1
    out = capsys.readouterr().out
    assert "triton/flash_mla b2_s1_h16_t100 under memcheck: 2 errors" in out
    assert (tmp_path / "out" / "triton-flash_mla" / "b2_s1_h16_t100" / "memcheck.log").is_file()


def test_without_a_gpu_the_command_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    tail = ["--b", "2", "--h", "16", "--t", "100", "--sanitize", "synccheck", "--debug-out", str(tmp_path)]
    status = cli.main(["check", "triton/flash_mla", *tail])
    err = capsys.readouterr().err
    job = tmp_path / "triton-flash_mla" / "b2_s1_h16_t100" / "job.json"
    assert status == 2 and job.is_file()
    assert "compute-sanitizer --tool synccheck" in err and f"python -m mla_var3.lab.diagnosis.watched {job}" in err


def test_the_watched_process_refuses_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    job = sanitizer.write_job(tmp_path, KERNEL, SMALL, None)
    assert watched.main([str(job)]) == 2 and "watched: the watched process sees no GPU." in capsys.readouterr().err
    assert watched.main([]) == 2


def test_the_watched_process_judges_with_the_oracle() -> None:
    from mla_var3.workload.decode import make_inputs, mla_decode_reference

    pd = MlaProblem(b=2, h=2, t=20)
    plan = registry.get_plan(KernelId("torch", "mla", "flash_mla"))
    reference = mla_decode_reference(*make_inputs(pd, "cpu", seed=1), k=pd.k, scale=pd.scale, causal=False)
    out = reference[0].to(pd.torch_dtype)
    assert watched.judge(plan, (out, reference[1].float()), reference, "flashmla")[0]
    out[0, 0, 0, 0] += 1
    right, said = watched.judge(plan, (out, reference[1].float()), reference, "flashmla")
    assert not right and said.startswith("WRONG: ")


# ---------------------------------------------------------------- keep, lineinfo
def test_kinds() -> None:
    assert debugging.kinds("ir, sass,sass") == (*debugging.IR, "sass") and debugging.kinds("") == ()
    with pytest.raises(UserError, match="--keep 'sas' is unknown: did you mean 'sass'"):
        debugging.kinds("sas")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sanitize", "racechek"], "did you mean 'racecheck'"),
        (["--keep", "ptxx"], "did you mean 'ptx'"),
        (["--sanitize-timeout", "0", "--sanitize", "memcheck"], "must be above 0"),
        (["--sanitize-kernel", "combine"], "give that as well"),
    ],
)
def test_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "triton/flash_mla", *words]) == 2 and said in capsys.readouterr().err


def test_triton_keeps_its_two_forms_and_says_what_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    words = ["--b", "2", "--h", "16", "--t", "100", "--keep", "ir,ptx,sass,object", "--debug-out", str(tmp_path)]
    assert cli.main(["check", "triton/flash_mla", *words]) == 3, "compiled is not checked"
    said = capsys.readouterr()
    kept = {path.suffix for path in tmp_path.rglob("flash_mla.*")}
    assert kept == {".ttir", ".ttgir", ".ptx", ".sass"} and "triton makes no object" in said.err
    assert "compiled for h200, not checked" in said.out
    assert cli.main(["check", "torch/flash_mla", "--keep", "sass"]) == 2
    assert "has nothing to keep" in capsys.readouterr().err


def test_source_lines_come_into_a_cute_binary_and_change_no_instruction(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(paths.import_root()), env.get("PYTHONPATH")]))
    words = [sys.executable, "-m", "mla_var3.cli", "check", "cute-dsl/rmsnorm", "--problem", "rows=3"]
    both = []
    for options in ([], ["--lineinfo"]):
        out = tmp_path / f"lines{len(options)}"
        done = subprocess.run(
            [*words, "--keep", "ir,cubin,ptx,sass", "--debug-out", str(out), *options], env=env, capture_output=True,
            timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == (0 if Device.detect() else 3), done.stderr
        both.append(out)
    files = [{p.suffix: p for p in out.rglob("rmsnorm.*")} for out in both]
    assert all(set(one) == {".mlir", ".cubin", ".ptx", ".sass"} for one in files)
    assert files[0][".sass"].read_text() == files[1][".sass"].read_text()
    assert [b".debug_line" in one[".cubin"].read_bytes() for one in files] == [False, True]
    assert ".loc" not in files[0][".ptx"].read_text() and "rmsnorm.py" in files[1][".ptx"].read_text()


def test_lines_cannot_be_asked_for_once_the_compiler_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTE_DSL_LINEINFO", raising=False)
    monkeypatch.setitem(sys.modules, "cutlass", object())
    parser = cli.parser_of("check")
    with pytest.raises(UserError, match="start with CUTE_DSL_LINEINFO=1"):
        debugging.prepare(parser.parse_args(["x", "--lineinfo"]))
