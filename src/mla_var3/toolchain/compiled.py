"""What came out of a compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_var3.toolchain.digest import Code


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes. Bytes, per block (shared memory) or per thread (registers, spills, stack).

    spill_loop_bytes: those of `spill_bytes` in the loops of products (`toolchain.spills`). code_bytes: of machine code.
    """

    registers: int = 0
    smem_static: int = 0
    smem_dynamic: int = 0
    spill_bytes: int = 0
    spill_loop_bytes: int = 0
    stack_bytes: int = 0
    threads: int = 0
    ctas_per_sm: int = 0
    code_bytes: int = 0
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
    warnings: broken limits and slow paths, one sentence each. seconds: that the compiler took when it made this, also
    where a cache has it from then; None where that is not known. code: of the whole call, None where a stage's is not
    known. handle: the loaded function, where the language gives one; not kept when pickled.
    """

    name: str
    arch: str
    resources: Resources
    artefacts: dict[str, Path] = field(default_factory=dict)
    stages: tuple[CompiledKernel, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: float | None = None
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

    def outcome(self) -> dict[str, Any]:
        """Fields of a record that this gives, without those that are not known."""
        found: dict[str, Any] = {"resources": self.to_record(), "warnings": list(self.warnings)}
        if self.seconds is not None:
            found["compile_seconds"] = round(self.seconds, 3)
        if self.code is not None:
            found["code"] = self.code.to_record()
        return found

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
        took = [c.seconds for c in stages if c.seconds is not None]
        seconds = sum(took) if stages and len(took) == len(stages) else None
        code = Code.of_stages([stage.code for stage in stages])
        return cls(name, arch, main.resources, dict(main.artefacts), tuple(stages), warnings, seconds, code)
