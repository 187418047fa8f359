"""The process that measures cells: `python -m mla_var3.measure.worker JOB.json OUT.jsonl`.

It says what it is about to do before it does it, so that whoever started it (`mla_var3.measure.cell`) knows whose
fault a crash or a hang is. One JSON object a line in OUT.jsonl:

    {"event": "phase", "slot": 3, "phase": "check", "limit_s": 240}    about to begin; slot null: nobody's in particular
    {"event": "environment", "fields": {...}}
    {"event": "info", "slot": 3, "fields": {...}}      found on the way (resources, tiling, error): kept if it dies
    {"event": "result", "slot": 3, "fields": {"status": ..., ...}}     this contender is finished
    {"event": "fatal", "reason": "..."}                nothing can be measured here; a user's mistake
    {"event": "poisoned"}                              the device context is gone; start me again for the others
    {"event": "done"}

JOB.json: {"settings", "device": key | null, "parent": pid, "cells": [{"problem", "sets", "set_bytes", "contenders":
[{"slot", "kernel", "tiling", "tune", "plan", "carry"}]}]}. `carry` is what earlier `info` events of that slot said.

No record is made here and nothing above `bench` is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue import registry
from mla_var3.errors import Infeasible, Unsupported, UserError
from mla_var3.measure import environment, timing
from mla_var3.measure.calibrate import LimitItems
from mla_var3.measure.cuda_backend import make_backend
from mla_var3.measure.settings import BenchSettings, from_record
from mla_var3.toolchain import mistakes
from mla_var3.toolchain.aot import CompileCache
from mla_var3.workload import Problem, problem_from_record

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.measure.timing import Backend, Item
    from mla_var3.runtime.plan import KernelPlan

EXIT_POISONED = 3
_PR_SET_PDEATHSIG = 1

#: What `info` events say that belongs in the record of a contender however it ends.
KEPT = ("tiling", "resources", "compile_seconds", "code", "error", "warnings", "tuning")
TIMED = ("host_us", "launches", "plan_us", "cross_check_us", "overlap_us", "with_schedule_us", "beside_us", "timeline")


class Stop(Exception):
    """Ends one contender with a status and a reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Poisoned(Exception):
    """Nothing more can run in this process."""


