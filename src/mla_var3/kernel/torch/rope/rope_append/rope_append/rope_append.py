"""rope_append v0 in torch: the oracle as a kernel version.

    gather cosines and sines → turn q's and k's rope columns (float64) → round once → scatter into the cache

Written for being right, on any device and in any dtype. Which tokens are written is read on the host, so it cannot be
captured in a graph. Nothing to tune.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_var3.device import Requirement
from mla_var3.runtime import KernelPlan, Tiling, TorchKernel, Verdict
from mla_var3.workload import rope

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.rope import RopeProblem


@dataclass(frozen=True)
class RopeAppendTiling(Tiling):
    """No knobs."""

    def validate(self, pd: RopeProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes()


class RopeAppendPlan(KernelPlan):
    """Plan of the oracle: inputs (q, latent, rope, positions, slots, table), outputs (out, cache)."""

    workload = rope.WORKLOAD
    tiling_type = RopeAppendTiling
    requires = Requirement(archs=(), dtypes=("bf16", "fp16", "fp32"))
    graph_capturable = False

    def default_tiling(self) -> RopeAppendTiling:
        return RopeAppendTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [RopeAppendTiling()]

    def plan(self, *inputs: torch.Tensor) -> TorchKernel:
        out, cache = rope.new_outputs(self.problem, inputs[0])

        def rope_append(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """What is to be written, where it belongs; the rest as it was."""
            turned, appended = rope.appended(self.problem, *inputs, held=(out, cache))
            return turned.to(out.dtype), appended.to(cache.dtype)

        return TorchKernel(
            rope_append,
            name="rope_append",
            input_tensors=inputs,
            output_tensors=(out, cache),
            tiling=self.tiling,
            plan=self,
        )

    def plan_empty(self) -> TorchKernel:
        return TorchKernel(
            lambda *inputs: rope.reference(self.problem, *inputs), name="rope_append", tiling=self.tiling, plan=self
        )
