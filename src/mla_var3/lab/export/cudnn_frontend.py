"""Records as a table in the columns of cudnn-frontend's benchmark of attention for inference, one CSV row each.

Of its phases, `generation` is absorbed decode here (kind `mla_absorbed`: the values are a part of the keys) and
`context` prefill over decompressed heads (kind `gqa`). What these columns have no place for is left out: requests of
different lengths, packed caches, other workloads.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue import spoken
from mla_var3.device import Device
from mla_var3.errors import UserError
from mla_var3.workload import TORCH_DTYPES, problem_from_record
from mla_var3.workload.decode import MlaProblem
from mla_var3.workload.prefill import PrefillProblem

if TYPE_CHECKING:
    from mla_var3.record import Record

COLUMNS = (
    "config_name", "model_name", "phase", "backend", "data_type", "kv_cache_dtype", "batch_size", "q_tokens", "kv_len",
    "num_q_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "kind", "sliding_window_size", "page_size", "time_ms",
    "tflops", "gbps", "sol_pct", "num_iterations", "success", "error_message", "gpu_name", "backend_detail",
    "cudnn_backend_version",
)  # fmt: skip
STATE = "burst"


def table(records: Iterable[Record]) -> tuple[str, int, int]:
    """(the CSV, rows, timed records without a row) of the records that speak in their cells."""
    rows, left = list[dict[str, Any]](), 0
    for record in spoken.speaking(records, aside=True):
        found = row(record)
        left += found is None
        rows += [] if found is None else [found]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue(), len(rows), left


def row(record: Record) -> dict[str, Any] | None:
    """A record's row; None where the columns have no place for its problem, or it has no time in burst.

    time_ms is the median; gbps counts every input once and every output once; sol_pct is its share of the peak
    bandwidth of the device's data sheet.
    """
    shape = _shape(problem_from_record(record.problem))
    us = record.median(STATE)
    if shape is None or us is None:
        return None
    flops, bytes_ = record.work()
    gbps = bytes_ / us / 1e3
    peak = _peak(record.device)
    assert record.time_us is not None and record.time_us.burst is not None
    commit = (record.source.commit or "")[:7]
    return {
        **shape,
        "config_name": record.experiment,
        "backend": record.kernel.label,
        "time_ms": round(us / 1e3, 6),
        "tflops": round(flops / us / 1e6, 3),
        "gbps": round(gbps, 3),
        "sol_pct": None if peak is None else round(100 * gbps / peak, 4),
        "num_iterations": record.time_us.burst.n,
        "success": True,
        "gpu_name": record.environment.get("gpu") or record.device,
        "backend_detail": f"{spoken.name(record)}, mla_var3 {commit}".rstrip(" ,"),
    }


def _shape(problem: Any) -> dict[str, Any] | None:
    """The columns that say the problem."""
    if type(problem) is MlaProblem and problem.lengths == "uniform" and not (problem.packed or problem.tree):
        widths = {"head_dim_qk": problem.k + problem.p, "head_dim_vo": problem.k}
        of = {"phase": "generation", "kind": "mla_absorbed", "kv_len": problem.t, "num_kv_heads": problem.h_kv}
        page, model = problem.page, _model(problem.h, problem.k, problem.p)
    elif type(problem) is PrefillProblem and problem.uniform:
        widths = {"head_dim_qk": problem.d + problem.p, "head_dim_vo": problem.d}
        of = {"phase": "context", "kind": "gqa", "kv_len": problem.t, "num_kv_heads": problem.h_kv}
        page, model = None, _model(problem.h, 512, problem.p)
    else:
        return None
    dtype = TORCH_DTYPES[problem.dtype]
    return {
        **of, **widths, "model_name": model, "data_type": dtype, "kv_cache_dtype": dtype, "batch_size": problem.b,
        "q_tokens": problem.s, "num_q_heads": problem.h, "page_size": page,
    }  # fmt: skip


def _model(h: int, k: int, p: int) -> str:
    """A name as that benchmark makes them: of a model, and how many GPUs share its heads."""
    if (k, p) != (512, 64) or 128 % h:
        return f"mla-h{h}-k{k}-p{p}"
    return "deepseek-v3" if h == 128 else f"deepseek-v3-tp{128 // h}"


def _peak(key: str) -> float | None:
    try:
        return Device.get(key).hbm_gbps
    except UserError:
        return None