class Channel:
    """Writes events, each a whole line and unbuffered, so that a crash loses none."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def emit(self, event: str, **fields: Any) -> None:
        data = (json.dumps({"event": event, **fields}, default=str) + "\n").encode()
        while data:
            data = data[os.write(self._fd, data) :]


@dataclass
class Contender:
    """One version in one cell, on its way."""

    slot: int
    spec: Mapping[str, Any]
    carry: dict[str, Any]
    plan: Any = None
    calls: list[Any] = field(default_factory=list)
    item: Item | None = None
    with_schedule: Item | None = None
    beside: dict[str, Item] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    phase: str = "plan"
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def items(self) -> list[Item]:
        """What is timed of it."""
        return [x for x in (self.item, self.with_schedule, *self.beside.values()) if x is not None]

    def drop(self) -> None:
        """Lets go of what is timed, with its graphs and tensors."""
        self.item = self.with_schedule = None
        self.beside.clear()
        self.calls.clear()


class Worker:
    """Runs a job's cells one after the other."""

    def __init__(self, job: Mapping[str, Any], channel: Channel) -> None:
        self.job = job
        self.channel = channel
        self.settings: BenchSettings = from_record(job["settings"])
        self.backend: Backend
        self.device: Device | None = None
        self.limits: LimitItems | None = None
        self._compiled: dict[Any, CompileCache] = {}
        self._resources: dict[Any, dict[str, Any]] = {}

    # ------------------------------------------------------------ phases
    @contextlib.contextmanager
    def phase(self, contender: Contender | None, name: str) -> Iterator[None]:
        """Announces a phase, and takes its time."""
        slot = None if contender is None else contender.slot
        self.channel.emit("phase", slot=slot, phase=name, limit_s=self.settings.limit_s(name))
        if contender is not None:
            contender.phase = name
        start = time.monotonic()
        try:
            yield
        finally:
            if contender is not None:
                contender.seconds[name] = round(contender.seconds.get(name, 0.0) + time.monotonic() - start, 3)

    def info(self, contender: Contender, **fields: Any) -> None:
        contender.carry.update(fields)
        self.channel.emit("info", slot=contender.slot, fields=fields)

    def finish(self, contender: Contender, status: str, reason: str = "", **fields: Any) -> None:
        found: dict[str, Any] = {k: contender.carry[k] for k in KEPT if k in contender.carry}
        found |= {**contender.facts, **fields, "seconds": contender.seconds, "status": status, "reason": reason}
        if "time_us" not in found:  # what was timed on the way counts only beside a time
            for name in TIMED:
                found.pop(name, None)
        self.channel.emit("result", slot=contender.slot, fields=found)

    # ------------------------------------------------------------ the job
    def run(self) -> None:
        with self.phase(None, "startup"):
            self._start()
        for cell in self.job["cells"]:
            self._cell(cell)
        self.channel.emit("done")

    def _start(self) -> None:
        from mla_var3.device import Device

        key, mode = self.job["device"], self.settings.mode
        if mode == "compile":
            self.device = Device.get(key) if key is not None else None
            self.backend = make_backend("auto", False) if self.settings.backend == "auto" else self._backend(False)
        else:
            self.backend = self._backend(key is not None)
            if key is not None and self.settings.backend == "auto":
                self.device = self._detected(key)
            elif key is not None:
                self.device = Device.get(key)
        on_gpu = self.backend.torch_device.startswith("cuda")
        self.channel.emit("environment", fields=environment.describe(gpu=on_gpu))
        if mode == "time" and self.backend.times:
            costs = [problem_from_record(cell["problem"]).cost() for cell in self.job["cells"]]
            self.limits = LimitItems(self.backend, self.settings, costs)

    def _backend(self, on_gpu: bool) -> Backend:
        return make_backend(self.settings.backend, on_gpu)

    def _detected(self, key: str) -> Device:
        from mla_var3.device import Device

        device = Device.detect()
        if device is None:
            raise UserError(f"there is no GPU here to measure {key} on: use mode compile, or a machine with one.")
        if device.key != key:
            raise UserError(f"the GPU here is {device.key} ({device.name}), not {key}: ask for device {device.key}.")
        return device

    def _cell(self, cell: Mapping[str, Any]) -> None:
        problem = problem_from_record(cell["problem"])
        ready: list[Contender] = []
        inputs = _Inputs(self.backend, self.settings, cell)
        contenders = []
        for spec in cell["contenders"]:
            carry = dict(spec.get("carry") or {})
            contenders.append(Contender(spec["slot"], spec, carry, seconds=dict(carry.get("seconds", {}))))
        for contender in contenders:
            with self._guarded(contender):
                if self._examine(contender, problem, inputs):
                    ready.append(contender)
        if self.limits is not None:
            self._time(ready, inputs)
        # Graphs and tensors of this cell must be gone before the next one allocates.
        for contender in contenders:
            contender.drop()
            contender.plan = None
        inputs.clear()
        self.backend.release()

    @contextlib.contextmanager
    def _guarded(self, contender: Contender) -> Iterator[None]:
        """Makes an exception the contender's result; ends the process when the device did not survive it."""
        try:
            yield
        except Exception as error:
            self._lost(contender, error)

    def _lost(self, contender: Contender, error: Exception) -> None:
        status, reason = _verdict(error, contender.phase)
        self.finish(contender, status, reason)
        if not isinstance(error, Stop) and self.backend.broken():
            raise Poisoned from error

    # ------------------------------------------------------------ one contender, up to its check
    def _examine(self, contender: Contender, problem: Problem, inputs: _Inputs) -> bool:
        """Plan, tune, compile, check. True when the contender may be timed; results of the others are emitted."""
        spec, carry, settings = contender.spec, contender.carry, self.settings
        language = spec["kernel"]["language"]
        with self.phase(contender, "plan"):
            self._plan(contender, problem)
        if settings.mode != "compile" and self.backend.torch_device == "cpu" and _only_on_gpu(language):
            raise Stop("skipped", f"{language} kernels do not run on a CPU; compile this one, or check it on a GPU")
        if spec.get("tune") and "tuning" not in carry and settings.mode != "compile":
            with self.phase(contender, "tune"):
                self._tune(contender, inputs)
        contender.facts.update(dict(zip(("flops", "bytes"), contender.plan.algorithmic_flops_bytes(), strict=True)))
        wants_resources = settings.resources or settings.mode == "compile"
        if self.device is not None and wants_resources and _compiled(language) and "resources" not in carry:
            with self.phase(contender, "compile"):
                self._compile(contender, problem)
        elif self.device is not None and not _compiled(language) and "code" not in carry:
            code = contender.plan.plan_empty().code(self.device)
            if code is not None:
                self.info(contender, code=code.to_record())
        if settings.mode == "compile":
            if not _compiled(language):
                raise Stop("skipped", f"{language} has no kernel of its own to compile")
            self.finish(contender, "compiled")
            return False
        if not carry.get("checked"):
            with self.phase(contender, "check"):
                self._check(contender)
            self.info(contender, checked=True, seconds=contender.seconds)
        if self.limits is None:
            self.finish(contender, "passed")
            return False
        return True

    def _plan(self, contender: Contender, problem: Problem) -> None:
        spec, carry = contender.spec, contender.carry
        plan_cls = _plan_class(spec)
        # Plans of one problem class share what is compiled: check, timing and later cells compile nothing again.
        key = (json.dumps(spec["kernel"], sort_keys=True), spec.get("plan"), problem.problem_class())
        plan: KernelPlan = plan_cls(problem, None, self.device)
        plan.compiled = self._compiled.setdefault(key, CompileCache())
        fields = carry.get("tiling") or spec.get("tiling")
        if fields:
            tiling = plan.tiling.from_record({**plan.tiling.to_record(), **fields})
            plan = plan.with_tiling(tiling)
        contender.plan = plan
        if not spec.get("tune"):
            self._feasible(contender)
        else:
            plan.supported().require(Unsupported)

    def _feasible(self, contender: Contender) -> None:
        plan = contender.plan
        self.info(contender, tiling=plan.tiling.to_record())
        plan.feasible().require(Infeasible)
        plan.supported().require(Unsupported)

    def _tune(self, contender: Contender, inputs: _Inputs) -> None:
        from mla_var3.runtime.autotune import autotune

        sets = inputs.of(contender.plan)
        cache = Path(self.settings.tune_cache) if self.settings.tune_cache else None

        def measure(kernel: Any) -> float:
            calls = [kernel, *(kernel.bind(*other) for other in sets[1:])]
            return timing.median_us(self.backend, calls, graph=contender.plan.graph_capturable)

        kernel = contender.plan.plan(*sets[0])
        # Not by cuTile's own search: it repeats one input set, and cannot time a tiling that splits.
        result = autotune(kernel, measure, budget_s=self.settings.tune_budget_s, cache_dir=cache, progress=False)
        trials = [asdict(trial) for trial in result.trials]
        tuning = {"from_cache": result.from_cache, "tried": len(trials), "trials": trials}
        self.info(contender, tuning=tuning, tiling=result.best.to_record())
        contender.plan = contender.plan.with_tiling(result.best)
        self._feasible(contender)

    def _compile(self, contender: Contender, problem: Problem) -> None:
        assert self.device is not None
        tiling = contender.plan.tiling
        key = (json.dumps(contender.spec["kernel"]), contender.spec.get("plan"), problem, tiling)
        found = self._resources.get(key)
        if found is None:
            try:
                compiled = contender.plan.plan_empty().compile(None, self.device)
            except (Infeasible, Unsupported):
                raise
            except UserError as error:
                if self.settings.mode == "compile":
                    raise
                # A compiler that is missing on this machine does not make the kernel wrong.
                self.info(contender, warnings=[f"not compiled for its resources: {error}"])
                return
            found = self._resources[key] = compiled.outcome()
        self.info(contender, **found)
        smem, room = found["resources"]["smem"], self.device.smem_per_block
        if smem > room:
            raise Stop("infeasible", f"takes {smem} bytes of shared memory a block; {self.device.key} has {room}")

    def _check(self, contender: Contender) -> None:
        plan = contender.plan
        report = self.backend.check(plan, self.device, self.settings.quick_check)
        self.backend.synchronize()
        self.info(contender, error=dict(report.error))
        if not report.ok:
            raise Stop("incorrect", report.reason or "the check failed")

    # ------------------------------------------------------------ timing
    def _time(self, ready: list[Contender], inputs: _Inputs) -> None:
        assert self.limits is not None
        self.backend.release()  # what the checks left
        self._each(ready, lambda contender: self._prepare(contender, inputs))
        probed = [item for contender in ready for item in contender.items if item.bound]
        if any(item.overlap_us for item in probed):
            gap_us = min(item.gap_us for item in probed)
            self._each(ready, lambda contender: timing.take_apart(self.backend, contender.items, gap_us))
        if not ready:
            return
        owners = {id(item): contender for contender in ready for item in contender.items}
        timed = [item for contender in ready for item in contender.items]
        age_s = self.limits.age_s()
        fresh = age_s is None or age_s >= self.settings.limits_every_s
        if fresh:
            self.limits.reset()
        items = [*(self.limits.items if fresh else ()), *timed]

        def announce(item: Item, state: str, number: int) -> None:
            owner = owners.get(id(item))
            slot = None if owner is None else owner.slot
            if owner is not None:
                owner.phase = "time"
            limit = self.settings.limit_s("time")
            self.channel.emit("phase", slot=slot, phase="time", limit_s=limit, detail=f"{state} {number}")

        def failed(item: Item, error: Exception) -> None:
            owner = owners.get(id(item))
            if owner is None:
                raise error
            if owner in ready:
                ready.remove(owner)
                self._lost(owner, error)

        start = time.monotonic()
        timing.take_turns(self.backend, items, self.settings, announce, failed)
        shared = round((time.monotonic() - start) / max(1, len(items)), 3)
        if fresh:
            self.limits.measured()
        for contender in list(ready):
            contender.seconds["time"] = shared
            with self._guarded(contender):
                self._timed(contender, inputs, 0.0 if fresh else age_s or 0.0)

    def _each(self, ready: list[Contender], step: Callable[[Contender], None]) -> None:
        """A step before the timing, for every contender; those that it loses are out."""
        for contender in list(ready):
            lost = True
            with self._guarded(contender):
                with self.phase(contender, "prepare"):
                    step(contender)
                lost = False
            if lost:
                contender.drop()
                ready.remove(contender)

    def _prepare(self, contender: Contender, inputs: _Inputs) -> None:
        from mla_var3.measure.buffers import Shared

        plan = contender.plan
        sets = inputs.of(plan)
        shared = Shared(lambda: plan.plan(*sets[0]))
        first = shared.first
        first()  # compiles; what follows binds only
        self.backend.synchronize()
        contender.calls.append(first.sharing())
        planning = []
        for other in sets[1:]:
            start = time.perf_counter_ns()
            bound = shared.bind(*other)
            self.backend.synchronize()
            planning.append((time.perf_counter_ns() - start) / 1e3)
            contender.calls.append(bound.sharing())
        if planning:
            contender.facts["plan_us"] = timing.percentile(planning, 0.5)
        contender.item = timing.prepare(
            self.backend, str(contender.slot), contender.calls, self.settings, graph=bool(plan.graph_capturable)
        )
        if plan.graph_capturable and (again := [x for c in contender.calls if (x := c.with_schedule) is not None]):
            contender.with_schedule = timing.prepare(self.backend, f"{contender.slot} scheduled", again, self.settings)
        for name in first.beside if plan.graph_capturable else ():
            parts = [call.beside[name] for call in contender.calls]
            contender.beside[name] = timing.prepare(self.backend, f"{contender.slot} {name}", parts, self.settings)
        contender.facts["host_us"] = timing.host_us(self.backend, first, self.settings.host_calls)
        launches = self.backend.launches(first) if plan.graph_capturable else None
        if launches is not None:
            contender.facts["launches"] = launches

    def _timed(self, contender: Contender, inputs: _Inputs, limits_age_s: float) -> None:
        item, plan, settings = contender.item, contender.plan, self.settings
        assert item is not None and self.limits is not None
        facts = contender.facts
        if settings.cross_check_ms and plan.graph_capturable:
            limit = settings.limit_s("time")
            self.channel.emit("phase", slot=contender.slot, phase="time", limit_s=limit, detail="cross-check")
            self.backend.idle(settings.idle_ms / 1e3)
            cross = self.backend.cross_check_us(contender.calls, settings.cross_check_ms)
            if cross is not None:
                facts["cross_check_us"] = cross
        if item.overlap_us:
            facts["overlap_us"] = item.overlap_us
        if contender.with_schedule is not None:
            facts["with_schedule_us"] = contender.with_schedule.stats()
        if contender.beside:
            facts["beside_us"] = {name: part.stats() for name, part in contender.beside.items()}
        if settings.timeline and plan.graph_capturable and (spans := self.backend.timeline(contender.calls)):
            facts["timeline"] = [{"name": name, "us": round(us, 3)} for name, us in spans]
        sensors = item.sensors()
        self.finish(
            contender,
            "passed",
            time_us=item.stats(),
            limits=self.limits.to_record(plan.problem.cost(), limits_age_s),
            method=timing.method_text(
                item,
                inputs.count,
                inputs.set_bytes,
                settings,
                graph=bool(plan.graph_capturable),
                clock=self.backend.clock,
                limits_age_s=limits_age_s,
                limits=self.limits.words,
            ),
            readings=environment.by_quantity(sensors),
        )


