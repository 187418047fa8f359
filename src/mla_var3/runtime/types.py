"""What a kernel and its knobs are. Nothing heavy is imported here."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from mla_var3.errors import UserError, Verdict, nearest

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.toolchain.compiled import CompiledKernel


@dataclass(frozen=True)
class Tiling(ABC):
    """The knobs of one kernel version. Subclasses are frozen dataclasses of plain values."""

    launch_fields: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def validate(self, pd: Any, device: Device | None = None) -> Verdict:
        """Whether the problem and the device allow these knobs; a false verdict carries the numbers."""

    def to_record(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> Tiling:
        """Inverse of `to_record`; an unknown field is a `UserError` that names the nearest."""
        names = [f.name for f in dataclasses.fields(cls)]
        for key in data:
            if key not in names:
                raise UserError(f"{cls.__name__} has no field {key!r}: {nearest(str(key), names)}.")
        return cls(**dict(data))


@runtime_checkable
class Kernel(Protocol):
    """A runnable: compiled, called, timed. Calling launches on the current stream, allocates nothing, never waits."""

    name: str
    tiling: Any
    input_tensors: tuple[Any, ...]
    output_tensors: tuple[Any, ...]

    def __call__(self) -> tuple[Any, ...]: ...

    def bind(self, *inputs: Any) -> Kernel: ...

    def compile(self, out_dir: Path | None, device: Device, keep: Sequence[str] = ()) -> CompiledKernel: ...

    def autotune(self, measure: Any) -> Any: ...
