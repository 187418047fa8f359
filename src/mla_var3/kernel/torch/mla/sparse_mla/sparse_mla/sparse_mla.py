"""sparse_mla v0 in torch: the oracle as a kernel version.

    for each query token:  gather and dequantise its tokens → logits = scale · q Kᵀ (float64) → softmax → sink → P V
                           → round once

Sparse and dense decode over packed caches written for being right, on any device and in every layout. It reads indices,
pages and lengths on the host and cannot be captured in a graph. Nothing to tune.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_var3.device import Requirement
from mla_var3.runtime import KernelPlan, Tiling, TorchKernel, Verdict
from mla_var3.workload import sparse_decode

if TYPE_CHECKING:
    import torch

    from mla_var3.device import Device
    from mla_var3.workload.sparse_decode import SparseProblem


@dataclass(frozen=True)
class SparseMlaTiling(Tiling):
    """No knobs."""

    def validate(self, pd: SparseProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes()


class SparseMlaPlan(KernelPlan):
    """Plan of the oracle: inputs of `workload.sparse_decode`, outputs (out, lse)."""

    workload = sparse_decode.WORKLOAD
    tiling_type = SparseMlaTiling
    requires = Requirement(archs=(), dtypes=("bf16",), options=("no_rope", "paged", "strided", "strided_out", "v41"))
    graph_capturable = False

    def default_tiling(self) -> SparseMlaTiling:
        return SparseMlaTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [SparseMlaTiling()]

    def sparse_mla(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """out (b, s, h, 512) and lse (b, h, s), unrounded."""
        return sparse_decode.reference(self.problem, *inputs)

    def plan(self, *inputs: torch.Tensor) -> TorchKernel:
        return TorchKernel(
            self.sparse_mla,
            name="sparse_mla",
            input_tensors=inputs,
            output_tensors=sparse_decode.new_outputs(self.problem, inputs[0]),
            tiling=self.tiling,
            plan=self,
        )

    def plan_empty(self) -> TorchKernel:
        return TorchKernel(self.sparse_mla, name="sparse_mla", tiling=self.tiling, plan=self)
