"""Measures cells: starts the worker, watches it, and turns what it says into records.

A contender that crashes the worker, poisons its device context or hangs gets a record that says so, and the worker is
started again for the others; what they had already passed (compiling, checking) is not done twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3 import paths
from mla_var3.errors import UserError
from mla_var3.measure import environment
from mla_var3.measure.settings import BenchSettings
from mla_var3.measure.timing import plan_sets
from mla_var3.measure.worker import KEPT
from mla_var3.record import DEFAULT, TUNED, Record, new_id, now, record_key

if TYPE_CHECKING:
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.device import Device
    from mla_var3.workload import Problem

__all__ = ["BenchSettings", "Contender", "contender_key", "measure_cell", "measure_cells"]

CPU = "cpu"  #: what a record says in place of a device key when nothing ran on a GPU
_POLL_S = 0.01
_REASON_CHARS = 1500
_STACK_LINES = 8


@dataclass(frozen=True)
class Contender:
    """One version in a cell.

    tiling: fields that differ from the default tiling, or None. tune: measure the tilings first and take the fastest.
    plan: "module:Class" of a `KernelPlan` outside the registry, which `kernel` then only names.
    picked_by: what chose the version ("dispatch", "fixed_split"), or "" where the user named it.
    """

    kernel: KernelId
    tiling: Mapping[str, Any] | None = None
    tune: bool = False
    plan: str | None = None
    picked_by: str = ""

    def __post_init__(self) -> None:
        if self.tune and self.tiling:
            raise UserError(f"{self.kernel.label}: give a tiling, or have it tuned, not both.")

    @property
    def requested(self) -> str | dict[str, Any]:
        """ "default", "tuned", the tiling fields, or "dispatch", which chooses them too, as records have it."""
        if self.picked_by == "dispatch":
            return self.picked_by
        return TUNED if self.tune else dict(self.tiling) if self.tiling else DEFAULT


def contender_key(problem: Problem, contender: Contender, device: Device | None, mode: str = "time") -> str:
    """The `record_key` that a contender's record in this cell will have: what `resume` looks for."""
    return record_key(
        contender.kernel.to_record(),
        problem.to_record(),
        contender.requested,
        CPU if device is None else device.key,
        environment.source_hash(contender.kernel, contender.plan),
        mode,
    )


@dataclass
class _Slot:
    """A contender in a cell, until its record is made."""

    number: int
    cell: int
    problem: Problem
    contender: Contender
    hash: str
    carry: dict[str, Any] = field(default_factory=dict)

    def spec(self) -> dict[str, Any]:
        c = self.contender
        return {
            "slot": self.number,
            "kernel": c.kernel.to_record(),
            "tiling": dict(c.tiling) if c.tiling else None,
            "tune": c.tune,
            "plan": c.plan,
            "carry": self.carry,
        }


def measure_cell(
    problem: Problem,
    contenders: Sequence[Contender],
    device: Device | None,
    settings: BenchSettings | None = None,
    *,
    experiment: str,
) -> Iterator[Record]:
    """One cell; see `measure_cells`."""
    return measure_cells([(problem, contenders)], device, settings, experiment=experiment)


def measure_cells(
    cells: Sequence[tuple[Problem, Sequence[Contender]]],
    device: Device | None,
    settings: BenchSettings | None = None,
    *,
    experiment: str,
) -> Iterator[Record]:
    """Measures cells in one worker process and yields the record of every contender as soon as it is known.

    device: the GPU to measure on (or, in mode compile, to compile for); None: the CPU, where mode time becomes check.
    A cell's contenders are timed in turn beside the cell's limits. Cells of one problem class share what was compiled.
    Closing the iterator ends the worker.
    Raises `UserError` when the worker cannot measure here at all (no GPU, or another one).
    """
    settings = settings or BenchSettings()
    if device is None and settings.backend == "auto" and settings.mode == "time":
        settings = replace(settings, mode="check")
    run = _Run(device, settings, experiment)
    slots: list[_Slot] = []
    for number, (problem, contenders) in enumerate(cells):
        mine = [
            _Slot(len(slots) + i, number, problem, c, environment.source_hash(c.kernel, c.plan))
            for i, c in enumerate(contenders)
        ]
        reason = run.too_large(number, problem, len(mine))
        if reason:
            for slot in mine:
                yield run.record(slot, {"status": "skipped", "reason": reason})
        slots += [] if reason else mine
    while slots:
        before = len(slots)
        for slot, fields in run.work(slots):
            slots.remove(slot)
            yield run.record(slot, fields)
        for slot in list(slots):
            reason = run.given_up(slot)
            if reason:
                slots.remove(slot)
                yield run.record(slot, {"status": "skipped", "reason": reason})
        if len(slots) == before:  # the worker ended without a result: do not start it for ever
            for slot in slots:
                yield run.record(slot, {"status": "failed", "reason": "the worker ended without a result"})
            return


