"""What compute-sanitizer reports, and which of it is known to be no fault.

    python -m mla_var3.lab.diagnosis.reports TOOL LOG

A report is known when `KNOWN` has it by tool, kernel, kind and source lines, and when in addition the machine code says
so: at the place of a synccheck report stands a wait at a named barrier that has another place of waiting, and of two
racing accesses the write comes before its warpgroup's n-th turn at a named barrier and the read behind the other one's.
Where a named barrier's number is in a register, the write stands between a wait and an arrival at barriers of as many
threads, and the read behind a wait at one in the other warps' code.
Everything else is new, also what cannot be looked up. The verb ends with 1 when something is new.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mla_var3 import paths
from mla_var3.errors import EXIT_USER_ERROR, UserError


@dataclass(frozen=True)
class Access:
    """One place of a report. kind: Read or Write, "" for a barrier. offset: in `function`. where: file:line, or ""."""

    kind: str
    function: str
    offset: int
    where: str


@dataclass(frozen=True)
class Report:
    """what: the tool's sentence. rest: its other lines. accesses: of a race the first one and those it races with."""

    what: str
    rest: tuple[str, ...]
    accesses: tuple[Access, ...]


@dataclass(frozen=True)
class Known:
    """A report that is no fault. barriers: which named ones order it. lines: (file below the package, a line of it).
    threads: that the barriers count, where their numbers are in registers, so that `barriers` is empty."""

    tool: str
    kernels: tuple[str, ...]
    what: str
    barriers: tuple[int, ...]
    lines: tuple[tuple[str, str], ...]
    why: str
    threads: int = 0


_FLASH_MLA_MMA = "kernel/cute_python/mla/flash_mla_mma/flash_mla_mma_v3/flash_mla_mma_v3.py"
_FLASH_MLA = "kernel/cute_python/mla/flash_mla/flash_mla/flash_mla.py"
_TWO_PLACES = (
    "each consumer warpgroup has a copy of the code, and both wait at one named barrier, which counts both; synccheck "
    "takes bar.sync in two places for divergence, and PTX forbids that within a warp only"
)
_HANDED_OVER = (
    "a named barrier that counts both warpgroups lies between the write and the read, in two copies of the code"
)
_ARRIVED_AT = (
    "warps of the scores arrive at FULL behind the write and warps of the output wait there ahead of the read, and the "
    "other way round at EMPTY; racecheck does not follow bar.arrive"
)
#: Barriers of flash_mla: 5 is `CONSUMERS`, 2 is `MAX_ODD`.
KNOWN: tuple[Known, ...] = (
    Known(
        "synccheck", ("flash_mla",), "Barrier error detected. Divergent thread(s) in block.", (5,),
        (
            (
                "kernel/cute_python/prims/sync.py",
                "cute.arch.barrier(barrier_id=int(barrier), number_of_threads=threads)",
            ),
        ),
        _TWO_PLACES,
    ),
    Known(
        "racecheck", ("flash_mla",), "Error: Race reported between", (2,),
        (
            (_FLASH_MLA, "after_odd = max_odd[wgmma.acc_row(self.thread, r)]"),
            (_FLASH_MLA, "row_values[wgmma.acc_row(self.thread, r)] = value"),
        ),
        _HANDED_OVER,
    ),
    Known(
        "racecheck", ("flash_mla_mma_v3",), "Error: Race reported between", (),
        (
            (_FLASH_MLA_MMA, "moved[self.me] = any_moves"),
            (_FLASH_MLA_MMA, "factors[self.row(half)] = self.factor[half]"),
            (_FLASH_MLA_MMA, "sources[self.lane] = older.source"),
            (_FLASH_MLA_MMA, "cute.autovec_copy(rounded, cute.make_tensor(at, cute.make_layout(2)))"),
            (
                _FLASH_MLA_MMA,
                "maxima[self.row(half)], sums[self.row(half)] = self.row_max[half], total",
            ),
            (_FLASH_MLA_MMA, "cute.autovec_copy(self.moved_in(buffer), moved)"),
            (_FLASH_MLA_MMA, "self.scale(i, half, factors[self.row(i, half, self.lane)])"),
            (_FLASH_MLA_MMA, "source = source_of(self.sources_in(buffer)[loaded_row(geometry)], geometry)"),
            (_FLASH_MLA_MMA, "found.top[half, i], found.total[half, i] = maxima[row], sums[row]"),
            (
                "kernel/cute_python/prims/warp_mma.py",
                "cute.copy(atom, cute.make_tensor(place, cute.make_layout(OPERANDS)), target)",
            ),
        ),
        _ARRIVED_AT, threads=384,
    ),
)  # fmt: skip