class _Inputs:
    """The input sets of a cell, made once for every way of making them and shared by the contenders."""

    def __init__(self, backend: Backend, settings: BenchSettings, cell: Mapping[str, Any]) -> None:
        self.count = int(cell.get("sets", 1))
        self.set_bytes = int(cell.get("set_bytes", 0))
        self._backend = backend
        self._settings = settings
        self._made: dict[Any, list[Any]] = {}

    def of(self, plan: Any) -> list[Any]:
        options = {"dist": self._settings.dist, "poison": False, **getattr(plan, "input_options", {})}
        key = (type(plan).prepare_inputs, tuple(sorted(options.items())))
        if key not in self._made:
            seeds = range(self._settings.seed, self._settings.seed + self.count)
            device = self._backend.torch_device
            self._made[key] = [plan.prepare_inputs(device, seed=seed, **options) for seed in seeds]
        return self._made[key]

    def clear(self) -> None:
        self._made.clear()


def _compiled(language: str) -> bool:
    return language not in registry.LANGUAGES or registry.is_compiled(language)


def _only_on_gpu(language: str) -> bool:
    known = registry.LANGUAGES.get(language)
    return known is not None and known.interpreter is None


def _plan_class(spec: Mapping[str, Any]) -> Any:
    """The plan class of a contender. A language that is not installed skips it."""
    if spec.get("plan"):
        module, _, name = str(spec["plan"]).partition(":")
        return getattr(import_module(module), name)
    kernel = registry.KernelId(**spec["kernel"])
    if kernel.language in registry.LANGUAGES:
        reason = registry.missing(kernel.language)
        if reason:
            raise Stop("skipped", reason)
    return registry.get_plan(kernel)


