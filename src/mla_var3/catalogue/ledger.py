"""Which code the versions of this checkout compile to: results/code.json, a line a version, problem class, knobs and
functions.

A record says which code it timed (`mla_var3.toolchain.digest`). Whether that is the code that is here takes compiling,
so it is compiled once for each source and written down with the hash of that source; from then on comparing costs
nothing. `scripts/record_code.py` writes the file, and the tests compile a line of each version again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3 import paths
from mla_var3.catalogue import registry
from mla_var3.errors import UserError

if TYPE_CHECKING:
    from mla_var3.workload import Problem

SAME = "same code"
OTHER = "other code"
UNKNOWN = "code not recorded"
GONE = "code gone"
NO_LINE = "not in results/code.json"
LIBRARY = "a library"


@dataclass(frozen=True)
class Line:
    """What one version compiles to, for one problem class and some knobs.

    knobs: fields of the tiling that change the code. functions: names of what a call has compiled
    (`BaseKernel.functions`): of one version there may be several lines that differ in them, as one that combines where
    requests are split has another function, and one that holds a row in registers has a function for each length.
    stages: names of the kernels that a call launches, in order. source: what `source_of` gave when the line was
    written. digest: of the code. problem: label of the one problem that the line is about. It is empty in CuTe, where
    the host function that chooses a launch by the sizes is part of the code, so that the line is about every problem of
    the class. toolchain: versions of the packages that compiled it."""

    kernel: str
    problem_class: str
    knobs: Mapping[str, Any]
    functions: Sequence[str]
    stages: Sequence[str]
    arch: str
    source: str
    digest: str
    problem: str = ""
    toolchain: Mapping[str, str] = field(default_factory=dict)


def path() -> Path:
    return paths.shipped_results_dir() / "code.json"


def to_json(found: Sequence[Line]) -> str:
    """The text of the file: a JSON array, one element a line."""
    return "[\n" + ",\n".join(json.dumps(asdict(line)) for line in found) + "\n]\n"


@lru_cache(maxsize=4)
def lines(file: Path | None = None) -> tuple[Line, ...]:
    """The shipped lines, or those of another file; none where there is no file."""
    target = file or path()
    if not target.is_file():
        return ()
    try:
        return tuple(Line(**fields) for fields in json.loads(target.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{target} is damaged ({error}): run scripts/record_code.py.") from error


@lru_cache(maxsize=4)
def _of_class(file: Path | None = None) -> dict[tuple[str, str], list[Line]]:
    """The lines of each version and problem class."""
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines(file):
        found.setdefault((line.kernel, line.problem_class), []).append(line)
    return found


@lru_cache(maxsize=64)
def source_of(label: str) -> str:
    """Hash of the source that a version's code comes from; empty where it is not here."""
    return next((registry.source_hash(kernel) for kernel in registry.all_kernels() if kernel.label == label), "")


def standing(label: str, problem: Problem, digest: str, file: Path | None = None) -> str:
    """How the code of that digest, which a record of the version timed on the problem, stands to the code that is here:
    one of the words above. digest: empty where the record has none."""
    kernel = next((kernel for kernel in registry.all_kernels() if kernel.label == label), None)
    if kernel is None:
        return GONE
    if not digest:
        return UNKNOWN
    if kernel.language == "peer":
        return LIBRARY
    found, source = _of_class(file).get((label, problem.problem_class().key()), ()), source_of(label)
    current = [line.digest for line in found if line.source == source and line.problem in ("", problem.label)]
    if not current:
        return NO_LINE
    return SAME if digest in current else OTHER
