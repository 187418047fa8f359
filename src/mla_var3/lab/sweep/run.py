"""The sweep: an experiment in, records and tables out.

    conf → cells × kernels → verdicts (language, device, tiling) → measured here, or compiled for a device → records

With the target GPU in the machine every point is checked and timed by the measuring worker. Without it, points are
compiled for the target, checked on the CPU at small sizes where the language can, and shown beside what the project
recorded on that device. Each record is on the disk before the next point begins.
"""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3 import paths
from mla_var3.catalogue import registry, spoken
from mla_var3.errors import UserError
from mla_var3.files import check_folder
from mla_var3.lab.knobs import own_knobs
from mla_var3.lab.profiling import DISABLED
from mla_var3.lab.sweep import config as sweep_config
from mla_var3.lab.sweep.hand import Cell
from mla_var3.lab.sweep.launch import Launcher, launcher_of
from mla_var3.lab.sweep.plan import (
    Point,
    Target,
    chosen_kernels,
    expand,
    expand_cells,
    find_targets,
    select_kernels,
)
from mla_var3.lab.sweep.telling import BAD, Telling, answer, folded, say, side_by_side, telling_refusals, then

if TYPE_CHECKING:
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.device import Device
    from mla_var3.lab.sweep.config import SweepConfig
    from mla_var3.record import Record
    from mla_var3.workload import Problem

EXIT_INTERRUPTED = 130


class Journal:
    """A sweep's record file of one device, and what it already holds when the sweep is resumed."""

    def __init__(self, folder: Path, experiment: str, resume: bool) -> None:
        from mla_var3.record import RecordStore, load

        name = re.compile(rf"\d{{4}}-\d\d-\d\d-{re.escape(experiment)}\.jsonl")
        earlier = sorted(path for path in folder.glob(f"*-{experiment}.jsonl") if name.fullmatch(path.name))
        self.path = folder / f"{datetime.now(UTC):%Y-%m-%d}-{experiment}.jsonl"
        self.by_key: dict[str, Record] = {}
        self.made: list[Record] = []
        if resume and earlier:
            self.path = earlier[-1]
            found = load(earlier)
            for problem in found.problems:
                say(f"warning: {problem}")
            self.by_key = {record.key: record for record in found.records if record.key}
        self.store = RecordStore(self.path)

    def finished(self, key: str) -> bool:
        """Whether a point needs no second run: what failed, or lacked a language, is tried again."""
        from mla_var3.record import finished_keys

        record = self.by_key.get(key)
        return record is not None and bool(finished_keys([record], retry=("failed", "skipped")))

    def add(self, record: Record, *, stored: bool = False) -> None:
        """Stores a record, unless the file already says the same of a point that cannot run."""
        known = self.by_key.get(record.key or "")
        if known is not None and known.status == record.status == "skipped" and known.reason == record.reason:
            return
        if not stored:
            self.store.append(record)
        self.made.append(record)
        if record.key:
            self.by_key[record.key] = record


