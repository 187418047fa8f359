"""Profile folders: the one that is meant, those of a version, and what `mla-var3 profile` left in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_var3 import paths
from mla_var3.catalogue.registry import KernelId
from mla_var3.errors import UserError
from mla_var3.workload import Problem, problem_from_record

#: What makes a folder a profile.
FILES = ("facts.json", "params.json")
_SHOWN = 4


@dataclass(frozen=True)
class Hot:
    """A line of the kernel at which warps wait: share of the stall samples in per cent, and the first reason."""

    where: str
    source: str
    share: float
    stall: str


@dataclass(frozen=True)
class Profile:
    """One kernel of a profile folder: the profiled one, or the baseline beside it.

    facts: what `profiling.facts.Facts.to_record` gives. params: all of params.json.
    """

    folder: Path
    kernel: KernelId
    problem: Problem
    facts: Mapping[str, Any]
    params: Mapping[str, Any]

    @property
    def label(self) -> str:
        return self.kernel.label

    @property
    def device(self) -> str:
        return str(self.params["device"])

    @property
    def at(self) -> str:
        """When it was made, as it sorts: `20261121T134147Z`."""
        return str(self.params["at"])

    @property
    def has_counters(self) -> bool:
        return bool(self.facts.get("launches"))

    @property
    def source_hash(self) -> str | None:
        found = ((self.params.get("source") or {}).get("hash") or {}).get(self.label)
        return None if found is None else str(found)

    def hot(self) -> list[Hot]:
        """The lines of "Where the warps wait" in the report; empty for the baseline, and where nothing sampled."""
        path = self.folder / "report.md"
        if self.label != _label(self.params["request"]["kernel"]) or not path.is_file():
            return []
        section = path.read_text(encoding="utf-8").partition("\n## Where the warps wait\n")[2].partition("\n## ")[0]
        rows = []
        for line in section.splitlines():
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if len(cells) == 5 and re.fullmatch(r"[\d.]+", cells[2]):
                rows.append(Hot(cells[0], cells[1], float(cells[2]), cells[4]))
        return rows


def _label(kernel: Mapping[str, Any]) -> str:
    return KernelId(**dict(kernel)).label


def is_profile(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def read(folder: Path) -> list[Profile]:
    """The kernels of a profile folder, the profiled one first. Raises `UserError` for a folder that is none."""
    try:
        facts, params = (json.loads((folder / name).read_text(encoding="utf-8")) for name in FILES)
        request = params["request"]
        problem = problem_from_record(request["problem"])
        asked = [request["kernel"], *([request["baseline"]] if request.get("baseline") else [])]
        by_label = {_label(kernel): KernelId(**kernel) for kernel in asked}
        return [
            Profile(folder, by_label[one["kernel"]], problem, one, params)
            for one in facts["kernels"]
            if one["kernel"] in by_label
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder} is no finished profile ({type(error).__name__}: {error}): give a folder that mla-var3 profile "
            "made, with facts.json and params.json."
        ) from error


def find(path: Path) -> Path:
    """The profile folder that a path means: itself, its parent, or the only one below. Raises `UserError`."""
    folder = path.parent if path.is_file() else path
    if is_profile(folder):
        return folder
    below = sorted(p.parent for p in folder.rglob(FILES[0]) if is_profile(p.parent))
    if len(below) == 1:
        return below[0]
    if not below:
        raise UserError(f"{path} holds no profile: give a folder with facts.json, as mla-var3 profile makes them.")
    some = ", ".join(str(p.relative_to(folder)) for p in below[:_SHOWN]) + (", ..." if len(below) > _SHOWN else "")
    raise UserError(f"{path} holds {len(below)} profiles: name one of {some}.")


def places() -> list[Path]:
    """Folders in which profiles are looked for: kept ones of each device, then what was made here."""
    from mla_var3.lab.profiling.request import OUT

    results = [Path("results"), paths.shipped_results_dir()]
    found = [folder for root in results for folder in sorted(root.glob("*/profiles"))]
    return list(dict.fromkeys(p.resolve() for p in [*found, Path(OUT)] if p.is_dir()))


def known(kernel: KernelId, problem: Problem | None = None, device: str | None = None) -> list[Profile]:
    """Profiles of a version (as the profiled kernel or as a baseline), those with counters first, then the newest."""
    found = [
        profile
        for profile in _all()
        if profile.kernel == kernel
        and (problem is None or profile.problem == problem)
        and (device is None or profile.device == device)
    ]
    return sorted(found, key=lambda p: (p.has_counters, p.at), reverse=True)


def _all() -> Iterator[Profile]:
    for place in places():
        for path in sorted(place.rglob(FILES[0])):
            if is_profile(path.parent):
                try:
                    yield from read(path.parent)
                except UserError:
                    continue  # an unfinished one among others is nobody's mistake
