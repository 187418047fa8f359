"""Records: one measured (or compiled, or refused) point each, as JSON lines that survive a kill and a full disk.

The field names of `Record` are fixed; tools rely on them. A file is append-only: `RecordStore.append` writes one line
and waits until it is on the disk, so whatever was finished before a crash is there after it. A line that was torn by
a kill stays in the file; the next append starts on a fresh line, and `load` reports the torn one and skips it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mla_var3.errors import UserError
from mla_var3.files import cause, read_bytes
from mla_var3.names import kernel_label
from mla_var3.workload import problem_from_record

if TYPE_CHECKING:
    import pandas as pd

Status = Literal["passed", "incorrect", "infeasible", "skipped", "failed", "compiled"]

#: Experiments that are not for who is fastest, and why: no table of the fastest counts their records.
ASIDE = {
    "against": "times two states of the code beside each other, in burst alone",
    "context_parallel": "times several GPUs beside one",
    "host_cost": "times few calls, for what launches cost the host",
    "nightly": "takes few samples, for the board of dates",
    "one_turn": "gives each contender one hot turn, so that their order decides",
    "portable": "times versions for other GPUs, with tilings for these, on a GPU that has faster ones",
    "sparse_sub": "takes few samples of a form of a version that was given up",
}

#: What `record_key` may say in place of a tiling.
DEFAULT, TUNED = "default", "tuned"


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", ser_json_inf_nan="strings")


class KernelRef(_Part):
    """Which version; version 0 is the base."""

    language: str
    layer: str
    design: str
    version: int = 0

    @property
    def label(self) -> str:
        return kernel_label(self.language, self.design, self.version)


class Stats(_Part):
    """Microseconds of one call: median, 10th and 90th percentile over n samples."""

    median: float = Field(gt=0)
    p10: float = Field(gt=0)
    p90: float = Field(gt=0)
    n: int = Field(ge=1)


#: Of the chip while it is timed: the fields of `Times`.
STATES = ("burst", "sustained")


class Times(_Part):
    """Device time of a call on a cool chip, and at the chip's power limit."""

    burst: Stats | None = None
    sustained: Stats | None = None


class StateLimits(_Part):
    """matmul_tflops: cuBLAS bf16 8192^3, read_gbps: a kernel that only reads, limit_us: the larger of the two times.
    copy_gbps: a kernel that copies, in a run with problems that write much; their writes are then charged at its rate,
    with as many reads. rows_gbps: the same, for what is written in rows with gaps between them."""

    matmul_tflops: float
    read_gbps: float
    copy_gbps: float | None = None
    rows_gbps: float | None = None
    limit_us: float


class Span(_Part):
    """A kernel's part of a call."""

    name: str
    us: float


#: Layers of DeepSeek V3 (num_hidden_layers of its config.json), which share the schedule of a step.
LAYERS = 61


class RunLimits(_Part):
    """Measured in the same run as the times; bound: which of the two sets limit_us ("compute" or "memory")."""

    burst: StateLimits | None = None
    sustained: StateLimits | None = None
    bound: Literal["compute", "memory"] | None = None


class Error(_Part):
    """Of each output, by its name: the relative (Frobenius) error where rows are judged (out), else the largest one
    (lse, of attention; logits; indices): absolute where the reference is below 1, relative to it elsewhere. It was
    absolute everywhere in records made before checks had logits of millions."""

    out: float | None = None
    lse: float | None = None

    @property
    def first(self) -> float:
        """Of the workload's first output."""
        named = next(iter((self.model_extra or {}).values()), math.nan)
        return float(named) if self.out is None else self.out


class Source(_Part):
    """commit: of the repository, or null. dirty: tracked files differed from it. hash: version's files and its lib.
    code_added: of a record that is older than digests, the commit that its `code` was compiled from afterwards."""

    commit: str | None = None
    hash: str
    dirty: bool | None = None
    code_added: str | None = None


