"""Records: the schema, and what a kill, a full disk or a bad line does to a file of them."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mla_var3 import paths
from mla_var3 import record as records
from mla_var3.errors import UserError
from mla_var3.record import Record, RecordStore, code_bytes, finished_keys, load, record_key, to_frame
from mla_var3.workload.decode import MlaProblem

FIXED = (
    "id at experiment status reason kernel problem tiling device time_us host_us limits error resources method "
    "environment source"
).split()


def point(**changes: Any) -> Record:
    stats = {"median": 220.0, "p10": 218.0, "p90": 223.0, "n": 5}
    limit = {"matmul_tflops": 800.0, "read_gbps": 4600.0, "limit_us": 182.0}
    data: dict[str, Any] = {
        "id": records.new_id(),
        "at": records.now(),
        "experiment": "test",
        "status": "passed",
        "kernel": {"language": "cute-dsl", "layer": "mla", "design": "flash_mla", "version": 2},
        "problem": MlaProblem(b=128).to_record(),
        "tiling": {"tile_m": 64},
        "device": "h200",
        "time_us": {"burst": stats},
        "host_us": 5.0,
        "limits": {"burst": limit, "bound": "compute"},
        "error": {"out": 0.002, "lse": 1e-6},
        "resources": {
            "registers": 168,
            "smem": 200000,
            "spill_bytes": 0,
            "ctas_per_sm": 1,
            "instructions": {"HGMMA": 9},
        },
        "method": "in a test",
        "environment": {"gpu": None, "clocks": {"burst": {"sm_mhz": 1980.0}}},
        "source": {"commit": None, "hash": "0123456789abcdef"},
        "key": "k",
        "flops": 146028888064,
        "bytes": 639631360,
    }
    return Record.model_validate({**data, **changes})


def test_the_fixed_names_are_there_in_order() -> None:
    assert list(Record.model_fields)[: len(FIXED)] == FIXED


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "h200" / "x.jsonl")
    first, second = point(), point(note="kept although unknown")
    store.append(first)
    store.append(second)
    loaded = load(store.path)
    assert loaded.records == [first, second] and not loaded.problems
    assert json.loads(store.path.read_text().splitlines()[1])["note"] == "kept although unknown"


def test_an_error_that_is_not_finite_is_valid_json_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    bad = point(status="incorrect", reason="NaN", time_us=None, host_us=None, error={"out": float("inf"), "lse": 0.0})
    RecordStore(path).append(bad)
    assert "Infinity" in json.dumps(json.loads(path.read_text(), parse_constant=pytest.fail))
    loaded = load(path).records[0]
    assert loaded.error is not None and loaded.error.out == float("inf")


@pytest.mark.parametrize("status", ["incorrect", "infeasible", "skipped", "failed", "compiled"])
def test_only_a_passed_record_has_a_time(status: str) -> None:
    with pytest.raises(ValidationError, match="cannot have a time"):
        point(status=status, reason="because")
    assert point(status=status, reason="because", time_us=None, host_us=None).time_us is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"error": None}, "needs the error"),
        ({"status": "failed", "time_us": None, "host_us": None}, "needs a reason"),
        ({"time_us": None}, "host_us stands beside time_us"),
        ({"problem": {"b": 1}}, "problem lacks"),
        ({"status": "fine"}, "Input should be"),
        ({"source": {"commit": "abc"}}, "hash"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        point(**changes)


def test_a_torn_line_is_reported_and_the_next_append_starts_on_a_fresh_one(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    store = RecordStore(path)
    first, second, third = point(), point(), point()
    store.append(first)
    store.append(second)
    path.write_bytes(path.read_bytes()[:-40])
    before = load(path)
    assert before.records == [first]
    assert len(before.problems) == 1 and before.problems[0].startswith(f"{path}:2: the line is torn")
    RecordStore(path).append(third)
    after = load(path)
    assert after.records == [first, third]
    assert [p.split(":")[1] for p in after.problems] == ["2"]


def test_lines_that_are_no_records_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    good = point()
    path.write_text("not json\n" + good.to_json() + '\n{"id": "1"}\n\n[1]\n')
    loaded = load([path])
    assert loaded.records == [good]
    assert [p.split(": ")[0] for p in loaded.problems] == [f"{path}:{n}" for n in (1, 3, 5)]
    assert "at: Field required" in loaded.problems[1]


def test_a_folder_stands_for_its_files(tmp_path: Path) -> None:
    for name in ("h200/2026-01-02-b.jsonl", "h100/2026-01-01-a.jsonl"):
        RecordStore(tmp_path / name).append(point(experiment=name))
    assert [r.experiment for r in load(tmp_path).records] == ["h100/2026-01-01-a.jsonl", "h200/2026-01-02-b.jsonl"]
    with pytest.raises(UserError, match="there are no records at"):
        load(tmp_path / "nothing")


def test_a_full_disk_is_a_sentence() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(UserError, match="the disk is full") as caught:
        RecordStore("/dev/full").append(point())
    assert "resume=true" in str(caught.value)


def test_a_disk_that_fills_up_inside_a_line_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RecordStore(tmp_path / "x.jsonl")
    first, second = point(), point()
    store.append(first)
    whole = store.path.read_bytes()
    write, room = os.write, [100]

    def short(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(fd, data[: room[0]])
        room[0] -= done
        return done

    with monkeypatch.context() as patch:
        patch.setattr(records.os, "write", short)
        with pytest.raises(UserError, match="the file holds 1 records"):
            store.append(second)
    assert store.path.read_bytes() == whole
    store.append(second)
    assert load(store.path).records == [first, second]


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot append a record to"):
        RecordStore(tmp_path / "file" / "x.jsonl").append(point())


_APPENDER = """
import sys
from mla_var3.record import Record, RecordStore
store = RecordStore(sys.argv[1])
record = Record.model_validate_json(sys.argv[2])
while True:
    store.append(record.model_copy(update={"reason": "x" * 5000}))
    print("appended", flush=True)
