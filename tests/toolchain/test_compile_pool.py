"""The compile pool: results in order, and a job that fails, crashes or hangs costs no other."""

from __future__ import annotations

import importlib
import textwrap
from pathlib import Path
from typing import Any

import pytest

from mla_var3.catalogue.jobs import CompileJob, compile_all
from mla_var3.errors import UserError
from mla_var3.toolchain.compiled import CompiledKernel, Resources
from mla_var3.toolchain.pool import compile_many

WORK = """
    import os, sys, time
    from mla_var3.errors import Infeasible
    from mla_var3.toolchain.compiled import CompiledKernel, Resources

    def work(job):
        if job == "crash":
            os.write(2, b"ptxas fell over\\n")
            os.kill(os.getpid(), 11)
        if job == "leave":
            os._exit(3)
        if job == "raise":
            raise ValueError("first line\\nsecond line")
        if job == "infeasible":
            raise Infeasible("tile_m is 3; it must be a multiple of 64")
        if job == "hang":
            time.sleep(60)
        print("noise")
        return CompiledKernel(str(job), "sm_90a", Resources(registers=32), handle=lambda: None)
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that spawned processes can import."""
    (tmp_path / "pool_work.py").write_text(textwrap.dedent(WORK))
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("pool_work").work


def test_every_job_has_its_own_result_in_order(work: Any, capfd: pytest.CaptureFixture[str]) -> None:
    jobs = ["a", "crash", "b", "raise", "leave", "infeasible", "c"]
    results = compile_many(jobs, workers=2, run=work)
    assert [r.job for r in results] == jobs
    assert [r.compiled.name if r.compiled else "" for r in results] == ["a", "", "b", "", "", "", "c"]
    assert [r.ok for r in results] == [True, False, True, False, False, False, True]
    _, crash, _, raised, left, infeasible, _ = results
    assert (crash.error_type, crash.details) == ("Crash", "ptxas fell over")
    assert crash.error == "the compiling process died (signal 11, SIGSEGV)"
    assert raised.error_type == "ValueError"
    assert (
        raised.error.startswith("ValueError: first line\n  second line\n")
        and "pool_work.py:13, in work" in raised.error
    )
    assert "Traceback" in raised.details and "second line" in raised.details
    assert left.error == "the compiling process died (exit status 3)"
    assert (infeasible.error_type, infeasible.error) == ("Infeasible", "tile_m is 3; it must be a multiple of 64")
    assert results[0].compiled == CompiledKernel("a", "sm_90a", Resources(registers=32))
    said = capfd.readouterr()
    assert said.out == ""
    # Every failure has a line; of the others some do, depending on when they come.
    assert len(jobs) - 2 <= len(said.err.splitlines()) <= len(jobs) and "[7/7]" in said.err
    assert all(f" {job}: not compiled" in said.err for job in ("crash", "raise", "leave", "infeasible"))


def test_a_job_that_hangs_runs_out_of_time(work: Any) -> None:
    hung, fine = compile_many(["hang", "a"], workers=1, progress=False, timeout_s=3, run=work)
    assert (hung.error_type, hung.error) == ("Timeout", "took longer than 3 s")
    assert fine.ok and 3 <= hung.seconds < 10


def test_nothing_to_do_and_wrong_use() -> None:
    assert compile_many([], run=work) == []
    with pytest.raises(UserError, match="at least 1"):
        compile_many(["a"], workers=0, run=work)


def test_an_unknown_kernel_is_that_job_s_result() -> None:
    job = CompileJob("torch", "mla", "no_such_design", 0, {"b": 1, "t": 64}, "h200")
    (result,) = compile_all([job], progress=False)
    assert not result.ok and "no_such_design" in result.error
    assert job.label == "torch/no_such_design b1_t64"
