"""From a configuration to points: which kernel, on which problem, for which device, and whether it can run at all."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3 import workload
from mla_var3.catalogue import registry
from mla_var3.catalogue.registry import KernelId
from mla_var3.catalogue.retired import where_is
from mla_var3.device import Device
from mla_var3.errors import Infeasible, Unsupported, UserError, nearest
from mla_var3.lab.knobs import knobs, own_knobs
from mla_var3.lab.naming import model_dims, with_batch
from mla_var3.ops import captured
from mla_var3.toolchain import mistakes
from mla_var3.workload import Problem, Workload

if TYPE_CHECKING:
    from mla_var3.lab.sweep.config import SweepConfig
    from mla_var3.runtime.types import Tiling


#: Words that stand, in place of a version, for what is picked in each cell.
DISPATCH, FIXED_SPLIT = "dispatch", "fixed_split"
PICKERS = (DISPATCH, FIXED_SPLIT)


@dataclass(frozen=True)
class Point:
    """One kernel on one problem. status is "" when it can run, else infeasible, skipped or failed, with the reason.

    asked: tiling fields that the user set on this kernel. tiling: what comes out of them and the defaults.
    picked_by: the word of `PICKERS` that chose the kernel, or "".
    """

    problem: Problem
    kernel: KernelId
    device: Device
    asked: dict[str, Any] = field(default_factory=dict, hash=False)
    tiling: Tiling | None = None
    status: str = ""
    reason: str = ""
    picked_by: str = ""

    @property
    def runnable(self) -> bool:
        return not self.status

    @property
    def requested(self) -> str | dict[str, Any]:
        """What the record says was asked for: the fields, "default", or what picked the version."""
        if self.picked_by == DISPATCH:
            return self.picked_by
        return dict(self.asked) if self.asked else "default"

    @property
    def label(self) -> str:
        return f"{self.kernel.label} {self.problem.label}"


# ---------------------------------------------------------------- cells
def problem_for(
    kernels: Sequence[KernelId], kind: Workload, asked: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Any:
    """A workload's problem with the fields `asked`, for these of its versions.

    Other fields come from `defaults`, else from the workload. Where a version does not take the problem that this
    makes, the first of the workload's `variants` that all versions take replaces such fields. Where there is none the
    problem stays as it is, and the version says why it does not take it. Raises `UserError` for fields that make no
    sense.
    """
    first = kind.problem.from_record({**defaults, **asked})
    takes = [registry.get_plan(kernel).requires for kernel in kernels if not registry.missing(kernel)]
    for fields in ({}, *kind.variants):
        if asked.keys() & fields.keys():
            continue
        with suppress(UserError):  # of a variant that does not go with what was asked for
            problem = kind.problem.from_record({**defaults, **fields, **asked})
            if all(requirement.accepts(problem) for requirement in takes):
                return problem
    return first


def _grids(experiment: Any) -> Sequence[Any]:
    """The grids of an experiment, of which one may stand without a list."""
    return experiment.grid if isinstance(experiment.grid, list | tuple) else [experiment.grid or {}]


def expand_cells(config: SweepConfig) -> list[Problem]:
    """The experiment's problems, in order, each once: its cells, then its grid, under the model and `problem.*`."""
    experiment = config.experiment
    cells: list[Mapping[str, Any]] = []
    for index, cell in enumerate(experiment.cells):
        if not isinstance(cell, Mapping):
            raise UserError(
                f"experiment.cells[{index}] = {cell!r} is not a mapping: write {{b: 1, s: 1, h: 128, t: 4096}}."
            )
        cells.append(cell)
    for grid in _grids(experiment):
        if not isinstance(grid, Mapping):
            raise UserError(f"experiment.grid has {grid!r}, which is not a mapping: write {{h: [16, 128], b: [1]}}.")
        for name, values in grid.items():
            if not isinstance(values, list | tuple) or not values:
                raise UserError(
                    f"experiment.grid.{name} = {values!r} is not a list of values: write {name}: [{values}]."
                )
        cells += [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()) if grid]
    cells += _drawn(config)
    if config.workload:
        cells += [problem.to_record() for problem in captured.problems(Path(config.workload))]
    if experiment.boundaries:
        return _part(list(_lacking(config)), config.part)
    if not cells:
        raise UserError(
            f"experiment {experiment.name!r} has neither cells nor a grid: add one, choose another, "
            "or give workload=PATH, a file or folder of calls that were captured."
        )
    changes = {name: value for name, value in config.problem.items() if value is not None}
    problems = list(dict.fromkeys(_problem(config, {**cell, **changes}) for cell in cells))
    if experiment.order != "even":
        return _part(problems, config.part)
    dealt = set(_part(sorted(problems, key=_work, reverse=True), config.part))
    return _evenly([problem for problem in problems if problem in dealt])


