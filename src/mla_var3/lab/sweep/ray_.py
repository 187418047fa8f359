"""Sweeps on a Ray cluster.

An actor holds each GPU and measures whole cells on it (`mla_var3.lab.sweep.hand`); tasks compile, one a CPU, on nodes
without a GPU where there are any. This process alone decides who does what, and whoever asked it stores the records.
So an actor or a node can be lost at any time: what it was at goes whole to another one, and after `TRIES` of them
counts as failed.

Nodes get this package as Ray ships code (`py_modules`); everything else that kernels need is installed there, as it is
here. A node announces its GPUs with a custom resource (`ray start --resources '{"mla_var3_h100": 8}'`), or they
are asked.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3 import paths
from mla_var3.device import Device
from mla_var3.errors import UserError, absent
from mla_var3.lab.sweep.hand import Cell, Hand, host_functions
from mla_var3.lab.sweep.telling import say

if TYPE_CHECKING:
    from mla_var3.lab.sweep.compile import StoredJob
    from mla_var3.measure.settings import BenchSettings
    from mla_var3.record import Record
    from mla_var3.toolchain.pool import CompileResult

#: What a node's custom resource is called, before the key of its device.
ANNOUNCED = "mla_var3_"
#: Actors, or compiler processes, that one cell or job may end.
TRIES = 3
#: Seconds: to reach an address; between looks at the cluster; for GPUs to say what they are; for a GPU to come back.
_REACH_S, _LOOK_S, _ASK_S, PATIENCE_S = 5.0, 2.0, 120.0, 60.0


def connect(*, start: bool) -> Any:
    """The module `ray`, connected to the cluster of Ray's own settings. start: to one of this machine where none runs.

    Raises `UserError` where Ray is missing or its address cannot be reached.
    """
    why = absent("launcher=ray", "ray")
    if why:
        raise UserError(why)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that starts here
    import ray

    if ray.is_initialized():
        return ray
    address = os.environ.get("RAY_ADDRESS", "")
    if ":" in address:
        _reach(address)  # Ray tries for minutes, and then ends the process
    options: dict[str, Any] = {"runtime_env": {"py_modules": [str(paths.package())]}} if start else {"address": "auto"}
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR", **options)
    except ConnectionError as error:
        if not start and not address:
            raise UserError(
                "no Ray cluster runs here: start one as docs/cluster.md says, or set RAY_ADDRESS."
            ) from error
        where = f"RAY_ADDRESS={address}" if address else "this machine"
        raise UserError(
            f"the Ray cluster at {where} refuses: where it was started with a token, set RAY_AUTH_MODE=token."
        ) from error
    except (RuntimeError, ValueError, OSError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"Ray cannot be used here: {said}; see docs/cluster.md.") from error
    return ray


def _reach(address: str) -> None:
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except (OSError, ValueError) as error:
        raise UserError(
            f"no Ray cluster answers at RAY_ADDRESS={address} ({error}): start one there, or unset the variable."
        ) from error


def offer() -> str:
    """What the cluster that runs here offers, in one line; a `UserError` where there is none. Starts nothing."""
    ray = connect(start=False)
    try:
        nodes = _nodes(ray)
        kinds = Counter({key: 0 for node in nodes.values() for key in _announced(node)})
        for node in nodes.values():
            kinds.update({key: int(node["Resources"][ANNOUNCED + key]) for key in _announced(node)})
        cpus, gpus = (sum(_count(node, kind) for node in nodes.values()) for kind in ("CPU", "GPU"))
        devices = ", ".join(f"{count} announced as {key}" for key, count in kinds.items())
        return (
            f"ray {ray.__version__}: {len(nodes)} nodes, {cpus} CPUs, {gpus} GPUs{f' ({devices})' if devices else ''}"
        )
    finally:
        ray.shutdown()


def _nodes(ray: Any) -> dict[str, dict[str, Any]]:
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def _count(node: Mapping[str, Any], resource: str) -> int:
    return int(node["Resources"].get(resource, 0))


def _announced(node: Mapping[str, Any]) -> list[str]:
    return [name.removeprefix(ANNOUNCED) for name in node["Resources"] if name.startswith(ANNOUNCED)]


def _on(ray: Any, node: str) -> Any:
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)


def _reason(error: BaseException) -> str:
    """Why an actor or a task was lost, in one line."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0][:300] if lines else 'no reason was given'}"