_PLACE = re.compile(
    r"(?:(?P<kind>Read|Write) access )?at (?P<function>[\w$]+)\+0x(?P<offset>[0-9a-f]+)(?: in (?P<where>\S+))?"
)
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (?P<count>\d+) (?P<what>.*)$", re.MULTILINE)
#: Lines that begin a block without reporting anything.
_OTHER = (
    "COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Target application",
    "Error: process didn't terminate successfully",
)  # fmt: skip


def read(text: str) -> list[Report]:
    """The reports of a log, in its order."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        match = re.match(r"=========(\s*)(.*)$", line)
        if match is None or not match[2]:
            continue
        if len(match[1]) <= 1:
            blocks.append([match[2].strip()])
        elif blocks:
            blocks[-1].append(match[2].strip())
    return [
        Report(block[0], tuple(block[1:]), tuple(_accesses(block)))
        for block in blocks
        if not block[0].startswith(_OTHER)
    ]


def _accesses(block: Sequence[str]) -> Iterator[Access]:
    for line in block:
        # Frames of the host say where a kernel was launched.
        match = None if line.startswith("Host Frame") else _PLACE.search(line)
        if match:
            yield Access(match["kind"] or "", match["function"], int(match["offset"], 16), match["where"] or "")


def total(text: str) -> int | None:
    """How many reports the tool counts, those that it did not print among them; None without a summary."""
    counts = [int(one["count"]) for one in _SUMMARY.finditer(text) if "not printed" not in one["what"]]
    return sum(counts) if counts else None


# ---------------------------------------------------------------- machine code
@dataclass(frozen=True)
class Code:
    """Machine code of one kernel. instructions: offset -> text."""

    instructions: Mapping[int, str] = field(hash=False)

    @classmethod
    def of(cls, sass: str) -> Code:
        found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass)
        return cls({int(at, 16): text for at, text in found})

    def barriers(self, number: int, kinds: str = "SYNC|ARV") -> list[int]:
        """Offsets at which code waits (SYNC) or arrives (ARV) at a named barrier."""
        pattern = re.compile(rf"BAR\.(?:{kinds})\S* {number:#x}, ")
        return [at for at, text in self.instructions.items() if pattern.match(text)]

    def waits_at(self, offset: int, numbers: Sequence[int]) -> bool:
        """Whether a wait at one of the barriers stands at an offset, and that barrier has two places of waiting."""
        return any(len(self.barriers(n, "SYNC")) > 1 and offset in self.barriers(n, "SYNC") for n in numbers)

    def ordered(self, write: int, read: int, number: int) -> bool:
        """Whether each write comes before the reader's turn: the barrier's n-th completion lies between the two.

        One warpgroup arrives at the barrier and the other waits, equally often: a write before the n-th arrival is read
        behind the n-th wait, or a later one.
        """
        if not (self._is(write, "STS") and self._is(read, "LDS")):
            return False
        arrivals, waits = self.barriers(number, "ARV"), self.barriers(number, "SYNC")
        return len(arrivals) == len(waits) and _turn(arrivals, write) < _turn(waits, read)

    def handed_over(self, write: int, read: int, threads: int) -> bool:
        """Whether a write stands between a wait and an arrival at barriers of that many threads, and a read in other
        code, which waits at one ahead of it and arrives at one.

        Some warps arrive where the others wait, and the other way round: a write behind its wait and before its arrival
        is read behind the wait that this arrival ends, and not written again before the readers have arrived.
        """
        if not (self._is(write, "STS") and self._is(read, "LDS|LDSM")):
            return False
        turns = self._turns(threads)
        around = [(at, kind) for at, kind in turns if at < write][-1:] + [turn for turn in turns if turn[0] > write][:1]
        if [kind for _, kind in around] != ["SYNC", "ARV"]:
            return False
        own = around[0][0]
        waits = [at for at, kind in turns if kind == "SYNC"]
        ahead = max((at for at in waits if at < read), default=None)
        if ahead is None or ahead == own:
            return False
        end = min((at for at in waits if at > ahead), default=math.inf)  # where the next warps' code has its wait
        return any(ahead < at < end and kind == "ARV" for at, kind in turns)

    def _is(self, offset: int, names: str) -> bool:
        return re.match(rf"(?:@!?U?P\d+ +)?(?:{names})\b", self.instructions.get(offset, "")) is not None

    def _turns(self, threads: int) -> list[tuple[int, str]]:
        """(offset, SYNC or ARV) of the barriers that count so many threads, in the order of the code."""
        pattern = re.compile(rf"(?:@!?U?P\d+ +)?BAR\.(SYNC|ARV)\S* \S+, {threads:#x}$")
        found = ((at, pattern.match(text)) for at, text in sorted(self.instructions.items()))
        return [(at, match[1]) for at, match in found if match]


def _turn(offsets: Sequence[int], at: int) -> int:
    """How many of the offsets lie before one."""
    return sum(offset < at for offset in offsets)


@cache
def codes(function: str) -> tuple[Code, ...]:
    """The kernel's machine code in every compiled object that is here: of the open bundles and of the cache."""
    from mla_var3.toolchain import sass
    from mla_var3.toolchain.aot import bundle_dirs, default_cache_dir

    name = re.sub(r"_\d+$", "", function)
    folders = [*bundle_dirs(), default_cache_dir()]
    found = []
    paths = [path for folder in folders for path in folder.rglob(f"{name}-sm_*.so")]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)[:_MOST]:
        for cubin in cubins(path.read_bytes()):
            text = sass.functions(sass.disassemble(cubin)).get(function)
            if text:
                found.append(Code.of(text))
    return tuple(found)


