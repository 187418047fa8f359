"""indexed_append v0 in torch: the oracle as a kernel version.

    those of packed_append and of index_append, one behind the other

Written for being right, on any device. Which tokens are written is read on the host, so it cannot be captured in a
graph. Nothing to tune.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mla_var3.device import Requirement
from mla_var3.runtime import KernelPlan, Tiling, TorchKernel, Verdict
from mla_var3.workload import indexed_append

if TYPE_CHECKING:
    from mla_var3.device import Device
    from mla_var3.workload.indexed_append import IndexedAppendProblem


@dataclass(frozen=True)
class IndexedAppendTiling(Tiling):
    """No knobs."""

    def validate(self, pd: IndexedAppendProblem, device: Device | None = None) -> Verdict:
        return Verdict.yes()


class IndexedAppendPlan(KernelPlan):
    """Inputs and outputs of `workload.indexed_append`."""

    workload = indexed_append.WORKLOAD
    tiling_type = IndexedAppendTiling
    requires = Requirement(archs=(), dtypes=("bf16",))
    graph_capturable = False

    def default_tiling(self) -> IndexedAppendTiling:
        return IndexedAppendTiling()

    def autotune_configs(self) -> list[Tiling]:
        return [IndexedAppendTiling()]

    def plan(self, *inputs: torch.Tensor) -> TorchKernel:
        outputs = indexed_append.new_outputs(self.problem, inputs[0])

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            """What is to be written, where it belongs; the rest as it was."""
            after = indexed_append.appended(self.problem, *inputs, held=outputs)
            return tuple(x.to(held.dtype) for x, held in zip(after, outputs, strict=True))

        return TorchKernel(
            run, name="indexed_append", input_tensors=inputs, output_tensors=outputs, tiling=self.tiling, plan=self
        )

    def plan_empty(self) -> TorchKernel:
        return TorchKernel(
            lambda *inputs: indexed_append.reference(self.problem, *inputs),
            name="indexed_append",
            tiling=self.tiling,
            plan=self,
        )