@dataclass
class _Gpu:
    """An actor that holds a GPU. asked: its answer to what it is, until that came. cell: what it is at, with `call`."""

    actor: Any
    node: str
    name: str
    asked: Any
    device: Device | None = None
    cell: int | None = None
    call: Any = None


class Ray:
    """A launcher: see `mla_var3.lab.sweep.launch.Launcher`. hand: the class of the actors that hold the GPUs."""

    place = "the cluster"

    def __init__(self, hand: type[Hand] = Hand) -> None:
        self._ours = not _connected()
        self.ray = connect(start=True)
        self._hand = self.ray.remote(hand)
        self._gpus: list[_Gpu] = []
        self._unusable: Counter[str] = Counter()  # GPUs of a node that are not to be held again
        self._looked = 0.0
        self._nodes: dict[str, dict[str, Any]] = {}
        self._stopped = False
        self._cells = (0, 0, 0)

    # ------------------------------------------------------------ who is there
    def devices(self) -> list[Device]:
        deadline = time.monotonic() + _ASK_S
        self._look()
        while (open_ := [gpu for gpu in self._gpus if gpu.asked is not None]) and time.monotonic() < deadline:
            ready, _ = self.ray.wait([gpu.asked for gpu in open_], num_returns=1, timeout=1.0)
            for gpu in open_:
                if gpu.asked in ready:
                    self._answered(gpu)
        if open_:
            say(f"{len(open_)} GPUs have not said what they are in {_ASK_S:g} s: in use by others, or starting.")
        found = {gpu.device.key: gpu.device for gpu in self._gpus if gpu.device is not None}
        # Of those that are in use by others it is known where they announced it.
        for key in (key for node in self._nodes.values() if _count(node, "GPU") for key in _announced(node)):
            found.setdefault(key, Device.get(key))
        return [found[key] for key in sorted(found)]

    def _look(self) -> None:
        """Holds every GPU of every node that is there, and forgets those whose node is gone."""
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        nodes = _nodes(self.ray)
        for gone in self._nodes.keys() - nodes.keys():
            say(f"node {self._nodes[gone]['NodeName']} left the cluster")
        self._nodes = nodes
        # One that measures is told of by its call.
        self._gpus = [gpu for gpu in self._gpus if gpu.node in nodes or gpu.call is not None]
        for node, facts in nodes.items():
            held = sum(gpu.node == node for gpu in self._gpus) + self._unusable[node]
            for _ in range(_count(facts, "GPU") - held):
                actor = self._hand.options(num_gpus=1, num_cpus=0, scheduling_strategy=_on(self.ray, node)).remote()
                announced = next((Device.get(key) for key in _announced(facts)), None)
                self._gpus.append(_Gpu(actor, node, facts["NodeName"], actor.device.remote(announced)))

    def _answered(self, gpu: _Gpu) -> None:
        """Takes a GPU's answer to what it is; without a usable one it is left out from now on."""
        try:
            gpu.device = self.ray.get(gpu.asked)
            why = "torch sees no GPU there" if gpu.device is None else ""
        except self.ray.exceptions.RayError as error:
            why = _reason(error)
        gpu.asked = None
        if why:
            self._leave_out(gpu, why)

    def _leave_out(self, gpu: _Gpu, why: str) -> None:
        self._drop(gpu)
        if gpu.node in self._nodes:
            self._unusable[gpu.node] += 1
            say(f"a GPU of node {gpu.name} is left out: {why}")

    def _drop(self, gpu: _Gpu) -> None:
        self._gpus.remove(gpu)
        self.ray.kill(gpu.actor)

    # ------------------------------------------------------------ measuring
    def measure(
        self, cells: Sequence[Cell], settings: BenchSettings, *, experiment: str
    ) -> Generator[Record, None, None]:
        from mla_var3.measure import environment
        from mla_var3.measure.cell import unmeasured
        from mla_var3.record import Record

        commit, dirty = (settings.commit, None) if settings.commit is not None else environment.git_state()
        settings = replace(settings, commit=commit)
        self._stopped = False
        code = _Code(self.ray, cells)
        waiting: dict[str, deque[int]] = {}
        for index, cell in enumerate(cells):
            waiting.setdefault(cell.device.key, deque()).append(index)
        lost: Counter[int] = Counter()
        seen = {key: time.monotonic() for key in waiting}  # when there was a GPU for a device

        def ended(index: int, status: str, reason: str) -> Iterator[Record]:
            cell = cells[index]
            yield from unmeasured(
                cell.problem, cell.contenders, cell.device, settings,
                experiment=experiment, status=status, reason=reason,
            )  # fmt: skip

        done = 0
        try:
            while True:
                self._look()
                code.fill(self._nodes)
                if not self._stopped:
                    self._hand_out(cells, waiting, code, settings, experiment)
                busy = {gpu.call: gpu for gpu in self._gpus if gpu.call is not None}
                left = 0 if self._stopped else sum(map(len, waiting.values()))
                self._cells = (done, len(busy), left)
                if not busy and not left:
                    return
                if sys.stderr.isatty():
                    say(self.state(), live=True)
                asked = {gpu.asked: gpu for gpu in self._gpus if gpu.asked is not None}
                for ref in _ready(self.ray, [*busy, *asked, *code.running]):
                    if ref in asked:
                        self._answered(asked[ref])
                        continue
                    if ref in code.running:
                        code.take(ref)
                        continue
                    gpu = busy[ref]
                    assert gpu.cell is not None
                    at, gpu.cell, gpu.call = gpu.cell, None, None
                    try:
                        lines = self.ray.get(ref)
                    except self.ray.exceptions.RayError as error:
                        lost[at] += 1
                        reason = _reason(error)
                        if isinstance(error, self.ray.exceptions.RayTaskError):
                            self._leave_out(gpu, reason)  # it lives, and cannot measure
                        else:
                            self._drop(gpu)
                        self._looked = 0.0
                        if lost[at] < TRIES:
                            waiting[cells[at].device.key].appendleft(at)
                            say(f"{cells[at].problem.label} was lost on node {gpu.name}, and is taken up again")
                        else:
                            done += 1
                            yield from ended(at, "failed", f"it ended {TRIES} workers, the last with {reason}")
                        continue
                    done += 1
                    self._cells = (done, len(busy) - 1, left)
                    for line in lines:
                        record = Record.model_validate_json(line)
                        record.source = record.source.model_copy(update={"dirty": dirty})
                        yield record
                for key, indices in waiting.items():
                    if self._hope(key):
                        seen[key] = time.monotonic()
                    elif indices and time.monotonic() - seen[key] > PATIENCE_S and not self._stopped:
                        name = cells[indices[0]].device.name
                        while indices:
                            done += 1
                            yield from ended(indices.popleft(), "skipped", f"the cluster has no {name} left")
        finally:
            self._release(lambda gpu: gpu.call is not None)
            code.cancel()

    def _hope(self, key: str) -> bool:
        """Whether there is a GPU for a device, or one that has not said what it is, because others use it."""
        for gpu in self._gpus:
            announced = _announced(self._nodes.get(gpu.node, {"Resources": {}}))
            if gpu.asked is not None and key in (announced or [key]):
                return True
            if gpu.device is not None and gpu.device.key == key:
                return True
        return False

    def _hand_out(
        self,
        cells: Sequence[Cell],
        waiting: Mapping[str, deque[int]],
        code: _Code,
        settings: BenchSettings,
        experiment: str,
    ) -> None:
        """Gives each GPU that is free the first cell for it whose code is compiled."""
        for gpu in self._gpus:
            if gpu.device is None or gpu.call is not None:
                continue
            indices = waiting.get(gpu.device.key, ())
            index = next((i for i in indices if code.ready(i)), None)
            if index is None:
                continue
            waiting[gpu.device.key].remove(index)
            gpu.cell = index
            gpu.call = gpu.actor.measure.remote(cells[index], settings, experiment, *code.of(index))

    # ------------------------------------------------------------ compiling
    def compile(self, jobs: Sequence[StoredJob], workers: int | None = None) -> list[CompileResult]:
        from mla_var3.lab.sweep.compile import TIMEOUT_S, outcome_of, store
        from mla_var3.toolchain.pool import CompileResult, progress_of

        self._release(lambda gpu: True)  # nothing is measured
        results: dict[int, CompileResult] = {}
        tasks = _Tasks(self.ray, outcome_of, jobs, workers, TIMEOUT_S)
        try:
            with progress_of(len(jobs), True) as tell:
                while len(results) < len(jobs):
                    tasks.fill(_nodes(self.ray))
                    for ref in [*_ready(self.ray, list(tasks.running)), *tasks.late()]:
                        taken = tasks.take(ref)
                        if taken is None:
                            continue
                        index, outcome, error, seconds = taken
                        job = jobs[index]
                        if error:
                            results[index] = CompileResult(job, None, error, "Crash", seconds=seconds)
                        else:
                            stored: Any = store(job, outcome)
                            results[index] = CompileResult(job, stored, seconds=seconds)
                        tell(results[index])
        finally:
            tasks.cancel()
        return [results[index] for index in range(len(jobs))]

    # ------------------------------------------------------------ the rest
    def stop(self) -> None:
        self._stopped = True

    def state(self) -> str:
        done, running, waiting = self._cells
        gpus = sum(gpu.device is not None for gpu in self._gpus)
        cells = f"cells {done} done, {running} running, {waiting} waiting"
        return f"{len(self._nodes)} nodes, {gpus} GPUs: {cells}"

    def _release(self, which: Callable[[_Gpu], bool]) -> None:
        for gpu in [gpu for gpu in self._gpus if which(gpu)]:
            self._drop(gpu)

    def close(self) -> None:
        self._release(lambda gpu: True)
        if self._ours:
            self.ray.shutdown()


