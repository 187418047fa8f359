"""What a sweep runs on the nodes of a cluster. It knows nothing of the engine that put it there."""

from __future__ import annotations

import os
import pickle
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mla_var3 import paths
from mla_var3.errors import UserError
from mla_var3.files import write_whole

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.lab.bundle import BundleJob
    from mla_var3.measure.cell import Contender
    from mla_var3.measure.settings import BenchSettings
    from mla_var3.workload import Problem

_DETECT = (
    "import pickle, sys; from mla_var3.device import Device; sys.stdout.buffer.write(pickle.dumps(Device.detect()))"
)
_DETECT_S = 180.0


#: Name and content of a file of the compile cache. Names hold the key, a digest of all that the code depends on.
CodeFile = tuple[str, bytes]


@dataclass(frozen=True)
class Cell:
    """What one GPU measures in turn: contenders of a problem, beside its limits."""

    problem: Problem
    contenders: tuple[Contender, ...]
    device: Device


class Hand:
    """Holds one GPU, and measures one cell at a time on it, each in a worker process of its own."""

    def __init__(self) -> None:
        # Ray sets it to 1, which no worker process has that is started by hand.
        os.environ.pop("OMP_NUM_THREADS", None)

    def device(self, announced: Device | None) -> Device | None:
        """The GPU that is held: as its node announced it, else what torch sees. None: there is none to be used."""
        if announced is not None:
            return announced
        # In a process that ends: a CUDA context here would take memory from what is measured.
        done = subprocess.run(
            [sys.executable, "-c", _DETECT],
            env={**os.environ, "PYTHONPATH": paths.python_path()}, capture_output=True, timeout=_DETECT_S, check=True,
        )  # fmt: skip
        found: Device | None = pickle.loads(done.stdout)
        return found

    def measure(self, cell: Cell, settings: BenchSettings, experiment: str, *code: Sequence[CodeFile]) -> list[str]:
        """The records of a cell's contenders, as JSON. code: compiled host functions that this node may not have."""
        from mla_var3.measure.cell import measure_cell

        for files in code:
            keep(files)
        found = list(measure_cell(cell.problem, cell.contenders, cell.device, settings, experiment=experiment))
        for record in found:
            record.environment = {**record.environment, "node": platform.node()}
        return [record.to_json() for record in found]


# ---------------------------------------------------------------- compiled code
def host_functions(job: BundleJob) -> list[CodeFile]:
    """Compiles CuTe host functions, or finds them in this node's cache, and returns the files of their entries."""
    from mla_var3.lab.bundle import run_bundle_job
    from mla_var3.toolchain.aot import default_cache_dir

    folder = default_cache_dir()
    entries = run_bundle_job(replace(job, folder=str(folder)))
    objects = sorted({folder / entry["object"] for entry in entries})
    # The `.json` last: an entry counts once that is there.
    return [(path.name, path.read_bytes()) for library in objects for path in (library, library.with_suffix(".json"))]


def keep(files: Sequence[CodeFile]) -> None:
    """Puts those files into this node's cache that it does not have. One that cannot be written is compiled again."""
    from mla_var3.toolchain.aot import default_cache_dir

    folder = default_cache_dir()
    for name, data in files:
        if not (folder / name).exists():
            try:
                write_whole(folder / name, data)
            except UserError as error:
                print(error, file=sys.stderr)
                return