class Record(_Part):
    """One point. Beside the fixed names there are, where they apply:

    key: what `resume` compares (`record_key`). requested: "default", "tuned", or the tiling fields that were asked for.
    mode: how far it was meant to go: time, check or compile. flops, bytes: of one call, algorithmic.
    launches: kernels (and copies) that one call puts on the device, counted in its graph; host_us covers them all.
    plan_us: host and device time of binding to other tensors (planning and metadata, no compiling).
    cross_check_us: `triton.testing.do_bench_cudagraph` on the same rotating input sets, last of all,
    after an idle gap: neither quite burst nor sustained.
    picked_by: what chose the version for this problem ("dispatch", "fixed_split"), where it was not named.
    with_schedule_us: like time_us, of a call that also makes what the calls of a step share (`LAYERS`).
    beside_us: like time_us, of parts of the call by themselves, by name: of a layer its plain projections.
    timeline: kernels of a call in the order of their ends, each with its name and us, from the end of the one before to
    its own, medians in a graph under torch's profiler.
    overlap_us: how much of a call ran beside the one before it, where that had to be prevented.
    code: what ran (`mla_var3.toolchain.digest.Code.to_record`): its digest, and what that is made of.
    model_us: what a call was predicted to take before it was timed, where something predicts it.
    seconds: of each phase. compile_seconds: that the compiler took when it made the code, which a cache may have had
    since; not there where nobody knows. warnings: what the compiler said. Unknown names are kept.
    tuning: {from_cache, tried, trials}, a trial with tiling, status, reason and time_us (`runtime.autotune.Trial`).
    """

    id: str
    at: str
    experiment: str
    status: Status
    reason: str = ""
    kernel: KernelRef
    problem: dict[str, Any]
    tiling: dict[str, Any] | None = None
    device: str
    time_us: Times | None = None
    host_us: float | None = None
    limits: RunLimits | None = None
    error: Error | None = None
    resources: dict[str, Any] | None = None
    method: str | None = None
    environment: dict[str, Any] = Field(default_factory=dict)
    source: Source
    code: dict[str, Any] | None = None
    key: str | None = None
    requested: str | dict[str, Any] | None = None
    mode: str | None = None
    picked_by: str | None = None
    flops: int | None = None
    bytes: int | None = None
    launches: int | None = None
    plan_us: float | None = None
    cross_check_us: float | None = None
    overlap_us: float | None = None
    model_us: float | None = None
    with_schedule_us: Times | None = None
    beside_us: dict[str, Times] | None = None
    timeline: list[Span] | None = None
    seconds: dict[str, float] | None = None
    compile_seconds: float | None = None
    warnings: list[str] | None = None
    tuning: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Record:
        if self.time_us is not None and self.status != "passed":
            raise ValueError(f"a record that is {self.status} cannot have a time")
        if self.host_us is not None and self.time_us is None:
            raise ValueError("host_us stands beside time_us only")
        if self.status == "passed" and self.error is None:
            raise ValueError("a passed record needs the error that its check found")
        if self.status not in ("passed", "compiled") and not self.reason:
            raise ValueError(f"a record that is {self.status} needs a reason")
        try:
            problem = problem_from_record(self.problem)
        except UserError as error:
            raise ValueError(str(error)) from error
        missing = problem.to_record().keys() - self.problem.keys()
        if missing:
            raise ValueError(f"problem lacks {', '.join(sorted(missing))}")
        self.problem = problem.to_record()  # one form for old records and new ones, so that they compare
        return self

    def median(self, state: str) -> float | None:
        """Microseconds of a call in a state, burst or sustained; None where it was not timed."""
        stats = getattr(self.time_us, state, None)
        return None if stats is None else float(stats.median)

    def in_a_step(self, state: str) -> float | None:
        """Microseconds of a call with its share of what the calls of a step make once; None where it was not timed."""
        call, scheduled = self.median(state), self.scheduled(state)
        return None if call is None or scheduled is None else call + max(scheduled - call, 0.0) / LAYERS

    def scheduled(self, state: str) -> float | None:
        """Microseconds of a call that makes its own schedule; of most kernels, of any call."""
        stats = getattr(self.with_schedule_us, state, None)
        return self.median(state) if stats is None else float(stats.median)

    @property
    def run(self) -> str:
        """What records have in common whose contenders took turns: limits are measured beside them, and no two
        measurements agree to the last digit. Empty where none were."""
        if self.limits is None:
            return ""
        return hashlib.sha256(self.limits.model_dump_json(exclude={"age_s"}).encode()).hexdigest()[:8]

    def limit(self, state: str) -> float | None:
        """Microseconds that the hardware needs at least, measured in the same run; None where it was not."""
        limits = getattr(self.limits, state, None)
        return float(limits.limit_us) if limits is not None and 0 < limits.limit_us < math.inf else None

    def of_limit(self, state: str) -> float | None:
        """The limit over the time: 1 is as fast as the hardware allows."""
        limit, us = self.limit(state), self.median(state)
        return None if limit is None or us is None else limit / us

    def speedup(self, other: Record, state: str) -> float | None:
        """The other record's time over this one's, both as in a step: above 1 where this one is faster."""
        mine, others = self.in_a_step(state), other.in_a_step(state)
        return None if mine is None or others is None else others / mine

    def limit_speedup(self, other: Record, state: str) -> float | None:
        """As `speedup`, each time as a share of the limit of its own run: of one run that is the same, and of two cards
        it compares how near each came to what its card can do. Without the limits, `speedup`."""
        plain, mine, others = self.speedup(other, state), self.limit(state), other.limit(state)
        if plain is None or mine is None or others is None or self.run == other.run:
            return plain
        return plain * mine / others

    def beside(self, part: str, state: str) -> float | None:
        """Microseconds of a part of the call by itself; None where it was not timed."""
        stats = getattr((self.beside_us or {}).get(part), state, None)
        return None if stats is None else float(stats.median)

    def work(self) -> tuple[int, int]:
        """(FLOPs, minimal bytes) of one call; see `work_of`."""
        return work_of(self.flops, self.bytes, self.problem)

    @property
    def problem_label(self) -> str:
        return problem_from_record(self.problem).label

    def to_json(self) -> str:
        """One line, without the optional fields that are not set."""
        return self.model_dump_json(exclude_unset=True)