class Sweep:
    """One job of a sweep. again: the command that goes on where it ended."""

    def __init__(self, config: SweepConfig, launcher: Launcher, again: str = "resume=true") -> None:
        from mla_var3.measure import environment
        from mla_var3.measure.settings import BenchSettings

        bench = dict(config.bench)
        self.tune = bool(bench.pop("tune", False))
        self.settings = BenchSettings.of(bench)
        self.config = config
        self.launcher = launcher
        self.again = again
        self.targets: list[Target] = find_targets(config, launcher.devices(), launcher.place)
        self.target = self.targets[0]  # the one at hand, where there are several
        self.measures = any(target.present for target in self.targets) and config.experiment.mode == "measure"
        check_folder(config.compile_dir, "compile_dir =")
        if self.measures:
            check_folder(config.results_dir, "results_dir =")
        self.cells: list[Problem] = expand_cells(config)
        self.kernels = chosen_kernels(config)
        if self.tune and (config.tiling or config.tilings):
            raise UserError("tiling.* and tilings set knobs and bench.tune=true searches for them: give one of them.")
        if config.profile.mode != DISABLED:
            self._can_profile()
        self.environment: dict[str, Any] = environment.describe()
        self.commit, self.dirty = environment.git_state()
        if self.settings.commit is not None:
            self.commit, self.dirty = self.settings.commit, None
        self.telling = Telling(config.verbose)
        self.journals: dict[tuple[str, str], Journal] = {}
        self.keys: dict[tuple[Point, str], str] = {}
        self.failed: list[Record] = []  # points that are wrong or do not run, of this run and of what it resumed

    # ------------------------------------------------------------ records
    def journal(self, device: str, *, measured: bool = False) -> Journal:
        """The record file for a device key; compiled and CPU records are kept apart from measured ones."""
        folder = self.config.results_dir if measured else self.config.compile_dir
        if (folder, device) not in self.journals:
            self.journals[folder, device] = Journal(
                Path(folder) / device, self.config.experiment.name, self.config.resume
            )
        return self.journals[folder, device]

    def contender(self, point: Point) -> Any:
        from mla_var3.measure.cell import Contender

        tune = self.tune and self.measures and not point.picked_by
        asked = dict(point.asked) or None
        return Contender(point.kernel, asked, tune=tune, picked_by=point.picked_by)

    def contenders(self, point: Point) -> list[Any]:
        """The point's contender; of a tuned one the default tiling too, in turn with it on the same chip: two runs of
        one tiling differ by more than a search often brings."""
        from mla_var3.measure.cell import Contender

        first = self.contender(point)
        return [first, Contender(point.kernel)] if first.tune else [first]

    def key(self, point: Point, mode: str) -> str:
        """The point's `record_key`, as it was when first asked for: sources may be edited while a sweep runs."""
        from mla_var3.measure.cell import contender_key

        if (point, mode) not in self.keys:
            self.keys[point, mode] = contender_key(point.problem, self.contender(point), point.device, mode)
        return self.keys[point, mode]

    def form(self, point: Point, mode: str) -> dict[str, Any]:
        """A record of the point without its outcome."""
        cost = point.problem.cost()
        return {
            **({"picked_by": point.picked_by} if point.picked_by else {}),
            "experiment": self.config.experiment.name,
            "kernel": point.kernel.to_record(),
            "problem": point.problem.to_record(),
            "tiling": None if point.tiling is None else point.tiling.to_record(),
            "device": point.device.key,
            "environment": self.environment,
            "source": {"commit": self.commit, "hash": registry.source_hash(point.kernel), "dirty": self.dirty},
            "requested": self.contender(point).requested,
            "mode": mode,
            "key": self.key(point, mode),
            "flops": cost.flops,
            "bytes": cost.bytes,
        }

    def refuse(self, points: Sequence[Point], mode: str, *, measured: bool) -> None:
        """Records of the points that cannot run, and one line for each language that is missing."""
        from mla_var3.record import Record, new_id, now

        kernels = dict.fromkeys(p.kernel for p in points)
        missing = {k: reason for k in kernels if (reason := registry.missing(k))}
        for reason in dict.fromkeys(reason for k, reason in missing.items() if k.language != "peer"):
            say(f"skipped: {reason}")
        peers = sum(k.language == "peer" for k in missing)
        if peers:
            say(f"skipped: {peers} peer libraries are not installed; mla-var3 list kernels says how to get them.")
        for point in points:
            outcome = {"id": new_id(), "at": now(), "status": point.status, "reason": point.reason}
            record = Record.model_validate({**self.form(point, mode), **outcome})
            self.journal(point.device.key, measured=measured).add(record)

    # ------------------------------------------------------------ running
    def run(self) -> None:
        experiment = self.config.experiment
        size = f"{len(self.cells)} cells, {len(self.kernels)} kernels"
        say(f"experiment {experiment.name}: {size}, for {self.names}")
        if experiment.mode == "measure" and not self.measures:
            for target in self.targets:
                say(target.note)
        step = self.measure if self.measures else self.compile
        worst = step()
        self.summary(() if self.telling.verbose else then(worst, self.failed))
        if self.config.profile.mode != DISABLED:
            from mla_var3.lab.profiling.points import profile_points

            profile_points(self.journal(self.target.device.key, measured=True).made, self.config.profile, say)

    @property
    def names(self) -> str:
        return ", ".join(target.device.name for target in self.targets)

    def measure(self) -> Record | None:
        """Measures every point that can run, cells one after the other on a GPU, contenders of a cell in turn; returns
        the record that is furthest from its limit."""
        from mla_var3.workload import problem_from_record

        points = [point for target in self.targets for point in self._points(target)]
        self.refuse([p for p in points if not p.runnable], "time", measured=True)
        runnable = [p for p in points if p.runnable]
        todo = [p for p in runnable if not self.journal(p.device.key, measured=True).finished(self.key(p, "time"))]
        if len(todo) < len(runnable):
            files = ", ".join(str(self.journal(t.device.key, measured=True).path) for t in self.targets if t.present)
            say(f"resuming: {len(runnable) - len(todo)} points are in {files}")
        contenders: dict[tuple[Device, Problem], list[Any]] = {}
        for point in todo:
            contenders.setdefault((point.device, point.problem), []).extend(self.contenders(point))
        cells = [Cell(problem, tuple(some), device) for (device, problem), some in contenders.items()]
        stream = self.launcher.measure(cells, self.settings, experiment=self.config.experiment.name)
        began, budget_s, stopped = time.monotonic(), self.config.budget_s, False
        open_points = {(cell.device.key, cell.problem): len(cell.contenders) for cell in cells}
        number, total = 0, sum(open_points.values())
        try:
            for number, record in enumerate(stream, start=1):
                self.journal(record.device, measured=True).add(record)
                passed = time.monotonic() - began
                left = passed / number * (total - number)
                state = "".join(f", {text}" for text in [self.launcher.state()] if text)
                line = f"[{number}/{total}, {left:.0f} s left{state}] {record.problem_label} {describe(record)}"
                self.telling.step(number, total, line, at_once=record.status in BAD)
                cell = (record.device, problem_from_record(record.problem))
                open_points[cell] = open_points.get(cell, 0) - 1
                # Only between cells: the contenders of one are timed in turn, and their records come together.
                if 0 < budget_s < passed and open_points[cell] <= 0 and not stopped:
                    stopped = True
                    self.launcher.stop()
        finally:
            stream.close()
        if stopped and number < total:
            say(f"{budget_s:g} s are over: {total - number} points are left; go on with: {self.again}")
        worst: Record | None = None
        for target in self.targets:
            self.target = target
            mine = [p for p in points if p.device.key == self.target.device.key]
            worst = self.report(mine, "time", measured=True) or worst
        return worst

    def _points(self, target: Target) -> list[Point]:
        """A target's points; of one that no GPU is for, while there is one for another, each is skipped."""
        points = expand(self.config, target, self.cells, tuned=self.tune)
        if target.present:
            return points
        reason = f"{self.launcher.place} has no {target.device.name}: name another device, or add one"
        return [replace(p, status="skipped", reason=reason) if p.runnable else p for p in points]

    def _can_profile(self) -> None:
        """Refuses a profile that cannot be made, before anything is measured."""
        from mla_var3.lab.profiling.run import available

        mode = self.config.profile.mode
        if not self.measures:
            raise UserError(
                f"profile={mode} follows a measurement, and this sweep only compiles for {self.target.device.name}: "
                "leave it out, or use `mla-var3 profile KERNEL`, whose mode annotation works without a GPU."
            )
        if self.config.launcher != "local":
            raise UserError(f"profile={mode} profiles on this machine: leave launcher={self.config.launcher} out.")
        check_folder(self.config.profile.out, "profile.out =")
        available(mode, self.target.device)

    def compile(self) -> Record | None:
        """Compiles for each target, checks small problems on the CPU, and shows what was recorded there; returns the
        record that is furthest from its limit."""
        from mla_var3.lab.sweep.compile import compile_points

        kernels = [k for k in self.kernels if registry.is_compiled(k.language)]
        peers = sum(k.language == "peer" for k in self.kernels)
        if peers:
            say(f"{peers} peer libraries left out: they can only be measured, on a GPU")
        worst: Record | None = None
        patterns = self.config.experiment.no_loop_spills
        strict = select_kernels(patterns) if patterns else ()
        for target in self.targets:
            self.target = target
            compiling = expand(self.config, self.target, self.cells, kernels)
            self.refuse([p for p in compiling if not p.runnable], "compile", measured=False)
            for key in dict.fromkeys(p.device.key for p in compiling):
                journal = self.journal(key)
                mine = [p for p in compiling if p.device.key == key and p.runnable]
                for record in compile_points(
                    mine, journal.path, self.form, workers=self.config.jobs or None, no_loop_spills=strict,
                    done=journal.finished, run=self.launcher.compile,
                ):  # fmt: skip
                    journal.add(record, stored=True)
            worst = self.report(compiling, "compile", measured=False) or worst
        return worst

    # ------------------------------------------------------------ on the CPU
    def on_cpu(self) -> list[Record]:
        """Checks every kernel that can run on a CPU, on small problems of the cells' classes."""
        from mla_var3.lab.sweep import cpu as sweep_cpu
        from mla_var3.measure.cell import CPU, Contender, contender_key
        from mla_var3.record import Record, new_id, now

        languages = dict.fromkeys(k.language for k in self.kernels if k.language != "peer")
        reasons = {name: registry.missing(name) or registry.cannot_run_on_cpu(name) for name in languages}
        for language, reason in reasons.items():
            if reason and not registry.missing(language):
                say(f"not run on the CPU: {reason}")
        journal = self.journal(CPU)
        problems = list(dict.fromkeys(sweep_cpu.small(cell) for cell in self.cells))
        work, shown = [], []
        kernels = [k for k in self.kernels if reasons.get(k.language) == ""]
        if self.config.kernels.newest:
            kernels = [k for k in kernels if k.version == max(o.version for o in kernels if _family(o) == _family(k))]
        asked = {k: self._asked(k) for k in kernels}
        for kernel in asked:
            for problem in problems:
                contender = Contender(kernel, asked[kernel] or None)
                key = contender_key(problem, contender, None, "check")
                if journal.finished(key):
                    shown.append(journal.by_key[key])
                else:
                    work.append((kernel, problem))
        for result in sweep_cpu.run_many(work, self.config.tiling, tell=say):
            contender = Contender(result.kernel, asked[result.kernel] or None)
            record = Record.model_validate(
                {
                    "id": new_id(),
                    "at": now(),
                    "experiment": self.config.experiment.name,
                    "status": result.status,
                    "reason": result.reason,
                    "kernel": result.kernel.to_record(),
                    "problem": result.problem.to_record(),
                    "tiling": result.tiling,
                    "device": CPU,
                    "error": result.error,
                    "environment": self.environment,
                    "source": {"commit": self.commit, "hash": registry.source_hash(result.kernel), "dirty": self.dirty},
                    "requested": contender.requested,
                    "mode": "check",
                    "method": f"checked with {sweep_cpu.interpreter(result.kernel.language).name}; not timed",
                    "key": contender_key(result.problem, contender, None, "check"),
                    "seconds": {"check": result.seconds},
                }
            )
            journal.add(record)
            shown.append(record)
            if self.telling.verbose or record.status in BAD:
                say(f"{describe(record)} ({result.seconds:.1f} s)")
        return shown

    def _asked(self, kernel: KernelId) -> dict[str, Any]:
        """Knobs that were asked for and that the kernel has; none when it cannot be imported."""
        if not self.config.tiling:
            return {}
        try:
            return own_knobs(registry.get_plan(kernel), self.config.tiling)
        except Exception:
            return {}

    # ------------------------------------------------------------ telling
    def report(self, points: Sequence[Point], mode: str, *, measured: bool) -> Record | None:
        """The final tables: of this run, and of what it resumed. Returns the record that is furthest from its limit."""
        from mla_var3.lab.report import tables
        from mla_var3.measure.cell import contender_key

        records = []
        for point in points:
            beside = self.contenders(point)[1:] if measured else []
            keys = [self.key(point, mode), *(contender_key(point.problem, c, point.device, mode) for c in beside)]
            known = self.journal(point.device.key, measured=measured).by_key
            records += [known[key] for key in keys if key in known]
        experiment = self.config.experiment
        device = self.target.device if experiment.targets == "device" else None
        checks = self.on_cpu() if not measured and experiment.mode == "measure" and experiment.cpu else []
        failed = [r for r in [*records, *checks] if r.status in BAD]
        self.failed += failed
        if failed:
            print()
            tables.show(tables.refused(failed, "Failed: wrong results, or nothing that runs"))
        worst: Record | None = None
        if measured:
            timed = [r for r in records if r.time_us is not None or r.status in BAD]
            if timed:
                self.telling.detail(tables.comparison(timed, f"Measured on {self.target.device.name}"))
            worst = self.answer(timed, self.target.device, "measured")
        compiled = [r for r in records if r.resources]
        if compiled:
            name = device.name if device is not None else "the architectures each kernel claims"
            self.telling.detail(tables.resources(compiled, device, f"Compiled for {name}"))
        if not measured and device is not None:
            self.telling.detail(tables.roofline(self.cells, device))
        if checks:
            self.telling.detail(tables.checked(checks))
        if not measured and device is not None and experiment.recorded:
            worst = self.recorded(device, {r.kernel.label for r in failed})
        lost = [r for r in [*records, *checks] if r.status in ("infeasible", "skipped", *BAD)]
        if lost:
            self.telling.detail(tables.refused(lost))
        ran = {r.kernel.label for r in [*records, *checks] if r.status in ("passed", "compiled")}
        shown = telling_refusals([*records, *checks], ran)
        if shown and not self.telling.verbose:
            print()
            tables.show(tables.refused(shown))
        for line in folded((r.kernel.label, text) for r in compiled for text in r.warnings or []):
            say(f"compiled, {line}")
        return worst

    def answer(self, records: Sequence[Record], device: Device, how: str, wrong: Collection[str] = ()) -> Record | None:
        """Prints the answer's table, behind that of two languages where the experiment is for them; returns the record
        that is furthest from its limit. wrong: labels of kernels whose recorded times are none of what they are now."""
        from mla_var3.lab.report import tables

        languages = self.config.experiment.beside
        pair = side_by_side(self.cells, records, languages, how, wrong) if languages else None
        table, worst = answer(self.cells, records, device, f"Fastest here on {device.name}, {how}", wrong)
        for found in (pair, table):
            if found is not None:
                print()
                tables.show(found)
        return worst

    def recorded(self, device: Device, wrong: Collection[str] = ()) -> Record | None:
        """Shipped measurements of these cells on the device, the one that speaks for each kernel, marked as recorded;
        returns the one that is furthest from its limit. wrong: labels of kernels that are wrong now, or do not compile:
        the times are those of other code, and answer nothing."""
        from mla_var3.lab.report import tables
        from mla_var3.record import ASIDE, load
        from mla_var3.workload import problem_from_record

        aside = set(ASIDE) - {self.config.experiment.name}
        folder = paths.shipped_results_dir() / device.key
        wanted = set(self.cells)
        found = [r for r in load(folder).records if r.experiment not in aside] if folder.is_dir() else []
        mine = [r for r in found if r.status == "passed" and r.time_us and problem_from_record(r.problem) in wanted]
        if not mine:
            print(f"\nNo recorded measurements of these cells on {device.name} are shipped with this version.")
            return None
        order = {cell.label: i for i, cell in enumerate(self.cells)}
        mine = sorted(spoken.speaking(mine, aside=True), key=lambda r: order.get(r.problem_label, len(order)))
        title = f"Recorded on {device.name}, not measured now: shipped with the project, dates in the last columns"
        self.telling.detail(tables.comparison(mine, title, dated=True))
        return self.answer(mine, device, "recorded", wrong)

    def summary(self, more: Sequence[str] = ()) -> None:
        """What was made of the points, where it lies, and `more`."""
        made = [record for journal in self.journals.values() for record in journal.made]
        counts = Counter(record.status for record in made)
        text = ", ".join(f"{count} {status}" for status, count in counts.most_common()) or "nothing new"
        files = ", ".join(str(journal.path) for journal in self.journals.values() if journal.made)
        say(f"{text}{'; records in ' + files if files else ''}")
        name = f"{datetime.now(UTC):%Y-%m-%d}-{self.config.experiment.name}.txt"
        self.telling.write(Path(self.config.compile_dir) / self.targets[0].device.key / name)
        for line in more:
            say(line)

    def interrupted(self) -> str:
        """Where the finished points are, after Ctrl-C."""
        # Compiled records are written by worker processes, and count from the file.
        files = [journal.path for journal in self.journals.values() if journal.path.exists()]
        return f"finished points are in {', '.join(map(str, files))}" if files else "no point was finished"


