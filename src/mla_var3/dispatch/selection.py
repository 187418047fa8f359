"""Picking: every version that takes the problem, in the order of its predicted time.

`survey` judges all of them and says why; `choose` stops at the first that accepts the problem and the device; `pick`
does that once for a neighbourhood of batch sizes and lengths, which is what a serving loop can afford. A version that
nobody measured is taken only where no measured one accepts the problem, and the reason says so.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue import registry
from mla_var3.dispatch import model
from mla_var3.dispatch import table as tables
from mla_var3.errors import Unsupported, UserError, Verdict
from mla_var3.runtime.types import Tiling
from mla_var3.toolchain import mistakes
from mla_var3.workload.decode import MlaProblem, of_class

if TYPE_CHECKING:
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.device import Device
    from mla_var3.dispatch.table import DeviceTable, Recipe, Table
    from mla_var3.runtime.plan import KernelPlan
    from mla_var3.workload import Problem

#: Languages in the order in which versions that nobody measured are tried.
_UNMEASURED = ("cute-dsl", "triton", "cutile-dsl")

#: The language whose absence makes serving slow, and that the installation for serving brings. Whether a version of
#: another language would take the problem cannot be asked where it is missing, and nobody who serves needs that one.
_SERVING = "cute-dsl"

_warned: set[str] = set()  # languages

Accepts = Callable[["type[KernelPlan]", "KernelPlan"], Verdict]


@dataclass(frozen=True)
class Choice:
    """What to run. tiling: fields that differ from the version's default. us: predicted microseconds, None where nobody
    measured. reason: one sentence. records: ids of the records that the prediction rests on, nearest first."""

    kernel: KernelId
    tiling: tuple[tuple[str, Any], ...]
    us: float | None
    reason: str
    records: tuple[str, ...] = ()

    @property
    def knobs(self) -> dict[str, Any]:
        return dict(self.tiling)

    @property
    def label(self) -> str:
        knobs = ", ".join(f"{name}={value}" for name, value in self.tiling)
        return f"{self.kernel.label} ({knobs})" if knobs else self.kernel.label

    def plan(self, problem: Problem, device: Device | None) -> KernelPlan:
        """The version's plan with these knobs."""
        return _plan(registry.get_plan(self.kernel), problem, device, self.knobs)


@dataclass(frozen=True)
class Refused:
    """A version that does not take the problem, and why."""

    label: str
    reason: str


def survey(
    problem: MlaProblem,
    device: Device,
    *,
    table: Table | None = None,
    kernels: Iterable[KernelId] | None = None,
    accepts: Accepts | None = None,
) -> tuple[list[Choice], list[Refused]]:
    """Every version, judged: those that take the problem in the order of preference, and the others.

    kernels: only these versions. accepts: a further condition, called with the plan's class and a plan.
    """
    chosen: list[Choice] = []
    refused: list[Refused] = []
    for choice, verdict in _candidates(problem, device, table or tables.load(), kernels, accepts):
        if verdict:
            chosen.append(choice)
        else:
            refused.append(Refused(choice.label, verdict.reason))
    return chosen, refused


def choose(
    problem: Problem,
    device: Device,
    *,
    table: Table | None = None,
    kernels: Iterable[KernelId] | None = None,
    accepts: Accepts | None = None,
) -> Choice:
    """The version and knobs for a problem on a device; `survey` for the arguments.

    Only what is predicted to be faster is looked at before the one that is picked, so few languages are imported.
    Raises `Unsupported` with the reasons when no version takes the problem. Warns once where only the package that
    serving is installed with stands between the problem and a version that is predicted to be faster: serving would be
    slow without a word.
    """
    refused = []
    faster: Choice | None = None  # the first that is predicted to be so, and whose language is missing
    for choice, verdict in _candidates(problem, device, table or tables.load(), kernels, accepts):
        if verdict:
            if faster is not None and _same_architecture(device, table or tables.load()):
                _warn_once(choice, faster)
            return choice
        language = choice.kernel.language
        if faster is None and choice.us is not None and language == _SERVING and registry.missing(language) is not None:
            faster = choice
        refused.append(f"{choice.label}: {verdict.reason}")
    why = "; ".join(dict.fromkeys(refused)) or "there is no version to choose from"
    raise Unsupported(f"no version takes {problem.label} on {device.key}: {why}.")


def _same_architecture(device: Device, table: Table) -> bool:
    """Whether predictions for a device rest on what ran on its architecture."""
    measured = table.nearest(device)
    return bool(measured.recipes) and measured.hardware.arch == device.arch