def work_of(flops: int | None, bytes_: int | None, problem: Mapping[str, Any]) -> tuple[int, int]:
    """(FLOPs, minimal bytes) of one call: as recorded, else of the problem."""
    if flops is not None and bytes_ is not None:
        return flops, bytes_
    cost = problem_from_record(problem).cost()
    return cost.flops, cost.bytes


#: Bytes of a machine instruction, of every architecture since Volta.
_INSTRUCTION = 16


def code_bytes(resources: Mapping[str, Any] | None) -> int | None:
    """Bytes of machine code of the kernel that resources are of: as recorded, of older records by the number of its
    instructions; None where neither is known."""
    known = resources or {}
    total = (known.get("instructions") or {}).get("total")
    found = known.get("code_bytes", None if total is None else _INSTRUCTION * total)
    return None if found is None else int(found)


def as_ratio(ratio: float | None, digits: int = 3) -> str:
    """A ratio of times as every table writes it: with so many significant digits, and with more where it is under 1 and
    would else read as 1. What differs from 1 by less than a millionth is 1: no measurement tells it apart."""
    if ratio is None or not 0 < ratio < math.inf:
        return "-"
    ratio = 1.0 if abs(ratio - 1.0) < 1e-6 else ratio
    decimals = max(0, digits - 1 - math.floor(math.log10(ratio)))
    text = f"{ratio:.{decimals}f}"
    while ratio < 1 <= float(text):
        decimals += 1
        text = f"{ratio:.{decimals}f}"
    return text


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """None of no ratios."""
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None


def new_id() -> str:
    """A fresh record id, 12 hex digits."""
    return uuid.uuid4().hex[:12]


def now() -> str:
    """The current UTC time as ISO 8601 with seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def record_key(
    kernel: Mapping[str, Any],
    problem: Mapping[str, Any],
    tiling: str | Mapping[str, Any],
    device: str,
    source_hash: str,
    mode: str = "time",
) -> str:
    """Names a point before it is measured: the same point, asked for again, has the same key.

    kernel, problem: their record forms. tiling: "default", "tuned" or the fields asked for. device: a key, or "cpu".
    source_hash: of the version's files, so an edited kernel is a new point. mode: time, check or compile.
    """
    knobs = tiling if isinstance(tiling, str) else dict(tiling)
    parts = [dict(kernel), dict(problem), knobs, device, source_hash, mode]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def finished_keys(records: Iterable[Record], *, retry: Iterable[str] = ("failed",)) -> set[str]:
    """Keys of the points that need no second run; those whose status is in `retry` do."""
    again = set(retry)
    return {r.key for r in records if r.key is not None and r.status not in again}


# ---------------------------------------------------------------- writing
class NotStored(UserError):
    """A record could not be appended. Its text says how many the file holds, counted when it is asked for."""

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = Path(path), why

    def __str__(self) -> str:
        try:
            held = self.path.read_bytes().count(b"\n") if self.path.is_file() else 0
        except OSError:
            held = 0
        return (
            f"cannot append a record to {self.path}: {self.why}; the file holds {held} records. "
            "Make room or give another folder for records, and run again with resume=true."
        )


class RecordStore:
    """Appends records to one file. Several processes may append to the same file."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def append(self, record: Record) -> None:
        """Writes one line and waits until it is on the disk.

        Raises `NotStored` when the file cannot be written, a full disk among the causes; what was there stays whole.
        """
        line = record.to_json().encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self.path.exists()
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                with contextlib.suppress(OSError):  # a file system without locks still appends
                    fcntl.flock(fd, fcntl.LOCK_EX)
                _append(fd, line)
            finally:
                os.close(fd)
            if is_new:
                _sync_folder(self.path.parent)
        except OSError as error:
            raise NotStored(self.path, cause(error)) from error


