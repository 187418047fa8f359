"""Which record speaks for a kernel in a cell, and what a cell answers: the rule of every table, page and picture.

A cell is a problem on a device. Of each contender one record speaks:

- of a version the newest that timed the code which is here today; where none did, the newest. One that timed a cool
  chip and one at its power limit counts before one that timed only one of the two, and one of a run in which a library
  took turns before one of a run without: cards differ by more than versions do.
- of a library the one of the run that speaks for the fastest version, so that the two took turns; where it was not in
  that run, its newest.

What the dispatcher picked is the version that it picked, and no contender of its own. Contenders are compared by the
time of a call with its share of what the calls of a step make once, as a share of the limit of its own run: within one
run that is the plain ratio of the times. A version whose record is of another run than those it is compared with, or of
code that has changed since, is ahead of them only if it is by more than runs differ (`RUNS_DIFFER`). So is a library
whose record is of another run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_var3.catalogue import ledger, registry
from mla_var3.record import ASIDE, STATES, TUNED

if TYPE_CHECKING:
    from mla_var3.record import Record

PEER = "peer"
FIXED_SPLIT, DISPATCH = "fixed_split", "dispatch"

#: A chip at its power limit was seen up to this much slower than another one, which limits of memory do not show.
RUNS_DIFFER = 1.06

TODAY = (ledger.SAME, ledger.LIBRARY)


def name(record: Record) -> str:
    """Of the contender: the version, and in brackets how it was asked for when not by its default tiling."""
    label, asked = str(record.kernel.label), record.requested
    if record.picked_by == FIXED_SPLIT:
        return f"{FIXED_SPLIT} ({label})"
    if isinstance(asked, Mapping) and asked:
        return f"{label} ({', '.join(f'{k}={v}' for k, v in sorted(asked.items()))})"
    return f"{label} (tuned)" if asked == TUNED else label


def is_peer(record: Record) -> bool:
    """Whether a record is of somebody else's library."""
    return record.kernel.language == PEER


def standing(record: Record) -> str:
    """How the code that a record timed stands to the code that is here: one of the words of `catalogue.ledger`."""
    label = str(record.kernel.label)
    if not is_peer(record) and record.source.hash == ledger.source_of(label):
        return ledger.SAME
    from mla_var3.workload import problem_from_record

    return ledger.standing(label, problem_from_record(record.problem), (record.code or {}).get("digest", ""))


def live(record: Record) -> bool:
    """Whether its contender can be run from here: a library, or a version that is not retired."""
    label = record.kernel.label
    return is_peer(record) or any(k.label == label for k in registry.all_kernels())


# ---------------------------------------------------------------- one record a contender
def cells(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records by device and problem, in order of first appearance."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record.device, json.dumps(record.problem, sort_keys=True)), []).append(record)
    return found


def speaking(records: Iterable[Record], *, aside: bool = False) -> list[Record]:
    """The records that speak, cell by cell, each with its contenders in order of first appearance. aside: those of
    experiments that time for something else than speed (`record.ASIDE`) count too: somebody asked for them."""
    timed = (r for r in records if r.status == "passed" and r.time_us and (aside or r.experiment not in ASIDE))
    return [record for block in cells(timed).values() for record in _of_cell(block)]


def _of_cell(block: Sequence[Record]) -> list[Record]:
    by_name: dict[str, list[Record]] = {}
    for record in block:
        by_name.setdefault(name(record), []).append(record)
    if len(by_name) == len(block):
        return list(block)
    beside = library_runs(block)
    versions = {
        who: _newest(some, lambda r: (standing(r) in TODAY, _in_both_states(r), r.run in beside))
        for who, some in by_name.items()
        if not is_peer(some[0])
    }
    told = (ranked(versions.values(), state, beside) for state in STATES)
    ours = next((found[0] for found in told if found), None)
    run = ours.run if ours is not None else ""
    libraries = {
        who: _newest(some, lambda r: (bool(run) and r.run == run,)) for who, some in by_name.items() if is_peer(some[0])
    }
    return [(libraries if is_peer(some[0]) else versions)[who] for who, some in by_name.items()]


def _in_both_states(record: Record) -> bool:
    return all(record.median(state) is not None for state in STATES)


def _newest(records: Sequence[Record], worth: Callable[[Record], tuple[bool, ...]]) -> Record:
    """The newest of those that are worth most; of one moment, the last."""
    if len(records) == 1:
        return records[0]
    return max(enumerate(records), key=lambda pair: (worth(pair[1]), pair[1].at, pair[0]))[1]


# ---------------------------------------------------------------- what a cell answers
def library_runs(records: Iterable[Record]) -> set[str]:
    """Runs in which a library took turns."""
    return {r.run for r in records if is_peer(r) and r.run}


def ranked(records: Iterable[Record], state: str, runs: Collection[str] = ()) -> list[Record]:
    """Versions that count as ours, fastest first: those that are here, and where none of them was timed, the retired.
    The fixed-split mode is none: it runs the same versions. records: that speak, of one cell. runs: whose records are
    compared with each other; others, and those of code that has changed since, are ahead only by `RUNS_DIFFER`."""
    own = [r for r in records if not is_peer(r) and r.picked_by != FIXED_SPLIT and r.median(state) is not None]
    return _by_speed([r for r in own if live(r)] or own, state, runs)


def _by_speed(records: Sequence[Record], state: str, runs: Collection[str]) -> list[Record]:
    limited = all(r.limit(state) for r in records)

    def took(record: Record) -> tuple[float, str]:
        us = record.in_a_step(state) or 0.0
        share = us / (record.limit(state) or 1.0) if limited else us
        beside = record.run in runs and (is_peer(record) or standing(record) in TODAY)
        return share if beside else share * RUNS_DIFFER, name(record)

    return sorted(records, key=took)


@dataclass(frozen=True)
class Answer:
    """ours: the fastest version, as `ranked` has it. library: the fastest one. next: the fastest of another version.
    ratio: the library's time over ours, above 1 where ours is faster. of_one_run: the two took turns."""

    state: str
    ours: Record | None
    library: Record | None
    next: Record | None
    ratio: float | None

    @property
    def best(self) -> Record:
        """The faster of the two."""
        found = self.ours if self.library is None or (self.ratio or 0.0) >= 1 else self.library
        assert found is not None
        return found

    @property
    def of_one_run(self) -> bool:
        return bool(self.ours and self.library and self.ours.run and self.ours.run == self.library.run)


def answer(records: Iterable[Record], state: str, wrong: Collection[str] = ()) -> Answer | None:
    """What a cell answers in a state; None where nothing was timed in it. records: that speak (`speaking`), of one
    cell. wrong: labels of versions that are known to be wrong now, whose times are no answer."""
    some = [r for r in records if r.median(state) is not None and r.kernel.label not in wrong]
    own = ranked(some, state, library_runs(some))
    ours = own[0] if own else None
    libraries = _by_speed([r for r in some if is_peer(r)], state, () if ours is None else {ours.run})
    library = libraries[0] if libraries else None
    if ours is None and library is None:
        return None
    other = next((r for r in own if ours and r.kernel.label != ours.kernel.label), None)
    ratio = ours.limit_speedup(library, state) if ours and library else None
    return Answer(state, ours, library, other, ratio)
