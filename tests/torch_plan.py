"""A kernel of torch operations without knobs, for the check to judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mla_var3.errors import Verdict
from mla_var3.runtime import KernelPlan, TorchKernel
from mla_var3.runtime.types import Tiling


@dataclass(frozen=True)
class NoTiling(Tiling):
    def validate(self, pd: Any, device: Any = None) -> Verdict:
        return Verdict.yes()


class TorchPlan(KernelPlan):
    """Subclasses say the workload and what they require, and plan a `kernel` for inputs."""

    tiling_type = NoTiling

    def default_tiling(self) -> Tiling:
        return NoTiling()

    def autotune_configs(self) -> list[Tiling]:
        return []

    def kernel(self, run: Callable[..., tuple[Any, ...]], inputs: Sequence[Any], outputs: Sequence[Any]) -> TorchKernel:
        """run: what the outputs are to hold, of the inputs."""
        return TorchKernel(run, name="x", input_tensors=inputs, output_tensors=outputs, plan=self)

    def plan_empty(self) -> TorchKernel:
        return TorchKernel(lambda *given: given, name="x", plan=self)
