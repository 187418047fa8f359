"""`ConcurrentKernels`: stages on streams of their own, joined by events, as one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UserError, Verdict
from mla_var3.runtime.base import BaseKernel
from mla_var3.runtime.pipeline import _distinct
from mla_var3.toolchain.compiled import CompiledKernel

if TYPE_CHECKING:
    from mla_var3.device import Device

JointCheck = Callable[["ConcurrentKernels", "Device | None"], Verdict]


class ConcurrentKernels(BaseKernel):
    """Runs `stages` at the same time: the first on the caller's stream, the others on side streams.

    Side streams wait for an event of the caller's stream, and the caller's stream waits for an event of each at the
    end, so a call orders like any other launch and can be captured in a CUDA graph. Streams and events are made when
    the kernel is, not when it is called. On tensors of the CPU the stages simply run in order.

    Joint validation (`validate`) refuses stages that write a tensor another one reads or writes, and what `joint`
    (for example: do both fit on an SM together?) refuses. Outputs are those of all stages, in order.
    """

    def __init__(
        self, stages: Sequence[BaseKernel], *, name: str = "concurrent", joint: JointCheck | None = None, **options: Any
    ) -> None:
        if len(stages) < 2:
            raise UserError("ConcurrentKernels needs at least two stages; call a single kernel directly.")
        self.stages = tuple(stages)
        self.joint = joint
        options.setdefault("input_tensors", _distinct([t for s in stages for t in s.input_tensors]))
        options.setdefault("output_tensors", [t for s in stages for t in s.output_tensors])
        options.setdefault("workspace_tensors", _distinct([t for s in stages for t in s.workspace_tensors]))
        options.setdefault("tiling", tuple(s.tiling for s in stages))
        super().__init__(name, **options)
        self._streams: list[Any] = []
        self._fork: Any = None
        self._joins: list[Any] = []
        if any(getattr(t, "is_cuda", False) for t in self.input_tensors):
            import torch

            self._streams = [torch.cuda.Stream() for _ in self.stages[1:]]
            self._fork = torch.cuda.Event()
            self._joins = [torch.cuda.Event() for _ in self._streams]
        self.validate().require(UserError)

    def validate(self, device: Device | None = None) -> Verdict:
        """True when the stages may run at once: no tensor that one writes is touched by another, and `joint` agrees."""
        for i, writer in enumerate(self.stages):
            written = {_storage(t) for t in (*writer.output_tensors, *writer.workspace_tensors) if _has_elements(t)}
            for j, other in enumerate(self.stages):
                if i == j:
                    continue
                touched = (*other.input_tensors, *other.output_tensors, *other.workspace_tensors)
                if any(_storage(t) in written for t in touched):
                    return Verdict.no(
                        f"{writer.name} (stage {i}) writes a tensor that {other.name} (stage {j}) touches at the same "
                        "time: give each stage tensors of its own, or put them in a KernelPipeline."
                    )
        return self.joint(self, device) if self.joint is not None else Verdict.yes()

    def launch(self) -> None:
        if not self._streams:
            for stage in self.stages:
                stage.launch()
            return
        import torch

        caller = torch.cuda.current_stream()
        self._fork.record(caller)
        for stage, stream, join in zip(self.stages[1:], self._streams, self._joins, strict=True):
            stream.wait_event(self._fork)
            with torch.cuda.stream(stream):
                stage.launch()
            join.record(stream)
        self.stages[0].launch()
        for join in self._joins:
            caller.wait_event(join)

    def compile(self, out_dir: Path | None, device: Device, keep: Sequence[str] = ()) -> CompiledKernel:
        compiled = [s.compile(None if out_dir is None else out_dir / s.name, device, keep) for s in self.stages]
        return CompiledKernel.of_stages(self.name, device.arch, compiled)


def _has_elements(tensor: Any) -> bool:
    numel = getattr(tensor, "numel", None)
    return numel is None or numel() > 0


def _storage(tensor: Any) -> Any:
    """Identity of the memory a tensor lives in, so that two views of one buffer count as the same."""
    storage = getattr(tensor, "untyped_storage", None)
    return storage().data_ptr() if storage is not None else id(tensor)
