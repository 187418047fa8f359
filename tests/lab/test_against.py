"""`bench --against`: whether a version is slower than it was, in one sentence with an interval and an exit status."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_var3.catalogue import ledger
from mla_var3.catalogue.registry import KernelId
from mla_var3.cli._main import main
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.lab import against
from mla_var3.measure.settings import BenchSettings
from mla_var3.record import ASIDE, Record, as_ratio, load, new_id
from mla_var3.workload import problem_from_record

H200 = Device.get("h200")
V23 = KernelId.parse("cute-dsl/flash_mla_v23")


@pytest.fixture(scope="module")
def told(repo_root: Path) -> Record:
    """A measured time of version 23, with limits and a card."""
    records = load(repo_root / "results" / "h200" / "2026-11-27-decode.jsonl").records
    return next(r for r in records if r.kernel.label == V23.label and r.problem_label == "b128_s1_h64_t4096")


def times(record: Record, factor: float, **changes: Any) -> Record:
    """The record with another id and its times multiplied."""
    data = json.loads(record.to_json())
    for some in [data["time_us"], data.get("with_schedule_us") or {}]:
        for stats in filter(None, some.values()):
            stats.update({name: stats[name] * factor for name in ("median", "p10", "p90")})
    return Record.model_validate({**data, "id": new_id(), **changes})


# ---------------------------------------------------------------- in turn
@pytest.mark.parametrize(
    ("factors", "verdict"),
    [
        ((1.05, 1.049, 1.051, 1.05, 1.05), "a loss beyond noise"),
        ((1.05, 0.96, 1.04, 0.97, 1.03), "no loss beyond noise"),
        ((0.95, 0.951, 0.949, 0.95, 0.95), "a gain beyond noise"),
        ((1.0, 1.0, 1.0, 1.0, 1.0), "no loss beyond noise"),
        ((1.0009, 1.0009, 1.0009, 1.0009, 1.0009), "no loss beyond noise"),  # less than counts
    ],
)
def test_a_loss_stands_out_of_the_spread_of_the_pairs(told: Record, factors: Sequence[float], verdict: str) -> None:
    drift = (1.0, 1.1, 1.2, 1.3, 1.4)  # of the card, for both alike
    then = [times(told, d) for d in drift]
    compared = against.paired([times(told, d * f) for d, f in zip(drift, factors, strict=True)], then)
    logs = [math.log(f) for f in factors]
    mean = sum(logs) / 5
    error = math.sqrt(sum((x - mean) ** 2 for x in logs) / 4 / 5)
    expected = [math.exp(mean), math.exp(mean - 2.776 * error), math.exp(mean + 2.776 * error)]
    assert [compared.ratio, compared.low, compared.high] == pytest.approx(expected)
    assert compared.lost == (verdict == "a loss beyond noise")
    sentence = compared.sentence(V23.label, "b128_s1_h64_t4096", "at commit 1234567")
    assert f"times as long as at commit 1234567, {verdict} (95 % interval" in sentence
    assert "burst, 5 pairs of runs in turn on one NVIDIA H200; both run the same machine code)" in sentence
    assert "\n" not in sentence


def test_runs_take_turns_and_every_other_pair_is_reversed(
    told: Record, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[str, bool, int]] = []

    def measured(kernel: Any, problem: Any, tiling: Any, device: Any, settings: Any, *where: Any) -> Record:
        there = bool(where)
        assert not settings.sustained_rounds and (not there or where == (tmp_path, "c0ffee"))
        seen.append(("there" if there else "here", settings.resources, len(seen)))
        return times(told, 1.0 if there else 1.08)

    class Out:
        def __enter__(self) -> Path:
            return tmp_path

        def __exit__(self, *error: Any) -> None: ...

    monkeypatch.setattr(against, "measure", measured)
    monkeypatch.setattr(against, "checked_out", lambda commit: Out())
    kept: list[Record] = []
    lost, sentence = against.answer(
        V23, against.Other(V23, "c0ffee"), problem_from_record(told.problem), None, H200,
        BenchSettings(), [], kept.append, lambda line: None,
    )  # fmt: skip
    where = [name for name, *_ in seen]
    assert where == ["here", "there", "there", "here"] * 2 + ["here", "there"]
    assert [resources for _, resources, _ in seen] == [True, True] + [False] * 8
    assert lost and len(kept) == 10 and "takes 1.080 times as long as at commit c0ffee, a loss" in sentence


def test_a_version_without_a_time_is_lost_and_older_code_without_one_is_a_mistake(
    told: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a record of it, the older code that cannot be run is compared by that."""
    wrong = Record.model_validate(
        {**json.loads(told.to_json()), "time_us": None, "host_us": None, "status": "incorrect", "reason": "out is off"}
    )
    problem, settings = problem_from_record(told.problem), BenchSettings()
    lacking = {"here"}

    def measured(*of: Any) -> Record:
        return wrong if ("there" if len(of) > 5 else "here") in lacking else times(told, 1.3)

    monkeypatch.setattr(against, "measure", measured)
    other = against.Other(V23, against._git("rev-parse", "HEAD") or "")
    if not other.commit:
        pytest.skip("this is no checkout of git")

    def answered(other: against.Other) -> tuple[bool, str]:
        return against.answer(V23, other, problem, None, H200, settings, [], lambda r: None, lambda line: None)

    said = "cute-dsl/flash_mla_v23 here was not timed on b128_s1_h64_t4096: out is off"
    assert answered(other) == (True, said)
    lacking.symmetric_difference_update({"here", "there"})
    with pytest.raises(UserError, match=r"at commit [0-9a-f]{7} was not timed on b128_s1_h64_t4096: out is off"):
        answered(other)
    named = f"record {told.id} of {told.at[:10]}"
    lost, sentence = answered(replace(other, record=told))
    assert lost and f"takes 1.300 times as long as in {named}, a loss" in sentence and "by shares" in sentence
    # Where it runs, it is measured again: the record only names it.
    lacking.clear()
    lost, sentence = answered(replace(other, record=told))
    assert not lost and f"at commit {other.commit[:7]}, the code of {named}, no loss" in sentence
    _, sentence = answered(against.Other(KernelId.parse("peer/flash_mla_lib"), other.commit))
    assert f"as long as peer/flash_mla_lib at commit {other.commit[:7]}, no loss" in sentence


