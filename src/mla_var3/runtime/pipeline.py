"""`KernelPipeline`: stages in order on one stream, as one kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.runtime.base import BaseKernel
from mla_var3.toolchain.compiled import CompiledKernel

if TYPE_CHECKING:
    from mla_var3.device import Device


class KernelPipeline(BaseKernel):
    """Runs `stages` one after the other on the current stream; the last stage's outputs are the pipeline's.

    Stages read each other's tensors; the pipeline neither copies nor allocates. Inputs are the first stage's unless
    given. Its FLOPs and bytes are the plan's (of the whole), not the sum of the stages.
    """

    def __init__(self, stages: Sequence[BaseKernel], *, name: str | None = None, **options: Any) -> None:
        self.stages = tuple(stages)
        first, last = self.stages[0], self.stages[-1]
        options.setdefault("input_tensors", first.input_tensors)
        options.setdefault("output_tensors", last.output_tensors)
        options.setdefault("workspace_tensors", _distinct([t for s in self.stages for t in s.workspace_tensors]))
        options.setdefault("tiling", first.tiling)
        super().__init__(name or first.name, **options)

    def launch(self) -> None:
        for stage in self.stages:
            stage.launch()

    @property
    def with_schedule(self) -> Callable[[], Any] | None:
        made = [stage.with_schedule for stage in self.stages]
        if not any(made):
            return None
        calls = [again or stage.launch for again, stage in zip(made, self.stages, strict=True)]

        def launch() -> None:
            for call in calls:
                call()

        return launch

    def sharing(self) -> BaseKernel:
        stages = tuple(stage.sharing() for stage in self.stages)
        if all(made is stage for made, stage in zip(stages, self.stages, strict=True)):
            return self
        other = copy.copy(self)
        other.stages = stages
        return other

    def compile(self, out_dir: Path | None, device: Device, keep: Sequence[str] = ()) -> CompiledKernel:
        own = [s for s in self.stages if not s.comes_compiled]
        compiled = [s.compile(None if out_dir is None else out_dir / s.name, device, keep) for s in own]
        return CompiledKernel.of_stages(self.name, device.arch, compiled)


def _distinct(tensors: Sequence[Any]) -> list[Any]:
    """Each tensor object once, in order (tensors have no truth value to put them in a set by value)."""
    return list({id(t): t for t in tensors}.values())
