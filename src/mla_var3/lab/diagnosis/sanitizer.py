"""A version under NVIDIA's compute-sanitizer: one call of it, and what the tool said, each fault once."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError
from mla_var3.lab.diagnosis import reports
from mla_var3.lab.diagnosis.reports import Report

if TYPE_CHECKING:
    from mla_var3.catalogue.registry import KernelId
    from mla_var3.workload import Problem

#: Tool -> what it finds.
TOOLS: Mapping[str, str] = {
    "memcheck": "accesses out of bounds or misaligned",
    "racecheck": "races in shared memory",
    "synccheck": "barriers that threads use wrongly",
    "initcheck": "reads of global memory that nothing wrote",
}
TIMEOUT_S = 900.0
#: For the result of a process that gave none.
ENDED = "the process ended before its result"
#: What the tool ends with when it found something, apart from what the watched process ends with (0, 1 or 2).
_FOUND = 86
#: Reports that are printed. All, of a tool of which some are known: what is not printed cannot be told from a new one.
_LIMIT, _ALL = 200, 100_000


@dataclass(frozen=True)
class Fault:
    """A kind of fault at a place. what: the tool's sentence. where: function and line, "" without. count: how often."""

    what: str
    where: str
    first: str
    count: int


@dataclass(frozen=True)
class Sanitized:
    """errors: by the tool's count, without what is known to be no fault. known: that, why -> how often.

    faults: what else it said, the most frequent first. result: of the watched process.
    """

    tool: str
    errors: int
    known: Mapping[str, int]
    faults: tuple[Fault, ...]
    result: str
    command: tuple[str, ...]
    log: Path

    @property
    def ok(self) -> bool:
        """Nothing new; and the result is right, where the tool did not end the process at a known report."""
        ended = self.result == ENDED and sum(self.known.values()) > 0
        return self.errors == 0 and (ended or self.result.startswith("right"))


def command(exe: str | Path, tool: str, job: Path, only: str | None = None) -> list[str]:
    """The tool over one call of the job's version. only: part of the names of the device functions to watch."""
    limit = _ALL if any(known.tool == tool for known in reports.KNOWN) else _LIMIT
    options = ["--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", str(limit)]
    options += ["--kernel-name", f"kernel_substring={only}"] if only else []
    return [str(exe), *options, sys.executable, "-m", "mla_var3.lab.diagnosis.watched", str(job)]


def environment() -> dict[str, str]:
    """Line information in what is compiled, and every tensor an allocation of its own, so that its end is one."""
    from mla_var3.lab.profiling.modes import tools

    return {**tools.target_env(line_info=True), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def write_job(
    folder: Path, kernel: KernelId, problem: Problem, tiling: Mapping[str, Any] | None, seed: int = 0
) -> Path:
    """job.json in a folder, which is made."""
    from mla_var3.lab.profiling.folder import write_json

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.json"
    record = None if tiling is None else dict(tiling)
    write_json(path, {"kernel": kernel.to_record(), "problem": problem.to_record(), "tiling": record, "seed": seed})
    return path


def run(tool: str, job: Path, timeout_s: float = TIMEOUT_S, only: str | None = None) -> Sanitized:
    """Runs the tool; its whole output is in `<tool>.log` beside the job. Raises `UserError` when it could not work."""
    from mla_var3.lab.profiling.modes import tools

    exe = tools.find("compute-sanitizer")
    if exe is None:
        raise UserError(
            "compute-sanitizer is not here: it comes with the CUDA toolkit (package cuda-sanitizer); put it on PATH."
        )
    words, log = command(exe, tool, job, only), job.with_name(f"{tool}.log")
    try:
        status, said = tools.watch(words, timeout_s, environment())
    except OSError as error:
        raise UserError(f"compute-sanitizer cannot be started: {error.strerror}.") from error
    log.write_text(said, encoding="utf-8")
    if status is None:
        seen = "".join(
            f"; until then: {' '.join(filter(None, (one.what, one.where)))}"
            for one in collapsed(reports.read(said))[:1]
        )
        raise UserError(
            f"{tool} was not done after {timeout_s:g} s and was ended ({log}): a kernel that hangs, or too large a "
            f"problem; make it smaller with --b and --t{seen}."
        )
    return judge(tool, said, words, log)


def judge(tool: str, text: str, words: Sequence[str], log: Path) -> Sanitized:
    """What the output says. Raises `UserError` when the tool gave no summary: then it has watched nothing."""
    result = next((m[1] for m in re.finditer(r"^watched: (.*)$", text, re.MULTILINE)), "")
    counted = reports.total(text)
    if counted is None:
        lines = [line for line in text.splitlines() if line.strip()]
        said = result or (lines[-1].strip("= ") if lines else "it printed nothing")
        raise UserError(f"{tool} gave no summary ({log}): {said}")
    if not re.match(r"right|WRONG|$", result):  # the sentence of a process that refused
        raise UserError(f"the watched process refused: {result}")
    known, new = reports.split(tool, text)
    errors = max(counted - known.total(), len(new))
    return Sanitized(tool, errors, known, tuple(collapsed(new)), result or ENDED, tuple(words), log)


def collapsed(new: Sequence[Report]) -> list[Fault]:
    """Each kind of report once, with its place and the first thread that had it."""
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    for one in new:
        # A race names its second access on the line below; all else its place.
        places = [line for start in ("at ", "and ") for line in one.rest if line.startswith(start)]
        where = (places or [""])[0].removeprefix("at ")
        key = (re.sub(r"\((\d+),\s*(\d+),\s*(\d+)\)", "(…)", one.what), where)
        counts[key] += 1
        first.setdefault(key, next((line for line in one.rest if line.startswith(("by thread", "Address"))), ""))
    return [Fault(what, where, first[what, where], n) for (what, where), n in counts.most_common()]


def lines(found: Sanitized, label: str) -> list[str]:
    """The verdict, and a line or two for each fault."""
    word = "clean" if found.errors == 0 else f"{found.errors} errors"
    if found.errors == 0 and found.known:
        word = "nothing new"
    result = found.result if found.result == ENDED else f"the result is {found.result}"
    rows = [f"{label} under {found.tool}: {word}; {result}"]
    rows += [f"  {count} known to be no fault: {why}" for why, count in found.known.items()]
    if found.known and found.result == ENDED:
        rows.append(
            "  the tool ends the process at such a report, and what comes after was not watched: another kernel of the "
            "call is watched alone with --sanitize-kernel NAME"
        )
    for fault in found.faults[:20]:
        times = f"{fault.count} × " if fault.count > 1 else ""
        rows.append(f"  {times}{fault.what}")
        rows += [f"      {text}" for text in (fault.where, fault.first) if text]
    if len(found.faults) > 20:
        rows.append(f"  and {len(found.faults) - 20} more kinds")
    return [*rows, f"  all of it: {found.log}"]
