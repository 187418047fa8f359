"""What a sweep runs on: this machine (`Local`), or a Ray cluster (`mla_var3.lab.sweep.ray_`)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.lab.sweep.compile import StoredJob
    from mla_var3.lab.sweep.config import SweepConfig
    from mla_var3.lab.sweep.hand import Cell
    from mla_var3.measure.settings import BenchSettings
    from mla_var3.record import Record
    from mla_var3.toolchain.pool import CompileResult


class Launcher(Protocol):
    """place: where devices are, as a sentence names it ("this machine")."""

    place: str

    def devices(self) -> list[Device]:
        """Each kind of GPU that can be measured on, once."""

    def compile(self, jobs: Sequence[StoredJob], workers: int | None = None) -> list[CompileResult]:
        """Compiles, and stores the records of each job as soon as it is done; results in the jobs' order.

        workers: compiler processes at a time; None is one a core.
        """

    def measure(
        self, cells: Sequence[Cell], settings: BenchSettings, *, experiment: str
    ) -> Generator[Record, None, None]:
        """The record of every contender, as it comes; nothing is stored. Closing the iterator ends what runs."""

    def stop(self) -> None:
        """Begins no further cell: `measure` ends with those that have begun."""

    def state(self) -> str:
        """What is running where, for the progress; "" where that goes without saying."""

    def close(self) -> None:
        """Ends everything that was started."""


class Local:
    """This machine: a pool of processes compiles, a worker process measures. detected: its GPU, or None."""

    place = "this machine"

    def __init__(self, detected: Device | None) -> None:
        self._detected = detected
        self._stopped = False

    def devices(self) -> list[Device]:
        return [] if self._detected is None else [self._detected]

    def compile(self, jobs: Sequence[StoredJob], workers: int | None = None) -> list[CompileResult]:
        from mla_var3.lab.sweep.compile import compile_here

        return compile_here(jobs, workers)

    def measure(
        self, cells: Sequence[Cell], settings: BenchSettings, *, experiment: str
    ) -> Generator[Record, None, None]:
        from mla_var3.measure.cell import measure_cells

        self._stopped = False
        some = [(cell.problem, cell.contenders) for cell in cells]
        stream = measure_cells(some, self._detected, settings, experiment=experiment)
        try:
            for record in stream:
                yield record
                if self._stopped:
                    return
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()

    def stop(self) -> None:
        self._stopped = True

    def state(self) -> str:
        return ""

    def close(self) -> None:
        pass


def launcher_of(config: SweepConfig) -> Launcher:
    """What `launcher=` names; a `UserError` where it is not installed or cannot be reached."""
    if config.launcher == "ray":
        from mla_var3.lab.sweep.ray_ import Ray

        return Ray()
    from mla_var3.device import Device

    return Local(Device.detect())
