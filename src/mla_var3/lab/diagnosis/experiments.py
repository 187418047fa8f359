"""What to try next: each with the gain that records predict for it, and which records these are.

Three things predict a gain:

- another kernel is faster on this very problem: it gains at least what that kernel is ahead by;
- a technique that the version does not state to have was measured with and without, on other problems of the same
  bound: the nearest of them says how much it may gain here;
- the same version, compiled for the same class of problems, is nearer to its limit on another one: what this problem
  adds to that rate (prologue, beginnings and ends of splits, merges, unequal work, the gap between calls) is the most
  that there is to gain.

What the records of a problem leave to its limit caps them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mla_var3.catalogue import registry, spoken
from mla_var3.catalogue.registry import PEER
from mla_var3.lab.diagnosis.evidence import Evidence, Record
from mla_var3.lab.knowledge.find import Found
from mla_var3.record import ASIDE, as_ratio
from mla_var3.record import Record as Model
from mla_var3.workload import Problem, problem_from_record

#: A gain below this is within what two runs differ by.
LEAST = 1.01
#: Above this a share of a limit is of a problem that fits into the L2 cache, or of a limit of another machine.
_MOST_SHARE = 1.0


@dataclass(frozen=True)
class Experiment:
    """what: to do. gain: predicted, time before over time after. at_most: it bounds the gain and does not predict one.
    us: the time that would be left. why: what the prediction rests on, in words. records: ids, that of the evidence
    first. state: burst or sustained."""

    what: str
    gain: float
    at_most: bool
    state: str
    us: float | None
    why: str
    records: tuple[str, ...]


def suggest(e: Evidence, techniques: Sequence[Found], records: Iterable[Record]) -> list[Experiment]:
    """Experiments by what predicts them, those that were measured by their gain and then the bounds. None for a library
    and for a version that is retired. techniques: optimizations whose triggers fit and that the version does not
    have."""
    if not can_change(e):
        return []
    mine = Model.model_validate(e.record) if (e.record or {}).get("time_us") else None
    state = "burst" if mine is None or mine.median("burst") is not None else "sustained"
    found = [one for entry in techniques if (one := _technique(e, entry, mine, state)) is not None]
    bounds: list[Experiment] = []
    if mine is not None:
        near = [r for r in records if r["device"] == e.device_key and _timed(r)]
        found += _faster(e, mine, state, near)
        bounds += _same_version(e, mine, state, near)
    return [*sorted(found, key=lambda one: -one.gain), *bounds]


def can_change(e: Evidence) -> bool:
    """Whether it is a version that is here, and no library."""
    return e.kernel.language != PEER and e.kernel in registry.all_kernels()


def _timed(record: Record) -> bool:
    return bool(record.get("time_us")) and record.get("experiment") not in ASIDE


def _made(mine: Model | None, state: str, gain: float) -> tuple[float, float | None]:
    """(the gain, capped by what is left to the limit; the time after it)."""
    us = None if mine is None else mine.median(state)
    share = None if mine is None else mine.of_limit(state)
    capped = gain if share is None else min(gain, max(1.0, 1 / share))
    return capped, None if us is None else us / capped


# ---------------------------------------------------------------- techniques
def _technique(e: Evidence, found: Found, mine: Model | None, state: str) -> Experiment | None:
    """By the pair of records whose problem is nearest to this one, of the same bound."""
    pairs = [
        (distance, gain)
        for gain in found.entry.get("gains", [])
        if gain["state"] == state and gain["bound"] in (None, e.bound)
        if (distance := _distance(e.problem, problem_from_record(gain["problem"]))) is not None
    ]
    if not pairs:
        return None
    nearest = min(pairs, key=lambda pair: pair[0])[1]
    gain, us = _made(mine, state, nearest["speedup"])
    if gain < LEAST:
        return None
    cell = problem_from_record(nearest["problem"]).label
    why = (
        f"{as_ratio(nearest['speedup'])}x with it on {cell} ({nearest['device']}), the nearest problem of the same "
        "bound that it was measured on"
    )
    what = f"{found.entry['title']} (docs/knowledge/{found.entry['path']})"
    return Experiment(what, gain, False, state, us, why, (nearest["record"], nearest["over"]))


#: Sizes of a problem that a speed depends on; query tokens and heads count as query rows.
_SIZES = ("b", "t", "rows", "n", "topk", "d")


def _distance(one: Problem, other: Problem) -> float | None:
    """How far two problems of a workload lie apart, in doublings of their sizes; None of two workloads."""
    if one.workload != other.workload:
        return None
    pairs = [(getattr(one, name, None), getattr(other, name, None)) for name in _SIZES]
    known = [(a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int) and a > 0 and b > 0]
    return math.fsum(abs(math.log2(a / b)) for a, b in known)


# ---------------------------------------------------------------- other records
def _faster(e: Evidence, mine: Model, state: str, records: Sequence[Record]) -> Iterator[Experiment]:
    """The fastest contender on this problem, where it is ahead by more than measurements differ."""
    wanted = e.problem.to_record()
    cell = [Model.model_validate(r) for r in records if dict(r["problem"]) == wanted]
    ahead = []
    for other in spoken.speaking(cell):
        ratio = other.limit_speedup(mine, state)
        if ratio is not None and ratio > (LEAST if other.run == mine.run else spoken.RUNS_DIFFER):
            ahead.append((ratio, other))
    if not ahead:
        return
    top = max(ratio for ratio, _ in ahead)
    # Of two that runs cannot tell apart, the one that is here: its code can be read, compiled and compared.
    ratio, best = max(ahead, key=lambda pair: (spoken.live(pair[1]) and pair[0] * spoken.RUNS_DIFFER > top, pair[0]))
    name = spoken.name(best)
    gain, us = _made(mine, state, ratio)
    turn = "in the same run" if best.run == mine.run else "each time over the limit of its own run"
    how = " (retired: its devlog names the commit)"
    if spoken.live(best):
        compiled = registry.is_compiled(best.kernel.language) and not spoken.is_peer(best)
        how = f" (mla-var3 diff {e.label} {best.kernel.label})" if compiled else ""
    why = f"{name} takes {best.median(state):,.1f} us on this problem, {as_ratio(ratio)} times as fast, {turn}"
    yield Experiment(f"do what {name} does otherwise{how}", gain, False, state, us, why, (best.id, mine.id))


def _same_version(e: Evidence, mine: Model, state: str, records: Sequence[Record]) -> Iterator[Experiment]:
    """What this problem adds to the rate of the same version where it is nearest to its limit."""
    share, us = mine.of_limit(state), mine.median(state)
    if share is None or us is None or mine.limits is None:
        return
    wanted, bound = e.problem.problem_class().key(), mine.limits.bound
    candidates = [
        Model.model_validate(r)
        for r in records
        if r["kernel"] == (e.record or {}).get("kernel") and (r.get("limits") or {}).get("bound") == bound
    ]
    same = [
        r
        for r in spoken.speaking(candidates)
        if r.kernel.label == e.label and problem_from_record(r.problem).problem_class().key() == wanted
    ]
    shares = [(s, r) for r in same if (s := r.of_limit(state)) is not None and share * LEAST < s <= _MOST_SHARE]
    if not shares:
        return
    best, reference = max(shares, key=lambda pair: pair[0])
    # No call is shorter than the shortest one that was recorded: a launch takes its time, whatever it does.
    shortest = min(r["time_us"][state]["median"] for r in records if r["time_us"].get(state))
    gain, left = _made(mine, state, min(best / share, us / shortest))
    if gain < LEAST:
        return
    assert left is not None
    why = (
        f"the same version reaches {100 * best:.1f} % of its limit on {reference.problem_label} and "
        f"{100 * share:.1f} % here, so that {us - left:,.1f} of {us:,.1f} us come on top of that rate"
    )
    what = (
        "shorten what this problem adds to the main loop: prologue, beginnings and ends of splits, merges, unequal "
        "work, the gap between calls (mla-var3 profile says which)"
    )
    yield Experiment(what, gain, True, state, left, why, (reference.id, mine.id))
