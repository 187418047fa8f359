"""Profiles of a sweep's points, each in a process of its own: one that breaks the device costs no other."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.catalogue.registry import KernelId
from mla_var3.errors import UserError
from mla_var3.lab.profiling import DISABLED, folder
from mla_var3.lab.profiling.modes import tools
from mla_var3.lab.profiling.request import OUT, TIMEOUT_S, Request, baseline_of
from mla_var3.workload import problem_from_record

if TYPE_CHECKING:
    from mla_var3.record import Record

#: Beyond the profiler's own time: imports, compiling, the short timing, reading the report; for two versions.
_BESIDE_S = 300.0


@dataclass
class ProfileConfig:
    """What happens to points that passed, once all of them are timed: one profile each, in a process of its own.

    mode: disabled, or a mode of `mla-var3 profile`. baseline: a version to compare with; null is the version before (in
    mode annotation), none is nothing. launches, kernel_name, out, timeout_s: as of `mla-var3 profile`.
    """

    mode: str = DISABLED
    baseline: str | None = None
    launches: int = 1
    kernel_name: str | None = None
    out: str = OUT
    timeout_s: float = TIMEOUT_S


def request_of(record: Record, config: ProfileConfig) -> Request:
    """The profile of a measured record: its tiling as it was timed."""
    kernel = KernelId(**record.kernel.model_dump())
    return Request(
        kernel,
        problem_from_record(record.problem),
        config.mode,
        dict(record.tiling or {}),
        baseline_of(kernel, config.baseline, config.mode),
        launches=config.launches,
        kernel_name=config.kernel_name,
        out=config.out,
        timeout_s=config.timeout_s,
    )


def profile_points(records: Iterable[Record], config: ProfileConfig, say: Callable[[str], None]) -> list[Path]:
    """Profiles every record that passed, one after the other, and says where each report lies, or why there is none."""
    passed = [record for record in records if record.status == "passed" and record.time_us is not None]
    made: list[Path] = []
    for number, record in enumerate(passed, start=1):
        label = f"[profile {number}/{len(passed)}] {record.problem_label} {record.kernel.label}"
        try:
            found = _run(request_of(record, config))
        except UserError as error:
            say(f"{label}: not profiled: {error}")
        else:
            made.append(found)
            say(f"{label}: {found / 'report.md'}")
    return made


def _run(request: Request) -> Path:
    with tempfile.TemporaryDirectory(prefix="profile-") as scratch:
        path = Path(scratch) / "request.json"
        folder.write_json(path, request.to_record())
        command: list[Any] = [sys.executable, "-m", "mla_var3.lab.profiling.run", path]
        limit = 2 * request.timeout_s + _BESIDE_S
        env = tools.environ(tools.target_env(line_info=False))
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, env=env)
        except subprocess.TimeoutExpired:
            raise UserError(f"it was not done after {limit:g} s.") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError(lines[-1].removeprefix("profile: ") if lines else f"it ended with status {done.returncode}.")
    return Path(done.stdout.strip().splitlines()[-1])