def test_the_code_of_a_record_is_built_where_its_commit_is_here_and_says_all(told: Record) -> None:
    head = against._git("rev-parse", "HEAD")
    if head is None:
        pytest.skip("this is no checkout of git")
    problem = problem_from_record(told.problem)
    for source, commit in (
        ({"commit": head, "hash": "0", "dirty": False}, head),
        ({"commit": head, "hash": "0", "dirty": True}, ""),  # the commit is not all of it
        ({"commit": head, "hash": "0"}, ""),
        ({"commit": "0" * 40, "hash": "0", "dirty": False}, ""),
    ):
        record = times(told, 1.0, source=source)
        found = against.find(record.id, V23, problem, H200, [record])
        assert (found.commit, found.record, found.kernel) == (commit, record, V23)
    assert against.find("HEAD", V23, problem, H200, []) == against.Other(V23, head)
    with against.checked_out(head) as root:
        assert (root / "src" / "mla_var3" / "lab" / "bundle.py").is_file() and (root / "conf" / "sweep.yaml").is_file()
    assert not root.exists()


def test_knobs_that_a_record_was_asked_for_with_are_asked_for_again(told: Record) -> None:
    assert against.asked(None) is against.asked(times(told, 1.0, requested="default")) is None
    assert against.asked(times(told, 1.0, requested={"workers": 4})) == {"workers": 4}
    for chosen in ("tuned", "dispatch"):
        assert against.asked(times(told, 1.0, requested=chosen)) == told.tiling


# ---------------------------------------------------------------- by records
def test_runs_of_one_code_say_what_noise_is(repo_root: Path, told: Record) -> None:
    pool = load([repo_root / "results" / name for name in ("h200", "h100")]).records
    same = against.runs_differ(pool, V23.label, same_card=True)
    other = against.runs_differ(pool, V23.label, same_card=False)
    assert same is not None and other is not None and 1.0 < same < 1.02 < other < 1.05
    # Of a version of which there are too few, all of this project's count.
    everybody = against.runs_differ(pool, "triton/none", same_card=False)
    assert everybody is not None and everybody > other
    assert against.runs_differ([], V23.label, same_card=True) is None
    some = [times(told, f, environment={"chip": "c"}) for f in (1.0, 1.0, 1.01, 1.01, 1.1)]
    for number, record in enumerate(some):
        assert record.limits is not None and record.limits.burst is not None
        record.limits.burst.read_gbps += number  # of five runs
    assert against.runs_differ(some, V23.label, same_card=True) == pytest.approx(1.1)
    assert against.runs_differ(some, V23.label, same_card=False) is None


