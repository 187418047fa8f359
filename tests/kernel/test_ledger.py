"""results/code.json: what versions compile to, and what that says of records."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mla_var3 import paths
from mla_var3.dispatch import table as tables
from mla_var3.kernel import ledger, registry
from mla_var3.kernel.ledger import GONE, LIBRARY, OTHER, SAME, STALE, UNKNOWN, Line
from mla_var3.record import load
from mla_var3.workload.decode import MlaProblem

VERSIONS = [k for k in registry.all_kernels() if k.language == "cute-dsl"]


def test_no_line_is_older_than_its_source() -> None:
    hashes = {kernel.label: registry.source_hash(kernel) for kernel in VERSIONS}
    assert ledger.lines() and set(hashes) == {line.kernel for line in ledger.lines()}
    old = {line.kernel for line in ledger.lines() if line.source != hashes[line.kernel]}
    assert not old, f"compile them again: scripts/record_code.py {' '.join(sorted(old))}"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", VERSIONS, ids=lambda k: k.label)
def test_a_version_compiles_to_what_its_line_says(kernel: registry.KernelId, repo_root: Path) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    known = [line for line in ledger.lines() if line.kernel == kernel.label]
    # One of the problem classes that records timed, or of what always has a line: the first of each version.
    problem = MlaProblem(h=16 if kernel.version == 22 else 128)
    tiling = {"num_splits": 4} if kernel.version == 0 else None
    arguments = json.dumps([kernel.label, problem.to_record(), tiling, "h200"])
    done = subprocess.run(
        [sys.executable, str(repo_root / "scripts" / "record_code.py"), "--one", arguments],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    line = Line(**json.loads(done.stdout))
    same = [one for one in known if (one.problem_class, one.stages) == (line.problem_class, line.stages)]
    assert [one.digest for one in same] == [line.digest]


def test_the_dispatcher_rests_on_code_that_is_here() -> None:
    found = {
        (recipe.kernel.label, ledger.standing(recipe.kernel.label, point.problem, point.code))
        for device in tables.load().devices.values()
        for recipe in device.recipes
        for point in recipe.points
    }
    late = {standing for label, standing in found if label in ("cute-dsl/flash_mla_v21", "cute-dsl/flash_mla_v22")}
    assert late == {SAME}
    # Records of the first versions were written before records had a digest.
    assert {standing for _, standing in found} <= {SAME, UNKNOWN}


def test_what_a_digest_says(tmp_path: Path) -> None:
    problem = MlaProblem(b=3, t=700)
    label, file = VERSIONS[0].label, tmp_path / "code.json"
    line = Line(label, problem.problem_class().key(), {}, ["x"], "sm_90a", registry.source_hash(VERSIONS[0]), "aa")

    def says(digest: str, *written: Line, kernel: str = label, of: MlaProblem = problem) -> str:
        file.write_text(ledger.to_json(written))
        ledger.lines.cache_clear()
        return ledger.standing(kernel, of, digest, file)

    assert says("aa", line) == SAME
    assert says("bb", line) == OTHER
    assert says("bb", line, replace(line, stages=["x", "y"], digest="bb")) == SAME
    assert says("", line) == UNKNOWN
    assert says("aa", replace(line, source="older")) == STALE
    assert says("aa", line, of=problem.replace(h=16)) == STALE
    assert says("aa", line, kernel="cute-dsl/flash_mla_v8") == GONE
    assert says("aa", line, kernel="peer/flash_mla_lib") == LIBRARY
    ledger.lines.cache_clear()


def test_records_of_the_newest_versions_timed_the_code_that_is_here() -> None:
    found = [r for r in load([paths.shipped_results_dir() / "h200"]).records if r.code and r.kernel.version in (21, 22)]
    assert len(found) >= 41
    for record in found:
        problem = MlaProblem.from_record(record.problem)
        assert ledger.standing(record.kernel.label, problem, record.code["digest"]) == SAME, record.id
