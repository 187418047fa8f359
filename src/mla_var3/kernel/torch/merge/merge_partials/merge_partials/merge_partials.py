"""merge_partials v0 in torch: the oracle as a kernel version.

    w = exp(lse - max) → out = Σ w · partial / Σ w, lse = max + log Σ w (float64) → round once

Written for being right, on any device and in any dtype: the yardstick of the other languages. Nothing to tune.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_var3.device import Requirement
from mla_var3.runtime import KernelPlan, Tiling, TorchKernel, Verdict
from mla_var3.workload import merge

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.merge import MergeProblem


@dataclass(frozen=True)
class MergePartialsTiling(Tiling):
    """No knobs."""

    def validate(self, pd: MergeProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes()


class MergePartialsPlan(KernelPlan):
    """Plan of the oracle: inputs (partials, lse), outputs (out, lse)."""

    workload = merge.WORKLOAD
    tiling_type = MergePartialsTiling
    requires = Requirement(archs=(), dtypes=("bf16", "fp16", "fp32"))

    def default_tiling(self) -> MergePartialsTiling:
        return MergePartialsTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [MergePartialsTiling()]

    def merge_partials(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of `workload.merge`, unrounded."""
        return merge.reference(self.problem, *inputs)

    def plan(self, *inputs: torch.Tensor) -> TorchKernel:
        outputs = merge.new_outputs(self.problem, inputs[0])
        return TorchKernel(
            self.merge_partials, name="merge_partials", input_tensors=inputs, output_tensors=outputs,
            tiling=self.tiling, plan=self,
        )  # fmt: skip

    def plan_empty(self) -> TorchKernel:
        return TorchKernel(self.merge_partials, name="merge_partials", tiling=self.tiling, plan=self)
