"""Compilations of versions as plain data, for worker processes (`mla_var3.toolchain.pool`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_var3.device import Device
from mla_var3.kernel.registry import KernelId, get_plan
from mla_var3.names import kernel_label
from mla_var3.toolchain import pool
from mla_var3.toolchain.compiled import CompiledKernel
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
    """Compiles one job in this process; raises what the version raises."""
    plan_type = get_plan(KernelId(job.language, job.layer, job.design, job.version))
    device = Device.get(job.device)
    tiling = None if job.tiling is None else plan_type.tiling_type.from_record(job.tiling)
    plan = plan_type(problem_from_record(job.problem), tiling, device)
    plan.require()
    out_dir = None if job.out_dir is None else Path(job.out_dir)
    return plan.plan_empty().compile(out_dir, device, keep=job.keep)


def compile_all(
    jobs: Sequence[CompileJob], workers: int | None = None, progress: bool = True
) -> list[pool.CompileResult]:
    """Runs the jobs in worker processes, by default one a core, and returns their results in the jobs' order."""
    return pool.compile_many(jobs, workers, progress, run=run_job)
