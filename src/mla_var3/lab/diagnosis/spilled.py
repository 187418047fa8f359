"""Where a version spills registers, by loop and by source line: its code, compiled once more with line information.

CuTe DSL's own report (`--keep remarks`) counts the spilled bytes of a whole kernel and names one line near which
registers are short. Which instruction spills for which line stands in the binary's line table, and in which loop it is
follows from its machine code. Line information changes no instruction, which the digest of the code shows each time.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mla_var3.catalogue import registry
from mla_var3.catalogue.jobs import CompileJob, run_job
from mla_var3.lab.knobs import own_knobs
from mla_var3.lab.profiling import sources
from mla_var3.toolchain import loops, pool, sass, spills
from mla_var3.toolchain.aot import default_cache_dir
from mla_var3.toolchain.compiled import CompiledKernel

if TYPE_CHECKING:
    from mla_var3.lab.diagnosis.evidence import Evidence
    from mla_var3.toolchain.spills import Spill

#: How a place of `toolchain.spills` is told.
WORDS = {
    spills.LOOP: "in the loop of products, for every KV tile",
    spills.AROUND: "in the loop around that of products, for every split or request",
    spills.OUTSIDE: "elsewhere, once a CTA or in loops without products",
}
#: Lines of the compiler's report: it points at a place once for a kernel that spills.
_POINTS = re.compile(r"register spills\n\s*--> (?P<file>[^\n]+?):(?P<line>\d+):\d+")


def locate(evidence: Evidence) -> None:
    """Adds to the evidence where it spills; of what does not spill, is retired or cannot be compiled here, nothing.

    A few seconds the first time. What was compiled is kept in the cache of the user, and found again while the version,
    its tiling and the toolchain stay as they are.
    """
    if not evidence.resources.get("spill_bytes") or evidence.device is None:
        return
    kernel, problem = evidence.kernel, evidence.problem
    if kernel not in registry.all_kernels() or not registry.is_compiled(kernel.language) or registry.missing(kernel):
        return
    tiling = own_knobs(registry.get_plan(kernel), evidence.tiling)
    folder = default_cache_dir().parent / "lines" / kernel.label.replace("/", "-") / evidence.device.key / problem.label
    job = CompileJob(
        **kernel.to_record(), problem=problem.to_record(), device=evidence.device.key, tiling=tiling or None,
        out_dir=str(folder), keep=("cubin", "sass", "remarks"),
    )  # fmt: skip
    (result,) = pool.compile_many([job], 1, progress=False, run=with_lines)
    if result.compiled is None:
        evidence.notes.append(f"where it spills is not known, as it does not compile: {result.error.rstrip('.')}")
        return
    _read(evidence, result.compiled)


def with_lines(job: CompileJob) -> CompiledKernel:
    """In a worker process: compiles with line information, which Triton and cuTile always write."""
    os.environ["CUTE_DSL_LINEINFO"] = "1"
    return run_job(job)


def _read(evidence: Evidence, compiled: CompiledKernel) -> None:
    main = loops.main_code(compiled)
    if main is None or "cubin" not in main[2]:
        return
    name, code, kept = main
    lines = sass.source_lines(kept["cubin"]).get(name, {})
    found = spills.of(code, lines)
    digest = ((evidence.record or {}).get("code") or {}).get("digest")
    now = sum(one.width for one in found)
    if now != evidence.resources["spill_bytes"] or (digest and compiled.code and digest != compiled.code.digest):
        evidence.notes.append(
            f"the version has other code today than what was recorded; where it spills, {now:,} bytes, is told of the "
            "code of today"
        )
    evidence.spills = tuple(_with_line(one, lines) for one in found)
    if "remarks" in kept:
        points = _POINTS.finditer(kept["remarks"].read_text(encoding="utf-8"))
        evidence.short_of_registers = tuple(f"{sources.short(m['file'])}:{m['line']}" for m in points)


#: So many bytes of code before a spill that has no line of its own, the line of another instruction is looked for.
_NEAR = 1024


def _with_line(spill: Spill, lines: Mapping[int, tuple[str, int]]) -> Spill:
    """With the line that is meant. CuTe's binaries ascribe what a loop or a branch does to the decorator of a host
    function: the last line before it that has code of its own stands for that."""
    for address in range(spill.address, max(-1, spill.address - _NEAR), -16):
        file, number = lines.get(address, ("", 0))
        line, text = sources.place(file, number, "") if file else (0, "")
        if text not in ("", sources.NO_LINE):
            return replace(spill, file=file, line=line, near=address != spill.address)
    return spill


def by_place(found: Iterable[Spill]) -> Iterator[tuple[str, int, list[tuple[int, str, str]]]]:
    """(place, bytes, [(bytes, file:line, its text)]) of the places that spill, most bytes first in each."""
    some = list(found)
    for place in spills.PLACES:
        rows: Counter[tuple[str, str]] = Counter()
        for one in some:
            if one.place == place:
                rows[_where(one)] += one.width
        if rows:
            ordered = sorted(rows.items(), key=lambda row: (-row[1], row[0]))
            yield place, rows.total(), [(width, *where) for where, width in ordered]


def _where(spill: Spill) -> tuple[str, str]:
    if not spill.file:
        return "", ""
    _, text = sources.place(spill.file, spill.line, "")
    return f"{'near ' if spill.near else ''}{sources.short(spill.file)}:{spill.line}", text