def _drawn(config: SweepConfig) -> list[Mapping[str, Any]]:
    """The cells that workloads draw: the same for the same seed, on every machine."""
    cells: list[Mapping[str, Any]] = []
    for name, count in config.experiment.draws().items():
        draw = workload.get(name).draw
        if count and draw is None:
            raise UserError(f"workload {name!r} draws no problems: set experiment.draw=0.")
        rng = random.Random(config.seed)
        cells += [{"workload": name, **draw(rng)} for _ in range(count) if draw]
    return cells


def _lacking(config: SweepConfig) -> dict[Problem, tuple[str, ...]]:
    """Cells that the rules of the dispatcher lack on the devices of a configuration, each with the versions that are to
    take turns there."""
    target, fallback = config.device.target, config.device.fallback
    keys = [(Device.detect() or Device.get(fallback)).key] if target == "auto" else target.split(",")
    found = _lacking_on(tuple(key.strip() for key in keys))
    if not found:
        raise UserError(f"the dispatcher's rules lack nothing on {', '.join(keys)}: there is nothing to measure.")
    return found


@lru_cache(maxsize=4)
def _lacking_on(keys: tuple[str, ...]) -> dict[Problem, tuple[str, ...]]:
    from mla_var3.dispatch import evidence, rules

    found: dict[Problem, tuple[str, ...]] = {}
    for device, name in itertools.product(map(Device.get, keys), rules.served()):
        for problem, pair in evidence.missing(name, device).items():
            found[problem] = tuple(dict.fromkeys((*found.get(problem, ()), *pair)))
    return found


def _work(problem: Problem) -> float:
    """About how long a cell takes, in bytes: a GPU does some 150 dense operations in the time of one byte."""
    cost = problem.cost()
    return max(cost.flops / 150.0, cost.bytes)


def _evenly(cells: list[Problem]) -> list[Problem]:
    """The cells in an order whose every beginning lies evenly over the list: in strides of its golden section."""
    count = len(cells)
    stride = next((n for n in range(round(0.618 * count), count) if math.gcd(n, count) == 1), 1)
    return [cells[i * stride % count] for i in range(count)]


def _part(cells: list[Problem], part: str) -> list[Problem]:
    """Every n-th cell from the k-th, for "k/n": parts are disjoint, and together they are all."""
    match = re.fullmatch(r"(\d+)/(\d+)", part.strip())
    k, n = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= k <= n:
        raise UserError(f"part = {part!r} is no part: write part=1/4, then 2/4, 3/4 and 4/4.")
    if k > len(cells):
        raise UserError(f"part = {part} is empty: there are {len(cells)} cells; ask for fewer parts.")
    return cells[k - 1 :: n]


def _problem(config: SweepConfig, fields: dict[str, Any]) -> Problem:
    """The problem of a cell, over the model's dims: of the experiment's workload unless the cell names its own."""
    kind = workload.get(str(fields.pop("workload", config.experiment.workload))).problem
    fields = with_batch(fields, kind)
    fields = {**model_dims(vars(config.model), kind), **fields}
    if fields.get("page") in ("contiguous", "none", 0):
        fields["page"] = None
    problem: Problem = kind.from_record(fields)
    return problem


# ---------------------------------------------------------------- kernels
def select_kernels(patterns: Sequence[str], exclude: Sequence[str] = ()) -> list[KernelId]:
    """Versions that a pattern names, in the order of the patterns, which is that of their turns: at the power limit a
    kernel's time depends on what ran before it. A pattern that names none is a `UserError` with the nearest.

    Words of `PICKERS` name none by themselves: alone, they leave the list empty.
    """
    named = [pattern for pattern in patterns if pattern not in PICKERS]
    if patterns and not named:
        return []
    patterns = named
    kernels = registry.all_kernels()
    if not kernels:
        raise UserError("this installation has no kernel versions: reinstall mla-var3.")
    chosen: list[KernelId] = []
    for pattern in patterns:
        some = sorted(k for k in kernels if _matches(k, pattern))
        if not some:
            if (sentence := where_is(pattern)) is not None:
                raise UserError(sentence)
            choices = {k.label for k in kernels} | {k.module_name for k in kernels} | set(PICKERS)
            raise UserError(f"no kernel matches {pattern!r}: {nearest(pattern, choices)}.")
        chosen += [k for k in some if k not in chosen]
    left = [k for k in chosen if not any(_matches(k, pattern) for pattern in exclude)]
    if not left:
        raise UserError("kernels.exclude leaves no kernel: shorten it.")
    return left


