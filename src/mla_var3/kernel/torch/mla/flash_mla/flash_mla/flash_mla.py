"""flash_mla v0 in torch: the oracle as a kernel version.

    for each request:  gather its pages → logits = scale · q Kᵀ (float64) → softmax → P V → round once

Absorbed MLA decode written for being right, on any device and in any dtype. It is the yardstick of the other languages
and the version to read first; it reads the lengths on the host and cannot be captured in a graph. Nothing to tune.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_var3.device import Requirement
from mla_var3.runtime import KernelPlan, Tiling, TorchKernel, Verdict
from mla_var3.workload import decode

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.decode import MlaProblem


@dataclass(frozen=True)
class FlashMlaTiling(Tiling):
    """No knobs."""

    def validate(self, pd: MlaProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes()


class FlashMlaPlan(KernelPlan):
    """Plan of the oracle: inputs (q, kv_cache, page_table, seq_lens), outputs (out, lse)."""

    workload = decode.WORKLOAD
    tiling_type = FlashMlaTiling
    requires = Requirement(
        archs=(), dtypes=("bf16", "fp16", "fp32"), options=("strided_pages", "packed", "tree", "strided", "strided_out")
    )
    graph_capturable = False

    def default_tiling(self) -> FlashMlaTiling:
        return FlashMlaTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [FlashMlaTiling()]

    def flash_mla(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """out (b, s, h, k) and lse (b, h, s), unrounded; of packed queries (tokens, h, k) and (tokens, h)."""
        return decode.reference(self.problem, *inputs)

    def plan(self, *inputs: torch.Tensor) -> TorchKernel:
        return TorchKernel(
            self.flash_mla,
            name="flash_mla",
            input_tensors=inputs,
            output_tensors=decode.new_outputs(self.problem, inputs[0]),
            tiling=self.tiling,
            plan=self,
        )

    def plan_empty(self) -> TorchKernel:
        return TorchKernel(self.flash_mla, name="flash_mla", tiling=self.tiling, plan=self)
