"""indexer_topk v0 in torch: the oracle of `indexer_topk` as a kernel version.

    the oracle's logits, then the oracle's top-k

Written for being right, on any device: the yardstick of the other languages. Nothing to tune. It reads lengths on the
host, so that it cannot be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_var3.device import Requirement
from mla_var3.runtime import KernelPlan, Tiling, TorchKernel, Verdict
from mla_var3.workload import indexer_topk

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.indexer_topk import IndexerTopkProblem


@dataclass(frozen=True)
class IndexerTopkTiling(Tiling):
    """No knobs."""

    def validate(self, pd: IndexerTopkProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes()


class IndexerTopkPlan(KernelPlan):
    """Plan of the oracle: inputs and output of `workload.indexer_topk`."""

    workload = indexer_topk.WORKLOAD
    tiling_type = IndexerTopkTiling
    requires = Requirement(archs=(), dtypes=("fp32",))
    graph_capturable = False

    def default_tiling(self) -> IndexerTopkTiling:
        return IndexerTopkTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [IndexerTopkTiling()]

    def indexer_topk(self, *inputs: torch.Tensor) -> tuple[torch.Tensor]:
        """(indices,) of `workload.indexer_topk`."""
        return indexer_topk.reference(self.problem, *inputs)

    def plan(self, *inputs: torch.Tensor) -> TorchKernel:
        rows = inputs[0].shape[:-2].numel()
        outputs = (torch.empty((rows, self.problem.topk), dtype=torch.int32, device=inputs[0].device),)
        return TorchKernel(
            self.indexer_topk,
            name="indexer_topk",
            input_tensors=inputs,
            output_tensors=outputs,
            tiling=self.tiling,
            plan=self,
        )

    def plan_empty(self) -> TorchKernel:
        return TorchKernel(self.indexer_topk, name="indexer_topk", tiling=self.tiling, plan=self)
