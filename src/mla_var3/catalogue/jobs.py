"""Compilations of versions as plain data, for worker processes (`mla_var3.toolchain.pool`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mla_var3.catalogue.registry import KernelId, get_plan, source_hash
from mla_var3.device import Device
from mla_var3.files import write_whole
from mla_var3.names import kernel_label
from mla_var3.toolchain import aot, pool
from mla_var3.toolchain.compiled import CompiledKernel
from mla_var3.toolchain.versions import toolchain
from mla_var3.workload import problem_from_record


@dataclass(frozen=True)
class CompileJob:
    """What to compile, as plain data. problem and tiling are records; tiling None is the version's default."""

    language: str
    layer: str
    design: str
    version: int
    problem: dict[str, Any] = field(hash=False)
    device: str
    tiling: dict[str, Any] | None = field(default=None, hash=False)
    out_dir: str | None = None
    keep: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        sizes = "_".join(f"{name}{self.problem[name]}" for name in ("b", "s", "h", "t") if name in self.problem)
        return f"{kernel_label(self.language, self.design, self.version)} {sizes}".strip()


def run_job(job: CompileJob) -> CompiledKernel:
    """Compiles one job in this process, unless what it would keep has been kept already; raises what the version
    raises."""
    kernel = KernelId(job.language, job.layer, job.design, job.version)
    plan_type = get_plan(kernel)
    device = Device.get(job.device)
    tiling = None if job.tiling is None else plan_type.tiling_type.from_record(job.tiling)
    plan = plan_type(problem_from_record(job.problem), tiling, device)
    plan.require()
    if job.out_dir is None or not job.keep:
        return plan.plan_empty().compile(None if job.out_dir is None else Path(job.out_dir), device, keep=job.keep)
    note = Path(job.out_dir) / "compiled.json"
    made_of = {
        "source": source_hash(kernel), "toolchain": toolchain(job.language), "problem": job.problem,
        "tiling": plan.tiling.to_record(), "device": job.device, "keep": sorted(job.keep),
    }  # fmt: skip
    kept = _kept(note, made_of)
    if kept is None:
        kept = plan.plan_empty().compile(Path(job.out_dir), device, keep=job.keep)
        artefacts = [{kind: str(path) for kind, path in one.artefacts.items()} for one in (kept, *kept.stages)]
        write_whole(note, json.dumps({"of": made_of, "compiled": aot.to_json(kept), "artefacts": artefacts}))
    return kept


def _kept(note: Path, made_of: dict[str, Any]) -> CompiledKernel | None:
    """What an earlier job of the same source, toolchain, problem and knobs left beside this note, where all of it is
    still there."""
    try:
        said = json.loads(note.read_text(encoding="utf-8"))
        files = [{kind: Path(path) for kind, path in one.items()} for one in said["artefacts"]]
        # Through JSON, as the note went: tuples are lists there.
        if said["of"] != json.loads(json.dumps(made_of)) or not all(p.is_file() for one in files for p in one.values()):
            return None
        whole = aot.from_json(said["compiled"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    stages = tuple(replace(stage, artefacts=own) for stage, own in zip(whole.stages, files[1:], strict=True))
    return replace(whole, artefacts=files[0], stages=stages)


def compile_all(
    jobs: Sequence[CompileJob], workers: int | None = None, progress: bool = True
) -> list[pool.CompileResult]:
    """Runs the jobs in worker processes, by default one a core, and returns their results in the jobs' order."""
    return pool.compile_many(jobs, workers, progress, run=run_job)
