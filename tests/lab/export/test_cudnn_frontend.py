"""Records in the columns of cudnn-frontend's benchmark of attention."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from mla_var3.cli._main import main
from mla_var3.lab.export import cudnn_frontend
from mla_var3.record import Record, load

#: The first line of that benchmark's own files, as of November 2026.
HEADER = (
    "config_name,model_name,phase,backend,data_type,kv_cache_dtype,batch_size,q_tokens,kv_len,num_q_heads,num_kv_heads,"
    "head_dim_qk,head_dim_vo,kind,sliding_window_size,page_size,time_ms,tflops,gbps,sol_pct,num_iterations,success,"
    "error_message,gpu_name,backend_detail,cudnn_backend_version"
)


def of(repo_root: Path, file: str, label: str, kernel: str) -> Record:
    records = load(repo_root / "results" / "h200" / file).records
    return next(r for r in records if r.problem_label == label and r.kernel.label == kernel and r.time_us)


def test_a_decode_record_has_its_row(repo_root: Path) -> None:
    record = of(repo_root, "2026-11-27-decode.jsonl", "b128_s1_h64_t4096", "cute-dsl/flash_mla_v23")
    row = cudnn_frontend.row(record)
    assert row is not None
    us = record.median("burst")
    assert us is not None
    # 128 requests of 4096 cached tokens of 576 columns, queries of 64 heads, their outputs of 512: bf16.
    flops = 2 * 128 * 4096 * 64 * (576 + 512)
    bytes_ = 2 * 128 * (4096 * 576 + 64 * (576 + 512))
    assert row == {
        "config_name": "decode", "model_name": "deepseek-v3-tp2", "phase": "generation",
        "backend": "cute-dsl/flash_mla_v23", "data_type": "bfloat16", "kv_cache_dtype": "bfloat16", "batch_size": 128,
        "q_tokens": 1, "kv_len": 4096, "num_q_heads": 64, "num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512,
        "kind": "mla_absorbed", "page_size": 64, "time_ms": round(us / 1e3, 6), "success": True,
        "tflops": pytest.approx(flops / us / 1e6, abs=1e-3), "gbps": pytest.approx(bytes_ / us / 1e3, abs=1e-3),
        "sol_pct": pytest.approx(100 * bytes_ / us / 1e3 / 4800, abs=1e-4), "num_iterations": 5,
        "gpu_name": "NVIDIA H200", "backend_detail": f"cute-dsl/flash_mla_v23, mla_var3 {record.source.commit[:7]}",
    }  # fmt: skip


def test_prefill_is_the_context_phase(repo_root: Path) -> None:
    records = load(repo_root / "results" / "h200" / "2026-11-21-prefill.jsonl").records
    row = cudnn_frontend.row(next(r for r in records if r.time_us))
    assert row is not None and row["phase"] == "context" and row["kind"] == "gqa" and row["page_size"] is None
    assert (row["head_dim_qk"], row["head_dim_vo"], row["num_kv_heads"]) == (192, 128, 128)
    assert row["q_tokens"] == row["kv_len"]


def test_what_the_columns_cannot_say_has_no_row(repo_root: Path) -> None:
    for name in ("2026-11-27-ragged.jsonl", "2026-11-26-sparse_decode.jsonl", "2026-11-26-rmsnorm.jsonl"):
        records = load(repo_root / "results" / "h200" / name).records
        assert all(cudnn_frontend.row(r) is None for r in records[:20])
    assert cudnn_frontend.table([])[0] == HEADER + "\n"


def test_the_verb(repo_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = repo_root / "results" / "h200" / "2026-11-27-decode.jsonl", tmp_path / "table.csv"
    words = ["export", str(file), "--format", "cudnn-frontend", "--out", str(out)]
    assert main(words) == 0
    text = out.read_text()
    assert text.splitlines()[0] == HEADER
    rows = list(csv.DictReader(text.splitlines()))
    assert capsys.readouterr().out == f"{out}: {len(rows)} rows\n"
    cells = {(r["batch_size"], r["q_tokens"], r["num_q_heads"], r["kv_len"]) for r in rows}
    assert len(cells) == 17 and {r["gpu_name"] for r in rows} == {"NVIDIA H200"}
    assert {"peer/flash_mla_lib", "cute-dsl/flash_mla_v23"} <= {r["backend"] for r in rows}
    ragged = str(repo_root / "results" / "h200" / "2026-11-27-ragged.jsonl")
    for more, sentence in (
        ([ragged], "none of these records is a time of dense decode or prefill"),
        ([str(file), "--device", "h100"], "none of these records is a time of dense decode or prefill"),
        ([str(file), "--b", "3"], "leave --experiment and the options of a problem out"),
    ):
        assert main(["export", *more, "--format", "cudnn-frontend", "--out", str(out)]) == 2
        assert sentence in capsys.readouterr().err
