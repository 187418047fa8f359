"""The process that a profiler watches: `python -m mla_var3.lab.profiling.target JOB.json`.

Plans one version, warms it up, and calls it between cudaProfilerStart and cudaProfilerStop, so that a profiler which
waits for these (`ncu --profile-from-start off`, `nsys --capture-range=cudaProfilerApi`) sees the wanted calls alone.

JOB.json: {"kernel", "problem", "tiling": record | null, "calls", "warmup", "seed"}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import EXIT_USER_ERROR, UserError

if TYPE_CHECKING:
    from mla_var3.runtime.plan import KernelPlan


def inputs_of(plan: Any, seed: int = 0) -> tuple[Any, ...]:
    """Inputs as the benchmark makes them: random data, no padding rows of NaN."""
    options = {"dist": "normal", "poison": False, **getattr(plan, "input_options", {})}
    made: tuple[Any, ...] = plan.prepare_inputs("cuda", seed=seed, **options)
    return made


def plan_of(job: Mapping[str, Any], process: str) -> KernelPlan:
    """The plan that a job names, for the GPU that is here. process: the word for this process in a refusal.

    Raises `UserError` where there is no GPU or the version does not take the problem.
    """
    from mla_var3.catalogue.registry import KernelId, get_plan
    from mla_var3.device import Device
    from mla_var3.workload import problem_from_record

    device = Device.detect()
    if device is None:
        raise UserError(f"the {process} process sees no GPU.")
    plan_type = get_plan(KernelId(**job["kernel"]))
    tiling = None if job.get("tiling") is None else plan_type.tiling_type.from_record(job["tiling"])
    plan = plan_type(problem_from_record(job["problem"]), tiling, device)
    plan.require()
    return plan


def run(job: Mapping[str, Any]) -> None:
    """Does what the job says; raises `UserError` where there is no GPU or the version does not take the problem."""
    import torch

    plan = plan_of(job, "profiled")
    kernel = plan.plan(*inputs_of(plan, int(job.get("seed", 0))))
    for _ in range(int(job.get("warmup", 3))):
        kernel.launch()
    torch.cuda.synchronize()
    cudart = torch.cuda.cudart()
    cudart.cudaProfilerStart()
    for _ in range(int(job.get("calls", 1))):
        # Not __call__: what a peer converts for its reader is no part of the kernel.
        kernel.launch()
    torch.cuda.synchronize()
    cudart.cudaProfilerStop()


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) != 1:
        print("usage: python -m mla_var3.lab.profiling.target JOB.json", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        run(json.loads(Path(words[0]).read_text()))
    except UserError as error:
        print(f"target: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
