"""Picking: the first rule of the problem's workload that holds, and whose version takes the problem.

What a version takes, its plan decides (`requires`, and `validate` of its tiling). A version is also refused where its
language is not installed, where it is of another workload, where no graph can capture it, and where its plan fails. A
rule whose version is refused falls through to the next. `survey` judges all rules and says why; `choose` stops at the
first that is accepted, so that few languages are imported.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue import registry
from mla_var3.dispatch import rules
from mla_var3.errors import Unsupported, UserError, Verdict
from mla_var3.runtime.types import Tiling
from mla_var3.toolchain import mistakes

if TYPE_CHECKING:
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.device import Device
    from mla_var3.dispatch.rule import Bound, Rule
    from mla_var3.runtime.plan import KernelPlan
    from mla_var3.workload import Problem

#: Never picked: torch is the oracle and reads lengths on the host, peers are other people's libraries.
NOT_SERVED = ("torch", "peer")

#: The language whose absence makes serving slow, and that the installation for serving brings. Whether a version of
#: another language would take the problem cannot be asked where it is missing, and nobody who serves needs that one.
_SERVING = "cute-dsl"

_warned: set[str] = set()  # languages

Accepts = Callable[["type[KernelPlan]", "KernelPlan"], Verdict]


@dataclass(frozen=True)
class Choice:
    """What to run. tiling: fields that differ from the version's default. reason: one sentence. records: ids of the
    records that the rule was made from; they do not prove it."""

    kernel: KernelId
    tiling: tuple[tuple[str, Any], ...]
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
class Judged:
    """A rule with its number in the list, from 1, what it would run, and whether that takes the problem."""

    number: int
    rule: Rule
    choice: Choice
    verdict: Verdict


def survey(problem: Problem, device: Device, *, accepts: Accepts | None = None) -> list[Judged]:
    """Every rule of the workload, in order; the first with a good verdict is the one that is picked.

    accepts: a further condition, called with the plan's class and a plan.
    """
    return list(_judged(problem, device, accepts))


def choose(problem: Problem, device: Device, *, accepts: Accepts | None = None) -> Choice:
    """The version and knobs for a problem on a device; `accepts` is as in `survey`.

    Raises `Unsupported` with the reasons when no rule has a version that takes the problem. Where an earlier rule holds
    and its version is in CuTe DSL, which is not installed, a later version is picked, which may be slower. A warning
    says so, once in a process.
    """
    refused = []
    first: Choice | None = None  # whose language is missing
    for judged in _judged(problem, device, accepts):
        choice = judged.choice
        if judged.verdict:
            if first is not None:
                _warn_once(choice, first)
            return choice
        here = not judged.rule.against(problem, device)
        if first is None and here and choice.kernel.language == _SERVING and registry.missing(_SERVING) is not None:
            first = choice
        refused.append(f"{choice.label}: {judged.verdict.reason}")
    why = "; ".join(dict.fromkeys(refused)) or f"workload {problem.workload} has no rules in mla_var3/dispatch/rules"
    raise Unsupported(f"no version takes {problem.label} on {device.key}: {why}.")


def _warn_once(picked: Choice, first: Choice) -> None:
    """Once for a language: a serving loop asks for many shapes."""
    if first.kernel.language in _warned:
        return
    _warned.add(first.kernel.language)
    warnings.warn(
        f"{picked.label} is picked; {first.label} comes first for this problem, but "
        f"{registry.missing(first.kernel.language)}",
        RuntimeWarning,
        stacklevel=3,
    )


@functools.lru_cache(maxsize=64)
def boundaries(workload: str) -> tuple[Bound, ...]:
    """The conditions of a workload's rules that problems of one class may differ in: those that agree in all of them
    are computed by the same version."""
    found = (bound for rule in rules.of(workload) for bound in rule.where if not bound.quantity.of_class)
    return tuple(dict.fromkeys(found))


def unnamed(workload: str) -> list[KernelId]:
    """Versions of a workload that no rule names, so that they are never picked."""
    named = {rule.version for rule in rules.of(workload)}
    mine = (k for k in registry.all_kernels() if k.language not in NOT_SERVED and k.workload == workload)
    return [kernel for kernel in mine if kernel.label not in named]


# ---------------------------------------------------------------- judging
def _judged(problem: Problem, device: Device, accepts: Accepts | None) -> Iterator[Judged]:
    """The rules in order, each with its verdict; plans are imported one at a time, when asked for."""
    here = {kernel.label for kernel in registry.all_kernels()}
    for number, rule in enumerate(rules.of(problem.workload), 1):
        if rule.version not in here:
            continue  # a version that somebody has taken out: the next rule serves
        choice = Choice(rule.kernel, rule.tiling, f"rule {number}, {rule.condition}: {rule.reason}", rule.records)
        against = rule.against(problem, device)
        yield Judged(number, rule, choice, Verdict.no(against) if against else takes(choice, problem, device, accepts))


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
