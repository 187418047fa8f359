"""absorb_gemm v0 in torch: the oracle as a kernel version.

    out[n, h] = x[n, h] · W_UK (side "q")   or   x[n, h] · W_UVᵀ (side "out"), in float64 → round once

Written for being right, on any device and in any dtype: the yardstick of the other languages. Nothing to tune.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_var3.device import Requirement
from mla_var3.runtime import KernelPlan, Tiling, TorchKernel, Verdict
from mla_var3.workload import gemm

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.gemm import GemmProblem


@dataclass(frozen=True)
class AbsorbGemmTiling(Tiling):
    """No knobs."""

    def validate(self, pd: GemmProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes()


class AbsorbGemmPlan(KernelPlan):
    """Plan of the oracle: inputs (x, weight), output (out,)."""

    workload = gemm.WORKLOAD
    tiling_type = AbsorbGemmTiling
    requires = Requirement(archs=(), dtypes=("bf16", "fp16", "fp32"))

    def default_tiling(self) -> AbsorbGemmTiling:
        return AbsorbGemmTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [AbsorbGemmTiling()]

    def plan(self, *inputs: torch.Tensor) -> TorchKernel:
        return self._make(inputs, (gemm.new_output(self.problem, inputs[0]),))

    def plan_empty(self) -> TorchKernel:
        return self._make((), ())

    def _make(self, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> TorchKernel:
        def absorb_gemm(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
            """The output, with the columns behind those of the product as they were."""
            (out,) = outputs
            product = gemm.product(self.problem, x, weight).to(out.dtype)
            return (torch.cat([product, out[..., self.problem.columns :]], dim=-1),)

        return TorchKernel(
            absorb_gemm, name="absorb_gemm", input_tensors=inputs, output_tensors=outputs, tiling=self.tiling, plan=self
        )
