"""What the report takes up, what it leaves out, and the words it says about that."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from mla_var3 import cli, workload
from mla_var3.cli import arguments
from mla_var3.errors import UserError
from mla_var3.lab.naming import cell_name
from mla_var3.lab.report.gather import Gathered, arrange, command, gather
from mla_var3.record import ASIDE, RecordStore
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.mixed import MixedProblem
from mla_var3.workload.prefill import PrefillProblem


def said(gathered: Gathered) -> str:
    return "\n".join(f"{line.count} {line.what}: {line.why} ({'; '.join(line.examples)})" for line in gathered.left_out)


def test_corrupt_lines_are_named_and_the_others_shown(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    RecordStore(path).append(make())
    with path.open("a") as file:
        file.write('{"id": "torn"\nnot json at all\n{"id": "x"}\n')
    found = gather([path])
    assert len(found.points) == 1
    assert "3 lines of record files: they are no records" in said(found)
    assert f"{path}:2:" in said(found)


def test_records_without_a_time_are_counted_by_kernel_and_reason(make: Any) -> None:
    records = [
        make("triton/flash_mla", None, status="failed", reason=f"no luck (while checking case 'own' with seed {i})")
        for i in range(3)
    ]
    records += [make("cute-dsl/flash_mla", None, status="skipped", reason="too many rows"), make()]
    found = arrange(records)
    assert len(found.points) == 1
    assert "3 records of triton/flash_mla: failed: no luck" in said(found)
    assert "more reasons" not in said(found), "the seed of a check is no other reason"
    assert "1 records of cute-dsl/flash_mla: skipped: too many rows" in said(found)


@pytest.mark.parametrize("experiment", ASIDE)
def test_what_was_timed_for_something_else_hides_no_measurement(make: Any, experiment: str) -> None:
    found = arrange([make(us=100, day="2026-11-21"), make(us=90, day="2026-11-22", experiment=experiment)])
    assert [(p.us("burst"), p.newest) for p in found.points] == [(100, True)]
    assert f"1 timed records: they are of {experiment}, which {ASIDE[experiment]}" in said(found)


def test_a_newer_record_replaces_an_older_one_and_that_is_said(make: Any) -> None:
    found = arrange([make(us=90, day="2026-11-22"), make(us=100, day="2026-11-21")])
    assert [(p.us("burst"), p.newest) for p in found.points] == [(100, False), (90, True)]
    assert "1 timed records: another one speaks for the contender in that cell" in said(found)
    assert len(found.sets) == 2


def test_other_tilings_are_other_contenders(make: Any) -> None:
    asked: list[Any] = ["default", "tuned", {"num_splits": 4}]
    found = arrange(
        [make(requested=a) for a in asked] + [make(requested={"split_tokens": 512}, picked_by="fixed_split")]
    )
    names = {p.name for p in found.newest}
    assert names == {
        "cute-dsl/flash_mla", "cute-dsl/flash_mla (tuned)", "cute-dsl/flash_mla (num_splits=4)",
        "fixed_split (cute-dsl/flash_mla)",
    }  # fmt: skip


def test_what_the_dispatcher_picked_is_the_version_that_it_picked(make: Any) -> None:
    picked = make(us=90, requested="dispatch", picked_by="dispatch", day="2026-11-22")
    found = arrange([make(us=100, day="2026-11-21"), picked])
    assert [(p.name, p.us("burst")) for p in found.newest] == [("cute-dsl/flash_mla", 90)]


def test_unknown_devices_and_mixed_runs_are_shown_with_a_word(make: Any) -> None:
    found = arrange(
        [make(device="gb999"), make(), make("peer/fa4", torch="2.12.0"), make("triton/flash_mla", limit=None)]
    )
    assert len(found.newest) == 4
    assert "device 'gb999' is not in devices.json" in said(found)
    assert "1 cells: their contenders were measured in different runs" in said(found)
    assert "they carry no limit of their run" in said(found)


def test_a_problem_that_makes_no_sense_is_left_out(make: Any) -> None:
    bad = make()
    bad.problem["h"] = 0
    found = arrange([bad, make()])
    assert len(found.points) == 1
    assert "their problem makes no sense here" in said(found)


def test_the_same_record_in_two_files_counts_once(make: Any) -> None:
    record = make()
    found = arrange([record, record])
    assert len(found.points) == 1
    assert "the same record stands in two files" in said(found)


PROBLEMS = [
    MlaProblem(b=128, t=4096),
    MlaProblem(b=4, s=2, t=300, h=16, causal=True, dtype="fp16", page=None),
    MlaProblem(b=3, t=128, h=32, h_kv=2, k=256, p=32, d=64, page=16),
    MlaProblem(b=8, t=1024, lengths={"name": "ragged", "seed": 3}),
    MlaProblem(b=3, t=128, lengths=[70, 0, 128]),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=cell_name)
@pytest.mark.parametrize("requested", ["default", "tuned", "dispatch", {"num_splits": 4, "swapped": True}], ids=str)
def test_the_command_measures_the_same_again(make: Any, problem: MlaProblem, requested: Any) -> None:
    words = shlex.split(command(make("triton/flash_mla", problem=problem, requested=requested), problem))
    assert words[:2] == ["mla-var3", "bench"]
    args = cli.parser_of("bench").parse_args(words[2:])
    assert arguments.problem_of(args) == problem
    assert args.kernels == ["dispatch" if requested == "dispatch" else "triton/flash_mla"]
    assert args.tune == (requested == "tuned")
    assert arguments.tiling_fields(args.tiling) == (requested if isinstance(requested, dict) else {})


@pytest.mark.parametrize("problem", [MixedProblem(b=2, t=512, n=64), PrefillProblem(b=2, s=96, causal=True)], ids=repr)
def test_the_command_names_problems_of_other_workloads(make: Any, problem: Any) -> None:
    words = shlex.split(command(make(problem=problem, requested={"num_splits": 2}), problem))
    args = cli.parser_of("bench").parse_args(words[2:])
    assert arguments.problem_of(args, workload.get(problem.workload)) == problem
    assert arguments.tiling_fields(args.tiling) == {"num_splits": 2}


def test_cells_that_differ_have_names_that_differ() -> None:
    base = MlaProblem(b=2, t=512)
    others = [base, *PROBLEMS, base.replace(page=128), base.replace(k=256), base.replace(lengths=[1, 512])]
    others += [base.replace(lengths=[2, 512]), base.replace(lengths={"name": "ragged", "seed": 1})]
    assert len({cell_name(p) for p in others}) == len(others)
    assert cell_name(base) == "b2_s1_h128_t512"


def test_no_records_and_no_files_are_mistakes_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are no records at"):
        gather([tmp_path / "nothing.jsonl"])
    (tmp_path / "empty.jsonl").write_text("")
    args = cli.parser_of("report").parse_args([str(tmp_path / "empty.jsonl")])
    from mla_var3.cli import report as verb

    with pytest.raises(UserError, match="hold no times"):
        verb.run(args)
