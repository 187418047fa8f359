"""index_append v0 in torch: the oracle as a kernel version.

    norm (float64) → round to bf16 → turn the first 64 columns → round to bf16 → quantise → scatter bytes

Written for being right, on any device. Which tokens are written is read on the host, so it cannot be captured in a
graph. Nothing to tune.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_var3.device import Requirement
from mla_var3.runtime import KernelPlan, Tiling, TorchKernel, Verdict
from mla_var3.workload import index_append

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.index_append import IndexAppendProblem


@dataclass(frozen=True)
class IndexAppendTiling(Tiling):
    """No knobs."""

    def validate(self, pd: IndexAppendProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes()


class IndexAppendPlan(KernelPlan):
    """Inputs and outputs of `workload.index_append`."""

    workload = index_append.WORKLOAD
    tiling_type = IndexAppendTiling
    requires = Requirement(archs=(), dtypes=("bf16",))
    graph_capturable = False

    def default_tiling(self) -> IndexAppendTiling:
        return IndexAppendTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [IndexAppendTiling()]

    def plan(self, *inputs: torch.Tensor) -> TorchKernel:
        outputs = index_append.new_outputs(self.problem, inputs[0])

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            """What is to be written, where it belongs; the rest as it was."""
            after = index_append.appended(self.problem, *inputs, held=outputs)
            return tuple(x.to(held.dtype) for x, held in zip(after, outputs, strict=True))

        return TorchKernel(
            run, name="index_append", input_tensors=inputs, output_tensors=outputs, tiling=self.tiling, plan=self
        )

    def plan_empty(self) -> TorchKernel:
        return TorchKernel(
            lambda *inputs: index_append.reference(self.problem, *inputs),
            name="index_append",
            tiling=self.tiling,
            plan=self,
        )
