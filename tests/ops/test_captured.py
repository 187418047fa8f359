"""What MLA_VAR3_CAPTURE writes of calls, and that the same problems are read from it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ops_fakes import CpuEngine  # noqa: E402

from mla_var3.errors import UserError  # noqa: E402
from mla_var3.lab.sweep import config, plan  # noqa: E402
from mla_var3.ops import captured, mla_decode, packed_mla_decode, sparse_mla_decode  # noqa: E402
from mla_var3.ops import engine as engine_module  # noqa: E402
from mla_var3.workload import get  # noqa: E402
from mla_var3.workload.decode import MlaProblem  # noqa: E402
from mla_var3.workload.prefill import PrefillProblem  # noqa: E402
from mla_var3.workload.sparse_decode import SparseProblem  # noqa: E402


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> captured.Notes:
    made = captured.Notes(tmp_path / "calls")
    monkeypatch.setattr(engine_module, "notes", lambda: made)
    monkeypatch.setattr(captured, "APART_S", 0.0)
    return made


def call(problem: Any, engine: CpuEngine) -> None:
    given = get(problem.workload).make_inputs(problem, "cpu", seed=0)
    if problem.workload == "decode":
        queries = {"cu_seqlens_q": given[4]} if problem.packed else {}
        options = {"causal": problem.causal, "kernel": "torch/flash_mla", **queries}
        mla_decode(*given[:4], scale=problem.scale, on=engine, **options)
    else:
        function = packed_mla_decode if problem.paged else sparse_mla_decode
        options = {"cache_scale": given[-1]} if problem.cache.one_scale else {}
        rest = given[: 4 if problem.paged else 3]
        function(*rest, layout=problem.layout, on=engine, kernel="torch/sparse_mla", **options)


CALLS = [
    MlaProblem(b=3, h=4, t=129, page=64, lengths=[70, 0, 129]),
    MlaProblem(b=2, h=4, t=129, page=16, lengths=[64, 129], s=3, causal=True),
    MlaProblem(b=3, h=4, t=129, page=64, lengths=[70, 7, 129], queries=[1, 5, 2], causal=True),
    SparseProblem(b=4, h=4, t=128, topk=64, layout="bf16"),
    SparseProblem(b=4, h=4, t=128, topk=64, layout="v32"),
    SparseProblem(b=2, h=4, t=128, s=2, layout="flat", paged=True),
]


def test_calls_are_read_as_they_were_made(notes: captured.Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CpuEngine()
    for problem in CALLS:
        call(problem, engine)
    notes.flush()
    found = captured.problems(notes.folder)
    assert sorted(map(repr, found)) == sorted(map(repr, CALLS))
    (line,) = (
        (notes.folder / "workloads/mla_paged/mla_paged_decode_h4_ckv512_kpe64_ps64.jsonl").read_text().splitlines()
    )
    trace = json.loads(line)
    assert trace["solution"] is None and trace["workload"]["axes"] == {
        "batch_size": 3, "num_pages": 5, "len_indptr": 4, "num_kv_indices": 5,
    }  # fmt: skip
    assert trace["workload"]["inputs"]["ckv_cache"] == {"type": "random"}
    # A sweep takes them for cells.
    setting = ["experiment=captured", f"workload={notes.folder}"]
    assert sorted(map(repr, plan.expand_cells(config.compose(setting)))) == sorted(map(repr, CALLS))
    with pytest.raises(UserError, match="or give workload=PATH"):
        plan.expand_cells(config.compose(["experiment=captured"]))


def test_prompts(notes: captured.Notes) -> None:
    problem = PrefillProblem(b=2, h=4, causal=True, lengths=[[70, 70], [12, 140]])
    called = problem.replace(lengths={"queries": 82, "keys": 210})  # what the host knows
    offsets = torch.tensor([0, 70, 82]), torch.tensor([0, 70, 210])
    notes.note(called, (torch.empty(0), torch.empty(0), torch.empty(0), *offsets), False)
    notes.flush()
    assert captured.problems(notes.folder) == [problem]


def test_of_a_captured_graph_shapes_are_written_once(notes: captured.Notes) -> None:
    engine = CpuEngine()
    call(CALLS[0], engine)
    engine.current_capture = 1
    for _ in range(3):
        call(CALLS[0], engine)
    notes.flush()
    shapes = MlaProblem(b=3, h=4, t=192, page=64, lengths=[192] * 3)
    assert set(captured.problems(notes.folder)) == {CALLS[0], shapes}
    assert len(next(notes.folder.rglob("*.jsonl")).read_text().splitlines()) == 2


def test_lengths_are_awaited_and_calls_are_far_apart(notes: captured.Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = [False]

    class Event:
        query = staticmethod(lambda: ready[0])
        synchronize = staticmethod(lambda: ready.__setitem__(0, True))

    monkeypatch.setattr(captured, "_copied", lambda lengths: ([x.clone() for x in lengths], Event()))
    monkeypatch.setattr(captured, "APART_S", 3600.0)
    engine = CpuEngine()
    for _ in range(2):
        call(CALLS[0], engine)
    call(CALLS[1], engine)
    assert not notes.folder.exists() and len(notes._awaited) == 2
    notes.flush()
    assert ready == [True] and len(captured.problems(notes.folder)) == 2
    monkeypatch.setattr(captured, "MOST_LINES", 2)
    monkeypatch.setattr(captured, "APART_S", 0.0)
    call(CALLS[3], engine)
    notes.flush()
    assert len(captured.problems(notes.folder)) == 2


def test_it_is_off_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(captured.ENVIRONMENT, raising=False)
    captured.notes.cache_clear()
    assert captured.notes() is None
    begin = time.perf_counter()
    for _ in range(10_000):
        captured.notes()
    assert time.perf_counter() - begin < 0.1
    captured.notes.cache_clear()
    monkeypatch.setenv(captured.ENVIRONMENT, str(tmp_path))
    made = captured.notes()
    assert made is not None and made.folder == tmp_path
    captured.notes.cache_clear()


def test_a_trace_of_others_is_read(tmp_path: Path) -> None:
    """The form of flashinfer-bench's own definitions, with pages of one token and without lengths of last pages."""
    blob = tmp_path / "blob" / "one.safetensors"
    blob.parent.mkdir()
    blob.write_bytes(captured.safetensors({"kv_indptr": torch.tensor([0, 5, 12]), "other": torch.tensor([[1, 2]])}))
    table = {"type": "safetensors", "path": "blob/one.safetensors", "tensor_key": "kv_indptr"}
    traces = [
        {"definition": "mla_paged_decode_h16_ckv512_kpe64_ps1",
         "workload": {"axes": {"batch_size": 2, "num_pages": 99, "len_indptr": 3, "num_kv_indices": 12},
                      "inputs": {"kv_indptr": table}}},
        {"definition": "dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps64",
         "workload": {"axes": {"num_tokens": 8, "num_pages": 8462}, "inputs": {}}},
        {"definition": "rmsnorm_h7168", "workload": {"axes": {"batch_size": 2}, "inputs": {}}},
    ]  # fmt: skip
    file = tmp_path / "workloads.jsonl"
    file.write_text("".join(json.dumps(trace) + "\n" for trace in traces))
    assert captured.problems(file) == [
        MlaProblem(b=2, h=16, t=7, page=1, lengths=[5, 7]),
        SparseProblem(b=8, h=16, topk=2048, page=64, t=67696, layout="bf16"),
    ]
    blob.unlink()
    with pytest.raises(UserError, match="copy the folder blob as well"):
        captured.problems(file)
    file.write_text(json.dumps(traces[-1]))
    with pytest.raises(UserError, match="holds no workload of MLA"):
        captured.problems(file)
    file.write_text("{")
    with pytest.raises(UserError, match="line 1, is no workload of flashinfer-bench"):
        captured.problems(file)
