"""The folder of one profile: `<out>/<mode>/<kernel>/<params>/<time>/`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.lab import naming

if TYPE_CHECKING:
    from mla_var3.lab.profiling.request import Request

_LONGEST = 120  # of a folder's name


def params_name(request: Request) -> str:
    """The problem's label, with what it leaves out (page, a list of lengths) and the knobs that were asked for."""
    problem = request.problem
    parts = [problem.label]
    if more := naming.detail(problem):
        parts.append(more.strip("_").replace("_", "-"))
    parts += [f"{name}{value}" for name, value in sorted(request.tiling.items())]
    if request.tune:
        parts.append("tuned")
    return re.sub(r"[^\w.-]+", "-", "-".join(parts))[:_LONGEST]


def make(request: Request) -> Path:
    """A new folder, never one that was there."""
    above = Path(request.out) / request.mode / request.kernel.label.replace("/", "-") / params_name(request)
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    for name in (stamp, *(f"{stamp}-{n}" for n in range(2, 1000))):
        try:
            (above / name).mkdir(parents=True)
        except FileExistsError:
            continue
        return above / name
    raise FileExistsError(above / stamp)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, default=str) + "\n")


def keep_tuning(folder: Path, kernel: Any, name: str = "tuning.json") -> Path | None:
    """Copies what tuning this kernel measured, where it was ever tuned; None where it was not."""
    from mla_var3.runtime.autotune import default_cache_dir, tuning_key

    if getattr(kernel, "plan", None) is None:
        return None
    kept = default_cache_dir() / f"{tuning_key(kernel)}.json"
    if not kept.is_file():
        return None
    shutil.copyfile(kept, folder / name)
    return folder / name