def _connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _ready(ray: Any, refs: list[Any]) -> list[Any]:
    """Those that are done, once one is or a second has passed."""
    if not refs:
        time.sleep(0.2)
        return []
    first, rest = ray.wait(refs, num_returns=1, timeout=1.0)
    if not first or not rest:
        return list(first)
    more, _ = ray.wait(rest, num_returns=len(rest), timeout=0)
    return [*first, *more]


class _Tasks:
    """Calls of a function with each of some jobs, one a CPU: on nodes without a GPU where there are any, for whoever
    compiles beside a measurement disturbs it. A job whose process or node is lost is tried `TRIES` times."""

    def __init__(
        self, ray: Any, function: Callable[[Any], Any], jobs: Sequence[Any], workers: int | None, timeout_s: float
    ) -> None:
        self.ray, self.jobs, self.workers, self.timeout_s = ray, jobs, workers, timeout_s
        self.running: dict[Any, tuple[int, str, float]] = {}
        self._function = ray.remote(function)
        self._waiting = deque(range(len(jobs)))
        self._tries: Counter[int] = Counter()

    def fill(self, nodes: Mapping[str, Mapping[str, Any]]) -> None:
        """Starts a job on every CPU that has none of ours."""
        if not self._waiting:
            return
        cpus = {node: _count(facts, "CPU") for node, facts in nodes.items()}
        plain = {node: count for node, count in cpus.items() if count and not _count(nodes[node], "GPU")}
        cpus = plain or cpus
        used = Counter(node for _, node, _ in self.running.values())
        free = {node: count - used[node] for node, count in cpus.items()}
        while self._waiting and (self.workers is None or len(self.running) < self.workers):
            node = max(free, key=lambda node: free[node], default=None)
            if node is None or free[node] <= 0:
                return
            free[node] -= 1
            index = self._waiting.popleft()
            call = self._function.options(num_cpus=1, max_retries=0, scheduling_strategy=_on(self.ray, node))
            self.running[call.remote(self.jobs[index])] = (index, node, time.monotonic())

    def late(self) -> list[Any]:
        """Those that have had their time."""
        return [ref for ref, (_, _, began) in self.running.items() if time.monotonic() - began > self.timeout_s]

    def take(self, ref: Any) -> tuple[int, Any, str, float] | None:
        """(job, result, why there is none or "", seconds) of a call that is done or late; None: it is tried again."""
        if ref not in self.running:
            return None
        index, _, began = self.running.pop(ref)
        seconds = time.monotonic() - began
        try:
            return index, self.ray.get(ref, timeout=0), "", seconds
        except self.ray.exceptions.GetTimeoutError:
            self.ray.cancel(ref, force=True)
            return index, None, f"took longer than {self.timeout_s:g} s", seconds
        except self.ray.exceptions.RayTaskError as error:
            return index, None, _reason(error), seconds
        except self.ray.exceptions.RayError as error:
            self._tries[index] += 1
            if self._tries[index] < TRIES:
                self._waiting.append(index)
                return None
            return index, None, f"the compiling process died {TRIES} times ({_reason(error)})", seconds

    def cancel(self) -> None:
        for ref in self.running:
            with contextlib.suppress(Exception):  # it may have ended by now
                self.ray.cancel(ref, force=True)
        self.running.clear()


