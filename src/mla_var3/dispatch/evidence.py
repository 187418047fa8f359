"""What the records say of the rules: which boundaries have been timed on both sides, and which cells would tell.

A rule claims that its version is faster than that of another rule: of the rules below it that have another label (a
version with its knobs), the first that takes some of the same problems. Each condition of a rule is a boundary between
the two, and has two sides, each an octave wide. On each side there must be a cell in which both were timed in turn, in
one run. Within the condition the rule's version must be the faster one, and beyond it the other one. The faster one has
the smaller time in the geometric mean over the cells of the side, where the time of a cell is the geometric mean of
burst and sustained. A rule without conditions needs one such cell anywhere. It takes what is left, so that rules behind
the first one without conditions make no claim.

Where only one of the two takes the problems of a side, there is nothing to compare. The same is said where no problem
of the side was found that both take, and where the language of one is not installed.

`missing` has the sides that were not timed as cells for `experiment=dispatch_boundaries`. A side whose records speak
against the rule was timed, and is not among them. All of this is judged from all records, which a checkout has:
`complete` says whether they are here.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mla_var3 import paths
from mla_var3.catalogue import registry, spoken
from mla_var3.device import Device
from mla_var3.dispatch import rules, selection
from mla_var3.dispatch.rule import plain
from mla_var3.errors import UserError
from mla_var3.workload import DEFAULT, get, problem_from_record

if TYPE_CHECKING:
    from mla_var3.dispatch.rule import Bound, Rule
    from mla_var3.record import Record
    from mla_var3.workload import Problem

STATES = ("burst", "sustained")
#: What is said in place of a proof where the records are not `complete`.
INCOMPLETE = "whether rules are proved is judged from all records, and those are only in a checkout of the project."
#: Experiments that time one version where others would be faster, or few calls, or calls whose order decides, or that
#: are for a comparison of dates and commits.
_APART = ("mla_var6_plus", "tuning", "host_cost", "one_turn", "nightly", "against")
_KERNEL = re.compile(r'"kernel": ?(\{[^}]*\})')
_TRIED = 40  # recorded problems that a missing cell is looked for near


@dataclass(frozen=True)
class Timed:
    """A record of a version: what `timed` returns. `of_records` makes them of libraries' records too, where it is given
    some. us: time by state."""

    record: Record
    problem: Problem
    us: Mapping[str, float]

    @property
    def label(self) -> str:
        """The version, and its knobs where they were asked for."""
        return spoken.name(self.record)

    @property
    def code(self) -> str:
        """Digest of what ran; empty where the record has none."""
        return str((self.record.code or {}).get("digest", ""))

    @property
    def mean_us(self) -> float:
        """Of the states, geometric."""
        return math.exp(math.fsum(map(math.log, self.us.values())) / len(self.us))


# ---------------------------------------------------------------- reading
def complete() -> bool:
    """Whether all records are here, as in a checkout: of some of them alone, no rule is called proved or refuted."""
    return paths.repo_root() is not None


def timed(workload: str, device: str) -> tuple[Timed, ...]:
    """What the shipped records have of a workload's versions on a device, oldest first. An installed package has only
    the records that rules name and those of quickstart's cells."""
    return _timed(workload, paths.shipped_results_dir() / device)


@functools.lru_cache(maxsize=32)
def _timed(workload: str, folder: Path) -> tuple[Timed, ...]:
    ours = {kernel: kernel.label for kernel in registry.all_kernels() if kernel.language not in selection.NOT_SERVED}
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            found += [line for line in lines if _may_count(line, workload, ours)]
    return of_records(_read(found), workload)


def _may_count(line: str, workload: str, known: Collection[registry.KernelId]) -> bool:
    """Whether a record may be one that counts, by its text: reading it whole takes many times as long."""
    if '"passed"' not in line or (workload != DEFAULT and f'"workload":"{workload}"' not in line):
        return False
    named = _KERNEL.search(line)
    try:
        return named is not None and registry.KernelId.from_record(json.loads(named[1])) in known
    except (ValueError, KeyError):
        return False


def _read(lines: Iterable[str]) -> Iterator[Record]:
    from pydantic import ValidationError

    from mla_var3.record import Record

    for line in lines:
        try:
            yield Record.model_validate_json(line)
        except ValidationError:  # a torn line: `mla-var3 report` names it
            continue


