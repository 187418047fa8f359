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
    """The knobs of one kernel version: sizes of tiles, numbers of stages, warps or splits. Each version has a subclass
    of its own, a frozen dataclass whose fields are plain values, so that tilings can be compared, kept in records, and
    made from them."""

    #: Knobs that only the launch depends on, such as the grid. Tilings that differ in these share their compiled code.
    launch_fields: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def validate(self, pd: Any, device: Device | None = None) -> Verdict:
        """Whether these knobs fit the problem `pd` and, where one is given, the device: registers, shared memory, and
        what the code assumes of sizes. A false verdict gives the reason in one sentence, with the numbers."""

    def to_record(self) -> dict[str, Any]:
        """The knobs by name, as a record keeps them."""
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
    """What check, bench and sweep ask of a kernel. `BaseKernel` implements it for every language.

    input_tensors, output_tensors: what it is bound to; empty for a kernel that was planned without tensors.
    """

    name: str
    tiling: Any
    input_tensors: tuple[Any, ...]
    output_tensors: tuple[Any, ...]

    def __call__(self) -> tuple[Any, ...]:
        """Launches on the current stream and returns the outputs. Allocates nothing, and does not wait for the GPU."""
        ...

    def bind(self, *inputs: Any) -> Kernel:
        """The same kernel on other tensors of the same problem class; nothing is compiled."""
        ...

    def compile(self, out_dir: Path | None, device: Device, keep: Sequence[str] = ()) -> CompiledKernel:
        """Compiles for `device`, which need not be here, and reads back registers, shared memory and instructions."""
        ...

    def autotune(self, measure: Any) -> Any:
        """Times every feasible tiling by `measure(kernel)`, which gives a time; adopts the fastest and returns it."""
        ...
