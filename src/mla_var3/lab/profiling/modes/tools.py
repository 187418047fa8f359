"""NVIDIA's tools as subprocesses: finding them, running them, and saying what went wrong in one sentence."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mla_var3 import paths
from mla_var3.errors import UserError

#: Where a tool lies when it is not on PATH, the newest last.
_PLACES = {
    "ncu": ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu"),
    "nsys": ("/usr/local/cuda*/bin/nsys", "/opt/nvidia/nsight-systems/*/bin/nsys"),
    "compute-sanitizer": (
        "/usr/local/cuda*/bin/compute-sanitizer", "/usr/local/cuda*/compute-sanitizer/compute-sanitizer",
    ),
}  # fmt: skip
_TITLES = {"ncu": "Nsight Compute (ncu)", "nsys": "Nsight Systems (nsys)"}
#: What to do without the tool.
INSTEAD = {
    "ncu": "use --mode annotation, which does without counters, or --mode timeline",
    "nsys": "use --mode timeline, which shows the same overlap and gaps",
}


def without_advice(error: UserError, name: str = "ncu") -> str:
    """The sentence of an error without what to use instead, for a mode that goes on."""
    text = str(error)
    for before in (", or ", "; ", ": "):
        text = text.replace(before + INSTEAD[name], "")
    return text


class Denied(UserError):
    """The tool is here, and this user may not read the device's counters."""


@dataclass(frozen=True)
class Ran:
    """What a profiler run left. text: everything it printed, which is in `log` as well."""

    command: tuple[str, ...]
    status: int
    text: str
    log: Path


def find(name: str) -> Path | None:
    """The executable, from PATH or its usual places."""
    found = shutil.which(name)
    if found:
        return Path(found)
    for pattern in _PLACES.get(name, ()):
        some = sorted(path for path in Path("/").glob(pattern.lstrip("/")) if os.access(path, os.X_OK))
        if some:
            return some[-1]
    return None


def need(name: str) -> Path:
    """The executable; a `UserError` names the mode that works without."""
    path = find(name)
    if path is None:
        raise UserError(f"{_TITLES[name]} is not installed here: put it on PATH, or {INSTEAD[name]}.")
    return path


def run(command: Sequence[str], log: Path, timeout_s: float, env: Mapping[str, str] | None = None) -> Ran:
    """Runs a profiler with everything it starts; after `timeout_s` all of it is ended and a `UserError` raised."""
    name = Path(command[0]).name
    instead = INSTEAD.get(name, "use --mode timeline")
    try:
        status, text = watch(command, timeout_s, env or {})
    except OSError as error:
        raise UserError(f"{name} cannot be started ({error.strerror}): {instead}.") from error
    log.write_text(text)
    if status is None:
        raise UserError(
            f"{name} was not done after {timeout_s:g} s and was ended (its output: {log}): give it longer with "
            f"--timeout, or {instead}."
        )
    return Ran(tuple(command), status, text, log)


def watch(command: Sequence[str], timeout_s: float, env: Mapping[str, str]) -> tuple[int | None, str]:
    """(status, everything printed) of a tool over another process; status None: it took longer, and all was ended.

    All: a tool that is killed leaves the process it watches behind, and with it a kernel that hangs on the GPU.
    Raises `OSError` when it cannot be started.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environ(env),
        start_new_session=True,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end(process)
        text, _ = process.communicate()
        return None, text
    except BaseException:
        _end(process)
        raise
    return process.returncode, text


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def environ(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `more` over it."""
    return {**os.environ, **more}


def target_command(job: Path) -> list[str]:
    """The process to watch."""
    return [sys.executable, "-m", "mla_var3.lab.profiling.target", str(job)]


def target_env(*, line_info: bool) -> dict[str, str]:
    """Its environment: this package importable, and kernels compiled with source lines where that is an option."""
    env = {"PYTHONPATH": paths.python_path()}
    if line_info:
        # cuTile and Triton always write them; CuTe's SASS has come out the same with and without.
        env["CUTE_DSL_LINEINFO"] = "1"
    return env


def target_error(text: str) -> str | None:
    """The sentence of a target that refused, or the last line of its traceback; None when it said nothing."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        if line.startswith("target: "):
            return line.removeprefix("target: ")
    if "Traceback (most recent call last):" in text:
        after = text.rpartition("Traceback (most recent call last):")[2].splitlines()
        ends = [line for line in after if line and not line.startswith((" ", "=="))]
        return ends[0].strip() if ends else lines[-1]
    return None