def of_records(records: Iterable[Record], workload: str) -> tuple[Timed, ...]:
    """Those of the records that count, oldest first: of versions that are here, and of libraries."""
    known = {kernel.label for kernel in registry.all_kernels() if kernel.language != "torch"}
    found = []
    for record in records:
        apart = record.experiment in _APART or record.kernel.label not in known
        if record.status != "passed" or record.time_us is None or apart:
            continue
        if record.problem.get("workload", DEFAULT) != workload:
            continue
        us = {state: value for state in STATES if (value := record.median(state)) is not None}
        if us:
            found.append(Timed(record, problem_from_record(record.problem), us))
    return tuple(sorted(found, key=lambda one: one.record.at))


# ---------------------------------------------------------------- claims
@dataclass(frozen=True)
class Side:
    """One side of a boundary. text: which. ratios: of the time of what is picked there over the other's, by problem.
    probe: a problem that would tell, where none was timed; None where none was found that both take."""

    text: str
    ratios: Mapping[Problem, float]
    probe: Problem | None = None

    @property
    def proved(self) -> bool:
        """Whether it was timed and what is picked is the faster one in the mean, or there is nothing to compare."""
        return self.mean < 1 if self.ratios else self.probe is None

    @property
    def mean(self) -> float:
        return math.exp(math.fsum(map(math.log, self.ratios.values())) / len(self.ratios))

    def __str__(self) -> str:
        if not self.ratios:
            said = (
                "only one of the two takes them"
                if self.probe is None
                else f"not timed in turn since their code changed last; {self.probe.label} would tell"
            )
            return f"{self.text}: {said}"
        few = "1 cell" if len(self.ratios) == 1 else f"{len(self.ratios)} cells"
        worst = max(self.ratios.values())
        return f"{self.text}: {self.mean:.3f} of the other's time in {few}, at worst {worst:.3f}"


@dataclass(frozen=True)
class Claim:
    """That the version of a rule is faster than that of another one further down, and slower than it beyond the
    boundary. bound: the condition whose boundary it is; None for a claim without one."""

    number: int
    rule: Rule
    other: Rule
    bound: Bound | None
    sides: tuple[Side, ...]

    @property
    def proved(self) -> bool:
        return all(side.proved for side in self.sides)

    @property
    def empty(self) -> bool:
        """Whether no problem was found that both versions take."""
        return not any(side.ratios or side.probe for side in self.sides)

    @property
    def slower(self) -> bool:
        """Whether records speak against it."""
        return any(side.ratios and side.mean >= 1 for side in self.sides)


def claims(workload: str, device: Device, found: Sequence[Timed] | None = None) -> list[Claim]:
    """Every claim of a workload's rules on a device. found: what was timed there; default: the shipped records, which
    must be `complete`, since claims that are judged from some of them may come out otherwise."""
    here = [(number, rule) for number, rule in enumerate(rules.of(workload), 1) if rule.fits(device)]
    found = timed(workload, device.key) if found is None else found
    problems = _problems(workload, found)
    made = []
    last = next((i for i, (_, rule) in enumerate(here) if not rule.where), len(here) - 1)
    for i, (number, rule) in enumerate(here[: last + 1]):
        others = dict.fromkeys(later.label for _, later in here[i + 1 :] if later.label != rule.label)
        rivals = [next(later for _, later in here[i + 1 :] if later.label == label) for label in others]
        for bound in rule.where or (None,):
            # The next one down that takes some of the same problems: with others there is nothing to compare.
            # The rest, which is what no condition tells, may be rare among what was timed.
            tried = problems if bound else [*dict.fromkeys(one.problem for one in found), *problems]
            told = (_claim(number, rule, other, bound, device, found, tried) for other in rivals)
            first = next((claim for claim in told if not claim.empty), None)
            if first is not None:
                made.append(first)
    return made


def _claim(
    number: int, rule: Rule, other: Rule, bound: Bound | None, device: Device, found: Sequence[Timed],
    problems: Sequence[Problem],
) -> Claim:  # fmt: skip
    pair = (rule.label, other.label)
    both = _in_turn(found, pair)
    sides = []
    for near in (True, False) if bound else (True,):
        mine, theirs = pair if near else pair[::-1]
        ratios = {
            problem: us[mine] / us[theirs]
            for problem, us in both.items()
            if _on_side(problem, device, rule, other, bound, near)
        }
        probe = None if ratios else _probe(problems, device, rule, other, bound, near)
        sides.append(Side(_words(bound, near), ratios, probe))
    return Claim(number, rule, other, bound, tuple(sides))