#: Objects of one kernel that are looked into, the newest first.
_MOST = 40
_CUDA = 190  # e_machine


def cubins(data: bytes) -> Iterator[bytes]:
    """The ELF images for GPUs within a library."""
    at = data.find(b"\x7fELF", 1)
    while at >= 0:
        if len(data) >= at + 64 and struct.unpack_from("<H", data, at + 18)[0] == _CUDA:
            programs, sections = struct.unpack_from("<QQ", data, at + 32)
            psize, pnum, ssize, snum = struct.unpack_from("<HHHH", data, at + 54)
            yield data[at : at + max(programs + psize * pnum, sections + ssize * snum)]
        at = data.find(b"\x7fELF", at + 4)


# ---------------------------------------------------------------- known ones
def why_known(tool: str, report: Report) -> str | None:
    """Why a report is no fault; None for one that is new."""
    for known in KNOWN:
        if known.tool == tool and report.what.startswith(known.what) and report.accesses and _fits(known, report):
            return known.why
    return None


def _fits(known: Known, report: Report) -> bool:
    functions = {access.function for access in report.accesses}
    if len(functions) != 1 or re.sub(r"_\d+$", "", next(iter(functions))) not in known.kernels:
        return False
    if not all(any(_is_line(access.where, *line) for line in known.lines) for access in report.accesses):
        return False
    listings = codes(next(iter(functions)))
    first, *others = report.accesses
    if known.tool == "synccheck":
        return not others and any(code.waits_at(first.offset, known.barriers) for code in listings)
    pairs = [(first, other) if first.kind == "Write" else (other, first) for other in others]
    if not pairs or any((w.kind, r.kind) != ("Write", "Read") or w.where == r.where for w, r in pairs):
        return False
    return any(all(_ordered(known, code, w.offset, r.offset) for w, r in pairs) for code in listings)


def _ordered(known: Known, code: Code, write: int, read: int) -> bool:
    if known.threads:
        return code.handed_over(write, read, known.threads)
    return any(code.ordered(write, read, number) for number in known.barriers)


def _is_line(where: str, file: str, text: str) -> bool:
    from mla_var3.lab.profiling import sources

    name, _, number = where.partition(":")
    if name != file.rpartition("/")[2] or not number.isdigit():
        return False
    lines = sources.lines(str(paths.package() / file))
    return 0 < int(number) <= len(lines) and lines[int(number) - 1].strip() == text


def split(tool: str, text: str) -> tuple[Counter[str], list[Report]]:
    """(why -> how many known reports, new reports) of a log."""
    known: Counter[str] = Counter()
    new = []
    reasons: dict[tuple[str, tuple[Access, ...]], str | None] = {}  # the same place comes once for every thread
    for report in read(text):
        key = (re.sub(r"\[\d+ hazards\]", "", report.what), report.accesses)
        if key not in reasons:
            reasons[key] = why_known(tool, report)
        reason = reasons[key]
        if reason is None:
            new.append(report)
        else:
            known[reason] += 1
    return known, new


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what a log holds; 0 when all of it is known and all of it was printed, 1 when not."""
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) != 2:
        print("usage: python -m mla_var3.lab.diagnosis.reports TOOL LOG", file=sys.stderr)
        return EXIT_USER_ERROR
    tool, log = words
    try:
        text = Path(log).read_text(encoding="utf-8", errors="replace")
        counted = total(text)
        if counted is None:
            raise UserError(f"{log} has no summary of the tool: it watched nothing.")
    except (OSError, UserError) as error:
        print(f"reports: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    known, new = split(tool, text)
    hidden = counted - known.total() - len(new)
    for reason, count in known.items():
        print(f"{count} known: {reason}")
    for report, count in Counter(Report(one.what, (), one.accesses) for one in new).most_common():
        places = "; ".join(f"{a.kind} {a.function}+{a.offset:#x} {a.where}".strip() for a in report.accesses)
        print(f"{count} new: {report.what} ({places})")
    if hidden > 0:
        print(f"{hidden} that were not printed: raise --print-limit")
    print(f"{tool}: {known.total()} known, {len(new)} new")
    return 1 if new or hidden > 0 else 0


if __name__ == "__main__":
    raise SystemExit(main())