def write(folder: Path, *records: Record) -> Path:
    path = folder / "h200" / "2026-01-01-bench.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(record.to_json() + "\n" for record in records))
    return path


@pytest.mark.parametrize(("factor", "status", "verdict"), [(1.2, 1, "a loss"), (1.0, 0, "no loss"), (0.8, 0, "a gain")])
def test_without_a_gpu_records_are_compared(
    told: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    factor: float, status: int, verdict: str,
) -> None:  # fmt: skip
    """The newest record of today's code beside the one that is named: by its id, and by its file."""
    monkeypatch.setattr("mla_var3.paths.shipped_results_dir", lambda: tmp_path / "none")
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    today: dict[str, Any] = {
        "source": {"commit": None, "hash": ledger.source_of(V23.label)},
        "at": "2026-12-01T00:00:00Z",
    }
    now = times(told, factor, **today)
    assert now.limits is not None and now.limits.burst is not None
    now.limits.burst.read_gbps += 1.0  # another run
    then = times(told, 1.0)
    file = write(tmp_path / "then", then)
    write(tmp_path / "results", now, then)
    words = ["bench", V23.label, "--results-dir", str(tmp_path / "results"), "--against"]
    ratio = as_ratio(factor, 4)
    said = f"cute-dsl/flash_mla_v23 on b128_s1_h64_t4096 takes {ratio} times as long as in record {then.id} of "
    for what in (then.id, str(file)):
        assert main([*words, what]) == status
        out = capsys.readouterr().out
        assert out.startswith(said) and f"{verdict} beyond noise (95 % interval" in out and out.count("\n") == 1
        assert "; burst, by shares of each run's limit, " in out
        assert "where runs of one code were seen to differ by up to 6 %" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--against", "nowhere"], "--against 'nowhere' is no record file, no record's id and no commit here"),
        (["--against", "HEAD"], "needs a GPU, and there is none here"),
        (["cute-dsl/flash_mla_v24", "--against", "HEAD"], "--against compares one kernel, and 2 are named: name one"),
        (["--against", "HEAD", "--tune"], "--against compares one kernel as it is: leave --calibrate and --tune out"),
        (["--against", "ID", "--b", "3"], "is of b128_s1_h64_t4096, and b3_s1_h128_t"),
        (["--against", "FILE", "--b", "3"], "has no time of cute-dsl/flash_mla_v23 on b3_s1_h128_t"),
        (["--against", "FILE"], "no other record of cute-dsl/flash_mla_v23 with the code that it has now"),
        (["--against", "EMPTY"], "has no time of cute-dsl/flash_mla_v23"),
    ],
)
def test_mistakes(
    told: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    words: list[str], sentence: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(Device, "detect", staticmethod(lambda index=0: None))
    monkeypatch.setattr("mla_var3.paths.shipped_results_dir", lambda: tmp_path / "none")
    file = write(tmp_path / "results", times(told, 1.0, source={"commit": None, "hash": "0"}))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    named = {"ID": load(file).records[0].id, "FILE": str(file), "EMPTY": str(empty)}
    asked = [named.get(word, word) for word in words]
    assert main(["bench", V23.label, *asked, "--results-dir", str(tmp_path / "results")]) == 2
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said


def test_records_of_two_codes_in_turn_say_nothing_of_who_is_fastest() -> None:
    assert against.EXPERIMENT in ASIDE


# ---------------------------------------------------------------- a regression planted in a clone
FAKE = """
from bench_fakes import FakePlan


class PlantedPlan(FakePlan):
    seconds = 400e-6
"""
RUN = """
import sys
from bench_fakes import WITHOUT_TORCH
from mla_var3.device import Device
from mla_var3.lab import against
from mla_var3.measure.settings import BenchSettings

quick = dict(backend="bench_fakes:HostBackend", burst_rounds=3, graph_ms=2.0, max_sets=2, overlap_probe=False)
quick |= dict(sustained_s=0.01, settle_s=0.01, worker_env=((WITHOUT_TORCH, "1"),))
BenchSettings.of = classmethod(lambda cls, values: cls(**quick))
Device.detect = staticmethod(lambda index=0: Device.get("h200"))
against.PAIRS, against.STUDENT_95 = 2, 12.706
from mla_var3.cli._main import main
sys.exit(main(sys.argv[1:]))
"""


WHO = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def cloned(repo_root: Path, clone: Path, files: dict[str, str]) -> dict[str, str]:
    """Makes a repository of its own of the sources and `files`, committed; returns the environment to run it in."""
    left = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(repo_root / "src" / "mla_var3", clone / "src" / "mla_var3", ignore=left)
    shutil.copytree(repo_root / "conf", clone / "conf")
    for name, text in files.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)
    # Packages may come by PYTHONPATH too; the checkout's own sources lie behind the clone's.
    path = [str(clone / "src"), str(repo_root / "tests" / "measure"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, **WHO, "PYTHONPATH": os.pathsep.join(path)}
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "before"]):
        subprocess.run(["git", *words], cwd=clone, env=env, check=True, capture_output=True)
    return env


