"""packed_append v0 in torch: the oracle as a kernel version.

    gather cosines and sines → turn q's and k's rope columns (float64) → round to bf16 → pack → scatter bytes

Written for being right, on any device. Which tokens are written is read on the host, so it cannot be captured in a
graph. Nothing to tune.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_var3.device import Requirement
from mla_var3.runtime import KernelPlan, Tiling, TorchKernel, Verdict
from mla_var3.workload import packed_append

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.packed_append import PackedAppendProblem


@dataclass(frozen=True)
class PackedAppendTiling(Tiling):
    """No knobs."""

    def validate(self, pd: PackedAppendProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes()


class PackedAppendPlan(KernelPlan):
    """Inputs and outputs of `workload.packed_append`."""

    workload = packed_append.WORKLOAD
    tiling_type = PackedAppendTiling
    requires = Requirement(archs=(), dtypes=("bf16",), options=("v41", "no_rope"))
    graph_capturable = False

    def default_tiling(self) -> PackedAppendTiling:
        return PackedAppendTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [PackedAppendTiling()]

    def plan(self, *inputs: torch.Tensor) -> TorchKernel:
        outputs = packed_append.new_outputs(self.problem, inputs[0])

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            """What is to be written, where it belongs; the rest as it was."""
            after = packed_append.appended(self.problem, *inputs, held=outputs)
            return tuple(x.to(held.dtype) for x, held in zip(after, outputs, strict=True))

        return TorchKernel(
            run, name="packed_append", input_tensors=inputs, output_tensors=outputs, tiling=self.tiling, plan=self
        )

    def plan_empty(self) -> TorchKernel:
        return TorchKernel(
            lambda *inputs: packed_append.reference(self.problem, *inputs),
            name="packed_append",
            tiling=self.tiling,
            plan=self,
        )