"""


def test_kill_9_loses_nothing_that_was_appended(tmp_path: Path) -> None:
    path, source = tmp_path / "x.jsonl", str(paths.import_root())
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _APPENDER, str(path), point().to_json()],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": source},
        )
        for _ in range(2)
    ]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    time.sleep(0.1)
    said = 0
    for child in children:
        child.send_signal(signal.SIGKILL)
        said += 1 + child.communicate()[0].count(b"\n")
    loaded = load(path)
    assert len(loaded.records) >= said
    assert len(loaded.problems) <= len(children)
    RecordStore(path).append(point(experiment="after"))
    assert load(path).records[-1].experiment == "after"


def test_keys_name_a_point_before_it_is_measured() -> None:
    kernel, problem = {"language": "torch", "design": "flash_mla"}, MlaProblem().to_record()
    key = record_key(kernel, problem, "default", "h200", "abc")
    assert key == record_key(dict(reversed(kernel.items())), problem, "default", "h200", "abc")
    others = {
        record_key(kernel, problem, "tuned", "h200", "abc"),
        record_key(kernel, problem, {"tile_m": 64}, "h200", "abc"),
        record_key(kernel, problem, "default", "cpu", "abc"),
        record_key(kernel, problem, "default", "h200", "changed"),
        record_key(kernel, MlaProblem(t=1).to_record(), "default", "h200", "abc"),
        record_key(kernel, problem, "default", "h200", "abc", "compile"),
    }
    assert len(others) == 6 and key not in others


def test_failed_points_are_not_finished() -> None:
    failed = point(status="failed", reason="crash", time_us=None, host_us=None, key="b")
    assert finished_keys([point(key="a"), failed, point(key=None)]) == {"a"}
    assert finished_keys([failed], retry=()) == {"b"}


def test_the_size_of_code_is_as_recorded_or_follows_from_its_instructions() -> None:
    assert code_bytes({"code_bytes": 136832, "instructions": {"total": 1}}) == 136832
    assert code_bytes({"instructions": {"HGMMA": 3, "total": 8552}}) == 136832
    assert code_bytes({"registers": 3}) is None and code_bytes(None) is None
    frame = to_frame([point(resources={"instructions": {"total": 4}}, compile_seconds=2.5), point(resources=None)])
    assert frame["code_bytes"][0] == 64 and frame["code_bytes"].isna()[1]
    assert frame["compile_seconds"][0] == 2.5 and frame["compile_seconds"].isna()[1]


def test_the_frame_is_flat() -> None:
    lengths = MlaProblem(b=2, t=[5, 9]).to_record()
    ragged = MlaProblem(b=2, lengths={"name": "ragged", "seed": 3}).to_record()
    frame = to_frame([point(), point(problem=lengths, tiling=None, requested={"a": 1}), point(problem=ragged)])
    row = frame.iloc[0]
    assert row["label"] == "cute-dsl/flash_mla_v2" and row["problem_label"] == "b128_s1_h128_t4096"
    assert row["time_us_burst_median"] == 220.0 and row["kernel_version"] == 2 and row["problem_b"] == 128
    assert row["ratio_burst"] == pytest.approx(220 / 182)
    assert row["tflops_burst"] == pytest.approx(663.8, abs=0.1)
    assert row["gbps_burst"] == pytest.approx(2907, abs=1)
    assert row["resources_instructions_HGMMA"] == 9 and row["tiling_tile_m"] == 64
    assert json.loads(frame.iloc[1]["problem_lengths"]) == [5, 9]
    assert not any(isinstance(value, dict | list) for column in frame for value in frame[column])
    assert to_frame([]).empty


def test_errors_have_the_names_of_a_workloads_outputs() -> None:
    """Outputs of the indexer's workloads are none called out: a record keeps their names, and lists show the first."""
    record = point(error={"codes": 0.5, "scales": 0.25})
    assert record.error is not None and record.error.first == 0.5
    kept = json.loads(record.to_json())["error"]
    assert kept == {"codes": 0.5, "scales": 0.25} and Record.model_validate_json(record.to_json()) == record
    attention = point().error
    assert attention is not None and attention.first == attention.out == 0.002
