"""Small types that every room shares. Nothing heavy is imported here."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from mla_var3.errors import Infeasible, UserError, nearest
from mla_var3.toolchain.digest import Code

if TYPE_CHECKING:
    from mla_var3.device import Device


@dataclass(frozen=True)
class Verdict:
    """True or false, and why: `if not verdict: print(verdict.reason)`."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok

    @classmethod
    def yes(cls) -> Verdict:
        return cls(True)

    @classmethod
    def no(cls, reason: str) -> Verdict:
        return cls(False, reason)

    def require(self, error: type[UserError] = Infeasible) -> None:
        """Raises `error` with the reason when false."""
        if not self.ok:
            raise error(self.reason)


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


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes. Bytes, per block (shared memory) or per thread (registers, spills, stack)."""

    registers: int = 0
    smem_static: int = 0
    smem_dynamic: int = 0
    spill_bytes: int = 0
    stack_bytes: int = 0
    threads: int = 0
    ctas_per_sm: int = 0
    instructions: dict[str, int] = field(default_factory=dict)

    @property
    def smem(self) -> int:
        """Static and dynamic shared memory of one block, in bytes."""
        return self.smem_static + self.smem_dynamic

    def to_record(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "smem": self.smem}


@dataclass(frozen=True)
class CompiledKernel:
    """What came out of a compiler for one architecture.

    artefacts: what was kept, by kind (ptx, cubin, sass, tileir, mlir, object). stages: of a pipeline, in order.
    warnings: broken limits and slow paths, one sentence each. code: of the whole call, None where a stage's is not
    known. handle: the loaded function, where the language gives one; not kept when pickled.
    """

    name: str
    arch: str
    resources: Resources
    artefacts: dict[str, Path] = field(default_factory=dict)
    stages: tuple[CompiledKernel, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    code: Code | None = None
    handle: Any = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handle": None}

    def to_record(self) -> dict[str, Any]:
        """What a record holds as `resources`: the main stage's, and, of several, every stage's beside it."""
        data = self.resources.to_record()
        if self.stages:
            data["stages"] = [
                {"name": s.name, **s.resources.to_record(), "warnings": list(s.warnings)} for s in self.stages
            ]
        return data

    @classmethod
    def of_stages(cls, name: str, arch: str, stages: Sequence[CompiledKernel]) -> CompiledKernel:
        """A pipeline's: the resources of its main stage, and all warnings.

        The main stage is the one with the most tensor-core instructions; of stages without any, the largest.
        """

        def weight(stage: CompiledKernel) -> tuple[int, int]:
            counts = stage.resources.instructions
            return counts.get("HGMMA", 0) + counts.get("UTCMMA", 0) + counts.get("HMMA", 0), sum(counts.values())

        main = max(stages, key=weight)
        warnings = tuple(w for c in stages for w in c.warnings)
        seconds = sum(c.seconds for c in stages)
        code = Code.of_stages([stage.code for stage in stages])
        return cls(name, arch, main.resources, dict(main.artefacts), tuple(stages), warnings, seconds, code)


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

    def autotune(self) -> Any: ...
