"""What a rule of the dispatcher is: a version, the problems and devices that it is for, and why.

A workload has an ordered list of rules; the first that holds, and whose version takes the problem, decides. A condition
is a boundary in one quantity of the problem, so that `evidence` can look for records on both sides of it.

Tests demand of the rules of a workload (`rules/<workload>.py`):

- The last rule has no `where`, so that it takes what the others leave.
- Together the rules name every version of the workload that is here, those in torch and libraries aside.
- A rule names a version of that workload, and no library and no version in torch.
- Each id in `records` is of a shipped record of the H200 or the H100 that counts for `evidence`. It says which code it
  timed, and a rule of the list names its version with its knobs.
- Among a rule's `records` are some of its own version with its knobs, and each of the others is of the same run as one
  of these, so that the two took turns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue.registry import KernelId

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload import Problem

HOPPER = ("sm_90a",)


@dataclass(frozen=True)
class Quantity:
    """A number of a problem, which conditions are about. of(problem): the number, above 0. near(problem, value): other
    problems, which differ from this one in that their number is about `value`, the best one to measure first.
    of_class: problems of one class, whatever their sizes, have the same number."""

    name: str
    of: Callable[[Any], float]
    near: Callable[[Any, float], Iterable[Any]]
    of_class: bool = False


@dataclass(frozen=True)
class Bound:
    """A quantity is at most a value or, with `above`, more than it."""

    quantity: Quantity
    value: float
    above: bool = False

    def holds(self, problem: Problem) -> bool:
        return (self.quantity.of(problem) > self.value) == self.above

    def __str__(self) -> str:
        return f"{self.quantity.name} {'above' if self.above else 'at most'} {plain(self.value)}"


def plain(number: float) -> str:
    """A quantity in a sentence."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:g}"


@dataclass(frozen=True)
class Rule:
    """version: its label. where: every condition must hold. archs: architectures that the rule is for; () is any.
    tiling: knobs that differ from the version's default. records: ids of the records that its author looked at when the
    rule was made; they are no proof of it, which `evidence` looks for in all records."""

    version: str
    reason: str
    where: tuple[Bound, ...] = ()
    archs: tuple[str, ...] = ()
    tiling: tuple[tuple[str, Any], ...] = ()
    records: tuple[str, ...] = ()

    @functools.cached_property
    def kernel(self) -> KernelId:
        return KernelId.parse(self.version)

    @property
    def label(self) -> str:
        """The version with its knobs, as records are named."""
        knobs = ", ".join(f"{name}={value}" for name, value in sorted(self.tiling))
        return f"{self.version} ({knobs})" if knobs else self.version

    @property
    def condition(self) -> str:
        """In words."""
        return " and ".join(map(str, self.where)) or "any problem that it takes"

    def fits(self, device: Device) -> bool:
        """Whether the rule is for a device."""
        return not self.archs or device.arch in self.archs

    def holds(self, problem: Problem) -> bool:
        """Whether all conditions on the problem hold."""
        return all(bound.holds(problem) for bound in self.where)

    def against(self, problem: Problem, device: Device) -> str:
        """Why the rule is not for this problem and device; empty where it is."""
        if not self.fits(device):
            return f"the rule is for {' and '.join(self.archs)}, and this is {device.arch}"
        failing = next((bound for bound in self.where if not bound.holds(problem)), None)
        if failing is None:
            return ""
        return f"the rule is for {failing}, and the problem has {plain(failing.quantity.of(problem))}"