def test_a_regression_planted_in_a_clone_is_named(repo_root: Path, tmp_path: Path) -> None:
    """Takes seconds: four workers start, each with the sources of its side. A version that waits is timed by the host's
    clock; in the clone it is then made to wait half as long again."""
    name = "src/mla_var3/kernel/torch/mla/planted/planted/planted.py"
    env = cloned(repo_root, tmp_path, {name: FAKE})
    (tmp_path / name).write_text(FAKE.replace("400e-6", "600e-6"))
    words = [sys.executable, "-c", RUN, "bench", "torch/planted", "--b", "1", "--t", "64", "--against", "HEAD"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("torch/planted on b1_s1_h128_t64 takes 1.")
    assert "times as long as at commit " in done.stdout and ", a loss beyond noise (95 % interval 1." in done.stdout
    records = load(next((tmp_path / "results" / "h200").glob("*-against.jsonl"))).records
    there = [r for r in records if r.source.dirty is False]
    assert len(records) == 4 and len(there) == 2 and len({r.source.hash for r in records}) == 2
    assert {r.source.hash for r in there} != {"unknown"}
    assert all(r.median("burst") > 550 for r in records if r not in there)
    assert all(r.median("burst") < 550 for r in there), "the other side ran this side's code"


#: What a norm does of its row, and the same a few times more, which changes no result.
SUM = "    factor = tl.rsqrt(tl.sum(h * h, 0) / WIDTH + eps)\n"
AGAIN = SUM + "    for _ in range(8):\n        factor = tl.rsqrt(tl.sum(h * h + 0.0 * factor, 0) / WIDTH + eps)\n"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_regression_planted_in_a_clone_is_named_on_a_gpu(repo_root: Path, tmp_path: Path) -> None:
    """About three minutes: twice five pairs of runs of Triton's norm, as it is and with sums that it does not need."""
    name = "src/mla_var3/kernel/triton/norm/rmsnorm/rmsnorm/rmsnorm.py"
    env = cloned(repo_root, tmp_path, {})
    text = (tmp_path / name).read_text()
    assert text.count(SUM) == 1
    words = ["-m", "mla_var3.cli", "bench", "triton/rmsnorm", "--rows", "128", "--preset", "fast", "--against", "HEAD"]

    def bench() -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400
        )
        print(done.stdout)
        return done

    same = bench()
    assert same.returncode in (0, 1), same.stderr
    found = re.search(r"takes ([\d.]+) times as long as at commit .* both run the same machine code", same.stdout)
    assert found and 0.97 < float(found[1]) < 1.03
    (tmp_path / name).write_text(text.replace(SUM, AGAIN))
    planted = bench()
    assert planted.returncode == 1, planted.stdout + planted.stderr
    assert ", a loss beyond noise (95 % interval 1." in planted.stdout
    assert "the same machine code" not in planted.stdout