def missing(workload: str, device: Device) -> dict[Problem, tuple[str, ...]]:
    """Cells that would prove, or refute, what nothing was timed for: each with the versions that are to take turns.
    Raises `UserError` where not all records are here."""
    if not complete():
        raise UserError(
            "what the rules lack is told from all records, and those are only in a checkout of the project: "
            "run this there."
        )
    found: dict[Problem, tuple[str, ...]] = {}
    for claim in claims(workload, device):
        for side in claim.sides:
            if side.probe is not None:
                pair = (claim.rule.version, claim.other.version)
                found[side.probe] = tuple(dict.fromkeys((*found.get(side.probe, ()), *pair)))
    return found


def _words(bound: Bound | None, near: bool) -> str:
    if bound is None:
        return "anywhere"
    low, high = (bound.value, 2 * bound.value) if bound.above == near else (bound.value / 2, bound.value)
    return f"{bound.quantity.name} {plain(low)} to {plain(high)}"


def _deciding(problem: Problem, device: Device) -> Rule | None:
    """The rule that decides: the first that holds and whose version takes the problem, as far as can be told here."""
    for rule in rules.of(problem.workload):
        if not rule.against(problem, device) and (registry.missing(rule.kernel) or _takes(rule, problem, device)):
            return rule
    return None


def _takes(rule: Rule, problem: Problem, device: Device) -> bool:
    return bool(selection.takes(selection.Choice(rule.kernel, rule.tiling, ""), problem, device))


def _on_side(problem: Problem, device: Device, rule: Rule, other: Rule, bound: Bound | None, near: bool) -> bool:
    """Whether a problem is of the rule (near), or of the other one just beyond the boundary."""
    deciding = _deciding(problem, device)
    if deciding is None or deciding.label != (rule if near else other).label:
        return False
    if bound is None:
        return deciding == rule
    value = bound.quantity.of(problem)
    within = bound.value / 2 <= value <= 2 * bound.value
    others = all(one.holds(problem) for one in rule.where if one is not bound)
    return within and others and bound.holds(problem) == near


def _in_turn(found: Sequence[Timed], pair: tuple[str, str]) -> dict[Problem, dict[str, float]]:
    """Times of both versions in the newest run in which they took turns, by problem. A record counts for nothing once
    other code of its version was timed on the problem."""
    newest = {(one.problem, one.label): one.code for one in found}
    by_run: dict[tuple[Problem, str], dict[str, Timed]] = {}
    for one in found:
        if one.label in pair and one.record.run and one.code == newest[one.problem, one.label]:
            by_run.setdefault((one.problem, one.record.run), {})[one.label] = one
    latest: dict[Problem, dict[str, float]] = {}
    for (problem, _), both in by_run.items():  # oldest first
        if len(both) == 2:
            states = set.intersection(*(set(one.us) for one in both.values()))
            if states:
                latest[problem] = {
                    label: math.prod(one.us[state] for state in states) ** (1 / len(states))
                    for label, one in both.items()
                }
    return latest


# ---------------------------------------------------------------- what would tell
def _problems(workload: str, found: Sequence[Timed]) -> list[Problem]:
    """Problems to look for a missing cell near: those that were timed most often first, the workload's own last."""
    counted = Counter(one.problem for one in found)
    own: Problem = get(workload).problem()
    return [*(problem for problem, _ in counted.most_common(_TRIED)), own]


def _probe(
    problems: Sequence[Problem], device: Device, rule: Rule, other: Rule, bound: Bound | None, near: bool
) -> Problem | None:
    """A problem on a side of a boundary that both versions take; None where none is found."""
    for problem in _candidates(problems, bound, near):
        if all(_takes(one, problem, device) for one in (rule, other)) and _on_side(
            problem, device, rule, other, bound, near
        ):
            return problem
    return None


def _candidates(problems: Sequence[Problem], bound: Bound | None, near: bool) -> Iterator[Problem]:
    for problem in problems:
        if bound is None:
            yield problem
            continue
        value = 2 * bound.value if bound.above == near else bound.value
        try:
            yield from bound.quantity.near(problem, value)
        except UserError:  # of a problem that cannot have this value
            continue
