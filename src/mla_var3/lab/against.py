"""Whether a version is slower than it was: its time beside that of other code, with an interval.

The other code is named by a commit or by a record. Where it can be built, which means that its commit is in this
repository, its sources are taken out of git into a temporary folder, and both are measured on the same card in turn:
`PAIRS` times one run of each, every other pair in reverse, each run in a process of its own with its own compile,
inputs and memory. Runs of one code differ by what such a process is given (pages of memory, the chip's warmth), so the
spread of the pairs is the noise that a loss has to stand out of.

Where it cannot be built there is only the record, of another run and perhaps of another card. Then each time counts as
a share of the limit of its own run, and the noise is by how much repeated runs of one code differ in the records.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3 import paths
from mla_var3.catalogue import spoken
from mla_var3.catalogue.registry import KernelId
from mla_var3.errors import UserError, nearest
from mla_var3.record import TUNED, Record, as_ratio, load, record_key

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.measure.settings import BenchSettings
    from mla_var3.workload import Problem

EXPERIMENT = "against"
STATE = "burst"
#: Runs of each code. Five leave the mean of their ratios with four degrees of freedom, for which 95 % of Student's
#: distribution lie within this many standard errors.
PAIRS, STUDENT_95 = 5, 2.776
#: No smaller difference counts, however well the pairs agree: the limits of one run move as far from one cell to the
#: next in burst (`measure.timing`).
LEAST = 0.001
#: Pairs of records of one code that it takes to say by how much its runs differ.
ENOUGH = 10

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Other:
    """What a version is compared with: another version, or the same one, as it was. commit: whose code is to be built,
    or "". record: of its time, or None."""

    kernel: KernelId
    commit: str = ""
    record: Record | None = None

    def words(self, kernel: KernelId, *, built: bool) -> str:
        """What follows "as long as" in a sentence about `kernel`. built: measured now, at the commit."""
        whose = "" if self.kernel == kernel else f"{self.kernel.label} "
        named = "" if self.record is None else f"record {self.record.id} of {self.record.at[:10]}"
        if not built:
            return f"{whose}in {named}"
        return f"{whose}at commit {self.commit[:7]}" + (f", the code of {named}" if named else "")


@dataclass(frozen=True)
class Comparison:
    """ratio: the time now over that of the other code, above 1 where now is slower; low, high: 95 % of what it may be
    lie between them. how: how it was measured, for the sentence."""

    ratio: float
    low: float
    high: float
    how: str

    @property
    def lost(self) -> bool:
        """Whether it is slower by more than noise explains."""
        return self.low > 1.0 + LEAST

    @property
    def gained(self) -> bool:
        """Whether it is faster by more than noise explains."""
        return self.high < 1.0 - LEAST

    def sentence(self, kernel: str, cell: str, other: str) -> str:
        what = "a loss" if self.lost else "a gain" if self.gained else "no loss"
        between = f"{as_ratio(self.low, 4)} to {as_ratio(self.high, 4)}"
        return (
            f"{kernel} on {cell} takes {as_ratio(self.ratio, 4)} times as long as {other}, {what} beyond "
            f"noise (95 % interval {between}; {STATE}, {self.how})."
        )


# ---------------------------------------------------------------- what is meant
def find(what: str, kernel: KernelId, problem: Problem | None, device: Device | None, pool: Sequence[Record]) -> Other:
    """The other code: of the newest record in a file that has the version on the problem, of the record of `pool` with
    that id, or at a commit, in this order. problem: None where the user gave none, and a record's is meant.

    Raises `UserError` where `what` is none of them.
    """
    if Path(what).exists():
        return _of_record(_newest(what, kernel, problem, device))
    if re.fullmatch(r"[0-9a-f]{12}", what) and (found := next((r for r in pool if r.id == what), None)) is not None:
        if problem is not None and found.problem != problem.to_record():
            raise UserError(
                f"--against {what} is of {found.problem_label}, and {problem.label} is asked for: leave the options of "
                "the problem out, or name a record of it."
            )
        if found.median(STATE) is None:
            raise UserError(f"--against {what}: that record has no time in {STATE}: name one that has.")
        return _of_record(found)
    commit = _commit(what)
    if commit is None:
        raise UserError(
            f"--against {what!r} is no record file, no record's id and no commit here: give one, as HEAD~1 or "
            "results/h200/2026-11-27-decode.jsonl."
        )
    return Other(kernel, commit)


def _newest(file: str, kernel: KernelId, problem: Problem | None, device: Device | None) -> Record:
    """The newest timed record of a version in a file or folder, on the problem, or on the only one that it is of."""
    timed = [r for r in load([file]).records if r.median(STATE) is not None]
    mine = [r for r in timed if r.kernel.label == kernel.label and (device is None or r.device == device.key)]
    if not mine:
        labels = sorted({r.kernel.label for r in timed})
        on = f" on {device.key}" if device is not None else ""
        raise UserError(f"--against {file} has no time of {kernel.label}{on}: {nearest(kernel.label, labels)}.")
    cells = sorted({r.problem_label for r in mine})
    if problem is None:
        if len(cells) > 1:
            raise UserError(
                f"--against {file} has {kernel.label} on {len(cells)} problems: say which, for example by --b."
            )
    else:
        mine = [r for r in mine if r.problem == problem.to_record()]
        if not mine:
            raise UserError(
                f"--against {file} has no time of {kernel.label} on {problem.label}: {nearest(problem.label, cells)}."
            )
    return max(mine, key=lambda r: r.at)


def _of_record(record: Record) -> Other:
    return Other(KernelId.from_record(record.kernel.model_dump()), _buildable(record), record)


def _buildable(record: Record) -> str:
    """The commit whose code a record timed, if it is here; of a tree that differed from its commit none is."""
    commit = record.source.commit
    if not commit or record.source.dirty is not False:
        return ""
    return _commit(commit) or ""


def _commit(name: str) -> str | None:
    """The commit that a name means in this repository; None where it means none."""
    return _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")


def asked(record: Record | None) -> dict[str, Any] | None:
    """The knobs that a record's contender was asked for with, or that a search or the dispatcher gave it; None for the
    default tiling."""
    if record is None:
        return None
    if isinstance(record.requested, Mapping):
        return dict(record.requested) or None
    return dict(record.tiling or {}) or None if record.requested in (TUNED, spoken.DISPATCH) else None


# ---------------------------------------------------------------- the other code
def _git(*words: str) -> str | None:
    """What git says in this repository; None where it fails, or there is no repository."""
    root = paths.repo_root()
    if root is None:
        return None
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A temporary folder with `src` and `conf` of a commit. The repository itself is not touched.

    Raises `UserError` where git cannot give them.
    """
    with tempfile.TemporaryDirectory(prefix="mla_var3-against-") as folder:
        words = ["git", "archive", "--format=tar", commit, "--", "src", "conf"]
        try:
            done = subprocess.run(words, cwd=paths.repo_root(), capture_output=True, timeout=120, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise UserError(
                f"--against: git cannot give src and conf of commit {commit[:7]}: name a commit that has both."
            ) from error
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder)