def _warn_once(picked: Choice, faster: Choice) -> None:
    """Once for a language: a serving loop asks for many shapes."""
    if faster.kernel.language in _warned:
        return
    _warned.add(faster.kernel.language)
    taken = "" if picked.us is None else f", predicted to take {picked.us:.1f} us"
    warnings.warn(
        f"{picked.label} is picked{taken}; {faster.label} may do it in {faster.us:.1f} us, but "
        f"{registry.missing(faster.kernel.language)}",
        RuntimeWarning,
        stacklevel=3,
    )


def pick(problem: MlaProblem, device: Device) -> Choice:
    """`choose` for the neighbourhood of the problem's sizes: asked again, it costs microseconds.

    Sizes are taken to the nearest quarter of an octave (4096 stays 4096), packed query tokens too, the mean length to
    the nearest half octave under the longest. Where what is picked so has no room for the problem's own sizes, or
    nothing has room for its neighbourhood's, it is picked for the problem itself.
    """
    shape = (neighbourhood(problem.b), neighbourhood(max(problem.t, 1)))
    halves = round(2 * math.log2(problem.fill))
    queries = neighbourhood(max(problem.query_tokens, 1)) if problem.packed else None
    try:
        choice = _pick(problem.problem_class(), *shape, queries, halves, device)
    except UserError:
        return choose(problem, device)
    return choice if takes(choice, problem, device) else choose(problem, device)


@functools.lru_cache(maxsize=4096)
def _pick(problem_class: Any, b: int, t: int, queries: int | None, halves: int, device: Device) -> Choice:
    lengths: Any = "uniform"
    if halves and b > 1:
        rest = max(0, round((2 ** (halves / 2) * b - 1) * t / (b - 1)))
        lengths = (t, *(rest,) * (b - 1))
    return choose(of_class(problem_class, b=b, t=t, lengths=lengths, query_tokens=queries), device)


def neighbourhood(size: int) -> int:
    """The size that stands for its neighbourhood, a quarter of an octave wide."""
    return round(2 ** (round(4 * math.log2(size)) / 4))


def forget() -> None:
    """Drops what `pick` remembers: for tests, and after a table was rebuilt."""
    _pick.cache_clear()
    tables.load.cache_clear()


# ---------------------------------------------------------------- candidates
def _candidates(
    problem: Problem, device: Device, table: Table, kernels: Iterable[KernelId] | None, accepts: Accepts | None
) -> Iterator[tuple[Choice, Verdict]]:
    """Choices in order of preference, each with its verdict; plans are imported one at a time, when asked for."""
    served = (k for k in registry.all_kernels() if k.language not in tables.NOT_SERVED)
    known = [k for k in served if k.layer == problem.layer]
    if kernels is not None:
        wanted = set(kernels)
        known = [k for k in known if k in wanted]
    measured = table.nearest(device)
    # The table has decode; of other workloads a language's rank decides.
    ranked = rank(measured, problem, device, known) if isinstance(problem, MlaProblem) else []
    seen = {choice.kernel for choice in ranked}
    unmeasured = [k for k in known if k not in seen]
    order = {language: i for i, language in enumerate(_UNMEASURED)}
    unmeasured.sort(key=lambda k: (order.get(k.language, len(order)), -k.version, k.label))
    for kernel in unmeasured:
        reason = "the table has no time of it, so it is taken only where no measured version takes the problem"
        ranked.append(Choice(kernel, (), None, reason))
    for choice in ranked:
        yield choice, takes(choice, problem, device, accepts)


def rank(
    measured: DeviceTable, problem: MlaProblem, device: Device, known: Iterable[KernelId] | None = None
) -> list[Choice]:
    """Measured recipes by their predicted time, without asking whether they take the problem."""
    allowed = None if known is None else set(known)
    recipes = [r for r in measured.recipes if (allowed is None or r.kernel in allowed) and r.speaks_of(problem)]
    if not recipes:
        return []
    # A device without peaks (a slice of one, or one nobody entered) is judged by the limits of the measured one.
    limits = device if model.has_peaks(device) else measured.hardware
    place, limit = model.place_of(problem, limits), model.limit_us(problem, limits)
    guesses = {r: model.predict(place, limit, measured.floor_us, measured.points(r)) for r in recipes}
    nearest = min(guess.distance for guess in guesses.values())

    def doubted(recipe: Recipe) -> float:
        guess = guesses[recipe]
        us = guess.us * math.exp(model.DOUBT * (guess.distance - nearest))
        # A base version is there to be read: it serves what the later ones of its design do not take.
        later = [doubted(other) for other in recipes if _follows(other.kernel, recipe.kernel)]
        return max([us, *(math.nextafter(most, math.inf) for most in later)])

    where = "" if measured.device == device.key else f", from measurements on {measured.device}"
    choices = []
    for recipe in sorted(recipes, key=lambda r: (doubted(r), r.label)):
        guess = guesses[recipe]
        near = "measured here" if guess.distance < 1e-9 else f"{guess.distance:.1f} octaves from the nearest record"
        reason = f"predicted {guess.us:.1f} us, {near}{where}"
        choices.append(Choice(recipe.kernel, recipe.tiling, guess.us, reason, guess.records))
    return choices