def chosen_kernels(config: SweepConfig) -> list[KernelId]:
    """Versions that the configuration names. Of those that only a wildcard names, the ones that compute what one of the
    experiment's cells asks for: a prefill kernel has no place in a table of decode cells."""
    if config.experiment.boundaries:
        return [KernelId.parse(label) for label in dict.fromkeys(itertools.chain(*_lacking(config).values()))]
    patterns = config.kernels.patterns
    kernels = select_kernels(patterns, config.kernels.exclude)
    wanted = {None, *_workloads(config)}
    fitting = [
        k for k in kernels
        if k.label in patterns or k.module_name in patterns or _workload(k) in wanted
    ]  # fmt: skip
    return fitting or kernels


def _workloads(config: SweepConfig) -> set[str]:
    """The workloads of an experiment's cells."""
    experiment = config.experiment
    named = [cell.get("workload", experiment.workload) for cell in experiment.cells]
    named += [name for grid in _grids(experiment) for name in grid.get("workload", [experiment.workload]) if grid]
    return {*map(str, named), *(name for name, count in experiment.draws().items() if count)}


def kernels_of(config: SweepConfig, kernels: Sequence[KernelId], problem: Problem) -> list[KernelId]:
    """Those of the versions that `kernels.only` does not keep out of this cell; of the dispatcher's boundaries, the two
    that meet there. In an experiment of several workloads a version stays out of the cells of another one."""
    if config.experiment.boundaries:
        return [k for k in kernels if k.label in _lacking(config).get(problem, ())]
    if len(_workloads(config)) > 1:
        kernels = [k for k in kernels if _workload(k) in (None, problem.workload)]
    cell = problem.to_record()

    def stays(kernel: KernelId) -> bool:
        rules = [rule for rule in config.kernels.only if _matches(kernel, rule["kernels"])]
        return all(cell[name] == value for rule in rules for name, value in rule.items() if name != "kernels")

    return [k for k in kernels if stays(k)]


def _workload(kernel: KernelId) -> str | None:
    """What a version computes; None where its language is missing, or it cannot be imported."""
    try:
        return None if registry.missing(kernel.language) else registry.get_plan(kernel).workload.name
    except Exception:  # the point's own record says it
        return None


def _matches(kernel: KernelId, pattern: str) -> bool:
    name = kernel.label if "/" in pattern else kernel.module_name
    return fnmatch.fnmatchcase(name, pattern)


# ---------------------------------------------------------------- devices
@dataclass(frozen=True)
class Target:
    """What is compiled for, and whether it is also the GPU that is here. note: a sentence for the user, or ""."""

    device: Device
    present: bool
    note: str = ""


def find_targets(config: SweepConfig, here: Sequence[Device], place: str = "this machine") -> list[Target]:
    """The devices that a configuration means. Naming one that is not here compiles for it and measures nothing.

    here: the kinds of GPU there are, at `place`.
    """
    wanted = [key.strip() for key in config.device.target.split(",")]
    if wanted == ["auto"]:
        if here:
            return [Target(device, True) for device in here]
        fallback = Device.get(config.device.fallback)
        return [Target(fallback, False, f"No GPU here: compiling for {fallback.name}, measuring nothing.")]
    found = {device.key: device for device in here}
    there = f"{place} has {', '.join(device.name for device in here)}" if here else "no GPU here"
    targets = []
    for key in dict.fromkeys(wanted):
        device = found.get(key) or Device.get(key)
        note = f"{device.name} was asked for and {there}: compiling for it, measuring nothing."
        targets.append(Target(device, True) if key in found else Target(device, False, note))
    return targets


def claimed_devices(kernel: KernelId) -> list[Device]:
    """One device for every architecture that a version claims; () for a language that is not installed."""
    try:
        requires = registry.get_plan(kernel).requires
    except Exception:
        return []
    by_arch: dict[str, Device] = {}
    for device in sorted(Device.all(), key=lambda d: d.key != "h200"):
        if requires.archs and device.can_run(requires):
            by_arch.setdefault(device.arch, device)
    return [by_arch[arch] for arch in sorted(by_arch, key=lambda a: by_arch[a].sm_version)]