def unmeasured(
    problem: Problem,
    contenders: Sequence[Contender],
    device: Device | None,
    settings: BenchSettings,
    *,
    experiment: str,
    status: str,
    reason: str,
) -> list[Record]:
    """Records of a cell that no worker came to an end with."""
    run = _Run(device, settings, experiment)
    slots = [_Slot(i, 0, problem, c, environment.source_hash(c.kernel, c.plan)) for i, c in enumerate(contenders)]
    return [run.record(slot, {"status": status, "reason": reason}) for slot in slots]


class _Run:
    """What the cells of one call have in common."""

    def __init__(self, device: Device | None, settings: BenchSettings, experiment: str) -> None:
        self.device = device
        self.settings = settings
        self.experiment = experiment
        self.environment: dict[str, Any] = environment.describe()
        self.commit, self.dirty = (settings.commit, None) if settings.commit is not None else environment.git_state()
        self.sets: dict[int, tuple[int, int]] = {}
        self.deaths: Counter[Any] = Counter()

    def given_up(self, slot: _Slot) -> str:
        """Why a contender is not tried in a further cell: each time it ends the worker costs a start; else ""."""
        deaths = self.deaths[_kind(slot)]
        if not self.settings.give_up or deaths < self.settings.give_up:
            return ""
        return f"given up: it ended the worker in {deaths} cells like this one; resume=true tries it again"

    def too_large(self, cell: int, problem: Problem, contenders: int) -> str:
        """Why a cell does not fit in the device's memory, in one sentence; else "", and its input sets are planned."""
        if self.device is None or self.settings.mode == "compile":
            self.sets[cell] = (1, problem.input_bytes())
            return ""
        plan = plan_sets(problem, contenders, self.device.memory_gb * 1e9, self.settings)
        self.sets[cell] = (plan.count, plan.set_bytes)
        return f"{problem.label} on {self.device.key} {plan.reason}." if plan.reason else ""

    def record(self, slot: _Slot, fields: Mapping[str, Any]) -> Record:
        """The record of a slot from the worker's fields, or from what it said before it died."""
        fields = dict(fields)
        readings = {k: v for k, v in dict(fields.pop("readings", None) or {}).items() if v}
        kept = {name: slot.carry[name] for name in KEPT if name in slot.carry}
        kernel, problem = slot.contender.kernel.to_record(), slot.problem.to_record()
        device = CPU if self.device is None else self.device.key
        requested, mode = slot.contender.requested, self.settings.mode
        # The identity first: lines are read by people too.
        return Record.model_validate(
            {
                "id": new_id(),
                "at": now(),
                "experiment": self.experiment,
                "kernel": kernel,
                "problem": problem,
                "device": device,
                **kept,
                **fields,
                **({"picked_by": slot.contender.picked_by} if slot.contender.picked_by else {}),
                "environment": {**self.environment, **readings},
                "source": {"commit": self.commit, "hash": slot.hash, "dirty": self.dirty},
                "requested": requested,
                "mode": mode,
                "key": record_key(kernel, problem, requested, device, slot.hash, mode),
            }
        )

    # ------------------------------------------------------------ one life of the worker
    def work(self, slots: Sequence[_Slot]) -> Iterator[tuple[_Slot, dict[str, Any]]]:
        """Starts a worker for these slots and yields results, the one of a crash or a hang last."""
        waiting = {slot.number: slot for slot in slots}
        last: _Slot | None = None
        with tempfile.TemporaryDirectory(prefix="mla_var3-bench-") as folder:
            life = _Life(Path(folder), self._job(slots), self.settings)
            try:
                for event in life.events():
                    kind = event["event"]
                    if kind == "environment":
                        self.environment = event["fields"]
                    elif kind == "info":
                        waiting[event["slot"]].carry.update(event["fields"])
                    elif kind == "result":
                        last = waiting.pop(event["slot"])
                        yield last, event["fields"]
                    elif kind == "fatal":
                        raise UserError(event["reason"])
                dead = last if life.poisoned else None
                if life.lost and life.slot is not None:
                    dead = waiting.get(life.slot)
                if dead is not None:
                    self.deaths[_kind(dead)] += 1
                if life.lost:
                    guilty = [waiting[life.slot]] if life.slot in waiting else list(waiting.values())
                    for slot in guilty:
                        yield slot, {"status": "failed", "reason": life.lost}
            finally:
                life.end()

    def _job(self, slots: Sequence[_Slot]) -> dict[str, Any]:
        cells: dict[int, dict[str, Any]] = {}
        for slot in slots:
            sets, set_bytes = self.sets[slot.cell]
            cell = cells.setdefault(
                slot.cell,
                {"problem": slot.problem.to_record(), "sets": sets, "set_bytes": set_bytes, "contenders": []},
            )
            cell["contenders"].append(slot.spec())
        return {
            "settings": self.settings.to_record(),
            "device": None if self.device is None else self.device.key,
            "parent": os.getpid(),
            "cells": list(cells.values()),
        }


