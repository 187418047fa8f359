"""mqa_logits v0 in torch: the oracle of `indexer_logits` as a kernel version.

    q · keyᵀ per head, relu, weighted sum over heads, times the key's scale (float64)

Written for being right, on any device: the yardstick of the other languages. Nothing to tune. It reads lengths on the
host, so that it cannot be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mla_var3.device import Requirement
from mla_var3.runtime import KernelPlan, Tiling, TorchKernel, Verdict
from mla_var3.workload import indexer_logits

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.indexer_logits import IndexerLogitsProblem


@dataclass(frozen=True)
class MqaLogitsTiling(Tiling):
    """No knobs."""

    def validate(self, pd: IndexerLogitsProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes()


class MqaLogitsPlan(KernelPlan):
    """Plan of the oracle: inputs and output of `workload.indexer_logits`."""

    workload = indexer_logits.WORKLOAD
    tiling_type = MqaLogitsTiling
    requires = Requirement(archs=(), dtypes=("fp32", "bf16"))
    graph_capturable = False

    def default_tiling(self) -> MqaLogitsTiling:
        return MqaLogitsTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [MqaLogitsTiling()]

    def plan(self, *inputs: torch.Tensor) -> TorchKernel:
        problem = indexer_logits.rebound(self.problem, *inputs)
        logits = indexer_logits.new_logits(problem, inputs[0], problem.rows, problem.columns)

        def mqa_logits(*given: torch.Tensor) -> tuple[torch.Tensor]:
            """(logits,) of `workload.indexer_logits`; what is out of range stays as it is."""
            (found,) = indexer_logits.reference(problem, *given)
            return (torch.where(torch.isnan(found), logits, found.to(logits.dtype)),)

        return self._make(mqa_logits, inputs, (logits,))

    def plan_empty(self) -> TorchKernel:
        return self._make(indexer_logits.reference, (), ())

    def _make(self, fn: Any, inputs: Any, outputs: Any) -> TorchKernel:
        return TorchKernel(
            fn, name="mqa_logits", input_tensors=inputs, output_tensors=outputs, tiling=self.tiling, plan=self
        )
