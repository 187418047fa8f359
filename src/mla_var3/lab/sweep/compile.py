"""Compiling a sweep's points for a device that need not be here, and storing each record as it comes.

A worker process stores what it compiled itself, so a stopped sweep keeps everything that was finished. Points that
share a problem class, a tiling and an architecture share one compilation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue import registry
from mla_var3.catalogue.jobs import CompileJob, run_job
from mla_var3.catalogue.registry import is_compiled
from mla_var3.errors import UserError
from mla_var3.lab.sweep.plan import Point
from mla_var3.record import NotStored
from mla_var3.toolchain import mistakes
from mla_var3.toolchain.pool import CompileResult, compile_many

if TYPE_CHECKING:
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.record import Record

#: Longest that one compilation may take.
TIMEOUT_S = 300.0

_STATUS = {"Infeasible": "infeasible", "Unsupported": "skipped"}


@dataclass(frozen=True)
class StoredJob(CompileJob):
    """A compilation, and the records that its outcome becomes: one for each point that shares it. no_loop_spills: code
    that spills in the loop of products is a failure."""

    store: str = ""
    no_loop_spills: bool = False
    forms: tuple[dict[str, Any], ...] = field(default=(), hash=False)


def compile_points(
    points: Sequence[Point],
    path: Path,
    form: Callable[[Point, str], dict[str, Any]],
    *,
    workers: int | None = None,
    no_loop_spills: Collection[KernelId] = (),
    done: Callable[[str], bool] = lambda key: False,
    run: Callable[[Sequence[StoredJob], int | None], list[CompileResult]],
) -> list[Record]:
    """Compiles the runnable points and returns the new records, all of which are in `path`.

    form(point, mode): a record without its outcome. no_loop_spills: versions whose code must not spill in the loop of
    products. done(key): whether a point's record exists already. run: a launcher's `compile`.
    """
    jobs: dict[Any, list[Point]] = {}
    forms: dict[Point, dict[str, Any]] = {}
    for point in points:
        if not point.runnable or not is_compiled(point.kernel.language):
            continue
        forms[point] = form(point, "compile")
        if not done(forms[point]["key"]):
            jobs.setdefault(_sharing(point), []).append(point)
    if not jobs:
        return []
    todo = [_job(group, path, [forms[p] for p in group], group[0].kernel in no_loop_spills) for group in jobs.values()]
    shared = sum(len(group) for group in jobs.values())
    sharing = f" (of {shared} points)" if shared > len(todo) else ""
    print(f"compiling {len(todo)} kernels{sharing}", file=sys.stderr, flush=True)
    records: list[Record] = []
    for result in run(todo, workers):
        records += _outcome(result)
    return records


def compile_here(jobs: Sequence[StoredJob], workers: int | None = None) -> list[CompileResult]:
    """In a pool of processes, which store what they compile."""
    return compile_many(jobs, workers=workers, progress=True, timeout_s=TIMEOUT_S, run=run_and_store)


def _sharing(point: Point) -> Any:
    """What makes two points the same code: with and without a combine it is another, and with rows of another length
    may be; sizes that are arguments of the launch change none."""
    code_class = registry.get_plan(point.kernel).code_class(point.problem)
    return (point.kernel, code_class, point.tiling, point.device.key, _functions(point))


def _functions(point: Point) -> Any:
    try:
        kernel = registry.get_plan(point.kernel)(point.problem, point.tiling, point.device).plan_empty()
    except Exception:
        return point.problem
    return kernel.functions


def _job(group: Sequence[Point], path: Path, forms: Sequence[dict[str, Any]], no_loop_spills: bool) -> StoredJob:
    first = group[0]
    return StoredJob(
        **first.kernel.to_record(),
        problem=first.problem.to_record(),
        device=first.device.key,
        tiling=None if first.tiling is None else first.tiling.to_record(),
        store=str(path),
        no_loop_spills=no_loop_spills,
        forms=tuple(forms),
    )


def run_and_store(job: StoredJob) -> list[Record] | str:
    """In a worker process: compiles, appends the records, and returns them; or why they could not be appended."""
    outcome = outcome_of(job)
    try:
        return store(job, outcome)
    except NotStored as error:
        return error.why


def outcome_of(job: StoredJob) -> dict[str, Any]:
    """Compiles, and returns what a record says of it."""
    start = time.perf_counter()
    try:
        compiled = run_job(job)
    except UserError as error:
        return {"status": _STATUS.get(type(error).__name__, "failed"), "reason": str(error)}
    except Exception as error:
        return {"status": "failed", "reason": f"compiling failed: {mistakes.sentence(error)}"}
    outcome = compiled.outcome()
    seconds = {"compile": round(time.perf_counter() - start, 3)}
    spilled = compiled.resources.spill_loop_bytes
    if job.no_loop_spills and spilled:
        reason = f"spills {spilled:,} bytes in the loop of products, and may spill none there"
        return {"status": "failed", "reason": reason, **outcome, "seconds": seconds}
    return {"status": "compiled", "reason": "", **outcome, "seconds": seconds}


def store(job: StoredJob, outcome: dict[str, Any]) -> list[Record]:
    """Appends the records that an outcome becomes, and returns them; raises `NotStored`."""
    from mla_var3.record import Record, RecordStore, new_id, now

    file = RecordStore(job.store)
    records = [Record.model_validate({**form, "id": new_id(), "at": now(), **outcome}) for form in job.forms]
    for record in records:
        file.append(record)
    return records


def _outcome(result: CompileResult) -> list[Record]:
    if result.ok:
        stored: Any = result.compiled
        if isinstance(stored, str):
            raise NotStored(result.job.store, stored)
        return list(stored)
    if result.error_type in ("Crash", "Timeout"):
        return store(result.job, {"status": "failed", "reason": f"compiling failed: {result.error}"})
    raise UserError(result.error)