def _follows(later: KernelId, base: KernelId) -> bool:
    """Whether a version is a later one of a base version's design and language."""
    return later.version > base.version == 0 and (later.language, later.design) == (base.language, base.design)


def takes(choice: Choice, problem: Problem, device: Device, accepts: Accepts | None = None) -> Verdict:
    """Whether a version takes a problem on a device, with the choice's knobs; `survey` for `accepts`."""
    missing = registry.missing(choice.kernel)
    if missing:
        return Verdict.no(missing)
    try:
        plan_type = registry.get_plan(choice.kernel)
        if plan_type.workload.name != problem.workload:
            return Verdict.no(f"it computes {plan_type.workload.name}, from other inputs")
        if not plan_type.graph_capturable:
            return Verdict.no("it waits for the device, so a graph cannot hold it")
        plan = _plan(plan_type, problem, device, choice.knobs)
        verdict = plan.supported()
        verdict = plan.feasible() if verdict else verdict
        return accepts(plan_type, plan) if verdict and accepts is not None else verdict
    except UserError as error:
        return Verdict.no(str(error))
    except Exception as error:  # a version under construction must not stop the others
        return Verdict.no(f"it cannot be planned: {mistakes.sentence(error)}")


def _plan(plan_type: Any, problem: Problem, device: Device | None, knobs: dict[str, Any]) -> KernelPlan:
    plan: KernelPlan = plan_type(problem, None, device)
    if not knobs:
        return plan
    tiling: Tiling = plan.tiling.from_record({**plan.tiling.to_record(), **knobs})
    made: KernelPlan = plan_type(problem, tiling, device)
    return made


# ---------------------------------------------------------------- how good is it
@dataclass(frozen=True)
class HeldOut:
    """A cell that the table was asked about as if it had never been measured. ratio: time of what was picked over the
    best time measured there."""

    problem: MlaProblem
    picked: str
    best: str
    ratio: float


def hold_out(measured: DeviceTable) -> list[HeldOut]:
    """Leaves out one problem after the other and looks how far from its best the pick from the others lands.

    Picks are among the versions that were measured on the problem, for of the others nobody knows the time. Pages of
    another size are loaded by other code, so a problem with the only pages of its size that a version was measured on
    is not left out: from the others nobody can tell what they cost.
    """
    results = []
    problems = dict.fromkeys(point.problem for recipe in measured.recipes for point in recipe.points)
    for problem in problems:
        times: dict[Any, float] = {}
        for recipe in measured.recipes:
            for point in recipe.points:
                if point.problem == problem and not recipe.tiling:
                    times[recipe.kernel] = point.us
        others = measured.without(problem)
        ranked = rank(others, problem, measured.hardware)
        picked = next((c for c in ranked if c.kernel in times and not c.tiling), None)
        told = {
            recipe.kernel
            for recipe in others.recipes
            if not recipe.tiling and any(point.problem.page_size == problem.page_size for point in recipe.points)
        }
        if picked is None or len(times) < 2 or not times.keys() <= told:
            continue
        best = min(times, key=lambda kernel: times[kernel])
        ratio = times[picked.kernel] / times[best]
        results.append(HeldOut(problem, picked.kernel.label, best.label, ratio))
    return results


def summary(results: list[HeldOut]) -> dict[str, Any]:
    """cells, the geometric mean of the ratios, and the worst cell."""
    if not results:
        return {"cells": 0}
    mean = math.exp(sum(math.log(r.ratio) for r in results) / len(results))
    worst = max(results, key=lambda r: r.ratio)
    return {
        "cells": len(results),
        "mean_ratio": round(mean, 4),
        "worst": {
            "problem": worst.problem.label,
            "picked": worst.picked,
            "best": worst.best,
            "ratio": round(worst.ratio, 4),
        },
    }