class _Code:
    """What cells need compiled, and the files that this made, each kept once under its name, which is a digest.

    What does not compile here is compiled where it is measured, whose record then says why not.
    """

    def __init__(self, ray: Any, cells: Sequence[Cell]) -> None:
        from mla_var3.lab import bundle
        from mla_var3.toolchain import loader

        self.ray = ray
        self._needs: dict[int, set[Hashable]] = {}
        self._made: dict[Hashable, list[Any]] = {}
        self._kept: dict[str, Any] = {}
        groups: dict[Any, bundle.BundleJob] = {}
        if loader.compiler_here():
            for index, cell in enumerate(cells):
                if cell.contenders and (needs := _add(groups, cell)):
                    self._needs[index] = needs
        self._keys = list(groups)
        self._tasks = _Tasks(ray, host_functions, list(groups.values()), None, bundle.TIMEOUT_S)
        self.running = self._tasks.running
        if groups:
            say(f"compiling {len(groups)} host functions on the cluster")

    def fill(self, nodes: Mapping[str, Mapping[str, Any]]) -> None:
        if not any(_count(facts, "CPU") for facts in nodes.values()):
            self._made = {key: self._made.get(key, []) for key in self._keys}  # nobody compiles ahead here
            return
        self._tasks.fill(nodes)
        for ref in self._tasks.late():
            self.take(ref)

    def take(self, ref: Any) -> None:
        taken = self._tasks.take(ref)
        if taken is None:
            return
        index, files, why, _ = taken
        if why:
            say(f"{self._tasks.jobs[index].label}: not compiled ahead: {why}")
        made = []
        for library, entry in zip((files or [])[::2], (files or [])[1::2], strict=True):
            if library[0] not in self._kept:
                self._kept[library[0]] = self.ray.put([library, entry])
            made.append(self._kept[library[0]])
        self._made[self._keys[index]] = made

    def ready(self, index: int) -> bool:
        """Whether all that a cell needs was compiled, or found not to compile."""
        return all(key in self._made for key in self._needs.get(index, ()))

    def of(self, index: int) -> list[Any]:
        """References to the files that a cell needs."""
        found = {id(ref): ref for key in self._needs.get(index, ()) for ref in self._made[key]}
        return list(found.values())

    def cancel(self) -> None:
        self._tasks.cancel()


def _add(groups: dict[Any, Any], cell: Cell) -> set[Hashable]:
    """Adds the CuTe host functions of a cell to the jobs of `groups`; returns the keys of those that it needs."""
    from mla_var3.lab import bundle
    from mla_var3.lab.knobs import knobs

    needs: set[Hashable] = set()
    for contender in cell.contenders:
        if contender.kernel.language != bundle.LANGUAGE:
            continue
        name = contender.plan or contender.kernel.label
        # Whatever is wrong with a contender, its record says it.
        with contextlib.suppress(Exception):
            plan = bundle.plan_of(name)(cell.problem, None, cell.device)
            tiling = knobs(plan.tiling, contender.tiling or {})
            tiling.validate(cell.problem, cell.device).require()
            needs |= bundle.add(groups, name, cell.problem, tiling, cell.device, Path())
    return needs