@functools.cache
def _hash_there(root: Path, kernel: KernelId) -> str:
    """A version's source hash as the code in `root` computes it, so that its records have it; "unknown" where that code
    is too old to be asked."""
    program = (
        "import json, sys\nfrom mla_var3.catalogue import registry\n"
        "print(registry.source_hash(registry.KernelId(**json.loads(sys.argv[1]))))"
    )
    words = [sys.executable, "-c", program, json.dumps(kernel.to_record())]
    try:
        done = subprocess.run(words, env=_env(root), capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _env(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": paths.python_path(root / "src")}


# ---------------------------------------------------------------- measuring
def measure(
    kernel: KernelId,
    problem: Problem,
    tiling: Mapping[str, Any] | None,
    device: Device,
    settings: BenchSettings,
    root: Path | None = None,
    commit: str = "",
) -> Record:
    """One run of one contender, in a process of its own. root: of the code, where it is not this one; commit: of it."""
    from mla_var3.measure.cell import Contender, measure_cell

    if root is not None:
        env = {**dict(settings.worker_env), "PYTHONPATH": paths.python_path(root / "src")}
        settings = replace(settings, worker_env=tuple(env.items()), commit=commit)
    (record,) = measure_cell(problem, [Contender(kernel, tiling)], device, settings, experiment=EXPERIMENT)
    if root is None:
        return record
    found = _hash_there(root, kernel)
    source = {**record.source.model_dump(), "hash": found, "dirty": False}
    key = record_key(kernel.to_record(), problem.to_record(), tiling or "default", device.key, found)
    return Record.model_validate({**record.model_dump(exclude_unset=True), "source": source, "key": key})


def in_turn(
    kernel: KernelId,
    other: Other,
    problem: Problem,
    tiling: Mapping[str, Any] | None,
    device: Device,
    settings: BenchSettings,
    keep: Callable[[Record], None],
    tell: Tell,
) -> tuple[list[Record], list[Record]]:
    """`PAIRS` runs of this code and as many of the other's, in turn; `keep` is given each record as it is made.

    Only the time on a cool chip is taken: at the power limit two turns of one code differ by several per cent. Raises
    `UserError` where a run of either is wrong, refused or fails.
    """
    then_tiling = asked(other.record) if tiling is None else tiling
    settings = replace(settings, sustained_rounds=0, cross_check_ms=0.0)
    now, then = list[Record](), list[Record]()
    with checked_out(other.commit) as root:
        for number in range(PAIRS):
            for here in (True, False) if number % 2 == 0 else (False, True):
                once = replace(settings, resources=settings.resources and number == 0)
                if here:
                    record = measure(kernel, problem, tiling, device, once)
                else:
                    record = measure(other.kernel, problem, then_tiling, device, once, root, other.commit)
                keep(record)
                if record.median(STATE) is None:
                    code = f"{kernel.label} here" if here else f"{other.kernel.label} at commit {other.commit[:7]}"
                    raise Failed(f"{code} was not timed on {problem.label}: {record.reason}", here=here)
                tell(f"pair {number + 1} of {PAIRS}, {'here' if here else 'there'}: {record.median(STATE):.2f} us")
                (now if here else then).append(record)
    return now, then


class Failed(UserError):
    """A run without a time. here: of this code, which is then worse than slow."""

    def __init__(self, sentence: str, *, here: bool) -> None:
        super().__init__(sentence)
        self.here = here


def answer(
    kernel: KernelId,
    other: Other,
    problem: Problem,
    tiling: Mapping[str, Any] | None,
    device: Device | None,
    settings: BenchSettings,
    pool: Sequence[Record],
    keep: Callable[[Record], None],
    tell: Tell,
) -> tuple[bool, str]:
    """(whether the version is slower than the other code by more than noise, or has no time any more; the sentence).

    device: the GPU that is here; without one the newest record of today's code in `pool` stands for now. pool: records
    that say by how much runs of one code differ. Raises `UserError` where the two cannot be compared.
    """
    cell = problem.label
    if device is None:
        compared = by_shares(_recorded(kernel, other, problem, pool), _record_of(other), pool)
        return compared.lost, compared.sentence(kernel.label, cell, other.words(kernel, built=False))
    if other.commit:
        try:
            now, then = in_turn(kernel, other, problem, tiling, device, settings, keep, tell)
        except Failed as failed:
            if failed.here:
                return True, str(failed)
            if other.record is None:
                raise
            tell(f"{failed} So the record itself is compared.")
        else:
            compared = paired(now, then)
            return compared.lost, compared.sentence(kernel.label, cell, other.words(kernel, built=True))
    then_record = _record_of(other)
    if then_record.device != device.key:
        raise UserError(
            f"--against: record {then_record.id} was measured on {then_record.device}, its code is not in this "
            f"repository, and here is {device.name}: name a record of {device.key}, or a commit."
        )
    record = measure(kernel, problem, tiling, device, settings)
    keep(record)
    if record.median(STATE) is None:
        return True, f"{kernel.label} here was not timed on {cell}: {record.reason}"
    compared = by_shares(record, then_record, pool)
    return compared.lost, compared.sentence(kernel.label, cell, other.words(kernel, built=False))


def _record_of(other: Other) -> Record:
    if other.record is None:
        raise UserError(
            f"--against: the code at commit {other.commit[:7]} is measured beside this one, which needs a GPU, and "
            "there is none here; a record of it can be compared with a record of this code."
        )
    return other.record


def _recorded(kernel: KernelId, other: Other, problem: Problem, pool: Sequence[Record]) -> Record:
    """The newest record of the version as it is here, on the problem and the device of the other record."""
    then = _record_of(other)
    mine = [
        r for r in pool
        if r.kernel.label == kernel.label and r.problem == problem.to_record() and r.device == then.device
        and r.id != then.id and r.median(STATE) is not None and spoken.standing(r) in spoken.TODAY
    ]  # fmt: skip
    if not mine:
        raise UserError(
            f"--against: there is no GPU here, and no other record of {kernel.label} with the code that it has now on "
            f"{problem.label}, {then.device}: run this where the GPU is."
        )
    return max(mine, key=lambda r: r.at)


# ---------------------------------------------------------------- comparing
def paired(now: Sequence[Record], then: Sequence[Record]) -> Comparison:
    """Of runs in turn: the geometric mean of the ratios of the pairs, and its interval by their spread."""
    ratios = [
        math.log((a.in_a_step(STATE) or 0.0) / (b.in_a_step(STATE) or 0.0)) for a, b in zip(now, then, strict=True)
    ]
    mean = statistics.fmean(ratios)
    half = STUDENT_95 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    card = now[0].environment.get("gpu") or now[0].device
    how = f"{len(ratios)} pairs of runs in turn on one {card}{_same_code(now[0], then[0])}"
    return Comparison(math.exp(mean), math.exp(mean - half), math.exp(mean + half), how)


def by_shares(now: Record, then: Record, pool: Sequence[Record]) -> Comparison:
    """Of two records: each time as a share of its own run's limit, and the interval by which runs of one code differ in
    `pool`. Raises `UserError` where one has no limit."""
    mine, others = now.of_limit(STATE), then.of_limit(STATE)
    ratio = then.limit_speedup(now, STATE)
    if mine is None or others is None or ratio is None:
        raise UserError(
            f"--against: record {(then if mine else now).id} has no limit of its run, so it compares with no other."
        )
    chips = now.environment.get("chip"), then.environment.get("chip")
    same_card = chips[0] is not None and chips[0] == chips[1]
    # What is compared says nothing of noise.
    others_ran = [r for r in pool if r.id not in (now.id, then.id)]
    differ = runs_differ(others_ran, now.kernel.label, same_card=same_card)
    if differ is None:
        differ = spoken.RUNS_DIFFER
        agree = f"where runs of one code were seen to differ by up to {100 * (differ - 1):.0f} %"
    else:
        cards = "one card" if same_card else "two cards"
        agree = f"where 19 of 20 repeated runs of one code on {cards} agree within {100 * (differ - 1):.1f} %"
    shares = f"{100 * mine:.1f} % and {100 * others:.1f} %"
    how = f"by shares of each run's limit, {shares}, {agree}{_same_code(now, then)}"
    return Comparison(ratio, ratio / differ, ratio * differ, how)


def runs_differ(pool: Sequence[Record], label: str, *, same_card: bool) -> float | None:
    """The ratio within which 95 % of pairs of runs of one code agree: of the version where it was measured often
    enough, else of all of this project's; None where there are too few of these too."""
    mine = _gaps([r for r in pool if r.kernel.label == label], same_card)
    if len(mine) < ENOUGH:
        mine = _gaps([r for r in pool if not spoken.is_peer(r)], same_card)
    return math.exp(sorted(mine)[math.ceil(0.95 * len(mine)) - 1]) if len(mine) >= ENOUGH else None


def _gaps(pool: Sequence[Record], same_card: bool) -> list[float]:
    """Logarithms of how far the shares of two runs of one code on one problem are apart."""
    groups: dict[tuple[str, ...], list[tuple[str, str, float]]] = {}  # chip, run and share of each record
    for r in pool:
        digest, chip, share = (r.code or {}).get("digest"), r.environment.get("chip"), r.of_limit(STATE)
        if digest and chip and share is not None:
            key = (r.device, r.kernel.label, digest, json.dumps([r.problem, r.tiling], sort_keys=True))
            groups.setdefault(key, []).append((chip, r.run, share))
    return [
        abs(math.log(a / b))
        for some in groups.values()
        for (chip, run, a), (other_chip, other_run, b) in itertools.combinations(some, 2)
        if run != other_run and (chip == other_chip) == same_card
    ]


def _same_code(now: Record, then: Record) -> str:
    digests = [(r.code or {}).get("digest") for r in (now, then)]
    return "; both run the same machine code" if digests[0] and digests[0] == digests[1] else ""
