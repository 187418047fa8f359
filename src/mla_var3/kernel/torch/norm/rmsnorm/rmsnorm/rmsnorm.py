"""rmsnorm v0 in torch: the oracle as a kernel version.

    h = x + residual → h · rsqrt(mean(h²) + eps) · weight (float64) → round once

Written for being right, on any device and in any dtype: the yardstick of the other languages. Nothing to tune.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_var3.device import Requirement
from mla_var3.runtime import KernelPlan, Tiling, TorchKernel, Verdict
from mla_var3.workload import norm

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.norm import NormProblem


@dataclass(frozen=True)
class RmsNormTiling(Tiling):
    """No knobs."""

    def validate(self, pd: NormProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes()


class RmsNormPlan(KernelPlan):
    """Plan of the oracle: inputs (x, weight, [second weight], [residual]), outputs (out, second, new residual)."""

    workload = norm.WORKLOAD
    tiling_type = RmsNormTiling
    requires = Requirement(archs=(), dtypes=("bf16", "fp16", "fp32"))

    def default_tiling(self) -> RmsNormTiling:
        return RmsNormTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [RmsNormTiling()]

    def rmsnorm(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(out, second, new residual) of `workload.norm`, unrounded but for the residual."""
        return norm.reference(self.problem, *inputs)

    def plan(self, *inputs: torch.Tensor) -> TorchKernel:
        outputs = norm.new_outputs(self.problem, inputs[0])
        return TorchKernel(
            self.rmsnorm, name="rmsnorm", input_tensors=inputs, output_tensors=outputs, tiling=self.tiling, plan=self
        )

    def plan_empty(self) -> TorchKernel:
        return TorchKernel(self.rmsnorm, name="rmsnorm", tiling=self.tiling, plan=self)