def _append(fd: int, line: bytes) -> None:
    """Appends whole or not at all, on a line of its own."""
    size = os.fstat(fd).st_size
    torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
    data = b"\n" + line if torn else line
    try:
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
        raise


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


# ---------------------------------------------------------------- reading
@dataclass
class LoadResult:
    """records: in file order. problems: one sentence for each line that was skipped, beginning with file:line."""

    records: list[Record] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def load(paths: Path | str | Iterable[Path | str]) -> LoadResult:
    """Reads record files; a folder stands for every .jsonl file in it, at any depth.

    A line that is no record is reported as `file:line: why` and skipped. A path that does not exist is a `UserError`.
    """
    result = LoadResult()
    for path in _files([paths] if isinstance(paths, Path | str) else paths):
        _load_file(path, result)
    return result


def _files(paths: Iterable[Path | str]) -> list[Path]:
    found: list[Path] = []
    for item in paths:
        path = Path(item)
        if path.is_dir():
            found += sorted(path.rglob("*.jsonl"))
        elif path.exists():
            found.append(path)
        else:
            raise UserError(f"there are no records at {path}: give a .jsonl file or a folder of them.")
    return list(dict.fromkeys(found))


def _load_file(path: Path, result: LoadResult) -> None:
    data = read_bytes(path)
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            result.records.append(Record.model_validate_json(line))
        except ValidationError as error:
            torn = number == len(lines) and not data.endswith(b"\n")
            why = "the line is torn: its writer was stopped before the end" if torn else _why(error)
            result.problems.append(f"{path}:{number}: {why}; skipped.")


def _why(error: ValidationError) -> str:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return "not JSON, or torn by a stopped writer"
    where = ".".join(str(part) for part in first["loc"])
    return f"not a record: {where + ': ' if where else ''}{first['msg']}"


def to_frame(records: Iterable[Record]) -> pd.DataFrame:
    """A table with one row a record and flat columns: nested names joined by `_` (`time_us_burst_median`,
    `kernel_language`, `problem_b`). Lists become JSON text. Derived columns: `label`, `problem_label`, `code_bytes` of
    the main kernel, and for each state `ratio_<state>` (time over limit), `tflops_<state>` and `gbps_<state>`.
    """
    import pandas as pd

    return pd.DataFrame([_row(record) for record in records])


def _row(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = {"label": record.kernel.label, "problem_label": record.problem_label}
    data = record.model_dump()
    # A tiling has other fields in every version: one column that can be compared, and one for each field.
    row["tiling"] = json.dumps(record.tiling, sort_keys=True) if record.tiling is not None else None
    if isinstance(data["requested"], dict):
        data["requested"] = json.dumps(data["requested"], sort_keys=True)
    if isinstance(data["problem"].get("lengths"), dict):
        data["problem"]["lengths"] = json.dumps(data["problem"]["lengths"], sort_keys=True)
    row.update(_flat("", data))
    row["code_bytes"] = code_bytes(record.resources)
    for state in STATES:
        stats = getattr(record.time_us, state, None) if record.time_us else None
        share = record.of_limit(state)
        row[f"ratio_{state}"] = None if share is None else 1.0 / share
        row[f"tflops_{state}"] = record.flops / stats.median / 1e6 if stats and record.flops is not None else None
        row[f"gbps_{state}"] = record.bytes / stats.median / 1e3 if stats and record.bytes is not None else None
    return row


def _flat(prefix: str, value: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            flat.update(_flat(f"{prefix}{name}_", item))
        else:
            flat[prefix + name] = json.dumps(item) if isinstance(item, list | tuple) else item
    return flat
