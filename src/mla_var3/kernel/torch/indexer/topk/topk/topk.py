"""topk v0 in torch: the oracle of `topk` as a kernel version.

    a stable sort of every row in float64, its first k

Written for being right, on any device: the yardstick of the other languages. Nothing to tune. It reads lengths on the
host, so that it cannot be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_var3.device import Requirement
from mla_var3.runtime import KernelPlan, Tiling, TorchKernel, Verdict
from mla_var3.workload import topk

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.topk import TopkProblem


@dataclass(frozen=True)
class TopkTiling(Tiling):
    """No knobs."""

    def validate(self, pd: TopkProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes()


class TopkPlan(KernelPlan):
    """Plan of the oracle: inputs and output of `workload.topk`."""

    workload = topk.WORKLOAD
    tiling_type = TopkTiling
    requires = Requirement(archs=(), dtypes=("fp32", "bf16"))
    graph_capturable = False

    def default_tiling(self) -> TopkTiling:
        return TopkTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [TopkTiling()]

    def topk(self, *inputs: torch.Tensor) -> tuple[torch.Tensor]:
        """(indices,) of `workload.topk`."""
        return topk.reference(self.problem, *inputs)

    def plan(self, *inputs: torch.Tensor) -> TorchKernel:
        rows = len(inputs[0])
        outputs = (torch.empty((rows, self.problem.topk), dtype=torch.int32, device=inputs[0].device),)
        return TorchKernel(
            self.topk, name="topk", input_tensors=inputs, output_tensors=outputs, tiling=self.tiling, plan=self
        )

    def plan_empty(self) -> TorchKernel:
        return TorchKernel(self.topk, name="topk", tiling=self.tiling, plan=self)