def _family(kernel: KernelId) -> tuple[str, str, str]:
    return kernel.language, kernel.layer, kernel.design


def describe(record: Record) -> str:
    """One line about a record, for the progress."""
    text = f"{record.kernel.label}: {record.status}"
    times = [f"{state} {us:.1f} us" for state in ("burst", "sustained") if (us := record.median(state)) is not None]
    if times:
        text += " " + ", ".join(times)
    elif record.error is not None and record.status == "passed":
        text += f", error {record.error.first:.1e}"
    if record.reason:
        text += f": {record.reason}"
    return text


def resumed(arguments: Sequence[str]) -> str:
    """The command that goes on where a sweep with these arguments ended, as a shell takes it."""
    words = [word for word in arguments if not word.startswith("resume=")]
    return shlex.join(["mla-var3", "sweep", *words, "resume=true"])


def main(arguments: Sequence[str]) -> int:
    """Runs `mla-var3 sweep ARGUMENTS`; 1 where a kernel is wrong or does not run, else 0. Mistakes are raised as
    `UserError`."""
    running: list[Sweep] = []

    def job(config: SweepConfig) -> None:
        launcher = launcher_of(config)
        try:
            sweep = Sweep(config, launcher, resumed(arguments))
            running.append(sweep)
            sweep.run()
        finally:
            launcher.close()

    try:
        sweep_config.run_hydra(arguments, job)
    except KeyboardInterrupt:
        state = running[-1].interrupted() if running else "nothing had begun"
        say(f"\nstopped: {state}. Go on with: {resumed(arguments)}")
        return EXIT_INTERRUPTED
    return 1 if any(sweep.failed for sweep in running) else 0
