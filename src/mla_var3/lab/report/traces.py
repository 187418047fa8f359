"""Traces that `mla-var3 profile --mode trace` left: the timeline inside a kernel, for the page."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_var3 import paths
from mla_var3.catalogue.registry import KernelId
from mla_var3.errors import UserError
from mla_var3.lab.profiling.picture import FILE
from mla_var3.lab.profiling.request import OUT
from mla_var3.workload import problem_from_record

#: A picture is tens of kilobytes of the page, of which every reader loads all.
MOST = 12
#: What a picture is made of. Anything else in a file does not get into the page.
_ELEMENTS = ("svg", "title", "text", "rect", "line")
_SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Drawn:
    """One trace. said: sentences on what fills the time. shares: rows as `modes.trace.Share`. picture: SVG."""

    kernel: str
    cell: str
    device: str
    at: str
    said: list[str]
    shares: list[dict[str, Any]]
    picture: str

    @property
    def title(self) -> str:
        return f"{self.kernel} on {self.cell}, {self.device}"


def default_folders() -> list[Path]:
    """Where traces are looked for: profiles made here, and those that the project's results have."""
    return [Path(OUT), *sorted(paths.shipped_results_dir().glob("*/profiles"))]


def find(folders: Iterable[Path]) -> list[Drawn]:
    """The newest trace of each kernel, cell and device, the newest first, at most `MOST`. A folder that holds no
    finished trace, or a picture that is not one of ours, is passed over."""
    newest: dict[str, Drawn] = {}
    for one in sorted((one for folder in folders for one in _in(folder)), key=lambda one: one.at):
        newest[one.title] = one
    return sorted(newest.values(), key=lambda one: one.at, reverse=True)[:MOST]


def _in(folder: Path) -> Iterator[Drawn]:
    for path in sorted(folder.glob(f"**/{FILE}")):
        try:
            params, facts = (json.loads((path.parent / f"{name}.json").read_text()) for name in ("params", "facts"))
            found = _drawn(params, facts["kernels"][0], path.read_text())
        except (OSError, ValueError, KeyError, TypeError, IndexError, UserError):
            continue
        if found is not None:
            yield found


def _drawn(params: Mapping[str, Any], facts: Mapping[str, Any], picture: str) -> Drawn | None:
    request, trace = params["request"], facts["trace"]
    if trace is None or not is_ours(picture):
        return None
    return Drawn(
        KernelId(**request["kernel"]).label, problem_from_record(request["problem"]).label, params["device"],
        params["at"], list(trace["said"]), list(trace["shares"]), picture,
    )  # fmt: skip


def is_ours(picture: str) -> bool:
    """Whether an SVG file has only what `lab.profiling.picture` draws: no script, and nothing that leads elsewhere."""
    try:
        root = ElementTree.fromstring(picture)
    except ElementTree.ParseError:
        return False
    allowed = {f"{_SVG}{name}" for name in _ELEMENTS}
    return all(
        element.tag in allowed and not any(name.lower().startswith("on") or "href" in name for name in element.attrib)
        for element in root.iter()
    )
