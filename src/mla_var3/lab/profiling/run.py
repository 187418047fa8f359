"""Makes one profile, from a request to a folder with `report.md`:
`python -m mla_var3.lab.profiling.run REQUEST.json`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import is_compiled
from mla_var3.errors import EXIT_USER_ERROR, UserError
from mla_var3.lab.profiling import folder as folders
from mla_var3.lab.profiling.facts import Facts
from mla_var3.lab.profiling.modes import tools
from mla_var3.lab.profiling.request import Request
from mla_var3.lab.profiling.roofline import roofline

if TYPE_CHECKING:
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.device import Device
    from mla_var3.runtime.plan import KernelPlan

#: Languages without a binary of ours to look into.
#: Calls on a time axis: enough to see what stands between two of them.
TIMELINE_CALLS = 5
_FILES = {
    "ncu": "ncu.ncu-rep",
    "annotation": "counters.ncu-rep",
    "nsys": "nsys.nsys-rep",
    "timeline": "trace.json",
    "trace": "trace.json",
}


@dataclass(frozen=True)
class Outcome:
    """A finished profile. ran: False when only compiling and counting were possible."""

    folder: Path
    report: str
    facts: tuple[Facts, ...]
    ran: bool


def available(mode: str, device: Device | None) -> None:
    """Raises `UserError` when a mode cannot work here at all; device: the GPU that is here."""
    if device is None and mode != "annotation":
        raise UserError(
            f"profile mode {mode} needs a GPU and there is none here: --mode annotation works without, and says what "
            "compiling and counting can."
        )
    if mode in ("ncu", "nsys"):
        tools.need(mode)


def takes(mode: str, kernel: KernelId) -> None:
    """Raises `UserError` where a mode cannot look into kernels of that language."""
    from mla_var3.lab.profiling.modes import trace

    if mode == "trace" and kernel.language != trace.LANGUAGE:
        raise UserError(
            f"profile mode trace looks into kernels of {trace.LANGUAGE}, and {kernel.label} is none: --mode timeline "
            "shows its kernels from outside, and --mode ncu where their warps wait."
        )


def profile(request: Request, detected: Device | None) -> Outcome:
    """Makes the profile that is asked for; detected: the GPU that is here.

    Raises `UserError` for whatever stands in the way. Only the short counter pass of `annotation` may be missing: the
    report then says why, and has the rest.
    """
    from mla_var3.measure import environment

    device = _device(request, detected)
    runs = detected is not None and detected.key == device.key
    available(request.mode, detected if runs else None)
    for kernel in filter(None, (request.kernel, request.baseline)):
        takes(request.mode, kernel)
    plans = _plans(request, device)
    folder = folders.make(request)
    params: dict[str, Any] = {
        "at": folder.name,
        "request": request.to_record(),
        "device": device.key,
        "ran": runs,
        "status": "running",
        "environment": environment.describe(gpu=runs),
        "source": _sources(plans),
    }
    folders.write_json(folder / "params.json", params)
    found: list[Facts] = []
    try:
        for number, (kernel, (plan, notes)) in enumerate(plans.items()):
            below = folder if number == 0 else folder / "baseline"
            below.mkdir(exist_ok=True)
            facts = Facts(kernel.label, {}, roofline(*plan.algorithmic_flops_bytes(), plan.problem.dtype, device))
            facts.notes += notes
            found.append(facts)
            _one(request, kernel, plan, device, below, facts, runs)
    except BaseException as error:
        params |= {"status": "failed", "reason": str(error) or type(error).__name__}
        raise
    else:
        params["status"] = "done"
    finally:
        params["tiling"] = {facts.label: dict(facts.tiling) for facts in found}
        params["commands"] = {facts.label: [list(words) for words in facts.commands] for facts in found}
        folders.write_json(folder / "params.json", params)
    from mla_var3.lab.profiling.report import render

    text = render(request, device, found, folder, ran=runs, at=folder.name)
    folders.write_json(folder / "facts.json", {"kernels": [facts.to_record() for facts in found]})
    (folder / "report.md").write_text(text)
    return Outcome(folder, text, tuple(found), runs)


def _device(request: Request, detected: Device | None) -> Device:
    from mla_var3.device import Device

    if request.device is not None and (detected is None or detected.key != request.device):
        return Device.get(request.device)
    return detected if detected is not None else Device.get("h200")


def _plans(request: Request, device: Device) -> dict[KernelId, tuple[KernelPlan, list[str]]]:
    """The kernel's plan and its baseline's; a baseline that does not take the problem is a `UserError`."""
    from mla_var3.lab.knobs import knobs, own_knobs

    plans: dict[KernelId, tuple[KernelPlan, list[str]]] = {}
    for kernel in dict.fromkeys([request.kernel, *([request.baseline] if request.baseline is not None else [])]):
        reason = registry.missing(kernel)
        if reason:
            raise UserError(reason)
        plan_type = registry.get_plan(kernel)
        asked = own_knobs(plan_type, request.tiling)
        notes = []
        left = [name for name in request.tiling if name not in asked]
        if left and kernel == request.kernel:
            raise UserError(f"{kernel.label} has no knob {left[0]!r}: leave it out of --tiling.")
        if left:
            notes.append(f"has no knob {', '.join(left)}; its default tiling has the rest")
        tiling = knobs(plan_type(request.problem, None, device).tiling, asked)
        plan = plan_type(request.problem, tiling, device)
        try:
            plan.require()
        except UserError as error:
            if kernel == request.kernel:
                raise
            raise type(error)(f"the baseline {kernel.label} cannot be used: {error} (--baseline none)") from error
        plans[kernel] = (plan, notes)
    return plans


def _sources(plans: Mapping[KernelId, Any]) -> dict[str, Any]:
    from mla_var3.measure import environment

    commit, dirty = environment.git_state()
    hashes = {kernel.label: registry.source_hash(kernel) for kernel in plans}
    return {"commit": commit, "dirty": dirty, "hash": hashes}


# ---------------------------------------------------------------- one kernel
def _one(
    request: Request, kernel: KernelId, plan: KernelPlan, device: Device, folder: Path, facts: Facts, runs: bool
) -> None:
    if request.tune and runs:
        plan = _tuned(plan, folder, facts)
    facts.tiling = plan.tiling.to_record()
    kept = folders.keep_tuning(folder, plan.plan_empty()) if "tuning history" not in facts.files else None
    if kept is not None:
        facts.files["tuning history"] = kept
    _compile(kernel, plan, device, folder, facts)
    if not runs:
        return
    mode = request.mode
    if mode in ("event", "annotation", "timeline", "trace"):
        _in_process(request, plan, folder, facts)
    if mode in ("annotation", "ncu", "nsys"):
        _under_a_tool(request, kernel, plan, folder, facts)


def _tuned(plan: KernelPlan, folder: Path, facts: Facts) -> KernelPlan:
    from dataclasses import asdict

    from mla_var3.lab.profiling.target import inputs_of
    from mla_var3.measure.cuda_backend import CudaBackend
    from mla_var3.measure.timing import median_us
    from mla_var3.runtime.autotune import autotune

    backend = CudaBackend()
    result = autotune(
        plan.plan(*inputs_of(plan)), lambda kernel: median_us(backend, [kernel], graph=plan.graph_capturable)
    )
    trials = [asdict(trial) for trial in result.trials]
    record = {"best": result.best.to_record(), "from_cache": result.from_cache, "trials": trials}
    folders.write_json(folder / "tuning.json", record)
    facts.files["tuning history"] = folder / "tuning.json"
    return plan.with_tiling(result.best)


def _compile(kernel: KernelId, plan: KernelPlan, device: Device, folder: Path, facts: Facts) -> None:
    """Resources and artefacts; a version without a binary of its own, or a machine without its compiler, is noted."""
    if not is_compiled(kernel.language):
        why = "it is made of torch operations" if kernel.language == "torch" else "it comes compiled, with its library"
        facts.notes.append(f"no binary to look into: {why}")
        return
    try:
        facts.compiled = plan.plan_empty().compile(folder / "artefacts", device)
    except (UserError, ImportError) as error:
        missing = f"{error.name} is not installed" if isinstance(error, ImportError) else str(error)
        facts.notes.append(f"no artefacts: {missing}")
        # What a bundle or the cache has of it says the resources, without its compiler.
        with contextlib.suppress(UserError):
            facts.compiled = plan.plan_empty().compile(None, device)
        return
    except Exception as error:
        facts.notes.append(f"no artefacts: compiling failed with {type(error).__name__}: {str(error).splitlines()[:1]}")
        return
    for compiled in facts.compiled.stages or (facts.compiled,):
        for kind, path in compiled.artefacts.items():
            facts.files[f"{kind} of {compiled.name}"] = path


def _in_process(request: Request, plan: KernelPlan, folder: Path, facts: Facts) -> None:
    import torch

    from mla_var3.lab.profiling.modes.event import time_call
    from mla_var3.lab.profiling.target import inputs_of

    inputs = inputs_of(plan)
    kernel = plan.plan(*inputs)
    facts.timing = time_call(kernel)
    if request.mode == "timeline":
        from mla_var3.lab.profiling.modes import timeline

        facts.calls = max(request.launches, TIMELINE_CALLS)
        path = folder / _FILES["timeline"]
        facts.spans = timeline.record(kernel, facts.calls, path)
        facts.files["Chrome trace (open it in Perfetto)"] = path
    if request.mode == "trace":
        from mla_var3.lab.profiling import picture
        from mla_var3.lab.profiling.modes import trace

        facts.trace = trace.record(plan, kernel, inputs)
        facts.notes += facts.trace.notes
        chrome, drawn = folder / _FILES["trace"], folder / picture.FILE
        chrome.write_text(json.dumps(trace.chrome(facts.trace), separators=(",", ":")))
        drawn.write_text(picture.draw(facts.trace))
        facts.files |= {"Chrome trace (open it in Perfetto)": chrome, "picture": drawn}
    del kernel
    torch.cuda.empty_cache()  # the profiled process needs the room


def _under_a_tool(request: Request, kernel: KernelId, plan: KernelPlan, folder: Path, facts: Facts) -> None:
    facts.calls = request.launches
    job = folder / "job.json"
    record = {
        "kernel": kernel.to_record(),
        "problem": plan.problem.to_record(),
        "tiling": plan.tiling.to_record(),
        "calls": request.launches,
        "warmup": 3,
        "seed": 0,
    }
    folders.write_json(job, record)
    facts.files["job of the profiled process"] = job
    report = folder / _FILES[request.mode]
    if request.mode == "nsys":
        from mla_var3.lab.profiling.modes import nsys

        facts.spans, command = nsys.profile(report, job, timeout_s=request.timeout_s)
        facts.commands.append(command)
    else:
        from mla_var3.lab.profiling.modes import ncu

        full = request.mode == "ncu"
        names = request.kernel_name or own_names(kernel, plan)
        try:
            facts.launches, notes, command = ncu.profile(
                report, job, full=full, kernel_name=names, timeout_s=request.timeout_s,
                named=request.kernel_name is not None,
            )  # fmt: skip
        except UserError as error:
            if full:
                raise
            # The rest of an annotation stands without counters.
            facts.notes.append(f"no counters: {tools.without_advice(error)}")
            return
        facts.notes += notes
        facts.commands.append(command)
    facts.files["raw report"] = report


def own_names(kernel: KernelId, plan: KernelPlan) -> str | None:
    """A regular expression of the version's device functions; None for libraries, whose names nobody knows."""
    if not is_compiled(kernel.language):
        return None
    return "|".join(sorted(set(_stage_names(plan.plan_empty()))))


def _stage_names(kernel: Any) -> Iterator[str]:
    stages = getattr(kernel, "stages", ())
    if not stages:
        yield kernel.name
    for stage in stages:
        yield from _stage_names(stage)


# ---------------------------------------------------------------- as a process
def main(argv: Sequence[str] | None = None, tell: Callable[[str], None] = print) -> int:
    """Profiles what the file asks for and prints the folder, last; a mistake is one line and status 2."""
    from mla_var3.device import Device

    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) != 1:
        print("usage: python -m mla_var3.lab.profiling.run REQUEST.json", file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        outcome = profile(Request.from_record(json.loads(Path(words[0]).read_text())), Device.detect())
    except UserError as error:
        print(f"profile: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    tell(str(outcome.folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
