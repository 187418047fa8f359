"""flash_attention v0 in torch: the oracle as a kernel version.

    for each request and head of keys:  logits = scale · q Kᵀ (float64) → softmax → P V → round once

Attention of prompts over decompressed heads, written for being right, on any device and in any dtype. It is the
yardstick of the other languages, and what `mla_var3.ops.mla_prefill` runs where no other version takes a problem. It
reads the lengths on the host and cannot be captured in a graph. Nothing to tune.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mla_var3.device import Requirement
from mla_var3.runtime import KernelPlan, LibraryCall, Tiling, Verdict
from mla_var3.workload import prefill

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.prefill import PrefillProblem


@dataclass(frozen=True)
class FlashAttentionTiling(Tiling):
    """No knobs."""

    def validate(self, pd: PrefillProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes()


class Oracle(LibraryCall):
    """The oracle of a problem, into (out, lse); rows behind the last request stay as they are. Reads addresses and
    shapes of its tensors when it launches."""

    follows_tensors = True

    def __init__(self, problem: PrefillProblem, **options: Any) -> None:
        super().__init__(self._attend, name="flash_attention", **options)
        self.problem = problem

    def _attend(self) -> None:
        prefill.write(self.problem, self.input_tensors, self.output_tensors)


class FlashAttentionPlan(KernelPlan):
    """Plan of the oracle: inputs (q, k, v, cu_seqlens_q, cu_seqlens_k), outputs (out, lse)."""

    workload = prefill.WORKLOAD
    tiling_type = FlashAttentionTiling
    requires = Requirement(archs=(), dtypes=("bf16", "fp16", "fp32"), options=("strided_kv", "grouped"))
    graph_capturable = False
    any_size = True

    def default_tiling(self) -> FlashAttentionTiling:
        return FlashAttentionTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [FlashAttentionTiling()]

    def plan(self, *inputs: torch.Tensor) -> Oracle:
        self.require()
        q, _, v, *_ = inputs
        outputs = q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty((q.shape[1], len(q)), dtype=torch.float32)
        return Oracle(self.problem, input_tensors=inputs, output_tensors=outputs, tiling=self.tiling, plan=self)

    def plan_empty(self) -> Oracle:
        return Oracle(self.problem, tiling=self.tiling, plan=self)