def _verdict(error: Exception, phase: str) -> tuple[str, str]:
    """The status and the sentence that an exception in a phase comes to."""
    if isinstance(error, Stop):
        return error.status, error.reason
    if isinstance(error, Infeasible):
        return "infeasible", str(error)
    if isinstance(error, Unsupported):
        return "skipped", str(error)
    if isinstance(error, UserError):
        return "failed", f"{phase}: {error}"
    notes = "; ".join(getattr(error, "__notes__", []))
    text = " ".join(str(error).split())[:600]
    if type(error).__name__ == "OutOfMemoryError":
        return "skipped", f"{phase}: the device's memory is not enough: {text}"
    where = f" ({notes})" if notes else ""
    mistake = mistakes.mistake_of(error)
    return "failed", f"{phase}: {mistake.sentence if mistake else f'{type(error).__name__}: {text}'}{where}"


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies: a measurement that nobody waits for must not run on."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """Runs JOB.json, writing OUT.jsonl. 0: every contender has its result. EXIT_POISONED: it must start again."""
    job_path, out_path = arguments
    job = json.loads(Path(job_path).read_text())
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    _die_with(int(job["parent"]))
    channel = Channel(out_path)
    try:
        Worker(job, channel).run()
    except Poisoned:
        channel.emit("poisoned")
        os._exit(EXIT_POISONED)  # no destructor may touch the device again
    except UserError as error:
        channel.emit("fatal", reason=str(error))
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