class _Life:
    """One worker process, from its start to its end.

    slot: whose phase it was in last; None: nobody's. lost: why it ended before it was done, else "". poisoned: it ended
    itself, for the last contender that it gave a result of broke the device.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], settings: BenchSettings) -> None:
        self.slot: int | None = None
        self.lost = ""
        self.poisoned = False
        self._phase = "startup"
        self._limit_s = settings.limit_s("startup")
        self._since = time.monotonic()
        self._out = folder / "out.jsonl"
        self._log = folder / "stderr.txt"
        self._out.touch()
        (folder / "job.json").write_text(json.dumps(job))
        words = [sys.executable, "-m", "mla_var3.measure.worker", str(folder / "job.json"), str(self._out)]
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C reaches this process alone, and the worker's children end with it.
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(settings),
                start_new_session=True,
            )

    def events(self) -> Iterator[dict[str, Any]]:
        """What the worker says, until it is done, dead or killed for hanging; phases are noted, not passed on."""
        with self._out.open("rb") as out:
            rest = b""
            while True:
                code = self._process.poll()
                data = out.read()  # read after poll: a process that has ended has said everything
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["event"] in ("done", "poisoned"):
                        self.poisoned = event["event"] == "poisoned"
                        return
                    if event["event"] == "phase":
                        self.slot, self._phase, self._limit_s = event["slot"], event["phase"], float(event["limit_s"])
                        self._since = time.monotonic()
                        continue
                    yield event
                if code is not None:
                    self.lost = f"{self._phase}: the worker {_ending(code)}{self._said()}"
                    return
                if time.monotonic() - self._since > self._limit_s:
                    self._ask_where()
                    self.lost = f"{self._phase}: no end after {self._limit_s:g} s, so it was stopped{self._said()}"
                    return
                if not data:
                    time.sleep(_POLL_S)

    def end(self) -> None:
        """Ends the process and everything it started; waits until it is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process.poll() is None and not self.lost:
                self._process.wait(0.2)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A kernel that never ends can keep its process for a while after the kill.
            self._process.wait(30.0)

    def _ask_where(self) -> None:
        """Has the worker write its stack before it is killed."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)

    def _said(self) -> str:
        text = _digest(self._log.read_text(errors="replace"))
        return f"; its stderr: {text}" if text else ""


def _kind(slot: _Slot) -> tuple[Any, ...]:
    """What cells have in common where a contender that crashes in one will crash in the other: all but their sizes."""
    sizes = ("b", "s", "t", "h", "lengths")
    rest = tuple((name, str(value)) for name, value in slot.problem.to_record().items() if name not in sizes)
    return slot.contender.kernel, slot.contender.plan, rest


def _environment(settings: BenchSettings) -> dict[str, str]:
    """The caller's, with this package importable whatever put it on the path."""
    return {**os.environ, "PYTHONPATH": paths.python_path(), "PYTHONUNBUFFERED": "1", **dict(settings.worker_env)}


def _ending(code: int) -> str:
    """How a process ended, from its return code."""
    if code >= 0:
        return f"ended early with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _digest(text: str) -> str:
    """The telling end of a worker's stderr: the innermost frames of a stack dump, else the last lines."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("Extension modules:")]
    stacks = [i for i, line in enumerate(lines) if line.endswith("(most recent call first):")]
    if stacks:
        lines = lines[max(0, stacks[-1] - 4) : stacks[-1] + 1 + _STACK_LINES]
    return " / ".join(lines[-(_STACK_LINES + 6) :])[-_REASON_CHARS:]