# ---------------------------------------------------------------- points
def expand(
    config: SweepConfig,
    target: Target,
    cells: Iterable[Problem] | None = None,
    kernels: Sequence[KernelId] | None = None,
    *,
    tuned: bool = False,
) -> list[Point]:
    """Every cell with every kernel, each judged without launching anything; tuned: default tilings are not judged."""
    all_of_them = kernels is None
    if kernels is None:
        kernels = chosen_kernels(config)
    pickers = [word for word in PICKERS if word in config.kernels.patterns]
    variants = [{**config.tiling, **knobs} for knobs in config.tilings] or [config.tiling]
    for asked in variants:
        _check_knobs(kernels, asked, pickers)
    claimed = config.experiment.targets == "claimed"
    devices = {k: (claimed and claimed_devices(k)) or [target.device] for k in kernels}
    points: list[Point] = []
    for problem in expand_cells(config) if cells is None else cells:
        found: dict[Any, Point] = {}  # a version that lacks a knob does not tell all variants apart
        fitting = kernels_of(config, kernels, problem)
        if all_of_them and not (fitting or pickers):
            raise UserError(f"kernels.only leaves no kernel for {problem.label}: shorten it, or leave the cell out.")
        for asked in variants:
            some = [prepare(problem, k, device, asked, tuned=tuned) for k in fitting for device in devices[k]]
            for point in newest(some) if config.kernels.newest else some:
                found.setdefault(_key(point), point)
        points += sorted(found.values(), key=lambda point: kernels.index(point.kernel))
        for word in pickers:
            pick = picked(word, problem, target.device, config.tiling)
            # A version that is named and picked is one contender, and is timed once.
            if pick is not None and (word != DISPATCH or _key(pick) not in found):
                points.append(pick)
    return points


def _key(point: Point) -> tuple[KernelId, str, str]:
    return point.kernel, point.device.key, repr(sorted(point.asked.items()))


def newest(points: Sequence[Point]) -> list[Point]:
    """Of each cell, device, language and design the newest version that takes the problem, else the newest of all."""
    best: dict[Any, Point] = {}
    for point in points:
        k = point.kernel
        key = (point.problem, point.device.key, k.language, k.layer, k.design, point.picked_by)
        rank = (point.status not in ("skipped", "infeasible"), k.version)
        known = best.get(key)
        if known is None or rank > (known.status not in ("skipped", "infeasible"), known.kernel.version):
            best[key] = point
    return list(best.values())


def prepare(
    problem: Problem,
    kernel: KernelId,
    device: Device,
    asked: Mapping[str, Any] | None = None,
    *,
    tuned: bool = False,
) -> Point:
    """One point, with its verdict: language, import, requirements, tiling."""
    own: dict[str, Any] = {}
    tiling: Tiling | None = None

    def refused(status: str, reason: str) -> Point:
        return Point(problem, kernel, device, own, tiling, status, reason)

    missing = registry.missing(kernel)
    if missing:
        return refused("skipped", missing)
    try:
        plan_type = registry.get_plan(kernel)
    except UserError as error:
        return refused("failed", str(error))
    except Exception as error:
        return refused("failed", _cannot("imported", kernel, error))
    own = own_knobs(plan_type, asked)
    try:
        device.can_run(plan_type.requires, problem).require(Unsupported)
        tiling = knobs(plan_type(problem, None, device).tiling, own)
        if not tuned:
            tiling.validate(problem, device).require(Infeasible)
        return Point(problem, kernel, device, own, tiling)
    except Unsupported as error:
        return refused("skipped", str(error))
    except UserError as error:
        return refused("infeasible", str(error))
    except Exception as error:
        return refused("failed", _cannot("planned", kernel, error))


def picked(word: str, problem: Problem, device: Device, asked: Mapping[str, Any] | None = None) -> Point | None:
    """What a word of `PICKERS` stands for on this problem; None where no version takes it (the others' records say
    why). Of knobs that were asked for, the tokens of a split count for `fixed_split`."""
    from mla_var3.dispatch import choose
    from mla_var3.ops.fixed import SPLIT_TOKENS, fixed_choice
    from mla_var3.workload.decode import MlaProblem
    from mla_var3.workload.sparse_decode import SparseProblem

    try:
        if word == FIXED_SPLIT:
            if not isinstance(problem, MlaProblem | SparseProblem):
                return None  # no other has splits that can be fixed
            if isinstance(problem, MlaProblem) and problem.workload != workload.DEFAULT:
                return None
            choice = fixed_choice(problem, (asked or {}).get("split_tokens", SPLIT_TOKENS), device)
        else:
            choice = choose(problem, device)
    except Unsupported:
        return None
    return dataclasses.replace(prepare(problem, choice.kernel, device, choice.knobs), picked_by=word)


def _cannot(done: str, kernel: KernelId, error: Exception) -> str:
    return f"{kernel.path.name} could not be {done}: {mistakes.sentence(error)}"


def _check_knobs(kernels: Sequence[KernelId], asked: Mapping[str, Any], pickers: Sequence[str] = ()) -> None:
    """A knob that no chosen kernel has is a typing error."""
    if not asked:
        return
    known: set[str] = set()
    if FIXED_SPLIT in pickers:
        known.add("split_tokens")
    for kernel in kernels:
        try:
            known |= {f.name for f in dataclasses.fields(registry.get_plan(kernel).tiling_type)}
        except Exception:
            continue
    for name in asked:
        if name not in known and known:
            raise UserError(f"no chosen kernel has a knob tiling.{name}: {nearest(name, known)}.")
